"""Datasets that draw random numbers, each in another way, and a function that makes batches and draws (trust=[drawing_sets])."""

import random
from functools import partial
from typing import Any

import numpy as np
import torch

module_generator = np.random.default_rng(3)


class Base(torch.utils.data.Dataset):
    """Numbered samples; 53 to train with, 11 to test with. A sample is three numbers that it draws, and its class."""

    num_classes = 4

    def __init__(self, split: str = "train") -> None:
        self.count = 53 if split == "train" else 11

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.as_tensor(self.draw(index), dtype=torch.float32) + index % 4, index % 4

    def draw(self, index: int) -> Any:
        raise NotImplementedError


class Nothing(Base):
    def draw(self, index: int) -> Any:
        return [index / 53, 0.5, 1.0]


class Torch(Base):
    def draw(self, index: int) -> Any:
        return torch.rand(3)


class Numpy(Base):
    def draw(self, index: int) -> Any:
        return np.random.rand(3)


class Python(Base):
    def draw(self, index: int) -> Any:
        return [random.random() for _ in range(3)]


class Gaussian(Base):
    """numpy and Python keep every second normal number for the next draw."""

    def draw(self, index: int) -> Any:
        return [np.random.randn(), random.gauss(0, 1), np.random.randn() + np.random.randn()]


class All(Base):
    def draw(self, index: int) -> Any:
        return [torch.rand(1).item(), np.random.rand(), random.random()]


class Sometimes(Base):
    """Few samples draw, and by the way from another stream."""

    def draw(self, index: int) -> Any:
        if index % 9 == 4:
            return np.random.rand(3)
        return [random.random() if index % 13 == 5 else 0.25, 0.5, 1.0]


class Together(Base):
    """Its samples are asked for at once."""

    def __getitems__(self, indices: list[int]) -> list[tuple[torch.Tensor, int]]:
        return [self[i] for i in indices]

    def draw(self, index: int) -> Any:
        return torch.rand(3)


class Kept(Base):
    """Generators of its own: as an attribute, in a closure, in a partial, and one of the module."""

    def __init__(self, split: str = "train") -> None:
        super().__init__(split)
        self.generators = {"torch": torch.Generator().manual_seed(1), "other": np.random.RandomState(np.random.PCG64(5))}
        own, other = np.random.default_rng(2), random.Random(4)
        self.from_closure = lambda: own.random()
        self.from_partial = partial(random.Random.random, other)

    def draw(self, index: int) -> Any:
        drawn = torch.rand(1, generator=self.generators["torch"]).item() + module_generator.random()
        return [drawn, self.from_closure(), self.from_partial() + self.generators["other"].rand()]

    def __reduce__(self) -> Any:
        return type(self), ("train" if self.count == 53 else "test",)


class Late(Base):
    """A generator that is made at the first sample."""

    generator: Any = None

    def draw(self, index: int) -> Any:
        if self.generator is None:
            self.generator = np.random.default_rng()
        return self.generator.random(3)


class Entropy(Base):
    """Draws that nobody can repeat."""

    def draw(self, index: int) -> Any:
        return np.random.default_rng().random(3)


class Quiet(Base):
    """Draws in the function that makes its batches alone."""

    def draw(self, index: int) -> Any:
        return [index / 53, 0.5, 1.0]


def noisy(samples: list[Any]) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.stack([x for x, _ in samples])
    return x + np.random.rand(*x.shape).astype(np.float32), torch.tensor([y for _, y in samples])


def some(samples: list[Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Leave every other sample out of the second half of the set, as a function does whose files are broken."""
    kept = [(x, y) for x, y in samples if (number := round(53 * (float(x[0]) - y))) < 26 or number % 2]
    return torch.stack([x for x, _ in kept]), torch.tensor([[float(y)] for _, y in kept])


class Net(torch.nn.Module):
    """A linear network, whose outputs draw in evaluations too where `noise` is not 0."""

    def __init__(self, classes: int, noise: float = 0.0) -> None:
        super().__init__()
        self.linear, self.noise = torch.nn.Linear(3, classes), noise

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.linear(x)
        return found + self.noise * (torch.randn_like(found) + np.random.randn() + random.random())


class Forces(Net):
    """The gradient of an energy by its inputs, as physics has it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            x = x.requires_grad_()
            (force,) = torch.autograd.grad(self.linear(x).square().sum(), x, create_graph=self.training)
        return torch.cat([force, force[:, :1]], 1)


class Ordered(All):
    """Samples with classes, weights and an order of their own: 64 of 53, the even ones twice."""

    def __init__(self, split: str = "train") -> None:
        super().__init__(split)
        self.targets = [index % 4 for index in range(self.count)]
        self.weights = [1.0 + index for index in range(self.count)]

    def order(self, seed: int, epoch: int) -> list[int]:
        shuffled = np.random.default_rng([seed, epoch]).permutation(self.count).tolist()
        return [*shuffled, *(index for index in shuffled if index % 2 == 0)][:64]
