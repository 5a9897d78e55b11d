"""Measurements of what techniques bring and cost: benchmarks, profiles, tuning, claims and reports."""
