"""model=own: a class of the user's."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from drivetrain.core.errors import OperatorGives
from drivetrain.core.lazy import torch
from drivetrain.core.options.allowed import Arguments
from drivetrain.core.options.option import RunSpec
from drivetrain.core.user import code as user_code
from drivetrain.model.base import Model


@dataclass(eq=False)
class OwnModel(Model):
    """The class or function `target` (a dotted name) of a package listed in `trust`; `kwargs` are its arguments.

    `shape`, `classes` and `num_classes` are passed too if it has such parameters.
    """

    target: str | None = None
    kwargs: Arguments = field(default_factory=dict)

    machine_local_keys = ("target", *Model.machine_local_keys)
    tokens = generates = None
    pixels = None
    may_be_transformer = True
    takes_trees = True

    def validate(self, run: RunSpec) -> Iterator[str]:
        yield from super().validate(run)
        if not self.target:
            yield OperatorGives("model=own needs model.target, the dotted name of your class, such as my_pkg.Net")
        else:
            yield from user_code.trust_problems(f"model.target={self.target}", self.target, run.values["trust"])

    def create(self, shape: tuple[int, ...], classes: int) -> torch.nn.Module:
        setting = f"model.target={self.target}"
        offered = {"shape": shape, "classes": classes, "num_classes": classes}
        made: torch.nn.Module = user_code.make(setting, user_code.load(setting, str(self.target)), self.kwargs, offered)
        return made
