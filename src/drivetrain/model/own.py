"""model=own: a class of the user's."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from drivetrain.core.errors import UserError
from drivetrain.core.lazy import torch
from drivetrain.core.option import RunSpec
from drivetrain.model.base import Model


@dataclass(eq=False)
class Own(Model):
    """The class or function `target` (a dotted name) of a package that is listed in `trust`; `kwargs` are its arguments.

    `shape`, `classes` and `num_classes` are passed too if it has parameters of these names.
    """

    target: str | None = None
    kwargs: dict[str, Any] = field(default_factory=dict)

    machine_local_keys = ("target", *Model.machine_local_keys)
    tokens = None
    pixels = None
    may_be_transformer = True
    takes_trees = True

    def validate(self, run: RunSpec) -> Iterator[str]:
        yield from super().validate(run)
        if not self.target:
            yield "model=own needs model.target, the dotted name of your class, such as my_pkg.Net"
        elif self.target.split(".")[0] not in run.values["trust"]:
            yield (
                f"model.target={self.target} is code that drivetrain does not ship: "
                f"if you trust it, set trust=[{self.target.split('.')[0]}] on the command line"
            )

    def create(self, shape: tuple[int, ...], classes: int) -> torch.nn.Module:
        target = self._import()
        offered = {"shape": shape, "classes": classes, "num_classes": classes}
        parameters = inspect.signature(target).parameters
        kwargs = {**{k: v for k, v in offered.items() if k in parameters}, **self.kwargs}
        try:
            return target(**kwargs)
        except TypeError as error:
            raise UserError(f"model.target={self.target} cannot be built with {sorted(kwargs)}: {error}") from None

    def _import(self) -> Callable[..., torch.nn.Module]:
        module, _, name = str(self.target).rpartition(".")
        try:
            target = getattr(import_module(module), name)
        except (ImportError, AttributeError, ValueError) as error:
            raise UserError(f"model.target={self.target} cannot be imported: {error}") from None
        if not callable(target):
            raise UserError(f"model.target={self.target} is {type(target).__name__}: name a class, or a function that makes one")
        return target
