"""Frees the memory that a failed step holds."""

from __future__ import annotations

import gc
import sys
import traceback

import torch


def release_memory(error: BaseException, device: torch.device) -> None:
    """Free what the failed step holds, in one piece, and forget for which shapes the model was compiled.

    The error's frames hold the step's activations. torch keeps their memory in blocks of the old sizes, which smaller
    tensors would only break up. And a compiler that has seen two batch sizes compiles slower code for any size.
    """
    cause: BaseException | None = error
    while cause is not None:
        traceback.clear_frames(cause.__traceback__)
        cause = cause.__cause__ or cause.__context__
    free_memory(device)


def free_memory(device: torch.device) -> None:
    """Free all unreferenced memory, and drop what was compiled for it."""
    gc.collect()
    if device.type != "cpu":
        torch.get_device_module(device).empty_cache()
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()
