"""Fully sharded data parallelism: each rank keeps a share of weights, gradients and optimizer state."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from drivetrain.core.lazy import torch
from drivetrain.core.options.allowed import Name
from drivetrain.core.options.option import Count, RunSpec
from drivetrain.core.step.blocks import describe_blocks, repeated_blocks
from drivetrain.core.step.trees import Tree
from drivetrain.parallel.base import is_sharded
from drivetrain.parallel.sharded import Sharded

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(kw_only=True, eq=False)
class Fsdp(Sharded):
    """Uses torch's `fully_shard` (FSDP2; Rajbhandari et al. 2020, Zhao et al. 2023), which gathers weights block by block.

    `block` is the class name of the blocks; null means the blocks that the model repeats. `reshard_after_forward=false`
    keeps gathered weights until the backward: one all-gather less, more memory. With `replicate` the ranks form that many
    groups, and each group holds the whole model (hybrid sharding). `sync_each_micro` reduces gradients after every
    micro-batch, not once an update: more traffic, but no full gradient in memory. Where autocast computes in bfloat16,
    weights are gathered in bfloat16, except in a model with BatchNorm.
    """

    effect = "close"
    changes = "gradients are averaged over ranks, and BatchNorm takes its statistics from each rank's part"
    replicate: Count = 1
    reshard_after_forward: bool = True
    sync_each_micro: bool = False
    offload: bool = False
    block: Name | None = None

    def validate(self, run: RunSpec) -> Iterator[str]:
        yield from super().validate(run)
        yield from self.divisibility_problems("replicate", self.replicate, self.replicate)
        if run.compile.cuda_graphs:
            yield (
                f"{run.named('compile')} with CUDA graphs and parallel=fsdp exclude each other (weights are gathered and freed "
                "within a forward): set compile=regional compile.mode=default"
            )

    def validate_device(self, run: RunSpec) -> Iterator[str]:
        yield from super().validate_device(run)
        if self.offload and run.runtime.device_type() == "cpu":
            yield "parallel.offload=true moves shards from the device to the CPU, but the device is a CPU: set it to false"

    @property
    def keeps_own_gradients(self) -> bool:
        return False

    def weight_shards(self) -> int:
        return self.ranks() // self.replicate

    def _shard_model(self, model: torch.nn.Module, dtype: str | None, example: Tree) -> tuple[DeviceMesh, str]:
        from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy

        shards = self.world.size // self.replicate
        mesh = self.device_mesh(**({"replicate": self.replicate} if self.replicate > 1 else {}), shard=shards)
        blocks = repeated_blocks(model, self.block)
        for module in blocks or [model]:
            self._work.time_forward(module)
        offload = CPUOffloadPolicy() if self.offload else OffloadPolicy()
        reshard = self.reshard_after_forward
        fully_shard_blocks(model, blocks, mesh, dtype, reshard_after_forward=reshard, offload_policy=offload)
        self._sync_last_only = not self.sync_each_micro
        copies = f", {self.replicate} copies" if self.replicate > 1 else ""
        return mesh, f"{describe_blocks(blocks) or 'the model as one block'} over {shards} shards{copies}"


def fully_shard_blocks(
    model: torch.nn.Module, blocks: Sequence[torch.nn.Module], mesh: DeviceMesh, dtype: str | None, **options: Any
) -> None:
    """Apply `fully_shard` to the model's blocks and to the rest of the model.

    A BatchNorm whose weights have another dtype than the rest is sharded by itself: FSDP gathers weights of one dtype at once.
    """
    has_norms = _has_batch_norm(model)
    mixed = len({p.dtype for p in model.parameters()}) > 1
    norms = [m for m in model.modules() if mixed and _is_batch_norm(m) and m.weight is not None]
    for module in dict.fromkeys((*norms, *blocks, model)):
        fully_shard_block(module, mesh, None if has_norms else dtype, **options)


def fully_shard_block(
    block: torch.nn.Module, mesh: DeviceMesh, dtype: str | None, cast_inputs: bool = False, **options: Any
) -> None:
    """Apply `fully_shard`. Weights are gathered in bfloat16 if `dtype` is, unless the block has a BatchNorm."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy()
    if dtype == "bfloat16" and not _has_batch_norm(block):  # BatchNorm has float32 statistics, and needs float32 weights
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=cast_inputs)
    elif any(p.dtype == torch.bfloat16 for p in block.parameters()):
        policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)  # weights already in bfloat16
    for p in block.parameters():  # FSDP shards along dimension 0 of contiguous memory, so not channels_last
        if not is_sharded(p):
            p.data = p.data.contiguous()
    name = type(block).__name__
    fully_shard(block, mesh=mesh, mp_policy=policy, **options)
    type(block).__name__ = name  # fully_shard renames it; compile.block and messages need the original name


def _has_batch_norm(model: torch.nn.Module) -> bool:
    return any(_is_batch_norm(m) for m in model.modules())


def _is_batch_norm(module: torch.nn.Module) -> bool:
    return isinstance(module, torch.nn.modules.batchnorm._NormBase)
