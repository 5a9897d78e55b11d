"""`drivetrain ablate`: what each technique of a recipe brings."""

from __future__ import annotations

from collections.abc import Sequence

from drivetrain.cli import arguments
from drivetrain.core.errors import DONE

HELP = """\
drivetrain ablate recipe=fast baseline=naive [key=value] …   what each technique of a recipe brings, and what leaving it out costs

  drivetrain ablate recipe=fast baseline=naive data=digits model=resnet9
  drivetrain ablate recipe=mine.yaml quality=true          is the result still right, technique by technique?

The arms are the baseline with each technique (alone), the recipe without each (without), and the techniques added one after
another to the baseline, the best first (steps). tables=[steps] measures those alone, in the order of the config.

  rounds=8              as for `drivetrain compare`, which says what block_s is too
  quality=true          a second column: is the result still as good? seeds, max_seeds, quality_s, judge and target are
                        compare's; a config that several tables have is trained once
  --recipe FILE         write the recipe with the claim that the last of the steps measured
  -cd, --config-dir DIR your own options: DIR/<group>/<option>.yaml
"""


def command(argv: Sequence[str]) -> int:
    """Run `drivetrain ablate`; its exit code."""
    if (given := arguments.parse("ablate", argv, HELP, "--recipe")) is None:
        return DONE
    from drivetrain.measure.benchmark import ablate
    from drivetrain.measure.claims import write

    return ablate.command(given.overrides, given.config_dir, write.writer("ablate", given.recipe, last=True))
