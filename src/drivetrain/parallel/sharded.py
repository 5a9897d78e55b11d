# long: cutting, gathering and summing weights for fsdp, tensor and pipeline
"""The base of the strategies that shard weights over ranks, as torch's DTensors.

Clipping, optimizer, EMA and loss scaling work on this rank's shards as plain tensors: with the fused kernels, and without
DTensor's dispatch per operation. Operations across shards are here: the norm, overflows, saving and loading.
"""

from __future__ import annotations

import functools
import itertools
import logging
import math
from collections import defaultdict
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from drivetrain.core.lazy import torch
from drivetrain.core.options.option import BuildContext, RunSpec
from drivetrain.core.step.microbatch import MicroBatch
from drivetrain.core.step.modules import replace_parameters
from drivetrain.core.step.step import Made, Step, WrappingStep
from drivetrain.core.step.trees import Tree
from drivetrain.core.typed import StateDict
from drivetrain.parallel.base import OwnGradients, is_sharded, shard_of
from drivetrain.parallel.process_group import ProcessGroupStrategy
from drivetrain.saving.content import Divided, TensorPart, whole
from drivetrain.saving.sharded_checkpoint import merge_optimizer_states

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor


logger = logging.getLogger(__name__)


class ShardDims(NamedTuple):
    """The mesh dimensions that divide a weight."""

    run: tuple[str, ...]  # a sum over these dimensions counts each weight once
    layer: tuple[str, ...]  # these number the parts of this weight
    row: tuple[str, ...]  # these number parts of its rows; for a vector, which is one unit, parts of its elements


class ShardSums:
    """Sums numbers per weight over the ranks with its parts. Weights of one layout share an all-reduce."""

    def __init__(self, layouts: Sequence[tuple[str, ...]], mesh: DeviceMesh) -> None:
        self._mesh, self._members = mesh, defaultdict(list)
        for i, dimensions in enumerate(layouts):
            if dimensions:
                self._members[dimensions].append(i)

    def __call__(self, numbers: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the sum of each weight's tensor. It has the same shape on all ranks with a part."""
        sums = list(numbers)
        for dimensions in sorted(self._members):
            members = self._members[dimensions]
            flat = torch.cat([numbers[i].reshape(-1) for i in members])
            for name in dimensions:
                torch.distributed.all_reduce(flat, group=self._mesh.get_group(name))
            for i, part in zip(members, torch.split(flat, [numbers[i].numel() for i in members]), strict=True):
                sums[i] = part.view(numbers[i].shape)
        return sums


def parts_of(tensor: DTensor, shape: tuple[int, ...]) -> list[TensorPart]:
    """Return this rank's parts of a DTensor as views with their places in a weight of this shape; none for an empty part.

    A fused projection's DTensor has one dimension more than its weight, for its matrices; each has a part here.
    """
    (chunk,) = tensor.__create_chunk_list__()
    local, offsets = shard_of(tensor), tuple(chunk.offsets)
    if not local.numel() and 0 not in shape:
        return []
    if tensor.ndim == len(shape):
        return [TensorPart(offsets, local)]
    first, row, *rest = offsets
    return [TensorPart(((first + i) * tensor.shape[1] + row, *rest), matrix) for i, matrix in enumerate(local)]


@dataclass
class _Weight:
    """A divided weight: this rank's part, and the whole weight as the optimizer sees it."""

    name: str
    shard: torch.nn.Parameter
    shape: tuple[int, ...]
    ranks: tuple[str, ...]  # mesh dimensions that divide it
    owner: tuple[int, ...]  # coordinates of the updating rank in them
    own: bool = False
    whole: torch.nn.Parameter = field(init=False)  # without memory on the other ranks


class WholeWeights:
    """Assigns every divided weight to one of the ranks with a part of it, as evenly as sizes allow.

    Before an update these ranks gather its gradient. The owner updates the whole weight, holds its only optimizer state, and
    sends every rank its part. The owner keeps the whole weight, the others a tensor without memory.
    """

    def __init__(
        self,
        divided: Sequence[tuple[str, torch.nn.Parameter, tuple[int, ...], tuple[str, ...]]],
        mesh: DeviceMesh,
        gather: Callable[[str, torch.Tensor], torch.Tensor],
        own_part: Callable[[str, torch.Tensor], torch.Tensor],
    ) -> None:
        self._mesh, self._gather, self._own_part = mesh, gather, own_part
        self._at = {name: mesh.get_local_rank(name) for name in mesh.mesh_dim_names or ()}
        self._weights = [_Weight(name, shard, shape, ranks, ()) for name, shard, shape, ranks in divided]
        self._share_out()
        self.stale = True  # the owners' weights are outdated: something else, such as a loaded checkpoint, has set the parts
        for weight in self._weights:
            weight.own = weight.owner == tuple(self._at[name] for name in weight.ranks)
            device = weight.shard.device if weight.own else torch.device("meta")
            weight.whole = torch.nn.Parameter(torch.empty(weight.shape, dtype=weight.shard.dtype, device=device))
        self.by_shard = {id(weight.shard): weight.whole for weight in self._weights}
        self.owned = {weight.name: weight.own for weight in self._weights}

    def _share_out(self) -> None:
        """Choose the owners: the largest weights first, each to the rank with the least so far."""
        loads: dict[tuple[str, ...], dict[tuple[int, ...], int]] = {}
        for weight in sorted(self._weights, key=lambda w: (-math.prod(w.shape), w.name)):
            sizes = [range(self._mesh[name].size()) for name in weight.ranks]
            load = loads.setdefault(weight.ranks, dict.fromkeys(itertools.product(*sizes), 0))
            weight.owner = min(load, key=lambda rank: (load[rank], rank))
            load[weight.owner] += math.prod(weight.shape)

    def gather(self) -> None:
        """Give the owners whole gradients, and whole weights too if anything but `spread` has set the parts."""
        for weight in self._weights:
            if self.stale:
                whole = self._gather(weight.name, weight.shard)
                if weight.own:
                    weight.whole.detach().copy_(whole)
            if weight.shard.grad is not None:
                gradient = self._gather(weight.name, weight.shard.grad)
                weight.whole.grad = gradient.contiguous() if weight.own else None
        self.stale = False

    def spread(self) -> None:
        """Give every rank its parts of the updated weights."""
        for weight in self._weights:
            if weight.shard.grad is not None:
                whole = weight.whole.detach() if weight.own else weight.shard.new_empty(weight.shape)
                self._broadcast(whole, weight)
                weight.shard.detach().copy_(self._own_part(weight.name, whole))

    def _broadcast(self, whole: torch.Tensor, weight: _Weight) -> None:
        """Send the owner's weight along the mesh dimensions, one after another, from ranks that already have it."""
        for n, name in enumerate(weight.ranks):
            if all(self._at[later] == at for later, at in zip(weight.ranks[n + 1 :], weight.owner[n + 1 :], strict=True)):
                group = self._mesh.get_group(name)
                torch.distributed.broadcast(whole, torch.distributed.get_global_rank(group, weight.owner[n]), group=group)

    def clear(self) -> None:
        """Forget the whole gradients."""
        for weight in self._weights:
            weight.whole.grad = None


@dataclass(eq=False)
class ShardedStep(WrappingStep):
    """Gives the optimizer the gradients of this rank's shards, as plain tensors."""

    shards: Sequence[tuple[torch.nn.Parameter, torch.nn.Parameter]]  # each sharded weight with the optimizer's shard of it
    root: FSDPModule | None  # the model, if FSDP reduces gradients once an update; None: after every micro-batch
    whole: WholeWeights | None  # whole weights that the optimizer updates instead of shards

    def micro_batch(self, batch: MicroBatch, loss_sum: torch.Tensor) -> None:
        if self.root is not None:
            self.root.set_requires_gradient_sync(batch.last)
        self.inner.micro_batch(batch, loss_sum)

    def update(self) -> Made:
        for p, shard in self.shards:
            shard.grad = None if p.grad is None else shard_of(p.grad).view(shard.shape)
        if self.whole is None:
            return self.inner.update()
        self.whole.gather()
        if made := bool(self.inner.update()):
            self.whole.spread()
        return made

    def zero_grad(self) -> None:
        for _, shard in self.shards:
            shard.grad = None
        if self.whole is not None:
            self.whole.clear()
        self.inner.zero_grad()


class GatheredGradients(OwnGradients):
    """Watches the weights that FSDP gathers for each block's forward; `dims_of` maps each to its remaining mesh dimensions."""

    def __init__(self, root: torch.nn.Module, shards: Container[int], dims_of: Callable[[str], tuple[str, ...]]) -> None:
        from torch.distributed.fsdp import FSDPModule

        super().__init__()
        self._shards, self._dims_of = shards, dims_of  # the former by their ids
        for name, module in root.named_modules():
            if isinstance(module, FSDPModule):
                self._hooks[id(module)] = module.register_forward_pre_hook(  # type: ignore[attr-defined]
                    functools.partial(self._gathered, name)
                )

    def _gathered(self, block: str, module: torch.nn.Module, inputs: Tree) -> None:
        for name, p in module.named_parameters(prefix=block):
            if p.requires_grad and id(p) not in self._shards:
                self.watch(p, self._dims_of(name))


@dataclass(kw_only=True, eq=False)
class Sharded(ProcessGroupStrategy):
    """The base of fsdp, tensor and pipeline."""

    lockstep_evaluation = True
    whole_model = calls_parts = False
    model_dims: ClassVar[tuple[str, ...]] = ()  # mesh dimensions that divide the model for the same samples
    can_unfreeze = False
    _whole: WholeWeights | None = field(default=None, init=False)
    _sync_last_only: bool = field(default=False, init=False)  # FSDP reduces gradients only in an update's last micro-batch

    def validate(self, run: RunSpec) -> Iterator[str]:
        yield from super().validate(run)
        name = run.named("parallel")
        if not (run.optimizer.elementwise or run.optimizer.by_norms or run.optimizer.by_parameter):
            yield (
                f"{run.named('optimizer')} does not declare that it updates each parameter separately, "
                f"and {name} leaves each rank a part of them: set parallel=ddp, or another optimizer (adamw, lamb, muon), "
                "or declare it in your own class: elementwise = True"
            )
        if run.precision.owns_weights and not (run.precision.divides_weights and self.own_forward):
            yield f"{run.named('precision')} and {name} exclude each other (both keep copies of the weights): set precision=bf16"
        elif run.precision.owns_weights and run.optimizer.by_parameter:
            yield (
                f"{run.named('optimizer')} updates whole weights, and {run.named('precision')} with {name} has copies of parts: "
                "set precision=bf16, or another optimizer (adamw, lamb)"
            )
        if run.runtime.zero_grad == "memset":
            yield f"runtime.zero_grad=memset and {name} exclude each other (shards get new gradients every step): set it to none"
        if run.compile.torchscript:
            yield (
                f"compile=jit and {name} exclude each other (TorchScript does not support sharded weights): set compile=inductor"
            )

    def shard(self, model: torch.nn.Module, dtype: str | None, example: Tree) -> None:
        self._plain_shapes = {name: tuple(p.shape) for name, p in model.named_parameters(remove_duplicate=False)}
        self._root = model
        self._mesh, line = self._shard_model(model, dtype, example)
        logger.info(line)
        self._sharded = dict(model.named_parameters(remove_duplicate=False))
        self._shards: dict[int, torch.nn.Parameter] = {}
        for name, p in self._sharded.items():
            if is_sharded(p) and id(p) not in self._shards:
                plain = _flatten_parts(shard_of(p), len(self._plain_shapes[name]))
                self._shards[id(p)] = torch.nn.Parameter(plain, requires_grad=p.requires_grad)
        both = ((p, self._shards.get(id(p), p), self._layout(name)) for name, p in self._sharded.items())
        self._layouts = {id(tensor): layout for *tensors, layout in both for tensor in tensors}
        own = {self._layout(name).run for name, p in self._sharded.items() if p.requires_grad}
        self._all_dims = sorted(set().union(*self.of_all_ranks(own)))  # of all ranks' weights, in one order on all ranks

    def leave_model(self) -> None:
        self._root, self._sharded, self._shards, self._whole = torch.nn.Module(), {}, {}, None

    def _shard_model(self, model: torch.nn.Module, dtype: str | None, example: Tree) -> tuple[DeviceMesh, str]:
        """Make the model's parameters DTensors over a mesh, in place. Returns the mesh and a line to log."""
        raise self.unwritten("_shard_model")

    @contextmanager
    def plain_parameters(self, model: torch.nn.Module) -> Iterator[None]:
        replace_parameters(model, self._shards)
        try:
            yield
        finally:
            replace_parameters(model, {id(shard): p for p, shard in self._pairs()})

    @property
    def whole_updates(self) -> bool:  # type: ignore[override]
        return self._whole is not None

    def own_part(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        return self._local_shard(name, tensor)

    def stands_for(self, copy: torch.Tensor, parameter: torch.Tensor) -> None:
        self._layouts[id(copy)] = self._layouts[id(parameter)]

    @contextmanager
    def whole_parameters(self, model: torch.nn.Module) -> Iterator[None]:
        divided = [
            (name, self._shards[id(p)], self._plain_shapes[name], self._layout(name).layer)
            for name, p in {id(p): (name, p) for name, p in reversed(self._sharded.items())}.values()
            if id(p) in self._shards and p.requires_grad
        ]
        self._whole = WholeWeights(divided, self._mesh, self._gather_full, self._local_shard)
        for name, shard, _, _ in divided:
            self._layouts[id(self._whole.by_shard[id(shard)])] = ShardDims(self._layout(name).run, (), ())
        replace_parameters(model, self._whole.by_shard)
        try:
            yield
        finally:
            replace_parameters(model, {id(self._whole.by_shard[id(shard)]): shard for _, shard, _, _ in divided})

    @contextmanager
    def evaluation_context(self) -> Iterator[None]:
        """Disable gradients, and reshard afterwards."""
        from torch.distributed.fsdp import FSDPModule

        try:
            with torch.no_grad():
                yield
        finally:
            for module in self._root.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()

    def wrap_step(self, step: Step, context: BuildContext) -> Step:
        pairs = [(p, shard) for p, shard in self._pairs() if p.requires_grad]
        root = self._root if self._sync_last_only else None
        return ShardedStep(step, pairs, root, self._whole)  # type: ignore[arg-type]  # the root is an FSDPModule

    def all_reduce_max(self, found: torch.Tensor) -> torch.Tensor:
        torch.distributed.all_reduce(found, torch.distributed.ReduceOp.MAX)
        return found

    def norm(self, parameters: Sequence[torch.Tensor], norm_type: float) -> torch.Tensor:
        """Sum powers over this rank's shards, then over the ranks with the other shards, so that each weight counts once."""
        gradients: dict[tuple[str, ...], list[torch.Tensor]] = defaultdict(list)
        for p in parameters:
            if p.grad is not None:
                gradients[self._layouts[id(p)].run].append(shard_of(p.grad))
        powers = {run: torch.nn.utils.get_total_norm(group, norm_type) ** norm_type for run, group in gradients.items()}
        dtypes = [torch.float32, *(g.dtype for group in gradients.values() for g in group[:1])]
        return (self._total(powers, self._all_dims) ** (1.0 / norm_type)).to(functools.reduce(torch.promote_types, dtypes))

    @contextmanager
    def own_gradient(self, parameters: Sequence[torch.Tensor]) -> Iterator[Callable[[], torch.Tensor]]:
        def dims_of(dimensions: tuple[str, ...]) -> tuple[str, ...]:
            return tuple(name for name in dimensions if name in self.model_dims)  # FSDP gathers the parts over the others

        own = GatheredGradients(self._root, self._layouts, lambda name: dims_of(self._layout(name).run))
        try:
            yield lambda: self._total(own.squares(), sorted(set(map(dims_of, self._all_dims)))).float()
        finally:
            own.leave()

    def _total(self, powers: Mapping[tuple[str, ...], torch.Tensor], dims: Sequence[tuple[str, ...]]) -> torch.Tensor:
        """Return the sum over all weights, 0-d, from this rank's `powers` by the mesh dimensions that divide its weights.

        `dims` are the dimensions of all ranks' weights, in the same order on all ranks.
        """
        total = torch.zeros((), device=self._device, dtype=torch.float64)
        for dimensions in dims:
            power = torch.zeros_like(total) + powers.get(dimensions, 0.0)  # a rank may have no weights with these dimensions
            for name in dimensions:
                torch.distributed.all_reduce(power, group=self._mesh.get_group(name))
            total = total + power
        return total

    def layer_sums(self, parameters: Sequence[torch.Tensor]) -> ShardSums | None:
        return self._sums([self._layouts[id(p)].layer for p in parameters])

    def row_sums(self, parameters: Sequence[torch.Tensor]) -> ShardSums | None:
        return self._sums([self._layouts[id(p)].row for p in parameters])

    def _sums(self, layouts: Sequence[tuple[str, ...]]) -> ShardSums | None:
        return ShardSums(layouts, self._mesh) if any(layouts) else None

    def _layout(self, name: str) -> ShardDims:
        """Return the mesh dimensions that divide a weight."""
        p, ndim = self._sharded[name], len(self._plain_shapes[name])
        if not is_sharded(p):
            return ShardDims((), (), ())
        rows = 1 + p.ndim - ndim  # a fused projection has a dimension more, for its parts
        places = zip(p.device_mesh.mesh_dim_names or (), p.placements, strict=True)
        divided = [(name, how) for name, how in places if not how.is_replicate()]
        layer = tuple(name for name, _ in divided)
        return ShardDims(layer, layer, tuple(name for name, how in divided if ndim <= 1 or how.dim >= rows))  # type: ignore[attr-defined]

    def _pairs(self) -> list[tuple[torch.nn.Parameter, torch.nn.Parameter]]:
        """Return each sharded weight once, with the optimizer's shard."""
        return [(p, self._shards[i]) for i, p in {id(p): p for p in self._sharded.values()}.items() if i in self._shards]

    # --- saving: this rank's shards ↔ full tensors ---

    def full_state_dict(self, model: torch.nn.Module, state: StateDict) -> tuple[StateDict, StateDict]:
        is_first = self.world.rank == 0

        def gather(name: str, tensor: torch.Tensor) -> torch.Tensor | None:
            full = self._gather_full(name, tensor)
            return full.to("cpu", copy=True) if is_first else None  # without the padding of the gathered tensor

        weights = {name: gather(name, t) for name, t in model.state_dict().items()}
        return weights, self.with_states_of_all(self._map_state(state, gather))

    def with_states_of_all(self, state: StateDict, sends: bool = True) -> StateDict:
        """Return, on rank 0, the state with the optimizer states of all sending ranks, if no rank has the whole."""
        if self._whole is None and self.own_forward:
            return state
        parts = [part for part in self.gather_object(state["optimizer"] if sends else None) if part is not None]
        return {**state, "optimizer": merge_optimizer_states(parts)} if parts else state

    def divided(self, kind: str, name: str, tensor: torch.Tensor) -> Divided:
        p = self._sharded.get(name)
        if p is None or not is_sharded(p) or self._owns_state(kind, name) is not None or not self._is_part(p, tensor):
            return whole(tensor)
        shape = self._plain_shapes[name]
        return Divided(shape, parts_of(tensor if is_sharded(tensor) else _as_dtensor(tensor, p), shape))

    def empty_shard(self, kind: str, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        p = self._sharded.get(name)
        if (own := self._owns_state(kind, name)) is not None:
            return torch.empty(shape, dtype=dtype, device=None if own else "meta")
        if p is None or not is_sharded(p) or self._plain_shapes[name] != shape:
            return super().empty_shard(kind, name, shape, dtype)
        return _as_dtensor(torch.empty(p.to_local().shape, dtype=dtype, device=p.device), p)

    def _owns_state(self, kind: str, name: str) -> bool | None:
        """Return whether this rank alone has the optimizer state of a weight; None if no rank has it whole."""
        return self._whole.owned.get(name) if self._whole is not None and kind == "optimizer" else None

    def _is_part(self, p: torch.Tensor, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is this rank's part of a tensor of the weight's size."""
        return is_sharded(tensor) or tensor.shape == self._shards[id(p)].shape

    def shard_state_dict(self, weights: StateDict, state: StateDict) -> tuple[StateDict, StateDict]:
        if self._whole is not None:
            self._whole.stale = True
        shards = {name: self._local_shard(name, t) for name, t in weights.items()}
        for name, p in self._sharded.items():
            if name in shards and is_sharded(p):
                shards[name] = _as_dtensor(shards[name], p)
        return shards, self._map_state(state, self._local_shard)

    def _map_state(self, state: StateDict, change: Callable[[str, torch.Tensor], torch.Tensor | None]) -> StateDict:
        """Return the state with each tensor that belongs to a weight replaced by `change(name of the weight, tensor)`."""
        optimizer, ema = state["optimizer"], state["ema"]
        owned = self._whole.owned if self._whole is not None else {}
        # In one order on all ranks, because all ranks gather together. The state's order differs between ranks if one of
        # them has no element of a weight: our optimizers give such weights a state before or after the others.
        changed = {
            name: {
                k: change(name, v) if name not in owned and self._is_elementwise_state(name, v) else v
                for k, v in parameter_state.items()
            }
            for name, parameter_state in sorted(optimizer["state"].items())
            if owned.get(name, True)
        }
        state = {**state, "optimizer": {**optimizer, "state": changed}}
        if ema:
            state["ema"] = {**ema, "tensors": {name: change(name, t) for name, t in ema["tensors"].items()}}
        if masters := state.get("precision", {}).get("masters"):
            state["precision"] = {**state["precision"], "masters": {name: change(name, t) for name, t in masters.items()}}
        return state

    def _is_elementwise_state(self, name: str, value: object) -> bool:
        """Return whether a value of an optimizer's state has one element per element of the weight."""
        if not isinstance(value, torch.Tensor) or name not in self._sharded:
            return False
        if is_sharded(value):  # read from a checkpoint in parts
            return True
        shard = self._shards.get(id(self._sharded[name]))
        shapes = [self._plain_shapes[name], *([tuple(shard.shape)] if shard is not None else [])]
        return value.ndim > 0 and tuple(value.shape) in shapes

    def _gather_full(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Gather the full tensor from a shard (or DTensor) of a weight or of its state."""
        p = self._sharded.get(name)
        if p is None or not is_sharded(p):
            return tensor.detach()
        full = tensor.detach() if is_sharded(tensor) else _as_dtensor(tensor, p)
        return full.full_tensor().reshape(self._plain_shapes[name])  # type: ignore[attr-defined, no-any-return]

    def _local_shard(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return this rank's shard of a weight or of its state."""
        from torch.distributed.tensor import distribute_tensor

        p = self._sharded.get(name)
        if p is None or not is_sharded(p):
            return tensor
        if is_sharded(tensor):
            return _flatten_parts(shard_of(tensor), len(self._plain_shapes[name]))
        full = tensor.to(p.device, copy=True).reshape(p.shape)
        return _flatten_parts(shard_of(distribute_tensor(full, p.device_mesh, p.placements, src_data_rank=None)), tensor.ndim)


def _flatten_parts(shard: torch.Tensor, ndim: int) -> torch.Tensor:
    """Reshape a shard to as many dimensions as the weight has: fused projections (tensor.py) have one more, for their parts."""
    return shard.flatten(0, 1) if shard.ndim > ndim else shard


def _as_dtensor(shard: torch.Tensor, p: DTensor) -> DTensor:
    """Return a shard as part of a DTensor with the layout of `p`."""
    from torch.distributed.tensor import DTensor

    local = shard.reshape(p.to_local().shape)
    return DTensor.from_local(local, p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride())
