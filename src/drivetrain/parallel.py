"""One process or many: who takes part, how gradients meet, and what is summed over the ranks."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any, Literal

from drivetrain.lazy import torch
from drivetrain.plan import World
from drivetrain.spec import Count, Part, Positive, Run

_NULL = nullcontext()


class Parallel(Part):
    """parallel=single: one process."""

    world = World()
    distributed = False  # wants a process group, also with one rank

    def check(self, run: Run) -> Iterator[str]:
        if (launched() or 1) > 1 and self.ranks() == 1:
            yield (
                f"started as one of {launched()} ranks (WORLD_SIZE), but {run.named('parallel')} is one process: set parallel=ddp"
            )

    def ranks(self) -> int:
        """Processes that train together."""
        return 1

    def start(self, world: World, device: torch.device) -> None:
        """Join the other ranks."""
        self.world = world

    def wrap(self, model: Any) -> Any:
        """The callable that training calls, its gradients shared between the ranks."""
        return model

    def sync(self, model: Any, last: bool) -> AbstractContextManager[Any]:
        """The context of one micro-batch; gradients meet in the update's last one alone."""
        return _NULL

    def agree(self, flag: int) -> int:
        """The highest `flag` of all ranks, so that all of them stop or save at the same update."""
        return flag

    def total(self, sums: torch.Tensor) -> torch.Tensor:
        """The sum over the ranks."""
        return sums

    def share_buffers(self, model: torch.nn.Module) -> None:
        """Give every rank rank 0's buffers, so that all evaluate the model that is saved."""

    def gather(self, value: Any) -> list[Any]:
        """One value per rank, on rank 0."""
        return [value]

    def same(self, value: Any) -> Any:
        """Rank 0's value, on every rank."""
        return value

    def stop(self) -> None:
        """Leave."""


class Ddp(Parallel):
    """DistributedDataParallel: one process per device, gradients all-reduced in buckets during the backward.

    `nproc` is the ranks on this machine: auto is one per CUDA device, two on a CPU.
    """

    distributed = True

    def __init__(
        self,
        nproc: Count | Literal["auto"] = "auto",
        bucket_mb: Positive = 25.0,
        static_graph: bool = False,
        gradient_as_bucket_view: bool = True,
        find_unused_parameters: bool = False,
        timeout_s: Positive = 600.0,
    ) -> None:
        self.nproc, self.bucket_mb, self.static_graph = nproc, bucket_mb, static_graph
        self.gradient_as_bucket_view, self.find_unused_parameters = gradient_as_bucket_view, find_unused_parameters
        self.timeout_s = timeout_s

    def check(self, run: Run) -> Iterator[str]:
        size = launched()
        if size is not None and self.nproc not in ("auto", size):
            yield f"parallel.nproc={self.nproc}, but the launcher started {size} ranks (WORLD_SIZE): set parallel.nproc=auto"

    def ranks(self) -> int:
        if (size := launched()) is not None:  # torchrun's or Slurm's ranks are honoured
            return size
        if self.nproc != "auto":
            return int(self.nproc)
        return max(1, cuda_devices()) if cuda_devices() else 2

    def start(self, world: World, device: torch.device) -> None:
        import torch.distributed as dist

        self.world, self._device = world, device
        timeout = timedelta(seconds=self.timeout_s)
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=timeout)
        # Flags travel on the CPU whatever the device: reading one must not wait for the device's queue.
        self._control: Any = dist.new_group(backend="gloo", timeout=timeout) if device.type == "cuda" else dist.group.WORLD
        self._flag = torch.zeros((), dtype=torch.int64)
        self._pending: Any = None

    def wrap(self, model: Any) -> Any:
        return torch.nn.parallel.DistributedDataParallel(
            model,
            device_ids=[self._device.index] if self._device.type == "cuda" else None,
            bucket_cap_mb=self.bucket_mb,
            static_graph=self.static_graph,
            gradient_as_bucket_view=self.gradient_as_bucket_view,
            find_unused_parameters=self.find_unused_parameters,
        )

    def sync(self, model: Any, last: bool) -> AbstractContextManager[Any]:
        return _NULL if last else model.no_sync()

    def agree(self, flag: int) -> int:
        """Answers with what was asked at the update before: that all-reduce ran beside a step and costs no wait."""
        import torch.distributed as dist

        agreed = 0
        if self._pending is not None:
            self._pending.wait()
            agreed = int(self._flag)
        self._flag.fill_(0 if agreed else flag)  # what was agreed is done now; what is still wanted is asked for again
        self._pending = dist.all_reduce(self._flag, dist.ReduceOp.MAX, group=self._control, async_op=True)
        return agreed

    def total(self, sums: torch.Tensor) -> torch.Tensor:
        import torch.distributed as dist

        dist.all_reduce(sums)
        return sums

    def share_buffers(self, model: torch.nn.Module) -> None:
        import torch.distributed as dist

        for buffer in model.buffers():
            dist.broadcast(buffer, src=0)

    def gather(self, value: Any) -> list[Any]:
        import torch.distributed as dist

        values: list[Any] | None = [None] * self.world.size if self.world.rank == 0 else None
        dist.gather_object(value, values, dst=0, group=self._control)
        return values or []

    def same(self, value: Any) -> Any:
        import torch.distributed as dist

        values = [value]
        dist.broadcast_object_list(values, src=0, group=self._control)
        return values[0]

    def stop(self) -> None:
        import torch.distributed as dist

        if self._pending is not None:
            self._pending.wait()
        dist.destroy_process_group()


def launched() -> int | None:
    """How many ranks torchrun or Slurm started, of which this is one; None where neither did."""
    size = os.environ.get("WORLD_SIZE", "")
    return int(size) if size.isdecimal() and "RANK" in os.environ else None


def cuda_devices() -> int:
    """CUDA devices, told without starting CUDA or importing torch: the ranks are forked from this process."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([d for d in visible.split(",") if d.strip() not in ("", "-1")])
    try:
        return sum(name.isdigit() for name in os.listdir("/proc/driver/nvidia/gpus")) or len(
            os.listdir("/proc/driver/nvidia/gpus")
        )
    except OSError:
        return 0
