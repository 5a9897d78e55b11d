"""The cost of draws by key for a sample of a user's Dataset: `python -m bench.draws [--rounds N]`.

Each kind of Dataset (tests/support/drawing_sets.py) is read in batches as it is, and by key, in turns; the least time counts.
"""

from __future__ import annotations

from timeit import timeit

import torch
from tests.support import drawing_sets

from bench import harness
from drivetrain.data.own import Reader, keys

KINDS = ("Nothing", "Torch", "Numpy", "Python", "All")


def microseconds(kind: str, size: int, rounds: int) -> list[float]:
    """µs a sample: as the Dataset is, and by key."""
    reader, order = Reader(getattr(drawing_sets, kind)(), list), torch.arange(size) % 53
    indices = order.tolist()
    ways = (lambda: reader.plain(indices)), (lambda: reader.read(indices, keys(0, 1, order).tolist()))
    turns = [[timeit(way, number=1) for way in ways] for _ in range(rounds)]
    return [1e6 / size * min(times) for times in zip(*turns, strict=True)]


def main() -> None:
    """Measure all kinds in batches of two sizes."""
    given = harness.parse(__doc__, "draws-cpu.json", rounds=300)
    torch.set_num_threads(1)
    found = {f"{kind.lower()}, batches of {size}": microseconds(kind, size, given.rounds) for size in (32, 128) for kind in KINDS}
    rows = [[name, f"{plain:.1f}", f"{keyed:.1f}", f"{keyed - plain:+.1f}"] for name, (plain, keyed) in found.items()]
    harness.table("draws of a sample", ["draws of", "µs a sample", "by key", "more"], rows)
    harness.write(given.out, {"unit": "µs a sample, plain and by key", "sets": found})


if __name__ == "__main__":
    main()
