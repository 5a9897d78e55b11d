"""Checks every module's backward against finite differences in float64, before training."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from typing import TYPE_CHECKING, Any

from drivetrain.core.errors import UserError
from drivetrain.core.lazy import torch
from drivetrain.core.microbatch import Request
from drivetrain.core.option import Count, Positive, RunSpec
from drivetrain.core.trees import Tree, call, map_tensors
from drivetrain.debug.base import Debug

if TYPE_CHECKING:
    from drivetrain.core.context import BuildContext

logger = logging.getLogger(__name__)

NOISE = (0.1, 0.1, 0.01, 0.0)  # added to inputs at each attempt: at a kink (ReLU's 0, a tie of maxima) every check fails


class WrongGradient(RuntimeError):
    """A backward is not the derivative of its forward."""


class Gradcheck(Debug):
    """Runs torch.autograd.gradcheck on a float64 copy: on each module's inputs and own parameters, then on the loss.

    It checks one random direction per tensor, at the cost of a few forwards whatever the size. It uses `samples` training
    samples; `parameters` parameters, spread over the model, are checked through the loss. A wrong backward ends the run
    before training and is named by its module. Modules that do not compute in float64 are left out and logged.
    """

    effect = "exact"
    needs_real_tensors = "it compares numbers"

    def __init__(
        self,
        samples: Count = 4,
        parameters: Count = 8,
        eps: Positive = 1e-7,
        atol: Positive = 1e-6,
        rtol: Positive = 1e-3,
    ) -> None:
        self.samples, self.parameters = samples, parameters
        self.eps, self.atol, self.rtol = eps, atol, rtol

    def validate(self, run: RunSpec) -> Iterator[str]:
        if not run.precision.full_float32:
            yield (
                f"debug=gradcheck compares with finite differences, for which {run.named('precision')} is too coarse "
                "(it checks a float64 copy): set precision=fp32"
            )
        if not run.adapter.true_gradient:
            yield (
                f"debug=gradcheck and {run.named('adapter')} exclude each other (its backward leaves out a derivative on "
                "purpose): set adapter=lora or debug=none"
            )

    def advise(self, run: RunSpec) -> Iterator[str]:
        if run.compile.active:
            yield f"debug=gradcheck checks the plain model, not what {run.named('compile')} makes of it"

    def setup(self, context: BuildContext) -> None:
        self._context = context

    def check_model(self, model: torch.nn.Module, loss: Any, data: Any) -> None:
        device = next(model.parameters()).device
        request = Request(0, torch.arange(min(self.samples, len(data.source))), 1.0)
        x, y = (map_tensors(lambda t: _double(t.to(device)), tree) for tree in data(request))
        arguments = self._context.model_call.arguments(x)
        with _float64_and_own_rng(device):
            copy = _float64_copy(model)
            calls, left_out = _record_calls(copy, arguments)
            problems: dict[str, str] = {}
            for name, call in calls.items():
                if not _contains(name, (*problems, *left_out)) and (problem := call.problem(self._gradcheck)) is not None:
                    problems[name] = f"{_title(copy, name)}, {problem}"
            if not problems and not left_out and (problem := self._check_loss(copy, loss, arguments, y)) is not None:
                problems[""] = f"the loss of the whole model, {problem}"
        if problems:
            raise WrongGradient("a backward is not its forward's derivative: " + "; ".join(problems.values()))
        checked = sum(not _contains(name, left_out) for name in calls)
        logger.info(f"debug=gradcheck: the gradients of {checked} modules{'' if left_out else ' and of the loss'} are right")
        for name, reason in left_out.items():
            logger.info(f"debug=gradcheck leaves out {_title(copy, name)}: {reason}")

    def _check_loss(self, model: torch.nn.Module, loss: Any, arguments: Tree, y: Tree) -> str | None:
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        selected = dict(named[:: -max(1, len(named) // self.parameters)][: self.parameters])

        def loss_with(values: dict[str, torch.Tensor]) -> torch.Tensor:
            output = call(lambda *a, **k: torch.func.functional_call(model, values, a, k), arguments)
            return loss(output, y)  # type: ignore[no-any-return]

        return _Call(loss_with, (), {}, selected).problem(self._gradcheck)

    def _gradcheck(self, function: Callable[..., torch.Tensor], steps: list[torch.Tensor]) -> str | None:
        """Run torch's gradcheck on a function of 0-d tensors. Returns its error message, or None."""
        from torch.autograd.gradcheck import GradcheckError

        try:
            torch.autograd.gradcheck(
                function, steps, eps=self.eps, atol=self.atol, rtol=self.rtol, nondet_tol=1e-8, check_undefined_grad=False
            )
        except GradcheckError as error:
            return str(error)
        return None


class _Call:
    """A call: a function with its inputs and named parameters, which can be repeated at other points."""

    def __init__(self, function: Callable[..., Any], args: Any, kwargs: Any, parameters: Mapping[str, torch.Tensor]) -> None:
        from torch.utils._pytree import tree_flatten

        self.function, self.parameters = function, parameters
        leaves, self.tree = tree_flatten((args, kwargs))
        self.leaves = [v.detach().clone() if isinstance(v, torch.Tensor) else v for v in leaves]
        self.inputs = [i for i, v in enumerate(self.leaves) if isinstance(v, torch.Tensor) and v.is_floating_point()]

    def problem(self, gradcheck: Callable[..., str | None]) -> str | None:
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

            if not steps or (error := gradcheck(along, steps)) is None:
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
        numerical, analytical = (n[0] if n else "?" for n in numbers)
        tensor = [*names, *self.parameters][int(found[1])]
        return f"with respect to {tensor}: {analytical} along a direction in which differences give {numerical}"


def _record_calls(model: torch.nn.Module, arguments: Tree) -> tuple[dict[str, _Call], dict[str, str]]:
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
) -> tuple[dict[str, _Call], tuple[str, str] | None]:
    from drivetrain.debug.torch_modes import NarrowFloats

    calls: dict[str, _Call] = {}
    stack: list[str] = []  # names of the modules that are being called
    narrow: list[str] = []

    def enter(name: str, module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        stack.append(name)
        own = dict(module.named_parameters(recurse=False))
        if name not in calls and not _any_left_out(stack, left_out) and not isinstance(module, _containers()):
            calls[name] = _Call(lambda values, *a, **k: torch.func.functional_call(module, values, a, k), args, kwargs, own)

    def record_narrow() -> None:
        if not _any_left_out(stack, left_out):
            narrow.append(stack[-1] if stack else "")

    handles = []
    for name, module in model.named_modules():
        handles.append(module.register_forward_pre_hook(lambda m, a, k, n=name: enter(n, m, a, k), with_kwargs=True))
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

    forward = module.float().forward
    module.forward = lambda *args, **kwargs: tree_map(  # type: ignore[method-assign]
        _double, forward(*tree_map(_single, args), **tree_map(_single, kwargs))
    )


@contextmanager
def _float64_and_own_rng(device: torch.device) -> Iterator[None]:
    """Make float64 the default dtype and fork the random state, so that the check does not affect training."""
    before = torch.get_default_dtype()
    with torch.random.fork_rng([device] if device.type != "cpu" else [], device_type=device.type), torch.enable_grad():
        torch.set_default_dtype(torch.float64)
        try:
            yield
        finally:
            torch.set_default_dtype(before)


def _float64_copy(model: torch.nn.Module) -> torch.nn.Module:
    try:
        return deepcopy(model).double().train()
    except Exception as error:
        raise UserError(f"debug=gradcheck works on a copy of the model, and it cannot be copied: {error}") from None


def _containers() -> tuple[type, ...]:
    return torch.nn.Sequential, torch.nn.ModuleList, torch.nn.ModuleDict, torch.nn.Identity


def _contains(name: str, others: Sequence[str] | dict[str, str]) -> bool:
    """Return whether one of the others is the module `name` or inside of it."""
    return any(other == name or not name or other.startswith(f"{name}.") for other in others)


def _any_left_out(stack: list[str], left_out: dict[str, str]) -> bool:
    return any(name in left_out for name in stack)


def _title(model: torch.nn.Module, name: str) -> str:
    kind = type(model.get_submodule(name)).__name__
    return f"module {name} ({kind})" if name else f"the model itself ({kind})"


def _random(like: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Return standard normal values, the same on every device."""
    return torch.randn(like.shape, generator=generator).to(like.device)


def _double(value: Any) -> Any:
    return value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def _single(value: Any) -> Any:
    return value.float() if isinstance(value, torch.Tensor) and value.is_floating_point() else value
