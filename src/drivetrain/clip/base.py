"""Gradient clipping, once an update: after unscaling, on the gradients of all micro-batches and ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from drivetrain.core.lazy import torch
from drivetrain.core.option import Effect, Option, Positive

GlobalNorm = Callable[[Sequence[Any], float], Any]  # (parameters, type of the norm) → norm of their gradients, 0-d

if TYPE_CHECKING:
    from drivetrain.core.context import BuildContext


def _nothing() -> None:
    pass


class Clip(Option):
    """clip=none: gradients are not clipped."""

    stage_option: ClassVar[bool] = True
    stage_keys: ClassVar[tuple[str, ...]] = ("*",)
    effect: ClassVar[Effect] = "exact"
    active = False
    needs_whole_rows = False  # of weights, where ranks may hold parts of them

    def build(self, context: BuildContext) -> Callable[[], None]:
        """A function that clips the gradients of the parameters that the run's optimizer updates."""
        parameters = [p for group in context.optimizer.param_groups for p in group["params"]]
        return self.create(parameters, context.parallel.norm)

    def create(self, parameters: list[torch.nn.Parameter], norm: GlobalNorm) -> Callable[[], None]:
        """A function that bounds the (unscaled) gradients of a model's parameters, given in their order, in place.

        `norm(parameters, type)` is the norm of the whole model's gradients, also if each rank has a part of them.
        """
        return _nothing


class Norm(Clip):
    """Scale all gradients by one factor so that their global norm is at most `max_norm` (Pascanu et al. 2013)."""

    effect = "changes"
    changes = "all gradients are scaled down where their norm is large"
    active = True

    def __init__(self, max_norm: Positive = 1.0, norm_type: Positive = 2.0) -> None:
        self.max_norm, self.norm_type = max_norm, norm_type

    def create(self, parameters: list[torch.nn.Parameter], norm: GlobalNorm) -> Callable[[], None]:
        def clip() -> None:
            torch.nn.utils.clip_grads_with_norm_(parameters, self.max_norm, norm(parameters, self.norm_type))

        return clip


class Value(Clip):
    """Clamp each element of the gradients to ± `clip_value` (torch's clip_grad_value_), which changes their direction."""

    effect = "changes"
    changes = "large elements of gradients are cut off"
    active = True

    def __init__(self, clip_value: Positive = 1.0) -> None:
        self.clip_value = clip_value

    def create(self, parameters: list[torch.nn.Parameter], norm: GlobalNorm) -> Callable[[], None]:
        def clip() -> None:
            torch.nn.utils.clip_grad_value_(parameters, self.clip_value)

        return clip


class Agc(Clip):
    """Adaptive gradient clipping: scale each unit's gradient so that its norm is at most `clip_factor` × the norm of the
    unit's weights (Brock et al. 2021, NFNets).

    A unit is a row of a weight's first dimension (an output of a linear layer or convolution); a vector (bias, gain) is one
    unit. A weight norm below `eps` counts as `eps`, so that weights that start at zero can move. As in the paper, the final
    layer is not clipped: the last parameter of two or more dimensions and those after it (its bias).
    """

    effect = "changes"
    changes = "large gradients of a unit are scaled down"
    active = True
    needs_whole_rows = True

    def __init__(self, clip_factor: Positive = 0.01, eps: Positive = 1e-3) -> None:
        self.clip_factor, self.eps = clip_factor, eps

    def create(self, parameters: list[torch.nn.Parameter], norm: GlobalNorm) -> Callable[[], None]:
        final = max((i for i, p in enumerate(parameters) if p.ndim > 1), default=len(parameters))
        clipped = parameters[:final]

        def clip() -> None:
            given = [p for p in clipped if p.grad is not None]
            if given:
                self._clip([p.detach() for p in given], [p.grad for p in given if p.grad is not None])

        return clip

    def _clip(self, weights: list[torch.Tensor], gradients: list[torch.Tensor]) -> None:
        with torch.no_grad():
            scale = [_unit_norms(w) for w in weights]
            norms = [_unit_norms(g) for g in gradients]
            torch._foreach_clamp_min_(scale, self.eps)
            torch._foreach_mul_(scale, self.clip_factor)
            torch._foreach_div_(scale, norms)
            torch._foreach_clamp_max_(scale, 1.0)  # infinite for a zero gradient, which stays zero
            torch._foreach_mul_(gradients, scale)


def _unit_norms(x: torch.Tensor) -> torch.Tensor:
    """2-norms over all but the first dimension: (rows, 1, …), or () of a vector or scalar."""
    if x.ndim <= 1:
        return torch.linalg.vector_norm(x)
    return torch.linalg.vector_norm(x, dim=tuple(range(1, x.ndim)), keepdim=True)
