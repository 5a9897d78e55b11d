"""loss=arcface: cross entropy of cosines, with a margin."""

from __future__ import annotations

import math
from typing import Annotated

from annotated_types import Ge, Lt

from drivetrain.core.errors import UserError
from drivetrain.core.lazy import torch
from drivetrain.core.options.option import Positive
from drivetrain.core.step.architecture import Architecture
from drivetrain.core.step.modules import put_in_place
from drivetrain.core.step.trees import Tree
from drivetrain.loss.base import SMALLEST, wide
from drivetrain.loss.classification import OverClasses

Margin = Annotated[float, Ge(0), Lt(1.5)]


class ArcFace(OverClasses):
    """Additive angular margin (Deng et al. 2019): it pulls embeddings of a class closer to the centre of the class.

    The model's last linear layer computes `scale` × the cosines between its input, the embedding, and its rows, the centres of
    the classes; it has no bias. In training the angle to the right class is `margin` radians wider; beyond π, where the cosine
    would rise again, it is lower by margin × sin margin instead. An evaluation uses no margin.
    """

    changes = "classifies by angles with a margin between classes"
    takes = ("class",)

    def __init__(self, margin: Margin = 0.5, scale: Positive = 64.0) -> None:
        self.margin, self.scale = margin, scale

    def add_parameters(self, model: torch.nn.Module) -> None:
        """Replace the model's last layer by one that gives cosines. Raises UserError if it is not linear."""
        from drivetrain.loss.cosine import CosineLinear

        outputs = Architecture.of(model).outputs
        layer = model.get_submodule(outputs[-1]) if outputs else model
        if type(layer) is not torch.nn.Linear or layer is model:
            raise UserError(
                f"loss=arcface makes cosines of the linear layer that gives the model's outputs, and {type(layer).__name__} is "
                "none: end the model with torch.nn.Linear, or set loss=cross_entropy"
            )
        put_in_place(model, [(layer, CosineLinear.of(layer, self.scale))])

    def sum_and_count(self, output: torch.Tensor, target: Tree) -> tuple[torch.Tensor, torch.Tensor]:
        logits, right = wide(output), target.long().clamp(min=0).unsqueeze(1)
        cosine = (logits.gather(1, right) / self.scale).clamp(-1, 1)
        sine = (1 - cosine.square()).clamp(min=SMALLEST).sqrt()  # the square root has an infinite gradient at 0
        wider = cosine * math.cos(self.margin) - sine * math.sin(self.margin)
        wider = torch.where(cosine > -math.cos(self.margin), wider, cosine - self.margin * math.sin(self.margin))
        return self.plain_sum(logits.scatter(1, right, self.scale * wider), target), self.count(target).to(logits.dtype)
