"""model=resnet9, model=mlp, model=unet and model=gpt: the options of the networks that drivetrain ships."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from drivetrain.core.errors import UserError
from drivetrain.core.lazy import torch
from drivetrain.core.options.option import BuildContext, Count, Momentum, RunSpec
from drivetrain.model.base import Model


@dataclass(eq=False)
class ResNet9(Model):
    """Nine convolutions with residuals (drivetrain.model.nets), for small images.

    `bias` adds biases to the convolutions, which the next BatchNorms subtract again: for comparison only.
    """

    width: Count = 16
    bias: bool = False

    def validate_device(self, run: RunSpec) -> Iterator[str]:
        if (problem := self._shape_problem(run.data.shape())) is not None:
            yield problem

    def _shape_problem(self, shape: tuple[int, ...] | None) -> str | None:
        if shape is not None and (len(shape) != 3 or min(shape[1:]) < 8):
            return f"model=resnet9 wants images of at least 8×8, but the data gives {list(shape)}: set model=mlp"
        return None

    def create(self, shape: tuple[int, ...], classes: int) -> torch.nn.Module:
        from drivetrain.model import nets

        if (problem := self._shape_problem(shape)) is not None:  # some data's shape is unknown before it is read
            raise UserError(problem)
        return nets.ResNet9(shape, classes, self.width, self.bias)


@dataclass(eq=False)
class Mlp(Model):
    """Linear layers with ReLU and dropout (drivetrain.model.nets), for inputs of any shape."""

    hidden: Sequence[Count] = (256, 256)
    dropout: Momentum = 0.0

    may_convolve = False

    def create(self, shape: tuple[int, ...], classes: int) -> torch.nn.Module:
        from drivetrain.model import nets

        return nets.Mlp(shape, classes, self.hidden, self.dropout)


@dataclass(eq=False)
class UNet(Model):
    """A small fully convolutional network (drivetrain.model.nets) that gives a class for each pixel."""

    width: Count = 16
    depth: Count = 2

    pixels = True

    def validate_device(self, run: RunSpec) -> Iterator[str]:
        if (problem := self._shape_problem(run.data.shape())) is not None:
            yield problem

    def _shape_problem(self, shape: tuple[int, ...] | None) -> str | None:
        least = 2**self.depth
        if shape is None or (len(shape) == 3 and min(shape[1:]) >= least):
            return None
        hint = "lower model.depth" if len(shape) == 3 else "set model=mlp"
        wants = f"wants images of at least {least}×{least}, but the data gives {list(shape)}"
        return f"model=unet with model.depth={self.depth} {wants}: {hint}"

    def create(self, shape: tuple[int, ...], classes: int) -> torch.nn.Module:
        from drivetrain.model import nets

        if (problem := self._shape_problem(shape)) is not None:
            raise UserError(problem)
        return nets.UNet(shape, classes, self.width, self.depth)


@dataclass(eq=False)
class Gpt(Model):
    """A small decoder-only transformer (drivetrain.model.gpt) that predicts the next token from those before it.

    If the data has a class for each text, a head on the mean over the text's tokens predicts it.
    """

    width: Count = 256
    depth: Count = 4
    heads: Count = 4
    dropout: Momentum = 0.0
    ngrams: Count = 1
    buckets: Count = 8192
    drop_path: Momentum = 0.0

    tokens = True
    may_be_transformer = True
    may_convolve = False

    def validate(self, run: RunSpec) -> Iterator[str]:
        yield from super().validate(run)
        if self.width % (2 * self.heads):
            near = self.width // (2 * self.heads) * 2 * self.heads
            yield (
                f"model.width={self.width} does not divide into model.heads={self.heads} heads of an even width: "
                f"set model.width to {' or '.join(str(n) for n in (near, near + 2 * self.heads) if n)}"
            )
        if self.drop_path and self.depth == 1:
            yield (
                f"model.drop_path={self.drop_path} has no effect with model.depth=1, as it rises from 0 in the first block: set "
                "model.depth=2 or more, or model.drop_path=0"
            )

    def create_for(self, context: BuildContext) -> torch.nn.Module:
        data = context.data
        if context.run.data.targets == "tokens" or data.vocabulary is None:
            return super().create_for(context)
        return self.classifier(data.shape, data.classes, data.vocabulary)

    def create(self, shape: tuple[int, ...], classes: int) -> torch.nn.Module:
        from drivetrain.model import gpt

        return gpt.Gpt(shape[0], classes, *self._sizes)

    def classifier(self, shape: tuple[int, ...], classes: int, vocabulary: int) -> torch.nn.Module:
        """A freshly initialised network for texts of `vocabulary` tokens, with `classes` outputs per text."""
        from drivetrain.model import gpt

        return gpt.GptClassifier(shape[0], classes, vocabulary, *self._sizes)

    @property
    def _sizes(self) -> tuple[int, int, int, float, int, int, float]:
        return self.width, self.depth, self.heads, self.dropout, self.ngrams, self.buckets, self.drop_path
