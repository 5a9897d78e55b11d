"""`drivetrain tune`: the settings that make a run faster on this machine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from drivetrain.cli import arguments
from drivetrain.core.errors import DONE

HELP = """\
drivetrain tune [what=all] [group=option] [key=value] …      what makes this run faster on this machine, kept where proven

  drivetrain tune model=resnet9                        loaders, precision, layout, optimizer, micro-batch, compiling; then lr
  drivetrain tune what=workers data=imagefolder data.root=photos
  drivetrain tune what=lr optimizer=sgd                the range test, with a plot: advice, nothing is set

  what=all              or workers (loaders and their counts), batch (micro-batches of the same global batch), lr
  budget_s=600          about how many seconds it may take
  rounds=8, block_s=0.3  of each comparison; candidates that fall behind stop early
  quality=true          is the result still right? seeds=5 trainings of each, as far as the budget goes
  lr_updates=150        updates of the range test
  'target=accuracy>=0.98'  in place of speed: which global batch near the gradient noise scale gets there soonest, over seeds=5
                        (or --target 'accuracy>=0.98')
  --recipe FILE         where to write the recipe with its claim, in place of a file below outputs/tune
  -cd, --config-dir DIR your own options: DIR/<group>/<option>.yaml

Writes a recipe with its measurements, tune.json and a page under outputs/tune. The run itself is not changed.
"""


def command(argv: Sequence[str]) -> int:
    """Run `drivetrain tune`; its exit code."""
    made = arguments.parser("tune")
    made.add_argument("--recipe", type=Path)
    made.add_argument("--target")
    given = arguments.parse_with(made, argv)
    if given.help:
        arguments.echo(arguments.fold(HELP))
        return DONE
    from drivetrain.measure.tune import tune

    target = [] if given.target is None else [f"target={given.target}"]
    return tune.command([*given.overrides, *target], given.config_dir, given.recipe)
