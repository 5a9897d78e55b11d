"""Fully sharded data parallelism: each rank keeps a share of weights, gradients and optimizer state."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from drivetrain.core.blocks import describe_blocks, repeated_blocks
from drivetrain.core.lazy import torch
from drivetrain.core.option import Count, RunSpec
from drivetrain.parallel.sharded import Sharded, is_sharded


@dataclass(kw_only=True, eq=False)
class Fsdp(Sharded):
    """torch's `fully_shard` (FSDP2; Rajbhandari et al. 2020, Zhao et al. 2023): weights gathered block by block when needed.

    `block` names the blocks' class where the model's own repetition is not the one wanted. `reshard_after_forward=false`
    keeps gathered weights until the backward: one gathering less, more memory. With `replicate` the ranks are that many
    groups, each of which holds the whole model (hybrid sharding). `sync_each_micro` shares gradients after every
    micro-batch, not once an update: more traffic, no whole gradient kept. Where autocast computes in bfloat16, weights
    travel in it, but those of a model with BatchNorm.
    """

    replicate: Count = 1
    reshard_after_forward: bool = True
    sync_each_micro: bool = False
    offload: bool = False
    block: str | None = None

    def validate(self, run: RunSpec) -> Iterator[str]:
        yield from super().validate(run)
        yield from self.divides("replicate", self.replicate, self.replicate)
        if run.compile.cuda_graphs:
            yield (
                "compile=cudagraph and parallel=fsdp exclude each other (weights come and go within a forward): "
                "set compile=regional"
            )

    def validate_device(self, run: RunSpec) -> Iterator[str]:
        yield from super().validate_device(run)
        if self.offload and run.runtime.device_type() != "cuda":
            yield "parallel.offload=true moves shards from a CUDA device to the CPU, and the device is a CPU: set it to false"

    def _split(self, model: torch.nn.Module, dtype: str | None, example: torch.Tensor) -> list[str]:
        shards = self.world.size // self.replicate
        mesh = self.made_mesh(**({"replicate": self.replicate} if self.replicate > 1 else {}), shard=shards)
        self._mesh = mesh
        blocks = repeated_blocks(model, self.block)
        for module in blocks or [model]:
            self._work.through(module)
        fully_shard_blocks(model, blocks, mesh, dtype, reshard_after_forward=self.reshard_after_forward, **self._offloading())
        self._once_an_update = not self.sync_each_micro
        copies = f", {self.replicate} copies" if self.replicate > 1 else ""
        return [f"{describe_blocks(blocks) or 'the model as one block'} over {shards} shards{copies}"]

    def _offloading(self) -> dict[str, Any]:
        from torch.distributed.fsdp import CPUOffloadPolicy

        return {"offload_policy": CPUOffloadPolicy()} if self.offload else {}


def fully_shard_blocks(model: Any, blocks: Sequence[torch.nn.Module], mesh: Any, dtype: str | None, **how: Any) -> None:
    """`fully_shard` on the model's blocks and on what is left."""
    norms = _has_batch_norm(model)
    for module in (*blocks, model):
        fully_shard_block(module, mesh, None if norms else dtype, **how)


def fully_shard_block(block: Any, mesh: Any, dtype: str | None, **how: Any) -> None:
    """`fully_shard`; weights travel in bfloat16 where `dtype` says so, unless there is a BatchNorm among them."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy()
    if dtype == "bfloat16" and not _has_batch_norm(block):  # it computes with float32 statistics, and wants weights alike
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for p in block.parameters():  # shards are rows one after the other: weights in channels_last go back to that
        if not is_sharded(p):
            p.data = p.data.contiguous()
    name = type(block).__name__
    fully_shard(block, mesh=mesh, mp_policy=policy, **how)
    type(block).__name__ = name  # the user knows it by its own: compile.block finds it, messages tell it


def _has_batch_norm(model: torch.nn.Module) -> bool:
    return any(isinstance(m, torch.nn.modules.batchnorm._NormBase) for m in model.modules())
