"""All faults."""

from __future__ import annotations

from bench.mutations import in_data, in_measuring, in_parallel, in_running, in_training

ALL = (*in_training.FAULTS, *in_data.FAULTS, *in_parallel.FAULTS, *in_running.FAULTS, *in_measuring.FAULTS)
