"""Checkpoints whose files were changed by somebody who can give them the right hashes, verified and restored."""

from __future__ import annotations

import functools
import json
import logging
import pickle
import random
import shutil
import struct
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from bench import small_runs
from bench.fuzz import damage
from bench.fuzz.judged import Example
from bench.small_runs import SmallRun

HOSTILE = [  # pickles by hand: calls, memos, deep and endless structures
    b"cposix\nsystem\n(S'touch PWNED'\ntR.", b"cbuiltins\neval\n(V1\ntR.", b"\x80\x02r\xff\xff\xff\xff.",
    b"(" * 5000 + b"t" * 5000 + b".",
    b"\x80\x02]q\x00h\x00a.", b"\x80\x04\x8d\xff\xff\xff\xff\xff\xff\xff\x7f.", b"\x80\x05\x96\x00\x00\x00\x00\x01\x00\x00\x00.",
    b"\x80\x02}.",
    b"ctorch.storage\nUntypedStorage\n(I1000000000\ntR.", b"ctorch\nSize\n(I-1\ntR.", b"ccollections\nCounter\n(I5\ntR.", b"",
]  # fmt: skip


def examples(place: Path, count: int, seed: int, trained: Mapping[str, SmallRun] | None = None) -> Iterator[Example]:
    """Yield checkpoints of the run on images of `bench.small_runs`, each damaged, with the way that `resume=` restores them."""
    from drivetrain.core.context import BuildContext
    from drivetrain.core.world import World
    from drivetrain.engine.stages import StagedRun
    from drivetrain.launch import launcher

    whole = (trained or small_runs.train_all(place / "trained"))["pictures"].run_dir
    draw = random.Random(seed)
    context = BuildContext(launcher.prepare([*small_runs.RUN, "logger=[]"]).run, World(), place / "run")
    logging.getLogger("drivetrain").setLevel(logging.ERROR)  # each passed over is a warning
    try:
        staged = StagedRun(context, [])
        staged.build()
        restore(whole, staged)
        for number in range(count):
            folder = place / f"case{number}"
            shutil.copytree(whole / "checkpoints", folder / "checkpoints")
            told = [change(draw, folder / "checkpoints" / "4")]
            if draw.random() < 0.3:
                told.append("and the one before: " + change(draw, folder / "checkpoints" / "2"))
            yield Example("; ".join(told), functools.partial(restore, folder, staged), (place, whole), (folder / "checkpoints",))
            damage.remove(folder)
    finally:
        context.on_exit.close()
        logging.getLogger("drivetrain").setLevel(logging.NOTSET)


def restore(folder: Path, staged: Any) -> None:
    """Choose the newest valid checkpoint, and restore it, as a resumed run does. Raises UserError where there is none."""
    from drivetrain.core.errors import UserError
    from drivetrain.launch import kept
    from drivetrain.saving import manifest

    found, problems = manifest.newest_valid(folder)
    if found is None:
        raise UserError(problems or "no checkpoint")
    kept.restore(staged, found)


def change(draw: random.Random, checkpoint: Path) -> str:
    """Damage one file of a checkpoint, as a rule with a manifest that has its hash; return how."""
    name = draw.choice(["state.pt", "state.pt", "state.pt", "model.safetensors", "model.safetensors", "manifest.json"])
    file = checkpoint / name
    kind = draw.random()
    if kind < 0.2:
        how = damage.damage(draw, file)
    elif name == "state.pt":
        how = draw.choice([_values, _values, _pickle, _archive])(draw, file)
    elif name == "model.safetensors":
        how = _header(draw, file)
    else:
        how = _manifest(draw, file)
    if (
        name != "manifest.json"
        and draw.random() < 0.9
        and file.is_file()
        and not file.is_symlink()
        and file.stat().st_size < 10**7
    ):
        sign(checkpoint)
    return f"{name}: {how}"


def sign(checkpoint: Path, about: Mapping[str, Any] | None = None) -> None:
    """Write a checkpoint's manifest anew, with the right hashes; `about` in place of what it says of the model."""
    from drivetrain.saving import manifest

    about = about or manifest.read(checkpoint)["about"]
    (checkpoint / "manifest.json").unlink()
    manifest.write(checkpoint, int(checkpoint.name), about)


def _manifest(draw: random.Random, file: Path) -> str:
    """Change the values of a manifest, which then has the right hash of itself."""
    from drivetrain.core import sealed

    tree = {k: v for k, v in json.loads(file.read_bytes()).items() if k != "own_sha256"}
    changed = damage.of_tree(draw, tree)
    try:
        file.write_text(sealed.text(json.loads(damage.as_json(changed))))
    except (ValueError, TypeError, AttributeError):
        file.write_bytes(damage.as_json(changed))
    return f"values {changed!r:.300}"


def _values(draw: random.Random, file: Path) -> str:
    """Change the values of a state, as torch writes it."""
    import torch

    state = torch.load(file, weights_only=True)
    told = []
    for _ in range(draw.choice([1, 1, 2, 4])):
        paths = list(_paths(state))
        path, value = draw.choice(paths), draw.choice([damage.odd(draw), *_tensors(torch)])
        target = state
        for key in path[:-1]:
            target = target[key]
        with suppress(TypeError, IndexError, KeyError):
            if draw.random() < 0.25:
                del target[path[-1]]
                told.append(f"without {path}")
            else:
                target[path[-1]] = str(value) if isinstance(value, str) else value
                told.append(f"{path}={value!r:.60}")
    torch.save(state, file)
    return f"state {told}"


def _tensors(torch: Any) -> list[Any]:
    return [
        torch.ones(3), torch.ones(0), torch.tensor(float("nan")), torch.ones(2, dtype=torch.int64),
        torch.ones(1, 1, 1, 1).expand(9, 9, 9, 9),
        torch.zeros(3, dtype=torch.complex64), torch.ones(2, 2).to_sparse(), torch.empty(2, device="meta"),
        torch.zeros(10, dtype=torch.uint8),
    ]  # fmt: skip


def _paths(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list | tuple) else ()
    if path:
        yield path
    for key, value in items:
        yield from _paths(value, (*path, key))


def _pickle(draw: random.Random, file: Path) -> str:
    """Change the pickle in a state's archive."""
    with zipfile.ZipFile(file) as archive:
        parts = {entry.filename: archive.read(entry) for entry in archive.infolist()}
    name = next(name for name in parts if name.endswith("data.pkl"))
    parts[name] = (
        draw.choice([*HOSTILE, pickle.dumps(damage.of_tree(draw, {"a": [1]}), 2)])
        if draw.random() < 0.4
        else damage.of_bytes(draw, parts[name])
    )
    with zipfile.ZipFile(file, "w") as archive:
        for part, content in parts.items():
            archive.writestr(part, content)
    return f"pickle {parts[name][:40]!r}"


def _archive(draw: random.Random, file: Path) -> str:
    """Change the members of a state's archive."""
    with zipfile.ZipFile(file) as archive:
        parts = [(entry.filename, archive.read(entry)) for entry in archive.infolist()]
    at = draw.randrange(len(parts))
    name, content = parts[at]
    how = draw.choice(["twice", "gone", "renamed", "shorter", "deflated", "outside"])
    changed = {"twice": [parts[at]] * 2, "gone": [], "renamed": [(name + "x", content)], "shorter": [(name, content[:3])],
               "deflated": [parts[at]], "outside": [("../../" + name, content)]}[how]  # fmt: skip
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED if how == "deflated" else zipfile.ZIP_STORED) as archive:
        for part, data in [*parts[:at], *changed, *parts[at + 1 :]]:
            archive.writestr(part, data)
    return f"{name} {how}"


def _header(draw: random.Random, file: Path) -> str:
    """Change the header of the weights."""
    content = file.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header = damage.as_json(damage.of_tree(draw, json.loads(content[8 : 8 + length])))
    written = draw.choice([len(header)] * 5 + [0, 2**63, 2**64 - 1, length])
    file.write_bytes(struct.pack("<Q", written) + header + content[8 + length :])
    return f"header {header[:200]!r}"
