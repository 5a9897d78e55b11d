"""Gradient clipping, once an update: after unscaling, on the gradients of all micro-batches and ranks."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, ClassVar

from annotated_types import Ge, Le

from drivetrain.core.lazy import torch
from drivetrain.core.options import groups
from drivetrain.core.options.option import BuildContext, Effect, Option, Positive, RunSpec
from drivetrain.core.step.architecture import Architecture
from drivetrain.core.typed import StateDict

Tensors = Sequence["torch.Tensor"]
GlobalNorm = Callable[[Tensors, float], "torch.Tensor"]  # (parameters, type of the norm) → norm of their gradients, 0-d


def _nothing() -> None:
    pass


def updated_parameters(context: BuildContext) -> list[torch.nn.Parameter]:
    """The parameters that the run's optimizer updates, in its order."""
    return [p for group in context.optimizer.param_groups for p in group["params"]]


class Clip(Option, groups.Clip):
    """clip=none: gradients are not clipped."""

    stage_option: ClassVar[bool] = True
    stage_keys: ClassVar[tuple[str, ...]] = ("*",)
    effect: ClassVar[Effect] = "exact"

    def build(self, context: BuildContext) -> Callable[[], bool | None]:
        """A function that clips the gradients of the parameters that the run's optimizer updates.

        Where it returns False, the update is skipped.
        """
        return self.create(updated_parameters(context), context.parallel.norm)

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

    def build(self, context: BuildContext) -> Callable[[], None]:
        total = context.sums["grad_norm"] = torch.zeros((), device=context.device)

        def norm(parameters: Tensors, norm_type: float) -> torch.Tensor:
            found: torch.Tensor = context.parallel.norm(parameters, norm_type)
            total.add_(found)
            return found

        return self.create(updated_parameters(context), norm)

    def create(self, parameters: list[torch.nn.Parameter], norm: GlobalNorm) -> Callable[[], None]:
        on_device = [[p for p in parameters if p.device == device] for device in {p.device for p in parameters}]

        def clip() -> None:
            with torch.no_grad():
                factor = (self.max_norm / (norm(parameters, self.norm_type) + 1e-6)).clamp_(max=1.0)  # as in torch
                for group in on_device:
                    if gradients := [p.grad for p in group if p.grad is not None]:
                        torch._foreach_mul_(gradients, factor.to(gradients[0].device))

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
    """Adaptive gradient clipping (Brock et al. 2021, NFNets): bounds each unit's gradient by its weights.

    The gradient's norm is at most `clip_factor` × the weights' norm. A unit is a row of a weight's first dimension (an output
    of a linear layer or convolution); a vector (bias, gain) is one unit. A weight norm below `eps` counts as `eps`, so that
    weights that start at zero can move. As in the paper, the output layers are not clipped; with phases, those among the
    phase's parameters.
    """

    effect = "changes"
    changes = "large gradients of a unit are scaled down"
    active = True

    def __init__(self, clip_factor: Positive = 0.01, eps: Positive = 1e-3) -> None:
        self.clip_factor, self.eps = clip_factor, eps

    def build(self, context: BuildContext) -> Callable[[], None]:
        groups = context.optimizer.param_groups
        updated = {name: p for group in groups for name, p in zip(group["param_names"], group["params"], strict=True)}
        among = updated if context.run.values["phases"] else None
        left = Architecture.of(context.model, context.example, among).of_outputs
        # In the model's order: an optimizer's groups put biases after all weights. Other ranks may update some parameters.
        clipped = [updated[name] for name, _ in context.model.named_parameters() if name in updated and name not in left]
        return self._clipping(clipped, context.parallel.row_sums)

    def create(self, parameters: list[torch.nn.Parameter], norm: GlobalNorm) -> Callable[[], None]:
        return self._clipping(parameters, lambda _: None)

    def _clipping(
        self, clipped: list[torch.nn.Parameter], row_sums: Callable[[Tensors], groups.Sums | None]
    ) -> Callable[[], None]:
        sums: dict[tuple[bool, ...], groups.Sums | None] = {}  # by which parameters have a gradient

        def clip() -> None:
            has_grad = tuple(p.grad is not None for p in clipped)
            given = [p for p in clipped if p.grad is not None]
            if has_grad not in sums:
                sums[has_grad] = row_sums(given)
            if given:
                self._clip([p.detach() for p in given], [p.grad for p in given if p.grad is not None], sums[has_grad])

        return clip

    def _clip(self, weights: list[torch.Tensor], gradients: list[torch.Tensor], sums: groups.Sums | None = None) -> None:
        with torch.no_grad():
            scale = [_unit_norms(w) for w in weights]
            norms = [_unit_norms(g) for g in gradients]
            if sums is not None:
                scale, norms = _norms_of_all_parts(sums, scale, norms)
            torch._foreach_clamp_min_(scale, self.eps)
            torch._foreach_mul_(scale, self.clip_factor)
            torch._foreach_div_(scale, norms)
            torch._foreach_clamp_max_(scale, 1.0)  # infinite for a zero gradient, which stays zero
            torch._foreach_mul_(gradients, scale)


class Spike(Clip):
    """Skip an update whose gradient norm is above the mean of the last `window` ones by `factor` standard deviations.

    As in OLMo's optimizers with skipped steps (OLMo 2, 2025). Skipped updates count in the mean too, so that a norm which stays
    high soon counts as normal. Until half a window is full nothing is skipped, and a norm that is not finite is left to the
    precision.
    """

    effect = "changes"
    changes = "updates whose gradient norm stands out are left out"
    active = True
    step_waits = "each update is made or skipped by its gradient norm, which the host reads"

    def __init__(self, factor: Positive = 6.0, window: Annotated[int, Ge(4), Le(100_000)] = 128) -> None:
        self.factor, self.window = factor, window

    def validate(self, run: RunSpec) -> Iterator[str]:
        reasons = {
            "compile": (run.compile.captures_step, "its graph makes every update: set compile=inductor"),
            "optimizer": (run.optimizer.takes_closure, "it has made the update by then: set optimizer=adamw"),
        }
        for group, (is_so, why) in reasons.items():
            if is_so:
                yield f"{run.named('clip')} and {run.named(group)} exclude each other: {why}"
        if run.values["phases"]:
            yield f"{run.named('clip')} skips whole updates, and a phase is a part of one: set clip=norm"

    def build(self, context: BuildContext) -> Callable[[], bool]:
        parameters, norm = updated_parameters(context), context.parallel.norm
        guard = context.kept["clip"] = SpikeGuard(self.factor, self.window)
        return lambda: guard.allows(float(norm(parameters, 2.0)))


class SpikeGuard:
    """The gradient norms of the last updates, and the test whether another one is an outlier."""

    def __init__(self, factor: float, window: int) -> None:
        self.factor, self.norms = factor, deque[float](maxlen=window)

    def allows(self, norm: float) -> bool:
        """Return whether an update with this norm is to be made, and remember it."""
        if not math.isfinite(norm):
            return True
        known = len(self.norms) >= max(2, (self.norms.maxlen or 0) // 2)
        stands_out = known and norm > statistics.fmean(self.norms) + self.factor * statistics.stdev(self.norms)
        self.norms.append(norm)
        return not stands_out

    def state_dict(self) -> StateDict:
        """Return the norms."""
        return {"norms": list(self.norms)}

    def load_state_dict(self, state: StateDict) -> None:
        """Load a `state_dict()`."""
        self.norms.extend(state.get("norms", ()))


def _norms_of_all_parts(sums: groups.Sums, *of_parts: list[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Norms of whole units from the norms of this rank's parts, all by one sum over the ranks."""
    squares = [torch.stack([norm.square() for norm in of_weight]) for of_weight in zip(*of_parts, strict=True)]
    whole = [square.sqrt_().unbind() for square in sums(squares)]
    return [list(norms) for norms in zip(*whole, strict=True)]


def _unit_norms(x: torch.Tensor) -> torch.Tensor:
    """2-norms over all but the first dimension: (rows, 1, …), or () of a vector or scalar."""
    dimensions = tuple(range(1, x.ndim)) or None
    return torch.linalg.vector_norm(x, dim=dimensions, keepdim=dimensions is not None)  # type: ignore[no-any-return]
