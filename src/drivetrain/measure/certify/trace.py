"""What a run computed in its first updates, small enough to keep: sketches of tensors, by update, phase and name.

A sketch is linear, so differences of sketches are sketches of differences, and their norms agree to a few percent.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from drivetrain.core.lazy import torch

# What is compared, in the order in which an update computes it: the first difference is the cause of those after it.
PHASES = (
    "samples", "start", "inputs", "targets", "forward", "loss", "buffers", "gradient", "clipped gradient", "learning rate",
    "optimizer state", "weights", "average", "evaluation",
)  # fmt: skip
WHOLE = 4096  # elements up to which a tensor is kept as it is
BUCKETS = 256  # of a larger tensor's sketch
ROW_BUCKETS = 16  # of the sketch of one sample's activations
FLOAT32 = 2.0**-24  # the largest relative error of one rounding to float32

Array = npt.NDArray[Any]
Key = tuple[int, str, str]  # update from 1, phase, name of the module or parameter


@dataclass
class Entry:
    """One tensor of a trace."""

    values: Array  # float64: the tensor or its sketch
    rounding: float = 0.0  # the norm of what storing it in its number format may lose
    shape: tuple[int, ...] = ()  # of one sample's part, or the elements of a tensor: others are not compared

    def distance(self, other: Entry) -> float:
        """Return the norm of the difference; infinite where one of the two is not finite."""
        distance = float(np.linalg.norm(self.values - other.values))
        if math.isfinite(distance):
            return distance
        return 0.0 if np.array_equal(self.values, other.values, equal_nan=True) else math.inf

    @property
    def size(self) -> float:
        """The norm."""
        return float(np.linalg.norm(self.values))

    def comparable(self, other: Entry) -> bool:
        """Whether the two are the same kind of tensor."""
        return self.shape == other.shape and self.values.shape == other.values.shape


@dataclass
class Trace:
    """What one run computed."""

    entries: dict[Key, Entry] = field(default_factory=dict)
    kinds: dict[str, str] = field(default_factory=dict)  # module's name → its class
    settings: dict[str, dict[str, float]] = field(default_factory=dict)  # parameter's name → its optimizer settings
    random: list[str] = field(default_factory=list)  # what drew random numbers in the forward; empty where nothing did
    skipped: int = 0  # updates that an overflow skipped
    notice: str = ""  # what the run's precision does not do on this device
    unseen: list[str] = field(default_factory=list)  # what cannot be looked into, and why, for the report


@dataclass
class Rows:
    """One tensor of one micro-batch: sketches of its samples."""

    indices: Array  # (n,) of the samples
    values: Array  # (n, buckets)
    rounding: float  # relative
    shape: tuple[int, ...]  # of one sample

    @staticmethod
    def entry(parts: Sequence[Rows]) -> Entry | None:
        """Return all rows in the order of the samples; None where the parts are of different shapes."""
        if len({part.shape for part in parts}) > 1:
            return None
        indices = np.concatenate([part.indices for part in parts])
        values = np.concatenate([part.values for part in parts])[np.argsort(indices, kind="stable")]
        return Entry(values, parts[0].rounding * float(np.linalg.norm(values)), (len(values), *parts[0].shape))


@lru_cache(maxsize=64)
def _signs(count: int) -> Any:
    """Random signs (count,), the same in every run. They are a prefix of those of more elements."""
    size = 1 << max(12, (count - 1).bit_length())
    signs = torch.randint(0, 2, (size,), generator=torch.Generator().manual_seed(20), dtype=torch.int8)
    return signs.mul_(2).sub_(1)[:count]


def _folded(rows: Any, buckets: int) -> Any:
    """Rows (n, elements) times random signs, summed into buckets (n, buckets) in float64."""
    signed = rows.double() * _signs(rows.shape[1]).to(rows.device)
    short = -rows.shape[1] % buckets
    padded = torch.nn.functional.pad(signed, (0, short)) if short else signed
    return padded.view(len(rows), -1, buckets).sum(1)


def roundoff(dtype: Any) -> float:
    """Return the largest relative error of one rounding to a dtype; 0 for whole numbers."""
    return float(torch.finfo(dtype).eps) / 2 if dtype.is_floating_point else 0.0


def whole(tensor: Any) -> Any:
    """Return a plain tensor: all of it where ranks hold shards. Called on all ranks."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def of_tensor(tensor: Any, scale: float = 1.0) -> Entry:
    """Return the entry of a weight, gradient, buffer or state, divided by `scale`."""
    flat = tensor.detach().reshape(1, -1)
    values = flat.double() if flat.shape[1] <= WHOLE else _folded(flat, BUCKETS)
    kept = (values[0] / scale).cpu().numpy()
    return Entry(kept, roundoff(tensor.dtype) * float(np.linalg.norm(kept)), (tensor.numel(),))


def of_rows(tensor: Any, is_target: bool = False) -> tuple[Array, float, tuple[int, ...]]:
    """Return sketches (n, buckets) of a batch's samples, the format's rounding, and the shape of one sample.

    Padding of tokens (0) and of targets (negative) counts nothing, so that batches padded to other lengths compare.
    """
    rows = tensor.detach().reshape(len(tensor), -1)
    if not rows.is_floating_point():
        rows = (rows.double() + 1).clamp(min=0) if is_target else rows.double()
        return _folded(rows, ROW_BUCKETS).cpu().numpy(), 0.0, ()
    return _folded(rows, ROW_BUCKETS).cpu().numpy(), roundoff(tensor.dtype), tuple(tensor.shape[1:])


def of_numbers(*numbers: float, rounding: float = 0.0) -> Entry:
    """Return the entry of some numbers, such as a loss."""
    values = np.array(numbers, dtype=np.float64)
    return Entry(values, rounding * float(np.linalg.norm(values)))
