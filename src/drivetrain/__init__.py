"""drivetrain: every training technique is one config override, and measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from drivetrain.core.process import __version__ as __version__

if TYPE_CHECKING:
    from drivetrain.run.result import Result


def train(config: Sequence[str] | Mapping[str, Any] = (), config_dirs: Sequence[str] = ()) -> Result:
    """Run `python -m src.train <overrides>` and return its result.

    `config` is a list of overrides, or a config that your own program composed, such as the DictConfig of a function with
    @hydra.main: then the run's files go to Hydra's output directory, if no run is there yet. `config_dirs` are as --config-dir.
    Raises `drivetrain.core.errors.UserError` for a bad config; a run that fails later is returned with
    its `status` and `error` like any other.
    """
    from drivetrain.launch.launcher import train as launch_train

    return launch_train(config, config_dirs)
