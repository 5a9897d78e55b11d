"""The problem that is solved, in one word: config group `task`."""

from drivetrain.task.base import (
    Contrastive,
    LanguageModelling,
    Multilabel,
    Regression,
    Segmentation,
    Task,
    TextClassification,
)

__all__ = ["Contrastive", "LanguageModelling", "Multilabel", "Regression", "Segmentation", "Task", "TextClassification"]
