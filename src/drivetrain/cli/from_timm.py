"""The args.yaml of timm's train.py in drivetrain's words. Its arguments with no word here are told, a line each."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, get_origin

from drivetrain.config.other_tools import ELSEWHERE, NOT_HERE
from drivetrain.core.errors import UserError
from drivetrain.core.options.overrides import format_value
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
OF_IMAGES = (  # of what is drawn for each image, all of which `no_aug` switches off
    "scale", "ratio", "hflip", "vflip", "color_jitter", "aa", "train_crop_mode", "train_interpolation", "remode", "recount",
)  # fmt: skip
INTERPOLATIONS = ("bilinear", "bicubic")
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


class _Run(Translation):
    """The arguments, of which each is read once."""

    def __init__(self, args: Mapping[str, object], devices: int) -> None:
        super().__init__()
        self._args, self._devices, self._read = args, devices, {*SILENT}

    def translated(self) -> Translation:
        """All of it."""
        for section in (
            self._data, self._model, self._batch, self._optimizer, self._scheduler, self._augment, self._loss, self._speed,
            self._rest,
        ):  # fmt: skip
            section()
        off = tuple(start for start, switch in BELOW.items() if not self._args.get(switch))
        for name, value in self._args.items():
            if not name.startswith(off) and name not in self._read:
                why = f"see {ELSEWHERE[name]}" if name in ELSEWHERE else NOT_HERE.get(name, "it has no counterpart")
                self._tell(name, None if value in OFF or DEFAULTS.get(name) == value else format_value(value), why)
        return self

    def _get(self, name: str, default: Any = None, kind: Any = Any, what: str = "") -> Any:
        """An argument; the default where it is not given. Raises UserError where it is not what it should be."""
        self._read.add(name)
        value = self._args.get(name)
        if value in (None, "") or (value == [] and get_origin(kind) is list):
            return default
        if not fits(value, kind):
            raise UserError(f"{name}: {value} is no {what}, as timm's train.py writes one")
        return value

    def _number(self, name: str, default: float = 0) -> float:
        found: float = self._get(name, default, float, "number")
        return found

    def _numbers(self, name: str, default: Sequence[float] | None, least: int = 1) -> list[float]:
        what = f"list of {least} numbers or more"
        found = self._get(name, default, list[float], what)
        if found is not None and len(found) < least:
            raise UserError(f"{name}: {found} is no {what}, as timm's train.py writes one")
        return [*(found or ())]

    def _set(self, group: str, option: object, values: Mapping[str, object] | None = None) -> None:
        """Choose an option, and set its keys; None stands for one that is not set."""
        self.options[group] = option
        self.values |= {f"{group}.{key}": value for key, value in (values or {}).items() if value is not None}

    def _tell(self, name: str, value: object, why: str, fine: Sequence[object] = OFF) -> None:
        """Say what becomes of an argument, unless it has a value of which nothing need be said (`fine`)."""
        if value not in fine:
            self.left.append(f"{name}={f'{value:g}' if isinstance(value, float) else value}: {why}")

    def _data(self) -> None:
        name, root = str(self._get("dataset", "")).lower(), self._get("data_dir") or self._get("data", "PATH")
        kind = name.partition("/")[0]
        option = ELSEWHERE_DATA.get(name) or FOLDERS.get(kind, "imagefolder")
        fetched = kind in FOLDERS or (kind in ("torch", "tfds") and name not in ("torch/cifar10", "torch/image_folder"))
        self._tell("dataset", name * fetched, f"nothing is fetched by that name: have it as data={option} reads it")
        self.words.append(f"data.{'train' if option == 'webdataset' else 'root'}={_word(root)}")
        if option == "cifar10":
            return self._set("data", option)
        known = _pretrained(str(self._args["model"]))
        shape = self._numbers("input_size", known.get("input_size") or [3, 224, 224], 3)
        size = int(self._number("img_size", shape[-1]))
        self._tell("input_size", format_value(shape) * (shape[-1] != shape[-2]), f"images are square here, and data.size={size}")
        given = [self._numbers(key, known.get(key) or usual) for key, usual in zip(("mean", "std"), IMAGENET, strict=True)]
        measured = given != [*IMAGENET]
        why = "the mean and deviation of 500 training images take their place"
        self._tell("mean, std", format_value(given) * measured, why)
        self._set("data", option, {
            "size": size, "crop_pct": self._number("crop_pct", known.get("crop_pct") or 0.875),
            "normalize": "measured" if measured else None, "order": int(self._number("aug_repeats")) or None,
        })  # fmt: skip

    def _model(self) -> None:
        kwargs = {theirs: value for name, theirs in MODEL.items() if (value := self._get(name)) not in OFF}
        kwargs |= self._get("model_kwargs", {}, dict[str, object], "mapping")
        drop_path = self._get("drop_path")
        self._set("model", "timm", {"name": self._get("model"), "kwargs": kwargs or None, "drop_path": drop_path})
        weights = self._get("initial_checkpoint") or self._get("pretrained_path")
        self.words += ["model.pretrained=true"] if self._get("pretrained") else []
        self.words += [f"model.weights={_word(weights)}"] if weights else []

    def _batch(self) -> None:
        parts = int(self._number("grad_accum_steps", 1))
        self._samples = int(self._number("batch_size", 128)) * parts * self._devices
        option, steps = ("accumulate", parts) if parts > 1 else ("fixed", None)
        self._set("batch", option, {"global_batch": self._samples, "accumulation_steps": steps})
        self.words += ["parallel=ddp", f"parallel.nproc={self._devices}"] if self._devices > 1 else []

    def _optimizer(self) -> None:
        name = str(self._get("opt")).lower()
        known = OPTIMIZERS.get(name)
        option = "timm" if known is None else "sgd" if "nesterov" in known else name
        betas, momentum = self._numbers("opt_betas", None, 2), self._get("momentum")
        of_betas = {"betas": betas} if option == "timm" else dict(zip(("beta1", "beta2"), betas, strict=False))
        more = self._get("opt_kwargs", {}, dict[str, object], "mapping") | {
            "eps": self._get("opt_eps"), **(of_betas if betas else {}), "momentum": momentum if option == "sgd" else None,
        }  # fmt: skip
        more = {key: value for key, value in more.items() if value is not None}
        own = {"name": name, "kwargs": more or None} if option == "timm" else {**(known or {}), **more}
        rate, decay = self._learning_rate(name), self._number("weight_decay")
        self._set("optimizer", option, {"lr": rate, "weight_decay": decay, **own, "layer_decay": self._get("layer_decay")})
        bound, mode = self._number("clip_grad"), self._get("clip_mode", "norm")
        if bound:
            self._set("clip", mode, {{"norm": "max_norm", "value": "clip_value"}.get(mode, "clip_factor"): bound})

    def _learning_rate(self, name: str) -> float:
        """The rate that is set, and the rule by which it follows the batch; the rate of this batch is kept."""
        given, base, of = self._number("lr"), self._number("lr_base", 0.1), self._number("lr_base_size", 256)
        by = self._get("lr_base_scale") or ("sqrt" if "ada" in name or "lamb" in name else "linear")
        scaled = self._get("lr") is None
        if scaled and of <= 0:
            raise UserError(f"lr_base_size: {of:g} is not above 0")
        self._lr = base * (self._samples / of) ** (0.5 if by == "sqrt" else 1) if scaled else given
        if self._lr <= 0:
            raise UserError(f"lr: {self._lr:g} is not above 0")
        self.values |= {"batch.lr_scaling": by, "batch.base_batch": int(of)} if scaled else {}
        return base if scaled else given

    def _scheduler(self) -> None:
        name, warmup, warm = str(self._get("sched", "cosine")), self._number("warmup_epochs"), self._number("warmup_lr")
        option = SCHEDULES.get(name, "cosine")
        self._tell("sched", name * (name not in SCHEDULES), "scheduler=cosine takes its place")
        prefix = warmup * bool(self._get("warmup_prefix") and option != "constant")
        every, rate, rest = self._number("decay_epochs", 90), self._number("decay_rate", 0.1), self._number("cooldown_epochs")
        final = float(f"{min(1.0, self._number('min_lr') / self._lr):.4g}")
        milestones, patience = self._numbers("decay_milestones", [90, 180, 270]), int(self._number("patience_epochs", 10))
        epochs, cycles = self._cycles(option)
        length = epochs + prefix
        share = every * (epochs - (0 if prefix else warmup)) if 0 < every < 1 else every
        in_cycles = {"final": final or None, **cycles, "length": f"{length:g}ep" if rest else None}
        own: dict[str, Mapping[str, object]] = {
            "cosine": in_cycles, "poly": in_cycles | {"power": rate}, "step": {"every": f"{every:g}ep", "gamma": rate},
            "multistep": {"milestones": [f"{each:g}ep" for each in milestones], "gamma": rate},
            "plateau": {
                "final": final or None, "factor": rate, "patience": patience, "metric": "accuracy", "mode": "max",
            },
            "wsd": {"final": final or None, "decay": f"{share:g}ep", "shape": "sqrt"},
        }  # fmt: skip
        start = {"warmup": f"{warmup:g}ep", "warmup_start": float(f"{min(1.0, warm / self._lr):.4g}")}
        self._set("scheduler", option, {**(start if warmup and name != "none" else {}), **own.get(option, {})})
        each_epoch = not self._get("sched_on_updates", False) and option not in ("constant", "plateau")
        self._tell("sched_on_updates", "false" * each_epoch, "the learning rate moves at every update here, not once an epoch")
        self.values["epochs"] = round(length + (rest if option in ("cosine", "poly") else 0))

    def _cycles(self, option: str) -> tuple[float, Mapping[str, object]]:
        """The epochs of a schedule with its restarts, and what sets these."""
        epochs, times, decay = self._number("epochs", 300), self._number("lr_cycle_mul", 1), self._number("lr_cycle_decay", 0.5)
        count = int(min(self._number("lr_cycle_limit", 1), MOST_CYCLES))
        if option != "cosine" or count < 2:
            several = count * (option == "poly" and count > 1)
            self._tell("lr_cycle_limit", several, f"scheduler={option} has one cycle, scheduler=cosine several")
            return epochs, {}
        return epochs * sum(times**n for n in range(count)), {"cycles": count, "cycle_mult": times, "cycle_decay": decay}

    def _augment(self) -> None:
        self._read |= {*OF_IMAGES}
        mixing, steps = dict(self._mixing()), {} if self._get("no_aug") else dict(self._images())
        self.options["augment"] = [*steps, *mixing]
        for name, keys in (steps | mixing).items():
            self.values |= {f"augment.{name}.{key}": value for key, value in keys.items()}
        off = int(self._number("mixup_off_epoch"))
        if mixing and off:
            self.values["stages"] = [{"until": f"{off}ep"}, {"augment": [*steps]}]

    def _images(self) -> Iterator[tuple[str, dict[str, object]]]:
        """Yield what is drawn for each image."""
        self._tell(
            "train_crop_mode", self._get("train_crop_mode", "rrc"), "augment.random_resized_crop takes its place", ("rrc",)
        )
        crop: dict[str, object] = {"scale": self._numbers("scale", [0.08, 1.0]), "ratio": self._numbers("ratio", [3 / 4, 4 / 3])}
        drawn = self._get("train_interpolation", "random")
        self._tell("train_interpolation", drawn, "it is bicubic for every image", INTERPOLATIONS)
        yield "random_resized_crop", {**crop, "interpolation": drawn if drawn in INTERPOLATIONS else "bicubic"}
        if flip := self._number("hflip", 0.5):
            yield "flip_crop", {"flip": flip, "pad": 0}
        self._tell("vflip", self._number("vflip"), "no augmentation turns images upside down")
        policy, jitter = str(self._get("aa", "")), self._get("color_jitter")
        if jitter and (not policy or "3a" in policy):
            parts = [*jitter, 0, 0, 0, 0][:4] if isinstance(jitter, list) else [jitter] * 3 + [0]
            yield "color_jitter", dict(zip(("brightness", "contrast", "saturation", "hue"), parts, strict=True))
        if policy.startswith("rand"):
            yield "randaugment", self._randaugment(policy)
        else:
            self._tell("aa", policy, "of its policies augment=[randaugment] is here: none is set")
        if erased := self._number("reprob"):
            yield "random_erasing", {"prob": erased, "fill": "mean" if self._get("remode", "pixel") == "const" else "noise"}
            boxes = self._number("recount", 1)
            self._tell("recount", boxes if boxes > 1 else None, "augment=[random_erasing] erases one box of an image")

    def _randaugment(self, policy: str) -> dict[str, object]:
        """The keys of augment.randaugment that are in timm's words, such as rand-m9-mstd0.5-inc1."""
        found: dict[str, object] = {}
        ignored = []
        for part in filter(None, policy.split("-")[1:]):
            key, value = part[0], part[1:]
            if key in "mn" and value.replace(".", "", 1).isdigit():
                found |= {"magnitude": float(value)} if key == "m" else {"n": int(float(value))}
            else:
                ignored.append(part)
        why = f"augment.randaugment has no {', '.join(ignored)}: its operations are as strong each time"
        self._tell("aa", policy if ignored else None, why)
        return found

    def _mixing(self) -> Iterator[tuple[str, dict[str, object]]]:
        """Yield mixup and cutmix, with the share of the samples that each one mixes."""
        alphas = {name: alpha for name in ("mixup", "cutmix") if (alpha := self._number(name)) > 0}
        share, cut, mode = self._number("mixup_prob", 1), self._number("mixup_switch_prob", 0.5), self._get("mixup_mode", "batch")
        self._tell("mixup_mode", mode if alphas else "batch", "each sample draws for itself", ("batch", "elem"))
        for name, alpha in alphas.items():
            part = 1 if len(alphas) < 2 else cut if name == "cutmix" else 1 - cut
            yield name, {"alpha": alpha, "prob": round(share * part, 6), "per": "update" if mode == "batch" else "sample"}

    def _loss(self) -> None:
        bce, threshold = self._get("bce_loss"), self._get("bce_target_thresh")
        values = {"label_smoothing": self._number("smoothing", 0.1), "target_threshold": threshold if bce else None}
        self._set("loss", "bce" if bce else "cross_entropy", values)
        self._tell("bce_pos_weight", self._get("bce_pos_weight"), "loss.pos_weight is for samples with any number of labels")

    def _speed(self) -> None:
        dtype, bf16 = str(self._get("model_dtype", "float32")), self._get("amp_dtype") == "bfloat16"
        mixed = [self._get(name) for name in ("amp", "native_amp", "apex_amp")]  # the last two are of older versions
        if precision := DTYPES.get(dtype) or (("bf16" if bf16 else "amp") if any(mixed) else None):
            self._set("precision", precision)
        self._tell("model_dtype", dtype, f"weights in {dtype} cannot be trained", ("float32", *DTYPES))
        self.options |= {group: option for name, (group, option) in FLAGS.items() if self._get(name)}
        if edits := [option for name, option in EDITS.items() if self._get(name)]:
            self._set("surgery", edits)
        if workers := int(self._number("workers", 4)):
            self._set("loader", "workers", {"num_workers": workers})

    def _rest(self) -> None:
        average = {"decay": self._number("model_ema_decay", 0.9998), "warmup": bool(self._get("model_ema_warmup"))}
        if self._get("model_ema"):
            self._set("ema", "ema", average)
        every = int(self._number("recovery_interval")) or None
        self._set("saving", "best", {"keep": int(self._number("checkpoint_hist", 10)), "every_updates": every})
        if (metric := self._get("eval_metric", "top1")) != "top1":
            self._set("metrics", [metric] * (metric == "top5"))
            self.values["select"] = metric
        self.values["runtime.seed"] = int(self._number("seed", 42))
        self.words += ["logger=[files,wandb]"] if self._get("log_wandb") else []


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
