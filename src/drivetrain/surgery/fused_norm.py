"""surgery=[fused_norm]: norms written out in several operations become torch's single kernel."""

from __future__ import annotations

import copy
import inspect
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

from drivetrain.core.lazy import torch
from drivetrain.core.step.modules import put_in_place, taken_over
from drivetrain.core.step.trees import Tree
from drivetrain.surgery.base import Edit

# The names of parameters and epsilon in such modules.
WEIGHTS = ("weight", "scale", "gamma", "g")
BIASES = ("bias", "shift", "beta", "b")
EPSILONS = ("eps", "epsilon", "variance_epsilon", "variance_eps")
KERNELS = {"layer_norm", "rms_norm", "group_norm", "batch_norm", "instance_norm"}  # of torch.nn.functional


class FusedNorm(Edit):
    """Replace norms written out in several operations by torch's kernel: LayerNorm, and on CUDA RMSNorm.

    A norm is recognised by its parameters' names and then compared with the kernel on random input before it is replaced.
    Norms that already call a kernel of torch, such as those of torch.nn and timm, stay unchanged. torch has no kernel
    for a norm with its activation (compile=inductor fuses those), and none for RMSNorm on a CPU.
    """

    effect = "close"
    changes = "one kernel of a norm rounds differently than several"
    needs_real_tensors = "a norm is recognised by what it computes"

    def apply(self, model: torch.nn.Module, example: Tree) -> str:
        fused, left = Counter[str](), 0
        new: list[tuple[torch.nn.Module, torch.nn.Module]] = []
        for module in list(model.modules()):
            norm = recognise(module)
            if norm is None:
                continue
            if norm.kernel == "rms_norm" and not next(model.parameters()).is_cuda:
                left += 1
                continue
            new.append((module, fused_form(module, norm)))
            fused[f"{type(module).__name__} to {norm.kernel}"] += 1
        put_in_place(model, new)
        rest = (
            f"; {left} RMSNorms left: torch has no single kernel for them on a {next(model.parameters()).device.type}"
            if left
            else ""
        )
        which = ", ".join(f"{n} {name}" for name, n in fused.items()) or "no norm is written out by hand" * (not left)
        return f"{fused.total()} hand-written norms fused" + (f" ({which})" if which else "") + rest


class NormKernel(NamedTuple):
    """One norm in terms of torch's kernel."""

    kernel: str  # layer_norm or rms_norm, of torch.nn.functional
    weight: str  # the parameters' names in the module
    bias: str | None
    eps: float
    dimension: int = -1  # the normalised dimension; 1: the channels of images
    offset: float = 0.0  # added to the weight: 1 in Gemma's RMSNorm, which keeps it around 0

    def __call__(self, module: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        """The norm of x (any shape) by the kernel, with the module's parameters."""
        x = x.movedim(self.dimension, -1)
        weight = getattr(module, self.weight) + self.offset if self.offset else getattr(module, self.weight)
        if self.kernel == "rms_norm":
            out = torch.nn.functional.rms_norm(x, weight.shape, weight, self.eps)
        else:
            bias = None if self.bias is None else getattr(module, self.bias)
            out = torch.nn.functional.layer_norm(x, weight.shape, weight, bias, self.eps)
        return out.movedim(-1, self.dimension)


def recognise(module: torch.nn.Module) -> NormKernel | None:
    """The norm computed by the module, if it is written out by hand.

    It must have no submodules, buffers or parameters but a weight and perhaps a bias, of shape (n,), and an epsilon, under
    the usual names; and it must agree with torch's kernel. A module that calls a kernel itself does not count.
    """
    parameters = {name: p for name, p in module._parameters.items() if p is not None}
    weight, bias = (next((name for name in known if name in parameters), None) for known in (WEIGHTS, BIASES))
    eps = next((value for name in EPSILONS if isinstance(value := getattr(module, name, None), float)), None)
    if weight is None or eps is None or set(parameters) != {weight, bias} - {None} or module._modules or module._buffers:
        return None
    if {p.shape for p in parameters.values()} != {(parameters[weight].numel(),)}:
        return None
    if len(inspect.signature(module.forward).parameters) != 1:
        return None
    forms = [NormKernel("layer_norm", weight, bias, eps), NormKernel("layer_norm", weight, bias, eps, dimension=1)]
    if bias is None:
        forms += [NormKernel("rms_norm", weight, None, eps), NormKernel("rms_norm", weight, None, eps, offset=1.0)]
    return next((form for form in forms if _agrees(module, form)), None)


def _agrees(module: torch.nn.Module, norm: NormKernel) -> bool:
    """True if the module and the kernel agree on random input, in training and in evaluation.

    The rows of the input are of two sizes: in the smaller ones the epsilon weighs as much as the variance, so that a wrong
    one shows. Computed in float64, compared to single precision, because some modules always compute in float32.
    """
    twin = copy.deepcopy(module).cpu().double()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in twin.parameters():
            p.copy_(torch.rand(p.shape, generator=generator, dtype=torch.float64) + 0.5)
        x = torch.randn(4, 3, 5, len(getattr(twin, norm.weight)), generator=generator, dtype=torch.float64) + 0.3
        x[::2] *= max(norm.eps, 1e-6) ** 0.5
        x = x.movedim(-1, norm.dimension)
        expected = norm(twin, x)
        for training in (True, False):
            try:
                out, kernels = _called(twin.train(training), x)
            except Exception:  # it takes other inputs than one tensor of this shape
                return False
            if kernels or not isinstance(out, torch.Tensor) or out.shape != x.shape:
                return False
            if not torch.allclose(expected, out.double(), rtol=1e-4, atol=1e-6):
                return False
    return True


def _called(module: torch.nn.Module, x: torch.Tensor) -> tuple[object, set[str]]:
    """The module's output on a copy of x, and its calls of norm kernels."""
    from torch.overrides import TorchFunctionMode

    names: set[str] = set()

    class CalledNames(TorchFunctionMode):
        def __torch_function__(
            self, func: Callable[..., Tree], types: object, args: tuple[Tree, ...] = (), kwargs: dict[str, Tree] | None = None
        ) -> Tree:
            names.add(func.__name__)
            return func(*args, **(kwargs or {}))

    with CalledNames():
        out = module(x.clone())
    return out, names & KERNELS


def fused_form(module: torch.nn.Module, norm: NormKernel) -> torch.nn.Module:
    """Return the module with a class of the same name that computes the norm by the kernel."""
    cls = type(module)
    return taken_over(module, type(cls.__name__, (cls,), {"forward": lambda self, x: norm(self, x), "__doc__": cls.__doc__}))
