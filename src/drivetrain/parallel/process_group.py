"""The base of the strategies with several processes: rank counts, process groups and collectives."""

from __future__ import annotations

import functools
import os
import re
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Literal, Self

from drivetrain.core.errors import UserError
from drivetrain.core.lazy import torch
from drivetrain.core.machine import accelerators
from drivetrain.core.machine.device import Clock, Mark, clock_for
from drivetrain.core.machine.guards import too_many
from drivetrain.core.options.option import BuildContext, Count, CountOrZero, Positive, RunSpec
from drivetrain.core.step.trees import leaves, map_tensors
from drivetrain.core.world import World
from drivetrain.parallel.base import Parallel, T
from drivetrain.parallel.environment import launched

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, Work
    from torch.distributed.device_mesh import DeviceMesh


class RankWork:
    """Adds up the time of the training forward without waits for other ranks.

    It is device time, because the host may run far ahead. The backward is left out because all ranks wait in it, and compiled
    code because a clock would cause graph breaks.
    """

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or Clock()
        self._seconds = 0.0
        self._since: Mark | None = None
        self._unread: deque[tuple[Mark, Mark]] = deque()

    def seconds(self) -> float:
        """Return the seconds of work so far. Waits for the device."""
        self._read(len(self._unread))
        return self._seconds

    def time_forward(self, module: torch.nn.Module) -> None:
        """Time a module's whole forward. Call it before FSDP or DDP add their hooks, so that these are not timed."""
        module.register_forward_pre_hook(self._begin, prepend=True)
        module.register_forward_hook(self._end)

    def time_between(self, first: torch.nn.Module, last: torch.nn.Module) -> None:
        """Time from the start of `first`'s forward to the start of `last`'s, which is inside of it."""
        first.register_forward_pre_hook(self._begin)
        last.register_forward_pre_hook(self._end)

    def _begin(self, module: torch.nn.Module, *_: object) -> None:
        if module.training and not torch.compiler.is_compiling():
            self._since = self._clock.mark()

    def _end(self, module: torch.nn.Module, *_: object) -> None:
        if torch.compiler.is_compiling():
            return
        if self._since is not None and module.training:
            self._unread.append((self._since, self._clock.mark()))
            if self._clock.passed(self._unread[0][1]):
                self._read(1)
        self._since = None

    def _read(self, count: int) -> None:
        """Read the oldest unread intervals."""
        self._seconds += self._clock.total([self._unread.popleft() for _ in range(count)])


MAX_KEYS = 8  # named in the message about ranks with different configs
ENDPOINT = re.compile(r"[^\s:]+:(\d{1,5})")


def device_id(device: torch.device) -> str | None:
    """Return a rank's device by its identity on its machine; None for a CPU, which ranks share."""
    if device.type == "cpu":
        return None
    properties = torch.get_device_module(device).get_device_properties(device)
    return str(getattr(properties, "uuid", device))


@dataclass(kw_only=True, eq=False)
class ProcessGroupStrategy(Parallel):
    """Runs processes that train together, on one machine or several.

    `nproc` is the number of ranks on this machine: auto is one per device, two on a CPU. With `nnodes` machines the same
    command on each of them connects to `rendezvous`, a host:port of one of them. If a rank dies, is stopped for
    `heartbeat_timeout_s`, or sends no heartbeat for `timeout_s`, the others are ended; all start again from the newest
    checkpoint, `max_restarts` times. A collective that takes longer than `timeout_s` fails.
    """

    nproc: Count | Literal["auto"] = "auto"
    nnodes: Count = 1
    rendezvous: str | None = None
    rendezvous_s: Positive = 300.0
    max_restarts: CountOrZero = 0
    timeout_s: Positive = 600.0
    heartbeat_timeout_s: Positive = 30.0

    distributed = True
    one_process = False
    reduces_in_graph = False
    _work: RankWork = field(default_factory=RankWork, init=False)  # time of this rank's own work
    _reported_work: float = field(default=0.0, init=False)  # its seconds at the last log
    _on_cpu: bool = field(default=False, init=False)  # independent of the machine's devices
    machine_local_keys = ("nnodes", "rendezvous", "rendezvous_s")

    def resolve(self, run: RunSpec) -> Self:
        return self.with_values(_on_cpu=run.runtime.device == "cpu")

    def validate(self, run: RunSpec) -> Iterator[str]:
        size = launched()
        if size is not None and self.nproc not in ("auto", size):
            yield f"parallel.nproc={self.nproc}, but the launcher started {size} ranks (WORLD_SIZE): set parallel.nproc=auto"
        if size is not None and self.nnodes > 1:
            yield (
                f"parallel.nnodes={self.nnodes}, but a launcher started {size} ranks already (WORLD_SIZE): leave the machines "
                "to it and set parallel.nnodes=1"
            )
        if self.nproc != "auto":
            yield from too_many("processes", f"parallel.nproc={self.nproc}", self.nproc)
        if self.nnodes > 1 and self.rendezvous is None:
            yield (
                f"parallel.nnodes={self.nnodes} machines need an address to connect to: set parallel.rendezvous=host:port, a "
                "free port of one of them, the same on each"
            )
        host_and_port = ENDPOINT.fullmatch(self.rendezvous or "")
        if self.rendezvous is not None and not (host_and_port and 0 < int(host_and_port[1]) < 2**16):
            yield f"parallel.rendezvous={self.rendezvous} is no host:port: give one such as node1:29500, a port of 1 to 65535"
        if self.rendezvous is not None and self.nnodes == 1:
            yield f"parallel.rendezvous={self.rendezvous} has no effect on one machine: set parallel.nnodes, or leave it out"
        if size is not None and self.max_restarts:
            yield (
                f"parallel.max_restarts={self.max_restarts}, but a launcher started the ranks (WORLD_SIZE), and it alone can "
                "start them again: set parallel.max_restarts=0, and resume=auto with its own restarts (torchrun --max-restarts)"
            )
        if self.max_restarts and not run.saving.active:
            yield (
                f"parallel.max_restarts={self.max_restarts} has no checkpoint to restart from with {run.named('saving')}: "
                "set saving=last"
            )

    def validate_device(self, run: RunSpec) -> Iterator[str]:
        found = run.runtime.accelerator()
        if found.type == "mps":
            yield f"{run.named('parallel')} needs collectives, but MPS has none: set parallel=single, or runtime.device=cpu"
        elif found.type != "cpu" and launched() is None and self.local_ranks() > found.count:
            yield (
                f"parallel.nproc={self.nproc} starts {self.local_ranks()} ranks, and torch finds {found.count} "
                f"{found.type.upper()} devices, one for each rank: set parallel.nproc={found.count}, or runtime.device=cpu"
            )

    def ranks(self) -> int:
        if (size := launched()) is not None:  # torchrun or Slurm has set the number of ranks
            return size
        return self.nnodes * self.local_ranks()

    def model_ranks(self) -> int:
        """Return the number of ranks that share one replica of the model and take the same samples."""
        return 1

    def data_ranks(self) -> int:
        return max(1, self.ranks() // self.model_ranks())

    def divisibility_problems(self, setting: str, given: object, number: int) -> Iterator[str]:
        """Yield a problem if the ranks cannot be divided into groups of `number`."""
        if self.ranks() % number:
            near = ", ".join(str(n) for n in range(1, self.ranks() + 1) if self.ranks() % n == 0)
            yield f"parallel.{setting}={given} does not divide the {self.ranks()} ranks: set it to one of {near}"

    def local_ranks(self) -> int:
        """Return the number of ranks on this machine."""
        if self.nproc != "auto":
            return self.nproc
        return (0 if self._on_cpu else accelerators.device_count()) or 2

    def setup(self, context: BuildContext) -> None:
        world, device = context.world, context.device
        self.world, self._device, self._work = world, device, RankWork(clock_for(device))
        model_ranks = self.model_ranks()
        self.data_world = World(world.rank // model_ranks, world.size // model_ranks, world.local_rank, world.local_size)
        timeout = timedelta(seconds=self.timeout_s)
        try:
            meeting = torch.distributed.rendezvous("env://", world.rank, world.size, timeout=timeout)
            store, _, _ = next(meeting)
            # A prefix per restart, so that restarted ranks do not read old addresses from the launcher's store.
            prefix = f"restart-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
            store = torch.distributed.PrefixStore(prefix, store)
            own = torch.distributed.get_default_backend_for_device(device)  # nccl for CUDA and ROCm, xccl for XPU
            backend = own if device.type == "cpu" else f"cpu:gloo,{device.type}:{own}"  # shards may be offloaded to the CPU
            torch.distributed.init_process_group(backend, store=store, rank=world.rank, world_size=world.size, timeout=timeout)
        except (torch.distributed.DistNetworkError, torch.distributed.DistStoreError) as error:
            raise UserError(f"the {world.size} ranks did not meet: {str(error).splitlines()[0]}") from None
        # Flags are reduced on the CPU whatever the device, because reading one must not wait for the device.
        self._control = self.saving_group() if device.type != "cpu" else torch.distributed.group.WORLD
        self._flag = torch.zeros((), dtype=torch.int64)
        self._pending: Work | None = None
        self._check_same_start(context)

    def device_mesh(self, **sizes: int) -> DeviceMesh:
        """Return a DeviceMesh of all ranks with these dimensions, the last one varying fastest, with `timeout_s` on each."""
        from torch.distributed.device_mesh import init_device_mesh

        mesh = init_device_mesh(self._device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
        set_timeout: Callable[[timedelta, ProcessGroup], None] = (
            getattr(torch.distributed, "set_timeout", None) or torch.distributed.distributed_c10d._set_pg_timeout
        )
        for name in sizes:
            set_timeout(timedelta(seconds=self.timeout_s), mesh.get_group(name))
        return mesh

    def _check_same_start(self, context: BuildContext) -> None:
        """Raise UserError on all ranks if they were started with different configs or versions, or share a device."""
        import socket

        from drivetrain.core.machine import process

        own_start = (context.config_hash, f"drivetrain {process.__version__}", f"torch {torch.__version__}")
        ranks = self.of_all_ranks((own_start, socket.gethostname(), device_id(self._device)))
        ranks_by_start: dict[tuple[str, ...], list[int]] = defaultdict(list)
        ranks_by_device: dict[tuple[str, str | None], list[int]] = defaultdict(list)
        for rank, (start, host, device) in enumerate(ranks):
            ranks_by_start[start].append(rank)
            ranks_by_device[host, device].append(rank)
        for (host, device), same in ranks_by_device.items():
            if device is not None and len(same) > 1:
                raise UserError(
                    f"ranks {' and '.join(map(str, same))} are on one device of {host} ({device}): start as many ranks as there "
                    "are devices (parallel.nproc), and let a launcher show each rank its own or all of them "
                    "(CUDA_VISIBLE_DEVICES)"
                )
        if len(ranks_by_start) > 1:
            described = "; ".join(
                f"{'ranks' if len(same) > 1 else 'rank'} {', '.join(map(str, same))} on {ranks[same[0]][1]}: config {start[0]}, "
                f"{start[1]}, {start[2]}"
                for start, same in ranks_by_start.items()
            )
            first_of_each = [same[0] for same in ranks_by_start.values()]
            raise UserError(
                f"the ranks were not started alike ({described}{self._different_keys(first_of_each, context.config)}): "
                "give the same command everywhere"
            )

    def of_all_ranks(self, value: T) -> list[T]:
        """Return the values of all ranks, on every rank."""
        values = [value] * self.world.size
        torch.distributed.all_gather_object(values, value, group=self._control)
        return values

    def rank_metrics(self, seconds: float, waited: float) -> dict[str, float]:
        """Return the slowest rank and the share of the step time for which the ranks wait for it on average."""
        if self.world.size == 1:
            return {}
        all_ranks = torch.zeros(2, self.world.size, dtype=torch.float64)
        worked = waited + self._work.seconds()  # its waits for data count, because the others wait too
        all_ranks[:, self.world.rank] = torch.tensor([worked - self._reported_work, seconds])
        self._reported_work = worked
        torch.distributed.all_reduce(all_ranks, group=self._control)
        works, steps = all_ranks
        slowest, longest = int(works.argmax()), float(steps.max())
        excess = float(works[slowest] - works.mean())
        return {"rank_work_excess": excess / longest if longest else 0.0, "slowest_rank": slowest}

    def _different_keys(self, ranks: list[int], config: Mapping[str, object]) -> str:
        """Describe the keys that have different values in the configs of these ranks."""
        configs = self.of_all_ranks(dict(config) if self.world.rank in ranks else {})
        keys = sorted(set().union(*(configs[rank] for rank in ranks)))
        values = {key: [configs[rank].get(key, "absent") for rank in ranks] for key in keys}
        differ = [f"{key} is {' and '.join(map(str, v))}" for key, v in values.items() if any(v[0] != other for other in v)]
        return "; " + ", ".join(differ[:MAX_KEYS]) + (" …" if len(differ) > MAX_KEYS else "") if differ else ""

    def all_reduce_flag(self, flag: int) -> int:
        """Return the highest flag of the previous update: its all-reduce ran during a step, so nothing waits for it."""
        self.finish_collectives()
        agreed = int(self._flag)
        self._flag.fill_(0 if agreed else flag)  # an agreed flag is handled now; any other is sent again
        self._pending = torch.distributed.all_reduce(
            self._flag, torch.distributed.ReduceOp.MAX, group=self._control, async_op=True
        )
        return agreed

    def finish_collectives(self) -> None:
        if self._pending is not None:
            self._pending.wait()

    def all_reduce_sum(self, sums: torch.Tensor) -> torch.Tensor:
        torch.distributed.all_reduce(sums, group=self.data_group)
        return sums

    def broadcast_buffers(self, model: torch.nn.Module) -> None:
        self.broadcast_tensors(list(model.buffers()))

    def broadcast_tensors(self, tensors: Sequence[torch.Tensor]) -> None:
        for tensor in tensors:
            torch.distributed.broadcast(tensor, src=0)

    def gather_object(self, value: T) -> list[T]:
        layout = map_tensors(_layout, value)
        values: list[T] = [layout] * self.world.size if self.world.rank == 0 else []
        torch.distributed.gather_object(layout, values or None, dst=0, group=self._control)
        if not values:
            for tensor in leaves(value):
                torch.distributed.send(_sent(tensor), 0, group=self._control)
            return []

        def receive(layout: torch.Tensor, rank: int) -> torch.Tensor:
            tensor = torch.empty_like(layout, device="cpu")
            torch.distributed.recv(memory_of(tensor), rank, group=self._control)
            return tensor

        others = [map_tensors(functools.partial(receive, rank=rank), sent) for rank, sent in enumerate(values) if rank]
        return [map_tensors(lambda tensor: tensor.detach().cpu(), value), *others]

    def broadcast_object(self, value: T) -> T:
        values: list[T] = [map_tensors(_layout, value)]
        torch.distributed.broadcast_object_list(values, src=0, group=self._control)
        if self.world.rank == 0:
            for tensor in leaves(value):
                torch.distributed.broadcast(_sent(tensor), src=0, group=self._control)
            return value

        def receive(layout: torch.Tensor) -> torch.Tensor:
            tensor = torch.empty_like(layout, device="cpu")
            torch.distributed.broadcast(memory_of(tensor), src=0, group=self._control)
            return tensor

        return map_tensors(receive, values[0])  # type: ignore[no-any-return]

    def saving_group(self) -> ProcessGroup:
        group = torch.distributed.new_group(backend="gloo", timeout=timedelta(seconds=self.timeout_s))
        return group  # type: ignore[return-value]  # each rank is in it

    def shutdown(self) -> None:
        self.finish_collectives()
        torch.distributed.destroy_process_group()


def _layout(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's shape, strides and dtype, to be sent within an object. Its memory follows separately."""
    return torch.empty_like(tensor, device="meta", requires_grad=False)


def _sent(tensor: torch.Tensor) -> torch.Tensor:
    return memory_of(torch.empty_like(tensor, device="cpu", requires_grad=False).copy_(tensor.detach()))


def memory_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory of a tensor without gaps as a vector, because gloo sends no other strides."""
    return tensor.as_strided((tensor.numel(),), (1,))
