"""Data sets that Hugging Face's `datasets` library has saved to disk."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from drivetrain.core.errors import DataError, OperatorGives, UserError, did_you_mean, refuse
from drivetrain.core.lazy import numpy as np
from drivetrain.core.lazy import torch
from drivetrain.core.options.allowed import ColumnName, Name
from drivetrain.core.options.option import Count, RunSpec, needs_extra
from drivetrain.core.step import rng
from drivetrain.core.step.source import Source
from drivetrain.data.base import FileSets, HeldOut, Splits, Validation
from drivetrain.data.cells import Cells, Words
from drivetrain.data.decoding import ImageFileSource
from drivetrain.data.images import PictureData
from drivetrain.data.tables import typed
from drivetrain.data.target_reader import TargetReader
from drivetrain.data.text import TextData, tell_cut
from drivetrain.data.tokenizer import Tokenizer
from drivetrain.data.untrusted import read_image_file

if TYPE_CHECKING:
    from datasets import Dataset

VALIDATION = ("validation", "valid", "val", "dev")  # the usual names of a validation split
LOOKED_AT = 1000  # texts whose lengths are counted, spread evenly


Known = tuple[Mapping[str, "Dataset"], TargetReader, Tokenizer]  # the splits, the reader of labels, and the encoder of texts


@dataclass(kw_only=True, eq=False)
class HuggingFace(PictureData, HeldOut["Images | Texts", Known, "Images | Texts"], TextData):
    """A data set that Hugging Face's `datasets` saved to disk: images or texts, each with a label.

    A text becomes int64 (length,): its tokens by the tokenizer of model=transformers, else its bytes plus one, and padding.
    """

    machine_local_keys = ("root",)
    samples_are: ClassVar[str] = "samples"

    root: str | None = None
    image: ColumnName | None = "image"
    text: ColumnName | None = None
    label: ColumnName = "label"
    train: Name = "train"
    test: Name | FileSets | None = None
    validation: Validation = "auto"
    length: Count = 256

    def __post_init__(self) -> None:
        super().__post_init__()
        self.tokens = self.text is not None

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

    def read(self) -> tuple[Images | Texts, Known]:
        found, tokenizer = load_from_disk("data.root", str(self.root)), self.given_tokenizer()
        assert tokenizer is not None  # huggingface never trains one
        splits = found if isinstance(found, dict) else {self.train: found}
        rows = self._checked("train", self.train, splits)
        names = getattr(rows.features[self.label], "names", None)
        reader = TargetReader("class", [self.label], f"data.label={self.label}", classes=names, numbered=True)
        reader.learn(cells := self._labels(rows), cells)
        return self.read_set(self.train, (splits, reader, tokenizer), "train"), (splits, reader, tokenizer)

    def divided(self, every: Images | Texts) -> tuple[Images | Texts, Images | Texts]:
        order, count = rng.permutation(0, 0, len(every)), round(len(every) * self.holdout)  # the same one in every run
        return every.subset(order[count:].sort().values), every.subset(order[:count].sort().values)

    def places(self, split: str, known: Known | None = None) -> dict[str, str]:
        """Return the splits that are a set each: the named ones, or those called so; one next to train is the test set."""
        found, tests, splits = super().places(split), super().places("test"), () if known is None else known[0]
        usual = [name for name in VALIDATION if name in splits][:1] if tests or "test" in splits else []
        own = [name for name in usual if name not in tests.values()] if self.validation == "auto" else []
        if split == "test":
            taken = own or super().places("validation").values()
            own = [name for name in ("test", *VALIDATION) if name in splits and name not in taken]
        return found or dict(zip([""], own, strict=False))

    def read_set(self, place: str, known: Known, split: str) -> Images | Texts:
        import datasets

        splits, reader, tokenizer = known
        found, column = self._checked(split, place, splits), str(self.image or self.text)
        rows, labels = found.with_format(None).select_columns([column]), reader.read(self._labels(found))
        if self.text is not None:
            return Texts(rows, column, labels, self.length, tokenizer)
        return Images(self, rows.cast_column(column, datasets.Image(decode=False)), column, labels)

    def about(self, known: Known, sources: Sequence[tuple[str, Images | Texts]], own: Splits | None) -> dict[str, object]:
        (_, reader, tokenizer), train = known, sources[0][1]
        if isinstance(train, Texts):
            some = torch.arange(n := min(len(train), LOOKED_AT)) * (len(train) // max(1, n))
            tell_cut(torch.tensor([len(tokens) for tokens in train.tokens(some)]), self.length, len(train))
        images = [(split, source) for split, source in sources if isinstance(source, Images)]
        about = self.looked_at(images) if images else {
            "normalize": None, "dtype": torch.int64, "vocabulary": tokenizer.vocabulary, "pad_token": tokenizer.padding,
            "files": tokenizer.files(),
        }  # fmt: skip
        return {"shape": self.shape(), **reader.about(sources), **about}

    def _labels(self, rows: Dataset) -> Cells:
        """Return the labels of a split. Raises UserError for those that are neither numbers nor texts."""
        column, names = rows.select_columns([self.label]).with_format("arrow"), getattr(rows.features[self.label], "names", None)
        values = typed(lambda: column[:], self.label, str(self.root), ())
        if names is not None and not isinstance(values, Words):
            values = Words(np.where(values >= 0, values, -1).astype(np.int32), names)
        return Cells({self.label: values}, str(self.root))

    def _checked(self, setting: str, name: str, splits: Mapping[str, Dataset]) -> Dataset:
        """Return the rows of a split. Raises UserError where it is empty, or a column is missing or of the wrong kind."""
        import datasets

        if name not in splits:
            raise UserError(f"data.{setting}={name}: {self.root} has no such split: {did_you_mean(name, splits)}")
        rows, column = splits[name], str(self.image or self.text)
        refuse(
            f"data.{key}={wanted}: {self.root} has no such column: {did_you_mean(wanted, rows.column_names)}"
            for key, wanted in (("image" if self.image else "text", column), ("label", self.label))
            if wanted not in rows.column_names
        )
        if not len(rows):
            raise UserError(f"data.root={self.root}: the split {name} has no samples: give it some, or set data.{setting}")
        if self.image and not isinstance(rows.features[column], datasets.Image):
            raise UserError(f"data.image={column} is no column of images: set data.image=null data.text={column} for texts")
        return rows


def load_from_disk(setting: str, path: str) -> Dataset | dict[str, Dataset]:
    """Open a data set, or its splits by name. Raises UserError."""
    import datasets

    try:
        return datasets.load_from_disk(path)
    except Exception as error:  # pyarrow and datasets fail in many ways
        text = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise UserError(f"{setting}={path} cannot be read as a data set ({text}): save it with save_to_disk") from None


class Texts(Source):
    """Texts as a source: the tokens int64 (n, length), padded after the end."""

    def __init__(self, rows: Dataset, column: str, labels: torch.Tensor, length: int, tokenizer: Tokenizer) -> None:
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
    """Images as a source: uint8 (n, 3, h, w)."""

    def __init__(self, data: HuggingFace, rows: Dataset, column: str, labels: torch.Tensor) -> None:
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
        return f"{self.root}, row {index + 1}"
