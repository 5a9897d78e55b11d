"""`drivetrain forecast`: memory, time and limits of a run before it is started."""

from __future__ import annotations

from collections.abc import Sequence

from drivetrain.cli import arguments, completion
from drivetrain.core.errors import DONE

HELP = """\
drivetrain forecast [device=NAME] [group=option] [key=value] …      peak memory, time and limits of a run, before it starts

  drivetrain forecast model=gpt task=language_modelling data=stdlib precision=bf16
  drivetrain forecast recipe=imagenet_resnet50 data=synthetic data.shape=[3,224,224] device=h100
  drivetrain forecast model=resnet9 parallel=fsdp parallel.nproc=8 device=a100 what_if=false

  device=here           this machine, of which a short look is taken; or h100, h200, a100, 4090, … (TAB names them)
  seconds=20            about how long it may take once the run is built
  what_if=true          which further override would help most: precision, recomputation, compiling, ranks
  --json                the figures as JSON: each with its interval, as [value, low, high]
  -cd, --config-dir DIR your own options: DIR/<group>/<option>.yaml

The run's own step is made on tensors without values: nothing is trained and nothing is written. Figures for devices that are
not here come from data sheets, and were not measured.

exit codes: 0 it fits the device's memory · 1 it does not · 2 a bad command line, or a step that cannot be forecast
"""


def command(argv: Sequence[str]) -> int:
    """Run `drivetrain forecast`; its exit code."""
    made = arguments.parser("forecast")
    made.add_argument("--json", action="store_true")
    made.add_argument("--device")
    given = arguments.parse_with(made, argv)
    if given.help:
        arguments.echo(HELP)
        return DONE
    from drivetrain.measure.forecast import forecast

    device = [f"device={given.device}"] if given.device else []  # as other tools write it
    return forecast.command([*given.overrides, *device], given.config_dir, given.json)


def complete(words: Sequence[str], last: str) -> list[str]:
    """What TAB offers: devices after `device=`, settings and overrides."""
    from drivetrain.measure.forecast.devices import NAMES

    if last.startswith("device="):
        return [f"device={name}" for name in NAMES]
    return ["device=", "seconds=", "what_if=", "--json", *completion.overrides(words, last)]
