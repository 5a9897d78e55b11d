"""Tensor parallelism: each rank computes with a slice of every large matrix of a transformer's blocks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from drivetrain.core.blocks import TensorLayout, repeated_blocks
from drivetrain.core.errors import UserError
from drivetrain.core.lazy import torch
from drivetrain.core.option import Count, RunSpec
from drivetrain.parallel.fsdp import fully_shard_blocks
from drivetrain.parallel.rank_work import RankWork
from drivetrain.parallel.sharded import Sharded


@dataclass(kw_only=True, eq=False)
class Tensor(Sharded):
    """Heads and hidden units over `size` ranks (Shoeybi et al. 2019), by torch's DeviceMesh; auto is all ranks.

    More ranks than `size` are groups that split the batch, and their weights are sharded over the groups as with
    parallel=fsdp. There are plans for the blocks of timm's vision transformers and of model=gpt.
    """

    portable_shards = False

    size: Count | Literal["auto"] = "auto"

    def validate(self, run: RunSpec) -> Iterator[str]:
        yield from super().validate(run)
        yield from self.divides("size", self.size, self.model_ranks())
        yield from cannot_be_laid("parallel=tensor", run)
        if run.compile.cuda_graphs:
            yield (
                "compile=cudagraph and parallel=tensor exclude each other (nobody has seen the ranks' sums replayed right): "
                "set compile=inductor"
            )
        if run.checkpointing.chosen_by_compiler:
            yield (
                "checkpointing=budget and parallel=tensor exclude each other (torch's compiler cannot tell what it would keep of "
                "a block that lies on several ranks): set checkpointing=blocks"
            )

    def model_ranks(self) -> int:
        return self.ranks() if self.size == "auto" else self.size

    def rng_rank(self) -> int:
        return self.world.rank - self.world.rank % self.model_ranks()  # a dropout is the same on the ranks of a block

    def _split(self, model: torch.nn.Module, dtype: str | None, example: torch.Tensor) -> list[str]:
        size = self.model_ranks()
        mesh = self.made_mesh(data=self.data_world.size, tensor=size)
        self._mesh, self.data_group = mesh, mesh.get_group("data")
        blocks = repeated_blocks(model)
        plans = lay("parallel=tensor", blocks, mesh["tensor"], self._work)
        self._once_an_update = self.data_world.size > 1
        if self.data_world.size > 1:
            fully_shard_blocks(model, blocks, mesh["data"], dtype)
        groups = f", {self.data_world.size} groups" if self.data_world.size > 1 else ""
        return [f"{plans} blocks, each over {size} ranks{groups}"]


Plan = Callable[[Any, RankWork], None]  # (mesh of the tensor ranks, what counts their work): changes its block; raises UserError


def cannot_be_laid(setting: str, run: RunSpec) -> Iterator[str]:
    """What cannot be laid over ranks, as far as the options tell: a model that is no transformer, say."""
    if run.debug.names_backward_lines:
        yield f"debug=anomaly and {setting} exclude each other (torch looks for NaN in no sharded tensor): set parallel=ddp"
    if run.batch.buckets_lengths and run.compile.dynamic is not False:
        yield (
            f"{run.named('compile')}, batch=bucketed and {setting} are not compiled for all lengths at once (torch's compiler "
            "comes to no end over sharded weights): set compile.dynamic=false, which compiles for each"
        )
    if not run.model.may_be_transformer:
        yield (
            f"{setting} has plans for transformers (model=gpt, vision transformers of model=timm), none for "
            f"{run.named('model')}: set parallel=ddp, fsdp or pipeline"
        )


def lay(setting: str, blocks: Sequence[torch.nn.Module], mesh: Any, work: RankWork) -> int:
    """Lay the blocks that we know over the mesh's ranks, in place; how many. Raises UserError where it is none.

    `work` counts what a rank does in them before it adds up with the others.
    """
    plans = [plan for block in blocks if (plan := plan_for(block)) is not None]
    if not plans:
        found = ", ".join(sorted({type(b).__name__ for b in blocks})) or "none that repeat"
        raise UserError(
            f"{setting} has no plan for this model's blocks ({found}): it knows those of timm's vision transformers and of "
            "model=gpt: set parallel=fsdp or pipeline"
        )
    for plan in plans:
        plan(mesh, work)
    return len(plans)


def plan_for(block: Any) -> Plan | None:
    """How to lay a block over ranks, if we know it: by its exact classes, for others with the same names compute otherwise."""
    from timm.layers.attention import Attention
    from timm.layers.mlp import Mlp

    attn, mlp = getattr(block, "attn", None), getattr(block, "mlp", None)
    if (
        type(attn) is Attention
        and type(mlp) is Mlp
        and _is_plain(attn, "gate", "norm", "q_norm", "k_norm")
        and _is_plain(mlp, "norm")
    ):
        return functools.partial(_timm, block)
    if "tensor_layout" in vars(type(block)):  # the class's own word: a class derived from it may compute otherwise
        return functools.partial(_by_layout, block.tensor_layout())
    return None


def _is_plain(module: Any, *parts: str) -> bool:
    """Whether these parts of a module, which all heads or hidden units share, are off."""
    return all(isinstance(getattr(module, part, None), torch.nn.Identity | None) for part in parts)


def _timm(block: Any, mesh: Any, work: RankWork) -> None:
    """timm's Block: heads of the attention, hidden units of the mlp."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    attn, size = block.attn, mesh.size()
    _divisible(attn.num_heads, "heads", size)
    _divisible(block.mlp.fc1.out_features, "hidden units", size)
    attn.num_heads //= size
    attn.attn_dim = attn.num_heads * attn.head_dim
    attn.qkv = _fused(attn.qkv, 3, mesh)
    parallelize_module(attn, mesh, {"proj": RowwiseParallel()}, src_data_rank=None)
    parallelize_module(block.mlp, mesh, {"fc1": ColwiseParallel(), "fc2": RowwiseParallel()}, src_data_rank=None)
    work.between(attn, attn.proj)
    work.between(block.mlp, block.mlp.fc2)


def _by_layout(layout: TensorLayout, mesh: Any, work: RankWork) -> None:
    """A block that names its own heads and hidden units."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    attention, feed_forward = layout.attention, layout.feed_forward
    _divisible(layout.heads, "heads", mesh.size())
    setattr(attention, layout.qkv, _fused(getattr(attention, layout.qkv), 3, mesh))
    parallelize_module(attention, mesh, {layout.out: RowwiseParallel()}, src_data_rank=None)
    halves = {layout.up: ColwiseParallel(), layout.down: RowwiseParallel()}
    parallelize_module(feed_forward, mesh, halves, src_data_rank=None)
    work.between(attention, getattr(attention, layout.out))
    work.between(feed_forward, getattr(feed_forward, layout.down))


def _divisible(number: int, what: str, size: int) -> None:
    if number % size:
        near = [n for n in range(size, 0, -1) if number % n == 0]
        raise UserError(
            f"a block's {number} {what} do not divide into {size} ranks: lay it over {near[0]} (parallel.size; of a pipeline "
            "parallel.tensor)"
        )


def _fused(linear: Any, parts: int, mesh: Any) -> Any:
    """A Linear whose rows are those of `parts` matrices, laid over the ranks matrix by matrix: each has its heads' q, k, v.

    Weight and bias get a dimension for the parts, so that a shard is a shard of each of them; saved, they have none.
    """
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

    for name, p in linear.named_parameters():
        split = p.detach().unflatten(0, (parts, -1))
        laid = distribute_tensor(split, mesh, [Shard(1)], src_data_rank=None)
        linear.register_parameter(name, torch.nn.Parameter(laid, requires_grad=p.requires_grad))

    def forward(x: torch.Tensor) -> torch.Tensor:
        # The input is the same on all ranks; its gradient is the sum of theirs.
        x = DTensor.from_local(x, mesh, [Replicate()], run_check=False).to_local(grad_placements=[Partial()])
        bias = None if linear.bias is None else linear.bias.to_local().flatten(0, 1)
        return torch.nn.functional.linear(x, linear.weight.to_local().flatten(0, 1), bias)

    linear.forward = forward
    return linear
