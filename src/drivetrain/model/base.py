"""The base of every model option."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from drivetrain.core.errors import UserError
from drivetrain.core.lazy import torch
from drivetrain.core.option import Option, RunSpec
from drivetrain.core.trees import named_leaves

if TYPE_CHECKING:
    from drivetrain.core.context import BuildContext


class Model(Option):
    """An option that builds a network for the data's shape and classes."""

    tokens: bool | None = False  # whether it reads sequences of tokens; None: not known
    pixels: bool | None = False  # whether it gives an output for each pixel of an image; None: not known
    may_be_transformer = False
    takes_trees = False  # whether a forward may take several inputs

    def validate(self, run: RunSpec) -> Iterator[str]:
        if run.data.tokens and self.tokens is False:
            yield f"{run.named('model')} does not read sequences of tokens, which {run.named('data')} gives: set model=gpt"
        if self.tokens and not run.data.tokens:
            yield (
                f"{run.named('model')} reads sequences of tokens, which {run.named('data')} does not give: "
                "set data=stdlib loss=next_token, or another model"
            )
        data, masks = run.named("data"), run.data.targets == "mask"
        if masks and self.pixels is False:
            yield f"{run.named('model')} gives one output for an image, but {data} has a class for each pixel: set model=unet"
        if self.pixels and not masks and run.data.targets is not None:
            yield f"{run.named('model')} is for masks, and {data} has none: set task=segmentation, or another model"

    def build(self, context: BuildContext) -> torch.nn.Module:
        """The network for the run's data, on its device. Raises UserError if it does not take inputs of this structure."""
        if not self.takes_trees and len(parts := named_leaves(context.data.two_samples(context.device))) > 1:
            raise UserError(
                f"{context.run.named('model')} takes one tensor, and the inputs of a sample are several "
                f"({', '.join(name for name, _ in parts)}): set model=own, with a network whose forward takes them"
            )
        return self.create(context.data.shape, context.data.classes).to(context.device)

    def create(self, shape: tuple[int, ...], classes: int) -> torch.nn.Module:
        """A freshly initialised network for samples of `shape` (without the batch dimension), with `classes` outputs."""
        raise NotImplementedError
