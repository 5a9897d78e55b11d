"""A stream without an end. Its state is that of its random generator, so a run that is killed goes on at the next reading."""

from __future__ import annotations

from collections.abc import Iterator

import torch

WEIGHTS = torch.linspace(-1, 1, 8)


class Readings(torch.utils.data.IterableDataset):
    """Readings of eight sensors, and what they add up to, with noise."""

    def __init__(self, split: str = "train") -> None:
        self.generator = torch.Generator().manual_seed(("train", "test").index(split))

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        while True:
            sensors, noise = torch.randn(9, generator=self.generator).split([8, 1])
            yield sensors, sensors @ WEIGHTS + 0.1 * noise

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"random": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self.generator.set_state(state["random"])
