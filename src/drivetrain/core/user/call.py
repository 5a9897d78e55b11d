"""The call of a user's function by a run, with arguments by the names of its parameters."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from drivetrain.core.errors import UserError
from drivetrain.core.lazy import torch
from drivetrain.core.options import horizon

NAMES = {  # a parameter's name → its argument
    "output": "output", "y_pred": "output", "target": "target", "y": "target", "y_true": "target", "input": "input", "x": "input",
    "batch": "batch", "model": "model", "progress": "progress", "event": "event", "phase": "phase",
}  # fmt: skip
BY_POSITION = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
ANY_NUMBER = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


@dataclass(frozen=True)
class ProgressView:
    """The progress of the run, as a user's function sees it."""

    _counts: horizon.Progress
    updates: int  # of the whole run
    epochs: int
    training: bool  # false: a set is evaluated
    _more: int = 0  # updates made but not yet counted

    @property
    def update(self) -> int:
        """The updates made so far."""
        return self._counts.updates + self._more

    @property
    def epoch(self) -> int:
        """The epochs completed so far."""
        return self._counts.epoch


class RunModel:
    """The model as a user's loss gets it: a call is the run's own forward, and attributes are the module's.

    `whole` is the reason why only the whole model can be called, where ranks hold parts of its weights; "" where its parts can
    be called too. `recorded` is the reason why a call always uses the run's own weights, even within
    torch.func.functional_call.
    """

    def __init__(self, forward: Callable[..., object], module: torch.nn.Module, whole: str = "", recorded: str = "") -> None:
        self._forward, self._module, self._whole, self._recorded = forward, module, whole, recorded or whole
        self.was_called = False

    @property  # type: ignore[misc]
    def __class__(self) -> type[torch.nn.Module]:  # type: ignore[override]
        """The module's class, as torch.func.functional_call checks it: it then calls the run's forward with other weights."""
        return type(self._module)

    def __deepcopy__(self, memo: dict[int, object]) -> torch.nn.Module:
        return copy.deepcopy(self._module, memo)  # such as a target network

    def __call__(self, *args: object, **kwargs: object) -> object:
        self.was_called = True
        return self._forward(*args, **kwargs)

    def __getattr__(self, name: str) -> object:
        value = getattr(self._module, name)
        if self._whole and (isinstance(value, torch.nn.Module | torch.nn.Parameter) or inspect.ismethod(value)):
            raise UserError(f"the loss takes `model.{name}`, and {self._whole}: call model(…), or set parallel=ddp")
        if self._recorded and name == "_parameters":
            raise UserError(f"the loss calls the model with other weights, and {self._recorded}: set parallel=ddp compile=none")
        return value


class UserCall:
    """A user's function with its parameters, looked up once.

    A call passes the arguments that they name. Names count only if one of `decides` is among them; else the call is by
    position, because torch's own losses name the output `input`.
    """

    def __init__(
        self,
        setting: str,
        function: Callable[..., Any],
        kwargs: Mapping[str, object] | None = None,
        *,
        offers: Collection[str],
        positions: tuple[str, ...] = ("output", "target"),
        decides: Collection[str] = ("output", "model"),
    ) -> None:
        self.function: Callable[..., Any] = partial(function, **kwargs) if kwargs else function
        every = _parameters(setting, function)
        parameters = {name: p for name, p in every.items() if name not in (kwargs or {})}
        named = {name: NAMES[name] for name, p in parameters.items() if name in NAMES and p.kind not in ANY_NUMBER}
        self.positional = not {*named.values()} & {*decides}
        self._positions = positions
        self._named = {} if self.positional else {name: what for name, what in named.items() if what in offers}
        self.needs = frozenset(positions if self.positional else self._named.values())
        required = [name for name, p in parameters.items() if p.default is p.empty and p.kind not in ANY_NUMBER]
        if self.positional:
            self._check_positions(
                setting, parameters, required, {name for name, what in named.items() if what in offers}, decides
            )
        elif unknown := [name for name in required if name not in self._named]:
            given = ", ".join(name for name, what in NAMES.items() if what in offers)
            raise UserError(
                f"{setting} has a parameter `{unknown[0]}`, and it is called with those of {given} that it names: rename it, "
                "give it a default, or its value in kwargs"
            )
        leading = [name for name, p in every.items() if p.kind in BY_POSITION][: len(positions)]
        # (output, target) in this order need no names: the step calls the function directly.
        self.positional |= list(self._named) == leading and tuple(self._named.values()) == positions

    def _check_positions(
        self,
        setting: str,
        parameters: Mapping[str, inspect.Parameter],
        required: list[str],
        named: Collection[str],
        decides: Collection[str],
    ) -> None:
        """Raise UserError where it cannot be called by position, or seems to expect names."""
        wants = f"({', '.join(self._positions)})"
        if misled := [name for name in named if name in ("batch", "progress", "phase")]:
            raise UserError(f"{setting} names `{misled[0]}`, and gets what it names only if {' or '.join(decides)} is among it")
        takes = sum(p.kind in BY_POSITION for p in parameters.values())
        any_number = any(p.kind is p.VAR_POSITIONAL for p in parameters.values())
        if (takes < len(self._positions) and not any_number) or len(required) > len(self._positions):
            raise UserError(f"{setting} cannot be called as {wants}: its parameters are ({', '.join(parameters)})")

    def __call__(self, **offered: object) -> Any:
        """Call it with the arguments that it takes among the offered ones."""
        if self.positional:
            return self.function(*(offered[name] for name in self._positions))
        return self.function(**{name: offered[what] for name, what in self._named.items()})


def _parameters(setting: str, function: Callable[..., object]) -> Mapping[str, inspect.Parameter]:
    """Return the parameters; a module's are its forward's. Raises UserError."""
    if inspect.iscoroutinefunction(function):
        raise UserError(f"{setting} is async, and nobody waits for it: write a plain def")
    try:
        return inspect.signature(function.forward if isinstance(function, torch.nn.Module) else function).parameters
    except (TypeError, ValueError):
        raise UserError(f"{setting} is {type(function).__name__}, which does not tell its parameters: wrap it in a def") from None


def bound(function: Callable[..., object], given: tuple[object, ...], keywords: Mapping[str, object]) -> Any:
    """Return the arguments of a call as `trees.call` takes them: a tensor, a tuple of positions, or a dict of keywords."""
    signature = inspect.signature(function)
    if keywords:
        found = signature.bind(*given, **keywords)
        given, keywords = found.args, found.kwargs
    if keywords:  # some can be passed only by name: then all are
        names = [name for name, p in signature.parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
        return {**dict(zip(names[: len(given)], given, strict=True)), **keywords}
    return given[0] if len(given) == 1 and isinstance(given[0], torch.Tensor) else given
