"""A page for each group of techniques, with a card for each option: from its YAML, its code and what was measured of it."""

from __future__ import annotations

import inspect
import json
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from drivetrain.config import catalog, recipe_checks, recipe_schema
from drivetrain.core.option import Option
from drivetrain.core.user_code import import_name

MEASURED = ("ablate-cpu.json", "ablate-text-cpu.json", "gpu-speed-h200.json")  # comparisons of one override with a baseline
PAIR = re.compile(r"^\| (\S+) · (\S+) \| (.*) \|$", re.MULTILINE)
EFFECTS = {
    "exact": "exact, the same numbers as without it",
    "close": "close, the same mathematics",
    "changes": "another training",
}
Refusals = dict[str, dict[str, str]]  # override → another one → why not both


def titles() -> dict[str, str]:
    """Group → the title of its page."""
    return {group: group.capitalize() for group in catalog.options()}


def pages(root: Path) -> dict[str, str]:
    """Group → its page, in Markdown."""
    refused, measured = _refused(root), _measured(root)
    found = {}
    for group, files in catalog.option_files().items():
        rows = [f"| [`{group}={name}`](#{group}-{name}) | {catalog.summary(file)} |" for name, file in files.items()]
        found[group] = "\n".join([f"# {titles()[group]}", "", "| override | what it brings |", "|---|---|", *rows, ""])
        for name, file in files.items():
            override = f"{group}=[{name}]" if group in catalog.LISTS else f"{group}={name}"
            found[group] += "\n".join(["", f"## {group}={name} {{#{group}-{name}}}", "", *_card(group, file, override)])
            found[group] += "\n".join(
                ["", *(f"**Measured:** {said}\n" for said in measured[override]), *_pairs(refused[override])]
            )
    return found


def _card(group: str, file: Path, override: str) -> Iterator[str]:
    """What an option's code and YAML say of it."""
    code = import_name(catalog.target(file))
    option: Option = code()
    effect = option.effect_as_set()
    changes = f" ({option.changes})" if option.changes and effect != "exact" else ""
    yield from (_sentence(catalog.summary(file)), "", f"    {override}", "", _text(inspect.cleandoc(code.__doc__ or "")), "")
    yield from (f"**Effect on training:** {EFFECTS[effect]}{changes}.", "")
    values: Any = OmegaConf.to_container(OmegaConf.load(file))
    keys = {key: value for key, value in values.items() if key not in ("_target_", "preset")}
    if keys:
        yield from ("| key | default | may be | |", "|---|---|---|---|")
    for key, about in recipe_schema.described(file, keys, recipe_checks.hints(code)).items():
        default = json.dumps(about["default"], ensure_ascii=False)
        yield f"| `{group}.{key}` | `{default}` | {cell(kind(about))} | {cell(about.get('description', ''))} |"
    yield ""


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}."


def _text(text: str) -> str:
    """A docstring as Markdown: `<` and `*` are meant as they are."""
    return text.replace("<", "&lt;").replace("*", r"\*")


def kind(schema: dict[str, Any]) -> str:
    """What a value may be, in words."""
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


def _pairs(others: dict[str, str]) -> Iterator[str]:
    """What refuses to go with an option, and why."""
    if others:
        yield f'??? note "Refused with {len(others)} other option{"s" if len(others) > 1 else ""}"\n'
        yield from (f"    - `{other}`: {cell(reason)}" for other, reason in others.items())
        yield ""


def _refused(root: Path) -> Refusals:
    """Option → other option → why they are refused together, from docs/pairwise.md."""
    found: Refusals = defaultdict(dict)
    for one, other, reason in PAIR.findall((root / "docs" / "pairwise.md").read_text(encoding="utf-8")):
        found[one][other] = found[other][one] = reason
    return found


def _measured(root: Path) -> dict[str, list[str]]:
    """Override → what comparisons found of it, with the machine; only where the table adds techniques one by one or alone."""
    found: dict[str, list[str]] = defaultdict(list)
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
