"""drivetrain: every training technique is one config override, and measured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from drivetrain.core.callback import Callback as Callback
from drivetrain.core.callback import Event as Event
from drivetrain.core.process import __version__ as __version__

if TYPE_CHECKING:
    from drivetrain.run.result import Result


def train(overrides: Sequence[str] = ()) -> Result:
    """Run `python -m src.train <overrides>` and return its result.

    Raises `drivetrain.core.errors.UserError` for a bad config; a run that fails later is returned with
    its `status` and `error` like any other.
    """
    from drivetrain.launch.launcher import train as launch_train

    return launch_train(list(overrides))
