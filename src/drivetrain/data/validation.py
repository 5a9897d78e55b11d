"""Holds out the validation set: a share of the training samples, the same ones in every run, on any number of ranks.

Which ones depends on the samples alone: on their content, or on what names them where reading them is too dear. Samples
that belong together, such as the pieces of a document, stay together. Each class gives the same share, where the classes
are known without reading samples.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from drivetrain.core import rng, trees
from drivetrain.core.errors import UserError
from drivetrain.core.lazy import numpy as np
from drivetrain.core.lazy import torch
from drivetrain.core.source import Source
from drivetrain.core.tensors import Tensors

STREAM = 9  # of the random numbers of samples that have nothing but their number


def hold_out(source: Source, share: float) -> tuple[Source, Source]:
    """Return the training and the validation samples of a source. Raises UserError where one of them would be empty."""
    keys, labels = _keys(source), source.labels()
    apart = chosen(keys, None if labels is None else labels.cpu().numpy(), share)
    held = int(apart.sum())
    if not held or held == len(apart):
        raise UserError(
            f"data.validation={share:g} takes {held} of {len(apart)} training samples, and both sets need some (samples that "
            "belong together stay together): set another share, or data.validation=null to select on the test set"
        )
    which = torch.from_numpy(apart)
    return source.subset((~which).nonzero().flatten()), source.subset(which.nonzero().flatten())


def count(samples: int, share: float) -> int:
    """Return how many of so many training samples are held out, where each stands for itself."""
    return int(max(share, 1 / samples) * samples + 0.5)


def chosen(keys: np.ndarray, labels: np.ndarray | None, share: float) -> np.ndarray:
    """Return which samples are held out, bool (n,): those of the lowest keys (n,) uint64, for each class its share.

    Samples of one key are a group, which is held out as a whole where at least half of it is wanted. The shares of classes
    are rounded so that their sum is that of all samples; there are none where a group has samples of several classes.
    """
    _, first, group, sizes = np.unique(keys, return_index=True, return_inverse=True, return_counts=True)  # in the keys' order
    one_class = labels is None or not (labels == labels[first][group]).all()
    _, number = np.unique(np.zeros(len(sizes)) if labels is None or one_class else labels[first], return_inverse=True)
    samples = np.bincount(number, weights=sizes)  # of each class
    left = np.diff(np.floor(max(share, 1 / len(keys)) * np.cumsum(samples) + 0.5), prepend=0).tolist()
    taken = np.zeros(len(sizes), bool)
    for n, (of_class, size) in enumerate(zip(number.tolist(), sizes.tolist(), strict=True)):
        if size / 2 <= left[of_class]:
            left[of_class] -= size
            taken[n] = True
    if not taken.any() and len(taken) > 1:  # few large groups
        taken[sizes.argmin()] = True
    return np.asarray(taken[group])


def _keys(source: Source) -> np.ndarray:
    """Return a number (n,) uint64 for each sample, equal for those that stay together."""
    if (names := source.identities()) is not None:
        return hash_of(names)
    if isinstance(source, Tensors) and source.device.type == "cpu":
        rows = [leaf.reshape(len(leaf), -1).contiguous().view(torch.uint8).numpy() for leaf in trees.leaves((source.x, source.y))]
        return hash_of(b"".join(parts) for parts in zip(*(map(bytes, leaf) for leaf in rows), strict=True))
    numbers = rng.uniform(0, 0, torch.arange(len(source)), STREAM).double() * 2**24
    return numbers.numpy().astype(np.uint64) * np.uint64(2**40) + np.arange(len(source), dtype=np.uint64)  # all different


def hash_of(identities: Iterable[str | bytes]) -> np.ndarray:
    """Return a hash (n,) uint64 of each text."""
    contents = (name.encode(errors="surrogateescape") if isinstance(name, str) else name for name in identities)
    digests = b"".join(hashlib.blake2b(content, digest_size=8, person=b"validation").digest() for content in contents)
    return np.frombuffer(digests, "<u8").astype(np.uint64)
