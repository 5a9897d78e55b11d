"""The grammar of overrides: reading and writing one `key=value`."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Any

from drivetrain.core.errors import UserError, without_logins

_WORD = re.compile(r"[A-Za-z][A-Za-z0-9_]*")
_OTHER_THAN_TEXT = re.compile(r"true|false|null|nan|inf", re.I)  # words that Hydra reads as a value of another type
# Quoted texts, and the text between the signs of lists and calls; in a mapping also between keys and values.
_PART = re.compile(r"""'[^']*'|"[^"]*"|[^,\[\](){}'"]+""")
_PART_OF_MAPPING = re.compile(r"""'[^']*'|"[^"]*"|[^,\[\](){}:'"]+""")
_OF_TABLES = re.compile(r"data\.(target|columns|image|text|label|delimiter|decimal|na)")  # keys whose values name columns
_PART_OF_NAMES = re.compile(r"""'[^']*'|"[^"]*"|[^,\[\]'"]+""")
MAX_LENGTH = 2**15  # characters of one override: Hydra's parser takes minutes for the longest that the system allows
MAX_DEPTH = 8  # levels of lists and mappings in a value, on the command line as in a recipe
SECRET = re.compile(r"(api_?key|token|secret|password)$", re.I)


def key_of(override: str) -> str:
    """The key or group that an override sets."""
    return override.partition("=")[0].lstrip("+")


def redact(override: str) -> str:
    """An override, without its value where the key names an API key, token, secret or password.

    An address loses its query, which may hold such a key.
    """
    key, equals, value = override.partition("=")
    if key == "recipe" and "://" in value:
        return without_logins(f"{key}={re.sub(r'[?][^#,]*', '?<redacted>', value)}")
    return f"{key}=<redacted>" if equals and SECRET.search(key) else without_logins(override)


def parse(text: str) -> Any:
    """Parse one override with Hydra. Raises HydraException, or ValueError for a number of more than 4,300 digits.

    `~/` in front of a path becomes the user's home, as in a shell. An address of a recipe needs no quotes for its # and =,
    nor does a target for its comparison, nor a text for letters unknown to Hydra's grammar, such as ö.
    """
    from hydra.errors import HydraException

    key, equals, value = text.partition("=")
    if equals and value.startswith("~/"):
        text = f"{key}={format_value(os.path.expanduser(value))}"
    if key == "target" and re.fullmatch(r"[^'\"\[{(]*[<>][^'\"\[{(]*", value):
        text = f"{key}={','.join(format_value(word) for word in value.split(','))}"
    if key.lstrip("+") == "recipe" and "://" in value and not re.match(r"['\"\[{]|\w+\(", value):
        text = f"{key}={','.join(format_value(word) if '://' in word else word for word in value.split(','))}"
    key, equals, value = text.partition("=")
    if not value.isascii() and not re.search(r"\\|\$\{", value):
        part = _PART_OF_MAPPING if "{" in value else _PART
        text = f"{key}={part.sub(lambda found: _quoted(found[0]), value)}"
    if key == "data.columns" and value.startswith("{") and value.endswith("}"):
        text = f"{key}={format_value(_typed_columns(value))}"
    try:
        return _parse(text)
    except HydraException:
        if not _OF_TABLES.fullmatch(key):
            raise
        return _parse(f"{key}={_with_columns(value)}")


def _typed_columns(value: str) -> list[str]:
    """The columns of a mapping to types, as a list, because a config's keys must be plain names. Others are appended."""
    pairs = [part.rpartition(":") for part in value[1:-1].split(",") if part.strip()]
    types = [f"{name.strip().strip(chr(39) + chr(34))}:{kind.strip()}" for name, _, kind in pairs]
    return [name for name in types if name != "*:unused"] + ([] if "*:unused" in types else ["*"])


def _with_columns(value: str) -> str:
    """A value whose names of columns are quoted: they may have any letters, as in `data.columns=[x#1,sepal length (cm)]`."""
    if value and set(value) <= set(",;|\t "):
        return format_value(value)
    return _PART_OF_NAMES.sub(lambda found: found[0] if found[0][0] in "'\"" else format_value(found[0].strip()), value)


def _quoted(part: str) -> str:
    """A part of a value, quoted if it is a plain text with letters unknown to Hydra's grammar."""
    return part if part.isascii() or part[0] in "'\"" else format_value(part.strip())


@lru_cache(maxsize=1024)  # 2 ms each, and the jobs of a sweep or of a comparison have most of their overrides in common
def _parse(text: str) -> Any:
    from drivetrain.core.options.hydra_parts import OverridesParser

    return OverridesParser.create().parse_override(text)


def parse_each(overrides: Iterable[str], form: str, problems: list[str]) -> Iterator[tuple[str, Any]]:
    """Each override and what Hydra parses it to. One that cannot be parsed is added to `problems` with the right `form`."""
    from hydra.errors import HydraException

    for text in overrides:
        if len(text) > MAX_LENGTH:
            problems.append(f"{text[:40]}… has {len(text):,} characters: no override may have more than {MAX_LENGTH:,}")
            continue
        if _depth(text.partition("=")[2]) > MAX_DEPTH:
            problems.append(f"{text[:40]}… has lists or mappings more than {MAX_DEPTH} deep: no value may be that deep")
            continue
        try:
            parsed = parse(text)
        except ValueError:
            key, _, value = text.partition("=")
            problems.append(f"{key}={value[:20]}… has a number of {len(value):,} characters: no number may be that long")
            continue
        except HydraException:
            quotes = ": put a value with ${ in quotes, as key='${…}'" if "${" in text else ""
            inner = next((c for c in text.partition("=")[2] if c in "=<>"), None)
            if not quotes and "{" in text and inner is not None:
                quotes = f": a text with {inner} within braces needs quotes of its own, as in key='{{inner: \"a>=1\"}}'"
            if not quotes and ("{" in text or "/" in text):  # shards, as train-{000..009}.tar; a path with a sign of the grammar
                quotes = _as_it_parses(text)
            if not quotes and (letter := next((c for c in text if not c.isascii()), None)) is not None:
                quotes = f": put texts with letters such as {letter} in quotes"
            problems.append(f"{text!r} is not of the form {form}{quotes}")
            continue
        yield text, parsed


def _as_it_parses(text: str) -> str:
    """The hint for a value with braces or for a path: the first form that can be parsed."""
    from hydra.errors import HydraException

    key, _, value = text.partition("=")
    unquoted = re.sub(r"""(['"])((?:(?!\1).)*)\1\s*:""", lambda found: f"{_key(found[2])}:", value)
    quoted = f"{'a value with braces' if '{' in value else 'such a path'} needs quotes of its own within the shell's"
    for why, form in (("keys in braces need no quotes", unquoted), (quoted, f'"{value}"'), (quoted, format_value(value))):
        with contextlib.suppress(HydraException):
            parse(f"{key}={form}")
            return f": {why}, as {shlex.quote(f'{key}={form}')}"
    return ""


def _depth(value: str) -> int:
    """The nesting depth of a value's brackets; brackets in quotes are text."""
    depth = deepest = 0
    for part in re.findall(r"""\\.|'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|[\[{(]|[\])}]""", value):
        depth += (part in "[{(") - (part in "])}")
        deepest = max(deepest, depth)
    return deepest


def single_values(overrides: Iterable[str], owner: str, problems: list[str]) -> dict[str, Any]:
    """Key → value of overrides that take one value each: settings of the `owner`, such as the command, and not of the run."""
    values: dict[str, Any] = {}
    for text, parsed in parse_each(overrides, "key=value", problems):
        key = key_of(text)
        if parsed.is_sweep_override():
            problems.append(f"'{text}': {key} is a setting of the {owner} and takes one value")
        elif key in values:
            problems.append(f"'{text}': {key} is given twice: leave one of them out")
        else:
            values[key] = parsed.value()
    return values


def format_value(value: object) -> str:
    """A plain value as Hydra's grammar writes it."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return "[" + ",".join(map(format_value, value)) + "]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{_key(k)}:{format_value(v)}" for k, v in value.items()) + "}"
    if isinstance(value, str) and (not _WORD.fullmatch(value) or _OTHER_THAN_TEXT.fullmatch(value)):
        # Within quotes a backslash is literal, except before a quote.
        return "'" + re.sub(r"(\\+)(?='|\Z)", r"\1\1", value).replace("'", "\\'") + "'"
    return str(value)


def words_of(verb: str, overrides: Iterable[str], keywords: Mapping[str, object]) -> list[str]:
    """The overrides passed to a function of the package, with its keywords as further ones. Raises UserError.

    A keyword's text is as on the command line: optimizer="sgd,adamw" is a sweep.
    """
    if isinstance(overrides, str):
        raise UserError(f"{verb}({overrides!r}): give a list of overrides, as [{overrides!r}], or keywords")
    return [*overrides, *(f"{key}={value if isinstance(value, str) else format_value(value)}" for key, value in keywords.items())]


def _key(key: object) -> str:
    """A mapping's key: Hydra's grammar has no quotes for it."""
    return re.sub(r"([\\()\[\]{}:=, \t])", r"\\\1", key) if isinstance(key, str) else format_value(key)
