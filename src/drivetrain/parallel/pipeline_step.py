"""The training step of a pipeline: an update's micro-batches pass through the stages in turn."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage

from drivetrain.core.microbatch import MicroBatch
from drivetrain.core.step import Step, WrappingStep
from drivetrain.parallel.pipeline_stages import Stage, schedule
from drivetrain.parallel.reducing_step import is_sharded, shard_of

if TYPE_CHECKING:
    from drivetrain.core.context import BuildContext
    from drivetrain.parallel.pipeline import Pipeline


class PipelineStep(WrappingStep):
    """Collects an update's micro-batches and runs them by torch's schedule; `inner` updates the weights."""

    def __init__(self, inner: Step, pipeline: Pipeline, context: BuildContext) -> None:
        super().__init__(inner)
        self._pipeline = pipeline
        self._model, self._loss, self._precision, self._device = context.model, context.loss, context.precision, context.device
        self._stage_forward = pipeline.stage_forward
        self._micro_batches: list[MicroBatch] = []  # of the current update, so far
        self._overwriting: set[int] = set()  # stages whose input is copied first
        self._schedules: dict[Any, Any] = {}  # by count and shape of the micro-batches
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
        first, last = self._pipeline.has_first_stage, self._pipeline.has_last_stage
        x = (torch.cat([b.x for b in batches]),) if first else ()
        self._schedules[key].step(*x, number=numbers, **({"target": numbers} if last else {}), return_outputs=False)
        for loss, batch in zip(self._losses, batches, strict=False):
            loss_sum.addcmul_(loss, batch.weight)

    def _schedule(self, count: int, x: torch.Tensor) -> Any:
        """Build torch's schedule for `count` micro-batches of the shape of `x`. It is reused for the whole run."""
        training = self._model.training
        self._model.eval()  # run only for the shapes: no running statistics, no random numbers
        with torch.no_grad(), self._precision.autocast():
            self._pipeline.inference_model(self._model)(x)
        self._overwriting = {stage for stage in self._pipeline.overwriting if stage > 0}
        self._model.train(training)
        stages = [self._stage(stage) for stage in self._pipeline.my_stages]
        return schedule(self._pipeline.schedule, stages, self._pipeline.stage_count, count, self._loss_of)

    def _stage(self, stage: int) -> Any:
        """Build a PipelineStage from known shapes. Tensors passed between stages require gradients."""
        count, (h, out) = self._pipeline.stage_count, self._pipeline.shapes[stage]
        inputs, outputs = (h.requires_grad_(stage > 0),), (out.requires_grad_(stage + 1 < count),)
        module = Stage(functools.partial(self._forward, stage))
        group = self._pipeline.stage_group
        return PipelineStage(module, stage, count, self._device, input_args=inputs, output_args=outputs, group=group)

    def _forward(self, stage: int, h: torch.Tensor, number: int) -> torch.Tensor:
        if stage in self._overwriting:  # autograd lets no leaf be overwritten
            h = h.clone()
        with self._precision.autocast():
            # Contiguous whatever the memory format, because that is how it is sent and received.
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
        common: list[Any] = [p.grad for p in self._common]
        works: list[Any] = [dist.all_reduce(g, group=self._pipeline.stage_group, async_op=True) for g in common]
        for work in works:
            work.wait()
        pipelines = self._pipeline.data_world.size
        if pipelines > 1:
            gradients = [shard_of(p.grad) for p in self._trained if p.grad is not None and not self._is_averaged(p)]
            works = [dist.all_reduce(g, group=self._pipeline.data_group, async_op=True) for g in gradients]
            for work in works:
                work.wait()
            torch._foreach_div_(gradients, pipelines)

    def _is_averaged(self, p: torch.Tensor) -> bool:
        """Return whether FSDP has averaged a weight's gradients already."""
        return self._pipeline.shard_stages and is_sharded(p)
