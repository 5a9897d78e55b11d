"""A finished run on disk: its config, one of its checkpoints, and the checkpoint's weights."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeGuard

from drivetrain.core.errors import UserError, printable
from drivetrain.core.lazy import torch
from drivetrain.core.options import stages
from drivetrain.core.options.option import CountOrZero
from drivetrain.core.options.overrides import format_value, key_of
from drivetrain.core.step import low_rank
from drivetrain.core.typed import JsonObject, StateDict, fits
from drivetrain.ema.base import Width
from drivetrain.launch.job import Job, is_of_this_user, of_run, recorded_environment, recorded_settings
from drivetrain.model import Model
from drivetrain.recipe import reader as recipes
from drivetrain.run import directory
from drivetrain.run.result import Result
from drivetrain.saving import manifest

# Options that only training needs are switched off. The optimizer is not used; sgd keeps no second copy of the weights.
OFF = (
    "augment=[]", "checkpointing=none", "clip=none", "compile=none", "debug=none", "logger=[]", "optimizer=sgd",
    "scheduler=constant", "stop=none", "select=null", "batch.preallocate=false", "data.drop_last=false", "callbacks=[]",
)  # fmt: skip
EVALUATED = {"data", "precision", "model", "batch", "ema"}  # groups that a stage may change and that affect an evaluation
ONE_PROCESS = "parallel=single"
# The groups needed to use a model. Rules of other groups are skipped: the run's data, teacher or loader may be gone.
MODEL_ALONE = ("runtime", "parallel", "precision", "model", "surgery", "batch")

Update = CountOrZero | Literal["best", "last"] | None


@dataclass
class Choice:
    """The choice of a run's weights."""

    update: Update = None  # None: the best if the run kept it, else the last
    # The averaged weights instead of the trained ones; a number: the average of this width. None: the average if it exists
    average: bool | Width | None = None
    split: Literal["test", "validation"] = "test"  # the set to evaluate on


@dataclass
class Finished:
    """A finished run and its chosen checkpoint."""

    run_dir: Path
    job: Job  # its config without training-only options
    used: Collection[str] | None  # the groups of used options; None: all
    checkpoint: Path
    average: bool | float | None

    def weights(self) -> dict[str, torch.Tensor]:
        """Read the chosen weights under the plain model's own names, with adapters merged. Raises UserError."""
        from drivetrain.saving import checkpoint_io

        return low_rank.merged(chosen_weights(self.checkpoint, *checkpoint_io.load(self.checkpoint), self.average))


def find(
    verb: str,
    run_dir: Path,
    overrides: Sequence[str] = (),
    config_dirs: Sequence[str] = (),
    choice: Choice | None = None,
    used: Collection[str] | None = None,
) -> Finished:
    """Find a run and one of its checkpoints. Raises UserError, whose message suggests `verb`. Imports no torch.

    `used` names the groups of used options; None: all.
    """
    choice, run_dir = choice or Choice(), directory.named(run_dir)
    recorded = recorded_environment(run_dir)
    given = {key_of(word) for word in overrides}
    words = [*(word for word in OFF if key_of(word) not in given), *overrides]
    settings = recorded_settings(recorded, words)
    own = is_of_this_user(recorded)
    try:
        # Trust, paths and devices from a stranger's files are ignored.
        dirs, taken = (config_dirs or recorded.get("config_dirs", []), settings) if own else (config_dirs, {})
        job = of_run(run_dir, [*_of_stage(run_dir, dirs, taken, given, choice, used), *words], dirs, taken, used)
    except UserError as error:
        wanted = {key: value for key, value in settings.items() if used is None or key.partition(".")[0] in (*used, "trust")}
        raise error if own else _refusal(error, verb, run_dir, wanted, recorded, config_dirs) from None
    job.composed.overrides = list(overrides)
    job.notices.clear()
    job.run = job.run.with_parts(model=Model.of(job.run).untrained())
    return Finished(run_dir, job, used, checkpoint_of(run_dir, choice.update, job.run.saving.best), choice.average)


def _of_stage(
    run_dir: Path,
    config_dirs: Sequence[str],
    settings: dict[str, object],
    given: set[str],
    choice: Choice,
    used: Collection[str] | None,
) -> list[str]:
    """The overrides with the settings of the stage that made the chosen checkpoint; [] without stages.

    They leave out groups chosen by the command (`given`) and training-only options.
    """
    if not recipes.read_of_run(run_dir).values.get("stages"):
        return []
    run = of_run(run_dir, [], config_dirs, settings, used).run
    update = int(checkpoint_of(run_dir, choice.update, run.saving.best).name)
    changes = {k: v for k, v in stages.changes_at(run, update).items() if k.split(".")[0] in EVALUATED - given}
    return ["stages=null", *(f"{key}={format_value(value)}" for key, value in changes.items())]


def _refusal(
    error: UserError,
    verb: str,
    run_dir: Path,
    settings: JsonObject,
    recorded: JsonObject,
    config_dirs: Sequence[str],
) -> UserError:
    """The error and, if the run named its own code, the way to allow it."""
    code = ("trust", "model.target", "data.target", "data.root", "data.path")
    missing = [f"{key}={format_value(value)}" for key, value in settings.items() if key in code and value]
    missing += [] if config_dirs else [word for folder in recorded.get("config_dirs") or [] for word in ("--config-dir", folder)]
    if not missing:
        return error
    return UserError(
        f"{run_dir} was recorded by another user or machine, or has been changed: what it says of code and paths is not taken "
        f"from its files. If you trust it, say: {printable(shlex.join([*verb.split(), str(run_dir), *missing]))}"
    )


def checkpoint_of(run_dir: Path, update: Update = None, keeps_best: bool = False) -> Path:
    """The checkpoint of an update, of the best evaluation, or the newest valid one. Raises UserError."""
    saved = sorted(int(p.name) for p in manifest.checkpoints(run_dir))
    if not saved:
        raise UserError(f"{run_dir} has no checkpoint: name a run's directory, such as outputs/<date>/<time>-<id>")
    result = Result.read(run_dir)
    update_of_best = result.judged("best").get("update") if result is not None else None
    best = update_of_best if fits(update_of_best, int) else -1
    if update == "last" or (update is None and not (keeps_best and best in saved)):
        found, complaints = manifest.newest_valid(run_dir)
        if found is None:
            raise UserError(complaints)
        return found
    number = best if update is None or update == "best" else int(update)
    chosen = run_dir / "checkpoints" / str(number)
    if number not in saved:
        raise UserError(f"{run_dir} has no checkpoint of update {number}: it has those of {', '.join(map(str, saved))}")
    if (wrong := manifest.verify(chosen)) is not None:
        raise UserError(f"checkpoint {chosen} {wrong}")
    return chosen


def chosen_weights(
    checkpoint: Path, weights: dict[str, torch.Tensor], state: StateDict, average: bool | float | None
) -> dict[str, torch.Tensor]:
    """A checkpoint's weights, or with `average` the averaged ones: of a width, or the run's own. None: averaged if present.

    Raises UserError.
    """
    averaged = state.get("ema")
    if average is False or (average is None and not averaged):
        return weights
    if not averaged:
        raise UserError(f"{checkpoint} has no averaged weights: the run had ema=none")
    tensors = averaged.get("tensors") if isinstance(averaged, dict) else None
    tied = averaged.get("tied", {}) if isinstance(averaged, dict) else {}  # further names, each with a tensor in the checkpoint
    if not (
        fits_weights(tensors, weights)
        and fits(tied, dict[str, str])
        and fits_weights({name: tensors.get(first) for name, first in tied.items()}, weights)
    ):
        raise UserError(f"{checkpoint} has averaged weights that do not fit its weights: leave average=… out, or say update=N")
    if average is not True and average is not None:
        from drivetrain.ema import profiles

        tensors = profiles.synthesised(checkpoint.parent.parent, averaged, average)
    tensors = {**tensors, **{name: tensors[first] for name, first in tied.items()}}
    return {**weights, **{n: t.to(weights[n].dtype) for n, t in tensors.items()}}


def fits_weights(tensors: object, weights: Mapping[str, torch.Tensor]) -> TypeGuard[dict[str, torch.Tensor]]:
    """True if these tensors have the names and shapes of the weights."""
    return isinstance(tensors, dict) and all(
        isinstance(tensor, torch.Tensor) and name in weights and tensor.shape == weights[name].shape
        for name, tensor in tensors.items()
    )


def load_weights(model: torch.nn.Module, weights: JsonObject) -> None:
    """Load weights into a model of the same names and shapes. Raises UserError with the first differences."""
    own = model.state_dict()
    wrong = [f"{name} is missing" for name in own if name not in weights]
    wrong += [f"there is no {name}" for name in weights if name not in own]
    for name, tensor in weights.items():
        if name in own and own[name].shape != tensor.shape:
            wrong.append(f"{name} is {list(tensor.shape)}, and the model wants {list(own[name].shape)}")
    if wrong:
        more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise UserError(
            f"the run's weights do not fit the model for this data ({'; '.join(wrong[:3])}{more}): give data with inputs of the "
            "same shape and with the same classes"
        )
    model.load_state_dict(weights)
