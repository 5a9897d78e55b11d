"""The problem that is solved, in one word: config group `task`."""

from drivetrain.task.base import (
    Contrastive,
    Instruction,
    LanguageModelling,
    Multilabel,
    Regression,
    Segmentation,
    Task,
    TextClassification,
)

__all__ = [
    "Contrastive",
    "Instruction",
    "LanguageModelling",
    "Multilabel",
    "Regression",
    "Segmentation",
    "Task",
    "TextClassification",
]
