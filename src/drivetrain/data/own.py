"""The user's own torch Dataset, and how its samples become a batch: what they draw, inputs and targets, stacked or padded."""

from __future__ import annotations

import inspect
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import partial
from typing import Any, Generic, TypeVar

from drivetrain.core.errors import DataError, OperatorGives, UserError
from drivetrain.core.lazy import torch
from drivetrain.core.options.allowed import Arguments, ColumnName, Name
from drivetrain.core.options.option import Count, RunSpec
from drivetrain.core.order import checked, index_of
from drivetrain.core.step import rng, streams, trees
from drivetrain.core.step.streams import RandomStream
from drivetrain.core.step.target_kinds import TargetKind
from drivetrain.core.step.trees import Tree, map_tensors, named_leaves
from drivetrain.core.user import code as user_code
from drivetrain.core.user import state as owned
from drivetrain.core.user.call import UserCall
from drivetrain.data.base import IGNORE_INDEX, SPLITS, Data, Fraction, Source, Splits, measure_on_some

logger = logging.getLogger(__name__)

STREAM = 10  # of the keys of samples
B = TypeVar("B")  # a batch
TOGETHER = 11  # of the key of the function that makes a batch, beside that of its first sample


class Reader(Generic[B]):
    """Reads samples of a map-style Dataset with draws by key. `together` makes a batch of a list of them.

    Streams belong to a process: a copy in a worker finds its own.
    """

    def __init__(self, dataset: Any, together: Callable[..., B]) -> None:
        self.dataset, self.together = dataset, together
        self.used: list[int] = []  # the positions of the streams that were seen to move
        self.stateful = bool(owned.find({"data": dataset, "data.collate": together}))  # each read counts: none is repeated
        self._streams: list[RandomStream] = []
        self.watched: list[RandomStream] = []  # those that only the Dataset draws from, where threads read it
        self._suspected = False  # whether one of them has moved

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.dataset, self.together)

    def keeps(self) -> dict[str, object]:
        """Return what the user brought by name."""
        return {"data": self.dataset, "data.collate": self.together.collate if isinstance(self.together, OwnCollate) else None}

    def drawn(self) -> list[str]:
        """Return what the samples were seen to draw from, such as numpy."""
        return sorted({self._streams[number].name for number in self.used})

    def _find(self, index: int) -> list[RandomStream]:
        """Return the streams that the Dataset may draw from, those included that it makes at its first sample."""
        if not self._streams:
            if not self.stateful:
                with streams.apart():
                    self._samples([index])
            self._streams = [*streams.of_process(), *streams.kept_by(self.dataset, self.together)]
            self.used = list(range(len(self._streams))) if self.stateful else []
        return self._streams

    def read(self, indices: Sequence[int], keys: Sequence[int], *options: object) -> B:
        """Return a batch whose samples draw by their keys; the streams are as they were before. Raises DataError."""
        found = self._find(indices[0])
        saved = [stream.save() for stream in found]
        try:
            batch = self._keyed(indices, keys, options) if self.used else self._unkeyed(indices, options)
            while moved := [n for n, stream in enumerate(found) if n not in self.used and stream.moved(saved[n])]:
                self.used += moved
                batch = self._keyed(indices, keys, options)
            return batch
        finally:
            for n, stream in enumerate(found):
                if n in self.used or stream.moved(saved[n]):
                    stream.restore(saved[n])

    def look(self, indices: Sequence[int]) -> B:
        """Return a batch that is only looked at: its samples draw the same in every run. Raises DataError."""
        return self.read(indices, keys(0, 0, torch.tensor(indices)).tolist())

    def share(self, watch_torch: bool) -> None:
        """Prepare for reads by threads, which share the streams: of what draws, they only see that it does."""
        self.watched = [s for n, s in enumerate(self._find(0)) if n or watch_torch]

    def suspected(self) -> bool:
        """Return whether samples that threads have read since the last question may have drawn."""
        suspected, self._suspected = self._suspected, False
        return suspected

    def plain(self, indices: Sequence[int], *options: object) -> B:
        """Return a batch whose samples draw as they come. Raises DataError."""
        saved = [stream.save() for stream in self.watched]
        batch = self._unkeyed(indices, options)
        if any(stream.moved(state) for stream, state in zip(self.watched, saved, strict=True)):
            self._suspected = True
        return batch

    def _unkeyed(self, indices: Sequence[int], options: Sequence[object]) -> B:
        return self._together(indices, self._samples(indices), options)

    def _keyed(self, indices: Sequence[int], keys: Sequence[int], options: Sequence[object]) -> B:
        samples = []
        for index, key in zip(indices, keys, strict=True):
            self._seed(key)
            samples += self._samples([index])
        self._seed(rng.mix(keys[0], TOGETHER))
        return self._together(indices, samples, options)

    def _together(self, indices: Sequence[int], samples: list[object], options: Sequence[object]) -> B:
        try:
            return self.together(samples, *options)
        except DataError as error:
            raise DataError(f"samples {list(indices[:4])} … do not make a batch of (x, y): {error}") from None

    def _seed(self, key: int) -> None:
        for number in self.used:
            self._streams[number].seed(key ^ streams.salt(number))

    def _samples(self, indices: Sequence[int]) -> list[object]:
        """Return samples, at once where the Dataset can. A StopIteration would end the loop that reads, and the training."""
        many = getattr(self.dataset, "__getitems__", None)
        try:
            return list(many(indices)) if many is not None else [self.dataset[i] for i in indices]
        except StopIteration:
            raise DataError(
                f"{type(self.dataset).__name__} raised StopIteration for a sample of {indices[0]} … {indices[-1]}, and says that "
                f"it has {len(self.dataset)}: its __getitem__ must return a sample for each index"
            ) from None


def keys(seed: int, epoch: int, indices: torch.Tensor) -> torch.Tensor:
    """Return the key of each sample (n,) in an epoch."""
    return rng.keys(seed, epoch, indices, STREAM)


TARGETS = ("label", "labels", "target", "targets", "y")  # the keys that are a dict sample's target, where none is named
TargetKey = str | Sequence[str] | None


def split_sample(sample: object, target_key: TargetKey, keep_dict: bool = False) -> tuple[Any, Any]:
    """Return the inputs and the target of a sample, or of a batch of the user's own. Raises UserError.

    A dict's target is what `target_key` names, a tuple's is its last item. A dict with one input gives that input, unless
    `keep_dict` is set.
    """
    if is_dataclass(sample):
        sample = {field.name: getattr(sample, field.name) for field in fields(sample)}
    if isinstance(sample, Mapping):
        keys = _target_keys(sample, target_key)
        x = {key: value for key, value in sample.items() if key not in keys}
        if not x:
            raise UserError(f"data=own: a sample has only its target, {', '.join(keys)}: give it inputs too")
        y = sample[keys[0]] if target_key is None or isinstance(target_key, str) else {key: sample[key] for key in keys}
        return (next(iter(x.values())) if len(x) == 1 and not keep_dict else x), y
    if target_key is not None:
        raise UserError(f"data.target_key={target_key} names a key, and a sample is a {type(sample).__name__}: let it be a dict")
    if not isinstance(sample, tuple | list) or len(sample) < 2:
        raise UserError(
            f"data=own: a sample is a {type(sample).__name__}, which does not say what its target is: let it be (x, y), "
            "(x, x) where the loss takes none, or a dict"
        )
    *inputs, y = sample
    return (inputs[0] if len(inputs) == 1 else tuple(inputs)), y


def _target_keys(sample: Mapping[str, object], target_key: TargetKey) -> list[str]:
    """Return the keys of a sample that are its target. Raises UserError."""
    if target_key is None:
        found = [key for key in TARGETS if key in sample]
        if len(found) != 1:
            many = f"several that could be its target ({', '.join(found)})" if found else "none of " + ", ".join(TARGETS)
            raise UserError(f"data=own: a sample has the keys {', '.join(map(str, sample))}, {many}: set data.target_key")
        return found
    keys = [target_key] if isinstance(target_key, str) else list(target_key)
    if missing := [key for key in keys if key not in sample]:
        raise UserError(f"data.target_key={missing[0]}: a sample has only the keys {', '.join(map(str, sample))}")
    return keys


def _is_node(value: object) -> bool:
    """Return whether a value is a part of a sample's structure, not a tensor, an array or (nested) numbers."""
    if isinstance(value, Mapping) or is_dataclass(value):
        return True
    return isinstance(value, tuple | list) and any(getattr(item, "ndim", 0) > 0 or _is_node(item) for item in value)


def as_tensors(value: Any, name: str) -> Tree:
    """Return a sample as a tree of tensors and Nones; `name` is what messages call it. Raises DataError.

    Numbers with fractions, such as NumPy's float64, become torch's default type, as the model's weights have it.
    """
    if value is None and "." in name:  # a field that no sample has to fill
        return None
    if isinstance(value, Mapping):
        return {key: as_tensors(item, f"{name}.{key}") for key, item in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        of_fields = {field.name: getattr(value, field.name) for field in fields(value)}
        return replace(value, **{key: as_tensors(item, f"{name}.{key}") for key, item in of_fields.items()})
    if _is_node(value):
        return tuple(as_tensors(item, f"{name}.{number}") for number, item in enumerate(value))
    try:
        tensor = torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        if value is None:
            raise DataError(f"{name} is None: give the inputs again, (x, x), where the loss takes no target") from None
        raise DataError(
            f"{name} is a {type(value).__name__}, which is no tensor, array or number ({error}): leave it out, or turn it "
            "into numbers"
        ) from None
    return tensor.to(torch.get_default_dtype()) if tensor.is_floating_point() else tensor


def tensors_of(sample: object, target_key: TargetKey, keep_dict: bool = False) -> tuple[Tree, Tree]:
    """Return a sample's inputs and target as trees of tensors. Raises UserError."""
    x, y = split_sample(sample, target_key, keep_dict)
    return as_tensors(x, "x"), as_tensors(y, "y")


def named_parts(pair: tuple[Tree, Tree]) -> list[tuple[str, torch.Tensor]]:
    """Return the tensors of a sample's inputs and target with their names, such as "x.ids" and "y"."""
    found = [(part, name, t) for part, tree in zip("xy", pair, strict=True) for name, t in named_leaves(tree)]
    return [(f"{part}.{name}" if name else part, t) for part, name, t in found]


@dataclass
class Stack:
    """Makes a batch of samples of one shape."""

    target_key: TargetKey = None

    def __call__(self, samples: Sequence[object], pad_to: int = 1) -> tuple[Tree, Tree]:
        """Return inputs and targets. Raises DataError."""
        pairs = [tensors_of(sample, self.target_key) for sample in samples]
        return stacked([x for x, _ in pairs], "x", stack), stacked([y for _, y in pairs], "y", stack)


def stacked(values: list[Tree], name: str, together: Callable[[list[torch.Tensor], str], torch.Tensor]) -> Tree:
    """Return samples of one structure as a batch, each leaf put together by `together`. Raises DataError."""
    first = values[0]
    if all(value is None for value in values):
        return None
    if isinstance(first, torch.Tensor) and all(isinstance(value, torch.Tensor) for value in values):
        return together(values, name)
    if isinstance(first, dict) and all(isinstance(value, dict) and value.keys() == first.keys() for value in values):
        return {key: stacked([value[key] for value in values], f"{name}.{key}", together) for key in first}
    if isinstance(first, tuple) and all(isinstance(value, tuple) and len(value) == len(first) for value in values):
        return tuple(stacked(list(items), f"{name}.{n}", together) for n, items in enumerate(zip(*values, strict=True)))
    if is_dataclass(first) and not isinstance(first, type) and all(type(value) is type(first) for value in values):
        names = [field.name for field in fields(first)]
        rows = {key: [getattr(value, key) for value in values] for key in names}
        return replace(first, **{key: stacked(row, f"{name}.{key}", together) for key, row in rows.items()})
    raise DataError(f"{name} is not of the same structure in all of them: give each sample the same keys")


def stack(tensors: list[torch.Tensor], name: str) -> torch.Tensor:
    """Return tensors of one shape as a batch (n, …). Raises DataError."""
    if len(shapes := sorted({tuple(t.shape) for t in tensors})) > 1:
        hint = ": data.pad=true pads sequences" if all(s[1:] == shapes[0][1:] and s for s in shapes) else ""
        raise DataError(f"{name} has the shapes {list(shapes[0])} and {list(shapes[-1])}{hint}")
    return torch.stack(tensors)


MASK = "mask"  # the input that says which positions of a padded sequence are real
ITS_NAME = {"input_ids": "attention_mask"}  # where inputs have the names of transformers
LOOKED_AT = 16  # samples that show whether a set's samples differ in length


@dataclass
class Pad:
    """Makes a batch of samples of several lengths, padded on the right: inputs with 0, whole-number targets with IGNORE_INDEX.

    Inputs that are a dict get a `mask` (n, length), true where a position is real, unless they have one; `attention_mask`
    where the sequence is `input_ids`.
    """

    target_key: TargetKey
    sequence: str  # the part of a sample whose length is the sample's, such as "x.ids"
    along: frozenset[str]  # all parts that are as long as it
    longest: int = 0  # sample of the set

    def __call__(self, samples: Sequence[object], pad_to: int = 1) -> tuple[Tree, Tree]:
        """Return inputs and targets. Their length is a multiple of `pad_to`, or that of the set's longest sample."""
        pairs = [tensors_of(sample, self.target_key, keep_dict=True) for sample in samples]
        lengths = [len(dict(named_parts(pair))[self.sequence]) for pair in pairs]
        length = max(max(lengths), min(-(-max(lengths) // pad_to) * pad_to, self.longest))

        def padded(tensors: list[torch.Tensor], name: str) -> torch.Tensor:
            if name in self.along:
                return _padded(tensors, name, length)
            differ = all(t.ndim for t in tensors) and len({len(t) for t in tensors}) > 1
            return _padded(tensors, name, max(map(len, tensors))) if differ else stack(tensors, name)

        x, y = stacked([x for x, _ in pairs], "x", padded), stacked([y for _, y in pairs], "y", padded)
        mask = ITS_NAME.get(self.sequence.removeprefix("x."), MASK)
        if isinstance(x, dict) and mask not in x and self.sequence.startswith("x"):
            x[mask] = torch.arange(length) < torch.tensor(lengths).unsqueeze(1)
        return x, y


def _padded(tensors: list[torch.Tensor], name: str, length: int) -> torch.Tensor:
    """Return sequences as a batch (n, length, …). Raises DataError."""
    if len({t.shape[1:] for t in tensors}) > 1:
        stack(tensors, name)  # which refuses them
    counts = not (tensors[0].is_floating_point() or tensors[0].dtype == torch.bool)
    value = IGNORE_INDEX if counts and name.split(".")[0] == "y" else 0
    batch = tensors[0].new_full((len(tensors), length, *tensors[0].shape[1:]), value)
    for row, tensor in zip(batch, tensors, strict=True):
        row[: len(tensor)] = tensor
    return batch


class Lengths:
    """The lengths of the parts of a set's samples, by name. A sample is read once for them."""

    def __init__(self, dataset: Any, target_key: TargetKey) -> None:
        self.dataset, self.target_key, self._reader = dataset, target_key, Reader[list[Any]](dataset, list)
        self._read: dict[int, dict[str, int]] = {}

    def of(self, index: int) -> dict[str, int]:
        """Return the length of each part of a sample that has one."""
        if index not in self._read:
            parts = named_parts(tensors_of(self._reader.look([index])[0], self.target_key, keep_dict=True))
            self._read[index] = {name: len(t) for name, t in parts if t.ndim}
        return self._read[index]

    def differing(self, indices: Iterable[int]) -> list[str]:
        """Return the parts that differ in length between these samples, the inputs first."""
        seen = [self.of(i) for i in indices]
        return [name for name in seen[0] if len({sizes.get(name) for sizes in seen}) > 1]

    def given(self) -> torch.Tensor | None:
        """Return the lengths (n,) that the Dataset itself tells, by an attribute `lengths`."""
        lengths = getattr(self.dataset, "lengths", None)
        return None if lengths is None else torch.as_tensor(lengths, dtype=torch.int64)

    def all(self, name: str) -> torch.Tensor:
        """Return the lengths (n,) of one part of the samples, as the Dataset tells them, or else by reading all samples."""
        if (given := self.given()) is not None:
            return given
        began, left = time.perf_counter(), len(self.dataset) - len(self._read)
        lengths = torch.tensor([self.of(i)[name] for i in range(len(self.dataset))])
        if (seconds := time.perf_counter() - began) > 1:
            logger.info(
                "read %d samples for their lengths, in %.0f s: a Dataset with an attribute `lengths` saves that", left, seconds
            )
        return lengths


def padding_for(dataset: Any, pad: bool | str | None, target_key: TargetKey) -> tuple[Pad, torch.Tensor] | None:
    """Return how a set's samples are padded, and their lengths (n,); None if they are not padded. Raises UserError.

    `pad` is the setting data.pad: a name says which input is the sequence; None looks at the first samples.
    """
    if pad is False:
        return None
    lengths, count = Lengths(dataset, target_key), len(dataset)
    looked_at = range(min(LOOKED_AT, count))
    if pad is None and not lengths.differing(looked_at):
        return None
    given = lengths.given()
    shown = range(count) if given is None else sorted({*looked_at, int(given.argmin()), int(given.argmax())})
    differing, parts = lengths.differing(shown), lengths.of(0)
    names = [f"x.{pad}"] if isinstance(pad, str) else [*differing, *parts]
    if not names or names[0] not in parts:
        raise UserError(
            f"data.pad={str(pad).lower() if isinstance(pad, bool) else pad}, and the parts of a sample that have a length are "
            f"{', '.join(parts) or 'none'}: name one of its inputs"
        )
    sequence = names[0]
    if given is not None and (wrong := [i for i in shown if lengths.of(i)[sequence] != given[i]]):
        raise UserError(
            f"the Dataset's lengths say {int(given[wrong[0]])} for sample {wrong[0]}, whose {sequence} has a length of "
            f"{lengths.of(wrong[0])[sequence]}: mend its `lengths`, or name the sequence in data.pad"
        )
    along = {n for n in differing if all(lengths.of(i).get(n) == lengths.of(i)[sequence] for i in shown)} | {sequence}
    logger.info("samples differ in length: %s padded to the longest of each batch", " and ".join(sorted({*differing, *along})))
    measured = lengths.all(sequence)
    return Pad(target_key, sequence, frozenset(along), int(measured.max())), measured


IMAGES = ("image", "images", "pixel_values", "x")  # the keys of a dict sample that images are looked for under


@dataclass(kw_only=True, eq=False)
class OwnDataset(Data):
    """The user's own map-style Dataset `target`, of a package named in `trust`.

    It is built twice, with `kwargs` and the arguments in `train` or `test`; without these, with split= or train=. A sample
    `dataset[i]` is (x, y), a tuple whose last item is the target, or a dict whose target is `target_key`; x may be a tuple or a
    dict too. Samples are stacked, and padded where they differ in length (`pad`), or made a batch by the function `collate`.
    """

    machine_local_keys = ("target", "collate")
    may_differ_in_length = True
    tokens = None
    each_token_counts = False
    max_value = None

    target: str | None = None
    kwargs: Arguments | None = field(default_factory=dict)
    train: Arguments | None = None
    test: Arguments | None = None
    validation: Fraction | Name | Arguments | None = 0.1
    classes: Count | None = None
    targets: TargetKind | None = None
    target_key: ColumnName | list[ColumnName] | None = None
    collate: str | None = None
    pad: bool | ColumnName | None = None
    normalize: bool = True

    def validate(self, run: RunSpec) -> Iterator[str]:
        if not self.target:
            yield OperatorGives(
                f"{run.named('data')} needs data.target, the dotted name of your Dataset, such as my_pkg.Pictures"
            )
        for key, name in (("target", self.target), ("collate", self.collate)):
            if name:
                yield from user_code.trust_problems(f"data.{key}={name}", name, run.values["trust"])
        if self.collate and self.pad not in (None, False):
            yield f"data.pad={str(self.pad).lower()} and data.collate={self.collate} exclude each other: the function pads"
        if (self.train is None) != (self.test is None):
            yield "data.train and data.test belong together: give both, or neither"

    def load(self, device: torch.device) -> Splits:
        target = user_code.load(f"data.target={self.target}", str(self.target))
        sets = {split: self._given(split) for split in SPLITS}
        datasets = [self._dataset(target, "train", self.train)]
        datasets += [self._dataset(target, split, given) for split, named in sets.items() for given in named.values()]
        try:
            train, *others = self._sources(*datasets)
        except DataError as error:
            raise DataError(f"data.target={self.target}: {error}") from None
        each = iter(others)
        of = {split: {name: next(each) for name in named} for split, named in sets.items()}
        example, images = self._example(train)
        self._log_target(train.dataset, example)
        if isinstance(example, torch.Tensor) and example.ndim == 1 and example.is_floating_point():
            logger.warning("the input of a sample is a single number, and most models want a list: return [x] in place of x")
        names = getattr(train.dataset, "classes", None)
        classes = self.classes or getattr(train.dataset, "num_classes", None) or names
        if isinstance(classes, list | tuple):
            classes = len(classes)
        if not isinstance(classes, int) or classes < 1:
            classes = self._values(train)
        named = isinstance(names, list | tuple) and all(isinstance(name, str) for name in names)
        values, normalize = example if images is None else example[images], None
        if self.normalize and isinstance(values, torch.Tensor) and values.dtype == torch.uint8 and values.dim() == 4:
            normalize = measure_on_some(train, images)
            example = normalize(values) if images is None else {**example, images: normalize(values)}
        shape = map_tensors(lambda t: tuple(t.shape[1:]), example)
        return Splits(
            train, of["test"], shape, classes, normalize, list(names or ()) if named else None, example=example, images=images,
            validation=of["validation"],
        )  # fmt: skip

    def several(self, split: str) -> Mapping[str, object]:
        """Return the arguments of the named sets: a mapping of mappings. One mapping is the arguments of one set."""
        given = super().several(split)
        return given if all(isinstance(each, Mapping) for each in given.values()) else {}

    def _given(self, split: str) -> Mapping[str, object]:
        """Return the arguments of the sets of a split by their names; {} where it is a share of the training set, or none."""
        given = self.test if split == "test" else self.validation
        is_set = split == "test" or isinstance(given, str | Mapping)
        return self.several(split) or ({"": given} if is_set else {})

    def _dataset(self, target: Callable[..., object], split: str, given: object) -> Any:
        """Build the Dataset of a split. Raises UserError."""
        kwargs = {**(self.kwargs or {}), **self._split_arguments(target, split, given)}
        dataset = user_code.make(f"data.target={self.target}", target, kwargs)
        if not is_map_style(dataset):
            raise UserError(
                f"data.target={self.target} has no __len__ and __getitem__ (an IterableDataset has not): it must be a map-style "
                "Dataset, because a run shuffles its samples by their numbers, and resumes at any of them. Where all fit into "
                "memory, name a function that returns list(your_dataset); data=stream takes a stream that has state_dict"
            )
        if not len(dataset):
            raise UserError(f"data.target={self.target} has no {split} samples (made with {kwargs})")
        return dataset

    def _split_arguments(self, target: Any, split: str, given: Any) -> dict[str, object]:
        """Return the arguments that make it the training or the test set. Raises UserError."""
        if isinstance(given, str):
            return {"split": given}
        if given is not None:
            return dict(given)
        takes = inspect.signature(target).parameters
        if "split" in takes:
            return {"split": split}
        if "train" in takes:  # as torchvision's
            return {"train": split == "train"}
        raise UserError(
            f"data.target={self.target} takes neither split nor train: give the arguments of each set in data.train and "
            "data.test, such as 'data.train={folder: a}' 'data.test={folder: b}'"
        )

    def _sources(self, train: object, *others: object) -> list[OwnSource]:
        """Return the sets as sources whose samples are stacked, padded, or put together by the user's function."""
        setting = f"data.target={self.target}"
        if self.collate:
            together = self._together()
            return [OwnSource(each, setting, together, Lengths(each, self.target_key).given()) for each in (train, *others)]
        padding = padding_for(train, self.pad, self.target_key)
        if padding is None:
            return [OwnSource(each, setting, self._together()) for each in (train, *others)]
        pad, lengths = padding
        measured = [Lengths(each, self.target_key).all(pad.sequence) for each in others]
        return [OwnSource(each, setting, pad, n) for each, n in zip((train, *others), (lengths, *measured), strict=True)]

    def _together(self) -> OwnCollate | Stack:
        """Return what makes a batch of samples that are not padded."""
        if not self.collate:
            return Stack(self.target_key)
        named = f"data.collate={self.collate}"
        return OwnCollate(user_code.load(named, self.collate), named, self.target_key)

    def _example(self, source: OwnSource) -> tuple[Tree, str | None]:
        """Return the inputs of two samples, the longest where they have lengths, and the key of the images in them."""
        lengths = source.lengths if source.lengths is not None else torch.zeros(len(source))
        two = torch.stack([lengths.argmax()] * 2) if lengths.any() else torch.tensor([0, min(1, len(source) - 1)])
        x, y = source.fetch(two)
        again = (x, y) if source.in_order or source.reader.stateful else source.fetch(two)
        if not all(map(_same, trees.leaves((x, y)), trees.leaves(again))):
            logger.warning(
                "a sample of data.target=%s is another one at each read, though torch, numpy and random draw the same, as where "
                "__getitem__ makes a generator without a seed: such a run cannot be repeated",
                self.target,
            )
        images = [key for key in IMAGES if isinstance(x, dict) and isinstance(x.get(key), torch.Tensor) and x[key].ndim == 4]
        return x, next(iter(images), None)

    def _values(self, source: OwnSource) -> int:
        """Return how many numbers the target of a sample is, where targets are values. Raises UserError for classes."""
        _, y = source.fetch(torch.tensor([0]))
        if self.targets == "values":
            return sum(leaf.numel() for leaf in trees.leaves(y))
        problem = (
            f"data.target={self.target} does not say how many classes it has: set data.classes=N, or give it an attribute "
            "`classes`, a list of their names"
        )
        if self.targets is None and (not isinstance(y, torch.Tensor) or y.numel() > 1):
            problem = (
                f"the targets of data.target={self.target} are {trees.described(y)}, and neither the Dataset nor a key says what "
                "they are: set data.targets=values where they are numbers or images to predict (data.classes is then the number "
                "of outputs), or data.classes=N for classes or labels"
            )
        elif isinstance(y, torch.Tensor) and y.is_floating_point() and self.targets in ("class", None):
            problem += f". Its targets are numbers such as {y.flatten()[0]:.4g}: if they are no classes, set task=regression"
        raise UserError(problem)

    def _log_target(self, dataset: object, example: Tree) -> None:
        """Log which key of a sample was taken for its target, where none is named."""
        if (
            self.target_key is None
            and not self.collate
            and is_map_style(dataset)
            and isinstance(sample := Reader[list[Any]](dataset, list).look([0])[0], Mapping)
        ):
            target = next(key for key in TARGETS if key in sample)
            inputs = ", ".join(map(str, example)) if isinstance(example, dict) else "the other key"
            logger.info("the target of a sample is %s, the model gets %s (data.target_key)", target, inputs)


class OwnCollate:
    """The user's own function that makes a batch, which is taken apart as a sample is.

    It gets a list of samples or, where its parameters are x (or input) and y (or target), a list of the inputs and one of the
    targets.
    """

    def __init__(self, collate: Any, setting: str, target_key: TargetKey) -> None:
        self.collate, self.setting, self.target_key = collate, setting, target_key
        self._takes_pad_to = "pad_to" in inspect.signature(collate).parameters
        self._calls: dict[int, UserCall] = {}

    def __call__(self, samples: Sequence[object], pad_to: int = 1) -> tuple[Tree, Tree]:
        """Return inputs and targets. Raises UserError."""
        if pad_to > 1 and not self._takes_pad_to:
            raise UserError(
                f"{self.setting} takes no argument `pad_to`, the multiple that batch=bucketed and loader=resident pad to: "
                "give it one, or set batch.pad_to=1 and another loader"
            )
        if (call := self._calls.get(pad_to)) is None:
            kwargs = {"pad_to": pad_to} if self._takes_pad_to else {}
            call = self._calls[pad_to] = UserCall(
                self.setting, self.collate, kwargs, offers=("input", "target"), positions=("samples",), decides=("target",)
            )
        if call.positional:
            return tensors_of(call.function(samples), self.target_key)
        pairs = [split_sample(sample, self.target_key) for sample in samples]
        return tensors_of(call(input=[x for x, _ in pairs], target=[y for _, y in pairs]), self.target_key)


class OwnSource(Source):
    """A map-style Dataset as a source; `together` makes a batch of a list of its samples."""

    def __init__(
        self, dataset: Any, setting: str, together: Callable[..., tuple[Tree, Tree]], lengths: torch.Tensor | None = None
    ) -> None:
        self.dataset, self.setting, self.lengths = dataset, setting, lengths
        self.own_code = self.reader = Reader(dataset, together)
        if callable(given := getattr(dataset, "order", None)):
            self.order = partial(checked, given, len(dataset), f"order(seed, epoch) of {setting}")

    def __len__(self) -> int:
        return len(self.dataset)

    def weights(self) -> torch.Tensor | None:
        """Return the Dataset's `weights` (n,), where it has some."""
        if (weights := getattr(self.dataset, "weights", None)) is None:
            return None
        if len(weights) != len(self):
            raise UserError(f"{self.setting} has {len(weights)} `weights` for {len(self)} samples: give one for each")
        try:
            return torch.as_tensor(weights, dtype=torch.float64)
        except (TypeError, ValueError, RuntimeError) as error:
            raise UserError(f"the `weights` of {self.setting} are no numbers (n,): {error}") from None

    def labels(self) -> torch.Tensor | None:
        """Return the classes (n,) where the Dataset has them as `targets`, as torchvision's have."""
        try:
            targets = torch.as_tensor(getattr(self.dataset, "targets", None))
        except (TypeError, ValueError, RuntimeError):
            return None
        whole = not targets.is_floating_point() and targets.dtype != torch.bool
        return targets if whole and targets.shape == (len(self),) else None

    def fetch(self, indices: torch.Tensor, pad_to: int = 1, draws: tuple[int, int] | None = (0, 0)) -> tuple[Tree, Tree]:
        """Return the samples as a batch. What they draw follows from `draws`, a seed and an epoch; None: it is as it comes."""
        chosen = index_of(indices).tolist()
        try:
            if draws is None:
                return self.reader.plain(chosen, pad_to)
            return self.reader.read(chosen, keys(*draws, indices).tolist(), pad_to)
        except DataError as error:
            raise DataError(f"{self.setting}: {error}") from None


def is_map_style(dataset: object) -> bool:
    """Return whether samples can be read by their numbers."""
    streams = isinstance(dataset, torch.utils.data.IterableDataset)  # which inherits a __getitem__ that raises
    return hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__") and not streams


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and bool(((one == other) | ((one != one) & (other != other))).all())
