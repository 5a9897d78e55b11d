"""Texts as tokens: in memory, or of larger files tokenized once into files of the cache, which are mapped into memory.

They are kept by the content of the texts and by what decides their tokens. A set that is used again is not tokenized again, and
a file that has changed is.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from drivetrain.core.errors import UserError
from drivetrain.core.files import one_at_a_time, read_text
from drivetrain.core.lazy import numpy as np
from drivetrain.core.lazy import torch
from drivetrain.core.paths import user_cache
from drivetrain.data.stored import END, KEY, LABEL, TEXTS, Sample, Stored, damaged, read_index, write_index, write_set
from drivetrain.data.untrusted import digest_of

LARGE = 16 << 20  # bytes of text, from which tokens are kept in files
SET = "texts"  # the name of the one set in a folder

logger = logging.getLogger(__name__)


class Document(NamedTuple):
    """A text's tokens (n,) and its key, which is `key_of` it."""

    tokens: torch.Tensor
    key: int
    number: int = 0  # of its class, or whatever whole number belongs to it
    end: int = 0  # bytes of the files up to its end


@dataclass
class Work:
    """The work that makes the documents of some files: those from a number on."""

    documents: Callable[[int], Iterator[Document]]
    largest: int  # token that there can be; tokens may also be below 0, down to -largest - 1
    files: Mapping[str, str] = field(default_factory=dict)  # name → text, kept with the tokens: a tokenizer
    names: list[str] = field(default_factory=list)  # of the classes: `documents` adds to them

    def dtype(self) -> torch.dtype:
        """Return the smallest type of all tokens; that of bytes has none below 0."""
        return torch.uint8 if self.largest < 2**8 else torch.int16 if self.largest < 2**15 else torch.int32


class Documents:
    """The tokens of documents, one after the other in memory or in a mapped file."""

    names: Sequence[str] = ()  # of the classes
    files: Mapping[str, str] = {}

    def __init__(self, content: torch.Tensor | Stored, dtype: torch.dtype, sizes: torch.Tensor) -> None:
        self.content, self.dtype, self.sizes = content, dtype, sizes  # sizes (m,): the number of tokens of each
        self.begins = sizes.cumsum(0) - sizes  # (m,) where each begins in `tokens`
        self.keys: torch.Tensor | None = None  # (m,) int64
        self.numbers = torch.zeros_like(sizes)  # (m,)

    def __len__(self) -> int:
        return len(self.sizes)

    @property
    def tokens(self) -> torch.Tensor:
        """The tokens of all."""
        return self.content if isinstance(self.content, torch.Tensor) else self.content.mapped[1].view(self.dtype)

    def check(self, which: torch.Tensor) -> None:
        """Verify documents that are about to be read. Raises DataError."""
        if isinstance(self.content, Stored):
            self.content.check(which)

    def fractions(self) -> np.ndarray:
        """Return a number in [0, 1) for each document (m,), which depends on its text alone."""
        assert self.keys is not None
        return np.asarray(self.keys.numpy().view(np.uint64).astype(np.float64) / 2**64)

    @classmethod
    def of(cls, contents: Sequence[bytes | torch.Tensor]) -> Documents:
        """Return documents in memory, whose tokens are bytes or whole numbers."""
        parts = [as_tokens(content) for content in contents]
        tokens = torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8)
        return cls(tokens, tokens.dtype, torch.tensor([len(part) for part in parts], dtype=torch.int64))


@dataclass
class Some:
    """Some documents of a file."""

    documents: Documents
    which: torch.Tensor  # (n,) their numbers
    source: str  # the file

    @classmethod
    def all(cls, documents: Documents, source: str) -> Some:
        """Return all of them."""
        return cls(documents, torch.arange(len(documents)), source)

    def __len__(self) -> int:
        return len(self.which)

    def subset(self, indices: torch.Tensor) -> Some:
        """Return some of these."""
        return Some(self.documents, self.which[indices], self.source)


def as_tokens(content: bytes | torch.Tensor) -> torch.Tensor:
    """Return a document's tokens: each byte of bytes is one."""
    return torch.frombuffer(bytearray(content), dtype=torch.uint8) if isinstance(content, bytes) else content


def key_of(text: str) -> int:
    """Return the key of a text, 64 bits with a sign: the same one in every run, with every tokenizer."""
    return int.from_bytes(hashlib.sha256(text.encode(errors="surrogateescape")).digest()[:8], "big", signed=True)


def tokenized(paths: Sequence[Path], about: Mapping[str, object], cache: str | None, prepare: Callable[[], Work]) -> Documents:
    """Return the documents of some files. `about` decides their tokens beside the content; `cache` is the setting data.cache.

    `prepare` is asked where they are not in the cache already. Raises UserError.
    """
    size = sum(path.stat().st_size for path in paths)
    if size < LARGE:
        return _in_memory(prepare())
    kept = user_cache()
    if cache is None and kept is None:
        raise UserError("there is no folder to keep the tokens of large texts in: set data.cache to one")
    content = hashlib.sha256("".join(map(digest_of, paths)).encode()).hexdigest()
    settings = json.dumps([[str(path.absolute()) for path in paths], about], sort_keys=True)
    key = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()
    folder = Path(os.path.expanduser(cache)) if cache else Path(str(kept)) / "texts"
    folder /= f"{content[:24]}-{key[:8]}"
    if not (folder / "index.json").exists():
        _write(folder, settings, prepare, size)
    return _opened(folder)


def _in_memory(work: Work) -> Documents:
    rows = [(d.tokens.to(work.dtype()), len(d.tokens), d.key, d.number) for d in work.documents(0)]
    tokens, *columns = zip(*rows, strict=True)
    sizes, keys, numbers = map(torch.tensor, columns)
    made = Documents(torch.cat(tokens), work.dtype(), sizes)
    made.keys, made.numbers, made.names, made.files = keys, numbers, work.names, work.files
    return made


def _opened(folder: Path) -> Documents:
    """Return the documents of a folder. Raises UserError where it is damaged."""
    index = read_index(folder, TEXTS)
    table, dtype = Stored.rows(folder, index, SET), getattr(torch, index["dtype"])
    if table.shape[1] != KEY + 1:
        raise damaged(folder / f"{SET}.table", "is no table of texts")
    content = Stored(folder / f"{SET}.data", table, verify=True)
    made = Documents(content, dtype, (table[:, END] - content.begins) // dtype.itemsize)
    made.keys, made.numbers, made.names, made.files = table[:, KEY], table[:, LABEL], index["names"], index["files"]
    return made


def _write(folder: Path, about: str, prepare: Callable[[], Work], size: int) -> None:
    """Tokenize into a folder: one process of a machine does it, and the others wait. Raises UserError."""
    with ExitStack() as alone:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            alone.enter_context(one_at_a_time(folder / ".lock"))
        except OSError as error:
            raise UserError(f"{folder} cannot be written ({error.strerror}): set data.cache to a folder for tokens") from None
        if (folder / "index.json").exists():
            return
        first = json.loads(about)[0][0]
        logger.info("%s: its %.0f MiB are tokenized once, into %s", first, size / 2**20, folder)
        if changed := [other for other in folder.parent.glob("*/index.json") if _about(other) == about]:
            logger.warning("%s has changed since it was tokenized: %s is of no use any more", first, changed[0].parent)
        work, said = prepare(), 0

        def samples(start: int) -> Iterator[Sample]:
            nonlocal said
            for document in work.documents(start):
                if (tenth := 10 * document.end // size) > said:
                    logger.info("%s: %d %% are tokenized", first, 10 * tenth)
                    said = tenth
                yield document.tokens.to(work.dtype()).numpy().tobytes(), document.number, document.key

        entry = write_set(folder, SET, about, samples, lambda done: None, work.names)
        write_index(folder, {
            "kind": TEXTS[0], "dtype": str(work.dtype()).removeprefix("torch."), "names": work.names, "about": about,
            "files": dict(work.files), "splits": {SET: entry},
        })  # fmt: skip


def _about(index: Path) -> object:
    """Return what was tokenized into a folder; None where that cannot be read."""
    try:
        return json.loads(read_text(index))["about"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
