"""What strategies have in common whose ranks each hold a part of the weights, as torch's DTensors.

Gradients, optimizer, average and loss scaling work on this rank's shards as plain tensors: the fused kernels as they are,
no dispatch per operation. What looks across shards is here: the norm, an overflow anywhere, saving and loading.
"""

from __future__ import annotations

import functools
import logging
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from drivetrain.core.lazy import torch
from drivetrain.core.microbatch import MicroBatch
from drivetrain.core.option import RunSpec
from drivetrain.core.step import Step
from drivetrain.parallel.base import State, Weights
from drivetrain.parallel.process_group import ProcessGroupStrategy
from drivetrain.saving.sharded_checkpoint import parameter_names

if TYPE_CHECKING:
    from drivetrain.core.context import BuildContext

logger = logging.getLogger(__name__)


@dataclass(kw_only=True, eq=False)
class Sharded(ProcessGroupStrategy):
    """The base of fsdp, tensor and pipeline."""

    lockstep_evaluation = True
    _mesh: Any = field(default=None, init=False)
    _once_an_update: bool = field(default=False, init=False)  # FSDP's gradients meet in an update's last micro-batch alone

    def validate(self, run: RunSpec) -> Iterator[str]:
        yield from super().validate(run)
        name = run.named("parallel")
        if not run.optimizer.elementwise:
            yield (
                f"{run.named('optimizer')} wants whole tensors, and {name} leaves each rank a part of them: "
                "set parallel=ddp, or an optimizer that works element by element (adamw, sgd, lion)"
            )
        if run.clip.needs_whole_rows:
            yield (
                f"{run.named('clip')} looks at whole rows, and {name} leaves each rank a part of them: set clip=norm, "
                "or parallel=ddp"
            )
        if run.precision.owns_weights:
            yield (f"{run.named('precision')} and {name} exclude each other (both keep weights of their own): set precision=bf16")
        if run.runtime.zero_grad == "memset":
            yield f"runtime.zero_grad=memset and {name} exclude each other (gradients of shards come anew): set it to none"
        if run.compile.torchscript:
            yield f"compile=jit and {name} exclude each other (TorchScript knows no sharded weights): set compile=inductor"

    def shard(self, model: torch.nn.Module, dtype: str | None, example: torch.Tensor) -> None:
        self._plain_shapes = {name: tuple(p.shape) for name, p in model.named_parameters(remove_duplicate=False)}
        self._root: Any = model
        for line in self._split(model, dtype, example):
            logger.info(line)
        self._sharded: dict[str, Any] = dict(model.named_parameters(remove_duplicate=False))
        self._shards: dict[int, torch.nn.Parameter] = {}
        for name, p in self._sharded.items():
            if is_sharded(p) and id(p) not in self._shards:
                plain = _as_plain(shard_of(p), len(self._plain_shapes[name]))
                self._shards[id(p)] = torch.nn.Parameter(plain, requires_grad=p.requires_grad)
        self._over = {id(self._shards.get(id(p), p)): self._dimensions_of(name) for name, p in self._sharded.items()}
        self._kinds = self._all_kinds({self._dimensions_of(name) for name, p in self._sharded.items() if p.requires_grad})

    def _all_kinds(self, mine: set[tuple[str, ...]]) -> list[tuple[str, ...]]:
        """Over which dimensions of the mesh weights lie in parts, on any rank, in one order: all ranks add up all of them."""
        import torch.distributed as dist

        of_ranks: list[Any] = [None] * self.world.size
        dist.all_gather_object(of_ranks, mine, group=self._control)
        return sorted(set().union(*of_ranks))

    def _split(self, model: torch.nn.Module, dtype: str | None, example: torch.Tensor) -> list[str]:
        """Make the model's parameters DTensors, in place, over the dimensions of `self._mesh`; what was done, a line each."""
        raise NotImplementedError

    @contextmanager
    def plain_parameters(self, model: torch.nn.Module) -> Iterator[None]:
        self._exchange(model, self._shards)
        try:
            yield
        finally:
            self._exchange(model, {id(shard): p for p, shard in self._pairs()})

    @staticmethod
    def _exchange(model: torch.nn.Module, others: dict[int, Any]) -> None:
        for module in model.modules():
            for name, p in module._parameters.items():
                if id(p) in others:
                    module._parameters[name] = others[id(p)]

    @contextmanager
    def evaluation_context(self) -> Iterator[None]:
        """Not inference mode, whose tensors cannot be trained on; afterwards no gathered weights are left to go stale."""
        from torch.distributed.fsdp import FSDPModule

        with torch.no_grad():
            yield
        for module in self._root.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def wrap_step(self, step: Step, context: BuildContext) -> Step:
        pairs = [(p, shard) for p, shard in self._pairs() if p.requires_grad]
        return ShardedStep(step, pairs, self._root if self._once_an_update else None)

    def all_reduce_max(self, found: torch.Tensor) -> torch.Tensor:
        import torch.distributed as dist

        dist.all_reduce(found, dist.ReduceOp.MAX)
        return found

    def norm(self, parameters: Sequence[torch.Tensor], norm_type: float) -> torch.Tensor:
        """Sums of powers over the shards, added over the ranks that hold the others; each weight counts once."""
        import torch.distributed as dist

        kinds: dict[Any, list[torch.Tensor]] = defaultdict(list)
        for p in parameters:
            if p.grad is not None:
                kinds[self._over[id(p)]].append(p.grad)
        total = torch.zeros((), device=self._device, dtype=torch.float64)
        for over in self._kinds:
            power = torch.zeros((), device=self._device, dtype=torch.float64)  # a rank may have no weight of a kind
            if kinds[over]:
                power += torch.nn.utils.get_total_norm(kinds[over], norm_type) ** norm_type
            for name in over:
                dist.all_reduce(power, group=self._mesh.get_group(name))
            total = total + power
        dtypes = [torch.float32, *(g.dtype for of_kind in kinds.values() for g in of_kind[:1])]
        return (total ** (1.0 / norm_type)).to(functools.reduce(torch.promote_types, dtypes))

    def _dimensions_of(self, name: str) -> tuple[str, ...]:
        """The dimensions of the mesh over which a weight lies in parts."""
        p = self._sharded[name]
        return _dimensions(p) if is_sharded(p) else ()

    def _pairs(self) -> list[tuple[Any, torch.nn.Parameter]]:
        """Each sharded weight once, with its shard as the optimizer has it."""
        return [(p, self._shards[i]) for i, p in {id(p): p for p in self._sharded.values()}.items() if i in self._shards]

    # --- saving: what every rank holds ↔ what one process would ---

    def full_state_dict(self, model: torch.nn.Module, state: State) -> tuple[Weights, State]:
        first = self.world.rank == 0

        def whole(name: str, tensor: torch.Tensor) -> Any:
            full = self._whole(name, tensor)
            return full.cpu() if first else None

        weights = {name: whole(name, t) for name, t in model.state_dict().items()}
        return weights, self._over_state(state, whole)

    def as_distributed(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        p = self._sharded.get(name)
        return tensor if p is None or not is_sharded(p) or is_sharded(tensor) else _like(tensor, p)

    def empty_shard(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        p = self._sharded.get(name)
        if p is None or not is_sharded(p) or tuple(p.shape) != shape:
            return super().empty_shard(name, shape, dtype)
        return _like(torch.empty(p.to_local().shape, dtype=dtype, device=p.device), p)

    def shard_state_dict(self, weights: Weights, state: State) -> tuple[Weights, State]:
        held = {name: self._part(name, t) for name, t in weights.items()}
        for name, p in self._sharded.items():
            if name in held and is_sharded(p):
                held[name] = _like(held[name], p)
        return held, self._over_state(state, self._part)

    def _over_state(self, state: State, change: Callable[[str, torch.Tensor], Any]) -> State:
        """The state with `change(name of the weight, tensor)` in place of each tensor that belongs to a weight."""
        optimizer, ema = state["optimizer"], state["ema"]
        names = parameter_names(optimizer)
        changed = {
            i: {k: change(names[i], v) if self._is_of(names[i], v) else v for k, v in of_weight.items()}
            for i, of_weight in optimizer["state"].items()
        }
        state = {**state, "optimizer": {**optimizer, "state": changed}}
        if ema:
            state["ema"] = {**ema, "tensors": {name: change(name, t) for name, t in ema["tensors"].items()}}
        return state

    def _is_of(self, name: str, value: Any) -> bool:
        """Whether a value of an optimizer's state has an element for each of the weight's."""
        if not isinstance(value, torch.Tensor) or name not in self._sharded:
            return False
        shard = self._shards.get(id(self._sharded[name]))
        shapes = [self._plain_shapes[name], *([tuple(shard.shape)] if shard is not None else [])]
        return value.ndim > 0 and tuple(value.shape) in shapes

    def _whole(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """A shard (or a DTensor) of what belongs to a weight, as one process would have it."""
        p = self._sharded.get(name)
        if p is None or not is_sharded(p):
            return tensor.detach()
        full: Any = tensor.detach() if is_sharded(tensor) else _like(tensor, p)
        return full.full_tensor().reshape(self._plain_shapes[name])

    def _part(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """This rank's shard of what belongs to a weight."""
        from torch.distributed.tensor import distribute_tensor

        p = self._sharded.get(name)
        if p is None or not is_sharded(p):
            return tensor
        if is_sharded(tensor):
            return shard_of(tensor)
        whole = tensor.to(p.device, copy=True).reshape(p.shape)
        return _as_plain(shard_of(distribute_tensor(whole, p.device_mesh, p.placements, src_data_rank=None)), tensor.ndim)


@dataclass(frozen=True, eq=False)
class ShardedStep:
    """A step whose optimizer works on this rank's shards, as plain tensors."""

    inner: Step
    shards: Sequence[tuple[Any, torch.nn.Parameter]]  # each sharded weight, and its shard as the optimizer has it
    root: Any  # the model, if FSDP is to share gradients once an update; None: after every micro-batch

    def micro_batch(self, batch: MicroBatch, loss_sum: torch.Tensor) -> None:
        if self.root is not None:
            self.root.set_requires_gradient_sync(batch.last)
        self.inner.micro_batch(batch, loss_sum)

    def update(self) -> bool:
        for p, shard in self.shards:
            shard.grad = None if p.grad is None else shard_of(p.grad).view(shard.shape)
        return self.inner.update()

    def zero_grad(self) -> None:
        for _, shard in self.shards:
            shard.grad = None
        self.inner.zero_grad()

    def with_forward(self, forward: Callable[..., torch.Tensor]) -> Step:
        return replace(self, inner=self.inner.with_forward(forward))


def is_sharded(tensor: torch.Tensor) -> bool:
    """Whether it is a DTensor."""
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)


def shard_of(tensor: Any) -> torch.Tensor:
    """This rank's part of a DTensor, or a plain tensor, sharing its memory."""
    return tensor.detach().to_local() if is_sharded(tensor) else tensor.detach()


def _as_plain(shard: torch.Tensor, ndim: int) -> torch.Tensor:
    """A shard in as many dimensions as the weight has: the parts of a fused product (tensor.py) lie in one more."""
    return shard.flatten(0, 1) if shard.ndim > ndim else shard


def _like(shard: torch.Tensor, p: Any) -> Any:
    """A shard as the DTensor that it is a part of."""
    from torch.distributed.tensor import DTensor

    local = shard.reshape(p.to_local().shape)
    return DTensor.from_local(local, p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride())


def _dimensions(p: Any) -> tuple[str, ...]:
    """The dimensions of its mesh over which a DTensor's shards lie."""
    return tuple(name for name, place in zip(p.device_mesh.mesh_dim_names, p.placements, strict=True) if not place.is_replicate())
