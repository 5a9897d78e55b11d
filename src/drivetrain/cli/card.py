"""`drivetrain card`: the model card of a finished run."""

from __future__ import annotations

from collections.abc import Sequence

from drivetrain.cli import run_arguments
from drivetrain.core.errors import DONE, UserError
from drivetrain.core.paths import expanded
from drivetrain.ui.output import echo

HELP = """\
drivetrain card RUN [FILE]      a model card of a finished run, as Hugging Face's hub shows it

  drivetrain card outputs/2026-11-21/07-37-57-4262f6
  drivetrain card outputs/2026-11-21/07-37-57-4262f6 model/README.md

  FILE                  the file to write; default: RUN/README.md

It has the figures with their intervals, data, training, limits, and the recipe, from the run's own files. What only you
know, such as the licence, is marked to be filled in. `drivetrain export RUN FOLDER --format transformers` writes it into
its folder.
"""


def command(argv: Sequence[str]) -> int:
    """Run `drivetrain card`; its exit code."""
    if (given := run_arguments.parse("card", argv, HELP)) is None:
        return DONE
    if len(given.paths) > 1 or given.overrides:
        raise UserError("drivetrain card needs a run's directory, and perhaps a file: drivetrain card RUN [FILE]")
    from drivetrain.inference import card
    from drivetrain.run import reader

    run = reader.read(given.run_dir)
    echo(f"written to {card.write(run, expanded(given.paths[0]) if given.paths else run.path / 'README.md')}")
    return DONE


def complete(words: Sequence[str], last: str) -> list[str]:
    """What TAB offers."""
    return run_arguments.complete(words, last)
