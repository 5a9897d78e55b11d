"""Runs one example under watch, and says how it ended."""

from __future__ import annotations

import collections
import traceback
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from tests.support.effects import Begins, TooLong, limited, watched

ACCEPTED, REFUSED, DEFECT = "accepted", "refused", "defect"
CODE = [Path(__file__).parents[2] / name for name in ("bench", "tests")]  # whose lines a warning quotes
MOST_SAID = 8_000  # characters of a refusal
EXAMPLES, SEED = 1_000, 0
MOST_SHOWN = 100  # defects in the result's file


class Example(NamedTuple):
    """Something odd, how it was made, and what reads it."""

    made: str
    read: Callable[[], object]
    readable: Sequence[Path] = ()
    writable: Sequence[Path] = ()
    starts: bool = False  # whether it may start a run, which ends the example
    seconds: float = 2.0  # of processor time


class Ended(NamedTuple):
    """How an example ended, with the message of a refusal, or what is wrong."""

    made: str
    outcome: str
    said: str = ""


class Kind(Protocol):
    """A kind of input."""

    def __call__(self, place: Path, count: int, seed: int) -> Iterable[Example]:
        """Yield so many examples, which may keep files in `place`. Each is read before the next one is made."""
        ...


def judged(example: Example) -> Ended:
    """Read an example, and say how it ended."""
    from drivetrain.core.errors import UserError

    outcome, said = ACCEPTED, ""
    effects: list[str] = []
    try:
        readable = (*CODE, *example.readable)
        with limited(example.seconds), watched(*readable, writable=example.writable, stopping=example.starts) as effects:
            example.read()
    except UserError as error:
        outcome, said = REFUSED, str(error)
    except Begins as error:
        said = str(error)
    except (Exception, TooLong, SystemExit) as error:
        outcome, said = DEFECT, f"{type(error).__name__}: {str(error)[:300]} at {_place(error)}"
    if outcome == REFUSED and (wrong := _wrong_with(said)):
        outcome, said = DEFECT, f"{wrong}: {said[:300]!r}"
    if effects and not example.starts:
        outcome, said = DEFECT, f"effect: {effects[0][:300]}"
    return Ended(example.made, outcome, said)


def _wrong_with(message: str) -> str:
    """What is wrong with a refusal; "" where it is in order."""
    if not message.strip() or len(message) > MOST_SAID or "Traceback" in message:
        return "a refusal says nothing, or too much"
    return "" if all(line.replace("\t", " ").isprintable() for line in message.split("\n")) else "a refusal is not printable"


def _place(error: BaseException) -> str:
    """The innermost lines of drivetrain that an exception came through."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "drivetrain/" in f.filename]
    return " < ".join(f"{Path(f.filename).parent.name}/{Path(f.filename).name}:{f.lineno}" for f in frames[:-4:-1])


def campaign(kind: Kind, place: Path, count: int, seed: int = SEED, done: Container[int] = ()) -> Iterator[Ended]:
    """Judge so many examples of a kind, one after the other, without those whose numbers are done."""
    return (judged(example) for number, example in enumerate(kind(place, count, seed)) if number not in done)


def summary(ended: Sequence[Ended]) -> dict[str, Any]:
    """How often each outcome came, and the defects."""
    outcomes = collections.Counter(each.outcome for each in ended)
    made = collections.Counter(each.made.partition(":")[0] for each in ended)
    wrong = [each._asdict() for each in ended if each.outcome == DEFECT]
    counts = {outcome: outcomes.get(outcome, 0) for outcome in (ACCEPTED, REFUSED, DEFECT)}
    return {"examples": len(ended), **counts, "made": dict(sorted(made.items())), "wrong": wrong[:MOST_SHOWN]}
