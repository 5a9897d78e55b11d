"""Runs one stage of a pipeline: a part of a model's forward."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle

from drivetrain.core.errors import UserError
from drivetrain.core.machine.torch_patches import wrap_forward
from drivetrain.core.step.microbatch import MicroBatch
from drivetrain.core.step.step import Step, WrappingStep
from drivetrain.core.step.trees import Forward, Tree
from drivetrain.parallel.base import is_sharded, shard_of

if TYPE_CHECKING:
    from drivetrain.core.options.context import BuildContext
    from drivetrain.parallel.pipeline import PipelineParallel


class StagedForward:
    """Runs a model's forward with one stage's blocks only. Created last, so that its hooks enclose the blocks' other hooks."""

    def __init__(self, model: torch.nn.Module, blocks: Sequence[torch.nn.Module]) -> None:
        self._model, self._count = model, len(blocks)
        self._first, self._end, self._received = 0, len(blocks), None
        self._undo = ExitStack()
        for i, block in enumerate(blocks):
            self._undo.callback(block.register_forward_pre_hook(functools.partial(self._enter, i), prepend=True).remove)
            self._undo.callback(wrap_forward(block, functools.partial(self._skip_before_stage, i)))
            self._undo.callback(block.register_forward_hook(functools.partial(self._leave, i)).remove)

    def run(self, first: int, end: int, h: Tree, x: Tree) -> Tree:
        """Run blocks first to end - 1 on `h`, the previous block's output for the input `x`. Returns their output.

        With the last block it returns the model's output.
        """
        self._first, self._end, self._received = first, end, h
        try:
            return self._model(x)
        except _StageEndError as stage_end:
            return stage_end.h
        finally:
            self._received = None

    def remove(self) -> None:
        """Restore the blocks."""
        self._undo.close()

    def _enter(self, i: int, block: torch.nn.Module, args: tuple[Tree, ...]) -> tuple[Tree, ...]:
        return (self._received, *args[1:]) if i == self._first and i > 0 else args

    def _skip_before_stage(self, i: int, forward: Forward) -> Forward:
        return lambda h, *args, **kwargs: h if i < self._first else forward(h, *args, **kwargs)

    def _leave(self, i: int, block: torch.nn.Module, args: tuple[Tree, ...], out: Tree) -> None:
        if i + 1 == self._end and self._end < self._count:
            raise _StageEndError(out)


class _StageEndError(Exception):
    """Ends a forward after the stage's last block, and carries its output."""

    def __init__(self, h: Tree) -> None:
        super().__init__()
        self.h = h


class StageModule(torch.nn.Module):
    """Wraps a stage as torch's pipelining calls it: with its input and the number of the micro-batch."""

    def __init__(self, forward: Callable[[torch.Tensor, int], torch.Tensor]) -> None:
        super().__init__()
        self._forward = forward

    def forward(self, h: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
        return self._forward(h, int(number))


Schedule = PipelineScheduleSingle | PipelineScheduleMulti


def schedule(
    name: str, own_stages: Sequence[PipelineStage], count: int, micro_batches: int, loss: Callable[..., torch.Tensor]
) -> Schedule:
    """Return torch's schedule `name` for this rank's stages, out of `count`, and an update's micro-batches."""
    from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

    if name == "interleaved":
        return ScheduleInterleaved1F1B(list(own_stages), micro_batches, loss_fn=loss, scale_grads=False)
    # 1F1B needs at least as many micro-batches as stages; with fewer, all forwards come first.
    kind = Schedule1F1B if name == "1f1b" and micro_batches >= count else ScheduleGPipe
    return kind(own_stages[0], micro_batches, loss_fn=loss, scale_grads=False)


def send(h: torch.Tensor, rank: int, control: ProcessGroup | None) -> None:
    """Send a tensor of any shape to another rank; its shape is sent over the group `control`."""
    dist.send_object_list([(tuple(h.shape), h.dtype)], rank, group=control)
    dist.send(h.contiguous(), rank)


def receive(rank: int, control: ProcessGroup | None, device: torch.device) -> torch.Tensor:
    """Receive the tensor that another rank sends."""
    header = [((0,), torch.float32)]
    dist.recv_object_list(header, rank, group=control)
    shape, dtype = header[0]
    h = torch.empty(shape, dtype=dtype, device=device)
    dist.recv(h, rank)
    return h


def broadcast(h: torch.Tensor, source: int, group: ProcessGroup) -> torch.Tensor:
    """Broadcast the tensor of rank `source` to the group. The other ranks' tensors may have other shapes."""
    header = [(tuple(h.shape), h.dtype)]
    dist.broadcast_object_list(header, source, group=group)
    shape, dtype = header[0]
    full = h.contiguous() if dist.get_rank() == source else torch.empty(shape, dtype=dtype, device=h.device)
    dist.broadcast(full, source, group=group)
    return full


def split_names(model: torch.nn.Module, blocks: Sequence[torch.nn.Module], owned: Sequence[int]) -> tuple[set[str], set[str]]:
    """Return the names of weights and buffers in the owned blocks, and the names of those outside of all blocks."""
    block_of = {id(t): i for i, block in enumerate(blocks) for t in (*block.parameters(), *block.buffers())}
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    own = {name for name, t in named if block_of.get(id(t)) in owned}
    return own, {name for name, t in named if id(t) not in block_of}


Ranges = Sequence[tuple[int, int]]  # each stage's first block, and the one after its last


def check_stages(model: torch.nn.Module, blocks: Sequence[torch.nn.Module], ranges: Ranges, example: torch.Tensor) -> None:
    """Raise UserError if the stages would not train the same function as the model."""
    if len({id(block) for block in blocks}) < len(blocks):
        raise UserError(
            "parallel=pipeline: a block with weights stands in the model's sequence several times, and would lie on several "
            "ranks: set parallel=fsdp"
        )
    if names := shared_weight_names(model, blocks):
        raise UserError(
            f"parallel=pipeline: {' and '.join(names)} are one weight, and would lie on several ranks: set parallel=fsdp"
        )
    untrained = [n for n, (first, end) in enumerate(ranges) if not _has_trainable(blocks[first:end])]
    if untrained and not _has_trainable([model], excluding=blocks):
        raise UserError(
            f"parallel=pipeline: stage {untrained[0]} of {len(ranges)} would have no weights to train: set parallel.stages to "
            "less (and parallel.nproc with it)"
        )
    if not stages_match_model(model, blocks, ranges, example):
        raise UserError(
            f"parallel=pipeline cannot cut this model: its sequence of {len(blocks)} {type(blocks[0]).__name__} does not only "
            "pass on each block's output (it adds to it, calls them in another order, or passes something around them): name the "
            "class of blocks that form a plain sequence in parallel.block, or set parallel=ddp, fsdp or tensor"
        )


def stages_match_model(model: torch.nn.Module, blocks: Sequence[torch.nn.Module], ranges: Ranges, example: torch.Tensor) -> bool:
    """Return whether stages that send only their last block's output compute the model's own output.

    They do not if the forward computes something between two blocks (such as a residual sum), calls the blocks in another
    order, or passes something around them. Raises UserError if the output is not a tensor.
    """
    noise = torch.Generator(example.device).manual_seed(0)
    x = example.clone()
    x = x.uniform_(generator=noise) if x.is_floating_point() else x.random_(0, 2, generator=noise)
    training = model.training
    with torch.no_grad(), ExitStack() as undo:
        undo.callback(model.train, training)
        model.eval()
        _perturb(model, blocks, noise, undo)
        whole = model(x)
        if not isinstance(whole, torch.Tensor):
            raise UserError(f"parallel=pipeline takes models that give one tensor, but this one gives a {type(whole).__name__}")
        staged, h = StagedForward(model, blocks), x
        undo.callback(staged.remove)
        try:
            for stage in ranges:
                h = staged.run(*stage, h, x)
        except Exception:  # a model may fail on a shape that does not fit
            return False
        scale = float(whole.nan_to_num(0, 0, 0).abs().max())  # values that are not finite must be equal
        return whole.shape == h.shape and torch.allclose(whole, h, rtol=0, atol=1e-4 * scale, equal_nan=True)


def _perturb(model: torch.nn.Module, blocks: Sequence[torch.nn.Module], noise: torch.Generator, undo: ExitStack) -> None:
    """Randomise zero weights and add noise to block outputs: an untrained model may hide differences behind zeros."""
    for p in model.parameters():
        if not p.any():
            undo.callback(p.zero_)
            p.normal_(generator=noise)
    for block in blocks:
        undo.callback(wrap_forward(block, functools.partial(_noisy, noise)))


def _noisy(noise: torch.Generator, forward: Callable[..., Tree]) -> Callable[..., Tree]:
    """Return a forward that adds the same noise to its output at each call."""
    added: list[torch.Tensor] = []

    def noisy(*args: object, **kwargs: object) -> torch.Tensor:
        out = forward(*args, **kwargs)
        if not isinstance(out, torch.Tensor):
            raise UserError(
                "parallel=pipeline hands one tensor from block to block, and a block of this model gives a "
                f"{type(out).__name__}: set parallel=ddp or fsdp"
            )
        if not added:
            added.append(torch.empty_like(out).normal_(generator=noise))
        return out + added[0]

    return noisy


def shared_weight_names(model: torch.nn.Module, blocks: Sequence[torch.nn.Module]) -> list[str]:
    """Return the names of a weight that several blocks share, or a block and the rest of the model; empty if none is."""
    block_of = {id(m): i for i, block in enumerate(blocks) for m in block.modules()}
    users: dict[int, dict[int, str]] = {}
    for prefix, module in model.named_modules():
        for name, p in module.named_parameters(prefix, recurse=False, remove_duplicate=False):
            users.setdefault(id(p), {})[block_of.get(id(module), -1)] = name
    return next((list(names.values()) for names in users.values() if len(names) > 1), [])


def _has_trainable(modules: Iterable[torch.nn.Module], excluding: Iterable[torch.nn.Module] = ()) -> bool:
    """Return whether these modules have weights to train that are not in `excluding`."""
    excluded = {id(p) for module in excluding for p in module.parameters()}
    return any(p.requires_grad and id(p) not in excluded for module in modules for p in module.parameters())


class PipelineStep(WrappingStep):
    """Collects an update's micro-batches and runs them in torch's schedule; `inner` updates the weights."""

    def __init__(self, inner: Step, pipeline: PipelineParallel, context: BuildContext) -> None:
        super().__init__(inner)
        self._pipeline = pipeline
        self._model, self._loss, self._precision, self._device = context.model, context.loss, context.precision, context.device
        self._stage_forward = pipeline.stage_forward
        self._micro_batches: list[MicroBatch] = []  # of the current update, so far
        self._overwriting: set[int] = set()  # stages whose input is copied first
        self._schedules: dict[tuple[int, torch.Size], Schedule] = {}  # by count and shape of the micro-batches
        parameters = {name: p for name, p in context.model.named_parameters() if p.requires_grad}
        self._common = [p for name, p in parameters.items() if name in pipeline.common_names]
        self._trained = [*self._common, *(p for name, p in parameters.items() if name in pipeline.own_names)]
        zero = torch.zeros((), device=self._device)
        self._precision.scaled(zero, zero)  # initialises the loss scale on all ranks: only the last stage computes a loss

    def micro_batch(self, batch: MicroBatch, loss_sum: torch.Tensor) -> None:
        self._micro_batches.append(batch)
        if batch.last:
            micro_batches, self._micro_batches = self._micro_batches, []
            for _, same_shape in itertools.groupby(micro_batches, lambda b: b.x.shape):
                self._run(list(same_shape), loss_sum)
            self._reduce_gradients()

    def with_forward(self, forward: Callable[..., torch.Tensor]) -> Step:
        raise NotImplementedError("a stage has no forward of its own")

    def _run(self, batches: list[MicroBatch], loss_sum: torch.Tensor) -> None:
        """Run forward and backward of micro-batches of one shape. The last stage adds up their losses."""
        key = (len(batches), batches[0].x.shape)
        if key not in self._schedules:
            self._schedules[key] = self._schedule(len(batches), batches[0].x)
        self._running, self._losses = batches, list[torch.Tensor]()
        numbers = torch.arange(len(batches))  # a stage finds its micro-batch by its number
        own = self._pipeline.my_stages
        first, last = 0 in own, len(self._pipeline.ranges) - 1 in own  # the first reads inputs, the last computes the loss
        x = (torch.cat([b.x for b in batches]),) if first else ()
        target: dict[str, Any] = {"target": numbers} if last else {}
        self._schedules[key].step(*x, number=numbers, **target, return_outputs=False)
        for loss, batch in zip(self._losses, batches, strict=False):
            loss_sum.addcmul_(loss, batch.weight)

    def _schedule(self, count: int, x: torch.Tensor) -> Schedule:
        """Build torch's schedule for `count` micro-batches of the shape of `x`. It is reused for the whole run."""
        training = self._model.training
        self._model.eval()  # run only for the shapes: no running statistics, no random numbers
        with torch.no_grad(), self._precision.autocast():
            self._pipeline.inference_model(self._model)(x)
        self._overwriting = {stage for stage in self._pipeline.overwriting if stage > 0}
        self._model.train(training)
        stages = [self._stage(stage) for stage in self._pipeline.my_stages]
        return schedule(self._pipeline.schedule, stages, len(self._pipeline.ranges), count, self._loss_of)

    def _stage(self, stage: int) -> PipelineStage:
        """Build a PipelineStage from known shapes. Tensors passed between stages require gradients."""
        count, (h, out) = len(self._pipeline.ranges), self._pipeline.shapes[stage]
        inputs, outputs = (h.requires_grad_(stage > 0),), (out.requires_grad_(stage + 1 < count),)
        module = StageModule(functools.partial(self._forward, stage))
        group = self._pipeline.stage_group
        return PipelineStage(module, stage, count, self._device, input_args=inputs, output_args=outputs, group=group)

    def _forward(self, stage: int, h: torch.Tensor, number: int) -> torch.Tensor:
        if stage in self._overwriting:  # autograd forbids overwriting a leaf
            h = h.clone()
        with self._precision.autocast():
            # Contiguous in any memory format, as tensors are sent and received.
            return self._stage_forward(stage, h, self._running[number].x).contiguous()

    def _loss_of(self, output: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
        """Return the tensor on which the last stage calls backward."""
        batch = self._running[int(number)]
        with self._precision.autocast():
            loss = self._loss.step(lambda _: output, batch)
        self._losses.append(loss.detach())
        return self._precision.scaled(loss, batch.weight)

    def _reduce_gradients(self) -> None:
        """Sum the shared modules' gradients over the stages, then average all gradients over the pipelines."""
        for p in self._common:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
        _sum_over([p.grad for p in self._common if p.grad is not None], self._pipeline.stage_group)
        pipelines = self._pipeline.data_world.size
        if pipelines > 1:
            averaged = self._pipeline.shard_stages  # FSDP has already averaged its shards
            gradients = [shard_of(p.grad) for p in self._trained if p.grad is not None and not (averaged and is_sharded(p))]
            _sum_over(gradients, self._pipeline.data_group)
            torch._foreach_div_(gradients, pipelines)


def _sum_over(gradients: Sequence[torch.Tensor], group: ProcessGroup | None) -> None:
    """All-reduce them in place, all at the same time."""
    for work in [dist.all_reduce(g, group=group, async_op=True) for g in gradients]:
        work.wait()
