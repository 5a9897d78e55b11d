"""Counts what a device would be told to do: each operation that computes or copies is a launch, a replayed graph is one.

The operations are those of a CPU, whose backward, fused updates and loaders call the same ones as a GPU's.
"""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from drivetrain.compile import replays, whole_step
from drivetrain.core.step.microbatch import MicroBatch
from drivetrain.loader import pieces

FREE = (
    "empty",
    "new_empty",
    "detach",
    "alias",
    "lift_fresh",
    "_local_scalar_dense",
    "is_same_size",
    "_unsafe_view",
    "pin_memory",
)


class Launches(TorchDispatchMode):
    """Counts operations by name, for each update of a stream apart."""

    def __init__(self) -> None:
        super().__init__()
        self.updates: list[Counter[str]] = [Counter()]
        self.replaying = False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        if not (self.replaying or func.is_view or name.startswith(FREE)):
            self.updates[-1][name] += 1
        return func(*args, **(kwargs or {}))

    def watch(self, stream: Iterator[MicroBatch]) -> Iterator[MicroBatch]:
        """A stream watcher, which begins a new count when the loop asks for what comes after an update."""
        for micro in stream:
            yield micro
            if micro.last:
                self.updates.append(Counter())

    def simulate(self, monkeypatch: pytest.MonkeyPatch, samples_at_once: int = 10**6) -> None:
        """Let a CPU's samples come in pieces, and whole steps be replayed, as on CUDA: a capture computes nothing."""
        counter = self

        def capture(graph: replays.CapturedGraph) -> bool:
            def replay() -> None:
                counter.updates[-1]["replay"] += 1
                counter.replaying = True
                graph._outputs = graph._run()
                counter.replaying = False

            graph._graph = type("Graph", (), {"replay": staticmethod(replay)})()
            return True

        monkeypatch.setattr(pieces, "samples_at_once", lambda *_: samples_at_once)
        monkeypatch.setattr(replays.CapturedGraph, "_capture", capture)
        monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "pool")
        monkeypatch.setattr(whole_step, "has_graphs", lambda device: True)
