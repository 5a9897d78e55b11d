"""The network that is trained: config group `model`. The options import no torch; gpt, mlp, resnet9 and unet are the networks."""

from drivetrain.model.base import Model

__all__ = ["Model"]
