"""The network that is trained: config group `model`. The options import no torch; gpt and nets have the networks."""

from drivetrain.model.base import Model

__all__ = ["Model"]
