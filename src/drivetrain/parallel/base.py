"""One process: the off switch of every technique that spreads a run over devices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from drivetrain.core.lazy import torch
from drivetrain.core.option import Option, RunSpec
from drivetrain.core.step import Step
from drivetrain.core.world import World
from drivetrain.parallel.environment import launched

if TYPE_CHECKING:
    from drivetrain.core.context import BuildContext

_NULL = nullcontext()
Weights = dict[str, Any]  # under plain names
State = dict[str, Any]


class Parallel(Option):
    """parallel=single: one process."""

    world = World()
    data_world = World()  # this process among those that share a batch: what splits the model splits no samples
    nnodes = 1  # machines
    lockstep_evaluation = False  # a forward takes all ranks, an evaluation's too
    distributed = False  # wants a process group, also with one rank
    one_process = True  # on one device
    thread_per_device = False
    portable_shards = True  # what a rank holds can be read by the ranks of other strategies

    def validate(self, run: RunSpec) -> Iterator[str]:
        if (launched() or 1) > 1 and not self.distributed:
            yield (
                f"started as one of {launched()} ranks (WORLD_SIZE), but {run.named('parallel')} is one process: set parallel=ddp"
            )

    def ranks(self) -> int:
        """Processes that train together."""
        return 1

    def data_ranks(self) -> int:
        """How many of them the samples of an update are split among."""
        return self.ranks()

    def rng_rank(self) -> int:
        """The rank with whose random stream this one goes on: its own, but where ranks compute the same activations."""
        return self.world.rank

    def setup(self, context: BuildContext) -> None:
        """Join the other ranks."""
        self.world = self.data_world = context.world

    def shard(self, model: torch.nn.Module, dtype: str | None, example: torch.Tensor) -> None:
        """Leave this rank its part of the model, in place.

        `dtype` is what autocast computes in, `example` a batch of two zeros.
        """

    def plain_parameters(self, model: torch.nn.Module) -> AbstractContextManager[None]:
        """While it lasts the model's parameters are plain tensors: this rank's shards, which optimizer and average work on."""
        return _NULL

    def wrap_model(self, model: Any) -> Any:
        """The callable that training calls, its gradients shared between the ranks."""
        return model

    def wrap_step(self, step: Step, context: BuildContext) -> Step:
        """The step of one rank, which shares gradients where the strategy does so outside of the model."""
        return step

    def norm(self, parameters: Sequence[torch.Tensor], norm_type: float) -> torch.Tensor:
        """The norm over the whole model's gradients, 0-d; `parameters` are those that the optimizer has."""
        return torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None], norm_type)

    def evaluation_context(self) -> AbstractContextManager[Any]:
        """The context of an evaluation: no gradients."""
        return torch.inference_mode()

    def rank_metrics(self, seconds: float, waited: float) -> dict[str, float]:
        """Figures of the ranks for a log record. Called on all ranks.

        `seconds` of steps have passed since the last record; `waited` is what this rank has waited for data since the start.
        """
        return {}

    def all_reduce_max(self, found: torch.Tensor) -> torch.Tensor:
        """The highest value of all ranks that hold parts of one gradient, 0-d: an overflow in one part is one in all."""
        return found

    def all_reduce_flag(self, flag: int) -> int:
        """The highest `flag` of all ranks, so that all of them stop or save at the same update."""
        return flag

    def all_reduce_sum(self, sums: torch.Tensor) -> torch.Tensor:
        """The sum over the ranks that share a batch."""
        return sums

    def broadcast_buffers(self, model: torch.nn.Module) -> None:
        """Give every rank rank 0's buffers, so that all evaluate the model that is saved."""

    def gather_object(self, value: Any) -> list[Any]:
        """One value per rank, on rank 0."""
        return [value]

    def broadcast_object(self, value: Any) -> Any:
        """Rank 0's value, on every rank."""
        return value

    def full_state_dict(self, model: torch.nn.Module, state: State) -> tuple[Weights, State]:
        """Weights and training state as one process would have them, on rank 0."""
        return model.state_dict(), state

    def as_distributed(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """What belongs to a weight, as all ranks together have it."""
        return tensor

    def empty_shard(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Where this rank's part of what belongs to a weight is read to."""
        return torch.empty(shape, dtype=dtype)

    def saving_group(self) -> Any:
        """All ranks, for those of their threads that save."""
        return None

    def shard_state_dict(self, weights: Weights, state: State) -> tuple[Weights, State]:
        """What this rank holds of what `collect` gave, maybe under another strategy."""
        return weights, state

    def inference_model(self, model: torch.nn.Module) -> Any:
        """The callable that evaluation calls; every rank gets its outputs."""
        return model

    def shutdown(self) -> None:
        """Leave."""
