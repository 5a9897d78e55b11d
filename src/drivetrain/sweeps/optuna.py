"""`hydra/sweeper=optuna`: a search by optuna's ask-and-tell interface, which proposes each job's values."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from drivetrain.core.errors import UserError
from drivetrain.launch.job import Job
from drivetrain.sweeps import search_space
from drivetrain.sweeps.grid import SweepJob, is_sweep_recipe, prepare_one
from drivetrain.sweeps.objective import Objective
from drivetrain.sweeps.options import Optuna
from drivetrain.sweeps.search_space import Axis
from drivetrain.sweeps.store import FINAL, Entry, Sweep

MAX_GRID = 10_000  # combinations with sampler=grid


class SearchSpace:
    """The overrides of a search, validated before anything is written."""

    def __init__(self, option: Optuna, overrides: Sequence[str], config_dirs: Sequence[str]) -> None:
        if is_sweep_recipe(overrides):
            raise UserError("hydra/sweeper=optuna: the recipe has a grid of its own: leave out one of the two")
        self.option, self.config_dirs = option, config_dirs
        self.overrides = search_space.read(overrides)
        self.axes = [a for a in self.overrides if isinstance(a, Axis)]
        self.trials = option.n_trials
        if option.sampler == "grid":
            self.trials = min(self.trials, self._grid_size())
        self.first = self._validate_values()
        self.objective = Objective.of(self.first.run)
        if option.direction is not None:
            self.objective.maximize = option.direction == "maximize"

    def job(self, values: dict[str, Any]) -> SweepJob:
        """The job of these values."""
        label = [a.override(values[a.key]) for a in self.axes]
        overrides = [o.override(values[o.key]) if isinstance(o, Axis) else o for o in self.overrides]
        return prepare_one(label, overrides, config_dirs=self.config_dirs)

    def _validate_values(self) -> Job:
        """Compose a job for each listed value, with the other axes' first values; return one of them. Raises UserError."""
        examples = {a.key: a.examples() for a in self.axes}
        first = {key: values[0] for key, values in examples.items()}
        combinations = [first, *({**first, key: v} for key, values in examples.items() for v in values[1:])]
        jobs = [self.job(values) for values in combinations]
        if problems := [p for job in jobs for p in job.problems]:
            raise UserError(dict.fromkeys(problems))
        assert jobs[0].job is not None
        return jobs[0].job

    def _grid_size(self) -> int:
        lists = {axis.key: axis.listed() for axis in self.axes}
        for key, values in lists.items():
            if values is None:
                raise UserError(f"hydra.sweeper.sampler=grid goes through listed values, and {key} has an interval")
        size = math.prod(len(values or []) for values in lists.values())
        if size > MAX_GRID:
            raise UserError(f"hydra.sweeper.sampler=grid: {size:,} combinations are too many: at most {MAX_GRID:,}")
        return size

    def grid(self) -> list[dict[str, Any]]:
        """Every combination, shuffled by the search's seed."""
        values = [axis.listed() or [] for axis in self.axes]
        cells = [dict(zip((a.key for a in self.axes), cell, strict=True)) for cell in itertools.product(*values)]
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

    def _restore(self, trial: Any) -> None:
        """Take over a trial of the stored study."""
        if set(trial.params) != {a.key for a in self.space.axes}:  # the search was killed while optuna proposed values
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
            trial = self._study.ask({a.key: a.distribution() for a in self.space.axes})
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
        """Whether every trial has ended."""
        entries = self._sweep.entries
        return len(entries) >= self.total and all(e.result is not None and e.result.status != "interrupted" for e in entries)

    def _tell_failed(self, number: int) -> None:
        from optuna.trial import TrialState

        self._study.tell(number, state=TrialState.FAIL)


def _study(space: SearchSpace, file: Path) -> Any:
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
