"""`drivetrain certify`: is a run the same mathematics as another one?"""

from __future__ import annotations

from collections.abc import Sequence

from drivetrain.cli import arguments, completion
from drivetrain.core.errors import DONE

HELP = """\
drivetrain certify [group=option] [key=value] … [against [group=option] …]     is this the same mathematics?

  drivetrain certify recipe=fast                          beside the same run without its exact and close techniques
  drivetrain certify model=gpt task=language_modelling data=stdlib precision=bf16 against precision=fp32
  drivetrain certify model=mlp parallel=ddp batch=accumulate against parallel=single batch=fixed

Both runs make a few updates from one state with the same samples. Answers:
  exact                 bit for bit the same, or only the order of sums differs
  within rounding       the differences are those that the run's number format gives
  differs               with the first layer or phase that does, and the update in which it does

After `against`: the settings of the other run that differ; the rest is the same. Without it, each technique of the run that
claims to be exact or close (`drivetrain list`) is switched off in the other run.

  steps=4               updates that are compared
  -cd, --config-dir DIR your own options: DIR/<group>/<option>.yaml

exit codes: 0 exact or within rounding · 1 differs · 2 cannot be judged, or a bad command line
"""


def command(argv: Sequence[str]) -> int:
    """Run `drivetrain certify`; its exit code."""
    words = list(argv)
    at = words.index("against") if "against" in words else len(words)
    if (given := arguments.parse("certify", words[:at], HELP)) is None:
        return DONE
    folders = [word for folder in given.config_dir for word in ("--config-dir", folder)]
    if (other := arguments.parse("certify", [*folders, *words[at + 1 :]], HELP)) is None:
        return DONE
    from drivetrain.measure.certify import certify

    return certify.command(given.overrides, other.overrides if at < len(words) else None, other.config_dir)


def complete(words: Sequence[str], last: str) -> list[str]:
    """What TAB offers: overrides, and once `against`."""
    offered = completion.overrides([word for word in words if word != "against"], last)
    return offered if "against" in words or "=" in last else ["against", *offered]
