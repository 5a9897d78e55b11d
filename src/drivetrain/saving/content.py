"""Checks the content of a checkpoint's states before torch loads them, because hashes do not prove the author.

torch and safetensors themselves refuse anything except tensors and plain values. Here, oversized content is refused.
"""

from __future__ import annotations

import io
import zipfile
from typing import IO, NamedTuple, Protocol

from drivetrain.core.errors import UserError
from drivetrain.core.lazy import torch

MOST_PICKLE = 2**28  # bytes of a state's structure, without its tensors


class Malformed(UserError):
    """A file that cannot be part of a checkpoint, whatever its hash."""


def check_state(file: IO[bytes]) -> None:
    """Raise Malformed unless a file is an archive of torch's that needs no more memory than its size."""
    try:
        with zipfile.ZipFile(file) as archive:
            entries = archive.infolist()
            if any(entry.compress_type != zipfile.ZIP_STORED or entry.file_size != entry.compress_size for entry in entries):
                raise Malformed("it is compressed, but torch's are not")
            size = file.seek(0, io.SEEK_END)
            if sum(entry.file_size for entry in entries) > size:
                raise Malformed("its parts overlap")
            structures = [entry for entry in entries if entry.filename.endswith("/data.pkl")]
            if len(structures) != 1 or structures[0].file_size > MOST_PICKLE:
                raise Malformed("it has no readable structure")
            if b"\nbytearray\n" in archive.read(structures[0]):  # torch calls it with any number and fills as many bytes
                raise Malformed("it names bytearray, which no checkpoint contains")
    except Malformed:
        raise
    except Exception as error:  # damaged bytes may raise anything in zipfile
        raise Malformed(f"it cannot be read ({str(error).splitlines()[0] if str(error) else type(error).__name__})") from None


class TensorPart(NamedTuple):
    """A part of a tensor, and its offsets in the whole tensor, by dimension."""

    offsets: tuple[int, ...]
    tensor: torch.Tensor


class Divided(NamedTuple):
    """A tensor of this shape, and this rank's parts of it. Several ranks may hold one part; no two parts overlap."""

    shape: tuple[int, ...]
    parts: list[TensorPart]


class Shards(Protocol):
    """A rank's part of a checkpoint's tensors, each of one weight and of kind "model", "optimizer", "ema" or "masters"."""

    def divided(self, kind: str, name: str, tensor: torch.Tensor) -> Divided:
        """Return a tensor that belongs to the weight `name` as this rank's parts of it, in the weight's own shape."""

    def empty_shard(self, kind: str, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return an empty tensor for this rank's parts of a tensor of this shape. A meta tensor: the rank has no part."""


class Undivided:
    """A process with whole tensors."""

    def divided(self, kind: str, name: str, tensor: torch.Tensor) -> Divided:
        """Return the tensor as its only part."""
        return whole(tensor)

    def empty_shard(self, kind: str, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return an empty tensor of the whole shape."""
        return torch.empty(shape, dtype=dtype)


def whole(tensor: torch.Tensor) -> Divided:
    """Return a tensor as its only part. A meta tensor has no part: it is on other ranks."""
    return Divided(tuple(tensor.shape), [] if tensor.is_meta else [TensorPart((0,) * tensor.ndim, tensor)])
