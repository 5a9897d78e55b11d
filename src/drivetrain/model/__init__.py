"""The network that is trained: config group `model`. The options import no torch; gpt, mlp, resnet9 and unet are the networks."""

from drivetrain.model.base import Model
from drivetrain.model.own import Own
from drivetrain.model.shipped import Gpt, Mlp, ResNet9, UNet
from drivetrain.model.timm import Timm
from drivetrain.model.transformers import Transformers

__all__ = ["Gpt", "Mlp", "Model", "Own", "ResNet9", "Timm", "Transformers", "UNet"]
