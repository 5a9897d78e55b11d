"""One forward of a model, to look at what it calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from drivetrain.core.lazy import torch
from drivetrain.core.trees import Tree, call


def run_once(model: torch.nn.Module, example: Tree, hooks: Sequence[Any]) -> None:
    """Run one forward in evaluation mode, without gradients, and then remove the hooks. The model's mode stays."""
    training = model.training
    try:
        with torch.no_grad():
            call(model.eval(), example)
    finally:
        model.train(training)
        for hook in hooks:
            hook.remove()
