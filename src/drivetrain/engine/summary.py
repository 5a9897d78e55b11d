"""The line that describes a run before it trains, and advice where its data is too small for its batch."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path

from drivetrain.batch.base import Batch
from drivetrain.core.errors import UserError
from drivetrain.core.lazy import torch
from drivetrain.core.machine import files
from drivetrain.core.machine.process import __version__
from drivetrain.core.options.option import RunSpec
from drivetrain.core.step.source import Source
from drivetrain.core.step.target_kinds import TargetKind
from drivetrain.core.step.trees import Tree, map_tensors
from drivetrain.core.typed import JsonMapping, JsonObject
from drivetrain.data.base import Normalize, Splits, Units
from drivetrain.data.decoding import Range
from drivetrain.engine.context import RunContext
from drivetrain.engine.trainer import Trainer
from drivetrain.model.base import Model
from drivetrain.run import environment

SHOWN = 5  # classes that are named
FEW_UPDATES = 8  # in an epoch: with fewer a model hardly learns
WANTED_UPDATES = 10
SMALLEST = 8
MUCH = 0.15  # of an epoch's samples
WORDS: dict[TargetKind, tuple[str, str]] = {  # what the model's outputs are, one and several
    "class": ("class", "classes"), "mask": ("class", "classes"), "labels": ("label", "labels"), "values": ("value", "values"),
    "tokens": ("token", "tokens"), "words": ("class", "classes"), "pair": ("class", "classes"), "sequence": ("class", "classes"),
}  # fmt: skip


def line(context: RunContext, trainer: Trainer) -> str:
    """Return samples per set and where they come from, classes, parameters, device and updates, in one line."""
    parts = [*_samples(context), _inputs(context), _outputs(context), _parameters(trainer), _device(trainer), _updates(trainer)]
    return "; ".join(filter(None, parts))


def _inputs(context: RunContext) -> str:
    lengths = context.train_data.source.lengths
    if context.data.inputs or lengths is None or not len(lengths):
        return str(context.data.inputs)
    return f"inputs: sequences of {int(lengths.min()):,} to {int(lengths.max()):,}{' tokens' * bool(context.run.data.tokens)}"


def _samples(context: RunContext) -> Iterator[str]:
    origins, data = context.data.origins, {"training": context.train_data}
    for split, sets in context.evaluated.items():
        data |= {f"{split} {name}".rstrip(): pipeline for name, pipeline in sets.items()}
    parts = []
    for name, pipeline in data.items():
        origin = origins.get("train" if name == "training" else name, "")
        parts.append(f"{len(pipeline.source):,} {name}" + (f" ({origin})" if origin else ""))
    yield f"samples: {', '.join(parts)}"


def _outputs(context: RunContext) -> str:
    data, kind = context.data, context.run.target_kind
    one, several = WORDS.get(kind, ("output", "outputs")) if kind is not None else ("output", "outputs")
    names = list(data.names or ())
    named = f": {', '.join(names[:SHOWN])}{', …' if len(names) > SHOWN else ''}" if len(names) == data.classes else ""
    vocabulary = "a vocabulary of " * (kind == "tokens")
    return f"{vocabulary}{data.classes:,} {one if data.classes == 1 else several}{named}"


def _parameters(trainer: Trainer) -> str:
    sizes = [(p.numel(), p.requires_grad) for p in trainer.model.parameters()]
    every, trained = sum(n for n, _ in sizes), sum(n for n, trains in sizes if trains)
    return f"{every:,} parameters" + (f", {trained:,} trained" if trained != every else "")


def _device(trainer: Trainer) -> str:
    ranks = trainer.parallel.world.size
    device = trainer.device.type
    if device == "cpu":
        threads = torch.get_num_threads()
        device += f" ({threads} thread{'s' * (threads != 1)})"
    else:
        device += f" ({environment.device_name(trainer.device)})"
    return f"{ranks} × {device}" if ranks > 1 else device


def _updates(trainer: Trainer) -> str:
    an_epoch = _an_epoch(trainer)
    text = f"{an_epoch:,} update{'s' * (an_epoch != 1)} an epoch, {trainer.max_updates:,} in all"
    done = trainer.progress.updates
    return f"{text}, {done:,} of them done" if done else text


def _an_epoch(trainer: Trainer) -> int:
    return trainer.batch.updates(trainer.batch.order.length, trainer.progress.epoch, trainer.drop_last)


def advice(trainer: Trainer) -> Iterator[str]:
    """Yield advice where an epoch has few updates or leaves many samples out."""
    samples, an_epoch = trainer.batch.order.length, _an_epoch(trainer)
    if an_epoch >= trainer.max_updates or trainer.batch.tokens is not None:  # less than an epoch, on purpose
        return
    first = trainer.batch.updates(samples, 0, trainer.drop_last)
    left_out = 1 - trainer.batch.consumed(samples, 0, first, trainer.drop_last) / samples
    better = smaller_batch(samples, trainer.batch.accumulation_steps * trainer.parallel.data_world.size)
    if an_epoch < FEW_UPDATES and trainer.batch.found is None and better < trainer.batch.global_batch:
        few = f"an epoch of {samples:,} samples has {an_epoch} update{'s' * (an_epoch != 1)} of {trainer.batch.global_batch}"
        dropped = f", and leaves out {100 * left_out:.0f} % of them (data.drop_last)" if left_out > MUCH else ""
        yield f"{few}{dropped}: set batch.global_batch={better} for more updates"
    elif left_out > MUCH:
        yield (
            f"an epoch leaves out {100 * left_out:.0f} % of its {samples:,} samples, which fill no batch of "
            f"{trainer.batch.global_batch}: set data.drop_last=false, or a smaller batch.global_batch"
        )


def too_few_samples(batch: Batch, epochs: int, samples: int) -> str:
    """The reason why one of the epochs has no update, and the settings to change."""
    if batch.tokens is not None:
        return f"batch.tokens={batch.tokens} is more than the training samples have: set it to less, or data.drop_last=false"
    size = next(batch.size(each.start) for each in batch.stretches(epochs) if batch.size(each.start) > samples)
    set_smaller = f"set batch.global_batch={min(samples, smaller_batch(samples))}"
    given = f"batch.global_batch={size} is"
    if batch.grow_every and batch.global_batch <= samples:
        given = f"batch.global_batch={batch.global_batch} grows to {size} by batch.grow_every={batch.grow_every}, which is"
        grown = batch.global_batch * batch.grow_by
        set_smaller = f"set batch.grow_until={samples}" if grown <= samples else "leave batch.grow_every out"
    return (
        f"{given} more than the {samples} training samples, and data.drop_last drops the short batch: {set_smaller}, or "
        "data.drop_last=false"
    )


def single_sample(context: RunContext, batch: Batch, norm: str) -> Iterator[str]:
    """The reason why the BatchNorm `norm` would get one sample at a time in this run, and the settings to change."""
    world, samples = context.parallel.data_world, context.batch.order.length
    size, drop_last = batch.size(0), context.run.data.drop_last
    last = samples % size if context.horizon.updates >= batch.updates(samples, 0, drop_last) and not drop_last else 0
    split = f"over {world.size} ranks and {batch.accumulation_steps} micro-batches"
    needs = f"the BatchNorm {norm} of {context.run.named('model')} needs two samples at once to have a deviation"
    if batch.buckets_lengths:
        return  # its batches are of several sizes
    if batch.smallest(size, world) == 1:
        above = 2 * world.size * batch.accumulation_steps
        yield f"{needs}, and batch.global_batch={size} gives it one {split}: set batch.global_batch={above} or more"
    elif last and batch.smallest(last, world) == 1:
        yield (
            f"{needs}, and the last batch of an epoch has {last} of the {samples} samples, one at a time {split}: set "
            "data.drop_last=true, or another batch.global_batch"
        )


def smaller_batch(samples: int, unit: int = 1) -> int:
    """Return the largest batch that gives enough updates with so many samples: a power of two and a multiple of `unit`.

    It is not below SMALLEST, for the statistics of BatchNorm.
    """
    size = SMALLEST
    while 2 * size * WANTED_UPDATES <= samples:
        size *= 2
    return -(-size // unit) * unit


def describe(run: RunSpec, data: Splits) -> JsonObject:
    """Return the model's option, the shape, classes and normalisation of its inputs, and its outputs' units, as plain values.

    Values from the environment are left out: they may be secrets.
    """
    left_out = {f.name for f in fields(Model)} | {"pretrained"}  # such as the weights that training started from
    model = {
        key: value
        for key, value in vars(run.model).items()
        if not (key.startswith("_") or key in left_out or run.from_environment(f"model.{key}"))
    }
    normalize, units = data.normalize, data.units
    return {
        "drivetrain": __version__,
        "model": {"option": run.named("model").partition("=")[2], **model},
        "surgery": run.names("surgery"),
        "targets": run.data.targets,
        "shape": list(data.shape) if data.example is None else None,
        "inputs": None if data.example is None else _write_tree(data.example),
        **({} if data.call is None else {"call": _write_tree(data.call, 0)}),
        "images": data.images,
        "decodes_images": run.data.decodes_images(),  # the packed data that holds this fact may be gone
        "outputs": data.classes,
        "classes": None if data.names is None else list(data.names),
        "dtype": None if data.dtype is None else _name(data.dtype),
        "vocabulary": data.vocabulary,
        "normalize": normalize and {"mean": normalize.mean.flatten().tolist(), "std": normalize.std.flatten().tolist()},
        "files": {name: _sha256(text) for name, text in data.files.items()},
        "pixels": data.pixels and {"low": data.pixels.low, "high": data.pixels.high, "said": data.pixels.said},
        "units": units and {"mean": units.mean.tolist(), "std": units.std.tolist()},
    }


class NoSamples(Source):
    """A source without samples."""

    def __len__(self) -> int:
        return 0

    def fetch(self, indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        raise IndexError("there are no samples")


def recall(about: JsonMapping, run_dir: Path) -> Splits:
    """Return the data that `describe` described, without its samples; its files are the run's."""
    normalize, example = about["normalize"], about["inputs"] and _read_tree(about["inputs"], 2)
    units = about.get("units")
    return Splits(
        train=NoSamples(),
        test=NoSamples(),
        shape=tuple(about["shape"]) if example is None else map_tensors(lambda t: tuple(t.shape[1:]), example),
        classes=about["outputs"],
        normalize=normalize and Normalize(normalize["mean"], normalize["std"]),
        names=about["classes"],
        dtype=about["dtype"] and getattr(torch, about["dtype"]),
        vocabulary=about["vocabulary"],
        units=units and Units(torch.tensor(units["mean"]), torch.tensor(units["std"])),
        pixels=about.get("pixels") and Range(**about["pixels"]),
        files=KeptFiles(run_dir, about.get("files") or {}),
        example=example,
        call=about.get("call") and _read_tree(about["call"]),
        images=about["images"],
    )


class KeptFiles(dict[str, str]):
    """The texts of the files that a run keeps for its data (`Splits.files`), each read when it is first needed."""

    def __init__(self, run_dir: Path, sha256: Mapping[str, str]) -> None:
        super().__init__()
        self._run_dir, self._sha256 = run_dir, sha256

    def __contains__(self, name: object) -> bool:
        return name in self._sha256

    def __missing__(self, name: str) -> str:
        path = self._run_dir / name
        try:
            text = files.read_text(path)
        except (OSError, ValueError) as error:  # ValueError: no UTF-8
            why = getattr(error, "strerror", None) or error
            raise UserError(f"{path} cannot be read ({why}): the run keeps there how its inputs are encoded") from None
        if _sha256(text) != self._sha256.get(name):
            raise UserError(f"{path} is not what the run wrote (its SHA-256 differs): take it from a copy of the run")
        self[name] = text
        return text


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _write_tree(x: Tree, leave_out: int = 1) -> JsonObject:
    """Return the structure of inputs, with the shape (without its first dimensions) and the dtype of each tensor."""
    if isinstance(x, dict):
        return {"keys": {key: _write_tree(value, leave_out) for key, value in x.items()}}
    if isinstance(x, tuple | list):
        return {"items": [_write_tree(value, leave_out) for value in x]}
    return {"shape": list(x.shape[leave_out:]), "dtype": _name(x.dtype)}


def _read_tree(written: JsonMapping, *first: int) -> Tree:
    """Return zeros of the structure that `_write_tree` wrote, with these first dimensions."""
    if "keys" in written:
        return {key: _read_tree(value, *first) for key, value in written["keys"].items()}
    if "items" in written:
        return tuple(_read_tree(value, *first) for value in written["items"])
    return torch.zeros(*first, *written["shape"], dtype=getattr(torch, written["dtype"]))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
