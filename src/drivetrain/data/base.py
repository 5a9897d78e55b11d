"""The interface of every data option: sources of the training, validation and test sets, read a batch at a time."""

from __future__ import annotations

import contextlib
import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import annotated_types

from drivetrain.core import order as orders
from drivetrain.core.allowed import FILE_NAME, PLAIN_NAME, Entries, FileName, Text
from drivetrain.core.errors import DataError, UserError
from drivetrain.core.lazy import torch
from drivetrain.core.option import Option, RunSpec
from drivetrain.core.order import REPEATS, Order, Sampling
from drivetrain.core.source import Source as Source
from drivetrain.core.targets import TargetKind
from drivetrain.core.tensors import Tensors as Tensors
from drivetrain.core.trees import Tree, map_tensors
from drivetrain.data import named_sets
from drivetrain.data.decoding import Range
from drivetrain.data.fingerprint import fingerprint
from drivetrain.data.named_sets import SPLITS as SPLITS
from drivetrain.data.validation import count as held_out_count
from drivetrain.data.validation import hold_out

IGNORE_INDEX = -100  # a target that the loss ignores: torch's own ignore_index
Fraction = Annotated[float, annotated_types.Gt(0), annotated_types.Lt(1)]
# Several named sets: for each what the setting takes for one.
_NAMED = Entries(PLAIN_NAME, ((Text(r".*", ""), FILE_NAME),))
Sets = Annotated[dict[str, Fraction | FileName], _NAMED]
FileSets = Annotated[dict[str, FileName], _NAMED]
Validation = Literal["auto"] | Fraction | FileName | Sets | None
AUTO_SHARE = 0.1  # of the training samples, with data.validation=auto where the data has no validation set of its own


WHOLE = {"test": "the whole file"}  # the origin of the samples of another file than the run's own


@dataclass
class Splits:
    """The loaded data: its sources, and what a model must know of them."""

    train: Source
    test: Source | Mapping[str, Source]  # several have names
    shape: Any  # of one input, tuple[int, ...]; where inputs are a tree, the same tree of their shapes
    classes: int  # of the model's outputs: classes, labels or values
    normalize: Normalize | None
    names: Sequence[str] | None = None  # of the classes, where they have names
    dtype: torch.dtype | None = None  # of the inputs, where they are not floats
    vocabulary: int | None = None  # of the inputs, where they are tokens; None: that of the outputs
    pad_token: int | None = None  # that texts are padded with, where their tokens are those of the model's own tokenizer
    token_bytes: torch.Tensor | None = None  # (vocabulary,) the bytes of text of each target token; None: a token is a byte
    units: Units | None = None  # of target values that were standardised
    files: Mapping[str, str] = field(default_factory=dict)  # name → text, kept in the run's directory: a tokenizer, …
    example: Tree | None = None  # the inputs of two samples; None: of this shape and type
    pixels: Range | None = None  # of the values of image files of more than 8 bits, or those that the user gave
    images: str | None = None  # the key of the images, where inputs are a dict: they are augmented and normalised
    validation: Source | Mapping[str, Source] | None = None  # None: there is none, and a run selects on the test set
    origins: Mapping[str, str] = field(default_factory=dict)  # set → where its samples come from, in words, where it is known
    inputs: str = ""  # what the inputs are, in short, for the run's first line
    doubts: Sequence[str] = ()  # what looks wrong in the data, a line each

    def sets(self, split: str) -> Mapping[str, Source]:
        """Return the sets of a split, test or validation, by name: one alone is "", and {} where there is none."""
        found = self.test if split == "test" else self.validation
        return {} if found is None else found if isinstance(found, Mapping) else {"": found}

    def two_samples(self, device: torch.device) -> Tree:
        """Return the inputs of two samples as zeros, to try a model with. What is true or false is true: a mask of nothing."""
        if self.example is None:
            return torch.zeros(2, *self.shape, device=device, dtype=self.dtype)
        return map_tensors(lambda t: torch.full_like(t, t.dtype == torch.bool, device=device), self.example)


@dataclass
class Inputs:
    """The inputs of samples that are to be predicted, as training encoded them.

    Each block is a number of samples, and what reads some of them; reading raises DataError.
    """

    blocks: Iterator[tuple[int, Callable[[slice], Tree]]]
    unknown: Counter[str] = field(default_factory=Counter)  # column → its rows with a category that no training row has


@dataclass
class OwnData:
    """What a finished run keeps of its own data, where it is evaluated on data of another place."""

    splits: Splits  # without samples
    hash: str  # the fingerprint of its training samples; "" where it has none
    holdout: float | None = None  # the share of the other data that the command asks for; None: all
    test: bool = False  # whether the command gives data.test


class Normalize:
    """Turns uint8 or float inputs into (x − mean) / std per channel, computed in float32."""

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        self.mean, self.std = torch.tensor(mean).view(-1, 1, 1), torch.tensor(std).view(-1, 1, 1)
        self.dtype = torch.float32  # of the results

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise inputs (n, c, h, w) that are on this normaliser's device."""
        values = x.float() if x.is_floating_point() else x  # bytes become floats as the mean is subtracted: one kernel fewer
        return (values - self.mean).div_(self.std).to(self.dtype)  # not sub_: x may be the source's

    def to(self, device: torch.device) -> Normalize:
        """Return the same normalisation for inputs on a device."""
        moved = copy(self)
        moved.mean, moved.std = self.mean.to(device), self.std.to(device)
        return moved

    def rounded(self, dtype: torch.dtype) -> Normalize:
        """Return the same normalisation with results of this type."""
        rounded = copy(self)
        rounded.dtype = dtype
        return rounded


@dataclass
class Units:
    """Turns standardised values (n, k) back into those of the data: value × std + mean."""

    mean: torch.Tensor  # (k,)
    std: torch.Tensor  # (k,)

    def __call__(self, values: torch.Tensor) -> torch.Tensor:
        """Return values (n, k) in the data's units: targets, or outputs, of which a loss may want several for each target."""
        each = values.shape[-1] // len(self.mean) if values.ndim > 1 else 1
        return values * self.std.repeat_interleave(each) + self.mean.repeat_interleave(each)

    def to(self, device: torch.device) -> Units:
        """Return the same units for values on a device."""
        return Units(self.mean.to(device), self.std.to(device))


def number_apart(count: int, share: float) -> int:
    """Return how many of so many samples are held out for the test. Raises DataError where one of the sets would be empty."""
    apart = round(count * share)
    if not 0 < apart < count:
        raise DataError(
            f"data.holdout={share:g} holds {apart} of {count:,} samples out, and both sets need some: set another share"
        )
    return apart


class Data(Option):
    """The base of every data option."""

    changes = "trains on other samples"
    stage_keys: ClassVar[tuple[str, ...]] = ("size",)
    stays: ClassVar[str] = "the samples and their order are one for the whole run"
    drop_last: bool
    order: Sampling
    # A share of the training set, a set of its own, auto (that, else a share), or several sets of these by name.
    validation: Validation | Mapping[str, Any] = None
    test: Any = None  # the test set, or several by name, where the user chooses it
    beside: frozenset[str] = frozenset()  # what the settings name for other sets of the data, of an option that is `alone`
    max_value: float | None = 255.0  # the largest value of an input; None where there is no bound
    on_device = False  # samples are made on the model's device
    mirrored_changes_label = False  # a mirrored image shows another class
    tokens: bool | None = False  # inputs are sequences of tokens, which may differ in length; None where only the user knows
    each_token_counts = True  # each token of a sample is a target of the loss, where targets are tokens
    byte_tokens = True  # a token is a byte: losses are also in bits per byte
    may_differ_in_length = False  # samples may be sequences of several lengths, other than tokens
    targets: TargetKind | None = "class"  # what a sample's target is; None where only the user knows
    views = 1  # how many views the augmentation makes of each sample
    input_files: ClassVar[tuple[str, ...]] = ()  # endings of the files that `read_inputs` reads
    reads_rows = False  # `read_inputs` reads any file, and lines: they are tables
    reads: ClassVar[tuple[TargetKind, ...]] = ()  # what targets it can read, where there are several kinds; the usual one first
    kind: TargetKind | None = None  # the one of them that the user chose
    own: OwnData | None = None  # of a finished run that is evaluated on data of another place

    def see(self, run: RunSpec) -> None:
        """Read the targets that the user chose, or those that the task wants; for pairs, make two views of each image."""
        wanted = run.parts["task"].targets
        if self.reads:
            self.targets = self.kind or next((kind for kind in wanted if kind in self.reads), self.reads[0])
        if self.targets is None and len(wanted) == 1:
            self.targets = wanted[0]
        if "pair" in wanted and self.targets == "class" and not self.tokens:
            self.targets, self.views = "pair", 2

    def rules(self, run: RunSpec) -> Iterator[str]:
        """Yield what is wrong with the named sets, or what `validate` says of each of them alone."""
        return named_sets.problems(self, run)

    def several(self, split: str) -> Mapping[str, Any]:
        """Return the settings of the named sets of a split, validation or test; {} where it is one set, or none."""
        given = self.test if split == "test" else self.validation
        return given if isinstance(given, Mapping) else {}

    def judging_sets(self) -> Sequence[str]:
        """Return the names of the sets that models are selected by; one alone is \"\"."""
        return list(self.several("test" if self.validation is None else "validation")) or [""]

    def alone(self, split: str = "", name: str = "") -> Data:
        """Return the option with one set in each split: the set `name` of `split`, and the first ones of others."""
        alone = copy(self)
        alone.beside = frozenset(str(each) for of in SPLITS for each in self.several(of).values())
        for each in SPLITS:
            if named := self.several(each):
                vars(alone)[each] = named[name] if each == split else next(iter(named.values()))
        return alone

    def advise(self, run: RunSpec) -> Iterator[str]:
        if self.validation is None:
            yield (
                "data.validation=null: there is no validation set, so what selects (best checkpoint, plateau, early stopping, "
                "best job) looks at the test set, whose figures are then too good"
            )

    def load(self, device: torch.device) -> Splits:
        """Load the data, or open its files: the training and the test set, and the validation set where it is one of its own.

        Raises UserError where it is missing or not usable.
        """
        raise NotImplementedError

    def load_set(self, split: str, beside: Splits, device: torch.device) -> Source:
        """Return the one set of a split, for data that is loaded. Raises UserError where it does not fit that."""
        return named_sets.load_beside(self, split, beside, device)

    def load_sets(self, device: torch.device) -> Splits:
        """Load the data, and hold out the validation set from the training set where it is a share of it. Raises UserError.

        Data that a finished run is evaluated on is used whole, encoded as the run's own, where it is other data than that.
        """
        try:
            return named_sets.load(self, device) if self.own is None else self._judged(self.own, device)
        except OSError as error:
            if error.filename is None:
                raise
            raise DataError(
                f"{error.filename} cannot be read ({error.strerror}): set the path of the data, or mend the file"
            ) from None

    def load_whole(self, own: Splits) -> Splits | None:
        """Return all samples as the training and the test set, encoded as those of a run's own data. Raises UserError.

        None where the option has no such way, or where there is a test set: the sets are then those of training.
        """
        return None

    def other_file(self) -> Path:
        """Return the file that a finished run is evaluated on: data.test where the command gives it, else data.path."""
        return Path(str(getattr(self, "test" if self.own is not None and self.own.test else "path")))

    def _judged(self, own: OwnData, device: torch.device) -> Splits:
        """Return the other data that a finished run is evaluated on."""
        divided = None
        with contextlib.suppress(UserError):  # too few samples to be divided; what else is wrong is found again
            divided = named_sets.load(self, device)
            if (fingerprint(divided.train) or {}).get("hash") == own.hash:  # it was moved: its test set is the run's own
                return divided
        if named := self.several("test"):
            each = {name: self.alone("test", name)._judged(own, device) for name in named}
            return replace(
                next(iter(each.values())), test={name: data.sets("test")[""] for name, data in each.items()}, origins={}
            )
        data = self.load_whole(own.splits)
        if data is None:
            return divided or named_sets.load(self, device)
        if own.holdout is None:
            return data
        _, test = hold_out(data.sets("test")[""], own.holdout)
        return replace(data, test=test, origins={"test": f"{own.holdout:g} of the samples"})

    def share(self) -> float | None:
        """Return which share of the training samples is held out, where the data has no validation set of its own."""
        shares = [setting for setting in self.several("validation").values() if isinstance(setting, float)]
        given = shares[0] if shares else self.validation
        return AUTO_SHARE if given == "auto" else given if isinstance(given, float) else None

    def order_of(self, source: Source) -> Order:
        """Return the order in which the samples of the training set come. Raises UserError."""
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
        return Order(len(source.order(0, 0)), source.order, repeats=source.own_code is not None)

    def _no_order(self, wanted: str, told_by: str) -> UserError:
        return UserError(
            f"data.order={self.order} needs {wanted}, which is not known before the samples are read: set data.order=shuffled, "
            f"or give your own Dataset (data=own) {told_by}"
        )

    def shape(self) -> tuple[int, ...] | None:
        """Return the shape of one input; None where only loading tells."""
        return None

    def encode(self, text: str, data: Splits) -> torch.Tensor:
        """Return the tokens of a text (length,), as the model takes them. Raises DataError."""
        raise DataError(f"{type(self).__name__.lower()} does not read text")

    def decode(self, tokens: Sequence[int], data: Splits) -> str | None:
        """Return the text that the tokens of an input stand for; None where the option cannot tell."""
        return None

    def read_inputs(self, file: Path | Iterable[bytes], data: Splits, size: int) -> Inputs:
        """Return the inputs of a file, or of its lines, in blocks of up to `size`, for predictions.

        Raises UserError where the file as a whole is wrong.
        """
        raise NotImplementedError

    def reads_file(self, path: Path) -> bool:
        """Whether `read_inputs` reads such a file."""
        return self.reads_rows or path.suffix.lower() in self.input_files

    def decodes_images(self) -> bool:
        """Whether samples are image files, decoded as they are read."""
        return False

    def train_samples(self) -> int | None:
        """Return the number of training samples; None where only loading tells."""
        samples, share = self.loaded_samples(), self.share()
        return samples if samples is None or share is None else samples - held_out_count(samples, share)

    def loaded_samples(self) -> int | None:
        """Return the number of training samples, those included that are held out of them; None where only loading tells."""
        return None


def measure_normalization(x: torch.Tensor) -> Normalize:
    """Return the normalisation that brings inputs x (n, c, …) to mean 0 and standard deviation 1 per channel."""
    per_channel = x.double().transpose(0, 1).flatten(1)
    return Normalize(per_channel.mean(1).tolist(), per_channel.std(1).tolist())


def measure_on_some(source: Source, images: str | None = None) -> Normalize:
    """Return the normalisation measured on up to 500 samples, spread evenly over a source; `images` is their key in a dict."""
    count = min(len(source), 500)
    x, _ = source.fetch(torch.arange(count) * (1 if source.in_order else len(source) // count))
    return measure_normalization(x if images is None else x[images])


def beside(path: str | None, validation: object) -> Path | None:
    """Return the file of the validation set, in the folder of the training file `path`; None where it is no file."""
    return Path(str(path)).parent / validation if path and isinstance(validation, str) else None


def hash_fraction(name: str) -> float:
    """Return a number in [0, 1) that depends on a sample's name alone, to hold out the same samples in every run."""
    return int.from_bytes(hashlib.sha256(name.encode(errors="surrogateescape")).digest()[:8], "big") / 2**64
