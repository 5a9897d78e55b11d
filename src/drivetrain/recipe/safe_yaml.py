"""Reading YAML from untrusted authors: plain values of bounded size; no objects, no aliases, no environment."""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from drivetrain.core.errors import UserError, printable
from drivetrain.core.options.overrides import MAX_DEPTH

_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # PyYAML's C parser, if built with one
MAX_BYTES, MAX_NODES = 64 * 1024, 2000
MAX_KEY, MAX_TEXT = 200, 2000  # characters
MAX_WHOLE = 2**63 - 1  # a whole number
OPERATOR_KEYS = {  # set by the user who starts the run, never by a shared file
    "hydra": "Hydra's settings", "trust": "trust in code", "resume": "a run to resume", "resume_changed": "a run to resume",
    "recipe": "another recipe", "output_dir": "a path", "logger": "loggers",
    "callbacks": "code",
}  # fmt: skip
# Control characters, direction marks, and line breaks that only some programs know: a comment may hide a line behind them.
_DECEIVING = re.compile("[\x00-\x08\x0b\x0e-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]|(?!\\A)\ufeff|\r(?!\n)")
_OTHER_NOTATION = re.compile(r"[-+]?0[0-9_bx]|.*:")  # 010 is octal, and 1:30 counts in sixties
CODE_GROUPS = ("model", "data", "loss", "metrics")  # their option `own` names a class or a function
REFERENCE = re.compile(r"\$\{([a-z_]+(?:\.[a-z_0-9]+)*)\}")


def read_bytes(path: Path) -> bytes:
    """The bytes of a recipe file. Raises UserError."""
    try:  # does not wait for a pipe's writer
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise UserError(f"recipe {path} is not a regular file")
            raw = file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:  # ValueError: a null character in the path
        raise UserError(f"recipe {path} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if len(raw) > MAX_BYTES:
        raise UserError(f"recipe {path} is larger than {MAX_BYTES // 1024} KiB, the largest size of a recipe")
    return raw


class RecipeKey(NamedTuple):
    """A key of a recipe file with its value, or a whole file. `problems` collects every reason to refuse the file."""

    path: Path
    key: str
    line: int
    node: yaml.Node
    problems: list[str]

    def refuse(self, problem: str) -> None:
        """Note its problem."""
        self.problems.append(f"{self.path}:{self.line}: {problem}")

    def entries(self) -> list[RecipeKey]:
        """The entries of a mapping, each key once; [] of anything else."""
        found: dict[str, RecipeKey] = {}
        for node, value in self.node.value if isinstance(self.node, yaml.MappingNode) else []:
            entry = self._replace(key=str(node.value), line=node.start_mark.line + 1, node=value)  # a key may be a list
            if entry.key in found:
                entry.refuse(f"'{printable(entry.key):.60}' is given twice")
            found.setdefault(entry.key, entry)
        return [*found.values()]

    def mapping(self, of: str, at_least: int = 0) -> list[RecipeKey] | None:
        """The entries of a required mapping of `of`; None if it is no mapping or too short."""
        if isinstance(self.node, yaml.MappingNode) and len(self.node.value) >= at_least:
            return self.entries()
        self.refuse(f"{self.key}: must be a mapping of {of}")
        return None

    def under(self, key: str) -> RecipeKey:
        """The entry by its dotted key, below this one."""
        return self._replace(key=f"{key}.{self.key}")

    def may_be_set(self) -> bool:
        """True if a recipe may set the key or choose an option of the group; otherwise the reason is noted."""
        if problem := _key_problem(self.key):
            self.refuse(problem)
        return not problem

    def value(self) -> Any:
        """The value in plain Python. The only interpolation allowed is `${key.of.the.config}`."""
        if isinstance(self.node, yaml.SequenceNode):
            return [self._replace(node=node).value() for node in self.node.value]
        if isinstance(self.node, yaml.MappingNode):
            for each in (entries := self.entries()):
                if each.key.startswith("_"):
                    self.refuse(f"'{printable(each.key):.60}': a recipe chooses options and sets values, never a target")
            return {each.key: self._replace(node=each.node).value() for each in entries}
        value, problem = scalar(self.node, several_lines=self.key == "description")
        if problem:
            self.refuse(f"{self.key}: {problem}")
        return None if problem else value


def load(path: Path, raw: bytes | None = None) -> RecipeKey:
    """A recipe file, or bytes without a file. Raises UserError.

    It is composed only after a check of its YAML events, which refuses aliases, tags and deep nesting.
    """
    raw = read_bytes(path) if raw is None else raw
    try:
        text, depth, nodes = raw.decode("utf-8"), 0, 0
        if found := _DECEIVING.search(text):
            number = text.count("\n", 0, found.start()) + 1
            raise UserError(
                f"{path}:{number}: a recipe may not have the character U+{ord(found[0]):04X}, by which it looks other than YAML "
                "reads it"
            )
        for event in yaml.parse(text, Loader=_Loader):
            where = f"{path}:{event.start_mark.line + 1}"
            nodes += isinstance(event, yaml.NodeEvent)
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
                raise UserError(f"{where}: a recipe may not have YAML anchors or aliases: write the value out")
            if tag := getattr(event, "tag", None):
                raise UserError(
                    f"{where}: a recipe may not have YAML tags ({printable(tag):.60}): it holds plain values, never objects"
                )
            if nodes > MAX_NODES or depth > MAX_DEPTH:
                raise UserError(f"{where}: a recipe has at most {MAX_NODES} values, {MAX_DEPTH} deep: this is more")
        node = yaml.compose(text, Loader=_Loader) or yaml.MappingNode("", [])
    except UnicodeDecodeError:
        raise UserError(f"recipe {path} is not UTF-8 text") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark else ""
        reason = str(getattr(error, "problem", None) or error).splitlines()[0]
        raise UserError(f"{path}{line}: not valid YAML: {reason}") from None
    if not isinstance(node, yaml.MappingNode):
        kind = "list" if isinstance(node, yaml.SequenceNode) else "single value"
        raise UserError(f"recipe {path} is a {kind}, not a mapping: write 'defaults:' and 'group: {{key: value}}' entries")
    return RecipeKey(path, "", 1, node, [])


def names_code(group: str, option: object) -> bool:
    """True if this option of a group names code: a class or a function of the user's."""
    return group in CODE_GROUPS and "own" in (option if isinstance(option, list) else [option])


def code_refusal(group: str) -> str:
    """The reason why a recipe alone cannot choose it."""
    return (
        f"a recipe cannot choose '{group}=own' (it names code): choose it on the command line too, with its target and trust=[…]"
    )


def _key_problem(key: str) -> str:
    """The reason why no recipe may set this key or choose an option of this group; "" if it may."""
    first, shown = re.split(r"[./]", key)[0], f"'{printable(key):.60}'"
    if first in OPERATOR_KEYS:
        return f"a recipe cannot set '{key}' ({OPERATOR_KEYS[first]}): set it on the command line"
    if any(part.startswith("_") for part in key.split(".")):
        return f"{shown}: a recipe chooses options and sets values, never a target or another key of Hydra's"
    if not re.fullmatch(r"[A-Za-z0-9_.*?]+", key) or len(key) > MAX_KEY:  # * and ? occur in patterns of parameter names
        return f"{shown} is not a key: keys are plain names of at most {MAX_KEY} characters"
    return ""


def _scalar(node: yaml.ScalarNode) -> object:
    """A scalar by the rules of YAML 1.1, except that 1e-3 is a number; the node itself if YAML cannot read its value."""
    if not node.style and re.fullmatch(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+", node.value):
        return float(node.value)
    if not node.style and re.fullmatch(r"[-+]?[\d_]{20,}", node.value):  # Python reads no number of more than 4,300 digits
        return MAX_WHOLE + 1
    loader = yaml.SafeLoader("")
    try:
        return loader.construct_object(node)
    except (ValueError, yaml.YAMLError):  # 2026-13-01 has the form of a date, and "=" a meaning in YAML 1.1
        return node
    finally:
        loader.dispose()


def scalar(node: yaml.ScalarNode, several_lines: bool = False) -> tuple[object, str]:
    """A scalar in plain Python, and the reason why a recipe may not hold it; "" if it may."""
    value, text, problem = _scalar(node), node.value, ""
    short = printable(text) if len(text) < 40 else f"{printable(text[:40])}…"
    if not isinstance(value, str | int | float | bool | None):
        problem = f"YAML reads {short} as a date, binary data or nothing: quote it, if it is a text"
    elif isinstance(value, int) and abs(value) > MAX_WHOLE:
        problem = f"{short} is too large a number"
    elif isinstance(value, int | float) and not isinstance(value, bool) and _OTHER_NOTATION.match(text):
        problem = f"YAML reads {short} as {value}: write {value}, or quote it, if it is a text"
    elif isinstance(value, str) and "${" in value and ("${" in REFERENCE.sub("", value) or "\\" in value):
        problem = f"'{short}': a recipe may refer to keys of the config only, as ${{optimizer.lr}}, never to the environment"
    elif value == "???":
        problem = "'???' stands for a missing value: write the value"
    elif isinstance(value, str) and (
        len(value) > MAX_TEXT or not (value.replace("\n", "") if several_lines else value).isprintable()
    ):
        problem = f"'{short}': a text has at most {MAX_TEXT} characters, all of them printable"
    return value, problem
