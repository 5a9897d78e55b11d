"""CIFAR-10, from its own archives."""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from drivetrain.core.errors import DataError, UserError
from drivetrain.core.lazy import torch
from drivetrain.core.option import RunSpec
from drivetrain.data import archive
from drivetrain.data.base import Data, Normalize, Splits, Tensors, measured

PIXELS = 3 * 32 * 32
TRAIN = [f"data_batch_{i}" for i in range(1, 6)]
NAMES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
MOST = 512 << 20  # bytes that an archive may unpack to; the real ones come to 186 million
URL = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
MD5 = "c32a1d4ab5d03f1284b67883e8d87530"


class Form(NamedTuple):
    """One of the two forms in which the set is given out."""

    folder: str
    archive: str
    ending: str  # of its files
    read: Callable[[str, bytes], tuple[torch.Tensor, torch.Tensor]]  # name for messages, content → images, labels


class Cifar10(Data):
    """CIFAR-10 (Krizhevsky 2009): 50,000 training and 10,000 test images of 32×32 in ten classes, held in memory.

    `root` is the binary or the Python version, as .tar.gz or unpacked, or the folder that holds one of them.
    """

    machine_local_keys = ("root", "download")

    def __init__(self, root: str | None = None, download: bool = False, normalize: bool = True, drop_last: bool = True) -> None:
        self.root = os.path.expanduser(root) if root else None
        self.download, self.normalize, self.drop_last = download, normalize, drop_last

    def validate(self, run: RunSpec) -> Iterator[str]:
        if not self.root:
            yield f"data=cifar10 needs data.root, the folder that holds {' or '.join(f.archive for f in FORMS)}"
        elif not self.download and _find(Path(self.root)) is None:
            yield (
                f"data.root={self.root} holds no CIFAR-10 ({', '.join(n for f in FORMS for n in (f.folder, f.archive))}): "
                "put one there or set data.download=true"
            )

    def shape(self) -> tuple[int, ...]:
        return (3, 32, 32)

    def load(self, device: torch.device) -> Splits:
        root = Path(str(self.root))
        found = _find(root)
        if found is None:
            archive.download(URL, root / FORMS[0].archive, MD5)
            found = FORMS[0], root / FORMS[0].archive
        files = _files(*found)
        train, test = (_joined(found[0], files, names) for names in (TRAIN, ["test_batch"]))
        normalize = measured(train.x) if self.normalize else Normalize([0.0] * 3, [1.0] * 3)
        return Splits(train, test, self.shape(), len(NAMES), normalize, NAMES)


def _find(root: Path) -> tuple[Form, Path] | None:
    """The form of what lies at `root` or in it, and where that is; unpacked before packed."""
    for form in FORMS:
        for place in (root, root / form.folder):
            if (place / (TRAIN[0] + form.ending)).is_file():
                return form, place
    for form in FORMS:
        for place in (root, root / form.archive):
            if place.name == form.archive and place.is_file():
                return form, place
    return None


def _files(form: Form, place: Path) -> dict[str, bytes]:
    """The six files' contents by name, without their ending. Raises DataError naming what is missing."""
    wanted = {name + form.ending: name for name in [*TRAIN, "test_batch"]}
    if place.is_dir():
        files = {file: (place / file).read_bytes() for file in wanted if (place / file).is_file()}
    else:
        files = archive.tar_files(place, set(wanted), MOST)
    if missing := sorted(set(wanted) - set(files)):
        raise DataError(f"{place} lacks {', '.join(missing)}: fetch {form.archive} again")
    return {wanted[file]: content for file, content in files.items()}


def _joined(form: Form, files: dict[str, bytes], names: list[str]) -> Tensors:
    read = [form.read(name + form.ending, files.pop(name)) for name in names]
    return Tensors(torch.cat([x for x, _ in read]), torch.cat([y for _, y in read]))


def _checked(name: str, x: Any, y: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Images (n, 3, 32, 32) uint8 and labels (n,) int64, of arrays."""
    if not len(y):
        raise DataError(f"{name} holds no images: fetch the archive again")
    if not 0 <= y.min() <= y.max() < len(NAMES):
        raise DataError(f"{name} has labels from {y.min()} to {y.max()}, not 0 to 9: fetch the archive again")
    return torch.tensor(x).view(-1, 3, 32, 32), torch.tensor(y).long()


def _read_binary(name: str, content: bytes) -> tuple[torch.Tensor, torch.Tensor]:
    """Records of one byte label and 3072 bytes red, green, blue."""
    import numpy as np

    if len(content) % (1 + PIXELS):
        raise DataError(f"{name} has {len(content):,} bytes, no whole number of records of {1 + PIXELS}: fetch the archive again")
    records = np.frombuffer(content, np.uint8).reshape(-1, 1 + PIXELS)
    return _checked(name, records[:, 1:], records[:, 0])


def _read_pickle(name: str, content: bytes) -> tuple[torch.Tensor, torch.Tensor]:
    """A pickled mapping of `data`, an array (n, 3072), and `labels`, a list. Raises DataError for anything else."""
    import numpy as np

    batch: Any = _unpickled(name, content)
    named = batch.items() if isinstance(batch, dict) else ()
    batch = {k.decode("latin-1") if isinstance(k, bytes) else k: v for k, v in named}
    data, labels = batch.get("data"), batch.get("labels")
    whole = isinstance(data, _Array) and isinstance(labels, list) and data.shape == (len(labels), PIXELS)
    if not whole or not all(type(label) is int for label in labels):
        raise DataError(f"{name} holds no 'data' of {PIXELS} bytes with as many 'labels': it is no batch of CIFAR-10")
    return _checked(name, np.frombuffer(data.bytes, np.uint8).reshape(data.shape), np.array(labels))


class _Array:
    """What stands for a numpy array in a pickle: bytes and a shape. numpy itself never sees what the pickle says."""

    def __setstate__(self, state: Any) -> None:
        _, shape, kind, fortran, content = state
        whole = isinstance(kind, _Kind) and kind.name == "u1" and not fortran and isinstance(content, bytes)
        if not whole or len(shape) != 2 or shape[0] * shape[1] != len(content):
            raise pickle.UnpicklingError("an array that is not uint8 (n, m)")
        self.shape, self.bytes = tuple(shape), content


class _Kind:
    """What stands for a numpy dtype."""

    def __init__(self, name: str | bytes, *_: Any) -> None:
        self.name = name.decode("latin-1") if isinstance(name, bytes) else name

    def __setstate__(self, state: Any) -> None:
        pass  # byte order: one byte has none


def _unpickled(name: str, content: bytes) -> Any:
    """A pickle's content, where it needs nothing but arrays of bytes. Nothing that it names is imported."""

    def encode(text: str, encoding: str) -> bytes:
        return text.encode({"latin1": "latin-1"}[encoding])

    def reconstruct(*_: Any) -> _Array:
        return _Array()

    admitted = {
        "numpy.core.multiarray._reconstruct": reconstruct, "numpy._core.multiarray._reconstruct": reconstruct,
        "numpy.ndarray": "ndarray", "numpy.dtype": _Kind, "_codecs.encode": encode,
    }  # fmt: skip

    class Reader(pickle._Unpickler):  # type: ignore[name-defined,misc] # the one in Python: its memo is a dict, no array a pickle can size
        def find_class(self, module: str, attribute: str) -> Any:
            if f"{module}.{attribute}" not in admitted:
                raise DataError(f"{name} is a pickle that asks for {module}.{attribute}, which no image needs: refused")
            return admitted[f"{module}.{attribute}"]

    try:
        return Reader(io.BytesIO(content), encoding="bytes").load()
    except UserError:
        raise
    except Exception as error:  # a pickle's machine can fail in any way
        raise DataError(f"{name} cannot be read as a batch of CIFAR-10 ({error}): fetch the archive again") from None


FORMS = (
    Form("cifar-10-batches-bin", "cifar-10-binary.tar.gz", ".bin", _read_binary),
    Form("cifar-10-batches-py", "cifar-10-python.tar.gz", "", _read_pickle),
)
