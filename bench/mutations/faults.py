"""All faults, by parts of the source."""

from __future__ import annotations

from bench.mutations import in_data, in_measuring, in_parallel, in_running, in_training

PARTS = {
    "training": in_training.FAULTS,
    "data": in_data.FAULTS,
    "parallel": in_parallel.FAULTS,
    "running": in_running.FAULTS,
    "measuring": in_measuring.FAULTS,
}
ALL = tuple(fault for faults in PARTS.values() for fault in faults)
