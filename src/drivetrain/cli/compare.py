"""`drivetrain compare`: techniques side by side."""

from __future__ import annotations

from collections.abc import Sequence

from drivetrain.cli import arguments
from drivetrain.core.errors import DONE

HELP = """\
drivetrain compare key=a,b [group=x,y] [key=value] …      techniques side by side, relative to the first

  drivetrain compare precision=fp32,bf16 surgery=[],[channels_last]
  drivetrain compare recipe=naive,fast data=digits
  drivetrain compare optimizer=adamw,lamb quality=true      is the result still right?

  rounds=20             at most; each starts fresh processes of all arms, and an arm that is known to 2 % stops early
  block_s=0.4            seconds of a block of timed updates; each arm has two in a round
  quality=true          also train each arm to its end: PASS, FAIL or INCONCLUSIVE against the first arm's own spread
  seeds=5               trainings of each arm for quality=true before the first look, and before each further one
  max_seeds=20          as many at most, while an arm is INCONCLUSIVE
  quality_s=600         no further seeds after so many seconds of training
  judge=[accuracy]      evaluated figures that decide; else the metric that ranks models, and the loss
  target=0.95           of that metric: the seconds until it is reached are judged too
  --recipe FILE         hand the fastest arm on as a recipe that claims what was measured, if it is faster beyond doubt;
                        a better result alone is not handed on
  -cd, --config-dir DIR your own options: DIR/<group>/<option>.yaml

A key that only one arm's option has goes to that arm: optimizer=sgd,adamw optimizer.momentum=0.9. Of an arm whose options claim
the same mathematics (exact or close in `drivetrain list`), the training loss decides too.

Each arm is a process of its own, and only one runs at a time: they take turns, A B B A, so that the machine's drift cancels.
"""


def command(argv: Sequence[str]) -> int:
    """Run `drivetrain compare`; its exit code."""
    if (given := arguments.parse("compare", argv, HELP, "--recipe")) is None:
        return DONE
    from drivetrain.measure.benchmark import compare
    from drivetrain.measure.claims import write

    return compare.command(given.overrides, given.config_dir, write.writer("compare", given.recipe))
