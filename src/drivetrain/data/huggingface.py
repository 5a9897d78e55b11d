"""Data sets that Hugging Face's `datasets` library has saved to disk."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from drivetrain.core import rng
from drivetrain.core.allowed import ColumnName, Name
from drivetrain.core.errors import DataError, OperatorGives, UserError, did_you_mean
from drivetrain.core.lazy import torch
from drivetrain.core.option import Count, RunSpec, needs_extra
from drivetrain.core.order import Sampling
from drivetrain.core.source import Source
from drivetrain.data.base import FileSets, Fraction, Splits, Validation
from drivetrain.data.decoding import CropShare, ImageFileSource, MaxSkipped, OnError
from drivetrain.data.images import ImageData, Normalization
from drivetrain.data.text import TextData, tell_cut
from drivetrain.data.tokenizer import Tokenizer
from drivetrain.data.untrusted import read_image_file

VALIDATION = ("validation", "valid", "val", "dev")  # the names that a split for it has
LOOKED_AT = 1000  # texts whose lengths are counted, spread evenly


class HuggingFace(TextData, ImageData):
    """A data set that Hugging Face's `datasets` saved to disk: images or texts, each with a label.

    A text becomes int64 (length,): its tokens by the tokenizer of model=transformers, else its bytes plus one, and padding.
    """

    machine_local_keys = ("root",)

    def __init__(
        self,
        root: str | None = None,
        image: ColumnName | None = "image",
        text: ColumnName | None = None,
        label: ColumnName = "label",
        train: Name = "train",
        test: Name | FileSets | None = None,
        holdout: Fraction = 0.1,
        validation: Validation = "auto",
        size: Count = 224,
        crop_pct: CropShare = 1.0,
        length: Count = 256,
        normalize: Normalization = "imagenet",
        range: Sequence[float] | None = None,
        max_pixels: Count = 50_000_000,
        on_error: OnError = "raise",
        max_skipped: MaxSkipped = 0.01,
        drop_last: bool = True,
        order: Sampling = "shuffled",
    ) -> None:
        self.root = os.path.expanduser(root) if root else None
        self.image, self.text, self.label, self.train, self.test = image, text, label, train, test
        self.holdout, self.validation = holdout, validation
        self.size, self.crop_pct, self.length, self.normalize = size, crop_pct, length, normalize
        self.max_pixels, self.range, self.drop_last = max_pixels, range, drop_last
        self.on_error, self.max_skipped = on_error, max_skipped
        self.order = order
        self.tokens = text is not None

    def validate(self, run: RunSpec) -> Iterator[str]:
        yield from super().validate(run)
        if not self.root:
            yield OperatorGives("data=huggingface needs data.root, the folder that save_to_disk wrote")
        elif not Path(self.root).is_dir():
            yield f"data.root={self.root} is no directory: set it to the folder that save_to_disk wrote"
        if (self.image is None) == (self.text is None):
            yield f"data.image={self.image or 'null'} and data.text={self.text or 'null'}: name one column, the other is null"

    def validate_device(self, run: RunSpec) -> Iterator[str]:
        yield from needs_extra("datasets", "datasets", "data=huggingface")

    def shape(self) -> tuple[int, ...]:
        return super().shape() if self.image else (self.length,)

    def decodes_images(self) -> bool:
        return self.image is not None

    def load(self, device: torch.device) -> Splits:
        splits = self._splits()
        for rows in splits:
            self._check(rows)
        names = getattr(splits[0].features[self.label], "names", None)
        labels = [self._labels(rows, names) for rows in splits]
        classes = len(names) if names else 1 + max(int(each.max()) for each in labels)
        tokenizer = self.given_tokenizer()
        assert tokenizer is not None  # none is trained
        sources = [self._source(rows, each, tokenizer) for rows, each in zip(splits, labels, strict=True)]
        images = [source for source in sources if isinstance(source, Images)]
        if isinstance(texts := sources[0], Texts):
            some = torch.arange(n := min(len(texts), LOOKED_AT)) * (len(texts) // max(1, n))
            tell_cut(torch.tensor([len(tokens) for tokens in texts.tokens(some)]), self.length, len(texts))
        as_texts = {
            "normalize": None, "dtype": torch.int64, "vocabulary": tokenizer.vocabulary, "pad_token": tokenizer.padding,
            "files": tokenizer.files(),
        }  # fmt: skip
        looked = self.looked_at(images) if images else as_texts
        validation = sources[2] if len(sources) > 2 else None
        return Splits(sources[0], sources[1], self.shape(), classes, names=names, validation=validation, **looked)

    def _labels(self, rows: Any, names: list[str] | None) -> torch.Tensor:
        """Return the classes of a split (n,) by the numbers that their names have in training. Raises DataError."""
        where, own = f"{self.root}: column '{self.label}'", getattr(rows.features[self.label], "names", None)
        found = rows.select_columns([self.label])[:][self.label]
        if None in found:
            raise DataError(f"{where} has no label in row {found.index(None)}: leave it out or mend it")
        if (lowest := min(found)) < 0:
            raise DataError(f"{where} has labels from {lowest}: leave samples without a label out")
        if own == names:
            return torch.tensor(found)
        if own is None or names is None:
            raise DataError(
                f"{where} has names of classes in one split and none in another: save all splits with the same column"
            )
        if unknown := sorted({own[label] for label in found} - set(names)):
            raise DataError(f"{where} has classes that data.train={self.train} has not: {', '.join(unknown[:5])}")
        return torch.tensor([names.index(name) if name in names else -1 for name in own])[found]

    def _splits(self) -> list[Any]:
        """Open the data set; return the rows of the training, the test and, if there is one, the validation split.

        Raises UserError.
        """
        import datasets

        try:
            found = datasets.load_from_disk(str(self.root))
        except Exception as error:  # pyarrow and datasets fail in many ways
            text = str(error).strip().splitlines() or [type(error).__name__]
            raise UserError(
                f"data.root={self.root} cannot be read as a data set ({text[0]}): save it with save_to_disk"
            ) from None
        splits = found if isinstance(found, dict) else {self.train: found}
        own = self.validation if isinstance(self.validation, str) else None
        if own == "auto":  # one split beside train is the test set
            own = next((name for name in VALIDATION if name in splits and (self.test or "test" in splits)), None)
            own = own if own != self.test else None
        for knob, split in (("train", self.train), ("test", self.test), ("validation", own)):
            if split is not None and split not in splits:
                raise UserError(f"data.{knob}={split}: {self.root} has no such split: {did_you_mean(split, splits)}")
        train, validation = splits[self.train], [splits[own]] if own else []
        test = self.test or next(
            (name for name in ("test", *VALIDATION) if name in splits and name not in {own, *self.beside}), None
        )
        if test is not None:
            return [train, splits[test], *validation]
        order = rng.permutation(0, 0, len(train))  # the same split in every run, whatever its seed
        count = round(len(train) * self.holdout)
        parts = [train.select(rows.sort().values.tolist()) for rows in (order[count:], order[:count])]
        return [*parts, *validation]

    def _check(self, rows: Any) -> None:
        """Raise UserError where a split is empty, or a column is missing or of the wrong kind."""
        import datasets

        column = str(self.image or self.text)
        for knob, name in (("image" if self.image else "text", column), ("label", self.label)):
            if name not in rows.column_names:
                raise UserError(f"data.{knob}={name}: {self.root} has no such column: {did_you_mean(name, rows.column_names)}")
        if not len(rows):
            raise UserError(
                f"data.root={self.root}: a split has no samples: give data.test, more samples or a larger data.holdout"
            )
        kind = getattr(rows.features[self.label], "dtype", "")
        if not str(kind).startswith(("int", "uint")):
            raise UserError(f"data.label={self.label} is a column of {kind or 'nested values'}, not of whole numbers")
        if self.image and not isinstance(rows.features[column], datasets.Image):
            raise UserError(f"data.image={column} is no column of images: set data.image=null data.text={column} for texts")

    def _source(self, rows: Any, labels: torch.Tensor, tokenizer: Tokenizer) -> Images | Texts:
        """Return the rows of a split as a source."""
        import datasets

        column = str(self.image or self.text)
        rows = rows.with_format(None).select_columns([column])
        if self.text is not None:
            return Texts(rows, column, labels, self.length, tokenizer)
        return Images(self, rows.cast_column(column, datasets.Image(decode=False)), column, labels)


class Texts(Source):
    """Texts as a source: the tokens int64 (n, length), padded after the end."""

    def __init__(self, rows: Any, column: str, labels: torch.Tensor, length: int, tokenizer: Tokenizer) -> None:
        self.rows, self.column, self.targets, self.length, self.tokenizer = rows, column, labels, length, tokenizer

    def __len__(self) -> int:
        return len(self.targets)

    def subset(self, indices: torch.Tensor) -> Texts:
        return Texts(self.rows.select(indices.tolist()), self.column, self.targets[indices], self.length, self.tokenizer)

    def labels(self) -> torch.Tensor:
        return self.targets

    def tokens(self, indices: torch.Tensor) -> list[torch.Tensor]:
        """Return the tokens of these texts."""
        return self.tokenizer.whole([text or "" for text in self.rows[indices.tolist()][self.column]], self.length)

    def fetch(self, indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.full((len(indices), self.length), self.tokenizer.padding or 0)
        for row, tokens in zip(x, self.tokens(indices), strict=True):
            row[: len(tokens)] = tokens[: self.length].long() + self.tokenizer.shift
        return x, self.targets[indices]


class Images(ImageFileSource):
    """Images as a source: uint8 (n, 3, size, size)."""

    def __init__(self, data: HuggingFace, rows: Any, column: str, labels: torch.Tensor) -> None:
        self.root, self.rows, self.column = data.root, rows, column
        super().__init__(data.how(), labels)

    def select(self, indices: torch.Tensor) -> None:
        super().select(indices)
        self.rows = self.rows.select(indices.tolist())

    def content(self, index: int) -> bytes:
        image = self.rows[index][self.column] or {}
        if image.get("bytes") is not None:
            return bytes(image["bytes"])
        if image.get("path") is None:
            raise DataError(f"{self.name(index)} has no image")
        return read_image_file(image["path"], self.how.max_pixels)

    def name(self, index: int) -> str:
        return f"{self.root}: row {index}"
