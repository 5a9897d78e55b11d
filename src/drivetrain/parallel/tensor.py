"""Tensor parallelism: each rank computes with a slice of every large matrix in a transformer's blocks."""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from drivetrain.core.errors import UserError
from drivetrain.core.lazy import torch
from drivetrain.core.machine.torch_patches import wrap_forward
from drivetrain.core.options.option import Count, RunSpec
from drivetrain.core.step.blocks import TensorLayout, repeated_blocks
from drivetrain.core.step.trees import Tree
from drivetrain.parallel.fsdp import fully_shard_blocks
from drivetrain.parallel.process_group import RankWork
from drivetrain.parallel.sharded import Sharded

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(kw_only=True, eq=False)
class Tensor(Sharded):
    """Shards heads and hidden units over `size` ranks (Shoeybi et al. 2019), by torch's DeviceMesh; auto is all ranks.

    More ranks than `size` form groups that split the batch; weights are also sharded over the groups, as with
    parallel=fsdp. There are sharding plans for the blocks of timm's vision transformers and of model=gpt, and models of
    transformers have their own (`tp_plan`).
    """

    effect = "close"
    changes = "products are summed over ranks"
    model_dims: ClassVar[tuple[str, ...]] = ("tensor",)

    size: Count | Literal["auto"] = "auto"

    def validate(self, run: RunSpec) -> Iterator[str]:
        yield from super().validate(run)
        yield from self.divisibility_problems("size", self.size, self.model_ranks())
        yield from tensor_parallel_problems("parallel=tensor", run)
        if run.compile.cuda_graphs:
            yield (
                f"{run.named('compile')} with CUDA graphs and parallel=tensor exclude each other (replaying the ranks' "
                "all-reduces is not tested): set compile=inductor compile.mode=default"
            )
        if run.checkpointing.chosen_by_compiler:
            yield (
                "checkpointing=budget and parallel=tensor exclude each other (torch's compiler cannot tell what it would keep of "
                "a block that lies on several ranks): set checkpointing=blocks"
            )

    @property
    def keeps_own_gradients(self) -> bool:
        return self.data_world.size == 1  # otherwise FSDP divides the weights among the groups

    def model_ranks(self) -> int:
        return self.ranks() if self.size == "auto" else self.size

    def rng_rank(self) -> int:
        return self.world.rank - self.world.rank % self.model_ranks()  # dropout must be the same on all ranks of a block

    def _shard_model(self, model: torch.nn.Module, dtype: str | None, example: Tree) -> tuple[DeviceMesh, str]:
        size = self.model_ranks()
        mesh = self.device_mesh(data=self.data_world.size, tensor=size)
        self.data_group = mesh.get_group("data")
        blocks = repeated_blocks(model)
        count = shard_blocks("parallel=tensor", model, blocks, mesh["tensor"], self._work)
        self._sync_last_only = self.data_world.size > 1
        if self.data_world.size > 1:
            fully_shard_blocks(model, blocks, mesh["data"], dtype)
        groups = f", {self.data_world.size} groups" if self.data_world.size > 1 else ""
        return mesh, f"{count} blocks, each over {size} ranks{groups}"


Plan = Callable[
    ["DeviceMesh", RankWork], None
]  # (tensor mesh, timer of the ranks' work): shards its block in place; raises UserError


def tensor_parallel_problems(setting: str, run: RunSpec) -> Iterator[str]:
    """Yield the options that exclude tensor parallelism, such as a model that is not a transformer."""
    if run.debug.names_backward_lines:
        yield f"debug=anomaly and {setting} exclude each other (torch does not check sharded tensors for NaN): set parallel=ddp"
    if run.batch.buckets_lengths and run.compile.dynamic is not False:
        yield (
            f"{run.named('compile')}, batch=bucketed and {setting} are not compiled for all lengths at once (torch's compiler "
            "does not finish with sharded weights): set compile.dynamic=false, which compiles for each"
        )
    if run.adapter.active:
        yield (
            f"{run.named('adapter')} and {setting} exclude each other (its plans shard plain Linear layers): set "
            "parallel=fsdp or ddp"
        )
    if not run.model.may_be_transformer:
        yield (
            f"{setting} has plans for transformers (model=gpt, model=transformers, vision transformers of model=timm), none for "
            f"{run.named('model')}: set parallel=ddp, fsdp or pipeline"
        )


def shard_blocks(
    setting: str, model: torch.nn.Module, blocks: Sequence[torch.nn.Module], mesh: DeviceMesh, work: RankWork
) -> int:
    """Shard the blocks with a plan over the mesh's ranks, in place. Returns their number. Raises UserError without any.

    `work` times a rank's computation in the blocks before the all-reduce.
    """
    styles = own_styles(model)
    plans = [plan for block in blocks if (plan := plan_for(block, styles)) is not None]
    if not plans:
        found = ", ".join(sorted({type(b).__name__ for b in blocks})) or "none that repeat"
        raise UserError(
            f"{setting} has no plan for this model's blocks ({found}): it knows those of timm's vision transformers, of "
            "model=gpt, and of models of transformers that bring one, as llama does and bert does not: set parallel=fsdp"
        )
    for plan in plans:
        plan(mesh, work)
    return len(plans)


def own_styles(model: torch.nn.Module) -> dict[int, str]:
    """The styles of layers, by their ids, from the plan of a model of transformers; {} without a plan."""
    for module in model.modules():
        if plan := getattr(module, "_tp_plan", None):
            numbered = ((re.sub(r"\b\d+\b", "*", name), layer) for name, layer in module.named_modules())
            return {id(layer): plan[name] for name, layer in numbered if name in plan}
    return {}


def plan_for(block: torch.nn.Module, styles: Mapping[int, str] | None = None) -> Plan | None:
    """Return the sharding plan of a block, or None. Matches exact classes, because derived ones may compute something else.

    `styles` are from `own_styles`, for a block with layers among them.
    """
    if styles and (own := {name: styles[id(m)] for name, m in block.named_modules() if id(m) in styles}):
        return functools.partial(_shard_by_styles, block, own)
    timms = sys.modules.get("timm.layers.attention"), sys.modules.get("timm.layers.mlp")  # loaded if a block is timm's
    attn, mlp = getattr(block, "attn", None), getattr(block, "mlp", None)
    if (
        type(attn) is getattr(timms[0], "Attention", None)
        and type(mlp) is getattr(timms[1], "Mlp", None)
        and _is_plain(attn, "gate", "norm", "q_norm", "k_norm")
        and _is_plain(mlp, "norm")
    ):
        return functools.partial(_shard_timm_block, attn, mlp)
    own_layout = vars(type(block)).get("tensor_layout")  # defined by this very class: a derived one may compute something else
    return None if own_layout is None else functools.partial(_shard_by_layout, own_layout(block))


def _is_plain(module: object, *parts: str) -> bool:
    """Return whether a module lacks these parts, which would mix all heads or hidden units."""
    return all(isinstance(getattr(module, part, None), torch.nn.Identity | None) for part in parts)


def _shard_timm_block(attn: Any, mlp: Any, mesh: DeviceMesh, work: RankWork) -> None:
    """Shard timm's Block: the heads of its attention and the hidden units of its MLP."""
    _shard_by_layout(TensorLayout(attn, "qkv", "proj", attn.num_heads, mlp, "fc1", "fc2"), mesh, work)
    attn.num_heads //= mesh.size()
    attn.attn_dim = attn.num_heads * attn.head_dim


def _shard_by_layout(layout: TensorLayout, mesh: DeviceMesh, work: RankWork) -> None:
    """Shard a block that declares its heads and hidden units (`TensorLayout`)."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    attention, feed_forward = layout.attention, layout.feed_forward
    _check_divisible(layout.heads, "heads", mesh.size())
    _check_divisible(len(feed_forward.get_parameter(f"{layout.up}.weight")), "hidden units", mesh.size())
    _shard_fused_linear(attention.get_submodule(layout.qkv), 3, mesh)
    parallelize_module(attention, mesh, {layout.out: RowwiseParallel()}, src_data_rank=None)
    styles = {layout.up: ColwiseParallel(), layout.down: RowwiseParallel()}
    parallelize_module(feed_forward, mesh, styles, src_data_rank=None)
    work.time_between(attention, attention.get_submodule(layout.out))
    work.time_between(feed_forward, feed_forward.get_submodule(layout.down))


def _shard_by_styles(block: torch.nn.Module, styles: Mapping[str, str], mesh: DeviceMesh, work: RankWork) -> None:
    """Shard a block by the styles of its layers. The widths of its layers are an attention's heads or hidden units."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    made = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}
    if others := sorted({*styles.values()} - {*made}):
        raise UserError(
            f"the tensor plan of {type(block).__name__} has styles unknown to drivetrain ({', '.join(others)}): set parallel=fsdp"
        )
    modules = dict(block.named_modules())
    for name, style in styles.items():
        parent, layer = modules[name.rpartition(".")[0]], modules[name]
        if style == "rowwise":
            work.time_between(parent, layer)
        else:
            heads = getattr(parent, "head_dim", None)
            _check_divisible(layer.out_features // (heads or 1), "heads" if heads else "hidden units", mesh.size())
    parallelize_module(block, mesh, {name: made[style]() for name, style in styles.items()}, src_data_rank=None)


def _check_divisible(number: int, what: str, size: int) -> None:
    if number % size:
        near = [n for n in range(size, 0, -1) if number % n == 0]
        raise UserError(
            f"a block's {number} {what} do not divide into {size} ranks: shard it over {near[0]} (parallel.size; of a pipeline "
            "parallel.tensor)"
        )


def _shard_fused_linear(linear: Any, parts: int, mesh: DeviceMesh) -> None:
    """Shard a Linear that fuses `parts` matrices, in place, matrix by matrix, so that each rank has the q, k, v of its heads.

    Weight and bias get a dimension for the parts, so that a shard is a slice of each part. Checkpoints have no such dimension.
    """
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

    for name, p in linear.named_parameters():
        separate = p.detach().unflatten(0, (parts, -1))
        sharded = distribute_tensor(separate, mesh, [Shard(1)], src_data_rank=None)
        linear.register_parameter(name, torch.nn.Parameter(sharded, requires_grad=p.requires_grad))

    def of_parts(x: torch.Tensor) -> torch.Tensor:
        # The input is the same on all ranks; its gradient is the sum of the ranks' gradients.
        x = DTensor.from_local(x, mesh, [Replicate()], run_check=False).to_local(grad_placements=[Partial()])
        bias = None if linear.bias is None else linear.bias.to_local().flatten(0, 1)
        return torch.nn.functional.linear(x, linear.weight.to_local().flatten(0, 1), bias)

    wrap_forward(linear, lambda forward: of_parts)
