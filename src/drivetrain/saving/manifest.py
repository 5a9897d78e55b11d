"""Verifies checkpoints by their manifests, hashes and content, without torch."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import re
from collections.abc import Mapping
from itertools import zip_longest
from pathlib import Path
from typing import get_args

from drivetrain.core.errors import UserError
from drivetrain.core.machine import files
from drivetrain.core.step.target_kinds import TargetKind
from drivetrain.core.step.trees import Tree
from drivetrain.core.typed import JsonMapping, JsonObject, fits
from drivetrain.run import directory
from drivetrain.run.result import Result
from drivetrain.saving.content import Malformed, check_state

MOST = 2**31  # limit of a size: of a dimension, of outputs, of a vocabulary
DEEPEST = 20  # levels of a tree of inputs
DTYPES = frozenset(("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64"))
NAMES = frozenset(("targets", "shape", "inputs", "images", "outputs", "classes", "dtype", "vocabulary", "normalize"))
Moments = dict[str, list[float]] | None  # mean and std, each with a number per channel or value


def problem(about: JsonMapping) -> str | None:
    """Return the first entry that no run could have written, such as "shape=[-3]"; None without one.

    A run without a description has an empty mapping.
    """
    if not about:
        return None
    if missing := NAMES - about.keys():
        return f"no {min(missing)}"
    names, outputs, inputs = about["classes"], about["outputs"], about["inputs"]
    good = {
        "targets": about["targets"] in (None, *get_args(TargetKind)),
        "shape": (about["shape"] is None) if inputs is not None else _is_shape(about["shape"]),
        "inputs": inputs is None or _is_tree(inputs),
        "call": about.get("call") is None or _is_tree(about["call"]),
        "images": fits(about["images"], str | None),
        "decodes_images": fits(about.get("decodes_images"), bool | None),
        "outputs": _is_size(outputs),
        "classes": names is None or (fits(names, list[str]) and _name_outputs(len(names), outputs, about["targets"])),
        "dtype": about["dtype"] in (None, *DTYPES),
        "vocabulary": about["vocabulary"] is None or _is_size(about["vocabulary"]),
        "normalize": _are_moments(about["normalize"]),
        "files": fits(about.get("files"), dict[str, str] | None),
        "data": fits(about.get("data"), dict[str, object] | None),
        "pixels": _is_range(about.get("pixels")),
        "units": _are_moments(about.get("units")),
    }
    return next((f"{name}={about.get(name)!r:.80}" for name, is_good in good.items() if not is_good), None)


def _name_outputs(names: int, outputs: Tree, targets: object) -> bool:
    """True if there are as many names as outputs.

    A loss may need several outputs for each value, such as quantiles, or one for the blank between items of a sequence.
    """
    several = targets in ("values", None) and names > 0 and _is_size(outputs) and outputs % names == 0
    return names == outputs or several or (targets in ("sequence", None) and outputs == names + 1)


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value < MOST


def _is_shape(value: object) -> bool:
    return isinstance(value, list) and all(_is_size(size) for size in value) and math.prod(value) < MOST


def _is_tree(value: object, deep: int = 0) -> bool:
    """True for the structure of inputs as engine/summary.py writes it."""
    if not isinstance(value, dict) or deep > DEEPEST:
        return False
    if "keys" in value:
        return isinstance(value["keys"], dict) and all(_is_tree(each, deep + 1) for each in value["keys"].values())
    if "items" in value:
        return isinstance(value["items"], list) and all(_is_tree(each, deep + 1) for each in value["items"])
    return _is_shape(value.get("shape")) and value.get("dtype") in DTYPES


def _is_range(value: object) -> bool:
    """True for the range of pixel values as engine/summary.py writes it."""
    if value is None:
        return True
    if not isinstance(value, dict) or value.keys() != {"low", "high", "said"} or not fits(value["said"], bool):
        return False
    return fits([value["low"], value["high"]], list[float]) and -math.inf < value["low"] < value["high"] < math.inf


def _are_moments(value: Mapping[str, list[float]] | None) -> bool:
    if value is None:
        return True
    return fits(value, Moments) and value.keys() == {"mean", "std"} and 0 < len(value["mean"]) == len(value["std"])


OWN = "own_sha256"


def text(content: JsonMapping) -> str:
    """Return the text of a sealed file."""
    own = hashlib.sha256(json.dumps(content).encode()).hexdigest()
    return json.dumps({**content, OWN: own}, indent=2)


def check(written: str, found: Mapping[str, object]) -> None:
    """Raise ValueError if any byte of a sealed file has changed; `found` is its parsed text."""
    if written != text({key: value for key, value in found.items() if key != OWN}):
        raise ValueError("it is damaged: its SHA-256 differs")


FORMAT = 3
FULL = {"model.safetensors", "state.pt"}
PIECES = "pieces.json"  # places of a sharded checkpoint's shards in its files
SHARDED = {PIECES, "state.pt"}
# The keys read from a manifest, with their types.
KINDS: JsonObject = {"sha256": dict[str, str], "bytes": dict[str, int], "about": dict[str, object]}
NUMBER = re.compile(r"0|[1-9][0-9]{0,17}", re.ASCII)  # of an update; int() also reads digits of other scripts


def verify(checkpoint: Path) -> str | None:
    """Return the problem of a checkpoint, or None."""
    try:
        manifest = read(checkpoint)
        hashes: dict[str, str] = manifest["sha256"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"has no readable manifest.json ({error})"
    if manifest.get("format") != FORMAT:
        return f"has format {manifest.get('format')}, this drivetrain reads {FORMAT}"
    if (wrong := problem(manifest["about"])) is not None:
        return f"has a manifest.json with {wrong}, and no run writes that"
    for name, expected in hashes.items():
        if Path(name).name != name:
            return f"names a file outside itself: {name!r}"
        if (wrong := _wrong_with(checkpoint / name, expected, manifest["bytes"].get(name))) is not None:
            return wrong
    return None if any(kind <= set(hashes) for kind in (FULL, SHARDED)) else "is incomplete"


def read(checkpoint: Path) -> JsonObject:
    """Read a checkpoint's manifest. Raises OSError, and ValueError if any byte has changed."""
    written = files.read_text(checkpoint / "manifest.json")
    found = files.parse_json(written)
    if not isinstance(found, dict):
        raise TypeError("it is no mapping")
    if wrong := [name for name, kind in KINDS.items() if not fits(found.get(name), kind)]:
        raise TypeError(f"its {wrong[0]!r} is not one that drivetrain writes")
    check(written, found)
    return found


def write(folder: Path, update: int, about: Mapping[str, object]) -> None:
    """Write the manifest of the files in a folder: their sizes and hashes."""
    names = sorted(file.name for file in folder.iterdir())
    sizes = {name: (folder / name).stat().st_size for name in names}
    hashes = {name: sha256(folder / name) for name in names}
    plain = json.loads(json.dumps(dict(about)))  # as read back
    content = {"format": FORMAT, "update": update, "about": plain, "bytes": sizes, "sha256": hashes}
    files.write_text(folder / "manifest.json", text(content))


def _wrong_with(file: Path, expected: str, size: int | None) -> str | None:
    """Return the problem of one file of a checkpoint, or None."""
    try:
        with files.opened(file, "rb") as opened:
            if size is not None and opened.seek(0, 2) != size:
                return f"has a damaged {file.name} (its length differs)"
            opened.seek(0)
            if hashlib.file_digest(opened, "sha256").hexdigest() != expected:
                return f"has a damaged {file.name} (its SHA-256 differs)"
            if file.suffix == ".pt":
                check_state(opened)
    except FileNotFoundError:
        return f"lacks {file.name}"
    except Malformed as error:
        return f"has a malformed {file.name} ({error})"
    except (OSError, ValueError) as error:  # ValueError: an impossible file name
        return f"has a {file.name} that cannot be read ({getattr(error, 'strerror', None) or error})"
    return None


def about(checkpoint: Path) -> JsonObject:
    """Return a checkpoint's facts about the model, such as input shape and classes."""
    found: JsonObject = read(checkpoint)["about"]
    return found


def check_classes(own: JsonMapping, here: JsonMapping | None) -> None:
    """Raise UserError if data described as `here` has other classes than a model's `own`: numbers would mean other classes."""
    were, are = own.get("classes"), (here or {}).get("classes")
    if were is not None and are is not None and were != are:
        at, (was, now) = next((at, pair) for at, pair in enumerate(zip_longest(were, are)) if pair[0] != pair[1])
        raise UserError(
            f"the data has other classes than in training: class {at} is {'none' if now is None else repr(now)} and was "
            f"{'none' if was is None else repr(was)}: give data with the same {len(were)} classes"
        )


def as_metadata(about: Mapping[str, object]) -> dict[str, str]:
    """Return the facts as file metadata, where all values are texts: JSON under the single key "drivetrain".

    With several keys safetensors would write a random order, and equal runs would write unequal files.
    """
    return {"drivetrain": json.dumps(about)}


def newest_valid(run_dir: Path, below: int | None = None) -> tuple[Path | None, list[str]]:
    """Return the newest valid checkpoint, and one line for each newer invalid one; `below`: before this update."""
    if not directory.is_locked(run_dir):
        recover(run_dir)
    problems: list[str] = []
    for checkpoint in sorted(checkpoints(run_dir), key=lambda p: int(p.name), reverse=True):
        if below is not None and int(checkpoint.name) >= below:
            continue
        problem = verify(checkpoint)
        if problem is None:
            return checkpoint, problems
        problems.append(f"checkpoint {checkpoint} {problem}: passed over")
    return None, problems


def recover(run_dir: Path) -> None:
    """Restore a checkpoint whose replacement at the same update was killed between the two renames."""
    root = run_dir / "checkpoints"
    if root.is_symlink() or not root.is_dir():
        return
    for replaced in root.glob(".replaced-*"):
        name = replaced.name.removeprefix(".replaced-")
        if NUMBER.fullmatch(name) and not replaced.is_symlink() and not (root / name).exists():
            with contextlib.suppress(OSError):  # a read-only directory
                replaced.rename(root / name)


def best_or_newest(run_dir: Path) -> Path:
    """Return the checkpoint of a run's best evaluation if it was kept, else the newest valid one. Raises UserError."""
    result = Result.read(run_dir)
    best = result.judged("best").get("update") if result is not None else None
    for checkpoint in checkpoints(run_dir):
        if int(checkpoint.name) == best and verify(checkpoint) is None:
            return checkpoint
    newest, problems = newest_valid(run_dir)
    if newest is None:
        raise UserError(problems or f"{run_dir} has no checkpoint: it saves nothing (saving=none), or has not come that far")
    return newest


def checkpoints(run_dir: Path) -> list[Path]:
    """Return the checkpoints in a run's directory, unordered and without links."""
    root = run_dir / "checkpoints"
    if root.is_symlink() or not root.is_dir():
        return []
    return [p for p in root.iterdir() if NUMBER.fullmatch(p.name) and p.is_dir() and not p.is_symlink()]


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file's bytes."""
    with files.opened(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
