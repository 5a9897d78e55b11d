"""Datasets whose samples are dicts and tuples, and networks for them (trust=[tree_sets])."""

from typing import Any

import numpy as np
import torch
from torch import nn


class Base(torch.utils.data.Dataset):
    """Numbered samples; 53 to train with, 7 to test with."""

    num_classes = 4

    def __init__(self, split: str) -> None:
        self.first, self.count = (0, 53) if split == "train" else (100, 7)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        return self.sample(np.random.default_rng(self.first + index), index)

    def sample(self, noise: np.random.Generator, index: int) -> Any:
        raise NotImplementedError


class Dicts(Base):
    """An image, a nested dict and a label, as NumPy makes them."""

    def sample(self, noise: np.random.Generator, index: int) -> Any:
        image = noise.integers(0, 255, (3, 8, 8), dtype=np.uint8)
        return {"image": image, "person": {"age": float(index), "size": noise.normal(size=3)}, "label": np.int64(index % 4)}


class Pictures(Base):
    """An input of one tensor."""

    def sample(self, noise: np.random.Generator, index: int) -> Any:
        return noise.normal(size=(3, 8, 8)), index % 4


class Tuples(Base):
    """Two inputs and a label: the inputs are positions."""

    def sample(self, noise: np.random.Generator, index: int) -> Any:
        return (noise.normal(size=(3, 8, 8)).astype(np.float32), noise.normal(size=3).astype(np.float32)), index % 4


class Words(Base):
    """Token numbers of several lengths, of which each has a weight, and a number that belongs to the whole."""

    def sample(self, noise: np.random.Generator, index: int) -> Any:
        length = 3 + (7 * index + self.first) % 11
        ids = noise.integers(1, 20, length)
        return {"ids": ids.tolist(), "weights": noise.uniform(size=length), "size": float(length), "label": index % 4}


class Known(Words):
    """The same, which tells its lengths."""

    def __init__(self, split: str) -> None:
        super().__init__(split)
        self.lengths = [3 + (7 * index + self.first) % 11 for index in range(self.count)]


class Tagged(Base):
    """Token numbers with a target for each of them."""

    num_classes = 20

    def sample(self, noise: np.random.Generator, index: int) -> Any:
        ids = torch.from_numpy(noise.integers(1, 20, 3 + (7 * index + self.first) % 11))
        return {"ids": ids, "labels": ids.flip(0)}


class Text(Base):
    """Token numbers and the next ones, as a pair."""

    num_classes = 20

    def sample(self, noise: np.random.Generator, index: int) -> Any:
        ids = torch.from_numpy(noise.integers(1, 20, 4 + (7 * index + self.first) % 11))
        return ids[:-1], ids[1:]


class Views(Base):
    """A target that is a dict itself."""

    def sample(self, noise: np.random.Generator, index: int) -> Any:
        return {"a": noise.normal(size=3), "b": noise.normal(size=3), "start": index % 4, "end": (index + 1) % 4}


def collate(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """Pads words on the left."""
    longest = max(len(sample["ids"]) for sample in samples)
    ids = torch.tensor([[0] * (longest - len(sample["ids"])) + sample["ids"] for sample in samples])
    return {"ids": ids, "mask": ids > 0, "label": torch.tensor([sample["label"] for sample in samples])}


class Net(nn.Module):
    """Takes an image and numbers, by position or by the names of `Dicts`."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.image, self.numbers = nn.Linear(192, 8), nn.Linear(3, 8)
        self.block = nn.Sequential(nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
        self.head = nn.Linear(8, classes)

    def forward(self, image: torch.Tensor, person: Any) -> torch.Tensor:
        numbers = person if isinstance(person, torch.Tensor) else person["size"] + person["age"].unsqueeze(1) / 50
        return self.head(self.block(self.image(image.flatten(1)) + self.numbers(numbers)))


class Pool(nn.Module):
    """Takes images of any size."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.head = nn.Linear(3, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x.mean((2, 3)))


class Together(Net):
    """The same of one argument."""

    def forward(self, inputs: Any) -> torch.Tensor:
        return super().forward(*(inputs.values() if isinstance(inputs, dict) else inputs))


class Images(Net):
    """The same with a convolution."""

    def __init__(self, classes: int) -> None:
        super().__init__(classes)
        self.conv = nn.Conv2d(3, 3, 3, padding=1)

    def forward(self, image: torch.Tensor, person: Any) -> torch.Tensor:
        assert image.is_contiguous(memory_format=torch.channels_last)
        return super().forward(self.conv(image), person)


class Reader(nn.Module):
    """The mean of the tokens that are real."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(20, 8), nn.Linear(9, classes)

    def forward(
        self, ids: torch.Tensor, mask: torch.Tensor, weights: torch.Tensor | None = None, size: torch.Tensor | None = None
    ) -> torch.Tensor:
        real = mask.unsqueeze(2) * (1.0 if weights is None else weights.unsqueeze(2))
        mean = (self.embedding(ids) * real).sum(1) / mask.sum(1, keepdim=True)
        size = mask.sum(1) if size is None else size
        return self.head(torch.cat([mean, size.unsqueeze(1) / 10], 1))


class Tagger(nn.Module):
    """An answer for each token."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(20, 8), nn.Linear(8, classes)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        embedded = self.embedding(ids) * mask.unsqueeze(2)
        return self.head(embedded + embedded.sum(1, keepdim=True) / mask.sum(1)[:, None, None])
