"""Writes a measurement into a recipe: evidence as comments, and a claim as data that `recipe verify` measures again."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import yaml
from omegaconf import OmegaConf

from drivetrain.core.overrides import format_value
from drivetrain.launch.job import Job
from drivetrain.measure.benchmark.comparison import Row
from drivetrain.recipe.claim import Claim as Claim
from drivetrain.recipe.safe_yaml import printable
from drivetrain.run import environment, recipe_file
from drivetrain.run.identity import flatten

_ABSENT = object()
_COMMENTS = {
    "ratio": "samples a second, relative to the baseline",
    "interval": "95 %",
    "against": "what turns this recipe into the baseline again",
}


def against(job: Job, base: Job) -> dict[str, Any]:
    """The options and keys that turn the recipe of `job` into that of `base` again, as a claim holds them."""
    ours, theirs = (flatten(OmegaConf.to_container(j.composed.config)) for j in (job, base))
    options = base.composed.choices
    found = {group: option for group, option in options.items() if job.composed.choice(group) != option}
    removed = {key.split(".")[0] for key in ours.keys() - theirs.keys()} & options.keys()
    found |= {group: options[group] for group in removed}  # only a group's option can remove a key
    shipped = flatten(base.composed.option_defaults)
    for key, value in theirs.items():
        before = shipped if key.split(".")[0] in found else ours
        if before.get(key, _ABSENT) != value and not key.endswith("_target_"):
            found[key] = value
    return found


def claim_of(row: Row, against: dict[str, Any]) -> Claim | None:
    """The claim of an arm that was compared to its baseline; None where the ratio has no interval."""
    if row.ratio is None or not row.ratio.low or not against:
        return None
    middle, low, high = (round(value, 3) for value in row.ratio)
    versions = {name: str(environment.version(name)) for name in ("torch", "drivetrain")}
    quality = row.verdict.outcome if row.verdict else None
    return Claim(middle, (low, high), str(row.device), versions, against, time.strftime("%Y-%m-%d"), quality)


def own_groups(job: Job) -> set[str]:
    """The groups whose option is the user's own class, which no recipe may choose."""
    return {group for group, option in job.composed.choices.items() if option == "own"}


def recipe_text(job: Job, against: dict[str, Any], row: Row, base_row: Row | None = None, comments: Sequence[str] = ()) -> str:
    """A recipe file of `job`, which `row` measured: comments, the recipe, and its claim.

    The recipe leaves out the user's own code and paths, and saving=none, which measuring sets. Where the baseline differs in
    those there can be no claim: a comment says so instead.
    """
    left_out = job.machine_local_keys | own_groups(job)
    if not job.run.saving.active and "saving" not in against:
        left_out = left_out | {"saving"}
    unclaimable = [key for key in against if key in left_out or key.split(".")[0] in left_out]
    claim = None if unclaimable else claim_of(row, against)
    lines = [*comments]
    if base_row is not None and row.samples_per_second and base_row.samples_per_second:
        lines.append(f"{row.samples_per_second:,.0f} samples a second, the baseline {base_row.samples_per_second:,.0f}")
    if unclaimable:
        lines.append(f"no claim: the baseline differs in {', '.join(unclaimable)}, which no recipe may set")
    section = to_yaml(claim) if claim is not None else ""
    return as_comments(lines) + recipe_file.to_recipe(job.composed, left_out, sections=section)


def as_comments(lines: Sequence[str]) -> str:
    """The lines as YAML comments, with control characters and line breaks removed."""
    return "".join(f"# {printable(line)}\n" for line in lines)


def to_yaml(claim: Claim) -> str:
    """The `claim:` section of a recipe."""
    section = {
        "ratio": claim.ratio,
        "interval": list(claim.interval),
        "device": claim.device,
        "versions": claim.versions,
        "against": claim.against,
        "measured": claim.measured,
        "quality": claim.quality,
    }
    lines = {key: f"  {key}: {_flow(value)}" for key, value in section.items() if value is not None}
    width = max(len(lines[key]) for key in ("ratio", "interval"))
    commented = [f"{line:<{width}}  # {_COMMENTS[key]}" if key in _COMMENTS else line for key, line in lines.items()]
    return "\n".join(["claim:", *commented]) + "\n"


def _flow(value: Any) -> str:
    """A value in one line of YAML."""
    text = yaml.safe_dump([value], default_flow_style=True, width=10**6, allow_unicode=True, sort_keys=False)
    return text.strip()[1:-1]


def describe(claim: Claim) -> str:
    """The claim as a sentence."""
    when = f", {claim.measured}" if claim.measured else ""
    quality = f"; quality {claim.quality}" if claim.quality else ""
    return (
        f"{times(claim.ratio, *claim.interval)} the samples a second of {as_overrides(claim.against)}, on {claim.device} with "
        f"{' '.join(f'{name} {version}' for name, version in claim.versions.items())}{when}{quality}"
    )


def times(middle: float, low: float, high: float) -> str:
    """A ratio and its interval as text."""
    return f"{middle:.2f} × ({low:.2f} to {high:.2f})"


def as_overrides(against: dict[str, Any]) -> str:
    """A claim's baseline as overrides, as a user would type them."""
    return printable(" ".join(f"{key}={format_value(value)}" for key, value in against.items()))
