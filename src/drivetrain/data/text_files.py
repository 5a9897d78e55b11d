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
from drivetrain.data.untrusted import lines_of

PIECES = 4  # of `length` characters in a passage, at least


class TextFiles(Jsonl):
    """Plain text, of which the model learns to predict the next token: a file, or a folder with its .txt files.

    A file is cut into passages of whole lines. Without texts of their own for the test, the share `holdout` of the passages is
    held out, chosen by the hash of their content.
    """

    input_files = ()
    reads_what = "a .txt file, or a folder of them"
    instead = "plain text has none: set task=language_modelling, or data=jsonl"

    def __init__(
        self,
        path: str | None = None,
        test: str | dict[str, str] | None = None,
        tokenizer: Literal["bytes", "bpe", "file"] = "bytes",
        vocabulary: Count = 4096,
        tokenizer_file: str | None = None,
        length: Count = 256,
        holdout: Fraction = 0.1,
        validation: Fraction | FileName | Sets | None = 0.1,
        drop_last: bool = True,
        order: Sampling = "shuffled",
    ) -> None:
        super().__init__(
            path, test, tokenizer=tokenizer, vocabulary=vocabulary, tokenizer_file=tokenizer_file, length=length, holdout=holdout,
            validation=validation, drop_last=drop_last, order=order,
        )  # fmt: skip

    def validate(self, run: RunSpec) -> Iterator[str]:
        yield from super().validate(run)
        if "tokens" not in run.loss.takes and "class" not in run.task.targets:
            yield f"{run.named('data')} is for predicting the next token: set task=language_modelling, which sets model and loss"

    def exists(self, path: Path) -> bool:
        return path.is_file() or path.is_dir()

    def _read(self, path: Path) -> list[Line]:
        files = sorted(path.rglob("*.txt")) if path.is_dir() else [path]
        passages = [Line(passage, "") for file in files for passage in self._passages(file)]
        if not passages:
            raise UserError(f"{path} holds no .txt file with a text" if path.is_dir() else f"{path} is empty")
        return passages

    def _passages(self, file: Path) -> Iterator[str]:
        """Yield the passages of a file. Raises UserError."""
        lines: list[str] = []
        size = 0
        try:
            for line in lines_of(file):
                lines.append(line)
                size += len(line)
                if size >= PIECES * self.length:
                    yield "".join(lines)
                    lines, size = [], 0
        except UnicodeDecodeError as error:
            raise UserError(f"{file} is not UTF-8: {error}") from None
        if size:
            yield "".join(lines)
