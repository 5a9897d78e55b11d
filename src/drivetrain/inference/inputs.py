"""The inputs of `drivetrain predict`: images, folders, arrays, tables, lines of text, and the run's own data, read in order."""

from __future__ import annotations

import logging
import os
import shlex
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, starmap
from pathlib import Path
from typing import NamedTuple

import torch

from drivetrain.core.errors import DataError, UserError, collecting, refuse
from drivetrain.core.machine.guards import usable_cores
from drivetrain.core.step.source import Source
from drivetrain.core.step.trees import Tree, leaves, map_tensors, unflatten
from drivetrain.data import listing
from drivetrain.data.listing import IMAGES
from drivetrain.data.untrusted import decode
from drivetrain.inference.transforms import Transforms

logger = logging.getLogger(__name__)
ARRAYS = (".npy", ".npz", ".pt", ".pth")


Targets = Sequence[Tree] | None  # None if unknown


class SampleBlock(NamedTuple):
    """Samples read together: one, or rows."""

    names: Sequence[str]
    read: Callable[[slice], tuple[Tree, Targets]]  # some of them, (n, …), and their targets; raises DataError


@dataclass
class PredictedSample:
    """A sample that was read, or the reason of its failure, and the model's prediction."""

    name: str
    x: Tree = None
    target: Tree = None  # None where it is not known
    error: str | None = None
    row: Mapping[str, object] = field(default_factory=dict)  # the columns of its prediction


def given(
    words: Sequence[str], transforms: Transforms, lines: Iterable[bytes], size: int
) -> tuple[Iterator[SampleBlock], int | None]:
    """The inputs named by the words, in their order, and their number if known; "-" means `lines`.

    Rows come in blocks of up to `size`. Raises UserError.
    """
    as_line = ": a text is a line, as in: echo {} | drivetrain predict RUN -" if transforms.tokens else ""
    lost = [word for word in words if word != "-" and not os.path.lexists(word)]
    refuse(f"{word}: there is no such file or folder{as_line.format(shlex.quote(word))}" for word in lost)
    found, problems = list[Iterable[SampleBlock]](), list[str]()
    for path in (Path(word) for word in words if word != "-"):
        with collecting(problems):
            found.append(_of_folder(path, transforms, size) if path.is_dir() else _of_file(path, transforms, size))
    refuse(problems)
    if "-" not in words:
        known = [sum(len(block.names) for block in blocks) for blocks in found if isinstance(blocks, list)]
        return chain.from_iterable(found), sum(known) if len(known) == len(found) else None
    if len(words) > 1:
        raise UserError("'-' reads the inputs from standard input: give it alone")
    return _of_lines(lines, transforms, size), None


def _of_folder(folder: Path, transforms: Transforms, size: int) -> list[SampleBlock]:
    """The images and arrays in a folder and below, sorted by their paths."""
    listed = listing.walk(str(folder), (*IMAGES, *ARRAYS))
    if left := listing.said(listed.passed_over):
        logger.warning("%s: not read: %s", folder, left)
    inside = [folder / name for name in sorted(listed.every())]
    if not inside:
        raise UserError(f"{folder} holds no image and no array: it needs files such as {', '.join((*IMAGES[:4], *ARRAYS))}")
    return [block for path in inside for block in _of_file(path, transforms, size)]


def _of_file(path: Path, transforms: Transforms, size: int) -> Iterable[SampleBlock]:
    """The samples of a file: an image is one, and so is each row of an array or a table, and each line of texts."""
    if transforms.option.reads_file(path):
        return starmap(_block, transforms.read_inputs(path, size))
    if path.suffix.lower() in ARRAYS:
        rows = transforms.as_samples(_read_array(path), str(path))
        if not len(rows):
            raise UserError(f"{path} holds no samples: its shape is {tuple(rows.shape)}")
        names = [f"{path}[{n}]" for n in range(len(rows))] if len(rows) > 1 else [str(path)]
        return [_block(names[n : n + size], rows[n : n + size].__getitem__) for n in range(0, len(names), size)]
    if transforms.tokens:
        files = "".join(f", or a file *{ending}" for ending in transforms.option.input_files)
        raise UserError(
            f"{path}: this run reads text: give its lines by standard input, as in: drivetrain predict RUN - < {path}{files}"
        )
    transforms.image_shape()  # raises if the model takes no images
    if path.suffix.lower() not in IMAGES:  # it may be an image under another name
        try:
            transforms.read_file(path)
        except DataError:
            raise UserError(
                f"{path} is no image, and this run reads images: give files such as {', '.join(IMAGES[:4])}, folders of them, or "
                f"arrays ({', '.join(ARRAYS)})"
            ) from None
    return [_one(str(path), lambda: transforms.read_file(path))]


def _block(names: Sequence[str], read: Callable[[slice], Tree]) -> SampleBlock:
    return SampleBlock(names, lambda which: (read(which), None))


def _one(name: str, read: Callable[[], Tree]) -> SampleBlock:
    return _block([name], lambda _: map_tensors(lambda t: t.unsqueeze(0), read()))


def _read_array(path: Path) -> torch.Tensor:
    """Return a file's array, memory-mapped. Raises UserError."""
    import numpy as np

    try:
        if path.suffix.lower() in (".pt", ".pth"):
            found = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
            if not isinstance(found, torch.Tensor):
                raise ValueError(f"it holds a {type(found).__name__}, and not one tensor")
            return found
        loaded = np.load(path, mmap_mode="c", allow_pickle=False)  # copy on write, because torch takes no read-only memory
        if path.suffix.lower() == ".npz":
            names = list(loaded)
            if len(names) > 1 and "x" not in names:
                raise ValueError(f"it holds the arrays {', '.join(names)}: name the inputs 'x'")
            loaded = loaded["x" if "x" in names else names[0]]
        return torch.from_numpy(loaded)
    except Exception as error:  # a damaged file may raise anything in a reader
        raise UserError(f"{path} cannot be read as an array: {str(error).splitlines()[0]}") from None


def _of_lines(lines: Iterable[bytes], transforms: Transforms, size: int) -> Iterator[SampleBlock]:
    """One sample for each line: a text, a row of a table, or the path of an image file, whichever the run reads."""
    if transforms.option.reads_rows:
        return starmap(_block, transforms.read_inputs(lines, size))
    if not transforms.tokens:
        transforms.image_shape()
    return _of_texts_or_paths(lines, transforms)


def _of_texts_or_paths(lines: Iterable[bytes], transforms: Transforms) -> Iterator[SampleBlock]:
    for number, line in enumerate(lines, 1):
        line = line.rstrip(b"\r\n")
        if transforms.tokens:
            text = partial(decode, line, "standard input", number)
            yield _one(line.decode(errors="replace"), lambda text=text: transforms.read_text(text()))  # type: ignore[misc]
        elif line:
            path = os.fsdecode(line)
            yield _one(path, partial(transforms.read_file, Path(path)))


def of_source(source: Source, split: str, size: int) -> tuple[Iterator[SampleBlock], int]:
    """The samples of a data set with their targets, and their number."""

    def read(numbers: torch.Tensor, which: slice) -> tuple[Tree, Targets]:
        x, y = source.fetch(numbers[which])
        return x, y.tolist() if isinstance(y, torch.Tensor) else None

    size = 1 if source.parallel_read else size  # threads read one each
    parts = torch.arange(len(source)).split(size) if len(source) else ()
    names = ([source.name(n) or f"{split}[{n}]" for n in part.tolist()] for part in parts)
    return (SampleBlock(of_part, partial(read, part)) for of_part, part in zip(names, parts, strict=True)), len(source)


def grouped(batch: Sequence[PredictedSample]) -> Iterator[tuple[list[PredictedSample], Tree]]:
    """Yield the readable samples of a batch in groups of one shape, for one forward each, with their inputs."""
    groups: dict[tuple[torch.Size, ...], list[PredictedSample]] = {}
    for sample in batch:
        if sample.error is None:
            groups.setdefault(tuple(t.shape for t in leaves(sample.x)), []).append(sample)
    for samples in groups.values():
        tensors = zip(*(leaves(sample.x) for sample in samples), strict=True)
        yield samples, unflatten(list(map(torch.stack, tensors)), samples[0].x)


def read_in_batches(blocks: Iterator[SampleBlock], size: int) -> Iterator[list[PredictedSample]]:
    """Read the blocks in threads, at least `size` samples at a time and one batch ahead, and yield the batches in order."""
    ahead: deque[list[Future[list[PredictedSample]]]] = deque()
    with ThreadPoolExecutor(usable_cores()) as pool:
        while True:
            batch, count = list[Future[list[PredictedSample]]](), 0
            while count < size and (block := next(blocks, None)) is not None:
                batch.append(pool.submit(_read, block))
                count += len(block.names)
            if batch:
                ahead.append(batch)
            if ahead and (len(ahead) > 1 or not batch):
                yield [sample for future in ahead.popleft() for sample in future.result()]
            elif not batch:
                return


def _read(block: SampleBlock) -> list[PredictedSample]:
    """Read a block. If that fails, read its halves separately: one bad row of many is found in few steps."""
    samples, left = [PredictedSample(name) for name in block.names], [range(len(block.names))]
    while left:
        numbers = left.pop()
        try:
            x, targets = block.read(slice(numbers.start, numbers.stop))
        except DataError as error:
            middle = len(numbers) // 2
            samples[numbers.start].error = str(error)
            left += [numbers[middle:], numbers[:middle]] if middle else []
            continue
        rows = zip(*(t.unbind() for t in leaves(x)), strict=True)
        for at, (n, row) in enumerate(zip(numbers, rows, strict=True)):
            samples[n] = PredictedSample(block.names[n], unflatten(row, x), targets and targets[at])
    return samples
