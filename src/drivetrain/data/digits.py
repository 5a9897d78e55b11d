"""scikit-learn's digits."""

from __future__ import annotations

from drivetrain.core import rng
from drivetrain.core.lazy import torch
from drivetrain.data.base import Data, Fraction, Normalize, Splits, Tensors, measure_normalization
from drivetrain.data.scikit_learn import data_file

DIGITS = 1797


class Digits(Data):
    """scikit-learn's 1,797 real handwritten digits, 8×8 (Alpaydin & Kaynak 1998). Nothing is downloaded."""

    max_value = 16.0
    mirrored_changes_label = True

    def __init__(self, holdout: Fraction = 0.2, normalize: bool = True, drop_last: bool = True) -> None:
        self.holdout, self.normalize, self.drop_last = holdout, normalize, drop_last

    def shape(self) -> tuple[int, ...]:
        return (1, 8, 8)

    def train_samples(self) -> int:
        return DIGITS - round(DIGITS * self.holdout)

    def load(self, device: torch.device) -> Splits:
        x, y = read_digits()
        order = rng.permutation(0, 0, len(y))  # the same split in every run, whatever its seed
        test, train = order.split([round(len(y) * self.holdout), len(y) - round(len(y) * self.holdout)])
        sources = Tensors(x[train], y[train]), Tensors(x[test], y[test])
        normalize = measure_normalization(sources[0].x) if self.normalize else Normalize([0.0], [1.0])
        return Splits(*sources, self.shape(), 10, normalize)


def read_digits() -> tuple[torch.Tensor, torch.Tensor]:
    """Return images (n, 1, 8, 8) uint8 in 0 … 16 and labels (n,)."""
    import numpy as np

    table = np.loadtxt(data_file("digits.csv.gz"), delimiter=",", dtype=np.float32)
    x = torch.from_numpy(table[:, :-1]).to(torch.uint8).view(-1, 1, 8, 8)
    return x, torch.from_numpy(table[:, -1]).long()
