"""`drivetrain recipe from timm`: what timm's train.py leaves becomes a recipe that trains, and what has no word here is told."""

import contextlib
import math

import pytest
import yaml

import drivetrain
from drivetrain.cli.from_timm import SILENT, translate
from drivetrain.core.errors import UserError
from drivetrain.launch.job import prepare
from drivetrain.recipe.places import read

# What train.py writes where nothing is given: its parser's defaults, sorted.
ARGS = {
    "aa": None, "amp": False, "amp_dtype": "float16", "amp_impl": "native", "aug_repeats": 0, "aug_splits": 0, "batch_size": 128,
    "bce_loss": False, "bce_pos_weight": None, "bce_sum": False, "bce_target_thresh": None, "bn_eps": None, "bn_momentum": None,
    "channels_last": False, "checkpoint_hist": 10, "class_map": "", "clip_grad": None, "clip_mode": "norm", "color_jitter": 0.4,
    "color_jitter_prob": None, "cooldown_epochs": 0, "crop_pct": None, "cutmix": 0.0, "cutmix_minmax": None, "data": None,
    "data_dir": "/data/photos", "dataset": "", "dataset_download": False, "decay_epochs": 90, "decay_milestones": [90, 180, 270],
    "decay_rate": 0.1, "device": "cuda", "dist_bn": "reduce", "drop": 0.0, "drop_block": None, "drop_connect": None,
    "drop_path": None, "epoch_repeats": 0.0, "epochs": 300, "eval_metric": "top1", "experiment": "", "fast_norm": False,
    "fuser": "", "gaussian_blur_prob": None, "gp": None, "grad_accum_steps": 1, "grad_checkpointing": False,
    "grayscale_prob": None, "head_init_bias": None, "head_init_scale": None, "hflip": 0.5, "img_size": None, "in_chans": None,
    "initial_checkpoint": "", "input_size": None, "interpolation": "", "jsd_loss": False, "layer_decay": None, "local_rank": 0,
    "log_interval": 50, "log_wandb": False, "lr": None, "lr_base": 0.1, "lr_base_scale": "", "lr_base_size": 256,
    "lr_cycle_decay": 0.5, "lr_cycle_limit": 1, "lr_cycle_mul": 1.0, "lr_k_decay": 1.0, "lr_noise": None, "lr_noise_pct": 0.67,
    "lr_noise_std": 1.0, "mean": None, "min_lr": 0, "mixup": 0.0, "mixup_mode": "batch", "mixup_off_epoch": 0, "mixup_prob": 1.0,
    "mixup_switch_prob": 0.5, "model": "test_resnet", "model_dtype": None, "model_ema": False, "model_ema_decay": 0.9998,
    "model_ema_force_cpu": False, "model_ema_warmup": False, "model_kwargs": {}, "momentum": 0.9, "no_aug": False,
    "no_ddp_bb": False, "no_prefetcher": False, "no_resume_opt": False, "num_classes": None, "opt": "sgd", "opt_betas": None,
    "opt_eps": None, "opt_foreach": None, "opt_kwargs": {}, "output": "", "patience_epochs": 10, "pin_mem": False,
    "pretrained": False, "pretrained_path": None, "ratio": [0.75, 1.3333333333333333], "recount": 1, "recovery_interval": 0,
    "remode": "pixel", "reprob": 0.0, "resplit": False, "resume": "", "save_images": False, "scale": [0.08, 1.0],
    "sched": "cosine", "sched_on_updates": False, "seed": 42, "smoothing": 0.1, "split_bn": False, "start_epoch": None,
    "std": None, "sync_bn": False, "synchronize_step": False, "torchcompile": None, "torchcompile_mode": None,
    "torchscript": False, "train_crop_mode": None, "train_interpolation": "random", "train_split": "train", "tta": 0,
    "use_multi_epochs_loader": False, "val_split": "validation", "validation_batch_size": None, "vflip": 0.0,
    "wandb_project": None, "wandb_resume_id": "", "wandb_tags": [], "warmup_epochs": 5, "warmup_lr": 1e-5, "warmup_prefix": False,
    "weight_decay": 2e-5, "worker_seeding": "all", "workers": 4,
}  # fmt: skip
OF_SCHEDULES = (  # read where their schedule is chosen
    "cooldown_epochs", "decay_epochs", "decay_milestones", "decay_rate", "lr_cycle_decay", "lr_cycle_limit", "lr_cycle_mul",
    "min_lr", "patience_epochs", "warmup_epochs", "warmup_lr", "warmup_prefix",
)  # fmt: skip
TOY = ["data=synthetic", "data.shape=[3,32,32]", "data.classes=4", "data.samples=64", "data.test_samples=16", "loader=sync"]


def said(**given):
    """The lines that are said of a run with these arguments, beside what is said of every run."""
    found = translate(ARGS | given)
    return found.options | found.values, found.left


@pytest.mark.parametrize(
    ("given", "sets"),
    [
        ({}, {"data": "imagefolder", "model.name": "test_resnet", "batch.global_batch": 128, "optimizer": "sgd", "epochs": 300}),
        ({}, {"optimizer.lr": 0.1, "batch.lr_scaling": "linear", "batch.base_batch": 256, "optimizer.nesterov": True}),
        ({"opt": "lamb"}, {"optimizer": "timm", "optimizer.name": "lamb", "batch.lr_scaling": "sqrt"}),
        ({"opt": "adamw", "lr": 1e-3, "opt_betas": [0.9, 0.95]}, {"optimizer": "adamw", "optimizer.beta2": 0.95}),
        ({"opt": "nadamw", "opt_eps": 1e-6}, {"optimizer": "timm", "optimizer.kwargs": {"eps": 1e-6}}),
        ({"lr": 0.5, "warmup_lr": 0.05}, {"optimizer.lr": 0.5, "scheduler.warmup": "5ep", "scheduler.warmup_start": 0.1}),
        ({"lr": 1.0, "min_lr": 0.01}, {"scheduler": "cosine", "scheduler.final": 0.01}),
        ({"cooldown_epochs": 10}, {"epochs": 310, "scheduler.length": "300ep"}),
        ({"warmup_prefix": True}, {"epochs": 305}),
        ({"lr_cycle_limit": 2, "lr_cycle_mul": 2.0, "epochs": 10}, {"epochs": 30, "scheduler.cycles": 2}),
        ({"sched": "step", "decay_epochs": 2.4, "decay_rate": 0.97}, {"scheduler.every": "2.4ep", "scheduler.gamma": 0.97}),
        ({"sched": "multistep"}, {"scheduler.milestones": ["90ep", "180ep", "270ep"], "scheduler.gamma": 0.1}),
        ({"sched": "plateau"}, {"scheduler.metric": "accuracy", "scheduler.mode": "max", "scheduler.patience": 10}),
        ({"sched": "poly", "decay_rate": 2.0}, {"scheduler": "poly", "scheduler.power": 2.0}),
        ({"sched": "wsd", "decay_epochs": 0.2, "epochs": 105}, {"scheduler.decay": "20ep", "scheduler.shape": "sqrt"}),
        ({"grad_accum_steps": 4}, {"batch": "accumulate", "batch.accumulation_steps": 4, "batch.global_batch": 512}),
        ({"amp": True}, {"precision": "amp"}),
        ({"native_amp": True}, {"precision": "amp"}),
        ({"amp": True, "amp_dtype": "bfloat16"}, {"precision": "bf16"}),
        ({"channels_last": True, "sync_bn": True}, {"surgery": ["channels_last", "sync_bn"]}),
        ({"model_ema": True}, {"ema": "ema", "ema.decay": 0.9998, "ema.warmup": False}),
        ({"mixup": 0.2}, {"augment.mixup.alpha": 0.2, "augment.mixup.prob": 1, "augment.mixup.per": "update"}),
        ({"mixup": 0.2, "cutmix": 1.0, "mixup_prob": 0.8, "mixup_switch_prob": 0.25},
         {"augment.mixup.prob": 0.6, "augment.cutmix.prob": 0.2}),
        ({"cutmix": 1.0, "mixup_off_epoch": 9, "hflip": 0.0, "color_jitter": 0.0},
         {"augment": ["random_resized_crop", "cutmix"], "stages": [{"until": "9ep"}, {"augment": ["random_resized_crop"]}]}),
        ({"aa": "rand-m9-n3"}, {"augment": ["random_resized_crop", "flip_crop", "randaugment"], "augment.randaugment.n": 3}),
        ({"no_aug": True}, {"augment": []}),
        ({"reprob": 0.25}, {"augment.random_erasing.prob": 0.25, "augment.random_erasing.fill": "noise"}),
        ({"smoothing": 0.0}, {"loss": "cross_entropy", "loss.label_smoothing": 0.0}),
        ({"bce_loss": True, "bce_target_thresh": 0.2}, {"loss": "bce", "loss.target_threshold": 0.2}),
        ({"clip_grad": 2.0}, {"clip": "norm", "clip.max_norm": 2.0}),
        ({"clip_grad": 0.02, "clip_mode": "agc"}, {"clip": "agc", "clip.clip_factor": 0.02}),
        ({"drop": 0.1, "drop_path": 0.05}, {"model.kwargs": {"drop_rate": 0.1}, "model.drop_path": 0.05}),
        ({"img_size": 160, "crop_pct": 0.95}, {"data.size": 160, "data.crop_pct": 0.95}),
        ({"model": "resnet50"}, {"data.size": 224, "data.crop_pct": 0.95}),  # as timm's own weights were tested
        ({"mean": [0.5] * 3, "std": [0.5] * 3}, {"data.normalize": "measured"}),
        ({"aug_repeats": 3}, {"data.order": 3}),
        ({"workers": 8, "seed": 7}, {"loader.num_workers": 8, "runtime.seed": 7}),
        ({"layer_decay": 0.75}, {"optimizer.layer_decay": 0.75}),
        ({"torchcompile": "inductor", "grad_checkpointing": True}, {"compile": "inductor", "checkpointing": "blocks"}),
        ({"eval_metric": "top5"}, {"metrics": ["top5"], "select": "top5"}),
        ({"dataset": "torch/cifar10"}, {"data": "cifar10"}),
    ],
)  # fmt: skip
def test_values(given, sets):
    found, _ = said(**given)
    assert {key: found.get(key) for key in sets} == sets


def test_what_is_of_the_machine_is_said_beside_the_recipe():
    found = translate(ARGS | {"pretrained": True, "log_wandb": True, "data_dir": "my photos"}, devices=8)
    assert found.values["batch.global_batch"] == 1024
    words = ["data.root='my photos'", "model.pretrained=true", "parallel=ddp", "parallel.nproc=8", "logger=[files,wandb]"]
    assert found.words == words


def test_every_argument_is_translated_or_told():
    """Whatever differs from what train.py writes by itself changes the recipe, its command, or what is said of it."""
    other = {
        "model": "resnet18", "opt": "lion", "sched": "tanh", "clip_mode": "agc", "amp_dtype": "bfloat16",
        "dataset": "tfds/food101", "data_dir": "b", "eval_metric": "loss", "mixup_mode": "pair", "train_crop_mode": "rkrc",
        "train_interpolation": "bilinear", "remode": "const", "lr_base_scale": "sqrt", "aa": "v0", "model_kwargs": {"a": 1},
        "opt_kwargs": {"a": 1},
        "data": "b",
        "mean": [0.1] * 3, "std": [0.1] * 3, "ratio": [0.5, 2], "scale": [0.5, 1], "input_size": [3, 64, 32],
        "opt_betas": [0.1, 0.2],
        "model_dtype": "float16", "hflip": 0.1, "wandb_tags": ["a"], "cutmix_minmax": [0.2, 0.8], "lr_noise": [0.4],
    }  # fmt: skip
    needs = {
        "clip_mode": {"clip_grad": 1.0}, "amp_dtype": {"amp": True}, "lr_base": {}, "mixup_mode": {"mixup": 0.1},
        "mixup_prob": {"mixup": 0.1}, "mixup_switch_prob": {"mixup": 0.1, "cutmix": 0.1}, "mixup_off_epoch": {"mixup": 0.1},
        "remode": {"reprob": 0.1}, "recount": {"reprob": 0.1}, "model_ema_decay": {"model_ema": True},
        "model_ema_warmup": {"model_ema": True}, "bce_target_thresh": {"bce_loss": True}, "opt_betas": {"opt": "adamw"},
        "data": {"data_dir": None},
    }  # fmt: skip
    for name, value in ARGS.items():
        if name not in (*SILENT, *OF_SCHEDULES):
            given = ARGS | needs.get(name, {})
            changed = other.get(name, not value if isinstance(value, bool) else 0.7 if isinstance(value, float) else 2)
            assert translate(given) != translate(given | {name: changed}), name


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"vflip": 0.5}, "vflip=0.5: no augmentation turns images upside down"),
        ({"aa": "rand-m9-mstd0.5"}, "aa=rand-m9-mstd0.5: augment.randaugment has no mstd0.5"),
        ({"aa": "v0"}, "aa=v0: "),
        ({"sched": "tanh"}, "sched=tanh: scheduler=cosine takes its place"),
        ({"jsd_loss": True}, "jsd_loss=true: write it as loss=own"),
        ({"resume": "last.pth.tar"}, "resume='last.pth.tar': "),
        ({"a_new_one": 3}, "a_new_one=3: it has no counterpart"),
        ({"dataset": "tfds/food101"}, "dataset=tfds/food101: "),
    ],
)
def test_what_has_no_word_here_is_told_once(given, told):
    usual, (_, left) = said()[1], said(**given)
    (line,) = (line for line in left if line not in usual)
    assert line.startswith(told)


def test_what_belongs_to_something_that_is_off_is_not_told():
    assert said(naflex_loader=False, naflex_max_seq_len=576, kd_model_name=None, kd_temperature=4.0) == said()
    assert any(line.startswith("naflex_max_seq_len=576: ") for line in said(naflex_loader=True, naflex_max_seq_len=576)[1])


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("model: resnet50", "no arguments of timm's"),
        ("- 1", "no arguments of timm's"),
        (yaml.safe_dump(ARGS | {"epochs": "many"}), "epochs: many is no number"),
        (
            yaml.safe_dump(ARGS | {"sched": "multistep", "decay_milestones": 3}),
            "decay_milestones: 3 is no list of 1 numbers or more",
        ),
        ("{", "args.yaml cannot be read: "),
    ],
)
def test_another_file_is_refused(content, told, tmp_path, refused):
    (tmp_path / "args.yaml").write_text(content)
    assert told in refused("recipe", "from", "timm", tmp_path / "args.yaml")


@pytest.mark.parametrize("odd", ["x", -1, 0, 1e308, True, [], [1], ["a"], {}, {"a": 1}, [[1]]])
def test_whatever_stands_there_is_translated_or_refused(odd):
    for name in ARGS:
        with contextlib.suppress(UserError):
            assert translate(ARGS | {name: odd}).values, name


@pytest.mark.parametrize(
    "words", [[], ["lightning", "a.yaml"], ["timm"], ["timm", "a.yaml", "devices=0"], ["timm", "nowhere.yaml"]]
)
def test_wrong_words_are_refused(words, refused):
    assert refused("recipe", "from", *words).count("\n") == 1


def test_the_recipe_trains(tmp_path, says, refused):
    """It is written with what is left out, composes as it is, and trains on data that is here."""
    given = {
        "opt": "lamb", "lr": 0.005, "batch_size": 8, "grad_accum_steps": 2, "mixup": 0.1, "cutmix": 1.0, "smoothing": 0.1,
        "model_ema": True, "channels_last": True, "amp": True, "amp_dtype": "bfloat16", "epochs": 2, "warmup_epochs": 1,
        "reprob": 0.25, "clip_grad": 1.0, "img_size": 32, "color_jitter": 0.0,
    }  # fmt: skip
    (tmp_path / "args.yaml").write_text(yaml.safe_dump(ARGS | given, default_flow_style=False))
    file = tmp_path / "mine.yaml"
    out = says("recipe", "from", "timm", tmp_path / "args.yaml", file)
    assert "not translated: sched_on_updates=false" in out
    assert "# not translated: sched_on_updates=false" in file.read_text()
    assert f"drivetrain train recipe={file} data.root=/data/photos" in out
    assert read(str(file)).description == "test_resnet, as timm's train.py trained it"
    result = drivetrain.train(
        [f"recipe={file}", *TOY, "data.drop_last=true", "epochs=1", "scheduler.warmup=1", "runtime.threads=1"]
    )
    assert result.status == "completed"
    assert "is there already" in refused("recipe", "from", "timm", tmp_path / "args.yaml", file)


def test_the_schedule_is_timms():
    """After a warm-up that stands before it, a cosine gives timm's learning rate at the beginning of each epoch."""
    torch, timm = pytest.importorskip("torch"), pytest.importorskip("timm.scheduler")
    args = ARGS | {"lr": 0.5, "epochs": 8, "warmup_epochs": 2, "warmup_prefix": True, "min_lr": 0.005, "cooldown_epochs": 2}
    found = translate(args)
    values = [f"{key}={value}" for key, value in found.values.items() if key.startswith(("scheduler.", "optimizer.lr"))]
    run = prepare([*TOY, "scheduler=cosine", *values, f"epochs={found.values['epochs']}"]).run
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.5)
    theirs, epochs = timm.create_scheduler_v2(
        torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.5), num_epochs=8, warmup_epochs=2, warmup_prefix=True,
        warmup_lr=1e-5, min_lr=0.005, cooldown_epochs=2,
    )  # fmt: skip
    assert epochs == found.values["epochs"] == 12
    run.scheduler.bind(optimizer, 120, [10 * (epoch + 1) for epoch in range(12)])
    for epoch in range(2, 12):
        assert math.isclose(run.scheduler.lr_factor(10 * epoch) * 0.5, theirs._get_lr(epoch)[0], rel_tol=1e-6)
