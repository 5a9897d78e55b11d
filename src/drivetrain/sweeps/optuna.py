"""`hydra/sweeper=optuna`: a search by optuna's ask-and-tell interface, which proposes each job's values."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drivetrain.core.errors import UserError
from drivetrain.core.overrides import key_of, parse_each
from drivetrain.core.typed import JsonObject
from drivetrain.launch.job import Job
from drivetrain.sweeps.options import Optuna
from drivetrain.sweeps.store import FINAL, Entry, Objective, Sweep, SweepJob, is_sweep_recipe, listed, prepare_one

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override
    from optuna import Study
    from optuna.distributions import BaseDistribution
    from optuna.trial import FrozenTrial

MAX_GRID = 10_000  # combinations with sampler=grid
MAX_VALUES = 100_000  # of a key that is searched over


def read(overrides: Sequence[str]) -> tuple[list[str], JsonObject]:
    """The overrides, and the distribution of each key with several values, which stands bare among them. Raises UserError."""
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
        except ValueError as error:  # optuna's own: a low end above the high one
            problems.append(f"'{text}' is no space to search: {error}")
    if not axes and not problems:
        problems.append(
            "hydra/sweeper=optuna has nothing to search: give a key several values, as optimizer.lr=interval(1e-4,1e-1)"
        )
    keys = [key_of(override) for override in overrides]
    problems += [f"{key} is searched over and also given: leave one of them out" for key in axes if keys.count(key) > 1]
    if problems:
        raise UserError(dict.fromkeys(problems))
    return words, axes


def _distribution(text: str, override: Override) -> BaseDistribution:
    """The values that Hydra's sweep grammar names, as optuna takes them. Raises UserError or ValueError."""
    from hydra.core.override_parser.types import IntervalSweep, RangeSweep
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    value = override.value()
    tags: set[str] = getattr(value, "tags", set())  # a glob has none
    if other := sorted(tags - {"log"}):
        raise UserError(f"'{text}': tag {', '.join(other)} means nothing here: the only tag is log")
    if isinstance(value, IntervalSweep):
        low, high, log = value.start, value.end, "log" in tags
        if not math.isfinite(high - low):  # type: ignore[operator]
            raise UserError(f"'{text}': an interval has two ends")
        kind = IntDistribution if isinstance(low, int) and isinstance(high, int) else FloatDistribution
        return kind(low, high, log=log)  # type: ignore[arg-type]
    if tags:
        raise UserError(f"'{text}': log is for interval(a,b), not for listed values")
    values = listed(text, override, MAX_VALUES)
    if isinstance(value, RangeSweep) and len(values) > 1 and value.step > 0:
        first, step = next(iter(value.range())), value.step
        if isinstance(first, int) and isinstance(step, int):
            return IntDistribution(first, first + (len(values) - 1) * step, step=step)
        return FloatDistribution(float(first), float(first) + (len(values) - 1) * float(step), step=float(step))
    if len(set(values)) < len(values):
        raise UserError(f"'{text}' names a value twice")
    return CategoricalDistribution(values)


def choices(axis: Any) -> list[Any] | None:
    """All the values of a distribution; None where there are infinitely many."""
    if hasattr(axis, "choices"):
        return list(axis.choices)
    return None if axis.step is None else [axis.low + n * axis.step for n in range(round((axis.high - axis.low) / axis.step) + 1)]


def examples(axis: Any) -> list[Any]:
    """Values to validate a config with: all listed ones, or one in the middle of an interval."""
    if hasattr(axis, "choices"):
        return list(axis.choices)
    middle = math.sqrt(axis.low * axis.high) if axis.log else (axis.low + axis.high) / 2
    return [round(middle) if isinstance(axis.low, int) else middle]


def setting(key: str, value: object) -> str:
    """The override that sets this value, with at most six significant digits."""
    return f"{key}={float(f'{value:.6g}') if isinstance(value, float) else value}"


class SearchSpace:
    """The overrides of a search, validated before anything is written."""

    def __init__(self, option: Optuna, overrides: Sequence[str], config_dirs: Sequence[str]) -> None:
        if is_sweep_recipe(overrides):
            raise UserError("hydra/sweeper=optuna: the recipe has a grid of its own: leave out one of the two")
        self.option, self.config_dirs = option, config_dirs
        self.overrides, self.axes = read(overrides)
        self.trials = option.n_trials
        if option.sampler == "grid":
            self.trials = min(self.trials, self._grid_size())
        self.first = self._validate_values()
        self.objective = Objective.of(self.first.run)
        if option.direction is not None:
            self.objective.maximize = option.direction == "maximize"

    def job(self, values: dict[str, object]) -> SweepJob:
        """The job of these values."""
        label = [setting(key, values[key]) for key in self.axes]
        overrides = [setting(o, values[o]) if o in self.axes else o for o in self.overrides]
        return prepare_one(label, overrides, config_dirs=self.config_dirs)

    def _validate_values(self) -> Job:
        """Compose a job for each listed value, with the other axes' first values; return one of them. Raises UserError."""
        tried = {key: examples(axis) for key, axis in self.axes.items()}
        first = {key: values[0] for key, values in tried.items()}
        combinations = [first, *({**first, key: v} for key, values in tried.items() for v in values[1:])]
        jobs = [self.job(values) for values in combinations]
        if problems := [p for job in jobs for p in job.problems]:
            raise UserError(dict.fromkeys(problems))
        assert jobs[0].job is not None
        return jobs[0].job

    def _grid_size(self) -> int:
        lists = {key: choices(axis) for key, axis in self.axes.items()}
        for key, values in lists.items():
            if values is None:
                raise UserError(f"hydra.sweeper.sampler=grid goes through listed values, and {key} has an interval")
        size = math.prod(len(values or []) for values in lists.values())
        if size > MAX_GRID:
            raise UserError(f"hydra.sweeper.sampler=grid: {size:,} combinations are too many: at most {MAX_GRID:,}")
        return size

    def grid(self) -> list[JsonObject]:
        """Every combination, shuffled by the search's seed."""
        values = [choices(axis) or [] for axis in self.axes.values()]
        cells = [dict(zip(self.axes, cell, strict=True)) for cell in itertools.product(*values)]
        random.Random(self.option.seed or 0).shuffle(cells)
        return cells


class Search:
    """Yields a sweep's jobs one by one. The study is stored in the sweep's folder, so that a killed search can be resumed."""

    def __init__(self, space: SearchSpace, sweep: Sweep) -> None:
        self.space, self._sweep, self.total = space, sweep, space.trials
        self._study = _study(space, sweep.path / "study.db")
        self.kept: list[Entry] = []  # ended before this process began
        self._interrupted: list[Entry] = []  # running when the search ended; they resume from their checkpoints
        for trial in self._study.get_trials(deepcopy=False):
            self._restore(trial)

    def _restore(self, trial: FrozenTrial) -> None:
        """Take over a trial of the stored study."""
        if trial.params.keys() != self.space.axes.keys():  # the search was killed while optuna proposed values
            if not trial.state.is_finished():
                self._tell_failed(trial.number)
            return
        (entry,) = self._sweep.add([self.space.job(trial.params)], trial.number)
        if trial.state.is_finished():
            entry.load_result((*FINAL, "failed"))
            self.kept.append(entry)
        elif entry.load_result():  # it ended before optuna was told
            self.tell(entry)
            self.kept.append(entry)
        else:
            self._interrupted.append(entry)

    def ask(self, count: int) -> list[Entry]:
        """The next trials, at most `count`."""
        entries, self._interrupted = self._interrupted[:count], self._interrupted[count:]
        while len(entries) < count and len(self._sweep.entries) < self.total:
            if self.space.option.sampler == "grid":
                self._study.enqueue_trial(self.space.grid()[len(self._sweep.entries)])
            trial = self._study.ask(self.space.axes)
            entries += self._sweep.add([self.space.job(trial.params)], trial.number)
        return entries

    def tell(self, entry: Entry) -> None:
        """Tell optuna a trial's objective, or that it failed or diverged; an interrupted trial may be resumed."""
        from optuna.trial import TrialState

        value = self.space.objective.value(entry.result)
        if value is not None:
            self._study.tell(entry.number, value)
        elif entry.result is not None and entry.result.status == "diverged":
            self._study.tell(entry.number, state=TrialState.PRUNED)
        elif entry.result is not None and entry.result.status != "interrupted":
            self._tell_failed(entry.number)

    def is_finished(self) -> bool:
        """True if every trial has ended."""
        entries = self._sweep.entries
        return len(entries) >= self.total and all(e.result is not None and e.result.status != "interrupted" for e in entries)

    def _tell_failed(self, number: int) -> None:
        from optuna.trial import TrialState

        self._study.tell(number, state=TrialState.FAIL)


def _study(space: SearchSpace, file: Path) -> Study:
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = optuna.create_study(
        storage=f"sqlite:///{file.absolute()}",  # optuna-dashboard can read it
        study_name="search",
        direction=space.objective.direction,
        load_if_exists=True,
    )
    option = space.option
    # A resumed search gets another seed: with the same one it would draw the first part's values again.
    seed = None if option.seed is None else option.seed + len(study.trials)
    if option.sampler == "tpe":
        study.sampler = optuna.samplers.TPESampler(seed=seed, constant_liar=option.n_jobs > 1)
    else:  # a grid enqueues its values
        study.sampler = optuna.samplers.RandomSampler(seed=seed)
    return study
