"""The fingerprint of a training set as it was read: equal on every machine where the samples are, whatever the seed.

It is cheap: tensors in memory are hashed as a whole up to MAX_BYTES. What knows a text of each sample's content (rows of a
table, documents, checksums of a packed file) is hashed by these. Of image files it is their names and classes, and the
bytes of some files; of all else it is some samples. The fingerprint says which.
"""

from __future__ import annotations

import hashlib
import logging
from typing import Any

from drivetrain.core import trees
from drivetrain.core.lazy import torch
from drivetrain.core.source import Source
from drivetrain.core.tensors import Tensors
from drivetrain.data.decoding import ImageFileSource

MAX_BYTES = 2**28  # of tensors that are hashed as a whole
SAMPLES = 32  # that are read where it would be dear to read all, spread evenly

logger = logging.getLogger(__name__)


def fingerprint(source: Source) -> dict[str, Any] | None:
    """Return `hash`, `of` (what was hashed) and `samples` (how many there are) of a source; None where it cannot be read."""
    digest = hashlib.blake2b(f"{len(source)} samples".encode(), digest_size=16)
    try:
        of = _add(digest, source)
    except Exception as error:  # a user's own Dataset may raise anything
        logger.info("the training data has no fingerprint: %s: %s", type(error).__name__, error)
        return None
    return {"hash": digest.hexdigest(), "of": of, "samples": len(source)}


def _add(digest: Any, source: Source) -> str:
    """Hash what there is of a source; return what that was."""
    names = source.identities()
    if names is None and isinstance(source, Tensors) and trees.nbytes((source.x, source.y)) <= MAX_BYTES:
        _add_tensors(digest, (source.x, source.y))
        return "content"
    spread = torch.arange(count := min(SAMPLES, len(source)))
    if not source.in_order:
        spread = spread * len(source) // max(1, count)
    if names is not None:
        for name in names:
            digest.update(_bytes(name) + b"\0")
    if (labels := source.labels()) is not None:
        _add_tensors(digest, labels.long())
    if isinstance(source, ImageFileSource):
        for index in spread.tolist():
            digest.update(source.content(index))
        return f"names and {count} files" if names is not None else f"{count} files"
    if names is not None:
        return "content"
    _add_tensors(digest, source.fetch(spread))
    return f"{count} samples"


def _add_tensors(digest: Any, tree: Any) -> None:
    """Hash the tensors of a tree: their names, types, shapes and values."""
    for name, tensor in trees.named_leaves(tree):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())


def _bytes(name: str | bytes) -> bytes:
    return name.encode(errors="surrogateescape") if isinstance(name, str) else name
