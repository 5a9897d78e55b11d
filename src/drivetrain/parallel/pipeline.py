"""Pipeline parallelism: each rank holds some of the blocks, and an update's micro-batches pass through them in turn.

A stage runs the model's own forward. Blocks before the stage pass their input through, its first block takes the tensor
received from the stage before, and after its last block an exception ends the forward. So any model that calls a sequence
of blocks can be split, also if it computes masks or tables from its input. Every rank has the modules outside of the blocks
(an embedding, a head, weights they share); their gradients are summed over the stages.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from drivetrain.core.errors import UserError
from drivetrain.core.lazy import torch
from drivetrain.core.options.allowed import Name
from drivetrain.core.options.option import BuildContext, Count, RunSpec
from drivetrain.core.step.blocks import sequential_blocks
from drivetrain.core.step.step import Step
from drivetrain.core.step.trees import Forward, Tree
from drivetrain.core.typed import StateDict
from drivetrain.parallel import onehost
from drivetrain.parallel.fsdp import fully_shard_block
from drivetrain.parallel.sharded import ShardDims, Sharded
from drivetrain.parallel.tensor import shard_blocks, tensor_parallel_problems

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(kw_only=True, eq=False)
class PipelineParallel(Sharded):
    """Uses torch.distributed.pipelining over `stages` ranks (auto: all), split by estimated cost; needs batch=accumulate.

    1f1b (Narayanan et al. 2019) keeps the activations of at most as many micro-batches as there are stages; gpipe (Huang et
    al. 2019) keeps those of all; interleaved (Narayanan et al. 2021) gives each rank `per_rank` shorter stages, so that less
    time is idle. More ranks than stages form several pipelines, which split the batch; with `shard_stages` these also shard
    their stage's weights, as parallel=fsdp does, and reduce gradients at every micro-batch. With `tensor` each stage has that
    many ranks, over which its blocks are sharded as with parallel=tensor.
    """

    effect = "close"
    changes = "gradients are summed over micro-batches, and BatchNorm takes the statistics of each"
    own_forward = False
    own_gradients = False

    stages: Count | Literal["auto"] = "auto"
    schedule: Literal["1f1b", "gpipe", "interleaved"] = "1f1b"
    per_rank: Count = 2
    block: Name | None = None
    shard_stages: bool = False
    tensor: Count = 1

    needs_real_tensors = "its ranks exchange the shapes of sent tensors"

    def validate(self, run: RunSpec) -> Iterator[str]:
        yield from super().validate(run)
        ranks, stages, steps = self.ranks(), self._stage_ranks(), run.batch.accumulation_steps
        if self.tensor == 1:
            yield from self.divisibility_problems("stages", self.stages, stages)
        elif ranks % self.model_ranks():
            named = "" if self.stages == "auto" else f"parallel.stages={self.stages} × "
            yield (
                f"{named}parallel.tensor={self.tensor} does not divide the {ranks} ranks: a pipeline is stages × tensor of them"
            )
        if self.tensor > 1:
            yield from tensor_parallel_problems(f"parallel.tensor={self.tensor}", run)
        if self.schedule == "interleaved" and steps % stages:
            yield (
                f"parallel.schedule=interleaved needs micro-batches in multiples of the {stages} stages, but "
                f"{run.named('batch')} makes {steps} of an update: "
                f"set batch=accumulate batch.accumulation_steps={max(stages, steps // stages * stages)}"
            )
        needs_equal_updates = {"schedule=interleaved": self.schedule == "interleaved", "shard_stages=true": self.shard_stages}
        for setting in (setting for setting, given in needs_equal_updates.items() if given):
            if not run.data.drop_last:
                yield (
                    f"parallel.{setting} needs all updates to be equal, and data.drop_last=false leaves a short one: set "
                    f"data.drop_last=true, or leave parallel.{setting.partition('=')[0]} out"
                )
            if run.batch.buckets_lengths:
                yield (
                    f"parallel.{setting} needs micro-batches of equal shape, and batch=bucketed has many lengths: "
                    "set batch=accumulate"
                )
        if self.shard_stages and ranks == self.model_ranks():
            yield (
                f"parallel.shard_stages=true has nothing to shard because all {ranks} ranks are one pipeline: give it more "
                "ranks than parallel.stages"
            )
        if run.compile.whole_forward:
            yield (
                f"{run.named('compile')} and parallel=pipeline exclude each other (a stage leaves the model's forward in its "
                "middle): set compile=regional"
            )
        if any(edit.ranks_meet_in_forward for edit in run.surgery):
            yield "surgery=[sync_bn] and parallel=pipeline exclude each other (other ranks have other layers): set parallel=ddp"
        if run.batch.preallocate:
            yield (
                "batch.preallocate=true and parallel=pipeline exclude each other (a stage has no forward of its own to try): "
                "set batch.preallocate=false"
            )
        if run.checkpointing.chosen_by_compiler:
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

    # --- this rank's part of the model ---

    def _shard_model(self, model: torch.nn.Module, dtype: str | None, example: Tree) -> tuple[DeviceMesh, str]:
        from drivetrain.parallel.pipeline_stages import StagedForward, check_stages, split_names

        if not isinstance(example, torch.Tensor):
            raise UserError(
                "parallel=pipeline hands one tensor from stage to stage, and the inputs of a sample are several: "
                "set parallel=ddp or fsdp"
            )
        ranks = self._stage_ranks()
        mesh = self.device_mesh(data=self.data_world.size, pipe=ranks, tensor=self.tensor)
        self.stage_group, self.data_group = mesh.get_group("pipe"), mesh.get_group("data")
        self._pipe_rank, self._tensor_rank = mesh.get_local_rank("pipe"), mesh.get_local_rank("tensor")
        self._pipeline_ranks: list[int] = mesh.mesh[
            self.data_world.rank, :, self._tensor_rank
        ].tolist()  # global ranks of this pipeline
        blocks = sequential_blocks("parallel=pipeline", model, self.block)
        count = ranks * (self.per_rank if self.schedule == "interleaved" else 1)
        if count > len(blocks):
            raise UserError(
                f"parallel=pipeline: {count} stages, but the model is a sequence of {len(blocks)} blocks: set parallel.stages to "
                f"{len(blocks)} or less (and parallel.nproc with it)"
            )
        costs = self.broadcast_object(onehost.estimate_costs(model, blocks, example))
        boundaries = onehost.balanced_boundaries(costs, count)
        self.ranges = list(itertools.pairwise(boundaries))
        check_stages(model, blocks, self.ranges, example)
        self._with_inplace_dropout = {stage for stage, (i, _) in enumerate(self.ranges) if _has_inplace_dropout(blocks[i])}
        self.my_stages = range(self._pipe_rank, count, ranks)
        owned = [i for stage in self.my_stages for i in range(*self.ranges[stage])]
        if self.tensor > 1:
            shard_blocks(f"parallel.tensor={self.tensor}", model, [blocks[i] for i in owned], mesh["tensor"], self._work)
        else:
            for i in owned:
                self._work.time_forward(blocks[i])
        self.own_names, self.common_names = split_names(model, blocks, owned)
        for i, block in enumerate(blocks):
            if i not in owned:
                block.to("meta")
                block.requires_grad_(False)
        if self.shard_stages:
            for i in owned:
                # Outside of the blocks weights are float32, so their outputs would not fit bfloat16 weights.
                fully_shard_block(blocks[i], mesh["data"], dtype, cast_inputs=True)
        self._staged = StagedForward(model, blocks)
        tensor = f", each over {self.tensor} ranks" if self.tensor > 1 else ""
        pipelines = f", {self.data_world.size} pipelines" if self.data_world.size > 1 else ""
        return mesh, f"{count} stages of {onehost.describe_split(boundaries, costs)}{tensor}{pipelines}"

    def _layout(self, name: str) -> ShardDims:
        layout = super()._layout(name)
        return layout if name in self.common_names else layout._replace(run=("pipe", *layout.run))

    def rng_rank(self) -> int:
        return self.world.rank - self._tensor_rank

    def stage_forward(self, stage: int, h: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Run the forward of one stage: `h` is the previous stage's output, `x` the model's input."""
        return self._staged.run(*self.ranges[stage], h, x)  # type: ignore[no-any-return]

    def wrap_step(self, step: Step, context: BuildContext) -> Step:
        from drivetrain.parallel.pipeline_stages import PipelineStep

        return PipelineStep(super().wrap_step(step, context), self, context)

    # --- evaluation ---

    def inference_model(self, model: torch.nn.Module) -> Forward:
        from drivetrain.parallel import pipeline_stages

        def outputs(x: torch.Tensor) -> torch.Tensor:
            """Run stage after stage and return the last one's output, on every rank."""
            self.shapes: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
            self.overwriting = set(self._with_inplace_dropout)  # stages that change their input
            for stage in self.my_stages:
                h = x if stage == 0 else pipeline_stages.receive(self._rank_of(stage - 1), self._control, self._device)
                version = h._version
                out = self.stage_forward(stage, h, x)
                if h._version > version:
                    self.overwriting.add(stage)
                self.shapes[stage] = h.new_empty(h.shape, device="meta"), out.new_empty(out.shape, device="meta")
                if stage + 1 < len(self.ranges):
                    pipeline_stages.send(out, self._rank_of(stage + 1), self._control)
            return pipeline_stages.broadcast(out, self._rank_of(len(self.ranges) - 1), self.stage_group)

        return outputs

    def _rank_of(self, stage: int) -> int:
        return self._pipeline_ranks[stage % len(self._pipeline_ranks)]

    def all_reduce_sum(self, sums: torch.Tensor) -> torch.Tensor:
        """Sum the values of the last stage over the pipelines: only the last stage computes the loss."""
        torch.distributed.broadcast(sums, self._rank_of(len(self.ranges) - 1), group=self.stage_group)
        return super().all_reduce_sum(sums)

    def broadcast_buffers(self, model: torch.nn.Module) -> None:
        """Broadcast each stage's buffers from the first pipeline, and buffers outside of the blocks from the last stage."""
        for name, buffer in model.named_buffers():
            if name in self.common_names:
                torch.distributed.broadcast(buffer, self._rank_of(len(self.ranges) - 1), group=self.stage_group)
            if not buffer.is_meta:
                torch.distributed.broadcast(buffer, self.world.rank % self.model_ranks(), group=self.data_group)

    # --- saving ---

    def full_state_dict(self, model: torch.nn.Module, state: StateDict) -> tuple[StateDict, StateDict]:
        own = {n: self._gather_full(n, t).cpu() for n, t in model.state_dict().items() if not t.is_meta}
        state = self._map_state(state, self._gather_full)
        tensors = state["ema"].get("tensors", {})
        average = {n: t.cpu() for n, t in tensors.items() if not t.is_meta}
        is_first = self.data_world.rank == self._tensor_rank == 0
        parts = [part for part in self.gather_object((own, average) if is_first else None) if part is not None]
        state = self.with_states_of_all(state, is_first or self._whole is not None)
        if self.world.rank != 0:
            return {}, {}
        weights = {n: next(w[n] for w, _ in parts if n in w) for n in model.state_dict()}
        if state["ema"]:
            state["ema"] = {**state["ema"], "tensors": {n: next(a[n] for _, a in parts if n in a) for n in tensors}}
        return weights, state

    def empty_shard(self, kind: str, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        if name not in self.own_names and name not in self.common_names:
            return torch.empty(shape, dtype=dtype, device="meta")
        return super().empty_shard(kind, name, shape, dtype)

    def shard_state_dict(self, weights: StateDict, state: StateDict) -> tuple[StateDict, StateDict]:
        own = self._root.state_dict()
        shards, state = super().shard_state_dict({n: weights[n] for n, t in own.items() if not t.is_meta}, state)
        return {n: t if t.is_meta else shards[n] for n, t in own.items()}, state


def _has_inplace_dropout(block: torch.nn.Module) -> bool:
    """True if a block may overwrite its input only in training, where an evaluation does not show it."""
    return any(isinstance(m, torch.nn.modules.dropout._DropoutNd) and m.inplace for m in block.modules())
