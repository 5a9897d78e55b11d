"""What a planted fault is."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

SOURCE = Path("src/drivetrain")


class Fault(NamedTuple):
    """A mistake that a programmer could make, and the tests that should see it."""

    name: str  # says what is wrong
    file: str  # below src/drivetrain
    old: str  # stands in the file exactly once
    new: str
    tests: str  # files, separated by blanks
    only: str = ""  # pytest's -k

    def plant(self, text: str) -> str:
        """Return the file's text with the fault in it. Raises ValueError where the list does not fit the source any more."""
        if (times := text.count(self.old)) != 1:
            raise ValueError(f"{self.name}: {self.file} has {times} times, and not once: {self.old!r}")
        return text.replace(self.old, self.new)
