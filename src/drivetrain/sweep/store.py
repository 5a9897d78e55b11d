"""A sweep's folder: its words and jobs in jobs.json, each job's run in a folder of its own."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from drivetrain.core.errors import BAD_CONFIG, EXIT_OF_STATUS, FAILED, UserError
from drivetrain.core.files import write_json
from drivetrain.core.overrides import format_value, key_of
from drivetrain.launch.job import Job
from drivetrain.launch.job import prepare as prepare_job
from drivetrain.run import directory
from drivetrain.run.result import Result
from drivetrain.saving import manifest
from drivetrain.sweep.grid import SweepJob, prepare_one
from drivetrain.sweep.options import is_how

FINAL = ("completed", "diverged")  # what going on with a sweep keeps: all else is run again
LENGTH = ".max_updates"  # in a job's folder: how many updates it will make, once it is built


@dataclass(eq=False)
class Entry:
    """A job in its folder."""

    number: int
    job: SweepJob
    run_dir: Path
    result: Result | None = None
    code: int = FAILED
    began: float = 0.0
    before: float = 0.0  # the share of its updates that it had made when it was begun here

    def keep(self, ends: Sequence[str] = FINAL) -> bool:
        """Whether it has come to one of these ends already; then it has its result."""
        found = Result.read(self.run_dir)
        if found is None or found.status not in ends:
            return False
        self.result, self.code = found, EXIT_OF_STATUS[found.status]
        return True

    def make_ready(self) -> None:
        """Its folder as its process wants it: with its checkpoints, if it has any, else anew."""
        if manifest.checkpoints(self.run_dir):
            (self.run_dir / "result.json").unlink(missing_ok=True)  # of the part before
        else:
            shutil.rmtree(self.run_dir, ignore_errors=True)
            directory.make(self.run_dir)

    def composed(self) -> Job:
        """The job, to go on from its newest checkpoint if it has one. Raises UserError."""
        if self.job.job is None:
            raise UserError(self.job.problems)
        if not manifest.checkpoints(self.run_dir):
            return self.job.job
        job = prepare_job([f"resume={format_value(str(self.run_dir))}"], self.job.job.composed.config_dirs)
        job.composed.overrides = self.job.words
        return job

    def close(self, code: int | None, why: str, status: str = "failed") -> None:
        """It has ended, with this exit code if that is known; without a result of its own it gets one that says why."""
        found = Result.read(self.run_dir)
        if found is not None:
            self.result = found
            self.code = EXIT_OF_STATUS.get(found.status, FAILED) if code is None else code
            return
        self.code = code if code is not None and code > 0 else FAILED
        self.result = Result(status=status, error=why, overrides=self.job.words, run_dir=self.run_dir)
        self.result.write(self.run_dir)

    def refuse(self) -> None:
        """It is none that could be run."""
        self.make_ready()
        self.close(BAD_CONFIG, "\n".join(self.job.problems))

    def seconds(self) -> float:
        """How long it has been running."""
        return time.monotonic() - self.began


@dataclass
class Sweep:
    """What jobs.json holds: all that is needed to go on."""

    path: Path
    words: list[str]
    config_dirs: list[str]
    entries: list[Entry] = field(default_factory=list)

    def add(self, jobs: Sequence[SweepJob], first: int = 0) -> list[Entry]:
        """Number these jobs from `first` on, and write them down."""
        new = [Entry(n, job, self.path / str(n)) for n, job in enumerate(jobs, first)]
        self.entries += new
        content = [{"job": e.number, "overrides": e.job.words, "cell": e.job.cell} for e in self.entries]
        write_json(self.path / "jobs.json", {"words": self.words, "config_dirs": self.config_dirs, "jobs": content})
        return new


def read(path: Path) -> dict[str, Any]:
    """The content of a sweep's jobs.json. Raises UserError."""
    try:
        content = json.loads((path / "jobs.json").read_text())
        return {"words": content["words"], "config_dirs": content["config_dirs"], "jobs": content["jobs"]}
    except OSError:
        raise UserError(
            f"-m resume={path} is no sweep's folder (no jobs.json in it): name one such as outputs/multirun/<date>/<time>-<id>; "
            "a single run goes on without -m"
        ) from None
    except (ValueError, KeyError, TypeError):
        raise UserError(f"-m resume={path}: its jobs.json is damaged, or of an older drivetrain") from None


def one_job(path: Path, number: int) -> Entry:
    """One job of the sweep in `path`, composed anew, as on another machine."""
    content = read(path)
    (told,) = (job for job in content["jobs"] if job["job"] == number)
    words = told["overrides"][: len(told["overrides"]) - len(told["cell"])]
    return Entry(number, prepare_one((), words, told["cell"], content["config_dirs"]), path / str(number))


def unfinished(root: Path, words: Sequence[str]) -> Iterator[Path]:
    """The folders of sweeps with the same words in which something is left to do and nobody works, the newest first."""
    mine = what(words)
    for file in sorted(root.glob("multirun/*/*/jobs.json"), key=lambda p: p.parent.stat().st_mtime, reverse=True):
        try:
            content = read(file.parent)
        except UserError:
            continue
        if what(content["words"]) == mine and not is_finished(file.parent) and not directory.is_held(file.parent):
            yield file.parent


def is_finished(path: Path) -> bool:
    """Whether a sweep went to its end: then there is a sweep.json, and it says so."""
    try:
        return bool(json.loads((path / "sweep.json").read_text())["finished"])
    except (OSError, ValueError, KeyError, TypeError):
        return False


def what(words: Sequence[str]) -> list[str]:
    """The words without those of the launcher."""
    return [w for w in words if not key_of(w).startswith(("hydra/launcher", "hydra.launcher."))]


def with_beside(path: Path, words: Sequence[str], beside: Sequence[str]) -> list[str]:
    """A sweep's own words with those beside resume=, which only say how it is run. Raises UserError."""
    if wrong := [w for w in beside if not is_how(w)]:
        raise UserError(
            f"-m resume={path} goes on with that sweep's own words, and only hydra/launcher, its knobs and "
            f"hydra.sweeper.n_trials may change: leave out {' '.join(wrong)}"
        )
    keys = {key_of(w) for w in beside}
    # Another launcher has other knobs.
    replaced = "hydra/launcher" in keys
    kept = [w for w in words if key_of(w) not in keys and not (replaced and key_of(w).startswith("hydra.launcher."))]
    return [*kept, *beside]
