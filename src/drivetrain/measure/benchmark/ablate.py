"""`drivetrain ablate`: what each technique of a recipe gains alone, what its removal costs, and the steps to the recipe."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from drivetrain.config.catalog import LISTS
from drivetrain.core.errors import DONE, FAILED, UserError
from drivetrain.core.option import Count
from drivetrain.core.overrides import format_value
from drivetrain.core.stages import Stage
from drivetrain.launch.job import Job
from drivetrain.launch.job import prepare as prepare_job
from drivetrain.measure import arguments, leave
from drivetrain.measure.benchmark import arms, compare, comparison, quality
from drivetrain.measure.benchmark.comparison import Comparison
from drivetrain.measure.benchmark.overview import headline, titled
from drivetrain.run.identity import flatten
from drivetrain.ui.output import echo
from drivetrain.ui.sheet import Sheet, remarks

STAGES = "stages"


@dataclass
class Settings(comparison.Settings):
    """The settings of `drivetrain ablate`."""

    rounds: Count = 8  # of each of three comparisons, which have many arms
    recipe: str = "fast"
    baseline: str = "naive"
    tables: list[Literal["alone", "without", "steps"]] = field(default_factory=lambda: ["alone", "without", "steps"])


@dataclass(frozen=True)
class Technique:
    """One difference of the recipe from the baseline: an option with all its keys, one key, or one item of a list group."""

    label: str
    group: str
    enable: tuple[str, ...]  # overrides that set an arm to the recipe's value
    disable: tuple[str, ...]  # overrides that set it to the baseline's
    item: str | None = None  # of a list group: the option that one of them lists
    in_recipe: bool = True  # of an item: the recipe lists it and the baseline does not, or the reverse
    stages: tuple[str, ...] = ()  # all of the recipe, as they are typed, where `item` is one of them


def techniques(baseline: Job, recipe: Job) -> list[Technique]:
    """The differences of the recipe from the baseline, in the order of conf/config.yaml."""
    old, new = baseline.composed, recipe.composed
    found: list[Technique] = []
    for group in new.choices:
        if group in recipe.machine_local_keys | {"logger", "saving"}:
            continue
        if group in LISTS:
            found += _items(group, old.choice(group), new.choice(group))
        elif old.choice(group) != new.choice(group):
            enable, disable = _section(group, new.choice(group), new.plain), _section(group, old.choice(group), old.plain)
            found.append(Technique(enable[0], group, enable, disable))
        else:
            found += _keys(group, flatten(old.plain[group]), flatten(new.plain[group]), recipe.machine_local_keys)
    return found + _stages(baseline.run.stages, recipe.run.stages)


def _stages(old: Sequence[Stage], new: Sequence[Stage]) -> list[Technique]:
    """Each stage of the recipe that changes something; all of them as one where the baseline has stages too."""
    before, after = (f"stages=[{','.join(stage.typed() for stage in of)}]" if of else "stages=null" for of in (old, new))
    if old and before != after:
        return [Technique(after, STAGES, (after,), (before,))]
    names = tuple(stage.typed() for stage in new)
    return [
        Technique(f"stage {stage.title}", STAGES, (), (), name, stages=names)
        for stage, name in zip(new, names, strict=True)
        if stage.changes and not old
    ]


def _items(group: str, old: list[str], new: list[str]) -> list[Technique]:
    added = [Technique(f"{group}=[{name}]", group, (), (), name) for name in new if name not in old]
    return added + [Technique(f"{group} without {name}", group, (), (), name, False) for name in old if name not in new]


def _keys(group: str, old: dict[str, Any], new: dict[str, Any], machine_local_keys: set[str]) -> list[Technique]:
    found = []
    for key in (k for k in new if old.get(k) != new[k] and f"{group}.{k}" not in machine_local_keys):
        enable, disable = (f"{group}.{key}={format_value(value)}" for value in (new[key], old.get(key)))
        found.append(Technique(enable, group, (enable,), (disable,)))
    return found


def _section(group: str, option: str, plain: dict[str, Any]) -> tuple[str, ...]:
    """The overrides that set a group's option and all its keys."""
    keys = {k: v for k, v in flatten(plain[group]).items() if k and k != "_target_" and v != {}}
    return (f"{group}={option}", *(f"{group}.{k}={format_value(v)}" for k, v in keys.items()))


def overrides_of(start: Job, differences: Sequence[Technique], enable: bool) -> list[str]:
    """The overrides that add the techniques to the baseline `start` (`enable`), or remove them from the recipe `start`."""
    overrides = [override for t in differences for override in (t.enable if enable else t.disable)]
    stages = [t for t in differences if t.stages]
    for group in dict.fromkeys(t.group for t in differences if t.item is not None and not t.stages):
        items = list(start.composed.choice(group))
        for technique in (t for t in differences if t.group == group):
            if technique.in_recipe == enable:
                items.append(str(technique.item))
            else:
                items.remove(str(technique.item))
        overrides.append(f"{group}=[{','.join(items)}]")
    if stages:
        named = {t.item for t in stages}
        kept = [name if (name in named) == enable else _unchanged(name) for name in stages[0].stages]
        overrides.append(f"stages=[{','.join(kept)}]" if kept != [*map(_unchanged, kept)] else "stages=null")
    return overrides


def _unchanged(stage: str) -> str:
    """A stage, as it is typed, without its changes: it lasts as long, with the config of the run."""
    until = re.match(r"\{(until:[^,}]+)", stage)
    return f"{{{until[1]}}}" if until else "{}"


@dataclass
class Ablation:
    """The two recipes as jobs, and the command's settings."""

    settings: Settings
    overrides: list[str]
    config_dirs: Sequence[str]

    def __post_init__(self) -> None:
        self.baseline = prepare_job([f"recipe={self.settings.baseline}", *self.overrides], self.config_dirs)
        self.recipe = prepare_job([f"recipe={self.settings.recipe}", *self.overrides], self.config_dirs)
        quality.check(self.settings, self.baseline, self.settings.quality)
        self.trained: quality.Trained = {}  # the runs of all three comparisons, which have arms in common

    def compare(self, title: str, variants: dict[str, list[Technique]], enable: bool, subject: str) -> Comparison:
        """Measure the baseline with each variant's techniques (`enable`), or the recipe without them; print the table.

        `subject` is what a sentence calls a variant.
        """
        echo(f"\n{title}")
        name, start = (self.settings.baseline, self.baseline) if enable else (self.settings.recipe, self.recipe)
        given = [f"recipe={name}", *self.overrides]
        specs = [arms.compose(name, given, self.config_dirs)]
        for label, differences in variants.items():
            specs.append(arms.compose(label, [*given, *overrides_of(start, differences, enable)], self.config_dirs))
        done = comparison.measure(specs, self.settings, self.overrides, trained=self.trained)
        done.raise_if_baseline_failed()
        done.subject = subject
        self.specs = specs  # of the newest comparison
        compare.show(done)
        return done


def command(argv: list[str], config_dirs: Sequence[str] = (), hand_on: compare.HandOn | None = None) -> int:
    """Run `drivetrain ablate`; return its exit code. `hand_on` is called with the last table, which ends with the recipe."""
    settings, overrides = arguments.split(argv, Settings)
    if hand_on is not None and "steps" not in settings.tables:
        raise UserError("--recipe hands on the last of the steps, the whole recipe: tables= must have steps")
    arms.refuse_resume("ablate", overrides)
    if not settings.tables:
        raise UserError("tables=[] measures nothing: leave it out, or name some of alone, without and steps")
    recipe, baseline = settings.recipe, settings.baseline
    ablation = Ablation(settings, overrides, config_dirs)
    found = techniques(ablation.baseline, ablation.recipe)
    if not found:
        raise UserError(f"recipe={recipe} and baseline={baseline} do not differ with these overrides")
    comparisons = {}
    if "alone" in settings.tables:
        plus = ablation.compare(f"{baseline} + each", {f"+ {t.label}": [t] for t in found}, True, f"{baseline} with {{}}")
        comparisons[f"{baseline} and one technique more"] = plus
        found = _by_gain(found, plus)
    if "without" in settings.tables:
        minus = ablation.compare(f"{recipe} − each", {f"− {t.label}": [t] for t in found}, False, f"{recipe} without {{}}")
        comparisons[f"{recipe} and one technique less"] = minus
    if "steps" in settings.tables:
        steps = {f"+ {technique.label}": found[: n + 1] for n, technique in enumerate(found)}
        ladder = ablation.compare(f"from {baseline} to {recipe}", steps, True, f"{baseline} with all up to {{}}")
        comparisons = {f"From {baseline} to {recipe}, step by step": ladder, **comparisons}
    echo()
    content = {title: done.as_dict() for title, done in comparisons.items()}
    place, facts = leave.folder(ablation.baseline, "ablate"), next(iter(comparisons.values())).environment
    leave.leave(place, "ablate", sheet(recipe, baseline, comparisons), ["ablate", *argv], facts, content)
    if hand_on is not None:
        hand_on(ladder, ablation.specs)
    return FAILED if any(done.failed for done in comparisons.values()) else DONE


def sheet(recipe: str, baseline: str, comparisons: dict[str, Comparison]) -> Sheet:
    """What an ablation found; its answer is that of the first comparison."""
    about = f"What each technique of the recipe {recipe} is worth against {baseline}."
    if len(comparisons) > 1:
        about += " Where a technique gains when it is added alone, and its removal costs nothing, another makes up for it."
    answer = headline(next(iter(comparisons.values())))
    return Sheet(f"{recipe} against {baseline} – drivetrain ablate", answer, [remarks(about), *titled(comparisons, answer)])


def _by_gain(found: list[Technique], plus: Comparison) -> list[Technique]:
    """The techniques in descending order of their gain alone; those that cannot run alone come last.

    With a target, those that are there soonest come first.
    """
    if plus.target is not None:
        return [found[n - 1] for n in plus.order() if n]
    gains = {t: row.ratio.middle if row.ratio else 0.0 for t, row in zip(found, plus.rows[1:], strict=True)}
    return sorted(found, key=lambda t: -gains[t])
