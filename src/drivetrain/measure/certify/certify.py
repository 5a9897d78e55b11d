"""`drivetrain certify`: a few updates of two runs from one state, and whether they differ by more than rounding."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from drivetrain.config.catalog import default_options
from drivetrain.core.errors import DONE, FAILED, UserError
from drivetrain.core.machine import forking
from drivetrain.core.machine.signals import ended_by_signals
from drivetrain.core.options.option import Count, Option, RunSpec
from drivetrain.core.options.overrides import key_of
from drivetrain.core.typed import JsonObject
from drivetrain.launch.job import Job
from drivetrain.launch.job import prepare as prepare_job
from drivetrain.measure import verbs
from drivetrain.measure.benchmark import variants
from drivetrain.measure.certify.judge import (
    CLOSE,
    DIFFERS,
    EXACT,
    FLOAT32,
    MARGIN,
    NO_EFFECT,
    PHASES,
    Finding,
    Floors,
    Trace,
    TraceVerdict,
    common_factor,
    judge,
    may_have_flipped,
    same_in_float64,
)
from drivetrain.measure.changes import apply, between
from drivetrain.run import directory
from drivetrain.ui import sheet
from drivetrain.ui.progress import Steps

if TYPE_CHECKING:
    from drivetrain.engine.trainer import Trainer

FORMATS = {2.0**-24: "float32", 2.0**-11: "float16 or TF32", 2.0**-8: "bfloat16", 2.0**-3: "float8"}
MEANS = {
    "samples": "the updates take other samples, or weight them otherwise",
    "start": "the weights are others before the first update",
    "inputs": "the same samples look different: augmentation, or normalisation",
    "targets": "the same samples have other targets",
    "forward": "the forward computes something else",
    "loss": "the loss of the same outputs is another one",
    "buffers": "the forward leaves other statistics",
    "gradient": "the backward gives other gradients",
    "clipped gradient": "the gradients are the same before the update, and the optimizer gets others: unscaling, or clipping",
    "learning rate": "the schedule gives another learning rate",
    "optimizer state": "the optimizer keeps something else of the same gradients",
    "weights": "the same gradients and learning rate change the weights otherwise",
    "average": "the weights are the same, and their average is not",
    "evaluation": "the weights are the same, and an evaluation of them is not",
}
BESIDE = ("ema", "metrics", "stop", "saving", "logger")  # groups that leave an update's weights alone
MICRO_BATCHES = ("batch", "parallel")  # groups that divide an update's samples
Keys = Sequence[tuple[str, str, str]]  # a key of the config, the tested run's value, the other's


def different_keys(tested: Job, reference: Job) -> Keys:
    """Return the differences of the two configs.

    If the options of a group differ, the group is returned instead of its keys.
    """
    ours, theirs = (job.composed.settings() for job in (tested, reference))
    keys = [k for k in dict.fromkeys([*ours, *theirs]) if ours.get(k) != theirs.get(k)]
    groups = [k for k in keys if k in tested.composed.choices]
    shown = [k for k in keys if k in groups or k.partition(".")[0] not in groups]
    return [(k, sheet.setting(ours.get(k)), sheet.setting(theirs.get(k))) for k in sorted(shown, key=lambda k: k.split("."))]


@dataclass
class Certified:
    """The two runs and the verdict on them."""

    verdict: TraceVerdict
    tested: Trace
    reference: Trace
    roundoff: float  # of the coarser of the two
    different: Keys = ()
    unmoved: Sequence[str] = ()  # settings that should have changed training and did not

    @property
    def unseen(self) -> list[str]:
        """The parts that could not be examined, and the reasons."""
        return list(dict.fromkeys([*self.tested.unseen, *self.reference.unseen]))


def sheet_of(done: Certified) -> sheet.Sheet:
    """The verdict, the differences of the configs, and the phases."""
    answer, *more = lines(done)
    header = ("phase", "compared", "largest difference", "rounding gives", "in", "verdict")
    rows = [_row(*each, done.verdict.flipped) for each in phases(done.verdict)]
    settings = sheet.Table(("setting", "this run", "against"), done.different, "What differs in the configs")
    of_phases = sheet.Table(header, rows, "The phases of an update", ("in",))
    sections: list[sheet.Section] = [
        settings,
        of_phases,
        sheet.words(*(f"not looked into: {line}" for line in done.unseen), *more),
    ]
    return sheet.Sheet("The same mathematics? – drivetrain certify", answer, sections)


def phases(verdict: TraceVerdict) -> list[tuple[str, int, Finding]]:
    """Return each phase with the number of compared tensors, and the worst of them."""
    found = ((phase, [f for f in verdict.findings if f.key[1] == phase]) for phase in PHASES)
    return [
        (phase, len(those), max(those, key=lambda f: (f.is_different and f.decides, f.ratio, f.distance)))
        for phase, those in found
        if those
    ]


def _row(phase: str, count: int, worst: Finding, flipped: bool = False) -> tuple[str, ...]:
    above = "rearranged" if not worst.decides else "flipped" if flipped else "differs"
    differs = above if worst.is_different else "same" if worst.distance else "equal"
    update, _, name = worst.key
    place = " ".join(part for part in (name, f"(update {update})" if update else "") if part)
    sizes = (_share(worst.relative(value)) for value in (worst.distance, worst.floor))
    return phase, f"{count:,}", *sizes, place if worst.distance else "", differs


def _share(value: float) -> str:
    return "–" if not math.isfinite(value) else "0" if not value else f"{value:.1e}"


def lines(done: Certified) -> list[str]:
    """Return the verdict in sentences, and note where a run's precision does less on this machine than its name promises."""
    notices = [
        f"  precision of {whose}: {trace.notice}. This answer is not one for machines where it has an effect"
        for whose, trace in (("this run", done.tested), ("the other run", done.reference))
        if trace.notice
    ]
    return [*_verdict(done), *notices]


def _verdict(done: Certified) -> list[str]:
    verdict, first = done.verdict, done.verdict.first
    tensors = f"{len(verdict.findings):,} tensors"
    if first is None:
        if verdict.answer == NO_EFFECT:
            if done.unmoved:
                another = f"although another {' and '.join(done.unmoved)} changes training where it has an effect"
                return [
                    f"no effect in these updates, so nothing was tested: bit for bit the same, in all of {tensors}, {another}"
                ]
            rounds = f"although one of the two is to round as {FORMATS.get(done.roundoff, 'a coarser format')} does"
            return [f"no effect here, so nothing was tested: bit for bit the same, in all of {tensors}, {rounds}"]
        if verdict.bit_for_bit:
            return [f"exact: bit for bit the same, in all of {tensors}"]
        if verdict.flipped:
            flipped = [f for f in verdict.findings if f.is_different and f.decides]
            return [
                f"exact: in float64 the two runs are the same. In float32 {len(flipped)} of {tensors} differ by more than the "
                f"order of sums gives, from update {min(f.key[0] for f in flipped)} on: rounding moved a value over a threshold, "
                "such as a ReLU's"
            ]
        worst = max((f for f in verdict.findings if f.decides), key=lambda f: f.ratio)
        of = f"of {tensors}, none differs more than {worst.ratio:.1f} times what they give (differs: above {MARGIN:g} times)"
        number = FORMATS.get(done.roundoff, f"2^{math.log2(done.roundoff):.0f}")
        return [
            f"within rounding of {number}: {of}"
            if verdict.answer == CLOSE
            else f"exact: the order of sums is all that differs: {of}"
        ]
    update, phase, name = first.key
    place = f"{phase}: {name}" if name else phase
    if name and phase not in ("samples", "evaluation", "optimizer state"):
        place = f"{phase} of {named(name, done.reference)}"
    when = f"in update {update}" if update and phase != "evaluation" else "after the updates" if update else "before the updates"
    sizes = f"by {_share(first.relative(first.distance))} of its size, where rounding gives {_share(first.relative(first.floor))}"
    return [f"differs: first {when}, {place}, {sizes}", f"  {MEANS[phase]}", *hints(done, first)]


def named(name: str, trace: Trace) -> str:
    """Return a module or parameter with the class of its module."""
    module = name.removeprefix("input of ").split(" #")[0].split(" (")[0]
    kind = trace.kinds.get(module) or trace.kinds.get(module.rpartition(".")[0])
    shown = name if not name.startswith("input of ") else f"what goes into {module}"
    return f"{shown} ({kind})" if kind else shown


def hints(done: Certified, first: Finding) -> list[str]:
    """Return descriptions of the first difference, one line each."""
    update, phase, name = first.key
    found, tested, reference = [], done.tested, done.reference
    alike = [f for f in done.verdict.findings if f.key[:2] == (update, phase)]
    different = [f for f in alike if f.is_different]
    both = ((reference.entries[f.key], tested.entries[f.key]) for f in alike)
    if phase not in ("samples", "evaluation") and (factor := common_factor(both)) is not None:
        all_of = "" if len(alike) == 1 else f", all {len(alike)} of them"
        found.append(f"  it is {factor:.4g} times the other run's{all_of}")
    if phase == "samples":
        ours, theirs = (trace.entries[first.key].values for trace in (tested, reference))
        if len(ours) != len(theirs):
            found.append(f"  {len(ours)} updates in the first epochs, {len(theirs)} in the other run")
        elif len(where := (ours != theirs).nonzero()[0]):
            at = where[0]
            figures = "" if name == "which samples" else f": {ours[at]:g}, and {theirs[at]:g} in the other run"
            found.append(f"  first in {'epoch' if name == 'number of updates' else 'update'} {at + 1}{figures}")
    if phase in ("optimizer state", "weights", "gradient", "clipped gradient", "average") and len(different) < len(alike):
        names = [f.key[2] for f in different]
        found.append(f"  in {len(different)} of {len(alike)}: {', '.join(names[:4])}{' …' if len(names) > 4 else ''}")
    if phase in ("optimizer state", "weights"):
        of = name.rpartition(" of ")[2]
        own, other = (trace.settings.get(of, {}) for trace in (tested, reference))
        unlike = [key for key, value in own.items() if other.get(key, value) != value]
        found += [f"  {key} of {of} is {own[key]}, and {other[key]} in the other run" for key in unlike]
    if phase == "gradient" and any(not tested.entries[f.key].size and f.size for f in different):
        found.append("  these get no gradient: frozen, or cut off from the loss")
    if phase in ("forward", "buffers") and any(key.partition(".")[0] in MICRO_BATCHES for key, *_ in done.different):
        norm = named(name, reference)
        if "(BatchNorm" in norm or "(SyncBatchNorm" in norm:
            found.append(
                f"  {norm} takes its statistics from one micro-batch, and these are of other sizes: accumulation and ranks do "
                "not enlarge a BatchNorm's batch. Compare at the same micro-batch, or with a norm that looks at one sample"
            )
    return found


def as_dict(done: Certified) -> JsonObject:
    """Return the content of certify.json. Differences and floors are relative to the size of the other run's tensor."""

    def number(value: float) -> float | None:
        return value if math.isfinite(value) else None

    def finding(f: Finding) -> JsonObject:
        update, phase, name = f.key
        return {
            "update": update, "phase": phase, "name": name, "difference": number(f.relative(f.distance)),
            "floor": number(f.relative(f.floor)), "ratio": number(f.ratio), "differs": f.is_different,
        }  # fmt: skip

    verdict = done.verdict
    return {
        "answer": verdict.answer,
        "bit_for_bit": verdict.bit_for_bit,
        "same_in_float64_only": verdict.flipped,
        "first": finding(verdict.first) if verdict.first is not None else None,
        "phases": {phase: {"compared": count, **finding(worst)} for phase, count, worst in phases(verdict)},
        "lines": lines(done),
        "settings": {key: {"this": ours, "against": theirs} for key, ours, theirs in done.different},
        "not_looked_into": done.unseen,
        "roundoff": done.roundoff,
        "margin": MARGIN,
    }


PERMUTED, ROUNDED = 2, 3  # runs that show the effect of the order of sums and of rounding


@dataclass
class CertifySettings:
    """The settings of `drivetrain certify`."""

    steps: Count = 4  # updates


def command(argv: list[str], config_dirs: Sequence[str] = ()) -> int:
    """Run `drivetrain certify`; return its exit code.

    After "against" follow the other run's settings; without it, its techniques are off.
    """
    settings, words = verbs.split(argv, CertifySettings)
    at = words.index("against") if "against" in words else len(words)
    overrides, against = words[:at], words[at + 1 :]
    verbs.refuse_resume("certify", [*overrides, *against])
    job = prepare_job(variants.without_saving(overrides), config_dirs)
    changes = against if "against" in words else plain_changes(job.run)
    if "against" not in words and not changes:
        raise UserError(
            "no option of this run claims to be the same mathematics as the group's default (`drivetrain list` shows what each "
            "claims): say what to compare it with, as in `drivetrain certify precision=bf16 against precision=fp32`"
        )
    reference = prepare_job(apply(variants.without_saving(overrides), changes, config_dirs), config_dirs)
    different = different_keys(job, reference)
    if not different:
        raise UserError(f"against {' '.join(changes)}: that is the same run: name what the other run sets differently")
    with Steps() as progress:
        ours, theirs = (partial(run_recorded, each, settings.steps) for each in (job, reference))
        done = replace(certify(job.run, reference.run, ours, theirs, progress), different=different)
    effect, claims = between(reference, job)
    unmoved = sorted(
        {claim.partition("=")[0] for claim in claims if effect == "changes" and key_of(claim).partition(".")[0] not in BESIDE}
    )
    if done.verdict.bit_for_bit and unmoved:
        done = replace(done, verdict=replace(done.verdict, answer=NO_EFFECT), unmoved=unmoved)
    verbs.leave(job, "certify", sheet_of(done), ["certify", *argv], as_dict(done))
    return FAILED if done.verdict.answer == DIFFERS else DONE


def plain_changes(run: RunSpec) -> list[str]:
    """Return the overrides that switch off each technique that claims to be exact or close."""
    changes = []
    for group, default in default_options().items():
        part, choice = run.parts.get(group), run.choices.get(group)
        ranks_models = group == "metrics" and run.values.get("select") is not None  # the run needs the metric that ranks it
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


Recorded = Callable[..., Trace]  # takes further fields of record.RecordingOptions


def certify(
    tested: RunSpec, reference: RunSpec, recorded_tested: Recorded, recorded: Recorded, say: Callable[[str], None]
) -> Certified:
    """Record both runs and, if they are not bit for bit the same, the effect of rounding. Raises UserError."""
    say("recording both runs")
    theirs, ours = recorded(), recorded_tested()
    roundoffs = [
        max(option.roundoff() for part in run.parts.values() for option in (part if isinstance(part, list) else [part])
            if isinstance(option, Option))
        for run in (tested, reference)
    ]  # fmt: skip
    roundoff = max(roundoffs)  # the largest rounding error
    if ours.skipped != theirs.skipped:  # the runs are not at the same update then
        raise UserError(
            f"{max(ours.skipped, theirs.skipped)} updates were skipped by an overflow in one of the two runs (this one has "
            f"{tested.named('precision')}): its updates have other samples from there on: set a lower precision.init_scale"
        )
    verdict = judge(ours, theirs, Floors())
    if verdict.bit_for_bit:
        verdict = replace(verdict, answer=EXACT if len({*roundoffs}) == 1 else NO_EFFECT)
        return Certified(verdict, ours, theirs, roundoff)
    if layers := ours.random or theirs.random:
        raise UserError(_draws(tested, layers))
    say("recording what the order of sums and rounding change")
    coarser = roundoff > FLOAT32
    verdict = judge(ours, theirs, measured_floors(recorded, recorded_tested, roundoff, ours), coarser)
    if not coarser and may_have_flipped(verdict):
        say("recording both runs in float64")
        if agree_in_float64(recorded, recorded_tested):
            verdict = replace(verdict, answer=EXACT, first=None, flipped=True)
    return Certified(verdict, ours, theirs, roundoff)


def run_recorded(job: Job, updates: int, **look: object) -> Trace:
    """Return the trace of a run's first updates; `look` holds further fields of record.RecordingOptions. Raises UserError.

    It is an ordinary run in its own process, with its ranks, that makes a few updates.
    """
    import torch  # noqa: F401 - imported once here, because the processes are forked

    def work(answer: Callable[[Trace], None]) -> None:
        from drivetrain.launch import launcher
        from drivetrain.measure.certify import record

        run, options = record.prepared(job.run, updates, **look)

        def recording(trainer: Trainer) -> None:  # of each rank
            if (trace := record.TracingStep(trainer, options).run()) is not None:
                answer(trace)

        (folder / "run").mkdir()
        result = launcher.launch(replace(job, run=run, work=recording), folder / "run", quiet=True)
        if result.code:
            raise UserError(str(result.error).partition(" (traceback in")[0])  # that log file is removed

    with directory.working(Path(job.run.values["output_dir"]) / "certify") as folder, ended_by_signals():
        return forking.answer_of(work, "the run cannot be certified")


def agree_in_float64(recorded: Recorded, recorded_tested: Recorded) -> bool:
    """True if the two runs, each with its techniques, agree in float64; False if one cannot run in it."""
    wide = {"float64": True, "techniques": True}
    try:
        permuted = [recorded(permute=seed, **wide) for seed in range(1, PERMUTED + 1)]
        return same_in_float64(recorded_tested(**wide), recorded(**wide), permuted)
    except UserError:
        return False


def measured_floors(recorded: Recorded, recorded_tested: Recorded, roundoff: float, ours: Trace) -> Floors:
    """Record the effect of the order of sums and of rounding in the reference, and in the tested run if it rounds more."""
    orders = range(1, PERMUTED + 1)
    return Floors(
        permuted=[recorded(permute=seed) for seed in orders],
        shadow=recorded(float64=True),
        rounded=[recorded(float64=True, roundoff=roundoff, seed=seed) for seed in range(ROUNDED)],
        tested=[ours, *(recorded_tested(permute=seed) for seed in orders)] if roundoff > FLOAT32 else [],
    )


def _draws(run: RunSpec, layers: Sequence[str]) -> str:
    """The error where layers draw random numbers: two splits of a batch draw differently."""
    settings = [
        f"model.{key}=0" for key, value in vars(run.model).items() if "drop" in key and isinstance(value, float) and value
    ]
    what = " ".join(settings) or "their probabilities to 0, as model.kwargs={drop_rate: 0} does for many of timm's models"
    more = " …" if len(layers) > 3 else ""
    return (
        f"{', '.join(layers[:3])}{more} draw{'s' * (len(layers) == 1)} random numbers, and the two runs do not draw the same "
        f"ones, so that their difference says nothing about the mathematics: set {what} for both"
    )
