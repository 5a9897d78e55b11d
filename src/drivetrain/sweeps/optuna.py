"""`hydra/sweeper=optuna`: a search by optuna's ask-and-tell interface."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.trial import FrozenTrial, TrialState

from drivetrain.core.errors import UserError, refuse
from drivetrain.core.options.hydra_parts import parsed
from drivetrain.core.options.overrides import key_of, parse_each
from drivetrain.core.options.selection import selected
from drivetrain.core.typed import JsonObject
from drivetrain.launch.job import Job
from drivetrain.recipe import lookup
from drivetrain.sweeps.options import Optuna
from drivetrain.sweeps.store import FINAL, StoredJob, Sweep, SweepJob, direction, listed, prepare_one, value_of

MAX_GRID = 10_000  # combinations with sampler=grid
MAX_VALUES = 100_000  # of a searched key


def read(overrides: Sequence[str]) -> tuple[list[str], JsonObject]:
    """The overrides, with bare keys for searched ones, and the distribution of each searched key. Raises UserError."""
    words: list[str] = []
    axes: dict[str, BaseDistribution] = {}
    problems: list[str] = []
    for text, override in parse_each(overrides, "key=value, key=a,b or key=interval(a,b)", problems):
        if not override.is_sweep_override():
            words.append(text)
            continue
        key = str(override.get_key_element()).lstrip("+")
        words.append(key)
        try:
            axes[key] = _distribution(text, override)
        except UserError as error:
            problems += error.problems
        except ValueError as error:  # from optuna: a low end above the high one
            problems.append(f"'{text}' is not a search space: {error}")
    if not axes and not problems:
        problems.append(
            "hydra/sweeper=optuna has nothing to search: give a key several values, such as optimizer.lr=interval(1e-4,1e-1)"
        )
    keys = [key_of(override) for override in overrides]
    problems += [f"{key} is both searched over and set: leave one of them out" for key in axes if keys.count(key) > 1]
    refuse(problems)
    return words, axes


def _distribution(text: str, override: parsed.Override) -> BaseDistribution:
    """The values of Hydra's sweep grammar in optuna's form. Raises UserError or ValueError."""
    value = override.value()
    tags: set[str] = getattr(value, "tags", set())  # a glob has none
    if other := sorted(tags - {"log"}):
        raise UserError(f"'{text}': tag {', '.join(other)} is unknown here: the only tag is log")
    if isinstance(value, parsed.IntervalSweep):
        low, high, log = value.start, value.end, "log" in tags
        if not math.isfinite(high - low):  # type: ignore[operator]
            raise UserError(f"'{text}': an interval has two ends")
        kind = IntDistribution if isinstance(low, int) and isinstance(high, int) else FloatDistribution
        return kind(low, high, log=log)  # type: ignore[arg-type]
    if tags:
        raise UserError(f"'{text}': log is for interval(a,b), not for listed values")
    values = listed(text, override, MAX_VALUES)
    if isinstance(value, parsed.RangeSweep) and len(values) > 1 and value.step > 0:
        first, step = next(iter(value.range())), value.step
        if isinstance(first, int) and isinstance(step, int):
            return IntDistribution(first, first + (len(values) - 1) * step, step=step)
        return FloatDistribution(float(first), float(first) + (len(values) - 1) * float(step), step=float(step))
    if len(set(values)) < len(values):
        raise UserError(f"'{text}' names a value twice")
    return CategoricalDistribution(values)


def choices(axis: Any) -> list[Any] | None:
    """All values of a distribution; None if infinitely many."""
    if isinstance(axis, CategoricalDistribution):
        return list(axis.choices)
    return None if axis.step is None else [axis.low + n * axis.step for n in range(round((axis.high - axis.low) / axis.step) + 1)]


def examples(axis: Any) -> list[Any]:
    """Values to validate a config with: all listed ones, or one in the middle of an interval."""
    if isinstance(axis, CategoricalDistribution):
        return list(axis.choices)
    middle = math.sqrt(axis.low * axis.high) if axis.log else (axis.low + axis.high) / 2
    return [round(middle) if isinstance(axis.low, int) else middle]


def setting(key: str, value: object) -> str:
    """The override that sets this value, with at most six significant digits."""
    return f"{key}={float(f'{value:.6g}') if isinstance(value, float) else value}"


class Search:
    """The jobs of a search, one by one. The study is stored in the sweep's folder, so that a killed search can be resumed."""

    def __init__(self, option: Optuna, overrides: Sequence[str], config_dirs: Sequence[str]) -> None:
        """Validate the overrides, before anything is written. Raises UserError."""
        recipe = lookup.named(overrides)
        if recipe is not None and recipe.sweep:
            raise UserError("hydra/sweeper=optuna: the recipe has a grid of its own: leave out one of the two")
        self.option, self.config_dirs = option, config_dirs
        self.overrides, self.axes = read(overrides)
        self.cells = _cells(self.axes, option.seed or 0) if option.sampler == "grid" else []
        self.total = min(option.n_trials, len(self.cells) or option.n_trials)
        self.first = self._valid_job()
        self.objective = selected(self.first.run).across_runs
        if option.direction is not None:
            self.objective = self.objective._replace(better=max if option.direction == "maximize" else min)
        self.kept: list[StoredJob] = []  # ended before this process began
        self._interrupted: list[StoredJob] = []  # running when the search ended; they resume from their checkpoints

    def job(self, values: dict[str, object]) -> SweepJob:
        """The job of these values."""
        label = [setting(key, values[key]) for key in self.axes]
        overrides = [setting(o, values[o]) if o in self.axes else o for o in self.overrides]
        return prepare_one(label, overrides, config_dirs=self.config_dirs)

    def _valid_job(self) -> Job:
        """Compose a job for each listed value, with the other axes' first values; return one of them. Raises UserError."""
        tried = {key: examples(axis) for key, axis in self.axes.items()}
        first = {key: values[0] for key, values in tried.items()}
        jobs = [self.job(values) for values in [first, *({**first, key: v} for key, each in tried.items() for v in each[1:])]]
        if (problems := [p for job in jobs for p in job.problems]) or jobs[0].job is None:
            raise UserError(dict.fromkeys(problems))
        return jobs[0].job

    def begin(self, sweep: Sweep) -> None:
        """Begin the study in a sweep's folder, or take over the trials of an existing one."""
        self._sweep, self._study = sweep, _study(self, sweep.path / "study.db")
        for trial in self._study.get_trials(deepcopy=False):
            if trial.distributions == self.axes:  # otherwise its values do not belong to this search
                self._take_over(trial)
            elif not trial.state.is_finished():  # the search was killed while optuna proposed values
                self._study.tell(trial.number, state=TrialState.FAIL)

    def _take_over(self, trial: FrozenTrial) -> None:
        """Take over a trial of the stored study."""
        (entry,) = self._sweep.add([self.job(trial.params)], trial.number)
        told = trial.state.is_finished()  # otherwise it may have ended before optuna's record
        if not entry.load_result((*FINAL, "failed") if told else FINAL) and not told:
            self._interrupted.append(entry)
            return
        self.kept.append(entry)
        if not told:
            self.tell(entry)

    def ask(self, count: int) -> list[StoredJob]:
        """The next trials, at most `count`."""
        entries, self._interrupted = self._interrupted[:count], self._interrupted[count:]
        while len(entries) < count and len(self._sweep.entries) < self.total:
            if self.cells:
                self._study.enqueue_trial(self.cells[len(self._sweep.entries)])
            trial = self._study.ask(self.axes)
            entries += self._sweep.add([self.job(trial.params)], trial.number)
        return entries

    def tell(self, entry: StoredJob) -> None:
        """Report a trial's objective, failure or divergence to optuna; an interrupted trial may be resumed."""
        value, status = value_of(entry.result, self.objective), entry.result.status if entry.result else "interrupted"
        if value is not None:
            self._study.tell(entry.number, value)
        elif status != "interrupted":
            self._study.tell(entry.number, state=TrialState.PRUNED if status == "diverged" else TrialState.FAIL)

    def is_finished(self) -> bool:
        """True if every trial has ended."""
        entries = self._sweep.entries
        return len(entries) >= self.total and all(e.result is not None and e.result.status != "interrupted" for e in entries)


def _cells(axes: JsonObject, seed: int) -> list[JsonObject]:
    """Every combination of the axes' values, shuffled by the search's seed. Raises UserError."""
    values = {key: choices(axis) for key, axis in axes.items()}
    for key in [key for key, each in values.items() if each is None]:
        raise UserError(f"hydra.sweeper.sampler=grid goes through listed values, but {key} has an interval")
    if (size := math.prod(len(each or []) for each in values.values())) > MAX_GRID:
        raise UserError(f"hydra.sweeper.sampler=grid: {size:,} combinations are too many: at most {MAX_GRID:,}")
    cells = [dict(zip(values, cell, strict=True)) for cell in itertools.product(*(each or [] for each in values.values()))]
    random.Random(seed).shuffle(cells)
    return cells


def _study(search: Search, file: Path) -> optuna.Study:
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    storage, to = f"sqlite:///{file.absolute()}", direction(search.objective)  # optuna-dashboard can read it
    try:
        study = optuna.create_study(storage=storage, study_name="search", direction=to, load_if_exists=True)
        study.get_trials()
    except Exception as error:  # of optuna, SQLAlchemy or SQLite
        raise UserError(f"{file} is not a study of Optuna's ({str(error).splitlines()[0]}): start the search anew") from None
    option = search.option
    # A resumed search gets another seed: the same one would draw the first part's values again.
    seed = None if option.seed is None else option.seed + len(study.trials)
    # A grid enqueues its values.
    tpe, random_ = optuna.samplers.TPESampler, optuna.samplers.RandomSampler
    study.sampler = tpe(seed=seed, constant_liar=option.n_jobs > 1) if option.sampler == "tpe" else random_(seed=seed)
    return study
