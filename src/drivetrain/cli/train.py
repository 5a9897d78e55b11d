"""`drivetrain train`: compose a config, check it and train it, or show it."""

from __future__ import annotations

import argparse
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from drivetrain.cli.arguments import FLAG, Command
from drivetrain.config import catalog, hydra_words, plugins
from drivetrain.core.errors import DONE, UserError, did_you_mean
from drivetrain.core.machine.paths import conf_dir, recipes_dir
from drivetrain.core.machine.signals import StopFlag
from drivetrain.launch.job import Job, prepare, prepare_run
from drivetrain.recipe import lookup
from drivetrain.run import environment
from drivetrain.ui.output import echo
from drivetrain.ui.sheet import Table

HELP = """\
drivetrain train [group=option] [key=value] …      (the same: python -m src.train …)

  drivetrain train                                     the default recipe, on real data
  drivetrain train precision=amp parallel=ddp          techniques are overrides
  drivetrain train optimizer.lr=0.01 epochs=30         so are values
  drivetrain train -m precision=fp32,bf16 optimizer=sgd,adamw   every combination, compared in a table
  drivetrain train recipe=fast                         a shared recipe, by name or path
  drivetrain train resume=outputs/<date>/<run>         continue a run (resume=auto: the newest unfinished one)

  -m, --multirun        run every combination of a=x,y  b=range(1,4); resume=<its folder> continues a sweep
       hydra/launcher=joblib hydra.launcher.n_jobs=2        several at a time (also: submitit_slurm, submitit_local, ray)
       hydra/sweeper=optuna hydra.sweeper.n_trials=20       search: optimizer.lr=tag(log,interval(1e-4,1e-1))
  -c, --cfg job|hydra|all  show the config, Hydra's node, or both, and stop (--resolve: with references resolved)
  -p, --package KEY     with --cfg: this part only
  -i, --info [WHAT]     show where options come from: all, config, defaults, defaults-tree, plugins or searchpath
  -cd, --config-dir DIR your own options: DIR/<group>/<option>.yaml
  -cn, --config-name N  the same as recipe=N, also for DIR/N.yaml
  -q, --quiet           only the result
  --plain               without frames, colours and lines that change, as where the output is no terminal (every command has it)
  -h, --help            this

exit codes: 0 done · 1 an error while training · 2 bad config or recipe · 3 diverged · 75 interrupted, saved, resumable
"""
CFG = ("job", "hydra", "all")
INFO = ["all", "config", "defaults", "defaults-tree", "plugins", "searchpath"]
INSTEAD = {  # flags of Hydra → what to type
    "--hydra-help": "type `drivetrain train --help`; docs/sweeps.md has a table of Hydra's words",
    "-sc --shell-completion": 'say eval "$(drivetrain completion bash)" (or zsh, fish)',
    "--experimental-rerun": "say recipe=RUN/recipe.yaml to run it again, or resume=RUN to go on with it",
    "--version": "say `drivetrain --version`, or --info for all versions",
}


def _command(given: argparse.Namespace) -> int:
    _refuse_flags_of_hydra(given)
    if given.info is not None:
        return _show_info(given.info, given.overrides, given.config_dir)
    if given.cfg is not None and given.cfg not in CFG:
        by_file = f"; to train by a file, say recipe={given.cfg}" if given.cfg.endswith((".yaml", ".yml")) else ""
        raise UserError(f"--cfg {given.cfg}: it shows the config: say --cfg with one of {', '.join(CFG)}{by_file}")
    if given.cfg:
        return _show_config(given)
    for flag, value in (("--resolve", given.resolve), ("--package", given.package)):
        if value:
            raise UserError(f"{flag} goes with --cfg job, which shows the config and stops")
    return _train(given)


def _names(config_dirs: Sequence[str]) -> str:
    from drivetrain.cli import list

    return list.names(config_dirs)


command = Command("train", _command, HELP, {
    "-m --multirun": FLAG, "-r --run": FLAG,  # the default
    "-c --cfg": {}, "--resolve": FLAG, "-p --package": {}, "-i --info": {"nargs": "?", "const": "all", "choices": INFO},
    "-q --quiet": FLAG, **{flag: {"nargs": "?", "const": "", "dest": flag} for flag in INSTEAD},
}, more_help=_names)  # fmt: skip


def _refuse_flags_of_hydra(given: argparse.Namespace) -> None:
    for flag, hint in INSTEAD.items():
        if getattr(given, flag) is not None:
            raise UserError(f"{flag.split()[-1]}: {hint}")


def _train(given: argparse.Namespace) -> int:
    settings, overrides = hydra_words.split(given.overrides)
    recipe = None if given.multirun else lookup.named(overrides)
    if given.multirun or (recipe is not None and recipe.sweep):
        from drivetrain.measure.report import report
        from drivetrain.sweeps import driver

        folder, code = driver.run(given.overrides, given.config_dir, given.quiet)
        report.of_sweep(folder)
        return code
    settings.check_one_run()
    job = prepare(overrides, given.config_dir, recipe, hydra=settings)  # first, so that a wrong word costs no further imports
    return _run(job, given.quiet)


def _run(job: Job, quiet: bool) -> int:
    from drivetrain.core.machine.forking import end_with_parent
    from drivetrain.launch import launcher
    from drivetrain.measure.report import report
    from drivetrain.parallel.environment import launched
    from drivetrain.ui import terminal

    if launcher.started_from_python():
        end_with_parent(signal.SIGTERM)  # if the program is killed, the run saves and ends
    result = launcher.launch(job, quiet=quiet, stop=StopFlag(last=True))
    if result.run_dir is not None and not launcher.started_from_python():  # this is rank 0
        terminal.show_result(result, noted=not quiet)
        if not quiet:
            report.add_samples(result)
    if result.error and (result.run_dir is not None or launched() is None):  # otherwise rank 0 prints it
        for line in result.error.splitlines():
            terminal.say(f"error: {line}")
    return result.code


def _show_config(given: argparse.Namespace) -> int:
    if given.multirun:
        raise UserError(f"--cfg {given.cfg} shows the config of one run, but -m starts several: leave one of them out")
    job = prepare_run(given.overrides, given.config_dir)
    whole: Any = OmegaConf.to_container(job.hydra.whole(job.composed), resolve=given.resolve)
    shown = {key: value for key, value in whole.items() if given.cfg == "all" or (key == "hydra") == (given.cfg == "hydra")}
    shown = _part(shown, given.package) if given.package not in (None, "_global_") else shown
    echo(OmegaConf.to_yaml(shown) if isinstance(shown, dict | list) else shown)
    return DONE


def _part(config: object, package: str) -> Any:
    """The part of a config at a dotted key. Raises UserError."""
    for depth, name in enumerate(package.split(".")):
        if not isinstance(config, dict) or name not in config:
            inside = f" in {'.'.join(package.split('.')[:depth])}" if depth else ""
            hint = did_you_mean(name, config if isinstance(config, dict) else ())
            raise UserError(f"--package {package}: there is no '{name}'{inside}: {hint}")
        config = config[name]
    return config


def _show_info(what: str, overrides: Sequence[str], config_dirs: Sequence[str]) -> int:
    """Print Hydra's --info: `what` is all or one of the parts below; return the exit code. Raises UserError."""
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
    """One line for each group: its option, the option's file, and the origin of the choice."""
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
    echo(OmegaConf.to_yaml(job.composed.unresolved))


PARTS: dict[str, Callable[[Job], None]] = {
    "versions": _versions, "plugins": _plugins, "searchpath": _search_path, "defaults": _defaults, "config": _config,
}  # fmt: skip
