"""Byte-level text: documents of different lengths, read as sequences of tokens."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterator
from copy import copy
from pathlib import Path

from drivetrain.core.errors import UserError
from drivetrain.core.lazy import torch
from drivetrain.core.option import Count, RunSpec
from drivetrain.data.base import IGNORE_INDEX, Data, Fraction, Splits, hash_fraction

BEGIN = 256  # the token before a document's first byte
VOCABULARY = 257  # the 256 values of a byte, and BEGIN
NOT_LIBRARY = {"site-packages", "dist-packages", "__pycache__"}  # folders within the library's that do not belong to it
TESTS = {"test", "tests", "idle_test"}


class Stdlib(Data):
    """The source code of Python's standard library as bytes: real text of variable length, on every machine.

    A document is a file. Longer files are cut into pieces of `length` bytes, and a piece's first input is the byte before it,
    so every byte is a target once. Files are held out by the hash of their names: the same in every run.
    """

    machine_local_keys = ("root",)
    tokens = True
    targets = "tokens"

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

    def encode(self, text: str, data: Splits) -> torch.Tensor:
        """Return BEGIN and the bytes of a text; of a longer one those that fit at its end."""
        return torch.tensor([BEGIN, *text.encode(errors="surrogateescape")][-self.length :])

    def load(self, device: torch.device) -> Splits:
        root = Path(self.root or sysconfig.get_paths()["stdlib"])
        files = self._files(root)
        train, test = ([name for name, value in files if (value < self.holdout) is held] for held in (False, True))
        if not train or not test:
            raise UserError(
                f"{root} gives {len(train)} training and {len(test)} held-out .py files: set data.root to a folder with more of "
                "them; see data.max_files and data.holdout"
            )
        sources = [Texts([_read(root / name) for name in names], self.length) for names in (train, test)]
        return Splits(sources[0], sources[1].subset(self.test_samples), self.shape(), VOCABULARY, None, dtype=torch.int64)

    def _files(self, root: Path) -> list[tuple[Path, float]]:
        """Return the names of files below `root` and their hashes in [0, 1), in the order of the hashes; no empty files."""
        unwanted = NOT_LIBRARY if self.tests else NOT_LIBRARY | TESTS
        names = (p.relative_to(root) for p in root.rglob("*.py") if p.stat().st_size)
        hashed = sorted((hash_fraction(name.as_posix()), name) for name in names if not unwanted.intersection(name.parts[:-1]))
        step = max(1, len(hashed) // self.max_files) if self.max_files else 1  # held-out files come first: skip through all
        return [(name, value) for value, name in hashed[::step][: self.max_files]]


class Texts:
    """Pieces of documents as a source: inputs (n, longest of the batch) and targets, the next tokens."""

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

    def subset(self, max_pieces: int | None) -> Texts:
        """Return a source of at most so many of the pieces, spread evenly over the documents."""
        if max_pieces is None or max_pieces >= len(self):
            return self
        subset = copy(self)
        chosen = torch.arange(max_pieces) * len(self) // max_pieces
        subset.starts, subset.lengths = self.starts[chosen], self.lengths[chosen]
        return subset

    def fetch(self, indices: torch.Tensor, pad_to: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
        lengths = self.lengths[indices].unsqueeze(1)
        longest = -(-int(lengths.max()) // pad_to) * pad_to
        position = torch.arange(min(longest, self.longest))
        tokens = self.starts[indices].unsqueeze(1) + position
        padding = position >= lengths
        tokens.masked_fill_(padding, 0)
        x, y = self.text[tokens].long(), self.text[tokens + 1].long()
        return x.masked_fill_(padding, 0), y.masked_fill_(padding, IGNORE_INDEX)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}): mend or remove it, or set data.root") from None
