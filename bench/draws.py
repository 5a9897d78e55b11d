"""What draws by key cost a sample of a user's Dataset: `python -m bench.draws [--quick]`.

Each kind of Dataset (tests/support/drawing_sets.py) is read in batches as it is, and by key, in turns; the least time counts.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from tests.support import drawing_sets

from drivetrain.data.samples import Reader, keys

KINDS = ("Nothing", "Torch", "Numpy", "Python", "All")


def microseconds(kind: str, size: int, rounds: int) -> tuple[float, float]:
    """Return µs a sample: as the Dataset is, and by key."""
    reader, order = Reader(getattr(drawing_sets, kind)()), torch.arange(size) % 53
    indices = order.tolist()
    variants: tuple[Callable[[], object], ...] = (
        lambda: reader.plain(indices), lambda: reader.read(indices, keys(0, 1, order).tolist()),
    )  # fmt: skip
    least = [float("inf")] * len(variants)
    for _ in range(rounds):
        for n, variant in enumerate(variants):
            began = time.perf_counter()
            variant()
            least[n] = min(least[n], time.perf_counter() - began)
    return least[0] / size * 1e6, least[1] / size * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few rounds")
    quick = parser.parse_args().quick
    torch.set_num_threads(1)
    for size in (32, 128):
        for kind in KINDS:
            plain, keyed = microseconds(kind, size, 5 if quick else 300)
            print(f"{kind.lower():8} batches of {size:3}: {plain:5.1f} µs a sample, by key {keyed:5.1f} (+{keyed - plain:.1f})")


if __name__ == "__main__":
    main()
