"""`hydra/sweeper=optuna`: optuna proposes each job's values and is told what became of it (its ask-and-tell)."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from drivetrain.core.errors import UserError
from drivetrain.core.option import RunSpec
from drivetrain.sweep import search_space
from drivetrain.sweep.grid import SweepJob, is_sweep_recipe, prepare_one
from drivetrain.sweep.objective import Objective
from drivetrain.sweep.options import Optuna
from drivetrain.sweep.search_space import Axis
from drivetrain.sweep.store import FINAL, Entry, Sweep

MOST_GRID = 10_000  # combinations that sampler=grid is given


class Space:
    """The words of a search, checked, before anything is written."""

    def __init__(self, option: Optuna, words: Sequence[str], config_dirs: Sequence[str]) -> None:
        if is_sweep_recipe(words):
            raise UserError("hydra/sweeper=optuna: the recipe has a grid of its own: leave out one of the two")
        self.option, self.config_dirs = option, config_dirs
        self.words = search_space.read(words)
        self.axes = [a for a in self.words if isinstance(a, Axis)]
        self.trials = option.n_trials
        if option.sampler == "grid":
            self.trials = min(self.trials, self._grid_size())
        self.run = self._probe()
        self.objective = Objective.of(self.run)
        if option.direction is not None:
            self.objective.more = option.direction == "maximize"

    def job(self, values: dict[str, Any]) -> SweepJob:
        """The job of these values."""
        label = [a.word(values[a.key]) for a in self.axes]
        words = [w.word(values[w.key]) if isinstance(w, Axis) else w for w in self.words]
        return prepare_one(label, words, config_dirs=self.config_dirs)

    def _probe(self) -> RunSpec:
        """Every value that is named, tried once with the others' first: a wrong one is told now. Raises UserError."""
        examples = {a.key: a.examples() for a in self.axes}
        first = {key: values[0] for key, values in examples.items()}
        tried = [first, *({**first, key: v} for key, values in examples.items() for v in values[1:])]
        jobs = [self.job(values) for values in tried]
        if problems := [p for job in jobs for p in job.problems]:
            raise UserError(dict.fromkeys(problems))
        assert jobs[0].job is not None
        return jobs[0].job.run

    def _grid_size(self) -> int:
        size = 1
        for axis in self.axes:
            values = axis.listed()
            if values is None:
                raise UserError(f"hydra.sweeper.sampler=grid goes through values that are listed, and {axis.key} has an interval")
            size *= len(values)
        if size > MOST_GRID:
            raise UserError(f"hydra.sweeper.sampler=grid: {size:,} combinations are too many: at most {MOST_GRID:,}")
        return size

    def grid(self) -> list[dict[str, Any]]:
        """Every combination, in an order that favours none."""
        values = [axis.listed() or [] for axis in self.axes]
        cells = [dict(zip((a.key for a in self.axes), cell, strict=True)) for cell in itertools.product(*values)]
        random.Random(self.option.seed or 0).shuffle(cells)
        return cells


class Search:
    """Where a sweep's jobs come from, one by one. The study lies in the sweep's folder: a search that was killed goes on."""

    def __init__(self, where: Space, sweep: Sweep) -> None:
        self.space, self._sweep, self.total = where, sweep, where.trials
        self._study = _study(where, sweep.path / "study.db")
        self.kept: list[Entry] = []
        self._again: list[Entry] = []  # under way when the search ended: with their values, and their checkpoints
        for trial in self._study.get_trials(deepcopy=False):
            self._take_up(trial)

    def _take_up(self, trial: Any) -> None:
        if set(trial.params) != {a.key for a in self.space.axes}:  # killed as it was asked for
            if not trial.state.is_finished():
                self._tell_failed(trial.number)
            return
        (entry,) = self._sweep.add([self.space.job(trial.params)], trial.number)
        if trial.state.is_finished():
            entry.keep((*FINAL, "failed"))
            self.kept.append(entry)
        elif entry.keep():  # it came to its end, and optuna has not been told
            self.told(entry)
            self.kept.append(entry)
        else:
            self._again.append(entry)

    def take(self, count: int) -> list[Entry]:
        """The next trials, as many as are wanted and left."""
        taken, self._again = self._again[:count], self._again[count:]
        while len(taken) < count and len(self._sweep.entries) < self.total:
            if self.space.option.sampler == "grid":
                self._study.enqueue_trial(self.space.grid()[len(self._sweep.entries)])
            trial = self._study.ask({a.key: a.distribution() for a in self.space.axes})
            taken += self._sweep.add([self.space.job(trial.params)], trial.number)
        return taken

    def told(self, entry: Entry) -> None:
        """What became of a trial: one that failed or diverged is no end. One that was interrupted may go on."""
        from optuna.trial import TrialState

        value = self.space.objective.value(entry.result)
        if value is not None:
            self._study.tell(entry.number, value)
        elif entry.result is not None and entry.result.status == "diverged":
            self._study.tell(entry.number, state=TrialState.PRUNED)
        elif entry.result is not None and entry.result.status != "interrupted":
            self._tell_failed(entry.number)

    def is_finished(self) -> bool:
        """Whether every trial has been told."""
        entries = self._sweep.entries
        return len(entries) >= self.total and all(e.result is not None and e.result.status != "interrupted" for e in entries)

    def _tell_failed(self, number: int) -> None:
        from optuna.trial import TrialState

        self._study.tell(number, state=TrialState.FAIL)


def _study(where: Space, file: Path) -> Any:
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = optuna.create_study(
        storage=f"sqlite:///{file.absolute()}",  # as optuna-dashboard reads it, too
        study_name="search",
        direction="maximize" if where.objective.more else "minimize",
        load_if_exists=True,
    )
    option = where.option
    # Another seed for each part of a search: the same one would draw the first part's values again.
    seed = None if option.seed is None else option.seed + len(study.trials)
    if option.sampler == "tpe":
        study.sampler = optuna.samplers.TPESampler(seed=seed, constant_liar=option.n_jobs > 1)
    else:  # a grid's values are given to it
        study.sampler = optuna.samplers.RandomSampler(seed=seed)
    return study
