"""`drivetrain bisect`: which of the changes between two configs makes the difference."""

from __future__ import annotations

from collections.abc import Sequence

from drivetrain.cli import arguments, completion
from drivetrain.core.errors import DONE

HELP = """\
drivetrain bisect GOOD BAD [key=value] …      which of their differing knobs makes BAD slower, or its result worse?

  drivetrain bisect naive fast data=digits                              two recipes
  drivetrain bisect outputs/2026-01-05/11-02-40-1f3c9a mine.yaml        a run, and a recipe's file
  drivetrain bisect 'precision=fp32' 'precision=bf16 compile=inductor' model=resnet9
                        overrides in quotes; what follows GOOD and BAD, both have

  quality=true          bisect the result: the final metric, by trainings with the same seeds; without it, samples a second
  rounds=40             of each comparison, at most: a comparison ends when its interval is clear
  seeds=16              trainings of each config for quality=true, at most
  block_s=0.4           seconds of a block of timed updates; each config has two in a round
  budget_s=3600         seconds for all comparisons, approximately
  -cd, --config-dir DIR your own options: DIR/<group>/<option>.yaml

Subsets of the changes are put on top of GOOD, and compared with GOOD in turns as `drivetrain compare` does it. The answer is
the smallest set that makes the difference, also where several changes do so only together. A group's option and its keys are
one change. A BAD that fails is searched for what makes it fail.

exit codes: 0 named, or they do not differ · 1 not resolved within the budget, or GOOD fails · 2 a bad command line
"""


def command(argv: Sequence[str]) -> int:
    """Run `drivetrain bisect`; its exit code."""
    if (given := arguments.parse("bisect", argv, HELP)) is None:
        return DONE
    from drivetrain.measure.bisect import bisect

    return bisect.command(given.overrides, given.config_dir)


def complete(words: Sequence[str], last: str) -> Sequence[str]:
    """What TAB offers: recipes and runs for GOOD and BAD, then overrides."""
    from pathlib import Path

    from drivetrain.recipe import places
    from drivetrain.run import directory

    if len([word for word in words if not word.startswith("-")]) >= 2 or "=" in last:
        return completion.overrides(words, last)
    return [*places.names(), *(str(path) for path in directory.newest_first(Path("outputs"))[:50])]
