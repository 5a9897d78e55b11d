"""Optimizers that need norms of whole parameters, even if a rank holds only a part."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from drivetrain.core.machine.device import sum_dtype
from drivetrain.optimizer.algorithms.flat_optimizer import Chunk, FlatOptimizer


class LayerwiseOptimizer(FlatOptimizer):
    """The base of optimizers that update a chunk in two halves: `measure` computes norms, and `move` updates by them.

    With `set_shards` the parameters are a rank's parts of whole ones. All chunks are measured before the first one moves, and
    the squares of all norms are added up over the ranks at once.
    """

    measures = 0  # norms of each parameter that `measure` returns
    _norm: Callable[[Sequence[Tensor], float], Tensor] | None = None

    def set_shards(
        self, sums: Callable[[Sequence[Tensor]], list[Tensor]] | None, norm: Callable[[Sequence[Tensor], float], Tensor]
    ) -> None:
        """Take part of each parameter: `sums` adds up numbers over the ranks, `norm` is the norm of the whole model's gradients.

        Without `sums` these are whole parameters, and other ranks have the others.
        """
        self._sums, self._norm, self.own_work = sums or list, norm, sums is not None

    def measure(self, chunk: Chunk, group: dict[str, object]) -> tuple[Tensor, ...]:
        """Begin the update. Returns `measures` tensors (n,), norms of the chunk's parameters; or nothing."""
        raise NotImplementedError

    def move(self, chunk: Chunk, group: dict[str, object], *norms: Tensor) -> None:
        """End the update, by the norms of whole parameters."""
        raise NotImplementedError

    def update(self, chunk: Chunk, group: dict[str, Any]) -> None:
        self.move(chunk, group, *self.measure(chunk, group))

    def update_all(self, work: list[tuple[Chunk, dict[str, object]]]) -> None:
        if not self.own_work:
            super().update_all(work)
            return
        parameters = [p for group in self.param_groups for p in group["params"]]
        device = parameters[0].device
        place = {id(p): n for n, p in enumerate(parameters)}
        squares = torch.zeros(len(parameters), self.measures, device=device, dtype=sum_dtype(device))
        measured = []
        for chunk, group in work:
            chunk.step += 1
            norms = self.measure(chunk, group)
            if chunk.places is None:
                chunk.places = torch.tensor([place[id(p)] for p in chunk.params], device=device)
            if norms:
                squares[chunk.places] = torch.stack(norms, dim=1).to(squares.dtype).square()
            measured.append((chunk, group, bool(norms)))
        norms_of_all = torch.stack(self._sums(squares.unbind())).sqrt()
        for chunk, group, needed in measured:
            self.move(chunk, group, *(norms_of_all[chunk.places].to(chunk.dtype).unbind(1) if needed else ()))


class Lamb(LayerwiseOptimizer):
    """Layer-wise adaptive moments (You et al. 2020, algorithm 2, φ the identity), for each parameter w with gradient g:

        m ← β1 · m + (1 - β1) · g               m̂ = m / (1 - β1^t)
        v ← β2 · v + (1 - β2) · g²              v̂ = v / (1 - β2^t)
        u = m̂ / (√v̂ + ε) + decay · w
        w ← w - lr · ‖w‖ / ‖u‖ · u

    With `bias_correction=False`, m and v replace m̂ and v̂. The trust ratio ‖w‖ / ‖u‖ is 1 if ‖w‖ or ‖u‖ is zero,
    and in groups with `adapt=False`: LAMB as published with BERT does not adapt what does not decay (norms, biases), NVLAMB
    does. With `max_grad_norm`, all gradients are first divided by max(1, ‖all gradients‖ / max_grad_norm), as NVLAMB (apex
    FusedLAMB) does; None leaves them as they are. With `fused`, torch's fused Adam kernel computes the first term of u.
    """

    state_vectors = ("exp_avg", "exp_avg_sq")
    measures = 2

    def __init__(self, params: ParamsT, *, max_grad_norm: float | None, fused: bool, **settings: object) -> None:
        self.max_grad_norm = max_grad_norm
        self._moments: Callable[..., None] = _fused_moments if fused else _moments
        super().__init__(params, **settings)  # type: ignore[arg-type]

    def before_updates(self, chunks: list[Chunk]) -> None:
        self._divisor = None
        if self.max_grad_norm is not None and (chunks or self._norm):
            self._divisor = (self._norm_of_all(chunks) / self.max_grad_norm).clamp_(min=1.0)

    def _norm_of_all(self, chunks: list[Chunk]) -> Tensor:
        if self._norm is not None:
            return self._norm([p for group in self.param_groups for p in group["params"]], 2.0)
        device = chunks[0].step.device  # a model may be on several devices
        norms = [torch.linalg.vector_norm(chunk.grads()).to(device) for chunk in chunks]
        found: torch.Tensor = torch.linalg.vector_norm(torch.stack(norms))
        return found

    def measure(self, chunk: Chunk, group: dict[str, Any]) -> tuple[Tensor, ...]:
        w, g = chunk.weights(), chunk.grads()
        if self._divisor is not None:
            g = g / self._divisor.to(g.device)
        step = chunk.step if group["bias_correction"] else torch.full_like(chunk.step, math.inf)  # β^∞ = 0 corrects nothing
        m, v, u = (chunk.vectors[name] for name in ("exp_avg", "exp_avg_sq", "work"))
        self._moments(g, m, v, step, *group["betas"], group["eps"], u)
        u.add_(w, alpha=group["weight_decay"])
        return (chunk.norms(w), chunk.norms(u)) if group.get("adapt", True) else ()

    def move(self, chunk: Chunk, group: dict[str, Any], *norms: Tensor) -> None:
        if norms:
            w_norm, u_norm = norms
            chunk.scaled(chunk.vectors["work"], torch.where((w_norm > 0) & (u_norm > 0), w_norm / u_norm, 1.0))
        chunk.subtract("work", group["lr"])


def _moments(g: Tensor, m: Tensor, v: Tensor, step: Tensor, beta1: float, beta2: float, eps: float, out: Tensor) -> None:
    """out ← m̂ / (√v̂ + ε); updates m and v."""
    m.lerp_(g, 1 - beta1)
    v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
    step = step.to(sum_dtype(step.device))  # 1 - β2^t is tiny at first
    torch.div(v, 1 - beta2**step, out=out).sqrt_().add_(eps)
    torch.div(m, out, out=out).div_(1 - beta1**step)


def _fused_moments(g: Tensor, m: Tensor, v: Tensor, step: Tensor, beta1: float, beta2: float, eps: float, out: Tensor) -> None:
    """The same in one kernel: a step of Adam from zero with learning rate -1."""
    torch._fused_adamw_(
        [out.zero_()], [g], [m], [v], [], [step], lr=-1.0, beta1=beta1, beta2=beta2, weight_decay=0.0, eps=eps,
        amsgrad=False, maximize=False,
    )  # fmt: skip


class Lars(LayerwiseOptimizer):
    """Layer-wise adaptive rate scaling (You, Gitman & Ginsburg 2017, algorithm 1), for each parameter w with gradient g:

        λ = trust · ‖w‖ / (‖g‖ + decay · ‖w‖)
        v ← momentum · v + lr · λ · (g + decay · w)
        w ← w - v                                    (nesterov: w - lr · λ · (g + decay · w) - momentum · v)

    As in the paper, the learning rate is part of the momentum: a change of it does not rescale what v has accumulated.
    λ is 1 (plain SGD) if ‖w‖ or ‖g‖ is zero, and in groups with `adapt=False`. The paper adapts every layer;
    common practice does not adapt norms and biases.
    """

    state_vectors = ("momentum_buffer",)
    measures = 2

    def measure(self, chunk: Chunk, group: dict[str, Any]) -> tuple[Tensor, ...]:
        if chunk.by_tensors:
            tensors = (chunk.params, chunk.shaped_grads()) if group.get("adapt", True) else ()
            return tuple(torch.stack(torch._foreach_norm(of_each)) for of_each in tensors)
        w, g = chunk.weights(), chunk.grads()
        torch.add(g, w, alpha=group["weight_decay"], out=chunk.vectors["work"])
        return (chunk.norms(w), chunk.norms(g)) if group.get("adapt", True) else ()

    def move(self, chunk: Chunk, group: dict[str, Any], *norms: Tensor) -> None:
        rates = group["lr"]  # lr · λ
        if norms:
            w_norm, g_norm = norms
            ratio = group["trust"] * w_norm / (g_norm + group["weight_decay"] * w_norm)
            rates = rates * torch.where((w_norm > 0) & (g_norm > 0), ratio, 1.0)
        if chunk.by_tensors:
            self._move_tensors(chunk, group, torch.as_tensor(rates, dtype=chunk.dtype).expand(len(chunk.params)))
            return
        step, v, momentum = chunk.vectors["work"], chunk.vectors["momentum_buffer"], group["momentum"]
        if norms:
            chunk.scaled(step, rates)
        else:
            step.mul_(rates)
        v.mul_(momentum).add_(step)
        if group["nesterov"]:
            step.add_(v, alpha=momentum)
        chunk.subtract("work" if group["nesterov"] else "momentum_buffer")

    def _move_tensors(self, chunk: Chunk, group: dict[str, Any], rates: Tensor) -> None:
        """Update the parameters in place, without a vector of g + decay · w: its two terms are added one by one."""
        weights, grads, v = chunk.params, chunk.shaped_grads(), chunk.shaped("momentum_buffer")
        momentum, decays = group["momentum"], rates * group["weight_decay"]
        chunk.vectors["momentum_buffer"].mul_(momentum)
        torch._foreach_addcmul_(v, grads, rates.unbind())
        if group["weight_decay"]:
            torch._foreach_addcmul_(v, weights, decays.unbind())
        if group["nesterov"]:
            torch._foreach_mul_(weights, (1 - decays).unbind())
            torch._foreach_addcmul_(weights, grads, rates.neg().unbind())
            torch._foreach_add_(weights, v, alpha=-momentum)
        else:
            torch._foreach_sub_(weights, v)


class NovoGrad(LayerwiseOptimizer):
    """Layer-wise second moments (Ginsburg et al. 2019, algorithm 1), for each parameter w with gradient g:

        v₁ = ‖g₁‖²,  then  v ← β2 · v + (1 - β2) · ‖g‖²        (one number)
        m ← β1 · m + (g / (√v + ε) + decay · w)                (grad_averaging: times 1 - β1)
        w ← w - lr · m

    with m = 0 before the first step. There is no bias correction, since v starts at its first value. A first gradient of zero
    (before a layer whose weights start at zero) is not taken as that value; if it were, the next gradient would be divided by
    √(1 - β2) of its norm.
    """

    state_vectors = ("exp_avg",)
    state_numbers = ("exp_avg_sq",)
    measures = 1

    def update(self, chunk: Chunk, group: dict[str, Any]) -> None:
        g = chunk.grads()
        self._move(chunk, group, g, chunk.norms(g))

    def measure(self, chunk: Chunk, group: dict[str, object]) -> tuple[Tensor, ...]:
        return (chunk.norms(chunk.grads()),)

    def move(self, chunk: Chunk, group: dict[str, object], *norms: Tensor) -> None:
        self._move(chunk, group, chunk.grads(), *norms)

    def _move(self, chunk: Chunk, group: dict[str, Any], g: Tensor, norms: Tensor) -> None:
        m, v = chunk.vectors["exp_avg"], chunk.numbers["exp_avg_sq"]
        beta1, beta2 = group["betas"]
        squared = norms.square()
        v.copy_(torch.where(v == 0, squared, torch.lerp(v, squared, 1 - beta2)))
        update = chunk.scaled(g, 1 / (v.sqrt() + group["eps"]))
        if group["weight_decay"]:
            update.add_(chunk.weights(), alpha=group["weight_decay"])
        m.mul_(beta1).add_(update, alpha=1 - beta1 if group["grad_averaging"] else 1.0)
        chunk.subtract("exp_avg", group["lr"])
