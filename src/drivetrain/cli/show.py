"""`drivetrain show`: preview a run's data and schedule without training."""

from __future__ import annotations

import argparse
import copy
import shutil
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import get_args

from drivetrain.batch import Batch
from drivetrain.cli.arguments import FILE, Command
from drivetrain.core.errors import DONE, UserError
from drivetrain.core.options import horizon as horizons
from drivetrain.core.options import stages
from drivetrain.core.options.horizon import Horizon
from drivetrain.core.options.option import Effect, RunSpec
from drivetrain.core.options.overrides import key_of
from drivetrain.core.world import World
from drivetrain.data import Data
from drivetrain.launch.job import prepare
from drivetrain.scheduler import Scheduler
from drivetrain.ui import plots
from drivetrain.ui.output import echo
from drivetrain.ui.recipe_tree import effect

OF_DATA = ("data", "task")  # an override of these groups also shows the data
MAX_POINTS = 20_000  # per curve; a longer run is sampled at every n-th update
HELP = """\
drivetrain show [group=option] [key=value] …      preview the training data, the learning rate over the run,
                                                  and each option's effect on training: exact, close or changes

  drivetrain show scheduler=cosine scheduler.cycles=3
  drivetrain show recipe=fast epochs=90
  drivetrain show data=imagefolder data.root=photos --data seen.html
  drivetrain show scheduler=onecycle scheduler.momentum=[0.85,0.95] --png schedule.png

  --png FILE            the schedule as an image, drawn by matplotlib
  --data FILE           the data as a page, with samples; without it, data=… or task=… prints them as text
  --out FILE            either of the two, by suffix: .png or .html
  -cd, --config-dir DIR your own options: DIR/<group>/<option>.yaml
"""


def _show(given: argparse.Namespace) -> int:
    if given.out is not None and given.out.suffix not in (".png", ".html"):
        raise UserError(f"--out {given.out}: name a .png for the schedule, or an .html for the data")
    by_suffix = {given.out.suffix: given.out} if given.out is not None else {}
    show(given.overrides, given.config_dir, given.png or by_suffix.get(".png"), given.data or by_suffix.get(".html"))
    return DONE


command = Command("show", _show, HELP, {"--png": FILE, "--data": FILE, "--out": FILE})


def show(overrides: Sequence[str], config_dirs: Sequence[str], file: Path | None = None, page: Path | None = None) -> None:
    """Draw the schedule that `drivetrain train` would follow with these overrides: in the terminal, or as the PNG `file`.

    First print a summary of the training data if an override sets them or `page` is given. `page` receives it as HTML.
    """
    job = prepare(overrides, config_dirs)
    job.log_notices()
    told = page is not None or (file is None and any(key_of(word).split(".")[0] in OF_DATA for word in overrides))
    if told:
        from drivetrain.cli.show_data import sheet_of

        sheet = sheet_of(job.run)
        sheet.show()
        echo(f"written to {sheet.write(page)}\n" if page is not None else "--data FILE draws this as a page, with samples\n")
    try:
        over = _horizon(job.run)
    except UserError as error:
        if file is not None or not told:
            raise
        echo(f"no learning rate is drawn: {error}")
        return
    curves = _curves(job.run, over)
    if file is None:
        echo(_title(job.run, over))
        echo(plots.text(curves, over, min(100, shutil.get_terminal_size((90, 24)).columns)))
        echo(_summary(curves[0]))
    else:
        plots.png(curves, over, _title(job.run, over), file)
        echo(f"written to {file}")
    for line in _stages(job.run, over):
        echo(line)
    if file is None:
        echo(_effects(job.run))
    if note := Scheduler.of(job.run).plot_note:
        echo(f"{job.run.named('scheduler')}: {note}")


def _horizon(run: RunSpec) -> Horizon:
    over, samples = horizons.run_horizon(run), run.data.train_samples()
    if over is None:  # only reading the data shows the length
        import torch

        source = Data.of(run).load_sets(torch.device("cpu")).train
        batch = Batch.of(run).over(run.data.order_of(source, run))
        batch.measure(source, run.runtime.seed, World())
        samples = batch.order.length
        over = horizons.run_horizon(run, samples, batch)
    if over is None:
        raise UserError(
            f"batch.global_batch={run.batch.global_batch} is more than the {samples} training samples, so no update is made:"
            f" set batch.global_batch to {samples} or less"
        )
    return over.at_most(run.debug.updates)


def _curves(run: RunSpec, over: Horizon) -> list[plots.Curve]:
    updates = range(0, over.updates, -(-over.updates // MAX_POINTS))
    rates, momenta = [], []
    ends = [stages.in_updates(end, over) for end in stages.boundaries(run, over)]
    for number, of_stage in enumerate([stage.run for stage in run.stages] or [run]):
        schedule = copy.deepcopy(Scheduler.of(of_stage))
        schedule.set_horizon(over)
        base = of_stage.optimizer.lr * of_stage.batch.lr_factor()
        mine = [u for u in updates if bisect_right(ends, u) == number]
        rates += [(u, base * schedule.lr_factor(u)) for u in mine]
        momenta += [(u, m) for u in mine if (m := schedule.momentum_at(u)) is not None]
    curves = [plots.Curve("lr", rates, 0.0, max(rate for _, rate in rates) or 1.0)]
    if momenta:
        low, high = min(m for _, m in momenta), max(m for _, m in momenta)
        curves.append(plots.Curve("momentum", momenta, low, high if high > low else low + 1))
    return curves


def _title(run: RunSpec, over: Horizon) -> str:
    updates = f"{over.updates:,} updates, {over.ends[0]:,} an epoch{' at first' if Batch.of(run).grow_every else ''}"
    return f"{run.named('scheduler')} {run.named('optimizer')} optimizer.lr={run.optimizer.lr:g}: {updates}"


def _stages(run: RunSpec, over: Horizon) -> Iterator[str]:
    """A line for each stage of the run: its updates and its changes."""
    ends = [stages.in_updates(end, over) for end in stages.boundaries(run, over)]
    for number, (stage, begin, end) in enumerate(zip(run.stages, [0, *ends], [*ends, over.updates], strict=False), 1):
        yield f"stage {number}  updates {begin:,.0f} to {end:,.0f}, {stage.title}"


def _effects(run: RunSpec) -> str:
    """A line for each effect on training, with the settings that have it; settings that are off are left out."""
    groups = [group for group, option in run.choices.items() if option not in ("none", [], ["none"])]
    of = {name: [run.named(group) for group in groups if effect(run, group) == name] for name in get_args(Effect)}
    return "\n".join(f"{name:<8} {' '.join(settings)}" for name, settings in of.items() if settings)


def _summary(curve: plots.Curve) -> str:
    top = max(curve.points, key=lambda point: point[1])
    first, last = curve.points[0][1], curve.points[-1][1]
    return f"{curve.name}: {first:.2e} at first, {top[1]:.2e} at update {top[0]:,}, {last:.2e} at the last"
