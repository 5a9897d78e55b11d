"""scikit-learn's digits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Annotated

import annotated_types

from drivetrain.core import rng
from drivetrain.core.lazy import torch
from drivetrain.core.option import RunSpec
from drivetrain.core.order import Sampling
from drivetrain.data.base import Data, Fraction, Normalize, Splits, Tensors, measure_normalization, number_apart
from drivetrain.data.tabular import data_file

if TYPE_CHECKING:
    import numpy as np

DIGITS = 1797
SIDE = 8  # pixels
Size = Annotated[int, annotated_types.Ge(4), annotated_types.Le(64)]
Digit = Annotated[int, annotated_types.Ge(0), annotated_types.Le(9)]


class Digits(Data):
    """scikit-learn's 1,797 real handwritten digits, 8×8 (Alpaydin & Kaynak 1998). Nothing is downloaded.

    With `classes` only these digits, numbered from 0 in the order given: for pretraining on some and fine-tuning on others.
    Another `size` than 8 interpolates the images bilinearly.
    """

    max_value = 16.0
    mirrored_changes_label = True

    def __init__(
        self,
        holdout: Fraction = 0.2,
        validation: Fraction | None = 0.2,
        normalize: bool = True,
        drop_last: bool = True,
        order: Sampling = "shuffled",
        classes: Sequence[Digit] | None = None,
        size: Size = SIDE,
    ) -> None:
        self.holdout, self.validation, self.normalize, self.drop_last, self.order = (
            holdout,
            validation,
            normalize,
            drop_last,
            order,
        )
        self.classes, self.size = classes, size

    def validate(self, run: RunSpec) -> Iterator[str]:
        if self.classes is not None and len(set(self.classes)) < max(2, len(self.classes)):
            yield f"data.classes={list(self.classes)}: give two or more different digits, or null for all ten"

    def shape(self) -> tuple[int, ...]:
        return (1, self.size, self.size)

    def loaded_samples(self) -> int | None:
        return None if self.classes is not None else DIGITS - number_apart(DIGITS, self.holdout)

    def load(self, device: torch.device) -> Splits:
        x, y = read_digits()
        if self.size != SIDE:
            x = torch.nn.functional.interpolate(x.float(), size=(self.size, self.size), mode="bilinear", antialias=True)
            x = x.round().to(torch.uint8)
        order = rng.permutation(0, 0, len(y))  # the same split in every run, whatever its seed
        apart = number_apart(len(y), self.holdout)
        test, train = order[:apart], order[apart:]
        chosen = range(10) if self.classes is None else self.classes
        number = torch.tensor([chosen.index(digit) if digit in chosen else -1 for digit in range(10)])[y]
        train, test = (rows[number[rows] >= 0] for rows in (train, test))
        normalize = measure_normalization(x[train]) if self.normalize else Normalize([0.0], [1.0])
        names = None if self.classes is None else [str(digit) for digit in chosen]
        return Splits(
            Tensors(x[train], number[train]), Tensors(x[test], number[test]), self.shape(), len(chosen), normalize, names
        )


def read_digits() -> tuple[torch.Tensor, torch.Tensor]:
    """Return images (n, 1, 8, 8) uint8 in 0 … 16 and labels (n,)."""
    table = read_table()
    x = torch.from_numpy(table[:, :-1]).to(torch.uint8).view(-1, 1, 8, 8)
    return x, torch.from_numpy(table[:, -1]).long()


@lru_cache(maxsize=1)  # 20 ms of text, for half a megabyte
def read_table() -> np.ndarray:
    """Return the file: a row (65,) for each digit, its pixels and what it is."""
    import numpy as np

    return np.loadtxt(data_file("digits.csv.gz"), delimiter=",", dtype=np.float32)
