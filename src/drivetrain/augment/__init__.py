"""Augmentation: random changes of training images."""

from drivetrain.augment.base import Augment
from drivetrain.augment.color import ColorJitter
from drivetrain.augment.erasing import RandomErasing
from drivetrain.augment.geometry import FlipCrop, RandomResizedCrop, batch_crop, batch_flip
from drivetrain.augment.mixing import CutMix, Mixup
from drivetrain.augment.randaugment import RandAugment

__all__ = [
    "Augment", "ColorJitter", "CutMix", "FlipCrop", "Mixup", "RandAugment", "RandomErasing", "RandomResizedCrop",
    "batch_crop", "batch_flip",
]  # fmt: skip
