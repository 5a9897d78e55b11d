"""Samples one after the other in a file that is mapped into memory: packed images and tokenized texts.

A folder has two files for each set, NAME.data and NAME.table, and index.json, which is written last. A killed writing continues
where it was, and writes the same bytes.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import mmap
import os
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from drivetrain.core.errors import DataError, UserError, refuse
from drivetrain.core.lazy import torch
from drivetrain.core.machine.files import write_json
from drivetrain.core.typed import fits
from drivetrain.data.untrusted import MAPPED, let_go, ordinary, read_whole

FORMAT, VERSION = "drivetrain-packed", 5
# The columns of the table: a sample's end in the file, its CRC-32 and its class; for a text its key.
END, CRC, LABEL, KEY = range(4)
MOST_INDEX = 1 << 26  # bytes of index.json
CHUNK = 16 << 20  # bytes written between two entries of the journal, about
FAULT = 1 << 16  # bytes that the system maps at once for a read
INDEX: dict[str, object] = {"kind": str, "names": list[str] | None, "splits": dict[str, dict[str, Any]]}
OF_IMAGES: dict[str, object] = {"shape": list[int], "classes": int, "normalize": dict[str, list[float]] | None}
OF_TEXTS: dict[str, object] = {"dtype": str, "files": dict[str, str], "key": str}
IMAGES, TEXTS = ("uint8", "jpeg"), ("tokens",)  # kinds of samples
KINDS = {IMAGES: OF_IMAGES, TEXTS: OF_TEXTS}
DTYPES = ("uint8", "int16", "int32")
MAX_SIDE = 1 << 16  # pixels
# Of a set: the number of its samples, their bytes, and the digest of its table.
ENTRY = {"samples": int, "bytes": int, "table": str}

Sample = tuple[Any, ...]  # its stored bytes, and the columns of its row from LABEL on, whole numbers


def write_set(
    out: Path,
    name: str,
    about: str,
    samples: Callable[[int], Iterator[Sample]],
    on_progress: Callable[[int], None],
    names: list[str] | None = None,
) -> dict[str, Any]:
    """Write a set's data and table; return its entry in the index.

    `samples(n)` yields the samples from number n on. `about` describes the content: a set begun with another one is refused
    (UserError). `names` are the classes known so far; `samples` may add more.
    """
    import numpy as np

    journal = out / f"{name}.journal"
    begun = _begun(journal, about)
    names = [] if names is None else names
    names[:] = begun["names"]
    paths = [out / f"{name}.{ending}" for ending in ("data", "table")]
    with _writing(out):
        for path, size in zip(paths, begun["bytes"], strict=True):
            path.touch()
            if path.stat().st_size < size:
                raise UserError(f"{path} is damaged: give another folder, or remove {out}")
            os.truncate(path, size)  # drops data written after the journal's last entry
    on_progress(begun["samples"])
    for chunk in _chunks(samples(begun["samples"])):
        ends = begun["bytes"][0] + np.cumsum([len(content) for content, *_ in chunk])
        rows = [(end, zlib.crc32(content), *columns) for end, (content, *columns) in zip(ends, chunk, strict=True)]
        table = np.array(rows, "<i8").tobytes()
        with _writing(out):
            for path, parts in zip(paths, ((content for content, *_ in chunk), (table,)), strict=True):
                with path.open("ab") as file:
                    file.writelines(parts)
                    file.flush()
                    os.fsync(file.fileno())
            written = [int(ends[-1]), begun["bytes"][1] + len(table)]
            begun |= {"samples": begun["samples"] + len(chunk), "bytes": written, "names": names}
            write_json(journal, begun)  # once the counted samples are on the disk
        on_progress(begun["samples"])
    return {"samples": begun["samples"], "bytes": begun["bytes"][0], "table": hashlib.blake2b(paths[1].read_bytes()).hexdigest()}


def write_index(out: Path, index: Mapping[str, Any]) -> None:
    """Write index.json, which marks a folder as complete."""
    with _writing(out):
        whole = {"format": FORMAT, "version": VERSION, **index}
        write_json(out / "index.json", {**whole, "sha256": _hash_of(whole)})
        for name in index["splits"]:
            (out / f"{name}.journal").unlink(missing_ok=True)


def _hash_of(index: Mapping[str, Any]) -> str:
    """Return the hash of an index without its own entry, whatever their order and spacing."""
    entries = {name: entry for name, entry in index.items() if name != "sha256"}
    return hashlib.sha256(json.dumps(entries, sort_keys=True).encode()).hexdigest()


def _chunks(samples: Iterator[Sample]) -> Iterator[list[Sample]]:
    """Yield samples in lists of about CHUNK bytes."""
    chunk, size = list[Sample](), 0
    for sample in samples:
        chunk.append(sample)
        size += len(sample[0])
        if size >= CHUNK:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def _begun(journal: Path, about: str) -> dict[str, Any]:
    """Return the progress of an earlier writing. Raises UserError if it wrote something else."""
    begun = {"about": about, "samples": 0, "bytes": [0, 0], "names": []}
    if not journal.exists():
        return begun
    try:
        found = json.loads(read_whole(journal, MOST_INDEX))
        found = {name: found[name] for name in begun}
        known = fits(found["samples"], int) and fits(found["names"], list[str]) and fits(found["bytes"], list[int])
        if not known or len(found["bytes"]) != 2 or min(found["bytes"]) < 0:
            raise ValueError
    except (ValueError, KeyError, TypeError, RecursionError):
        raise UserError(f"{journal} is damaged: give another folder, or remove {journal.parent}") from None
    if found["about"] != about:
        raise UserError(
            f"{journal.parent} was begun with something else ({str(found['about'])[:300]}): give another folder or remove it"
        )
    return found


@contextlib.contextmanager
def _writing(out: Path) -> Iterator[None]:
    """Raise UserError where the disk is full, or the folder may not be written to."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"{out} cannot be written ({error.strerror}): make room, or give another folder (of texts: data.cache)"
        ) from None


def damaged(path: Path, what: str) -> DataError:
    """The error for a changed file."""
    return DataError(f"{path} {what}: remove {path.parent} and make it anew")


def read_index(root: Path, kinds: tuple[str, ...] = IMAGES) -> dict[str, Any]:
    """Read the index.json of a folder of these kinds. Raises UserError if it is missing or changed."""
    try:
        if not (root / "index.json").exists():
            raise FileNotFoundError
        index: dict[str, Any] = json.loads(read_whole(root / "index.json", MOST_INDEX))
        known, version = index["format"] == FORMAT, index["version"]
    except FileNotFoundError:
        started = any(root.glob("*.journal"))
        fix = "its packing was not finished: run the same drivetrain pack again" if started else "write one by drivetrain pack"
        raise UserError(f"data.root={root} is no packed folder (no index.json in it): {fix}") from None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        known, version = False, None
    if not known:
        raise damaged(root / "index.json", "is no index that drivetrain wrote")
    if version != VERSION:
        raise damaged(root / "index.json", f"is of version {version}, and this drivetrain reads {VERSION}")
    wanted = INDEX | KINDS.get(kinds, {})
    wrong = [name for name, kind in wanted.items() if name not in index or not fits(index[name], kind)]
    if wrong := wrong or _senseless(index, kinds):
        raise damaged(root / "index.json", f"is no index that drivetrain wrote (its {', '.join(wrong)})")
    if index.pop("sha256", None) != _hash_of(index):
        raise damaged(root / "index.json", "is not as drivetrain wrote it")
    return index


def _senseless(index: dict[str, Any], kinds: Sequence[str]) -> list[str]:
    """Return the names of the entries with impossible values."""
    splits = index["splits"]
    are_entries = all(fits(entry.get(name), kind) for entry in splits.values() for name, kind in ENTRY.items())
    good = {
        "kind": index["kind"] in kinds,
        "splits": bool(splits) and are_entries and all(entry["samples"] > 0 for entry in splits.values()),
    }
    if kinds == IMAGES:
        good |= {
            "shape": len(index["shape"]) == 3 and all(0 < side <= MAX_SIDE for side in index["shape"]),
            "classes": index["classes"] > 0,
            "normalize": index["normalize"] is None or set(index["normalize"]) == {"mean", "std"},
            "splits": good["splits"] and {"train", "test"} <= splits.keys(),
        }
    elif kinds == TEXTS:
        good["dtype"] = index["dtype"] in DTYPES
    return [name for name, is_good in good.items() if not is_good]


def _as_tensor(content: object, dtype: torch.dtype) -> torch.Tensor:
    """Return read-only bytes as a tensor on the same memory."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        return torch.frombuffer(content, dtype=dtype)


class StoredSamples:
    """The samples of a set, as bytes of a mapped file.

    With `verify`, a sample's checksum is checked at its first read in any process.
    """

    def __init__(self, path: Path, table: torch.Tensor, verify: bool) -> None:
        self.path, self.table, self.verifies = path, table, verify
        self.begins = torch.cat([torch.zeros_like(table[:1, END]), table[:-1, END]])  # (n,) the start of each sample
        self._touched = 0  # most bytes of pages mapped since the last release
        self._open: tuple[mmap.mmap, torch.Tensor] | None = None
        self.expect_all()

    @classmethod
    def rows(cls, root: Path, index: dict[str, Any], name: str) -> torch.Tensor:
        """Return the table (n, columns) of a set. Raises DataError where its files are not what the index describes."""
        entry, path = index["splits"].get(name), root / f"{name}.table"
        if entry is None:
            raise damaged(root, f"names no set {name}")
        try:
            size, of_table = (each.stat().st_size for each in (root / f"{name}.data", path))
        except OSError as error:
            raise damaged(Path(error.filename), f"cannot be read ({error.strerror})") from None
        columns, odd = divmod(of_table, 8 * entry["samples"])
        if odd or columns not in (LABEL + 1, KEY + 1):
            raise damaged(path, f"is no table of {entry['samples']:,} samples")
        if hashlib.blake2b(content := read_whole(path, of_table)).hexdigest() != entry["table"]:
            raise damaged(path, "is not what was packed (its checksum differs)")
        if size != entry["bytes"]:
            raise damaged(root / f"{name}.data", f"has {size:,} bytes, not {entry['bytes']:,}: it was cut or copied in part")
        table = _as_tensor(content, torch.int64).view(-1, columns)
        if int(table[-1, END]) > size or bool((table[:, END].diff(prepend=table.new_zeros(1)) < 0).any()):
            raise damaged(path, "is no table of these samples")
        return table

    def expect_all(self) -> None:
        """Verify each sample when it is read."""
        # In memory shared by worker processes: each sample is verified once, in any process.
        self.unverified = torch.ones(len(self.table), dtype=torch.bool).share_memory_() if self.verifies else None

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_open": None}  # each process maps the file itself

    @property
    def mapped(self) -> tuple[mmap.mmap, torch.Tensor]:
        """The file as mapped memory, and as a tensor (bytes,) uint8."""
        if self._open is None:
            # Read-only and shared: the system refuses a private mapping that is larger than the memory.
            with open(self.path, "rb", opener=ordinary) as file:
                memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            self._open = memory, _as_tensor(memory, torch.uint8)
        return self._open

    def check(self, indices: torch.Tensor) -> None:
        """Verify the samples before reading, and release pages read before. Raises DataError."""
        self._touched += int((self.table[indices, END] - self.begins[indices]).sum()) + FAULT * len(indices)
        if self._touched > MAPPED:
            let_go(self.mapped[0])
            self._touched = 0
        if self.unverified is not None:
            fresh = indices[self.unverified[indices]]
            for index, begin, row in zip(*(t.tolist() for t in (fresh, self.begins[fresh], self.table[fresh])), strict=True):
                if zlib.crc32(memoryview(self.mapped[0])[begin : row[END]]) != row[CRC]:
                    raise damaged(self.path, f"has a sample, number {index}, that is not what was packed (its checksum differs)")
            self.unverified[fresh] = False

    def stored(self, index: int) -> memoryview:
        """Return the stored bytes of a sample."""
        return memoryview(self.mapped[0])[int(self.begins[index]) : int(self.table[index, END])]


def verify(out: Path, on_progress: Callable[[str, int, int], None]) -> int:
    """Check every sample's checksum; return the number of samples. Raises DataError with the names of all wrong samples."""
    index = read_index(out, IMAGES + TEXTS)
    broken, count = list[str](), 0
    for name in index["splits"]:
        split = StoredSamples(out / f"{name}.data", StoredSamples.rows(out, index, name), verify=False)
        for i, row in enumerate(split.table):
            if zlib.crc32(split.stored(i)) != row[CRC]:
                broken.append(f"{split.path}: sample {i} (class {int(row[LABEL])}) is not what was packed: make the folder anew")
            if i % 1000 == 999 or i + 1 == len(split.table):
                on_progress(name, len(split.table), i + 1)
        count += len(split.table)
    refuse(broken, DataError)
    return count
