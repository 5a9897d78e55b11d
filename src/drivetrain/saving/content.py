"""Checks what the files of a checkpoint hold before they are loaded, without torch: hashes tell nothing of who wrote them.

A state of 4 MB may inflate to gigabytes, a pickle of ten bytes may ask for as much, and both may have the right hash.
"""

from __future__ import annotations

import io
import json
import pickle
import struct
import zipfile
from typing import IO, NamedTuple, Protocol

from drivetrain.core.errors import UserError
from drivetrain.core.lazy import torch

MOST_PICKLE = 2**28  # bytes of the structure of a state, beside its tensors
MOST_HEADER = 10**8  # bytes of the header of safetensors, as that library itself has it
# The names in a state of tensors, numbers, texts and containers, beside torch's dtypes and storages.
NAMES = {
    "collections.OrderedDict", "collections.Counter", "_codecs.encode", "builtins.set", "builtins.complex",
    "torch.Size", "torch.device", "torch.Tensor", "torch.nn.parameter.Parameter", "torch.serialization._get_layout",
    "torch._tensor._rebuild_from_type_v2", "torch.storage.UntypedStorage", "torch._utils._rebuild_parameter",
    "torch._utils._rebuild_tensor", "torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_tensor_v3",
}  # fmt: skip
DTYPES = ("float", "bfloat", "int", "uint", "complex", "bool", "double", "half", "long", "short", "quint", "qint", "bits")


class Malformed(UserError):
    """A file that is no part of a checkpoint, whatever its hash."""


def check_state(file: IO[bytes]) -> None:
    """Raise Malformed unless a file is torch's archive of plain values, which takes no more memory than it has bytes."""
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
            _Structure(archive.read(structures[0])).load()
    except Malformed:
        raise
    except Exception as error:  # whatever the bytes make of a reader of archives and pickles
        raise Malformed(f"it cannot be read ({str(error).splitlines()[0] if str(error) else type(error).__name__})") from None


def check_weights(file: IO[bytes]) -> None:
    """Raise Malformed unless the tensors that the header of a file of safetensors names fill the file."""
    try:
        size = file.seek(0, io.SEEK_END)
        file.seek(0)
        (length,) = struct.unpack("<Q", file.read(8))
        if length > min(size - 8, MOST_HEADER):
            raise Malformed("its header is longer than the file")
        header = json.loads(file.read(length))
        last = max([0, *(entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__")])
    except Malformed:
        raise
    except Exception as error:
        raise Malformed(f"its header cannot be read ({type(error).__name__})") from None
    if last != size - 8 - length:
        raise Malformed("its header is that of another file")


class _Nothing:
    """Stands for every object of a pickle that is read for its structure alone."""

    def __new__(cls, *_: object, **__: object) -> _Nothing:
        return super().__new__(cls)

    def __setstate__(self, _: object) -> None:
        pass

    def __setitem__(self, *_: object) -> None:
        pass

    def append(self, _: object) -> None:
        pass

    def extend(self, _: object) -> None:
        pass


class _Uncalled:
    """Stands for a class that a pickle may name, but not call: it would take as many bytes as the pickle asks for."""

    def __call__(self, *_: object) -> None:
        raise Malformed("it asks for an empty storage")


class _Structure(pickle._Unpickler):
    """Reads a pickle without making anything of it. The one in C takes gigabytes for a large number of a memo."""

    dispatch = {  # noqa: RUF012
        code: read
        for code, read in pickle._Unpickler.dispatch.items()
        if code not in (pickle.BYTEARRAY8[0], pickle.EXT1[0], pickle.EXT2[0], pickle.EXT4[0])
    }

    def __init__(self, content: bytes) -> None:
        super().__init__(io.BytesIO(content))

    def find_class(self, module: str, name: str) -> object:
        full = f"{module.replace('__builtin__', 'builtins')}.{name}"  # its name in Python 2, as in the pickles of torch
        if full == "torch.storage.UntypedStorage":
            return _Uncalled()
        of_torch = module == "torch" and (name.endswith("Storage") or name.startswith(DTYPES))
        if full not in NAMES and not of_torch:
            raise Malformed(f"it names {full}, which is no part of a checkpoint")
        return _Nothing

    def persistent_load(self, _: object) -> _Nothing:
        return _Nothing()


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
