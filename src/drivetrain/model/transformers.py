"""model=transformers: any model of Hugging Face's transformers, with a head for the data."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from drivetrain.core.errors import OperatorGives, UserError, did_you_mean
from drivetrain.core.lazy import torch
from drivetrain.core.machine import files
from drivetrain.core.options.allowed import Entries, Text
from drivetrain.core.options.option import BuildContext, RunSpec, needs_extra
from drivetrain.core.step.trees import Tree, first, shape_of
from drivetrain.model import hub
from drivetrain.model.base import NO_START, Model

KEPT = "model_config.json"  # in the run's directory: rebuilds the model without the folder or the hub
TOKENIZER = "tokenizer.json"
MOST_LAYERS = 10_000  # limit of a model from a config.json
PADDING = 0  # pads texts with a class, if their tokens are not from the model's own tokenizer
HEADS = {  # head → its class of transformers, and its outputs
    "sequence": ("AutoModelForSequenceClassification", "outputs for each text"),
    "token": ("AutoModelForTokenClassification", "outputs for each token"),
    "causal": ("AutoModelForCausalLM", "the next token"),
    "masked": ("AutoModelForMaskedLM", "masked tokens"),
    "image": ("AutoModelForImageClassification", "outputs for each image"),
}
# A config's keys for recipes: numbers and plain names, but no code, no attention (model.attention) and nothing private.
CONFIG = Entries(
    Text(
        r"(?!auto_map|.*implementation|quantization.*|use_kernels)[a-z]\w*(\.\w+)*",
        "a number or name of a config that a recipe may set",
    ),
    (
        (
            Text(r".*(_act|_activation|activation_function|_type|position_embedding\w*)", ""),
            Text(r"[a-z]\w{0,40}", "a plain name"),
        ),
    ),
)

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class Transformers(Model):
    """Any model of transformers: a new architecture, a folder (config.json and safetensors), or a name on the hub.

    The head has as many outputs as the data has classes or tokens. Inputs are one tensor, tokens or images, or a dict whose
    keys the model's forward takes. Only JSON and safetensors are read, and no remote code runs.
    """

    name: (
        Annotated[str, Text(r"[A-Za-z]\w*([.-]\w+)*(/\w+([.-]\w+)*)?", "an architecture or a model of the hub, no path")] | None
    ) = None
    pretrained: bool = False
    config: Annotated[dict[str, Any], CONFIG] = field(default_factory=dict)
    attention: Literal["auto", "sdpa", "eager", "flash", "flex"] = "auto"
    head: Literal["auto", "sequence", "token", "causal", "masked", "image"] = "auto"

    _finished: bool = field(default=False, init=False)  # True for a finished run, whose directory has its config
    began: bool = field(default=False, init=False)  # True if it began with given weights
    machine_local_keys = identifying_keys = (*Model.machine_local_keys, "pretrained")
    tokens = generates = None
    may_be_transformer = True
    takes_trees = packs = True

    def validate(self, run: RunSpec) -> Iterator[str]:
        yield from super().validate(run)
        if not self.name:
            yield OperatorGives(
                "model=transformers needs model.name, such as bert, a folder, or distilbert/distilbert-base-uncased"
            )
        if self.pretrained and self.weights is not None:
            yield f"model.pretrained=true and model.weights={self.weights} are two sets of initial weights: leave one out"

    def validate_device(self, run: RunSpec) -> Iterator[str]:
        yield from (missing := list(needs_extra("transformers", "transformers", "model=transformers")))
        if self.attention == "flash" and list(needs_extra("flash_attn", "", "")):
            yield "model.attention=flash needs the package 'flash_attn', which is not installed: set model.attention=sdpa"
        if self.attention == "flex" and not self._finished and (kind := run.runtime.device_type()) != "cuda":
            yield f"model.attention=flex trains on CUDA alone, and the device is of type {kind}: set model.attention=sdpa"
        if missing or not self.name or self._finished:
            return
        _log_quietly()
        try:
            head = self._head(run, None)
            config = self._given_config()
            if head is not None:
                self._class(head, config)
        except UserError as error:
            yield from error.problems

    @property
    def has_tokenizer(self) -> bool:
        place = Path(self.place())
        return (place / TOKENIZER).is_file() if place.is_dir() else self.pretrained

    def tokenizer_files(self) -> tuple[Path, Mapping[str, Any]]:
        file, template = self._file("tokenizer_config.json"), self._file("chat_template.jinja")
        settings = _read(file) if file.exists() else {}
        if template.exists():
            settings = {**settings, "chat_template": _read(template, files.read_text)}
        return self._file(TOKENIZER), settings

    @property
    def given_weights(self) -> bool:
        return self.pretrained or super().given_weights

    def untrained(self) -> Transformers:
        attention: Any = "sdpa" if self.attention == "flex" else self.attention  # the same computation, on any device
        finished = replace(self, **NO_START, pretrained=False, attention=attention)
        finished._finished, finished.began = True, self.given_weights
        return finished

    @property
    def packs_in_one_row(self) -> bool:  # type: ignore[override]
        return self.attention == "flash"

    def build(self, context: BuildContext) -> torch.nn.Module:
        model = super().build(context)
        if context.run.data.packing:
            self._check_packing(model, context.device)
        return model

    def _check_packing(self, model: torch.nn.Module, device: torch.device) -> None:
        """Raise UserError if packed texts of a row see each other: some architectures and attentions do not separate them."""
        from torch._guards import detect_fake_mode

        rows = torch.tensor([[1, 2, 3, 1, 2], [2, 3, 1, 1, 2]], device=device)
        places, training, flash = torch.tensor([[0, 1, 2, 0, 1]] * 2, device=device), model.training, self.packs_in_one_row
        with torch.no_grad(), torch.autocast(device.type, torch.bfloat16, enabled=flash):
            batches = zip(*(t.split(1 if flash else 2) for t in (rows, places)), strict=True)
            model.eval()
            out = torch.cat([model(input_ids=ids, position_ids=at) for ids, at in batches])[:, 3:].float()
            model.train(training)
        if detect_fake_mode(out) is None and not torch.allclose(out[0], out[1], atol=1e-4):
            config: Any = model.config
            raise UserError(
                f"data.packing=true: model.name={self.name} ({config.model_type}, {config._attn_implementation}) lets a text see "
                "others of its row: set data.packing=false"
            )

    def create_for(self, context: BuildContext) -> torch.nn.Module:
        _log_quietly()
        data, kept = context.data, context.run_dir / KEPT
        inputs = data.two_samples(torch.device("meta"))
        head = self._head(context.run, first(inputs))
        assert head is not None
        resumed = context.parallel.broadcast_object(context.resumed)
        if (resumed or not context.trains) and kept.is_file():
            config = _config_of(_read(kept), str(kept), {})
        else:
            config = self._given_config()
            self._fit(config, head, context, first(inputs))
        text, plain = head != "image", isinstance(inputs, torch.Tensor)
        if plain and (inputs.dim() != (2 if text else 4) or (text and inputs.is_floating_point())):
            raise UserError(
                f"model.name={self.name} with head={head} reads {'tokens (n, length)' if text else 'images'}, and the inputs of "
                f"{context.run.named('data')} have shape {shape_of(inputs)}: set another model, loss or model.head"
            )
        cls = self._class(head, config)
        if context.writes_files and context.trains:
            files.write_text(kept, config.to_json_string(use_diff=False))
        attention = {"auto": None, "flash": "flash_attention_2", "flex": "flex_attention"}.get(self.attention, self.attention)
        with _errors_of(f"model.name={self.name}"):
            if self.pretrained and not resumed and context.without_values is None:
                model = self._loaded(cls, config, attention)
            else:
                model = cls.from_config(config, attn_implementation=attention, dtype=torch.float32)
        if head in ("sequence", "token", "masked") and plain:
            model.register_forward_pre_hook(_with_mask, with_kwargs=True)
        model.register_forward_hook(_logits, with_kwargs=True)
        trained: torch.nn.Module = model.train()
        return trained

    # --- building ---

    def _head(self, run: RunSpec, x: torch.Tensor | None) -> str | None:
        """The head for the run's targets and inputs; None if only the data's samples decide. Raises UserError."""
        if self.head != "auto":
            return self.head
        kind, tokens = run.target_kind, run.data.tokens
        if kind in ("tokens", "words"):
            return "token" if kind == "words" else "masked" if run.loss.masks_tokens else "causal"
        if kind == "mask":
            raise UserError(f"model=transformers has no outputs for each pixel, which {run.named('data')} wants: set model=unet")
        if run.data.reads_rows and not tokens:
            raise UserError(
                f"model=transformers reads texts or images, and {run.named('data')} gives numbers: set model=mlp, or name a "
                "column of texts of data=tabular, as by data.columns=[NAME:text]"
            )
        if tokens is None and x is not None:
            tokens = not x.is_floating_point() and x.dtype != torch.uint8
        if tokens:
            return "sequence"
        return None if tokens is None else "image"

    def _class(self, head: str, config: Any) -> Any:
        """The class of transformers with the head. Raises UserError without one for this architecture."""
        import transformers

        name, gives = HEADS[head]
        cls = getattr(transformers, name)
        if type(config) not in cls._model_mapping:
            models = {other: getattr(transformers, auto)._model_mapping for other, (auto, _) in HEADS.items()}
            fitting = [other for other, classes in models.items() if type(config) in classes]
            raise UserError(
                f"model.name={self.name} ({config.model_type}) has no head for {gives}, but for "
                f"{', '.join(fitting) or 'nothing'}: set another model.name, or model.head and the data and task that fit it"
            )
        return cls

    def _given_config(self) -> Any:
        """The config of the architecture, folder or hub, with `model.config`. Raises UserError."""
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

        name, place = str(self.name), Path(self.place())
        if name in CONFIG_MAPPING_NAMES and not self.pretrained and not place.is_dir():
            return _config_of({"model_type": name}, f"model.name={name}", self.config)
        if not (file := self._file("config.json")).exists():
            raise UserError(f"model.name={name} has no config.json: give a folder that save_pretrained wrote")
        if self.pretrained and (adapter := self._file("adapter_config.json")).exists():
            raise UserError(
                f"{adapter} is an adapter next to the model's own weights: move it and adapter_model.safetensors to a folder of "
                "their own, which adapter.weights may name"
            )
        return _config_of(_read(file), f"model.name={name}", self.config)

    def _file(self, name: str) -> Path:
        """The file of this name in the folder, or of the hub's model in the cache; it need not exist. Raises UserError."""
        if (place := Path(self.place())).is_dir():
            return place / name
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import EntryNotFoundError
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

        known = list(CONFIG_MAPPING_NAMES) if "/" not in str(self.name) else []
        instead = "set model.name=/path/to/folder, which has its config.json and *.safetensors"
        cached = hub.only_cached(str(self.name), "config.json", f"model.name={self.name}", instead, known)
        with _errors_of(f"model.name={self.name}"):
            try:
                return Path(hf_hub_download(str(self.name), name, local_files_only=cached))
            except EntryNotFoundError:
                return place / name

    def place(self) -> str:
        """The folder, or the name on the hub, of the initial weights."""
        return os.path.expanduser(str(self.name))

    def _fit(self, config: Any, head: str, context: BuildContext, x: torch.Tensor) -> None:
        """Set the data's sizes in the config unless they are given. Raises UserError if they cannot be changed."""
        data, new = context.data, not self.pretrained
        config.use_cache = False  # otherwise a training forward keeps the keys and values of all tokens
        text = head != "image"
        if head not in ("causal", "masked") and config.num_labels != data.classes:
            config.num_labels = data.classes
        if head not in ("causal", "masked") and data.names is not None and len(data.names) == data.classes:
            config.id2label = dict(enumerate(map(str, data.names)))
            config.label2id = {name: number for number, name in config.id2label.items()}
        if text:
            self._fit_tokens(config, head, context, x)
            return
        shape = tuple(x.shape[1:])
        sizes = (
            {"num_channels": shape[0], "image_size": shape[1] if shape[1] == shape[2] else list(shape[1:])}
            if len(shape) == 3
            else {}
        )
        for key, size in sizes.items():
            if getattr(config, key, size) == size or not hasattr(config, key):
                continue
            if not new or key in self.config:
                raise UserError(
                    f"model.name={self.name} takes images with {key}={getattr(config, key)}, and {context.run.named('data')} "
                    f"gives {list(shape)}: set the data's size, or model.pretrained=false"
                )
            setattr(config, key, size)

    def _fit_tokens(self, config: Any, head: str, context: BuildContext, x: torch.Tensor) -> None:
        data, key = context.data, "vocab_size"
        tokens = data.classes if head in ("causal", "masked") else data.vocabulary
        if tokens is not None and data.pad_token is None and context.run.data.tokens and self.pretrained and self.has_tokenizer:
            raise UserError(
                f"{context.run.named('data')} has tokens of its own, and the weights of model.name={self.name} know those of "
                "their tokenizer: set data=jsonl or data=text with data.tokenizer=auto, or model.pretrained=false"
            )
        if tokens is not None and data.pad_token is None and not self.pretrained and key not in self.config:
            config.vocab_size = tokens
        if tokens is not None and config.vocab_size < tokens:
            raise UserError(
                f"{context.run.named('data')} has {tokens:,} tokens, and model.name={self.name} has a vocabulary of "
                f"{config.vocab_size:,}: set data.tokenizer to the model's own, or model.pretrained=false"
            )
        for name in ("pad_token_id", "bos_token_id", "eos_token_id"):  # new models have no special tokens of a tokenizer
            if (number := getattr(config, name, None)) is not None and not self.pretrained and number >= config.vocab_size:
                setattr(config, name, None)
        if head in ("token", "masked") or (head == "sequence" and data.vocabulary is not None):
            config.pad_token_id = PADDING if data.pad_token is None else data.pad_token
        most = getattr(config, "max_position_embeddings", None)
        if most is not None and x.dim() == 2 and x.shape[1] > most:
            raise UserError(
                f"model.name={self.name} takes at most {most} tokens, and a sample of {context.run.named('data')} has up to "
                f"{x.shape[1]}: set data.length={most}"
                + (f", or model.config.max_position_embeddings={x.shape[1]}" if not self.pretrained else "")
            )

    def _loaded(self, cls: Any, config: Any, attention: str | None) -> Any:
        """The model with the weights of its folder or name. Raises UserError if these are another model's."""
        model, found = cls.from_pretrained(
            self.place(), config=config, attn_implementation=attention, dtype=torch.float32, use_safetensors=True,
            ignore_mismatched_sizes=True, output_loading_info=True, trust_remote_code=False,
        )  # fmt: skip
        body = f"{model.base_model_prefix}."
        mismatched = {entry[0] for entry in found["mismatched_keys"]}
        wrong = {
            "not in the file": [n for n in found["missing_keys"] if n.startswith(body) and "pooler" not in n],
            "of another shape in the file": [name for name in mismatched if name.startswith(body)],
            "not in the model": [n for n in found["unexpected_keys"] if n.startswith(body) and "pooler" not in n],
        }
        if problems := [
            f"{len(names)} tensors are {what} ({', '.join(sorted(names)[:5])})" for what, names in wrong.items() if names
        ]:
            raise UserError(
                f"model.name={self.name}: {'; '.join(problems)}: leave model.config out, or set model.pretrained=false"
            )
        if anew := sorted({*found["missing_keys"], *mismatched}):
            logger.info("model.name=%s: %s start anew", self.name, ", ".join(anew))
        return model


def _with_mask(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Give a text model its mask: every position except padding; the first one always, for empty texts."""
    if len(args) == 1 and "attention_mask" not in kwargs:
        real = args[0] != model.config.pad_token_id
        kwargs = {**kwargs, "attention_mask": torch.cat([torch.ones_like(real[:, :1]), real[:, 1:]], 1)}
    return args, kwargs


def _logits(model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tree) -> Any:
    """The logits in an output of transformers, or the whole output if requested, as by its own `generate`."""
    return output if kwargs.get("return_dict") else output.logits


def _read(file: Path, reader: Callable[[Path], Any] = files.read_json) -> Any:
    """Read a file of an untrusted model folder. Raises UserError with its problem."""
    try:
        return reader(file.resolve())
    except (OSError, ValueError) as error:
        raise UserError(f"{file} cannot be read: {getattr(error, 'strerror', None) or error}") from None


def _config_of(content: Any, where: str, given: Mapping[str, Any]) -> Any:
    """The config of a file's content, with given values replacing its own. Raises UserError."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES

    kind = str(content.get("model_type")) if isinstance(content, dict) else ""
    if kind not in CONFIG_MAPPING_NAMES:
        raise UserError(f"{where}: its config.json names no architecture of transformers (model_type is {kind!r})")
    if not str(named := content.get("transformers_weights") or ".safetensors").endswith(
        (".safetensors", ".safetensors.index.json")
    ):
        raise UserError(f"{where}: its config.json names the weights {named!r}, and nothing but *.safetensors is read")
    layers = {key: n for key, n in content.items() if "layer" in key and isinstance(n, int) and n > MOST_LAYERS}
    if layers:
        raise UserError(f"{where}: its config.json has {layers}, and at most {MOST_LAYERS:,} layers are built")
    cls = CONFIG_MAPPING[kind]
    with _errors_of(where):
        known = [key for key in (*cls().to_dict(), *cls.attribute_map, "num_labels") if not key.startswith("_")]
    if unknown := [key for key in given if key not in known]:
        raise UserError(f"model.config.{unknown[0]} is no value of {cls.__name__}: {did_you_mean(unknown[0], known)}")
    replaced = {"model_type", "auto_map", *(cls.attribute_map.get(key, key) for key in given)}
    own = {key: value for key, value in content.items() if key not in replaced and not key.startswith("_")}
    if "num_labels" in given:
        own = {key: value for key, value in own.items() if key not in ("id2label", "label2id")}
    with _errors_of("model.config" if given else where):  # the class checks its arguments' types
        return cls.from_dict({**own, **given})


@contextmanager
def _errors_of(setting: str) -> Iterator[None]:
    """Turn transformers' own errors into UserError."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # errors of its models' classes and of huggingface_hub
        lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
        raise UserError(f"{setting}: transformers refuses this: {' '.join(lines[:2])}") from None


def _log_quietly() -> None:
    """Silence transformers' messages about new heads and its progress bars."""
    logging.getLogger("torch.utils._pytree").setLevel(logging.ERROR)  # torch 2.15's warning about torchao's enums
    from transformers.utils import logging as theirs

    theirs.set_verbosity_error()
    theirs.disable_progress_bar()
