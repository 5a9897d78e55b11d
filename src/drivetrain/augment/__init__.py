"""Augmentation: random changes of training images."""

from drivetrain.augment.base import Augment

__all__ = ["Augment"]
