"""`drivetrain certify`: a few updates of two runs from one state, and whether they differ by more than rounding."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drivetrain.config.catalog import default_options
from drivetrain.core import forking
from drivetrain.core.errors import DONE, FAILED, UserError
from drivetrain.core.option import Count, Option, RunSpec
from drivetrain.core.signals import ended_by_signals
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
    Finding,
    Floors,
    Trace,
    Verdict,
    common_factor,
    different_settings,
    judge,
    may_have_flipped,
    same_bits,
    same_in_float64,
)
from drivetrain.measure.changes import apply
from drivetrain.run import directory, environment
from drivetrain.run.identity import flatten
from drivetrain.ui.progress import Steps
from drivetrain.ui.sheet import Section, Sheet, Table, setting, words

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
MICRO_BATCHES = ("batch", "parallel")  # groups that share an update's samples out
Keys = Sequence[tuple[str, str, str]]  # a key of the config, the tested run's value, the other's


def different_keys(tested: Job, reference: Job) -> Keys:
    """Return where the two configs differ. Where another option of a group is chosen, the group stands for its keys."""
    ours, theirs = ({**flatten(job.composed.plain), **job.composed.choices} for job in (tested, reference))
    keys = [k for k in dict.fromkeys([*ours, *theirs]) if ours.get(k) != theirs.get(k)]
    groups = [k for k in keys if k in tested.composed.choices]
    shown = [k for k in keys if k in groups or k.partition(".")[0] not in groups]
    return [(k, setting(ours.get(k)), setting(theirs.get(k))) for k in sorted(shown, key=lambda k: k.split("."))]


def sheet(verdict: Verdict, tested: Trace, reference: Trace, roundoff: float, different: Keys) -> Sheet:
    """The verdict, what differs in the configs, and the phases."""
    answer, *more = lines(verdict, tested, reference, roundoff, different)
    header = ("phase", "compared", "largest difference", "rounding gives", "in", "verdict")
    rows = [_row(*each, verdict.flipped) for each in phases(verdict)]
    unseen = [f"not looked into: {line}" for line in dict.fromkeys([*tested.unseen, *reference.unseen])]
    settings = Table(("setting", "this run", "against"), different, "What differs in the configs")
    sections: list[Section] = [settings, Table(header, rows, "The phases of an update", ("in",)), words(*unseen, *more)]
    return Sheet("The same mathematics? – drivetrain certify", answer, sections)


def phases(verdict: Verdict) -> list[tuple[str, int, Finding]]:
    """Return each phase with the number of tensors that were compared, and the worst of them."""
    found = verdict.by_phase().items()
    worst = {phase: max(those, key=lambda f: (f.is_different and f.decides, f.ratio, f.distance)) for phase, those in found}
    return [(phase, len(those), worst[phase]) for phase, those in found]


def _row(phase: str, count: int, worst: Finding, flipped: bool = False) -> tuple[str, ...]:
    above = "rearranged" if not worst.decides else "flipped" if flipped else "differs"
    differs = above if worst.is_different else "same" if worst.distance else "equal"
    where = _where(worst) if worst.distance else ""
    return phase, f"{count:,}", _share(worst.relative(worst.distance)), _share(worst.relative(worst.floor)), where, differs


def _share(value: float) -> str:
    return "–" if not math.isfinite(value) else "0" if not value else f"{value:.1e}"


def _where(finding: Finding) -> str:
    update, _, name = finding.key
    return " ".join(part for part in (name, f"(update {update})" if update else "") if part)


def lines(verdict: Verdict, tested: Trace, reference: Trace, roundoff: float, different: Keys = ()) -> list[str]:
    """Return the verdict in sentences, and where a run's precision does less on this machine than its name says."""
    notices = [
        f"  precision of {whose}: {trace.notice}. There it has no effect: this answer is not one for machines where it has"
        for whose, trace in (("this run", tested), ("the other run", reference))
        if trace.notice
    ]
    if any(key.partition(".")[0] in MICRO_BATCHES for key, *_ in different) and (norm := first_batch_norm(verdict, reference)):
        notices.insert(
            0,
            f"  {norm} takes its statistics from one micro-batch, and these are of other sizes: accumulation and ranks do not "
            "enlarge a BatchNorm's batch. Compare at the same micro-batch, or with a norm that looks at one sample",
        )
    return [*_verdict(verdict, tested, reference, roundoff), *notices]


def first_batch_norm(verdict: Verdict, reference: Trace) -> str:
    """The BatchNorm in whose forward the runs first differ; "" where they differ elsewhere."""
    if verdict.first is None or verdict.first.key[1] not in ("forward", "buffers"):
        return ""
    place = named(verdict.first.key[2], reference)
    return place if "(BatchNorm" in place or "(SyncBatchNorm" in place else ""


def _verdict(verdict: Verdict, tested: Trace, reference: Trace, roundoff: float) -> list[str]:
    tensors = f"{len(verdict.findings):,} tensors"
    if verdict.answer != DIFFERS:
        if verdict.bit_for_bit:
            return [f"exact: bit for bit the same, in all of {tensors}"]
        if verdict.flipped:
            return [_of_flips(verdict, tensors)]
        worst = max((f for f in verdict.findings if f.decides), key=lambda f: f.ratio)
        of = f"of {tensors}, none differs more than {worst.ratio:.1f} times what they give (differs: above {MARGIN:g} times)"
        if verdict.answer == CLOSE:
            return [f"within rounding of {FORMATS.get(roundoff, f'2^{math.log2(roundoff):.0f}')}: {of}"]
        return [f"exact: the order of sums is all that differs: {of}"]
    assert verdict.first is not None
    first, (update, phase, name) = verdict.first, verdict.first.key
    place = f"{phase} of {named(name, reference)}" if name and phase not in ("samples", "evaluation", "optimizer state") else (
        f"{phase}: {name}" if name else phase
    )  # fmt: skip
    when = f"in update {update}" if update and phase != "evaluation" else "after the updates" if update else "before the updates"
    sizes = f"by {_share(first.relative(first.distance))} of its size, where rounding gives {_share(first.relative(first.floor))}"
    return [f"differs: first {when}, {place}, {sizes}", f"  {MEANS[phase]}", *hints(verdict, tested, reference)]


def _of_flips(verdict: Verdict, tensors: str) -> str:
    """The text on two runs that are the same in float64 only."""
    flipped = [f for f in verdict.findings if f.is_different and f.decides]
    return (
        f"exact: in float64 the two runs are the same. In float32 {len(flipped)} of {tensors} differ by more than the order of "
        f"sums gives, from update {min(f.key[0] for f in flipped)} on: rounding moved a value over a threshold, such as a ReLU's"
    )


def named(name: str, trace: Trace) -> str:
    """Return a module or parameter with the class of its module."""
    module = name.removeprefix("input of ").split(" #")[0].split(" (")[0]
    kind = trace.kinds.get(module) or trace.kinds.get(module.rpartition(".")[0])
    shown = name if not name.startswith("input of ") else f"what goes into {module}"
    return f"{shown} ({kind})" if kind else shown


def hints(verdict: Verdict, tested: Trace, reference: Trace) -> list[str]:
    """Return what the first difference looks like, one line each."""
    assert verdict.first is not None
    update, phase, name = verdict.first.key
    found = []
    alike = [f for f in verdict.findings if f.key[:2] == (update, phase)]
    different = [f for f in alike if f.is_different]
    if phase not in ("samples", "evaluation") and (factor := common_factor(alike)) is not None:
        all_of = "" if len(alike) == 1 else f", all {len(alike)} of them"
        found.append(f"  it is {factor:.4g} times the other run's{all_of}")
    if phase == "samples":
        ours, theirs = (trace.entries[verdict.first.key].values for trace in (tested, reference))
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
        settings = different_settings(tested.settings.get(of, {}), reference.settings.get(of, {}))
        found += [f"  {key} of {of} is {value:g}, and {other:g} in the other run" for key, value, other in settings]
    if phase == "gradient" and any(not tested.entries[f.key].size and f.size for f in different):
        found.append("  these get no gradient: frozen, or cut off from the loss")
    return found


def as_dict(verdict: Verdict, tested: Trace, reference: Trace, roundoff: float, different: Keys) -> dict[str, Any]:
    """Return the content of certify.json. Differences and floors are relative to the size of the other run's tensor."""

    def finding(f: Finding) -> dict[str, Any]:
        update, phase, name = f.key
        return {
            "update": update, "phase": phase, "name": name, "difference": _number(f.relative(f.distance)),
            "floor": _number(f.relative(f.floor)), "ratio": _number(f.ratio), "differs": f.is_different,
        }  # fmt: skip

    return {
        "answer": verdict.answer,
        "bit_for_bit": verdict.bit_for_bit,
        "same_in_float64_only": verdict.flipped,
        "first": finding(verdict.first) if verdict.first is not None else None,
        "phases": {phase: {"compared": count, **finding(worst)} for phase, count, worst in phases(verdict)},
        "lines": lines(verdict, tested, reference, roundoff, different),
        "settings": {key: {"this": ours, "against": theirs} for key, ours, theirs in different},
        "not_looked_into": list(dict.fromkeys([*tested.unseen, *reference.unseen])),
        "roundoff": roundoff,
        "margin": MARGIN,
    }


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None


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
    settings, words = verbs.split(argv, Settings)
    at = words.index("against") if "against" in words else len(words)
    overrides, against = words[:at], words[at + 1 :]
    variants.refuse_resume("certify", [*overrides, *against])
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
        done = certify(job, reference, settings.steps, progress)
    found = done.verdict, done.tested, done.reference, done.roundoff, different
    shown, content = sheet(*found), as_dict(*found)
    shown.show()
    about = environment.describe(argv, job.config_hash, {})
    verbs.write(verbs.folder(job, "certify"), "certify", shown, ["certify", *argv], about, content)
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


def run_recorded(job: Job, updates: int, **look: object) -> Trace:
    """Return the trace of a run's first updates; `look` holds further fields of record.RecordingOptions. Raises UserError.

    It is an ordinary run in a process of its own, with its ranks, that makes a few updates.
    """
    import torch  # noqa: F401 - imported once here, because the processes are forked

    folder = directory.create(Path(job.run.values["output_dir"]), "certify")

    def work(answer: Callable[[Trace], None]) -> None:
        from drivetrain.launch import launcher
        from drivetrain.measure.certify import record

        looked, run = record.RecordingOptions.at(job.run, updates, **look), job.run
        if looked.float64:
            run = record.widened_run(run) if looked.techniques else record.shadow_of(run)

        def recording(trainer: Trainer) -> None:  # of each rank
            if (trace := record.Recorder(trainer, looked).run()) is not None:
                answer(trace)

        ended = launcher.launch(replace(job, run=run, work=recording), folder, quiet=True)
        if ended.code:
            raise UserError(str(ended.result.error).partition(" (traceback in")[0])  # that file is removed

    try:
        with ended_by_signals():
            return forking.answer_of(work, "the run cannot be certified")
    finally:
        directory.remove(folder)


Recorded = Callable[..., Trace]  # takes further fields of record.RecordingOptions


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
    """True if the two runs, each with its techniques, are the same in float64; False where one cannot be made there."""
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
    settings = [
        f"model.{key}=0" for key, value in vars(run.model).items() if "drop" in key and isinstance(value, float) and value
    ]
    what = " ".join(settings) or "their probabilities to 0, as model.kwargs={drop_rate: 0} does for many of timm's models"
    more = " …" if len(layers) > 3 else ""
    draw = "draws" if len(layers) == 1 else "draw"
    raise UserError(
        f"{', '.join(layers[:3])}{more} {draw} random numbers, and the two runs do not draw the same ones, so that their "
        f"difference says nothing about the mathematics: set {what} for both"
    )
