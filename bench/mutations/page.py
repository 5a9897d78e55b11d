"""The page docs/mutations.md, made from the results."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from bench import harness
from bench.mutations import faults
from bench.mutations.workshop import SEEN

PAGE = harness.ROOT / "docs" / "mutations.md"
WANTED = 0.95  # of the faults are to be seen


def write(content: dict[str, Any]) -> None:
    """Write the page."""
    PAGE.write_text(text(content), encoding="utf-8")


def text(content: dict[str, Any]) -> str:
    """Return the page: a table by parts of the source, and what is not seen."""
    outcomes = {name: result["outcome"] for name, result in content["faults"].items()}
    parts: dict[str, list[str]] = defaultdict(list)
    for fault in faults.ALL:
        if fault.name in outcomes:
            parts[fault.file.partition("/")[0]].append(outcomes[fault.name])
    rows = [f"| {part} | {len(of)} | {of.count(SEEN)} |" for part, of in sorted(parts.items())]
    unseen = [f"- {name}" for name, outcome in outcomes.items() if outcome != SEEN]
    return "\n".join(
        [
            "# What the tests see",
            "",
            "`python -m bench.mutations` plants faults in a copy of the source, one at a time: mistakes that a programmer could "
            "make. "
            f"Of the {len(faults.ALL)} faults of its list {content['count']} have run, and the tests see {content['seen']} "
            f"of these ({content['share']:.1%}). A fault whose tests did not end in time counts as unseen. It wrote this page.",
            "",
            "| part | faults | seen |",
            "|---|--:|--:|",
            *rows,
            "",
            *(["Not seen:", "", *unseen, ""] if unseen else []),
        ]
    )
