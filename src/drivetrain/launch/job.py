"""A job: composed and validated overrides, with the resumed run if any, before any process starts."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from drivetrain.config import compose as composing
from drivetrain.config import hydra_words
from drivetrain.config import validate as check
from drivetrain.config.composed import Composed, flatten
from drivetrain.config.hydra_words import HydraSettings
from drivetrain.config.keys import replaced
from drivetrain.core.errors import UserError, collecting, printable, refuse
from drivetrain.core.machine import files, home
from drivetrain.core.machine.files import MB, read_json
from drivetrain.core.machine.paths import add_import_paths
from drivetrain.core.options.option import RunSpec
from drivetrain.core.options.overrides import format_value, key_of, redact
from drivetrain.core.options.selection import selected
from drivetrain.core.typed import JsonObject, fits
from drivetrain.recipe import reader as recipes
from drivetrain.recipe import write
from drivetrain.recipe.reader import Recipe
from drivetrain.run import directory, environment, identity, recipe_file
from drivetrain.run.result import Result
from drivetrain.saving import manifest

if TYPE_CHECKING:
    from drivetrain.engine.trainer import Trainer

OURS = "# written by drivetrain\n"  # the first line of our hydra.yaml


def _leave_hydras_folder(run_dir: Path, config: str, composed: Composed, settings: HydraSettings, resumed: bool = False) -> None:
    """Write `config`, the unresolved config as YAML, overrides.yaml and hydra.yaml; for a resumed run config.yaml alone.

    Files by Hydra itself, for a surrounding script with @hydra.main, stay unchanged.
    """
    folder = run_dir / ".hydra"
    if folder.is_symlink():  # writing would follow it to another folder
        return
    if (hydras := folder / "hydra.yaml").exists():
        try:
            ours = files.read_text(hydras).startswith(OURS)
        except (OSError, ValueError):
            ours = False
        if not ours:
            return
    folder.mkdir(parents=True, exist_ok=True)
    files.write_text(folder / "config.yaml", config)
    if not resumed:
        files.write_text(folder / "overrides.yaml", write.plain([redact(word) for word in composed.overrides]))
        files.write_text(hydras, OURS + write.block({"hydra": settings.node(composed, run_dir)}))


logger = logging.getLogger(__name__)

# The keys read from environment.json, with their types.
_READ: JsonObject = {"machine_local": dict[str, object] | None, "config_dirs": list[str] | None}


@dataclass
class Job:
    """A validated run before its start."""

    composed: Composed
    run: RunSpec
    config_hash: str
    machine_local_keys: set[str]
    run_dir: Path | None = None  # of a resumed run
    checkpoint: Path | None = None
    notices: list[str] = field(default_factory=list)  # messages for the user at the job's start
    told: bool = False  # a run with another seed has already shown the notices
    shared: Recipe | None = None  # the named recipe; its hash is checked at the job's start
    hydra: HydraSettings = field(default_factory=HydraSettings)
    attach: Callable[[Trainer], None] | None = None  # called with each rank's finished trainer, before it fits
    work: Callable[[Trainer], None] | None = None  # called with each rank's finished trainer, instead of training

    @property
    def not_compared(self) -> set[str]:
        """The keys in which one run may differ: machine-local ones, except those that would make another run."""
        return self.machine_local_keys - check.identifying_keys(self.run)

    def log_notices(self) -> None:
        """Log the notices of composing, even under `--quiet`. Composing is silent: sweeps and measuring compose many jobs."""
        if self.told:
            return
        for line in [*self.notices, *recipe_file.notices(self.shared, self.composed.config_dirs, self.run.values["trust"])]:
            logger.warning("%s", line)

    def make_run_dir(self) -> Path:
        """Create the run's directory: the one named by hydra.run.dir, or a new one. Raises UserError."""
        run_dir = self.new_run_dir()
        refuse(directory.cannot_take(run_dir, "hydra.run.dir"))
        directory.make(run_dir, exist_ok="run.dir" in self.hydra.given)
        return run_dir

    def new_run_dir(self) -> Path:
        """The path of the run's directory, without creating it."""
        return self.hydra.path("run.dir", self.composed) or directory.new(Path(self.run.values["output_dir"]))

    def write_files(self, run_dir: Path) -> None:
        """Write recipe.yaml, config.yaml and environment.json; replace a resumed run's, because its length may differ."""
        local = identity.machine_local_overrides(self.composed, self.machine_local_keys)
        about = environment.describe(self.composed.overrides, self.config_hash, local)
        about["config_dirs"] = [str(Path(folder).resolve()) for folder in self.composed.config_dirs]
        about["recipe"] = self._origin(run_dir)
        about["selection"] = selected(self.run).record()
        about["batch"] = self.run.batch.found
        about["checkpointing"] = self.run.checkpointing.found
        about["runtime"] = self.run.runtime.found
        about["signature"] = home.sign(_of_this_machine(about))
        recipe = recipe_file.to_recipe(self.composed, self.machine_local_keys, check.identifying_keys(self.run))
        files.write_text(run_dir / "recipe.yaml", recipe)
        config = write.plain(self.composed.unresolved)
        files.write_text(run_dir / "config.yaml", config)
        files.write_json(run_dir / "environment.json", about)
        _leave_hydras_folder(run_dir, config, self.composed, self.hydra, resumed=self.run_dir is not None)

    def _origin(self, run_dir: Path) -> object:
        """The source of the recipe, for the record; a resumed run's record already has it."""
        recipe = self.composed.recipe
        if recipe is not None and recipe.source is not None:
            return recipe.source.record()
        if self.run_dir is None:
            return None
        return recorded_environment(run_dir).get("recipe")


def prepare(
    overrides: Sequence[str],
    config_dirs: Sequence[str] = (),
    cell: Recipe | None = None,
    of_cell: Sequence[str] = (),
    hydra: HydraSettings | None = None,
) -> Job:
    """Overrides → a validated job. Raises UserError with all problems; writes nothing and does not import torch.

    `hydra` holds Hydra's settings of a single run; overrides may not contain them. `cell` replaces `recipe=`: a recipe that was
    read already, or one cell of its sweep with `of_cell` as its overrides.
    """
    refuse(
        f"{text!r} is no UTF-8, as a run's files are: give it another name"
        for text in (os.getcwd(), *overrides)
        if _is_bytes(text)
    )
    overrides = directory.with_last(overrides)
    asked = {key_of(word): word.partition("=")[2] for word in overrides}
    resume = os.path.expanduser(asked.get("resume", "null").strip("'\""))
    words = [w for w in overrides if key_of(w) != "resume"]
    if resume not in ("null", "", "auto"):
        if hydra is not None and "run.dir" in hydra.given:
            raise UserError(f"resume={resume} goes on in that run's directory: leave out hydra.run.dir")
        return _resumed(Path(resume), words, config_dirs)
    composed = composing.compose(words, config_dirs, base=cell)
    composed.overrides += of_cell
    composed.notices += _given_twice(words)
    if composed.recipe is not None and set(composed.recipe.sweep) - set(asked):
        raise UserError(f"recipe {composed.recipe.name} is a sweep: run it by `drivetrain train recipe={composed.recipe.name}`")
    job = checked(composed)
    job.hydra = hydra or HydraSettings()
    if resume == "auto":
        job = _newest_unfinished(job)
    named = job.hydra.path("run.dir", composed)
    if job.run_dir is None and named is not None and (wrong := list(directory.cannot_take(named, "hydra.run.dir"))):
        raise UserError(wrong)
    return job


def _is_bytes(text: str) -> bool:
    """True if a text holds bytes that are not UTF-8, as a file name may."""
    return bool(re.search("[\ud800-\udfff]", text))


def prepare_run(words: Sequence[str], config_dirs: Sequence[str] = ()) -> Job:
    """Like `prepare`, for a single run with Hydra's idioms and settings, such as hydra.run.dir."""
    settings, overrides = hydra_words.split(hydra_words.translated(words, config_dirs))
    settings.check_one_run()
    return prepare(overrides, config_dirs, hydra=settings)


def _given_twice(words: Sequence[str]) -> list[str]:
    """A notice for each key with two values, as when a shell expands {a,b}: the last one counts."""
    values: dict[str, list[str]] = {}
    for word in words:
        values.setdefault(key_of(word), []).append(word)
    return [f"{key} is given {len(set(given))} times: {given[-1]} holds" for key, given in values.items() if len(set(given)) > 1]


def checked(composed: Composed, own: bool = False, used: Collection[str] | None = None) -> Job:
    """Validate a composed config as a job. Raises UserError. With `own` its recipe is a run's, with machine-local choices.

    `used` names the groups to validate; None: all.
    """
    run = check.validate(composed, own, used)
    local = check.machine_local_keys(run)
    advice = [
        line for each in _all_runs(run) for part in check.options_of(each) for line in part.returned("advise", part.advise(each))
    ]
    notices = list(dict.fromkeys(composed.notices + advice))
    config_hash = identity.config_hash(composed, local - check.identifying_keys(run))
    return Job(composed, run, config_hash, local, notices=notices, shared=None if own else composed.recipe)


def _all_runs(run: RunSpec) -> list[RunSpec]:
    """The options of a run and of each stage."""
    return [run, *(stage.run for stage in run.stages)]


def device_problems(jobs: Iterable[Job | None]) -> list[str]:
    """The problems of torch, this machine's device or a library that prevent any of these jobs or their stages."""
    problems: list[str] = []
    for run in (run for job in jobs if job is not None for run in _all_runs(job.run)):
        with collecting(problems):
            check.validate_device(run)
    return problems


def _resumed(run_dir: Path, words: list[str], config_dirs: Sequence[str]) -> Job:
    """The job of `resume=<run dir>`: the run's own recipe and machine-local settings, then the other overrides."""
    recorded = recorded_environment(run_dir, "resume=")
    settings, dirs = recorded_settings(recorded, words), config_dirs or recorded.get("config_dirs", [])
    if not is_of_this_user(recorded):
        base = None if any(key_of(w) == "recipe" for w in words) else recipes.read_of_run(run_dir)
        _refuse_settings_of_strangers(run_dir, settings, recorded, composing.compose(words, config_dirs, base=base))
        settings, dirs = {}, config_dirs
    job = of_run(run_dir, words, dirs, settings)
    try:
        recorded_config = check.read_config(run_dir / "config.yaml")
    except (OSError, ValueError, RecursionError) as error:
        why = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(f"resume={run_dir}: its config.yaml is damaged ({why})") from None
    different = identity.differences(recorded_config, job.composed.unresolved, job.not_compared)
    if different and not job.run.values["resume_changed"]:
        shorter = [line for line in different if line.partition(":")[0] in identity.MAY_LENGTHEN]
        other = [line for line in different if line not in shorter]
        problems = [f"the config differs from the run's, but only the length may: {'; '.join(other)}"] if other else []
        if shorter:
            ends = " or ".join(f"{key}={recorded_config.get(key)}" for key in identity.MAY_LENGTHEN if recorded_config.get(key))
            problems.append(f"{'; '.join(shorter)}: a run may only become longer, and this one ends after {ends}: set more of it")
        raise UserError(f"resume={run_dir}: {problem}. Say resume_changed=true to go on all the same" for problem in problems)
    job.notices += [f"resumed with a changed config: {line}" for line in different]
    return _from_newest_checkpoint(job, run_dir)


def of_run(
    run_dir: Path,
    words: Sequence[str],
    config_dirs: Sequence[str],
    settings: Mapping[str, object],
    used: Collection[str] | None = None,
) -> Job:
    """The job of a run's own recipe and these of its machine-local settings, changed by overrides. Raises UserError.

    `used` is as in `checked`.
    """
    own = [f"{k}={format_value(v)}" for k, v in settings.items()]
    base = None if any(key_of(w) == "recipe" for w in words) else recipes.read_of_run(run_dir)
    add_import_paths(config_dirs)
    job = checked(composing.compose([*own, *words], config_dirs, base=base), own=base is not None, used=used)
    job.composed.overrides = list(words)
    return job


def recorded_settings(recorded: JsonObject, words: Sequence[str]) -> JsonObject:
    """The machine-local settings that a run recorded, without those that the overrides replace.

    A setting of a group's option is dropped where an override chooses another option.
    """
    given = {key_of(w) for w in words}
    local = recorded.get("machine_local") or {}
    return {k: v for k, v in local.items() if k not in given and k.partition(".")[0] not in given and not replaced(k, given)}


def is_of_this_user(recorded: dict[str, object]) -> bool:
    """True if this user recorded the run on this machine, and its trust, paths and devices are unchanged since."""
    return home.is_own(_of_this_machine(recorded), recorded.get("signature"))


def _of_this_machine(recorded: dict[str, object]) -> list[object]:
    """The machine's part of a run's record: the signed part of environment.json."""
    return [recorded.get("machine_local"), recorded.get("config_dirs")]


def _refuse_settings_of_strangers(run_dir: Path, settings: JsonObject, recorded: JsonObject, composed: Composed) -> None:
    """Refuse to resume a run with a foreign or edited record if it needs settings that only the operator may give.

    Call it before importing anything from the run's package or folders. Raises UserError.
    """
    defaults = flatten(composed.unresolved) | composed.choices
    wanted = [f"{k}={format_value(v)}" for k, v in settings.items() if defaults.get(k) != v]
    wanted += [f"--config-dir {folder}" for folder in recorded.get("config_dirs") or [] if not composed.config_dirs]
    if wanted:
        raise UserError(
            f"resume={run_dir} was recorded by another user or machine, or has been changed: what it says of trust, paths and "
            f"devices is not taken from its files. Give on the command line what you agree with: {printable(' '.join(wanted))}"
        )


def recorded_environment(run_dir: Path, setting: str = "") -> JsonObject:
    """A run's environment.json. Raises UserError if this is no run's directory; the message begins with `setting`."""
    if (run_dir / "jobs.json").is_file():
        hint = "say -m before it to go on with what is left of it" if setting else "name one of the runs in it"
        raise UserError(f"{setting}{run_dir} is a sweep: {hint}")
    if not (run_dir / "recipe.yaml").is_file() or not (run_dir / "environment.json").is_file():
        raise UserError(
            f"{setting}{run_dir} is no run's directory (no recipe.yaml in it): name one such as outputs/<date>/<time>-<id>"
            f"{', or resume=auto for the newest unfinished run of this config' if setting else ''}"
        )
    try:
        content = read_json(run_dir / "environment.json", MB)
    except (OSError, ValueError):
        content = None
    if not isinstance(content, dict) or not all(fits(content.get(key), kind) for key, kind in _READ.items()):
        raise UserError(f"{setting}{run_dir}: its environment.json is damaged")
    return content


def _from_newest_checkpoint(job: Job, run_dir: Path) -> Job:
    job.run_dir = run_dir
    job.checkpoint, problems = manifest.newest_valid(run_dir)
    job.notices += problems
    if job.checkpoint is None:
        job.notices.append(f"{run_dir} has no checkpoint that verifies: it starts from the beginning")
    else:
        job.notices.append(f"resuming from {job.checkpoint}")
    return job


def _newest_unfinished(job: Job) -> Job:
    """The job, continuing the newest unfinished run of the same config if one exists that no process runs."""
    named = job.hydra.path("run.dir", job.composed)
    for run_dir in directory.newest_first(Path(job.run.values["output_dir"])) if named is None else [named]:
        result = Result.read(run_dir)
        if result is not None and result.status in ("completed", "diverged"):
            continue
        try:
            same = read_json(run_dir / "environment.json").get("config_hash") == job.config_hash
        except (OSError, ValueError, AttributeError):
            continue
        if same and not directory.is_locked(run_dir):
            return _from_newest_checkpoint(job, run_dir)
    job.notices.append("resume=auto: no unfinished run of this config: a new one starts")
    return job
