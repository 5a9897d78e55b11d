"""A sweep's folder: its overrides and jobs in jobs.json, each job's run in its own folder, and sweep.json at the end."""

from __future__ import annotations

import itertools
import logging
import math
import shlex
import shutil
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from drivetrain.config.catalog import options
from drivetrain.config.hydra_words import HydraSettings
from drivetrain.core.errors import BAD_CONFIG, FAILED, UserError, collecting, printable, refuse
from drivetrain.core.machine import home
from drivetrain.core.machine.files import read_json, write_json
from drivetrain.core.machine.paths import add_import_paths
from drivetrain.core.options.overrides import format_value, key_of, parse_each
from drivetrain.core.options.selection import REPEATS, Selection, handed_on, selected
from drivetrain.core.typed import JsonObject, fits
from drivetrain.launch.job import Job
from drivetrain.launch.job import prepare as prepare_job
from drivetrain.recipe import lookup
from drivetrain.recipe.reader import Recipe
from drivetrain.run import directory, environment
from drivetrain.run.result import Result
from drivetrain.saving import manifest
from drivetrain.sweeps.options import is_launch_setting, split

if TYPE_CHECKING:
    from drivetrain.core.options.hydra_parts import parsed

MAX_JOBS = 10_000  # of a sweep
HOPELESS = 50  # impossible jobs in a row


@dataclass
class SweepJob:
    """One combination: its job, or the reason why it cannot run."""

    label: str  # overrides that differ between jobs
    overrides: list[str]
    job: Job | None
    problems: list[str] = field(default_factory=list)
    cell: JsonObject = field(default_factory=dict)  # values from a recipe's `sweep:`, at the end of the overrides too


def prepare(overrides: Sequence[str], config_dirs: Sequence[str] = ()) -> list[SweepJob]:
    """A job for each combination of the values given in Hydra's sweep grammar, and of the grid in a recipe's `sweep:`."""
    axes = _axes(overrides)
    if (count := math.prod(map(len, axes))) > MAX_JOBS:
        raise UserError(f"the sweep has {count:,} combinations, but at most {MAX_JOBS:,} are possible: sweep over fewer values")
    named = cache(lookup.named)  # each recipe is read once
    jobs: list[SweepJob] = []
    for combination in itertools.product(*axes):
        label = [override for override, axis in zip(combination, axes, strict=True) if len(axis) > 1]
        recipe = named(tuple(word for word in combination if key_of(word) == "recipe"))
        grid = (
            recipe.cells(options(config_dirs), given={*map(key_of, combination)}) if recipe and recipe.sweep else [({}, recipe)]
        )
        for cell, of_cell in grid:
            jobs.append(prepare_one(label, combination, cell, config_dirs, of_cell))
            if len(jobs) > MAX_JOBS:
                raise UserError(f"the sweep has more than {MAX_JOBS:,} jobs: sweep over fewer values")
            if len(jobs) == HOPELESS and not any(job.job for job in jobs):  # hundreds more would take minutes
                problems = dict.fromkeys(problem for job in jobs for problem in job.problems)
                raise UserError(
                    [*problems, f"none of the first {HOPELESS} jobs of this sweep can run: the others were not tried"]
                )
    return jobs


def prepare_one(
    label: Sequence[str],
    overrides: Sequence[str],
    cell: dict[str, object] | None = None,
    config_dirs: Sequence[str] = (),
    of_cell: Recipe | None = None,
) -> SweepJob:
    """One job of single-value overrides and this cell of its recipe's `sweep:`.

    `of_cell` is the recipe with the cell's values, if already read.
    """
    cell = cell or {}
    if of_cell is None and (recipe := lookup.named(overrides)) is not None:
        of_cell = recipe.cell(cell, options(config_dirs)) if recipe.sweep else recipe
    extra = [f"{k}={format_value(v)}" for k, v in cell.items()]
    made = SweepJob(" ".join([*label, *extra]), [*overrides, *extra], None, cell=cell)
    with collecting(made.problems):
        made.job = prepare_job(overrides, config_dirs, of_cell, extra)
    return made


def _axes(overrides: Sequence[str]) -> list[list[str]]:
    """Each override expanded into single-value overrides."""
    axes: list[list[str]] = []
    problems: list[str] = []
    for text, override in parse_each(overrides, "key=value, group=option or key=value,value", problems):
        with collecting(problems):
            axes.append(_values(text, override) if override.is_sweep_override() else [text])
    refuse(problems)
    return axes


def _values(text: str, override: parsed.Override) -> list[str]:
    """The single-value overrides of one with several values. Raises UserError."""
    if getattr(override.value(), "shuffle", False):
        raise UserError(f"'{text}': a sweep runs its jobs in the given order, so that it can be resumed: leave out shuffle")
    values = listed(text, override, MAX_JOBS)
    if key_of(text) == "recipe":  # an address needs no quotes
        values = [value.strip("'\"") for value in values]
    return [f"{override.get_key_element()}={value}" for value in values]


def listed(text: str, override: parsed.Override, most: int) -> list[str]:
    """The values that an override lists in Hydra's sweep grammar. Raises UserError without any, or for more than `most`."""
    from drivetrain.core.options.hydra_parts import parsed

    if override.value_type is parsed.ValueType.GLOB_CHOICE_SWEEP:
        raise UserError(f"'{text}': glob() chooses among the options of a group, but {key_of(text)} is not a group")
    if override.value_type is parsed.ValueType.INTERVAL_SWEEP:
        raise UserError(
            f"'{text}': a sweep goes through listed values: write them out as a,b,c or range(1,4), "
            "or search by -m hydra/sweeper=optuna"
        )
    try:
        values = [str(value) for value in itertools.islice(override.sweep_string_iterator(), most + 1)]
    except (ValueError, ArithmeticError) as error:  # Hydra's own: range(1,4,0)
        raise UserError(f"'{text}' is not a sweep: {error}") from None
    if len(values) > most:
        raise UserError(f"'{text}' has more than {most:,} values, the most that are possible: list fewer")
    return values


logger = logging.getLogger(__name__)

FINAL = ("completed", "diverged")  # statuses that a resumed sweep does not run again
# In a sweep's folder, next to its jobs' folders.
OTHERS = ("jobs.json", "sweep.json", "report.html", "report.csv", "study.db", "submitit", ".lock")
LENGTH = ".max_updates"  # file in a job's folder: its number of updates, once it is built


@dataclass(eq=False)
class StoredJob:
    """A job of a sweep with its folder, and its result once it has ended."""

    number: int
    job: SweepJob
    run_dir: Path
    result: Result | None = None
    began: float = 0.0
    before: float = 0.0  # share of its updates made before this process

    def load_result(self, statuses: Sequence[str] = FINAL) -> bool:
        """Read the result from the folder if its status is one of these; return whether it is."""
        found = Result.read(self.run_dir)
        if found is None or found.status not in statuses:
            return False
        self.result = found
        return True

    def prepare_folder(self) -> None:
        """Keep the folder if it has checkpoints to resume from, else recreate it."""
        if manifest.checkpoints(self.run_dir):
            (self.run_dir / "result.json").unlink(missing_ok=True)  # of the earlier part
        else:
            shutil.rmtree(self.run_dir, ignore_errors=True)
            directory.make(self.run_dir)

    def composed(self) -> Job:
        """The job, resumed from its newest checkpoint if any. Raises UserError."""
        if self.job.job is None:
            raise UserError(self.job.problems)
        if not manifest.checkpoints(self.run_dir):
            return self.job.job
        job = prepare_job([f"resume={format_value(str(self.run_dir))}"], self.job.job.composed.config_dirs)
        job.composed.overrides = self.job.overrides
        job.hydra = self.job.job.hydra
        return job

    def close(self, code: int | None, error: str, status: str = "failed") -> None:
        """Record the job's end: its exit code, if known, and its result, or `error` and `status` without one."""
        self.result = Result.read(self.run_dir)
        if self.result is not None:
            # A job killed after writing its result keeps the result's code.
            self.result.code = self.result.code if code is None or code < 0 else code
            return
        self.result = Result(status=status, error=error, overrides=self.job.overrides, run_dir=self.run_dir)
        self.result.code = code if code is not None and code > 0 else FAILED
        try:
            self.run_dir.mkdir(parents=True, exist_ok=True)  # the folder may have been moved
            self.result.write(self.run_dir)
        except OSError as problem:  # a full disk: the other jobs continue
            logger.error("result.json could not be written to %s (%s)", self.run_dir, problem.strerror)

    def refuse(self) -> None:
        """Record that the job's config is invalid."""
        self.prepare_folder()
        self.close(BAD_CONFIG, "\n".join(self.job.problems))

    def seconds(self) -> float:
        """Seconds since the job began."""
        return time.monotonic() - self.began


KINDS: JsonObject = {"overrides": list[str], "config_dirs": list[str], "jobs": list[dict[str, object]]}  # of jobs.json


@dataclass
class Sweep:
    """The content of jobs.json, sufficient to resume a sweep."""

    path: Path
    overrides: list[str]
    config_dirs: list[str]
    hydra: HydraSettings = field(default_factory=HydraSettings)
    entries: list[StoredJob] = field(default_factory=list)

    def add(self, jobs: Sequence[SweepJob], first: int = 0) -> list[StoredJob]:
        """Number these jobs from `first`, and write jobs.json. Raises UserError if two jobs would have one folder."""
        new = [StoredJob(n, job, _folder(self.path, n, job, self.hydra)) for n, job in enumerate(jobs, first)]
        self.entries += new
        folders = {entry.run_dir for entry in self.entries}
        if len(folders) < len(self.entries) or any(above in folders for folder in folders for above in folder.parents):
            raise UserError(
                f"hydra.sweep.subdir={self.hydra.given.get('sweep.subdir')}: two jobs would have one folder, or one inside the "
                "other's: put ${hydra.job.num} or ${hydra.job.override_dirname} into it"
            )
        jobs_json = [{"job": e.number, "overrides": e.job.overrides, "cell": e.job.cell} for e in self.entries]
        content = {"overrides": self.overrides, "config_dirs": self.config_dirs, "jobs": jobs_json}
        write_json(self.path / "jobs.json", {**content, "signature": home.sign(content)})
        return new


def _folder(path: Path, number: int, job: SweepJob, hydra: HydraSettings) -> Path:
    """A job's folder within its sweep's: its number, or hydra.sweep.subdir. The job gets both values."""
    if job.job is None:
        return path / str(number)
    job.job.hydra = replace(hydra, number=number)
    subdir = job.job.hydra.path("sweep.subdir", job.job.composed) or Path(str(number))
    if subdir.is_absolute() or not subdir.parts or ".." in subdir.parts or subdir.parts[0] in OTHERS:
        raise UserError(f"hydra.sweep.subdir={subdir}: a job's folder is inside the sweep's: give it its own name there")
    return path / subdir


class Grid:
    """The jobs of a sweep that are all known in advance and valid."""

    def __init__(self, jobs: Sequence[SweepJob]) -> None:
        self.jobs, self.total = jobs, len(jobs)
        self.kept: list[StoredJob] = []  # ended before this process began
        self._waiting: list[StoredJob] = []

    @property
    def first(self) -> Job:
        """One of the jobs."""
        return next(job.job for job in self.jobs if job.job is not None)

    @property
    def objective(self) -> Selection | None:
        """The metric that ranks the jobs; None if their losses have different ones."""
        found = [selected(job.job.run).across_runs for job in self.jobs if job.job is not None]
        return found[0] if all(each == found[0] for each in found) else None

    def begin(self, sweep: Sweep) -> None:
        """Put the jobs into a sweep's folder, which may already have results."""
        self._sweep, entries = sweep, sweep.add(self.jobs)
        self.kept = [entry for entry in entries if entry.load_result()]
        self._waiting = [entry for entry in entries if entry.result is None]

    def ask(self, count: int) -> list[StoredJob]:
        """The next jobs, at most `count`."""
        entries, self._waiting = self._waiting[:count], self._waiting[count:]
        return entries

    def tell(self, entry: StoredJob) -> None:
        """A job has ended."""

    def is_finished(self) -> bool:
        """True if no job is left to run."""
        return all(e.result is not None and e.result.status in FINAL for e in self._sweep.entries)


def read(path: Path) -> JsonObject:
    """The content of a sweep's jobs.json. Raises UserError."""
    try:
        content = read_json(path / "jobs.json")
        found = {name: content[name] for name in KINDS}
        if not all(fits(found[name], kind) for name, kind in KINDS.items()):
            raise TypeError("values of other types")
        return found
    except OSError:
        raise UserError(
            f"-m resume={path} is no sweep's folder (no jobs.json in it): name one such as outputs/multirun/<date>/<time>-<id>; "
            "a single run is resumed without -m"
        ) from None
    except (ValueError, KeyError, TypeError):
        raise UserError(f"-m resume={path}: its jobs.json is damaged, or of an older drivetrain") from None


def read_own(path: Path) -> JsonObject:
    """The content of a jobs.json by this user's drivetrain, because its words may name code to run. Raises UserError."""
    content = read(path)
    if not home.is_own(content, read_json(path / "jobs.json").get("signature")):
        raise UserError(
            f"-m resume={path} was recorded by another user or machine, or has been changed, and its words may name code to run: "
            f"start it anew with the words that you accept: {printable(shlex.join(map(str, content['overrides'])))}"
        )
    return content


def one_job(path: Path, number: int) -> StoredJob:
    """One job of the sweep in `path`, composed again, for instance on another machine."""
    content = read(path)
    add_import_paths(content["config_dirs"])
    (entry,) = (job for job in content["jobs"] if job["job"] == number)
    overrides = entry["overrides"][: len(entry["overrides"]) - len(entry["cell"])]
    job = prepare_one((), overrides, entry["cell"], content["config_dirs"])
    return StoredJob(number, job, _folder(path, number, job, split(content["overrides"], check=False)[0].hydra))


def unfinished(root: Path, overrides: Sequence[str], named: Path | None = None) -> Iterator[Path]:
    """The folders of unfinished, idle sweeps with the same jobs, the newest first.

    They are below `root`, or the single folder named by hydra.sweep.dir.
    """
    wanted = [o for o in overrides if not is_launch_setting(o)]
    files = root.glob("multirun/*/*/jobs.json") if named is None else named.glob("jobs.json")
    for file in sorted(files, key=lambda p: p.parent.stat().st_mtime, reverse=True):
        path = file.parent
        try:
            content = read(path)
        except UserError:
            continue
        same = [o for o in content["overrides"] if not is_launch_setting(o)] == wanted
        if same and not is_finished(path) and not directory.is_locked(path):
            yield path


def is_finished(path: Path) -> bool:
    """True if the sweep ran all its jobs, by its sweep.json."""
    try:
        return bool(read_json(path / "sweep.json")["finished"])
    except (OSError, ValueError, KeyError, TypeError):
        return False


def merge_overrides(path: Path, overrides: Sequence[str], given: Sequence[str]) -> list[str]:
    """A sweep's overrides with those given next to resume=, which may only change its launch. Raises UserError."""
    if wrong := [o for o in given if not is_launch_setting(o)]:
        raise UserError(
            f"-m resume={path} resumes that sweep with its own overrides, and only hydra/launcher, its keys and "
            f"hydra.sweeper.n_trials may change: leave out {' '.join(wrong)}"
        )
    keys = {key_of(o) for o in given}
    new_launcher = "hydra/launcher" in keys  # it has its own keys
    kept = [o for o in overrides if key_of(o) not in keys and not (new_launcher and key_of(o).startswith("hydra.launcher."))]
    return [*kept, *given]


def place_of(result: Result | None, objective: Selection | None) -> tuple[float, float] | None:
    """The sort key of a run's best evaluation; None if the run did not complete or the objective is not finite."""
    if result is None or objective is None or result.status != "completed":
        return None
    return objective.place(handed_on(result.judged("best")))


def value_of(result: Result | None, objective: Selection | None) -> float | None:
    """The objective at a run's best evaluation; None if the run is not ranked."""
    place = place_of(result, objective)
    return objective.value(place) if objective is not None and place is not None else None


def config_of(entry: StoredJob) -> str:
    """A job's overrides without the seed and the fold."""
    return str([word for word in entry.job.overrides if key_of(word) not in REPEATS])


def means(entries: Sequence[StoredJob], objective: Selection | None) -> dict[str, float]:
    """The mean of the final objective for each config with several jobs; the worst value if a job has none."""
    if objective is None:
        return {}
    found: dict[str, list[float]] = {}
    for entry in entries:
        result, worst = entry.result, -math.inf if objective.maximize else math.inf
        end = handed_on(result.judged("final")) if result is not None and result.status == "completed" else {}
        found.setdefault(config_of(entry), []).append(end.get(objective.name, worst))
    return {config: statistics.mean(values) for config, values in found.items() if len(values) > 1}


def best_of(entries: Sequence[StoredJob], objective: Selection | None) -> StoredJob | None:
    """The best job (the first of a tie), or None if no job is ranked. Configs with several jobs are compared by their means."""
    placed = [(place, entry) for entry in entries if (place := place_of(entry.result, objective)) is not None]
    of, sign = means(entries, objective), -1 if objective is not None and objective.maximize else 1
    return min(placed, key=lambda each: (sign * of.get(config_of(each[1]), 0.0), each[0]))[1] if placed else None


def ties(entries: Sequence[StoredJob], objective: Selection, best: StoredJob) -> str:
    """The jobs that tie with the best one's metric, in words: also in the loss, or decided by the loss."""
    placed = [(entry.number, place_of(entry.result, objective)) for entry in entries if entry is not best]
    first = place_of(best.result, objective)
    equal = [(number, place) for number, place in placed if first is not None and place is not None and place[0] == first[0]]
    same = [str(number) for number, place in equal if place == first]
    others = same or [str(number) for number, _ in equal]
    said = f": job{'s' * (len(others) > 1)} {', '.join(others)} tie{'s' * (len(others) == 1)} with it"
    return f"{said}{'' if same else f' in {objective.name}, and its loss is lower'}" if others else ""


def direction(objective: Selection) -> Literal["minimize", "maximize"]:
    """The direction of an objective, in optuna's words."""
    return "maximize" if objective.maximize else "minimize"


def write_summary(sweep: Sweep, objective: Selection | None, seconds: float, finished: bool) -> None:
    """Write sweep.json: the jobs with their statuses, objectives and times, and the best one."""
    best = best_of(sweep.entries, objective)
    content = {
        "finished": finished,
        "overrides": [environment.redact(o) for o in sweep.overrides],
        "objective": {"metric": objective.name, "direction": direction(objective)} if objective else None,
        "best": best.number if best else None,
        "wall_s": seconds,
        "jobs": [
            {
                "job": entry.number,
                "overrides": [environment.redact(o) for o in entry.job.overrides],
                "status": entry.result.status if entry.result else None,  # null: it has not run, or still runs elsewhere
                "objective": value_of(entry.result, objective),
                "wall_s": entry.result.wall_s if entry.result else None,
            }
            for entry in sweep.entries
        ],
    }
    write_json(sweep.path / "sweep.json", content)
