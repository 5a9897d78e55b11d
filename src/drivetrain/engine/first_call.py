"""The arguments of training's first call of the model, for samples of the training set.

Every trial of the model before training uses these arguments: `context.example`, or `context.first_call` for more samples.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch

from drivetrain.core.errors import UserError
from drivetrain.core.step import streams, trees
from drivetrain.core.step.microbatch import MicroBatch, Request
from drivetrain.core.step.modules import unchanged
from drivetrain.core.step.trees import Forward, Tree
from drivetrain.core.user.call import bound
from drivetrain.core.user.state import untouched
from drivetrain.engine import flops
from drivetrain.engine.context import RunContext
from drivetrain.loss import Loss

CLOSE = 1e-3  # relative: two sums of losses that are equal up to rounding
MOST = 4  # samples of each half

T = TypeVar("T")

logger = logging.getLogger(__name__)


@dataclass
class PartsCall:
    """The example for a loss that calls only parts of the model: a function of the model, and a tree of samples."""

    run: Callable[[MicroBatch, torch.nn.Module], None]
    batch: MicroBatch

    def __call__(self, model: torch.nn.Module) -> None:
        """Run the loss, with this model instead of the run's."""
        self.run(self.batch, model)


class _Called(BaseException):
    """The model is called; the loss must not catch this."""


def samples(context: RunContext) -> int:
    """Return how many samples an example has: two, or one where a forward of the run gets no more."""
    return min(2, context.batch.micro_batch(context.parallel.data_world))


def read(context: RunContext, rows: torch.Tensor) -> MicroBatch:
    """Read training samples as the steps get them, without using up a stream's samples or moving a random stream."""
    data, order = context.train_data, context.memory_format
    with untouched({} if data.own_code is None else data.own_code.keeps()):
        x, y = (trees.to(tree, context.device) for tree in data(Request(0, rows % len(data.source), 1.0)))
    x = trees.map_tensors(lambda t: t.contiguous(memory_format=order) if t.dim() == 4 else t, x)
    return MicroBatch(x, y, torch.ones((), device=context.device), True, False)


def of(context: RunContext, model: torch.nn.Module, count: int) -> tuple[MicroBatch, Tree]:
    """Return `count` training samples, and the model's arguments for them in training."""
    batch = read(context, torch.arange(count))
    return batch, record(context, model, batch)


def record(context: RunContext, model: torch.nn.Module, batch: MicroBatch) -> Tree:
    """Return the arguments of the loss's first call of the model, for these samples, without a forward.

    For a loss that calls only parts of the model it is a function of the model that runs the loss. Raises UserError.
    """
    arguments = context.model_call.arguments(context.loss.joined(batch.x))
    if not context.loss.runs_model:
        return arguments

    def called(module: torch.nn.Module, given: tuple[object, ...], keywords: Mapping[str, object]) -> None:
        if module is model:  # not a copy that the loss has made of it
            raise _Called(bound(model.forward, given, keywords))

    hook = model.register_forward_pre_hook(called, with_kwargs=True, prepend=True)
    try:
        _step(context, batch, model)
        arguments = PartsCall(partial(_step, context), batch)
    except _Called as call:
        arguments = trees.map_tensors(lambda t: t.detach().requires_grad_(t.requires_grad), call.args[0])
    except UserError:
        raise
    except Exception as error:  # it ends the first step too
        logger.debug("the loss fails before it calls the model: %s", error)
    finally:
        hook.remove()
    return arguments


def _step(context: RunContext, batch: MicroBatch, model: torch.nn.Module) -> None:
    """Run the loss on samples."""
    phases = context.run.values["phases"]
    _run_loss(context, model, lambda loss, run: (loss.of_phase(next(iter(phases))) if phases else loss).step(run, batch))


def _run_loss(context: RunContext, model: torch.nn.Module, work: Callable[[Loss, Forward], T], training: bool | None = None) -> T:
    """Return the result of `work` on the loss and the model's forward, with `model` instead of the run's.

    All state is restored.
    """
    loss, before = context.loss, getattr(context, "model", None)
    context.model = model
    try:
        with untouched(loss.keeps()), unchanged(model, training), torch.enable_grad():
            return work(loss, context.model_call.taking_batches(model))
    finally:
        del context.model
        if before is not None:
            context.model = before
        for total in loss.parts().values():
            total.zero_()


def count(context: RunContext, model: torch.nn.Module) -> flops.ModelFlops:
    """Count the operations of a sample, over all calls of a loss that runs the model itself.

    A model that cannot take two samples, for example with a fixed batch size in its code, gets as many as a forward does.
    """
    micro_batch = context.batch.micro_batch(context.parallel.data_world)
    found = _count(context, model, samples(context))
    if found.failed and context.first is not None and micro_batch > samples(context):
        context.first, context.example = context.first_call(model, micro_batch)
        found = _count(context, model, micro_batch)
    return found


def _count(context: RunContext, model: torch.nn.Module, size: int) -> flops.ModelFlops:
    if context.first is None or not context.loss.runs_model:
        return flops.count(model, context.example, size)
    return flops.count(model, PartsCall(partial(_step, context), context.first), size)


def check_split(context: RunContext, model: torch.nn.Module) -> None:
    """Raise UserError if a user's loss compares samples and the update is split, as its value would change."""
    loss, world, steps = context.loss, context.parallel.data_world, context.batch.accumulation_steps
    if steps * world.size == 1 or loss.compares_samples or not loss.keeps():
        return
    half = min(MOST, context.batch.micro_batch(world))
    rows = torch.linspace(0, len(context.train_data.source) - 1, 2 * half).long()
    try:
        parts = [read(context, of) for of in (rows, rows, rows[:half], rows[half:])]
        found = _run_loss(context, model, partial(_evaluated, parts), training=False)
    except Exception as error:  # it ends the first step too
        logger.debug("the loss cannot be evaluated: %s", error)
        return
    whole, again, split = found[0], found[1], found[2] + found[3]
    same = [torch.allclose(whole, other, rtol=CLOSE, atol=CLOSE**2) for other in (again, split)]
    if same == [True, False]:  # else it draws random numbers
        raise UserError(
            f"{context.run.named('loss')} is {whole[0] / whole[-1]:.6g} for {2 * half} samples, and {split[0] / split[-1]:.6g} "
            f"where they are split in two, as each update is (micro-batches: {steps}, ranks: {world.size}): a loss that compares "
            "samples sets `compares_samples = True`, and one that averages over items other than samples has a method `count` "
            "(docs/losses.md)"
        )


def _evaluated(parts: list[MicroBatch], loss: Loss, forward: Forward) -> list[torch.Tensor]:
    """Return the sums of an evaluation of each part, each with other random draws."""
    found = []
    for number, part in enumerate(parts):
        streams.seed_all(number)
        found.append(loss.evaluate(forward, part, need_output=False)[1])
    return found
