"""Byte-level text: documents of different lengths, read as sequences of tokens."""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections import Counter
from collections.abc import Container, Iterator, Sequence
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import ClassVar, Literal, Self, cast

from drivetrain.core.errors import UserError
from drivetrain.core.lazy import torch
from drivetrain.core.option import Count, RunSpec
from drivetrain.core.order import Sampling
from drivetrain.core.source import Source
from drivetrain.core.targets import TargetKind
from drivetrain.data.base import IGNORE_INDEX, Data, Fraction, Splits, hash_fraction
from drivetrain.data.untrusted import read_whole

BEGIN = 256  # the token before a document's first byte
VOCABULARY = 257  # the 256 values of a byte, and BEGIN
NOT_LIBRARY = {"site-packages", "dist-packages", "__pycache__"}  # folders within the library's that do not belong to it
PACKAGE, PIECES = 20, 16  # files that make a package a class, and pieces of each file, with kind=class
TESTS = {"test", "tests", "idle_test"}


class Stdlib(Data):
    """The source code of Python's standard library as bytes: real text of variable length, on every machine.

    A document is a file. Longer files are cut into pieces of `length` bytes, and a piece's first input is the byte before it,
    so every byte is a target once. Files are held out by the hash of their names: the same in every run.
    With kind=class a piece's class is the package that its file belongs to, of those with at least 20 files; of each file
    there are at most 16 pieces, spread evenly.
    """

    machine_local_keys = ("root",)
    tokens = True
    targets = "tokens"
    reads: ClassVar[tuple[TargetKind, ...]] = ("tokens", "class")

    def __init__(
        self,
        kind: Literal["tokens", "class"] | None = None,
        root: str | None = None,
        length: Count = 256,
        holdout: Fraction = 0.1,
        validation: Fraction | None = 0.1,
        tests: bool = False,
        max_files: Count | None = None,
        test_samples: Count | None = None,
        drop_last: bool = True,
        order: Sampling = "shuffled",
    ) -> None:
        self.kind, self.root = kind, os.path.expanduser(root) if root else None
        self.length, self.holdout, self.validation, self.tests = length, holdout, validation, tests
        self.max_files, self.test_samples, self.drop_last, self.order = max_files, test_samples, drop_last, order

    def validate(self, run: RunSpec) -> Iterator[str]:
        if run.augment:
            yield f"{run.named('augment')} changes images, but data=stdlib is text: set augment=[]"
        if self.root and not Path(self.root).is_dir():
            yield f"data.root={self.root} is no directory: set it to a folder of .py files, or to null for Python's own library"

    def shape(self) -> tuple[int, ...]:
        return (self.length,)

    def encode(self, text: str, data: Splits) -> torch.Tensor:
        """Return BEGIN and the bytes of a text, of a longer one those at its end; for its class the first bytes, each plus 1."""
        content = text.encode(errors="surrogateescape")
        if self.targets == "class":
            return torch.tensor([byte + 1 for byte in content[: self.length]] or [0])  # as LabelledTexts has them
        return torch.tensor([BEGIN, *content][-self.length :])

    def decode(self, tokens: Sequence[int], data: Splits) -> str:
        """Return the text of an input's bytes, without BEGIN and padding."""
        shift = 1 if self.targets == "class" else 0
        return bytes(t - shift for t in tokens if 0 <= t - shift < BEGIN).decode(errors="replace")

    def load(self, device: torch.device) -> Splits:
        root = Path(self.root or sysconfig.get_paths()["stdlib"])
        files = self._files(root)
        packages = _packages(files) if self.targets == "class" else None
        if packages is not None:
            files = [(name, value) for name, value in files if name.parts[0] in packages]
        train, test = ([name for name, value in files if (value < self.holdout) is held] for held in (False, True))
        if not train or not test:
            raise UserError(
                f"{root} gives {len(train)} training and {len(test)} held-out .py files: set data.root to a folder with more of "
                "them; see data.max_files and data.holdout"
            )
        if packages is not None:
            return self._classified(root, train, test, packages)
        sources = [Texts([read_whole(root / name) for name in names], self.length) for names in (train, test)]
        return Splits(sources[0], sources[1].spread(self.test_samples), self.shape(), VOCABULARY, None, dtype=torch.int64)

    def load_sets(self, device: torch.device) -> Splits:
        data = super().load_sets(device)
        if data.validation is None:
            return data
        return replace(data, validation=cast(Pieces, data.validation).spread(self.test_samples))

    def _classified(self, root: Path, train: list[Path], test: list[Path], packages: list[str]) -> Splits:
        sources = [
            LabelledTexts(
                [as_tokens(read_whole(root / name)) for name in names], [packages.index(name.parts[0]) for name in names],
                self.length, PIECES,
            )
            for names in (train, test)
        ]  # fmt: skip
        test_source = sources[1].spread(self.test_samples)
        shape = self.shape()
        return Splits(sources[0], test_source, shape, len(packages), None, packages, torch.int64, vocabulary=VOCABULARY)

    def _files(self, root: Path) -> list[tuple[Path, float]]:
        """Return the names of files below `root` and their hashes in [0, 1), in the order of the hashes; no empty files."""
        unwanted = NOT_LIBRARY if self.tests else NOT_LIBRARY | TESTS
        hashed = sorted((hash_fraction(name.as_posix()), name) for name in _python_files(root, unwanted))
        step = max(1, len(hashed) // self.max_files) if self.max_files else 1  # held-out files come first: skip through all
        return [(name, value) for value, name in hashed[::step][: self.max_files]]


def _python_files(root: Path, unwanted: Container[str]) -> Iterator[Path]:
    """The names of files below `root` that are not empty; no folder of an unwanted name is entered, as some hold thousands."""
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in unwanted]
        for path in (Path(folder, name) for name in files if name.endswith(".py")):
            if path.stat().st_size:
                yield path.relative_to(root)


def _packages(files: list[tuple[Path, float]]) -> list[str]:
    """Return the packages that have enough files to be classes. Raises UserError."""
    counts = Counter(name.parts[0] for name, _ in files if len(name.parts) > 1)
    packages = sorted(package for package, count in counts.items() if count >= PACKAGE)
    if len(packages) < 2:
        raise UserError(
            f"{len(packages)} packages have at least {PACKAGE} files, and two are needed to tell them apart: set data.max_files "
            "and data.root to more files, or data.kind=tokens"
        )
    return packages


class Pieces(Source):
    """Pieces of documents as a source, (n,) each: where they begin in a text, their lengths, and their documents' numbers."""

    text: torch.Tensor
    starts: torch.Tensor
    lengths: torch.Tensor
    document: torch.Tensor

    def __len__(self) -> int:
        return len(self.lengths)

    def fetch(self, indices: torch.Tensor, pad_to: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
        """Return inputs and targets of these pieces, padded to the longest of them."""
        raise NotImplementedError

    def spread(self, max_pieces: int | None) -> Self:
        """Return a source of at most so many of the pieces, spread evenly over the documents."""
        if max_pieces is None or max_pieces >= len(self):
            return self
        return self.subset(torch.arange(max_pieces) * len(self) // max_pieces)

    def subset(self, indices: torch.Tensor) -> Self:
        """Return a source of these pieces, of the same text."""
        subset = copy(self)
        subset.starts, subset.lengths, subset.document = self.starts[indices], self.lengths[indices], self.document[indices]
        return subset

    def identities(self) -> list[bytes]:
        """Return a hash of each piece's document: the pieces of a document, and of equal ones, stay together."""
        first = torch.cat([torch.ones(1, dtype=torch.bool), self.document[1:] != self.document[:-1]])
        ends = self.starts + self.lengths
        last = torch.cat([first[1:], torch.ones(1, dtype=torch.bool)])
        spans = zip(self.starts[first].tolist(), ends[last].tolist(), strict=True)
        hashes = [hashlib.blake2b(self.text[start:end].numpy().tobytes(), digest_size=8).digest() for start, end in spans]
        return [hashes[n] for n in (first.cumsum(0) - 1).tolist()]


class Texts(Pieces):
    """Pieces of documents as a source: inputs (n, longest of the batch) and targets, the next tokens.

    Documents are bytes, or tokens below `begin` (int tensors); `begin` is the token before a document's first.
    """

    def __init__(self, documents: Sequence[bytes | torch.Tensor], length: int, begin: int = BEGIN) -> None:
        sizes = torch.tensor([len(d) for d in documents])
        pieces = -(-sizes // length)
        document = torch.repeat_interleave(pieces)  # of each piece
        number = torch.arange(len(document)) - (pieces.cumsum(0) - pieces)[document]  # of the piece in its document
        begins = (sizes + 1).cumsum(0) - sizes - 1
        largest = max([begin, *(int(d.max()) for d in documents if isinstance(d, torch.Tensor) and len(d))])
        dtype = torch.int16 if largest < 2**15 else torch.int32
        self.text = torch.full((int(sizes.sum()) + len(documents),), begin, dtype=dtype)
        for first, content in zip((begins + 1).tolist(), documents, strict=True):
            self.text[first : first + len(content)] = as_tokens(content)
        self.starts = begins[document] + number * length  # of each piece's inputs, in `text`
        self.lengths = (sizes[document] - number * length).clamp_(max=length)
        self.document, self.longest = document, int(self.lengths.max())

    def fetch(self, indices: torch.Tensor, pad_to: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
        lengths = self.lengths[indices].unsqueeze(1)
        longest = -(-int(lengths.max()) // pad_to) * pad_to
        position = torch.arange(min(longest, self.longest))
        tokens = self.starts[indices].unsqueeze(1) + position
        padding = position >= lengths
        tokens.masked_fill_(padding, 0)
        x, y = self.text[tokens].long(), self.text[tokens + 1].long()
        return x.masked_fill_(padding, 0), y.masked_fill_(padding, IGNORE_INDEX)


class LabelledTexts(Pieces):
    """Pieces of documents as a source: inputs (n, longest of the batch), and each piece's class, which is its document's.

    An input is the token + `shift`, and what follows a shorter text is `padding`. Of a document there are at most `max_pieces`,
    spread evenly.
    """

    def __init__(
        self,
        documents: Sequence[torch.Tensor],
        labels: Sequence[int],
        length: int,
        max_pieces: int,
        shift: int = 1,
        padding: int = 0,
    ) -> None:
        sizes = torch.tensor([len(d) for d in documents])
        all_pieces = (-(-sizes // length)).clamp(min=1)
        pieces = all_pieces.clamp(max=max_pieces)
        document = torch.repeat_interleave(pieces)  # of each piece
        chosen = torch.arange(len(document)) - (pieces.cumsum(0) - pieces)[document]  # its number among its document's
        number = chosen * all_pieces[document] // pieces[document]
        self.text = torch.cat(list(documents)).to(torch.int32) + shift
        self.padding = padding
        self.starts = (sizes.cumsum(0) - sizes)[document] + number * length
        self.lengths = (sizes[document] - number * length).clamp_(max=length)
        self.classes = torch.tensor(labels)  # of the documents
        self.document, self.longest = document, int(self.lengths.max())

    def labels(self) -> torch.Tensor:
        """Return the classes (n,)."""
        return self.classes[self.document]

    def fetch(self, indices: torch.Tensor, pad_to: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
        lengths = self.lengths[indices].unsqueeze(1)
        longest = -(-int(lengths.max()) // pad_to) * pad_to
        position = torch.arange(min(max(longest, 1), self.longest))
        padding = position >= lengths
        tokens = (self.starts[indices].unsqueeze(1) + position).masked_fill_(padding, 0)
        return self.text[tokens].long().masked_fill_(padding, self.padding), self.classes[self.document[indices]]


def as_tokens(content: bytes | torch.Tensor) -> torch.Tensor:
    """Return a document's tokens: each byte of bytes is one."""
    return torch.frombuffer(bytearray(content), dtype=torch.uint8) if isinstance(content, bytes) else content
