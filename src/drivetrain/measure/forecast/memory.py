"""The peak of a rank's memory, split by what takes it, with sharding over assumed ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from drivetrain.engine.rehearsal.fake_step import BATCH, GRADIENTS, PARAMETERS, STATE
from drivetrain.engine.rehearsal.recorder import OTHER
from drivetrain.measure.forecast.devices import Device, Figure

KINDS = (PARAMETERS, GRADIENTS, STATE, OTHER, BATCH)
COUNTED = (0.97, 1.04)  # of the peak of what was counted on this machine, where kernels' own buffers were measured
ELSEWHERE = (0.90, 1.15)  # where another device has other kernels
ALLOWANCE = Figure(0.05, 0.0, 0.15)  # of the activations, for kernels' own buffers where these were not measured


@dataclass(frozen=True)
class Ranks:
    """How a run is spread over ranks, as far as memory and network depend on it."""

    count: int = 1
    shards: int = 1  # over which weights, gradients and optimizer state are divided
    keeps_gathered: bool = False  # whole weights stay between forward and backward
    whole_gradients: bool = False  # gradients are divided only at an update's last micro-batch
    offloaded: bool = False  # a rank's own part of them is in the host's memory
    largest_block: float = 0.0  # bytes of the weights of the largest block that is gathered at once


class Memory(NamedTuple):
    """The peak of one rank."""

    parts: dict[str, float]  # bytes by kind, and the workspace
    peak: Figure


def peak_memory(counted: Mapping[str, int], at_most: float, measured: bool, ranks: Ranks, device: Device) -> Memory:
    """Return the peak. `counted` are bytes by kind; `at_most` those with kernels' own buffers, where they were `measured`."""
    parts: dict[str, float] = {kind: float(counted.get(kind, 0)) for kind in KINDS}
    parts = sharded(parts, ranks)
    factors = COUNTED if measured else ELSEWHERE
    if measured:
        workspace = Figure.exactly(max(0.0, at_most - sum(counted.values())))
    else:
        workspace = device.reserved + ALLOWANCE.times(parts[OTHER])
    whole = sum(parts.values())
    parts["workspace"] = workspace.value + (device.fragmentation.value - 1) * whole
    low, high = factors[0] * device.fragmentation.low, factors[1] * device.fragmentation.high
    return Memory(parts, Figure(sum(parts.values()), low * whole + workspace.low, high * whole + workspace.high))


def sharded(parts: Mapping[str, float], ranks: Ranks) -> dict[str, float]:
    """Divide what the ranks share. A block's weights are gathered while the one before it computes, its gradients are whole."""
    n = ranks.shards
    if n == 1 and not ranks.offloaded:
        return dict(parts)
    own = 0.0 if ranks.offloaded else 1 / n  # of what is divided
    gathered = parts[PARAMETERS] if ranks.keeps_gathered else 2 * ranks.largest_block
    gradients = parts[GRADIENTS] if ranks.whole_gradients else own * parts[GRADIENTS] + ranks.largest_block
    return {
        **parts,
        PARAMETERS: own * parts[PARAMETERS] + gathered,
        GRADIENTS: gradients,
        STATE: own * parts[STATE],
    }


def sent_bytes(parameters: float, ranks: Ranks, micro_batches: int) -> float:
    """Bytes that a rank sends in an update: one all-reduce of gradients, or gathering weights twice and dividing gradients."""
    if ranks.count == 1:
        return 0.0
    share = (ranks.count - 1) / ranks.count
    if ranks.shards == 1:
        return 2 * share * parameters
    gathers = micro_batches * (1 if ranks.keeps_gathered else 2)
    return share * parameters * (gathers + 1)
