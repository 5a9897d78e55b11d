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
    both = [variants.compose(n, [f"recipe={n}", *overrides], config_dirs, own_saving=True) for n in (baseline, recipe)]
    variants.refuse_bad(both)
    before, after = (variants.baseline_job([spec]) for spec in both)
    quality.check(settings, before, settings.quality)
    if overrides and not any(key_of(word) == "recipe" for word in argv):
        echo(f"no recipe= is given: what is measured are the techniques of recipe={recipe}; {_on_both_sides(overrides)}")
    added, removed = techniques(before, after), techniques(after, before)
    found, removals = added.found(), {change.key: change for change in removed.found()}
    if not found:
        raise UserError(f"recipe={recipe} and baseline={baseline} do not differ with these overrides")
    beside = f" with {len(overrides)} override{'s' * (len(overrides) != 1)}" if overrides else ""  # what both sides have
    trained: Trained = {}  # the runs of all three comparisons, which have variants in common

    def measured(title: str, name: str, chosen: dict[str, list[Change]], subject: str) -> tuple[Comparison, list[VariantSpec]]:
        """Measure the baseline with each variant's techniques, or the recipe without; `subject` is what a sentence calls it."""
        echo(f"\n{title}")
        given = [f"recipe={name}", *overrides]
        specs = [variants.compose(f"{name}{beside}", given, config_dirs)]
        for label, changes in chosen.items():
            words = removed.overrides([removals[c.key] for c in changes]) if name == recipe else added.overrides(changes)
            specs.append(variants.compose(label, [*given, *words], config_dirs))
        done = compare.measure(specs, settings, overrides, trained=trained)
        done.raise_if_baseline_failed()
        done.subject = subject
        compare.sheet(done).show()
        return done, specs

    comparisons = {}
    if "alone" in settings.tables:
        alone = {f"+ {t.label}": [t] for t in found}
        plus, specs = measured(f"{baseline} + each", baseline, alone, f"{baseline} with {{}}")
        comparisons[f"{baseline} and one technique more"] = plus
        found = _by_gain(found, plus)
    if "without" in settings.tables:
        without = {f"− {t.label}": [t] for t in found}
        minus, specs = measured(f"{recipe} − each", recipe, without, f"{recipe} without {{}}")
        comparisons[f"{recipe} and one technique less"] = minus
    if "steps" in settings.tables:
        steps = {f"+ {technique.label}": found[: n + 1] for n, technique in enumerate(found)}
        ladder, specs = measured(f"from {baseline} to {recipe}", baseline, steps, f"{baseline} with all up to {{}}")
        comparisons = {f"From {baseline} to {recipe}, step by step": ladder, **comparisons}
    echo()
    content = {title: done.as_dict() for title, done in comparisons.items()}
    shown = sheet(recipe, baseline, comparisons, overrides)
    verbs.write(verbs.folder(before, "ablate"), "ablate", shown, ["ablate", *argv], content)
    return comparisons, specs


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
