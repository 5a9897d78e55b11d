"""Learning-rate schedules: config group `scheduler`. All but plateau are pure functions of the update number."""

from drivetrain.scheduler.base import Scheduler
from drivetrain.scheduler.cyclic import Cyclic, OneCycle
from drivetrain.scheduler.decay import Cosine, Exponential, Linear, Poly, Wsd
from drivetrain.scheduler.plateau import Plateau
from drivetrain.scheduler.steps import MultiStep, Step

__all__ = ["Cosine", "Cyclic", "Exponential", "Linear", "MultiStep", "OneCycle", "Plateau", "Poly", "Scheduler", "Step", "Wsd"]
