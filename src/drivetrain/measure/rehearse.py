"""`drivetrain rehearse`: one of everything that a long run will do, small, with the run's own config, data and code."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

from drivetrain.core.errors import DONE, FAILED, UserError
from drivetrain.core.lazy import torch
from drivetrain.core.machine import process
from drivetrain.core.options.protocols import LogWriter
from drivetrain.core.typed import JsonMapping
from drivetrain.launch.job import Job, prepare_run
from drivetrain.measure import verbs
from drivetrain.run import directory
from drivetrain.saving import checkpoint_io, manifest
from drivetrain.sweeps import launchers, options
from drivetrain.ui import sheet
from drivetrain.ui.output import echo
from drivetrain.ui.progress import Steps
from drivetrain.ui.terminal import duration

if TYPE_CHECKING:
    from drivetrain.engine.trainer import Trainer

GOOD, BAD, SKIPPED = "✔", "✘", "–"
SAVE_EVERY, KILLED_AT, STOPPED_AT = 2, 5, 7  # updates
MOST_UPDATES = 16  # while there was no evaluation yet
MOST_UPDATES_LEFT = 200  # until a stop is agreed
STOP_LIMIT_S = 30.0  # from the signal until the run has saved and ended: what most clusters leave at least
STATE, EVALUATED = ("weights", "state"), "state.progress.evaluated"
READ_SHARE = 0.2  # of the time, for reading samples


@dataclass
class RehearseSettings:
    """The settings of `drivetrain rehearse`."""

    budget: str = "5m"  # no further step begins after it


class Wrong(Exception):
    """A step that fails, and what to set."""


class NotAsked(Exception):
    """A step that this run does not ask for, or that there is no time for."""


@dataclass
class RehearsedRun:
    """A run that is rehearsed: its words, a folder for its small runs, and what the steps found."""

    job: Job
    words: Sequence[str]
    config_dirs: Sequence[str]
    place: Path
    until: float
    rows: list[tuple[str, str, str, float]] = field(default_factory=list)  # mark, step, finding, seconds
    said: list[str] = field(default_factory=list)  # by its processes, on standard error
    seeds: int = 0  # of hashes: each process has another one

    def steps(self) -> Iterator[tuple[str, Callable[[], str]]]:
        """Yield the steps, in order."""
        yield "every sample can be read", self.data
        yield "it fits the device's memory", self.memory
        yield "it trains, evaluates, saves, and stops when told", self.short_run
        yield "another process computes the same bits", self.repeats
        yield "killed and resumed, it computes the same bits", self.resumes
        yield "its ranks compute what one process does", self.one_process
        yield "it resumes on fewer ranks", self.other_ranks
        yield "the disk holds its checkpoints", self.disk
        yield "its checkpoints load and predict", self.predicts
        yield "it can be evaluated", lambda: self.verb("evaluate", str(self.run("whole")))
        yield "it can be exported", lambda: self.verb("export", str(self.run("whole")), str(self.place / "model.pt2"))
        yield "its trackers can be reached", self.trackers

    def run(self, name: str) -> Path:
        """The folder of a small run. Raises NotAsked where it left nothing."""
        folder = self.place / name
        if not (folder / "recipe.yaml").exists():
            raise NotAsked("the small run did not come so far")
        return folder

    def data(self) -> str:
        """Read all samples, or as many as there is time for."""
        seconds = READ_SHARE * max(0.0, self.until - time.monotonic())
        return self._child("data", f"{seconds:.0f}", *self.words)[-1]

    def memory(self) -> str:
        """Forecast the memory of the device, and the time of the run."""
        from drivetrain.measure.forecast import forecast

        try:
            _, stages = forecast.forecast(self.words, self.config_dirs, forecast.ForecastSettings(seconds=10.0, what_if=False))
        except UserError as error:
            raise NotAsked(f"no forecast: {error.problems[0]}") from None
        peak = max(each.peak_bytes.high for each in stages)
        said = f"at most {forecast.size(peak)}, {duration(forecast.whole(stages).value)} in all"
        if not forecast.fits(stages):
            raise Wrong(f"{said}: more than the device has; `drivetrain forecast` says what one more setting would change")
        return said

    def short_run(self) -> str:
        """Train some updates, then SIGTERM."""
        began = process.now()
        lines = self._train("whole", STOPPED_AT, "TERM")
        found = json.loads(lines[-1])
        stopped = found["told"] and process.now() - found["told"]
        if stopped and stopped > STOP_LIMIT_S:
            raise Wrong(f"it ended {stopped:.0f} s after SIGTERM, and clusters leave about {STOP_LIMIT_S:.0f} s: save more often")
        if stopped and found["status"] != "interrupted" and found["updates"] > STOPPED_AT + MOST_UPDATES_LEFT:
            raise Wrong(f"it did not stop at SIGTERM, and went on to update {found['updates']}: something takes the signal away")
        ended = f", and ended {stopped:.1f} s after SIGTERM" if stopped else ""
        return f"{found['updates']} updates in {process.now() - began:.0f} s{ended}"

    def repeats(self) -> str:
        """Train to a kill, with another seed of Python's hashes."""
        self.run("whole")
        self._train("killed", KILLED_AT, "KILL")
        return self._same("killed")

    def resumes(self) -> str:
        """Continue the killed run up to a kill within a save, and further; compare it with the one that was not killed."""
        self._train("killed", STOPPED_AT, "SAVE", resume=True)
        self._train("killed", STOPPED_AT, "TERM", resume=True)
        return self._same("killed")

    def _same(self, name: str) -> str:
        """Compare the newest checkpoint that two runs have of the same update. Raises Wrong where they differ."""
        ours, theirs = ({each.name: each for each in manifest.checkpoints(self.run(of))} for of in (name, "whole"))
        if not (common := [each for each in theirs if each in ours]):
            raise NotAsked(
                "they kept no checkpoint of the same update: the next step compares the end" if theirs else "it saves nothing"
            )
        for update in sorted(common, key=int, reverse=True):
            one, other = (flat(dict(zip(STATE, checkpoint_io.load(of[update]), strict=True))) for of in (ours, theirs))
            if one.get(EVALUATED) == other.get(EVALUATED):  # else a kill came before the evaluation of this update
                break
        if different := [key for key in {**other, **one} if one.get(key) != other.get(key)]:
            raise Wrong(
                f"at update {update} {len(different)} of {len(other)} values differ, such as {different[0]}: something draws or "
                "keeps what no checkpoint has, as a Dataset, a loss or a callback without state_dict, random numbers of the "
                "system, the order of a set. `drivetrain certify` finds the phase"
            )
        return f"bit for bit, at update {update}"

    def ranks(self) -> int:
        """The ranks that are asked for. Raises NotAsked for one."""
        ranks = self.job.run.parallel.ranks() if self.job.run.parallel.distributed else 1
        if ranks < 2:
            raise NotAsked("it has one rank")
        return ranks

    def one_process(self) -> str:
        """Certify the updates of the ranks against those of one process."""
        self.ranks()
        return self.verb("certify", *self.words, "--out", str(self.place / "certify"), "against", "parallel=single")

    def other_ranks(self) -> str:
        """Continue with half of the ranks."""
        ranks = self.ranks()
        shutil.copytree(self.run("whole"), self.place / "fewer")
        self._train("fewer", STOPPED_AT + 2, "TERM", f"parallel.nproc={ranks // 2}", "resume_changed=true", resume=True)
        return f"from {ranks} to {ranks // 2}"

    def disk(self) -> str:
        """Compare the kept checkpoints, and the one that is written before the oldest goes, with the free disk."""
        found = manifest.checkpoints(self.run("whole"))
        if not found:
            raise NotAsked("it saves nothing")
        size = sum(file.stat().st_size for file in found[-1].rglob("*") if file.is_file())
        keep = int(getattr(self.job.run.saving, "keep", 1)) + int(getattr(self.job.run.saving, "keep_recent", None) or 1)
        root = Path(self.job.run.values["output_dir"]).absolute()
        free = shutil.disk_usage(next(place for place in (root, *root.parents) if place.exists())).free
        said = f"{keep} of {size / 2**20:,.1f} MiB, and {free / 2**30:,.1f} GiB are free"
        if keep * size > free:
            raise Wrong(f"{said}: lower saving.keep, make room, or set another output_dir")
        return said

    def predicts(self) -> str:
        """Load the checkpoints, and predict three samples of the test."""
        return self._child("predict", str(self.run("whole")))[-1]

    def verb(self, *words: str) -> str:
        """Run another verb on the small run. Raises Wrong with its error."""
        lines = self._run([*process.command("drivetrain"), *words])
        return next((line for line in reversed(lines) if line.strip()), "")

    def trackers(self) -> str:
        """Look for what the loggers of the small run said."""
        names = [name for name in self.job.run.names("logger") if name != "files"]
        if not names:
            raise NotAsked("it has none")
        if said := [line for line in self.said if line.startswith(tuple(f"logger={name} " for name in names))]:
            raise Wrong(said[0])
        return ", ".join(names)

    def _train(self, name: str, update: int, how: str, *more: str, resume: bool = False) -> list[str]:
        """Train in a new process until it is stopped or killed after an update."""
        folder = self.place / name
        saving = [f"saving.every_updates={SAVE_EVERY}", "saving.keep=4"] if hasattr(self.job.run.saving, "keep") else []
        log = [] if getattr(self.job.run.compile, "updates_per_replay", 1) > 1 else ["log_every=1"]
        start = [f"resume={folder}"] if resume else [*self.words, *saving, *log, f"hydra.run.dir='{folder}'"]
        return self._child("train", str(update), how, *start, *more, killed=how != "TERM")

    def _child(self, *words: str, killed: bool = False) -> list[str]:
        folders = [word for folder in self.config_dirs for word in ("--config-dir", str(folder))]
        return self._run([*process.command("drivetrain.measure.rehearse"), *folders, *words], killed)

    def _run(self, command: Sequence[str], killed: bool = False) -> list[str]:
        """The lines that a command prints. Raises Wrong where it fails."""
        self.seeds += 1
        env = {**os.environ, "PYTHONPATH": process.import_path(), "PYTHONHASHSEED": str(self.seeds)}
        try:
            done = subprocess.run(
                command, env=env, capture_output=True, text=True, errors="replace", check=False, stdin=subprocess.DEVNULL,
                timeout=max(10.0, self.until - time.monotonic()),
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            raise NotAsked("it was not done when the time was over (budget=…)") from None
        self.said += done.stderr.splitlines()
        if done.returncode and not (killed and done.returncode == -signal.SIGKILL):
            errors = [line.removeprefix("error: ") for line in done.stderr.splitlines() if line.startswith("error: ")]
            told = [line for line in done.stdout.splitlines() if line.strip() and not line.startswith("written to ")]
            raise Wrong([f"exit code {done.returncode}", *done.stderr.strip().splitlines(), *told, *errors[:1]][-1])
        return done.stdout.splitlines() or [""]


def flat(value: object, prefix: str = "") -> dict[str, object]:
    """Return a saved state as dotted names → numbers, texts, and of tensors the type, shape and bytes."""
    if isinstance(value, torch.Tensor):
        return {prefix: (str(value.dtype), tuple(value.shape), value.contiguous().flatten().view(torch.uint8).numpy().tobytes())}
    if isinstance(value, Mapping):
        names = {f"{prefix}.{name}".lstrip("."): each for name, each in value.items()}
        return {key: each for name, inner in names.items() for key, each in flat(inner, name).items()}
    if isinstance(value, list | tuple):
        return flat(dict(enumerate(value)), prefix)
    return {prefix: value}


def rehearse(words: Sequence[str], config_dirs: Sequence[str], settings: RehearseSettings) -> tuple[RehearsedRun, sheet.Sheet]:
    """Rehearse a run. Raises UserError for a config that cannot be."""
    if (seconds := verbs.seconds(settings.budget)) is None:
        raise UserError(f"budget={settings.budget} is no time: give one such as 90s, 5m or 1h")
    job = prepare_run([*words], config_dirs)
    with directory.temporary() as folder, Steps() as progress:
        found = RehearsedRun(job, words, config_dirs, folder, time.monotonic() + seconds)
        for step, work in found.steps():
            began = time.monotonic()
            progress(step)
            try:
                if began > found.until:
                    raise NotAsked(f"no time was left (budget={settings.budget})")
                mark, said = GOOD, work()
            except Wrong as error:
                mark, said = BAD, str(error)
            except (NotAsked, UserError, OSError) as error:
                mark, said = SKIPPED if isinstance(error, NotAsked) else BAD, str(error)
            found.rows.append((mark, step, said.replace(str(folder), "…"), time.monotonic() - began))
    wrong = [step for mark, step, *_ in found.rows if mark == BAD]
    answer = f"{len(wrong)} of {len(found.rows)} would fail: {'; '.join(wrong)}" if wrong else "nothing stands in its way"
    table = sheet.Table(
        ["", "step", "found", "took"], [[mark, step, said, duration(took)] for mark, step, said, took in found.rows], "The steps",
        prose=("found",),
    )  # fmt: skip
    return found, sheet.Sheet("Will it survive? – drivetrain rehearse", answer, [table])


def command(argv: Sequence[str], config_dirs: Sequence[str] = ()) -> int:
    """Run `drivetrain rehearse`; its exit code: 0 only if all holds."""
    if any(options.is_launch_setting(word) for word in argv):
        return _submitted(argv, config_dirs)
    settings, words = verbs.split(argv, RehearseSettings)
    found, page = rehearse(words, config_dirs, settings)
    rows = [dict(zip(("mark", "step", "found", "seconds"), row, strict=True)) for row in found.rows]
    verbs.leave(found.job, "rehearse", page, ["rehearse", *argv], {"steps": rows})
    return FAILED if any(mark == BAD for mark, *_ in found.rows) else DONE


def _submitted(argv: Sequence[str], config_dirs: Sequence[str]) -> int:
    """Rehearse where a sweep's launcher starts jobs, on one node; print what it prints. Raises UserError."""
    chosen, words = options.split(argv)
    launcher = chosen.launcher
    if not isinstance(launcher, options.SubmititLocal | options.SubmititSlurm):
        raise UserError(
            "hydra/launcher: a rehearsal runs here, or by submitit_slurm or submitit_local on a node: set one of them"
        )
    if isinstance(launcher, options.SubmititSlurm) and launcher.nodes > 1:
        echo(f"hydra.launcher.nodes={launcher.nodes}: it is rehearsed on one node")
        launcher = replace(launcher, nodes=1)
    launcher = replace(launcher, tasks_per_node=1)  # the rehearsal starts the ranks itself
    job = launchers.executor(launcher, Path("outputs", "rehearse"), "rehearse").submit(command, words, list(config_dirs))
    echo(f"submitted as job {job.job_id}; its output: {job.paths.stdout}")
    try:
        code: int = job.result()
    except Exception as error:  # submitit raises what the job raised, or its own errors
        told = str(error).strip().splitlines() or [type(error).__name__]
        raise UserError(f"the job ended without an answer: {told[-1]}") from None
    echo(job.stdout())
    return code


# --- in a new process ---


class _Stopper:
    """A log writer that signals the run's first process after an update, and after an evaluation where one comes soon."""

    def __init__(self, update: int, number: signal.Signals, main: int, told: Path) -> None:
        self.update, self.number, self.main, self.told = update, number, main, told
        self.evaluated = number == signal.SIGKILL

    def log(self, record: JsonMapping) -> None:
        """Look at the update of a record."""
        self.evaluated = self.evaluated or record["event"] == "evaluate" or record["update"] >= MOST_UPDATES
        if record["event"] == "train" and record["update"] >= self.update and self.evaluated and not self.told.exists():
            self.told.write_text(str(process.now()), encoding="utf-8")
            os.kill(self.main, self.number)

    def log_image(self, name: str, update: int, path: Path) -> None:
        """Show nothing."""

    def close(self, status: str = "completed") -> None:
        """The run ended."""


def _train(update: int, how: str, words: Sequence[str], config_dirs: Sequence[str]) -> None:
    from drivetrain.launch.launcher import launch

    job, main = prepare_run([*words], config_dirs), os.getpid()
    with directory.temporary() as folder:
        told, number = folder / "told", signal.SIGKILL if how == "KILL" else signal.SIGTERM

        def cut(event: str, given: tuple[object, ...]) -> None:
            """Kill the run where a checkpoint's files are written, and it has no name yet."""
            if event == "os.rename" and Path(str(given[1])).parent.name == "checkpoints":
                os.kill(main, signal.SIGKILL)
                os._exit(FAILED)  # a rank in its own process

        def attach(trainer: Trainer) -> None:
            if trainer.parallel.world.rank == 0:
                cast(list[LogWriter], trainer.log.writers).append(_Stopper(update, number, main, told))
            if how == "SAVE":
                sys.addaudithook(cut)

        job.attach = attach
        result = launch(job, quiet=True)
        when = float(told.read_text(encoding="utf-8")) if told.exists() else None
    if result.error and result.status != "interrupted":
        raise UserError(result.error)
    echo(json.dumps({"status": result.status, "updates": result.updates, "told": when}))


def _data(seconds: float, words: Sequence[str], config_dirs: Sequence[str]) -> None:
    from drivetrain.data.base import SPLITS, Data

    run = prepare_run([*words], config_dirs).run
    data, until = Data.of(run).load(torch.device("cpu")), time.monotonic() + seconds
    sources = {"train": data.train, **{f"{split} {name}".strip(): s for split in SPLITS for name, s in data.sets(split).items()}}
    read = total = 0
    for source in sources.values():
        count = len(source)
        total += count
        for first in range(0, count, 64):
            if time.monotonic() > until:
                break
            read += len(chosen := torch.arange(first, min(first + 64, count)))
            source.fetch(chosen)
    echo(f"{read:,} of {total:,} samples were read: there was no time for more" if read < total else f"all {total:,} samples")


def _predict(folder: str) -> None:
    from drivetrain.inference.finished import Choice
    from drivetrain.inference.loaded import load
    from drivetrain.measure.report.samples import samples_of
    from drivetrain.run import reader

    load(Path(folder), (), (), Choice("last"))
    shown = "".join(getattr(each, "html", "") for each in samples_of(reader.read(Path(folder)), 3, 3))
    if found := re.search(r"There are none: ([^<]*)", shown):
        raise UserError(found[1])
    echo("three samples of the test")


def main(argv: Sequence[str]) -> None:
    """Do one step of a rehearsal: a training, a reading of the data, or predictions."""
    folders, words = list[str](), [*argv]
    while words[:1] == ["--config-dir"]:
        folders, words = [*folders, words[1]], words[2:]
    if words[0] == "train":
        _train(int(words[1]), words[2], words[3:], folders)
    elif words[0] == "data":
        _data(float(words[1]), words[2:], folders)
    else:
        _predict(words[1])


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except Exception as error:
        for problem in error.problems if isinstance(error, UserError) else [f"{type(error).__name__}: {error}"]:
            echo(f"error: {problem}", file=sys.stderr)
        sys.exit(FAILED)
