"""What the parts of a run ask of each other. Config groups do not import each other; they meet in these protocols."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

from drivetrain.core.lazy import torch
from drivetrain.core.microbatch import MicroBatch, Request
from drivetrain.core.progress import Progress
from drivetrain.core.source import Source
from drivetrain.core.world import World


class Pipeline(Protocol):
    """A source, and what is done to its samples: augmentation, mixing, normalisation."""

    @property
    def source(self) -> Source: ...

    def __call__(self, request: Request) -> tuple[Any, Any]:
        """Inputs and targets of a request, ready for the model."""


class Loss(Protocol):
    """A loss that is trained."""

    def __call__(self, output: torch.Tensor, target: torch.Tensor, /) -> torch.Tensor:
        """The mean loss of a micro-batch, 0-d."""


class Strategy(Protocol):
    """A parallel strategy at work: this process among those that train together."""

    world: World  # among all ranks
    data_world: World  # among the ranks that share out the samples of a batch
    lockstep_evaluation: bool  # a forward takes all ranks, so that all evaluate equally many batches

    def all_reduce_max(self, found: torch.Tensor) -> torch.Tensor:
        """The highest value of all ranks that hold parts of one gradient, 0-d."""

    def full_state_dict(self, model: torch.nn.Module, state: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Weights and training state as one process would have them, on rank 0."""

    def as_distributed(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor that belongs to the weight `name`, as all ranks together have it."""

    def saving_group(self) -> Any:
        """A process group of all ranks, for those of their threads that save."""

    def gather_object(self, value: Any) -> list[Any]:
        """One value of each rank, on rank 0."""

    def broadcast_object(self, value: Any) -> Any:
        """Rank 0's value, on every rank."""


class Precision(Protocol):
    """The number formats of a step, at work."""

    def autocast(self) -> AbstractContextManager[Any]:
        """The context of forward and loss."""

    def backward(self, loss: torch.Tensor, weight: torch.Tensor) -> None:
        """Add the gradients of weight × loss."""

    def scaled(self, loss: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """The tensor that a backward started elsewhere, such as by a pipeline schedule, begins with."""

    def step(self, optimizer: torch.optim.Optimizer, clip: Callable[[], None]) -> bool:
        """Clip and update; False if the update was skipped."""


class Batch(Protocol):
    """Which samples make which micro-batch of which update."""

    accumulation_steps: int

    def lr_factor(self) -> float:
        """The multiple of the learning rate that goes with the batch."""

    def micro_batch(self, world: World) -> int:
        """The most samples that one rank's forward takes."""

    def size(self, epoch: int) -> int:
        """Samples of one update in an epoch."""

    def updates(self, samples: int, epoch: int, drop_last: bool) -> int:
        """Updates of an epoch."""

    def requests(
        self,
        samples: int,
        seed: int,
        epoch: int,
        world: World,
        drop_last: bool,
        skip: int = 0,
        device: torch.device | None = None,
        order: Callable[[int, int], torch.Tensor] | None = None,
    ) -> Iterator[Request]:
        """The micro-batches of one rank in an epoch, in order, from update number `skip` on."""


class Loader(Protocol):
    """Brings requested samples to the device."""

    def stream(
        self, pipeline: Any, requests: Iterable[Request], device: torch.device, memory_format: torch.memory_format
    ) -> Iterator[MicroBatch]:
        """The micro-batches of `requests`, in their order, on the device."""


class LogWriter(Protocol):
    """Takes the records of a run: one mapping for each logged update and each evaluation."""

    def log(self, record: Mapping[str, Any], /) -> None:
        """Write one record."""


class Checkpointed(Protocol):
    """What is saved: a trainer."""

    model: torch.nn.Module
    progress: Progress

    def state(self) -> dict[str, Any]:
        """Everything but the weights that a resumed run needs. Called on all ranks."""
