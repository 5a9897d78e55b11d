"""`drivetrain replay RUN`: an update of a run again, exactly, with its samples and layers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from drivetrain.core.errors import DONE, UserError
from drivetrain.core.machine import forking
from drivetrain.core.machine.paths import expanded
from drivetrain.core.machine.signals import ended_by_signals
from drivetrain.core.options.option import Count
from drivetrain.launch import job as jobs
from drivetrain.measure import verbs
from drivetrain.measure.replay.judge import Cause, cause, ranges
from drivetrain.measure.replay.record import Found, Plan, Recorder, worse
from drivetrain.run import directory, records
from drivetrain.run.result import Result
from drivetrain.saving import manifest
from drivetrain.ui.pages import charts
from drivetrain.ui.progress import Steps
from drivetrain.ui.sheet import Section, Sheet, Table, under, words

if TYPE_CHECKING:
    from drivetrain.engine.trainer import Trainer

LIMIT_S = 7 * 86_400.0
BEFORE = 20  # records that a spike is compared with
SHOWN = 12  # samples and layers in the terminal

Windows = dict[int, tuple[int, float | None]]  # the update of a record → the update at which it begins, and the mean loss


@dataclass
class ReplaySettings:
    """The settings of `drivetrain replay`."""

    update: Count | None = None  # None: where it diverged, else its largest spike
    back: Count = 50  # updates before it that are looked at too
    samples: Count = 64  # of each micro-batch, whose gradients are taken


@dataclass
class Replayed:
    """An update that was made again."""

    start: int  # the update of the checkpoint; 0: the run's start
    found: Found
    same: list[int]  # records whose losses are bit for bit those of the run
    other: list[int]  # records whose losses differ
    cause: Cause


def windows_of(run_dir: Path, begin: int = 0) -> Windows:
    """The records of a run's training losses."""
    found: Windows = {}
    for record in records.read(run_dir / "metrics.jsonl").records:
        if record.get("event") == "train":
            found[record["update"]] = begin, record.get("loss")
        if record.get("event") in ("train", "resume"):
            begin = record["update"]
    return found


def spike(windows: Windows) -> int | None:
    """The record whose loss is furthest above those before, by their own spread."""
    found, before = dict[int, float](), list[float]()
    for update in sorted(windows):
        loss = windows[update][1]
        if loss is not None and len(before) >= 3:
            usual = median(before[-BEFORE:])
            spread = median(abs(each - usual) for each in before[-BEFORE:])
            found[update] = (loss - usual) / (spread + 1e-3 * abs(usual) + 1e-12)
        before += [] if loss is None else [loss]
    return max(found, key=lambda update: found[update], default=None)


def planned(run_dir: Path, settings: ReplaySettings) -> Plan:
    """The updates to look at. Raises UserError."""
    windows, result = windows_of(run_dir), Result.read(run_dir)
    last = max([*windows, result.updates if result is not None else 0], default=0)
    if not last:
        raise UserError(f"{run_dir} has made no update yet: there is nothing to replay")
    if settings.update is not None:
        if settings.update > last:
            raise UserError(f"update={settings.update}: {run_dir} has made {last} updates: name one of them")
        low = high = settings.update
    elif result is not None and result.status == "diverged":
        low, high = min(max(windows, default=0) + 1, last), last
    else:
        high = spike(windows) or last
        low = windows[high][0] + 1 if high in windows else high
    until = min((update for update in windows if update >= high), default=high)
    return Plan(low, high, settings.back, until, settings.samples)


def replay(
    run_dir: Path, overrides: Sequence[str], config_dirs: Sequence[str], settings: ReplaySettings
) -> tuple[jobs.Job, Replayed]:
    """Train a run again up to an update, in a folder that is removed. Raises UserError."""
    import torch  # noqa: F401 - imported once here, because the processes are forked

    plan = planned(run_dir, settings)
    job = jobs.prepare([*overrides, "logger=[]", f"resume={run_dir}", "resume_changed=true"], config_dirs)
    run = job.run
    if run.stages or not run.parallel.own_forward:
        what = "a run with stages" if run.stages else f"{run.named('parallel')}, which runs parts of the model,"
        raise UserError(f"{run_dir}: {what} cannot be replayed: resume a copy of it with debug=anomaly")
    point, _ = manifest.newest_valid(run_dir, below=max(1, plan.low - plan.back))
    start, folder = int(point.name) if point is not None else 0, directory.create(Path(run.values["output_dir"]), "replay")

    def work(answer: Callable[[list[Found | None]], None]) -> None:
        from drivetrain.launch import launcher

        def on_rank(trainer: Trainer) -> None:
            found = trainer.parallel.gather_object(Recorder(trainer, plan).run())
            if trainer.parallel.world.rank == 0:
                answer(found)

        result = launcher.launch(replace(job, run_dir=None, checkpoint=point, work=on_rank, notices=[]), folder, quiet=True)
        if result.code:
            raise UserError(str(result.error).partition(" (traceback in")[0])  # that file is removed

    try:
        with ended_by_signals(), Steps() as progress:
            progress(
                f"training again from {f'the checkpoint of update {start:,}' if start else 'the start'} to update {plan.until:,}"
            )
            ranks = [each for each in forking.answer_of(work, "the run cannot be replayed", LIMIT_S) if each is not None]
        if not ranks:
            raise UserError(f"trained again from update {start}, the run ended before update {plan.low}: it is another run now")
        recorded, again = windows_of(run_dir), windows_of(folder, start)
    finally:
        directory.remove(folder)
    common = [update for update in again if update in recorded and recorded[update][0] == again[update][0]]
    same = [update for update in common if recorded[update] == again[update]]
    found = merged(ranks)
    return job, Replayed(start, found, same, [update for update in common if update not in same], cause(found))


def merged(ranks: Sequence[Found]) -> Found:
    """What all ranks found: their samples together, and of sizes the largest."""
    first = ranks[0]
    for update, sizes in first.history.items():
        sizes |= {name: worse(*(rank.history[update][name] for rank in ranks)) for name in sizes}
    samples = sorted((sample for rank in ranks for sample in rank.samples), key=lambda sample: sample.rank)
    return replace(first, samples=samples, unseen=list(dict.fromkeys(line for rank in ranks for line in rank.unseen)))


def _figure(value: float | None) -> str:
    return "–" if value is None else f"{value:.4g}" if math.isfinite(value) else "not finite"


def _times(value: float) -> str:
    return "–" if value <= 1 else f"{value:.1f}" if value < 1000 else f"{value:.0e}"


def sheet(done: Replayed) -> Sheet:
    """What happened at the update: its cause, the samples, the layers."""
    found = done.found
    ago = f"at update {found.earlier:,}"
    rows = [
        [s.name, s.target, s.text, _figure(s.input), _figure(s.loss), _figure(s.gradient), _figure(s.earlier)]
        for s in found.samples
    ]
    header = ["sample", "is", "text", "largest value", "loss", "gradient", ago]
    samples = Table(header, rows, "The samples", ("sample", "text"), spare=("text", "is", "largest value"), most=SHOWN).used()
    sizes = sorted(ranges(found.history, found.update), key=lambda each: -each.times)
    layers = Table(
        ["what", "size", "in the updates before", "times beyond"],
        [[each.name, _figure(each.size), f"{each.low:.4g} to {each.high:.4g}", _times(each.times)] for each in sizes],
        "The layers", most=SHOWN,
    )  # fmt: skip
    tiles = [
        charts.tile(s.picture, s.name, s.target, f"loss {_figure(s.loss)}", "") for s in found.samples if s.picture is not None
    ]
    sections: list[Section] = [words(*_said(done)), *under(f"The samples of update {found.update:,}, the worst first", samples)]
    sections += [charts.tiles(tiles)] if tiles else []
    sections += under(f"The layers in update {found.update:,}, what is furthest beyond its range first", layers)
    sections += [words(*(f"not looked into: {line}" for line in found.unseen))]
    return Sheet("What happened? – drivetrain replay", f"update {found.update:,}: {done.cause.said}", sections)


def _said(done: Replayed) -> list[str]:
    """How exactly it was made again."""
    came = f"trained again from {f'the checkpoint of update {done.start:,}' if done.start else 'the start'}"
    if done.other:
        return [
            f"{came}: {len(done.other)} of {len(done.same) + len(done.other)} recorded losses are others, from update "
            f"{done.other[0]:,} on, so this explains another run: another machine, torch, data or code than the run's"
        ]
    if not done.same:
        return [
            f"{came}: no record of the run can be compared, so nothing shows that this is the same run (log_every=1 records each)"
        ]
    return [f"{came}: all {len(done.same):,} recorded losses since are the run's own, bit for bit"]


def as_dict(done: Replayed) -> dict[str, object]:
    """The content of replay.json; null: not finite, or not known."""

    def plain(value: float | None) -> float | None:
        return value if value is not None and math.isfinite(value) else None

    found = done.found
    samples = [
        {
            "name": s.name,
            "target": s.target,
            "text": s.text,
            **{key: plain(getattr(s, key)) for key in ("input", "loss", "gradient", "earlier")},
        }
        for s in found.samples
    ]
    layers = [
        {key: plain(v) if isinstance(v, float) else v for key, v in each._asdict().items()}
        for each in ranges(found.history, found.update)
    ]
    return {
        "update": found.update, "earlier": found.earlier, "from": done.start, "cause": done.cause._asdict(),
        "same": done.same, "other": done.other, "losses": {str(update): plain(loss) for update, loss in found.losses.items()},
        "samples": samples, "layers": layers, "not_looked_into": found.unseen,
    }  # fmt: skip


def command(argv: Sequence[str], config_dirs: Sequence[str] = ()) -> int:
    """Run `drivetrain replay`; its exit code."""
    settings, given = verbs.split(argv, ReplaySettings)
    runs = [word for word in given if "=" not in word or Path(word).exists()]
    if len(runs) != 1:
        raise UserError(
            f"drivetrain replay takes one run's directory, such as outputs/<date>/<time>-<id>, and was given {len(runs)}"
        )
    run_dir = directory.named(expanded(runs[0]))
    jobs.recorded_environment(run_dir)
    job, done = replay(run_dir, [word for word in given if word not in runs], config_dirs, settings)
    verbs.leave(job, "replay", sheet(done), ["replay", *argv], as_dict(done))
    return DONE
