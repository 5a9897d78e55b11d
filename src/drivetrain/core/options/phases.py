"""The phases of an update: parts of a model that are trained one after the other, each by its own optimizer and loss."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from drivetrain.core.errors import refuse
from drivetrain.core.options.allowed import NAME_PATTERN, Entries, NamePattern, Text, check_patterns, matches
from drivetrain.core.options.option import Count, Positive, RunSpec

Phases = Annotated[
    dict[str, Any],
    Entries(Text(r"[A-Za-z]\w{0,99}\.\w{1,20}", "a phase and a key of it"), ((Text(r"\w+\.parameters", ""), NAME_PATTERN),)),
]  # the top-level value phases


@dataclass(frozen=True)
class Phase:
    """Settings of a phase. Those that are None are the run's."""

    parameters: list[NamePattern]  # the parameters that it trains
    every: Count = 1  # the period of its updates
    lr: Positive | None = None
    max_norm: Positive | None = None  # of its gradients, as in clip=norm


def of(run: RunSpec) -> dict[str, Phase]:
    """Return the run's phases by name, in their order."""
    return {name: Phase(**settings) for name, settings in (run.values["phases"] or {}).items()}


def problems(run: RunSpec) -> Iterator[str]:
    """Yield why an update of this run cannot have its phases."""
    found = of(run)
    if not found:
        return
    if all(phase.every > 1 for phase in found.values()):
        yield f"phases: none of {', '.join(found)} runs in every update: let one have every: 1"
    named = f"phases={{{', '.join(found)}}}"
    excluded = {
        "precision": (run.precision.owns_weights, "it trains copies of the weights", "set precision=bf16"),
        "parallel": (not run.parallel.calls_parts, "its ranks hold parts of the weights", "set parallel=ddp"),
        "loss": (run.loss.compares_samples, "it is computed from all samples at once", "set loss=own"),
        "batch": (bool(run.batch.untried) or run.batch.preallocate, "it tries a forward", "set batch=fixed"),
        "model": (bool(run.model.unfreeze), "model.unfreeze says what trains", "set model.unfreeze={}"),
    }
    for group, (is_so, why, remedy) in excluded.items():
        if is_so:
            yield f"{named} and {run.named(group)} exclude each other ({why}): {remedy}"
    if run.stages:
        yield f"{named} and stages exclude each other: leave one of them out"


def divided(found: Mapping[str, Phase], names: Collection[str]) -> dict[str, list[str]]:
    """Return the names of the parameters that each phase trains. Raises UserError where one of `names` has none, or several."""
    check_patterns(names, {f"phases.{name}.parameters": phase.parameters for name, phase in found.items()})
    trained = {n: [p for p, phase in found.items() if any(matches(n, pattern) for pattern in phase.parameters)] for n in names}
    refuse(
        f"phases: {name} is trained by {' and '.join(by) if by else 'no phase'}: name it in the parameters of one, or freeze it "
        "(model.freeze)"
        for name, by in trained.items()
        if len(by) != 1
    )
    return {phase: [name for name, by in trained.items() if by == [phase]] for phase in found}
