"""Reading a stranger's YAML: plain values under plain keys, in bounds; never an object, an alias or the environment."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from drivetrain.core.errors import UserError

MAX_BYTES, MAX_NODES, MAX_DEPTH = 64 * 1024, 2000, 8
OPERATORS = {  # what belongs to whoever runs it, never to a file that was shared
    "hydra": "Hydra's settings", "trust": "trust in code", "resume": "the run's place", "resume_changed": "the run's place",
    "recipe": "another recipe", "output_dir": "a path", "logger": "loggers",
}  # fmt: skip
_INTERPOLATION = re.compile(r"\$\{([^}]*)\}?")


def load(path: Path) -> yaml.MappingNode | None:
    """The tree of a recipe file; None of an empty one. Raises UserError."""
    try:
        raw = path.read_bytes()[: MAX_BYTES + 1]
    except OSError as error:
        raise UserError(f"recipe {path} cannot be read: {error.strerror}") from None
    if len(raw) > MAX_BYTES:
        raise UserError(f"recipe {path} is larger than {MAX_BYTES // 1024} KiB: that is no recipe")
    return _nodes(path, raw)


def _nodes(path: Path, raw: bytes) -> yaml.MappingNode | None:
    """The YAML tree, after looking at its events only: no alias, no tag, no more than the caps."""
    try:
        text, depth, nodes = raw.decode("utf-8"), 0, 0
        for event in yaml.parse(text, Loader=yaml.SafeLoader):
            where = f"{path}:{event.start_mark.line + 1}"
            nodes += isinstance(event, yaml.NodeEvent)
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
                raise UserError(f"{where}: a recipe has no YAML anchors or aliases: write the value out")
            if getattr(event, "tag", None):
                raise UserError(
                    f"{where}: a recipe has no YAML tags ({getattr(event, 'tag', '')}): it holds plain values, never objects"
                )
            if nodes > MAX_NODES or depth > MAX_DEPTH:
                raise UserError(f"{where}: a recipe has at most {MAX_NODES} values, {MAX_DEPTH} deep: this is more")
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except UnicodeDecodeError:
        raise UserError(f"recipe {path} is not UTF-8 text") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark else ""
        raise UserError(f"{path}{line}: not valid YAML: {getattr(error, 'problem', None) or error}") from None
    if node is not None and not isinstance(node, yaml.MappingNode):
        kind = "list" if isinstance(node, yaml.SequenceNode) else "single value"
        raise UserError(f"recipe {path} is a {kind}, not a mapping: write 'defaults:' and 'group: {{key: value}}' entries")
    return node


def repeated(node: Any) -> Iterator[Any]:
    """The keys that stand in a mapping a second time, at any depth."""
    if isinstance(node, yaml.MappingNode):
        seen: set[str] = set()
        for key_node, value in node.value:
            if str(key_node.value) in seen:
                yield key_node
            seen.add(str(key_node.value))
            yield from repeated(value)
    elif isinstance(node, yaml.SequenceNode):
        for value in node.value:
            yield from repeated(value)


def may_set(key: str, where: str, problems: list[str]) -> bool:
    """Whether a recipe may set a key or choose a group at all; if not, that is added to `problems`."""
    owner = re.split(r"[./]", key)[0]
    if owner in OPERATORS:
        problems.append(f"{where}: '{key}' is not a recipe's to set ({OPERATORS[owner]}): give it on the command line")
    return owner not in OPERATORS


def is_key(key: str, where: str, problems: list[str]) -> bool:
    """Whether a key is plain; if not, that is added to `problems`."""
    if any(part.startswith("_") for part in key.split(".")):
        problems.append(f"{where}: '{key}': a recipe names options and values, never a target or another key of Hydra's")
    elif not re.fullmatch(r"[A-Za-z0-9_.*?]+", key):  # * and ? in patterns of parameters' names
        problems.append(f"{where}: '{key}' is no key: keys are plain names")
    else:
        return True
    return False


def plain(node: Any, where: str, key: str, problems: list[str]) -> Any:
    """A node of `key` as plain Python values; only `${key.of.the.config}` as interpolation."""
    if isinstance(node, yaml.MappingNode):
        result = {}
        for k, v in node.value:
            if str(k.value).startswith("_"):
                problems.append(f"{where}: '{k.value}': a recipe names options and values, never a target")
            result[str(k.value)] = plain(v, where, key, problems)
        return result
    if isinstance(node, yaml.SequenceNode):
        return [plain(v, where, key, problems) for v in node.value]
    for name in _INTERPOLATION.findall(node.value):
        if not re.fullmatch(r"[a-z_]+(\.[a-z_0-9]+)*", name):
            problems.append(f"{where}: '${{{name}}}': a recipe refers to keys of the config alone, never to the environment")
    if node.style is None and re.fullmatch(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+", node.value):
        return float(node.value)  # YAML 1.1 reads 1e-3 as text
    loader = yaml.SafeLoader("")
    try:
        value = loader.construct_object(node)
    except (ValueError, yaml.YAMLError):  # 2026-13-01 looks like a date, = like a default, and neither is one
        value = node
    finally:
        loader.dispose()
    if not isinstance(value, str | int | float | bool | None):
        shown = node.value if len(node.value) < 40 else f"{node.value[:40]}…"
        problems.append(f"{where}: {key}: {shown} reads as a date, binary data or nothing at all: quote it, if it is a text")
        return None
    return value


def shown(text: str) -> str:
    """A stranger's text in one line that steers no terminal."""
    return "".join(c if c.isprintable() else " " for c in text)
