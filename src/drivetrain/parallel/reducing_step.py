"""Averages gradients over the ranks without hooks, so that the whole step can be recorded as one graph."""

from __future__ import annotations

import functools
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from drivetrain.core.errors import UserError
from drivetrain.core.lazy import torch
from drivetrain.core.microbatch import MicroBatch
from drivetrain.core.step import WrappingStep
from drivetrain.core.trees import Tree

if TYPE_CHECKING:
    from typing import TypeGuard

    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor
    from torch.utils.hooks import RemovableHandle


@dataclass
class _Weight:
    """A divided weight, the part of it that this rank holds, and the whole one as the optimizer has it."""

    name: str
    shard: torch.nn.Parameter
    shape: tuple[int, ...]
    ranks: tuple[str, ...]  # dimensions of the mesh over which it is divided
    owner: tuple[int, ...]  # the coordinates in them of the rank that updates it
    own: bool = False
    whole: torch.nn.Parameter = field(init=False)  # without memory on the other ranks


class WholeWeights:
    """Hands every divided weight to one of the ranks that hold a part of it, as evenly as their sizes allow.

    Before an update these ranks gather its gradient; its owner updates the whole weight, with an optimizer state that no other
    rank has, and gives every rank its part. The owner keeps the whole weight, the others a tensor without memory in its place.
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
        self.stale = True  # the owners have old weights: something else, such as a loaded checkpoint, has set the parts
        for weight in self._weights:
            weight.own = weight.owner == tuple(self._at[name] for name in weight.ranks)
            device = weight.shard.device if weight.own else torch.device("meta")
            weight.whole = torch.nn.Parameter(torch.empty(weight.shape, dtype=weight.shard.dtype, device=device))
        self.by_shard = {id(weight.shard): weight.whole for weight in self._weights}
        self.owned = {weight.name: weight.own for weight in self._weights}

    def _share_out(self) -> None:
        """Choose the owners: the largest weights first, each to the rank that has the least so far."""
        loads: dict[tuple[str, ...], dict[tuple[int, ...], int]] = {}
        for weight in sorted(self._weights, key=lambda w: (-math.prod(w.shape), w.name)):
            sizes = [range(self._mesh[name].size()) for name in weight.ranks]
            load = loads.setdefault(weight.ranks, dict.fromkeys(itertools.product(*sizes), 0))
            weight.owner = min(load, key=lambda rank: (load[rank], rank))
            load[weight.owner] += math.prod(weight.shape)

    def gather(self) -> None:
        """Give the owners whole gradients, and whole weights too where anything but `spread` has set the parts."""
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
        """Send the owner's weight along one dimension of the mesh after the other, from the ranks that have it already."""
        for n, name in enumerate(weight.ranks):
            if all(self._at[later] == at for later, at in zip(weight.ranks[n + 1 :], weight.owner[n + 1 :], strict=True)):
                group = self._mesh.get_group(name)
                torch.distributed.broadcast(whole, torch.distributed.get_global_rank(group, weight.owner[n]), group=group)

    def clear(self) -> None:
        """Forget the whole gradients."""
        for weight in self._weights:
            weight.whole.grad = None


@dataclass(eq=False)
class ReducingStep(WrappingStep):
    """Averages the gradients over all ranks after the backward of an update's last micro-batch, in buckets.

    DDP's all-reduces are in hooks of autograd, which a graph does not call. These are torch's functional collectives, which
    a recording holds and inductor compiles. They are the same whether the step runs op by op, is recorded or is a graph, so
    that a rank which cannot record it does not hold up the others.
    """

    parameters: Mapping[str, torch.nn.Parameter]  # by name
    ranks: int
    bucket_bytes: float
    sent_as: torch.dtype | None  # dtype in which gradients travel; None: their own
    some_unused: bool | None  # whether weights may have no gradient on some ranks; None: all ranks run the same graph

    def micro_batch(self, batch: MicroBatch, loss_sum: torch.Tensor) -> None:
        self.inner.micro_batch(batch, loss_sum)
        if batch.last:
            with torch.no_grad():
                if self.some_unused is not None:
                    self._complete()
                self._average([p.grad for p in self.parameters.values() if p.grad is not None])

    def _complete(self) -> None:
        """Give weights that have a gradient on another rank one of zeros. Raises UserError where none may be missing."""
        missing = [name for name, p in self.parameters.items() if p.grad is None]
        if not self.some_unused:
            if missing:
                raise unused(missing)
            return
        parameters = list(self.parameters.values())
        anywhere = torch.tensor([p.grad is not None for p in parameters], dtype=torch.uint8, device=parameters[0].device)
        torch.distributed.all_reduce(anywhere, torch.distributed.ReduceOp.MAX)
        for p, has_gradient in zip(parameters, anywhere.tolist(), strict=True):
            if has_gradient and p.grad is None:
                p.grad = torch.zeros_like(p)

    def _average(self, gradients: Sequence[torch.Tensor]) -> None:
        from torch.distributed import _functional_collectives as collectives

        world = torch.distributed.distributed_c10d._get_default_group()
        buckets = list(_buckets(gradients, self.bucket_bytes))
        flat = [torch.cat([g.reshape(-1) for g in bucket]) for bucket in buckets]
        shares = [(f if self.sent_as is None else f.to(self.sent_as)) / self.ranks for f in flat]
        means = [collectives.all_reduce(share, "sum", world) for share in shares]  # all begin before one is waited for
        for bucket, mean in zip(buckets, means, strict=True):
            parts = torch.split(collectives.wait_tensor(mean), [g.numel() for g in bucket])  # type: ignore[no-untyped-call]
            for gradient, part in zip(bucket, parts, strict=True):
                gradient.copy_(part.view(gradient.shape))


def unused(names: Sequence[str]) -> UserError:
    """Return the error of an update in which parameters of these names got no gradient."""
    plain = [name.removeprefix("model.").replace("_orig_mod.", "") for name in names[:3]]
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return UserError(
        f"parallel=ddp waits for the gradients of all parameters, and {', '.join(plain)}{more} got none in an update: set "
        "parallel.find_unused_parameters=true, or freeze them (model.freeze)"
    )


def _buckets(gradients: Sequence[torch.Tensor], most: float) -> Iterator[list[torch.Tensor]]:
    """Yield gradients of one dtype that are `most` bytes together, or a single larger one, the last layers' first."""
    bucket: list[torch.Tensor] = []
    for gradient in reversed(gradients):
        if bucket and (sum(g.nbytes for g in bucket) + gradient.nbytes > most or gradient.dtype != bucket[0].dtype):
            yield bucket
            bucket = []
        bucket.append(gradient)
    if bucket:
        yield bucket


@dataclass(eq=False)
class ShardedStep(WrappingStep):
    """Gives the optimizer the gradients of this rank's shards, as plain tensors."""

    shards: Sequence[tuple[torch.nn.Parameter, torch.nn.Parameter]]  # each sharded weight, and its shard as the optimizer has it
    root: FSDPModule | None  # the model, if FSDP reduces gradients once an update; None: after every micro-batch
    whole: WholeWeights | None  # that the optimizer updates in place of the shards

    def micro_batch(self, batch: MicroBatch, loss_sum: torch.Tensor) -> None:
        if self.root is not None:
            self.root.set_requires_gradient_sync(batch.last)
        self.inner.micro_batch(batch, loss_sum)

    def update(self) -> bool:
        for p, shard in self.shards:
            shard.grad = None if p.grad is None else shard_of(p.grad).view(shard.shape)
        if self.whole is None:
            return self.inner.update()
        self.whole.gather()
        if made := self.inner.update():
            self.whole.spread()
        return made

    def zero_grad(self) -> None:
        for _, shard in self.shards:
            shard.grad = None
        if self.whole is not None:
            self.whole.clear()
        self.inner.zero_grad()


def is_sharded(tensor: object) -> TypeGuard[DTensor]:
    """Return whether a tensor is a DTensor."""
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)


def shard_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of a DTensor, or a plain tensor itself, sharing its memory."""
    return tensor.detach().to_local() if is_sharded(tensor) else tensor.detach()  # type: ignore[attr-defined]


class OwnGradients:
    """The sums of squares of gradients as a backward makes them, by the mesh dimensions over which their weights are divided."""

    def __init__(self) -> None:
        self._norms: dict[tuple[str, ...], list[torch.Tensor]] = defaultdict(list)
        self._hooks: dict[int, RemovableHandle] = {}  # by the id of what is watched

    def watch(self, weight: torch.Tensor, dimensions: tuple[str, ...] = ()) -> None:
        """Take the gradient of a weight, of which this rank has a part where there are dimensions."""

        def add(gradient: torch.Tensor) -> None:
            if is_sharded(gradient) and is_sharded(weight) and gradient.placements != weight.placements:
                gradient = gradient.redistribute(placements=weight.placements)
            wide = torch.promote_types(gradient.dtype, torch.float32)
            self._norms[dimensions].append(torch.linalg.vector_norm(shard_of(gradient), dtype=wide).float())

        if id(weight) not in self._hooks:  # recomputation runs a forward, which gathers weights, twice
            self._hooks[id(weight)] = weight.register_hook(add)  # type: ignore[no-untyped-call]

    def squares(self) -> dict[tuple[str, ...], torch.Tensor]:
        """The sums so far, 0-d."""
        return {dimensions: torch.stack(norms).square().sum() for dimensions, norms in self._norms.items()}

    def leave(self) -> None:
        """Remove all hooks."""
        for hook in self._hooks.values():
            hook.remove()


class GatheredGradients(OwnGradients):
    """Watches the weights that FSDP gathers for each block's forward; `dims_of` tells what each one stays divided over."""

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
