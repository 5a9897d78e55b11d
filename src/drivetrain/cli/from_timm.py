"""The args.yaml of timm's train.py in drivetrain's words. Its arguments with no word here are told, a line each."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from drivetrain.config.elsewhere import ELSEWHERE, NOT_HERE
from drivetrain.core.errors import UserError
from drivetrain.core.overrides import format_value
from drivetrain.core.typed import fits

IMAGENET = ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])  # what data.normalize=imagenet means
FOLDERS = {"hfds": "huggingface", "hfids": "huggingface", "wds": "webdataset"}  # what stands before the / of `dataset`
ELSEWHERE_DATA = {"torch/cifar10": "cifar10"}
# The same updates as timm's own of that name; any other one is optimizer=timm.
OPTIMIZERS = {
    "sgd": {"nesterov": True}, "nesterov": {"nesterov": True}, "momentum": {"nesterov": False}, "adam": {}, "adamw": {},
}  # fmt: skip
DTYPES = {"bfloat16": "bf16_pure"}  # of `model_dtype`
SCHEDULES = {
    "cosine": "cosine", "step": "step", "multistep": "multistep", "poly": "poly", "plateau": "plateau", "wsd": "wsd",
    "constant": "constant", "none": "constant",
}  # fmt: skip
MODEL = {  # argument → of timm.create_model
    "drop": "drop_rate", "drop_block": "drop_block_rate", "drop_connect": "drop_connect_rate", "gp": "global_pool",
    "bn_momentum": "bn_momentum", "bn_eps": "bn_eps",
}  # fmt: skip
FLAGS = {  # argument that is on → what is set
    "grad_checkpointing": ("checkpointing", "blocks"), "torchscript": ("compile", "jit"), "torchcompile": ("compile", "inductor"),
}  # fmt: skip
EDITS = {"channels_last": "channels_last", "sync_bn": "sync_bn", "fast_norm": "fused_norm"}
OF_SCHEDULES = (  # read where their schedule is chosen
    "cooldown_epochs", "decay_epochs", "decay_milestones", "decay_rate", "lr_cycle_decay", "lr_cycle_limit", "lr_cycle_mul",
    "min_lr", "patience_epochs", "warmup_epochs", "warmup_lr", "warmup_prefix",
)  # fmt: skip
SILENT = (  # of this machine, or what follows from the data, or what only names the run
    "class_map_cache", "dataset_download", "device", "dist_bn", "experiment", "in_chans", "local_rank", "log_interval",
    "no_prefetcher", "num_classes", "output", "pin_mem", "prefetcher", "rank", "train_split",
    "use_multi_epochs_loader", "val_split", "validation_batch_size", "world_size", "distributed", "lr_noise_pct", "lr_noise_std",
    "wandb_project", "wandb_tags", "synchronize_step", "no_ddp_bb", "resplit", "amp_impl", "torchcompile_mode",
)  # fmt: skip
DEFAULTS = {"worker_seeding": "all", "lr_k_decay": 1, "sched_on_updates": True, "input_img_mode": "RGB", "bce_sum": False}
BELOW = {"naflex_": "naflex_loader", "kd_": "kd_model_name"}  # beginning of arguments → the one without which they are off
MOST_CYCLES = 100
OFF: tuple[object, ...] = (None, False, 0, "", [], {})


@dataclass
class Translation:
    """The words of a recipe, those that its user says beside it, and what is left out."""

    options: dict[str, object] = field(default_factory=dict)  # group → option
    values: dict[str, object] = field(default_factory=dict)  # dotted key → value
    words: list[str] = field(default_factory=list)  # of the machine, which no recipe sets
    left: list[str] = field(default_factory=list)  # a sentence for each argument that has no word here, or another meaning


def translate(args: Mapping[str, object], devices: int = 1) -> Translation:
    """The run that timm trained on so many devices with these arguments. Raises UserError where they are none of timm's."""
    if not isinstance(args, Mapping) or not isinstance(args.get("model"), str) or "opt" not in args:
        raise UserError(
            "these are no arguments of timm's train.py: it writes args.yaml into its output folder, with model and opt"
        )
    return _Run(args, devices).translated()


class _Run:
    """The arguments, of which each is read once."""

    def __init__(self, args: Mapping[str, object], devices: int) -> None:
        self.args, self.devices = args, devices
        self.read = {*SILENT, *OF_SCHEDULES}
        self.found = Translation()
        self.options, self.values, self.left = self.found.options, self.found.values, self.found.left

    def get(self, name: str, default: Any = None) -> Any:
        """An argument; the default where it is not given."""
        self.read.add(name)
        value = self.args.get(name)
        return default if value in (None, "") else value

    def number(self, name: str, default: float = 0) -> float:
        """An argument that is a number. Raises UserError."""
        value = self.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise UserError(f"{name}: {value} is no number, as timm's train.py writes one")
        return value

    def numbers(self, name: str, default: Sequence[float] = (), least: int = 1) -> list[float]:
        """An argument that is a list of at least so many numbers. Raises UserError."""
        value = self.get(name)
        if value is None or value == []:
            return [*default]
        if not fits(value, list[float]) or len(value) < least:
            raise UserError(f"{name}: {value} is no list of {least} numbers or more, as timm's train.py writes one")
        return list(value)

    def mapping(self, name: str) -> dict[str, object]:
        """An argument that is a mapping. Raises UserError."""
        value = self.get(name, {})
        if not isinstance(value, dict):
            raise UserError(f"{name}: {value} is no mapping, as timm's train.py writes one")
        return value

    def translated(self) -> Translation:
        """All of it."""
        self.data()
        self.model()
        self.batch()
        self.optimizer()
        self.scheduler()
        self.augment()
        self.loss()
        self.rest()
        off = tuple(start for start, switch in BELOW.items() if not self.args.get(switch))
        for name, value in self.args.items():
            if not name.startswith(off) and name not in self.read and value not in OFF and DEFAULTS.get(name) != value:
                why = f"see {ELSEWHERE[name]}" if name in ELSEWHERE else NOT_HERE.get(name, "it has no counterpart")
                self.left.append(f"{name}={format_value(value)}: {why}")
        return self.found

    def data(self) -> None:
        name, root = str(self.get("dataset", "")).lower(), self.get("data_dir") or self.get("data", "PATH")
        kind = name.partition("/")[0]
        option = ELSEWHERE_DATA.get(name) or FOLDERS.get(kind, "imagefolder")
        if kind in FOLDERS or (kind in ("torch", "tfds") and name not in ("torch/cifar10", "torch/image_folder")):
            self.left.append(f"dataset={name}: nothing is fetched by that name: have it as data={option} reads it")
        self.options["data"] = option
        self.found.words.append(f"data.{'train' if option == 'webdataset' else 'root'}={_word(root)}")
        if option == "cifar10":
            return
        known = _pretrained(str(self.args["model"]))
        shape = self.numbers("input_size", known.get("input_size") or [3, 224, 224], 3)
        size = int(self.number("img_size", shape[-1]))
        if shape[-1] != shape[-2]:
            self.left.append(f"input_size={format_value(shape)}: images are square here, and data.size={size}")
        self.values |= {"data.size": size, "data.crop_pct": self.number("crop_pct", known.get("crop_pct") or 0.875)}
        given = [self.numbers(key, known.get(key) or usual) for key, usual in zip(("mean", "std"), IMAGENET, strict=True)]
        if given != [*IMAGENET]:
            self.values["data.normalize"] = "measured"
            self.left.append(
                f"mean and std {format_value(given)}: the mean and deviation of 500 training images take their place"
            )
        if repeats := self.number("aug_repeats"):
            self.values["data.order"] = int(repeats)

    def model(self) -> None:
        self.options["model"] = "timm"
        self.values["model.name"] = self.get("model")
        kwargs = {theirs: value for name, theirs in MODEL.items() if (value := self.get(name)) not in OFF}
        if kwargs := kwargs | self.mapping("model_kwargs"):
            self.values["model.kwargs"] = kwargs
        if (drop_path := self.get("drop_path")) is not None:
            self.values["model.drop_path"] = drop_path
        if self.get("pretrained"):
            self.found.words.append("model.pretrained=true")
        if weights := self.get("initial_checkpoint") or self.get("pretrained_path"):
            self.found.words.append(f"model.weights={_word(weights)}")

    def batch(self) -> None:
        parts = int(self.number("grad_accum_steps", 1))
        self.options["batch"] = "accumulate" if parts > 1 else "fixed"
        self.samples = int(self.number("batch_size", 128)) * parts * self.devices
        self.values["batch.global_batch"] = self.samples
        if parts > 1:
            self.values["batch.accumulation_steps"] = parts
        if self.devices > 1:
            self.found.words += ["parallel=ddp", f"parallel.nproc={self.devices}"]

    def optimizer(self) -> None:
        name = str(self.get("opt")).lower()
        known = OPTIMIZERS.get(name)
        option = "timm" if known is None else "sgd" if "nesterov" in known else name
        self.options["optimizer"] = option
        more = dict(self.mapping("opt_kwargs"))
        if (eps := self.get("opt_eps")) is not None:
            more["eps"] = eps
        if betas := self.numbers("opt_betas", least=2):
            more |= {"betas": betas} if option == "timm" else {"beta1": betas[0], "beta2": betas[1]}
        if (momentum := self.get("momentum")) is not None and option == "sgd":
            more["momentum"] = momentum
        self.lr = self.learning_rate(name)
        if self.lr <= 0:
            raise UserError(f"lr: {self.lr:g} is not above 0")
        self.values["optimizer.weight_decay"] = self.number("weight_decay")
        if option == "timm":
            self.values |= {"optimizer.name": name} | ({"optimizer.kwargs": more} if more else {})
        else:
            self.values |= {f"optimizer.{key}": value for key, value in {**(known or {}), **more}.items()}
        if (decay := self.get("layer_decay")) is not None:
            self.values["optimizer.layer_decay"] = decay
        if bound := self.number("clip_grad"):
            mode = self.get("clip_mode", "norm")
            self.options["clip"] = mode
            self.values[{"norm": "clip.max_norm", "value": "clip.clip_value"}.get(mode, "clip.clip_factor")] = bound
        self.read.add("clip_mode")

    def learning_rate(self, name: str) -> float:
        """Set the rate, and return what it is for this batch."""
        self.read |= {"lr_base", "lr_base_size", "lr_base_scale"}
        if self.get("lr") is not None:
            self.values["optimizer.lr"] = self.number("lr")
            return self.number("lr")
        of = self.number("lr_base_size", 256)
        by = self.get("lr_base_scale") or ("sqrt" if "ada" in name or "lamb" in name else "linear")
        base = self.number("lr_base", 0.1)
        if of <= 0:
            raise UserError(f"lr_base_size: {of:g} is not above 0")
        self.values |= {"optimizer.lr": base, "batch.lr_scaling": by, "batch.base_batch": int(of)}
        return base * (self.samples / of) ** (0.5 if by == "sqrt" else 1)

    def scheduler(self) -> None:
        name = str(self.get("sched", "cosine"))
        option = SCHEDULES.get(name, "cosine")
        if name not in SCHEDULES:
            self.left.append(f"sched={name}: scheduler=cosine takes its place")
        self.options["scheduler"] = option
        epochs, warmup = self.number("epochs", 300), self.number("warmup_epochs")
        prefix = warmup if self.args.get("warmup_prefix") and option != "constant" else 0
        if warmup and name != "none":
            start = min(1.0, self.number("warmup_lr") / self.lr)
            self.values |= {"scheduler.warmup": f"{warmup:g}ep", "scheduler.warmup_start": float(f"{start:.4g}")}
        final = float(f"{min(1.0, self.number('min_lr') / self.lr):.4g}")
        every = self.number("decay_epochs", 90)
        rate = self.number("decay_rate", 0.1)
        if option in ("cosine", "poly", "plateau", "wsd") and final:
            self.values["scheduler.final"] = final
        if option in ("cosine", "poly"):
            epochs = self.cycles(option, epochs) + prefix
            if rest := self.number("cooldown_epochs"):
                self.values["scheduler.length"] = f"{epochs:g}ep"
                epochs += rest
        if option == "poly":
            self.values["scheduler.power"] = rate
        elif option == "step":
            self.values |= {"scheduler.every": f"{every:g}ep", "scheduler.gamma": rate}
        elif option == "multistep":
            at = self.numbers("decay_milestones", [90, 180, 270])
            self.values |= {"scheduler.milestones": [f"{each:g}ep" for each in at], "scheduler.gamma": rate}
        elif option == "plateau":
            patience = int(self.number("patience_epochs", 10))
            self.values |= {"scheduler.factor": rate, "scheduler.patience": patience}
            self.values |= {"scheduler.metric": "accuracy", "scheduler.mode": "max"}
        elif option == "wsd":
            share = every * (epochs - (0 if prefix else warmup)) if 0 < every < 1 else every
            self.values |= {"scheduler.decay": f"{share:g}ep", "scheduler.shape": "sqrt"}
        if not self.get("sched_on_updates", False) and option not in ("constant", "plateau"):
            self.left.append("sched_on_updates=false: the learning rate moves at every update here, not once an epoch")
        self.values["epochs"] = round(epochs if option in ("cosine", "poly") else epochs + prefix)

    def cycles(self, option: str, epochs: float) -> float:
        """Set the restarts of a schedule, and return how many epochs they take."""
        count, times = int(min(self.number("lr_cycle_limit", 1), MOST_CYCLES)), self.number("lr_cycle_mul", 1)
        if count < 2:
            return epochs
        if option != "cosine":
            self.left.append(f"lr_cycle_limit={count}: scheduler={option} has one cycle, scheduler=cosine several")
            return epochs
        decay = self.number("lr_cycle_decay", 0.5)
        self.values |= {"scheduler.cycles": count, "scheduler.cycle_mult": times, "scheduler.cycle_decay": decay}
        return epochs * sum(times**cycle for cycle in range(count))

    def augment(self) -> None:
        mixing = dict(self.mixing())
        steps = {} if self.get("no_aug") else dict(self.images())
        self.read |= {"scale", "ratio", "hflip", "vflip", "color_jitter", "aa", "train_crop_mode", "train_interpolation"}
        every = {**steps, **mixing}
        self.options["augment"] = [*every]
        self.values |= {f"augment.{name}.{key}": value for name, keys in every.items() for key, value in keys.items()}
        off = int(self.number("mixup_off_epoch"))
        if mixing and off:
            self.values["stages"] = [{"until": f"{off}ep"}, {"augment": [*steps]}]

    def images(self) -> Iterator[tuple[str, dict[str, object]]]:
        """Yield what is drawn for each image."""
        if (mode := self.get("train_crop_mode", "rrc")) != "rrc":
            self.left.append(f"train_crop_mode={mode}: augment.random_resized_crop takes its place")
        crop: dict[str, object] = {"scale": self.numbers("scale", [0.08, 1.0]), "ratio": self.numbers("ratio", [3 / 4, 4 / 3])}
        drawn = self.get("train_interpolation", "random")
        if drawn not in ("bilinear", "bicubic"):
            self.left.append(f"train_interpolation={drawn}: it is bicubic for every image")
            drawn = "bicubic"
        yield "random_resized_crop", {**crop, "interpolation": drawn}
        if flip := self.number("hflip", 0.5):
            yield "flip_crop", {"flip": flip, "pad": 0}
        if up := self.number("vflip"):
            self.left.append(f"vflip={up:g}: no augmentation turns images upside down")
        policy = str(self.get("aa", ""))
        jitter = self.get("color_jitter")
        if jitter and (not policy or "3a" in policy):
            parts = [*jitter, 0, 0, 0, 0][:4] if isinstance(jitter, list) else [jitter] * 3 + [0]
            yield "color_jitter", dict(zip(("brightness", "contrast", "saturation", "hue"), parts, strict=True))
        if policy.startswith("rand"):
            yield "randaugment", self.randaugment(policy)
        elif policy:
            self.left.append(f"aa={policy}: of its policies augment=[randaugment] is here: none is set")
        if erased := self.number("reprob"):
            fill = "mean" if self.get("remode", "pixel") == "const" else "noise"
            yield "random_erasing", {"prob": erased, "fill": fill}
            if (count := self.number("recount", 1)) > 1:
                self.left.append(f"recount={count:g}: augment=[random_erasing] erases one box of an image")
        self.read |= {"remode", "recount"}

    def randaugment(self, policy: str) -> dict[str, object]:
        """The keys of augment.randaugment that are in timm's words, such as rand-m9-mstd0.5-inc1."""
        found: dict[str, object] = {}
        ignored = []
        for part in filter(None, policy.split("-")[1:]):
            key, value = part[0], part[1:]
            if key in "mn" and value.replace(".", "", 1).isdigit():
                found |= {"magnitude": float(value)} if key == "m" else {"n": int(float(value))}
            else:
                ignored.append(part)
        if ignored:
            self.left.append(
                f"aa={policy}: augment.randaugment has no {', '.join(ignored)}: its operations are as strong each time"
            )
        return found

    def mixing(self) -> Iterator[tuple[str, dict[str, object]]]:
        """Yield mixup and cutmix, with the share of the samples that each one mixes."""
        alphas = {name: alpha for name in ("mixup", "cutmix") if (alpha := self.number(name)) > 0}
        share, cut, mode = self.number("mixup_prob", 1), self.number("mixup_switch_prob", 0.5), self.get("mixup_mode", "batch")
        if alphas and mode not in ("batch", "elem"):
            self.left.append(f"mixup_mode={mode}: each sample draws for itself")
        for name, alpha in alphas.items():
            part = 1 if len(alphas) < 2 else cut if name == "cutmix" else 1 - cut
            yield name, {"alpha": alpha, "prob": round(share * part, 6), "per": "update" if mode == "batch" else "sample"}

    def loss(self) -> None:
        self.options["loss"] = "bce" if self.get("bce_loss") else "cross_entropy"
        self.values["loss.label_smoothing"] = self.number("smoothing", 0.1)
        threshold, weight = self.get("bce_target_thresh"), self.get("bce_pos_weight")
        if self.options["loss"] == "bce" and threshold is not None:
            self.values["loss.target_threshold"] = threshold
        if weight is not None:
            self.left.append(f"bce_pos_weight={weight}: loss.pos_weight is for samples with any number of labels")

    def rest(self) -> None:
        dtype = str(self.get("model_dtype", "float32"))
        mixed = [self.get(name) for name in ("amp", "native_amp", "apex_amp")]  # the last two are of older versions
        half = ("bf16" if self.get("amp_dtype") == "bfloat16" else "amp") if any(mixed) else None
        if precision := DTYPES.get(dtype) or half:
            self.options["precision"] = precision
        if dtype not in ("float32", *DTYPES):
            self.left.append(f"model_dtype={dtype}: weights in {dtype} cannot be trained")
        self.read.add("amp_dtype")
        for name, (group, option) in FLAGS.items():
            if self.get(name):
                self.options[group] = option
        if edits := [option for name, option in EDITS.items() if self.get(name)]:
            self.options["surgery"] = edits
        if self.get("model_ema"):
            self.options["ema"] = "ema"
            self.values |= {"ema.decay": self.number("model_ema_decay", 0.9998), "ema.warmup": bool(self.get("model_ema_warmup"))}
        self.read |= {"model_ema_decay", "model_ema_warmup"}
        if workers := int(self.number("workers", 4)):
            self.options["loader"] = "workers"
            self.values["loader.num_workers"] = workers
        self.options["saving"] = "best"
        self.values["saving.keep"] = int(self.number("checkpoint_hist", 10))
        if every := int(self.number("recovery_interval")):
            self.values["saving.every_updates"] = every
        if (metric := self.get("eval_metric", "top1")) != "top1":
            self.values["select"] = metric
            self.options["metrics"] = [metric] * (metric == "top5")
        self.values["runtime.seed"] = int(self.number("seed", 42))
        if self.get("log_wandb"):
            self.found.words.append("logger=[files,wandb]")


def _word(path: object) -> str:
    """A path as the value of an override."""
    return str(path) if re.fullmatch(r"[\w./~-]+", str(path)) else format_value(path)


def _pretrained(name: str) -> dict[str, Any]:
    """The facts that timm knows of a model's inputs; {} where it does not know the model, or is not installed."""
    try:
        from timm.models import get_pretrained_cfg
    except ImportError:
        return {}
    found = get_pretrained_cfg(name, allow_unregistered=True)
    return asdict(found) if found is not None else {}
