"""A recipe as text, written so that recipe/reader.py reads the same options and values again."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import yaml

from drivetrain.recipe.header import Header
from drivetrain.recipe.safe_yaml import plain_value

UNCHANGED = "unchanged:  # the defaults of that time, spelled out: the run stays the same when defaults change"


def text(
    header: Header,
    description: str,
    chosen: tuple[Mapping[str, Any], Mapping[str, Any]],
    unchanged: tuple[Mapping[str, Any], Mapping[str, Any]],
    more: str = "",
) -> str:
    """The recipe of these options (group → option) and values (dotted key → value): first what was chosen, then the rest.

    `more` is YAML that stands between them: comments, or further sections.
    """
    lines = header.lines() + ([f"description: {json.dumps(description, ensure_ascii=False)}"] if description else [])
    rest = "".join(f"  {line}\n" for line in _section(*unchanged).splitlines())
    return "\n".join(lines) + "\n" + _section(*chosen) + more + (f"\n{UNCHANGED}\n{rest}" if rest else "")


def with_section(recipe: str, section: str) -> str:
    """The text of a recipe with a further section, above what was merely a default."""
    head, mark, rest = recipe.partition(f"\n{UNCHANGED}\n")
    return head + section + mark + rest


def _section(options: Mapping[str, Any], values: Mapping[str, Any]) -> str:
    """The options as a defaults list, then the values as nested mappings."""
    lines = [f"  - override /{group}: {flow(option)}\n" for group, option in options.items()]
    return "".join(["defaults:\n"] * bool(lines) + lines) + (block(nested(values)) if values else "")


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted keys as nested mappings. A key stays dotted where a part of it has a value of its own, as `head` beside `head.0`."""
    tree: dict[str, Any] = {}
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


def block(tree: Mapping[str, Any]) -> str:
    """Nested mappings as YAML, a line for each value."""
    return yaml.dump(tree, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


def flow(value: Any) -> str:
    """A value as YAML in one line."""
    return _name(value) if isinstance(value, str) else _flow(value)


def _flow(value: Any) -> str:
    dumped = yaml.dump([value], Dumper=_Dumper, default_flow_style=True, sort_keys=False, allow_unicode=True, width=10**6)
    return dumped.strip()[1:-1]


_name = lru_cache(maxsize=1024)(_flow)  # every recipe names an option of each group


class _Dumper(yaml.SafeDumper):
    """Writes lists in one line, and quotes every text that the recipe's reader would read as something else."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _list(dumper: yaml.SafeDumper, value: Sequence[Any]) -> yaml.Node:
    return dumper.represent_sequence("tag:yaml.org,2002:seq", value, flow_style=True)


def _string(dumper: yaml.SafeDumper, value: str) -> yaml.Node:
    node = dumper.represent_str(value)
    if plain_value(yaml.ScalarNode(dumper.resolve(yaml.ScalarNode, value, (True, False)), value), "", "", []) != value:
        node.style = "'"
    return node


_Dumper.add_representer(list, _list)
_Dumper.add_representer(str, _string)
