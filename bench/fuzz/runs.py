"""Run directories and sweeps whose files were changed, read by `resume=`, `report`, `recipe diff`, `evaluate` and others."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import json
import os
import random
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

from scipy import stats  # noqa: F401 - takes a second, which is not to count as the first case's

from bench import small_runs
from bench.fuzz import checkpoints, damage
from bench.fuzz.commands import run as run_command
from bench.fuzz.judged import Example
from bench.small_runs import SmallRun

CHECKPOINT = "checkpoints/4"
MANIFEST = f"{CHECKPOINT}/manifest.json"
FILES = (
    "config.yaml", "recipe.yaml", "environment.json", "metrics.jsonl", "result.json", "jobs.json", "sweep.json", "table.json",
    "tokenizer.json", "trackers.json", "averages/2.safetensors", MANIFEST,
)  # fmt: skip
KEPT = ("table.json", "tokenizer.json", "averages/2.safetensors")  # a checkpoint has their hashes
OF_RUN = ("resume", "resume", "report", "diff", "evaluate", "auto", "load", "load", "predict", "predict", "trackers", "export")


def examples(place: Path, count: int, seed: int, trained: Mapping[str, SmallRun] | None = None) -> Iterator[Example]:
    """Yield runs with one to three damaged files, each with what reads it. `trained` are the runs of `bench.small_runs`."""
    wholes = trained or small_runs.train_all(place / "trained")
    sweep = wholes["pictures"].moved(make_sweep(place / "sweep", wholes["pictures"].run_dir))
    draw = random.Random(seed)
    for whole in wholes.values():  # imports, and reads that are no effect of the damage
        for reader in dict.fromkeys(OF_RUN):
            _read_once(reader, whole, place / "out")
    _read_once("sweep", sweep, place / "out")
    given = [path.parent for whole in wholes.values() for path in [Path(str(whole.input))] if path.is_file()]
    for number in range(count):
        of_sweep = draw.random() < 0.2
        whole = sweep if of_sweep else draw.choice(list(wholes.values()))
        folder, out = place / f"case{number}", place / f"out{number}"
        shutil.copytree(whole.run_dir, folder)
        out.mkdir()
        names = [name for name in FILES if (folder / name).is_file()]
        chosen = draw.sample(names, draw.randint(1, len(names)) if of_sweep else draw.choice([1, 1, 2, 3]))
        told = [f"{name} {change(draw, folder, name, wholes)}" for name in chosen]
        reader = draw.choice(["sweep", "sweep", "report"]) if of_sweep else draw.choice(OF_RUN)
        keep = {name: damage.beginning(folder / name) for name in chosen}
        readable = (place.parent, whole.run_dir, *given, Path(os.environ["XDG_STATE_HOME"]), Path.cwd())
        read = functools.partial(READERS[reader], whole.moved(folder), out)
        yield Example(f"{reader}: {'; '.join(told)} {keep!r:.1500}", read, readable, (out,))
        damage.remove(folder)
        damage.remove(out)


def _read_once(reader: str, run: SmallRun, out: Path) -> None:
    with contextlib.suppress(BaseException), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        READERS[reader](run, out)


def change(draw: random.Random, folder: Path, name: str, wholes: Mapping[str, SmallRun]) -> str:
    """Damage a file of a run; return how. Half of those that a checkpoint has the hash of have the right one afterwards."""
    if name == MANIFEST and draw.random() < 0.8:
        return _about(draw, folder / CHECKPOINT, wholes)
    how = damage.damage(draw, folder / name)
    if name == "trackers.json" and draw.random() < 0.5:
        return f"{how}, {_sealed(draw, folder / name)}"
    if name in KEPT and draw.random() < 0.5 and _is_ordinary(folder / name):
        return f"{how}, and its hash {_hashed(folder, name)}"
    return how


def _is_ordinary(file: Path) -> bool:
    return file.is_file() and not file.is_symlink() and file.stat().st_size < 10**7


def _about(draw: random.Random, checkpoint: Path, wholes: Mapping[str, SmallRun]) -> str:
    """Describe another model in a manifest: that of another kind of run, or one with a few changed values."""
    if draw.random() < 0.3:
        kind = draw.choice(list(wholes))
        about = json.loads((wholes[kind].run_dir / MANIFEST).read_bytes())["about"]
    else:
        kind = "another"
        about = damage.of_tree(draw, json.loads((checkpoint / "manifest.json").read_bytes())["about"])
    with contextlib.suppress(ValueError, TypeError, AttributeError):
        checkpoints.sign(checkpoint, json.loads(damage.as_json(about)))
    return f"describes {kind}: {about!r:.300}"


def _sealed(draw: random.Random, file: Path) -> str:
    """Write ids of trackers as nobody would, with the right hash."""
    from drivetrain.core import sealed

    ids = damage.of_tree(draw, {"mlflow": "0a1b2c3d", "wandb": "5e6f7a8b"})
    damage.remove(file)
    file.write_text(sealed.text(ids) if isinstance(ids, dict) else json.dumps(str(ids)))
    return f"sealed {ids!r:.300}"


def _hashed(folder: Path, name: str) -> str:
    """Write the hash of a changed file to where the newest checkpoint has it; return the hash."""
    import torch

    from drivetrain.saving import manifest

    found = hashlib.sha256((folder / name).read_bytes()).hexdigest()
    checkpoint = folder / CHECKPOINT
    try:
        about = manifest.about(checkpoint)
    except (OSError, ValueError, TypeError):  # it was damaged before
        return "is nowhere"
    if name.startswith("averages/"):
        state = torch.load(checkpoint / "state.pt", weights_only=True)
        state["ema"]["stored"][Path(name).stem] = found
        torch.save(state, checkpoint / "state.pt")
    else:
        about["files"] = {name: found}
    checkpoints.sign(checkpoint, about)
    return found


def make_sweep(path: Path, whole: Path) -> Path:
    """The folder of a sweep of two jobs, of which one has run."""
    from drivetrain.core.files import write_json
    from drivetrain.sweeps import grid, store

    words = [*small_runs.RUN, "runtime.seed=1,2", f"output_dir={path.parent}"]
    path.mkdir()
    store.Sweep(path, words, []).add(grid.prepare(words, []))
    shutil.copytree(whole, path / "0")
    write_json(path / "sweep.json", {"finished": False})
    return path


def resume(run: SmallRun, _: Path) -> None:
    """`drivetrain train resume=RUN`, until it would start."""
    from drivetrain.launch import launcher

    launcher.prepare([f"resume={run.run_dir}"])


def auto(run: SmallRun, _: Path) -> None:
    """`resume=auto` with the run where new ones go."""
    from drivetrain.launch import launcher

    launcher.prepare([*small_runs.RUN, f"output_dir={run.run_dir.parents[1]}", "resume=auto"])


def resume_sweep(run: SmallRun, _: Path) -> None:
    """`drivetrain train -m resume=SWEEP`, until it would start."""
    from unittest import mock

    from drivetrain.sweeps import driver

    with mock.patch.object(driver, "_run_in"):
        driver.run([f"resume={run.run_dir}"])


def report(run: SmallRun, out: Path) -> None:
    """`drivetrain report`."""
    run_command(["report", str(run.run_dir), f"out={out}"])


def diff(run: SmallRun, out: Path) -> None:
    """`drivetrain recipe diff` of the run and a recipe that ships."""
    run_command(["recipe", "diff", str(run.run_dir), "fast"])


def export(run: SmallRun, out: Path) -> None:
    """`drivetrain recipe export`."""
    run_command(["recipe", "export", str(run.run_dir), str(out / "exported.yaml")])


def evaluate(run: SmallRun, _: Path) -> None:
    """`drivetrain evaluate`, until it reads data."""
    from drivetrain.inference import finished

    finished.find("drivetrain evaluate", run.run_dir).weights()


def load(run: SmallRun, _: Path) -> None:
    """`drivetrain.load`."""
    import drivetrain

    drivetrain.load(run.run_dir)


def predict(run: SmallRun, _: Path) -> None:
    """`drivetrain.load` with an average that is made of files, and a prediction."""
    run.predictions()


def trackers(run: SmallRun, _: Path) -> None:
    """The ids of trackers, as a resumed run takes them."""
    run.trackers()


READERS: dict[str, Callable[[SmallRun, Path], None]] = {
    "resume": resume, "auto": auto, "sweep": resume_sweep, "report": report, "diff": diff, "export": export, "evaluate": evaluate,
    "load": load, "predict": predict, "trackers": trackers,
}  # fmt: skip
