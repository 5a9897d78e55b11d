"""Norms written out by hand, known by what they compute, and torch's single kernel for them."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as functional
from torch import nn

from drivetrain.surgery.tracing import left_as_it_was

EPS = (1e-3, 1e-5, 1e-6, 1e-8, 1e-12, 0.0, None)  # None: torch's own for the type
FUSED = {"layer_norm", "rms_norm", "group_norm", "batch_norm", "instance_norm"}


class Form(NamedTuple):
    """What a hand-written norm computes."""

    kind: str  # layer_norm or rms_norm
    dimension: int  # that is normalised: 1 (channels) or -1
    weight: str | None  # name of the scale
    offset: float  # added to the scale: 1 where it is kept around 0
    bias: str | None
    eps: float | None

    def of(self, module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        """The same computed by torch's kernel, from the module's parameters."""
        moved = x.movedim(1, -1) if self.dimension == 1 else x
        weight = None if self.weight is None else getattr(module, self.weight)
        weight = weight + self.offset if weight is not None and self.offset else weight
        size = (moved.shape[-1],)
        if self.kind == "rms_norm":
            out = functional.rms_norm(moved, size, weight, self.eps)
        else:
            bias = None if self.bias is None else getattr(module, self.bias)
            out = functional.layer_norm(moved, size, weight, bias, self.eps or 0.0)
        return out.movedim(-1, 1) if self.dimension == 1 else out


def fuse(module: nn.Module, form: Form) -> None:
    """Give the module this forward in place. Its class is a new one of the same name, so that a copy of it works too."""
    cls = type(module)
    module.__class__ = type(cls.__name__, (cls,), {"forward": lambda self, x: form.of(self, x), "__doc__": cls.__doc__})


def find(model: nn.Module, example: torch.Tensor) -> list[tuple[nn.Module, Form]]:
    """The model's hand-written norms, each with what it computes."""
    found = []
    for module, shape in _candidates(model, example):
        form = recognise(module, shape)
        if form is not None:
            found.append((module, form))
    return found


def recognise(module: nn.Module, shape: tuple[int, ...]) -> Form | None:
    """What the module computes, if it is a norm: told by its outputs on random inputs, in double precision.

    Inputs of two sizes: at the smaller one eps weighs as much as the variance, so that a wrong one shows.
    """
    twin = copy.deepcopy(module).cpu().double()
    vectors = [name for name, p in twin.named_parameters() if p.ndim == 1]
    if len(vectors) > 2 or len(vectors) != len(list(twin.parameters())):
        return None
    generator = torch.Generator().manual_seed(0)
    inputs = [(torch.randn(shape, generator=generator, dtype=torch.float64) + 0.3) * scale for scale in (1.0, 1e-3)]
    with torch.no_grad():
        for p in twin.parameters():
            p.copy_(torch.rand(p.shape, generator=generator, dtype=torch.float64) + 0.5)
        try:
            wanted = [twin(x) for x in inputs]
        except Exception:  # it wants something else than one tensor of doubles: no norm that we know
            return None
        return next((form for form in _forms(twin, vectors, shape) if _same(form, twin, inputs, wanted)), None)


def _forms(module: nn.Module, vectors: list[str], shape: tuple[int, ...]) -> Iterator[Form]:
    own = [v for v in vars(module).values() if isinstance(v, float)]
    sizes = {getattr(module, name).numel() for name in vectors}
    dimensions = [d for d in (-1, 1) if sizes <= {shape[d]}]
    if len(shape) == 2:
        dimensions = dimensions[:1]
    scales = [(None, None), *((w, b) for w in vectors for b in (None, *(v for v in vectors if v != w)))]
    for (weight, bias), offset, dimension in itertools.product(scales, (0.0, 1.0), dimensions):
        if len([v for v in (weight, bias) if v]) != len(vectors) or (offset and weight is None):
            continue
        for eps in dict.fromkeys([*own, *EPS]):
            if eps is not None:
                yield Form("layer_norm", dimension, weight, offset, bias, eps)
            if bias is None:
                yield Form("rms_norm", dimension, weight, offset, None, eps)


def _same(form: Form, module: nn.Module, inputs: list[torch.Tensor], wanted: list[Any]) -> bool:
    return all(  # as close as single precision: some compute in float whatever comes
        isinstance(w, torch.Tensor) and torch.allclose(form.of(module, x), w.double(), rtol=1e-4, atol=1e-6)
        for x, w in zip(inputs, wanted, strict=True)
    )


def _candidates(model: nn.Module, example: torch.Tensor) -> list[tuple[nn.Module, tuple[int, ...]]]:
    """Modules without submodules that map a tensor to one of its shape by several operations, none of them a fused norm."""
    from torch.overrides import TorchFunctionMode

    inside: list[Any] = []
    done: dict[int, list[str]] = {}
    found: list[tuple[nn.Module, tuple[int, ...]]] = []

    class Watch(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if inside:
                done.setdefault(id(inside[-1]), []).append(func.__name__)
            return func(*args, **(kwargs or {}))

    def entered(module: nn.Module, _: Any) -> None:
        inside.append(module)

    def left(module: nn.Module, args: Any, out: Any) -> None:
        inside.pop()
        operations = done.get(id(module), [])
        alike = len(args) == 1 and isinstance(out, torch.Tensor) and out.shape == args[0].shape and out.ndim > 1
        if alike and len(operations) > 2 and not FUSED & set(operations) and module not in [m for m, _ in found]:
            found.append((module, tuple(out.shape)))

    handles = []
    for module in model.modules():
        if not any(True for _ in module.children()):
            handles += [module.register_forward_pre_hook(entered), module.register_forward_hook(left)]
    try:
        with left_as_it_was(model, example.device), torch.no_grad():
            model.eval()
            with Watch():
                model(example)
    finally:
        for handle in handles:
            handle.remove()
    return found
