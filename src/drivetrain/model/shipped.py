"""model=resnet9, model=mlp and model=gpt: the options of the networks that drivetrain ships."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from drivetrain.core.lazy import torch
from drivetrain.core.option import Count, Momentum, RunSpec
from drivetrain.model.base import Model


@dataclass(eq=False)
class ResNet9(Model):
    """Nine convolutions with residuals (drivetrain.model.resnet9), for small images.

    `bias` gives the convolutions biases, which the BatchNorms after them subtract again: for comparison only.
    """

    width: Count = 16
    bias: bool = False

    def validate_device(self, run: RunSpec) -> Iterator[str]:
        shape = run.data.shape()
        if shape is not None and (len(shape) != 3 or min(shape[1:]) < 8):
            yield f"model=resnet9 wants images of at least 8×8, but the data gives {list(shape)}: set model=mlp"

    def create(self, shape: tuple[int, ...], classes: int) -> torch.nn.Module:
        from drivetrain.model import resnet9

        return resnet9.ResNet9(shape, classes, self.width, self.bias)


@dataclass(eq=False)
class Mlp(Model):
    """Linear layers with ReLU and dropout (drivetrain.model.mlp), for inputs of any shape."""

    hidden: Sequence[Count] = (256, 256)
    dropout: Momentum = 0.0

    def create(self, shape: tuple[int, ...], classes: int) -> torch.nn.Module:
        from drivetrain.model import mlp

        return mlp.Mlp(shape, classes, self.hidden, self.dropout)


@dataclass(eq=False)
class Gpt(Model):
    """A small decoder-only transformer (drivetrain.model.gpt) that predicts the next token from those before it."""

    width: Count = 256
    depth: Count = 4
    heads: Count = 4
    dropout: Momentum = 0.0
    ngrams: Count = 1
    buckets: Count = 8192

    tokens = True
    may_be_transformer = True

    def validate(self, run: RunSpec) -> Iterator[str]:
        yield from super().validate(run)
        if self.width % (2 * self.heads):
            near = self.width // (2 * self.heads) * 2 * self.heads
            yield (
                f"model.width={self.width} does not divide into model.heads={self.heads} heads of an even width: "
                f"set model.width to {' or '.join(str(n) for n in (near, near + 2 * self.heads) if n)}"
            )

    def create(self, shape: tuple[int, ...], classes: int) -> torch.nn.Module:
        from drivetrain.model import gpt

        return gpt.Gpt(shape[0], classes, self.width, self.depth, self.heads, self.dropout, self.ngrams, self.buckets)
