"""Learning-rate schedules: pure functions of the update number, so nothing but plateau's has state to save."""

from drivetrain.scheduler.base import Scheduler
from drivetrain.scheduler.cycles import Cyclic, OneCycle
from drivetrain.scheduler.falling import Cosine, Exponential, Linear, Poly, Wsd
from drivetrain.scheduler.plateau import Plateau
from drivetrain.scheduler.steps import MultiStep, Step

__all__ = ["Cosine", "Cyclic", "Exponential", "Linear", "MultiStep", "OneCycle", "Plateau", "Poly", "Scheduler", "Step", "Wsd"]
