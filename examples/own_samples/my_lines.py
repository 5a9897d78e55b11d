"""A line of code, and the module of Python's standard library that it comes from. Samples are dicts, of lines of many lengths."""

from __future__ import annotations

import argparse
import random
import tarfile
from pathlib import Path
from typing import Any

import torch
from torch import nn

MODULES = (argparse, random, tarfile)


class Lines(torch.utils.data.Dataset):
    """Every eighth line is for the test."""

    classes = tuple(module.__name__ for module in MODULES)

    def __init__(self, split: str) -> None:
        held_out = split == "test"
        self.lines = [
            (line, label)
            for label, module in enumerate(MODULES)
            for number, line in enumerate(Path(str(module.__file__)).read_text().splitlines())
            if line.strip() and (number % 8 == 0) is held_out
        ]

    def __len__(self) -> int:
        return len(self.lines)

    def __getitem__(self, index: int) -> dict[str, Any]:
        line, label = self.lines[index]
        text = line.strip().encode("ascii", "replace")
        return {"ids": list(text), "indent": (len(line) - len(line.lstrip())) / 8, "label": label}


class Reader(nn.Module):
    """The mean of what is at each position, and how far the line is indented."""

    def __init__(self, classes: int, width: int = 64) -> None:
        super().__init__()
        self.letters = nn.Embedding(128, width)
        self.read = nn.Conv1d(width, width, 5, padding=2)
        self.head = nn.Linear(width + 1, classes)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor, indent: torch.Tensor) -> torch.Tensor:
        real = mask.unsqueeze(1)  # (n, 1, length): false where a line is padded
        found = self.read(self.letters(ids).transpose(1, 2) * real).relu() * real
        mean = found.sum(2) / mask.sum(1, keepdim=True)
        return self.head(torch.cat([mean, indent.unsqueeze(1)], 1))
