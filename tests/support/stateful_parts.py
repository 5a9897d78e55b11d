"""A loss, a Dataset and a function that makes batches that keep a state (trust=[stateful_parts])."""

from typing import Any

import numpy as np
import torch

from tests.support.drawing_sets import Base


class Centred(torch.nn.Module):
    """Cross-entropy of outputs whose running mean is subtracted, as DINO's is."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(4))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.centre.lerp_(output.mean(0), 0.1)
            self.seen += 1
        return torch.nn.functional.cross_entropy(output - self.centre, y)


class Holder:
    """A loss that is no module, and holds one, and a teacher that does not learn."""

    def __init__(self) -> None:
        self.inner = {"centred": Centred()}
        self.teacher = torch.nn.Linear(3, 3).eval()

    def __call__(self, output: torch.Tensor, y: torch.Tensor) -> Any:
        return self.inner["centred"](output, y)


class Curriculum(Base):
    """Samples that grow with the number of reads."""

    def __init__(self, split: str = "train") -> None:
        super().__init__(split)
        self.reads = 0

    def draw(self, index: int) -> Any:
        self.reads += 1
        return np.random.rand(3) + self.reads * 1e-3

    def state_dict(self) -> dict[str, Any]:
        return {"reads": self.reads}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.reads = state["reads"]


class Unsaved(Curriculum):
    """A state that no checkpoint can hold."""

    def state_dict(self) -> dict[str, Any]:
        return {"reads": np.array(self.reads)}


class Collate:
    """Makes batches, and adds a little more to each."""

    def __init__(self) -> None:
        self.batches = 0

    def __call__(self, samples: list[Any]) -> tuple[torch.Tensor, torch.Tensor]:
        self.batches += 1
        return torch.stack([x for x, _ in samples]) + self.batches * 1e-3, torch.tensor([y for _, y in samples])

    def state_dict(self) -> dict[str, int]:
        return {"batches": self.batches}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.batches = state["batches"]


class Counting:
    """A loss that counts its calls, also those of evaluations, and goes by their number."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return torch.nn.functional.cross_entropy(output, target) / self.calls

    def state_dict(self) -> dict[str, int]:
        return {"calls": self.calls}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.calls = state["calls"]
