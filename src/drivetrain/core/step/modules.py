"""Puts modules in the place of others. A changed module is a new one, which takes over what the old one holds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

from drivetrain.core.lazy import torch
from drivetrain.core.step.trees import Tree, call

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

M = TypeVar("M", bound="torch.nn.Module")


def taken_over(module: torch.nn.Module, cls: type[M]) -> M:
    """Return a module of a class that holds the parameters, buffers, submodules, hooks and settings of another one.

    Both share them from then on, also those that are added later.
    """
    made = cls.__new__(cls)
    made.__setstate__(dict(vars(module)))  # type: ignore[no-untyped-call]  # as a copy does
    return made


def put_in_place(model: torch.nn.Module, pairs: Iterable[tuple[torch.nn.Module, torch.nn.Module]]) -> None:
    """Put the second of each pair in the place of the first, wherever the model holds it: the keys of its state dict stay.

    A list, tuple or attribute that holds one of them beside (past torch's registration) gets the new one too. Raises
    ValueError where the model itself is to be replaced.
    """
    new = {id(module): made for module, made in pairs}
    for name, module in list(model.named_modules(remove_duplicate=False)):
        if id(module) in new:
            model.set_submodule(name, new[id(module)])
    for holder in model.modules():
        for name, value in list(vars(holder).items()):
            if id(value) in new:
                vars(holder)[name] = new[id(value)]
            elif isinstance(value, list | tuple) and any(id(v) in new for v in value):
                vars(holder)[name] = type(value)(new.get(id(v), v) for v in value)


def replace_parameters(model: torch.nn.Module, new: Mapping[int, torch.nn.Parameter | None]) -> None:
    """Put others in the place of parameters, by their ids, wherever the model holds them; None: the module is to have none."""
    for module in model.modules():
        for name, p in module._parameters.items():
            if id(p) in new:
                module._parameters[name] = new[id(p)]


def run_once(model: torch.nn.Module, example: Tree, hooks: Sequence[RemovableHandle]) -> None:
    """Run one forward in evaluation mode, without gradients, and then remove the hooks. The model's mode stays."""
    training = model.training
    try:
        with torch.no_grad():
            call(model.eval(), example)
    finally:
        model.train(training)
        for hook in hooks:
            hook.remove()


def _stay(mode: bool = True) -> None:
    pass


def keep_in_evaluation(module: torch.nn.Module, kept: bool = True) -> None:
    """Keep a module in evaluation mode while the model trains, or let it follow the model, which trains, again.

    Its own `train` does nothing then. A class of its own, in its place, would be no longer of the type that others look for.
    """
    if kept:
        module.eval()
        vars(module)["train"] = _stay
    elif vars(module).pop("train", None) is not None:
        module.train()


def is_kept_in_evaluation(module: torch.nn.Module) -> bool:
    """True if it stays in evaluation mode while the model trains."""
    return vars(module).get("train") is _stay
