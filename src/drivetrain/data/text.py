"""Byte-level text: documents of different lengths, read as sequences of tokens."""

from __future__ import annotations

import hashlib
import logging
import sysconfig
from abc import abstractmethod
from collections import Counter
from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar, Literal, Self, cast

from drivetrain.core.errors import UserError
from drivetrain.core.lazy import numpy as np
from drivetrain.core.lazy import torch
from drivetrain.core.options.option import Count, RunSpec
from drivetrain.core.step.source import Source
from drivetrain.core.step.target_kinds import TargetKind
from drivetrain.core.step.trees import Tree
from drivetrain.data.base import IGNORE_INDEX, SPLITS, Data, Fraction, HeldOut, Listed, Splits, hash_fraction, hash_fractions
from drivetrain.data.listing import walk
from drivetrain.data.tokenizer import KEPT, Bytes, Documents, OfModel, Tokenizer, from_json
from drivetrain.data.untrusted import as_kept, read_whole

BEGIN = 256  # the token before a document's first byte
VOCABULARY = 257  # the 256 values of a byte, and BEGIN
NOT_LIBRARY = {"site-packages", "dist-packages", "__pycache__"}  # folders within the library's that do not belong to it
PACKAGE, PIECES = 20, 16  # files that make a package a class, and pieces of each file, with kind=class
TESTS = {"test", "tests", "idle_test"}

logger = logging.getLogger(__name__)


class TextData(Data):
    """The base of data that reads texts by a tokenizer: the model's own, where it has one, else their bytes."""

    tokenizer: str = "auto"
    tokenizer_file: str | None = None
    length: int  # tokens that a model reads of a text
    _model: Any = None  # the model option whose own tokenizer is the data's

    def resolve(self, run: RunSpec) -> Self:
        found = super().resolve(run)
        if found.tokens and self.tokenizer == "auto" and run.model.has_tokenizer:
            return found.with_values(_model=run.model, byte_tokens=False)
        return found

    def encode(self, text: str, data: Splits) -> torch.Tensor:
        """Return a text's tokens: the first ones for its class or number; the last ones, after which comes the next, else."""
        if not self.tokens:
            return super().encode(text, data)
        tokenizer = self.kept_tokenizer(data)
        if self.targets == "tokens":
            return torch.cat([torch.tensor([tokenizer.begin]), tokenizer([text])[0].long()])[-self.length :]
        tokens = tokenizer.whole([text], self.length)[0][: self.length].long() + tokenizer.shift
        return tokens if len(tokens) else torch.full((1,), tokenizer.padding or 0)  # as LabelledTexts has them

    def decode(self, tokens: Sequence[int], data: Splits) -> str | None:
        """Return the text of an input's tokens, without the one before its first, and padding."""
        if not self.tokens:
            return None
        tokenizer = self.kept_tokenizer(data)
        shift = 0 if self.targets == "tokens" else tokenizer.shift
        return tokenizer.text([t - shift for t in tokens if 0 <= t - shift < tokenizer.size])

    def kept_tokenizer(self, data: Splits) -> Tokenizer:
        """Return a run's tokenizer. Raises UserError where it is none, or has more tokens than the model."""
        with as_kept(KEPT):
            tokenizer = self.of_model() or _kept(data.files[KEPT], self.tokenizer_file)
            if self._model is not None and tokenizer.to_json() != data.files[KEPT]:
                raise ValueError(f"it is not that of model.name={self._model.name}, which it was trained with")
            if tokenizer.vocabulary > (data.vocabulary or data.classes):
                raise ValueError(f"it has {tokenizer.size:,} tokens, which are not the model's")
        return tokenizer

    def given_tokenizer(self) -> Tokenizer | None:
        """Return the tokenizer; None where it is still to be trained on the texts. Raises UserError."""
        if self.own is not None and (not self.byte_tokens or KEPT in self.own.splits.files):
            return self.kept_tokenizer(self.own.splits)
        return self.of_model() or Bytes()

    def of_model(self) -> OfModel | None:
        """Return the model's own tokenizer, where the data takes that. Raises UserError."""
        return None if self._model is None else OfModel.read(*self._model.tokenizer_files())


def tell_cut(lengths: torch.Tensor, length: int, samples: int) -> None:
    """Log how many of the training texts are as long as a model reads them, by the lengths of all or some (n,)."""
    if cut := int((lengths >= length).sum()):
        logger.info(
            "%d of %d training texts%s have data.length=%d tokens or more: a longer text is read to there",
            cut, len(lengths), " that were looked at" * (len(lengths) < samples), length,
        )  # fmt: skip


@lru_cache(1)  # each of many texts is encoded alone
def _kept(tokenizer: str, own_file: str | None) -> Tokenizer:
    return from_json(tokenizer, None if own_file is None else Path(own_file))


@dataclass(kw_only=True, eq=False)
class Stdlib(HeldOut[Listed[str], list[str], "Pieces"], TextData):
    """The source code of Python's standard library as bytes: real text of variable length, on every machine.

    A document is a file. Longer files are cut into pieces of `length` bytes, and a piece's first input is the byte before it,
    so every byte is a target once. Files are held out by the hash of their names: the same in every run.
    With kind=class a piece's class is the package that its file belongs to, of those with at least 20 files; of each file
    there are at most 16 pieces, spread evenly.
    """

    machine_local_keys = ("root",)
    samples_are: ClassVar[str] = ".py files"
    remedy: ClassVar[str] = "set data.root to a folder with more of them; see data.max_files and data.holdout"
    tokens = True
    tokenizer = "bytes"
    reads: ClassVar[tuple[TargetKind, ...]] = ("tokens", "class")

    kind: Literal["tokens", "class"] | None = None
    root: str | None = None
    validation: Fraction | None = 0.1
    length: Count = 256
    tests: bool = False
    max_files: Count | None = None
    test_samples: Count | None = None

    def validate(self, run: RunSpec) -> Iterator[str]:
        if run.augment:
            yield f"{run.named('augment')} changes images, but data=stdlib is text: set augment=[]"
        if self.root and not Path(self.root).is_dir():
            yield f"data.root={self.root} is no directory: set it to a folder of .py files, or to null for Python's own library"

    def shape(self) -> tuple[int, ...]:
        return (self.length,)

    def kept_tokenizer(self, data: Splits) -> Tokenizer:
        return Bytes()

    def read(self) -> tuple[Listed[str], list[str]]:
        names = self._files()
        if self.targets == "tokens":
            return Listed(names), []
        counts = Counter(name.partition("/")[0] for name in names if "/" in name)
        packages = sorted(package for package, count in counts.items() if count >= PACKAGE)
        if len(packages) < 2:
            raise UserError(
                f"{len(packages)} packages have at least {PACKAGE} files, and two are needed to tell them apart: set "
                "data.max_files and data.root to more files, or data.kind=tokens"
            )
        return Listed(name for name in names if name.partition("/")[0] in packages), packages

    def fractions(self, every: Listed[str]) -> np.ndarray:
        return hash_fractions(every, len(every))

    def source(self, known: list[str], part: Listed[str]) -> Pieces:
        contents = [read_whole(self._folder() / name) for name in part]
        if not known:
            return Texts(contents, self.length)
        return LabelledTexts(contents, [known.index(name.partition("/")[0]) for name in part], self.length, PIECES)

    def about(self, known: list[str], sources: Sequence[tuple[str, Pieces]], own: Splits | None) -> dict[str, object]:
        classes = {"names": known, "vocabulary": VOCABULARY} if known else {}
        return {"shape": self.shape(), "classes": len(known) or VOCABULARY, "normalize": None, "dtype": torch.int64, **classes}

    def _folder(self) -> Path:
        return Path(self.root or sysconfig.get_paths()["stdlib"])

    def load_sets(self, device: torch.device) -> Splits:
        data, most = super().load_sets(device), self.test_samples
        fewer = {
            of: source.subset(torch.arange(most) * len(source) // most)  # spread evenly over the documents
            for of in SPLITS for source in data.sets(of).values() if most is not None and most < len(source)
        }  # fmt: skip
        return replace(data, **cast(Any, fewer))

    def _files(self) -> list[str]:
        """Return the names of files, in the order of their hashes; no empty files."""
        root, unwanted = self._folder(), NOT_LIBRARY if self.tests else NOT_LIBRARY | TESTS
        names = walk(str(root), (".py",), unwanted).every()
        hashed = sorted((hash_fraction(name), name) for name in names if (root / name).stat().st_size)
        step = max(1, len(hashed) // self.max_files) if self.max_files else 1  # held-out files come first: skip through all
        return [name for _, name in hashed[::step][: self.max_files]]


class Pieces(Source):
    """Pieces of documents as a source, (n,) each: up to `length` tokens, in order, of the documents `which` (m,)."""

    lengths: torch.Tensor  # (n,)
    groups: torch.Tensor  # (m,)
    most: int | None = None  # pieces of a document, spread evenly
    least = 0
    unread = 0  # tokens at a document's beginning that are in no piece

    def __init__(
        self, documents: Documents | Sequence[bytes | torch.Tensor], length: int, which: torch.Tensor | None = None
    ) -> None:
        self.documents = documents if isinstance(documents, Documents) else Documents.of(documents)
        self.length = length
        self._keep(torch.arange(len(self.documents)) if which is None else which)

    def _keep(self, which: torch.Tensor) -> None:
        sizes = (self.documents.sizes[which] - self.unread).clamp(min=0)
        whole = (-(-sizes // self.length)).clamp_(min=self.least)  # pieces of each document
        self.which, self.begins = which, self.documents.begins[which]
        self.groups = whole if self.most is None else whole.clamp(max=self.most)
        self.edges = torch.nn.functional.pad(self.groups.cumsum(0), (1, 0))  # (m + 1,) between the pieces of two documents
        self.lengths = torch.full((int(self.edges[-1]),), self.length, dtype=torch.int32)
        last = (whole > 0) & (whole == self.groups)  # documents whose last piece is one of theirs
        self.lengths[self.edges[1:][last] - 1] = (sizes - (whole - 1) * self.length)[last].int()
        self.longest = int(self.lengths.max()) if len(self.lengths) else 0

    def of(self, which: torch.Tensor) -> Self:
        """Return a source of the pieces of these of the documents (m,)."""
        part = copy(self)
        part._keep(self.which[which])
        return part

    def __len__(self) -> int:
        return len(self.lengths)

    @abstractmethod
    def fetch(self, indices: torch.Tensor, pad_to: int = 1) -> tuple[Tree, torch.Tensor]:
        """Return inputs and targets of these pieces, padded to the longest of them."""

    def read(self, indices: torch.Tensor, pad_to: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return tokens (n, length), what of them is padding, the places of the first ones in their documents, and these."""
        document = torch.searchsorted(self.edges, indices.contiguous(), right=True).sub_(1)  # its place in `which`
        self.documents.check(self.which[document])
        number = indices - self.edges[document]  # of the piece among its document's
        if self.most is not None:
            sizes = self.documents.sizes[self.which[document]] - self.unread
            whole = (-(-sizes // self.length)).clamp_(min=self.least)
            number = number * whole // self.groups[document]
        start, lengths = self.unread + number * self.length, self.lengths[indices].unsqueeze(1)
        longest = max(-(-int(lengths.max()) // pad_to) * pad_to, self.least)
        position = torch.arange(min(longest, self.longest))
        padding = position >= lengths
        at = (self.begins[document] + start).unsqueeze(1) + position
        return self.documents.tokens[at.masked_fill_(padding, 0)].long(), padding, start, document

    def identities(self) -> torch.Tensor | list[bytes]:
        """Return a key for each document, equal for equal ones: their pieces stay together."""
        if self.documents.keys is not None:
            return self.documents.keys[self.which]
        ends = self.documents.begins + self.documents.sizes
        parts = (self.documents.tokens[self.documents.begins[n] : ends[n]] for n in self.which.tolist())
        return [hashlib.blake2b(self.inputs(part).numpy().tobytes(), digest_size=8).digest() for part in parts]

    @abstractmethod
    def inputs(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return what a model reads of a document's tokens."""


class Texts(Pieces):
    """Pieces of documents as a source: inputs (n, longest of the batch) and targets, the next tokens.

    `begin` is the token before a document's first; before a later piece stands the last one of the piece before it. A token that
    is no target is stored as its complement, ~token. With `packing` pieces share rows of up to `length` tokens, or one row of any
    length: inputs are then `input_ids` and `position_ids`, which begin anew at each piece.
    """

    def __init__(
        self,
        documents: Documents | Sequence[bytes | torch.Tensor],
        length: int,
        begin: int = BEGIN,
        packing: Literal["rows", "one row"] | None = None,
        which: torch.Tensor | None = None,
    ) -> None:
        super().__init__(documents, length, which)
        self.begin, self.packing = begin, packing

    def inputs(self, tokens: torch.Tensor) -> torch.Tensor:
        dtype = torch.int16 if self.begin < 2**15 else torch.int32
        return torch.cat([torch.tensor([self.begin], dtype=dtype), tokens[:-1].to(dtype)])

    def fetch(self, indices: torch.Tensor, pad_to: int = 1) -> tuple[Tree, torch.Tensor]:
        y, padding, start, document = self.read(indices, pad_to)
        before = (self.begins[document] + (start - 1)).clamp_(min=0)
        first = self.documents.tokens[before].long().masked_fill_(start == 0, self.begin)
        x = torch.cat([first.unsqueeze(1), y[:, :-1]], 1)
        x = torch.where(x < 0, ~x, x).masked_fill_(padding, 0)
        y = y.masked_fill_(padding | (y < 0), IGNORE_INDEX)
        return (x, y) if self.packing is None else self._packed(x, y, ~padding, pad_to)

    def _packed(self, x: torch.Tensor, y: torch.Tensor, real: torch.Tensor, pad_to: int) -> tuple[Tree, torch.Tensor]:
        """Return padded pieces (n, length) as rows that several of them share. Padding has the position 0 throughout."""
        lengths = real.sum(1).tolist()
        rows, offsets, width = shared_rows(lengths, self.length if self.packing == "rows" else sum(lengths))
        if self.packing == "rows":
            width = min(-(-width // pad_to) * pad_to, self.length)
        position = torch.arange(x.shape[1]).expand_as(x)
        to = ((torch.tensor(rows) * width + torch.tensor(offsets)).unsqueeze(1) + position)[real]
        out = [torch.full((1 + max(rows), width), filler) for filler in (0, 0, IGNORE_INDEX)]
        for packed, values in zip(out, (x, position, y), strict=True):
            packed.view(-1)[to] = values[real]
        return {"input_ids": out[0], "position_ids": out[1]}, out[2]


class Conversations(Texts):
    """Documents as a source, each read from its beginning up to `length` tokens after the first, which is no target."""

    unread = most = 1


def shared_rows(lengths: Sequence[int], capacity: int) -> tuple[list[int], list[int], int]:
    """Return the row of each piece, its place there, and the length of the longest row: longest first, each where it fits."""
    fills, rows, offsets = list[int](), [0] * len(lengths), [0] * len(lengths)
    for n in sorted(range(len(lengths)), key=lambda n: -lengths[n]):
        row = next((row for row, fill in enumerate(fills) if fill + lengths[n] <= capacity), len(fills))
        fills += [0] * (row == len(fills))
        rows[n], offsets[n] = row, fills[row]
        fills[row] += lengths[n]
    return rows, offsets, max(fills)


class LabelledTexts(Pieces):
    """Pieces of documents as a source: inputs (n, longest of the batch), and each piece's target, which is its document's.

    An input is the token + `shift`, and what follows a shorter text is `padding`. Of a document there are at most `max_pieces`,
    spread evenly.
    """

    least = 1

    def __init__(
        self,
        documents: Documents | Sequence[bytes | torch.Tensor],
        labels: Sequence[int] | torch.Tensor,
        length: int,
        max_pieces: int,
        shift: int = 1,
        padding: int = 0,
        which: torch.Tensor | None = None,
    ) -> None:
        self.classes, self.most = torch.as_tensor(labels), max_pieces  # of all documents: classes (m,), or other targets (m, k)
        self.shift, self.padding = shift, padding
        super().__init__(documents, length, which)

    def inputs(self, tokens: torch.Tensor) -> torch.Tensor:
        whole = max(1, -(-len(tokens) // self.length))
        pieces = whole if self.most is None else min(whole, self.most)
        return tokens[: ((pieces - 1) * whole // pieces + 1) * self.length].int() + self.shift

    def labels(self) -> torch.Tensor | None:
        """Return the classes (n,); None where targets are others."""
        return self.classes[self.which].repeat_interleave(self.groups) if self.classes.ndim == 1 else None

    def fetch(self, indices: torch.Tensor, pad_to: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
        tokens, padding, _, document = self.read(indices, pad_to)
        return tokens.add_(self.shift).masked_fill_(padding, self.padding), self.classes[self.which[document]]
