"""The command: verbs, and for `train` compose → check → launch."""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path

from drivetrain import __version__, terminal
from drivetrain.errors import BAD_CONFIG, DONE, FAILED, INTERRUPTED, UserError, did_you_mean
from drivetrain.paths import add_own_places

TRAIN_HELP = """\
drivetrain train [group=option] [key=value] …      (the same: python -m src.train …)

  drivetrain train                                     the default recipe, on real data
  drivetrain train precision=amp parallel=ddp          techniques are overrides
  drivetrain train optimizer.lr=0.01 epochs=30         so are values
  drivetrain train -m precision=fp32,bf16 optimizer=sgd,adamw   every combination, compared in a table
  drivetrain train recipe=fast                         a shared recipe, by name or path
  drivetrain train resume=outputs/<date>/<run>         go on where a run was (resume=auto: the newest)

  -m, --multirun        run every combination of a=x,y  b=range(1,4); resume=<its folder> goes on with what is left of it
       hydra/launcher=joblib hydra.launcher.n_jobs=2        several at a time (also: submitit_slurm, submitit_local)
       hydra/sweeper=optuna hydra.sweeper.n_trials=20       search: optimizer.lr=tag(log,interval(1e-4,1e-1))
  -c, --cfg job         show the composed config and stop (--resolve: with references resolved)
  -p, --package KEY     with --cfg: that part of it
  -cd, --config-dir DIR your own options: DIR/<group>/<option>.yaml
  -q, --quiet           only the result
  -h, --help            this

exit codes: 0 done · 1 an error while training · 2 bad config or recipe · 3 diverged · 75 interrupted, saved, resumable
"""


SHOW_HELP = """\
drivetrain show [group=option] [key=value] …      the learning rate (and momentum) over the run that these words compose

  drivetrain show scheduler=cosine scheduler.cycles=3
  drivetrain show recipe=fast epochs=90
  drivetrain show scheduler=onecycle scheduler.momentum=[0.85,0.95] --png schedule.png

  --png FILE            as an image, by matplotlib
  -cd, --config-dir DIR your own options: DIR/<group>/<option>.yaml
"""


COMPARE_HELP = """\
drivetrain compare key=a,b [group=x,y] [key=value] …      techniques side by side, measured by the first

  drivetrain compare precision=fp32,bf16 surgery=[],[channels_last]
  drivetrain compare recipe=naive,fast data=digits
  drivetrain compare optimizer=adamw,lamb quality=true      is the result still right? seeds=5 trainings of each arm

  rounds=20             at most, each with fresh processes of all arms; an arm that is known to 2 % takes no more
  turn_s=0.4            seconds of timed updates a turn, two for each round and arm
  quality=true          train each arm to its end too: PASS, FAIL or INCONCLUSIVE against the first arm's own spread
  seeds=5               trainings of each arm for that
  -cd, --config-dir DIR your own options: DIR/<group>/<option>.yaml

Each arm is a live process, and only one moves at a time: they take turns, A B B A, so that the machine's drift cancels.
"""


ABLATE_HELP = """\
drivetrain ablate recipe=fast baseline=naive [key=value] …      what each technique of a recipe brings, and what its loss costs

  drivetrain ablate recipe=fast baseline=naive data=digits model=resnet9
  drivetrain ablate recipe=mine.yaml quality=true          is the result still right, technique by technique?

The arms follow from the recipes: the baseline with each technique, the recipe without each, and the way from one to the
other, the best first. rounds=8, turn_s, quality, seeds: as for `drivetrain compare`.

  -cd, --config-dir DIR your own options: DIR/<group>/<option>.yaml
"""


TUNE_HELP = """\
drivetrain tune [what=all] [group=option] [key=value] …      what makes this run faster on this machine, kept where proven

  drivetrain tune model=resnet9                        loaders, precision, layout, optimizer, micro-batch, compiling; then lr
  drivetrain tune what=workers data=imagefolder data.root=photos
  drivetrain tune what=lr optimizer=sgd                the range test, with a plot: advice, nothing is set

  what=all              or workers (loaders and their counts), batch (micro-batches of the same global batch), lr
  budget_s=600          seconds that it may take, about
  rounds=8, turn_s=0.3  of each comparison; tries that fall behind take no further rounds
  quality=true          is the result still right? seeds=5 trainings of each, as far as the budget goes
  lr_updates=150        updates of the range test
  -cd, --config-dir DIR your own options: DIR/<group>/<option>.yaml

Leaves a recipe with what it rests on, tune.json and a page under outputs/tune. The run itself is not touched.
"""


REPORT_HELP = """\
drivetrain report [DIR …]      any runs and sweeps, finished or under way, in one table, one CSV and one page

  drivetrain report                                    all below outputs/
  drivetrain report outputs/multirun/2026-11-21/…      one sweep
  drivetrain report runs/a runs/b target=0.97 out=page

  target=VALUE          time is taken until the metric is there; else what all completed runs reached
  out=DIR               where report.html and report.csv go; else a new folder under outputs/report
"""


DOCTOR_HELP = """\
drivetrain doctor [group=option] [key=value] …      where a step's time goes, what is wrong, and what is proven to help

  drivetrain doctor model=own model.target=my_pkg.Net data=own data.target=my_pkg.Data trust=[my_pkg]
  drivetrain doctor recipe=naive rounds=16

  prove=false           only look
  look_s=2              seconds of each look at the step
  rounds=8, turn_s=0.4  of the comparison that proves the overrides
  -cd, --config-dir DIR your own options: DIR/<group>/<option>.yaml
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; its exit code."""
    argv = list(sys.argv[1:] if argv is None else argv)
    terminal.prepare_output()
    try:
        return _dispatch(argv)
    except UserError as error:
        for problem in error.problems:
            print(f"error: {problem}", file=sys.stderr)
        return BAD_CONFIG
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except Exception as error:  # a bug of ours: one line, the rest on demand
        if os.environ.get("DRIVETRAIN_TRACEBACK"):
            traceback.print_exc()
        text = str(error).strip().splitlines()
        print(
            f"error: {type(error).__name__}: {text[0] if text else ''} (DRIVETRAIN_TRACEBACK=1 shows where)",
            file=sys.stderr,
        )
        return FAILED


def _dispatch(argv: list[str]) -> int:
    verb = argv[0] if argv else "--help"
    if verb in ("-h", "--help", "help"):
        print(_overview())
        return DONE
    if verb == "--version":
        print(f"drivetrain {__version__}")
        return DONE
    if verb not in VERBS:
        hint = f"drivetrain train {verb} …" if "=" in verb else did_you_mean(verb, VERBS)
        raise UserError(f"there is no command '{verb}': {hint}")
    return VERBS[verb][0](argv[1:])


def _overview() -> str:
    verbs = "\n".join(f"  drivetrain {name:<12} {text}" for name, (_, text) in VERBS.items() if text)
    title = f"drivetrain {__version__}: every training technique is one config override, and measured"
    return f"{title}\n\n{verbs}\n\n  drivetrain train --help says more"


def _train(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="drivetrain train", add_help=False)
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("-m", "--multirun", action="store_true")
    parser.add_argument("-c", "--cfg", choices=["job"])
    parser.add_argument("--resolve", action="store_true")
    parser.add_argument("-p", "--package")
    parser.add_argument("-cd", "--config-dir", action="append", default=[])
    parser.add_argument("-q", "--quiet", action="store_true")
    parser.add_argument("-h", "--help", action="store_true")
    given = parser.parse_intermixed_args(argv)
    if given.help:
        from drivetrain import catalogue

        print(TRAIN_HELP)
        catalogue.show()
        return DONE
    add_own_places(given.config_dir)
    if given.cfg:
        return _show_config(given)
    for flag, value in (("--resolve", given.resolve), ("--package", given.package)):
        if value:
            raise UserError(f"{flag} goes with --cfg job, which shows the config and stops")
    from drivetrain import launch, sweep
    from drivetrain.job import prepare

    if given.multirun or sweep.is_sweep_recipe(given.overrides):
        return sweep.run(given.overrides, given.config_dir, given.quiet)
    ended = launch.launch(prepare(given.overrides, given.config_dir), quiet=given.quiet)
    if ended.result.run_dir is not None:  # rank 0
        terminal.show_result(ended.result)
        if ended.result.error:
            for line in ended.result.error.splitlines():
                terminal.say(f"error: {line}")
    return ended.code


def _given(verb: str, argv: list[str], text: str, *paths: str) -> argparse.Namespace | None:
    """A verb's overrides, config dirs (which are added) and options that are `paths`; None where help was asked for."""
    parser = argparse.ArgumentParser(prog=f"drivetrain {verb}", add_help=False)
    parser.add_argument("overrides", nargs="*")
    for option in paths:
        parser.add_argument(option, type=Path)
    parser.add_argument("-cd", "--config-dir", action="append", default=[])
    parser.add_argument("-h", "--help", action="store_true")
    given = parser.parse_intermixed_args(argv)
    if given.help:
        print(text)
        return None
    add_own_places(given.config_dir)
    return given


def _show(argv: list[str]) -> int:
    if (given := _given("show", argv, SHOW_HELP, "--png")) is not None:
        from drivetrain import show

        show.show(given.overrides, given.config_dir, given.png)
    return DONE


def _compare(argv: list[str]) -> int:
    return _measured("compare", argv, COMPARE_HELP)


def _ablate(argv: list[str]) -> int:
    return _measured("ablate", argv, ABLATE_HELP)


def _doctor(argv: list[str]) -> int:
    return _measured("doctor", argv, DOCTOR_HELP)


def _tune(argv: list[str]) -> int:
    return _measured("tune", argv, TUNE_HELP)


def _measured(verb: str, argv: list[str], text: str) -> int:
    if (given := _given(verb, argv, text)) is None:
        return DONE
    return int(import_module(f"drivetrain.measure.{verb}").command(given.overrides, given.config_dir))


def _report(argv: list[str]) -> int:
    if {"-h", "--help"}.intersection(argv):
        print(REPORT_HELP)
        return DONE
    from drivetrain.measure import report

    return report.command(argv)


def _show_config(given: argparse.Namespace) -> int:
    from omegaconf import OmegaConf

    from drivetrain.job import prepare

    if given.multirun:
        raise UserError("--cfg job shows the config of one run, and -m starts several: leave one of them out")
    config = prepare(given.overrides, given.config_dir).composed.config
    part = OmegaConf.select(config, given.package) if given.package else config
    if part is None:
        raise UserError(f"--package {given.package}: {did_you_mean(given.package, map(str, config))}")
    print(OmegaConf.to_yaml(part, resolve=given.resolve) if OmegaConf.is_config(part) else part)
    return DONE


def _list(argv: list[str]) -> int:
    from drivetrain import catalogue

    if len(argv) > 1:
        raise UserError(f"drivetrain list shows one group at a time: leave out {' '.join(argv[1:])}")
    catalogue.show(*argv)
    return DONE


def _recipe(argv: list[str]) -> int:
    from drivetrain import recipe_verbs

    return recipe_verbs.command(argv)


def _pack(argv: list[str]) -> int:
    from drivetrain import pack

    return pack.command(argv)


def _completion(argv: list[str]) -> int:
    from drivetrain import completion

    return completion.install(argv)


def _complete(argv: list[str]) -> int:
    from drivetrain import completion

    print("\n".join(completion.candidates(argv)))
    return DONE


VERBS: dict[str, tuple[Callable[[list[str]], int], str]] = {
    "train": (_train, "train what the config says"),
    "list": (_list, "every option of every group, or of one, with what it buys"),
    "compare": (_compare, "techniques side by side in turns: what each brings and costs, and whether the result is still right"),
    "ablate": (_ablate, "what each technique of a recipe brings by itself, and what its loss costs"),
    "doctor": (_doctor, "where a step's time goes, what is wrong, and which overrides are proven to help"),
    "tune": (_tune, "what makes a run faster on this machine, searched for by measuring, kept where it is proven"),
    "report": (_report, "any runs in one table, one CSV and one page with plots"),
    "show": (_show, "draw the learning rate over a run, before it is trained"),
    "recipe": (_recipe, "list, show, check, export, verify or compare recipes"),
    "pack": (_pack, "decode images once, for data=packed"),
    "completion": (_completion, "TAB completion for bash, zsh or fish"),
    "complete": (_complete, ""),
}
