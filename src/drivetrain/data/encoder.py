"""Columns of a table as inputs: numbers are standardised, texts become a column of 0 and 1 for each category."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from drivetrain.core.errors import DataError, UserError
from drivetrain.core.files import parse_json
from drivetrain.core.lazy import torch
from drivetrain.core.typed import fits
from drivetrain.data.columns import Columns, as_text, is_text, missing, named, typed

if TYPE_CHECKING:
    import numpy as np

MAX_CATEGORIES = 1000  # of one column; more are texts or numbers of rows, not categories
NO_VALUE = "(missing)"  # the category of a missing text
KINDS = {"name": str, "categories": list[str] | None, "mean": float, "std": float}  # of a column, in the run's table.json


@dataclass
class Encoded:
    """How one column becomes inputs: a category's columns of 0 and 1, or a number's standardised value."""

    name: str
    categories: Sequence[str] | None = None  # None: a number
    mean: float = 0.0  # also what fills a missing number
    std: float = 1.0

    def __call__(self, columns: Columns) -> torch.Tensor:
        """Return float32 (n, outputs). A category that no training row has is all zeros."""
        import numpy as np

        values = columns[self.name]
        if self.categories is None:
            values = self._numbers(values)
            numbers = torch.from_numpy(np.where(np.isnan(values), self.mean, values))
            return ((numbers - self.mean) / self.std).float().unsqueeze(1)
        code_of = {category: number for number, category in enumerate(self.categories)}
        codes = torch.tensor([code_of.get(cell, len(code_of)) for cell in _category_cells(values)])
        return torch.nn.functional.one_hot(codes, len(code_of) + 1)[:, :-1].float()

    @property
    def outputs(self) -> int:
        """How many inputs of the model it becomes."""
        return 1 if self.categories is None else len(self.categories)

    def _numbers(self, values: np.ndarray) -> np.ndarray:
        numbers = typed(values) if is_text(values) else values  # another row may have made the column one of texts
        if is_text(numbers):
            wrong = next(cell for cell in values if is_text(typed([cell])))
            raise DataError(f"column {self.name} holds {wrong!r}, and the training rows have numbers there")
        return numbers


@dataclass
class Encoder:
    """Turns columns into inputs (n, d). Its means, deviations and categories are those of the training rows."""

    columns: list[Encoded]

    @classmethod
    def learned(cls, train: Columns, names: Sequence[str], categories: Sequence[str], normalize: bool) -> Encoder:
        """Return the encoder of these columns; texts and the columns named in `categories` are categories."""
        import numpy as np

        encoded = []
        for name in names:
            values = train[name]
            if is_text(values) or name in categories:
                encoded.append(Encoded(name, _categories(name, values)))
                continue
            known = values[~np.isnan(values)]
            std = float(known.std()) if len(known) else 0.0
            mean = float(known.mean()) if len(known) else 0.0
            encoded.append(Encoded(name, None, mean, (std or 1.0) if normalize else 1.0))
            if not normalize:
                encoded[-1].mean = 0.0
        return cls(encoded)

    def __call__(self, columns: Columns) -> torch.Tensor:
        """Return inputs float32 (n, d)."""
        return torch.cat([encoded(columns) for encoded in self.columns], 1)

    def row(self, columns: Columns, fills: bool) -> torch.Tensor:
        """Return the inputs (d,) of columns of one row. Raises DataError, also for missing values unless `fills`."""
        if not fills and (gaps := [name for name in self.names if missing(columns[name]).any()]):
            raise DataError(f"there is no value in {named(gaps)}, and training rows have one (data.missing=refuse)")
        return self(columns)[0]

    @property
    def names(self) -> list[str]:
        """The columns that it reads."""
        return [encoded.name for encoded in self.columns]

    @property
    def outputs(self) -> int:
        """How many inputs it makes of a row."""
        return sum(encoded.outputs for encoded in self.columns)

    def to_json(self) -> str:
        """Return the encoder as text, to be kept with the run."""
        return json.dumps([asdict(encoded) for encoded in self.columns], indent=1)

    @classmethod
    def from_json(cls, text: str) -> Encoder:
        """Return the encoder that `to_json` wrote. Raises ValueError where no run wrote it: its folder may be a stranger's."""
        entries = parse_json(text)
        if not isinstance(entries, list) or not entries:
            raise ValueError("it is no list of columns")
        for entry in entries:
            if not _is_column(entry):
                raise ValueError(f"{entry!r:.80} is no column")
        return cls([Encoded(**entry) for entry in entries])


def _is_column(entry: Any) -> bool:
    if not (isinstance(entry, dict) and entry.keys() == KINDS.keys() and all(fits(entry[k], kind) for k, kind in KINDS.items())):
        return False
    categories = entry["categories"]
    few = categories is None or 0 < len(categories) <= MAX_CATEGORIES
    return few and math.isfinite(entry["mean"]) and math.isfinite(entry["std"]) and entry["std"] > 0


def _categories(name: str, values: np.ndarray) -> list[str]:
    found = sorted(set(_category_cells(values)))
    if len(found) > MAX_CATEGORIES:
        raise UserError(
            f"the column {name} has {len(found):,} different texts, and each would become an input: leave it out by data.columns"
        )
    return found


def _category_cells(values: np.ndarray) -> list[str]:
    return [NO_VALUE if cell is None or cell != cell else as_text(cell) for cell in values.tolist()]
