"""The header of a recipe that drivetrain wrote: its form, who wrote it, and the hash of the config that it stands for.

A recipe that was written by hand needs none.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from drivetrain.core import process
from drivetrain.core.errors import UserError
from drivetrain.recipe.safe_yaml import printable

SCHEMA = 1  # the form that is written and read here
HASH_DIGITS = 16
FORMS = {  # key → what its text must look like, and that in words
    "schema": (r"[1-9]\d{0,5}", "a whole number from 1"),
    "drivetrain": (r"\d[0-9A-Za-z.+!-]{0,39}", 'a version, as "0.1.0"'),
    "hash": (rf"[0-9a-f]{{{HASH_DIGITS}}}", f"{HASH_DIGITS} hex digits in quotes"),
    "left_out": (r"[A-Za-z_][A-Za-z0-9_.*?]*", "a list of groups and keys, as [model]"),
}


@dataclass(frozen=True)
class Header:
    """What a written recipe says of itself. All is None in one that was written by hand."""

    schema: int | None = None
    drivetrain: str | None = None  # the version that wrote it
    hash: str | None = None  # of the config that the file stands for (run/drift.py)
    left_out: frozenset[str] = frozenset()  # groups and keys that it leaves to whoever runs it; the hash is without them

    @property
    def writer(self) -> str:
        """Who wrote the recipe, for messages."""
        return f"drivetrain {self.drivetrain}" if self.drivetrain else "another drivetrain"

    def lines(self) -> list[str]:
        """The header as YAML. Texts are quoted: YAML reads a hash without letters as a number."""
        left_out = [f"left_out: [{', '.join(sorted(self.left_out))}]  # for whoever runs it to choose"] if self.left_out else []
        return [f"schema: {self.schema}", f'drivetrain: "{self.drivetrain}"', f'hash: "{self.hash}"', *left_out]


def read(path: Path, root: yaml.MappingNode | None, problems: list[str]) -> Header:
    """The header among a recipe's keys. Raises UserError for a form that is newer than this drivetrain."""
    found: dict[str, Any] = {}
    where: dict[str, str] = {}
    for key_node, node in root.value if root is not None else []:
        if (key := str(key_node.value)) in FORMS:
            where[key] = f"{path}:{key_node.start_mark.line + 1}"
            found[key] = _READ.get(key, _text)(node)
            if not found[key] or not all(re.fullmatch(FORMS[key][0], text) for text in found[key]):
                shown = f"{key}: {printable(str(node.value)):.40}" if isinstance(node, yaml.ScalarNode) else f"{key}:"
                problems.append(f"{where[key]}: {shown} must be {FORMS[key][1]}")
                del found[key]
    schema, version, digest = (found.get(key, [None])[0] for key in ("schema", "drivetrain", "hash"))
    header = Header(int(schema) if schema else None, version, digest, frozenset(found.get("left_out", ())))
    if header.schema is not None and header.schema > SCHEMA:
        version = f">={header.drivetrain}" if header.drivetrain else ""
        raise UserError(
            f"{where['schema']}: schema: {header.schema}: {header.writer} wrote this recipe in a newer form, and drivetrain "
            f"{process.__version__} reads schema {SCHEMA}: pip install --upgrade 'drivetrain{version}'"
        )
    if "hash" in where and "schema" not in where:
        problems.append(f"{where['hash']}: hash: says nothing without the schema that it was made by: give schema:, or remove it")
    return header


def _text(node: yaml.Node) -> list[str]:
    """The text of a scalar as it stands in the file, whatever YAML would read it as."""
    return [node.value] if isinstance(node, yaml.ScalarNode) else []


def _texts(node: yaml.Node) -> list[str]:
    return [text for entry in node.value for text in _text(entry) or [""]] if isinstance(node, yaml.SequenceNode) else []


_READ: dict[str, Callable[[yaml.Node], list[str]]] = {"left_out": _texts}
