"""Texts to tokens, by bytes or byte pairs: in memory, or for larger files once, into mapped files of the cache.

The cache's key is the content of the texts and the settings of their tokens. So a repeated set is not tokenized again, and a
changed file is.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import logging
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from drivetrain.core.errors import UserError
from drivetrain.core.lazy import numpy as np
from drivetrain.core.lazy import torch
from drivetrain.core.machine.files import one_at_a_time, parse_json, read_text
from drivetrain.core.machine.paths import user_cache
from drivetrain.core.typed import fits
from drivetrain.data.stored import END, KEY, LABEL, TEXTS, Sample, StoredSamples, damaged, read_index, write_index, write_set
from drivetrain.data.untrusted import MOST_GROWTH, digest_of, growth

KEPT = "tokenizer.json"  # in the run's directory
SETTINGS = "tokenizer_config.json"  # in the folder of a model's own tokenizer
MOST_DIGITS = 7  # of a token's number in a tokenizer.json
LISTS = ("vocab", "merges")  # of a model of byte pairs; the rest are settings
SWITCHES = dict[str, bool | None]


class Tokenizer(ABC):
    """Turns texts into tokens, numbers from 0 to `size` − 1. The base of the data's own tokenizers.

    With them a special token precedes a text's first. In texts with a class 0 pads, and tokens are 1 larger.
    """

    size: int
    shift: int = 1  # added to the tokens of a text with a class
    mask: int | None = None  # the token that hides another one from the model, if the tokenizer has one
    padding: int | None = None  # the tokenizer's own padding token for such texts, if it has one

    @property
    def begin(self) -> int:
        """The token before a text's first."""
        return self.size

    @property
    def vocabulary(self) -> int:
        """The number of tokens in the model's vocabulary."""
        return self.size + 1

    def largest(self) -> int:
        """Return the largest token."""
        return self.size - 1

    def token_bytes(self) -> torch.Tensor | None:
        """Return the bytes of text in each token (size,); None: a token is a byte."""
        return None

    @abstractmethod
    def __call__(self, texts: Sequence[str]) -> list[torch.Tensor]:
        """Return each text's tokens, int (length,)."""

    @abstractmethod
    def located(self, texts: Sequence[str]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield each text's tokens, int (length,), and the place of each one's first character in the text."""

    def written(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, special ones included."""
        return self.text([token for token in tokens if token < self.size])

    def whole(self, texts: Sequence[str], length: int) -> list[torch.Tensor]:
        """Return the tokens of texts with a class each, cut to the model's length."""
        return self(texts)

    @abstractmethod
    def with_ends(self, text: str, length: int) -> tuple[list[int], list[int]]:
        """Return at most `length` tokens of a text read as a whole, and the end of each in it; 0: not part of the text."""

    @abstractmethod
    def text(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens."""

    @abstractmethod
    def to_json(self) -> str:
        """Return the tokenizer as text, for the run's files."""

    def files(self) -> dict[str, str]:
        """Return its files that a run keeps: name → text."""
        return {KEPT: self.to_json()}


class Bytes(Tokenizer):
    """A token for each byte of a text's UTF-8."""

    size = 256

    def __call__(self, texts: Sequence[str]) -> list[torch.Tensor]:
        encoded = [text.encode(errors="surrogateescape") for text in texts]
        all_bytes = torch.frombuffer(bytearray(b"".join(encoded) + b"."), dtype=torch.uint8)[:-1]  # torch takes no empty buffer
        return list(torch.split(all_bytes, [len(content) for content in encoded]))

    def with_ends(self, text: str, length: int) -> tuple[list[int], list[int]]:
        ends = [end for end, character in enumerate(text, 1) for _ in character.encode()]
        return [byte + self.shift for byte in text.encode()[:length]], ends[:length]

    def located(self, texts: Sequence[str]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for text, tokens in zip(texts, self(texts), strict=True):
            sizes = torch.tensor([len(character.encode()) for character in text], dtype=torch.int64)
            yield tokens.int(), torch.arange(len(text)).repeat_interleave(sizes)

    def text(self, tokens: Sequence[int]) -> str:
        return bytes(tokens).decode(errors="replace")

    def to_json(self) -> str:
        return '{"model": {"type": "bytes"}}\n'


class BytePairs(Tokenizer):
    """A tokenizer of the tokenizers library (Hugging Face), described by its file tokenizer.json."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.tokenizer.no_padding()
        self.tokenizer.no_truncation()
        self.size: int = tokenizer.get_vocab_size()

    def __call__(self, texts: Sequence[str]) -> list[torch.Tensor]:
        return self._encoded(texts, False)

    def _encodings(self, texts: Sequence[str], special: bool) -> list[Any]:
        try:
            with _errors_of_the_library():
                return list(self.tokenizer.encode_batch(list(texts), add_special_tokens=special))
        except ValueError as error:
            raise UserError(f"the tokenizer cannot encode a text: {error}") from None

    def located(self, texts: Sequence[str]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for found in self._encodings(texts, False):
            yield torch.tensor(found.ids, dtype=torch.int32), torch.tensor([begin for begin, _ in found.offsets])

    def written(self, tokens: Sequence[int]) -> str:
        return str(self.tokenizer.decode([token for token in tokens if token < self.size], skip_special_tokens=False))

    def _encoded(self, texts: Sequence[str], special: bool) -> list[torch.Tensor]:
        encoded = [text.ids for text in self._encodings(texts, special)]
        tokens = torch.tensor(list(itertools.chain.from_iterable(encoded)), dtype=torch.int32)
        return list(torch.split(tokens, [len(text) for text in encoded]))

    def largest(self) -> int:
        return int(max(self.tokenizer.get_vocab().values()))

    def with_ends(self, text: str, length: int) -> tuple[list[int], list[int]]:
        with self._cut(length):
            found = self.tokenizer.encode(text, add_special_tokens=self.shift == 0)
        parts = zip(found.special_tokens_mask, found.offsets, strict=True)
        return [token + self.shift for token in found.ids], [0 if special else end for special, (_, end) in parts]

    @contextlib.contextmanager
    def _cut(self, length: int) -> Iterator[None]:
        """Within the context texts are cut to a number of tokens. Raises UserError if nothing would be left of them."""
        around = self.tokenizer.num_special_tokens_to_add(is_pair=False) if self.shift == 0 else 0
        if length <= around:
            raise UserError(f"data.length={length}: the tokenizer puts {around} tokens around each text: set it to more")
        self.tokenizer.enable_truncation(length)
        try:
            yield
        finally:
            self.tokenizer.no_truncation()

    def token_bytes(self) -> torch.Tensor | None:
        texts = (self.tokenizer.decode([token]) for token in range(self.size))
        if self.tokenizer.decoder is None or "ByteLevel" not in type(self.tokenizer.decoder).__name__:
            return torch.tensor([max(1, len(text.encode())) for text in texts])
        # A byte-level token has one character for each of its bytes.
        return torch.tensor([len(self.tokenizer.id_to_token(token)) for token in range(self.size)])

    def text(self, tokens: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(tokens)))

    def to_json(self) -> str:
        return str(self.tokenizer.to_str())

    @classmethod
    def trained(cls, texts: Iterable[str], size: int) -> BytePairs:
        """Return a byte-level BPE tokenizer of at most `size` tokens, trained on texts: the same texts give the same one."""
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()  # all bytes: no text has an unknown token
        trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False)
        tokenizer.train_from_iterator(texts, trainer)
        return cls(tokenizer)

    @classmethod
    def loaded(cls, path: Path, key: str = "data.tokenizer_file") -> BytePairs:
        """Return the tokenizer of a file, such as tokenizer.json. Raises UserError."""
        from tokenizers import Tokenizer

        try:
            text = read_text(path.resolve())
            if far := re.search(rf'"\s*:\s*(\d{{{MOST_DIGITS + 1},}})', text):  # the library allocates all smaller numbers
                raise ValueError(f"a number of {len(far[1])} digits, and those of tokens have at most {MOST_DIGITS}")
            with _errors_of_the_library():
                made = Tokenizer.from_str(text)
                steps = [json.loads(part.__getstate__()) for part in (made.normalizer, made.decoder) if part is not None]
            if (times := growth(steps)) > MOST_GROWTH:
                raise ValueError(f"it may make a text {times:,.0f} times as long, and at most {MOST_GROWTH:,} times is good")
            return BytePairs(made)
        except (OSError, ValueError) as error:
            raise UserError(f"{key}={path} is no tokenizer of the tokenizers library: {error}") from None


class OfModel(BytePairs):
    """The tokenizer of a model's weights, with the special tokens of its settings (tokenizer_config.json).

    A text with a class gets the tokenizer's tokens around a text, such as [CLS] and [SEP].
    """

    shift = 0

    def __init__(self, tokenizer: Any, settings: Mapping[str, object]) -> None:
        super().__init__(tokenizer)
        self.settings = settings
        found = [self._token(settings.get(f"{name}_token")) for name in ("bos", "eos", "cls", "pad", "eos")]
        self._begin = next((token for token in found[:3] if token is not None), 0)
        self.mask = self._token(settings.get("mask_token"))
        self.padding = next((token for token in found[3:] if token is not None), 0)

    def _token(self, named: object) -> int | None:
        text = named.get("content") if isinstance(named, dict) else named
        return self.tokenizer.token_to_id(text) if isinstance(text, str) else None

    @property
    def begin(self) -> int:
        return self._begin

    @property
    def vocabulary(self) -> int:
        return self.size

    def files(self) -> dict[str, str]:
        return {**super().files(), SETTINGS: json.dumps(self.settings)}

    def whole(self, texts: Sequence[str], length: int) -> list[torch.Tensor]:
        with self._cut(length):
            return self._encoded(texts, True)

    @classmethod
    def read(cls, path: Path, settings: Mapping[str, object]) -> OfModel:
        """Return the tokenizer of a model's file tokenizer.json, and its settings. Raises UserError."""
        return cls(BytePairs.loaded(path, "model.name").tokenizer, settings)


def from_json(text: str, own_file: Path | None = None) -> Tokenizer:
    """Return the tokenizer that `to_json` wrote. Raises ValueError for one with parts that drivetrain does not train.

    A run may be a stranger's, and some parts of the library take any time and memory, or crash. A text with such parts is read
    only if the operator's own tokenizer file has the same content.
    """
    if text == Bytes().to_json():
        return Bytes()
    if own_file is not None and own_file.is_file() and (own := BytePairs.loaded(own_file)).to_json() == text:
        return own
    if (wrong := _foreign_part(parse_json(text))) is not None:
        raise ValueError(f"its {wrong} is none that drivetrain trains: give the file that it was by data.tokenizer_file")
    from tokenizers import Tokenizer

    with _errors_of_the_library():
        return BytePairs(Tokenizer.from_str(text))


def _foreign_part(content: object) -> str | None:
    """The first part of a file of the tokenizers library that `BytePairs.trained` would not make."""
    if not isinstance(content, dict):
        return "content"
    good = {name: not part for name, part in content.items() if name != "version"}  # most are null
    good |= {name: _is_plain(content.get(name), "ByteLevel") for name in ("pre_tokenizer", "decoder")}
    good["model"] = _is_byte_pairs(content.get("model"))
    return next((name for name, is_good in good.items() if not is_good), None)


def _is_byte_pairs(model: object) -> bool:
    if not isinstance(model, dict):
        return False
    tokens: Any = model.get("vocab")
    if not (fits(tokens, dict[str, int]) and sorted(tokens.values()) == list(range(len(tokens)))):
        return False
    return isinstance(model.get("merges"), list) and _is_plain({k: v for k, v in model.items() if k not in LISTS}, "BPE")


def _is_plain(part: object, kind: str) -> bool:
    """True if it is this part, and each of its settings is on, off or null."""
    return isinstance(part, dict) and part.get("type") == kind and fits({k: v for k, v in part.items() if k != "type"}, SWITCHES)


@contextlib.contextmanager
def _errors_of_the_library() -> Iterator[None]:
    """Raise ValueError for the library's errors: plain Exceptions, and PanicException, which is not an Exception."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise ValueError(next(iter(str(error).splitlines()), type(error).__name__)) from None


LARGE = 16 << 20  # bytes of text from which tokens are kept in files
SET = "texts"  # the name of the one set in a folder

logger = logging.getLogger(__name__)


class Document(NamedTuple):
    """A text's tokens (n,) and its key, which is `key_of` it."""

    tokens: torch.Tensor
    key: int
    number: int = 0  # of its class, or another whole number
    end: int = 0  # bytes of the files up to its end


@dataclass
class Work:
    """The work that makes the documents of some files, from a number on."""

    documents: Callable[[int], Iterator[Document]]
    largest: int  # possible token; tokens may also be negative, down to -largest - 1
    files: Mapping[str, str] = field(default_factory=dict)  # name → text, kept with the tokens: a tokenizer
    names: list[str] = field(default_factory=list)  # of the classes: `documents` adds to them

    def dtype(self) -> torch.dtype:
        """Return the smallest dtype for all tokens; bytes are unsigned."""
        return torch.uint8 if self.largest < 2**8 else torch.int16 if self.largest < 2**15 else torch.int32


class Documents:
    """The tokens of documents, one after the other in memory or in a mapped file."""

    def __init__(
        self, content: torch.Tensor | StoredSamples, dtype: torch.dtype, sizes: torch.Tensor, keys: torch.Tensor | None = None,
        numbers: torch.Tensor | None = None, names: Sequence[str] = (), files: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        self.content, self.dtype, self.sizes = content, dtype, sizes  # sizes (m,): the number of tokens of each
        self.begins = sizes.cumsum(0) - sizes  # (m,) the begin of each in `tokens`
        self.keys = keys  # (m,) int64
        self.numbers = torch.zeros_like(sizes) if numbers is None else numbers  # (m,)
        self.names, self.files = names, files or {}  # names of the classes

    def __len__(self) -> int:
        return len(self.sizes)

    @property
    def tokens(self) -> torch.Tensor:
        """The tokens of all."""
        return self.content if isinstance(self.content, torch.Tensor) else self.content.mapped[1].view(self.dtype)

    def check(self, which: torch.Tensor) -> None:
        """Verify documents before reading. Raises DataError."""
        if isinstance(self.content, StoredSamples):
            self.content.check(which)

    def fractions(self) -> np.ndarray:
        """Return a number in [0, 1) for each document (m,), which depends only on its text."""
        assert self.keys is not None
        return np.asarray(self.keys.numpy().view(np.uint64).astype(np.float64) / 2**64)

    @classmethod
    def of(cls, contents: Sequence[bytes | torch.Tensor], keys: torch.Tensor | None = None) -> Documents:
        """Return documents in memory, with bytes or whole numbers as tokens."""
        parts = [torch.frombuffer(bytearray(each), dtype=torch.uint8) if isinstance(each, bytes) else each for each in contents]
        tokens = torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8)
        return cls(tokens, tokens.dtype, torch.tensor([len(part) for part in parts], dtype=torch.int64), keys)


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


def key_of(text: str) -> int:
    """Return the key of a text, 64 bits with a sign: the same one in every run, with every tokenizer."""
    return int.from_bytes(hashlib.sha256(text.encode(errors="surrogateescape")).digest()[:8], "big", signed=True)


def tokenized(paths: Sequence[Path], about: Mapping[str, object], cache: str | None, prepare: Callable[[], Work]) -> Documents:
    """Return the documents of some files. Their tokens follow from the content and `about`; `cache` is the setting data.cache.

    `prepare` is called where the cache lacks them. Raises UserError.
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
    return Documents(torch.cat(tokens), work.dtype(), sizes, keys, numbers, work.names, work.files)


def _opened(folder: Path) -> Documents:
    """Return the documents of a folder. Raises UserError if it is damaged."""
    index = read_index(folder, TEXTS)
    if index["key"] != folder.name:
        raise damaged(folder / "index.json", "is that of other texts")
    table, dtype = StoredSamples.rows(folder, index, SET), getattr(torch, index["dtype"])
    if table.shape[1] != KEY + 1:
        raise damaged(folder / f"{SET}.table", "is no table of texts")
    content = StoredSamples(folder / f"{SET}.data", table, verify=True)
    sizes = (table[:, END] - content.begins) // dtype.itemsize
    return Documents(content, dtype, sizes, table[:, KEY], table[:, LABEL], index["names"], index["files"])


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
            "files": dict(work.files), "splits": {SET: entry}, "key": folder.name,
        })  # fmt: skip


def _about(index: Path) -> object:
    """Return a description of a folder's tokenized content; None if it cannot be read."""
    try:
        return json.loads(read_text(index))["about"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
