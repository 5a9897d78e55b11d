"""Mixup and CutMix: two samples are mixed into one, and so are their labels."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from typing import ClassVar, Literal, cast

from drivetrain.augment import base
from drivetrain.augment.base import Augment, in_chunks, per_sample, require_images, where
from drivetrain.augment.erasing import box_mask
from drivetrain.core.lazy import torch
from drivetrain.core.options.option import Positive, RunSpec, Share
from drivetrain.core.step import rng
from drivetrain.core.step.microbatch import Request
from drivetrain.core.step.source import PipelineParts
from drivetrain.core.step.tensors import send

KNOTS = 4096  # of the table of a Beta distribution


class Mixing(Augment):
    """Mixes each sample with the next one in the epoch's order. Its own share λ is drawn from Beta(alpha, alpha).

    With `per` each sample draws, or all samples of an update together, as in timm. Of several mixing options at most one is
    drawn, each with its probability `prob`; if these sum to more than 1, they are divided by their sum.
    """

    mixes = True
    name: ClassVar[str]
    draws: ClassVar[range]  # random streams: the share, …

    def __init__(self, alpha: Positive = 1.0, prob: Share = 1.0, per: Literal["sample", "update"] = "sample") -> None:
        self.alpha, self.prob, self.per = alpha, prob, per

    def validate(self, run: RunSpec) -> Iterator[str]:
        chosen = run.names("augment")
        mixing = [name for name, part in zip(chosen, run.augment, strict=True) if part.mixes]
        if chosen[-len(mixing) :] != mixing:
            right = ",".join([*(c for c in chosen if c not in mixing), *mixing])
            yield f"{run.named('augment')}: {self.name} mixes already augmented images: write it last, [{right}]"
        if not self.prob:
            yield f"augment.{self.name}.prob=0 does nothing: raise it or leave {self.name} out"
        for name, other in zip(chosen, run.augment, strict=True):
            if isinstance(other, Mixing) and self.per == "update" != other.per:
                yield f"augment.{self.name}.per=update, and augment.{name}.per={other.per}: one of them is drawn: set both alike"
        if run.data.targets not in ("class", "labels", None):
            yield f"augment=[{self.name}] mixes the classes of samples, and {run.named('data')} has none: leave {self.name} out"
        elif not run.loss.soft_targets:
            yield (
                f"augment=[{self.name}] gives each sample a share of two labels, and {run.named('loss')} takes one: "
                f"set loss=cross_entropy or loss=bce, or leave {self.name} out"
            )

    def validate_shape(self, run: RunSpec, shape: Sequence[int]) -> Iterator[str]:
        yield from require_images(run, shape, self.name)

    def apply(
        self, x: torch.Tensor, y: torch.Tensor, indices: torch.Tensor, pipeline: PipelineParts, request: Request
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Mix the request's samples (n, …); targets become probabilities (n, classes) float32."""
        mixers = [cast(Mixing, step) for step in pipeline.steps if step.mixes]
        if self is not mixers[0]:
            return x, y, indices  # the first mixing option has already mixed
        n = len(request.indices)
        drawn_by = request.indices if self.per == "sample" else torch.full((n,), request.update)
        partner = send(_partner_rows(request), x.device)
        other = x.index_select(0, partner)
        x, share = x[:n], torch.ones(n)  # shares are drawn on the CPU: a device would run a hundred kernels for a few numbers
        choice = rng.uniform(pipeline.seed, request.epoch, drawn_by, base.MIXER[0])
        choice *= max(1.0, sum(mixer.prob for mixer in mixers))
        begin = 0.0
        for mixer in mixers:
            beta, *box_draws = (rng.uniform(pipeline.seed, request.epoch, drawn_by, stream) for stream in mixer.draws)
            mine = (choice >= begin) & (choice < begin + mixer.prob)
            x, kept = mixer.mix(x, other, torch.where(mine, quantile(beta, mixer.alpha), 1.0), *box_draws)
            begin, share = begin + mixer.prob, share * kept
        share = send(share, y.device).view(-1, 1)
        if y.dim() == 1:
            y = (y.view(-1, 1) == torch.arange(pipeline.classes, device=y.device)).to(share.dtype)
        return x, y[:n] * share + y[partner] * (1 - share), indices[:n]

    def mix(
        self, x: torch.Tensor, other: torch.Tensor, share: torch.Tensor, *draws: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Mix images (n, c, h, w), keeping a `share` (n,) of each (1: the whole image); return them and the exact shares.

        Shares and draws are on the CPU.
        """
        raise self.unwritten("mix")


class Mixup(Mixing):
    """The weighted mean of two images, and of their labels (Zhang et al. 2018). Images become float."""

    effect = "changes"
    changes = "two training images become one, and so do their labels"
    name, draws = "mixup", base.MIXUP

    def __init__(self, alpha: Positive = 0.2, prob: Share = 1.0, per: Literal["sample", "update"] = "sample") -> None:
        super().__init__(alpha, prob, per)

    def mix(
        self, x: torch.Tensor, other: torch.Tensor, share: torch.Tensor, *draws: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        kind = x.dtype if x.is_floating_point() else torch.float32
        return in_chunks(
            lambda a, b, by: torch.lerp(b.to(kind), a.to(kind), per_sample(by).to(kind)), x, other, send(share, x.device)
        ), share


class CutMix(Mixing):
    """Pastes a box of another image into each; labels are mixed by area (Yun et al. 2019)."""

    effect = "changes"
    changes = "training images get a part of another one, and labels their share"
    name, draws = "cutmix", base.CUTMIX

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
        box = send(torch.stack([top, left, height, width]), x.device)
        mask = box_mask(box[0], box[1], box[2], box[3], h, w)
        return where(mask, other, x), 1 - (height * width).to(share.dtype) / (h * w)


def _partner_rows(request: Request) -> torch.Tensor:
    """Return the rows (n,) of the batch that hold `request.mix_with`; without it (a dry run), each sample's own row."""
    if request.mix_with is None:
        return torch.arange(len(request.indices))
    ordered, order = request.indices_to_read().sort()
    return order[torch.searchsorted(ordered, request.mix_with)]


def quantile(u: torch.Tensor, alpha: float) -> torch.Tensor:
    """Return the quantiles of Beta(alpha, alpha) at u (n,) in [0, 1), interpolated in a table."""
    below, values = _beta(alpha)
    right = torch.searchsorted(below, u, right=True).clamp_(max=len(below) - 1)
    left = right - 1
    step = (below[right] - below[left]).clamp_(min=1e-30)
    return values[left] + (values[right] - values[left]) * ((u - below[left]) / step)


@cache
def _beta(alpha: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Tabulate the distribution function of Beta(alpha, alpha) at KNOTS values, which are denser towards 0 and 1.

    It is integrated up to the middle over s = t^alpha, where the density t^(alpha−1)·(1−t)^(alpha−1) has no pole, and mirrored.
    """
    t = torch.linspace(0, 1, KNOTS // 2, dtype=torch.float64).pow(2) / 2
    area = torch.cumulative_trapezoid((1 - t) ** (alpha - 1), t**alpha)
    lower = torch.cat([area.new_zeros(1), area / area[-1] / 2])
    below, values = torch.cat([lower, 1 - lower.flip(0)[1:]]), torch.cat([t, 1 - t.flip(0)[1:]])
    return below.float(), values.float()
