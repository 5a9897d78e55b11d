"""The inputs of `drivetrain predict`: images, folders, arrays, tables, lines of text, and the run's own data, read in order."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from drivetrain.core.cpus import usable_cores
from drivetrain.core.errors import DataError, UserError
from drivetrain.core.source import Source
from drivetrain.core.trees import Tree, map_tensors
from drivetrain.inference.transforms import Transforms

IMAGES = (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".ppm", ".pgm")
ARRAYS = (".npy", ".npz", ".pt", ".pth")


@dataclass
class Item:
    """One input that can be read."""

    name: str
    read: Callable[[], Tree]  # raises DataError
    target: Callable[[], Any] | None = None  # the right answer, where the data set has it


@dataclass
class Read:
    """One input that was read, or why it could not be."""

    name: str
    x: Tree | None
    error: str = ""
    target: Any = None


def given(words: Sequence[str], transforms: Transforms, lines: Iterable[str]) -> tuple[Iterator[Item], int | None]:
    """The inputs that the words name, in their order, and how many; "-" stands for `lines`. Raises UserError."""
    missing = [word for word in words if word != "-" and not os.path.lexists(word)]
    if missing:
        raise UserError([f"{word}: there is no such file or folder" for word in missing])
    found: list[Item] = []
    problems: list[str] = []
    for path in (Path(word) for word in words if word != "-"):
        try:
            found += _of_folder(path, transforms) if path.is_dir() else _of_file(path, transforms)
        except UserError as error:
            problems += error.problems
    if problems:
        raise UserError(problems)
    if "-" not in words:
        return iter(found), len(found)
    if len(words) > 1:
        raise UserError("'-' reads the inputs from standard input: give it alone")
    return _of_lines(lines, transforms), None


def _of_folder(folder: Path, transforms: Transforms) -> list[Item]:
    """The images and arrays in a folder and below, sorted by their paths."""
    inside = sorted(p for p in folder.rglob("*") if p.suffix.lower() in IMAGES + ARRAYS)
    if not inside:
        raise UserError(f"{folder} holds no image and no array: it needs files such as {', '.join((*IMAGES[:4], *ARRAYS))}")
    return [item for path in inside for item in _of_file(path, transforms)]


def _of_file(path: Path, transforms: Transforms) -> list[Item]:
    """The samples of a file: one of an image, one for each row of an array or a table, one for each line of texts."""
    if path.suffix.lower() in transforms.input_files:
        return [Item(f"{path}[{n}]", read) for n, read in enumerate(transforms.read_inputs(path))]
    if path.suffix.lower() in ARRAYS:
        rows = transforms.as_samples(_read_array(path), str(path))
        if len(rows) == 1:
            return [Item(str(path), lambda: rows[0])]
        return [Item(f"{path}[{n}]", lambda n=n: rows[n]) for n in range(len(rows))]  # type: ignore[misc]
    if transforms.tokens:
        files = "".join(f", or a file *{ending}" for ending in transforms.input_files)
        raise UserError(
            f"{path}: this run reads text: give its lines by standard input, as in: drivetrain predict RUN - < {path}{files}"
        )
    if transforms.input_files:
        raise UserError(f"{path}: this run reads tables: give a file whose name ends in {', '.join(transforms.input_files)}")
    transforms.image_shape()  # raises where the model takes no images
    return [Item(str(path), lambda: transforms.read_file(path))]


def _read_array(path: Path) -> torch.Tensor:
    """Return an array of a file, whose bytes are read where they are used. Raises UserError."""
    import numpy as np

    try:
        if path.suffix.lower() in (".pt", ".pth"):
            found = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
            if not isinstance(found, torch.Tensor):
                raise ValueError(f"it holds a {type(found).__name__}, and not one tensor")
            return found
        loaded = np.load(path, mmap_mode="c", allow_pickle=False)  # copied where written to: torch takes no read-only memory
        if path.suffix.lower() == ".npz":
            names = list(loaded)
            if len(names) > 1 and "x" not in names:
                raise ValueError(f"it holds the arrays {', '.join(names)}: name the inputs 'x'")
            loaded = loaded["x" if "x" in names else names[0]]
        return torch.from_numpy(loaded)
    except Exception as error:  # a damaged file can make a reader fail in any way
        raise UserError(f"{path} cannot be read as an array: {str(error).splitlines()[0]}") from None


def _of_lines(lines: Iterable[str], transforms: Transforms) -> Iterator[Item]:
    """One sample for each line: a text where the run reads text, a row where it reads tables, else the path of an image file."""
    if transforms.input_files and not transforms.tokens:
        return (Item(f"-[{n}]", read) for n, read in enumerate(transforms.read_inputs(lines)))
    if not transforms.tokens:
        transforms.image_shape()
    return _of_texts_or_paths(lines, transforms)


def _of_texts_or_paths(lines: Iterable[str], transforms: Transforms) -> Iterator[Item]:
    for line in (line.rstrip("\r\n") for line in lines):
        if transforms.tokens:
            yield Item(line, lambda line=line: transforms.read_text(line))  # type: ignore[misc]
        elif line:
            yield Item(line, lambda line=line: transforms.read_file(Path(line)))  # type: ignore[misc]


def of_source(source: Source, split: str) -> tuple[Iterator[Item], int]:
    """The samples of a data set, with their targets, and how many."""

    def items() -> Iterator[Item]:
        for n in range(len(source)):
            found: dict[str, Any] = {}

            def read(n: int = n, found: dict[str, Any] = found) -> Tree:
                x, y = source.fetch(torch.tensor([n]))
                found["y"] = y[0].tolist() if isinstance(y, torch.Tensor) else None
                return map_tensors(lambda t: t[0], x)

            yield Item(source.name(n) or f"{split}[{n}]", read, lambda found=found: found["y"])  # type: ignore[misc]

    return items(), len(source)


def read_in_batches(items: Iterator[Item], size: int) -> Iterator[list[Read]]:
    """Read the items in threads, `size` at a time and one batch ahead, and yield the batches in order."""
    ahead: deque[list[Future[Read]]] = deque()
    with ThreadPoolExecutor(usable_cores()) as pool:
        while True:
            if batch := [pool.submit(_read, item) for item in islice(items, size)]:
                ahead.append(batch)
            if ahead and (len(ahead) > 1 or not batch):
                yield [future.result() for future in ahead.popleft()]
            elif not batch:
                return


def _read(item: Item) -> Read:
    try:
        x = item.read()
        return Read(item.name, x, target=item.target() if item.target is not None else None)
    except DataError as error:
        return Read(item.name, None, str(error))
