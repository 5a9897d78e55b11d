"""Runs and sweeps whose files were changed, read by `resume=`, `report`, `recipe diff` and others; and what that found."""

import contextlib
import hashlib
import io
import json
import logging
import os
import pickle
import random
import shutil
import struct
import zipfile
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, note
from hypothesis import strategies as st

import drivetrain
from drivetrain.core.errors import UserError
from drivetrain.core.machine.files import write_json
from drivetrain.core.world import World
from drivetrain.engine.context import RunContext
from drivetrain.engine.staged_run import StagedRun
from drivetrain.inference import finished
from drivetrain.launch import launcher, worker
from drivetrain.run import identity, reader
from drivetrain.saving import manifest
from drivetrain.sweeps import driver, store
from tests.cli.test_fuzz import run as run_command
from tests.support import odd, small_runs
from tests.support.small_runs import SmallRun
from tests.support.to_end import continued

Small = dict[str, SmallRun]
CHECKPOINT = "checkpoints/4"
MANIFEST = f"{CHECKPOINT}/manifest.json"
KEPT = ("table.json", "tokenizer.json", "averages/2.safetensors")  # a checkpoint has their hashes
FILES = (
    "config.yaml", "recipe.yaml", "environment.json", "metrics.jsonl", "result.json", "jobs.json", "sweep.json",
    "trackers.json", MANIFEST, *KEPT,
)  # fmt: skip


def resume_sweep(run: SmallRun, _: Path) -> None:
    """`drivetrain train -m resume=SWEEP`, until it would start."""
    with mock.patch.object(driver, "_run_in"):
        driver.run([f"resume={run.run_dir}"])


# What reads a run, until it would train or read data.
READERS: dict[str, Callable[[SmallRun, Path], object]] = {
    "resume": lambda run, _: launcher.prepare([f"resume={run.run_dir}"]),
    "auto": lambda run, _: launcher.prepare([*small_runs.RUN, f"output_dir={run.run_dir.parents[1]}", "resume=auto"]),
    "report": lambda run, out: run_command(["report", str(run.run_dir), f"out={out}"]),
    "diff": lambda run, _: run_command(["recipe", "diff", str(run.run_dir), "fast"]),
    "export": lambda run, out: run_command(["recipe", "export", str(run.run_dir), str(out / "exported.yaml")]),
    "evaluate": lambda run, _: finished.find("drivetrain evaluate", run.run_dir).weights(),
    "load": lambda run, _: drivetrain.load(run.run_dir),
    "predict": lambda run, _: run.predictions(),  # with an average that is made of files
    "trackers": lambda run, _: run.trackers(),
}


@pytest.fixture
def sweep(pictures: SmallRun, tmp_path: Path) -> SmallRun:
    """The folder of a sweep of two jobs, of which one has run."""
    path = tmp_path / "sweep"
    words = [*small_runs.RUN, "runtime.seed=1,2", f"output_dir={tmp_path}"]
    path.mkdir()
    store.Sweep(path, words, []).add(store.prepare(words, []))
    shutil.copytree(pictures.run_dir, path / "0")
    write_json(path / "sweep.json", {"finished": False})
    return pictures.moved(path)


@odd.fuzz
def test_odd_runs_are_read_or_refused(small: Small, sweep: SmallRun, tmp_path: Path) -> None:
    subjects = [(run, READERS) for run in small.values()] + [(sweep, {"sweep": resume_sweep, "report": READERS["report"]})]
    for run, readers in subjects:  # imports, and reads that are no effect of the damage
        for read in readers.values():
            with contextlib.suppress(BaseException), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
                read(run, tmp_path / "out")
    given = [Path(str(run.input)).parent for run in small.values() if Path(str(run.input)).is_file()]
    folder, out = tmp_path / "runs" / "case", tmp_path / "out"
    of_subject = st.one_of([st.tuples(st.just(run), st.sampled_from(sorted(readers.items()))) for run, readers in subjects])

    def judged(drawn: tuple[tuple[SmallRun, tuple[str, Callable[[SmallRun, Path], object]]], random.Random]) -> str:
        (run, (reader, read)), draw = drawn
        odd.remove(folder)
        odd.remove(out)
        shutil.copytree(run.run_dir, folder)
        out.mkdir()
        names = [name for name in FILES if (folder / name).is_file()]
        note(reader)
        for name in draw.sample(names, draw.choice([1, 1, 2, min(3, len(names))])):
            note(f"{name} {change(draw, folder, name, small)}")
        readable = (tmp_path, run.run_dir, *given, Path(os.environ["XDG_STATE_HOME"]))
        return odd.outcome(lambda: read(run.moved(folder), out), *readable, writable=(out,))

    odd.tried(st.tuples(of_subject, odd.dice), judged)


def change(draw: random.Random, folder: Path, name: str, small: Small) -> str:
    """Damage a file of a run; return how. Half of those that a checkpoint has the hash of have the right one afterwards."""
    if name == MANIFEST and draw.randrange(10) < 8:
        return describe_another(draw, folder / CHECKPOINT, small)
    how = odd.damage(draw, folder / name)
    if draw.randrange(2):
        return how
    if name == "trackers.json":
        ids = odd.of_tree(draw, {"mlflow": "0a1b2c3d", "wandb": "5e6f7a8b"})
        odd.remove(folder / name)
        (folder / name).write_text(manifest.text(ids) if isinstance(ids, dict) else json.dumps(str(ids)))
        return f"sealed {ids!r:.300}"
    if name in KEPT and is_ordinary(folder / name):
        keep_hash(folder, name)
    return f"{how}, and its hash"


def describe_another(draw: random.Random, checkpoint: Path, small: Small) -> str:
    """Describe another model in a manifest: that of another kind of run, or one with a few changed values."""
    if draw.randrange(10) < 3:
        about = json.loads((small[draw.choice(sorted(small))].run_dir / MANIFEST).read_bytes())["about"]
    else:
        about = odd.of_tree(draw, json.loads((checkpoint / "manifest.json").read_bytes())["about"])
    with contextlib.suppress(ValueError, TypeError, AttributeError):
        sign(checkpoint, json.loads(odd.as_json(about)))
    return f"describes {about!r:.300}"


def keep_hash(folder: Path, name: str) -> None:
    """Write the hash of a changed file to where the newest checkpoint has it."""
    found, checkpoint = hashlib.sha256((folder / name).read_bytes()).hexdigest(), folder / CHECKPOINT
    try:
        about = manifest.about(checkpoint)
    except (OSError, ValueError, TypeError):  # it was damaged before
        return
    if name.startswith("averages/"):
        state = torch.load(checkpoint / "state.pt", weights_only=True)
        state["ema"]["stored"][Path(name).stem] = found
        torch.save(state, checkpoint / "state.pt")
    else:
        about["files"] = {name: found}
    sign(checkpoint, about)


# --- what it found ---


@pytest.fixture
def run(once: Path, tmp_path: Path) -> Path:
    return shutil.copytree(once, tmp_path / "run")


def test_a_checkpoint_that_nobody_can_restore_is_told_in_words(run: Path) -> None:
    for update in ("2", "4"):
        torch.save({"nothing": 1}, run / "checkpoints" / update / "state.pt")
        sign(run / "checkpoints" / update)
    result = continued(run, "updates=6", ends="failed")
    assert "checkpoints/4 cannot be restored (KeyError: " in str(result.error)


# --- bits that flip and ends that are lost, in every file of a run: nothing that a resumed run computes changes ---

REJECTED, SAME, FIGURES, EFFECT = "rejected", "no effect", "figures", "effect"


class Whole:
    """A run as it was before any damage, and what readers take from it."""

    def __init__(self, run: SmallRun) -> None:
        self.run = run
        self._config: Any = None
        self.used, self.shown = self.read("")

    def judge(self, file: str, content: bytes) -> str:
        """Damage one file, read the run, and put the file back."""
        path = self.run.run_dir / file
        before = path.read_bytes()
        path.write_bytes(content)
        try:
            if any(manifest.verify(each) is not None for each in manifest.checkpoints(self.run.run_dir)):
                return REJECTED
            used, shown = self.read(file)
        except UserError:
            return REJECTED
        finally:
            path.write_bytes(before)
        return EFFECT if used != self.used else SAME if shown == self.shown else FIGURES

    def read(self, damaged: str) -> tuple[Any, str]:
        """The state that a resumed run and a prediction use, and the text of a report. A damaged checkpoint changes no config."""
        run_dir, of_checkpoint = self.run.run_dir, damaged.startswith("checkpoints/")
        config = self._config
        if config is None or not of_checkpoint:
            job = launcher.prepare([f"resume={run_dir}"])
            config = job.config_hash, str(identity.without_machine_local(job.composed, job.not_compared))
            self._config = self._config or config
        found, _ = manifest.newest_valid(run_dir)
        start = None if found is None else (found.name, [(f.name, manifest.sha256(f)) for f in sorted(found.iterdir())])
        used = (config, start, self.run.trackers(), self.run.predictions())
        return used, "" if of_checkpoint else repr(reader.read(run_dir))


@pytest.fixture(scope="module")
def wholes(small: dict[str, SmallRun], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Whole]:
    place = tmp_path_factory.mktemp("wholes")
    return {kind: Whole(run.moved(shutil.copytree(run.run_dir, place / kind))) for kind, run in small.items()}


@st.composite
def damages(draw: st.DrawFn, wholes: dict[str, Whole]) -> tuple[str, str, bytes]:
    """A kind of run, one of its files, and its bytes with one bit flipped or their end cut off."""
    kind = draw(st.sampled_from(sorted(wholes)))
    run_dir = wholes[kind].run.run_dir
    file = draw(st.sampled_from(sorted(file for file in run_dir.rglob("*") if file.is_file() and file.stat().st_size)))
    content = bytearray(file.read_bytes())
    place = draw(st.integers(0, len(content) - 1))
    if draw(st.integers(0, 4)) == 0:
        return kind, str(file.relative_to(run_dir)), bytes(content[:place])
    content[place] ^= 1 << draw(st.integers(0, 7))
    return kind, str(file.relative_to(run_dir)), bytes(content)


@odd.fuzz
def test_no_damage_changes_what_a_resumed_run_computes(wholes: dict[str, Whole]) -> None:
    @given(damages(wholes))
    def each(damage: tuple[str, str, bytes]) -> None:
        kind, file, content = damage
        outcome = wholes[kind].judge(file, content)
        assert outcome != EFFECT
        assert outcome == REJECTED or not file.startswith("checkpoints/"), "every bit of a checkpoint counts"

    each()


def test_every_bit_of_what_a_run_keeps_beside_its_checkpoints_counts(wholes: dict[str, Whole]) -> None:
    files = {"trackers.json": "pictures", "averages/2.safetensors": "pictures", "table.json": "table", "tokenizer.json": "texts"}
    for name, kind in files.items():
        content = (wholes[kind].run.run_dir / name).read_bytes()
        for place in (0, len(content) // 2, len(content) - 1):
            flipped = content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]
            assert wholes[kind].judge(name, flipped) == REJECTED, name
        assert wholes[kind].judge(name, content) == SAME, name


def test_a_damage_that_is_not_seen_is_an_effect(wholes: dict[str, Whole], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("drivetrain.saving.manifest.verify", lambda checkpoint: None)
    file = wholes["pictures"].run.run_dir / "checkpoints/4/state.pt"
    content = file.read_bytes()
    flipped = bytes([*content[: len(content) // 2], content[len(content) // 2] ^ 1, *content[len(content) // 2 + 1 :]])
    assert wholes["pictures"].judge("checkpoints/4/state.pt", flipped) == EFFECT


# --- checkpoints whose files were changed by somebody who gives them the right hashes: restored, or passed over ---


HOSTILE = [  # pickles by hand: calls, memos, deep and endless structures
    b"cposix\nsystem\n(S'touch PWNED'\ntR.", b"cbuiltins\neval\n(V1\ntR.", b"\x80\x02r\xff\xff\xff\xff.",
    b"(" * 5000 + b"t" * 5000 + b".", b"\x80\x02]q\x00h\x00a.", b"\x80\x04\x8d\xff\xff\xff\xff\xff\xff\xff\x7f.",
    b"\x80\x02" + b"(" * 10**5, b"\x80\x04\x8c\x02os\x8c\x06system\x93.", b"\x80\x02}q\x00(",
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
            note(change_checkpoint(draw, checkpoints / update))
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


def change_checkpoint(draw: random.Random, checkpoint: Path) -> str:
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
