"""Run directories and sweeps whose files were changed, read by `resume=`, `report`, `recipe diff`, `evaluate` and others."""

from __future__ import annotations

import contextlib
import functools
import io
import os
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

from scipy import stats  # noqa: F401 - takes a second, which is not to count as the first case's

from bench import flips
from bench.fuzz import damage
from bench.fuzz.commands import run as run_command
from bench.fuzz.judged import Example

FILES = ("config.yaml", "recipe.yaml", "environment.json", "metrics.jsonl", "result.json", "jobs.json", "sweep.json")
SWEPT = ("jobs.json", "sweep.json")
OF_RUN = ("resume", "resume", "report", "diff", "evaluate", "auto", "load", "export")


def examples(place: Path, count: int, seed: int, trained: Path | None = None) -> Iterator[Example]:
    """Yield runs with one to three damaged files, each with what reads it. `trained` is a run of `bench.flips`."""
    whole = trained or flips.train(place / "trained")
    sweep = make_sweep(place / "sweep", whole)
    draw = random.Random(seed)
    for reader in (*dict.fromkeys(OF_RUN), "sweep"):  # imports, and reads that are no effect of the damage
        with contextlib.suppress(BaseException), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            READERS[reader](sweep if reader == "sweep" else whole, place / "out")
    for number in range(count):
        of_sweep = draw.random() < 0.2
        folder = place / f"case{number}"
        shutil.copytree(sweep if of_sweep else whole, folder)
        names = [name for name in FILES if (folder / name).is_file()]
        chosen = (
            draw.sample(names, draw.choice([1, 1, 2, 3])) if not of_sweep else draw.sample(names, draw.randint(1, len(names)))
        )
        told = [f"{name} {damage.damage(draw, folder / name)}" for name in chosen]
        reader = draw.choice(["sweep", "sweep", "report"]) if of_sweep else draw.choice(OF_RUN)
        out = place / f"out{number}"
        out.mkdir()
        keep = {name: damage.beginning(folder / name) for name in chosen}
        readable = (place.parent, whole, Path(os.environ["XDG_STATE_HOME"]), Path.cwd())
        yield Example(
            f"{reader}: {'; '.join(told)} {keep!r:.1500}", functools.partial(READERS[reader], folder, out), readable, (out,)
        )
        damage.remove(folder)
        damage.remove(out)


def make_sweep(path: Path, whole: Path) -> Path:
    """The folder of a sweep of two jobs, of which one has run."""
    from drivetrain.core.files import write_json
    from drivetrain.sweeps import grid, store

    words = [*flips.RUN, "runtime.seed=1,2", f"output_dir={path.parent}"]
    path.mkdir()
    store.Sweep(path, words, []).add(grid.prepare(words, []))
    shutil.copytree(whole, path / "0")
    write_json(path / "sweep.json", {"finished": False})
    return path


def resume(folder: Path, _: Path) -> None:
    """`drivetrain train resume=RUN`, until it would start."""
    from drivetrain.launch import launcher

    launcher.prepare([f"resume={folder}"])


def auto(folder: Path, _: Path) -> None:
    """`resume=auto` with the run where new ones go."""
    from drivetrain.launch import launcher

    launcher.prepare([*flips.RUN, f"output_dir={folder.parents[1]}", "resume=auto"])


def resume_sweep(folder: Path, _: Path) -> None:
    """`drivetrain train -m resume=SWEEP`, until it would start."""
    from unittest import mock

    from drivetrain.sweeps import driver

    with mock.patch.object(driver, "_run_in"):
        driver.run([f"resume={folder}"])


def report(folder: Path, out: Path) -> None:
    """`drivetrain report`."""
    run_command(["report", str(folder), f"out={out}"])


def diff(folder: Path, out: Path) -> None:
    """`drivetrain recipe diff` of the run and a recipe that ships."""
    run_command(["recipe", "diff", str(folder), "fast"])


def export(folder: Path, out: Path) -> None:
    """`drivetrain recipe export`."""
    run_command(["recipe", "export", str(folder), str(out / "exported.yaml")])


def evaluate(folder: Path, _: Path) -> None:
    """`drivetrain evaluate`, until it reads data."""
    from drivetrain.inference import finished

    finished.find("drivetrain evaluate", folder).weights()


def load(folder: Path, _: Path) -> None:
    """`drivetrain.load`."""
    import drivetrain

    drivetrain.load(folder)


READERS: dict[str, Callable[[Path, Path], None]] = {
    "resume": resume, "auto": auto, "sweep": resume_sweep, "report": report, "diff": diff, "export": export, "evaluate": evaluate,
    "load": load,
}  # fmt: skip
