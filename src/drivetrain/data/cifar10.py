"""CIFAR-10, read from its own archives or from their files.

Not by torchvision.datasets.CIFAR10: it takes no archive and no binary version, reads only files whose MD5 is the original's,
and runs pickle.load on them. This reader runs no pickle.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
import pickletools
import socket
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from drivetrain.core.errors import DataError, OperatorGives, UserError
from drivetrain.core.lazy import numpy as np
from drivetrain.core.lazy import torch
from drivetrain.core.machine.files import one_at_a_time
from drivetrain.core.options.option import RunSpec
from drivetrain.data.base import Data, Fraction, Normalize, Splits, Tensors, measure_normalization
from drivetrain.data.untrusted import check_member, ordinary, read_whole

logger = logging.getLogger(__name__)

PIXELS = 3 * 32 * 32
TRAIN = [f"data_batch_{i}" for i in range(1, 6)]
NAMES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
MAX_BYTES = 512 << 20  # of an unpacked archive; the real ones have 186 million
URL = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
SHA256 = "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd"  # of the archive at URL
# Of the published files, in the binary and in the Python version.
FILES = {
    "data_batch_1.bin": "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5",
    "data_batch_2.bin": "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed",
    "data_batch_3.bin": "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67",
    "data_batch_4.bin": "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48",
    "data_batch_5.bin": "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add",
    "test_batch.bin": "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b",
    "data_batch_1": "54636561a3ce25bd3e19253c6b0d8538147b0ae398331ac4a2d86c6d987368cd",
    "data_batch_2": "766b2cef9fbc745cf056b3152224f7cf77163b330ea9a15f9392beb8b89bc5a8",
    "data_batch_3": "0f00d98ebfb30b3ec0ad19f9756dc2630b89003e10525f5e148445e82aa6a1f9",
    "data_batch_4": "3f7bb240661948b8f4d53e36ec720d8306f5668bd0071dcb4e6c947f78e9682b",
    "data_batch_5": "d91802434d8376bbaeeadf58a737e3a1b12ac839077e931237e0dcd43adcb154",
    "test_batch": "f53d8d457504f7cff4ea9e021afcf0e0ad8e24a91f3fc42091b8adef61157831",
}


class Version(NamedTuple):
    """One of the two versions in which CIFAR-10 is published."""

    folder: str
    archive: str
    ending: str  # of its files
    read: Callable[[str, bytes], tuple[torch.Tensor, torch.Tensor]]  # file name for messages, content → images, labels


@dataclass(kw_only=True, eq=False)
class Cifar10(Data):
    """CIFAR-10 (Krizhevsky 2009): 50,000 training and 10,000 test images of 32×32 in ten classes, held in memory.

    `root` is the binary or the Python version, as .tar.gz or unpacked, or a folder that holds one of them.
    """

    machine_local_keys = ("root", "download")

    root: str | None = None
    download: bool = False
    validation: Fraction | None = 0.1
    normalize: bool = True

    def validate(self, run: RunSpec) -> Iterator[str]:
        if not self.root:
            yield OperatorGives(f"data=cifar10 needs data.root, the folder that holds {' or '.join(v.archive for v in VERSIONS)}")
        elif not self.download and _find(Path(self.root)) is None:
            yield self._missing()

    def _missing(self) -> str:
        names = ", ".join(name for version in VERSIONS for name in (version.folder, version.archive))
        return f"data.root={self.root} holds no CIFAR-10 ({names}): put one there or set data.download=true"

    def shape(self) -> tuple[int, ...]:
        return (3, 32, 32)

    def load(self, device: torch.device) -> Splits:
        root = Path(str(self.root))
        found = _find(root)
        if found is None:
            if not self.download:  # it existed when the config was checked
                raise UserError(self._missing())
            download(URL, root / VERSIONS[0].archive, SHA256)
            found = VERSIONS[0], root / VERSIONS[0].archive
        version, path = found
        files = _read_files(version, path)
        if others := [name for name, content in files.items() if hashlib.sha256(content).hexdigest() != FILES[name]]:
            logger.warning(
                "%s: not as CIFAR-10 was published (another SHA-256): %s. They are read unchanged; if they should be the "
                "originals, fetch %s again",
                path, ", ".join(others), version.archive,
            )  # fmt: skip
        batches = [version.read(name, files.pop(name)) for name in list(files)]  # which frees their memory
        x, y = (torch.cat(parts) for parts in zip(*batches, strict=True))
        count = len(y) - len(batches[-1][1])  # the test's are the last
        train, test = Tensors(x[:count], y[:count]), Tensors(x[count:], y[count:])
        normalize = measure_normalization(train.x) if self.normalize else Normalize([0.0] * 3, [1.0] * 3)
        return Splits(train=train, test=test, shape=self.shape(), classes=len(NAMES), normalize=normalize, names=NAMES)


def _find(root: Path) -> tuple[Version, Path] | None:
    """Return the version that `root` is or holds, and its path: a folder of files before an archive."""
    found = [(v, at) for v in VERSIONS for at in (root, root / v.folder) if (at / (TRAIN[0] + v.ending)).is_file()]
    found += [(v, at) for v in VERSIONS for at in (root, root / v.archive) if at.name == v.archive and at.is_file()]
    return next(iter(found), None)


def _read_files(version: Version, path: Path) -> dict[str, bytes]:
    """Read the six files; return their contents by name, the test's last. Raises DataError with the names of missing files."""
    names = [name + version.ending for name in [*TRAIN, "test_batch"]]
    if path.is_dir():
        files = {file: read_whole(path / file, MAX_BYTES) for file in names if (path / file).is_file()}
    else:
        files = read_members(path, set(names), MAX_BYTES)
    if missing := sorted(set(names) - set(files)):
        raise DataError(f"{path} lacks {', '.join(missing)}: fetch {version.archive} again")
    return {name: files[name] for name in names}


def _to_tensors(name: str, x: np.ndarray, y: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    """Turn arrays into images (n, 3, 32, 32) uint8 and labels (n,) int64. Raises DataError for labels out of range."""
    if not len(y):
        raise DataError(f"{name} holds no images: fetch the archive again")
    if not 0 <= y.min() <= y.max() < len(NAMES):
        raise DataError(f"{name} has labels from {y.min()} to {y.max()}, not 0 to 9: fetch the archive again")
    return torch.tensor(x).view(-1, 3, 32, 32), torch.tensor(y).long()


def _read_binary(name: str, content: bytes) -> tuple[torch.Tensor, torch.Tensor]:
    """Decode records of one byte for the label and 3072 bytes for the image (red, green, blue)."""
    if len(content) % (1 + PIXELS):
        raise DataError(f"{name} has {len(content):,} bytes, no whole number of records of {1 + PIXELS}: fetch the archive again")
    records = np.frombuffer(content, np.uint8).reshape(-1, 1 + PIXELS)
    return _to_tensors(name, records[:, 1:], records[:, 0])


NUMBERS = ("BININT1", "BININT2", "BININT", "INT", "LONG1")  # operations of a pickle
LISTS = (*NUMBERS, "EMPTY_LIST", "LIST", "MARK", "APPEND", "APPENDS", "BINPUT", "LONG_BINPUT", "PUT", "MEMOIZE")
ARRAYS = {
    "_codecs encode", "numpy dtype", "numpy ndarray", "numpy.core.multiarray _reconstruct", "numpy._core.multiarray _reconstruct",
}  # fmt: skip


def _read_pickle(name: str, content: bytes) -> tuple[torch.Tensor, torch.Tensor]:
    """Find the longest text of a pickle, its images, and the list of numbers after `labels`. Raises DataError.

    The pickle is not run: only its operations are read, and nothing that it names is imported.
    """
    try:
        found = [(operation.name, argument) for operation, argument, _ in pickletools.genops(content)]
    except Exception as error:  # a damaged pickle can fail in any way
        raise DataError(f"{name} cannot be read as a batch of CIFAR-10 ({error}): fetch the archive again") from None
    if foreign := [argument for kind, argument in found if kind in ("GLOBAL", "INST") and argument not in ARRAYS]:
        raise DataError(f"{name} is a pickle that asks for {str(foreign[0]).replace(' ', '.')}, which no image needs: refused")
    texts = [each.encode("latin-1", "replace") if isinstance(each, str) else each for _, each in found]
    pixels = max((each for each in texts if isinstance(each, bytes)), key=len, default=b"")
    after = itertools.dropwhile(lambda one: one[0] != "EMPTY_LIST", found[texts.index(b"labels") if b"labels" in texts else -1 :])
    listed = itertools.takewhile(lambda one: one[0] in LISTS, after)
    labels = np.array([argument for kind, argument in listed if kind in NUMBERS], np.int64)
    if b"u1" not in texts or not len(labels) or len(pixels) != len(labels) * PIXELS:
        raise DataError(f"{name} holds no 'data' of {PIXELS} bytes (uint8) with as many 'labels': it is no batch of CIFAR-10")
    return _to_tensors(name, np.frombuffer(pixels, np.uint8).reshape(-1, PIXELS), labels)


VERSIONS = (
    Version("cifar-10-batches-bin", "cifar-10-binary.tar.gz", ".bin", _read_binary),
    Version("cifar-10-batches-py", "cifar-10-python.tar.gz", "", _read_pickle),
)


def read_members(archive: Path, names: set[str], max_bytes: int) -> dict[str, bytes]:
    """Read the files called `names`, in any folder of a tar archive. Raises DataError if it unpacks to over `max_bytes`."""
    found: dict[str, bytes] = {}
    total = 0
    try:
        with open(archive, "rb", opener=ordinary) as file, tarfile.open(fileobj=file) as tar:
            for member in tar:
                check_member(archive, member)
                total += member.size  # members that are skipped count too: they are decompressed on the way
                if total > max_bytes:
                    raise DataError(f"{archive} unpacks to more than {max_bytes:,} bytes: it is not the archive it should be")
                name = PurePosixPath(member.name).name
                if member.isfile() and name in names:
                    content = tar.extractfile(member)
                    found[name] = content.read() if content is not None else b""
    except (OSError, tarfile.TarError, EOFError, ValueError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{archive} cannot be read as a tar archive ({error}): fetch it again") from None
    return found


def download(url: str, path: Path, sha256: str) -> None:
    """Download `url` to `path`, unless it exists.

    A file that is incomplete or has another digest is not kept. One process of a machine downloads; the others wait for it.
    Raises UserError.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with one_at_a_time(path.with_name(f".{path.name}.lock")):
        if not path.exists():
            waits = socket.getdefaulttimeout()
            try:
                socket.setdefaulttimeout(60)  # seconds without an answer: torch.hub itself sets none
                torch.hub.download_url_to_file(url, str(path), sha256, progress=False)
            except OSError as error:
                raise UserError(f"{url} could not be fetched ({error}): put the archive at {path} by hand") from None
            except RuntimeError as error:
                raise UserError(f"{url} gave a file of another SHA-256 ({error}): it was not kept") from None
            finally:
                socket.setdefaulttimeout(waits)
