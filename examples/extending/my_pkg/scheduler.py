"""scheduler=sine"""

from __future__ import annotations

import math

from drivetrain.scheduler.curves import Decay


class Sine(Decay):
    """A quarter of a sine: it falls fast at first, and slowly in the end."""

    def decay_curve(self, progress: float) -> float:
        """The curve, from 1 at progress 0 to 0 at progress 1."""
        return 1 - math.sin(math.pi / 2 * progress)
