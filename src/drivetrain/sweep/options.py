"""How a sweep is run, in Hydra's own words: hydra/launcher, hydra/sweeper, and their knobs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_type_hints

from drivetrain.config.validate import type_problems
from drivetrain.core.errors import UserError, did_you_mean
from drivetrain.core.option import Count, CountOrZero, Positive, needs_extra
from drivetrain.core.overrides import key_of, single_values


class SweepOption:
    """An option of hydra/launcher or of hydra/sweeper: its fields are its knobs."""

    def check(self) -> Iterator[str]:
        """Why it cannot be on this machine."""
        return iter(())


@dataclass
class Basic(SweepOption):
    """Hydra's default. Launcher: one job after another. Sweeper: every combination."""


@dataclass
class Joblib(SweepOption):
    """Several jobs at a time on this machine; -1: one on each core."""

    n_jobs: Count | Literal[-1] = -1


@dataclass
class SubmititLocal(SweepOption):
    """Each job by submitit on this machine, as it would run in Slurm; `array_parallelism` of them at a time."""

    timeout_min: Count = 60
    gpus_per_node: CountOrZero | None = None  # null: all that there are
    tasks_per_node: Count = 1
    array_parallelism: Count = 1
    setup: list[str] = field(default_factory=list)

    def check(self) -> Iterator[str]:
        yield from needs_extra("submitit", "slurm", "hydra/launcher=submitit_local")


@dataclass
class SubmititSlurm(SweepOption):
    """Each job in Slurm, all of them as one array, of which at most `array_parallelism` run at a time."""

    timeout_min: Count = 60
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    nodes: Count = 1
    tasks_per_node: Count = 1
    gpus_per_node: CountOrZero | None = None
    cpus_per_task: Count | None = None
    mem_gb: Positive | Count | None = None
    array_parallelism: Count = 256
    setup: list[str] = field(default_factory=list)

    def check(self) -> Iterator[str]:
        import shutil

        yield from needs_extra("submitit", "slurm", "hydra/launcher=submitit_slurm")
        if missing := [name for name in ("sbatch", "srun") if shutil.which(name) is None]:
            yield (
                f"hydra/launcher=submitit_slurm: there is no {' and no '.join(missing)} here: start it on a machine of the "
                "cluster, or set hydra/launcher=joblib"
            )


@dataclass
class Optuna(SweepOption):
    """A search: each trial is a job with values that follow from what the trials before it came to."""

    n_trials: Count = 20
    n_jobs: Count = 1  # trials at a time
    sampler: Literal["tpe", "random", "grid"] = "tpe"
    seed: CountOrZero | None = None
    direction: Literal["minimize", "maximize"] | None = None  # null: as the loss's metric says

    def check(self) -> Iterator[str]:
        yield from needs_extra("optuna", "optuna", "hydra/sweeper=optuna")


OPTIONS: dict[str, dict[str, type[SweepOption]]] = {
    "launcher": {"basic": Basic, "joblib": Joblib, "submitit_local": SubmititLocal, "submitit_slurm": SubmititSlurm},
    "sweeper": {"basic": Basic, "optuna": Optuna},
}


@dataclass
class Settings:
    """The launcher and the sweeper."""

    launcher: SweepOption
    sweeper: SweepOption


def is_hydras(word: str) -> bool:
    """Whether a word is Hydra's own and not the run's."""
    return key_of(word).split(".")[0].split("/")[0] == "hydra"


def is_how(word: str) -> bool:
    """Whether a word says how a sweep is run, and not what it is made of: it may be another one when it is gone on with."""
    return key_of(word).startswith(("hydra/launcher", "hydra.launcher.")) or key_of(word) == "hydra.sweeper.n_trials"


def split(words: Sequence[str]) -> tuple[Settings, list[str]]:
    """The settings, and the words that are the run's. Raises UserError with all that is wrong."""
    problems: list[str] = []
    values = _values([w for w in words if is_hydras(w)], problems)
    made = {group: _option(group, values, problems) for group in OPTIONS}
    if isinstance(made["launcher"], Joblib) and isinstance(made["sweeper"], Optuna):
        problems.append(
            "hydra/launcher=joblib beside hydra/sweeper=optuna: hydra.sweeper.n_jobs says how many trials run at a time"
        )
    if problems:
        raise UserError(problems)
    return Settings(**made), [w for w in words if not is_hydras(w)]  # type: ignore[arg-type]


def _values(words: Sequence[str], problems: list[str]) -> dict[str, Any]:
    """Key → value of Hydra's words; those that are no launcher's and no sweeper's are refused."""
    own = []
    for word in words:
        key = key_of(word)
        if key in ("hydra/launcher", "hydra/sweeper") or key.startswith(("hydra.launcher.", "hydra.sweeper.")):
            own.append(word)
        else:
            problems.append(
                f"'{word}': of Hydra's config drivetrain has hydra/launcher and hydra/sweeper alone: "
                "set output_dir=… for the place of runs"
            )
    return single_values(own, "sweep", problems)


def _option(group: str, values: dict[str, Any], problems: list[str]) -> SweepOption | None:
    """The option that is chosen, with its knobs; None where something is wrong with it."""
    known = OPTIONS[group]
    name = str(values.get(f"hydra/{group}", "basic"))
    if name not in known:
        problems.append(f"hydra/{group}={name} is no {group} here: {did_you_mean(name, known)}")
        return None
    place, kind = f"hydra.{group}", known[name]
    given = {key.removeprefix(f"{place}."): value for key, value in values.items() if key.startswith(f"{place}.")}
    hints = get_type_hints(kind, include_extras=True)
    wrong = [_no_knob(group, name, knob, list(hints)) for knob in given if knob not in hints]
    wrong += type_problems(place, {k: (hints[k], v) for k, v in given.items() if k in hints})
    problems += wrong
    if wrong:
        return None
    made = kind(**given)
    problems += made.check()
    return made


def _no_knob(group: str, name: str, knob: str, knobs: list[str]) -> str:
    others = [n for n, kind in OPTIONS[group].items() if knob in get_type_hints(kind)]
    hint = " or ".join(f"hydra/{group}={n}" for n in others) + " has it" if others else did_you_mean(knob, knobs)
    return f"hydra/{group}={name} has no '{knob}' (hydra.{group}.{knob}): {hint}"


def words() -> list[str]:
    """The words there are, for completion."""
    found = []
    for group, kinds in OPTIONS.items():
        found += [f"hydra/{group}={name}" for name in kinds]
        found += sorted({f"hydra.{group}.{knob}=" for kind in kinds.values() for knob in get_type_hints(kind)})
    return found
