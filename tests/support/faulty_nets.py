"""Networks to which something happens in training, once, on one rank: used with trust=[faulty_nets]."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import torch


class Faulty(torch.nn.Module):
    """A linear layer. At forward FAULT_AT of training rank FAULT_RANK does what FAULT says, unless FAULT_ONCE is there."""

    def __init__(self, shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.only = torch.nn.Linear(shape[0] * shape[1] * shape[2], classes)
        self.dropout = torch.nn.Dropout(0.1)
        self.forwards = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.forwards += self.training
        y = self.only(self.dropout(x.flatten(1)))
        if self.training and self._now():
            y = getattr(self, os.environ["FAULT"])(y)
        return y

    def _now(self) -> bool:
        once = Path(os.environ.get("FAULT_ONCE", "nowhere/at/all"))
        if self.forwards != int(os.environ.get("FAULT_AT", "0")) or os.environ.get("RANK") != os.environ.get("FAULT_RANK"):
            return False
        if once.exists() or not once.parent.exists():
            return False
        once.touch()
        return True

    @staticmethod
    def killed(y: torch.Tensor) -> torch.Tensor:
        os.kill(os.getpid(), signal.SIGKILL)
        return y

    @staticmethod
    def stopped(y: torch.Tensor) -> torch.Tensor:
        os.kill(os.getpid(), signal.SIGSTOP)
        return y

    @staticmethod
    def not_a_number(y: torch.Tensor) -> torch.Tensor:
        return y * float("nan")

    @staticmethod
    def out_of_memory(y: torch.Tensor) -> torch.Tensor:
        return y + torch.empty(1 << 50)


class Summing(torch.nn.Module):
    """Linear layers, each of which is added to what went into it."""

    def __init__(self, shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        size = shape[0] * shape[1] * shape[2]
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(size, size) for _ in range(3))
        self.head = torch.nn.Linear(size, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.flatten(1)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)
