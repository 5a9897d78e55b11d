"""From what was measured to a recipe that says so: its evidence as comments, its claim as data that `recipe verify` re-runs."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import yaml
from omegaconf import OmegaConf

from drivetrain.core.overrides import format_value
from drivetrain.launch.job import Job
from drivetrain.recipe.claim import Claim as Claim
from drivetrain.recipe.safe_yaml import printable
from drivetrain.run import environment, identity
from drivetrain.run.identity import flatten

if TYPE_CHECKING:
    from drivetrain.measure.benchmark.compare import Row

_ABSENT = object()
_COMMENTS = {
    "ratio": "samples a second, to the baseline's",
    "interval": "95 %",
    "against": "what makes this recipe the baseline again",
}


def against(job: Job, base: Job) -> dict[str, Any]:
    """What makes the recipe of `job` that of `base` again: options, and the values of keys, as a claim has them."""
    ours, theirs = (flatten(OmegaConf.to_container(j.composed.config)) for j in (job, base))
    options = base.composed.choices
    found = {group: option for group, option in options.items() if job.composed.choices[group] != option}
    gone = {key.split(".")[0] for key in ours.keys() - theirs.keys()} & options.keys()  # nothing but its group takes a key away
    found |= {group: options[group] for group in gone}
    shipped = flatten(base.composed.option_defaults)
    for key, value in theirs.items():
        before = shipped if key.split(".")[0] in found else ours
        if before.get(key, _ABSENT) != value and not key.endswith("_target_"):
            found[key] = value
    return found


def of(row: Row, against: dict[str, Any]) -> Claim | None:
    """The claim of an arm that was compared to its baseline; None where it has no interval."""
    if row.ratio is None or not row.ratio.low or not against:
        return None
    middle, low, high = (round(value, 3) for value in row.ratio)
    versions = {name: str(environment.version(name)) for name in ("torch", "drivetrain")}
    quality = row.verdict.word if row.verdict else None
    return Claim(middle, (low, high), str(row.device), versions, against, time.strftime("%Y-%m-%d"), quality)


def own_groups(job: Job) -> set[str]:
    """The groups whose option is the user's own class, which no recipe may choose."""
    return {group for group, option in job.composed.choices.items() if option == "own"}


def recipe_text(job: Job, against: dict[str, Any], row: Row, base_row: Row | None = None, comments: Sequence[str] = ()) -> str:
    """A recipe file of `job`, which `row` measured: comments, what replays it, and its claim.

    The user's own code and paths are left out, and so is saving=none, which measuring sets. A difference in those cannot be
    claimed: then a comment says so.
    """
    left_out = job.machine_local_keys | own_groups(job)
    if job.composed.choices["saving"] == "none" and "saving" not in against:
        left_out = left_out | {"saving"}
    theirs = [key for key in against if key in left_out or key.split(".")[0] in left_out]
    claim = None if theirs else of(row, against)
    lines = [*comments]
    if base_row is not None and row.samples_per_second and base_row.samples_per_second:
        lines.append(f"{row.samples_per_second:,.0f} samples a second, the baseline {base_row.samples_per_second:,.0f}")
    if theirs:
        lines.append(f"no claim: the baseline differs in {', '.join(theirs)}, which no recipe may set")
    text = commented(lines) + identity.to_recipe(job.composed, left_out)
    return text + (to_yaml(claim) if claim is not None else "")


def commented(lines: Sequence[str]) -> str:
    """The lines as comments, each in one line whatever is in it."""
    return "".join(f"# {printable(line)}\n" for line in lines)


def to_yaml(claim: Claim) -> str:
    """The claim as a recipe's section."""
    parts = {
        "ratio": claim.ratio, "interval": list(claim.interval), "device": claim.device, "versions": claim.versions,
        "against": claim.against, "measured": claim.measured, "quality": claim.quality,
    }  # fmt: skip
    lines = {key: f"  {key}: {_flow(value)}" for key, value in parts.items() if value is not None}
    width = max(len(lines[key]) for key in ("ratio", "interval"))
    return "\n".join(["claim:", *(_beside(line, _COMMENTS.get(key), width) for key, line in lines.items())]) + "\n"


def _beside(line: str, comment: str | None, width: int) -> str:
    return f"{line:<{width}}  # {comment}" if comment else line


def _flow(value: Any) -> str:
    """A value in one line of YAML."""
    text = yaml.safe_dump([value], default_flow_style=True, width=10**6, allow_unicode=True, sort_keys=False)
    return text.strip()[1:-1]


def told(claim: Claim) -> str:
    """The claim in words."""
    when = f", {claim.measured}" if claim.measured else ""
    quality = f"; quality {claim.quality}" if claim.quality else ""
    return (
        f"{times(claim.ratio, *claim.interval)} the samples a second of {words(claim.against)}, on {claim.device} with "
        f"{' '.join(f'{name} {version}' for name, version in claim.versions.items())}{when}{quality}"
    )


def times(middle: float, low: float, high: float) -> str:
    """A ratio and its interval."""
    return f"{middle:.2f} × ({low:.2f} to {high:.2f})"


def words(against: dict[str, Any]) -> str:
    """What makes the baseline, as it would be typed."""
    return printable(" ".join(f"{key}={format_value(value)}" for key, value in against.items()))
