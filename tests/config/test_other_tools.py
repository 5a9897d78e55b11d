"""Words of other tools, and misspelt ones, are answered with drivetrain's."""

import ast
import importlib.util
import re
from pathlib import Path

import pytest

from drivetrain.cli import train, verbs
from drivetrain.config import catalog
from drivetrain.config.hydra_words import HONOURED
from drivetrain.config.other_tools import ELSEWHERE, NOT_HERE, NOTES, USUAL
from drivetrain.core.errors import UserError
from drivetrain.core.options.allowed import check_patterns
from drivetrain.launch.job import prepare
from tests.support.command import ROOT
from tests.support.refusals import problems_of


def exists(setting: str) -> bool:
    """True if drivetrain has this key, group or option."""
    key, _, option = setting.partition("=")
    group, _, name = key.partition(".")
    options = catalog.options().get(group, [])
    if group == "hydra":
        return name in HONOURED
    if option and not name:
        return set(option.strip("[]").split(",")) <= set(options)
    if group in catalog.LISTS and "." in name:  # a setting of one of several options
        return name.partition(".")[2] in catalog.option_keys(group, name.partition(".")[0])
    if not options or not name:
        return key in (catalog.options() if options else catalog.root_config())
    return any(name in catalog.option_keys(group, option) for option in options)


def test_words_of_other_frameworks_lead_to_settings_that_exist():
    assert [word for word, present in ELSEWHERE.items() if not exists(present)] == []
    own = ("data.", "model.", "optimizer.", "logger.")  # another option of the group may have it
    assert [word for word in ELSEWHERE if exists(word) and not word.startswith(own)] == []
    assert set(NOTES) <= set(ELSEWHERE)
    assert [word for word in NOT_HERE if exists(word) or word in ELSEWHERE] == []
    assert all(option in catalog.options()[group] for group, option in USUAL.items())


def rows_of_settings():
    """(words of other tools, what docs/words.md says of them) for each row of its table of settings."""
    for line in (ROOT / "docs/words.md").read_text().partition("## Settings")[2].splitlines():
        *elsewhere, here = (cell.strip() for cell in line.strip("|").split("|"))
        if len(elsewhere) == 3 and here.startswith("`"):
            words = [word.lstrip("-").replace("-", "_") for cell in elsewhere for word in re.findall(r"`([^`]*)`", cell)]
            # What is a key of that tool, with a value or without; the rest is code to be written.
            keys = [re.match(r"([a-z_]+)(=[^[(]*)?$", word) for word in words]
            yield [key[1] for key in keys if key is not None and key[1] not in ("torchrun", "amp_dtype")], here


def test_the_page_of_words_says_what_the_command_answers():
    """A word's answer names a setting that its row names: by the table, or because a setting of drivetrain has the same name."""
    rows = list(rows_of_settings())
    assert sum(len(words) for words, _ in rows) > 30
    for words, here in rows:
        for word in words:
            answer = ELSEWHERE.get(word, word)
            assert re.search(rf"(?<!\w){re.escape(answer)}", here) or word in catalog.root_config(), (word, answer, here)


def rows_of_two(page, begin):
    """(words of other tools, what is said of them) for each row of a table of two columns after a heading."""
    for line in page.partition(begin)[2].partition("\n## ")[0].splitlines():
        if len(cells := line.strip("|").split("|")) == 2:
            yield re.findall(r"`([a-z_0-9]+)`", cells[0]), cells[1]


def test_every_field_of_training_arguments_has_its_row():
    spec = importlib.util.find_spec("transformers")
    if spec is None or spec.origin is None:
        pytest.skip("transformers is not installed")
    tree = ast.parse(Path(spec.origin).with_name("training_args.py").read_text())
    (cls,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "TrainingArguments")
    fields = {node.target.id for node in cls.body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)}
    page = (ROOT / "docs/words.md").read_text()
    told = {word for words, _ in rows_of_two(page, "## TrainingArguments") for word in words}
    public = {name for name in fields if not name.startswith("_")}
    assert len(public) > 100
    assert public - told == set()
    for begin in ("## TrainingArguments", "## TRL's SFTConfig"):
        for words, here in rows_of_two(page, begin):
            assert all(ELSEWHERE[word] in here for word in words if word in ELSEWHERE), words
            settings = re.findall(r"`([a-z_]+(?:\.[a-z_]+|=[a-z0-9_\[\],]+))[`=]", here)
            assert [each for each in settings if not exists(each)] == [], here


@pytest.mark.parametrize(
    ("word", "answer"),
    [
        ("batch_size=32", "use batch.global_batch"),
        ("per_device_train_batch_size=8", "use batch.global_batch (of all devices together)"),
        ("gradient_accumulation_steps=2", "use batch.accumulation_steps (with batch=accumulate"),
        ("learning_rate=0.1", "use optimizer.lr"),
        ("lr=0.1", "did you mean 'optimizer.lr'?"),
        ("weight_decay=0.1", "did you mean 'optimizer.weight_decay'?"),
        ("max_epochs=3", "use epochs"),
        ("epochs_num=3", "use epochs"),
        ("gpus=2", "use parallel.nproc"),
        ("devices=2", "use parallel.nproc"),
        ("accelerator=gpu", "use runtime.device"),
        ("num_workers=4", "use loader.num_workers"),
        ("fp16=true", "use precision=amp"),
        ("bf16=true", "use precision=bf16"),
        ("precision=fp16", "use precision=amp"),
        ("model=resnet50", "for a timm model: model=timm model.name=resnet50"),
        ("model=net.Net", "a class of your own is model=own model.target=net.Net 'trust=[net]'"),
        ("loss=net.my_loss", "a class of your own is loss=own loss.target=net.my_loss 'trust=[net]'"),
        ("optimizer=torch.optim.SGD", "did you mean 'sgd'"),
        ("data=/", "use data=imagefolder data.root=/ (a folder of images"),
        ("data=txt", "use data=text"),
        ("trainer.max_epochs=3", "use epochs"),
        ("train.epochs=3", "did you mean 'epochs'?"),
        ("training.lr=1", "did you mean 'optimizer.lr'?"),
        ("resume=last", "last is the newest run below outputs/, and there is none"),
        ("gpus=2", "use parallel.nproc (with parallel=ddp, fsdp"),
        ("warmup_epochs=5", "use scheduler.warmup (5 is five updates there, five epochs are 5ep)"),
        ("optimizer=SGD", "is no option of optimizer: did you mean 'sgd'?"),
        ("model=ResNet9", "is no option of model: did you mean 'resnet9'?"),
        ("compile=true", "is no option of compile: say compile=inductor"),
        ("ema=false", "is no option of ema: say ema=none"),
        ("~clip.norm", "to switch the group off, say clip=none"),
        ("model=gpt", "set task=language_modelling"),
        ("hflip=0.5", "use augment=[flip_crop]"),
        ("aa=rand-m9", "use augment=[randaugment]"),
        ("bce_loss=true", "use loss=bce"),
        ("worker_seeding=all", "depend only on the seed, the epoch and the sample"),
        ("seed_everything=7", "use runtime.seed"),
        ("optimizer=adamww", "is no option of optimizer: did you mean 'adamw'"),
    ],
)
def test_words_of_other_frameworks_are_answered(word, answer):
    assert answer in " ".join(problems_of(prepare, word.split()))


@pytest.mark.parametrize("name", verbs.ELSEWHERE)
def test_commands_of_other_tools_are_answered(name):
    assert verbs.ELSEWHERE[name].split()[0] in verbs.VERBS
    with pytest.raises(UserError, match=re.escape(f"it is drivetrain {verbs.ELSEWHERE[name]} here")):
        verbs.find(name)


@pytest.mark.parametrize(
    ("flag", "answer"),
    [
        ("--batch-size", "write settings as key=value: --batch-size is batch.global_batch=…"),
        ("--lr=0.1", "--lr=0.1 is optimizer.lr=0.1"),
        ("--fp16", "--fp16 is precision=amp"),
        ("--model", "--model is model=…"),
        ("--gpus 2", "--gpus 2 is parallel=ddp parallel.nproc=2"),
        ("--data-root x", "--data-root x is data.root=x"),
        ("--optimizer.lr=0.1", "--optimizer.lr=0.1 is optimizer.lr=0.1"),
        ("--quit", "did you mean '--quiet'"),
    ],
)
def test_flags_of_other_frameworks_are_answered(flag, answer):
    with pytest.raises(UserError, match=re.escape(answer)):
        train.command(flag.split())


def test_the_words_among_the_ideas_are_answered():
    """The command says of a tool's argument what the page says."""
    ideas = (ROOT / "docs/words.md").read_text().partition("## Settings")[0].splitlines()
    rows = [line.strip("|").split("|") for line in ideas if line.startswith("| ")]
    found = [(re.findall(r"`([a-z_]+)(?:=[\w\"]*)?`", row[0]), row[1]) for row in rows if len(row) == 2]
    words = {
        word: here for elsewhere, here in found for word in elsewhere if word in ELSEWHERE or "_" in word or word == "profiler"
    }
    assert {"fast_dev_run", "overfit_batches", "detect_anomaly", "profiler", "use_dora"} <= set(words)
    by_other_means = {  # a verb, code, or nothing to set
        "swa_utils", "find_lr", "training_step", "compute_loss", "save_pretrained", "num_labels", "ignore_mismatched_sizes",
    }  # fmt: skip
    for word in words.keys() - by_other_means:
        assert f"`{ELSEWHERE[word]}" in words[word], word


def test_one_text_is_a_list_of_texts():
    assert prepare(["model.freeze=stem"]).composed.plain["model"]["freeze"] == ["stem"]
    with pytest.raises(UserError, match=r"model.hidden=wide: must be a list"):
        prepare(["model=mlp", "model.hidden=wide"])


def test_a_pattern_that_matches_nothing_names_little():
    names = [f"features.{n}.weight" for n in range(70)] + ["head.weight", "head.bias"]
    with pytest.raises(
        UserError, match=r"matches no parameter of the model: there is: features, head, and their parts"
    ) as refused:
        check_patterns(names, {"key": ["foo"]}, "parameter")
    assert len(str(refused.value)) < 150
    with pytest.raises(UserError, match=r"did you mean 'head\.bias' or"):
        check_patterns(names, {"key": ["head.bais"]}, "parameter")


MISTYPED = {  # as new users typed them → the mend
    "metrics=f1,auroc": "metrics=[f1,auroc]",
    "augment=mixup,cutmix": "augment=[mixup,cutmix]",
    "data=churn.csv": "data=tabular data.path=churn.csv",
    "data=chats.jsonl": "data=jsonl data.path=chats.jsonl",
    "data=book.txt": "data=text data.path=book.txt",
    "data=imdb": "data=huggingface data.root=FOLDER",
    "logger.project=a": "logger.wandb.project",
    "save=best": "saving=best",
    "class_weight=balanced": "loss.class_weights",
    "verbose=0": "-q",
    "data.split=0.2": "data.holdout",
    "metrics=[roc_auc]": "auroc",
    "scheduler=ReduceLROnPlateau": "plateau",
    "metrics=[balanced_accuracy]": "recall",
    "model=xgboost": "set model=mlp",
    "ema_decay=0.9": "ema.decay",
    "mixup_alpha=0.2": "augment=[mixup] augment.mixup.alpha",
    "clip=1.0": "clip=norm clip.max_norm=1.0",
    "batch=32": "batch.global_batch=32",
    "clip.norm=1": "max_norm",
    "learningRate=0.1": "optimizer.lr",
    "optimizer=AdamW8": "'adamw",
    "loss=CrossEntropyLoss": "'cross_entropy'",
    "model=bert-base-uncased": "model=transformers model.name=bert-base-uncased",
    "callbacks=EarlyStopping": "stop=early",
    "augment.mixup_alpha=0.2": "augment.mixup.alpha=0.2",
    "logger.name=a": "logger.wandb.name",
    "saving.every=5": "saving.every_updates",
    "model.hidden=64,64": "model.hidden=[64,64]",
    "swa_start=10": "ema=swa ema.start",
    "ema.beta=0.9": "ema.decay",
    "random_state=1": "runtime.seed",
    "precision=float16": "precision=amp",
    # By their words, which no table has as they are.
    "num_train_epoch=3": "epochs",
    "train_batch_size_per_gpu=8": "batch.global_batch",
    "max_train_steps=100": "updates",
    "val_freq=2": "evaluate_every",
    "validate_every_n_epochs=2": "evaluate_every",
    "freeze_encoder=true": "model.freeze",
    "lora_target_module=[q]": "adapter.targets",
    "gradient_clipping=1": "clip",
    "TrainingArguments.learning_rate=0.1": "optimizer.lr",
    "datamodule.batch_size=8": "batch.global_batch",
    "data.val_fraction=0.1": "validation",
    "loss=SigmoidFocalLoss": "focal",
    "metrics=[MultilabelAUROC]": "auroc",
    "augment=RandomHorizontalFlip": "flip_crop",
    "scheduler=get_cosine_schedule": "cosine",
    "n_splits=5": "data.folds",
    # Sections of other tools, by what stands last in them.
    "SOLVER.MAX_ITER=3000": "use updates",
    "MODEL.WEIGHTS=a.pth": "'model.weights'",
    "DATALOADER.NUM_WORKERS=4": "loader.num_workers",
    "callbacks.early_stopping.patience=3": "use stop.patience",
    "randomness.deterministic=true": "runtime.deterministic",
    "model.backbone.frozen_stages=2": "model.freeze",
    "default_hooks.checkpoint.save_best=auto": "saving=best",
    # The option that the value is of, and the setting that a description is of.
    "strategy=ddp_find_unused_parameters_true": "use parallel=ddp",
    "criterion=BCEWithLogitsLoss": "use loss=bce",
    "evaluations_in_row=3": "stop.patience",
    "hybrid=1": "parallel.replicate",
    "data.path=chats.jsonl": "data=jsonl",
    "data=s3://bucket/train": "mounted",
    "model=my_models.py:Net": "model.target=my_models.Net",
    "wandb_run_naem=a": "logger=[wandb]",
}


@pytest.mark.parametrize("given", MISTYPED)
def test_a_mistyping_is_answered_with_its_mend(given):
    with pytest.raises(UserError) as caught:
        prepare([given])
    assert MISTYPED[given] in str(caught.value)
