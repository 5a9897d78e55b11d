"""`drivetrain report DIR…`: any runs and sweeps as one table, one CSV file and one page."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from drivetrain.core.errors import DONE, UserError, refuse
from drivetrain.core.machine.paths import expanded
from drivetrain.core.options.option import CountOrZero
from drivetrain.core.options.selection import REPEATS, Reach, Selection
from drivetrain.core.typed import fits
from drivetrain.measure import verbs
from drivetrain.measure.benchmark import quality
from drivetrain.measure.benchmark.variants import TimesToTarget, trained_run
from drivetrain.measure.intervals import deviation
from drivetrain.measure.report.samples import samples_of
from drivetrain.run import directory
from drivetrain.run.reader import RunFiles, find, put_on_one_clock, read
from drivetrain.run.result import Result
from drivetrain.ui import sheet
from drivetrain.ui.output import echo
from drivetrain.ui.pages import run_table
from drivetrain.ui.pages import runs as pages
from drivetrain.ui.pages.run_table import Target

ENDED = ("completed", "failed", "diverged")  # the statuses of runs that ended by themselves
LOOKED_AT = 512  # random samples of a set, from which the worst are shown
MOMENTS = 2.0  # seconds of training: as many samples are evaluated when a run ends
Repeats = dict[tuple[int, int], RunFiles]  # the runs of one config by their values of REPEATS


def summarize_repeats(runs: Sequence[RunFiles], target: Target = None) -> sheet.Table:
    """A row for each config with runs of several seeds or folds: its metric's mean and deviation, and a verdict.

    The verdict compares its quality with the oldest such config on the same data and loss, seed by seed and fold by fold.
    Stopped runs are left out. With a `target` each row has the number of runs that reached it, and the fastest comes first.
    """
    groups: dict[str, Repeats] = {}
    for run in runs:
        seed, fold = (run.config.get(key, 0) for key in REPEATS)
        if run.config and run.status in ENDED and fits(seed, int) and fits(fold, int):
            key = str(sorted((k, str(v)) for k, v in run.config.items() if k not in REPEATS))
            group = groups.setdefault(key, {})
            if run.status == "completed" or (seed, fold) not in group:
                group[seed, fold] = run
    configs = [group for group in groups.values() if len(group) > 1]
    metrics = {run.metric for group in configs for run in group.values() if run.metric}
    of = next(iter(metrics))[0] if len(metrics) == 1 else ""
    over = _repeated([place for group in configs for place in group])
    names = run_table.named([next(iter(group.values())) for group in configs], REPEATS)
    rows = [[name, *_spread(group, of), "", ""] for name, group in zip(names, configs, strict=True)]
    means = {n: statistics.mean(values) for n, group in enumerate(configs) if len(values := _ends(group)) == len(group)}
    best = max if metrics and next(iter(metrics))[1] else min
    winner = best(means, key=lambda n: means[n]) if of and means and target is None else None
    for row, group in zip(rows[1:], configs[1:], strict=True):
        first = next(other for other in configs if _task(other) == _task(group))
        both = sorted(group.keys() & first.keys())
        if first is not group and len(both) > 1 and (metric := first[both[0]].metric) is not None:
            ours, theirs = ([trained_run(side[place], *place) for place in both] for side in (group, first))
            found = quality.verdict(ours, theirs, Selection(metric[0], max if metric[1] else min))
            row[3:] = found.outcome, found.reason
    header = ["config", f"{of or 'mean'} ± deviation", over, "against the first", "because"]
    if target is not None:
        reached = [[run.to_target(target) or (None, None) for run in group.values()] for group in configs]
        times = [TimesToTarget("", [s for s, _ in each], [updates for _, updates in each]) for each in reached]
        for row, each in zip(rows, times, strict=True):
            when = f", after {each.when} (median)" if math.isfinite(each.median) else ""
            row.append(f"{each.reached} of {len(each.seconds)} {over}{when}")
        rows = [row for _, row in sorted(zip(times, rows, strict=True), key=lambda found: found[0].rank)]
        header.append(f"{run_table.said(target)} reached by")
    made = sheet.Table(
        header, rows, f"Over {over}", ("because",), spare=("because",), width=run_table.WIDTH, sortable=True, winner=winner
    )
    return made.used(3)


def _repeated(places: Sequence[tuple[int, int]]) -> str:
    """The word for the repetitions of one config: seeds, folds or runs."""
    seeds, folds = (len({place[n] for place in places}) > 1 for n in (0, 1))
    return "runs" if seeds and folds else "folds" if folds else "seeds"


def _task(group: Repeats) -> str:
    """The runs' data and loss."""
    config = next(iter(group.values())).config
    return str(sorted((k, str(v)) for k, v in config.items() if k.split(".")[0] in ("data", "loss") and k not in REPEATS))


def _ends(group: Repeats) -> list[float]:
    """The metric at the end of the runs that completed."""
    return [v for run in group.values() if run.status == "completed" and (v := run.final()) is not None]


def _spread(group: Repeats, of: str) -> tuple[str, str]:
    """The mean and deviation of a metric, with its name unless it is that `of` all, and the number of completed runs."""
    values, metric = _ends(group), next((run.metric for run in group.values() if run.metric), None)
    named = f"{metric[0]} " if metric and not of else ""
    found = f"{named}{statistics.mean(values):.4f} ± {deviation(values):.4f}" if len(values) > 1 else "–"
    return found, f"{len(values)}" if len(values) == len(group) else f"{len(values)} of {len(group)} completed"


@dataclass
class ReportSettings:
    """The settings of `drivetrain report`."""

    # A value of the metric, or accuracy>=0.98. None: the worst of the completed runs' best values
    target: float | str | None = None
    samples: CountOrZero = 12  # on the page of one run: the worst ones, and as many others
    out: str | None = None  # a folder; None: the folder of the one run, or a new one under outputs/report


def command(argv: Sequence[str], config_dirs: Sequence[str] = ()) -> int:
    """Run `drivetrain report`; return its exit code. Runs know their own `config_dirs`."""
    settings, rest = verbs.split(argv, ReportSettings)
    refuse(
        f"'{argument}' is no setting of report, which has target=, samples= and out=, nor a folder"
        for argument in rest
        if "=" in argument and not Path(argument).exists()
    )
    given = settings.target
    target: Target = Reach.parse(given) if isinstance(given, str) else given
    if target is None and given is not None:
        raise UserError(f"target={given}: give a number of the runs' own metric, or a metric's value as 'target=accuracy>=0.98'")
    runs = find([expanded(argument) for argument in rest or ["outputs"]])
    if isinstance(target, Reach) and not any(target.metric in values for run in runs for values in run.evaluated.values):
        raise UserError(f"target={target}: no run has evaluated {target.metric}")
    if len(runs) == 1 and target is not None:
        echo(sheet.sentence(f"{runs[0].path.name} {run_table.alone_at(runs[0], target)}"))
    elif isinstance(target, Reach) and not put_on_one_clock(runs, target):
        echo("The seconds to the target count from each run's first record: not all that reached it have noted it (target=).")
    if target is not None:
        runs.sort(key=lambda run: (run.to_target(target) or (math.inf,))[0])
    out = expanded(settings.out) if settings.out else directory.new(Path("outputs"), "report")
    page = _sheet(runs, target, out, settings.samples)
    page.show()
    if len(runs) == 1 and settings.out is None:
        try:
            echo(f"written to {page.write(runs[0].path / pages.FILE)}")
            return DONE
        except OSError as error:
            echo(f"{runs[0].path} takes no page ({error.strerror})")
    return _write(page, runs, target, out)


def of_sweep(folder: Path) -> None:
    """Write the page and the CSV of a sweep's runs into its folder, if any began and the disk has room."""
    with suppress(OSError, UserError):
        runs = find([folder])
        if (repeats := summarize_repeats(runs)).rows:
            echo(f"\n{repeats.name}, at the end of training:")
            repeats.show()
        _write(_sheet(runs, None, folder), runs, None, folder)


def add_samples(result: Result) -> None:
    """Add samples to the page of a run in one process, as many as it trains on in MOMENTS seconds."""
    place = result.run_dir / pages.FILE if result.run_dir is not None else None
    if place is not None and place.exists() and result.status == "completed" and result.world_size == 1:
        most = min(LOOKED_AT, max(ReportSettings.samples, int(MOMENTS * (result.samples_per_second or 0))))
        with suppress(OSError):  # on a full disk there are no samples
            _sheet([read(place.parent)], None, place.parent, ReportSettings.samples, most).write(place)


def _sheet(runs: Sequence[RunFiles], target: Target, folder: Path, count: int = 0, most: int = LOOKED_AT) -> sheet.Sheet:
    """The sheet of runs; for one with saved weights, with the worst `count` of `most` samples and as many others."""
    shown = len(runs) == 1 and count and (runs[0].path / "checkpoints").is_dir()
    repeats = summarize_repeats(runs, target)
    samples = samples_of(runs[0], count, most) if shown else ()
    return pages.sheet_of(runs, samples, repeats if repeats.rows else None, target, folder)


def _write(page: sheet.Sheet, runs: Sequence[RunFiles], target: Target, folder: Path) -> int:
    """Write the page, and the whole table as CSV, to a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    shown = run_table.common_target(runs) if target is None else target
    run_table.table(runs, shown, ranked=target is not None).write_csv(folder / "report.csv")
    page.write(folder / pages.FILE)
    echo(f"written to {folder}/{pages.FILE} and report.csv")
    return DONE
