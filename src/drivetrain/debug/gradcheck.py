"""Is every backward the derivative of its forward? Finite differences in float64 tell, before anything is trained."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

from drivetrain.core.errors import UserError
from drivetrain.core.lazy import torch
from drivetrain.core.microbatch import Request
from drivetrain.core.option import Count, Positive, RunSpec
from drivetrain.debug.base import Debug

logger = logging.getLogger(__name__)

NUDGES = (0.1, 0.1, 0.01, 0.0)  # how far inputs are moved before a try: at a kink (ReLU's 0, a tie of maxima) no check holds


class WrongGradient(RuntimeError):
    """A backward that is not the derivative of its forward."""


class Gradcheck(Debug):
    """torch.autograd.gradcheck on a copy in float64: each module by its inputs and own parameters, then the whole's loss.

    Along one random direction per tensor, which costs a few forwards however large it is. It runs on `samples` training
    samples; `parameters`, spread over the model, are checked through the loss. A wrong backward ends the run before it
    begins and is named by its module. What does not compute in float64 is left out, and said.
    """

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

    def advise(self, run: RunSpec) -> Iterator[str]:
        if run.compile.active:
            yield f"debug=gradcheck checks the plain model, not what {run.named('compile')} makes of it"

    def check_model(self, model: torch.nn.Module, loss: Any, data: Any) -> None:
        device = next(model.parameters()).device
        request = Request(0, torch.arange(min(self.samples, len(data.source))), torch.ones(()))
        x, y = (t.to(device) for t in data(request))
        with _aside(device):
            copy, x, y = _copied(model), _double(x), _double(y)
            calls, left_out = _recorded(copy, x)
            wrong: dict[str, str] = {}
            for name, call in calls.items():
                if not _within(name, (*wrong, *left_out)) and (problem := call.problem(self._wrong)) is not None:
                    wrong[name] = f"{_title(copy, name)}, {problem}"
            if not wrong and not left_out and (problem := self._through_the_loss(copy, loss, x, y)) is not None:
                wrong[""] = f"the loss of the whole model, {problem}"
        if wrong:
            raise WrongGradient("a backward is not its forward's derivative: " + "; ".join(wrong.values()))
        checked = sum(not _within(name, left_out) for name in calls)
        logger.info(f"debug=gradcheck: the gradients of {checked} modules{'' if left_out else ' and of the loss'} are right")
        for name, why in left_out.items():
            logger.info(f"debug=gradcheck leaves out {_title(copy, name)}: {why}")

    def _through_the_loss(self, model: torch.nn.Module, loss: Any, x: torch.Tensor, y: torch.Tensor) -> str | None:
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        chosen = dict(named[:: -max(1, len(named) // self.parameters)][: self.parameters])
        call = _Call(lambda by: loss(torch.func.functional_call(model, by, (x,)), y), (), {}, chosen)
        return call.problem(self._wrong)

    def _wrong(self, function: Callable[..., torch.Tensor], steps: list[torch.Tensor]) -> str | None:
        """What gradcheck has to say against a function of 0-d tensors."""
        from torch.autograd.gradcheck import GradcheckError

        try:
            torch.autograd.gradcheck(
                function, steps, eps=self.eps, atol=self.atol, rtol=self.rtol, nondet_tol=1e-8, check_undefined_grad=False
            )
        except GradcheckError as error:
            return str(error)
        return None


class _Call:
    """A function, and the inputs and named parameters it was called with: enough to call it again at another point."""

    def __init__(self, function: Callable[..., Any], args: Any, kwargs: Any, parameters: Mapping[str, torch.Tensor]) -> None:
        from torch.utils._pytree import tree_flatten

        self.function, self.parameters = function, parameters
        leaves, self.tree = tree_flatten((args, kwargs))
        self.leaves = [v.detach().clone() if isinstance(v, torch.Tensor) else v for v in leaves]
        self.inputs = [i for i, v in enumerate(self.leaves) if isinstance(v, torch.Tensor) and v.is_floating_point()]

    def problem(self, wrong: Callable[..., str | None]) -> str | None:
        """What is wrong wherever it was tried; None where one try was right."""
        said = None
        for attempt, nudge in enumerate(NUDGES):
            generator = torch.Generator().manual_seed(attempt)
            points = [self.leaves[i] for i in self.inputs] + [p.detach() for p in self.parameters.values()]
            points = [p + nudge * _random(p, generator) for p in points]
            ways = [_random(p, generator) for p in points]
            steps = [torch.zeros((), requires_grad=True) for _ in points]

            def along(*steps: torch.Tensor, points: Any = points, ways: Any = ways) -> torch.Tensor:
                return self._value([p + s.to(p.device) * way for p, s, way in zip(points, steps, ways, strict=True)])

            if not steps or (said := wrong(along, steps)) is None:
                return None
        return self._told(str(said))

    def _value(self, tensors: list[torch.Tensor]) -> torch.Tensor:
        """A random projection of all differentiable outputs, of the order of 1."""
        from torch.utils._pytree import tree_leaves, tree_unflatten

        torch.manual_seed(0)  # dropout drops the same each time
        leaves = list(self.leaves)
        for i, tensor in zip(self.inputs, tensors, strict=False):
            leaves[i] = tensor
        args, kwargs = tree_unflatten(leaves, self.tree)
        output = self.function(dict(zip(self.parameters, tensors[len(self.inputs) :], strict=True)), *args, **kwargs)
        generator = torch.Generator().manual_seed(-1)
        outputs = [o for o in tree_leaves(output) if isinstance(o, torch.Tensor) and o.requires_grad]
        parts = [(o * _random(o, generator)).sum() / o.numel() ** 0.5 for o in outputs]
        return sum(parts, torch.zeros((), requires_grad=True) * 0).cpu()

    def _told(self, error: str) -> str:
        """gradcheck's message, shortened and with the tensor's name."""
        found = re.search(r"input (\d+),\s*numerical:(.*)\s*analytical:(.*)", error)
        if found is None:
            return error.splitlines()[0]
        names = ["its input" if len(self.inputs) == 1 else f"its input {n}" for n in range(1, len(self.inputs) + 1)]
        numbers = (re.search(r"-?[\d.]+(e[-+]?\d+)?|-?inf|nan", text) for text in found.groups()[1:])
        numerical, analytical = (n[0] if n else "?" for n in numbers)
        which = [*names, *self.parameters][int(found[1])]
        return f"with respect to {which}: {analytical} along a direction in which differences give {numerical}"


def _recorded(model: torch.nn.Module, x: torch.Tensor) -> tuple[dict[str, _Call], dict[str, str]]:
    """Each module's first call by its name, innermost modules first, and the modules that do not compute in float64."""
    left_out: dict[str, str] = {}
    for _ in model.modules():  # a round more for each that is found not to
        calls, offender = _one_recording(model, x, left_out)
        if offender is None:
            break
        name, why = offender
        left_out[name] = why
        _in_float32(model.get_submodule(name))
    order = [name for name, _ in model.named_modules()][::-1]  # a module stands behind what it holds
    return {name: calls[name] for name in order if name in calls}, left_out


def _one_recording(
    model: torch.nn.Module, x: torch.Tensor, left_out: dict[str, str]
) -> tuple[dict[str, _Call], tuple[str, str] | None]:
    from drivetrain.debug.torch_modes import Narrow

    calls: dict[str, _Call] = {}
    inside: list[str] = []
    narrow: list[str] = []

    def entered(name: str, module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        inside.append(name)
        own = dict(module.named_parameters(recurse=False))
        if name not in calls and not _within_any(inside, left_out) and not isinstance(module, _only_containers()):
            calls[name] = _Call(lambda by, *a, **k: torch.func.functional_call(module, by, a, k), args, kwargs, own)

    def computed() -> None:
        if not _within_any(inside, left_out):
            narrow.append(inside[-1] if inside else "")

    handles = []
    for name, module in model.named_modules():
        handles.append(module.register_forward_pre_hook(lambda m, a, k, n=name: entered(n, m, a, k), with_kwargs=True))
        handles.append(module.register_forward_hook(lambda *_: inside.pop() and None))
    try:
        with Narrow(computed):
            model(x)
    except Exception as error:
        if not inside or _within_any(inside, left_out):
            raise
        return calls, (narrow[0] if narrow else inside[-1], str(error).splitlines()[0])
    finally:
        for handle in handles:
            handle.remove()
    return calls, (narrow[0], "it computes in a narrower format than float64") if narrow else None


def _in_float32(module: torch.nn.Module) -> None:
    """Let a module that cannot do float64 do float32, so that those around it can be checked."""
    from torch.utils._pytree import tree_map

    forward = module.float().forward
    module.forward = lambda *args, **kwargs: tree_map(  # type: ignore[method-assign]
        _double, forward(*tree_map(_single, args), **tree_map(_single, kwargs))
    )


@contextmanager
def _aside(device: torch.device) -> Iterator[None]:
    """float64 by default, and random streams of its own: the training that follows is the one it would have been."""
    before = torch.get_default_dtype()
    with torch.random.fork_rng([device] if device.type == "cuda" else []), torch.enable_grad():
        torch.set_default_dtype(torch.float64)
        try:
            yield
        finally:
            torch.set_default_dtype(before)


def _copied(model: torch.nn.Module) -> torch.nn.Module:
    try:
        return deepcopy(model).double().train()
    except Exception as error:
        raise UserError(f"debug=gradcheck works on a copy of the model, and it cannot be copied: {error}") from None


def _only_containers() -> tuple[type, ...]:
    return torch.nn.Sequential, torch.nn.ModuleList, torch.nn.ModuleDict, torch.nn.Identity


def _within(name: str, others: Sequence[str] | dict[str, str]) -> bool:
    """Whether one of the others is the module `name` or lies inside it."""
    return any(other == name or not name or other.startswith(f"{name}.") for other in others)


def _within_any(inside: list[str], left_out: dict[str, str]) -> bool:
    return any(name in left_out for name in inside)


def _title(model: torch.nn.Module, name: str) -> str:
    kind = type(model.get_submodule(name)).__name__
    return f"module {name} ({kind})" if name else f"the model itself ({kind})"


def _random(like: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Standard normal values, the same on every device."""
    return torch.randn(like.shape, generator=generator).to(like.device)


def _double(value: Any) -> Any:
    return value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def _single(value: Any) -> Any:
    return value.float() if isinstance(value, torch.Tensor) and value.is_floating_point() else value
