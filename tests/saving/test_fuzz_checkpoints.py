"""Checkpoints whose files were changed by somebody who gives them the right hashes: restored, or passed over."""

from __future__ import annotations

import json
import logging
import pickle
import random
import shutil
import struct
import zipfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import note

from drivetrain.core.errors import UserError
from drivetrain.core.world import World
from drivetrain.engine.context import RunContext
from drivetrain.engine.staged_run import StagedRun
from drivetrain.launch import launcher, worker
from drivetrain.saving import manifest
from tests.support import odd, small_runs

HOSTILE = [  # pickles by hand: calls, memos, deep and endless structures
    b"cposix\nsystem\n(S'touch PWNED'\ntR.", b"cbuiltins\neval\n(V1\ntR.", b"\x80\x02r\xff\xff\xff\xff.",
    b"(" * 5000 + b"t" * 5000 + b".", b"\x80\x02]q\x00h\x00a.", b"\x80\x04\x8d\xff\xff\xff\xff\xff\xff\xff\x7f.",
    b"\x80\x05\x96\x00\x00\x00\x00\x01\x00\x00\x00.", b"\x80\x02}.", b"ctorch.storage\nUntypedStorage\n(I1000000000\ntR.",
    b"ctorch\nSize\n(I-1\ntR.", b"ccollections\nCounter\n(I5\ntR.", b"",
]  # fmt: skip
TENSORS = [
    torch.ones(3), torch.ones(0), torch.tensor(float("nan")), torch.ones(2, dtype=torch.int64), 
    torch.ones(1, 1, 1, 1).expand(9, 9, 9, 9), torch.zeros(3, dtype=torch.complex64), torch.ones(2, 2).to_sparse(),
    torch.empty(2, device="meta"), torch.zeros(10, dtype=torch.uint8),
]  # fmt: skip


@pytest.fixture
def staged(once: Path, tmp_path: Path) -> Iterator[StagedRun]:
    """A run into which checkpoints are restored. What it says of each that is passed over is left out."""
    context = RunContext(launcher.prepare([*small_runs.RUN, "logger=[]"]).run, World(), tmp_path / "run")
    logging.getLogger("drivetrain").setLevel(logging.ERROR)
    staged = StagedRun(context, [])
    staged.build()
    restore(once, staged)
    yield staged
    context.on_exit.close()
    logging.getLogger("drivetrain").setLevel(logging.INFO)


def restore(folder: Path, staged: Any) -> None:
    """Choose the newest valid checkpoint, and restore it, as a resumed run does. Raises UserError where there is none."""
    found, problems = manifest.newest_valid(folder)
    if found is None:
        raise UserError(problems or "no checkpoint")
    worker.restore(staged, found)


@odd.fuzz
def test_odd_checkpoints_are_restored_or_passed_over(once: Path, staged: StagedRun, tmp_path: Path) -> None:
    checkpoints = tmp_path / "case" / "checkpoints"

    def judged(draw: random.Random) -> str:
        odd.remove(checkpoints)
        shutil.copytree(once / "checkpoints", checkpoints)
        for update in ("4", "2") if draw.randrange(10) < 3 else ("4",):
            note(change(draw, checkpoints / update))
        return odd.outcome(lambda: restore(checkpoints.parent, staged), tmp_path, once, writable=(checkpoints,))

    odd.tried(odd.dice, judged)


def test_a_hostile_state_is_passed_over(once: Path, staged: StagedRun, tmp_path: Path) -> None:
    folder = tmp_path / "case"
    shutil.copytree(once / "checkpoints", folder / "checkpoints")
    for content in HOSTILE:
        for update in ("2", "4"):
            replaced(folder / "checkpoints" / update / "state.pt", content)
            sign(folder / "checkpoints" / update)
        assert odd.outcome(lambda: restore(folder, staged), tmp_path, once, writable=(folder,)) == odd.REFUSED, content[:40]


def change(draw: random.Random, checkpoint: Path) -> str:
    """Damage one file of a checkpoint, as a rule with a manifest that has its hash; return how."""
    name = draw.choice(["state.pt", "state.pt", "state.pt", "model.safetensors", "model.safetensors", "manifest.json"])
    file = checkpoint / name
    ways = {"state.pt": (of_values, of_values, of_pickle, of_archive), "model.safetensors": (of_weights,)}.get(
        name, (of_manifest,)
    )
    how = (odd.damage if draw.randrange(10) < 2 else draw.choice(ways))(draw, file)
    if name != "manifest.json" and draw.randrange(10) and is_ordinary(file):
        sign(checkpoint)
    return f"{checkpoint.name}/{name}: {how}"


def is_ordinary(file: Path) -> bool:
    """True if a file is still one whose hash can be taken."""
    return file.is_file() and not file.is_symlink() and file.stat().st_size < 10**7


def sign(checkpoint: Path, about: Any = None) -> None:
    """Write a checkpoint's manifest anew, with the right hashes; `about` in place of what it says of the model."""
    about = about or manifest.read(checkpoint)["about"]
    (checkpoint / "manifest.json").unlink()
    manifest.write(checkpoint, int(checkpoint.name), about)


def of_manifest(draw: random.Random, file: Path) -> str:
    """Change the values of a manifest, which then has the right hash of itself."""
    changed = odd.of_tree(draw, {k: v for k, v in json.loads(file.read_bytes()).items() if k != "own_sha256"})
    try:
        file.write_text(manifest.text(json.loads(odd.as_json(changed))))
    except (ValueError, TypeError, AttributeError):
        file.write_bytes(odd.as_json(changed))
    return f"values {changed!r:.300}"


def of_values(draw: random.Random, file: Path) -> str:
    """Change the values of a state, as torch writes it."""
    state = torch.load(file, weights_only=True)
    told = []
    for _ in range(draw.choice([1, 1, 2, 4])):
        *way, last = draw.choice(list(_paths(state)))
        value: Any = draw.choice([odd.value(draw), *TENSORS])
        target = state
        for key in way:
            target = target[key]
        told.append(f"{way} {last} {value!r:.60}")
        with suppress(TypeError, IndexError, KeyError):
            if draw.randrange(4):
                target[last] = str(value) if isinstance(value, str) else value
            else:
                del target[last]
    torch.save(state, file)
    return f"state {told}"


def _paths(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list | tuple) else ()
    if path:
        yield path
    for key, value in items:
        yield from _paths(value, (*path, key))


def members(file: Path) -> list[tuple[str, bytes]]:
    """The members of a state's archive."""
    with zipfile.ZipFile(file) as archive:
        return [(entry.filename, archive.read(entry)) for entry in archive.infolist()]


def archive_of(file: Path, parts: list[tuple[str, bytes]], compression: int = zipfile.ZIP_STORED) -> None:
    """Write a state's archive anew."""
    with zipfile.ZipFile(file, "w", compression) as archive:
        for name, content in parts:
            archive.writestr(name, content)


def replaced(file: Path, content: bytes) -> None:
    """Put another pickle into a state's archive."""
    archive_of(file, [(name, content if name.endswith("data.pkl") else data) for name, data in members(file)])


def of_pickle(draw: random.Random, file: Path) -> str:
    """Change the pickle in a state's archive."""
    (content,) = [data for name, data in members(file) if name.endswith("data.pkl")]
    others = [*HOSTILE, pickle.dumps(odd.of_tree(draw, {"a": [1]}), 2)]
    content = draw.choice(others) if draw.randrange(10) < 4 else odd.of_bytes(draw, content)
    replaced(file, content)
    return f"pickle {content[:40]!r}"


def of_archive(draw: random.Random, file: Path) -> str:
    """Change a member of a state's archive."""
    parts = members(file)
    at = draw.randrange(len(parts))
    name, content = parts[at]
    how = draw.choice(["twice", "gone", "renamed", "shorter", "deflated", "outside"])
    parts[at : at + 1] = {
        "twice": [parts[at]] * 2, "gone": [], "renamed": [(name + "x", content)], "shorter": [(name, content[:3])],
        "deflated": [parts[at]], "outside": [("../../" + name, content)],
    }[how]  # fmt: skip
    archive_of(file, parts, zipfile.ZIP_DEFLATED if how == "deflated" else zipfile.ZIP_STORED)
    return f"{name} {how}"


def of_weights(draw: random.Random, file: Path) -> str:
    """Change the header of the weights."""
    content = file.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header = odd.as_json(odd.of_tree(draw, json.loads(content[8 : 8 + length])))
    written = draw.choice([len(header)] * 5 + [0, 2**63, 2**64 - 1, length])
    file.write_bytes(struct.pack("<Q", written) + header + content[8 + length :])
    return f"header {header[:200]!r}"
