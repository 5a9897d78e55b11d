"""What goes into and comes out of a model's modules while it trains, one row for each sample."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from drivetrain.core import trees
from drivetrain.measure.certify.trace import Array, Entry

if TYPE_CHECKING:
    from drivetrain.measure.certify.record import Recorder


@dataclass
class Rows:
    """One tensor of one micro-batch: sketches of its samples."""

    indices: Array  # (n,) of the samples
    values: Array  # (n, buckets)
    rounding: float  # relative
    shape: tuple[int, ...]  # of one sample

    @staticmethod
    def entry(parts: Sequence[Rows]) -> Entry | None:
        """Return all rows in the order of the samples; None where the parts are of different shapes."""
        if len({part.shape for part in parts}) > 1:
            return None
        indices = np.concatenate([part.indices for part in parts])
        values = np.concatenate([part.values for part in parts])[np.argsort(indices, kind="stable")]
        return Entry(values, parts[0].rounding * float(np.linalg.norm(values)), (len(values), *parts[0].shape))


class Activations:
    """Hooks on the modules of a model that is trained."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder, self._model = recorder, recorder.trainer.model
        self._forwards = 0  # of the model in this update
        self._update = 0
        self._calls: Counter[str] = Counter()

    def hidden(self) -> str:
        """Return why the modules cannot be looked into; "" if they can."""
        if not self._recorder.trainer.parallel.own_forward:
            return "layers: each rank runs a part of the model"
        if self._recorder.trainer.compile_seconds() is not None:
            return "layers: the model is compiled"
        return ""

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Within the context the modules' inputs and outputs are recorded."""
        handles = [self._model.register_forward_pre_hook(self._begin, prepend=True)]
        kinds = self._recorder.trace.kinds
        for name, module in self._model.named_modules():
            kinds[name] = type(module).__name__
            if not any(True for _ in module.children()):
                handles.append(module.register_forward_pre_hook(self._into(name)))
            handles.append(module.register_forward_hook(self._out_of(name)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _begin(self, module: torch.nn.Module, args: Any) -> None:
        if not module.training:
            return
        if self._update != self._recorder.attempt:
            self._update, self._forwards = self._recorder.attempt, 0
        self._forwards += 1
        self._calls.clear()

    def _into(self, name: str) -> Any:
        return lambda module, args: self._keep(module, f"input of {name}", args)

    def _out_of(self, name: str) -> Any:
        return lambda module, args, output: self._keep(module, name, output)

    def _keep(self, module: torch.nn.Module, name: str, tree: Any) -> None:
        recorder = self._recorder
        self._calls[name] += 1
        if not self._model.training or not 1 <= self._forwards <= len(recorder.batches):
            return  # an evaluation, or the second pass of a loss that takes two
        with recorder.looking():
            for number, leaf in enumerate(trees.leaves(tree)):
                if isinstance(leaf, torch.Tensor) and leaf.ndim and leaf.is_floating_point() and not hasattr(leaf, "full_tensor"):
                    marks = (f" #{self._calls[name]}" if self._calls[name] > 1 else "") + (f" ({number})" if number else "")
                    recorder.add_rows("forward", name + marks, self._forwards - 1, leaf)
