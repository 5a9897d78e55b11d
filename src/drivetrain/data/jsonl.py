"""Texts in files: JSON lines, one object on each line, and plain text; and words with a class each."""

from __future__ import annotations

import bisect
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, Self

from drivetrain.core.errors import DataError, UserError, did_you_mean, each_read, refuse
from drivetrain.core.lazy import numpy as np
from drivetrain.core.lazy import torch
from drivetrain.core.options.allowed import ColumnName
from drivetrain.core.options.option import Count, RunSpec, needs_extra
from drivetrain.core.step.source import Source
from drivetrain.data import cells
from drivetrain.data.base import IGNORE_INDEX, FromFile, Inputs, Listed, Splits, hash_fraction, hash_fractions
from drivetrain.data.listing import walk
from drivetrain.data.target_reader import TargetReader
from drivetrain.data.text import LabelledTexts, TextData, Texts, tell_cut
from drivetrain.data.tokenizer import (
    KEPT,
    BytePairs,
    Bytes,
    Document,
    Documents,
    Some,
    Tokenizer,
    Work,
    from_json,
    key_of,
    tokenized,
)
from drivetrain.data.untrusted import MAPPED, as_utf8, decode, let_go, lines_of, mapped

TOGETHER = 1024  # texts tokenized at a time, by the threads of a tokenizer
TRAINED_ON = 64 << 20  # most bytes of texts, about, for training byte pairs


class TextLine(NamedTuple):
    """One text and its class; "" for no class."""

    text: str
    label: str
    end: int = 0  # bytes of the files up to the text's end
    answers: Sequence[tuple[int, int]] = ()  # where they stand in the text of a conversation
    number: int = 0  # of its line in the file


Known = tuple[Tokenizer, TargetReader]  # the encoder of texts, and the reader of their classes


@dataclass(kw_only=True, eq=False)
class Jsonl(FromFile[Any, Known, Any], TextData):
    """Texts of a file of JSON lines. Without `label` the model learns to predict the next token, with it the text's class.

    Longer texts are cut into pieces of `length` tokens; a text with a class is read up to its first piece. Without a test
    file, the share `holdout` of the texts is held out, chosen by the hash of their content.
    """

    machine_local_keys = ("path", "test", "tokenizer_file", "cache")
    tokens = True
    max_value = None
    input_files: ClassVar[tuple[str, ...]] = (".jsonl",)
    reads_what: ClassVar[str] = "a file with one JSON object on each line"
    samples_are: ClassVar[str] = "texts"
    _one_row = False  # whether the model takes packed samples in one row
    least_token = 0  # the least context length in tokens
    instead = "set data.label to its key in the JSON objects"  # where there is no class

    text: ColumnName = "text"
    label: ColumnName | None = None
    tokenizer: Literal["auto", "bytes", "bpe", "file"] = "auto"
    vocabulary: Count = 4096
    tokenizer_file: str | None = None
    length: Count = 256
    packing: bool = False
    cache: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.targets = "tokens" if self.label is None else "class"
        self.byte_tokens = self.tokenizer in ("auto", "bytes")

    def resolve(self, run: RunSpec) -> Self:
        found = super().resolve(run)
        # Set by the task. If data.label disagrees, there is one message instead of one for each option.
        targets = next((kind for kind in ("tokens", "class") if kind in run.task.targets), found.targets)
        return found.with_values(_one_row=run.model.packs_in_one_row, targets=targets)

    def validate(self, run: RunSpec) -> Iterator[str]:
        yield from super().validate(run)
        if self.tokenizer_file and not Path(self.tokenizer_file).is_file():
            yield f"data.tokenizer_file={self.tokenizer_file} is no file"
        if (self.tokenizer == "file") != (self.tokenizer_file is not None):
            yield (
                f"data.tokenizer={self.tokenizer} and data.tokenizer_file={self.tokenizer_file or 'null'} exclude each other: "
                "a tokenizer is loaded by data.tokenizer=file data.tokenizer_file=PATH"
            )
        if not self.byte_tokens:
            yield from needs_extra("tokenizers", "text", f"data.tokenizer={self.tokenizer}")
        if self.tokenizer == "bpe" and self.vocabulary < Bytes.size:
            yield f"data.vocabulary={self.vocabulary}: the {Bytes.size} bytes are tokens of their own: set it to more"
        if self.packing and self.label is not None:
            yield "data.packing=true is for targets at each token, and data.label gives each text a class: leave one out"
        elif self.packing and not run.model.packs:
            yield "data.packing=true wants a model that keeps the texts of a row apart: set model=transformers"
        if self.label is None and self.targets == "class":
            yield f"{run.named('task')} wants a class for each text: {self.instead}"
        if self.label is not None and self.targets == "tokens":
            yield f"{run.named('task')} predicts the next token, and data.label={self.label} is a class: leave it out"
        if run.augment:
            yield f"{run.named('augment')} changes images, but {run.named('data')} is text: set augment=[]"

    def shape(self) -> tuple[int, ...]:
        return (self.length,)

    def read_inputs(self, file: Path | Iterable[bytes], data: Splits, size: int) -> Inputs:
        assert isinstance(file, Path)  # lines are texts, not JSON
        self.kept_tokenizer(data)  # refused once, not for each line
        lines = ((number, line) for number, line in lines_of(file, self.encoding) if line.strip())
        return Inputs(([f"{file}:{number}"], partial(self._encode_line, line, f"{file}", number, data)) for number, line in lines)

    def _encode_line(self, line: bytes, source: str, number: int, data: Splits, _: slice) -> torch.Tensor:
        return self.encode(self._entry(line, source, number, [("text", self.text)])[self.text], data).unsqueeze(0)

    def read(self) -> tuple[Any, Known]:
        documents, tokenizer = self._tokenized(str(self.path), None)
        return Some.all(documents, str(self.path)), (tokenizer, self._reader())

    def fractions(self, every: Any) -> np.ndarray:
        return np.asarray(every.documents.fractions())

    def learn(self, known: Known, every: Any, train: Any) -> None:
        if self.label is not None:
            known[1].learn(self._labels(every), self._labels(train))

    def read_set(self, place: str, known: Known, split: str) -> Any:
        return Some.all(self._tokenized(place, known[0])[0], place)

    def kept(self, own: Splits) -> Known:
        tokenizer = self.given_tokenizer()
        assert tokenizer is not None  # only byte pairs are trained, and the run keeps them
        return tokenizer, self._reader().of(own)

    def _reader(self) -> TargetReader:
        return TargetReader("class", [str(self.label)], "data.label")

    def _labels(self, part: Any) -> cells.Cells:
        """Return the classes of texts."""

        def lines(rows: np.ndarray) -> np.ndarray:
            numbers = np.array([line.number for line in self._read(Path(part.source))])
            return np.asarray(numbers[part.which.numpy()[rows]])

        words = cells.Words(part.documents.numbers[part.which].numpy(), list(part.documents.names))
        return cells.Cells({str(self.label): words}, part.source, lines)

    def source(self, known: Known, part: Any) -> Source:
        """Return texts to continue as a source; with `label`, texts with a class each. Raises UserError for other classes."""
        (tokenizer, reader), documents, which = known, part.documents, part.which
        if self.label is None:
            return Texts(documents, self.length, tokenizer.begin, self._packs(), which)
        classes = torch.zeros(len(documents), dtype=torch.int64)
        classes[which] = reader.read(self._labels(part))
        return LabelledTexts(documents, classes, self.length, 1, tokenizer.shift, tokenizer.padding or 0, which)

    def about(self, known: Known, sources: Sequence[tuple[str, Any]], own: Splits | None) -> dict[str, object]:
        tokenizer, reader = known
        about = {
            "shape": self.shape(), "normalize": None, "dtype": torch.int64, "files": tokenizer.files(),
            "pad_token": tokenizer.padding,
        }  # fmt: skip
        if self.label is not None:
            tell_cut(sources[0][1].lengths, self.length, len(sources[0][1]))
            return {**about, **reader.about(sources), "vocabulary": tokenizer.vocabulary}
        lengths = tokenizer.token_bytes()
        if lengths is not None and tokenizer.vocabulary > len(lengths):
            lengths = torch.cat([lengths, torch.zeros_like(lengths[:1])])  # the token before a text's first is no text
        whole = torch.arange(self.length).repeat(2, 1)
        return {
            **about, "classes": tokenizer.vocabulary, "token_bytes": lengths, "mask_token": tokenizer.mask,
            # The inputs of two samples, where they are not one tensor.
            "example": {"input_ids": torch.zeros_like(whole), "position_ids": whole} if self.packing else None,
        }  # fmt: skip

    def _packs(self) -> Literal["rows", "one row"] | None:
        return None if not self.packing else "one row" if self._one_row else "rows"

    def _tokens(self, tokenizer: Tokenizer, lines: Sequence[TextLine]) -> Iterable[torch.Tensor]:
        """Return the tokens of each text."""
        texts = [line.text for line in lines]
        return tokenizer(texts) if self.label is None else tokenizer.whole(texts, self.length)

    def _about(self) -> dict[str, object]:
        """Return the settings that change the tokens of a file."""
        return {
            "reads": type(self).__name__, "text": self.text, "label": self.label, "length": self.length,
            "encoding": self.encoding,
        }  # fmt: skip

    def _tokenized(self, place: str, tokenizer: Tokenizer | None) -> tuple[Documents, Tokenizer]:
        """Return the documents of a file, and their tokenizer: `tokenizer`, or else the training file's. Raises UserError."""
        path, tokenizer = Path(place), tokenizer or self.given_tokenizer()
        next(self._read(path))  # a file of another kind is reported before hashing all of it
        about = {
            **self._about(),
            "tokenizer": tokenizer.to_json() if tokenizer else [self.vocabulary, None if self.test else self.holdout],
        }  # fmt: skip
        documents = tokenized(self._files(path), about, self.cache, partial(self._work, path, tokenizer))
        return documents, tokenizer or from_json(documents.files[KEPT])

    def _work(self, path: Path, given: Tokenizer | None) -> Work:
        """Return the function that tokenizes a file; without a tokenizer it trains one."""
        tokenizer = given or BytePairs.trained(self._to_train_on(path), self.vocabulary)
        names = list[str]()
        number_of: dict[str, int] = {}

        def documents(start: int) -> Iterator[Document]:
            number_of.update({name: number for number, name in enumerate(names)})
            lines = islice(self._read(path), start, None)
            while batch := list(islice(lines, TOGETHER)):
                for line, tokens in zip(batch, self._tokens(tokenizer, batch), strict=True):
                    if line.label not in number_of:
                        number_of[line.label] = len(names)
                        names.append(line.label)
                    yield Document(tokens, key_of(line.text), number_of[line.label], line.end)

        return Work(documents, max(tokenizer.largest(), self.least_token), {KEPT: tokenizer.to_json()}, names)

    def _to_train_on(self, path: Path) -> Iterator[str]:
        """Yield the training texts, or a part that suffices to train a tokenizer, chosen by hashes."""
        first = 0.0 if self.test else self.holdout
        size = sum(file.stat().st_size for file in self._files(path))
        last = first + (1 - first) * min(1.0, TRAINED_ON / max(size, 1))
        return (line.text for line in self._read(path) if first <= hash_fraction(line.text) < last)

    def given_tokenizer(self) -> Tokenizer | None:
        if self.own is None and self.tokenizer == "file":
            return BytePairs.loaded(Path(str(self.tokenizer_file)))
        return None if self.own is None and self.tokenizer == "bpe" else super().given_tokenizer()

    def _files(self, path: Path) -> list[Path]:
        """Return the files of a path."""
        return [path]

    def _read(self, path: Path) -> Iterator[TextLine]:
        """Yield the lines whose text is not empty. Raises UserError."""
        end, empty = 0, True

        def read(numbered: tuple[int, bytes]) -> TextLine | None:
            nonlocal end
            number, content = numbered
            end += len(content)
            return self._line(content, str(path), number)._replace(end=end, number=number) if content.strip() else None

        for line in each_read(lines_of(path, self.encoding), read, LINES):
            if line is not None and line.text:
                empty = False
                yield line
        if empty:
            raise UserError(f"{path} has no texts under the key '{self.text}'")

    def _line(self, content: bytes, source: str, number: int) -> TextLine:
        entry = self._entry(content, source, number, [("text", self.text), ("label", self.label)])
        return TextLine(entry[self.text], "" if self.label is None else self._class(entry[self.label], f"{source}:{number}"))

    def _class(self, label: object, where: str) -> str:
        """Return the name of a class. Raises DataError."""
        if not isinstance(label, str | int):
            raise DataError(f"{where}: '{self.label}' is {type(label).__name__}: a class is a text or a whole number")
        return str(label)

    def _entry(self, content: bytes, source: str, number: int, keys: Sequence[tuple[str, str | None]]) -> dict[str, Any]:
        """Return a line's object, which has these keys of settings and a text. Raises DataError."""
        entry = self._object(content, source, number, keys)
        if not isinstance(entry[self.text], str):
            raise DataError(f"{source}:{number}: '{self.text}' is {type(entry[self.text]).__name__}, not a text")
        return {**entry, self.text: decode(entry[self.text], source, number)}

    def _object(self, content: bytes, source: str, number: int, keys: Sequence[tuple[str, str | None]]) -> dict[str, Any]:
        """Return a line's object, which has these keys of settings. Raises DataError."""
        where = f"{source}:{number}"
        text = decode(content, source, number)
        try:
            entry = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise DataError(
                f'{where}: not JSON: {error}: each line must be an object such as {{"{self.text}": "…"}} '
                "(data=text reads plain text, data=tabular a table)"
            ) from None
        if not isinstance(entry, dict):
            raise DataError(f"{where}: {type(entry).__name__}, but each line must be an object with the key {self.text}")
        lacking = ((setting, key) for setting, key in keys if key is not None and key not in entry)
        refuse((f"{where} has no '{key}' (data.{setting}): {did_you_mean(key, entry)}" for setting, key in lacking), DataError)
        return entry


LINES = "{count} lines cannot be read: mend or remove them"
PIECES = 4  # of `length` bytes in a passage, at least
LONG = 4  # times that: a longer line is cut


@dataclass(kw_only=True, eq=False)
class TextFiles(Jsonl):
    """Plain text for predicting the next token: a file, or a folder with its .txt files.

    A file is cut into passages of whole lines, a very long line at its spaces. Without test texts, the share
    `holdout` of the passages is held out, chosen by the hash of their content.
    """

    input_files = ()
    reads_what = "a .txt file, or a folder of them"
    instead = "plain text has none: set task=language_modelling, or data=jsonl"

    text: str = field(init=False, default="text")  # there are no keys
    label: str | None = field(init=False, default=None)

    def validate(self, run: RunSpec) -> Iterator[str]:
        yield from super().validate(run)
        if "tokens" not in run.loss.takes and "class" not in run.task.targets:
            yield f"{run.named('data')} is for predicting the next token: set task=language_modelling, which sets model and loss"

    def exists(self, path: Path) -> bool:
        return path.is_file() or path.is_dir()

    def _files(self, path: Path) -> list[Path]:
        return sorted(path / name for name in walk(str(path), (".txt",)).every()) if path.is_dir() else [path]

    def _read(self, path: Path) -> Iterator[TextLine]:
        end = 0
        for file in self._files(path):
            for passage, size in self._passages(file):
                end += size
                yield TextLine(passage, "", end)
        if not end:
            raise UserError(f"{path} holds no .txt file with a text" if path.is_dir() else f"{path} is empty")

    def _passages(self, file: Path) -> Iterator[tuple[str, int]]:
        """Yield the passages of a file, and their bytes: whole lines, or parts of a long one that end at a space.

        Raises DataError.
        """
        content, least = as_utf8(mapped(file), self.encoding, str(file)), PIECES * self.length
        start, line = 0, 1
        while start < len(content):
            ends = (content.find(sign, start + least - 1, start + LONG * least) + 1 for sign in (b"\n", b" "))
            end = min(next(filter(None, ends), start + LONG * least), len(content))
            while end < len(content) and content[end] & 0xC0 == 0x80:  # within a character
                end -= 1
            passage = content[start:end]
            yield decode(passage, str(file), line).replace("\r\n", "\n").replace("\r", "\n"), end - start
            if start // MAPPED < end // MAPPED:
                let_go(content)
            start, line = end, line + passage.count(b"\n")


class Tagged(NamedTuple):
    """The words of a text, and the class of each."""

    words: list[str]
    tags: list[str]
    source: str
    line: int


@dataclass(kw_only=True, eq=False)
class Words(Jsonl):
    """Texts with a class for each word: lines such as {"tokens": ["the", "Nile"], "tags": ["O", "RIVER"]}.

    A word's class is that of its first token. Its other tokens, and the tokenizer's special ones, have no class. Longer texts are
    read up to `length` tokens.
    """

    reads_what = "a file whose lines are JSON objects with a list of words and a list of their classes"

    text: ColumnName = "tokens"
    label: ColumnName | None = "tags"
    tokenizer: Literal["auto", "bytes", "file"] = "auto"
    vocabulary: int = field(init=False, default=4096)
    packing: bool = field(init=False, default=False)
    cache: str | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.targets = "words"

    def validate(self, run: RunSpec) -> Iterator[str]:
        yield from super().validate(run)
        if run.model.tokens:
            yield f"{run.named('data')} wants a model that reads a text as a whole: set model=transformers, with model.name=bert"

    def encode(self, text: str, data: Splits) -> torch.Tensor:
        """Return the tokens of a text's words, which spaces separate."""
        return torch.tensor(tokens_of(text.split(), self.kept_tokenizer(data), self.length)[0] or [0])

    def read(self) -> tuple[Listed[Tagged], Known]:
        tokenizer = self.given_tokenizer()
        assert tokenizer is not None  # only byte pairs are trained
        return self.read_set(str(self.path)), (tokenizer, self._reader())

    def fractions(self, every: Listed[Tagged]) -> np.ndarray:
        return hash_fractions((" ".join(text.words) for text in every), len(every))

    def read_set(self, place: str, known: Known | None = None, split: str = "") -> Listed[Tagged]:
        """Return the texts of a file that have words. Raises DataError."""
        lines = ((number, content) for number, content in lines_of(Path(place), self.encoding) if content.strip())
        texts = each_read(lines, lambda line: self._tagged(line[1], place, line[0]), LINES)
        if not (found := Listed(text for text in texts if text.words)):
            raise UserError(f"{place} has no texts under the key '{self.text}'")
        return found

    def _labels(self, part: Listed[Tagged]) -> cells.Cells:
        words = cells.Words.each(tag for text in part for tag in text.tags)
        lines = np.repeat([text.line for text in part], [len(text.tags) for text in part])
        return cells.Cells({str(self.label): words}, part[0].source, lines.__getitem__)

    def source(self, known: Known, part: Listed[Tagged]) -> TaggedTexts:
        classes = torch.split(known[1].read(self._labels(part)), [len(text.tags) for text in part])
        return TaggedTexts([text.words for text in part], classes, known[0], self.length)

    def _tagged(self, content: bytes, source: str, number: int) -> Tagged:
        entry, where = self._object(content, source, number, [("text", self.text), ("label", self.label)]), f"{source}:{number}"
        words, tags = entry[self.text], entry[str(self.label)]
        if not all(isinstance(each, list) for each in (words, tags)) or len(words) != len(tags):
            raise DataError(
                f"{where}: '{self.text}' must be a list of words, and '{self.label}' a list of a class for each of them"
            )
        if wrong := [word for word in words if not isinstance(word, str)]:
            raise DataError(f"{where}: '{self.text}' has a {type(wrong[0]).__name__} among its words")
        return Tagged(words, [self._class(tag, where) for tag in tags], source, number)


def tokens_of(words: Sequence[str], tokenizer: Tokenizer, length: int) -> tuple[list[int], list[int]]:
    """Return at most `length` tokens of a text, and each token's word number; -1: none."""
    begins, at = [], 0
    for word in words:
        begins.append(at)
        at += len(word) + 1
    tokens, ends = tokenizer.with_ends(" ".join(words), length)
    return tokens, [-1 if end == 0 else bisect.bisect_right(begins, end - 1) - 1 for end in ends]


class TaggedTexts(Source):
    """Texts as a source: tokens (n, longest of the batch), and for the first token of each word its class, -100 for others."""

    def __init__(
        self, texts: Sequence[Sequence[str]], classes: Sequence[torch.Tensor], tokenizer: Tokenizer, length: int
    ) -> None:
        self.padding, self._rows = tokenizer.padding or 0, list[tuple[torch.Tensor, torch.Tensor]]()
        self.texts = [" ".join(words) for words in texts]
        for words, tags in zip(texts, classes, strict=True):
            tokens, of = tokens_of(words, tokenizer, length)
            words_of = torch.tensor(of)
            first = (words_of >= 0) & words_of.diff(prepend=torch.tensor([-1])).bool()
            self._rows.append((torch.tensor(tokens), torch.where(first, tags[words_of], IGNORE_INDEX)))
        sizes = [len(tokens) for tokens, _ in self._rows]
        self.lengths, self._longest = torch.tensor(sizes), max(sizes)

    def __len__(self) -> int:
        return len(self._rows)

    def identities(self) -> Sequence[str]:
        return self.texts

    def fetch(self, indices: torch.Tensor, pad_to: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
        rows = [self._rows[i] for i in indices.tolist()]
        longest = min(-(-max(len(x) for x, _ in rows) // pad_to) * pad_to, self._longest)

        def padded(parts: Sequence[torch.Tensor], value: int) -> torch.Tensor:
            return torch.stack([torch.nn.functional.pad(part, (0, longest - len(part)), value=value) for part in parts])

        return padded([x for x, _ in rows], self.padding), padded([y for _, y in rows], IGNORE_INDEX)
