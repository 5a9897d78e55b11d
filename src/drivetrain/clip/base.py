"""Bounding the gradients of an update. It happens once an update, on unscaled gradients, over all its micro-batches and ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from drivetrain.core.lazy import torch
from drivetrain.core.option import Option, Positive

Norms = Callable[[Sequence[Any], float], Any]


def _nothing() -> None:
    pass


class Clip(Option):
    """clip=none: gradients as they are."""

    active = False
    needs_whole_rows = False  # of weights, where ranks may hold parts of them

    def build(self, parameters: list[torch.nn.Parameter], norm: Norms) -> Callable[[], None]:
        """A function that bounds the (unscaled) gradients of a model's parameters, given in their order, in place.

        `norm(parameters, type)` is that of the whole model's gradients, also where ranks have parts of them.
        """
        return _nothing


class Norm(Clip):
    """Scale all gradients so that their global norm is at most `max_norm` (Pascanu et al. 2013)."""

    active = True

    def __init__(self, max_norm: Positive = 1.0, norm_type: Positive = 2.0) -> None:
        self.max_norm, self.norm_type = max_norm, norm_type

    def build(self, parameters: list[torch.nn.Parameter], norm: Norms) -> Callable[[], None]:
        def clip() -> None:
            torch.nn.utils.clip_grads_with_norm_(parameters, self.max_norm, norm(parameters, self.norm_type))

        return clip


class Value(Clip):
    """Bound each element of the gradients to ± `clip_value` (torch's clip_grad_value_). It changes their direction."""

    active = True

    def __init__(self, clip_value: Positive = 1.0) -> None:
        self.clip_value = clip_value

    def build(self, parameters: list[torch.nn.Parameter], norm: Norms) -> Callable[[], None]:
        def clip() -> None:
            torch.nn.utils.clip_grad_value_(parameters, self.clip_value)

        return clip


class Agc(Clip):
    """Adaptive clipping: each unit's gradient norm is at most `clip_factor` × its weights' (Brock et al. 2021, NFNets).

    A unit is a row of a weight's first dimension (an output of a linear layer or convolution); a vector (bias, gain) is
    one unit. Weights count as no smaller than `eps`, so that those that start at zero can move. The final layer is left
    alone, as in the paper: the last parameter of two or more dimensions and those after it (its bias).
    """

    active = True
    needs_whole_rows = True

    def __init__(self, clip_factor: Positive = 0.01, eps: Positive = 1e-3) -> None:
        self.clip_factor, self.eps = clip_factor, eps

    def build(self, parameters: list[torch.nn.Parameter], norm: Norms) -> Callable[[], None]:
        final = max((i for i, p in enumerate(parameters) if p.ndim > 1), default=len(parameters))
        bounded = parameters[:final]

        def clip() -> None:
            held = [p for p in bounded if p.grad is not None]
            if held:
                self._bound([p.detach() for p in held], [p.grad for p in held if p.grad is not None])

        return clip

    def _bound(self, weights: list[torch.Tensor], gradients: list[torch.Tensor]) -> None:
        with torch.no_grad():
            scale = [_unit_norms(w) for w in weights]
            norms = [_unit_norms(g) for g in gradients]
            torch._foreach_clamp_min_(scale, self.eps)
            torch._foreach_mul_(scale, self.clip_factor)
            torch._foreach_div_(scale, norms)
            torch._foreach_clamp_max_(scale, 1.0)  # infinite for a gradient of zero, which stays one
            torch._foreach_mul_(gradients, scale)


def _unit_norms(x: torch.Tensor) -> torch.Tensor:
    """2-norms over all but the first dimension: (rows, 1, …), or () of a vector or scalar."""
    if x.ndim <= 1:
        return torch.linalg.vector_norm(x)
    return torch.linalg.vector_norm(x, dim=tuple(range(1, x.ndim)), keepdim=True)
