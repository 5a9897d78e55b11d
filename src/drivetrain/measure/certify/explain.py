"""The verdict in words: a table of the phases, the first place where the runs differ, and what it looks like."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from drivetrain.launch.job import Job
from drivetrain.measure.certify.judge import CLOSE, DIFFERS, MARGIN, Finding, Verdict, common_factor, different_settings
from drivetrain.measure.certify.trace import Trace
from drivetrain.run.identity import flatten
from drivetrain.ui.sheet import Section, Sheet, Table, setting, words

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
    """What is said of two runs that are the same in float64 only."""
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
