"""DistributedDataParallel: every rank has the whole model and a share of the batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from drivetrain.core.errors import UserError
from drivetrain.core.lazy import torch
from drivetrain.core.options import groups
from drivetrain.core.options.option import BuildContext, Count, Effect, Positive, RunSpec
from drivetrain.core.options.protocols import LossStep
from drivetrain.core.step.microbatch import MicroBatch
from drivetrain.core.step.step import Step, WrappingStep
from drivetrain.core.step.trees import Forward
from drivetrain.core.user.state import untouched
from drivetrain.parallel.owners import Owners, OwnersStep

if TYPE_CHECKING:
    from torch.nn.parallel import DistributedDataParallel


SMALLEST_COMPILED_MB = 1  # torch.distributed._DEFAULT_FIRST_BUCKET_BYTES


@dataclass(kw_only=True, eq=False)
class Ddp(Owners):
    """Runs one process per device and all-reduces gradients in buckets during the backward (Li et al. 2020).

    `compress` sends gradients in 16 bits (fp16, bf16), or as products of two matrices of rank `powersgd_rank` (PowerSGD,
    Vogels et al. 2019) with error feedback: the error is added to the next update's gradients. Each rank keeps its own
    buffers (BatchNorm's statistics) while it trains; evaluation and saving use rank 0's. With `forward_sync_buffers` all ranks
    also train with rank 0's, for models whose training forward reads its buffers. Under compile=step the all-reduces are in the
    graph, after the backward, in buckets of the same size. With `shard_optimizer` each rank keeps the optimizer's states of some
    weights, updates these, and sends them to the others (ZeRO-1, Rajbhandari et al. 2020).
    """

    effect = "close"
    changes = "gradients are averaged over ranks, and BatchNorm takes its statistics from each rank's part"
    bucket_mb: Positive = 25.0
    gradient_as_bucket_view: bool = True
    find_unused_parameters: bool = False
    forward_sync_buffers: bool = False
    compress: Literal["none", "fp16", "bf16", "powersgd"] = "none"
    powersgd_rank: Count = 1
    _wrapped: Any = field(default=None, init=False)  # None: the step itself reduces gradients
    _accumulating: AccumulatingStep | None = field(default=None, init=False)

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
        if run.model.unfreeze and not self.find_unused_parameters:
            yield (
                "model.unfreeze with parallel=ddp: DDP waits for the gradients of all parameters, also of ones that begin "
                "to train later: set parallel.find_unused_parameters=true"
            )
        if self.bucket_mb < SMALLEST_COMPILED_MB and run.compile.active and not run.compile.torchscript:
            yield (
                f"parallel.bucket_mb={self.bucket_mb:g} and {run.named('compile')} exclude each other (torch splits a compiled "
                f"model at its buckets, none smaller than {SMALLEST_COMPILED_MB} MiB): set parallel.bucket_mb to "
                f"{SMALLEST_COMPILED_MB} or more"
            )

        if self.shard_optimizer and self.find_unused_parameters and run.precision.scales_loss:
            yield (
                f"parallel.shard_optimizer=true, find_unused_parameters=true and {run.named('precision')} exclude each other "
                "(a rank may own no weight that an update used, but must report an overflow): set precision=bf16"
            )
        if run.compile.captures_step:
            yield from self._problems_of_graphs(run)

    def _problems_of_graphs(self, run: RunSpec) -> Iterator[str]:
        """Yield the settings that exclude a step in one graph per rank: the ranks record it at once, without torch's DDP."""
        together = f"parallel=ddp and {run.named('compile')} need equal micro-batches on all ranks, because these record together"
        if self.ranks() > 1 and not run.data.drop_last:
            yield f"{together}; data.drop_last=false leaves a short one: set data.drop_last=true, or compile=inductor"
        if self.ranks() > 1 and run.batch.buckets_lengths:
            yield f"{together}; {run.named('batch')} has many lengths: set batch=accumulate, or compile=inductor"
        if self.compress == "powersgd":
            yield (
                f"parallel.compress=powersgd and {run.named('compile')} exclude each other (it is a hook of DDP, and a graph "
                "calls none): set parallel.compress=bf16, or compile=inductor"
            )
        settings = {
            "gradient_as_bucket_view": self.gradient_as_bucket_view,
            "find_unused_parameters": self.find_unused_parameters, "forward_sync_buffers": self.forward_sync_buffers,
        }  # fmt: skip
        for key, given in settings.items():
            needed = key == "gradient_as_bucket_view"
            if given != needed:
                yield (
                    f"parallel.{key}={str(given).lower()} has no effect in {run.named('compile')}, whose graph reduces gradients "
                    f"without DDP: set it to {str(needed).lower()}, or compile=inductor"
                )

    def effect_as_set(self) -> Effect:
        return "changes" if self.compress == "powersgd" else self.effect  # low-rank, not only rounded

    def wrap_model(self, model: torch.nn.Module, context: BuildContext) -> torch.nn.Module:
        self._work.time_forward(model)
        # A loss that runs the model may call parts of it, and does so several times: it is wrapped as a whole instead.
        return model if _reduces_in_step(context) or context.loss.runs_model else self._distributed(model)

    def wrap_loss(self, loss: groups.Loss, model: torch.nn.Module, context: BuildContext) -> LossStep:
        if _reduces_in_step(context) or not loss.runs_model:
            return loss

        class StepModule(torch.nn.Module):
            """The loss's step as the forward of a module with the model's parameters."""

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
        super().leave_model()
        self._wrapped = self._accumulating = None

    def wrap_step(self, step: Step, context: BuildContext) -> Step:
        step = self._reducing(step, context)
        if not self.shard_optimizer:
            return step
        return OwnersStep(step, [(p, self._owner[name]) for name, p in context.model.named_parameters() if p.requires_grad])

    def _reducing(self, step: Step, context: BuildContext) -> Step:
        if self._wrapped is not None:
            self._accumulating = AccumulatingStep(step, self._wrapped)
            return self._accumulating
        sent_as = None if self.compress == "none" else {"fp16": torch.float16, "bf16": torch.bfloat16}[self.compress]
        trained = {name: p for name, p in context.model.named_parameters() if p.requires_grad}
        some_unused = None if context.run.compile.captures_step else self.find_unused_parameters
        return ReducingStep(step, trained, self.world.size, self.bucket_mb * 2**20, sent_as, some_unused)

    def wrap_watched(self, step: Step, context: BuildContext) -> Step:
        # A sum of two has no order. PowerSGD carries errors over, and no checkpoint has them.
        if self._accumulating is None or self.world.size < 3 or self.find_unused_parameters or self.compress == "powersgd":
            return step
        return BeginningStep(step, self._accumulating, context)


def _reduces_in_step(context: BuildContext) -> bool:
    """True if gradients are reduced after the backward: a graph calls no hooks, and a phase has only some gradients."""
    return context.run.compile.captures_step or bool(context.run.values["phases"])


@dataclass(eq=False)
class LossOfRanks:
    """A loss with DDP's forward as its `step`, so that the gradients of all its operations are averaged."""

    step: Callable[[Forward, MicroBatch], torch.Tensor]


@dataclass(eq=False)
class AccumulatingStep(WrappingStep):
    """All-reduces gradients only in the last micro-batch of an update."""

    model: DistributedDataParallel
    checked: bool = False  # True if all of its parameters got gradients

    def micro_batch(self, batch: MicroBatch, loss_sum: torch.Tensor) -> None:
        if batch.last:
            self.inner.micro_batch(batch, loss_sum)
            if not self.checked:
                self._check()
        else:
            with self.model.no_sync():  # needed around forward and backward
                self.inner.micro_batch(batch, loss_sum)

    def _check(self) -> None:
        """Raise UserError if DDP waits for gradients that never come: it has not averaged their bucket."""
        self.checked = True
        if self.model.find_unused_parameters:
            return
        if names := [name for name, p in self.model.module.named_parameters() if p.requires_grad and p.grad is None]:
            raise unused(names)


@dataclass(eq=False)
class BeginningStep(WrappingStep):
    """Runs the first micro-batch once before it counts, so that a resumed run adds gradients like an uninterrupted one.

    DDP rebuilds its buckets after its first backward, in the order of the gradients' arrival. The layout decides the order of
    sums over more than two ranks.
    """

    ranks: AccumulatingStep
    context: BuildContext
    begun: bool = False

    def micro_batch(self, batch: MicroBatch, loss_sum: torch.Tensor) -> None:
        if not self.begun:
            self.begun = True
            loss, sums = self.context.loss, self.context.parts().values()
            with untouched(loss.keeps(), self.context.model, *sums):
                self.ranks.micro_batch(replace(batch, last=True), torch.zeros_like(loss_sum))
            self.ranks.zero_grad()
        self.inner.micro_batch(batch, loss_sum)


@dataclass(eq=False)
class ReducingStep(WrappingStep):
    """Averages the gradients over all ranks after the backward of an update's last micro-batch, in buckets.

    DDP's all-reduces are in hooks of autograd, which a graph does not call. These are torch's functional collectives, which
    a recording holds and inductor compiles. They are the same whether the step runs op by op, is recorded or is a graph, so
    that a rank which cannot record it does not hold up the others.
    """

    parameters: Mapping[str, torch.nn.Parameter]  # by name
    ranks: int
    bucket_bytes: float
    sent_as: torch.dtype | None  # dtype of sent gradients; None: their own
    some_unused: bool | None  # True if weights may lack a gradient on some ranks; None: all ranks run the same graph

    def micro_batch(self, batch: MicroBatch, loss_sum: torch.Tensor) -> None:
        self.inner.micro_batch(batch, loss_sum)
        if batch.last:
            with torch.no_grad():
                if self.some_unused is not None:
                    self._complete()
                self._average([p.grad for p in self.parameters.values() if p.grad is not None])

    def _complete(self) -> None:
        """Give weights with a gradient on another rank a gradient of zeros. Raises UserError if none may be missing."""
        missing = [name for name, p in self.parameters.items() if p.grad is None]
        if not self.some_unused:
            if missing:
                raise unused(missing)
            return
        parameters = list(self.parameters.values())
        anywhere = torch.tensor([p.grad is not None for p in parameters], dtype=torch.uint8, device=parameters[0].device)
        torch.distributed.all_reduce(anywhere, torch.distributed.ReduceOp.MAX)
        for p, has_gradient in zip(parameters, anywhere.tolist(), strict=True):
            if has_gradient and p.grad is None:
                p.grad = torch.zeros_like(p)

    def _average(self, gradients: Sequence[torch.Tensor]) -> None:
        from torch.distributed import _functional_collectives as collectives

        world = torch.distributed.distributed_c10d._get_default_group()
        buckets = list(_buckets(gradients, self.bucket_bytes))
        flat = [torch.cat([g.reshape(-1) for g in bucket]) for bucket in buckets]
        shares = [(f if self.sent_as is None else f.to(self.sent_as)) / self.ranks for f in flat]
        means = [collectives.all_reduce(share, "sum", world) for share in shares]  # all begin before the first wait
        for bucket, mean in zip(buckets, means, strict=True):
            parts = torch.split(collectives.wait_tensor(mean), [g.numel() for g in bucket])
            for gradient, part in zip(bucket, parts, strict=True):
                gradient.copy_(part.view(gradient.shape))


def unused(names: Sequence[str]) -> UserError:
    """Return the error of an update in which parameters of these names got no gradient."""
    plain = [name.removeprefix("model.").replace("_orig_mod.", "") for name in names[:3]]
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return UserError(
        f"parallel=ddp waits for the gradients of all parameters, and {', '.join(plain)}{more} got none in an update: set "
        "parallel.find_unused_parameters=true, or freeze them (model.freeze)"
    )


def _buckets(gradients: Sequence[torch.Tensor], most: float) -> Iterator[list[torch.Tensor]]:
    """Yield groups of gradients of one dtype, at most `most` bytes together or a single larger one, last layers first."""
    bucket: list[torch.Tensor] = []
    for gradient in reversed(gradients):
        if bucket and (sum(g.nbytes for g in bucket) + gradient.nbytes > most or gradient.dtype != bucket[0].dtype):
            yield bucket
            bucket = []
        bucket.append(gradient)
    if bucket:
        yield bucket
