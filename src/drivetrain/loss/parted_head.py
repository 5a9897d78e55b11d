"""A language model's loss without its logits: the output layer returns sums over tokens, and computes the logits in parts."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction

from drivetrain.core.options.option import BuildContext
from drivetrain.core.step.architecture import Architecture
from drivetrain.core.step.modules import run_once

IGNORED = -100  # the label of ignored targets
UP = 1024.0  # scale of the logits' gradients in float16, where most probabilities would underflow


class Tail(NamedTuple):
    """The model's function of the layer's outputs z: `scale` · z, or `cap` · tanh(`scale` · z)."""

    scale: float = 1.0
    cap: float | None = None

    def times(self, factor: float) -> Self:
        """Multiply the result by `factor`."""
        return self._replace(scale=self.scale * factor) if self.cap is None else self._replace(cap=self.cap * factor)


class Terms(NamedTuple):
    """The terms and settings of a token's loss."""

    parts: int
    z_loss: float
    smoothing: float
    tail: Tail
    dtype: torch.dtype  # of the matrix product
    learns: bool


@dataclass(eq=False)
class PartedHead:
    """The Linear layer that computes a model's logits. Within `sums` it returns empty logits, of no token."""

    layer: nn.Linear
    tail: Tail
    asked: tuple[Tensor, int, float, float] | None = field(default=None, init=False)
    found: Tensor | None = field(default=None, init=False)

    @classmethod
    def of(cls, model: nn.Module, context: BuildContext) -> Self | str:
        """Return the head of a model, or the reason why its logits are not one product with a factor or a soft cap."""
        follow, names = _Follow(), Architecture.of(model, context.example).outputs
        hooks = [
            model.get_submodule(name).register_forward_hook(lambda _layer, _args, z, name=name: follow.begin(name, z))
            for name in names
        ]
        with follow:
            output = context.model_call.output_of(run_once(model, context.example, hooks))
        if (known := follow.tails.get(id(output))) is None:
            changed = sorted({operation for of_layer in follow.others.values() for operation in of_layer})
            return f"the model changes the output of {' and '.join(names)} ({', '.join(changed) or 'by code of its own'})"
        name, tail, _ = known
        if type(layer := model.get_submodule(name)) is not nn.Linear:
            return f"{name} is a {type(layer).__name__}, not one product"
        if follow.calls[name] > 1 or follow.others[name]:
            return f"the model uses the output of {name} in other ways too"
        made = cls(layer, tail)
        layer.register_forward_pre_hook(made.before)
        layer.register_forward_hook(made.after)
        return made

    def before(self, layer: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        """Compute the sums if they are requested, and pass no token to the layer."""
        if self.asked is None:
            return None
        (x, *_), (target, parts, z_loss, smoothing) = args, self.asked
        kind = x.device.type
        narrow = torch.is_autocast_enabled(kind) and x.dtype.itemsize < 8
        dtype = torch.get_autocast_dtype(kind) if narrow else x.dtype
        terms = Terms(parts, z_loss, smoothing, self.tail, dtype, torch.is_grad_enabled())
        sums: Callable[..., Tensor] = LogitSums.apply
        self.found = sums(x.flatten(0, -2), self.layer.weight, self.layer.bias, target.flatten().to(x.device), terms)
        return (x[..., :0, :],)

    def after(self, layer: nn.Module, args: tuple[Tensor, ...], z: Tensor) -> Tensor | None:
        """Connect the empty logits to the sums, because FSDP's backward begins at the model's output."""
        return None if self.asked is None or self.found is None else z.detach() + self.found[0].to(z.dtype)

    def sums(
        self, forward: Callable[[], Tensor], target: Tensor, parts: int, z_loss: float, smoothing: float
    ) -> tuple[Tensor, Tensor]:
        """Return the sums of the loss and of right answers over the targets (2,), and the forward's output."""
        self.asked = target, parts, z_loss, smoothing
        try:
            output = forward()
        finally:
            self.asked = None
        found, self.found = self.found, None
        assert found is not None, "the forward has not called the output layer"
        return found, output


class LogitSums(torch.autograd.Function):
    """Sums over tokens of the cross entropy and, without gradients, of right answers, (2,).

    The forward computes the gradients too, so that each logit is computed once: hidden (n, width), weight (classes, width).
    """

    @staticmethod
    def forward(
        ctx: BackwardCFunction, hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, terms: Terms
    ) -> Tensor:
        given, needs = (hidden, weight, bias), [needed and terms.learns for needed in ctx.needs_input_grad[:3]]
        wide = torch.float32 if terms.dtype.itemsize < 4 else terms.dtype  # 16 bits are too few for sums over tokens
        up = UP if terms.dtype == torch.float16 else 1.0
        inputs, w, b = hidden.to(terms.dtype), weight.to(terms.dtype), None if bias is None else bias.to(terms.dtype)
        d_hidden, d_weight, d_bias = found = [
            None if t is None or not needed else torch.zeros(t.shape, dtype=wide, device=t.device)
            for t, needed in zip(given, needs, strict=True)
        ]
        scale, cap = terms.tail
        sums = torch.zeros(2, dtype=wide, device=hidden.device)
        size = math.ceil(len(hidden) / terms.parts)
        for start in range(0, len(hidden), size):
            h, t = inputs[start : start + size], target[start : start + size]
            z, slope = nn.functional.linear(h, w, b).to(wide), None
            if scale != 1:
                z *= scale
            if cap is not None:
                z.tanh_()
                slope = 1 - z.square()
                z.mul_(cap)
            counts, at = (t != IGNORED).to(wide), t.clamp(min=0).unsqueeze(1)
            right = (z.argmax(1) == t).sum() if not any(needs) else sums.new_zeros(())
            first = z[:, 0].clone()
            z = z.log_softmax(1)
            sizes = first - z[:, 0]  # the logits' logsumexp
            losses = terms.z_loss * sizes.square() - (1 - terms.smoothing) * z.gather(1, at).squeeze(1)
            if terms.smoothing:
                losses -= terms.smoothing * z.mean(1)
            sums += torch.stack([(losses * counts).sum(), right.to(wide)])
            if not any(needs):
                continue
            g = z.exp_().mul_(((1 + 2 * terms.z_loss * sizes) * counts).unsqueeze(1))
            g.scatter_add_(1, at, (counts * (terms.smoothing - 1)).unsqueeze(1))
            if terms.smoothing:
                g -= (counts * (terms.smoothing / g.shape[1])).unsqueeze(1)
            if (factor := up * scale * (cap or 1.0)) != 1:
                g *= factor
            g = (g if slope is None else g.mul_(slope)).to(w.dtype)
            if d_hidden is not None:
                d_hidden[start : start + size] = g @ w
            if d_weight is not None and g.dtype == wide:
                d_weight.addmm_(g.t(), h)
            elif d_weight is not None:
                d_weight += g.t() @ h
            if d_bias is not None:
                d_bias += g.sum(0, dtype=wide)
        ctx.save_for_backward(*found)  # type: ignore[arg-type]  # some are None
        ctx.set_materialize_grads(True)
        ctx.dtypes, ctx.up = [None if t is None else t.dtype for t in given], up  # type: ignore[attr-defined]
        return sums

    @staticmethod
    def backward(ctx: BackwardCFunction, *grads: Tensor) -> tuple[Tensor | None, ...]:
        factor = grads[0][0] / ctx.up  # type: ignore[attr-defined]
        found = zip(ctx.saved_tensors, ctx.dtypes, strict=True)  # type: ignore[attr-defined]
        return (*(None if g is None else (g * factor).to(dtype) for g, dtype in found), None, None)


SAME = {"float", "to", "contiguous", "type"}
TIMES, OVER = {"mul", "rmul", "imul", "multiply"}, {"div", "truediv", "idiv", "itruediv", "divide", "true_divide"}


class _Follow(torch.overrides.TorchFunctionMode):
    """Follows the outputs of a layer to the model's own."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.tails: dict[int, tuple[str, Tail, Tensor]] = {}  # by tensor id; the tensor is kept, so that no other gets its id
        self.others: dict[str, set[str]] = defaultdict(set)  # other operations on a layer's outputs

    def begin(self, name: str, output: Tensor) -> None:
        self.calls[name] += 1
        self.tails[id(output)] = name, Tail(), output

    def __torch_function__(
        self, func: Callable[..., object], types: object, args: Sequence[object] = (), kwargs: dict[str, object] | None = None
    ) -> object:
        found = func(*args, **(kwargs or {}))
        known = next((self.tails[id(a)] for a in args if id(a) in self.tails), None)
        if known is None or not isinstance(found, Tensor):
            return found
        (layer, tail, _), name, number = known, func.__name__.strip("_"), args[1] if len(args) > 1 else None
        if name in SAME:
            self.tails[id(found)] = layer, tail, found
        elif name in TIMES | OVER and isinstance(number, int | float):
            self.tails[id(found)] = layer, tail.times(number if name in TIMES else 1 / number), found
        elif name == "tanh" and tail.cap is None:
            self.tails[id(found)] = layer, tail._replace(cap=1.0), found
        elif name != "get":  # "get" reads an attribute
            self.others[layer].add(name)
        return found
