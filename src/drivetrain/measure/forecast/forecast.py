"""`drivetrain forecast`: peak memory, time and limits of a run, before it is started."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from drivetrain.core.errors import DONE, FAILED
from drivetrain.core.option import Positive
from drivetrain.engine import child
from drivetrain.measure import arguments
from drivetrain.measure.benchmark import arms
from drivetrain.measure.forecast.devices import NAMES, Figure, known
from drivetrain.measure.forecast.plan import Plan, plan
from drivetrain.ui.output import echo
from drivetrain.ui.progress import Steps

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
    """What the process that built the run found; plain values, since they travel."""

    forecast: Any  # examine.Forecast
    rows: list[Any]  # of what_if
    notes: list[str]

    @property
    def fits(self) -> bool:
        """Whether the run fits the device's memory."""
        return bool(self.forecast.fits)


@dataclass
class StageAnswer:
    """A stage of a run, forecast as if the whole run were like it."""

    title: str
    share: float  # of the run's updates
    answer: Answer


@dataclass
class StagedAnswer:
    """What was found for a run with stages."""

    stages: list[StageAnswer]

    @property
    def fits(self) -> bool:
        """Whether each stage fits the device's memory."""
        return all(stage.answer.fits for stage in self.stages)

    @property
    def whole(self) -> Figure:
        """The seconds of the run: of each stage its share."""
        return sum((stage.answer.forecast.whole.times(stage.share) for stage in self.stages), Figure.exactly(0.0))


def command(argv: Sequence[str], config_dirs: Sequence[str] = (), as_json: bool = False) -> int:
    """Run `drivetrain forecast`; return its exit code: 1 where the run does not fit the device's memory."""
    settings, overrides = arguments.split([_quoted(word) for word in argv], Settings)
    arms.refuse_resume("forecast", overrides)
    with Steps() as progress:
        progress("building the run, and recording its step on fake tensors")
        answer = forecast(overrides, config_dirs, settings)
    from drivetrain.measure.forecast import page

    echo(json.dumps(page.as_dict(answer), indent=2) if as_json else page.text(answer))
    return DONE if answer.fits else FAILED


def _quoted(word: str) -> str:
    """A device in lower case, as H100; one whose name is a number, such as 4090, as a text."""
    key, _, value = word.partition("=")
    if key != "device":
        return word
    return f"device='{value}'" if value.isdecimal() else f"device={value.lower()}"


def forecast(
    overrides: Sequence[str], config_dirs: Sequence[str] = (), settings: Settings | None = None
) -> Answer | StagedAnswer:
    """Forecast a run, or each of its stages. Raises UserError."""
    settings, began = settings or Settings(), time.perf_counter()
    if settings.device != "here":
        known(settings.device)
    planned = plan(overrides, config_dirs, settings.device)
    if not planned.run.stages:
        return _built(planned, settings, began + settings.seconds)
    alone = planned.stages()
    settings = replace(settings, seconds=settings.seconds / len(alone), what_if=False)  # what-if is of a run with one config
    ends = [began + settings.seconds * number for number in range(1, len(alone) + 1)]
    return StagedAnswer(
        [StageAnswer(title, share, _built(each, settings, end)) for (title, share, each), end in zip(alone, ends, strict=True)]
    )


def _built(planned: Plan, settings: Settings, until: float) -> Answer:
    """The answer of a process of its own, which builds the run."""

    def question(trainer: Any) -> Answer:
        return answer(planned, trainer, settings, until)

    return child.ask(planned.look(), question, "the run cannot be forecast", values=planned.times_layers)


def _split(subject: Any, found: Any, settings: Settings, until: float) -> tuple[Any, Any]:
    """The run and its forecast with as many micro-batches as it takes to fit; as they are where no micro-batch does.

    Gradients that wait for the next micro-batch take memory too, so that the largest one becomes smaller with the first split.
    """
    from drivetrain.measure.forecast import examine

    for _ in range(SPLITS):
        if found.fits or found.largest is None:
            break
        subject = replace(subject, plan=subject.plan.split(found.largest.value))
        found = examine.examine(subject, LOOK_SHARE * settings.seconds, until)
    return subject, found


def answer(planned: Plan, trainer: Any, settings: Settings, until: float | None = None) -> Answer:
    """Forecast a plan whose trainer is built, in this process; by `until` of time.perf_counter() it should be done."""
    from drivetrain.measure.forecast import examine, what_if

    until = until or time.perf_counter() + settings.seconds
    subject = examine.Subject.build(planned, trainer)
    found = examine.examine(subject, LOOK_SHARE * settings.seconds, until)
    if planned.finds_split:
        subject, found = _split(subject, found, settings, until)
    rows = what_if.table(found, subject, until) if settings.what_if else []
    chosen = [f"checkpointing.memory_gb: {subject.recomputed} of {len(subject.blocks)} blocks are recomputed"]
    return Answer(found, rows, [*planned.notes, *(chosen if subject.blocks else [])])
