"""What a model must know of its data to be used without it: in each checkpoint, and in every exported file."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from drivetrain.core import files
from drivetrain.core.errors import UserError
from drivetrain.core.lazy import torch
from drivetrain.core.option import RunSpec
from drivetrain.core.process import __version__
from drivetrain.core.source import Source
from drivetrain.core.trees import Tree, map_tensors
from drivetrain.data.base import Normalize, Splits, Units
from drivetrain.data.decoding import Range
from drivetrain.model.base import Model


def describe(run: RunSpec, data: Splits) -> dict[str, Any]:
    """Return the model's option, the shape, classes and normalisation of its inputs, and its outputs' units, as plain values.

    Values from the environment are left out: they may be secrets.
    """
    left_out = {f.name for f in fields(Model)} | {"pretrained"}  # such as the weights that training started from
    model = {
        key: value
        for key, value in vars(run.model).items()
        if not (key.startswith("_") or key in left_out or run.from_environment(f"model.{key}"))
    }
    normalize, units = data.normalize, data.units
    return {
        "drivetrain": __version__,
        "model": {"option": run.named("model").partition("=")[2], **model},
        "surgery": run.names("surgery"),
        "targets": run.data.targets,
        "shape": list(data.shape) if data.example is None else None,
        "inputs": None if data.example is None else _write_tree(data.example),
        "images": data.images,
        "decodes_images": run.data.decodes_images(),  # the packed data that says it may be gone
        "outputs": data.classes,
        "classes": None if data.names is None else list(data.names),
        "dtype": None if data.dtype is None else _name(data.dtype),
        "vocabulary": data.vocabulary,
        "normalize": normalize and {"mean": normalize.mean.flatten().tolist(), "std": normalize.std.flatten().tolist()},
        "files": {name: _sha256(text) for name, text in data.files.items()},
        "pixels": data.pixels and {"low": data.pixels.low, "high": data.pixels.high, "said": data.pixels.said},
        "units": units and {"mean": units.mean.tolist(), "std": units.std.tolist()},
    }


class NoSamples(Source):
    """A source without samples."""

    def __len__(self) -> int:
        return 0

    def fetch(self, indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        raise IndexError("there are no samples")


def recall(about: Mapping[str, Any], run_dir: Path) -> Splits:
    """Return the data that `describe` described, without its samples; its files are those of the run."""
    normalize, example = about["normalize"], about["inputs"] and _read_tree(about["inputs"])
    units = about.get("units")
    return Splits(
        NoSamples(),
        NoSamples(),
        tuple(about["shape"]) if example is None else map_tensors(lambda t: tuple(t.shape[1:]), example),
        about["outputs"],
        normalize and Normalize(normalize["mean"], normalize["std"]),
        names=about["classes"],
        dtype=about["dtype"] and getattr(torch, about["dtype"]),
        vocabulary=about["vocabulary"],
        units=units and Units(torch.tensor(units["mean"]), torch.tensor(units["std"])),
        pixels=about.get("pixels") and Range(**about["pixels"]),
        files=RunFiles(run_dir, about.get("files") or {}),
        example=example,
        images=about["images"],
    )


class RunFiles(dict[str, str]):
    """The texts of the files that a run keeps for its data (`Splits.files`), each read when it is first needed."""

    def __init__(self, run_dir: Path, sha256: Mapping[str, str]) -> None:
        super().__init__()
        self._run_dir, self._sha256 = run_dir, sha256

    def __contains__(self, name: object) -> bool:
        return name in self._sha256

    def __missing__(self, name: str) -> str:
        path = self._run_dir / name
        try:
            text = files.read_text(path)
        except (OSError, ValueError) as error:  # ValueError: no UTF-8
            why = getattr(error, "strerror", None) or error
            raise UserError(f"{path} cannot be read ({why}): the run keeps there how its inputs are encoded") from None
        if _sha256(text) != self._sha256.get(name):
            raise UserError(f"{path} is not what the run wrote (its SHA-256 differs): take it from a copy of the run")
        self[name] = text
        return text


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _write_tree(x: Tree) -> Any:
    """Return the structure of inputs, with the shape of one sample and the type of each tensor, as plain values."""
    if isinstance(x, dict):
        return {"keys": {key: _write_tree(value) for key, value in x.items()}}
    if isinstance(x, tuple | list):
        return {"items": [_write_tree(value) for value in x]}
    return {"shape": list(x.shape[1:]), "dtype": _name(x.dtype)}


def _read_tree(written: Mapping[str, Any]) -> Tree:
    """Return two samples of zeros of the structure that `_write_tree` wrote."""
    if "keys" in written:
        return {key: _read_tree(value) for key, value in written["keys"].items()}
    if "items" in written:
        return tuple(_read_tree(value) for value in written["items"])
    return torch.zeros(2, *written["shape"], dtype=getattr(torch, written["dtype"]))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
