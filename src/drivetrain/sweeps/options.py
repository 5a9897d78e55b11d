"""The options of hydra/launcher and hydra/sweeper for the way a sweep runs, as in Hydra's own config."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from drivetrain.config import schema
from drivetrain.config.hydra_words import HONOURED, HydraSettings, instead, is_hydra_override
from drivetrain.config.hydra_words import split as split_hydra
from drivetrain.core.errors import collecting, did_you_mean, refuse
from drivetrain.core.options.option import Count, CountOrZero, Positive, needs_extra
from drivetrain.core.options.overrides import key_of, single_values


@dataclass
class Basic:
    """Hydra's default. As launcher: one job after another. As sweeper: every combination. A class's fields are its keys."""


@dataclass
class Joblib(Basic):
    """Several jobs at a time on this machine; -1: one on each core."""

    n_jobs: Count | Literal[-1] = -1


@dataclass
class SubmititLocal(Basic):
    """Each job by submitit on this machine, as it would run in Slurm; `array_parallelism` of them at a time."""

    timeout_min: Count = 60
    gpus_per_node: CountOrZero | None = None  # null: all of them
    tasks_per_node: Count = 1
    array_parallelism: Count = 1
    setup: list[str] = field(default_factory=list)


@dataclass
class SubmititSlurm(Basic):
    """All jobs in Slurm, as one array; at most `array_parallelism` run at a time."""

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


@dataclass
class Ray(Basic):
    """Each job as a task of a Ray cluster, which queues them. All machines see the sweep's folder."""

    address: str | None = None  # of a cluster; auto: the running one; null: a local cluster for this sweep alone
    num_cpus: Positive | Count = 1  # resources per job
    num_gpus: Positive | CountOrZero = 0


@dataclass
class Optuna(Basic):
    """A search: optuna proposes each trial's values from the results of the trials before it."""

    n_trials: Count = 20
    n_jobs: Count = 1  # trials at a time
    sampler: Literal["tpe", "random", "grid"] = "tpe"
    seed: CountOrZero | None = None
    direction: Literal["minimize", "maximize"] | None = None  # null: the direction of the loss's metric


LAUNCH_KEYS = ("hydra/launcher", "hydra/sweeper", "hydra.launcher.", "hydra.sweeper.")
OPTIONS: dict[str, dict[str, type[Basic]]] = {
    "launcher": {"basic": Basic, "joblib": Joblib, "submitit_local": SubmititLocal, "submitit_slurm": SubmititSlurm, "ray": Ray},
    "sweeper": {"basic": Basic, "optuna": Optuna},
}
PACKAGES: dict[type[Basic], tuple[str, str]] = {  # and its extra for pip
    SubmititLocal: ("submitit", "slurm"), SubmititSlurm: ("submitit", "slurm"), Ray: ("ray", "ray"), Optuna: ("optuna", "optuna"),
}  # fmt: skip


@dataclass
class SweepSettings:
    """The launcher, the sweeper, and Hydra's other settings."""

    launcher: Basic
    sweeper: Basic
    hydra: HydraSettings = field(default_factory=HydraSettings)


def is_launch_setting(override: str) -> bool:
    """True if an override changes only the way a sweep runs, not its jobs, so that a resume may change it."""
    return key_of(override).startswith(("hydra/launcher", "hydra.launcher.")) or key_of(override) == "hydra.sweeper.n_trials"


def split(overrides: Sequence[str], check: bool = True) -> tuple[SweepSettings, list[str]]:
    """Split off Hydra's settings from the run's overrides. Raises UserError with every problem.

    With `check`, a launcher that cannot run on this machine is one of them.
    """
    problems: list[str] = []
    words = [o for o in overrides if is_hydra_override(o)]
    own = [o for o in words if key_of(o).startswith(LAUNCH_KEYS)]
    values = single_values(own, "sweep", problems)
    hydra, others = HydraSettings(), list[str]()
    with collecting(problems):
        hydra, others = split_hydra([o for o in words if o not in own])
    problems += [instead(o) for o in others]
    if "run.dir" in hydra.given:
        problems.append(
            "hydra.run.dir is for one run: set hydra.sweep.dir=… for a sweep's folder, hydra.sweep.subdir=… for its jobs'"
        )
    made = {group: _option(group, values, problems, check) for group in OPTIONS}
    if isinstance(made["launcher"], Joblib) and isinstance(made["sweeper"], Optuna):
        problems.append(
            "hydra/launcher=joblib with hydra/sweeper=optuna: hydra.sweeper.n_jobs says how many trials run at a time"
        )
    refuse(problems)
    return SweepSettings(**made, hydra=hydra), [o for o in overrides if not is_hydra_override(o)]


def _option(group: str, values: dict[str, object], problems: list[str], check: bool) -> Basic:
    """The chosen option with its keys, or with its defaults if there is a problem."""
    known, place = OPTIONS[group], f"hydra.{group}."
    name = str(values.get(f"hydra/{group}", "basic"))
    if name not in known:
        problems.append(f"hydra/{group}={name} is not a known {group}: {did_you_mean(name, known)}")
        return Basic()
    takes = schema.of(known[name])
    given = {key.removeprefix(place): value for key, value in values.items() if key.startswith(place)}
    wrong = [_unknown_key(group, name, key, list(takes.hints)) for key in given if key not in takes.hints]
    wrong += takes.problems(place[:-1], {key: value for key, value in given.items() if key in takes.hints})
    if check and not wrong:
        problems += _missing(known[name], f"hydra/{group}={name}")
    problems += wrong
    return known[name](**({} if wrong else given))


def _missing(kind: type[Basic], word: str) -> list[str]:
    """The reasons why an option cannot run on this machine."""
    found = list(needs_extra(*PACKAGES[kind], word)) if kind in PACKAGES else []
    if kind is SubmititSlurm and (missing := [name for name in ("sbatch", "srun") if shutil.which(name) is None]):
        found.append(
            f"{word}: there is no {' and no '.join(missing)} here: start it on a machine of the cluster, or set "
            "hydra/launcher=joblib"
        )
    return found


def _unknown_key(group: str, name: str, key: str, keys: list[str]) -> str:
    others = [n for n, kind in OPTIONS[group].items() if key in schema.of(kind).hints]
    hint = " or ".join(f"hydra/{group}={n}" for n in others) + " has it" if others else did_you_mean(key, keys)
    return f"hydra/{group}={name} has no '{key}' (hydra.{group}.{key}): {hint}"


def completions() -> list[str]:
    """Every launcher, sweeper and key, and Hydra's other supported settings, for the shell's completion."""
    found = [f"hydra.{key}=" for key in HONOURED]
    for group, kinds in OPTIONS.items():
        found += [f"hydra/{group}={name}" for name in kinds]
        found += sorted({f"hydra.{group}.{key}=" for kind in kinds.values() for key in schema.of(kind).hints})
    return found
