"""Measurements against other loops. `python -m bench.overhead`, `python -m bench.startup`."""
