"""Turns files, arrays and lines of text into a model's inputs, like the run's own evaluation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import torch
from torch.utils._pytree import tree_map

from drivetrain.core.errors import DataError, UserError
from drivetrain.core.step.trees import Tree, concatenate, map_tensors
from drivetrain.data import decoding
from drivetrain.data.base import Data, Splits
from drivetrain.data.untrusted import read_image_file
from drivetrain.loader.base import Pipeline, in_memory_format

ROWS = 1024  # read at a time
MAX_PIXELS = 178_956_970  # limit of an image file, unless the data sets one: Pillow's own


class Transforms:
    """The transforms of a run: `read_file` and `read_text` return samples in the data set's form; a call makes a batch.

    Image files are cropped and resized as by the run's data option. Where its images have one fixed size, other sizes are
    refused.
    """

    def __init__(
        self, option: Data, data: Splits, decodes_images: bool, device: torch.device, memory_format: torch.memory_format
    ) -> None:
        self.option, self._data, self._decodes_images, self._memory_format = option, data, decodes_images, memory_format
        self.device, self.tokens = device, option.tokens is True
        self.unknown: list[Counter[str]] = []  # per input: column → rows with a category unknown in training
        self.shape = data.shape if data.example is None else None  # None: a Dataset of the user's makes the inputs
        self.normalize = None if data.normalize is None else data.normalize.to(device)
        self._pipeline = Pipeline(data.train, (), data.normalize, 0, images=data.images).to(device)

    def __call__(self, x: Tree) -> Tree:
        """Return a batch for the model, on its device: normalised, from samples or from paths of files. Raises UserError."""
        if isinstance(x, str | Path):
            x = [x]
        if isinstance(x, list | tuple) and x and isinstance(x[0], str | Path):
            x = concatenate([samples for item in x for samples in self._read(str(item))])
        samples = tree_map(torch.as_tensor, x) if self.shape is None else self.as_samples(torch.as_tensor(x))
        samples = map_tensors(lambda t: t.to(self.device), samples)
        return self._pipeline.normalized(in_memory_format(samples, self._memory_format))

    def as_samples(self, x: torch.Tensor, name: str = "the input") -> torch.Tensor:
        """Return samples (n, …) in the data set's form; a single one becomes a batch. Raises UserError if shapes differ.

        Samples of a user's Dataset may differ in size: only their number of dimensions counts.
        """
        own = self._data.example
        if own is not None and not isinstance(own, torch.Tensor):
            raise UserError(f"{name} is one tensor, but a sample has several inputs: use drivetrain.load in Python")
        given, wanted = tuple(x.shape), tuple(self._data.shape)
        if x.is_complex():
            raise DataError(f"{name} holds complex numbers, but the model takes real ones: give their parts or their size")
        if own is not None and x.ndim in (len(wanted), len(wanted) + 1):
            wanted = given[-len(wanted) :] if wanted else ()
        if self.tokens:
            if x.ndim not in (1, 2) or x.shape[-1] > wanted[0]:
                raise DataError(f"{name} has the shape {given}, and the model takes (n, up to {wanted[0]}) tokens: cut it")
            return x.long().reshape(-1, x.shape[-1])
        if given == wanted:
            x = x.unsqueeze(0)
        elif given[1:] != wanted:
            raise DataError(f"{name} has the shape {_text(given)}, and the model takes {_text(('n', *wanted))}: resize it")
        codes = own is not None and not own.is_floating_point() and not x.is_floating_point()
        return x if x.dtype == torch.uint8 or codes else x.float()

    def _read(self, given: str) -> list[Tree]:
        """Return batches of the samples of a file, or of a text if the run reads text."""
        if self.option.reads_file(Path(given)):
            return [read(slice(None)) for _, read in self.read_inputs(Path(given), ROWS)]
        return [(self.read_text(given) if self.tokens else self.read_file(Path(given))).unsqueeze(0)]

    def read_inputs(self, file: Path | Iterable[bytes], size: int) -> Iterator[tuple[Sequence[str], Callable[[slice], Tree]]]:
        """Return the samples of a file of one of `input_files`, or of its lines, in blocks. Raises UserError."""
        found = self.option.read_inputs(file, self._data, size)
        self.unknown.append(found.unknown)
        return found.blocks

    def read_file(self, path: Path) -> torch.Tensor:
        """Return the sample of an image file. Raises DataError."""
        limit = getattr(self.option, "max_pixels", MAX_PIXELS)
        content = read_image_file(path, limit)
        if self._decodes_images:
            return decoding.decode(
                content,
                str(path),
                self.image_shape()[1:],
                limit,
                crop_pct=getattr(self.option, "crop_pct", 1.0),
                scale=self._data.pixels,
            )
        return self._of_exact_size(content, path)

    def _of_exact_size(self, content: bytes, path: Path) -> torch.Tensor:
        """Return an image of the data's size, in grey if the data is, with values scaled to the data's."""
        import numpy as np

        channels, height, width = self.image_shape()
        with decoding.open_image(content, str(path)) as image:
            if image.size != (width, height):
                raise DataError(
                    f"{path} has {image.size[0]}×{image.size[1]} pixels, and the model takes {width}×{height}: resize it"
                )
            pixels = np.array(decoding.pixels_of(image, str(path), self._data.pixels, "L" if channels == 1 else "RGB"))
        x = torch.from_numpy(pixels.reshape(height, width, channels)).permute(2, 0, 1)
        top = self.option.max_value
        return x if top in (None, 255.0) else x.float() * (top / 255.0)

    def image_shape(self) -> tuple[int, int, int]:
        """Return channels, height and width of the model's images. Raises UserError if it takes no images."""
        if self.shape is None or len(self.shape) != 3 or self.shape[0] not in (1, 3):
            takes = "what your Dataset makes" if self.shape is None else f"inputs of shape {_text(self.shape)}"
            raise UserError(
                f"the model takes {takes}, and not image files: give arrays (.npy, .pt), or use drivetrain.load in Python"
            )
        channels, height, width = self.shape
        return channels, height, width

    def read_text(self, line: str) -> torch.Tensor:
        """Return the tokens of a line of text. Raises DataError."""
        return self.option.encode(line, self._data)


def _text(shape: Sequence[object]) -> str:
    return f"({', '.join(map(str, shape))})"
