"""Noise on the embeddings of tokens."""

from __future__ import annotations

import math
from functools import partial

import torch

from drivetrain.core.errors import UserError


def add(model: torch.nn.Module, alpha: float) -> None:
    """Let the model add uniform noise to its embeddings of tokens while it trains (NEFTune, Jain et al. 2024).

    It is between ± alpha / √(length × width), with the batch's padded length as in TRL, and drawn like dropout. The embedding is
    transformers' get_input_embeddings, else the first one. Raises UserError without an embedding.
    """
    named = getattr(model, "get_input_embeddings", lambda: None)()
    embedding = named or next((m for m in model.modules() if isinstance(m, torch.nn.Embedding)), None)
    if embedding is None:
        raise UserError(f"model.embedding_noise={alpha:g}: the model has no torch.nn.Embedding: set it to 0")
    embedding.register_forward_hook(partial(_noisy, alpha))


def _noisy(alpha: float, module: torch.nn.Module, _: object, embedded: torch.Tensor) -> torch.Tensor:
    if not module.training:
        return embedded
    bound = alpha / math.sqrt(embedded.shape[-2] * embedded.shape[-1])
    return embedded + torch.empty_like(embedded).uniform_(-bound, bound)
