"""Replays a compiled function by a single launch, as a CUDA graph."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch

logger = logging.getLogger(__name__)
Outputs = tuple[torch.Tensor, ...]


class CapturedGraph:
    """Captures a graph's second call as a CUDA graph, and replays it from then on.

    The graphs of all shapes take their memory from one `pool`. They never run at the same time, and what one returns has
    been read before the next one runs.
    """

    def __init__(self, run: Callable[..., Outputs], pool: Any) -> None:
        self._run, self._pool, self._call = run, pool, self._first

    def __call__(self, *inputs: torch.Tensor) -> Outputs:
        return self._call(*inputs)

    def _first(self, *inputs: torch.Tensor) -> Outputs:
        """Load and autotune kernels, which a capture cannot do."""
        self._call = self._second
        return self._run(*inputs)

    def _second(self, *inputs: torch.Tensor) -> Outputs:
        self._call = self._replay if self._capture(inputs) else self._run
        return self._call(*inputs)

    def _capture(self, inputs: tuple[torch.Tensor, ...]) -> bool:
        """Capture one call. Returns False if CUDA cannot: nothing has been computed then, because a capture only records."""
        self._graph, self._inputs = torch.cuda.CUDAGraph(), [t.clone() for t in inputs]
        stream = torch.cuda.current_stream()
        try:
            # In "global" mode the capture would fail when a loader's thread pins memory in the meantime.
            with torch.cuda.graph(self._graph, pool=self._pool, capture_error_mode="thread_local"):
                self._outputs = self._run(*self._inputs)
        except RuntimeError as error:
            torch.cuda.set_stream(stream)  # some releases of torch leave the stream of a failed capture current
            _end_capture_of_random_numbers()
            logger.warning("compile=step: no CUDA graph: %s. Going on with one launch for each kernel", first_line(error))
            return False
        return True

    def _replay(self, *inputs: torch.Tensor) -> Outputs:
        for captured, given in zip(self._inputs, inputs, strict=True):
            captured.copy_(given, non_blocking=True)
        self._graph.replay()
        return self._outputs


def _end_capture_of_random_numbers() -> None:
    """Let the device draw random numbers again.

    Where a capture fails, torch leaves the device's generator as if it were still captured: each later draw would raise
    "Offset increment outside graph capture". A copy of the generator's state is not captured.
    """
    generator = torch.cuda.default_generators[torch.cuda.current_device()]
    generator.graphsafe_set_state(generator.clone_state())


def first_line(error: Exception) -> str:
    """Return an error's type and the first line of its message."""
    return f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), '')}"
