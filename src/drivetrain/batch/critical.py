"""Chooses the global batch by the gradient noise scale."""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from drivetrain.batch.base import Batch, Scaling
from drivetrain.core.option import Count, RunSpec
from drivetrain.core.typed import fits

if TYPE_CHECKING:
    from drivetrain.core.context import BuildContext

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class Critical(Batch):
    """batch=critical: as many samples in an update as the gradient noise scale (McCandlish et al. 2018) says.

    At this size, the critical batch, a run takes about twice the fewest possible updates and twice the fewest possible samples.
    Before the ranks start, a process of its own trains for `look_updates` updates of `global_batch` samples and measures the
    noise scale. As long as that is above the batch, the batch is then doubled by more accumulation steps, to `max` at most. It
    stays for the whole run, whose length and schedule are known at its start as those of any other.
    A resumed run goes on with the batch that was found, which is in environment.json and result.json.
    """

    effect = "changes"
    changes = "the samples of an update: as many as a measurement says"
    key_effects: ClassVar[Mapping[str, Any]] = {}
    fixed_micro_batches: ClassVar[bool] = False
    is_tried: ClassVar[bool] = True
    chooses_size: ClassVar[bool] = True

    global_batch: Count = 32
    max: Count = 1024
    accumulation_steps: Count = 1
    look_updates: Count = 50
    lr_scaling: Scaling = "sqrt"

    def validate(self, run: RunSpec) -> Iterator[str]:
        yield from super().validate(run)
        if self.max < 2 * self.global_batch:
            yield (
                f"batch.max={self.max} leaves nothing to choose, because batch.global_batch={self.global_batch} is doubled: "
                f"set it to {2 * self.global_batch} or more"
            )
        if self.global_batch == 1:
            yield "batch.global_batch=1: the noise scale is measured from two parts of an update: set it to 2 or more"
        if run.loss.compares_samples:
            yield (
                f"batch=critical and {run.named('loss')} exclude each other (a loss that compares the samples of a batch has no "
                "gradient noise scale): set batch=fixed"
            )
        if run.parallel.nnodes > 1:
            yield (
                "batch=critical measures before the ranks of a machine start, and several machines could find different batches: "
                "let one find it, and set batch.global_batch there"
            )

    def advise(self, run: RunSpec) -> Iterator[str]:
        yield from super().advise(run)
        if self.lr_scaling == "none":
            yield (
                "batch=critical may make the batch several times larger, and batch.lr_scaling=none keeps the learning rate: sqrt "
                "suits AdamW, linear SGD"
            )

    def choose(self, measure: Callable[[int, int], dict[str, Any]], ranks: int, recorded: Any = None) -> Batch:
        limits = {"smallest": self.global_batch, "largest": self.max, "look_updates": self.look_updates}
        steps = max(2, self.accumulation_steps * ranks)  # the parts of an update that the ranks compute; it takes two to measure
        look = recorded if _is_of(recorded, limits) else measure(steps, self.look_updates)
        chosen = copy.deepcopy(self)
        growth = self._growth(look["noise_scale"], look["samples"])
        chosen.global_batch *= growth
        chosen.accumulation_steps *= growth
        measured = {key: look[key] for key in ("noise_scale", "updates", "samples")}
        chosen.found = {**limits, **measured, "global_batch": chosen.global_batch}
        return chosen

    def _growth(self, noise_scale: float | None, samples: int) -> int:
        """The power of two by which the smallest batch comes up to the noise scale, within the limits and the data."""
        most = math.floor(math.log2(max(1.0, min(self.max, samples) / self.global_batch)))
        wanted = math.ceil(math.log2(noise_scale / self.global_batch)) if noise_scale else 0
        return int(2 ** min(max(0, wanted), most))

    def setup(self, context: BuildContext) -> None:
        if self.found is not None and context.world.rank == 0:
            logger.info("%s", self._told(self.found))
        super().setup(context)

    def _told(self, found: Mapping[str, Any]) -> str:
        """What was found and chosen, in one line."""
        looked = f"{found['updates']} updates of {found['smallest']} samples"
        chosen = f"{self.global_batch} samples an update, of {found['smallest']} to {found['largest']}"
        if found["noise_scale"] is None:
            return f"batch=critical: the noise of {looked} hides the gradient: {chosen}; a larger batch.look_updates tells more"
        return f"batch=critical: gradient noise scale {found['noise_scale']:,.0f} by {looked}: {chosen}"


def _is_of(recorded: Any, limits: Mapping[str, int]) -> bool:
    """Whether it is what a run with these limits has recorded."""
    if not fits(recorded, dict[str, Any]) or any(recorded.get(key) != value for key, value in limits.items()):
        return False
    scale, counts = recorded.get("noise_scale"), (recorded.get("samples"), recorded.get("updates"))
    good = scale is None or (fits(scale, float) and 0 <= scale < math.inf)
    return good and all(fits(count, int) and count > 0 for count in counts)
