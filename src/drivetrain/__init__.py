"""drivetrain: every training technique is one config override, and what it brings can be measured."""

import os
import sys

# `python -m drivetrain` puts the working directory first on the import path, where a stranger's typing.py may lie. It is
# removed before any import, even of `annotations` from `__future__`.
if (
    sys.argv[:1] == ["-m"]  # Python is still looking up the module, named before the arguments
    and "drivetrain" in sys.orig_argv[-len(sys.argv)].partition(".")[0]
    and not sys.flags.safe_path
    and (not sys.path[0] or sys.path[0] == os.getcwd())
):
    del sys.path[0]

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from drivetrain.core.machine.isolation import isolated
from drivetrain.core.machine.process import __version__ as __version__
from drivetrain.core.user.callback import Callback as Callback
from drivetrain.core.user.callback import Event as Event

if TYPE_CHECKING:
    import pandas

    from drivetrain.inference.loaded import LoadedRun
    from drivetrain.measure.benchmark.compare import Comparison
    from drivetrain.measure.profile.doctor import Diagnosis
    from drivetrain.measure.report.trained import TrainedRun


def train(config: Sequence[str] | Mapping[str, object] = (), config_dirs: Sequence[str] = (), **keywords: object) -> "TrainedRun":
    """Run `python -m src.train <overrides>` and return its result.

    `config` is a list of overrides, or a config that your own program composed, such as the DictConfig of a function with
    @hydra.main: then the run's files go to Hydra's output directory, if no run is there yet. `config_dirs` are as --config-dir.
    Keywords are overrides too: train(epochs=3, model="mlp"), and **{"optimizer.lr": 0.1} for a key with a dot. `model`, `loss`,
    `data`, `metrics` and `callbacks` take classes, functions and objects too: model=Net, data=(training_set, validation, test).
    Raises `drivetrain.core.errors.UserError` for a bad config; a run that fails later is returned with its `status` and `error`
    like any other.
    """
    from drivetrain.launch.launcher import train as launch_train
    from drivetrain.measure.report.trained import TrainedRun

    return TrainedRun.of(launch_train(config, config_dirs, keywords))


@isolated()
def sweep(overrides: Sequence[str] = (), config_dirs: Sequence[str] = (), **keywords: object) -> "pandas.DataFrame":
    """Run `python -m src.train -m <overrides>`, such as ["optimizer=sgd,adamw"], and return its runs, as `runs` does.

    Keywords are overrides too: sweep(optimizer="sgd,adamw"). It needs pandas (pip install 'drivetrain[pandas]'). Raises
    `drivetrain.core.errors.UserError` if no job can run; jobs that fail are rows with their `status` and `error`.
    """
    from drivetrain.core.options.overrides import words_of
    from drivetrain.measure.report import report
    from drivetrain.run.reader import as_frame
    from drivetrain.run.records import need_pandas
    from drivetrain.sweeps import driver

    need_pandas("drivetrain.sweep")
    folder, _ = driver.run(words_of("drivetrain.sweep", overrides, keywords), config_dirs)
    report.of_sweep(folder)
    return as_frame(folder)


@isolated()
def compare(overrides: Sequence[str] = (), config_dirs: Sequence[str] = (), **keywords: object) -> "Comparison":
    """Run `drivetrain compare <overrides>`, such as ["precision=fp32,bf16", "quality=true"], and return the measurements.

    Keywords are overrides too: compare(precision="fp32,bf16", quality=True).

    A notebook shows its answer and its table; `rows` has the figures of each variant. Raises `drivetrain.core.errors.UserError`
    if there is nothing to compare.
    """
    from drivetrain.core.options.overrides import words_of
    from drivetrain.measure.benchmark.compare import run

    return run(words_of("drivetrain.compare", overrides, keywords), config_dirs)[0]


@isolated()
def doctor(overrides: Sequence[str] = (), config_dirs: Sequence[str] = (), **keywords: object) -> "Diagnosis":
    """Run `drivetrain doctor <overrides>` and return its findings: `profile`, `problems` and `gains`.

    Keywords are overrides too: doctor(recipe="naive").

    A notebook shows the verdict and the table. Raises `drivetrain.core.errors.UserError` for an invalid run.
    """
    from drivetrain.core.options.overrides import words_of
    from drivetrain.measure.profile.doctor import examine

    return examine(words_of("drivetrain.doctor", overrides, keywords), config_dirs)


@isolated()
def load(
    run_dir: Path | str,
    overrides: Sequence[str] = (),
    *,
    update: int | Literal["best", "last"] | None = None,
    average: bool | float | None = None,
    config_dirs: Sequence[str] = (),
) -> "LoadedRun":
    """Load a finished run: its `model` in evaluation mode, its `transforms`, its `classes`, and `predict(x)`.

    The weights are the best checkpoint's if the run kept it (saving=best), else the newest one's; `update` chooses another
    checkpoint. `average` chooses the averaged weights (None: if the run keeps an average); a number is their width
    (ema=post_hoc). Overrides change the config, such as `runtime.device=cpu`. Raises `drivetrain.core.errors.UserError` if
    there is no such run, or if its weights do not fit.
    """
    from drivetrain.inference import loaded
    from drivetrain.inference.finished import Choice

    return loaded.load(run_dir, overrides, config_dirs, Choice(update, average))


def runs(folder: Path | str = "outputs") -> "pandas.DataFrame":
    """Return the runs in a folder and below, the oldest first: a row for each, with its settings, metrics and times.

    It needs pandas (pip install 'drivetrain[pandas]').
    """
    from drivetrain.run.reader import as_frame

    return as_frame(folder)
