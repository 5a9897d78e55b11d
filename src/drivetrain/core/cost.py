"""What takes time to start and then the same time for each step: whether it pays depends on the number of steps."""

from __future__ import annotations

import math
from typing import NamedTuple


class Cost(NamedTuple):
    """Seconds: to start, and then for each step."""

    start: float
    step: float

    def of(self, steps: float) -> float:
        """Seconds for so many steps, the start included."""
        return self.start + steps * self.step

    def pays_after(self, base: Cost) -> int | None:
        """The number of steps that takes no longer than with `base`, and from which on it is faster; None: it never is."""
        saved = base.step - self.step
        return max(0, math.ceil((self.start - base.start) / saved)) if saved > 0 else None
