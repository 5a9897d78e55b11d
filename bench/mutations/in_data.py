"""Faults."""

from bench.mutations.fault import Fault

FAULTS: tuple[Fault, ...] = ()
