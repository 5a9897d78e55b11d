"""Texts in files: JSON lines, one object on each line, and plain text."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, Self

from drivetrain.core.allowed import ColumnName, FileName
from drivetrain.core.errors import DataError, OperatorGives, UserError, did_you_mean
from drivetrain.core.lazy import torch
from drivetrain.core.option import Count, RunSpec, needs_extra
from drivetrain.core.order import Sampling
from drivetrain.core.targets import TargetKind
from drivetrain.core.trees import Tree
from drivetrain.data.base import WHOLE, Fraction, Inputs, Sets, Splits, beside, expanded, hash_fraction
from drivetrain.data.listing import walk
from drivetrain.data.text import LabelledTexts, TextData, Texts, tell_cut
from drivetrain.data.tokenized import Document, Documents, Work, key_of, tokenized
from drivetrain.data.tokenizer import KEPT, BytePairs, Bytes, Tokenizer, from_json
from drivetrain.data.untrusted import MAPPED, Encoding, as_utf8, decode, let_go, lines_of, mapped

TOGETHER = 1024  # texts that are tokenized at a time, by the threads of a tokenizer
TRAINED_ON = 64 << 20  # bytes of texts, about, that byte pairs are trained on at most


class Line(NamedTuple):
    """One text and its class; "" for no class."""

    text: str
    label: str
    end: int = 0  # bytes of the files up to its end
    answers: Sequence[tuple[int, int]] = ()  # where they stand in the text of a conversation


class Jsonl(TextData):
    """Texts of a file of JSON lines. Without `label` the model learns to predict the next token, with it the text's class.

    Longer texts are cut into pieces of `length` tokens; of a text that has a class only the first piece is read. Without a
    file of its own for the test, the share `holdout` of the texts is held out, chosen by the hash of their content.
    """

    machine_local_keys = ("path", "test", "tokenizer_file", "cache")
    tokens = True
    max_value = None
    input_files: ClassVar[tuple[str, ...]] = (".jsonl",)
    reads_what = "a file with one JSON object on each line"
    _one_row = False  # whether the model takes packed samples in one row
    ships = False  # there are texts without a path
    least_token = 0  # to which there has to be room for tokens
    instead = "set data.label to its key in the JSON objects"  # where there is no class

    def __init__(
        self,
        path: str | None = None,
        test: str | dict[str, str] | None = None,
        text: ColumnName = "text",
        label: ColumnName | None = None,
        tokenizer: Literal["auto", "bytes", "bpe", "file"] = "auto",
        vocabulary: Count = 4096,
        tokenizer_file: str | None = None,
        length: Count = 256,
        packing: bool = False,
        encoding: Encoding | None = None,
        holdout: Fraction = 0.1,
        validation: Fraction | FileName | Sets | None = 0.1,
        cache: str | None = None,
        drop_last: bool = True,
        order: Sampling = "shuffled",
    ) -> None:
        self.path, self.test, self.tokenizer_file, self.cache = (expanded(p) for p in (path, test, tokenizer_file, cache))
        self.text, self.label, self.tokenizer, self.vocabulary = text, label, tokenizer, vocabulary
        self.length, self.packing, self.encoding = length, packing, encoding
        self.holdout, self.validation, self.drop_last, self.order = holdout, validation, drop_last, order
        self.targets: TargetKind = "tokens" if label is None else "class"
        self.byte_tokens = tokenizer in ("auto", "bytes")

    def resolve(self, run: RunSpec) -> Self:
        found = super().resolve(run)
        # What the task wants: where data.label says another thing, one message says so, and not one of each option.
        targets = next((kind for kind in ("tokens", "class") if kind in run.task.targets), found.targets)
        return found.with_values(_one_row=run.model.packs_in_one_row, targets=targets)

    def validate(self, run: RunSpec) -> Iterator[str]:
        if not self.path and not self.ships:
            yield OperatorGives(f"{run.named('data')} needs data.path, {self.reads_what}")
        for knob, path in {"path": self.path, "test": self.test, "validation": beside(self.path, self.validation)}.items():
            if path and not self.exists(Path(path)):
                yield f"data.{knob}={path} is no file"
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

    def exists(self, path: Path) -> bool:
        """Whether there is something to read at a path."""
        return path.is_file()

    def shape(self) -> tuple[int, ...]:
        return (self.length,)

    def read_inputs(self, file: Path | Iterable[bytes], data: Splits, size: int) -> Inputs:
        assert isinstance(file, Path)  # lines are texts, not JSON
        self.kept_tokenizer(data)  # refused once, and not for each line
        lines = ((number, line) for number, line in lines_of(file, self.encoding) if line.strip())
        return Inputs((1, partial(self._encode_line, line, f"{file}", number, data)) for number, line in lines)

    def _encode_line(self, line: bytes, source: str, number: int, data: Splits, _: slice) -> torch.Tensor:
        return self.encode(self._entry(line, source, number, [("text", self.text)])[self.text], data).unsqueeze(0)

    def load(self, device: torch.device) -> Splits:
        own = beside(self.path, self.validation)
        train, tokenizer = self._tokenized(Path(str(self.path)), None)
        others = [self._tokenized(Path(path), tokenizer)[0] for path in (self.test, own) if path]
        apart = torch.full((len(train),), False) if self.test else train.fractions() < self.holdout
        sets = [(train, (~apart).nonzero().flatten()), *((each, torch.arange(len(each))) for each in others)]
        if not self.test:
            sets.insert(1, (train, apart.nonzero().flatten()))
        if not all(len(which) for _, which in sets):
            train_texts, test_texts = (len(which) for _, which in sets[:2])
            raise UserError(
                f"{self.path} gives {train_texts} training and {test_texts} test texts: set data.test or data.holdout"
            )
        names = sorted(train.names[number] for number in train.numbers[sets[0][1]].unique().tolist())
        return self._splits(sets, tokenizer, names, f"{self.test or self.path}: no training text has the class")

    def load_whole(self, own: Splits) -> Splits:
        path = self.other_file()
        documents, tokenizer = self._tokenized(path, None)
        names = sorted(documents.names) if own.names is None else list(own.names)
        whole = (documents, torch.arange(len(documents)))
        return replace(
            self._splits([whole] * 2, tokenizer, names, f"{path} has classes that the run does not know:"), origins=WHOLE
        )

    def _splits(
        self, sets: Sequence[tuple[Documents, torch.Tensor]], tokenizer: Tokenizer, names: list[str], foreign: str
    ) -> Splits:
        """Return some documents of each set, and with `label` the numbers of their classes. Raises UserError: `foreign` ones."""
        files = tokenizer.files()
        shape, vocabulary = self.shape(), tokenizer.vocabulary
        if self.label is None:
            pieces = [self._source(documents, tokenizer, which) for documents, which in sets]
            lengths = tokenizer.token_bytes()
            if lengths is not None and vocabulary > len(lengths):
                lengths = torch.cat([lengths, torch.zeros_like(lengths[:1])])  # the token before a text's first is no text
            return Splits(
                pieces[0], pieces[1], shape, vocabulary, None, dtype=torch.int64, token_bytes=lengths, files=files,
                validation=pieces[2] if len(pieces) > 2 else None, pad_token=tokenizer.padding, mask_token=tokenizer.mask,
                example=self._example(),
            )  # fmt: skip
        sources, numbers = list[LabelledTexts](), {name: number for number, name in enumerate(names)}
        for documents, which in sets:
            classes = torch.tensor([numbers.get(name, -1) for name in documents.names])[documents.numbers]
            if unknown := sorted({documents.names[n] for n in documents.numbers[which[classes[which] < 0]].unique().tolist()}):
                raise UserError(f"{foreign} {', '.join(unknown[:5])}")
            padding = tokenizer.padding or 0
            sources.append(LabelledTexts(documents, classes, self.length, 1, tokenizer.shift, padding, which))
        tell_cut(sources[0].lengths, self.length, len(sources[0]))
        return Splits(
            sources[0], sources[1], shape, len(names), None, names, torch.int64, vocabulary=vocabulary, files=files,
            pad_token=tokenizer.padding, validation=sources[2] if len(sources) > 2 else None,
        )  # fmt: skip

    def _example(self) -> Tree | None:
        """Return the inputs of two samples, where they are not one tensor."""
        whole = torch.arange(self.length).repeat(2, 1)
        return {"input_ids": torch.zeros_like(whole), "position_ids": whole} if self.packing else None

    def _packs(self) -> Literal["rows", "one row"] | None:
        return None if not self.packing else "one row" if self._one_row else "rows"

    def _source(self, documents: Documents, tokenizer: Tokenizer, which: torch.Tensor) -> Texts:
        """Return the texts to continue as a source."""
        return Texts(documents, self.length, tokenizer.begin, self._packs(), which)

    def _tokens(self, tokenizer: Tokenizer, lines: Sequence[Line]) -> Iterable[torch.Tensor]:
        """Return the tokens of each text."""
        texts = [line.text for line in lines]
        return tokenizer(texts) if self.label is None else tokenizer.whole(texts, self.length)

    def _about(self) -> dict[str, Any]:
        """Return what decides the tokens of a file beside its content and the tokenizer."""
        return {
            "reads": type(self).__name__, "text": self.text, "label": self.label, "length": self.length,
            "encoding": self.encoding,
        }  # fmt: skip

    def _tokenized(self, path: Path, tokenizer: Tokenizer | None) -> tuple[Documents, Tokenizer]:
        """Return the documents of a file, and their tokenizer: this one, or else the training file's. Raises UserError."""
        tokenizer = tokenizer or self.given_tokenizer()
        next(self._read(path))  # what is no such file is said before all of it is hashed
        about = {
            **self._about(),
            "tokenizer": tokenizer.to_json() if tokenizer else [self.vocabulary, None if self.test else self.holdout],
        }  # fmt: skip
        documents = tokenized(self._files(path), about, self.cache, partial(self._work, path, tokenizer))
        return documents, tokenizer or from_json(documents.files[KEPT])

    def _work(self, path: Path, given: Tokenizer | None) -> Work:
        """Return what tokenizes a file, whose tokenizer is trained where there is none."""
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
        """Yield the training texts, or as many as a tokenizer is trained on, chosen by their hashes."""
        first = 0.0 if self.test else self.holdout
        size = sum(file.stat().st_size for file in self._files(path))
        last = first + (1 - first) * min(1.0, TRAINED_ON / max(size, 1))
        return (line.text for line in self._read(path) if first <= hash_fraction(line.text) < last)

    def given_tokenizer(self) -> Tokenizer | None:
        if self.own is None and self.tokenizer == "file":
            return BytePairs.loaded(Path(str(self.tokenizer_file)))
        return None if self.own is None and self.tokenizer == "bpe" else super().given_tokenizer()

    def _files(self, path: Path) -> list[Path]:
        """Return the files that a path stands for."""
        return [path]

    def _read(self, path: Path) -> Iterator[Line]:
        """Yield the lines whose text is not empty. Raises UserError."""
        end, empty = 0, True
        for number, content in lines_of(path, self.encoding):
            end += len(content)
            if content.strip() and (line := self._line(content, str(path), number)).text:
                empty = False
                yield line._replace(end=end)
        if empty:
            raise UserError(f"{path} has no texts under the key '{self.text}'")

    def _line(self, content: bytes, source: str, number: int) -> Line:
        entry = self._entry(content, source, number, [("text", self.text), ("label", self.label)])
        label = entry[self.label] if self.label is not None else ""
        if not isinstance(label, str | int | bool):
            raise DataError(f"{source}:{number}: '{self.label}' is {type(label).__name__}: a class is a text or a whole number")
        return Line(entry[self.text], str(label))

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
                "(data=text reads plain text)"
            ) from None
        if not isinstance(entry, dict):
            raise DataError(f"{where}: {type(entry).__name__}, but each line must be an object with the key {self.text}")
        for knob, key in keys:
            if key is not None and key not in entry:
                raise DataError(f"{where} has no '{key}' (data.{knob}): {did_you_mean(key, entry)}")
        return entry


PIECES = 4  # of `length` bytes in a passage, at least
LONG = 4  # times that: a longer line is cut


class TextFiles(Jsonl):
    """Plain text, of which the model learns to predict the next token: a file, or a folder with its .txt files.

    A file is cut into passages of whole lines, a very long line at its spaces. Without texts of their own for the test, the share
    `holdout` of the passages is held out, chosen by the hash of their content.
    """

    input_files = ()
    reads_what = "a .txt file, or a folder of them"
    instead = "plain text has none: set task=language_modelling, or data=jsonl"

    def __init__(
        self,
        path: str | None = None,
        test: str | dict[str, str] | None = None,
        tokenizer: Literal["auto", "bytes", "bpe", "file"] = "auto",
        vocabulary: Count = 4096,
        tokenizer_file: str | None = None,
        length: Count = 256,
        packing: bool = False,
        encoding: Encoding | None = None,
        holdout: Fraction = 0.1,
        validation: Fraction | FileName | Sets | None = 0.1,
        cache: str | None = None,
        drop_last: bool = True,
        order: Sampling = "shuffled",
    ) -> None:
        super().__init__(
            path, test, tokenizer=tokenizer, vocabulary=vocabulary, tokenizer_file=tokenizer_file, length=length,
            packing=packing, encoding=encoding, holdout=holdout, validation=validation, cache=cache, drop_last=drop_last,
            order=order,
        )  # fmt: skip

    def validate(self, run: RunSpec) -> Iterator[str]:
        yield from super().validate(run)
        if "tokens" not in run.loss.takes and "class" not in run.task.targets:
            yield f"{run.named('data')} is for predicting the next token: set task=language_modelling, which sets model and loss"

    def exists(self, path: Path) -> bool:
        return path.is_file() or path.is_dir()

    def _files(self, path: Path) -> list[Path]:
        return sorted(path / name for name in walk(str(path), (".txt",)).every()) if path.is_dir() else [path]

    def _read(self, path: Path) -> Iterator[Line]:
        end = 0
        for file in self._files(path):
            for passage, size in self._passages(file):
                end += size
                yield Line(passage, "", end)
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
