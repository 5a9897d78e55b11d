"""The exceptions that end a run, and the exit codes of the command."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from typing import TypeVar

Item = TypeVar("Item")
Made = TypeVar("Made")
DONE, FAILED, BAD_CONFIG, DIVERGED, INTERRUPTED = 0, 1, 2, 3, 75
SHORTEST = 3  # letters of a name to be found within another
MOST_SHOWN = 2_000  # characters of a problem; a longer one loses its middle
EXIT_OF_STATUS = {"completed": DONE, "failed": FAILED, "diverged": DIVERGED, "interrupted": INTERRUPTED}


class UserError(ValueError):
    """Bad input, with every problem that was found, one line each. Exit code 2; it is shown without a traceback."""

    def __init__(self, problems: str | Iterable[str]) -> None:
        self.problems = [type(problem)(_shown(problem)) for problem in ([problems] if isinstance(problems, str) else problems)]
        super().__init__("\n".join(self.problems))

    def __reduce__(self) -> tuple[type[UserError], tuple[list[str]]]:  # crosses worker processes
        return type(self), (self.problems,)


LOGIN = re.compile(r"(?<=://)[^\s/]+(?=@)|(?<=\w:/)[^\s/:]+:[^\s/]*(?=@)")  # in an address, also one taken for a path


def without_logins(text: str) -> str:
    """Return a text without the user names and passwords in its addresses."""
    return LOGIN.sub("<redacted>", text)


def _shown(text: str) -> str:
    """The message without logins and control characters, and without the middle of a long one: it may quote a stranger's file."""
    text = without_logins(text)
    if len(text) > MOST_SHOWN:
        begin, end = text[: 2 * MOST_SHOWN // 3], text[-MOST_SHOWN // 4 :]
        text = f"{begin} … {len(text) - len(begin) - len(end):,} characters … {end}"
    return "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text)


def refuse(problems: Iterable[str], error: type[UserError] = UserError) -> None:
    """Raise the error with these problems, each once, where there are any."""
    if each := [*dict.fromkeys(problems)]:
        raise error(each)


@contextmanager
def collecting(problems: list[str]) -> Iterator[None]:
    """Within the context a UserError is caught, and its problems are added to these."""
    try:
        yield
    except UserError as error:
        problems += error.problems


class OperatorGives(str):
    """A problem of a config that ends when the operator sets a key that no recipe may set, such as the path of the data."""


class DataError(UserError):
    """A sample that cannot be read; the message names its file."""

    at_once = False  # not the sample's fault: other samples need not be checked


MOST_TOLD = 20  # problems of one kind that are listed
MOST_COUNTED = 1_000  # nobody reads more of them


def told(problems: Sequence[str], mend: str = "") -> list[str]:
    """The first of some problems, how many more there are, and the remedy; a single one has its remedy already."""
    left = len(problems) - MOST_TOLD
    more = f"… and {'at least ' * (len(problems) >= MOST_COUNTED)}{left:,} more"
    return [*problems[:MOST_TOLD], *([more] if left > 0 else []), *([mend] if mend and len(problems) > 1 else [])]


def each_read(items: Iterable[Item], read: Callable[[Item], Made], mend: str = "") -> Iterator[Made]:
    """Yield `read(item)` for each item.

    After all good ones are read, raises DataError with the problems of the others. `mend` is the remedy for `{count}` of them.
    """
    problems: list[str] = []
    for item in items:
        try:
            made = read(item)
        except DataError as error:
            problems += error.problems
            if len(problems) >= MOST_COUNTED or error.at_once:
                break
            continue
        yield made
    refuse(told(problems, mend.format(count=len(problems))), DataError)


class Diverged(RuntimeError):
    """The loss is not finite. Exit code 3. The message is `what` diverged, and the advice."""

    def __init__(self, what: str, advice: str = "") -> None:
        super().__init__(what + advice)
        self.what = what


class CallbackError(RuntimeError):
    """A callback raised an exception. Exit code 1; the run was saved."""


class CannotSave(RuntimeError):
    """A run's files cannot be written. Exit code 1; the message says what is safe, and how to continue."""


class Interrupted(Exception):
    """A signal stopped the run, or its reading processes died. Exit code 75 if there is a checkpoint to resume from."""

    def __init__(self, message: str, saved: bool = False) -> None:
        super().__init__(message)
        self.saved = saved


def wants_traceback() -> bool:
    """True if the operator asked for whole tracebacks, by drivetrain's name for it or by Hydra's."""
    return bool(os.environ.get("DRIVETRAIN_TRACEBACK")) or os.environ.get("HYDRA_FULL_ERROR") == "1"


def did_you_mean(given: str, known: Iterable[str]) -> str:
    """A hint for a misspelt name: "did you mean …?" with similar known names, or the list of all of them."""
    known = sorted(known)
    if near := near_names(given, known):
        return "did you mean " + " or ".join(repr(n) for n in near) + "?"
    return "there is: " + ", ".join(known) if known else "it has none"


def near_names(given: str, known: Iterable[str], cutoff: float = 0.6) -> list[str]:
    """At most three similar known names; else names that contain it, or the longest within it (plateau in ReduceLROnPlateau)."""
    plain, word = {folded(name): name for name in known}, folded(given)
    if word in plain:
        return [plain[word]]
    near = get_close_matches(word, plain, n=3, cutoff=cutoff)
    around = [name for name in plain if len(word) > SHORTEST and (name.startswith(word) or name.endswith(word))]
    inside = [name for name in plain if len(name) >= SHORTEST and name in word]
    return [plain[name] for name in near or around[:3] or sorted(inside, key=len)[-1:]]


def folded(name: str) -> str:
    """A name in a normal form: lower case, without - and _, except those of a flag."""
    return name[:2].lower() + name[2:].lower().replace("_", "").replace("-", "")


PEER_GONE = "another rank is gone, or cannot be reached"


def is_peer_failure(error: str | None) -> bool:
    """True if a rank's error is one that torch raises when another rank is gone or does not answer."""
    signs = (
        "Connection closed by peer",
        "Connection reset",
        "gloo",
        "NCCL",
        "Broken pipe",
        "imed out",
        "caused pair closure",
        PEER_GONE,
    )
    return any(sign in str(error) for sign in signs)


def printable(text: str) -> str:
    """A text without line breaks and without control characters, which could steer a terminal."""
    return "".join(c if c.isprintable() else " " for c in text)
