"""The range of pixel values: image files of more than 8 bits say only in their numbers what is black and what is white."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, field
from typing import Any

from drivetrain.core.errors import DataError
from drivetrain.core.lazy import torch

BITS = (8, 10, 12, 14, 16)  # that instruments have
SPREAD = 4  # a set whose values spread over a smaller part than one of so many does not use its depth

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Range:
    """The lowest and the highest value of a set of images, which become 0 and 255. What lies beyond is clipped, and counted."""

    low: float
    high: float
    said: bool = False  # by the user: it holds for images of 8 bits too
    beyond: Any = field(default_factory=lambda: torch.zeros(1, dtype=torch.int64).share_memory_(), compare=False, repr=False)

    def __call__(self, values: Any, name: str) -> Any:
        """Return values (h, w, …) as uint8. Raises DataError for NaN."""
        import numpy as np

        scaled = np.asarray((values.astype(np.float32) - self.low) * (255 / (self.high - self.low)))
        lowest, highest = float(scaled.min()), float(scaled.max())
        if math.isnan(lowest):
            raise DataError(f"{name} has pixels that are no numbers (NaN): mend or remove it")
        if lowest < -0.5 or highest > 255.5:
            self._count(values, name)
        return np.rint(scaled.clip(0, 255)).astype(np.uint8)

    def _count(self, values: Any, name: str) -> None:
        """Count a file with values beyond the range; each tenfold number is told."""
        self.beyond.add_(1)
        count = int(self.beyond)
        if count == 10 ** (len(str(count)) - 1):
            logger.warning(
                "%d image%s had values beyond %g … %g, which are clipped, the last is %s with %g … %g: set data.range=[low,high]",
                count, "" if count == 1 else "s", self.low, self.high, name, values.min(), values.max(),
            )  # fmt: skip


def of_values(low: float, high: float, whole: bool, where: str) -> Range:
    """Return the range of images whose values lie between these; whether all are `whole` numbers. Raises DataError.

    Fractions from 0 or -1 to 1 are as they should be, and whole numbers fill a number of bits, where they use a part of it.
    """
    if not (math.isfinite(low) and math.isfinite(high)):
        raise DataError(f"{where} have pixels that are no finite numbers: mend them, or set data.range=[low,high]")
    if low == high:
        raise DataError(f"all pixels of {where} have the value {low:g}, so there is nothing to learn: mend them")
    if not whole and low >= -1 and high <= 1:
        return Range(0.0 if low >= 0 else -1.0, 1.0)
    depth = next((2**bits - 1 for bits in BITS if high < 2**bits), 0)
    if whole and low >= 0 and depth and (high - low) * SPREAD >= depth:
        return Range(0.0, float(depth))
    return Range(low, high)
