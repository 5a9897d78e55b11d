"""Changes to files, made at random: of their bytes, of the structure of JSON and YAML, and of what stands in their place."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml
from tests.support.recipe_mutants import FRAGMENTS, KINDS, NUMBERS, SHAPES, TEXTS, Raw, mutated, places

IN_PLACE: dict[str, Callable[[Path], object]] = {
    "a FIFO": os.mkfifo,
    "a link to /dev/zero": lambda file: file.symlink_to("/dev/zero"),
    "a link to a file": lambda file: file.symlink_to("/etc/passwd"),
    "a link to itself": lambda file: file.symlink_to(file.name),
    "a folder": lambda file: file.mkdir(),
    "nothing": lambda file: None,
    "an empty file": lambda file: file.touch(),
    "a terabyte of zeros": lambda file: _sparse(file, 2**40),
}
KEYS = ["", "a", "x" * 300, "\x1b[2J", "__class__", "_target_", "a.b", "0", "é", "\udc80"]
PIECES = [
    b"", b"\x00", b"\xff\xfe", b"\x00" * 600, b"-", b"9" * 400, b"1e999", b"NaN", b"-Infinity", b"[" * 5000,
    b'{"a":' * 5000, b"{}", b"[]",
    b"null", b"\n", b"\r\n", b'"', b"\\", b"\xf0\x9f\x98\x80", b"=", b",", b"\t", b"\x1b[2J", b"a" * 70_000,
    b"*a", b"&a [*a]", b"!!x ",
]  # fmt: skip


def _sparse(file: Path, size: int) -> None:
    with file.open("wb") as opened:
        opened.truncate(size)


def odd(draw: random.Random) -> Any:
    """A value of an odd kind or size."""
    return draw.choice([*NUMBERS, *NUMBERS, *TEXTS, *SHAPES])


def of_bytes(draw: random.Random, content: bytes) -> bytes:
    """Change a few bytes, or cut the end off, or put something in."""
    for _ in range(draw.choice([1, 1, 1, 3, 10])):
        at = draw.randrange(len(content) + 1)
        kind = draw.random()
        if kind < 0.4 and at < len(content):
            content = content[:at] + bytes([content[at] ^ (1 << draw.randrange(8))]) + content[at + 1 :]
        elif kind < 0.5:
            content = content[:at]
        elif kind < 0.6:
            content = content[:at] + content[at + draw.randrange(1, 200) :]
        elif kind < 0.7:
            content = content[:at] + content[draw.randrange(len(content) + 1) :][:500] + content[at:]
        else:
            content = (
                content[:at] + draw.choice([*PIECES, *(f.encode() for f in FRAGMENTS)]) + content[at + draw.choice([0, 1, 8]) :]
            )
    return content


def of_tree(draw: random.Random, tree: Any) -> Any:
    """Change a few values of a tree: remove, replace, nest, rename or add."""
    for _ in range(draw.choice([1, 1, 2, 4])):
        if not (paths := places(tree)):
            return odd(draw)
        tree = mutated(tree, draw.choice(paths), draw.choice(KINDS), draw.choice(KEYS), odd(draw))
    return tree


def as_json(tree: Any) -> bytes:
    """A tree as JSON, with numbers that Python's writer would not write."""
    raw: dict[str, str] = {}

    def marked(value: Any) -> Any:
        if isinstance(value, Raw):
            raw[f"<{len(raw)}>"] = {".inf": "Infinity", "-.inf": "-Infinity", ".nan": "NaN"}.get(value, value)
            return f"<{len(raw) - 1}>"
        if isinstance(value, dict):
            return {str(k): marked(v) for k, v in value.items()}
        return [marked(v) for v in value] if isinstance(value, list) else value

    text = json.dumps(marked(tree))
    for mark, number in raw.items():
        text = text.replace(f'"{mark}"', number)
    return text.encode("utf-8", "surrogatepass")


def structured(draw: random.Random, name: str, content: bytes) -> bytes:
    """Change the structure of a file of JSON, JSON lines or YAML; the bytes of any other."""
    if name.endswith(".json"):
        return as_json(of_tree(draw, json.loads(content)))
    if name.endswith(".jsonl"):
        lines = content.splitlines()
        at = draw.randrange(len(lines))
        lines[at] = as_json(of_tree(draw, json.loads(lines[at])))
        return b"\n".join(lines) + b"\n"
    if name.endswith(".yaml"):
        tree = of_tree(draw, yaml.safe_load(content) or {})
        return yaml.safe_dump(_plain(tree), allow_unicode=True).encode("utf-8", "surrogatepass")
    return of_bytes(draw, content)


def _plain(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {_plain(k): _plain(v) for k, v in tree.items()}
    if isinstance(tree, list):
        return [_plain(v) for v in tree]
    return str(tree) if isinstance(tree, str) else tree


def damage(draw: random.Random, file: Path) -> str:
    """Damage a file in one way; return how."""
    kind = draw.random()
    if kind < 0.15:
        how = draw.choice(list(IN_PLACE))
        remove(file)
        IN_PLACE[how](file)
        return how
    if kind < 0.6:
        file.write_bytes(structured(draw, file.name, file.read_bytes()))
        return "its structure"
    file.write_bytes(of_bytes(draw, file.read_bytes()))
    return "its bytes"


def remove(path: Path) -> None:
    """Remove whatever stands at a path."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def beginning(file: Path) -> bytes:
    """The first bytes of a file that is an ordinary one, to tell of it."""
    if file.is_symlink() or not file.is_file():
        return b""
    with file.open("rb") as opened:
        return opened.read(600)
