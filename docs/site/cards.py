"""A page for each group of techniques, with a card for each option: from its YAML, its code and what was measured of it."""

from __future__ import annotations

import inspect
import json
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matrix

from drivetrain.cli import recipe_schema
from drivetrain.config import catalog, schema
from drivetrain.core.options.option import Option
from drivetrain.core.user.code import import_name

MEASURED = ("ablate-cpu.json", "ablate-text-cpu.json")  # comparisons of one override with a baseline
OFF = "what the others are compared with"
# Groups whose options are not in place of each other: a run needs the one that it needs.
WHY_NOT = dict.fromkeys(
    ("data", "model", "task", "metrics", "debug", "stop", "runtime", "loss"), "chosen by the problem, not by its cost"
)
EFFECTS = {
    "exact": "exact, the same numbers as without it",
    "close": "close, the same mathematics",
    "changes": "another training",
}


def titles() -> dict[str, str]:
    """Group → the title of its page."""
    return {group: group.capitalize() for group in catalog.options()}


def pages(root: Path) -> dict[str, str]:
    """Group → its page, in Markdown."""
    record, measured = matrix.read(), _measured(root)
    found = {}
    for group, files in catalog.option_files().items():
        rows = [
            f"| [`{group}={name}`](#{group}-{name}) | {catalog.summary(file)} | {_here(group, name)} |"
            for name, file in files.items()
        ]
        head = ["| override | what it brings | measured here |", "|---|---|---|"]
        found[group] = "\n".join([f"# {titles()[group]}", "", *head, *rows, ""])
        for name, file in files.items():
            override = _override(group, name)
            found[group] += "\n".join(["", f"## {group}={name} {{#{group}-{name}}}", "", *_card(group, file, override)])
            found[group] += "\n".join(
                ["", *(f"**Measured:** {said}\n" for said in measured[override]), *_pairs(record, override)]
            )
    return found


def _override(group: str, name: str) -> str:
    return f"{group}=[{name}]" if group in catalog.LISTS else f"{group}={name}"


def _here(group: str, name: str) -> str:
    """What was measured of an option and of its keys, or why nothing was."""
    override = _override(group, name)
    found = {
        words.removeprefix(override).strip(): said for words, said in catalog.measured().items() if words.split()[0] == override
    }
    return "<br>".join(f"`{words}`: {cell(said)}" if words else cell(said) for words, said in found.items()) or WHY_NOT.get(
        group, OFF
    )


def _card(group: str, file: Path, override: str) -> Iterator[str]:
    """The facts that an option's code and YAML say of it."""
    code = import_name(catalog.target(file))
    option: Option = code()
    source = _source(inspect.getdoc(code) or "")
    effect = option.effect_as_set()
    changes = f" ({option.changes})" if option.changes and effect != "exact" else ""
    yield from (_sentence(catalog.summary(file)), "", f"    {override}", "", _text(inspect.cleandoc(code.__doc__ or "")), "")
    if when := catalog.when(file):
        yield from (f"**When:** {_text(when)}.", "")
    yield from (f"**Effect on training:** {EFFECTS[effect]}{changes}.", "")
    if source:
        yield from (f"**Source:** {source}.", "")
    keys = {key: value for key, value in catalog.content(file).items() if key not in ("_target_", "preset")}
    if keys:
        yield from ("| key | default | may be | |", "|---|---|---|---|")
    for key, about in recipe_schema.described(catalog.key_lines(file), keys, schema.of(code).hints).items():
        default = json.dumps(about["default"], ensure_ascii=False)
        yield f"| `{group}.{key}` | `{default}` | {cell(kind(about))} | {cell(about.get('description', ''))} |"
    yield ""


def _source(text: str) -> str:
    """The paper, or the library's class, that a docstring names in brackets; "" where it names none."""
    named = (" ".join(found.split()) for found in re.findall(r"\(([^()]+)\)", text))
    return "; ".join(_text(each) for each in named if re.search(r"\b(19|20)\d\d\b|\b(torch|timm)\.[a-z]", each))


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}."


def _text(text: str) -> str:
    """A docstring as Markdown: `<` and `*` are meant as they are."""
    return text.replace("<", "&lt;").replace("*", r"\*")


def kind(schema: dict[str, Any]) -> str:
    """The values that a setting may have, in words."""
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"])
    if "const" in schema:
        return f"`{schema['const']}`"
    if "anyOf" in schema:
        kinds = [kind(part) for part in schema["anyOf"] if "$ref" not in part]
        return " or ".join(dict.fromkeys(filter(None, kinds)))
    name = {"integer": "whole number", "number": "number", "boolean": "true or false", "string": "text", "array": "list",
            "object": "mapping", "null": "null"}.get(str(schema.get("type", "")), "")  # fmt: skip
    bounds = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    return " ".join([name, *(f"{sign} {schema[bound]:g}" for bound, sign in bounds.items() if bound in schema)]).strip()


def cell(text: str) -> str:
    return text.replace("|", r"\|").replace("<", "&lt;").replace("\n", " ")


def overrides() -> dict[str, list[str]]:
    """Group → its options as overrides; a list group is off or has one of its options."""
    found = {}
    for group, names in catalog.options().items():
        listed = [f"{group}=[]", *(f"{group}=[{name}]" for name in names if name != "none")]
        found[group] = listed if group in catalog.LISTS else [f"{group}={name}" for name in names]
    return found


def _pairs(record: matrix.Record, override: str) -> Iterator[str]:
    """The options that go with an option, those that refuse to, and why."""
    if override in record.alone:
        yield f"**Combines with:** not tried, since that machine could not run it ({cell(record.alone[override])}).\n"
    elif others := record.others(override):
        yield f"**Combines with:** {len(others)} options of other groups ([all pairs](../pairwise.md)).\n"
    refused = {next(iter(pair - {override})): reason for pair, reason in record.refused.items() if override in pair}
    if refused:
        yield f'??? note "Refused with {len(refused)} other option{"s" if len(refused) > 1 else ""}"\n'
        yield from (f"    - `{other}`: {cell(reason)}" for other, reason in refused.items())
        yield ""


def _measured(root: Path) -> dict[str, list[str]]:
    """Override → what comparisons found of it, with the machine; only where the table adds techniques one by one or alone."""
    found: dict[str, list[str]] = defaultdict(list)
    for words, said in catalog.measured().items():  # of an option, or of it with a key
        override, _, key = words.partition(" ")
        found[override].append(f"{f'`{key}`: ' if key else ''}{said}.")
    for file in (root / "bench" / "results" / name for name in MEASURED):
        if not file.exists():
            continue
        for title, table in json.loads(file.read_text(encoding="utf-8")).items():
            for row in table["rows"]:
                label, ratio = row["label"].removeprefix("+ "), row["ratio"]
                if ratio and ratio[1] and label != row["label"]:
                    verdict = (row["verdict"] or {}).get("outcome")
                    how = "with all techniques before it" if "step by step" in title else "alone"
                    judged = f"; its result: {verdict}" if verdict else ""
                    found[label].append(
                        f"{ratio[0]:.2f} × ({ratio[1]:.2f} to {ratio[2]:.2f}), {how}, on {row['device']}{judged} "
                        f"([{file.name}](../../bench/results/{file.name}))."
                    )
    return found
