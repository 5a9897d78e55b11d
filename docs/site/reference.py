"""The pages of the reference: the commands' own help, the keys of a run, and the functions of the package."""

from __future__ import annotations

import inspect
import io
from contextlib import redirect_stdout

import cards

import drivetrain
from drivetrain.cli import recipe_schema, verbs


def pages() -> dict[str, str]:
    """Name → page, in Markdown."""
    return {"commands": _commands(), "keys": _keys(), "python": _python()}


def _commands() -> str:
    found = ["# Commands", "", "`drivetrain VERB` is the command; `python -m src.train` is `drivetrain train`.", ""]
    for verb in verbs.all_verbs().values():
        if verb.help:
            with redirect_stdout(io.StringIO()) as page:
                verb.run(["--help"])
            found += [f"## {verb.name}", "", "```text", page.getvalue().rstrip(), "```", ""]
    return "\n".join(found)


def _keys() -> str:
    """The keys that are no group's. Those of a group are on the page of its options."""
    schema = recipe_schema.recipe_schema()
    groups = [f"[{group}](../techniques/{group}.md)" for group in cards.titles()]
    found = ["# Keys of a run", "", f"Groups, each with its options and their keys: {', '.join(groups)}.", "",
             "| key | default | may be | |", "|---|---|---|---|"]  # fmt: skip
    for key, about in schema["properties"].items():
        if "default" in about:
            may_be, said = cards.cell(cards.kind(about)), cards.cell(about.get("description", ""))
            found.append(f"| `{key}` | `{about['default']}` | {may_be} | {said} |")
    return "\n".join(found)


def _python() -> str:
    found = ["# Python", "", _text(inspect.getdoc(drivetrain) or ""), ""]
    for name in ("train", "sweep", "compare", "doctor", "load", "runs"):
        function = getattr(drivetrain, name)
        found += [f"## drivetrain.{name}", "", "```python", f"drivetrain.{name}{inspect.signature(function)}", "```", ""]
        found += [_text(inspect.getdoc(function) or ""), ""]
    return "\n".join(found)


def _text(text: str) -> str:
    return text.replace("<", "&lt;")


def words() -> str:
    """The end of the page of other tools' words: every one that the command answers."""
    from drivetrain.config.other_tools import ELSEWHERE, NOTES

    rows = [f"| `{word}` | `{ours}`{f' ({NOTES[word]})' if word in NOTES else ''} |" for word, ours in sorted(ELSEWHERE.items())]
    return "\n".join(["\n\n## Every word that is answered", "", "| typed | here |", "|---|---|", *rows, ""])
