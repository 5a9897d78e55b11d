"""Protocols between the config groups, which do not import each other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

from drivetrain.core.horizon import Progress
from drivetrain.core.lazy import torch
from drivetrain.core.microbatch import MicroBatch, Request
from drivetrain.core.order import Order
from drivetrain.core.run_spec import RunSpec
from drivetrain.core.source import Source
from drivetrain.core.trees import Forward, Tree
from drivetrain.core.typed import StateDict
from drivetrain.core.world import World


class Pipeline(Protocol):
    """A source and the transforms of its samples: augmentation, mixing, normalisation."""

    @property
    def source(self) -> Source: ...

    def __call__(self, request: Request) -> tuple[Any, Any]:
        """Return the inputs and targets of a request, ready for the model."""


class LossStep(Protocol):
    """The methods that a step calls on a loss."""

    def step(self, forward: Forward, batch: MicroBatch) -> torch.Tensor:
        """Run the forward on a micro-batch's inputs, and return its mean loss, 0-d."""


class Loss(LossStep, Protocol):
    """The training loss."""

    takes_trees: bool  # outputs and targets may be trees of tensors
    compares_samples: bool  # it is computed from the whole batch of all ranks
    runs_model: bool  # it calls the model itself, as often as it likes

    def of_phase(self, name: str) -> Loss:
        """Return the loss of a phase of the updates."""

    def joined(self, x: Tree) -> Any:
        """Return a batch's inputs as the model takes them: several views of a sample become as many inputs."""

    def parts(self) -> dict[str, torch.Tensor]:
        """Return running sums of its named parts, which a step adds to; 0-d."""

    def keeps(self) -> dict[str, Any]:
        """Return by name what a user brought."""

    def output_problem(self, output: tuple[int, ...], classes: int) -> str | None:
        """Return what is wrong with the shape of the model's output for two samples; None: nothing."""


class Strategy(Protocol):
    """A parallel strategy in a run: this process among the ranks that train together."""

    world: World  # among all ranks
    data_world: World  # among the data-parallel ranks, which split the samples of a batch
    data_group: Any  # the process group of the data-parallel ranks; None: that of all ranks
    lockstep_evaluation: bool  # a forward needs all ranks, so all evaluate the same number of batches

    def all_reduce_max(self, found: torch.Tensor) -> torch.Tensor:
        """Return the maximum over all ranks that hold parts of one gradient, 0-d."""

    def full_state_dict(self, model: torch.nn.Module, state: dict[str, object]) -> tuple[StateDict, StateDict]:
        """Return the full, unsharded weights and training state, on rank 0."""

    def broadcast_buffers(self, model: torch.nn.Module) -> None:
        """Give all ranks rank 0's buffers, such as BatchNorm's statistics."""

    def broadcast_tensors(self, tensors: Sequence[torch.Tensor]) -> None:
        """Give all ranks rank 0's values of these tensors, in place."""

    def with_states_of_all(self, state: dict[str, object]) -> StateDict:
        """Return, on rank 0, the state with the optimizer's of all ranks, where ranks have the state of other weights."""

    def divided(self, kind: str, name: str, tensor: torch.Tensor) -> Any:
        """Return a tensor that belongs to the weight `name` as this rank's parts of it (saving/content.py)."""

    def empty_shard(self, kind: str, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return an empty tensor into which this rank's parts of one of this shape are read."""

    def saving_group(self) -> Any:
        """Return a process group of all ranks for the threads that save."""

    def gather_object(self, value: object) -> list[Any]:
        """Return a list of every rank's value, on rank 0."""

    def broadcast_object(self, value: object) -> Any:
        """Return rank 0's value, on every rank."""


class PrecisionStep(Protocol):
    """The methods that a step calls on a precision."""

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the context for forward and loss."""

    def backward(self, loss: torch.Tensor, weight: torch.Tensor) -> None:
        """Accumulate the gradients of weight × loss."""

    def step(self, optimizer: torch.optim.Optimizer, clip: Callable[[], None]) -> bool:
        """Clip and update. Returns False if the update was skipped."""


class Precision(PrecisionStep, Protocol):
    """The number formats of a step, in a run."""

    def scaled(self, loss: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Return the tensor to call backward on, where the caller does so itself, such as a pipeline schedule."""


class Batch(Protocol):
    """Splits the samples into updates and micro-batches."""

    accumulation_steps: int
    order: Order  # of the training samples
    lengths: torch.Tensor | None  # (n,) the tokens of each training sample, where samples are sequences
    weighs_by_length: bool  # micro-batches are weighted by their tokens; else by their samples

    def lr_factor(self) -> float:
        """Return the factor by which the batch size scales the learning rate."""

    def decay_factor(self) -> float:
        """Return the factor by which the batch size scales the weight decay."""

    def micro_batch(self, world: World) -> int:
        """Return the maximum number of samples in one rank's forward."""

    def size(self, epoch: int) -> int:
        """Return the samples of one update in an epoch."""

    def updates(self, samples: int, epoch: int, drop_last: bool) -> int:
        """Return the number of updates in an epoch."""

    def requests(
        self,
        seed: int,
        epoch: int,
        world: World,
        drop_last: bool,
        skip: int = 0,
    ) -> Iterator[Request]:
        """Yield the micro-batches of one rank in an epoch, in order, from update number `skip` on."""


class Loader(Protocol):
    """Loads requested samples to the device."""

    def stream(
        self, pipeline: Any, requests: Iterable[Request], device: torch.device, memory_format: torch.memory_format
    ) -> Iterator[MicroBatch]:
        """Yield the micro-batches of `requests`, in order, on the device."""


class LogWriter(Protocol):
    """Writes the records of a run: one mapping for each logged update and each evaluation."""

    def log(self, record: Mapping[str, Any], /) -> None:
        """Write one record."""

    def log_image(self, name: str, update: int, path: Path, /) -> None:
        """Show a picture, a PNG file."""


class Checkpointed(Protocol):
    """The object that a checkpoint saves: a trainer."""

    model: torch.nn.Module
    progress: Progress

    def state(self) -> StateDict:
        """Return everything except the weights that a resumed run needs. Called on all ranks."""


class Trials(Protocol):
    """The trials that an option may make before the ranks start, each in a process of its own."""

    @property
    def run(self) -> RunSpec: ...

    @property
    def resumes(self) -> bool: ...  # from a checkpoint

    def count_fitting(self, sizes: Sequence[int], most: int, limit_gb: float | None) -> int:
        """Return how many of these ascending micro-batch sizes fit, from the first; a rank's update has `most` samples.

        `limit_gb` limits the device's memory, on a CPU the process's.
        """

    def forecast_micro_batch(self, most: int, limit_gb: float | None) -> int | None:
        """Return the micro-batch, of at most `most` samples, that is forecast to be the largest that fits; 0 if none does.

        None where it cannot be told, which is logged.
        """

    def look(self, steps: int, updates: int | None, micro_batches: Sequence[int]) -> dict[str, Any]:
        """Train for some updates of so many steps (None: as the run is long), and then time updates of each micro-batch.

        Returns noise_scale (None: not to be told), updates, the samples of the training set, and update_seconds.
        """

    def thread_seconds(self, counts: Sequence[int]) -> list[float]:
        """Return the seconds of a rank's update with each of these numbers of threads; [] where an update is so long that all
        cores are worth it.
        """

    def micro_batch(self) -> int:
        """Return the samples of a rank's forward."""

    def fewest_blocks(self, block: str | None, limit_gb: float) -> dict[str, int]:
        """Return how many of the first `blocks` must be `recomputed` for a rank's step to fit, and the `bytes` that it takes.

        `block` is the name of their class. Where it does not fit, its bytes are the least that it takes.
        """
