"""What devices can do: data sheets of those that are not here, with the shares of them that training reaches; or measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from drivetrain.core.errors import UserError, did_you_mean
from drivetrain.core.peak_flops import from_table


class Figure(NamedTuple):
    """A value with its interval."""

    value: float
    low: float
    high: float

    @classmethod
    def exactly(cls, value: float) -> Figure:
        """A value that is counted."""
        return cls(value, value, value)

    @classmethod
    def within(cls, value: float, low: float, high: float) -> Figure:
        """A value with an interval that is given by factors of it."""
        return cls(value, value * low, value * high)

    def __add__(self, other: Figure) -> Figure:  # type: ignore[override]
        """The sum, with the sum of the intervals: the parts may be wrong together."""
        return Figure(*(a + b for a, b in zip(self, other, strict=True)))

    def times(self, factor: float) -> Figure:
        """The figure so many times."""
        return Figure(*(factor * each for each in self))

    def holds(self, value: float) -> bool:
        """Whether a value lies in the interval."""
        return self.low <= value <= self.high


GIB, GB, TB = 2**30, 1e9, 1e12
# Eager kernels reach about 60 % of the peak in large matrix products, and less in convolutions and attention. Of the bandwidth
# they reach less than a copy does: kernels of normalisations read their inputs more than once.
EFFICIENCY = {
    "product": Figure(0.60, 0.40, 0.80),
    "convolution": Figure(0.40, 0.20, 0.65),
    "attention": Figure(0.40, 0.20, 0.65),
    "bandwidth": Figure(0.60, 0.40, 0.85),
}
KERNEL_S, HOST_S, VIEW_S = Figure(3e-6, 2e-6, 5e-6), Figure(7e-6, 4e-6, 12e-6), Figure(2e-6, 1e-6, 4e-6)
RESERVED, FRAGMENTATION = Figure(0.8 * GIB, 0.5 * GIB, 1.2 * GIB), Figure(1.05, 1.0, 1.12)
AS_FORECAST = Figure(1.0, 1.0, 1.0)
HERE = "here"
FORECAST_ONLY = "forecast, never measured here"


@dataclass(frozen=True)
class Device:
    """The limits of one device. Figures are shares of the peaks that operations reach, or seconds."""

    name: str
    memory: float  # bytes
    flops: Mapping[str, float]  # a second, by number format
    bandwidth: float  # bytes a second, of its memory
    link: float  # bytes a second that one device sends to others of its machine
    source: str
    asynchronous: bool = True  # the host queues work, and does not wait for it
    efficiency: Mapping[str, Figure] = field(default_factory=lambda: EFFICIENCY)
    kernel_s: Figure = KERNEL_S  # the shortest time of a kernel
    host_s: Figure = HOST_S  # for one operation on the host: Python, the dispatcher and the launch
    view_s: Figure = VIEW_S  # for an operation that moves nothing
    reserved: Figure = RESERVED  # the driver's context, and libraries' workspaces
    fragmentation: Figure = FRAGMENTATION  # what the caching allocator holds, as a factor of what is in use
    correction: Figure = AS_FORECAST  # of the time: what was measured, divided by what was forecast


# Memory and bandwidth are those of the makers' data sheets; FLOP/s are in core/peak_flops.py. A link is one direction's.
_TABLE: dict[str, tuple[str, float, float, float, str]] = {
    "b200": ("B200", 180 * GB, 8.0 * TB, 900 * GB, "data sheet of the HGX B200"),
    "h200": ("H200", 141 * GB, 4.8 * TB, 450 * GB, "data sheet of the H200 SXM"),
    "h100": ("H100", 80 * GB, 3.35 * TB, 450 * GB, "data sheet of the H100 SXM"),
    "h100-pcie": ("H100 PCIe", 80 * GB, 2.0 * TB, 64 * GB, "data sheet of the H100 PCIe"),
    "a100": ("A100", 80 * GB, 2.039 * TB, 300 * GB, "data sheet of the A100 SXM, 80 GB"),
    "a100-40gb": ("A100", 40 * GB, 1.555 * TB, 300 * GB, "data sheet of the A100 SXM, 40 GB"),
    "l40s": ("L40S", 48 * GB, 0.864 * TB, 32 * GB, "data sheet of the L40S"),
    "l4": ("L4", 24 * GB, 0.3 * TB, 32 * GB, "data sheet of the L4"),
    "5090": ("RTX 5090", 32 * GB, 1.792 * TB, 64 * GB, "whitepaper RTX Blackwell"),
    "4090": ("RTX 4090", 24 * GB, 1.008 * TB, 32 * GB, "whitepaper Ada GPU Architecture"),
    "3090": ("RTX 3090", 24 * GB, 0.936 * TB, 32 * GB, "whitepaper GA102"),
    "v100": ("V100 SXM2", 32 * GB, 0.9 * TB, 150 * GB, "data sheet of the V100 SXM2"),
    "t4": ("Tesla T4", 16 * GB, 0.32 * TB, 16 * GB, "data sheet of the T4"),
    "mi300x": ("MI300X", 192 * GB, 5.3 * TB, 448 * GB, "data sheet of the Instinct MI300X"),
}
NAMES = (HERE, *_TABLE)
FORMATS = ("float32", "tf32", "bfloat16", "float16")


def known(name: str) -> Device:
    """Return a device of the table. Raises UserError."""
    if name not in _TABLE:
        raise UserError(f"device={name} is not known: {did_you_mean(name, list(NAMES))}")
    torch_name, memory, bandwidth, link, source = _TABLE[name]
    flops = {number: 1e12 * tflops for number in FORMATS if (tflops := from_table(torch_name, number)) is not None}
    return Device(name, memory, flops, bandwidth, link, f"{source}: {FORECAST_ONLY}")
