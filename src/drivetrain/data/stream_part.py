"""A rank's and a worker's part of a stream, whose samples draw by their place in it."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator, Mapping
from typing import Any

from torch.utils.data import IterableDataset, get_worker_info

from drivetrain.core.machine.forking import disown_garbage, end_with_run, parent_pid
from drivetrain.core.machine.signals import STOP_SIGNALS
from drivetrain.core.step import rng, streams


def begin_worker(_: int) -> None:
    """Set up a worker's process: it ends with the run, and not at a signal that is sent to both."""
    disown_garbage()
    for number in STOP_SIGNALS:
        if number is not signal.SIGTERM:
            signal.signal(number, signal.SIG_IGN)
    if hasattr(signal, "sigtimedwait"):  # not on a Mac
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    threading.Thread(target=end_with_run, args=(parent_pid(),), daemon=True, name="end with run").start()


class StreamPart(IterableDataset[object]):
    """Every so-manyth sample of a stream, or all where it divides itself. What a sample draws follows from a key and its place.

    The draws are those from torch, numpy and random. Generators that the stream keeps belong to its own state.
    """

    def __init__(self, dataset: Any, key: int, part: int, parts: int) -> None:
        self.dataset, self.key, self.part, self.parts = dataset, key, part, parts
        self.place = 0

    def __iter__(self) -> Iterator[object]:
        info = get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        if not self.parts:  # it divides itself
            part, parts = 0, 1
        else:
            part, parts = self.part * workers + worker, self.parts * workers
        used, samples = streams.of_process(), iter(self.dataset)
        while True:
            before = [stream.save() for stream in used]
            for number, stream in enumerate(used):
                stream.seed(rng.mix(self.key, self.part, worker, self.place) ^ streams.salt(number))
            try:
                sample = next(samples)
            except StopIteration:
                self.place = 0
                return
            finally:
                for stream, saved in zip(used, before, strict=True):
                    stream.restore(saved)
            self.place += 1
            if (self.place - 1) % parts == part:
                yield sample

    def state_dict(self) -> dict[str, object]:
        """Return the state of the stream, and the place in it."""
        return {"place": self.place, "stream": self.dataset.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where a `state_dict()` was."""
        self.place = state["place"]
        self.dataset.load_state_dict(state["stream"])
