"""What a model must know of its data to be used without it: in each checkpoint, and in every exported file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from drivetrain.core.lazy import torch
from drivetrain.core.option import RunSpec
from drivetrain.core.process import __version__
from drivetrain.data.base import Normalize, Splits


def describe(run: RunSpec, data: Splits) -> dict[str, Any]:
    """Return the model's option, and shape, classes and normalisation of its inputs, as plain values."""
    model = {key: value for key, value in vars(run.model).items() if not key.startswith("_")}
    normalize = data.normalize
    return {
        "drivetrain": __version__,
        "model": {"option": run.named("model").partition("=")[2], **model},
        "surgery": run.names("surgery"),
        "targets": run.data.targets,
        "shape": list(data.shape),
        "outputs": data.classes,
        "classes": None if data.names is None else list(data.names),
        "dtype": None if data.dtype is None else str(data.dtype).removeprefix("torch."),
        "vocabulary": data.vocabulary,
        "normalize": normalize and {"mean": normalize.mean.flatten().tolist(), "std": normalize.std.flatten().tolist()},
    }


class NoSamples:
    """A source without samples."""

    def __len__(self) -> int:
        return 0

    def fetch(self, indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        raise IndexError("there are no samples")


def recall(about: Mapping[str, Any]) -> Splits:
    """Return the data that `describe` described, without its samples."""
    normalize = about["normalize"]
    return Splits(
        NoSamples(),
        NoSamples(),
        tuple(about["shape"]),
        about["outputs"],
        normalize and Normalize(normalize["mean"], normalize["std"]),
        about["classes"],
        about["dtype"] and getattr(torch, about["dtype"]),
        about["vocabulary"],
    )
