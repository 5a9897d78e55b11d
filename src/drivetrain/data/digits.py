"""scikit-learn's digits."""

from __future__ import annotations

from pathlib import Path

from drivetrain.core import rng
from drivetrain.core.lazy import torch
from drivetrain.data.base import Data, Fraction, Normalize, Splits, Tensors, measure_normalization

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
        x, y = _read_digits()
        order = rng.permutation(0, 0, len(y))  # the same split in every run, whatever its seed
        test, train = order.split([round(len(y) * self.holdout), len(y) - round(len(y) * self.holdout)])
        sources = Tensors(x[train], y[train]), Tensors(x[test], y[test])
        normalize = measure_normalization(sources[0].x) if self.normalize else Normalize([0.0], [1.0])
        return Splits(*sources, self.shape(), 10, normalize)


def _read_digits() -> tuple[torch.Tensor, torch.Tensor]:
    """Return images (n, 1, 8, 8) uint8 in 0 … 16 and labels (n,)."""
    from importlib.util import find_spec

    import numpy as np

    spec = find_spec("sklearn")  # read its file without importing it, which takes a second
    root = Path(next(iter(spec.submodule_search_locations or [""]))) if spec else Path()
    file = root / "datasets" / "data" / "digits.csv.gz"
    if file.is_file():
        table = np.loadtxt(file, delimiter=",", dtype=np.float32)
    else:
        from sklearn.datasets import load_digits

        images, labels = load_digits(return_X_y=True)
        table = np.column_stack([images, labels]).astype(np.float32)
    x = torch.from_numpy(table[:, :-1]).to(torch.uint8).view(-1, 1, 8, 8)
    return x, torch.from_numpy(table[:, -1]).long()
