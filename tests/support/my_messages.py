"""Code of a user's that goes wrong, copied beside the runs that name it."""

import torch
from torch import nn


class Numbers(torch.utils.data.Dataset):
    """Six numbers, and a target of a kind."""

    def __init__(self, split, kind="class"):
        self.kind = kind
        if kind in ("class", "half"):
            self.num_classes = 3

    def __len__(self):
        return 24

    def __getitem__(self, i):
        x = torch.linspace(0, 1, 6) * (i % 5)
        y = {"image": torch.zeros(3, 4, 4), "several": {"a": torch.zeros(2), "b": 1}}.get(self.kind, i % 3)
        return x.half() if self.kind == "half" else x, y


class Wrong(nn.Module):
    """Its head has another width than its inputs."""

    def __init__(self, classes):
        super().__init__()
        self.head = nn.Linear(7, classes)

    def forward(self, x):
        return self.head(x)


class Unused(nn.Module):
    """It has parameters that its forward never uses."""

    def __init__(self, classes):
        super().__init__()
        self.head, self.spare = nn.Linear(6, classes), nn.Linear(2, 2)

    def forward(self, x):
        return self.head(x)
