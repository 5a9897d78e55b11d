"""A generative adversarial network: two networks, two losses and two optimizers, which train together in any precision."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torchmetrics
from PIL import Image
from torch import nn
from torch.nn.functional import softplus

from drivetrain import Callback, Event
from drivetrain.core.option import Momentum, Positive, RunSpec
from drivetrain.optimizer import Optimizer
from drivetrain.optimizer.algorithms.chained import ChainedOptimizer
from drivetrain.optimizer.torch_wrappers import remove_step_wrappers
from drivetrain.task import Task

NETWORKS = ("generator", "discriminator")


class Gan(nn.Module):
    """A generator of images and a discriminator that tells them from real ones. A forward gives what both losses need."""

    def __init__(self, shape: tuple[int, ...], noise: int = 16, width: int = 128) -> None:
        super().__init__()
        self.shape, self.noise, pixels = shape, noise, math.prod(shape)
        self.generator = nn.Sequential(
            nn.Linear(noise, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, pixels)
        )
        self.discriminator = nn.Sequential(
            nn.Linear(pixels, width), nn.LeakyReLU(0.2), nn.Linear(width, width), nn.LeakyReLU(0.2), nn.Linear(width, 1)
        )

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        real = x.flatten(1)
        made = self.generator(torch.randn(len(x), self.noise, device=x.device))
        frozen = {name: p.detach() for name, p in self.discriminator.named_parameters()}
        return {
            "real": self.discriminator(real),
            "made": self.discriminator(made.detach()),  # the discriminator's loss ends here
            "fooled": torch.func.functional_call(self.discriminator, frozen, (made,)),  # the generator's goes through it
            "images": torch.stack([real, made], 1),
        }


def losses(output: dict[str, torch.Tensor], y: torch.Tensor) -> dict[str, torch.Tensor]:
    """Both losses (Goodfellow et al. 2014, non-saturating). Each reaches the weights of its own network alone."""
    return {
        "discriminator": softplus(-output["real"]).mean() + softplus(output["made"]).mean(),
        "generator": softplus(-output["fooled"]).mean(),
    }


class Generation(Task):
    """task=gan: any data of images will do."""


@dataclass(kw_only=True, eq=False)
class OneForEach(Optimizer):
    """An Adam for each network. With precision=amp each is checked for an overflow by itself, and skips alone."""

    elementwise = True
    lr: Positive = 0.001  # of the generator
    discriminator_lr: Positive = 0.002
    weight_decay: float = 0.0
    beta1: Momentum = 0.5
    beta2: Momentum = 0.99
    eps: Positive = 1e-8

    def validate(self, run: RunSpec) -> Iterator[str]:
        yield from super().validate(run)
        if run.clip.active:
            yield f"optimizer=one_for_each and {run.named('clip')} exclude each other (one norm of both networks): set clip=none"

    def group_settings(self, model: nn.Module) -> Any:
        return lambda name, decayed: {"network": name.partition(".")[0]}

    def make(self, groups: list[dict[str, Any]], implementation: str) -> torch.optim.Optimizer:
        rates = {"generator": 1.0, "discriminator": self.discriminator_lr / self.lr}
        members = []
        for network in NETWORKS:
            own = [{**group, "lr": group["lr"] * rates[network]} for group in groups if group["network"] == network]
            members.append(torch.optim.Adam(own, betas=(self.beta1, self.beta2), eps=self.eps))
            remove_step_wrappers(members[-1])
        return ChainedOptimizer(*members, separate=True)


class EnergyDistance(torchmetrics.Metric):
    """How far made images are from real ones (Székely and Rizzo 2013), on the whole set: 0 if both are distributed alike."""

    images: list[torch.Tensor]  # (n, 2, pixels): real and made

    def __init__(self) -> None:
        super().__init__()
        self.add_state("images", default=[], dist_reduce_fx="cat")

    def update(self, output: dict[str, torch.Tensor], target: torch.Tensor) -> None:
        self.images.append(output["images"].float())

    def compute(self) -> torch.Tensor:
        images = self.images if isinstance(self.images, torch.Tensor) else torch.cat(self.images)
        real, made = images.unbind(1)
        return 2 * torch.cdist(real, made).mean() - torch.cdist(real, real).mean() - torch.cdist(made, made).mean()


class Picture(Callback):
    """Draws 8 × 8 images of the generator at each evaluation: made.png in the run's directory."""

    needs_model = True

    def evaluation(self, event: Event) -> None:
        noise = torch.randn(64, event.model.noise, generator=torch.Generator().manual_seed(0))  # the run's own draws stay
        height, width = event.model.shape[-2:]
        with torch.no_grad():
            made = event.model.generator(noise.to(next(event.model.parameters()).device)).float().cpu()
        made = made.view(64, -1, height, width)[:, 0]
        page = made.view(8, 8, height, width).permute(0, 2, 1, 3).reshape(8 * height, 8 * width)
        dark, bright = page.quantile(torch.tensor([0.05, 0.98]))
        page = ((page - dark) / (bright - dark)).clamp(0, 1)
        Image.fromarray((255 * page).byte().numpy()).resize((64 * width, 64 * height), Image.Resampling.NEAREST).save(
            event.run_dir / "made.png"
        )
