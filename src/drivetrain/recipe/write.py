"""Recipes as text, from which recipe/reader.py reads the same options and values again."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache

import yaml

from drivetrain.core.errors import UserError, printable
from drivetrain.core.machine import process
from drivetrain.core.typed import JsonMapping, JsonObject
from drivetrain.recipe.safe_yaml import RecipeKey, scalar

SCHEMA = 1  # the version of the file format
HASH_DIGITS = 16
TEXT = "tag:yaml.org,2002:str"
FORMS = {  # key → pattern of its text, and its description
    "schema": (r"[1-9]\d{0,5}", "a whole number from 1"),
    "drivetrain": (r"\d[0-9A-Za-z.+!-]{0,39}", 'a version, as "0.1.0"'),
    "hash": (rf"[0-9a-f]{{{HASH_DIGITS}}}", f"{HASH_DIGITS} hex digits in quotes"),
    "left_out": (r"[A-Za-z_][A-Za-z0-9_.*?]*", "a list of groups and keys, as [model]"),
}


@dataclass(frozen=True)
class Header:
    """A recipe's facts about itself. All are None in a handwritten one."""

    schema: int | None = None
    drivetrain: str | None = None  # the version of drivetrain that wrote it
    hash: str | None = None  # of the resulting config (run/recipe_file.py)
    left_out: frozenset[str] = frozenset()  # groups and keys that each user chooses; the hash leaves them out

    @property
    def writer(self) -> str:
        """The writer of the recipe, for messages."""
        return f"drivetrain {self.drivetrain}" if self.drivetrain else "another drivetrain"

    def lines(self) -> list[str]:
        """The header as YAML. Texts are quoted: YAML reads a hash without letters as a number."""
        left_out = [f"left_out: [{', '.join(sorted(self.left_out))}]  # each user chooses these"] if self.left_out else []
        return [f"schema: {self.schema}", f'drivetrain: "{self.drivetrain}"', f'hash: "{self.hash}"', *left_out]


def read_header(root: RecipeKey) -> Header:
    """The header among a recipe's keys. Raises UserError for a format newer than this drivetrain."""
    given = {entry.key: entry for entry in root.entries() if entry.key in FORMS}
    found: dict[str, list[str]] = {}
    for key, entry in given.items():
        form, words = FORMS[key]
        texts = _texts(entry.node, is_list=key == "left_out")
        if texts and all(re.fullmatch(form, text) for text in texts):
            found[key] = texts
        else:
            shown = f" {printable(entry.node.value):.40}" if isinstance(entry.node, yaml.ScalarNode) else ""
            entry.refuse(f"{key}:{shown} must be {words}")
    schema, version, digest = (found.get(key, [None])[0] for key in ("schema", "drivetrain", "hash"))
    header = Header(int(schema) if schema else None, version, digest, frozenset(found.get("left_out", ())))
    if header.schema is not None and header.schema > SCHEMA:
        version = f">={header.drivetrain}" if header.drivetrain else ""
        raise UserError(
            f"{root.path}:{given['schema'].line}: schema: {header.schema}: {header.writer} wrote this recipe in a newer form, "
            f"and drivetrain {process.__version__} reads schema {SCHEMA}: pip install --upgrade 'drivetrain{version}'"
        )
    if "hash" in given and "schema" not in given:
        given["hash"].refuse("hash: means nothing without the schema of its making: give schema:, or remove it")
    return header


def _texts(node: yaml.Node, is_list: bool) -> list[str]:
    """A scalar, or each of a list, as literal text of the file, whatever YAML would read; "" for anything else."""
    nodes = ([node] if not is_list else node.value) if isinstance(node, yaml.SequenceNode) == is_list else []
    return [each.value if isinstance(each, yaml.ScalarNode) else "" for each in nodes]


UNCHANGED = "unchanged:  # the defaults of that time, spelled out: the run stays the same when defaults change"


def text(
    header: Header | None,
    description: str,
    chosen: tuple[JsonMapping, JsonMapping],
    unchanged: tuple[JsonMapping, JsonMapping],
    more: str = "",
) -> str:
    """The recipe of these options (group → option) and values (dotted key → value): first the chosen ones, then the rest.

    `more` is YAML between the two parts: comments, or further sections.
    """
    lines = (header.lines() if header is not None else []) + (
        [f"description: {json.dumps(description, ensure_ascii=False)}"] if description else []
    )
    rest = "".join(f"  {line}\n" for line in _section(*unchanged).splitlines())
    return "\n".join(lines) + "\n" + _section(*chosen) + more + (f"\n{UNCHANGED}\n{rest}" if rest else "")


def with_section(recipe: str, section: str) -> str:
    """The text of a recipe with a further section, above the mere defaults."""
    head, mark, rest = recipe.partition(f"\n{UNCHANGED}\n")
    return head + section + mark + rest


def _section(options: JsonMapping, values: JsonMapping) -> str:
    """The options as a defaults list, then the values as nested mappings."""
    lines = [f"  - override /{group}: {flow(option)}\n" for group, option in options.items()]
    return "".join(["defaults:\n"] * bool(lines) + lines) + (block(nested(values)) if values else "")


def nested(values: JsonMapping) -> JsonObject:
    """Dotted keys as nested mappings. A key stays dotted if a part of it has its own value, as `head` next to `head.0`."""
    tree: JsonObject = {}
    for key, value in values.items():
        *above, last = key.split(".")
        node = tree
        for depth, part in enumerate(above):
            if ".".join(above[: depth + 1]) in values:
                last = ".".join([*above[depth:], last])
                break
            node = node.setdefault(part, {})
        node[last] = value
    return tree


def block(tree: JsonMapping) -> str:
    """Nested mappings as YAML, a line for each value."""
    return str(yaml.dump(tree, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120))


def plain(tree: object) -> str:
    """A config in the form of OmegaConf.to_yaml, by PyYAML's emitter in C."""
    return str(yaml.dump(tree, Dumper=_Plain, sort_keys=False, allow_unicode=True))


def flow(value: object) -> str:
    """A value as YAML in one line."""
    return _name(value) if isinstance(value, str) else _flow(value)


def _flow(value: object) -> str:
    dumped = yaml.dump([value], Dumper=_Dumper, default_flow_style=True, sort_keys=False, allow_unicode=True, width=10**6)
    return str(dumped).strip()[1:-1]


_RESOLVER = yaml.resolver.Resolver()
_name = lru_cache(maxsize=1024)(_flow)  # every recipe names an option of each group


class _Plain(getattr(yaml, "CSafeDumper", yaml.SafeDumper)):  # type: ignore[misc]  # PyYAML's C emitter, if it was built with one
    """Quotes every text that OmegaConf would read as something else."""

    def ignore_aliases(self, data: object) -> bool:
        return True


class _Dumper(_Plain):
    """Writes lists in one line, and quotes every text that the recipe's reader would read as something else."""


def _list(dumper: yaml.SafeDumper, value: Sequence[object]) -> yaml.Node:
    return dumper.represent_sequence("tag:yaml.org,2002:seq", value, flow_style=True)


def _string(dumper: yaml.SafeDumper, value: str) -> yaml.Node:
    return dumper.represent_scalar(TEXT, value, style=_style(value))


@lru_cache(maxsize=4096)
def _style(value: str) -> str | None:
    """The quotes of a text that the recipe's reader would read as something else without them."""
    plain = yaml.ScalarNode(_RESOLVER.resolve(yaml.ScalarNode, value, (True, False)), value)
    return None if scalar(plain) == (value, "") else "'"


def _plain_string(dumper: yaml.SafeDumper, value: str) -> yaml.Node:
    quoted = value in ("y", "Y", "n", "N")  # a boolean in YAML 1.1, though PyYAML reads a text
    with suppress(ValueError):
        float(value)
        quoted = True
    return dumper.represent_scalar(TEXT, value, style="'" if quoted else None)


_Plain.add_representer(str, _plain_string)
_Dumper.add_representer(list, _list)
_Dumper.add_representer(str, _string)
