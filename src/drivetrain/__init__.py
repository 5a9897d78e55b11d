"""drivetrain: every training technique is one config override, and measured."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from drivetrain.measure.result import Result

__version__ = "0.1.0"
STARTED = time.time()  # `time_to_first_step_s` counts from here; forked ranks inherit it


def train(overrides: Sequence[str] = ()) -> Result:
    """Run `python -m src.train <overrides>` and return its result.

    Raises `drivetrain.errors.UserError` for a bad config; a run that fails later is returned with
    its `status` and `error` like any other.
    """
    from drivetrain.launch import train as launch_train

    return launch_train(list(overrides))
