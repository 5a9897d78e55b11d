"""Checks what the states in a checkpoint hold before torch loads them: hashes tell nothing of who wrote them.

torch and safetensors refuse what is no tensor or plain value themselves. What they would take memory for is refused here.
"""

from __future__ import annotations

import io
import zipfile
from typing import IO, NamedTuple, Protocol

from drivetrain.core.errors import UserError
from drivetrain.core.lazy import torch

MOST_PICKLE = 2**28  # bytes of the structure of a state, beside its tensors


class Malformed(UserError):
    """A file that is no part of a checkpoint, whatever its hash."""


def check_state(file: IO[bytes]) -> None:
    """Raise Malformed unless a file is an archive of torch's, which takes no more memory than it has bytes."""
    try:
        with zipfile.ZipFile(file) as archive:
            entries = archive.infolist()
            if any(entry.compress_type != zipfile.ZIP_STORED or entry.file_size != entry.compress_size for entry in entries):
                raise Malformed("it is compressed, which torch's are not")
            size = file.seek(0, io.SEEK_END)
            if sum(entry.file_size for entry in entries) > size:
                raise Malformed("its parts overlap")
            structures = [entry for entry in entries if entry.filename.endswith("/data.pkl")]
            if len(structures) != 1 or structures[0].file_size > MOST_PICKLE:
                raise Malformed("it has no structure that can be read")
            if b"\nbytearray\n" in archive.read(structures[0]):  # torch calls it with any number, and fills as many bytes
                raise Malformed("it names bytearray, which is no part of a checkpoint")
    except Malformed:
        raise
    except Exception as error:  # whatever the bytes make of a reader of archives
        raise Malformed(f"it cannot be read ({str(error).splitlines()[0] if str(error) else type(error).__name__})") from None


class TensorPart(NamedTuple):
    """A part of a tensor, and the index in the whole one at which it begins, by dimension."""

    offsets: tuple[int, ...]
    tensor: torch.Tensor


class Divided(NamedTuple):
    """A tensor of this shape, and this rank's parts of it. Several ranks may hold one part; no two parts overlap."""

    shape: tuple[int, ...]
    parts: list[TensorPart]


class Shards(Protocol):
    """The part of a checkpoint's tensors on a rank: of kind "model", "optimizer", "ema" or "masters", each of a weight."""

    def divided(self, kind: str, name: str, tensor: torch.Tensor) -> Divided:
        """Return a tensor that belongs to the weight `name` as this rank's parts of it, in the weight's own shape."""

    def empty_shard(self, kind: str, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return an empty tensor for this rank's parts of one of this shape. A meta tensor: it has none of it."""


class Undivided:
    """A process that holds all tensors whole."""

    def divided(self, kind: str, name: str, tensor: torch.Tensor) -> Divided:
        """Return the tensor as its only part."""
        return whole(tensor)

    def empty_shard(self, kind: str, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return an empty tensor of the whole shape."""
        return torch.empty(shape, dtype=dtype)


def whole(tensor: torch.Tensor) -> Divided:
    """Return a tensor as its only part. A meta tensor has none: it is on other ranks."""
    return Divided(tuple(tensor.shape), [] if tensor.is_meta else [TensorPart((0,) * tensor.ndim, tensor)])
