"""Which folders of a folder of images hold the training, the test and the validation set."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from drivetrain.core.errors import UserError

IMAGES = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".ppm", ".gif", ".tif", ".tiff")
# The usual names of each set's folder, in upper or lower case.
NAMES = {"train": ("train", "training"), "test": ("test", "testing"), "validation": ("val", "valid", "validation")}


@dataclass
class Layout:
    """The folder of each set that has one, and what else lies beside them."""

    train: Path
    test: Path | None = None  # None: a share of the training files
    validation: Path | None = None  # None: there is none of its own
    not_read: list[str] = field(default_factory=list)  # folders beside train/ that are no set's

    def origins(self, held_out: str) -> dict[str, str]:
        """Return where each set comes from, in words; `held_out` says it of a test set without a folder."""
        if self.test is None:
            return {"test": held_out}
        sets = {"train": self.train, "test": self.test, "validation": self.validation}
        return {name: f"{folder.name}/" for name, folder in sets.items() if folder is not None}


def find(root: Path, validation: str | None) -> Layout:
    """Return the layout of a folder: a folder for each class, or train/ and others that hold these.

    `validation` names the folder of that set; "auto" takes it where there is a test set too; None takes none. A folder beside
    train/ that is none of these is the test set's. Raises UserError where the folders could be read in two ways.
    """
    folders = class_folders(root)
    sets = {kind: [name for name in folders if name.lower() in names] for kind, names in NAMES.items()}
    holding = [name for names in sets.values() for name in names if class_folders(root / name)]
    if not any(name in holding for name in sets["train"]):
        _check_classes(root, folders, sets, holding)
        return Layout(root)
    if len(sets["train"]) > 1:
        raise UserError(_two(root, "training", sets["train"]))
    chosen = validation if validation != "auto" else None
    tests, others = ([name for name in sets[kind] if name != chosen] for kind in ("test", "validation"))
    if len(tests) > 1:
        raise UserError(_two(root, "test", tests))
    if len(others) > 1 and (validation == "auto" or not tests):
        raise UserError(_two(root, "validation", others))
    test = tests or others
    own = chosen or next(iter(others if tests and validation == "auto" else []), None)
    layout = Layout(root / sets["train"][0], root / test[0] if test else None, root / own if own else None)
    read = {layout.train, layout.test, layout.validation}
    layout.not_read = [name for name in folders if root / name not in read]
    for folder in filter(None, (layout.test, layout.validation)):
        if not class_folders(folder):
            raise UserError(
                f"{folder} holds no class folders, as {layout.train} does, so nothing tells the classes of its images: sort them "
                "into class folders, or move the folder elsewhere"
            )
    return layout


def _check_classes(root: Path, folders: list[str], sets: dict[str, list[str]], holding: list[str]) -> None:
    """Raise UserError where folders that are read as classes look like sets, or like the folder of all classes."""
    named = [name for names in sets.values() for name in names]
    if holding and not sets["train"]:
        raise UserError(
            f"{root} has {_listed(holding)} with class folders, but no train/: name the folder of the training images so"
        )
    if named and (holding or len(named) == len(folders)):
        flat = [name for name in named if name not in holding]
        raise UserError(
            f"{root}: there are no class folders in {_listed(flat)}: sort the images into one for each class, as {flat[0]}/cat"
        )
    if len(folders) == 1 and class_folders(root / folders[0]) and not any(_images(root / folders[0])):
        raise UserError(
            f"{root} has one folder, {folders[0]}, which would be the only class, and the folders in it are not read as classes: "
            f"set data.root={root / folders[0]}"
        )


def _two(root: Path, which: str, names: list[str]) -> str:
    return f"{root} has {_listed(names)}, and each could hold the {which} images: rename all but one"


def _listed(names: list[str]) -> str:
    return " and ".join(f"{name}/" for name in names)


def class_folders(folder: Path) -> list[str]:
    """Return the names of the folders in a folder, sorted, without hidden ones."""
    return sorted(entry.name for entry in os.scandir(folder) if entry.is_dir() and entry.name[0] != ".")


def _images(folder: Path) -> Iterator[Path]:
    """Yield the image files that lie in a folder itself."""
    return (path for path in folder.iterdir() if path.suffix.lower() in IMAGES)
