"""Activation checkpointing: forget a block's activations, recompute them in the backward (Chen et al. 2016)."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from drivetrain.blocks import repeated_blocks
from drivetrain.errors import UserError
from drivetrain.lazy import torch
from drivetrain.spec import Part


class Checkpointing(Part):
    """checkpointing=none: every activation is kept."""

    def apply(self, model: torch.nn.Module) -> None:
        """Change the model's forward in place; its parameters keep their names."""


class Blocks(Checkpointing):
    """Each repeated block (a transformer's layers, a ResNet's bottlenecks) keeps only its input.

    `block` names the block's class where the model's own repetition is not the one wanted.
    """

    def __init__(self, block: str | None = None) -> None:
        self.block = block

    def apply(self, model: torch.nn.Module) -> None:
        blocks = repeated_blocks(model, self.block)
        if not blocks:
            what = f"no module of class {self.block!r}" if self.block else "no repeated block"
            classes = sorted({type(m).__name__ for m in model.modules() if list(m.children())})
            raise UserError(
                f"checkpointing=blocks found {what} in the model: set checkpointing.block to one of {', '.join(classes)}"
                " or checkpointing=none"
            )
        for block in blocks:
            checkpoint_forward(block)


def checkpoint_forward(block: torch.nn.Module) -> None:
    """Make the block's forward a (non-reentrant) checkpoint that moves BatchNorm's running statistics once, not twice."""
    from torch.utils.checkpoint import checkpoint

    forward = block.forward
    norms = [m for m in block.modules() if isinstance(m, torch.nn.modules.batchnorm._NormBase)]

    def contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        return nullcontext(), _statistics_held(norms)

    @functools.wraps(forward)
    def recomputed(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        if not norms or torch.compiler.is_compiling():  # a compiled graph writes its buffers once by itself
            return checkpoint(forward, *args, use_reentrant=False, **kwargs)
        return checkpoint(forward, *args, use_reentrant=False, context_fn=contexts, **kwargs)

    block.forward = recomputed  # type: ignore[method-assign]


@contextmanager
def _statistics_held(norms: list[Any]) -> Iterator[None]:
    """Momentum 0 writes the running statistics back unchanged, and without its counter a norm counts nothing."""
    held = [(m.momentum, m.num_batches_tracked) for m in norms]
    try:
        for m in norms:
            m.momentum, m.num_batches_tracked = 0.0, None
        yield
    finally:
        for m, (momentum, counter) in zip(norms, held, strict=True):
            m.momentum, m.num_batches_tracked = momentum, counter
