"""The command: verbs, and for `train` compose → check → launch."""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path

from drivetrain import __version__
from drivetrain.cli import help
from drivetrain.core.errors import BAD_CONFIG, DONE, FAILED, INTERRUPTED, UserError, did_you_mean
from drivetrain.core.paths import add_own_places
from drivetrain.parallel import launched
from drivetrain.ui import terminal


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
        from drivetrain.cli import list

        print(help.TRAIN)
        list.show()
        return DONE
    add_own_places(given.config_dir)
    if given.cfg:
        return _show_config(given)
    for flag, value in (("--resolve", given.resolve), ("--package", given.package)):
        if value:
            raise UserError(f"{flag} goes with --cfg job, which shows the config and stops")
    from drivetrain import sweep
    from drivetrain.launch import launcher
    from drivetrain.launch.job import prepare

    if given.multirun or sweep.is_sweep_recipe(given.overrides):
        return sweep.run(given.overrides, given.config_dir, given.quiet)
    ended = launcher.launch(prepare(given.overrides, given.config_dir), quiet=given.quiet)
    if ended.result.run_dir is not None:  # rank 0
        terminal.show_result(ended.result)
    if ended.result.error and (ended.result.run_dir is not None or launched() is None):  # else rank 0 tells
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
    if (given := _given("show", argv, help.SHOW, "--png")) is not None:
        from drivetrain.cli import show

        show.show(given.overrides, given.config_dir, given.png)
    return DONE


def _compare(argv: list[str]) -> int:
    return _measured("benchmark.compare", argv, help.COMPARE)


def _ablate(argv: list[str]) -> int:
    return _measured("benchmark.ablate", argv, help.ABLATE)


def _doctor(argv: list[str]) -> int:
    return _measured("profile.doctor", argv, help.DOCTOR)


def _tune(argv: list[str]) -> int:
    return _measured("tune.tune", argv, help.TUNE)


def _measured(module: str, argv: list[str], text: str) -> int:
    if (given := _given(module.rpartition(".")[2], argv, text)) is None:
        return DONE
    return int(import_module(f"drivetrain.measure.{module}").command(given.overrides, given.config_dir))


def _report(argv: list[str]) -> int:
    if {"-h", "--help"}.intersection(argv):
        print(help.REPORT)
        return DONE
    from drivetrain.measure.report import report

    return report.command(argv)


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


def _list(argv: list[str]) -> int:
    from drivetrain.cli import list

    if len(argv) > 1:
        raise UserError(f"drivetrain list shows one group at a time: leave out {' '.join(argv[1:])}")
    list.show(*argv)
    return DONE


def _recipe(argv: list[str]) -> int:
    from drivetrain.cli import recipe

    return recipe.command(argv)


def _export(argv: list[str]) -> int:
    from drivetrain.cli import export

    return export.command(argv)


def _pack(argv: list[str]) -> int:
    from drivetrain.cli import pack

    return pack.command(argv)


def _completion(argv: list[str]) -> int:
    from drivetrain.cli import completion

    return completion.install(argv)


def _complete(argv: list[str]) -> int:
    from drivetrain.cli import completion

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
    "export": (_export, "a run's weights as one plain safetensors file"),
    "pack": (_pack, "decode images once, for data=packed"),
    "completion": (_completion, "TAB completion for bash, zsh or fish"),
    "complete": (_complete, ""),
}
