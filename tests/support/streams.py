"""Streams with a state, whose samples draw random numbers (trust=[streams])."""

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset

from tests.support.drawing_sets import Nothing


class Numbers(IterableDataset[Any]):
    """100 numbered samples: the number, and what torch, numpy and random draw. It goes on where its state says."""

    num_classes = 4

    def __init__(self, count: int = 100) -> None:
        self.count, self.at = count, 0

    def __iter__(self) -> Iterator[tuple[torch.Tensor, int]]:
        while self.at < self.count:
            number, self.at = self.at, self.at + 1
            yield torch.tensor([number / 100, torch.rand(1).item(), np.random.rand() + random.random()]), number % 4
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def numbers(split: str = "train", count: int = 100) -> Any:
    return Numbers(count) if split == "train" else Nothing(split)


def stateless(split: str = "train") -> Any:
    class Plain(IterableDataset[Any]):
        def __iter__(self) -> Iterator[tuple[torch.Tensor, int]]:
            return iter([(torch.rand(3), 0)])

    return Plain()


def asking(split: str = "train") -> Any:
    class Asks(Numbers):
        def state_dict(self, num_samples: int) -> dict[str, int]:  # type: ignore[override]
            return {"at": num_samples}

    return Asks(3)


def hugging_face(split: str = "train", shards: int = 4, shuffled: bool = False) -> Any:
    import datasets

    made = datasets.IterableDataset.from_generator(rows, gen_kwargs={"shards": list(range(shards))})
    return made.shuffle(seed=1, buffer_size=10) if shuffled else made


def rows(shards: list[int]) -> Iterator[dict[str, Any]]:
    for shard in shards:
        for number in range(25):
            yield {"x": [shard * 25 / 100 + number / 100, 0.5, 1.0], "label": number % 4}


def loader(split: str = "train") -> Any:
    """torchdata's loader, which batches itself."""
    from torchdata.stateful_dataloader import StatefulDataLoader

    if split != "train":
        return Nothing(split)
    made = StatefulDataLoader(Numbers(), batch_size=8)
    made.num_classes = 4
    return made


class Unsavable(Numbers):
    def state_dict(self) -> Any:
        return {"at": {self.at}, "random": random.Random(1)}


def unsavable(split: str = "train") -> Any:
    return Unsavable() if split == "train" else Nothing(split)
