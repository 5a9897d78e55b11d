"""`drivetrain ablate`: what each technique of a recipe brings by itself, what its loss costs, and the way there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drivetrain.config.catalog import LISTS
from drivetrain.core.errors import DONE, FAILED, UserError
from drivetrain.core.files import write_json
from drivetrain.core.option import Count
from drivetrain.core.overrides import format_value
from drivetrain.launch.job import Job
from drivetrain.launch.job import prepare as prepare_job
from drivetrain.measure import arguments
from drivetrain.measure.benchmark import compare
from drivetrain.measure.benchmark.compare import Comparison
from drivetrain.measure.report.html import ablation_page
from drivetrain.run import directory
from drivetrain.run.identity import flatten


@dataclass
class Settings(compare.Settings):
    """What the command itself can be told."""

    rounds: Count = 8  # of three comparisons with many arms
    recipe: str = "fast"
    baseline: str = "naive"


@dataclass(frozen=True)
class Technique:
    """One difference of the recipe from the baseline: a group's option with all its knobs, one knob, or one of a list."""

    label: str
    group: str
    has: tuple[str, ...]  # the words that give an arm the recipe's way
    lacks: tuple[str, ...]  # and those that give it the baseline's
    item: str | None = None  # of a list group: the option that is in it or not
    by_default: bool = True  # of an item: the recipe has it, the baseline has not


def techniques(baseline: Job, recipe: Job) -> list[Technique]:
    """In what the recipe differs from the baseline, in the order of conf/config.yaml."""
    old, new = baseline.composed, recipe.composed
    before, after = old.plain, new.plain
    found: list[Technique] = []
    for group in new.choices:
        if group in recipe.machine_local_keys | {"logger", "saving"}:
            continue
        if group in LISTS:
            found += _items(group, old.choices[group], new.choices[group])
        elif old.choices[group] != new.choices[group]:
            has, lacks = _section(group, new.choices[group], after), _section(group, old.choices[group], before)
            found.append(Technique(has[0], group, has, lacks))
        else:
            a, b = flatten(before[group]), flatten(after[group])
            for key in (k for k in b if a.get(k) != b[k] and f"{group}.{k}" not in recipe.machine_local_keys):
                new_word, old_word = (f"{group}.{key}={format_value(v)}" for v in (b[key], a.get(key)))
                found.append(Technique(new_word, group, (new_word,), (old_word,)))
    return found


def _items(group: str, old: list[str], new: list[str]) -> list[Technique]:
    gained = [Technique(f"{group}=[{name}]", group, (), (), name) for name in new if name not in old]
    return gained + [Technique(f"{group} without {name}", group, (), (), name, False) for name in old if name not in new]


def _section(group: str, option: str, plain: dict[str, Any]) -> tuple[str, ...]:
    """The option and all its knobs, as words."""
    knobs = {k: v for k, v in flatten(plain[group]).items() if k and k != "_target_" and v != {}}
    return (f"{group}={option}", *(f"{group}.{k}={format_value(v)}" for k, v in knobs.items()))


def words_of(start: Job, differing: Sequence[Technique], forward: bool) -> list[str]:
    """What turns the baseline into the baseline with these techniques (`forward`), or the recipe into it without them."""
    words = [word for t in differing for word in (t.has if forward else t.lacks)]
    for group in dict.fromkeys(t.group for t in differing if t.item is not None):
        items = list(start.composed.choices[group])
        for t in (t for t in differing if t.group == group):
            if t.by_default == forward:
                items.append(str(t.item))
            else:
                items.remove(str(t.item))
        words.append(f"{group}=[{','.join(items)}]")
    return words


def command(argv: list[str], config_dirs: Sequence[str] = ()) -> int:
    """`drivetrain ablate`; its exit code."""
    asked, words = arguments.split(argv, Settings)
    compare.afresh("ablate", words)
    from_words, to_words = [f"recipe={asked.baseline}", *words], [f"recipe={asked.recipe}", *words]
    baseline, recipe = prepare_job(from_words, config_dirs), prepare_job(to_words, config_dirs)
    found = techniques(baseline, recipe)
    if not found:
        raise UserError(f"recipe={asked.recipe} and baseline={asked.baseline} do not differ under these words")

    def measured(title: str, start: Job, given: Sequence[str], arms: dict[str, list[Technique]], forward: bool) -> Comparison:
        print(f"\n{title}", flush=True)
        entries = [compare.entry(asked.baseline if forward else asked.recipe, given, config_dirs)]
        for label, differing in arms.items():
            entries.append(compare.entry(label, [*given, *words_of(start, differing, forward)], config_dirs))
        done = compare.measure(entries, asked, words)
        compare.show(done)
        return done

    plus = measured(f"{asked.baseline} + each", baseline, from_words, {f"+ {t.label}": [t] for t in found}, True)
    minus = measured(f"{asked.recipe} − each", recipe, to_words, {f"− {t.label}": [t] for t in found}, False)
    best = _by_gain(found, plus)
    steps = {f"+ {best[n].label}": best[: n + 1] for n in range(len(best))}
    ladder = measured(f"from {asked.baseline} to {asked.recipe}", baseline, from_words, steps, True)
    parts = {
        f"From {asked.baseline} to {asked.recipe}, step by step": ladder,
        f"{asked.baseline} and one technique more": plus,
        f"{asked.recipe} and one technique less": minus,
    }
    folder = directory.create(Path(baseline.run.values["output_dir"]), "compare")
    write_json(folder / "ablate.json", {title: part.as_dict() for title, part in parts.items()})
    (folder / "ablate.html").write_text(ablation_page(asked.recipe, asked.baseline, parts, argv))
    print(f"\nwritten to {folder}/ablate.json and ablate.html")
    return FAILED if any(row.error for part in parts.values() for row in part.rows) else DONE


def _by_gain(found: list[Technique], plus: Comparison) -> list[Technique]:
    """The techniques, those first that bring the most by themselves; those that cannot be by themselves last."""
    gains = {t: row.ratio.middle if row.ratio else 0.0 for t, row in zip(found, plus.rows[1:], strict=True)}
    return sorted(found, key=lambda t: -gains[t])
