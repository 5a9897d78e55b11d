"""Hooks of a recorder on a run that is trained: on its step, and on what goes into and comes out of the model's modules."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from drivetrain.core import streams, trees
from drivetrain.core.microbatch import MicroBatch
from drivetrain.core.step import WrappingStep

if TYPE_CHECKING:
    from drivetrain.measure.certify.record import Recorder


@dataclass(eq=False)
class WatchedStep(WrappingStep):
    """The run's own step, with a look at what stands before and after its update."""

    recorder: Recorder
    made: bool = False
    before: float | None = None  # the running sum of losses before this update, once that has begun

    def micro_batch(self, batch: MicroBatch, loss_sum: torch.Tensor) -> None:
        if self.before is None:
            self.before = float(loss_sum)
        self.loss_sum, state = loss_sum, streams.state()
        self.recorder.rounding(self.inner.micro_batch)(batch, loss_sum)
        if any(not torch.equal(now, state[kind]) for kind, now in streams.state().items()):
            self.recorder.trace.random = ["the forward"]

    def update(self) -> bool:
        self.loss, self.before = float(self.loss_sum) - (self.before or 0.0), None
        self.recorder.before_update()
        self.made = self.inner.update()
        return self.made

    def zero_grad(self) -> None:
        self.recorder.after_update(self.loss, self.made)
        self.inner.zero_grad()


def hidden(trainer: Any) -> str:
    """Why the modules of a run cannot be looked into; "" if they can."""
    if not trainer.parallel.own_forward:
        return "layers: each rank runs a part of the model"
    return "layers: the model is compiled" if trainer.compile_seconds() is not None else ""


@contextmanager
def watched_modules(recorder: Recorder) -> Iterator[None]:
    """Within the context the inputs and outputs of the model's modules are recorded, a row for each sample."""
    model, watch = recorder.trainer.model, _Modules(recorder)
    with ExitStack() as hooks:
        hooks.callback(model.register_forward_pre_hook(watch.begin, prepend=True).remove)
        for name, module in model.named_modules():
            recorder.trace.kinds[name] = type(module).__name__
            if not any(True for _ in module.children()):
                hooks.callback(module.register_forward_pre_hook(partial(watch.keep, f"input of {name}")).remove)
            hooks.callback(module.register_forward_hook(partial(watch.keep, name)).remove)
        yield


class _Modules:
    """Counts the calls of the modules, and keeps what they are given and give."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._forwards = 0  # of the model in this update
        self._attempt = 0  # the update that they belong to
        self._calls: Counter[str] = Counter()

    def begin(self, model: torch.nn.Module, args: Any) -> None:
        """The model's forward begins."""
        if not model.training:
            return
        if self._attempt != self._recorder.attempt:
            self._attempt, self._forwards = self._recorder.attempt, 0
        self._forwards += 1
        self._calls.clear()

    def keep(self, name: str, module: torch.nn.Module, *trees_of_call: Any) -> None:
        """Keep the last of what a hook gets: the output of a module, or else its input."""
        recorder = self._recorder
        self._calls[name] += 1
        if not recorder.trainer.model.training or not 1 <= self._forwards <= len(recorder.batches):
            return  # an evaluation, or the second pass of a loss that takes two
        with recorder.looking():
            for number, leaf in enumerate(trees.leaves(trees_of_call[-1])):
                if isinstance(leaf, torch.Tensor) and leaf.ndim and leaf.is_floating_point() and not hasattr(leaf, "full_tensor"):
                    marks = (f" #{self._calls[name]}" if self._calls[name] > 1 else "") + (f" ({number})" if number else "")
                    recorder.add_rows("forward", name + marks, self._forwards - 1, leaf)
