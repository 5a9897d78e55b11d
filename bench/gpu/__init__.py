"""One command for the day a CUDA device is there: `python -m bench.gpu STAGE` (docs/gpu.md)."""
