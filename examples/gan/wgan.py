"""Handwritten digits of a Wasserstein GAN with gradient penalty (Gulrajani et al. 2017): three updates of the critic for one of
the generator.

One model holds both networks, and one loss has both sides: it is told the phase. `phases` says which parameters each trains.
"""

from __future__ import annotations

from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import nn

NOISE = 16


class Digits(torch.utils.data.Dataset):
    """1,797 images (64,) from -1 to 1; every eighth one is for the test."""

    def __init__(self, train: bool = True) -> None:
        pixels = torch.from_numpy(load_digits().data).float() / 8 - 1
        self.images = pixels[(torch.arange(len(pixels)) % 8 != 0) == train]

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.images[index], self.images[index]


class Gan(nn.Module):
    """A generator of images, and a critic that tells them from real ones."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.generator = nn.Sequential(
            nn.Linear(NOISE, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 64)
        )
        self.critic = nn.Sequential(nn.Linear(64, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 1))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.critic(images)


def loss(model: Any, x: torch.Tensor, phase: str) -> Any:
    """The quantity that the networks of a phase minimize. The distance of made images from real ones is logged."""
    made = model.generator(torch.randn(len(x), NOISE, device=x.device))
    if phase == "generator":
        return -model.critic(made).mean()
    share = torch.rand(len(x), 1, device=x.device)
    with torch.enable_grad():  # evaluations compute no gradients
        between = (share * x + (1 - share) * made.detach()).requires_grad_()
        (slope,) = torch.autograd.grad(model.critic(between).sum(), between, create_graph=True)
    distance = model.critic(x).mean() - model.critic(made.detach()).mean()
    return {"loss": 10 * (slope.norm(dim=1) - 1).square().mean() - distance, "distance": distance}
