"""The network that is trained."""

from drivetrain.model.base import Gpt, Mlp, Model, Own, ResNet9, Timm

__all__ = ["Gpt", "Mlp", "Model", "Own", "ResNet9", "Timm"]
