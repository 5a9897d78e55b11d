"""The answer of a run to a step that does not fit into memory: it goes on with smaller micro-batches."""

from __future__ import annotations

import gc
import logging
import sys
import traceback
from typing import TYPE_CHECKING

import torch

from drivetrain.core import streams
from drivetrain.core.device import is_out_of_memory
from drivetrain.core.microbatch import Request

if TYPE_CHECKING:
    from drivetrain.engine.trainer import Trainer

logger = logging.getLogger(__name__)


def halve_micro_batch(trainer: Trainer, error: RuntimeError) -> None:
    """After running out of memory, prepare to repeat the update in micro-batches half as large. Raises any other error."""
    world = trainer.parallel.world
    if not is_out_of_memory(error) or world.size > 1 or not trainer.batch.halve(world):
        raise error
    trainer.step.zero_grad()
    trainer.log.restart()
    release_memory(error, trainer.device)
    logger.warning("out of memory: training goes on with %d samples at once", trainer.batch.micro_batch(world))


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
    """Give back what nothing refers to any more, and forget what was compiled for it."""
    gc.collect()
    if device.type != "cpu":
        torch.get_device_module(device).empty_cache()
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()


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
