"""`drivetrain train --info`: where options come from, which are chosen, and the versions of what runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from omegaconf import OmegaConf

from drivetrain.config import catalog, plugins
from drivetrain.core.errors import DONE
from drivetrain.core.paths import conf_dir, recipes_dir
from drivetrain.launch.job import Job, prepare_run
from drivetrain.run import environment
from drivetrain.ui.output import echo
from drivetrain.ui.sheet import Table


def show(what: str, overrides: Sequence[str], config_dirs: Sequence[str]) -> int:
    """Print what Hydra's --info prints: `what` is all or one of the parts below; return the exit code. Raises UserError."""
    job = prepare_run(overrides, config_dirs)
    for name, part in PARTS.items():
        if what == "all" or name == what.removesuffix("-tree"):
            part(job)
    return DONE


def _versions(job: Job) -> None:
    names = ("torch", "torchvision", "timm", "hydra-core", "omegaconf")
    Table(
        ("package", "version"), [(name, environment.version(name) or "not installed") for name in ("drivetrain", *names)]
    ).show()


def _search_path(job: Job) -> None:
    recipes = [("recipes", recipes_dir()), ("recipes of this folder", Path("recipes").absolute())]
    own = [("--config-dir", Path(folder).resolve()) for folder in job.composed.config_dirs]
    found = [("drivetrain", conf_dir()), *((f"plugin {p.package}", p.conf) for p in plugins.plugins()), *own, *recipes]
    Table(("provider", "folder"), [(provider, str(folder)) for provider, folder in found]).show()


def _plugins(job: Job) -> None:
    found = [(p.package, str(p.conf)) for p in plugins.plugins()]
    Table(("plugin", "options in"), found or [("none", "")]).show()


def _defaults(job: Job) -> None:
    """One line for each group: its option, the file that holds it, and who chose it."""
    files, recipe = catalog.option_files(job.composed.config_dirs), job.composed.recipe
    rows = []
    for group, choice in job.composed.choices.items():
        by = "default" if choice == catalog.default_options()[group] else "command line"
        if recipe is not None and recipe.choices.get(group) == choice:
            by = recipe.where(group)
        for name in choice if isinstance(choice, list) else [choice]:
            rows.append((group, name, by, str(files[group][name])))
    Table(("group", "option", "chosen by", "file"), rows).show()


def _config(job: Job) -> None:
    echo(OmegaConf.to_yaml(job.composed.config))


PARTS: dict[str, Callable[[Job], None]] = {
    "versions": _versions, "plugins": _plugins, "searchpath": _search_path, "defaults": _defaults, "config": _config,
}  # fmt: skip
