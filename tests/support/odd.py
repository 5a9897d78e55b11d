"""Odd input: files changed at random, and what must come of reading anything: it is accepted, or refused in our words.

A test draws a few of each kind. `make fuzz` draws 10,000.
"""

import collections
import json
import os
import random
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import hypothesis
import pytest
import yaml
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st

from drivetrain.core.errors import UserError
from tests.support.effects import LIMIT_S, Begins, TooLong, limited, watched
from tests.support.recipe_mutants import FRAGMENTS, KINDS, NUMBERS, SHAPES, TEXTS, Raw, mutated, places

# What fails in the suite is not made smaller: that takes minutes.
settings.register_profile(
    "few", max_examples=25, phases=[Phase.explicit, Phase.generate], derandomize=True, database=None, deadline=None,
    suppress_health_check=list(HealthCheck),
)  # fmt: skip
few = settings.get_profile("few")
settings.register_profile("campaign", few, max_examples=10_000, phases=list(Phase), derandomize=False, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "few"))
fuzz = pytest.mark.fuzz

ACCEPTED, REFUSED = "accepted", "refused"
READABLE = Path(__file__).parents[1], Path(hypothesis.__file__).parents[1]  # tests, whose lines a warning quotes, and packages
TRIES = 3  # a busy machine slows one reading down, a long one takes long each time
MOST_SAID = 8_000  # characters of a refusal
IN_PLACE: dict[str, Callable[[Path], object]] = {
    "a FIFO": os.mkfifo,
    "a link to /dev/zero": lambda file: file.symlink_to("/dev/zero"),
    "a link to a file": lambda file: file.symlink_to("/etc/passwd"),
    "a link to itself": lambda file: file.symlink_to(file.name),
    "a folder": lambda file: file.mkdir(),
    "nothing": lambda file: None,
    "an empty file": lambda file: file.touch(),
    "a terabyte of zeros": lambda file: (file.touch(), os.truncate(file, 2**40)),
}
KEYS = ["", "a", "x" * 300, "\x1b[2J", "__class__", "_target_", "a.b", "0", "é", "\udc80"]
PIECES = [
    b"", b"\x00", b"\xff\xfe", b"\x00" * 600, b"-", b"9" * 400, b"1e999", b"NaN", b"-Infinity", b"[" * 5000,
    b'{"a":' * 5000, b"{}", b"[]", b"null", b"\n", b"\r\n", b'"', b"\\", b"\xf0\x9f\x98\x80", b"=", b",", b"\t", b"\x1b[2J",
    b"a" * 70_000, b"*a", b"&a [*a]", b"!!x ", *(fragment.encode() for fragment in FRAGMENTS),
]  # fmt: skip
dice = st.randoms(use_true_random=False)
T = TypeVar("T")


def tried(drawn: st.SearchStrategy[T], read: Callable[[T], str], examples: Sequence[T] = ()) -> None:
    """Read what is drawn, as often as the profile says, and what once was a defect. Some of it is accepted, and some refused."""
    counts: collections.Counter[str] = collections.Counter()

    @given(drawn)
    def each(value: T) -> None:
        counts[read(value)] += 1

    for value in examples:
        each = example(value)(each)
    each()
    assert set(counts) == {ACCEPTED, REFUSED}, counts


def outcome(
    read: Callable[[], object], *readable: Path, writable: Sequence[Path] = (), starts: bool = False, seconds: float = LIMIT_S,
    most_said: int = MOST_SAID,
) -> str:  # fmt: skip
    """Read something. Anything fails but its end, a refusal in few printable words and, where it `starts`, the start of a run.

    It may read and write these places alone, take as many seconds of processor time, and 200 MB.
    """
    said: str | None = None
    for left in reversed(range(TRIES)):
        try:
            with limited(seconds), watched(*READABLE, *readable, writable=writable, stopping=starts) as effects:
                read()
        except UserError as error:
            said = str(error)
        except Begins:
            pass
        except (TooLong, MemoryError, SystemExit) as error:
            if left and not isinstance(error, SystemExit):
                continue
            raise AssertionError(f"{type(error).__name__}: {error}") from error
        break
    assert starts or effects == [], effects
    if said is None:
        return ACCEPTED
    assert said.strip(), "a refusal says nothing"
    assert len(said) <= most_said, f"a refusal of {len(said)} characters"
    assert "Traceback" not in said
    assert all(line.replace("\t", " ").isprintable() for line in said.split("\n")), repr(said)
    return REFUSED


def value(draw: random.Random) -> Any:
    """A value of an odd kind or size."""
    return draw.choice([*NUMBERS, *NUMBERS, *TEXTS, *SHAPES])


def of_bytes(draw: random.Random, content: bytes) -> bytes:
    """Change a few bytes, or cut the end off, or put something in."""
    for _ in range(draw.choice([1, 1, 1, 3, 10])):
        at, kind = draw.randrange(len(content) + 1), draw.randrange(10)
        begin, rest = content[:at], content[at:]
        if kind < 4 and rest:
            content = begin + bytes([rest[0] ^ (1 << draw.randrange(8))]) + rest[1:]
        elif kind == 4:
            content = begin
        elif kind == 5:
            content = begin + rest[draw.randrange(1, 200) :]
        elif kind == 6:
            content = begin + content[draw.randrange(len(content) + 1) :][:500] + rest
        else:
            content = begin + draw.choice(PIECES) + rest[draw.choice([0, 1, 8]) :]
    return content


def of_tree(draw: random.Random, tree: Any) -> Any:
    """Change a few values of a tree: remove, replace, nest, rename or add."""
    for _ in range(draw.choice([1, 1, 2, 4])):
        if not (paths := places(tree)):
            return value(draw)
        tree = mutated(tree, draw.choice(paths), draw.choice(KINDS), draw.choice(KEYS), value(draw))
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
    kind = draw.randrange(100)
    if kind < 15:
        how = draw.choice(list(IN_PLACE))
        remove(file)
        IN_PLACE[how](file)
        return how
    change = structured if kind < 60 else lambda draw, _, content: of_bytes(draw, content)
    content = change(draw, file.name, file.read_bytes())
    file.write_bytes(content)
    return f"{content[:300]!r}"


def remove(path: Path) -> None:
    """Remove whatever stands at a path."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
