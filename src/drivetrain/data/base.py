# long: every data option follows one order of reading, holding out and learning
"""The interface of every data option: sources of the training, validation and test sets, read a batch at a time."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Generic, Literal, Protocol, Self, TypeVar, cast

import annotated_types

from drivetrain.core import order as orders
from drivetrain.core.errors import DataError, OperatorGives, UserError
from drivetrain.core.lazy import numpy as np
from drivetrain.core.lazy import torch
from drivetrain.core.options import groups
from drivetrain.core.options.allowed import FILE_NAME, PLAIN_NAME, Entries, FileName, Text
from drivetrain.core.options.option import CountOrZero, Option, RunSpec
from drivetrain.core.order import REPEATS, Order, Sampling
from drivetrain.core.step import rng, trees
from drivetrain.core.step.source import GroupedSource
from drivetrain.core.step.source import Source as Source
from drivetrain.core.step.target_kinds import TargetKind
from drivetrain.core.step.tensors import Tensors as Tensors
from drivetrain.core.step.trees import Tree, map_tensors
from drivetrain.core.typed import JsonObject
from drivetrain.core.user.state import untouched
from drivetrain.data.baseline import Baseline
from drivetrain.data.decoding import ImageFileSource, Range
from drivetrain.data.untrusted import Encoding

SPLITS = ("validation", "test")  # the evaluated ones
IGNORE_INDEX = -100  # a target that the loss ignores: torch's own ignore_index
Fraction = Annotated[float, annotated_types.Gt(0), annotated_types.Lt(1)]
# Several named sets: each has a value that the setting takes for one set.
_NAMED = Entries(PLAIN_NAME, ((Text(r".*", ""), FILE_NAME),))
Sets = Annotated[dict[str, Fraction | FileName], _NAMED]
FileSets = Annotated[dict[str, FileName], _NAMED]
Folds = Annotated[int, annotated_types.Ge(2), annotated_types.Le(1000)]
Validation = Literal["auto"] | Fraction | FileName | Sets | None
AUTO_SHARE = 0.1  # of the training samples, with data.validation=auto where the data has no validation set


HOLD_OUT_STREAM = 9  # of the random numbers of samples without a name or content
MAX_BYTES = 2**28  # of tensors that are hashed as a whole for the fingerprint
LARGE = 100_000_000  # samples of an order whose memory is reported
SAMPLES = 32  # read for it, spread evenly, where reading all would be expensive
WHOLE = {"test": "the whole file"}  # the origin of samples of another file than the run's own

logger = logging.getLogger(__name__)
T = TypeVar("T")
Name = TypeVar("Name", str, bytes, str | bytes)
P = TypeVar("P", bound="ReadSet")
S = TypeVar("S", bound=Source)
K = TypeVar("K")


@dataclass(kw_only=True)
class Splits(groups.Splits):
    """The loaded data, with its other sources, and all facts that a run keeps."""

    test: Source | Mapping[str, Source]  # several have names
    normalize: Normalize | None
    dtype: torch.dtype | None = None  # of the inputs, where they are not floats
    units: Units | None = None  # of standardised target values
    files: Mapping[str, str] = field(default_factory=dict)  # name → text, kept in the run's directory: a tokenizer, …
    example: Tree | None = None  # the inputs of two samples; None: of this shape and type
    call: Tree | None = None  # the arguments of a loss's own call of the model; None: it is called with the inputs
    pixels: Range | None = None  # of the values of image files of more than 8 bits, or the user's
    images: str | None = None  # the key of the images, where inputs are a dict: they are augmented and normalised
    validation: Source | Mapping[str, Source] | None = None  # None: there is none, and a run selects on the test set
    origins: Mapping[str, str] = field(default_factory=dict)  # set → the origin of its samples, in words, if known
    inputs: str = ""  # a short description of the inputs, for the run's first line
    doubts: Sequence[str] = ()  # doubts about the data, a line each

    def __post_init__(self) -> None:
        # A single set has no name.
        alone = (found.get("", found or None) if isinstance(found, dict) else found for found in (self.test, self.validation))
        self.test, self.validation = cast(Any, tuple(alone))

    def sets(self, split: str) -> Mapping[str, Source]:
        """Return the sets of a split, test or validation, by name: a single one is "", and {} without any."""
        found = self.test if split == "test" else self.validation
        return {} if found is None else found if isinstance(found, Mapping) else {"": found}

    def two_samples(self, device: torch.device) -> Tree:
        """Return the inputs of two samples as zeros, to try a model with. Booleans are true: a mask of nothing."""
        if self.example is None:
            return torch.zeros(2, *self.shape, device=device, dtype=self.dtype)
        return map_tensors(lambda t: torch.full_like(t, t.dtype == torch.bool, device=device), self.example)


@dataclass
class Inputs:
    """The inputs of samples to predict, encoded as in training.

    Each block has the names of its samples, and a function that reads some of them; it raises DataError.
    """

    blocks: Iterator[tuple[Sequence[str], Callable[[slice], Tree]]]
    unknown: Counter[str] = field(default_factory=Counter)  # column → its rows with a category unknown in training


@dataclass
class OwnData:
    """The facts that a finished run keeps about its own data, for an evaluation on other data."""

    splits: Splits  # without samples
    hash: str  # the fingerprint of its training samples; "" where it has none
    holdout: float | None = None  # the requested share of the other data; None: all
    test: bool = False  # whether the command gives data.test


class Normalize:
    """Turns uint8 or float inputs into (x − mean) / std per channel, computed in float32."""

    def __init__(
        self, mean: Sequence[float] | torch.Tensor, std: Sequence[float] | torch.Tensor, dtype: torch.dtype | None = None
    ) -> None:
        """`dtype` is the dtype of the results; None: float32."""
        self.mean, self.std = torch.as_tensor(mean).view(-1, 1, 1), torch.as_tensor(std).view(-1, 1, 1)
        self.dtype = dtype or torch.float32

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise inputs (n, c, h, w) on this normaliser's device."""
        values = x.float() if x.is_floating_point() else x  # bytes become floats as the mean is subtracted: one kernel fewer
        return (values - self.mean).div_(self.std).to(self.dtype)  # not sub_: x may be the source's

    def to(self, device: torch.device) -> Normalize:
        """Return the same normalisation for inputs on a device."""
        return Normalize(self.mean.to(device), self.std.to(device), self.dtype)

    def rounded(self, dtype: torch.dtype) -> Normalize:
        """Return the same normalisation with results of this dtype."""
        return Normalize(self.mean, self.std, dtype)


@dataclass
class Units:
    """Turns standardised values (n, k) back into the data's units: value × std + mean."""

    mean: torch.Tensor  # (k,)
    std: torch.Tensor  # (k,)

    def __call__(self, values: torch.Tensor) -> torch.Tensor:
        """Return values (n, k) in the data's units: targets, or outputs (some losses want several for each target)."""
        each = values.shape[-1] // len(self.mean) if values.ndim > 1 else 1
        return values * self.std.repeat_interleave(each) + self.mean.repeat_interleave(each)

    def to(self, device: torch.device) -> Units:
        """Return the same units for values on a device."""
        return Units(self.mean.to(device), self.std.to(device))


def number_apart(count: int, share: float) -> int:
    """Return how many of `count` samples are held out for the test. Raises DataError where one of the sets would be empty."""
    apart = round(count * share)
    if not 0 < apart < count:
        raise DataError(
            f"data.holdout={share:g} holds {apart} of {count:,} samples out, and both sets need some: set another share"
        )
    return apart


@dataclass(kw_only=True, eq=False)
class Data(Option, groups.Data):
    """The base of every data option. Its settings are the fields of its class and its bases."""

    changes = "trains on other samples"
    drop_last: bool = True
    order: Sampling = "shuffled"
    folds: Folds | None = None
    fold: CountOrZero = 0
    # A share of the training set, a separate set, auto (that, else a share), or several sets of these by name.
    validation: Validation | Mapping[str, object] = None
    stage_keys: ClassVar[tuple[str, ...]] = ("size", "length", "weights", "weights.*")
    why_fixed: ClassVar[str] = "the samples and their order are one for the whole run"
    test: Any = field(init=False, default=None)  # the test set, or several by name, if the user sets it
    # Inputs are sequences of tokens, which may differ in length; None where only the user knows.
    tokens: bool | None = field(init=False, default=False)
    targets: TargetKind | None = field(init=False, default="class")  # a sample's kind of target; None: only the user knows
    input_files: ClassVar[tuple[str, ...]] = ()  # endings of the files that `read_inputs` reads
    reads: ClassVar[tuple[TargetKind, ...]] = ()  # the kinds of targets that it can read, if several; the usual one first
    kind: TargetKind | None = field(init=False, default=None)  # the user's choice among them
    own: OwnData | None = field(init=False, default=None)  # of a finished run that is evaluated on other data
    like: Splits | None = field(init=False, default=None)  # the data that determines the encoding, in a mix

    def __post_init__(self) -> None:
        for key in self.machine_local_keys:
            vars(self)[key] = _expanded(getattr(self, key))
        if self.reads:
            self.targets = self.kind or self.reads[0]
        if self.folds is not None and (self.validation in (None, "auto") or isinstance(self.validation, float)):
            vars(self)["validation"] = 1 / self.folds

    def resolve(self, run: RunSpec) -> Self:
        """Set the targets to the user's choice or the task's; for pairs, make two views of each image."""
        wanted, targets = run.task.targets, self.targets
        if self.reads:
            targets = self.kind or next((kind for kind in wanted if kind in self.reads), self.reads[0])
        if targets is None and len(wanted) == 1:
            targets = wanted[0]
        if "pair" in wanted and targets == "class" and not self.tokens:
            return self.with_values(targets="pair", views=2)
        return self.with_values(targets=targets)

    def rules(self, run: RunSpec) -> Iterator[str]:
        """Yield the problems of the named sets, or those of `validate`."""
        wrong = list(self._name_problems())
        yield from wrong or iter(self.returned("validate", self.validate(run)))

    def _name_problems(self) -> Iterator[str]:
        for split, given in (("validation", self.validation), ("test", self.test)):
            if given == {}:
                yield f"data.{split}={{}} names no set: set it to null, to one set, or to several as {{clean: …, noisy: …}}"
            for name in self.several(split):
                if not PLAIN_NAME.takes(str(name)):
                    yield f"data.{split}: '{name}' is no name of a set: take letters, digits and _"
        shares = [name for name, setting in self.several("validation").items() if isinstance(setting, float)]
        if len(shares) > 1:
            yield f"data.validation: {' and '.join(shares)} are shares of training, and one can be held out: name files"
        if self.fold >= (self.folds or 1):
            mend = f"they are numbered 0 to {self.folds - 1}" if self.folds else "set data.folds=5, or how many there are"
            yield f"data.fold={self.fold}: there is no such fold: {mend}"
        if self.folds is not None and not isinstance(self.validation, float):
            yield f"data.folds={self.folds} divides the training samples, and data.validation names other sets: leave one out"

    def several(self, split: str) -> Mapping[str, object]:
        """Return the settings of the named sets of a split, validation or test; {} for a single set or none."""
        given = self.test if split == "test" else self.validation
        return given if isinstance(given, Mapping) else {}

    def judging_sets(self) -> Sequence[str]:
        """Return the names of the sets that select models; a single one is \"\"."""
        return list(self.several("test" if self.validation is None else "validation")) or [""]

    def places(self, split: str) -> dict[str, str]:
        """Return the file, folder or name of each separate set of a split, by name; a single one is \"\"."""
        given = self.test if split == "test" else self.validation
        named = given if isinstance(given, Mapping) else {"": given}
        return {name: place for name, place in named.items() if isinstance(place, str) and place != "auto"}

    def advise(self, run: RunSpec) -> Iterator[str]:
        if self.validation is None:
            yield (
                "data.validation=null: there is no validation set, so what selects (best checkpoint, plateau, early stopping, "
                "best job) looks at the test set, whose figures are then too good"
            )

    def load(self, device: torch.device) -> Splits:
        """Load the data, or open its files: the training set, and all separate test and validation sets.

        Raises UserError if it is missing or unusable.
        """
        raise self.unwritten("load")

    def load_sets(self, device: torch.device) -> Splits:
        """Load the data, and hold out the validation set if it is a share of the training set.

        Raises UserError. If a finished run is evaluated on other data, that data is used whole, with the encoding of the run's
        own.
        """
        try:
            return self._all_sets(device) if self.own is None else self._judged(self.own, device)
        except OSError as error:
            if error.filename is None:
                raise
            raise DataError(
                f"{error.filename} cannot be read ({error.strerror}): set the path of the data, or mend the file"
            ) from None

    def _all_sets(self, device: torch.device) -> Splits:
        """Load the data with all its sets, including a share of the training set."""
        data, share, names = self.load(device), self.share(), list(self.several("validation")) or [""]
        own = data.sets("validation")
        if self.folds is not None and own:
            raise UserError(
                f"data.folds={self.folds} divides the training samples, and this data makes a validation set of its own"
            )
        if share is None or all(name in own for name in names):
            return data
        train, held = hold_out(data.train, share, self.folds, self.fold)
        of = f"{share:g}" if self.folds is None else f"fold {self.fold} of {self.folds}"
        origins = {"validation": f"{of} of training", **data.origins}
        return replace(data, train=train, validation={name: own.get(name, held) for name in names}, origins=origins)

    def load_whole(self, own: Splits) -> Splits | None:
        """Return all samples as training and test sets, with the encoding of a run's own data.

        Raises UserError. None where the option cannot do so, or where there is a test set: the sets are then as in training.
        """
        return None

    def other_file(self) -> Path:
        """Return the file that a finished run is evaluated on: data.test if the command sets it, else data.path."""
        return Path(str(getattr(self, "test" if self.own is not None and self.own.test else "path")))

    def _judged(self, own: OwnData, device: torch.device) -> Splits:
        """Return the other data that a finished run is evaluated on."""
        divided = None
        with contextlib.suppress(UserError):  # too few samples to divide; other errors are raised again later
            divided = self._all_sets(device)
            if (fingerprint(divided.train) or {}).get("hash") == own.hash:  # the data was moved: its test set is the run's own
                return divided
        data = self.load_whole(own.splits)
        if data is None:
            return divided or self._all_sets(device)
        if own.holdout is None:
            return data
        held = {name: hold_out(source, own.holdout)[1] for name, source in data.sets("test").items()}
        return replace(data, test=held, origins={"test": f"{own.holdout:g} of the samples"})

    def share(self) -> float | None:
        """Return the held-out share of the training samples, where the data has no validation set."""
        shares = [setting for setting in self.several("validation").values() if isinstance(setting, float)]
        given = shares[0] if shares else self.validation
        return AUTO_SHARE if given == "auto" else given if isinstance(given, float) else None

    def order_of(self, source: Source, run: RunSpec) -> Order:
        """Return the order of the training samples in a run. Raises UserError."""
        order = self._order_of(source)
        if order.at is None and order.length > LARGE:
            gib = 8 * order.length / 2**30
            logger.warning("data.order=%s takes %.1f GiB on each rank, where data.order=shuffled takes none", self.order, gib)
        return order

    def _order_of(self, source: Source) -> Order:
        n, word = len(source), self.order
        if word == "sequential":
            return orders.sequential(n)
        if word == "balanced":
            if (labels := source.labels()) is None:
                raise self._no_order("the class of each sample", "a list `targets` of them")
            return orders.balanced(labels)
        if word == "weighted":
            if (weights := source.weights()) is None:
                raise self._no_order("a weight for each sample", "a list `weights` of them")
            return orders.weighted(weights)
        if word != "own":
            return orders.shuffled(n, 1 if word == "shuffled" else REPEATS if word == "repeated" else word)
        if source.order is None:
            raise self._no_order("an order", "a method `order(seed, epoch)`, of sample numbers")
        order = Order(len(source.order(0, 0)), source.order, repeats=source.own_code is not None)
        for seed, epoch in ((0, 1), (1, 0)):  # a wrong one ends the run here, not after an epoch
            order(seed, epoch)
        return order

    def _no_order(self, wanted: str, told_by: str) -> UserError:
        return UserError(
            f"data.order={self.order} needs {wanted}, which is not known before the samples are read: set data.order=shuffled, "
            f"or give your own Dataset (data=own) {told_by}"
        )

    def encode(self, text: str, data: Splits) -> torch.Tensor:
        """Return the tokens of a text (length,) for the model. Raises DataError."""
        raise DataError(f"{type(self).__name__.lower()} does not read text")

    def decode(self, tokens: Sequence[int], data: Splits) -> str | None:
        """Return the text of an input's tokens; None where the option has no tokenizer."""
        return None

    def fitted_baseline(self, data: Splits) -> Baseline | None:
        """Return the baseline for a run's model, fitted on the training samples; None: there is none."""
        return None

    def describe_row(self, x: Tree, data: Splits) -> Mapping[str, str]:
        """Return the values of a table's row by column; {} for other samples."""
        return {}

    def describe_columns(self, data: Splits) -> Mapping[str, Sequence[str]]:
        """Return the encoding of each column of the training table, in words; {} without a table."""
        return {}

    def answer_texts(self, data: Splits) -> tuple[Callable[[Sequence[int]], str], Sequence[str]]:
        """Return the function from an answer's tokens to text, special ones included, and the texts that end an answer."""
        raise self.unwritten("answer_texts")

    def read_inputs(self, file: Path | Iterable[bytes], data: Splits, size: int) -> Inputs:
        """Return the inputs of a file, or of its lines, in blocks of up to `size`, for predictions.

        Raises UserError where the file as a whole is wrong.
        """
        raise self.unwritten("read_inputs")

    def reads_file(self, path: Path) -> bool:
        """True if `read_inputs` reads such a file."""
        return self.reads_rows or path.suffix.lower() in self.input_files

    def train_samples(self) -> int | None:
        """Return the number of training samples; None where it is not known before loading."""
        samples, share = self.loaded_samples(), self.share()
        if samples is None or share is None:
            return samples
        left, held = samples, 0
        for n in range(min(self.fold, self.folds or 0) + 1):
            left -= held
            held = count_held_out(left, 1 / (self.folds - n) if self.folds else share) if left else 0
        return samples - held

    def loaded_samples(self) -> int | None:
        """Return the number of training samples, held-out ones included; None where it is not known before loading."""
        return None


class ReadSet(Protocol):
    """The samples of one set after reading: a source, or an object that becomes one once the training samples are known."""

    def __len__(self) -> int: ...

    def subset(self, indices: torch.Tensor) -> Self:
        """Return some of the samples (n,)."""


class Listed(list[T]):
    """Samples in a list."""

    def subset(self, indices: torch.Tensor) -> Listed[T]:
        return Listed(self[number] for number in indices.tolist())


@dataclass(kw_only=True, eq=False)
class HeldOut(Data, Generic[P, K, S]):
    """The base of data that is read set by set.

    Without a test set, the share `holdout` of training is the test set. A subclass reads the samples of the training and of
    other sets (P), has their encoding (K), such as a schema or classes, and makes sources of them (S).
    """

    holdout: Fraction = 0.1
    samples_are: ClassVar[str] = "images"  # their name in messages
    remedy: ClassVar[str] = "set data.test or data.holdout, or add more"  # for an empty set

    def places(self, split: str, known: K | None = None) -> dict[str, str]:
        """Return the places of sets, including those found while reading training, which `known` has."""
        return super().places(split)

    def read(self) -> tuple[P, K]:
        """Return the training samples, held-out ones included, and the facts learned from the data so far. Raises UserError."""
        raise self.unwritten("read")

    def fractions(self, every: P) -> np.ndarray:
        """Return a number in [0, 1) for each sample (n,), that decides whether it is held out: the same one in every run."""
        raise self.unwritten("fractions")

    def divided(self, every: P) -> tuple[P, P]:
        """Return the samples to train on, and the ones held out as the test set."""
        apart = torch.from_numpy(self.fractions(every) < self.holdout)
        return every.subset((~apart).nonzero().flatten()), every.subset(apart.nonzero().flatten())

    def learn(self, known: K, every: P, train: P) -> None:
        """Add to `known` the facts learned from the training samples: classes, statistics. `every` has the held-out ones too."""

    def read_set(self, place: str, known: K, split: str) -> P:
        """Return the samples of a set other than training. Raises UserError."""
        raise self.unwritten("read_set")

    def source(self, known: K, part: P) -> S:
        """Return the samples of a set as a source. Raises UserError."""
        return cast(S, part)

    def about(self, known: K, sources: Sequence[tuple[str, S]], own: Splits | None) -> dict[str, object]:
        """Return the properties of Splits for the sources, by split, training first.

        `own` is a run's own data, if these are others.
        """
        raise self.unwritten("about")

    def load(self, device: torch.device) -> Splits:
        every, known = self.read() if self.like is None else self.read_like(self.like)
        tests = self.places("test", known)
        train, test = (every, None) if tests else self.divided(every)
        self._refuse_empty(train, [] if test is None else [test])
        if self.like is None:
            self.learn(known, every, train)
        sets = {
            split: {name: self.read_set(place, known, split) for name, place in self.places(split, known).items()}
            for split in SPLITS
        }
        if test is not None:
            sets["test"] = {"": test}
        self._refuse_empty(train, sets["test"].values())
        return self._encoded(known, train, sets, self.like)

    def read_like(self, other: Splits) -> tuple[P, K]:
        """Return the result of `read`, with other data's properties instead of its own. Raises UserError."""
        if (known := self.kept(other)) is None:
            raise UserError(f"{type(self).__name__} is one whole table: mix tables of files (option: tabular)")
        return self.read_set(str(self.other_file()), known, "train"), known

    def _refuse_empty(self, train: P, tests: Iterable[P]) -> None:
        counts = [len(train), *map(len, tests)]
        if not all(counts):
            raise UserError(
                f"{getattr(self, self.machine_local_keys[0])} gives {counts[0]} training and {min(counts[1:], default=0)} test "
                f"{self.samples_are}: {self.remedy}"
            )

    def _encoded(self, known: K, train: P, sets: Mapping[str, Mapping[str, P]], own: Splits | None) -> Splits:
        source = self.source(known, train)
        of = {split: {name: self.source(known, part) for name, part in parts.items()} for split, parts in sets.items()}
        sources = [("train", source), *((split, each) for split, found in of.items() for each in found.values())]
        return Splits(
            train=source, test=of["test"], validation=of.get("validation"), **cast(Any, self.about(known, sources, own))
        )

    def kept(self, own: Splits) -> K | None:
        """Return the run's facts about its own data that encode other data; None: there are none. Raises UserError."""
        return None

    def load_whole(self, own: Splits) -> Splits | None:
        """Load the test files if the command sets them, else the training file."""
        if (known := self.kept(own)) is None:
            return None
        places = self.places("test") if self.own is not None and self.own.test else {"": str(self.other_file())}
        return self.judged(known, {name: self.read_set(place, known, "test") for name, place in places.items()}, own)

    def judged(self, known: K, parts: Mapping[str, P], own: Splits, origins: Mapping[str, str] = WHOLE) -> Splits:
        """Return the sets of other data as test sets; the first one is also the training set."""
        first, *others = parts
        data = self._encoded(known, parts[first], {"test": {name: parts[name] for name in others}}, own)
        return replace(data, test={first: data.train, **data.sets("test")}, files=own.files or data.files, origins=origins)


@dataclass(kw_only=True, eq=False)
class FromFile(HeldOut[P, K, S]):
    """The base of data in a file for each set."""

    reads_what: ClassVar[str]  # in words
    ships: ClassVar[bool] = False  # data exists without a path

    path: str | None = None
    test: str | dict[str, str] | None = None
    encoding: Encoding | None = None
    validation: Fraction | FileName | Sets | None = 0.1

    def places(self, split: str, known: K | None = None) -> dict[str, str]:
        """Return the files of a split's sets; validation files are in the folder of the training file."""
        found, folder = super().places(split), Path(str(self.path)).parent
        return found if split == "test" else {name: str(folder / file) for name, file in found.items()}

    def exists(self, path: Path) -> bool:
        """True if there is something to read at a path."""
        return path.is_file()

    def validate(self, run: RunSpec) -> Iterator[str]:
        given = [("path", self.path), *((split, file) for split in SPLITS for file in self.places(split).values())]
        if not self.path and not self.ships:
            yield OperatorGives(f"{run.named('data')} needs data.path, {self.reads_what}")
        for setting, file in given:
            if file and not self.exists(Path(file)):
                yield f"data.{setting}={file} is no file: set it to {self.reads_what}"


def measure_normalization(x: torch.Tensor) -> Normalize:
    """Return the normalisation that brings inputs x (n, c, …) to mean 0 and standard deviation 1 per channel."""
    per_channel = x.double().transpose(0, 1).flatten(1)
    return Normalize(per_channel.mean(1).tolist(), per_channel.std(1).tolist())


def measure_on_some(source: Source, images: str | None = None) -> Normalize:
    """Return the normalisation measured on up to 500 samples, spread evenly over a source; `images` is their key in a dict."""
    count = min(len(source), 500)
    x, _ = source.fetch(torch.arange(count) * (1 if source.in_order else len(source) // count))
    return measure_normalization(x if images is None else x[images])


def hash_fraction(name: str) -> float:
    """Return a number in [0, 1) that depends on a sample's name alone, to hold out the same samples in every run."""
    return int.from_bytes(hashlib.sha256(name.encode(errors="surrogateescape")).digest()[:8], "big") / 2**64


def hash_fractions(names: Iterable[str], count: int) -> np.ndarray:
    """Return the `hash_fraction` of each of `count` names (n,)."""
    return np.fromiter(map(hash_fraction, told(names, count)), np.float64, count)


MANY, TRIED = 10**7, 2**16  # names whose hashes take long, and names that are timed


def told(names: Iterable[Name], count: int) -> Iterator[Name]:
    """Yield names for hashing. With many, log an estimate of the time first, then the progress."""
    left = iter(names)
    if count >= MANY:
        for tried in (1, TRIED):  # the first call prepares
            began = time.perf_counter()
            chosen(hash_of(map(str, range(tried))), None, 0.1)
        minutes = (time.perf_counter() - began) / TRIED * count / 60
        logger.info("holding samples out: %s names are hashed and sorted, about %.1f minutes", f"{count:,}", minutes)
        for tenth in range(1, 11):
            yield from itertools.islice(left, -(-count // 10))
            logger.info("holding samples out: %d %% of the names are hashed", 10 * tenth)
    yield from left


def _expanded(given: object) -> object:
    """Return a path, or those of several sets, with ~ as the home directory; None for an empty one; and any other value."""
    if isinstance(given, Mapping):
        return {name: _expanded(each) for name, each in given.items()}
    return os.path.expanduser(given) or None if isinstance(given, str) else given


def hold_out(source: Source, share: float, folds: int | None = None, fold: int = 0) -> tuple[Source, Source]:
    """Return the training and the validation samples of a source: the same ones in every run, on any number of ranks.

    With `folds` they are one fold instead of a share. The choice depends only on the samples: on their content, or on their
    names where reading is too expensive. Samples that belong together, such as the pieces of a document, stay together. Each
    class gives the same share, where the classes are known without reading samples. Raises UserError where one of the sets
    would be empty.
    """
    labels, groups, counts = source.labels(), source.groups, None
    if groups is not None:
        counts, labels = groups.numpy(), None if labels is None else labels[groups.cumsum(0) - groups]
    keys, of_class = _keys(source), None if labels is None else labels.cpu().numpy()
    which = torch.from_numpy(in_fold(keys, of_class, counts, folds, fold) if folds else chosen(keys, of_class, share, counts))
    held = int(which.sum() if groups is None else groups[which].sum())
    if not held or held == len(source):
        setting = f"data.folds={folds} data.fold={fold}" if folds else f"data.validation={share:g}"
        raise UserError(
            f"{setting} takes {held} of {len(source)} training samples, and both sets need some (samples that "
            f"belong together stay together): set {'fewer folds' if folds else 'another share'}, or data.validation=null "
            "to select on the test set"
        )
    part = source.subset if groups is None else cast(GroupedSource, source).of
    return part((~which).nonzero().flatten()), part(which.nonzero().flatten())


def in_fold(keys: np.ndarray, labels: np.ndarray | None, counts: np.ndarray | None, folds: int, fold: int) -> np.ndarray:
    """Return which samples are in a fold, bool (n,): each fold takes its share of the samples left by earlier folds.

    The arguments are as in `chosen`.
    """
    left = np.ones(len(keys), bool)
    for n in range(fold + 1):
        held = np.zeros_like(left)
        if left.any():
            parts = (None if part is None else part[left] for part in (labels, counts))
            held[left] = chosen(keys[left], next(parts), 1 / (folds - n), next(parts))
        left &= ~held
    return held


def count_held_out(samples: int, share: float) -> int:
    """Return how many of `samples` training samples are held out, each counting once."""
    return int(max(share, 1 / samples) * samples + 0.5)


def chosen(keys: np.ndarray, labels: np.ndarray | None, share: float, counts: np.ndarray | None = None) -> np.ndarray:
    """Return which samples are held out, bool (n,): the lowest keys (n,) uint64, for each class its share.

    Samples of one key are a group, which is held out as a whole if at least half of it is wanted. The classes' shares are rounded
    to the sum over all samples; they are ignored if a group has samples of several classes. Where each of the n represents
    several samples, `counts` (n,) has their numbers.
    """
    _, first, group = np.unique(keys, return_index=True, return_inverse=True)  # in the keys' order
    sizes = np.bincount(group, counts)
    one_class = labels is None or not (labels == labels[first][group]).all()
    _, number = np.unique(np.zeros(len(sizes)) if labels is None or one_class else labels[first], return_inverse=True)
    samples = np.bincount(number, weights=sizes)  # of each class
    left = np.diff(np.floor(max(share, 1 / samples.sum()) * np.cumsum(samples) + 0.5), prepend=0).tolist()
    taken, wanting = np.zeros(len(sizes), bool), sum(each > 0 for each in left)
    for n, (of_class, size) in enumerate(zip(number, sizes, strict=True)):
        if 0 < size / 2 <= left[of_class]:
            left[of_class] -= size
            taken[n] = True
            wanting -= left[of_class] <= 0
            if not wanting:  # most groups are left, and are many
                break
    if not taken.any() and len(taken) > 1:  # few large groups
        taken[sizes.argmin()] = True
    return np.asarray(taken[group])


MOST_FILES = 20_000  # read to compare their content


def twice(one: Source, other: Source) -> int | None:
    """Return how many samples of `other` have the same content as one of `one`; None where finding out would be expensive."""
    if any(isinstance(each, ImageFileSource) for each in (one, other)):
        if len(one) + len(other) > MOST_FILES:
            return None
        found = [hash_of(map(each.content, range(len(each)))) for each in (one, other) if isinstance(each, ImageFileSource)]
    elif any(each.identities() is None and not isinstance(each, Tensors) for each in (one, other)):
        return None
    else:
        found = [_keys(one), _keys(other)]
    return int(np.isin(found[1], found[0]).sum())


def _keys(source: Source) -> np.ndarray:
    """Return a number (n,) uint64 for each sample, equal for samples that stay together."""
    if (names := source.identities()) is not None:
        if isinstance(names, torch.Tensor):
            return rng.keys(0, 0, names, HOLD_OUT_STREAM).numpy().astype(np.uint64)
        return hash_of(told(names, len(names)))
    if isinstance(source, Tensors) and source.device.type == "cpu":
        rows = [leaf.reshape(len(leaf), -1).contiguous().view(torch.uint8).numpy() for leaf in trees.leaves((source.x, source.y))]
        return hash_of(b"".join(parts) for parts in zip(*(map(bytes, leaf) for leaf in rows), strict=True))
    numbers = rng.uniform(0, 0, torch.arange(len(source)), HOLD_OUT_STREAM).double() * 2**24
    return numbers.numpy().astype(np.uint64) * np.uint64(2**40) + np.arange(len(source), dtype=np.uint64)  # all different


def hash_of(identities: Iterable[str | bytes]) -> np.ndarray:
    """Return a hash (n,) uint64 of each text."""
    digests = b"".join(hashlib.blake2b(_bytes(name), digest_size=8, person=b"validation").digest() for name in identities)
    return np.frombuffer(digests, "<u8").astype(np.uint64)


def fingerprint(source: Source) -> JsonObject | None:
    """Return `hash`, `of` (the hashed content) and `samples` (their number) of a source; None where it cannot be read.

    Equal samples have the same fingerprint on every machine and with any seed. It is cheap: tensors in memory are hashed whole
    up to MAX_BYTES. Sources with a text for each sample's content (rows of a table, documents, checksums of a packed file) are
    hashed by these texts. Image files are hashed by their names and classes and the bytes of some, and other sources by some
    samples.
    """
    digest = hashlib.blake2b(f"{len(source)} samples".encode(), digest_size=16)
    try:
        with untouched({} if source.own_code is None else source.own_code.keeps()):
            of = _add(digest, source)
    except Exception as error:  # a user's own Dataset may raise anything
        logger.info("the training data has no fingerprint: %s: %s", type(error).__name__, error)
        return None
    return {"hash": digest.hexdigest(), "of": of, "samples": len(source)}


def _add(digest: hashlib.blake2b, source: Source) -> str:
    """Hash a source; return a name for the hashed content."""
    names = source.identities()
    if names is None and isinstance(source, Tensors) and trees.nbytes((source.x, source.y)) <= MAX_BYTES:
        _add_tensors(digest, (source.x, source.y))
        return "content"
    spread = torch.arange(count := min(SAMPLES, len(source)))
    if not source.in_order:
        spread = spread * len(source) // max(1, count)
    if isinstance(names, torch.Tensor):
        _add_tensors(digest, names)
    elif names is not None:
        for name in names:
            digest.update(_bytes(name) + b"\0")
    if (labels := source.labels()) is not None:
        _add_tensors(digest, labels.long())
    if isinstance(source, ImageFileSource):
        for index in spread.tolist():
            digest.update(source.content(index))
        return f"names and {count} files" if names is not None else f"{count} files"
    if names is not None:
        return "content"
    _add_tensors(digest, source.fetch(spread))
    return f"{count} samples"


def _add_tensors(digest: hashlib.blake2b, tree: Tree) -> None:
    """Hash the tensors of a tree: their names, types, shapes and values."""
    for name, tensor in trees.named_leaves(tree):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)


def _bytes(name: str | bytes) -> bytes:
    return name.encode(errors="surrogateescape") if isinstance(name, str) else name
