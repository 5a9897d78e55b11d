"""An LSTM that reads on from batch to batch: gradients end at a batch's beginning, and the state goes on.

The text is read in 16 places at once. Sample n is the next piece at place n % 16, so that `data.order=sequential` in batches of
16 reads on at each of them.
"""

from __future__ import annotations

import argparse
import inspect
from typing import Any

import torch
from torch import nn

PLACES, STEPS, LETTERS = 16, 32, 128


class Text(torch.utils.data.Dataset):
    """The source code of argparse; its last fifth is for the test."""

    num_classes = LETTERS

    def __init__(self, train: bool = True) -> None:
        text = torch.tensor(list(inspect.getsource(argparse).encode("ascii", "replace")))
        part = text[: len(text) * 4 // 5] if train else text[len(text) * 4 // 5 :]
        self.pieces = (len(part) - 1) // (PLACES * STEPS)
        self.text = part

    def __len__(self) -> int:
        return PLACES * self.pieces

    def __getitem__(self, index: int) -> dict[str, Any]:
        place, piece = index % PLACES, index // PLACES
        start = (place * self.pieces + piece) * STEPS
        letters = self.text[start : start + STEPS + 1]
        return {"letters": letters[:-1], "begins": piece == 0, "label": letters[1:]}


class Reader(nn.Module):
    """Predicts the next letter. Its state is a buffer, so it is saved with the weights."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(LETTERS, width), nn.Linear(width, LETTERS)
        self.lstm = nn.LSTM(width, width, batch_first=True)
        self.register_buffer("state", torch.zeros(2, PLACES, width))

    def forward(self, letters: torch.Tensor, begins: torch.Tensor) -> torch.Tensor:
        goes_on = self.training and len(letters) == PLACES
        state = torch.zeros(2, len(letters), self.lstm.hidden_size, device=letters.device)
        if goes_on:
            state = self.state * ~begins.unsqueeze(1)
        found, (hidden, cell) = self.lstm(self.embed(letters), (state[:1], state[1:]))
        if goes_on:
            self.state = torch.cat([hidden, cell]).detach()
        return self.head(found)


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The mean cross-entropy of the letters."""
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())
