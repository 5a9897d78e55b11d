"""`drivetrain certify`: a few updates of two runs from one state, and whether they differ by more than rounding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from drivetrain.config.catalog import default_options
from drivetrain.core import child
from drivetrain.core.errors import DONE, FAILED, UserError
from drivetrain.core.option import Count, Option, RunSpec
from drivetrain.core.signals import ended_by_signals
from drivetrain.launch.job import Job
from drivetrain.launch.job import prepare as prepare_job
from drivetrain.measure import arguments, leave
from drivetrain.measure.benchmark import arms
from drivetrain.measure.certify import explain
from drivetrain.measure.certify.judge import DIFFERS, EXACT, Floors, Verdict, judge, may_have_flipped, same_bits, same_in_float64
from drivetrain.measure.certify.trace import FLOAT32, Trace
from drivetrain.measure.overrides import apply
from drivetrain.run import directory, environment
from drivetrain.ui.progress import Steps

PERMUTED, ROUNDED = 2, 3  # runs that show what the order of sums and rounding change


@dataclass
class Settings:
    """The settings of `drivetrain certify`."""

    steps: Count = 4  # updates


@dataclass
class Certified:
    """The two runs and the verdict on them."""

    verdict: Verdict
    tested: Trace
    reference: Trace
    roundoff: float  # of the coarser of the two


def command(argv: list[str], config_dirs: Sequence[str] = ()) -> int:
    """Run `drivetrain certify`; return its exit code. After "against": what the other run sets; without it: techniques off."""
    settings, words = arguments.split(argv, Settings)
    at = words.index("against") if "against" in words else len(words)
    overrides, against = words[:at], words[at + 1 :]
    arms.refuse_resume("certify", [*overrides, *against])
    job = prepare_job(arms.without_saving(overrides), config_dirs)
    changes = against if "against" in words else plain_changes(job.run)
    if "against" not in words and not changes:
        raise UserError(
            "no option of this run claims to be the same mathematics as the group's default (`drivetrain list` shows what each "
            "claims): say what to compare it with, as in `drivetrain certify precision=bf16 against precision=fp32`"
        )
    reference = prepare_job(apply(arms.without_saving(overrides), changes, config_dirs), config_dirs)
    different = explain.different_keys(job, reference)
    if not different:
        raise UserError(f"against {' '.join(changes)}: that is the same run: name what the other run sets differently")
    with Steps() as progress:
        done = certify(job, reference, settings.steps, progress)
    found = done.verdict, done.tested, done.reference, done.roundoff, different
    sheet, content = explain.sheet(*found), explain.as_dict(*found)
    sheet.show()
    about = environment.describe(argv, job.config_hash, {})
    leave.leave(leave.folder(job, "certify"), "certify", sheet, ["certify", *argv], about, content)
    return FAILED if done.verdict.answer == DIFFERS else DONE


def plain_changes(run: RunSpec) -> list[str]:
    """Return the overrides that switch off each technique that claims to be exact or close."""
    changes = []
    for group, default in default_options().items():
        part, choice = run.parts.get(group), run.choices.get(group)
        ranks_models = group == "metrics" and run.values.get("select") is not None  # the run cannot do without what ranks it
        if choice == default or group == "saving" or ranks_models:  # nothing is saved in either run
            continue
        if isinstance(part, list):
            names = run.names(group)
            kept = [name for name, each in zip(names, part, strict=True) if each.effect_as_set() == "changes"]
            if kept != names:
                changes.append(f"{group}=[{','.join(kept)}]")
        elif isinstance(part, Option) and part.effect_as_set() != "changes":
            changes.append(f"{group}={default}")
    return changes


def certify(tested: Job, reference: Job, updates: int, progress: Steps | None = None) -> Certified:
    """Record both runs, and what rounding changes where they are not bit for bit the same. Raises UserError."""
    say = progress or (lambda *_: None)
    say("recording both runs")
    traces = [run_recorded(job, updates) for job in (reference, tested)]
    theirs, ours = traces
    roundoffs = [roundoff_of(job.run) for job in (reference, tested)]
    roundoff = max(roundoffs)
    refuse_what_cannot_be_judged(tested, ours, theirs)
    if same_bits(ours, theirs):
        return Certified(judge(ours, theirs, Floors()), ours, theirs, roundoff)
    refuse_random_layers(tested.run, ours, theirs)
    recorded, recorded_tested = (partial(run_recorded, job, updates) for job in (reference, tested))
    return Certified(verdict_on(ours, theirs, roundoff, recorded, recorded_tested, say), ours, theirs, roundoff)


def run_recorded(job: Job, updates: int, **look: Any) -> Trace:
    """Return the trace of a run's first updates; `look` holds further fields of record.Look. Raises UserError.

    It is an ordinary run in a process of its own, with its ranks, that makes a few updates.
    """
    import torch  # noqa: F401 - imported once here, because the processes are forked

    folder = directory.create(Path(job.run.values["output_dir"]), "certify")

    def work(answer: Callable[[Trace], None]) -> None:
        from drivetrain.launch import launcher
        from drivetrain.measure.certify import record, shadow

        looked, run = record.Look.at(job.run, updates, **look), job.run
        if looked.float64:
            run = shadow.widened_run(run) if looked.techniques else shadow.shadow_of(run)

        def recording(trainer: Any) -> None:  # of each rank
            if (trace := record.Recorder(trainer, looked).run()) is not None:
                answer(trace)

        ended = launcher.launch(replace(job, run=run, work=recording), folder, quiet=True)
        if ended.code:
            raise UserError(str(ended.result.error).partition(" (traceback in")[0])  # that file is removed

    try:
        with ended_by_signals():
            return child.answer_of(work, "the run cannot be certified")
    finally:
        directory.remove(folder)


Recorded = Callable[..., Trace]  # takes further fields of record.Look


def verdict_on(
    ours: Trace, theirs: Trace, roundoff: float, recorded: Recorded, recorded_tested: Recorded, say: Callable[[str], None]
) -> Verdict:
    """Judge two traces that are not bit for bit the same, by further ones of the reference and of the tested run."""
    say("recording what the order of sums and rounding change")
    coarser = roundoff > FLOAT32
    verdict = judge(ours, theirs, measured_floors(recorded, recorded_tested, roundoff, ours), coarser)
    if not coarser and may_have_flipped(verdict):
        say("recording both runs in float64")
        if agree_in_float64(recorded, recorded_tested):
            return replace(verdict, answer=EXACT, first=None, flipped=True)
    return verdict


def agree_in_float64(recorded: Recorded, recorded_tested: Recorded) -> bool:
    """Whether the two runs, each with its techniques, are the same in float64; False where one cannot be made there."""
    wide = {"float64": True, "techniques": True}
    try:
        permuted = [recorded(permute=seed, **wide) for seed in range(1, PERMUTED + 1)]
        return same_in_float64(recorded_tested(**wide), recorded(**wide), permuted)
    except UserError:
        return False


def measured_floors(recorded: Recorded, recorded_tested: Recorded, roundoff: float, ours: Trace) -> Floors:
    """Record what the order of sums and rounding change: in the reference, and where it rounds more also in the tested run."""
    orders = range(1, PERMUTED + 1)
    return Floors(
        permuted=[recorded(permute=seed) for seed in orders],
        shadow=recorded(float64=True),
        rounded=[recorded(float64=True, roundoff=roundoff, seed=seed) for seed in range(ROUNDED)],
        tested=[ours, *(recorded_tested(permute=seed) for seed in orders)] if roundoff > FLOAT32 else [],
    )


def roundoff_of(run: RunSpec) -> float:
    """Return the largest relative error of one rounding in a run."""
    parts = [each for part in run.parts.values() for each in (part if isinstance(part, list) else [part])]
    return max(part.roundoff() for part in parts if isinstance(part, Option))


def refuse_what_cannot_be_judged(job: Job, ours: Trace, theirs: Trace) -> None:
    """Raise UserError where an update was skipped: the runs are not at the same update then."""
    if ours.skipped != theirs.skipped:
        raise UserError(
            f"{max(ours.skipped, theirs.skipped)} updates were skipped by an overflow in one of the two runs (this one has "
            f"{job.run.named('precision')}): its updates have other samples from there on: set a lower precision.init_scale"
        )


def refuse_random_layers(run: RunSpec, ours: Trace, theirs: Trace) -> None:
    """Raise UserError where layers draw random numbers: two splits of a batch do not draw the same."""
    layers = ours.random or theirs.random
    if not layers:
        return
    knobs = [f"model.{key}=0" for key, value in vars(run.model).items() if "drop" in key and isinstance(value, float) and value]
    what = " ".join(knobs) or "their probabilities to 0, as model.kwargs={drop_rate: 0} does for many of timm's models"
    more = " …" if len(layers) > 3 else ""
    draw = "draws" if len(layers) == 1 else "draw"
    raise UserError(
        f"{', '.join(layers[:3])}{more} {draw} random numbers, and the two runs do not draw the same ones, so that their "
        f"difference says nothing about the mathematics: set {what} for both"
    )
