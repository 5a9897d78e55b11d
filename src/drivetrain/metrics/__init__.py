"""What an evaluation measures beside the loss's own figures: config group `metrics`, a list of options."""

from drivetrain.metrics.base import Metric
from drivetrain.metrics.counts import F1, Accuracy, ConfusionMatrix, Dice, IoU, PerClass, Precision, Recall, TopK
from drivetrain.metrics.curves import AUROC, AveragePrecision, CalibrationError
from drivetrain.metrics.language import BitsPerByte, Perplexity
from drivetrain.metrics.own import Own
from drivetrain.metrics.regression import MAE, R2, RMSE

__all__ = [
    "AUROC", "F1", "MAE", "R2", "RMSE", "Accuracy", "AveragePrecision", "BitsPerByte", "CalibrationError", "ConfusionMatrix",
    "Dice", "IoU", "Metric", "Own", "PerClass", "Perplexity", "Precision", "Recall", "TopK",
]  # fmt: skip
