"""The page of which options go together: from the record that `python -m bench.pairwise` writes."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

# `make docs` has it written by the rules, before the site is built.
RECORD = Path(os.environ.get("PAIRS", Path(__file__).resolve().parents[2] / "outputs" / "pairwise.md"))
PAIR = re.compile(r"^\| (\S+) · (\S+) \| (.*) \|$", re.MULTILINE)
ROW = re.compile(r"^\| ([^|]+?) \| (.*) \|$", re.MULTILINE)


@dataclass
class Record:
    """The findings of the campaign."""

    head: str  # how many pairs, and what became of them
    tried: dict[str, list[str]]  # group → its options as overrides
    refused: dict[frozenset[str], str]  # two overrides → why not both
    alone: dict[str, str]  # override → why the machine of the campaign could not run it

    def others(self, override: str) -> list[str]:
        """The options of other groups that go together with this one."""
        group = override.partition("=")[0]
        if override in self.alone or override not in self.tried.get(group, []):
            return []
        words = [word for other, words in self.tried.items() if other != group for word in words]
        return [word for word in words if word not in self.alone and frozenset((word, override)) not in self.refused]


def read() -> Record:
    """The record."""
    head, *sections = re.split(r"^## .*\n", RECORD.read_text(encoding="utf-8"), flags=re.MULTILINE)
    refused, alone, tried = (section for section in sections[:3])
    return Record(
        " ".join(head.partition("\n\n")[2].split("\n\n")[0].split()),
        {group: words.split() for group, words in ROW.findall(tried) if group not in ("group", "---")},
        {frozenset((one, other)): reason for one, other, reason in PAIR.findall(refused)},
        {word: reason for word, reason in ROW.findall(alone) if "=" in word},
    )


def page(options: dict[str, list[str]]) -> str:
    """The page. `options` are those that there are now: group → overrides."""
    return "\n".join(_lines(read(), options))


def _lines(record: Record, options: dict[str, list[str]]) -> Iterator[str]:
    groups = list(record.tried)
    yield from ("# Which options go together", "", record.head, "")
    yield "A number says how many pairs of two groups are refused, with a reason and before a run starts. ✓: none is."
    yield from ("", f"| | {' | '.join(groups[:-1])} |", f"|---{'|---' * (len(groups) - 1)}|")
    for at, group in enumerate(groups[1:], 1):
        counts = " | ".join(_count(record, group, other) for other in groups[:at])
        yield f"| **{group}** | {counts} {'| ' * (len(groups) - 1 - at)}|"
    for one, other in combinations(groups, 2):
        if _refused(record, one, other):
            yield from _pair(record, one, other)
    yield from ("", "## Not on the machine of the campaign", "", "| option | reason |", "|---|---|")
    yield from (f"| `{word}` | {_cell(reason)} |" for word, reason in record.alone.items())
    known = {word for words in record.tried.values() for word in words}
    new = [word for words in options.values() if len(words) > 1 for word in words if word not in known]
    if new:
        yield from ("", "## Not tried", "")
        yield f"{len(new)} options came later. Their rules refuse pairs as well, and each is tested by itself: "
        yield ", ".join(f"`{word}`" for word in new) + "."
    yield from ("", "`python -m bench.pairwise` also trains all pairs, and writes the record of this page.", "")


def _refused(record: Record, one: str, other: str) -> dict[tuple[str, str], str]:
    pairs = [(a, b) for a in record.tried[one] for b in record.tried[other]]
    return {(a, b): record.refused[frozenset((a, b))] for a, b in pairs if frozenset((a, b)) in record.refused}


def _count(record: Record, group: str, other: str) -> str:
    found = len(_refused(record, other, group))
    return f"[{found}](#{other}-{group})" if found else "✓"


def _pair(record: Record, one: str, other: str) -> Iterator[str]:
    """The options of two groups beside each other, and the reasons."""
    refused = _refused(record, one, other)
    across = [word for word in record.tried[other] if any(b == word for _, b in refused)]
    yield from ("", f"## {one} and {other} {{#{one}-{other}}}", "", f"| | {' | '.join(f'`{b}`' for b in across)} |")
    yield f"|---{'|---' * len(across)}|"
    for a in record.tried[one]:
        if any((a, b) in refused for b in across):
            marks = ("✗" if (a, b) in refused else "–" if {a, b} & record.alone.keys() else "✓" for b in across)
            yield f"| `{a}` | {' | '.join(marks)} |"
    yield from (
        "",
        "✗ refused, ✓ goes together, – not on that machine. Options that go with all of the other group are left out.",
        "",
    )
    yield from (f"- `{a}` and `{b}`: {_cell(reason)}" for (a, b), reason in refused.items())


def _cell(text: str) -> str:
    return text.replace("|", r"\|").replace("<", "&lt;").replace("*", r"\*")
