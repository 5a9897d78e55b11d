"""The loss that is trained, and the sums from which an evaluation computes its metrics: config group `loss`."""

from drivetrain.loss.base import Loss
from drivetrain.loss.classification import Bce, CrossEntropy, Focal
from drivetrain.loss.distill import Distill
from drivetrain.loss.embedding import Contrastive, Triplet
from drivetrain.loss.language import MaskedToken, NextToken, TokenClass
from drivetrain.loss.own import Own
from drivetrain.loss.regression import L1, Huber, Mse, Quantile
from drivetrain.loss.segmentation import Dice
from drivetrain.loss.sum import Sum

__all__ = [
    "L1", "Bce", "Contrastive", "CrossEntropy", "Dice", "Distill", "Focal", "Huber", "Loss", "MaskedToken", "Mse", "NextToken",
    "Own", "Quantile", "Sum", "TokenClass", "Triplet",
]  # fmt: skip
