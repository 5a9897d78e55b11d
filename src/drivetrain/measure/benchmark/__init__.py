"""Runs side by side: interleaved turns, ratios with intervals, verdicts."""
