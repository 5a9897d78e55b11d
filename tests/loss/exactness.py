"""An update as its parts: micro-batches, and ranks as threads that meet in all_reduce_sum."""

import copy
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from drivetrain.core.step import trees
from drivetrain.core.step.microbatch import MicroBatch
from drivetrain.core.world import World
from drivetrain.engine.step import PlainStep
from drivetrain.engine.update_step import TwoPasses, UpdateStep, Weighed
from drivetrain.loss.embedding import ComparingLoss
from drivetrain.parallel import Parallel
from drivetrain.precision import Precision
from tests.support.waiting import LIMIT_S

Split = Sequence[Sequence[int]]  # of one rank: the samples of each micro-batch, in order


class Meeting:
    """The place at which the ranks add up."""

    def __init__(self, size: int) -> None:
        self.tensors: list[Any] = [None] * size
        self.barrier = threading.Barrier(size, timeout=LIMIT_S)


class Rank(Parallel):
    """One of several ranks of this process."""

    def __init__(self, rank: int, size: int, meeting: Meeting) -> None:
        self.world = self.data_world = World(rank, size)
        self._meeting = meeting

    def all_reduce_sum(self, sums: torch.Tensor) -> torch.Tensor:
        self._meeting.tensors[self.world.rank] = sums.clone()
        self._meeting.barrier.wait()
        sums.copy_(torch.stack(self._meeting.tensors).sum(0))
        self._meeting.barrier.wait()
        return sums


def update(
    loss: Any, model: torch.nn.Module, x: torch.Tensor, y: Any, ranks: Sequence[Split], setup: Callable[[Any, Parallel], None]
) -> tuple[float, dict[str, float], dict[str, torch.Tensor]]:
    """Forward and backward of one update: the loss as it is logged, its parts, and the gradients, averaged over the ranks."""
    size, samples = len(ranks), sum(len(part) for split in ranks for part in split)
    meeting, found, errors = Meeting(size), [None] * size, []

    def work(rank: int) -> None:
        try:
            found[rank] = _of_rank(rank)
        except BaseException as error:
            errors.append(error)
            meeting.barrier.abort()

    def _of_rank(rank: int) -> Any:
        parallel, own, twin = Rank(rank, size, meeting), copy.deepcopy(loss), copy.deepcopy(model)
        setup(own, parallel)
        own.add_parameters(twin)
        precision = Precision()
        plain = PlainStep(twin, own, precision, None, lambda: None, lambda: None)
        step: Any = plain
        if isinstance(own, ComparingLoss):
            step = UpdateStep(plain, TwoPasses(own, twin, twin, precision))
        elif own.counted:
            step = UpdateStep(plain, Weighed(own, parallel))
        loss_sum = torch.zeros((), dtype=torch.float64)
        for i, part in enumerate(ranks[rank]):
            rows = torch.tensor(list(part) or [0])
            weight = torch.tensor(len(part) * size / samples, dtype=torch.float64)
            step.micro_batch(MicroBatch(x[rows], trees.select(y, rows), weight, i + 1 == len(ranks[rank]), False), loss_sum)
        parts = {name: float(value) for name, value in own.parts().items()}
        return float(loss_sum), parts, {name: p.grad for name, p in twin.named_parameters()}

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    mean = sum(f[0] for f in found) / size
    parts = {name: sum(f[1][name] for f in found) / size for name in found[0][1]}
    return mean, parts, {name: torch.stack([f[2][name] for f in found]).mean(0) for name in found[0][2]}
