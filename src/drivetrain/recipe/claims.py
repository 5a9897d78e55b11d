"""The claim of a recipe: measured figures, a section for each kind, with the device, data and software of the measurement.

Each kind is a dataclass that declares its fields. A new kind costs one class here with its field in Claim, and one row of ALL
in measure/claims/verify.py, with its computation from runs and its test. Anyone may have written the file, so
everything in a claim is checked, plain, bounded and printable.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

from drivetrain.core.errors import printable
from drivetrain.core.options.overrides import format_value
from drivetrain.core.options.selection import SETS, Reach
from drivetrain.core.typed import JsonMapping, JsonObject
from drivetrain.recipe import sections
from drivetrain.recipe.safe_yaml import RecipeKey, code_refusal, names_code
from drivetrain.recipe.sections import Rule, Section, one_of, rules_of

QUALITIES = ("PASS", "FAIL", "INCONCLUSIVE")


_REACH = sections.check(
    lambda value: isinstance(value, str) and Reach.parse(value) is not None,
    "a metric and a value, as accuracy>=0.98 or loss<=0.1",
)
_RATIO = "samples a second, divided by the baseline's"


class Against(JsonObject):
    """The baseline's differing settings: group → option, dotted key → value; with the line of each, for messages."""

    lines: dict[str, int]

    def __init__(self, values: JsonMapping, lines: dict[str, int] | None = None) -> None:
        super().__init__(values)
        self.lines = lines or {}


class AgainstRule(Rule):
    """Keys and values by the same rules as a recipe's own."""

    def read(self, entry: RecipeKey) -> Against:
        found = Against({})
        for inner in entry.mapping("what the baseline has instead, as {precision: fp32}", at_least=1) or ():
            if inner.may_be_set():
                found[inner.key], found.lines[inner.key] = inner.value(), inner.line
                if names_code(inner.key, found[inner.key]):  # the command line could not give it to the baseline alone
                    inner.refuse(code_refusal(inner.key))
        return found


class Kind(Section):
    """One kind of claim: a figure that can be measured again."""

    of_all = False  # measured over all the claim's seeds

    def __str__(self) -> str:
        """The claim in words."""
        raise NotImplementedError


@dataclass(frozen=True)
class Speed(Kind):
    """The speed relative to a baseline, and the baseline's differing settings."""

    ratio: Annotated[
        float,
        Rule(sections.above_0, _RATIO, _RATIO),
    ]
    interval: Annotated[
        tuple[float, float], Rule(sections.interval_above_0, "the 95 % confidence interval of the ratio, as [1.85, 1.97]", "95 %")
    ]
    against: Annotated[
        Against,
        AgainstRule(
            about="what the baseline has instead, as {precision: fp32}", comment="the baseline is this recipe with these settings"
        ),
    ]
    quality: Annotated[str | None, Rule(one_of(*QUALITIES), comment="is the result as good as the baseline's?")] = None

    def contradictions(self, key: str) -> Iterator[str]:
        if not self.interval[0] <= self.ratio <= self.interval[1]:
            yield f"{key}.ratio={self.ratio} lies outside {key}.interval={list(self.interval)}"

    def __str__(self) -> str:
        return f"{times(self.ratio, *self.interval)} the samples a second of {as_overrides(self.against)}" + (
            f"; quality {self.quality}" if self.quality else ""
        )


@dataclass(frozen=True)
class Quality(Kind):
    """The final value of a metric over several seeds."""

    of_all = True

    metric: Annotated[str, Rule(sections.text, "the metric's name, as accuracy")]
    set: Annotated[str, Rule(one_of(*SETS), "the evaluated set, validation or test")]
    mean: Annotated[
        float, Rule(sections.number, "the metric's mean over the seeds, at the end of training", "at the end of training")
    ]
    n: Annotated[int, Rule(sections.count, "the number of seeds", "seeds")]
    sd: Annotated[float | None, Rule(sections.at_least_0, comment="standard deviation over the seeds")] = None
    interval: Annotated[tuple[float, float] | None, Rule(sections.interval, comment="95 %, of the mean")] = None

    def contradictions(self, key: str) -> Iterator[str]:
        if (self.n > 1) != (self.sd is not None) or (self.n > 1) != (self.interval is not None):
            yield f"{key}.n={self.n}: sd and interval are given if and only if there are several seeds"
        elif self.interval is not None and not self.interval[0] <= self.mean <= self.interval[1]:
            yield f"{key}.mean={self.mean} lies outside {key}.interval={list(self.interval)}"

    def __str__(self) -> str:
        spread = f" ({self.interval[0]:.4g} to {self.interval[1]:.4g})" if self.interval else ""
        return f"{self.metric} {self.mean:.4g}{spread}, {self.set}, {runs(self.n)}"


@dataclass(frozen=True)
class Target(Kind):
    """The time until a metric reached a value: medians over all seeds; a seed that never reached it counts as slowest."""

    of_all = True

    reach: Annotated[str, Rule(_REACH, "the value to reach, as accuracy>=0.98")]
    reached: Annotated[int, Rule(sections.whole, "the number of seeds that reached it", "of n seeds")]
    n: Annotated[int, Rule(sections.count, "the number of seeds")]
    updates: Annotated[float | None, Rule(sections.above_0, comment="median over the seeds")] = None
    slowest: Annotated[int | None, Rule(sections.count, comment="updates of the slowest seed, if all reached it")] = None
    seconds: Annotated[float | None, Rule(sections.at_least_0, comment="median, since the first record of training")] = None

    def contradictions(self, key: str) -> Iterator[str]:
        if self.reached > self.n:
            yield f"{key}.reached={self.reached} is more than {key}.n={self.n}"
        if self.updates is not None and 2 * self.reached <= self.n:
            yield f"{key}.updates={self.updates}: a median needs more than half of the seeds to reach it"
        if (self.slowest is not None) != (self.reached == self.n):
            yield f"{key}.slowest is given if and only if all seeds reached {printable(self.reach)}"

    def __str__(self) -> str:
        updates = f"{self.updates:,.0f} updates" if self.updates is not None else "–"
        seconds = f", {self.seconds:,.1f} s" if self.seconds is not None else ""
        return f"{self.reach} after {updates}{seconds}, {self.reached} of {runs(self.n)}"


@dataclass(frozen=True)
class Memory(Kind):
    """The peak memory: of the device's allocator, or of the process on a CPU."""

    peak_mib: Annotated[float, Rule(sections.above_0, "the peak memory in MiB, the largest over the seeds")]
    n: Annotated[int, Rule(sections.count, "the number of runs that it was measured in")]

    def __str__(self) -> str:
        return f"{self.peak_mib:,.0f} MiB at most, {runs(self.n)}"


@dataclass(frozen=True)
class Energy(Kind):
    """The device's energy in training, if the device counts it."""

    joules: Annotated[float, Rule(sections.above_0, "the device's joules, mean over the seeds")]
    n: Annotated[int, Rule(sections.count, "the number of runs that it was measured in")]

    def __str__(self) -> str:
        return f"{self.joules:,.0f} J, {runs(self.n)}"


@dataclass(frozen=True)
class DataSection(Section):
    """The fingerprint of the training set."""

    hash: Annotated[str, Rule(sections.like("[0-9a-f]{8,64}", "hex digits"), "the hash of the training set")]
    of: Annotated[str, Rule(sections.text, "the hashed quantity, such as content")]
    samples: Annotated[int, Rule(sections.count, "the number of training samples")]


@dataclass(frozen=True)
class DeviceSection(Section):
    """The device of the measurement."""

    kind: Annotated[
        str, Rule(sections.like("[a-z]{1,20}", "a device type of torch's, as cpu or cuda"), "the device type, as cpu or cuda")
    ]
    name: Annotated[str, Rule(sections.text, "the name of the CPU or GPU")]


@dataclass(frozen=True, kw_only=True)
class Claim(Section):
    """All claims of a recipe; each kind is optional."""

    speed: Annotated[Speed | None, Rule(kind=Speed)] = None
    quality: Annotated[Quality | None, Rule(kind=Quality)] = None
    target: Annotated[Target | None, Rule(kind=Target)] = None
    memory: Annotated[Memory | None, Rule(kind=Memory)] = None
    energy: Annotated[Energy | None, Rule(kind=Energy)] = None
    data: Annotated[DataSection | None, Rule(kind=DataSection)] = None
    device: Annotated[DeviceSection, Rule(kind=DeviceSection, about="the device of the measurement, as {kind: cpu, name: …}")]
    versions: Annotated[dict[str, str], Rule(sections.texts_by_name, "the software of the measurement, as {torch: 2.15.0}")]
    seeds: Annotated[tuple[int, ...] | None, Rule(sections.different_numbers)] = None
    folds: Annotated[int | None, Rule(sections.count)] = None  # each trained with each seed
    measured: Annotated[str | None, Rule(sections.text)] = None  # a date

    def kinds(self) -> dict[str, Kind]:
        """The claimed kinds, by their keys."""
        return {name: value for name in rules_of(type(self)) if isinstance(value := getattr(self, name), Kind)}

    def contradictions(self, key: str) -> Iterator[str]:
        if not self.kinds():
            yield f"{key} claims nothing: give one of {', '.join(KINDS)}"
        for name, kind in self.kinds().items():
            n = getattr(kind, "n", None)
            of, on = len(self.seeds or ()) * (self.folds or 1), f" on {self.folds} folds" if self.folds else ""
            if self.seeds is not None and n is not None and (n > of or (kind.of_all and n != of)):
                yield f"{key}.{name}.n={n}, but {key}.seeds are {len(self.seeds)}{on}"

    def text(self) -> str:
        """The section of a recipe's file."""
        return self.to_yaml("claim")

    def __str__(self) -> str:
        software = " ".join(f"{name} {version}" for name, version in self.versions.items())
        when = f", {self.measured}" if self.measured else ""
        return f"{'; '.join(map(str, self.kinds().values()))}; on {self.device.name} with {software}{when}"


KINDS = tuple(name for name, rule in rules_of(Claim).items() if rule.kind is not None and issubclass(rule.kind, Kind))


def times(middle: float, low: float, high: float) -> str:
    """A ratio and its interval as text."""
    return f"{middle:.2f} × ({low:.2f} to {high:.2f})"


def runs(count: int) -> str:
    """A number of runs with different seeds or folds, in words."""
    return f"{count} run{'s' if count > 1 else ''}"


def as_overrides(against: JsonMapping) -> str:
    """A claim's baseline as typed overrides."""
    return printable(" ".join(f"{key}={format_value(value)}" for key, value in against.items()))
