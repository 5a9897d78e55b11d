"""Direct preference optimization (Rafailov et al. 2023): a language model learns which of two answers is preferred.

What a run needs beside the network: pairs of answers, a frozen copy of the network to compare with, and the loss.
"""

from __future__ import annotations

import copy
import random
from typing import Any

import torch
import transformers
from torch import nn

SYMBOLS = " 0123456789+=."  # the first fills up, the last ends an answer
LENGTH, BETA = 10, 0.1


class Sums(torch.utils.data.Dataset):
    """Two answers to a sum, first the right one: tokens (2, length), and as targets those of the answers, else -100."""

    num_classes = len(SYMBOLS)

    def __init__(self, train: bool = True) -> None:
        draw = random.Random(int(train))
        self.samples = [
            (a, b := draw.randrange(50), a + b + draw.randrange(1, 9)) for a in range(50) for _ in range(4 + 4 * train)
        ]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        a, b, wrong = self.samples[index]
        asked = f"{a}+{b}="
        rows = [f"{asked}{answer}.".ljust(LENGTH) for answer in (a + b, wrong)]
        tokens = torch.tensor([[SYMBOLS.index(symbol) for symbol in row] for row in rows])
        place = torch.arange(LENGTH)
        return tokens, torch.where((place >= len(asked)) & (tokens > 0), tokens, -100)


class Preferring(nn.Module):
    """A causal language model, of a folder of transformers or a small new one, and the model that it was at first."""

    def __init__(self, folder: str | None = None) -> None:
        super().__init__()
        if folder is None:
            sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
            config = transformers.LlamaConfig(vocab_size=len(SYMBOLS), max_position_embeddings=LENGTH, pad_token_id=0, **sizes)
            self.policy = transformers.LlamaForCausalLM(config)
        else:
            self.policy = transformers.AutoModelForCausalLM.from_pretrained(folder)
        self.reference = copy.deepcopy(self.policy).eval().requires_grad_(False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.policy(tokens, use_cache=False).logits


def log_likelihood(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """That of each answer (n,): each token is predicted from those before it."""
    losses = nn.functional.cross_entropy(logits[:, :-1].transpose(1, 2), targets[:, 1:], reduction="none")
    return -losses.sum(1)


def loss(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """How little likelier than at first the right answers are, against the wrong ones."""
    tokens, targets = x.flatten(0, 1), y.flatten(0, 1)
    with torch.no_grad():
        before = log_likelihood(model.reference(tokens, use_cache=False).logits, targets)
    right, wrong = (log_likelihood(model(tokens), targets) - before).unflatten(0, (-1, 2)).unbind(1)
    return -nn.functional.logsigmoid(BETA * (right - wrong)).mean()
