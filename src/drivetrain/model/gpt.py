"""A small decoder-only transformer for bytes, after GPT-2 (Radford et al. 2019)."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import relu, scaled_dot_product_attention

from drivetrain.core.step.blocks import TensorLayout

ROTARY_BASE = 10_000.0
MULTIPLIER, PRIME = 1_000_003, 2_147_483_647  # of the n-grams' hash: products stay within 63 bits


class Attention(nn.Module):
    """Causal self-attention. Padding on the right needs no mask: no earlier position attends to it."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.head, self.dropout = width // heads, dropout
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor, rotary: torch.Tensor) -> torch.Tensor:
        """x (n, length, width) to the same shape; rotary (2, length, head / 2)."""
        n, length, _ = x.shape
        # -1: the number of heads, which is smaller on a rank of parallel=tensor.
        q, k, v = self.qkv(x).view(n, length, 3, -1, self.head).permute(2, 0, 3, 1, 4)
        q, k = apply_rotary(q, rotary), apply_rotary(k, rotary)
        mixed = scaled_dot_product_attention(q, k, v, dropout_p=self.dropout if self.training else 0.0, is_causal=True)
        found: torch.Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return found


class FeedForward(nn.Module):
    """Linear, squared ReLU (So et al. 2021), linear."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.down(relu(self.up(x)).square())
        return found


class DropPath(nn.Module):
    """Stochastic depth (Huang et al. 2016): in training, a sample's branch is dropped with probability `rate`.

    The other branches are divided by 1 - rate. The random draws equal those of timm's class of this name.
    """

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return x
        kept = x.new_empty(x.shape[0], *[1] * (x.ndim - 1)).bernoulli_(1 - self.rate)
        return x * kept.div_(1 - self.rate)


class Block(nn.Module):
    """x + attention(norm(x)), then x + feed_forward(norm(x)): a pre-norm block."""

    def __init__(self, width: int, heads: int, dropout: float, drop_path: float) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(width), Attention(width, heads, dropout)
        self.norm2, self.feed_forward = nn.LayerNorm(width), FeedForward(width)
        self.dropout = nn.Dropout(dropout) if dropout else nn.Identity()
        self.drop_path = DropPath(drop_path) if drop_path else nn.Identity()

    def forward(self, x: torch.Tensor, rotary: torch.Tensor) -> torch.Tensor:
        x = x + self.drop_path(self.dropout(self.attention(self.norm1(x), rotary)))
        found: torch.Tensor = x + self.drop_path(self.dropout(self.feed_forward(self.norm2(x))))
        return found

    def tensor_layout(self) -> TensorLayout:
        """The layout of the block over ranks for parallel=tensor."""
        heads = self.attention.qkv.in_features // self.attention.head
        return TensorLayout(self.attention, "qkv", "out", heads, self.feed_forward, "up", "down")


class Ngrams(nn.Module):
    """Embeddings of the last 2 … `longest` tokens together, each in a table of `buckets` rows that a hash selects.

    They give the first layer information that attention would have to gather (Clark et al. 2022; for
    bytes Pagnoni et al. 2024).
    """

    def __init__(self, longest: int, buckets: int, width: int) -> None:
        super().__init__()
        self.buckets = buckets
        self.tables = nn.ModuleList(nn.Embedding(buckets, width) for _ in range(2, longest + 1))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Tokens (n, length) to the sum of their n-grams' embeddings (n, length, width)."""
        total, hashed, earlier = torch.zeros((), device=tokens.device), tokens, tokens
        for table in self.tables:
            earlier = nn.functional.pad(earlier, (1, 0))[:, :-1]
            hashed = (hashed * MULTIPLIER + earlier + 1) % PRIME
            total = total + table(hashed % self.buckets)
        return total


class Gpt(nn.Module):
    """Tokens (n, up to `length`) to logits (n, the same, classes). Logits at a position depend on the tokens up to it.

    Pre-norm blocks, rotary position embeddings (Su et al. 2021), linear layers without bias, and an output layer that shares
    its weight with the embedding (Press and Wolf 2017). Blocks start as the identity (Zhang et al. 2019), n-grams at zero.
    """

    rotary: torch.Tensor

    def __init__(
        self,
        length: int,
        classes: int,
        width: int,
        depth: int,
        heads: int,
        dropout: float,
        ngrams: int,
        buckets: int,
        drop_path: float,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(classes, width)
        self.ngrams = Ngrams(ngrams, buckets, width) if ngrams > 1 else None
        rates = (drop_path * i / max(1, depth - 1) for i in range(depth))  # lower in early blocks, as the others depend on them
        self.blocks = nn.ModuleList(Block(width, heads, dropout, rate) for rate in rates)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes, bias=False)
        self.register_buffer("rotary", rotary_table(length, width // heads), persistent=False)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=module.in_features**-0.5)
            elif isinstance(module, nn.Embedding):
                nn.init.zeros_(module.weight)
        for block in self.blocks:
            nn.init.zeros_(block.attention.out.weight)  # type: ignore[union-attr, arg-type]
            nn.init.zeros_(block.feed_forward.down.weight)  # type: ignore[union-attr, arg-type]
        nn.init.normal_(self.embedding.weight, std=0.02)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(self.features(tokens))
        return found

    def features(self, tokens: torch.Tensor) -> torch.Tensor:
        """Tokens (n, length) to the head's inputs (n, length, width)."""
        x = self.embedding(tokens)
        if self.ngrams is not None:
            x = x + self.ngrams(tokens)
        x = nn.functional.layer_norm(x, x.shape[-1:])
        rotary = self.rotary[:, : tokens.shape[1]]
        for block in self.blocks:
            x = block(x, rotary)
        found: torch.Tensor = self.norm(x)
        return found


class GptClassifier(Gpt):
    """Tokens (n, up to `length`) to logits (n, classes): a head on the mean over a text's tokens. Token 0 is padding."""

    def __init__(self, length: int, classes: int, vocabulary: int, width: int, *others: float) -> None:
        super().__init__(length, vocabulary, width, *others)  # type: ignore[arg-type]
        self.head = nn.Linear(width, classes)
        nn.init.normal_(self.head.weight, std=width**-0.5)
        nn.init.zeros_(self.head.bias)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.features(tokens)
        counts = (tokens != 0).unsqueeze(2)
        wide = torch.promote_types(x.dtype, torch.float32)  # 16 bits are too few to count tokens
        mean = (x * counts).sum(1, dtype=wide) / counts.sum(1).clamp(min=1)
        found: torch.Tensor = self.head(mean.to(x.dtype))
        return found


def rotary_table(length: int, head: int) -> torch.Tensor:
    """Cosines and sines (2, length, head / 2) of each position's angle at each frequency."""
    frequencies = ROTARY_BASE ** (-torch.arange(0, head, 2, dtype=torch.float64) / head)
    angles = torch.arange(length, dtype=torch.float64).unsqueeze(1) * frequencies
    return torch.stack([angles.cos(), angles.sin()]).to(torch.get_default_dtype())


def apply_rotary(x: torch.Tensor, rotary: torch.Tensor) -> torch.Tensor:
    """Queries or keys (n, heads, length, head), rotated by the angles of their positions: the halves of a head are the pairs."""
    cos, sin = rotary.to(x.dtype)
    left, right = x.chunk(2, dim=-1)
    return torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1)
