"""`drivetrain doctor`: where a step's time goes, and which overrides help."""

from __future__ import annotations

from collections.abc import Sequence

from drivetrain.cli import arguments
from drivetrain.core.errors import DONE

HELP = """\
drivetrain doctor [group=option] [key=value] …      where a step's time goes, what is wrong, and what is proven to help

  drivetrain doctor model=own model.target=my_pkg.Net data=own data.target=my_pkg.Data trust=[my_pkg]
  drivetrain doctor recipe=naive rounds=16

  prove=false           only examine the step
  profile_s=2              seconds of each examination of the step
  rounds=8, block_s=0.4  of the comparison that proves the overrides
  --recipe FILE         where to write the recipe with its claim, in place of a file below outputs/doctor
  -cd, --config-dir DIR your own options: DIR/<group>/<option>.yaml
"""


def command(argv: Sequence[str]) -> int:
    """Run `drivetrain doctor`; its exit code."""
    if (given := arguments.parse("doctor", argv, HELP, "--recipe")) is None:
        return DONE
    from drivetrain.measure.profile import doctor

    return doctor.command(given.overrides, given.config_dir, given.recipe)
