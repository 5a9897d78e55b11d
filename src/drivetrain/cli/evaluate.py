"""`drivetrain evaluate`: a finished run evaluated again, on its own test set or on another one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from drivetrain.cli import run_arguments
from drivetrain.core.errors import DONE, UserError
from drivetrain.core.files import write_json
from drivetrain.ui.output import echo
from drivetrain.ui.sheet import Table

HELP = f"""\
drivetrain evaluate RUN [group=option] [key=value] …      the metrics of a finished run, as its own evaluation computes them

  drivetrain evaluate outputs/2026-11-21/07-37-57-4262f6
  drivetrain evaluate outputs/2026-11-21/07-37-57-4262f6 update=best --out best.json
  drivetrain evaluate outputs/2026-11-21/07-37-57-4262f6 split=validation
  drivetrain evaluate outputs/2026-11-21/07-37-57-4262f6 data=imagefolder data.root=~/other_photos
  drivetrain evaluate outputs/2026-11-21/07-37-57-4262f6 parallel=ddp runtime.device=cpu

  --out FILE            write the figures as JSON
  split=validation      the set that the run was selected by; default: split=test
{run_arguments.OF_CHOICE}

A folder that the run was not trained on, and that has no test/, is used whole; data.holdout=0.1 takes that share of it.
On the same set, with the run's own ranks, batch and device, the figures are those of training to the last digit.
"""


def command(argv: Sequence[str]) -> int:
    """Run `drivetrain evaluate`; its exit code."""
    if (given := run_arguments.parse("evaluate", argv, HELP, out={"type": Path})) is None:
        return DONE
    if given.paths:
        raise UserError(f"drivetrain evaluate takes one run, and was given {', '.join(given.paths)} too")
    from drivetrain.inference.evaluation import evaluate
    from drivetrain.parallel import launched, world_of_environment

    found = evaluate(given.run_dir, given.overrides, given.config_dirs, given.choice)
    if launched() is not None and world_of_environment().rank != 0:  # rank 0 prints
        return DONE
    samples = f"{found.samples:,} sample{'s' * (found.samples != 1)}"
    which = f"{found.split} set, {samples}, update {found.update}" + (", averaged" if found.average else "")
    echo(f"{found.split} set: {samples} of {found.source}")
    Table((str(given.run_dir), which), [(name, f"{value:.6g}") for name, value in found.metrics.items()]).show()
    if given.options.out is not None:
        given.options.out.parent.mkdir(parents=True, exist_ok=True)
        write_json(given.options.out, asdict(found))
        echo(f"written to {given.options.out}")
    return DONE


def complete(words: Sequence[str], last: str) -> list[str]:
    """What TAB offers."""
    return run_arguments.complete(words, last, "--out", "split=validation")
