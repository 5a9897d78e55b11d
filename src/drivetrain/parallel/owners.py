"""Optimizer states shared over ranks with the whole model: each weight has one owner, which alone updates it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from drivetrain.core.errors import UserError
from drivetrain.core.lazy import torch
from drivetrain.core.options.option import RunSpec
from drivetrain.core.step.modules import replace_parameters
from drivetrain.core.step.step import Made, WrappingStep
from drivetrain.core.typed import StateDict
from drivetrain.parallel.process_group import ProcessGroupStrategy, memory_of


@dataclass(kw_only=True, eq=False)
class Owners(ProcessGroupStrategy):
    """The base of ddp: `shard_optimizer` gives each weight to one of the ranks (ZeRO-1, Rajbhandari et al. 2020).

    As in torch's ZeroRedundancyOptimizer, the largest weights are handed out first, each to the rank with the least so far.
    For other ranks' weights the optimizer has tensors without memory.
    """

    shard_optimizer: bool = False
    _owner: dict[str, int] = field(default_factory=dict, init=False)  # weight name → the rank that updates it
    _weights: dict[int, torch.nn.Parameter] = field(default_factory=dict, init=False)  # keyed by the id of their stand-ins

    def validate(self, run: RunSpec) -> Iterator[str]:
        yield from super().validate(run)
        if not self.shard_optimizer:
            return
        optimizer, setting = run.optimizer, "parallel.shard_optimizer=true"
        alone = optimizer.elementwise or optimizer.by_norms or optimizer.by_parameter
        reasons = {
            "optimizer": (not alone, "it does not declare that it updates each weight separately", "set optimizer=adamw or muon"),
            "precision": (run.precision.owns_weights, "it keeps copies of all weights", "set precision=bf16"),
            "compile": (run.compile.captures_step, "its graph is the same on all ranks", "set compile=inductor"),
        }
        for group, (is_so, why, remedy) in reasons.items():
            if is_so:
                yield f"{setting} and {run.named(group)} exclude each other ({why}): {remedy}"

    def advise(self, run: RunSpec) -> Iterator[str]:
        yield from super().advise(run)
        if self.shard_optimizer and self.ranks() == 1:
            yield "parallel.shard_optimizer=true has no effect: there is one rank"

    @property
    def whole_updates(self) -> bool:  # type: ignore[override]
        return self.shard_optimizer

    @contextmanager
    def whole_parameters(self, model: torch.nn.Module) -> Iterator[None]:
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        absent = self._share_out(trained) if self.shard_optimizer else {}
        replace_parameters(model, absent)
        try:
            yield
        finally:
            replace_parameters(model, {id(stand_in): self._weights[id(stand_in)] for stand_in in absent.values()})

    def _share_out(self, trained: Mapping[str, torch.nn.Parameter]) -> dict[int, torch.nn.Parameter]:
        """Choose the owners of these weights. Return the stand-ins for other ranks' weights, by their ids."""
        if len(trained) < self.world.size:
            raise UserError(
                f"parallel.shard_optimizer=true: {self.world.size} ranks share {len(trained)} trained weights, and each "
                "needs one: set it to false, or lower parallel.nproc"
            )
        loads, absent = [0] * self.world.size, {}
        for name, p in sorted(trained.items(), key=lambda item: (-item[1].numel(), item[0])):
            owner = self._owner[name] = loads.index(min(loads))
            loads[owner] += p.numel()
            if owner != self.world.rank:
                absent[id(p)] = torch.nn.Parameter(torch.empty_like(p, device="meta"))
                self._weights[id(absent[id(p)])] = p
        return absent

    def leave_model(self) -> None:
        self._owner, self._weights = {}, {}

    def norm(self, parameters: Sequence[torch.Tensor], norm_type: float) -> torch.Tensor:
        """The owners compute the norms of their gradients. Joined, they equal one process's to the bit."""
        if not any(id(p) in self._weights for p in parameters):  # all gradients are here
            return super().norm(parameters, norm_type)
        graded = [p for p in parameters if self._weights.get(id(p), p).grad is not None]
        own = [(id(p), p.grad) for p in graded if p.grad is not None]
        found = torch._foreach_norm([gradient for _, gradient in own], norm_type) if own else ()
        norms = dict(zip((key for key, _ in own), found, strict=True))
        nothing = torch.zeros((), device=self._device, dtype=graded[0].dtype)
        of_all = torch.stack([norms.get(id(p), nothing) for p in graded])
        torch.distributed.all_reduce(of_all)
        return torch.linalg.vector_norm(of_all, norm_type)  # type: ignore[no-any-return]

    def all_reduce_max(self, found: torch.Tensor) -> torch.Tensor:
        if self._weights:
            torch.distributed.all_reduce(found, torch.distributed.ReduceOp.MAX)
        return found

    # --- saving: an owner's states ↔ all ---

    def _own(self, state: StateDict) -> StateDict:
        """Return an optimizer's state of this rank's own weights."""
        rank = self.world.rank
        return {**state, "state": {name: of for name, of in state["state"].items() if self._owner.get(name, rank) == rank}}

    def full_state_dict(self, model: torch.nn.Module, state: StateDict) -> tuple[StateDict, StateDict]:
        return model.state_dict(), self.with_states_of_all(state)

    def with_states_of_all(self, state: StateDict) -> StateDict:
        own = self._own(state["optimizer"])
        parts = self.gather_object(own["state"]) if self._owner else []
        states = {name: of for part in parts for name, of in part.items()} or own["state"]
        return {**state, "optimizer": {**own, "state": states}}

    def empty_shard(self, kind: str, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        elsewhere = kind == "optimizer" and self._owner.get(name, self.world.rank) != self.world.rank
        return torch.empty(shape, dtype=dtype, device="meta") if elsewhere else super().empty_shard(kind, name, shape, dtype)

    def shard_state_dict(self, weights: StateDict, state: StateDict) -> tuple[StateDict, StateDict]:
        return weights, {**state, "optimizer": self._own(state["optimizer"])}


@dataclass(eq=False)
class OwnersStep(WrappingStep):
    """Sends each weight from its owner to the other ranks after an update, in place; a skipped update sends nothing new."""

    owners: Sequence[tuple[torch.nn.Parameter, int]]  # each weight with the rank that updates it

    def update(self) -> Made:
        made = self.inner.update()
        sent = [torch.distributed.broadcast(memory_of(p.detach()), rank, async_op=True) for p, rank in self.owners]
        for work in sent:
            work.wait()  # type: ignore[union-attr]  # each rank is in the group
        return made
