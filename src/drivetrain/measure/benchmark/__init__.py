"""Interleaved benchmarks of several runs: rounds of timed blocks, ratios with intervals, and verdicts on quality."""
