"""The initial weights of a model: model.weights.

All names and shapes of a file must fit the model. Only the head is adapted, if the data has another number of classes, and with
timm the positional embeddings and the first convolution.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import safetensors.torch
import torch

from drivetrain.core.errors import UserError, refuse
from drivetrain.core.options.allowed import check_patterns, matches
from drivetrain.core.options.option import needs_extra
from drivetrain.core.step import low_rank
from drivetrain.core.step.architecture import Architecture, tied_names
from drivetrain.saving import checkpoint_io, manifest

Weights = dict[str, torch.Tensor]

WRAPPERS = ("state_dict", "model_state_dict", "model")  # keys of the weights in other programs' files
PREFIXES = ("module.", "model.")  # prefixes of all names: DistributedDataParallel's, and a LightningModule's
INFIXES = ("_orig_mod.", "_checkpoint_wrapped_module.")  # parts of names: torch.compile's, and activation checkpointing's
DEPTH = 8  # nesting of such keys
NAMED = 10  # names in a message


def load_into(model: torch.nn.Module, path: Path, skip: Sequence[str], shape: tuple[int, ...], classes: int) -> Iterator[str]:
    """Load the weights of a file or run into a new model, for inputs of `shape` and `classes` outputs. Yields lines to log.

    Names that match `skip` keep the model's own values. Raises UserError if the weights do not fit.
    """
    source, weights = read(path)
    weights = low_rank.merged(weights)
    yield f"weights of {source}: {len(weights)} tensors"
    own = model.state_dict()
    weights = _adapted_by_timm(model, _plain_names(weights, own), own)
    check_patterns({*weights, *own}, {"model.weights_skip": skip}, "tensor of the file or")
    kept = {name for name in (*weights, *own) if any(matches(name, pattern) for pattern in skip)}
    weights = {name: tensor for name, tensor in weights.items() if name not in kept}
    if kept:
        yield f"model.weights_skip leaves out {_listed(kept)}"
    yield from _adapt_first_convolution(model, weights, own, shape)
    remade = _drop_head(model, weights, own, classes)
    if remade:
        classes_of_file = " or ".join(map(str, sorted({*remade.values()})))
        yield f"the head ({_listed(remade)}) starts anew: {classes_of_file} classes in the file, {classes} in the data"
    unbiased = _add_zero_biases(model, weights, own)
    if unbiased:
        yield f"no bias in the file for {_listed(unbiased)}: these biases start at 0, which is the same function"
    if problem := _problem(weights, own, _may_be_missing(model, weights) | kept | remade.keys()):
        raise UserError(f"model.weights={path} does not fit the model: {problem}")
    model.load_state_dict(weights, strict=False)


# --- reading ---


def read(path: Path) -> tuple[Path, Weights]:
    """Read a safetensors or weights-only torch file, a checkpoint, or a run: its best checkpoint, else its newest valid one.

    Returns the weights' place, and the weights on the CPU. Raises UserError.
    """
    if path.is_dir():
        return _read_folder(path)
    if not path.is_file():
        raise UserError(f"model.weights={path}: there is no such file or folder")
    try:
        if path.suffix == ".safetensors":
            return path, safetensors.torch.load_file(path)
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch, pickle and safetensors may raise anything for other bytes
        line = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise UserError(
            f"model.weights={path} is not a file of weights alone ({line}): write one by torch.save(model.state_dict(), …) or "
            "safetensors.torch.save_file(model.state_dict(), …)"
        ) from None
    return path, _tensors_of(path, content)


def _read_folder(folder: Path) -> tuple[Path, Weights]:
    if (folder / "checkpoints").is_dir():
        folder = manifest.best_or_newest(folder)
    elif (folder / "manifest.json").is_file():
        if (wrong := manifest.verify(folder)) is not None:
            raise UserError(f"model.weights={folder}: the checkpoint {wrong}")
    elif not (folder / "model.safetensors").is_file():
        raise UserError(
            f"model.weights={folder} is no run's directory, and no checkpoint: name a file of weights, or a run such as "
            "outputs/<date>/<time>-<id>"
        )
    if (folder / "model.safetensors").is_file():
        return read(folder / "model.safetensors")
    return folder, checkpoint_io.load(folder)[0]  # shards, merged


def _tensors_of(path: Path, content: object) -> Weights:
    """The tensors of a torch file, perhaps under a key next to an optimizer's state and counters."""
    for _ in range(DEPTH):
        if not isinstance(content, Mapping):
            break
        inner = next((content[key] for key in WRAPPERS if isinstance(content.get(key), Mapping)), None)
        if inner is None:
            break
        content = inner
    else:  # a file's mapping can contain itself
        raise UserError(f"model.weights={path} holds itself, or {DEPTH} keys in one another: save model.state_dict() alone")
    found = content if isinstance(content, Mapping) else {}
    weights = {str(name): value for name, value in found.items() if isinstance(value, torch.Tensor)}
    if not weights:
        what = f"its keys are {_listed(map(str, found))}" if found else f"it holds a {type(content).__name__}"
        raise UserError(f"model.weights={path} holds no tensors by name ({what}): save model.state_dict() itself")
    return weights


def _plain_names(weights: Weights, own: Mapping[str, object]) -> Weights:
    """Remove wrappers' additions to the names."""
    for infix in INFIXES:
        if not any(infix in name for name in own):
            weights = {name.replace(infix, ""): tensor for name, tensor in weights.items()}
    for prefix in PREFIXES:
        if all(name.startswith(prefix) for name in weights) and not all(name.startswith(prefix) for name in own):
            weights = {name.removeprefix(prefix): tensor for name, tensor in weights.items()}
    return weights


# --- adapting ---


def _adapted_by_timm(model: torch.nn.Module, weights: Weights, own: Mapping[str, torch.Tensor]) -> Weights:
    """For a model of timm: the weights by its own filter, which renames old layouts and resamples positional embeddings."""
    convert = getattr(sys.modules[type(model).__module__], "checkpoint_filter_fn", None)
    fits = weights.keys() == own.keys() and all(tensor.shape == own[name].shape for name, tensor in weights.items())
    if convert is None or fits or not hasattr(model, "pretrained_cfg"):
        return weights
    try:
        return dict(convert(dict(weights), model))
    except Exception:  # a filter expects its model's layers; missing ones are reported below, with all other problems
        return weights


def _adapt_first_convolution(
    model: torch.nn.Module, weights: Weights, own: Mapping[str, torch.Tensor], shape: tuple[int, ...]
) -> Iterator[str]:
    """Give the first convolution the data's number of channels, if only that differs. Changes `weights`, yields log lines."""
    for name in (f"{module}.weight".lstrip(".") for module in _first_convolutions(model)):
        given, wanted = weights.get(name), own.get(name)
        if given is None or wanted is None or given.ndim != 4 or given.shape == wanted.shape or wanted.shape[1] != shape[0]:
            continue
        if (given.shape[0], *given.shape[2:]) != (wanted.shape[0], *wanted.shape[2:]):
            continue
        refuse(needs_extra("timm", "timm", f"a file with {given.shape[1]} input channels for data with {shape[0]}"))
        from timm.models import adapt_input_conv

        weights[name] = adapt_input_conv(shape[0], given, base_chans=given.shape[1])
        yield f"{name}: {given.shape[1]} input channels in the file, {shape[0]} in the data: adapted as timm does"


def _first_convolutions(model: torch.nn.Module) -> Sequence[str]:
    config = getattr(model, "pretrained_cfg", None)
    if isinstance(config, Mapping) and config.get("first_conv"):
        return _as_names(config["first_conv"])
    return [name for name, module in model.named_modules() if isinstance(module, torch.nn.Conv2d)][:1]


def _drop_head(model: torch.nn.Module, weights: Weights, own: Mapping[str, torch.Tensor], classes: int) -> dict[str, int]:
    """Remove head tensors that differ only in the number of classes. Returns their names, and the file's number."""
    names, outputs = Architecture.of(model).heads, getattr(model, "num_classes", classes)
    remade = {
        name: len(weights[name])
        for name, wanted in own.items()
        if name in weights
        and any(name.startswith(f"{head}.") for head in names)
        and weights[name].ndim == wanted.ndim > 0
        and len(weights[name]) != len(wanted) == outputs
        and weights[name].shape[1:] == wanted.shape[1:]
    }
    for name in remade:
        del weights[name]
    return remade


def _add_zero_biases(model: torch.nn.Module, weights: Weights, own: Mapping[str, torch.Tensor]) -> list[str]:
    """Add zeros for biases that the file's layers lack, as after surgery=[no_bias_before_norm]."""
    added = []
    for name, module in model.named_modules():
        weight, bias = f"{name}.weight".lstrip("."), f"{name}.bias".lstrip(".")
        layer = isinstance(module, torch.nn.Linear | torch.nn.modules.conv._ConvNd)
        if layer and weight in weights and bias in own and bias not in weights:
            weights[bias] = torch.zeros_like(own[bias])
            added.append(bias)
    return added


# --- problems ---


def _may_be_missing(model: torch.nn.Module, weights: Weights) -> set[str]:
    """Names that may be missing in a file: counts of batches (before torch 1.0), and other names of a weight that is there."""
    names: dict[str, set[str]] = {}
    for name, first in tied_names(model).items():
        names.setdefault(first, {first}).add(name)
    tied = [same for same in names.values() if same & weights.keys()]
    return {name for name in model.state_dict() if name.endswith("num_batches_tracked")}.union(*tied)


def _problem(weights: Weights, own: Mapping[str, torch.Tensor], may_be_missing: set[str]) -> str:
    """The tensors that do not fit, with the first names of each kind, and the remedy; "" if all fit."""
    if not weights.keys() & own.keys():
        return (
            f"no name is in both. The file has {_listed(weights)}; the model has {_listed(own)}: set the model options that the "
            "weights were trained with"
        )
    differences = {name: _difference(weights[name], tensor) for name, tensor in own.items() if name in weights}
    other = [name for name, difference in differences.items() if difference]
    missing = [name for name in own if name not in weights and name not in may_be_missing]
    unknown = [name for name in weights if name not in own]
    shapes = [f"{name}: {differences[name]}" for name in other]
    found = [
        f"{_count(other)} of another shape than the model wants ({_listed(shapes)})" * bool(other),
        f"{_count(missing)} not in the file ({_listed(missing)})" * bool(missing),
        f"{_count(unknown)} not in the model ({_listed(unknown)})" * bool(unknown),
    ]
    return "; ".join(filter(None, found)) + _hint([*other, *missing, *unknown], own) if any(found) else ""


def _hint(wrong: Sequence[str], own: Collection[str]) -> str:
    parts = list(dict.fromkeys(f"{name.split('.')[0]}.*" if "." in name else name for name in wrong))
    rest = [name for name in own if not any(matches(name, part) for part in parts)]
    skip = f", or let them start anew: model.weights_skip=[{','.join(parts)}]" if rest and len(parts) <= NAMED else ""
    return f": set the model options that the weights were trained with{skip}"


def _difference(given: torch.Tensor, wanted: torch.Tensor) -> str:
    """The difference between the file's tensor and the model's."""
    if given.shape != wanted.shape:
        return f"{_shape(given)} for {_shape(wanted)}"
    if given.is_floating_point() != wanted.is_floating_point():
        return f"{given.dtype} for {wanted.dtype}".replace("torch.", "")
    return ""


def _shape(tensor: torch.Tensor) -> str:
    return "×".join(map(str, tensor.shape)) or "a number"


def _count(names: Collection[str]) -> str:
    return f"{len(names)} tensor{'s are' if len(names) > 1 else ' is'}"


def _listed(names: Iterable[str]) -> str:
    """The first names, and the number of further ones."""
    listed = list(names)
    return ", ".join(listed[:NAMED]) + (f" and {len(listed) - NAMED} more" if len(listed) > NAMED else "")


def _as_names(given: str | Sequence[str]) -> list[str]:
    return [given] if isinstance(given, str) else list(given)
