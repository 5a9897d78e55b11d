"""Profiles of one run's step, and the diagnosis of what costs its time."""
