"""Verifies checkpoints by their manifests and hashes, without torch."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from drivetrain.core.errors import UserError
from drivetrain.run.result import Result

FORMAT = 2
FULL = {"model.safetensors", "state.pt"}
SHARDED = {".metadata", "state.pt"}  # .metadata is torch.distributed.checkpoint's; its shards are in further files


def verify(checkpoint: Path) -> str | None:
    """Return what is wrong with a checkpoint, or None."""
    try:
        manifest = json.loads((checkpoint / "manifest.json").read_text())
        if manifest["format"] != FORMAT:
            return f"has format {manifest['format']}, this drivetrain reads {FORMAT}"
        for name, expected in manifest["sha256"].items():
            if Path(name).name != name:
                return f"names a file outside itself: {name!r}"
            if not (checkpoint / name).is_file():
                return f"lacks {name}"
            if sha256(checkpoint / name) != expected:
                return f"has a damaged {name} (its SHA-256 differs)"
        if not any(kind <= set(manifest["sha256"]) for kind in (FULL, SHARDED)):
            return "is incomplete"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"has no readable manifest.json ({error})"
    return None


def about(checkpoint: Path) -> dict[str, Any]:
    """Return what a checkpoint says of the model, such as input shape and classes; {} where it was written without it."""
    content: dict[str, Any] = json.loads((checkpoint / "manifest.json").read_text()).get("about") or {}
    return content


def as_metadata(about: Mapping[str, Any]) -> dict[str, str]:
    """Return the same as the metadata of a file, in which all values are texts: as JSON, under the one key "drivetrain".

    safetensors writes several keys in a random order, and two equal runs would not write equal files.
    """
    return {"drivetrain": json.dumps(about)}


def newest_valid(run_dir: Path) -> tuple[Path | None, list[str]]:
    """Return the newest valid checkpoint, and one line for each newer one that is invalid."""
    problems: list[str] = []
    for checkpoint in sorted(checkpoints(run_dir), key=lambda p: int(p.name), reverse=True):
        problem = verify(checkpoint)
        if problem is None:
            return checkpoint, problems
        problems.append(f"checkpoint {checkpoint} {problem}: passed over")
    return None, problems


def best_or_newest(run_dir: Path) -> Path:
    """Return the checkpoint of a run's best evaluation if it was kept, else the newest valid one. Raises UserError."""
    result = Result.read(run_dir)
    best = result.judged("best").get("update") if result is not None else None
    for checkpoint in checkpoints(run_dir):
        if int(checkpoint.name) == best and verify(checkpoint) is None:
            return checkpoint
    newest, problems = newest_valid(run_dir)
    if newest is None:
        raise UserError(problems or f"{run_dir} has no checkpoint: it was not saved (saving=none), or has not come that far")
    return newest


def checkpoints(run_dir: Path) -> list[Path]:
    """Return the checkpoints in a run's directory, in no order."""
    root = run_dir / "checkpoints"
    return [p for p in root.iterdir() if p.name.isdigit()] if root.is_dir() else []


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
