"""The state of a user's objects: those with `state_dict` and `load_state_dict` are saved with the run, and restored."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any, cast

from drivetrain.core.errors import UserError, refuse
from drivetrain.core.lazy import pytree, torch
from drivetrain.core.options import groups
from drivetrain.core.options.context import BuildContext
from drivetrain.core.step import streams
from drivetrain.core.step.modules import attributes_kept, buffers_kept
from drivetrain.core.typed import StateDict, Stateful

MOST = 10_000  # objects to search, at most


def find(roots: Mapping[str, object]) -> dict[str, Stateful]:
    """Return the objects with a state, by name: among these, and in their attributes and containers.

    A module in evaluation mode, such as a fixed teacher, is left out.
    """
    found = {name: value for name, value in walk(roots, into=lambda value: not _has_state(value)) if _has_state(value)}
    return {name: cast(Stateful, value) for name, value in found.items() if name in roots or getattr(value, "training", True)}


def walk(roots: Mapping[str, object], into: Callable[[object], bool] = lambda value: True) -> Iterator[tuple[str, object]]:
    """Yield these objects and those in their attributes and containers, by name. `into`: whether to search an object."""
    waiting = list(roots.items())
    seen: set[int] = set()
    for name, value in waiting:
        if id(value) in seen or len(seen) > MOST or isinstance(value, str | bytes | int | float | type | torch.Tensor):
            continue
        seen.add(id(value))
        yield name, value
        if into(value) and not isinstance(value, FunctionType):
            waiting += [(f"{name}.{key}", part) for key, part in streams.parts(value)]


def _has_state(value: object) -> bool:
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


@contextmanager
def untouched(kept: Mapping[str, object], *more: object) -> Iterator[None]:
    """At the end of the context the user's objects, random streams, and `more` buffers and tensors are as they were before.

    Of the user's objects this restores states, buffers, and the attributes of objects whose class is not a library's.
    """
    moved = [(stream, stream.save()) for stream in streams.kept_by(*kept.values())]
    owners = [value for _, value in walk(kept) if not streams.is_library(type(value).__module__)]
    with (
        OwnState(find(kept)).untouched(),
        attributes_kept(*owners),
        buffers_kept(*kept.values(), *more),
        streams.apart(),
    ):
        try:
            yield
        finally:
            for stream, saved in moved:
                stream.restore(saved)


def of_run(context: BuildContext, metrics: Sequence[Any]) -> dict[str, Stateful]:
    """Return the user's objects with a state in a run, by name."""
    kept = context.loss.keeps()
    kept |= {f"metrics.{metric.name}": metric.state for metric in metrics if metric.state.state_dict()}  # few have one
    sets = {"train": context.train_data}
    for split, named in context.evaluated.items():
        sets |= {f"{split}.{name}" if name else split: pipeline for name, pipeline in named.items()}
    for name, pipeline in sets.items():
        if pipeline.own_code is not None:
            kept |= {key.replace("data", f"data.{name}", 1): each for key, each in pipeline.own_code.keeps().items()}
    return find(kept)


def unsavable(name: str, owner: Stateful) -> Iterator[str]:
    """Yield why the state of the user's object `name` cannot be saved, if it cannot."""
    file = io.BytesIO()
    try:
        torch.save(owner.state_dict(), file)
        torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    except Exception as error:
        yield (
            f"the state of {name} ({type(owner).__name__}) cannot be saved ({type(error).__name__}: "
            f"{str(error).strip().splitlines()[0]}): let its state_dict return tensors, numbers, texts, lists and dicts"
        )


@dataclass
class OwnState:
    """The state of a run's own objects on all ranks: a single one if all are equal, else that of each rank."""

    owners: Mapping[str, Stateful] = field(default_factory=dict)
    parallel: groups.Parallel | None = None

    def check(self) -> None:
        """Raise UserError if a checkpoint cannot hold a state: checkpoints are loaded without running code."""
        refuse(problem for name, owner in self.owners.items() for problem in unsavable(name, owner))

    def state_dict(self) -> StateDict:
        """Return `ranks`: the states of all ranks by name, or a single one if they are equal. Called on all ranks; for rank 0."""
        if not self.owners or self.parallel is None:
            return {}
        here = {name: owner.state_dict() for name, owner in self.owners.items()}
        ranks = self.parallel.gather_object(copy.deepcopy(pytree.tree_map_only(torch.Tensor, lambda t: t.detach().cpu(), here)))
        return {"ranks": ranks[:1] if all(same(ranks[0], other) for other in ranks[1:]) else ranks}

    @contextmanager
    def untouched(self) -> Iterator[None]:
        """Restore the states on this rank at the end of the context."""
        before = {name: copy.deepcopy(owner.state_dict()) for name, owner in self.owners.items()}
        try:
            yield
        finally:
            for name, owner in self.owners.items():
                owner.load_state_dict(before[name])

    def load_state_dict(self, state: StateDict) -> None:
        """Load a `state_dict()`. Raises UserError if ranks have different states, and their number has changed."""
        ranks: Sequence[StateDict] = state.get("ranks", [])
        if not ranks or self.parallel is None:
            return
        world = self.parallel.world
        if len(ranks) not in (1, world.size):
            different = [name for name in self.owners if not all(same(ranks[0][name], other[name]) for other in ranks)]
            raise UserError(
                f"each of the {len(ranks)} ranks that saved this run has its own state of {', '.join(different)}, and now there "
                f"are {world.size}: resume with {len(ranks)} ranks"
            )
        mine = ranks[world.rank % len(ranks)]
        for name, owner in self.owners.items():
            if name in mine:
                owner.load_state_dict(mine[name])


def same(one: object, other: Any) -> bool:
    """Return whether two states are equal, tensors bit for bit."""
    if isinstance(one, torch.Tensor):
        same_kind = isinstance(other, torch.Tensor) and (one.dtype, one.shape) == (other.dtype, other.shape)
        return same_kind and torch.equal(*(t.detach().cpu().contiguous().flatten().view(torch.uint8) for t in (one, other)))
    if isinstance(one, dict):
        return isinstance(other, dict) and one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)
