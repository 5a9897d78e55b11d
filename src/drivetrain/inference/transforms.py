"""Turns files, arrays and lines of text into what a run's model takes, as the run's own evaluation does it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from drivetrain.core.errors import DataError, UserError
from drivetrain.data import decoding
from drivetrain.data.base import Data, Splits

MAX_PIXELS = 178_956_970  # of an image file, where the data sets no limit: Pillow's own


class Transforms:
    """The transforms of a run: `read_file` and `read_text` give samples as the data set has them, a call makes a batch of them.

    Image files are cropped and resized as the data option of the run does it, or refused where it has images of one size.
    """

    def __init__(self, option: Data, data: Splits, device: torch.device, memory_format: torch.memory_format) -> None:
        self._option, self._data, self._memory_format = option, data, memory_format
        self.device, self.shape, self.tokens = device, tuple(data.shape), option.tokens
        self.normalize = None if data.normalize is None else data.normalize.to(device)

    def __call__(self, x: Any) -> torch.Tensor:
        """Return a batch for the model, on its device: normalised, from samples or from paths of files. Raises UserError."""
        if isinstance(x, str | Path):
            x = [x]
        if isinstance(x, list | tuple) and x and isinstance(x[0], str | Path):
            x = self.stack([self.read_text(str(item)) if self.tokens else self.read_file(Path(item)) for item in x])
        samples = self.as_samples(torch.as_tensor(x))
        samples = samples.to(self.device).to(memory_format=self._memory_format)
        return samples if self.normalize is None else self.normalize(samples)

    def as_samples(self, x: torch.Tensor, name: str = "the input") -> torch.Tensor:
        """Return samples (n, …) as the data set has them; a single one becomes a batch. Raises UserError where shapes differ."""
        given, wanted = tuple(x.shape), self.shape
        if self.tokens:
            if x.ndim not in (1, 2) or x.shape[-1] > wanted[0]:
                raise DataError(f"{name} has the shape {given}, and the model takes (n, up to {wanted[0]}) tokens: cut it")
            return x.long().reshape(-1, x.shape[-1])
        if given == wanted:
            x = x.unsqueeze(0)
        elif given[1:] != wanted:
            raise DataError(f"{name} has the shape {_text(given)}, and the model takes {_text(('n', *wanted))}: resize it")
        return x if x.dtype == torch.uint8 else x.float()

    def read_file(self, path: Path) -> torch.Tensor:
        """Return the sample that an image file holds. Raises DataError."""
        try:
            content = path.read_bytes()
        except OSError as error:
            raise DataError(f"{path} {decoding.DAMAGED.format(error.strerror)}") from None
        if self._option.decodes_images():
            limit = getattr(self._option, "max_pixels", MAX_PIXELS)
            return decoding.decode(content, str(path), self.shape[-1], limit)
        return self._of_exact_size(content, path)

    def _of_exact_size(self, content: bytes, path: Path) -> torch.Tensor:
        """Return an image of the data's own size, in grey where the data is, its values scaled to those of the data."""
        import numpy as np

        channels, height, width = self.image_shape()
        with decoding.open_image(content, str(path)) as image:
            if image.size != (width, height):
                raise DataError(
                    f"{path} has {image.size[0]}×{image.size[1]} pixels, and the model takes {width}×{height}: resize it"
                )
            pixels = np.array(image.convert("L") if channels == 1 else decoding.to_rgb(image))
        x = torch.from_numpy(pixels.reshape(height, width, channels)).permute(2, 0, 1)
        top = self._option.max_value
        return x if top in (None, 255.0) else x.float() * (top / 255.0)

    def image_shape(self) -> tuple[int, int, int]:
        """Return channels, height and width of the model's images. Raises UserError where it does not take any."""
        if len(self.shape) != 3 or self.shape[0] not in (1, 3):
            raise UserError(f"the model takes inputs of shape {_text(self.shape)}, and not image files: give arrays (.npy, .pt)")
        return self.shape

    def read_text(self, line: str) -> torch.Tensor:
        """Return the tokens of a line of text. Raises DataError."""
        return self._option.encode(line, self._data)

    def stack(self, samples: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return samples as one batch."""
        return torch.stack(list(samples))

    def groups(self, samples: Iterable[tuple[int, torch.Tensor]]) -> list[list[tuple[int, torch.Tensor]]]:
        """Return numbered samples grouped by their shape, which samples of one batch share."""
        found: dict[tuple[int, ...], list[tuple[int, torch.Tensor]]] = {}
        for number, x in samples:
            found.setdefault(tuple(x.shape), []).append((number, x))
        return list(found.values())


def _text(shape: Sequence[Any]) -> str:
    return f"({', '.join(map(str, shape))})"
