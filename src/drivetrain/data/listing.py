"""The files of a data set in a folder: one rule of what is data, for every reader."""

from __future__ import annotations

import itertools
import os
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from drivetrain.core.errors import DataError

IMAGES = (".jpg", ".jpeg", ".jfif", ".png", ".bmp", ".webp", ".avif", ".ppm", ".pgm", ".gif", ".tif", ".tiff")
# What systems and tools leave beside data. Names that begin with a dot are no data either.
JUNK = frozenset(
    ("__macosx", "@eadir", "#recycle", "$recycle.bin", "system volume information", "lost+found", "thumbs.db", "desktop.ini")
)
READERS = {  # of files that are not read: the package that does
    ".heic": "pillow-heif", ".heif": "pillow-heif", ".dcm": "pydicom", ".nii": "nibabel", ".jxl": "pillow-jxl-plugin",
    ".cr2": "rawpy", ".nef": "rawpy", ".arw": "rawpy", ".dng": "rawpy", ".svg": "cairosvg", ".exr": "OpenEXR",
}  # fmt: skip


@dataclass
class Folder:
    """A folder's files of the wanted kinds and the folders in it, without what is no data; names are sorted."""

    path: str = ""  # from the folder that was listed; "" for that itself, else it ends in "/"
    files: list[str] = field(default_factory=list)  # names
    folders: dict[str, Folder] = field(default_factory=dict)  # by their names, in one Unicode form
    passed_over: Counter[str] = field(default_factory=Counter)  # ending → number of files of other kinds, here and below
    twins: list[str] = field(default_factory=list)  # paths, here and below, of files whose name is there with another ending

    def every(self) -> Iterator[str]:
        """Yield the paths of the files in it and below, from the folder that was listed."""
        for name in self.files:
            yield self.path + name
        for folder in self.folders.values():
            yield from folder.every()

    def holds_files(self) -> bool:
        """Whether there are files in it or below."""
        return bool(self.files) or any(folder.holds_files() for folder in self.folders.values())


def one_form(name: str) -> str:
    """Return a name in one Unicode form: é is one letter on some systems, and two on others."""
    return unicodedata.normalize("NFC", name)


def walk(root: str, endings: Iterable[str]) -> Folder:
    """List the files below a folder whose names end in one of `endings`, in upper or lower case; links are followed.

    Hidden files and folders, and those of JUNK, are left out. Raises OSError, and DataError for names that look the same.
    """
    return _walk(root, "", frozenset(endings), (os.path.realpath(root),))


def _walk(root: str, path: str, endings: frozenset[str], chain: tuple[str, ...]) -> Folder:
    """List a folder. `chain` has the real folders that lead to it, as far as a link led on; a link back to one ends there."""
    found = Folder(path)
    inside: list[tuple[str, tuple[str, ...]]] = []
    kinds = set()
    with os.scandir(os.path.join(root, path)) as entries:
        for entry in entries:
            name = entry.name
            if name[0] == "." or name.casefold() in JUNK:
                continue
            ending = f".{name.rpartition('.')[2].lower()}" if "." in name else ""
            if ending in endings:
                found.files.append(name)
                kinds.add(ending)
            elif not entry.is_dir():
                found.passed_over[ending] += 1
            elif not entry.is_symlink():
                inside.append((name, chain))
            elif not any(f"{real}/".startswith(f"{target}/") for real in chain for target in [os.path.realpath(entry.path)]):
                inside.append((name, (*chain, os.path.realpath(entry.path))))
    found.files.sort()
    if len(kinds) > 1:
        pairs = itertools.pairwise(found.files)
        found.twins = [path + one for one, other in pairs if one.rpartition(".")[0] == other.rpartition(".")[0]]
    for name, leading in sorted(inside):
        if (key := one_form(name)) in found.folders:
            raise DataError(f"{root}: two folders in {path or '.'} have the name {key!r}, written differently: rename one")
        found.folders[key] = _walk(root, f"{path}{name}/", endings, leading)
        found.passed_over += found.folders[key].passed_over
        found.twins += found.folders[key].twins
    return found


def doubts(root: str, listed: Folder) -> list[str]:
    """Return what looks wrong in a folder that was listed: many files that are not read, and a picture that is there twice."""
    found = []
    if 10 * listed.passed_over.total() > sum(1 for _ in listed.every()):
        found.append(f"{root} has many files that are not read: {said(listed.passed_over)}")
    if listed.twins:
        found.append(
            f"{root} has {len(listed.twins)} files of one name and two kinds, which may be the same picture twice: the first is "
            f"{listed.twins[0]}"
        )
    return found


def said(passed_over: Counter[str]) -> str:
    """Return the files that were passed over in words, such as "30 .heic (pillow-heif reads them), 2 .txt"; "" for none."""
    kinds = [
        f"{count:,} {ending or 'without an ending'}" + (f" ({READERS[ending]} reads them)" if ending in READERS else "")
        for ending, count in passed_over.most_common(4)
    ]
    rest = passed_over.total() - sum(count for _, count in passed_over.most_common(4))
    return ", ".join([*kinds, *([f"{rest:,} others"] if rest else [])])
