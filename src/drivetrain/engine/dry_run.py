"""Runs a step to allocate its memory, and restores everything else."""

from __future__ import annotations

import torch

from drivetrain.core import streams
from drivetrain.core.microbatch import Request
from drivetrain.engine.trainer import Trainer


def forward_backward(trainer: Trainer, size: int) -> None:
    """Run forward and backward on the largest micro-batch of `size` samples. Leaves the gradients in place."""
    indices = trainer.batch.largest(len(trainer.train_data.source), size)
    request = Request(0, indices, 1.0)
    loss_sum = torch.zeros((), device=trainer.device)
    for batch in trainer.loader.stream(trainer.train_data, [request], trainer.device, trainer.memory_format):
        trainer.step.micro_batch(batch, loss_sum)


def preallocate(trainer: Trainer) -> None:
    """Allocate the memory of the largest micro-batch now. Buffers, gradients and random states are restored."""
    buffers = {name: b.clone() for name, b in trainer.model.named_buffers()}
    with streams.apart():
        forward_backward(trainer, trainer.batch.micro_batch(trainer.parallel.data_world))
    trainer.step.zero_grad()
    trainer.parallel.rank_metrics(0.0, trainer.timer.wait)  # reset: the dry run does not count as a rank's work
    for name, buffer in trainer.model.named_buffers():
        buffer.copy_(buffers[name])
