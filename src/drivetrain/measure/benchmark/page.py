"""The HTML pages of comparisons: the answer, the table with intervals, all figures, and the rates round by round."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from drivetrain.measure.benchmark import noninferiority
from drivetrain.measure.benchmark.comparison import Comparison
from drivetrain.measure.benchmark.overview import headline, names, overview
from drivetrain.ui.pages import blocks, charts
from drivetrain.ui.pages.charts import Curve


def comparison_page(comparison: Comparison, argv: Sequence[str], verb: str = "compare") -> str:
    """The page of `drivetrain compare`, or of another command that compares."""
    body = [*section(comparison), *footer(verb, comparison, argv)]
    return blocks.page(f"Techniques compared – drivetrain {verb}", headline(comparison), body)


def ablation_page(recipe: str, baseline: str, comparisons: dict[str, Comparison], argv: Sequence[str]) -> str:
    """The page of `drivetrain ablate`, which begins with the answer of its first comparison."""
    about = f"What each technique of the recipe {recipe} is worth against {baseline}."
    if len(comparisons) > 1:
        about += " Where a technique gains when it is added alone, and its removal costs nothing, another makes up for it."
    first, last = next(iter(comparisons.values())), next(reversed(comparisons.values()))
    answer = headline(first)
    body = [*blocks.paragraphs([about], soft=True), *sections(comparisons, answer), *footer("ablate", last, argv)]
    return blocks.page(f"{recipe} against {baseline} – drivetrain ablate", answer, body)


def sections(comparisons: dict[str, Comparison], said: str = "") -> list[str]:
    """The comparisons under their titles, each with its answer, unless the page `said` it."""
    body: list[str] = []
    for title, comparison in comparisons.items():
        answer = headline(comparison)
        body += [blocks.heading(title), *blocks.paragraphs([answer] if answer != said else []), *section(comparison)]
    return body


def section(comparison: Comparison) -> list[str]:
    """One comparison's tables and chart."""
    called = names(comparison)
    header, rows = comparison.table()
    rows = [rows[n] for n in comparison.order()]
    rounds = max((len(row.rates) for row in comparison.rows), default=0)
    how = (
        f"Relative to {called[0]}: {rounds} rounds, each with fresh processes that run two timed blocks of about "
        f"{comparison.settings.block_s:g} s; one process runs at a time. The point is the Hodges–Lehmann estimate over the "
        "rounds, the bar its 95 % interval (Wilcoxon), on a logarithmic axis around 1. Where the bar includes 1, the rounds do "
        "not distinguish the two."
    )
    failed = [f"{name} failed: {row.error}" for name, row in zip(called, comparison.rows, strict=True) if row.error]
    body = [
        overview(comparison),
        *blocks.paragraphs(failed),
        *blocks.paragraphs([how], soft=True),
        *blocks.paragraphs(comparison.notes),
    ]
    body.append(blocks.folded("All figures", [blocks.table(header, rows, ("because", "error"), True, name="All figures")]))
    body.append(charts.grid([_rounds(comparison, called)]))
    body += blocks.paragraphs(["A change that all arms share is the machine's; a change of one arm alone is its own."], soft=True)
    if comparison.settings.quality:
        body.append(blocks.folded("How it is decided whether the result is no worse", _method()))
    return body


def _method() -> list[str]:
    """The method of the verdicts on quality."""
    return blocks.paragraphs((noninferiority.__doc__ or "").split("\n\n"))


def footer(verb: str, comparison: Comparison, argv: Sequence[str]) -> list[str]:
    """The command that repeats the measurement, and the environment in which it ran."""
    about = comparison.environment
    rows = [(k, str(about[k])) for k in ("drivetrain", "python", "platform", "processor", "git_commit", "lock_hash") if about[k]]
    rows += [(name, str(version)) for name, version in about["versions"].items()]
    return [
        blocks.heading("How to reproduce it"), blocks.command(f"drivetrain {verb} {shlex.join(argv)}".strip()),
        blocks.heading("Where it ran"), blocks.facts(rows, "Versions and machine"),
    ]  # fmt: skip


def _rounds(comparison: Comparison, called: Sequence[str]) -> str:
    """Each arm's samples a second against the round."""
    of_arms = [
        Curve(name, [(float(n), rate) for n, rate in enumerate(row.rates, 1)])
        for name, row in zip(called, comparison.rows, strict=True)
    ]
    return charts.curves("Samples a second, round by round", of_arms, "round", zero=True)
