"""`drivetrain train`: compose a config, check it and train it, or show it."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from drivetrain.cli import arguments
from drivetrain.core.errors import DONE, UserError, did_you_mean
from drivetrain.core.paths import add_import_paths

HELP = """\
drivetrain train [group=option] [key=value] …      (the same: python -m src.train …)

  drivetrain train                                     the default recipe, on real data
  drivetrain train precision=amp parallel=ddp          techniques are overrides
  drivetrain train optimizer.lr=0.01 epochs=30         so are values
  drivetrain train -m precision=fp32,bf16 optimizer=sgd,adamw   every combination, compared in a table
  drivetrain train recipe=fast                         a shared recipe, by name or path
  drivetrain train resume=outputs/<date>/<run>         continue a run (resume=auto: the newest unfinished one)

  -m, --multirun        run every combination of a=x,y  b=range(1,4); resume=<its folder> continues a sweep
       hydra/launcher=joblib hydra.launcher.n_jobs=2        several at a time (also: submitit_slurm, submitit_local)
       hydra/sweeper=optuna hydra.sweeper.n_trials=20       search: optimizer.lr=tag(log,interval(1e-4,1e-1))
  -c, --cfg job         show the composed config and stop (--resolve: with references resolved)
  -p, --package KEY     with --cfg: this part only
  -cd, --config-dir DIR your own options: DIR/<group>/<option>.yaml
  -q, --quiet           only the result
  -h, --help            this

exit codes: 0 done · 1 an error while training · 2 bad config or recipe · 3 diverged · 75 interrupted, saved, resumable
"""


def command(argv: Sequence[str]) -> int:
    """Run `drivetrain train`; its exit code."""
    given = _parse(argv)
    if given.help:
        from drivetrain.cli import list

        print(HELP)
        list.show(config_dirs=given.config_dir)
        return DONE
    add_import_paths(given.config_dir)
    if given.cfg:
        return _show_config(given)
    for flag, value in (("--resolve", given.resolve), ("--package", given.package)):
        if value:
            raise UserError(f"{flag} goes with --cfg job, which shows the config and stops")
    return _train(given)


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = arguments.parser("train")
    parser.add_argument("-m", "--multirun", action="store_true")
    parser.add_argument("-c", "--cfg", choices=["job"])
    parser.add_argument("--resolve", action="store_true")
    parser.add_argument("-p", "--package")
    parser.add_argument("-q", "--quiet", action="store_true")
    return parser.parse_intermixed_args(argv)


def _train(given: argparse.Namespace) -> int:
    from drivetrain import sweep
    from drivetrain.launch import launcher
    from drivetrain.launch.job import prepare
    from drivetrain.parallel import launched
    from drivetrain.ui import terminal

    if given.multirun or sweep.is_sweep_recipe(given.overrides):
        return sweep.run(given.overrides, given.config_dir, given.quiet)
    ended = launcher.launch(prepare(given.overrides, given.config_dir), quiet=given.quiet)
    if ended.result.run_dir is not None:  # this is rank 0
        terminal.show_result(ended.result)
    if ended.result.error and (ended.result.run_dir is not None or launched() is None):  # else rank 0 prints it
        for line in ended.result.error.splitlines():
            terminal.say(f"error: {line}")
    return ended.code


def _show_config(given: argparse.Namespace) -> int:
    from omegaconf import OmegaConf

    from drivetrain.launch.job import prepare

    if given.multirun:
        raise UserError("--cfg job shows the config of one run, and -m starts several: leave one of them out")
    config = prepare(given.overrides, given.config_dir).composed.config
    part = OmegaConf.select(config, given.package) if given.package else config
    if part is None:
        raise UserError(f"--package {given.package}: {did_you_mean(given.package, map(str, config))}")
    print(OmegaConf.to_yaml(part, resolve=given.resolve) if OmegaConf.is_config(part) else part)
    return DONE
