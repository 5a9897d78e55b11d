"""Pipeline parallelism: each rank has some of the blocks, and an update's micro-batches follow one another through them.

A stage runs the model's own forward. Blocks before its own let their input pass, its first block takes what came from the
stage before, and after its last block the forward is left. So any model whose forward goes through a row of blocks can be
cut, masks and tables that it makes of its input included. What lies outside of the row (an embedding, a head, weights they
share) every rank has; its gradients are summed over the stages.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from drivetrain.core.blocks import sequential_blocks
from drivetrain.core.errors import UserError
from drivetrain.core.lazy import torch
from drivetrain.core.microbatch import MicroBatch
from drivetrain.core.option import Count, RunSpec
from drivetrain.parallel import balance
from drivetrain.parallel.base import State, Weights
from drivetrain.parallel.fsdp import fully_shard_block
from drivetrain.parallel.sharded import Sharded, is_sharded, shard_of
from drivetrain.parallel.tensor import cannot_be_laid, lay
from drivetrain.saving.sharded_checkpoint import merged


@dataclass(kw_only=True, eq=False)
class Pipeline(Sharded):
    """torch.distributed.pipelining over `stages` ranks (auto: all), by measured cost; batch=accumulate gives the micro-batches.

    1f1b (Narayanan et al. 2019) holds the activations of at most as many micro-batches as there are stages; gpipe (Huang et
    al. 2019) of all; interleaved (Narayanan et al. 2021) gives each rank `per_rank` shorter stages, so that less of the time
    is idle. More ranks than stages are pipelines that split the batch; with `shard_stages` they share out the weights of their
    stage's blocks too, as parallel=fsdp does, their gradients meeting at every micro-batch. With `tensor` a stage is so many
    ranks, over which its blocks are laid as with parallel=tensor.
    """

    stages: Count | Literal["auto"] = "auto"
    schedule: Literal["1f1b", "gpipe", "interleaved"] = "1f1b"
    per_rank: Count = 2
    block: str | None = None
    shard_stages: bool = False
    tensor: Count = 1

    def validate(self, run: RunSpec) -> Iterator[str]:
        yield from super().validate(run)
        ranks, stages, steps = self.ranks(), self._stage_ranks(), run.batch.accumulation_steps
        yield from self._divides()
        if self.tensor > 1:
            yield from cannot_be_laid(f"parallel.tensor={self.tensor}", run)
        if self.schedule == "interleaved" and steps % stages:
            yield (
                f"parallel.schedule=interleaved wants micro-batches in multiples of the {stages} stages, but "
                f"{run.named('batch')} makes {steps} of an update: "
                f"set batch=accumulate batch.accumulation_steps={max(stages, steps // stages * stages)}"
            )
        alike = {"schedule=interleaved": self.schedule == "interleaved", "shard_stages=true": self.shard_stages}
        for setting in (setting for setting, given in alike.items() if given):
            if not run.data.drop_last:
                yield (
                    f"parallel.{setting} wants all updates alike, and data.drop_last=false leaves a short one: set "
                    f"data.drop_last=true, or leave parallel.{setting.partition('=')[0]} out"
                )
            if run.choices["batch"] == "bucketed":
                yield f"parallel.{setting} wants micro-batches alike, and batch=bucketed has many lengths: set batch=accumulate"
        if self.shard_stages and ranks == self.model_ranks():
            yield (
                f"parallel.shard_stages=true has nothing to share out where all {ranks} ranks are one pipeline: give it more "
                "ranks than parallel.stages"
            )
        if run.choices["compile"] not in ("none", "regional"):
            yield (
                f"{run.named('compile')} and parallel=pipeline exclude each other (a stage leaves the model's forward in its "
                "middle): set compile=regional"
            )
        if "sync_bn" in run.choices["surgery"]:
            yield "surgery=[sync_bn] and parallel=pipeline exclude each other (other ranks have other layers): set parallel=ddp"
        if run.batch.preallocate:
            yield (
                "batch.preallocate=true and parallel=pipeline exclude each other (a stage has no forward of its own to try): "
                "set batch.preallocate=false"
            )
        if run.choices["checkpointing"] == "budget":
            yield "checkpointing=budget and parallel=pipeline exclude each other: set checkpointing=blocks"

    def advise(self, run: RunSpec) -> Iterator[str]:
        steps, stages = run.batch.accumulation_steps, self._stage_ranks()
        if steps < 2 * stages:
            idle = (stages - 1) / (steps + stages - 1)
            yield (
                f"parallel=pipeline: with {steps} micro-batches in {stages} stages each rank is idle for {idle:.0%} of a step: "
                f"batch=accumulate batch.accumulation_steps={4 * stages} makes it {(stages - 1) / (5 * stages - 1):.0%}"
            ).replace("%", " %")

    def model_ranks(self) -> int:
        return self._stage_ranks() * self.tensor

    def _stage_ranks(self) -> int:
        return max(1, self.ranks() // self.tensor) if self.stages == "auto" else self.stages

    def _divides(self) -> Iterator[str]:
        if self.tensor == 1:
            yield from self.divides("stages", self.stages, self._stage_ranks())
        elif self.ranks() % self.model_ranks():
            stages = "" if self.stages == "auto" else f"parallel.stages={self.stages} × "
            yield (
                f"{stages}parallel.tensor={self.tensor} does not divide the {self.ranks()} ranks: a pipeline is stages × tensor "
                "of them"
            )

    # --- what this rank keeps of the model ---

    def _split(self, model: torch.nn.Module, dtype: str | None, example: torch.Tensor) -> list[str]:
        from drivetrain.parallel.cuttable import refuse
        from drivetrain.parallel.stages import Row, names

        ranks = self._stage_ranks()
        mesh = self._mesh = self.made_mesh(data=self.data.size, pipe=ranks, tensor=self.tensor)
        self._pipe, self._group_of_data = mesh.get_group("pipe"), mesh.get_group("data")
        self._place, self._slice = mesh.get_local_rank("pipe"), mesh.get_local_rank("tensor")
        self._peers = mesh.mesh[self.data.rank, :, self._slice].tolist()  # this pipeline's ranks in the world
        row = sequential_blocks("parallel=pipeline", model, self.block)
        count = ranks * (self.per_rank if self.schedule == "interleaved" else 1)
        if count > len(row):
            raise UserError(
                f"parallel=pipeline: {count} stages, but the model is a row of {len(row)} blocks: set parallel.stages to "
                f"{len(row)} or less (and parallel.nproc with it)"
            )
        costs = self.same(balance.measured(model, row, example))
        places = balance.cuts(costs, count)
        self._ranges = list(itertools.pairwise(places))
        refuse(model, row, self._ranges, example)
        self._mine = range(self._place, count, ranks)
        owned = [i for stage in self._mine for i in range(*self._ranges[stage])]
        if self.tensor > 1:
            lay(f"parallel.tensor={self.tensor}", [row[i] for i in owned], mesh["tensor"], self._work)
        else:
            for i in owned:
                self._work.through(row[i])
        self._own_names, self._common_names = names(model, row, owned)
        for i, block in enumerate(row):
            if i not in owned:
                block.to("meta")
                block.requires_grad_(False)
        if self.shard_stages:
            for i in owned:
                fully_shard_block(row[i], mesh["data"], dtype)
        self._row = Row(model, row)
        over = f", each over {self.tensor} ranks" if self.tensor > 1 else ""
        times = f", {self.data.size} pipelines" if self.data.size > 1 else ""
        return [f"{count} stages of {balance.described(places, costs)}{over}{times}"]

    def _dimensions_of(self, name: str) -> tuple[str, ...]:
        return () if name in self._common_names else ("pipe", *super()._dimensions_of(name))

    def stream(self) -> int:
        return self.world.rank - self._slice

    # --- a window of micro-batches ---

    def attach(self, trainer: Any) -> None:
        super().attach(trainer)
        self._trainer = trainer
        self._window: list[MicroBatch] = []
        self._schedules: dict[Any, Any] = {}
        self._nothing = torch.zeros((), device=self._device)
        common = [p for name, p in trainer.model.named_parameters() if name in self._common_names and p.requires_grad]
        own = [p for name, p in trainer.model.named_parameters() if name in self._own_names and p.requires_grad]
        self._common, self._trained = common, [*common, *own]
        trainer.precision.scaled(self._nothing, self._nothing)  # a loss scale begins with the first loss, which one stage has
        trainer.micro = self._micro

    def _micro(self, micro: MicroBatch) -> torch.Tensor:
        """Collect an update's micro-batches; with the last one they go through the pipeline."""
        self._window.append(micro)
        if micro.last:
            window, self._window = self._window, []
            for _, alike in itertools.groupby(window, lambda m: m.x.shape):
                self._through(list(alike))
            self._share_gradients()
        return self._nothing

    def _through(self, micros: list[MicroBatch]) -> None:
        key = (len(micros), micros[0].x.shape)
        if key not in self._schedules:
            self._schedules[key] = self._made(*key, micros[0].x)
        self._micros = micros
        numbers = torch.arange(len(micros))  # a stage knows its micro-batch by its number
        first, last = 0 in self._mine, len(self._ranges) - 1 in self._mine
        x = (torch.cat([m.x for m in micros]),) if first else ()
        self._losses: list[torch.Tensor] = []  # the last stage's
        self._schedules[key].step(*x, number=numbers, **({"target": numbers} if last else {}), return_outputs=False)
        for loss, micro in zip(self._losses, micros, strict=False):
            self._trainer._loss.addcmul_(loss, micro.weight)

    def _made(self, count: int, shape: Any, x: torch.Tensor) -> Any:
        """torch's schedule for `count` micro-batches of a shape, which holds for as long as the run."""
        from drivetrain.parallel.stages import schedule

        training = self._trainer.model.training
        self._trainer.model.eval()  # only shapes are wanted: no statistics, no random numbers
        with torch.no_grad(), self._trainer.precision.autocast():
            self.infer(self._root)(x)
        self._trainer.model.train(training)
        stages: list[Any] = [self._stage(stage) for stage in self._mine]
        return schedule(self.schedule, stages, len(self._ranges), count, self._loss_of)

    def _stage(self, stage: int) -> Any:
        """A stage of torch's, its shapes known beforehand. What a stage is sent wants a gradient back."""
        from torch.distributed.pipelining import PipelineStage

        from drivetrain.parallel.stages import Stage

        count, (h, out) = len(self._ranges), self._seen[stage]
        inputs, outputs = (h.requires_grad_(stage > 0),), (out.requires_grad_(stage + 1 < count),)
        module = Stage(functools.partial(self._forward, stage))
        return PipelineStage(module, stage, count, self._device, input_args=inputs, output_args=outputs, group=self._pipe)

    def _forward(self, stage: int, h: torch.Tensor, number: int) -> torch.Tensor:
        with self._trainer.precision.autocast():
            # In rows, whatever the memory format: so it is sent, and so it arrives.
            return self._row.run(*self._ranges[stage], h, self._micros[number].x).contiguous()

    def _loss_of(self, output: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
        """What the last stage's backward starts from."""
        micro = self._micros[int(number)]
        with self._trainer.precision.autocast():
            loss = self._trainer.loss(output, micro.y)
        self._losses.append(loss.detach())
        return self._trainer.precision.scaled(loss, micro.weight)

    def _share_gradients(self) -> None:
        """Sums over the stages of what all of them have, means over the pipelines of everything."""
        import torch.distributed as dist

        for p in self._common:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
        works = [dist.all_reduce(p.grad, group=self._pipe, async_op=True) for p in self._common]
        for work in works:
            work.wait()
        if self.data.size > 1:
            gradients = [shard_of(p.grad) for p in self._trained if p.grad is not None and not self._is_shared_out(p)]
            works = [dist.all_reduce(g, group=self._group_of_data, async_op=True) for g in gradients]
            for work in works:
                work.wait()
            torch._foreach_div_(gradients, self.data.size)

    def _is_shared_out(self, p: torch.Tensor) -> bool:
        """Whether FSDP has taken the mean of a weight's gradients."""
        return self.shard_stages and is_sharded(p)

    # --- evaluation ---

    def infer(self, model: torch.nn.Module) -> Any:
        from drivetrain.parallel import stages

        def outputs(x: torch.Tensor) -> torch.Tensor:
            """Stage after stage; the last one's output, on every rank."""
            self._seen: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
            for stage in self._mine:
                h = x if stage == 0 else stages.receive(self._rank_of(stage - 1), self._control, self._device)
                out = self._row.run(*self._ranges[stage], h, x)
                self._seen[stage] = _like(h), _like(out)
                if stage + 1 < len(self._ranges):
                    stages.send(out, self._rank_of(stage + 1), self._control)
            return stages.broadcast(out, self._rank_of(len(self._ranges) - 1), self._pipe)

        return outputs

    def _rank_of(self, stage: int) -> int:
        return self._peers[stage % len(self._peers)]

    def total(self, sums: torch.Tensor) -> torch.Tensor:
        """Of the last stage's: the others have seen no loss."""
        import torch.distributed as dist

        dist.broadcast(sums, self._rank_of(len(self._ranges) - 1), group=self._pipe)
        return super().total(sums)

    def broadcast_buffers(self, model: torch.nn.Module) -> None:
        """Each stage's from the first pipeline's; what lies outside of the blocks is the last stage's."""
        import torch.distributed as dist

        for name, buffer in model.named_buffers():
            if name in self._common_names:
                dist.broadcast(buffer, self._rank_of(len(self._ranges) - 1), group=self._pipe)
            if not buffer.is_meta:
                dist.broadcast(buffer, self.world.rank % self.model_ranks(), group=self._group_of_data)

    # --- saving ---

    def full_state_dict(self, model: torch.nn.Module, state: State) -> tuple[Weights, State]:
        mine = {n: self._whole(n, t).cpu() for n, t in model.state_dict().items() if not t.is_meta}
        state = self._over_state(state, self._whole)
        tensors = state["ema"].get("tensors", {})
        average = {n: t.cpu() for n, t in tensors.items() if not t.is_meta}
        parts = self.gather((mine, state["optimizer"], average) if self.data.rank == self._slice == 0 else None)
        parts = [part for part in parts if part is not None]
        if self.world.rank != 0:
            return {}, {}
        weights = {n: next(w[n] for w, _, _ in parts if n in w) for n in model.state_dict()}
        state = {**state, "optimizer": merged([optimizer for _, optimizer, _ in parts])}
        if state["ema"]:
            state["ema"] = {**state["ema"], "tensors": {n: next(a[n] for _, _, a in parts if n in a) for n in tensors}}
        return weights, state

    def shard_state_dict(self, weights: Weights, state: State) -> tuple[Weights, State]:
        mine = self._root.state_dict()
        held, state = super().shard_state_dict({n: weights[n] for n, t in mine.items() if not t.is_meta}, state)
        return {n: t if t.is_meta else held[n] for n, t in mine.items()}, state


def _like(h: torch.Tensor) -> torch.Tensor:
    """Its shape and dtype."""
    return torch.empty(h.shape, dtype=h.dtype, device="meta")
