"""`drivetrain ablate`: what each technique of a recipe gains alone, what its removal costs, and the steps to the recipe."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from drivetrain.core.errors import UserError
from drivetrain.core.option import Count
from drivetrain.core.overrides import key_of
from drivetrain.launch.job import Job
from drivetrain.measure import verbs
from drivetrain.measure.benchmark import compare, quality, variants
from drivetrain.measure.benchmark.compare import Comparison, headline, titled
from drivetrain.measure.benchmark.variants import Trained, VariantSpec
from drivetrain.measure.changes import STAGES, Change, Changes
from drivetrain.ui.output import echo
from drivetrain.ui.sheet import Sheet, remarks


@dataclass
class Settings(compare.Settings):
    """The settings of `drivetrain ablate`."""

    rounds: Count = 8  # of each of three comparisons, which have many variants
    recipe: str = "fast"
    baseline: str = "naive"
    tables: list[Literal["alone", "without", "steps"]] = field(default_factory=lambda: ["alone", "without", "steps"])


def techniques(baseline: Job, recipe: Job) -> Changes:
    """The changes that turn the baseline into the recipe: options, keys, epochs, items of lists and stages; no machine keys."""
    values = {*recipe.composed.plain} - {*recipe.composed.choices, STAGES, "epochs"}
    return Changes(baseline, recipe, {"logger", "saving", *values, *baseline.machine_local_keys, *recipe.machine_local_keys})


@dataclass
class Ablation:
    """The two recipes as jobs, and the command's settings."""

    settings: Settings
    overrides: list[str]
    config_dirs: Sequence[str]

    def __post_init__(self) -> None:
        self.specs: list[VariantSpec] = []  # of the newest comparison
        named = (self.settings.baseline, self.settings.recipe)
        both = [variants.compose(name, [f"recipe={name}", *self.overrides], self.config_dirs, own_saving=True) for name in named]
        variants.refuse_bad(both)
        self.baseline, self.recipe = (variants.baseline_job([spec]) for spec in both)
        quality.check(self.settings, self.baseline, self.settings.quality)
        self.trained: Trained = {}  # the runs of all three comparisons, which have variants in common
        self.forward, self.backward = techniques(self.baseline, self.recipe), techniques(self.recipe, self.baseline)
        self.removals = {change.key: change for change in self.backward.found()}
        count = len(self.overrides)
        self.beside = f" with {count} override{'s' * (count != 1)}" if count else ""  # what both sides have, for labels

    def compare(self, title: str, techniques: dict[str, list[Change]], enable: bool, subject: str) -> Comparison:
        """Measure the baseline with each variant's techniques (`enable`), or the recipe without them; print the table.

        `subject` is what a sentence calls a variant.
        """
        echo(f"\n{title}")
        name = self.settings.baseline if enable else self.settings.recipe
        given = [f"recipe={name}", *self.overrides]
        specs = [variants.compose(f"{name}{self.beside}", given, self.config_dirs)]
        for label, differences in techniques.items():
            back = [self.removals[each.key] for each in differences]
            words = self.forward.overrides(differences) if enable else self.backward.overrides(back)
            specs.append(variants.compose(label, [*given, *words], self.config_dirs))
        done = compare.measure(specs, self.settings, self.overrides, trained=self.trained)
        done.raise_if_baseline_failed()
        done.subject = subject
        self.specs = specs
        compare.show(done)
        return done


def run(
    argv: Sequence[str], config_dirs: Sequence[str] = (), needs_steps: bool = False
) -> tuple[dict[str, Comparison], list[VariantSpec]]:
    """Measure the tables, show and save them; return them, the steps first, and the variants of the last that was measured."""
    settings, overrides = verbs.split(argv, Settings)
    if needs_steps and "steps" not in settings.tables:
        raise UserError("--recipe hands on the last of the steps, the whole recipe: tables= must have steps")
    variants.refuse_resume("ablate", overrides)
    if not settings.tables:
        raise UserError("tables=[] measures nothing: leave it out, or name some of alone, without and steps")
    recipe, baseline = settings.recipe, settings.baseline
    ablation = Ablation(settings, overrides, config_dirs)
    if overrides and not any(key_of(word) == "recipe" for word in argv):
        echo(f"no recipe= is given: what is measured are the techniques of recipe={recipe}; {_on_both_sides(overrides)}")
    found = ablation.forward.found()
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
    shown, place = sheet(recipe, baseline, comparisons, overrides), verbs.folder(ablation.baseline, "ablate")
    verbs.write(place, "ablate", shown, ["ablate", *argv], content)
    return comparisons, ablation.specs


def _on_both_sides(overrides: Sequence[str]) -> str:
    """The overrides of an ablation, in words."""
    return (
        f"{shlex.join(overrides)} {'are' if len(overrides) > 1 else 'is'} set on both sides, so that the effect is not measured"
    )


def sheet(recipe: str, baseline: str, comparisons: dict[str, Comparison], overrides: Sequence[str] = ()) -> Sheet:
    """The sheet of an ablation; its answer is that of the first comparison."""
    about = f"What each technique of the recipe {recipe} is worth against {baseline}."
    if len(comparisons) > 1:
        about += " Where a technique gains when it is added alone, and its removal costs nothing, another makes up for it."
    if overrides:
        about += f" {_on_both_sides(overrides)}."
    answer = headline(next(iter(comparisons.values())))
    return Sheet(f"{recipe} against {baseline} – drivetrain ablate", answer, [remarks(about), *titled(comparisons, answer)])


def _by_gain(found: list[Change], plus: Comparison) -> list[Change]:
    """The techniques in descending order of their gain alone; those that cannot run alone come last.

    With a target, those that are there soonest come first.
    """
    if plus.target is not None:
        return [found[n - 1] for n in plus.order() if n]
    gains = {t: row.ratio.middle if row.ratio else 0.0 for t, row in zip(found, plus.rows[1:], strict=True)}
    return sorted(found, key=lambda t: -gains[t])
