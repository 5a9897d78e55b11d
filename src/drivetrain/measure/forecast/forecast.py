"""`drivetrain forecast`: peak memory, time and limits of a run, before it is started."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from drivetrain.core.blocks import blocks_for
from drivetrain.core.errors import DONE, FAILED, UserError
from drivetrain.core.option import Positive
from drivetrain.engine import child
from drivetrain.measure import verbs
from drivetrain.measure.benchmark import variants
from drivetrain.measure.changes import apply, groups_of
from drivetrain.measure.forecast.examine import Forecast, Subject, examine
from drivetrain.measure.forecast.plan import Plan, plan
from drivetrain.measure.forecast.replay import FORECAST_ONLY, HERE, NAMES, Figure, known
from drivetrain.run import environment
from drivetrain.ui.output import echo
from drivetrain.ui.progress import Steps
from drivetrain.ui.sheet import Section, Sheet, Table, facts, under, words
from drivetrain.ui.terminal import duration

if TYPE_CHECKING:
    from drivetrain.engine.trainer import Trainer

GAIN = 1.1  # that counts as help: timings of the same operations differ by some per cent
ROW_S = 1.0  # of timing operations that are new in a row
RANKS = (2, 8)
SAME_MODEL = {"compile", "parallel", "batch"}  # groups that change nothing of the trainer as it is built to be looked at
RECOMPUTED = "checkpointing=blocks"  # its step is that of the trainer as it is, with all its blocks recomputed
FITTING = (RECOMPUTED, "batch=", "parallel=")  # most memory for least time and machines


@dataclass
class Row:
    """One override, and what it changes: the ratios of samples a second and of peak memory to the run's."""

    override: str
    speed: float | None = None
    memory: float | None = None
    step_s: float | None = None
    peak_bytes: float | None = None
    fits: bool | None = None
    why_not: str = ""  # it is not forecast


def candidates(run_plan: Plan) -> Iterator[str]:
    """Overrides that change speed or memory, and not what is trained, as far as the run does not have them.

    First what usually helps most for the time that its forecast takes: there may be no time for all.
    """
    run = run_plan.run
    if not run.compile.active:
        yield "compile=inductor"
    if run.precision.full_float32:
        yield "precision=bf16"
    if run.parallel.one_process and run_plan.device != HERE:
        for ranks in RANKS:
            yield f"parallel=fsdp parallel.nproc={ranks}"
    if not run.checkpointing.active:
        yield RECOMPUTED
    if run.batch.fixed_micro_batches and run.batch.size(0) % (2 * run_plan.micro_batches()) == 0:
        yield f"batch=accumulate batch.accumulation_steps={2 * run_plan.micro_batches()}"
    yield "checkpointing=none" if run.checkpointing.active else "checkpointing=selective"


def table(base: Forecast, subject: Subject, until: float) -> list[Row]:
    """Forecast each candidate that should be done in time, going by what others of its kind took; the others say so.

    Of a run that does not fit those come first that may make it fit, and the quick ones of them are forecast until one does.
    """
    rows, longest = [], {True: 0.0, False: 0.0}
    sought = not base.fits
    for override in sorted(candidates(subject.plan), key=_fitting if sought else lambda _: 0):
        began, rebuilt = time.perf_counter(), not _same_model(override)
        if began + longest[rebuilt] > until and (rebuilt or not sought):
            rows.append(Row(override, why_not="not forecast: the time was up (seconds=60 gives it more)"))
            continue
        rows.append(_row(override, base, subject))
        sought = sought and not rows[-1].fits
        longest[rebuilt] = max(longest[rebuilt], time.perf_counter() - began)
    return rows


def _fitting(override: str) -> int:
    return next((n for n, start in enumerate(FITTING) if override.startswith(start)), len(FITTING))


def _same_model(override: str) -> bool:
    return override.startswith(RECOMPUTED) or groups_of(override.split()) <= SAME_MODEL


def _row(override: str, base: Forecast, subject: Subject) -> Row:
    own = subject.plan
    try:
        changed = _changed(own, override)
        if changed.run.batch.size(0) != own.run.batch.size(0):  # another option has another default, or misses a preset's
            override += f" batch.global_batch={own.run.batch.size(0)}"
            changed = _changed(own, override)
        if override.startswith(RECOMPUTED):
            blocks = blocks_for(RECOMPUTED, "checkpointing.block", subject.trainer.model, None)
            found = examine(replace(subject, plan=changed, blocks=blocks, recomputed=len(blocks)), ROW_S)
        elif _same_model(override):
            found = examine(replace(subject, plan=changed), ROW_S)
        else:
            built = replace(Subject.build(changed), timed=subject.timed, beside=subject.beside)
            with built.on_exit:
                found = examine(built, ROW_S)
    except UserError as error:
        return Row(override, why_not=error.problems[0])
    step, peak = found.step.value, found.memory.peak.value
    return Row(override, base.step.value / step, peak / base.memory.peak.value, step, peak, found.fits)


def _changed(own: Plan, override: str) -> Plan:
    changed = plan(apply(own.overrides, override.split(), own.config_dirs), own.config_dirs, own.device)
    return replace(changed, steps=own.steps)


def best(rows: list[Row]) -> tuple[Row | None, Row | None]:
    """The rows that help most in time and in memory; None where no row helps."""
    told = [row for row in rows if row.speed is not None and row.memory is not None]
    # More micro-batches compute no less: what they seem to save is the error of timing other shapes.
    faster = max((r for r in told if not r.override.startswith("batch=")), key=lambda row: row.speed or 0, default=None)
    smaller = min(told, key=lambda row: row.memory or 1, default=None)
    return (
        faster if faster is not None and (faster.speed or 0) > GAIN else None,
        smaller if smaller is not None and (smaller.memory or 1) < 1 / GAIN else None,
    )


MIB, GIB = 2**20, 2**30


def as_dict(answer: Any) -> dict[str, Any]:
    """The forecast as plain values. A figure is [value, low, high]; seconds, bytes and samples."""
    if hasattr(answer, "stages"):
        stages = [{"stage": each.title, "share": each.share, **as_dict(each.answer)} for each in answer.stages]
        return {"fits": answer.fits, "run_s": answer.whole, "stages": stages}
    found = answer.forecast
    return {
        "device": found.device,
        "source": found.source,
        "ranks": found.ranks,
        "micro_batch": found.micro_batch,
        "micro_batches": found.micro_batches,
        "peak_bytes": found.peak,
        "tensors_bytes": found.memory.peak,
        "memory": found.memory.parts,
        "memory_limit_bytes": found.memory_limit,
        "fits": found.fits,
        "flops": found.flops,
        "moved_bytes": found.moved_bytes,
        "operations": found.operations,
        "step_s": found.step,
        "compute_s": found.compute,
        "data_wait_s": found.reading,
        "network_s": found.network,
        "shares": found.shares,
        "timed_share": found.timed_share,
        "limit": found.limit,
        "updates": found.updates,
        "run_s": found.whole,
        "samples_per_second": found.samples / found.step.value,
        "data_bytes_per_second": found.sample_bytes * found.samples / found.step.value,
        "largest_micro_batch": found.largest,
        "what_if": [asdict(row) for row in answer.rows],
        "notes": answer.notes,
    }


def sheet(answer: Any) -> Sheet:
    """The forecast: whether the run fits and how long it takes, memory, time, and what one more override would change."""
    title = "Memory and time before the start – drivetrain forecast"
    if hasattr(answer, "stages"):
        return Sheet(title, _conclusion(_largest(answer), answer.whole), _staged(answer))
    found = answer.forecast
    whole = sum(found.memory.parts.values()) or 1
    rows = [(kind, size(nbytes), f"{100 * nbytes / whole:.0f} %") for kind, nbytes in found.memory.parts.items()]
    parts = Table(("memory", "size", "share"), rows, "Memory", bars={"size": list(found.memory.parts.values())})
    body: list[Section] = [words(*_title(found)), facts(list(_facts(found)), "Forecast"), *under("What takes the memory", parts)]
    return Sheet(title, _conclusion(found, found.whole), [*body, *_what_if(answer.rows, found.fits), *_notes([answer])])


def _conclusion(found: Any, whole: Figure) -> str:
    fits = "The run fits" if found.fits else "The run does NOT fit"
    device = "this machine" if found.device == HERE else found.device
    memory = f"{_figure(found.peak, size)} of {size(found.memory_limit)} on {device}"
    return f"{fits}: its peak memory is {memory}; it takes {_figure(whole, run_time)}"


def _largest(answer: Any) -> Any:
    """The forecast of the stage that needs the most memory."""
    return max((stage.answer.forecast for stage in answer.stages), key=lambda each: each.peak.high)


def _staged(answer: Any) -> list[Section]:
    """A run with stages: what each stage is forecast to be."""
    rows = []
    for number, stage in enumerate(answer.stages):
        found = stage.answer.forecast
        share = f"stage {number + 1} of {len(answer.stages)}, {100 * stage.share:.0f} % of the updates: {stage.title}"
        memory = f"{_figure(found.peak, size)}: {'fits' if found.fits else 'does NOT fit'}"
        rows.append([share, memory, _figure(found.step, seconds), f"{found.samples / found.step.value:,.0f}", found.limit])
    return [
        Table(("stage", "peak memory", "an update", "samples/s", "limited by"), rows, "Stages"),
        *_notes([stage.answer for stage in answer.stages]),
    ]


def _title(found: Any) -> Iterator[str]:
    ranks = f"{found.ranks} × " if found.ranks > 1 else ""
    split = f" in {found.micro_batches} micro-batches" if found.micro_batches > 1 else ""
    yield f"forecast for {ranks}{found.device} ({found.source})"
    yield f"an update has {found.samples:,} samples: {math.ceil(found.samples / found.ranks):,} on each rank{split}"


def _facts(found: Any) -> Iterator[tuple[str, str]]:
    step, pace = found.step, found.samples / found.step.value
    counted = ", of the process, as the run prints it" if found.beside.value else ""
    yield "peak memory", f"{_figure(found.peak, size)} of {size(found.memory_limit)}{counted}"
    if found.beside.value:
        yield (
            "peak of its tensors",
            f"{_figure(found.memory.peak, size)}; beside them {size(found.beside.value)}, and freed memory",
        )
    if found.largest is not None:
        yield "largest micro-batch that fits", f"{_figure(found.largest, lambda n: f'{n:,.0f}')} samples"
    yield "an update", f"{_figure(step, seconds)}; {pace:,.0f} samples a second"
    work = f"{found.flops / 1e9:,.4g} GFLOP, {found.moved_bytes / 1e9:,.3g} GB moved, {found.operations:,} operations"
    yield "its work on each rank", f"{work}; {found.flops / step.value / 1e12:.3g} TFLOP/s"
    shares = sorted(found.shares.items(), key=lambda item: -item[1])
    named = ", ".join(f"{name} {100 * share:.0f} %" for name, share in shares if share > 0.005)
    yield "limited by", f"{found.limit}: {named}"
    if found.timed_share:
        yield "timed here", f"{100 * found.timed_share:.0f} % of it, operation by operation; the rest is a roofline"
    yield "data needed", f"{pace:,.0f} samples a second, {size(found.sample_bytes * pace)}/s as the model gets them"
    yield "whole run", f"{_figure(found.whole, run_time)} for {found.updates:,} updates and the evaluations"


def _what_if(rows: list[Any], fits: bool) -> list[Section]:
    if not rows:
        return []
    cells = [
        [row.override, "", "", row.why_not] if row.why_not
        else [row.override, f"× {row.speed:.2f}", f"× {row.memory:.2f}", "" if row.fits else "does not fit"]
        for row in rows
    ]  # fmt: skip
    enough = None if fits else next((row for row in rows if row.fits), None)
    faster, smaller = best(rows)
    said = {"it fits with": enough, "most speed": faster, "least memory": smaller}
    table = Table(("what if", "speed", "memory", "note"), cells, "What if", ("note",)).used(3)
    lines = [f"{name}: {row.override}" for name, row in said.items() if row is not None]
    return [*under("One override more", table), words(*lines)]


def _notes(answers: Sequence[Any]) -> list[Section]:
    found = dict.fromkeys(note for answer in answers for note in answer.notes)
    if any(FORECAST_ONLY in answer.forecast.source for answer in answers):
        found["no step of this device was measured: the intervals are those of efficiencies that are usual in training"] = None
    return [words(*(f"note: {note}" for note in found))] if found else []


def _figure(figure: Figure, show: Callable[[float], str]) -> str:
    return f"{show(figure.value)} ({show(figure.low)} … {show(figure.high)})"


def size(nbytes: float) -> str:
    """Bytes in few characters."""
    if nbytes >= GIB:
        return f"{nbytes / GIB:.3g} GiB"
    return f"{nbytes / MIB:.3g} MiB" if nbytes >= MIB / 10 else f"{nbytes / 1024:.3g} KiB"


def seconds(value: float) -> str:
    """A short time in few characters."""
    if value >= 1:
        return f"{value:.3g} s"
    return f"{1e3 * value:.3g} ms" if value >= 1e-3 else f"{1e6 * value:.3g} µs"


def run_time(value: float) -> str:
    """The time of a run in few characters, however short it is."""
    return duration(value) if value >= 1 else seconds(value)


SPLITS = 3  # that are tried for batch=auto
LOOK_SHARE = 0.25  # of the time, for timing operations of the run itself


@dataclass
class Settings:
    """The settings of `drivetrain forecast`."""

    device: Literal[NAMES] = "here"  # type: ignore[valid-type]
    seconds: Positive = 20.0  # that it may take, approximately
    what_if: bool = True


@dataclass
class Answer:
    """The findings of the process that built the run; plain values, since they travel."""

    forecast: Forecast
    rows: list[Row]  # of what if
    notes: list[str]

    @property
    def fits(self) -> bool:
        """True if the run fits the device's memory."""
        return bool(self.forecast.fits)


@dataclass
class StageAnswer:
    """A stage of a run, forecast as if the whole run were like it."""

    title: str
    share: float  # of the run's updates
    answer: Answer


@dataclass
class StagedAnswer:
    """The findings for a run with stages."""

    stages: list[StageAnswer]

    @property
    def fits(self) -> bool:
        """True if each stage fits the device's memory."""
        return all(stage.answer.fits for stage in self.stages)

    @property
    def whole(self) -> Figure:
        """The seconds of the run: of each stage its share."""
        return sum((stage.answer.forecast.whole.times(stage.share) for stage in self.stages), Figure.exactly(0.0))


def command(argv: Sequence[str], config_dirs: Sequence[str] = (), as_json: bool = False) -> int:
    """Run `drivetrain forecast`; return its exit code: 1 where the run does not fit the device's memory."""
    settings, overrides = verbs.split([_quoted(word) for word in argv], Settings)
    variants.refuse_resume("forecast", overrides)
    with Steps() as progress:
        progress("building the run, and recording its step on fake tensors")
        planned, answer = forecast(overrides, config_dirs, settings)
    if as_json:
        echo(json.dumps(as_dict(answer), indent=2))
        return DONE if answer.fits else FAILED
    found, about = sheet(answer), environment.describe(overrides, planned.job.config_hash, {})
    found.show()
    verbs.write(verbs.folder(planned.job, "forecast"), "forecast", found, ["forecast", *argv], about, as_dict(answer))
    return DONE if answer.fits else FAILED


def _quoted(word: str) -> str:
    """A device in lower case, as H100; one whose name is a number, such as 4090, as a text."""
    key, _, value = word.partition("=")
    if key != "device":
        return word
    return f"device='{value}'" if value.isdecimal() else f"device={value.lower()}"


def forecast(
    overrides: Sequence[str], config_dirs: Sequence[str] = (), settings: Settings | None = None
) -> tuple[Plan, Answer | StagedAnswer]:
    """Forecast a run, or each of its stages; return what was planned, and the answer. Raises UserError."""
    settings, began = settings or Settings(), time.perf_counter()
    if settings.device != "here":
        known(settings.device)
    planned = plan(overrides, config_dirs, settings.device)
    if not planned.run.stages:
        return planned, _built(planned, settings, began + settings.seconds)
    alone = planned.stages()
    settings = replace(settings, seconds=settings.seconds / len(alone), what_if=False)  # what-if is of a run with one config
    ends = [began + settings.seconds * number for number in range(1, len(alone) + 1)]
    stages = zip(alone, ends, strict=True)
    return planned, StagedAnswer([StageAnswer(name, share, _built(each, settings, end)) for (name, share, each), end in stages])


def _built(planned: Plan, settings: Settings, until: float) -> Answer:
    """The answer of a process of its own, which builds the run."""

    def question(trainer: Trainer) -> Answer:
        return answer(planned, trainer, settings, until)

    return child.ask(planned.look(), question, "the run cannot be forecast", values=planned.times_layers)


def _split(subject: Any, found: Any, settings: Settings, until: float) -> tuple[Any, Any]:
    """The run and its forecast with as many micro-batches as it takes to fit; as they are where no micro-batch does.

    Gradients that wait for the next micro-batch take memory too, so that the largest one becomes smaller with the first split.
    """
    for _ in range(SPLITS):
        if found.fits or found.largest is None:
            break
        subject = replace(subject, plan=subject.plan.split(found.largest.value))
        found = examine(subject, LOOK_SHARE * settings.seconds, until)
    return subject, found


def answer(planned: Plan, trainer: Trainer, settings: Settings, until: float | None = None) -> Answer:
    """Forecast a plan whose trainer is built, in this process; by `until` of time.perf_counter() it should be done."""
    until = until or time.perf_counter() + settings.seconds
    subject = Subject.build(planned, trainer)
    found = examine(subject, LOOK_SHARE * settings.seconds, until)
    if planned.finds_split:
        subject, found = _split(subject, found, settings, until)
    rows = table(found, subject, until) if settings.what_if else []
    chosen = [f"checkpointing.memory_gb: {subject.recomputed} of {len(subject.blocks)} blocks are recomputed"]
    return Answer(found, rows, [*planned.notes, *(chosen if subject.blocks else [])])
