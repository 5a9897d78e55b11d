"""The user's own torch Dataset as a source of samples, and data=own, the option that builds it."""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeGuard

from drivetrain.core.errors import DataError, OperatorGives, UserError
from drivetrain.core.lazy import torch
from drivetrain.core.options.allowed import Arguments, ColumnName, Name
from drivetrain.core.options.option import Count, RunSpec
from drivetrain.core.order import checked, index_of
from drivetrain.core.step import trees
from drivetrain.core.step.target_kinds import TargetKind
from drivetrain.core.step.trees import Tree, map_tensors
from drivetrain.core.user import code as user_code
from drivetrain.core.user import state as owned
from drivetrain.data.base import SPLITS, Data, Fraction, Source, Splits, measure_on_some
from drivetrain.data.collation import LOOKED_AT, TARGETS, Lengths, OwnCollate, Stack, padding_for
from drivetrain.data.draws import MapStyle, Reader, keys

logger = logging.getLogger(__name__)

IMAGES = ("image", "images", "pixel_values", "x")  # the keys of a dict sample that may hold images


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
            logger.warning("the input of a sample is a single number, and most models want a list: return [x] instead of x")
        names = getattr(train.dataset, "classes", None)
        classes = self.classes or getattr(train.dataset, "num_classes", None) or names
        if isinstance(classes, list | tuple):
            classes = len(classes)
        if not isinstance(classes, int) or classes < 1:
            classes = self._outputs(train)
        named = isinstance(names, list | tuple) and all(isinstance(name, str) for name in names)
        values, normalize = example if images is None else example[images], None
        if self.normalize and isinstance(values, torch.Tensor) and values.dtype == torch.uint8 and values.dim() == 4:
            normalize = measure_on_some(train, images)
            example = normalize(values) if images is None else {**example, images: normalize(values)}
        shape = map_tensors(lambda t: tuple(t.shape[1:]), example)
        return Splits(
            train=train, test=of["test"], shape=shape, classes=classes, normalize=normalize,
            names=list(names or ()) if named else None, example=example, images=images, validation=of["validation"],
        )  # fmt: skip

    def several(self, split: str) -> Mapping[str, object]:
        """Return the arguments of the named sets: a mapping of mappings. One mapping is the arguments of one set."""
        given = super().several(split)
        return given if all(isinstance(each, Mapping) for each in given.values()) else {}

    def _given(self, split: str) -> Mapping[str, object]:
        """Return the arguments of a split's sets by name; {} for a share of the training set, or none."""
        given = self.test if split == "test" else self.validation
        is_set = split == "test" or isinstance(given, str | Mapping)
        return self.several(split) or ({"": given} if is_set else {})

    def _dataset(self, target: Callable[..., object], split: str, given: object) -> MapStyle:
        """Build the Dataset of a split. Raises UserError."""
        kwargs = {**(self.kwargs or {}), **self._split_arguments(target, split, given)}
        takes = inspect.signature(target).parameters.items()
        missing = [
            n for n, p in takes if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD) and n not in kwargs
        ]
        if missing:
            given = " ".join(f"data.kwargs.{name}=…" for name in missing)
            raise UserError(f"data.target={self.target} wants {', '.join(missing)}: set {given}")
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
        if "train" in takes:  # as in torchvision
            return {"train": split == "train"}
        raise UserError(
            f"data.target={self.target} takes neither split nor train: give the arguments of each set in data.train and "
            "data.test, such as 'data.train={folder: a}' 'data.test={folder: b}'"
        )

    def _sources(self, train: MapStyle, *others: MapStyle) -> list[OwnSource]:
        """Return the sets as sources; samples are stacked, padded, or batched by the user's function."""
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
        """Return the function that makes a batch of unpadded samples."""
        if not self.collate:
            return Stack(self.target_key)
        named = f"data.collate={self.collate}"
        return OwnCollate(user_code.load(named, self.collate), named, self.target_key)

    def _example(self, source: OwnSource) -> tuple[Tree, str | None]:
        """Return the inputs of two samples, the longest if they have lengths, and the key of their images."""
        lengths = source.lengths if source.lengths is not None else torch.zeros(len(source))
        two = torch.stack([lengths.argmax()] * 2) if lengths.any() else torch.tensor([0, min(1, len(source) - 1)])
        x, y = source.fetch(two)
        again = (x, y) if source.in_order or source.reader.stateful else source.fetch(two)
        if not owned.same(trees.leaves((x, y)), trees.leaves(again)):
            logger.warning(
                "a sample of data.target=%s is another one at each read, though torch, numpy and random draw the same, as where "
                "__getitem__ makes a generator without a seed: such a run cannot be repeated",
                self.target,
            )
        images = [key for key in IMAGES if isinstance(x, dict) and isinstance(x.get(key), torch.Tensor) and x[key].ndim == 4]
        return x, next(iter(images), None)

    def _outputs(self, source: OwnSource) -> int:
        """Return the number of outputs for the targets, without class names. Raises UserError with the setting to change."""
        if self.targets in (None, "class") and (labels := source.labels()) is not None:
            logger.info("data.classes=%d, as the `targets` of data.target=%s have it", int(labels.max()) + 1, self.target)
            return int(labels.max()) + 1
        _, y = source.fetch(torch.arange(min(LOOKED_AT, len(source))))
        if self.targets in ("values", "pair"):
            return sum(leaf[0].numel() for leaf in trees.leaves(y))
        seen = f"the first {LOOKED_AT} targets of data.target={self.target}"
        if self.targets is None and (not isinstance(y, torch.Tensor) or y.ndim > 2):
            raise UserError(
                f"{seen} are {trees.described(y)}, and neither the Dataset nor a key says what they are: set data.targets=values "
                "where they are numbers or images to predict (data.classes is then the number of outputs), or data.classes=N for "
                "classes or labels"
            )
        values = torch.cat([leaf.flatten() for leaf in trees.leaves(y)])
        low, high = (each.item() for each in values.aminmax())
        if isinstance(y, torch.Tensor) and y.ndim == 2 and y.shape[1] > 1 and self.targets in (None, "labels"):
            several = f"are {y.shape[1]} numbers from {low:.4g} to {high:.4g}"
            if 0 <= low <= high <= 1:
                raise UserError(f"{seen} {several}: set data.classes={y.shape[1]}, and task=multilabel where they are labels")
            raise UserError(f"{seen} {several}: set task=regression (labels are a 0 or a 1 for each class)")
        if not math.isfinite(low + high):
            raise UserError(f"{seen} are not all finite: leave those samples out, or fill their targets")
        real, within = values.is_floating_point(), self.targets not in (None, "class", "labels")  # classes within a sample
        if real and bool(values.frac().any()):
            remedy = f"give class numbers (int64; {self.targets})" if within else "set task=regression"
            raise UserError(f"{seen} are numbers from {low:.4g} to {high:.4g} with fractions: {remedy}")
        numbers = ", or task=regression where they are no classes" if real and not within else ""
        form, integral = ", numbered from 0" if low < 0 and not within else "", values.dtype in (torch.int64, torch.uint8)
        if isinstance(y, torch.Tensor) and self.targets != "labels" and not (integral and (within or y.ndim == 1)):
            form += f", and give {'y.long()' if within else 'int(y)'} in place of {y.dtype} {trees.shape_of(y)}"
        raise UserError(
            f"{seen} are from {low:.4g} to {high:.4g}, and it does not say how many classes it has: set data.classes="
            f"{int(high) + 1} if none is higher{form}{numbers}, or give it an attribute `classes`, a list of their names"
        )

    def _log_target(self, dataset: object, example: Tree) -> None:
        """Log the key taken as a sample's target, if none is set."""
        if (
            self.target_key is None
            and not self.collate
            and is_map_style(dataset)
            and isinstance(sample := Reader[list[object]](dataset, list).look([0])[0], Mapping)
        ):
            target = next(key for key in TARGETS if key in sample)
            inputs = ", ".join(map(str, example)) if isinstance(example, dict) else "the other key"
            logger.info("the target of a sample is %s, the model gets %s (data.target_key)", target, inputs)


class OwnSource(Source):
    """A map-style Dataset as a source; `together` makes a batch of a list of its samples."""

    def __init__(
        self, dataset: MapStyle, setting: str, together: Callable[..., tuple[Tree, Tree]], lengths: torch.Tensor | None = None
    ) -> None:
        self.dataset, self.setting, self.lengths = dataset, setting, lengths
        self.own_code = self.reader = Reader(dataset, together)
        if callable(given := getattr(dataset, "order", None)):
            self.order = partial(checked, given, len(dataset), f"order(seed, epoch) of {setting}")

    def __len__(self) -> int:
        return len(self.dataset)

    def weights(self) -> torch.Tensor | None:
        """Return the Dataset's `weights` (n,), if it has them."""
        if (weights := getattr(self.dataset, "weights", None)) is None:
            return None
        if len(weights) != len(self):
            raise UserError(f"{self.setting} has {len(weights)} `weights` for {len(self)} samples: give one for each")
        try:
            return torch.as_tensor(weights, dtype=torch.float64)
        except (TypeError, ValueError, RuntimeError) as error:
            raise UserError(f"the `weights` of {self.setting} are no numbers (n,): {error}") from None

    def labels(self) -> torch.Tensor | None:
        """Return the classes (n,) if the Dataset has them as `targets`, as in torchvision."""
        try:
            targets = torch.as_tensor(getattr(self.dataset, "targets", None))
        except (TypeError, ValueError, RuntimeError):
            return None
        whole = not targets.is_floating_point() and targets.dtype != torch.bool
        return targets if whole and targets.shape == (len(self),) else None

    def fetch(self, indices: torch.Tensor, pad_to: int = 1, draws: tuple[int, int] | None = (0, 0)) -> tuple[Tree, Tree]:
        """Return the samples as a batch.

        Their random draws follow from `draws` (a seed and an epoch); None: they are not seeded.
        """
        chosen = index_of(indices).tolist()
        try:
            if draws is None:
                return self.reader.plain(chosen, pad_to)
            return self.reader.read(chosen, keys(*draws, indices).tolist(), pad_to)
        except DataError as error:
            raise DataError(f"{self.setting}: {error}") from None


def is_map_style(dataset: object) -> TypeGuard[MapStyle]:
    """Return whether samples can be read by their numbers."""
    streams = isinstance(dataset, torch.utils.data.IterableDataset)  # it inherits a __getitem__ that raises
    return hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__") and not streams
