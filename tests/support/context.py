"""A build context for options that are built by themselves."""

from pathlib import Path
from typing import Any

import torch

from drivetrain.core.options.context import BuildContext
from drivetrain.core.options.option import RunSpec
from drivetrain.core.world import World
from drivetrain.parallel import Parallel


def context(world: World | None = None, **known: Any) -> BuildContext:
    """The context of one CPU process, with what else is `known` of the run."""
    made = BuildContext(RunSpec({}, {}, {}), world or World(), Path())
    made.device = torch.device("cpu")
    made.parallel, made.example = Parallel(), torch.zeros(2, 1, dtype=torch.int64)
    for name, value in known.items():
        setattr(made, name, value)
    return made
