"""Words with a class each, such as names of people and places, in JSON lines."""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from drivetrain.core.allowed import ColumnName
from drivetrain.core.errors import DataError, UserError
from drivetrain.core.lazy import numpy as np
from drivetrain.core.lazy import torch
from drivetrain.core.option import RunSpec
from drivetrain.core.source import Source
from drivetrain.data.base import IGNORE_INDEX, Listed, Splits, hash_fractions
from drivetrain.data.jsonl import Jsonl, Known
from drivetrain.data.tokenizer import Tokenizer
from drivetrain.data.untrusted import lines_of

Tagged = tuple[list[str], list[str]]  # words, and the class of each


@dataclass(kw_only=True, eq=False)
class Words(Jsonl):
    """Texts of which each word has a class: lines such as {"tokens": ["the", "Nile"], "tags": ["O", "RIVER"]}.

    A word's class is that of its first token. Its other tokens, and what the tokenizer puts around a text, have none. Of a longer
    text the first `length` tokens are read.
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
        return Listed(self._tagged(Path(str(self.path)))), (tokenizer, [])

    def fractions(self, every: Listed[Tagged]) -> np.ndarray:
        return hash_fractions(" ".join(words) for words, _ in every)

    def learn(self, known: Known, every: Listed[Tagged], train: Listed[Tagged]) -> Known:
        return known[0], sorted({tag for _, tags in train for tag in tags})

    def read_set(self, place: str, known: Known, split: str) -> Listed[Tagged]:
        return Listed(self._tagged(Path(place)))

    def source(self, known: Known, part: Listed[Tagged]) -> TaggedTexts:
        tokenizer, names = known
        if foreign := sorted({tag for _, tags in part for tag in tags} - {*names}):
            raise UserError(f"{self.test or self.path}: no training text has the class {', '.join(foreign[:5])}")
        return TaggedTexts(part, {name: number for number, name in enumerate(names)}, tokenizer, self.length)

    def _tagged(self, path: Path) -> Iterator[Tagged]:
        """Yield the words of each line that has some, and their classes. Raises DataError."""
        for number, content in lines_of(path, self.encoding):
            if content.strip():
                words, tags = self._lists(content, str(path), number)
                if words:
                    yield words, tags

    def _lists(self, content: bytes, source: str, number: int) -> Tagged:
        entry = self._object(content, source, number, [("text", self.text), ("label", self.label)])
        words, tags = entry[self.text], entry[str(self.label)]
        if not all(isinstance(each, list) for each in (words, tags)) or len(words) != len(tags):
            raise DataError(
                f"{source}:{number}: '{self.text}' must be a list of words, and '{self.label}' a list of a class for each of them"
            )
        if wrong := [word for word in words if not isinstance(word, str)]:
            raise DataError(f"{source}:{number}: '{self.text}' has a {type(wrong[0]).__name__} among its words")
        if wrong := [tag for tag in tags if not isinstance(tag, str | int) or isinstance(tag, bool)]:
            kind = type(wrong[0]).__name__
            raise DataError(f"{source}:{number}: '{self.label}' has a {kind}: a class is a text or a whole number")
        return words, [str(tag) for tag in tags]


def tokens_of(words: Sequence[str], tokenizer: Tokenizer, length: int) -> tuple[list[int], list[int]]:
    """Return at most `length` tokens of a text, and the number of the word that each belongs to; -1: to none."""
    begins, at = [], 0
    for word in words:
        begins.append(at)
        at += len(word) + 1
    tokens, ends = tokenizer.with_ends(" ".join(words), length)
    return tokens, [-1 if end == 0 else bisect.bisect_right(begins, end - 1) - 1 for end in ends]


class TaggedTexts(Source):
    """Texts as a source: tokens (n, longest of the batch), and for the first token of each word its class, -100 for others."""

    def __init__(self, lines: Sequence[Tagged], numbers: dict[str, int], tokenizer: Tokenizer, length: int) -> None:
        self.padding, self._rows = tokenizer.padding or 0, list[tuple[torch.Tensor, torch.Tensor]]()
        self.texts = [" ".join(words) for words, _ in lines]
        for words, tags in lines:
            tokens, of = tokens_of(words, tokenizer, length)
            firsts = [n >= 0 and n != before for n, before in zip(of, [-1, *of], strict=False)]
            classes = [numbers[tags[n]] if first else IGNORE_INDEX for n, first in zip(of, firsts, strict=True)]
            self._rows.append((torch.tensor(tokens), torch.tensor(classes)))
        sizes = [len(tokens) for tokens, _ in self._rows]
        self.lengths, self._longest = torch.tensor(sizes), max(sizes)

    def __len__(self) -> int:
        return len(self._rows)

    def identities(self) -> Sequence[str]:
        return self.texts

    def fetch(self, indices: torch.Tensor, pad_to: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
        rows = [self._rows[i] for i in indices.tolist()]
        longest = min(-(-max(len(x) for x, _ in rows) // pad_to) * pad_to, self._longest)

        def padded(parts: Any, value: int) -> torch.Tensor:
            return torch.stack([torch.nn.functional.pad(part, (0, longest - len(part)), value=value) for part in parts])

        return padded([x for x, _ in rows], self.padding), padded([y for _, y in rows], IGNORE_INDEX)
