"""DistributedDataParallel: every rank has the whole model and a share of the batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from drivetrain.core.lazy import torch
from drivetrain.core.microbatch import MicroBatch
from drivetrain.core.option import BuildContext, Count, Effect, Positive, RunSpec
from drivetrain.core.protocols import Loss, LossStep
from drivetrain.core.step import Step, WrappingStep
from drivetrain.core.trees import Forward
from drivetrain.parallel.process_group import ProcessGroupStrategy
from drivetrain.parallel.reducing_step import ReducingStep, unused

if TYPE_CHECKING:
    from torch.nn.parallel import DistributedDataParallel


SMALLEST_COMPILED_MB = 1  # torch.distributed._DEFAULT_FIRST_BUCKET_BYTES


@dataclass(kw_only=True, eq=False)
class Ddp(ProcessGroupStrategy):
    """Runs one process per device and all-reduces gradients in buckets during the backward (Li et al. 2020).

    `compress` sends gradients in 16 bits (fp16, bf16), or as products of two matrices of rank `powersgd_rank` (PowerSGD,
    Vogels et al. 2019) with error feedback: the error is added to the next update's gradients. Each rank keeps its own
    buffers (BatchNorm's statistics) while it trains; evaluation and saving use rank 0's. With `forward_sync_buffers` all ranks
    also train with rank 0's, for models whose training forward reads its buffers. Under compile=step the all-reduces are in the
    graph, after the backward, in buckets of the same size.
    """

    effect = "close"
    changes = "gradients are averaged over ranks, of whose parts BatchNorm takes its statistics"
    bucket_mb: Positive = 25.0
    static_graph: bool = False
    gradient_as_bucket_view: bool = True
    find_unused_parameters: bool = False
    forward_sync_buffers: bool = False
    compress: Literal["none", "fp16", "bf16", "powersgd"] = "none"
    powersgd_rank: Count = 1
    _wrapped: Any = field(default=None, init=False)  # None: the step itself reduces gradients

    reduces_in_graph = True
    needs_real_tensors = "DDP's reducer reads the memory of gradients"

    def roundoff(self) -> float:
        return {"fp16": 2.0**-11, "bf16": 2.0**-8}.get(self.compress, super().roundoff())

    def validate(self, run: RunSpec) -> Iterator[str]:
        yield from super().validate(run)
        if self.compress == "powersgd" and run.values["phases"]:
            yield "parallel.compress=powersgd and phases exclude each other (it is a hook of DDP): set parallel.compress=bf16"
        if self.compress == "powersgd" and run.precision.scales_loss:
            yield (
                f"parallel.compress=powersgd and {run.named('precision')} exclude each other (an overflow would stay in what it "
                "carries over to the next update): set precision=bf16, or parallel.compress=fp16"
            )
        if run.model.unfreeze and (self.static_graph or not self.find_unused_parameters):
            yield (
                "model.unfreeze with parallel=ddp: DDP waits for the gradients of all parameters, also of those that begin "
                "to train later: set parallel.find_unused_parameters=true parallel.static_graph=false"
            )
        if self.bucket_mb < SMALLEST_COMPILED_MB and run.compile.active and not run.compile.torchscript:
            yield (
                f"parallel.bucket_mb={self.bucket_mb:g} and {run.named('compile')} exclude each other (torch splits a compiled "
                f"model at its buckets, none smaller than {SMALLEST_COMPILED_MB} MiB): set parallel.bucket_mb to "
                f"{SMALLEST_COMPILED_MB} or more"
            )

        if run.compile.captures_step:
            yield from self._problems_of_graphs(run)

    def _problems_of_graphs(self, run: RunSpec) -> Iterator[str]:
        """Yield what excludes a step that is one graph on each rank: the ranks record it at once, and without torch's DDP."""
        together = (
            f"parallel=ddp and {run.named('compile')} need micro-batches that are equal on all ranks, which record together"
        )
        if self.ranks() > 1 and not run.data.drop_last:
            yield f"{together}; data.drop_last=false leaves a short one: set data.drop_last=true, or compile=inductor"
        if self.ranks() > 1 and run.batch.buckets_lengths:
            yield f"{together}; {run.named('batch')} has many lengths: set batch=accumulate, or compile=inductor"
        if self.compress == "powersgd":
            yield (
                f"parallel.compress=powersgd and {run.named('compile')} exclude each other (it is a hook of DDP, and a graph "
                "calls none): set parallel.compress=bf16, or compile=inductor"
            )
        for key in ("static_graph", "gradient_as_bucket_view", "find_unused_parameters", "forward_sync_buffers"):
            needed = key == "gradient_as_bucket_view"
            if (given := getattr(self, key)) != needed:
                yield (
                    f"parallel.{key}={str(given).lower()} has no effect in {run.named('compile')}, whose graph reduces gradients "
                    f"without DDP: set it to {str(needed).lower()}, or compile=inductor"
                )

    def effect_as_set(self) -> Effect:
        return "changes" if self.compress == "powersgd" else self.effect  # of low rank, not only rounded

    def wrap_model(self, model: torch.nn.Module, context: BuildContext) -> torch.nn.Module:
        self._work.time_forward(model)
        # A loss that runs the model may call parts of it, and does so several times: it is wrapped as a whole instead.
        return model if _reduces_in_step(context) or context.loss.runs_model else self._distributed(model)

    def wrap_loss(self, loss: Loss, model: torch.nn.Module, context: BuildContext) -> LossStep:
        if _reduces_in_step(context) or not loss.runs_model:
            return loss

        class StepModule(torch.nn.Module):
            """The loss's step as the forward of a module that has the model's parameters."""

            def __init__(self) -> None:
                super().__init__()
                self.model = model

            def forward(self, forward: Forward, batch: MicroBatch) -> torch.Tensor:
                return loss.step(forward, batch)

        return LossOfRanks(self._distributed(StepModule()))

    def _distributed(self, model: torch.nn.Module) -> DistributedDataParallel:
        wrapped = torch.nn.parallel.DistributedDataParallel(
            model,
            bucket_cap_mb=self.bucket_mb,
            static_graph=self.static_graph,
            gradient_as_bucket_view=self.gradient_as_bucket_view,
            find_unused_parameters=self.find_unused_parameters,
        )
        wrapped.broadcast_buffers = self.forward_sync_buffers  # older torch has no argument of the newer name
        if self.compress == "powersgd":
            from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

            # From the second update on, because DDP builds its final buckets in the first.
            wrapped.register_comm_hook(PowerSGDState(None, self.powersgd_rank, start_powerSGD_iter=2), powerSGD_hook)
        elif self.compress != "none":
            from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook, fp16_compress_hook

            wrapped.register_comm_hook(None, {"fp16": fp16_compress_hook, "bf16": bf16_compress_hook}[self.compress])
        self._wrapped = wrapped
        return wrapped

    def leave_model(self) -> None:
        self._wrapped = None

    def wrap_step(self, step: Step, context: BuildContext) -> Step:
        if self._wrapped is not None:
            return AccumulatingStep(step, self._wrapped)
        sent_as = None if self.compress == "none" else {"fp16": torch.float16, "bf16": torch.bfloat16}[self.compress]
        trained = {name: p for name, p in context.model.named_parameters() if p.requires_grad}
        some_unused = None if context.run.compile.captures_step else self.find_unused_parameters
        return ReducingStep(step, trained, self.world.size, self.bucket_mb * 2**20, sent_as, some_unused)


def _reduces_in_step(context: BuildContext) -> bool:
    """True if gradients are reduced after the backward: a graph calls no hooks, and a phase has those of some weights only."""
    return context.run.compile.captures_step or bool(context.run.values["phases"])


@dataclass(eq=False)
class LossOfRanks:
    """A loss whose `step` is the forward of DDP: the gradients of all that it does are averaged."""

    step: Callable[[Forward, MicroBatch], torch.Tensor]


@dataclass(eq=False)
class AccumulatingStep(WrappingStep):
    """All-reduces gradients only in the last micro-batch of an update."""

    model: DistributedDataParallel
    checked: bool = False  # whether all of its parameters got gradients

    def micro_batch(self, batch: MicroBatch, loss_sum: torch.Tensor) -> None:
        if batch.last:
            self.inner.micro_batch(batch, loss_sum)
            if not self.checked:
                self._check()
        else:
            with self.model.no_sync():  # needed around forward and backward
                self.inner.micro_batch(batch, loss_sum)

    def _check(self) -> None:
        """Raise UserError where DDP waits for gradients that never come: it has averaged none of their bucket."""
        self.checked = True
        if self.model.find_unused_parameters or self.model.static_graph:
            return
        if names := [name for name, p in self.model.module.named_parameters() if p.requires_grad and p.grad is None]:
            raise unused(names)
