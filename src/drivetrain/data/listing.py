"""The files of a data set in a folder: the files that are data, and the folders of each set, by one rule for every reader."""

from __future__ import annotations

import itertools
import os
import re
import unicodedata
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from drivetrain.core.errors import DataError, UserError, refuse

IMAGES = (".jpg", ".jpeg", ".jfif", ".png", ".bmp", ".webp", ".avif", ".ppm", ".pgm", ".gif", ".tif", ".tiff")
# Files that systems and tools leave among data. Names that begin with a dot are no data either.
JUNK = frozenset(
    ("__macosx", "@eadir", "#recycle", "$recycle.bin", "system volume information", "lost+found", "thumbs.db", "desktop.ini")
)
READERS = {  # ending of files that are not read → a package that reads them
    ".heic": "pillow-heif", ".heif": "pillow-heif", ".dcm": "pydicom", ".nii": "nibabel", ".jxl": "pillow-jxl-plugin",
    ".cr2": "rawpy", ".nef": "rawpy", ".arw": "rawpy", ".dng": "rawpy", ".svg": "cairosvg", ".exr": "OpenEXR",
}  # fmt: skip


@dataclass
class Folder:
    """A folder's data files of the wanted kinds and its folders, sorted by name."""

    path: str = ""  # relative to the listed folder; "" for that folder, else it ends in "/"
    files: list[str] = field(default_factory=list)  # names
    folders: dict[str, Folder] = field(default_factory=dict)  # by their names, in one Unicode form
    passed_over: Counter[str] = field(default_factory=Counter)  # ending → number of files of other kinds, here and below
    twins: list[str] = field(default_factory=list)  # paths, here and below, of files that exist with another ending too

    def every(self) -> Iterator[str]:
        """Yield the paths of the files in it and below, relative to the listed folder."""
        yield from (self.path + name for name in self.files)
        for folder in self.folders.values():
            yield from folder.every()

    def holds_files(self) -> bool:
        """True if there are files in it or below."""
        return bool(self.files) or any(folder.holds_files() for folder in self.folders.values())


def one_form(name: str) -> str:
    """Return a name in one Unicode form: é is one letter on some systems, and two on others."""
    return unicodedata.normalize("NFC", name)


def walk(root: str, endings: Iterable[str], unwanted: Container[str] = ()) -> Folder:
    """List the files below a folder whose names end in one of `endings`, in upper or lower case; links are followed.

    Hidden files and folders, JUNK and `unwanted` are left out. Raises OSError, and DataError for names that look
    the same.
    """
    return _walk(root, "", frozenset(endings), unwanted, (os.path.realpath(root),))


def _walk(root: str, path: str, endings: frozenset[str], unwanted: Container[str], chain: tuple[str, ...]) -> Folder:
    """List a folder. `chain` has the real folders on the way; a link back to one of them is not followed."""
    found = Folder(path)
    inside: list[tuple[str, tuple[str, ...]]] = []
    kinds = set()
    with os.scandir(os.path.join(root, path)) as entries:
        for entry in entries:
            name = entry.name
            if name[0] == "." or name.casefold() in JUNK or name in unwanted:
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
        found.folders[key] = _walk(root, f"{path}{name}/", endings, unwanted, leading)
        found.passed_over += found.folders[key].passed_over
        found.twins += found.folders[key].twins
    return found


def doubts(root: str, listed: Folder) -> list[str]:
    """Return doubts about a listed folder: many unread files, and pictures that exist twice."""
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
    """Return the skipped files in words, such as "30 .heic (pillow-heif reads them), 2 .txt"; "" for none."""
    kinds = [
        f"{count:,} {ending or 'without an ending'}" + (f" ({READERS[ending]} reads them)" if ending in READERS else "")
        for ending, count in passed_over.most_common(4)
    ]
    rest = passed_over.total() - sum(count for _, count in passed_over.most_common(4))
    return ", ".join([*kinds, *([f"{rest:,} others"] if rest else [])])


# The words that name a set, in upper or lower case.
WORDS = {
    "train": ("train", "training", "trn"), "test": ("test", "testing", "tst"),
    "validation": ("val", "valid", "validation", "dev"),
}  # fmt: skip
FILLER = frozenset(("set", "sets", "data", "dataset", "image", "images", "img", "imgs", "split"))  # beyond a set's word


@dataclass
class SetFolders:
    """The folder of each set that has one, and the folders of no set."""

    train: Folder
    # The folders of the sets by their names. Without a test folder, a share of the training files; without a validation folder,
    # none.
    test: dict[str, Folder] = field(default_factory=dict)
    validation: dict[str, Folder] = field(default_factory=dict)
    not_read: list[str] = field(default_factory=list)  # folders next to train/ that are no set's

    def origins(self, held_out: str) -> dict[str, str]:
        """Return the origin of each set, in words; `held_out` is the origin of a test set without a folder."""
        if not self.test:
            return {"test": held_out}
        sets = {"train": [self.train], "test": self.test.values(), "validation": self.validation.values()}
        return {name: ", ".join(folder.path for folder in folders) for name, folders in sets.items() if folders}


def find(root: str, listed: Folder, validation: Sequence[str] | None, test: Sequence[str] = ()) -> SetFolders:
    """Return the layout of a folder: a folder for each class, or train/ and others that hold these.

    A folder with nothing but one folder of folders is passed through. `validation` names the folders of these sets; None takes
    the folder of that name, if there is a test set too. `test` names the test folders; without names it is the folder of that
    name. A folder next to train/ with an unusual name is not read. Raises UserError where the folders could be read in two ways.
    """
    named = roles(list(listed.folders))
    base = listed if named else _passed_through(listed)
    named = named or roles(list(base.folders))
    folders = {name: _passed_through(folder) for name, folder in base.folders.items()}
    classes = {name: set(class_folders(folder)) for name, folder in folders.items()}
    holding = [n for n in folders if classes[n] and (n in named or (len(classes[n]) > 1 and not folders[n].files))]
    train = [name for name in holding if named.get(name) == "train"]
    others = [name for name in holding if name not in train]
    alike = [name for name in others if any(_alike(classes[name], classes[one]) for one in (train or others) if one != name)]
    if not train or (others and not alike and any(name not in named for name in others)):
        _check_classes(f"{root}/{base.path}".rstrip("/"), folders, named, holding, alike)
        return SetFolders(base)
    beside = [name for name in folders if name not in named and folders[name].holds_files()]
    asked = {one_form(name) for name in (*test, *(validation or ()))}
    if beside and not any(name in named or name in asked for name in others):
        raise UserError(
            f"{root} has class folders in {_listed(train)}, and images in {_listed(beside[:5])}, so it could be a class: set "
            f"data.root={root}/{train[0]}, or move its images out of these folders"
        )
    return _sets(root, folders, named, validation, test)


def _sets(
    root: str, folders: dict[str, Folder], named: dict[str, str], validation: Sequence[str] | None, test: Sequence[str]
) -> SetFolders:
    """Return the layout of folders where some are sets. Raises UserError."""
    of = {kind: [name for name in folders if named.get(name) == kind] for kind in WORDS}
    if len(of["train"]) > 1:
        raise UserError(_two(root, "training", of["train"]))
    given, chosen = list(map(one_form, test)), list(map(one_form, validation or ()))
    tests, others = ([name for name in of[kind] if name not in (*chosen, *given)] for kind in ("test", "validation"))
    tests = given or tests
    if len(tests) > 1 and not given:
        raise UserError(_two(root, "test", tests))
    if len(others) > 1 and (validation is None or not tests):
        raise UserError(_two(root, "validation", others))
    own = chosen or (others[:1] if tests and validation is None else [])
    sets = [of["train"][:1], tests or others[:1], own]
    train, *found = ({name: folders.get(name, Folder(f"{name}/")) for name in names} for names in sets)
    refuse(
        f"{root}/{folder.path} holds no class folders, as {sets[0][0]}/ does, so the classes of its images are unknown: sort "
        "them into class folders, or move the folder elsewhere"
        for folder in (folder for each in found for folder in each.values())
        if not class_folders(folder)
    )
    return SetFolders(
        train[sets[0][0]], found[0], found[1], [name for name in folders if not any(name in names for names in sets)]
    )


def roles(names: Sequence[str]) -> dict[str, str]:
    """Return the set of each folder that is named after one: training_set, seg_train, train2017, …

    A name has one word of a set; its other words are numbers, filler, or words that all such names share.
    """
    words = {name: _words(name) for name in names}
    like = {name: of[0] for name in names if len(of := [kind for word in words[name] if (kind := _kind(word))]) == 1}
    shared = set.intersection(*(set(words[name]) for name in like)) if like else set()
    return {
        name: kind
        for name, kind in like.items()
        if all(_kind(word) or word.isdigit() or word in FILLER or word in shared for word in words[name])
    }


def _words(name: str) -> list[str]:
    """Return the words and numbers of a name: TrainSet2 has train, set and 2."""
    return [word.casefold() for word in re.findall(r"\d+|[^\W\d_]+", re.sub(r"(?<=[a-z])(?=[A-Z])", " ", name))]


def _kind(word: str) -> str | None:
    """Return the set that a word names, such as train or trainset."""
    plain = next((word.removesuffix(filler) for filler in FILLER if word.endswith(filler)), word)
    return next((kind for kind, words in WORDS.items() if word in words or plain in words), None)


def _passed_through(folder: Folder) -> Folder:
    """Return the folder at the end of a chain of single folders."""
    while not folder.files and len(folder.folders) == 1 and class_folders(inner := next(iter(folder.folders.values()))):
        folder = inner
    return folder


def _alike(one: set[str], other: set[str]) -> bool:
    """True if at least half of the class names are the same."""
    return 2 * len(one & other) >= min(len(one), len(other)) > 0


def _check_classes(
    root: str, folders: dict[str, Folder], named: dict[str, str], holding: Sequence[str], alike: Sequence[str]
) -> None:
    """Raise UserError where folders that are read as classes look like sets, or hold the same names."""
    sets = [name for name in holding if name in named]
    flat = [name for kind in WORDS for name in named if named[name] == kind and name not in holding]
    if sets and "train" not in named.values():
        raise UserError(
            f"{root} has {_listed(sets)} with class folders, but no train/: name the folder of the training images so"
        )
    if flat and (sets or len(flat) == len(folders)):
        left = said(sum((folders[name].passed_over for name in flat), Counter()))
        raise UserError(
            f"{root}: there are no class folders in {_listed(flat)} with images{f' (not read: {left})' if left else ''}: sort "
            f"the images into one for each class, as {flat[0]}/cat"
        )
    if alike:
        inside = class_folders(folders[alike[0]])
        hint = "move the sets above the classes, as train/cat" if roles(inside) else "name one train/, or set data.root to one"
        raise UserError(
            f"{root}: {_listed(alike[:5])} hold folders of the same names, such as {inside[0]}: if they are sets, {hint}; if "
            "they are classes, move their images out of these folders"
        )


def _two(root: str, which: str, names: list[str]) -> str:
    return f"{root} has {_listed(names)}, and each could hold the {which} images: rename all but one"


def _listed(names: Sequence[str]) -> str:
    return " and ".join(f"{name}/" for name in names)


def class_folders(folder: Folder) -> list[str]:
    """Return the names of the folders in a folder that hold files, sorted."""
    return sorted(name for name, inside in folder.folders.items() if inside.holds_files())


def strays(folder: Folder, read: Folder) -> Iterator[str]:
    """Yield the files next to class folders or sets, on the way to the folder that is read."""
    yield from folder.files
    if folder is not read:
        for inside in folder.folders.values():
            if read.path.startswith(inside.path):
                yield from strays(inside, read)
