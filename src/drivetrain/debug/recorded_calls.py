"""The calls of a model's modules, as functions of 0-d tensors that torch's gradient checks can take."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from drivetrain.core.lazy import torch
from drivetrain.core.trees import Tree, call

# (function of 0-d tensors, the tensors) → an error message of torch's, or None
Checker = Callable[[Callable[..., "torch.Tensor"], "list[torch.Tensor]"], str | None]
NOISE = (0.1, 0.1, 0.01, 0.0)  # added to inputs at each attempt: at a kink (ReLU's 0, a tie of maxima) every check fails


class Call:
    """A call: a function with its inputs and named parameters, which can be repeated at other points."""

    def __init__(self, function: Callable[..., Any], args: Any, kwargs: Any, parameters: Mapping[str, torch.Tensor]) -> None:
        from torch.utils._pytree import tree_flatten

        self.function, self.parameters = function, parameters
        leaves, self.tree = tree_flatten((args, kwargs))
        self.leaves = [v.detach().clone() if isinstance(v, torch.Tensor) else v for v in leaves]
        self.inputs = [i for i, v in enumerate(self.leaves) if isinstance(v, torch.Tensor) and v.is_floating_point()]

    def problem(self, check: Checker) -> str | None:
        """Return the problem if every attempt failed; None as soon as one succeeds."""
        error = None
        for attempt, noise in enumerate(NOISE):
            generator = torch.Generator().manual_seed(attempt)
            points = [self.leaves[i] for i in self.inputs] + [p.detach() for p in self.parameters.values()]
            points = [p + noise * _random(p, generator) for p in points]
            directions = [_random(p, generator) for p in points]
            steps = [torch.zeros((), requires_grad=True) for _ in points]

            def along(*steps: torch.Tensor, points: Any = points, directions: Any = directions) -> torch.Tensor:
                return self._value([p + s.to(p.device) * d for p, s, d in zip(points, steps, directions, strict=True)])

            if not steps or (error := check(along, steps)) is None:
                return None
        return self._describe(str(error))

    def _value(self, tensors: list[torch.Tensor]) -> torch.Tensor:
        """Call the function and return a random projection of all differentiable outputs, of the order of 1."""
        from torch.utils._pytree import tree_leaves, tree_unflatten

        torch.manual_seed(0)  # the same dropout mask each time
        leaves = list(self.leaves)
        for i, tensor in zip(self.inputs, tensors, strict=False):
            leaves[i] = tensor
        args, kwargs = tree_unflatten(leaves, self.tree)
        output = self.function(dict(zip(self.parameters, tensors[len(self.inputs) :], strict=True)), *args, **kwargs)
        generator = torch.Generator().manual_seed(-1)
        outputs = [o for o in tree_leaves(output) if isinstance(o, torch.Tensor) and o.requires_grad]
        parts = [(o * _random(o, generator)).sum() / o.numel() ** 0.5 for o in outputs]
        return sum(parts, torch.zeros((), requires_grad=True) * 0).cpu()

    def _describe(self, error: str) -> str:
        """Shorten gradcheck's message, and add the tensor's name."""
        found = re.search(r"input (\d+),\s*numerical:(.*)\s*analytical:(.*)", error)
        if found is None:
            return error.splitlines()[0]
        names = ["its input" if len(self.inputs) == 1 else f"its input {n}" for n in range(1, len(self.inputs) + 1)]
        numbers = (re.search(r"-?[\d.]+(e[-+]?\d+)?|-?inf|nan", text) for text in found.groups()[1:])
        numerical, analytical = (n[0].rstrip(".") if n else "?" for n in numbers)
        tensor = [*names, *self.parameters, "its output's gradient"][int(found[1])]
        return f"with respect to {tensor}: {analytical} along a direction in which differences give {numerical}"


def record_calls(model: torch.nn.Module, arguments: Tree) -> tuple[dict[str, Call], dict[str, str]]:
    """Return each module's first call by name, innermost modules first, and the modules that cannot compute in float64."""
    left_out: dict[str, str] = {}
    for _ in model.modules():  # one more forward for each module that cannot
        calls, failure = _record_forward(model, arguments, left_out)
        if failure is None:
            break
        name, reason = failure
        left_out[name] = reason
        _run_in_float32(model.get_submodule(name))
    order = [name for name, _ in model.named_modules()][::-1]  # children before their parents
    return {name: calls[name] for name in order if name in calls}, left_out


def _record_forward(
    model: torch.nn.Module, arguments: Tree, left_out: dict[str, str]
) -> tuple[dict[str, Call], tuple[str, str] | None]:
    from drivetrain.debug.torch_modes import NarrowFloats

    calls: dict[str, Call] = {}
    stack: list[str] = []  # names of the modules that are being called
    narrow: list[str] = []

    def enter(name: str, module: torch.nn.Module, args: object, kwargs: object) -> None:
        stack.append(name)
        own = dict(module.named_parameters(recurse=False))
        if name not in calls and not _any_left_out(stack, left_out) and not isinstance(module, _containers()):
            calls[name] = Call(lambda values, *a, **k: torch.func.functional_call(module, values, a, k), args, kwargs, own)

    def record_narrow() -> None:
        if not _any_left_out(stack, left_out):
            narrow.append(stack[-1] if stack else "")

    handles = []
    for name, module in model.named_modules():
        entered = partial(enter, name)  # before the inputs are cast
        handles.append(module.register_forward_pre_hook(entered, with_kwargs=True, prepend=True))
        handles.append(module.register_forward_hook(lambda *_: stack.pop() and None))
    try:
        with NarrowFloats(record_narrow):
            call(model, arguments)
    except Exception as error:
        if not stack or _any_left_out(stack, left_out):
            raise
        return calls, (narrow[0] if narrow else stack[-1], str(error).splitlines()[0])
    finally:
        for handle in handles:
            handle.remove()
    return calls, (narrow[0], "it computes in a narrower format than float64") if narrow else None


def _run_in_float32(module: torch.nn.Module) -> None:
    """Run a module that cannot compute in float64 in float32, so that the modules around it can be checked."""
    from torch.utils._pytree import tree_map

    module.float()
    module.register_forward_pre_hook(lambda _, args, kwargs: tree_map(_as_single, (args, kwargs)), with_kwargs=True)
    module.register_forward_hook(lambda _, args, output: tree_map(as_double, output))


def _containers() -> tuple[type, ...]:
    return torch.nn.Sequential, torch.nn.ModuleList, torch.nn.ModuleDict, torch.nn.Identity


def _any_left_out(stack: list[str], left_out: dict[str, str]) -> bool:
    return any(name in left_out for name in stack)


def _random(like: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Return standard normal values, the same on every device."""
    return torch.randn(like.shape, generator=generator).to(like.device)


def as_double(value: object) -> Any:
    return value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def _as_single(value: object) -> Any:
    return value.float() if isinstance(value, torch.Tensor) and value.is_floating_point() else value
