"""Byte-level text: documents of many lengths, read as sequences of tokens."""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from drivetrain.core.errors import UserError
from drivetrain.core.lazy import torch
from drivetrain.core.option import Count, RunSpec
from drivetrain.data.base import IGNORED, Data, Fraction, Splits

BEGIN = 256  # the token before a document's first byte
VOCABULARY = 257  # 256 values of a byte, and BEGIN
OTHERS = {"site-packages", "dist-packages", "__pycache__"}  # folders in the library's that are not it
TESTS = {"test", "tests", "idle_test"}


class Stdlib(Data):
    """The source of Python's own standard library as bytes: real text of variable length, on every machine.

    A document is a file; longer ones are cut into pieces of `length` bytes, each read after the byte before it. Every byte
    is a target once. The held-out files are chosen by the hash of their names, so they are the same in every run.
    """

    machine_local_keys = ("root",)
    tokens = True

    def __init__(
        self,
        root: str | None = None,
        length: Count = 256,
        holdout: Fraction = 0.1,
        tests: bool = False,
        max_files: Count | None = None,
        test_samples: Count | None = None,
        drop_last: bool = True,
    ) -> None:
        self.root = os.path.expanduser(root) if root else None
        self.length, self.holdout, self.tests = length, holdout, tests
        self.max_files, self.test_samples, self.drop_last = max_files, test_samples, drop_last

    def validate(self, run: RunSpec) -> Iterator[str]:
        if run.augment:
            yield f"{run.named('augment')} changes images, but data=stdlib is text: set augment=[]"
        if self.root and not Path(self.root).is_dir():
            yield f"data.root={self.root} is no directory: set it to a folder of .py files, or to null for Python's own library"

    def shape(self) -> tuple[int, ...]:
        return (self.length,)

    def load(self, device: torch.device) -> Splits:
        root = Path(self.root or sysconfig.get_paths()["stdlib"])
        files = self._files(root)
        train, test = ([name for name, place in files if (place < self.holdout) is held] for held in (False, True))
        if not train or not test:
            raise UserError(
                f"{root} gives {len(train)} training and {len(test)} held-out .py files: data.root wants a folder of more of "
                "them; see data.max_files and data.holdout"
            )
        sources = [Texts([_read(root / name) for name in names], self.length) for names in (train, test)]
        return Splits(sources[0], sources[1].spread(self.test_samples), self.shape(), VOCABULARY, None, dtype=torch.int64)

    def _files(self, root: Path) -> list[tuple[Path, float]]:
        """Names below `root` in the order of their hashes, which lie in [0, 1); without empty files."""
        unwanted = OTHERS if self.tests else OTHERS | TESTS
        names = (p.relative_to(root) for p in root.rglob("*.py") if p.stat().st_size)
        hashed = sorted((_place(name), name) for name in names if not unwanted.intersection(name.parts[:-1]))
        step = max(1, len(hashed) // self.max_files) if self.max_files else 1  # the held-out ones come first: take of all
        return [(name, place) for place, name in hashed[::step][: self.max_files]]


class Texts:
    """Documents as a source of sequences: inputs (n, longest) and targets, the next tokens."""

    def __init__(self, documents: list[bytes], length: int) -> None:
        sizes = torch.tensor([len(d) for d in documents])
        pieces = -(-sizes // length)
        document = torch.repeat_interleave(pieces)  # of each piece
        number = torch.arange(len(document)) - (pieces.cumsum(0) - pieces)[document]  # of the piece in its document
        begins = (sizes + 1).cumsum(0) - sizes - 1
        self.text = torch.full((int(sizes.sum()) + len(documents),), BEGIN, dtype=torch.int16)
        for begin, content in zip(begins.tolist(), documents, strict=True):
            self.text[begin + 1 : begin + 1 + len(content)] = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        self.starts = begins[document] + number * length  # of each piece's inputs, in `text`
        self.lengths = (sizes[document] - number * length).clamp_(max=length)
        self.longest = int(self.lengths.max())

    def __len__(self) -> int:
        return len(self.lengths)

    def spread(self, most: int | None) -> Texts:
        """At most so many of the pieces, spread evenly over the documents."""
        if most is None or most >= len(self):
            return self
        some: Any = object.__new__(Texts)
        chosen = torch.arange(most) * len(self) // most
        some.text, some.longest = self.text, self.longest
        some.starts, some.lengths = self.starts[chosen], self.lengths[chosen]
        return some

    def fetch(self, indices: torch.Tensor, pad_to: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
        lengths = self.lengths[indices].unsqueeze(1)
        longest = -(-int(lengths.max()) // pad_to) * pad_to
        place = torch.arange(min(longest, self.longest))
        tokens = self.starts[indices].unsqueeze(1) + place
        padding = place >= lengths
        tokens.masked_fill_(padding, 0)
        x, y = self.text[tokens].long(), self.text[tokens + 1].long()
        return x.masked_fill_(padding, 0), y.masked_fill_(padding, IGNORED)


def _place(name: Path) -> float:
    """A file's place in [0, 1), by the hash of its name."""
    return int.from_bytes(hashlib.sha256(name.as_posix().encode()).digest()[:8], "big") / 2**64


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}): mend or remove it, or set data.root") from None
