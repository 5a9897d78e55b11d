"""The verdict on two traces: is rounding the cause of all their differences? If not, which is the first other one?"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from drivetrain.core.lazy import torch

# The tensors to compare, in the order in which an update computes them: the first difference is the cause of those after it.
PHASES = (
    "samples", "start", "inputs", "targets", "forward", "loss", "buffers", "gradient", "clipped gradient", "learning rate",
    "optimizer state", "weights", "average", "evaluation",
)  # fmt: skip
WHOLE = 4096  # elements of the largest tensor that is kept without a sketch
BUCKETS = 256  # of a larger tensor's sketch
ROW_BUCKETS = 16  # of the sketch of one sample's activations
FLOAT32 = 2.0**-24  # the largest relative error of one rounding to float32

Array = npt.NDArray[np.float64]
Key = tuple[int, str, str]  # update from 1, phase, name of the module or parameter


@dataclass
class TracedTensor:
    """One tensor of a trace."""

    values: Array  # float64: the tensor or its sketch
    rounding: float = 0.0  # the largest norm of the error of storing it in its number format
    shape: tuple[int, ...] = ()  # of one sample, or (elements,) of a tensor: other shapes are not compared

    def distance(self, other: TracedTensor) -> float:
        """Return the norm of the difference; infinite if one of the two is not finite."""
        distance = float(np.linalg.norm(self.values - other.values))
        if math.isfinite(distance):
            return distance
        return 0.0 if np.array_equal(self.values, other.values, equal_nan=True) else math.inf

    @property
    def size(self) -> float:
        """The norm."""
        return float(np.linalg.norm(self.values))

    def comparable(self, other: TracedTensor) -> bool:
        """True if the two are the same kind of tensor."""
        return self.shape == other.shape and self.values.shape == other.values.shape


@dataclass
class Trace:
    """The tensors that one run computed, and the facts to compare them by."""

    entries: dict[Key, TracedTensor] = field(default_factory=dict)
    kinds: dict[str, str] = field(default_factory=dict)  # module's name → its class
    settings: dict[str, dict[str, object]] = field(default_factory=dict)  # parameter's name → its optimizer settings
    random: list[str] = field(default_factory=list)  # the parts of the forward that drew random numbers
    skipped: int = 0  # updates that an overflow skipped
    notice: str = ""  # the precision's message if it has no effect on this device
    unseen: list[str] = field(default_factory=list)  # the parts that cannot be observed, and why, for the report


@dataclass
class TracedRows:
    """One tensor of one micro-batch: sketches of its samples."""

    indices: Array  # (n,) of the samples
    values: Array  # (n, buckets)
    rounding: float  # relative
    shape: tuple[int, ...]  # of one sample

    @staticmethod
    def entry(parts: Sequence[TracedRows]) -> TracedTensor | None:
        """Return all rows in the order of the samples; None if the parts have different shapes."""
        if len({part.shape for part in parts}) > 1:
            return None
        indices = np.concatenate([part.indices for part in parts])
        values = np.concatenate([part.values for part in parts])[np.argsort(indices, kind="stable")]
        return TracedTensor(values, parts[0].rounding * float(np.linalg.norm(values)), (len(values), *parts[0].shape))


@lru_cache(maxsize=64)
def _signs(count: int) -> torch.Tensor:
    """Random signs (count,), the same in every run. Those of fewer elements are a prefix of those of more."""
    size = 1 << max(12, (count - 1).bit_length())
    signs = torch.randint(0, 2, (size,), generator=torch.Generator().manual_seed(20), dtype=torch.int8)
    return signs.mul_(2).sub_(1)[:count]


def _folded(rows: torch.Tensor, buckets: int) -> torch.Tensor:
    """Rows (n, elements) times random signs, summed into buckets (n, buckets) in float64."""
    signed = rows.double() * _signs(rows.shape[1]).to(rows.device)
    short = -rows.shape[1] % buckets
    padded = torch.nn.functional.pad(signed, (0, short)) if short else signed
    return padded.view(len(rows), -1, buckets).sum(1)


def roundoff(dtype: torch.dtype) -> float:
    """Return the largest relative error of one rounding to a dtype; 0 for whole numbers."""
    return float(torch.finfo(dtype).eps) / 2 if dtype.is_floating_point else 0.0


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return a plain tensor: the whole one if ranks hold shards. Called on all ranks."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def of_tensor(tensor: torch.Tensor, scale: float = 1.0) -> TracedTensor:
    """Return the entry of a weight, gradient, buffer or state, divided by `scale`."""
    flat = tensor.detach().reshape(1, -1)
    values = flat.double() if flat.shape[1] <= WHOLE else _folded(flat, BUCKETS)
    kept = (values[0] / scale).cpu().numpy()
    return TracedTensor(kept, roundoff(tensor.dtype) * float(np.linalg.norm(kept)), (tensor.numel(),))


def of_rows(tensor: torch.Tensor, is_target: bool = False) -> tuple[Array, float, tuple[int, ...]]:
    """Return sketches (n, buckets) of a batch's samples, the format's rounding, and the shape of one sample.

    Padding of tokens (0) and of targets (negative) adds nothing, so that batches padded to different lengths can be compared.
    """
    rows = tensor.detach().reshape(len(tensor), -1)
    if not rows.is_floating_point():
        rows = (rows.double() + 1).clamp(min=0) if is_target else rows.double()
        return _folded(rows, ROW_BUCKETS).cpu().numpy(), 0.0, ()
    return _folded(rows, ROW_BUCKETS).cpu().numpy(), roundoff(tensor.dtype), tuple(tensor.shape[1:])


def of_numbers(*numbers: float, rounding: float = 0.0) -> TracedTensor:
    """Return the entry of some numbers, such as a loss."""
    values = np.array(numbers, dtype=np.float64)
    return TracedTensor(values, rounding * float(np.linalg.norm(values)))


MARGIN = 8.0  # times the floor: a difference above it is not rounding
TRUSTED = 30.0  # times the random rounding: up to this limit, a run's differences from itself count as rounding
UNEXPLAINED = 0.02  # share of a tensor that a common factor may leave unexplained
NEVER_ROUNDED = {"samples", "start", "inputs", "targets", "learning rate"}  # except when they are stored
ALWAYS_COMPARED = ("samples", "start")  # even if the two runs have different shapes: this is a difference
INSIDE = ("forward", "buffers", "average")  # a model may be rearranged: its output and its parameters decide
EXACT, CLOSE, DIFFERS, NO_EFFECT = "exact", "within rounding", "differs", "no effect"


@dataclass
class Floors:
    """Runs that differ from the reference only by rounding and the order of sums.

    A floor is relative to the entry's size, and is the largest of all updates up to the next one: a ReLU that rounding flips
    makes few entries differ much. A floor is at least the median of its phase, for the same reason.
    """

    permuted: Sequence[Trace] = ()  # the reference with the samples of each micro-batch in another order
    shadow: Trace | None = None  # the reference in float64
    rounded: Sequence[Trace] = ()  # the shadow, with each operation rounded at random
    tested: Sequence[Trace] = ()  # the tested run, then with its samples in other orders: the effect of sums in its own format

    def relative_to(self, reference: Trace) -> dict[Key, float]:
        """Return the floor of each entry, relative to the size of the reference's."""
        own = {key: self.of(key, ours) / ours.size for key, ours in reference.entries.items() if ours.size}
        floors = {
            (at, phase, name): max(own.get((before, phase, name), 0.0) for before in range(at + 2))
            for at, phase, name in own
        }  # fmt: skip
        for at, phase in {key[:2] for key in floors if key[1] not in NEVER_ROUNDED | {"evaluation"}}:
            keys = [key for key in floors if key[:2] == (at, phase)]
            middle = float(np.median([floors[key] for key in keys]))
            floors |= {key: max(floors[key], middle) for key in keys}
        return floors

    def of(self, key: Key, reference: TracedTensor) -> float:
        """Return the largest difference that rounding can cause in an entry."""
        permuted = [trace.entries[key] for trace in self.permuted if key in trace.entries]
        floor = max([reference.rounding, *(o.distance(reference) for o in permuted if o.comparable(reference))])
        exact = self.shadow.entries.get(key) if self.shadow is not None else None
        if exact is None or not exact.comparable(reference):
            return floor
        rounded = [trace.entries[key] for trace in self.rounded if key in trace.entries]
        rounding = max([reference.rounding, *(o.distance(exact) for o in rounded if o.comparable(exact))])
        orders = [trace.entries[key] for trace in self.tested if key in trace.entries]
        measured = [exact.distance(reference), *(o.distance(orders[0]) for o in orders[1:] if o.comparable(orders[0]))]
        # A larger one is not rounding: it is a fault that depends on the order, or between the reference and its shadow.
        return max(floor, rounding, *(distance for distance in measured if distance <= TRUSTED * rounding))


@dataclass
class Finding:
    """One entry of both traces."""

    key: Key
    distance: float  # the norm of the difference
    floor: float
    size: float  # the norm of the reference's entry
    decides: bool  # False for a layer inside the model: it may differ as long as the model's output is the same

    @property
    def ratio(self) -> float:
        """The difference in units of the floor."""
        return 0.0 if not self.distance else self.distance / self.floor if self.floor else float("inf")

    @property
    def is_different(self) -> bool:
        """True if it is more than rounding."""
        return self.ratio > MARGIN

    def relative(self, value: float) -> float:
        """A norm as a share of the reference's."""
        return value / self.size if self.size else (0.0 if not value else float("inf"))


@dataclass
class TraceVerdict:
    """The answer and its evidence."""

    answer: str  # EXACT, CLOSE, DIFFERS or NO_EFFECT
    bit_for_bit: bool
    first: Finding | None  # the first difference, in the order in which an update computes
    findings: list[Finding] = field(default_factory=list)
    flipped: bool = False  # float32 differs by more than its floor, and float64 does not: a ReLU flipped, or the like


def judge(tested: Trace, reference: Trace, floors: Floors, coarser: bool = False) -> TraceVerdict:
    """Compare two traces; `coarser`: the two runs use different number formats."""
    findings = list(_findings(tested, reference, floors))
    order = {phase: i for i, phase in enumerate(PHASES)}
    place = {key: i for i, key in enumerate(reference.entries)}
    different = [f for f in findings if f.is_different]
    bit_for_bit = all(finding.distance == 0 for finding in findings)
    if any(f.decides for f in different):
        first = min(different, key=lambda f: (f.key[0], order[f.key[1]], place[f.key]))
        return TraceVerdict(DIFFERS, False, first, findings)
    return TraceVerdict(CLOSE if coarser and not bit_for_bit else EXACT, bit_for_bit, None, findings)


def may_have_flipped(verdict: TraceVerdict) -> bool:
    """True if a ReLU that rounding flips could be the difference: the runs have the same data, start and losses."""
    return verdict.answer == DIFFERS and not any(
        f.is_different and f.decides and f.key[1] in NEVER_ROUNDED | {"loss"} for f in verdict.findings
    )


def same_in_float64(tested: Trace, reference: Trace, permuted: Sequence[Trace]) -> bool:
    """True if two runs in float64 differ only by as much as rounding to float32 or the order of sums can cause."""
    entries = {
        key: replace(entry, rounding=max(entry.rounding, FLOAT32 / MARGIN * entry.size))
        for key, entry in reference.entries.items()
    }  # fmt: skip
    return judge(tested, replace(reference, entries=entries), Floors(permuted=permuted)).answer != DIFFERS


def _findings(tested: Trace, reference: Trace, floors: Floors) -> Iterable[Finding]:
    relative = floors.relative_to(reference)
    for key, ours in reference.entries.items():
        other = tested.entries.get(key)
        if other is None or (key[1] not in ALWAYS_COMPARED and not ours.comparable(other)):
            continue
        decides = key[1] not in INSIDE or not key[2] or (key[1] == "average" and (0, "start", key[2]) in reference.entries)
        if not ours.comparable(other):
            yield Finding(key, math.inf, 0.0, ours.size, decides)
            continue
        measured = relative.get(key, 0.0) * ours.size if ours.size else floors.of(key, ours)
        floor = max(measured, ours.rounding, other.rounding)
        yield Finding(key, ours.distance(other), floor, ours.size, decides)


def common_factor(pairs: Iterable[tuple[TracedTensor, TracedTensor]]) -> float | None:
    """Return the common factor from these entries of the reference to those of another run; None if there is none or it is 1.

    Entries that are equal in both, or zero in the reference, are left out.
    """
    factors = []
    for ours, other in pairs:
        distance = ours.distance(other) if ours.comparable(other) else math.inf
        if ours.size and distance:
            factors.append(float(np.vdot(ours.values, other.values)) / ours.size**2 if math.isfinite(distance) else math.nan)
            if math.isnan(factors[-1]) or TracedTensor(other.values - factors[-1] * ours.values).size > UNEXPLAINED * other.size:
                return None
    middle = float(np.median(factors)) if factors else 1.0
    return middle if np.allclose(factors, middle, rtol=0.02) and abs(middle - 1) > 1e-4 else None
