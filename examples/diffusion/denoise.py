"""A diffusion model of handwritten digits (Ho et al. 2020): it learns to tell the noise in an image, and draws new ones of noise.

What a run needs beside the network: a loss that runs the model itself, because it draws the noise, and a function that draws
images of the averaged weights at each evaluation.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from PIL import Image
from sklearn.datasets import load_digits
from torch import nn

STEPS = 100  # from an image to noise
SIGNAL = torch.cumprod(1 - torch.linspace(1e-3, 0.12, STEPS), 0)  # the share of the image that is left after each step


class Digits(torch.utils.data.Dataset):
    """1,797 images (64,) from -1 to 1; every eighth one is for the test."""

    classes = tuple("0123456789")

    def __init__(self, train: bool = True) -> None:
        pixels, self.labels = load_digits(return_X_y=True)
        chosen = (torch.arange(len(pixels)) % 8 != 0) == train
        self.images = torch.from_numpy(pixels).float()[chosen] / 8 - 1
        self.labels = torch.from_numpy(self.labels)[chosen]

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.images[index], int(self.labels[index])


class Denoiser(nn.Module):
    """Tells the noise in images (n, 64), each `when` steps on its way to noise."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.step = nn.Embedding(STEPS, width)
        self.read, self.tell = nn.Linear(64, width), nn.Linear(width, 64)
        self.between = nn.Sequential(nn.SiLU(), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU())

    def forward(self, noisy: torch.Tensor, when: torch.Tensor) -> torch.Tensor:
        return self.tell(self.between(self.read(noisy) + self.step(when)))


def loss(model: Any, input: torch.Tensor) -> torch.Tensor:
    """The error of the model in telling the noise that is added to the images here."""
    when = torch.randint(STEPS, (len(input),), device=input.device)
    noise, signal = torch.randn_like(input), SIGNAL.to(input.device)[when, None]
    noisy = signal.sqrt() * input + (1 - signal).sqrt() * noise
    return (model(noisy, when) - noise).square().mean()


def sample(model: Any, count: int) -> torch.Tensor:
    """Draw images (count, 64): of noise, from which the noise is taken step by step."""
    device = next(model.parameters()).device
    signal = SIGNAL.to(device)
    images = torch.randn(count, 64, device=device)
    for step in reversed(range(STEPS)):
        noise = model(images, torch.full((count,), step, device=device))
        kept = signal[step] / signal[step - 1] if step else signal[0]
        images = (images - (1 - kept) / (1 - signal[step]).sqrt() * noise) / kept.sqrt()
        if step:
            images = images + ((1 - kept) * (1 - signal[step - 1]) / (1 - signal[step])).sqrt() * torch.randn_like(images)
    return images


def draw(event: Any) -> None:
    """At each evaluation: 4 × 8 images of the averaged weights, drawn.png in the run's directory and in its trackers."""
    with event.eval_model() as model:
        images = sample(model, 32).view(4, 8, 8, 8)
    grey = ((images.clamp(-1, 1) + 1) * 127.5).byte().transpose(1, 2).reshape(32, 64)
    path = Path(event.run_dir) / "drawn.png"
    Image.fromarray(grey.cpu().numpy()).resize((512, 256), Image.Resampling.NEAREST).save(path)
    event.log_image("drawn", path)
