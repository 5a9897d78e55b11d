"""A trained model, made again from the files of its run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from drivetrain.config import catalog, plugins, recipe_checks, schema
from drivetrain.config.validate import read_config
from drivetrain.core import limits, low_rank, user_code
from drivetrain.core.errors import UserError
from drivetrain.core.lazy import torch
from drivetrain.saving import manifest

if TYPE_CHECKING:
    from drivetrain.core.context import BuildContext


def load(path: Path, key: str, context: BuildContext) -> torch.nn.Module:
    """Return the model of a run, or that of an exported file in its directory, in evaluation mode. Raises UserError.

    `path` is the run's directory, of which the newest valid checkpoint is taken, or a safetensors file in it.
    """
    run_dir = path if path.is_dir() else path.parent
    if not (run_dir / "config.yaml").is_file():
        raise UserError(f"{key}={path}: {run_dir} is no run's directory (it has no config.yaml, which names the model)")
    try:
        section = dict(read_config(run_dir / "config.yaml")["model"])
        target = section.pop("_target_")
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        raise UserError(f"{key}={path}: {run_dir / 'config.yaml'} cannot be read, or names no model") from None
    if "pretrained" in section:  # the run's weights follow
        section["pretrained"] = False
    for named in (target, section.get("target")):  # of model=own too
        if named is None or named in catalog.shipped_targets("model"):
            continue
        trusted = {*plugins.trusted_packages(), *context.run.values["trust"]}
        if problems := list(user_code.trust_problems(f"{key}={path}: its model {named}", str(named), trusted)):
            raise UserError(problems)
    option = user_code.import_name(target)
    if problems := list(schema.of(option).problems(f"{key}={path}: model", section)):
        raise UserError(problems)
    if keys := sorted(recipe_checks.not_for_recipes({"model": section}, {"model": option})):  # anybody may have written it
        raise UserError(f"{key}={path}: its config.yaml sets {', '.join(keys)} to what no recipe may hold")
    weights = low_rank.merged(_weights(path, key))
    try:
        with limits.model_within(limits.memory_bytes() // context.world.local_size, f"{key}={path}"):
            model: Any = option(**section).create(context.data.shape, context.data.classes)
        model.load_state_dict(weights)
    except RuntimeError as error:
        problem = str(error).splitlines()[-1].strip()
        raise UserError(f"{key}={path}: its weights do not fit this data's shape and classes: {problem}") from None
    return model.eval().requires_grad_(False)  # type: ignore[no-any-return]


def _weights(path: Path, key: str) -> dict[str, torch.Tensor]:
    from drivetrain.saving import checkpoint_io

    if path.is_dir():
        checkpoint, problems = manifest.newest_valid(path)
        if checkpoint is None:
            raise UserError(f"{key}={path} has no checkpoint that verifies: {'; '.join(problems) or 'it saved none'}")
        return checkpoint_io.load(checkpoint)[0]
    try:
        return checkpoint_io.read_weights(path)
    except Exception as error:
        raise UserError(f"{key}={path} is no safetensors file: {error}") from None
