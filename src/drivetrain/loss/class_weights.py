"""Weights by class: given as a list, or balanced by how often each class occurs in the training data."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any, Literal

from drivetrain.core.errors import UserError
from drivetrain.core.lazy import torch
from drivetrain.core.option import NonNegative
from drivetrain.core.source import Source

ClassWeights = list[NonNegative] | Literal["balanced"] | None
CHUNK = 256  # samples that are read at once

logger = logging.getLogger(__name__)


def weights_for(given: Any, source: Source, classes: int, ignore_index: int, key: str) -> torch.Tensor | None:
    """Return the weights (classes,) float32 on the CPU; None where there are none. Raises UserError.

    `balanced` is samples / (classes × samples of the class), as scikit-learn's: each class has the same weight in all. A
    class that does not occur has weight 0.
    """
    if given is None:
        return None
    if given == "balanced":
        counts = torch.zeros(classes, dtype=torch.float64)
        for y in _targets(source, classes, key):
            counts += torch.bincount(y[y != ignore_index].flatten(), minlength=classes)
        return torch.where(counts > 0, counts.sum() / (classes * counts), 0.0).float()
    if len(given) != classes:
        raise UserError(f"{key}: {len(given)} weights for {classes} classes: give one for each")
    return torch.tensor(given, dtype=torch.float32)


def positive_weights_for(given: Any, source: Source, labels: int, key: str) -> torch.Tensor | None:
    """Return what each label's positives weigh (labels,); `balanced`: as much in all as its negatives. Raises UserError."""
    if given is None:
        return None
    if given == "balanced":
        positives = torch.zeros(labels, dtype=torch.float64)
        samples = 0
        for y in _targets(source, labels, key, of_labels=True):
            positives += y.double().sum(0)
            samples += len(y)
        return torch.where(positives > 0, (samples - positives) / positives, 1.0).float()
    if len(given) != labels:
        raise UserError(f"{key}: {len(given)} weights for {labels} labels: give one for each")
    return torch.tensor(given, dtype=torch.float32)


def _targets(source: Source, classes: int, key: str, of_labels: bool = False) -> Iterator[torch.Tensor]:
    """Yield all targets of the training data, on the CPU. A source that knows them is not read; a user's code may change them."""
    if (known := source.labels() if source.own_code is None else None) is not None:
        batches: Iterator[torch.Tensor] = iter([known])
    else:
        logger.info("%s=balanced reads %d training samples to count their classes", key, len(source))
        batches = (source.fetch(indices)[1] for indices in torch.arange(len(source)).split(CHUNK))
    for y in batches:
        shape_is_right = y.dim() == 2 and y.shape[1] == classes if of_labels else not y.is_floating_point()
        if not shape_is_right or (not of_labels and int(y.max()) >= classes):
            raise UserError(f"{key}=balanced counts classes from 0 to {classes - 1}, which the training targets are not")
        yield y.cpu()
