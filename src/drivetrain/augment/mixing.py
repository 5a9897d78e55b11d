"""Two samples in one, and their labels with them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any, ClassVar

from drivetrain.augment import streams
from drivetrain.augment.base import Augment, in_pieces, per_sample, wants_images, where
from drivetrain.augment.erasing import box_mask
from drivetrain.core import rng
from drivetrain.core.lazy import torch
from drivetrain.core.microbatch import Request
from drivetrain.core.option import Positive, RunSpec, Share

KNOTS = 4096


class Mixing(Augment):
    """Mixes each sample with its neighbour in the epoch's order: share λ is its own, from Beta(alpha, alpha).

    λ is drawn for each sample, not for the batch: the papers' distribution, and a sample's result does not hang on who
    else is in its micro-batch. Of several mixing options each sample takes one, by a draw of equal chances.
    """

    mixes = True
    name: ClassVar[str]
    draws: ClassVar[range]  # whether at all, share, …

    def __init__(self, alpha: Positive = 1.0, prob: Share = 1.0) -> None:
        self.alpha, self.prob = alpha, prob

    def validate(self, run: RunSpec) -> Iterator[str]:
        chosen = run.names("augment")
        mixing = [name for name, part in zip(chosen, run.augment, strict=True) if part.mixes]
        if chosen[-len(mixing) :] != mixing:
            right = ",".join([*(c for c in chosen if c not in mixing), *mixing])
            yield f"{run.named('augment')}: {self.name} mixes images that are done: write it last, [{right}]"
        if not self.prob:
            yield f"augment.{self.name}.prob=0 does nothing: raise it or leave {self.name} out"
        if not getattr(run.loss, "soft_targets", False):
            yield (
                f"augment=[{self.name}] gives each sample a share of two labels, and {run.named('loss')} takes one: "
                f"set loss=cross_entropy, or leave {self.name} out"
            )

    def validate_device(self, run: RunSpec) -> Iterator[str]:
        yield from wants_images(run, self.name)

    def apply(
        self, x: torch.Tensor, y: torch.Tensor, rows: torch.Tensor, pipeline: Any, request: Request
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The request's samples mixed, (n, …); targets are probabilities (n, classes) float32."""
        mixers = [step for step in pipeline.steps if step.mixes]
        if self is not mixers[0]:
            return x, y, rows  # the first has done it for all
        n = len(request.indices)
        place = _partners(request).to(x.device, non_blocking=True)
        other, rows = x.index_select(0, place), rows[:n]
        x, share = x[:n], torch.ones(n, device=x.device)
        turn = (rng.uniform(pipeline.seed, request.epoch, rows, streams.TURN[0]) * len(mixers)).long()
        for number, mixer in enumerate(mixers):
            whether, beta, *place_draws = (rng.uniform(pipeline.seed, request.epoch, rows, stream) for stream in mixer.draws)
            mine = (turn == number) & (whether < mixer.prob)
            x, own = mixer.mix(x, other, torch.where(mine, quantile(beta, mixer.alpha), 1.0), *place_draws)
            share = share * own
        classes = torch.arange(pipeline.classes, device=y.device)
        first, second = (labels.view(-1, 1) == classes for labels in (y[:n], y[place]))
        return x, first * share.view(-1, 1) + second * (1 - share).view(-1, 1), rows

    def mix(
        self, x: torch.Tensor, other: torch.Tensor, share: torch.Tensor, *draws: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Images (n, c, h, w), `share` (n,) of them their own, and the share that it came to; 1 leaves them as they are."""
        raise NotImplementedError


class Mixup(Mixing):
    """Each image a weighted mean with another, the labels likewise (Zhang et al. 2018). Images come out in float."""

    name, draws = "mixup", streams.MIXUP

    def __init__(self, alpha: Positive = 0.2, prob: Share = 1.0) -> None:
        super().__init__(alpha, prob)

    def mix(
        self, x: torch.Tensor, other: torch.Tensor, share: torch.Tensor, *draws: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        kind = x.dtype if x.is_floating_point() else torch.float32
        return in_pieces(lambda a, b, by: torch.lerp(b.to(kind), a.to(kind), per_sample(by).to(kind)), x, other, share), share


class CutMix(Mixing):
    """A box of another image in each, the labels by area (Yun et al. 2019)."""

    name, draws = "cutmix", streams.CUTMIX

    def mix(
        self, x: torch.Tensor, other: torch.Tensor, share: torch.Tensor, *draws: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        h, w = x.shape[2:]
        side = torch.sqrt(1 - share)
        spans = []
        for size, draw in zip((h, w), draws, strict=True):
            middle, half = (draw * size).long(), (side * size / 2).long()
            begin, end = (middle - half).clamp(min=0), (middle + half).clamp(max=size)
            spans.append((begin, end - begin))
        (top, height), (left, width) = spans
        mask = box_mask(top, left, height, width, h, w)
        return where(mask, other, x), 1 - (height * width).to(share.dtype) / (h * w)


def _partners(request: Request) -> torch.Tensor:
    """Where in `request.rows()` the partners (n,) stand; each sample its own in a request without them (a dry run)."""
    if request.partners is None:
        return torch.arange(len(request.indices))
    ordered, order = request.rows().sort()
    return order[torch.searchsorted(ordered, request.partners)]


def quantile(u: torch.Tensor, alpha: float) -> torch.Tensor:
    """Beta(alpha, alpha)'s quantiles of u (n,) in [0, 1): the inverse of a table, by lines between its knots."""
    below, values = _beta(alpha, u.device)
    right = torch.searchsorted(below, u, right=True).clamp_(max=len(below) - 1)
    left = right - 1
    step = (below[right] - below[left]).clamp_(min=1e-30)
    return values[left] + (values[right] - values[left]) * ((u - below[left]) / step)


@cache
def _beta(alpha: float, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """The distribution function of Beta(alpha, alpha) at KNOTS values that lie closer towards 0 and 1.

    Integrated over s = t^alpha, in which the density t^(alpha−1)·(1−t)^(alpha−1) has no pole; the upper half mirrors the lower.
    """
    t = torch.linspace(0, 1, KNOTS // 2, dtype=torch.float64).pow(2) / 2
    area = torch.cumulative_trapezoid((1 - t) ** (alpha - 1), t**alpha)
    lower = torch.cat([area.new_zeros(1), area / area[-1] / 2])
    below, values = torch.cat([lower, 1 - lower.flip(0)[1:]]), torch.cat([t, 1 - t.flip(0)[1:]])
    return below.float().to(device), values.float().to(device)
