"""Checks every module's backward, and on request its double backward, against finite differences in float64."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated

from annotated_types import Ge, Le

from drivetrain.core.errors import UserError
from drivetrain.core.lazy import torch
from drivetrain.core.machine import isolation
from drivetrain.core.options.groups import Loss
from drivetrain.core.options.option import BuildContext, Count, Option, Positive, RunSpec
from drivetrain.core.step.microbatch import MicroBatch
from drivetrain.core.step.source import PipelineParts
from drivetrain.core.step.trees import Tree, call, cast
from drivetrain.debug.base import Debug

logger = logging.getLogger(__name__)


# (function of 0-d tensors, the tensors) → an error message of torch's, or None
Checker = Callable[[Callable[..., "torch.Tensor"], "list[torch.Tensor]"], str | None]
NOISE = (0.1, 0.1, 0.01, 0.0)  # added to inputs at each attempt: at a kink (ReLU's 0, a tie of maxima) every check fails


class Call:
    """A repeatable call: a function with its inputs and named parameters."""

    def __init__(
        self, function: Callable[..., Tree], args: object, kwargs: object, parameters: Mapping[str, torch.Tensor]
    ) -> None:
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

            def along(
                *steps: torch.Tensor, points: list[torch.Tensor] = points, directions: list[torch.Tensor] = directions
            ) -> torch.Tensor:
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
    """Return each module's first call by name, innermost modules first, and the modules without float64."""
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
    containers = torch.nn.Sequential, torch.nn.ModuleList, torch.nn.ModuleDict, torch.nn.Identity

    def enter(name: str, module: torch.nn.Module, args: object, kwargs: object) -> None:
        stack.append(name)
        own = dict(module.named_parameters(recurse=False))
        if name not in calls and left_out.keys().isdisjoint(stack) and not isinstance(module, containers):
            calls[name] = Call(lambda values, *a, **k: torch.func.functional_call(module, values, a, k), args, kwargs, own)

    def record_narrow() -> None:
        if left_out.keys().isdisjoint(stack):
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
        if not stack or not left_out.keys().isdisjoint(stack):
            raise
        return calls, (narrow[0] if narrow else stack[-1], str(error).splitlines()[0])
    finally:
        for handle in handles:
            handle.remove()
    return calls, (narrow[0], "it computes in a narrower format than float64") if narrow else None


def _run_in_float32(module: torch.nn.Module) -> None:
    """Run a module that cannot compute in float64 in float32, so that the modules around it can be checked."""
    module.float()
    module.register_forward_pre_hook(lambda _, args, kwargs: cast((args, kwargs), torch.float32), with_kwargs=True)
    module.register_forward_hook(lambda _, args, output: cast(output, torch.float64))


def _random(like: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Return standard normal values, the same on every device."""
    return torch.randn(like.shape, generator=generator).to(like.device)


Difference = Annotated[float, Ge(1e-12), Le(1e-2)]  # outside, differences in float64 come from rounding or curvature


class WrongGradient(RuntimeError):
    """A backward is not its forward's derivative, or a double backward not its backward's."""


@dataclass(frozen=True)
class _Order:
    """The words of messages for a derivative's order."""

    setting: str  # that requests it
    wrong: str
    checked: str


FIRST = _Order("debug=gradcheck", "a backward is not its forward's derivative", "gradients")
LOSS = "the loss of the whole model"  # instead of a module's name
SECOND = _Order("debug.second=true", "a double backward is not its backward's derivative", "second derivatives")


class Gradcheck(Debug):
    """Runs torch.autograd.gradcheck on a float64 copy: on each module's inputs and own parameters, then on the loss.

    It checks one random direction per tensor, at the cost of a few forwards whatever the size. It uses `samples` training
    samples; `parameters` parameters, spread over the model, are checked through the loss. A wrong backward ends the run
    before training and is named by its module. Modules that do not compute in float64 are left out and logged.

    `second` also checks the backwards' own derivatives, by torch.autograd.gradgradcheck: gradient penalties and meta-learning
    train through them. Modules whose backward cannot be differentiated are left out and logged.
    """

    effect = "exact"
    needs_real_tensors = "it compares numbers"

    def __init__(
        self,
        samples: Count = 4,
        parameters: Count = 8,
        eps: Difference = 1e-7,
        atol: Positive = 1e-6,
        rtol: Positive = 1e-3,
        second: bool = False,
    ) -> None:
        self.samples, self.parameters, self.second = samples, parameters, second
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

    def check_model(self, model: torch.nn.Module, loss: Loss, data: PipelineParts) -> None:
        most = self._context.batch.micro_batch(self._context.parallel.data_world)
        batch, arguments = self._context.first_call(model, min(self.samples, most, len(data.source)))
        x, y, arguments = (cast(tree, torch.float64) for tree in (batch.x, batch.y, arguments))
        batch = replace(batch, x=x, y=y)
        with isolation.isolated(isolation.settings()):
            torch.set_default_dtype(torch.float64)
            try:
                copy = deepcopy(model).double().train()
            except Exception as error:
                raise UserError(f"debug=gradcheck works on a copy of the model, but copying fails: {error}") from None
            for module in copy.modules():
                if isinstance(module, torch.nn.Embedding):
                    module.padding_idx = None  # the gradient of its row is left out on purpose
            calls, left_out = record_calls(copy, arguments)
            if loss.runs_model:
                left_out = {**left_out, LOSS: "it runs the model itself"}
            loss_call = self._loss_call(copy, loss, arguments, batch)
            for order in (FIRST, SECOND) if self.second else (FIRST,):
                self._check(order, copy, calls, loss_call, left_out)

    def _check(
        self, order: _Order, model: torch.nn.Module, calls: Mapping[str, Call], loss_call: Call, left_out: dict[str, str]
    ) -> None:
        """Check the modules, innermost first, and then the loss. Raises WrongGradient, or logs what was checked.

        Modules that contain a wrong one or one of `left_out` are not checked. Non-differentiable modules are added to
        `left_out`, with the reason.
        """
        problems: dict[str, str] = {}
        told = set(left_out) if order is SECOND else set()
        for name, module_call in calls.items():
            if not _contains(name, (*problems, *left_out)):
                self._check_call(order, name, module_call, problems, left_out)
        if not problems and not left_out:
            self._check_call(order, LOSS, loss_call, problems, left_out)
        if problems:
            wrong = [f"{_title(model, name)}, {problem}" for name, problem in problems.items()]
            raise WrongGradient(f"{order.wrong}: " + "; ".join(wrong))
        checked = sum(not _contains(name, [n for n in left_out if n != LOSS]) for name in calls)
        and_loss = "" if left_out else " and of the loss"
        logger.info(f"{order.setting}: the {order.checked} of {checked} modules{and_loss} are right")
        for name in (name for name in left_out if name not in told):
            logger.info(f"{order.setting} leaves out {_title(model, name)}: {left_out[name]}")

    def _check_call(self, order: _Order, name: str, of: Call, problems: dict[str, str], left_out: dict[str, str]) -> None:
        """Check one call; add to `problems`, or to `left_out` the reason why it cannot be differentiated."""
        from torch.autograd.gradcheck import GradcheckError, gradcheck, gradgradcheck

        derivative: Callable[..., bool] = gradcheck if order is FIRST else gradgradcheck

        def check(function: Callable[..., torch.Tensor], steps: list[torch.Tensor]) -> str | None:
            given = (steps,) if order is FIRST else (steps, torch.ones((), requires_grad=True))
            eps, atol, rtol = self.eps, self.atol, self.rtol
            try:
                derivative(function, *given, eps=eps, atol=atol, rtol=rtol, nondet_tol=1e-8, check_undefined_grad=False)
            except GradcheckError as error:
                return str(error)
            return None

        try:
            if (problem := of.problem(check)) is not None:
                problems[name] = problem
        except RuntimeError as error:
            if order is FIRST:
                raise
            left_out[name] = str(error).splitlines()[0]

    def _loss_call(self, model: torch.nn.Module, loss: Loss, arguments: Tree, batch: MicroBatch) -> Call:
        """Return the loss as a function of some parameters, spread over the model."""
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        selected = dict(named[:: -max(1, len(named) // self.parameters)][: self.parameters])
        own = {name: deepcopy(value).double() for name, value in vars(loss).items() if isinstance(value, torch.nn.Module)}
        assert isinstance(loss, Option)
        wide = loss.with_values(**own)  # such as a teacher

        def loss_with(values: dict[str, torch.Tensor]) -> torch.Tensor:
            output = call(lambda *a, **k: torch.func.functional_call(model, values, a, k), arguments)
            return wide.step(lambda _: output, batch)

        return Call(loss_with, (), {}, selected)


def _contains(name: str, others: Sequence[str] | dict[str, str]) -> bool:
    """Return whether one of `others` is the module `name` or inside of it."""
    return any(other == name or not name or other.startswith(f"{name}.") for other in others)


def _title(model: torch.nn.Module, name: str) -> str:
    if name == LOSS:
        return LOSS
    kind = type(model.get_submodule(name)).__name__
    return f"module {name} ({kind})" if name else f"the model itself ({kind})"
