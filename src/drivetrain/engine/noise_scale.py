"""The gradient noise scale (McCandlish et al. 2018): the batch size beyond which larger batches save few updates.

It is the variance of one sample's gradient, summed over all parameters, divided by the squared length of the true gradient. Both
are estimated without bias from two gradients that an update with several micro-batches or ranks already has: of one micro-batch,
and of the whole batch (their appendix A.1). The micro-batch is a rank's first one. If it is the rank's only one, or its gradient
is not kept to the end, it is measured in the backward, before the ranks average; the log has the mean over ranks.

Over several updates the two estimates are averaged in units of the squared gradient of the updates before. So every update counts
the same: the critical batch of a run is the mean of the noise scale over its updates (their appendix D). Plain sums would
describe the first updates only, whose gradients are many times longer. An update's own gradient as the unit would bias the ratio.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from drivetrain.core.step.microbatch import MicroBatch
from drivetrain.core.step.step import Made, WrappingStep
from drivetrain.core.typed import StateDict
from drivetrain.parallel import Parallel

EVERY = 8  # on small models the two norms take as long as a micro-batch
KEPT = 0.9  # share of the earlier sums kept at each record: single records are noisy
FOLLOWS = 0.1  # of the unit: the share of the last update's squared gradient


@dataclass
class NoiseScale:
    """Sums the two estimates on the device, and gives their ratio for each record of the log."""

    device: torch.device
    size: Callable[[int], int]  # the samples of an update in an epoch
    every: int = EVERY  # updates between two measurements
    sums: torch.Tensor = field(init=False)  # (2,): the variance divided by the batch size, and the squared length; see above

    def __post_init__(self) -> None:
        self.sums = torch.zeros(2, device=self.device)
        self._unit = torch.zeros((), device=self.device)
        self._before = (0.0, 0.0)
        self.updates = 0  # made so far; each `every`th is measured

    def state_dict(self) -> StateDict:
        """Return the state for a resumed run. The sums are 0 where a run is saved: a record was just written."""
        return {"unit": self._unit, "before": list(self._before), "updates": self.updates}

    def load_state_dict(self, state: StateDict) -> None:
        """Load a `state_dict()`."""
        if state:
            self._unit.copy_(state["unit"])
            self._before, self.updates = (state["before"][0], state["before"][1]), state["updates"]

    def add(self, first: torch.Tensor, whole: torch.Tensor, share: torch.Tensor) -> None:
        """Add an update: squared gradient norms of its first micro-batch and of the whole, and the former's share; all 0-d."""
        variance = (first - whole) / (1 / share - 1)  # of one sample, divided by the samples of the update
        squared = (whole - share * first) / (1 - share)
        unit = torch.where(self._unit > 0, self._unit, whole)
        both = torch.stack([variance, squared]) / unit
        finite = both.isfinite().all()  # else an overflow, or a filler batch with a share of 0
        self.sums += torch.where(finite, both, 0.0)
        self._unit = torch.where(finite, unit.lerp(whole.to(unit.dtype), FOLLOWS), self._unit)

    def scale(self, variance: float, squared: float, epoch: int) -> float | None:
        """Return the noise scale in samples, from the sums since the last record and the kept share of earlier ones.

        None where the noise hides the gradient.
        """
        self._before = variance, squared = KEPT * self._before[0] + variance, KEPT * self._before[1] + squared
        return self.size(epoch) * variance / squared if squared > 0 and variance > 0 else None


@dataclass(eq=False)
class NoiseScaleStep(WrappingStep):
    """Measures the gradients of this rank's first micro-batch and of the whole update, in some updates. It changes nothing."""

    noise: NoiseScale
    parameters: Sequence[torch.nn.Parameter]
    parallel: Parallel
    _first: torch.Tensor | None = field(default=None, init=False)

    def micro_batch(self, batch: MicroBatch, loss_sum: torch.Tensor) -> None:
        not_now = self._first is not None or self.noise.updates % self.noise.every
        if not_now or (batch.last and self.parallel.data_world.size == 1):  # the last one has the whole gradient
            self.inner.micro_batch(batch, loss_sum)
        elif self.parallel.keeps_own_gradients and not batch.last:
            self.inner.micro_batch(batch, loss_sum)
            self._measured(batch, self._squared_norm())
        else:
            with self.parallel.own_gradient(self.parameters) as squared_norm:
                self.inner.micro_batch(batch, loss_sum)
                self._measured(batch, squared_norm())

    def update(self) -> Made:
        if self._first is not None:
            self.noise.add(self._first, self._squared_norm(), self._share)
        self.noise.updates += 1
        return self.inner.update()

    def zero_grad(self) -> None:
        self._first = None
        self.inner.zero_grad()

    def _measured(self, batch: MicroBatch, squared: torch.Tensor) -> None:
        self._share = batch.weight / self.parallel.data_world.size
        self._first = squared / batch.weight**2

    def _squared_norm(self) -> torch.Tensor:
        return self.parallel.norm(self.parameters, 2.0).float().square()
