"""The base class of the parallel strategies: a run in one process."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, ClassVar, TypeVar

from drivetrain.core.lazy import torch
from drivetrain.core.options import groups
from drivetrain.core.options.option import BuildContext, Effect, Option, RunSpec
from drivetrain.core.options.protocols import LossStep
from drivetrain.core.step.step import Step
from drivetrain.core.step.trees import Tree
from drivetrain.core.typed import StateDict
from drivetrain.parallel.environment import launched
from drivetrain.saving.content import Divided, whole

if TYPE_CHECKING:
    from typing import TypeGuard

    from torch.distributed.tensor import DTensor
    from torch.utils.hooks import RemovableHandle


_NULL = nullcontext()
T = TypeVar("T")


def is_sharded(tensor: object) -> TypeGuard[DTensor]:
    """Return whether a tensor is a DTensor."""
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)


def shard_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of a DTensor, or a plain tensor itself, sharing its memory."""
    return tensor.detach().to_local() if is_sharded(tensor) else tensor.detach()  # type: ignore[attr-defined]


class OwnGradients:
    """Sums of squares of gradients, collected during a backward, by the mesh dimensions that divide their weights."""

    def __init__(self) -> None:
        self._norms: dict[tuple[str, ...], list[torch.Tensor]] = defaultdict(list)
        self._hooks: dict[int, RemovableHandle] = {}  # keyed by the watched object's id

    def watch(self, weight: torch.Tensor, dimensions: tuple[str, ...] = ()) -> None:
        """Add the gradient of a weight; with dimensions, this rank has a part of it."""

        def add(gradient: torch.Tensor) -> None:
            if is_sharded(gradient) and is_sharded(weight) and gradient.placements != weight.placements:
                gradient = gradient.redistribute(placements=weight.placements)
            wide = torch.promote_types(gradient.dtype, torch.float32)
            self._norms[dimensions].append(torch.linalg.vector_norm(shard_of(gradient), dtype=wide).float())

        if id(weight) not in self._hooks:  # recomputation runs a forward, which gathers weights, twice
            self._hooks[id(weight)] = weight.register_hook(add)

    def squares(self) -> dict[tuple[str, ...], torch.Tensor]:
        """The sums so far, 0-d."""
        return {dimensions: torch.stack(norms).square().sum() for dimensions, norms in self._norms.items()}

    def leave(self) -> None:
        """Remove all hooks."""
        for hook in self._hooks.values():
            hook.remove()


class Parallel(Option, groups.Parallel):
    """parallel=single: one process."""

    why_fixed: ClassVar[str] = "the ranks are started once"
    effect: ClassVar[Effect] = "exact"
    own_gradients = True  # the gradient of a data-parallel rank's own samples can be measured
    whole_updates = False  # each rank updates some weights, each as a whole

    def validate(self, run: RunSpec) -> Iterator[str]:
        if (launched() or 1) > 1 and not self.distributed:
            yield (
                f"started as one of {launched()} ranks (WORLD_SIZE), but {run.named('parallel')} is one process: set parallel=ddp"
            )

    def weight_shards(self) -> int:
        """Return over how many ranks weights, gradients and optimizer state are divided."""
        return 1

    def rng_rank(self) -> int:
        """Return the rank whose saved random state this one restores: its own, unless ranks compute the same activations."""
        return self.world.rank

    def setup(self, context: BuildContext) -> None:
        """Join the process group."""
        self.world = self.data_world = context.world

    def shard(self, model: torch.nn.Module, dtype: str | None, example: Tree) -> None:
        """Shard the model over the ranks, in place.

        `dtype` is autocast's; `example` is the model's input in training, for two samples.
        """

    def plain_parameters(self, model: torch.nn.Module) -> AbstractContextManager[None]:
        """A context in which the model's parameters are plain tensors: this rank's shards, for optimizer and EMA."""
        return _NULL

    def wrap_model(self, model: torch.nn.Module, context: BuildContext) -> torch.nn.Module:
        """Return the callable that training calls, such as DistributedDataParallel around the model."""
        return model

    def wrap_loss(self, loss: groups.Loss, model: torch.nn.Module, context: BuildContext) -> LossStep:
        """Wrap the loss if ranks must observe all its uses of the model, and the strategy does not wrap the forward."""
        return loss

    def leave_model(self) -> None:
        """Forget the model of a completed stage of the run; the next stage's model follows."""

    def wrap_step(self, step: Step, context: BuildContext) -> Step:
        """Wrap the step if the strategy synchronises gradients outside of the model."""
        return step

    def wrap_watched(self, step: Step, context: BuildContext) -> Step:
        """Wrap the step and its gradient measurement if the strategy has work before the first micro-batch."""
        return step

    @property
    def keeps_own_gradients(self) -> bool:
        """True if weights have the gradient of this rank's own samples until an update's last micro-batch."""
        return True

    @contextmanager
    def own_gradient(self, parameters: Sequence[torch.Tensor]) -> Iterator[Callable[[], torch.Tensor]]:
        """A context for a micro-batch. Yields a function for the squared norm of its gradient over this rank's own samples.

        `parameters` are the model's. The norm is 0-d, taken before the ranks average their gradients.
        """
        own = OwnGradients()
        for p in parameters:
            if p.requires_grad:  # the others may begin to train later
                own.watch(p)
        try:
            yield lambda: own.squares()[()]
        finally:
            own.leave()

    def rank_metrics(self, seconds: float, waited: float) -> dict[str, float]:
        """Return figures about the ranks for a log record. Called on all ranks.

        `seconds` is the time of the steps since the last record; `waited` is this rank's total wait for data.
        """
        return {}

    def all_reduce_flag(self, flag: int) -> int:
        """Return the highest `flag` of all ranks, so that all of them stop or save at the same update."""
        return flag

    def finish_collectives(self) -> None:
        """Wait until this rank has no collective under way on the host, so that it may pause for any time."""

    def divided(self, kind: str, name: str, tensor: torch.Tensor) -> Divided:
        """Return a tensor that belongs to the weight `name` as this rank's parts of it: see `Shards`, also for `kind`."""
        return whole(tensor)

    def shard_state_dict(self, weights: StateDict, state: StateDict) -> tuple[StateDict, StateDict]:
        """Return this rank's shards of a `full_state_dict`, perhaps of another strategy."""
        return weights, state

    def shutdown(self) -> None:
        """Leave the process group."""
