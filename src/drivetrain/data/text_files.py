"""Plain texts: a .txt file, or a folder of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from drivetrain.core.allowed import FileName
from drivetrain.core.errors import UserError
from drivetrain.core.option import Count, RunSpec
from drivetrain.core.order import Sampling
from drivetrain.data.base import Fraction, Sets
from drivetrain.data.jsonl import Jsonl, Line
from drivetrain.data.listing import walk
from drivetrain.data.untrusted import Encoding, as_utf8, decode, mapped

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
        encoding: Encoding | None = None,
        holdout: Fraction = 0.1,
        validation: Fraction | FileName | Sets | None = 0.1,
        drop_last: bool = True,
        order: Sampling = "shuffled",
    ) -> None:
        super().__init__(
            path, test, tokenizer=tokenizer, vocabulary=vocabulary, tokenizer_file=tokenizer_file, length=length,
            encoding=encoding, holdout=holdout, validation=validation, drop_last=drop_last, order=order,
        )  # fmt: skip

    def validate(self, run: RunSpec) -> Iterator[str]:
        yield from super().validate(run)
        if "tokens" not in run.loss.takes and "class" not in run.task.targets:
            yield f"{run.named('data')} is for predicting the next token: set task=language_modelling, which sets model and loss"

    def exists(self, path: Path) -> bool:
        return path.is_file() or path.is_dir()

    def _read(self, path: Path) -> list[Line]:
        files = sorted(path / name for name in walk(str(path), (".txt",)).every()) if path.is_dir() else [path]
        passages = [Line(passage, "") for file in files for passage in self._passages(file)]
        if not passages:
            raise UserError(f"{path} holds no .txt file with a text" if path.is_dir() else f"{path} is empty")
        return passages

    def _passages(self, file: Path) -> Iterator[str]:
        """Yield the passages of a file: whole lines, or parts of a long one that end at a space. Raises DataError."""
        content, least = as_utf8(mapped(file), self.encoding, str(file)), PIECES * self.length
        start, line = 0, 1
        while start < len(content):
            ends = (content.find(sign, start + least - 1, start + LONG * least) + 1 for sign in (b"\n", b" "))
            end = min(next(filter(None, ends), start + LONG * least), len(content))
            while end < len(content) and content[end] & 0xC0 == 0x80:  # within a character
                end -= 1
            passage = content[start:end]
            yield decode(passage, str(file), line).replace("\r\n", "\n").replace("\r", "\n")
            start, line = end, line + passage.count(b"\n")
