"""A step that leaves no trace but the memory it claimed."""

from __future__ import annotations

from typing import Any

import torch

from drivetrain.core.microbatch import Request
from drivetrain.saving import checkpoint_io


def forward_backward(trainer: Any, size: int) -> None:
    """Forward and backward of the largest micro-batch of `size` samples; the gradients are there afterwards."""
    indices = trainer.batch.largest(len(trainer.train_data.source), size)
    request = Request(0, indices, torch.ones((), device=trainer.device))
    for micro in trainer.loader.stream(trainer.train_data, [request], trainer.device, trainer.memory_format):
        with trainer.precision.autocast():
            loss = trainer.loss(trainer.forward(micro.x), micro.y)
        trainer.precision.backward(loss, micro.weight)


def preallocate(trainer: Any) -> None:
    """Claim the memory of the largest micro-batch now: buffers, gradients and random streams are put back."""
    random = checkpoint_io.random_state()
    buffers = {name: b.clone() for name, b in trainer.model.named_buffers()}
    forward_backward(trainer, trainer.batch.micro_batch(trainer.parallel.data))
    trainer.zero_grad()
    trainer.parallel.reading(0.0)  # what was tried is no rank's work
    for name, buffer in trainer.model.named_buffers():
        buffer.copy_(buffers[name])
    checkpoint_io.restore_random_state([random])
