"""Words → a job: composed, checked, and, where one is to be gone on with, the run it belongs to."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from drivetrain.config import compose as composing
from drivetrain.config import validate as check
from drivetrain.config.compose import Composed
from drivetrain.core.errors import UserError
from drivetrain.core.option import RunSpec
from drivetrain.core.overrides import format_value, key_of
from drivetrain.core.paths import add_import_paths
from drivetrain.recipe import reader as recipes
from drivetrain.run import directory, identity
from drivetrain.run.result import Result


@dataclass
class Job:
    """A run that was found good, before it has a directory."""

    composed: Composed
    run: RunSpec
    config_hash: str
    machine_local_keys: set[str]
    run_dir: Path | None = None  # set for a run that goes on
    checkpoint: Path | None = None
    said: list[str] = field(default_factory=list)
    attach: Callable[[Any], None] | None = None  # called with each rank's finished trainer, before it fits


def prepare(
    overrides: Sequence[str],
    config_dirs: Sequence[str] = (),
    cell: recipes.Recipe | None = None,
    of_cell: Sequence[str] = (),
) -> Job:
    """Words → a checked job. Raises UserError with all problems; writes nothing and imports no torch.

    `cell` is one cell of a recipe's sweep, read instead of `recipe=`, and `of_cell` what it sets, as words.
    """
    asked = {key_of(word): word.partition("=")[2] for word in overrides}
    going_on = os.path.expanduser(asked.get("resume", "null").strip("'\""))
    words = [w for w in overrides if key_of(w) != "resume"]
    if going_on in ("null", "", "auto"):
        composed = composing.compose(words, config_dirs, base=cell)
        composed.overrides += of_cell
        composed.notices += _given_twice(words)
        if composed.recipe is not None and set(composed.recipe.sweep) - set(asked):
            raise UserError(
                f"recipe {composed.recipe.name} is a sweep: run it by `python -m src.train recipe={composed.recipe.name}`"
            )
        job = checked(composed)
        return _newest_unfinished(job) if going_on == "auto" else job
    return _resumed(Path(going_on), words, config_dirs)


def _given_twice(words: Sequence[str]) -> list[str]:
    """A key that is given two values, as when a shell expands {a,b}: the last one holds, and that is said."""
    values: dict[str, list[str]] = {}
    for word in words:
        values.setdefault(key_of(word), []).append(word)
    return [f"{key} is given {len(set(given))} times: {given[-1]} holds" for key, given in values.items() if len(set(given)) > 1]


def checked(composed: Composed, own: bool = False) -> Job:
    """The composed config as a job. Raises UserError. `own` is for the recipe of a run, which names its operator's choices."""
    if not own:
        composed.problems += check.recipe_code_problems(composed)
    run = check.validate(composed)
    if not own:
        check.validate_recipe_keys(composed, run)
    machine_local_keys = check.machine_local_keys(run)
    said = composed.notices + [line for part in check.options_of(run) for line in part.advise(run)]
    return Job(composed, run, identity.config_hash(composed, machine_local_keys), machine_local_keys, said=said)


def _resumed(run_dir: Path, words: list[str], config_dirs: Sequence[str]) -> Job:
    """The job of `resume=<run dir>`: the run's own recipe and operator's settings, then the words beside it."""
    if (run_dir / "jobs.json").is_file():
        raise UserError(f"resume={run_dir} is a sweep: say -m before it to go on with what is left of it")
    if not (run_dir / "recipe.yaml").is_file() or not (run_dir / "environment.json").is_file():
        raise UserError(
            f"resume={run_dir} is no run's directory (no recipe.yaml in it): name one such as outputs/<date>/<time>-<id>"
        )
    try:
        facts = json.loads((run_dir / "environment.json").read_text())
    except ValueError:
        raise UserError(f"resume={run_dir}: its environment.json is damaged") from None
    given = {key_of(w) for w in words}
    # What was said of an option goes with it where the words beside choose another.
    mine = {k: v for k, v in facts.get("operator", {}).items() if k not in given and k.partition(".")[0] not in given}
    own = [f"{k}={format_value(v)}" for k, v in mine.items()]
    base = None if "recipe" in given else recipes.read(run_dir / "recipe.yaml")
    dirs = config_dirs or facts.get("config_dirs", [])
    add_import_paths(dirs)
    job = checked(composing.compose([*own, *words], dirs, base=base), own=base is not None)
    job.composed.overrides = words
    different = identity.differences(check.read_config(run_dir / "config.yaml"), job.composed.plain, job.machine_local_keys)
    if different and not job.run.values["resume_changed"]:
        raise UserError(
            [f"resume={run_dir}: the config differs from the run's, and only its length may: {'; '.join(different)}."
             " Say resume_changed=true to go on all the same"]
        )  # fmt: skip
    job.said += [f"resumed with a changed config: {line}" for line in different]
    return _from_newest(job, run_dir)


def _from_newest(job: Job, run_dir: Path) -> Job:
    from drivetrain.saving import manifest

    job.run_dir = run_dir
    job.checkpoint, complaints = manifest.newest_valid(run_dir)
    job.said += complaints
    if job.checkpoint is None:
        job.said.append(f"{run_dir} has no checkpoint that verifies: it starts from the beginning")
    else:
        job.said.append(f"going on from {job.checkpoint}")
    return job


def _newest_unfinished(job: Job) -> Job:
    for run_dir in directory.newest_first(Path(job.run.values["output_dir"])):
        result = Result.read(run_dir)
        if result is not None and result.status in ("completed", "diverged"):
            continue
        try:
            same = json.loads((run_dir / "environment.json").read_text()).get("config_hash") == job.config_hash
        except (OSError, ValueError):
            continue
        if same and not directory.is_held(run_dir):
            return _from_newest(job, run_dir)
    job.said.append("resume=auto: no unfinished run of this config: a new one starts")
    return job
