"""Which folders of a folder of images hold the training, the test and the validation set: a function of what is listed there."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from drivetrain.core.errors import UserError
from drivetrain.data.listing import Folder, one_form

# The words that name a set, in upper or lower case.
WORDS = {
    "train": ("train", "training", "trn"), "test": ("test", "testing", "tst"),
    "validation": ("val", "valid", "validation", "dev"),
}  # fmt: skip
FILLER = frozenset(("set", "sets", "data", "dataset", "image", "images", "img", "imgs", "split"))  # words that may stand beside


@dataclass
class Layout:
    """The folder of each set that has one, and what else lies beside them."""

    train: Folder
    test: Folder | None = None  # None: a share of the training files
    validation: Folder | None = None  # None: there is none of its own
    not_read: list[str] = field(default_factory=list)  # folders beside train/ that are no set's

    def origins(self, held_out: str) -> dict[str, str]:
        """Return where each set comes from, in words; `held_out` says it of a test set without a folder."""
        if self.test is None:
            return {"test": held_out}
        sets = {"train": self.train, "test": self.test, "validation": self.validation}
        return {name: folder.path for name, folder in sets.items() if folder is not None}


def find(root: str, listed: Folder, validation: str | None, test: str | None = None) -> Layout:
    """Return the layout of a folder: a folder for each class, or train/ and others that hold these.

    A folder with nothing but one folder of folders is passed through. `validation` names the folder of that set; "auto" takes
    it where there is a test set too; None takes none. `test` names that of the test set; None takes the one that is called so.
    Where a set's name is not among the usual ones, the folder beside train/ is not read. Raises UserError where the folders
    could be read in two ways.
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
        return Layout(base)
    beside = [name for name in folders if name not in named and folders[name].holds_files()]
    if beside and not any(name in named for name in others):
        raise UserError(
            f"{root} has class folders in {_listed(train)}, and images in {_listed(beside[:5])}, so it could be a class: set "
            f"data.root={root}/{train[0]}, or move its images out of these folders"
        )
    return _sets(root, folders, named, validation, test)


def _sets(root: str, folders: dict[str, Folder], named: dict[str, str], validation: str | None, given: str | None) -> Layout:
    """Return the layout of folders of which some are sets. Raises UserError."""
    of = {kind: [name for name in folders if named.get(name) == kind] for kind in WORDS}
    if len(of["train"]) > 1:
        raise UserError(_two(root, "training", of["train"]))
    chosen = None if validation in ("auto", None) else one_form(str(validation))
    tests, others = ([name for name in of[kind] if name not in (chosen, given)] for kind in ("test", "validation"))
    tests = tests if given is None else [one_form(given)]
    if len(tests) > 1:
        raise UserError(_two(root, "test", tests))
    if len(others) > 1 and (validation == "auto" or not tests):
        raise UserError(_two(root, "validation", others))
    test = tests or others
    own = chosen or next(iter(others if tests and validation == "auto" else []), None)
    sets = [of["train"][0], test[0] if test else None, own]
    found = [None if name is None else folders.get(name, Folder(f"{name}/")) for name in sets]
    for folder in found[1:]:
        if folder is not None and not class_folders(folder):
            raise UserError(
                f"{root}/{folder.path} holds no class folders, as {sets[0]}/ does, so nothing tells the classes of its images: "
                "sort them into class folders, or move the folder elsewhere"
            )
    assert found[0] is not None
    return Layout(found[0], found[1], found[2], [name for name in folders if name not in sets])


def roles(names: Sequence[str]) -> dict[str, str]:
    """Return which set each folder is named after, for those that are: training_set, seg_train, train2017, …

    A name has one word of a set, and beside it numbers, filler, or words that all such names share.
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
    """Return the set that a word names, as train and trainset do."""
    plain = next((word.removesuffix(filler) for filler in FILLER if word.endswith(filler)), word)
    return next((kind for kind, words in WORDS.items() if word in words or plain in words), None)


def _passed_through(folder: Folder) -> Folder:
    """Return what a folder with nothing but one folder of folders leads to."""
    while not folder.files and len(folder.folders) == 1 and class_folders(inner := next(iter(folder.folders.values()))):
        folder = inner
    return folder


def _alike(one: set[str], other: set[str]) -> bool:
    """Whether at least half of the class names are the same."""
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
        raise UserError(
            f"{root}: there are no class folders in {_listed(flat)}: sort the images into one for each class, as {flat[0]}/cat"
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
    """Yield the files that lie beside class folders or sets, on the way to the folder that is read."""
    yield from folder.files
    if folder is not read:
        for inside in folder.folders.values():
            if read.path.startswith(inside.path):
                yield from strays(inside, read)
