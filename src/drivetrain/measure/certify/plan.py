"""Which samples each update of the first epochs takes, in numbers that are the same for any split by ranks and micro-batches."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from drivetrain.core.microbatch import Request
from drivetrain.measure.certify.trace import Array

EPOCHS = 2
PRIME = 2_654_435_761  # Knuth's multiplicative hash
MOST = 1 << 40  # hashes of samples are below it, so that sums of 8192 of them are exact in float64


def plan_of(requests: Iterable[Request], ranks: int) -> dict[str, Array]:
    """Return for each update of the first epochs: how many samples, their hash, and the sum of the weights / ranks.

    All three add up over the ranks.
    """
    counts, hashes, weights, epochs = [0.0], [0.0], [0.0], []
    for request in requests:
        if request.epoch >= EPOCHS:
            break
        if request.weight:
            indices = request.indices.numpy().astype(np.uint64)
            counts[-1] += len(indices)
            hashes[-1] += float(((indices + np.uint64(1)) * np.uint64(PRIME) % np.uint64(MOST)).sum())
            weights[-1] += request.weight / ranks
        if request.last:
            epochs.append(float(request.epoch))
            for sums in (counts, hashes, weights):
                sums.append(0.0)
    return {
        "number of updates": np.array([epochs.count(float(e)) / ranks for e in range(EPOCHS)]),
        "number of samples": np.array(counts[:-1]),
        "which samples": np.array(hashes[:-1]),
        "weights of the micro-batches": np.round(np.array(weights[:-1]), 9),
    }
