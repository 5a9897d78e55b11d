"""Checks every module's backward, and on request its double backward, against finite differences in float64."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from annotated_types import Ge, Le

from drivetrain.core.errors import UserError
from drivetrain.core.lazy import torch
from drivetrain.core.microbatch import MicroBatch, Request
from drivetrain.core.option import Count, Positive, RunSpec
from drivetrain.core.trees import Tree, call, map_tensors
from drivetrain.debug.base import Debug
from drivetrain.debug.recorded_calls import Call, as_double, record_calls

if TYPE_CHECKING:
    from drivetrain.core.context import BuildContext

logger = logging.getLogger(__name__)
Difference = Annotated[float, Ge(1e-12), Le(1e-2)]  # outside, differences in float64 are rounding, or those of a curve


class WrongGradient(RuntimeError):
    """A backward is not the derivative of its forward, or a double backward not that of its backward."""


class NotDifferentiable(RuntimeError):
    """A backward cannot be differentiated."""


@dataclass(frozen=True)
class _Order:
    """What messages say of a derivative's order."""

    setting: str  # that asks for it
    wrong: str
    checked: str


FIRST = _Order("debug=gradcheck", "a backward is not its forward's derivative", "gradients")
LOSS = "the loss of the whole model"  # in the place of a module's name
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

    def check_model(self, model: torch.nn.Module, loss: Any, data: Any) -> None:
        device = next(model.parameters()).device
        request = Request(0, torch.arange(min(self.samples, len(data.source))), 1.0)
        x, y = (map_tensors(lambda t: as_double(t.to(device)), tree) for tree in data(request))
        batch = MicroBatch(x, y, torch.ones((), device=device), True, False)
        arguments = self._context.model_call.arguments(loss.joined(x))
        with _float64_and_own_rng(device):
            copy = _float64_copy(model)
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

        What contains a wrong module or one of `left_out` is not checked. Modules that turn out not to be differentiable come
        into `left_out`, with the reason.
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
        """Check one call and add to `problems` what is wrong, or to `left_out` why it cannot be differentiated."""
        try:
            if (problem := of.problem(self._gradcheck if order is FIRST else self._gradgradcheck)) is not None:
                problems[name] = problem
        except NotDifferentiable as error:
            left_out[name] = str(error).splitlines()[0]

    def _loss_call(self, model: torch.nn.Module, loss: Any, arguments: Tree, batch: MicroBatch) -> Call:
        """Return the loss as a function of some parameters, spread over the model."""
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        selected = dict(named[:: -max(1, len(named) // self.parameters)][: self.parameters])

        def loss_with(values: dict[str, torch.Tensor]) -> torch.Tensor:
            output = call(lambda *a, **k: torch.func.functional_call(model, values, a, k), arguments)
            return loss.step(lambda _: output, batch)  # type: ignore[no-any-return]

        return Call(loss_with, (), {}, selected)

    def _gradcheck(self, function: Callable[..., torch.Tensor], steps: list[torch.Tensor]) -> str | None:
        """Run torch's gradcheck on a function of 0-d tensors. Returns its error message, or None."""
        from torch.autograd.gradcheck import GradcheckError

        try:
            torch.autograd.gradcheck(function, steps, **self._tolerances())
        except GradcheckError as error:
            return str(error)
        return None

    def _gradgradcheck(self, function: Callable[..., torch.Tensor], steps: list[torch.Tensor]) -> str | None:
        """Run torch's gradgradcheck alike. Raises NotDifferentiable."""
        from torch.autograd.gradcheck import GradcheckError

        output_gradient = torch.ones((), requires_grad=True)
        try:
            torch.autograd.gradgradcheck(function, steps, output_gradient, **self._tolerances())
        except GradcheckError as error:
            return str(error)
        except RuntimeError as error:
            raise NotDifferentiable(error) from error
        return None

    def _tolerances(self) -> dict[str, Any]:
        return {"eps": self.eps, "atol": self.atol, "rtol": self.rtol, "nondet_tol": 1e-8, "check_undefined_grad": False}


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


def _contains(name: str, others: Sequence[str] | dict[str, str]) -> bool:
    """Return whether one of the others is the module `name` or inside of it."""
    return any(other == name or not name or other.startswith(f"{name}.") for other in others)


def _title(model: torch.nn.Module, name: str) -> str:
    if name == LOSS:
        return LOSS
    kind = type(model.get_submodule(name)).__name__
    return f"module {name} ({kind})" if name else f"the model itself ({kind})"
