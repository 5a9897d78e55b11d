"""The inputs of `drivetrain predict`: images, folders, arrays, tables, lines of text, and the run's own data, read in order."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import torch

from drivetrain.core.errors import DataError, UserError
from drivetrain.core.limits import usable_cores
from drivetrain.core.source import Source
from drivetrain.core.trees import Tree, concatenate, leaves, map_tensors
from drivetrain.data import listing
from drivetrain.data.listing import IMAGES
from drivetrain.data.untrusted import decode
from drivetrain.inference.transforms import Transforms

ARRAYS = (".npy", ".npz", ".pt", ".pth")


@dataclass
class Item:
    """Samples that are read together: one, or a block of rows."""

    names: Sequence[str]
    read: Callable[[slice], Tree]  # some of them, (n, …); raises DataError
    targets: Callable[[int], Tree] | None = None  # the right answer of one that was read, where the data set has it


class One(NamedTuple):
    """One sample that was read."""

    name: str
    x: Tree
    target: Tree  # None where it is not known


@dataclass
class Read:
    """The samples of an item that could be read, by their numbers, and why the others could not."""

    item: Item
    parts: list[tuple[range, Tree]]
    errors: dict[int, str]

    def one(self, n: int) -> One:
        """Return the sample of a number, which could be read."""
        numbers, x = next((numbers, x) for numbers, x in self.parts if n in numbers)
        target = self.item.targets and self.item.targets(n)
        return One(self.item.names[n], map_tensors(lambda t: t[numbers.index(n)], x), target)


def given(words: Sequence[str], transforms: Transforms, lines: Iterable[bytes], size: int) -> tuple[Iterator[Item], int | None]:
    """The inputs that the words name, in their order, and how many where that is known; "-" stands for `lines`.

    Rows come in blocks of up to `size`. Raises UserError.
    """
    missing = [word for word in words if word != "-" and not os.path.lexists(word)]
    if missing:
        raise UserError([f"{word}: there is no such file or folder" for word in missing])
    found: list[Iterable[Item]] = []
    count: int | None = 0
    problems: list[str] = []
    for path in (Path(word) for word in words if word != "-"):
        try:
            items = _of_folder(path, transforms, size) if path.is_dir() else _of_file(path, transforms, size)
            count = None if count is None or not isinstance(items, list) else count + sum(len(item.names) for item in items)
            found.append(items)
        except UserError as error:
            problems += error.problems
    if problems:
        raise UserError(problems)
    if "-" not in words:
        return chain.from_iterable(found), count
    if len(words) > 1:
        raise UserError("'-' reads the inputs from standard input: give it alone")
    return _of_lines(lines, transforms, size), None


def _of_folder(folder: Path, transforms: Transforms, size: int) -> list[Item]:
    """The images and arrays in a folder and below, sorted by their paths."""
    inside = [folder / name for name in sorted(listing.walk(str(folder), (*IMAGES, *ARRAYS)).every())]
    if not inside:
        raise UserError(f"{folder} holds no image and no array: it needs files such as {', '.join((*IMAGES[:4], *ARRAYS))}")
    return [item for path in inside for item in _of_file(path, transforms, size)]


def _of_file(path: Path, transforms: Transforms, size: int) -> Iterable[Item]:
    """The samples of a file: one of an image, one for each row of an array or a table, one for each line of texts."""
    if transforms.reads_file(path):
        return (Item(names, read) for names, read in transforms.read_inputs(path, size))
    if path.suffix.lower() in ARRAYS:
        rows = transforms.as_samples(_read_array(path), str(path))
        if len(rows) == 1:
            return [Item([str(path)], rows.__getitem__)]
        names = [f"{path}[{n}]" for n in range(len(rows))]
        return [Item(names[n : n + size], rows[n : n + size].__getitem__) for n in range(0, len(rows), size)]
    if transforms.tokens:
        files = "".join(f", or a file *{ending}" for ending in transforms.input_files)
        raise UserError(
            f"{path}: this run reads text: give its lines by standard input, as in: drivetrain predict RUN - < {path}{files}"
        )
    transforms.image_shape()  # raises where the model takes no images
    if path.suffix.lower() not in IMAGES:  # it may be one that is not called so
        try:
            transforms.read_file(path)
        except DataError:
            raise UserError(
                f"{path} is no image, and this run reads images: give files such as {', '.join(IMAGES[:4])}, folders of them, or "
                f"arrays ({', '.join(ARRAYS)})"
            ) from None
    return [_one(str(path), lambda: transforms.read_file(path))]


def _one(name: str, read: Callable[[], Tree]) -> Item:
    return Item([name], lambda _: map_tensors(lambda t: t.unsqueeze(0), read()))


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


def _of_lines(lines: Iterable[bytes], transforms: Transforms, size: int) -> Iterator[Item]:
    """One sample for each line: a text where the run reads text, a row where it reads tables, else the path of an image file."""
    if transforms.reads_rows:
        return (Item(names, read) for names, read in transforms.read_inputs(lines, size))
    if not transforms.tokens:
        transforms.image_shape()
    return _of_texts_or_paths(lines, transforms)


def _of_texts_or_paths(lines: Iterable[bytes], transforms: Transforms) -> Iterator[Item]:
    for number, line in enumerate(lines, 1):
        line = line.rstrip(b"\r\n")
        if transforms.tokens:
            text = partial(decode, line, "standard input", number)
            yield _one(line.decode(errors="replace"), lambda text=text: transforms.read_text(text()))  # type: ignore[misc]
        elif line:
            path = os.fsdecode(line)
            yield _one(path, partial(transforms.read_file, Path(path)))


def of_source(source: Source, split: str, size: int) -> tuple[Iterator[Item], int]:
    """The samples of a data set, with their targets, and how many."""

    size = 1 if source.parallel_read else size  # threads read one each

    def items() -> Iterator[Item]:
        for first in range(0, len(source), size):
            numbers, targets = torch.arange(first, min(first + size, len(source))), dict[int, Tree]()

            def read(which: slice, numbers: torch.Tensor = numbers, targets: dict[int, Tree] = targets) -> Tree:
                x, y = source.fetch(numbers[which])
                if isinstance(y, torch.Tensor):
                    targets.update(zip(range(len(numbers))[which], y.tolist(), strict=True))
                return x

            yield Item([source.name(n) or f"{split}[{n}]" for n in numbers.tolist()], read, targets.get)

    return items(), len(source)


def grouped(batch: Sequence[Read]) -> Iterator[tuple[list[tuple[Read, int]], Tree]]:
    """Yield the samples of a batch that have one shape, which a model takes together: their reads and numbers, and inputs."""
    groups: dict[tuple[torch.Size, ...], list[tuple[Read, range, Tree]]] = {}
    for read in batch:
        for numbers, x in read.parts:
            groups.setdefault(tuple(t.shape[1:] for t in leaves(x)), []).append((read, numbers, x))
    for parts in groups.values():
        yield [(read, n) for read, numbers, _ in parts for n in numbers], concatenate([x for _, _, x in parts])


def read_in_batches(items: Iterator[Item], size: int) -> Iterator[list[Read]]:
    """Read the items in threads, at least `size` samples at a time and one batch ahead, and yield the batches in order."""
    ahead: deque[list[Future[Read]]] = deque()
    with ThreadPoolExecutor(usable_cores()) as pool:
        while True:
            batch, count = list[Future[Read]](), 0
            while count < size and (item := next(items, None)) is not None:
                batch.append(pool.submit(_read, item))
                count += len(item.names)
            if batch:
                ahead.append(batch)
            if ahead and (len(ahead) > 1 or not batch):
                yield [future.result() for future in ahead.popleft()]
            elif not batch:
                return


def _read(item: Item) -> Read:
    """Read an item. Where a sample cannot be read, halves are read alone: one odd row of many is found in few steps."""
    read, left = Read(item, [], {}), [range(len(item.names))]
    while left:
        numbers = left.pop()
        try:
            read.parts.append((numbers, item.read(slice(numbers.start, numbers.stop))))
        except DataError as error:
            if len(numbers) == 1:
                read.errors[numbers.start] = str(error)
            else:
                middle = len(numbers) // 2
                left += [numbers[middle:], numbers[:middle]]
    return read
