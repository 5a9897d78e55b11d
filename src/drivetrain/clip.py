"""Bounding the gradients of an update."""

from __future__ import annotations

from collections.abc import Callable

from drivetrain.lazy import torch
from drivetrain.spec import Part, Positive


def _nothing() -> None:
    pass


class Clip(Part):
    """clip=none: gradients as they are."""

    def build(self, parameters: list[torch.nn.Parameter]) -> Callable[[], None]:
        """A function that bounds these parameters' (unscaled) gradients in place."""
        return _nothing


class Norm(Clip):
    """Scale all gradients so that their global norm is at most `max_norm` (Pascanu et al. 2013)."""

    def __init__(self, max_norm: Positive = 1.0, norm_type: Positive = 2.0) -> None:
        self.max_norm, self.norm_type = max_norm, norm_type

    def build(self, parameters: list[torch.nn.Parameter]) -> Callable[[], None]:
        def clip() -> None:
            torch.nn.utils.clip_grad_norm_(parameters, self.max_norm, self.norm_type)

        return clip
