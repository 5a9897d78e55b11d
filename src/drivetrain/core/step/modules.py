"""Replaces modules. A changed module is a new one, which takes over the old one's content."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import TypeVar

from drivetrain.core.errors import UserError
from drivetrain.core.lazy import torch
from drivetrain.core.step import streams
from drivetrain.core.step.trees import Tree, call, described

M = TypeVar("M", bound="torch.nn.Module")
CONTAINERS = (list, dict, set, deque)
MOST = 10_000  # items of one that is restored


def taken_over(module: torch.nn.Module, cls: type[M]) -> M:
    """Return a module of a class that holds the parameters, buffers, submodules, hooks and settings of another one.

    Both share them from then on, also those that are added later.
    """
    made = cls.__new__(cls)
    made.__setstate__(dict(vars(module)))  # type: ignore[no-untyped-call]  # as a copy does
    return made


def put_in_place(model: torch.nn.Module, pairs: Iterable[tuple[torch.nn.Module, torch.nn.Module]]) -> None:
    """Replace the first of each pair by the second, wherever the model holds it: the keys of its state dict stay.

    A list, tuple or attribute that also holds one of them (past torch's registration) gets the new one too. Raises
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
    """Replace parameters, by their ids, wherever the model holds them; None: the module gets none."""
    for module in model.modules():
        for name, p in module._parameters.items():
            if id(p) in new:
                module._parameters[name] = new[id(p)]


def run_once(
    model: torch.nn.Module, example: Tree, hooks: Sequence[torch.utils.hooks.RemovableHandle] = (), *, training: bool = False
) -> Tree:
    """Run one forward, by default in evaluation mode, and then remove the hooks. Modes, buffers and random streams stay.

    It computes gradients only where the forward needs them. Raises UserError where the model cannot take the example.
    """
    try:
        with unchanged(model, training):
            try:
                with torch.no_grad():
                    return call(model, example)
            except RuntimeError as error:
                if "does not require grad" not in str(error):
                    raise
            with torch.enable_grad():  # the forward differentiates
                return call(model, example)
    except (UserError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        said = next(iter(str(error).strip().splitlines()), "")
        raise UserError(
            f"the model cannot be run on an example of what it is called with, {described(example)} "
            f"({type(error).__name__}: {said})"
        ) from error
    finally:
        for hook in hooks:
            hook.remove()


def _stay(mode: bool = True) -> None:
    pass


def keep_in_evaluation(module: torch.nn.Module, kept: bool = True) -> None:
    """Keep a module in evaluation mode while the model trains, or let it follow the model, which trains, again.

    Its own `train` does nothing then. Another class in its place would no longer have the type that others look for.
    """
    if kept:
        module.eval()
        vars(module)["train"] = _stay
    elif vars(module).pop("train", None) is not None:
        module.train()


def is_kept_in_evaluation(module: torch.nn.Module) -> bool:
    """True if it stays in evaluation mode while the model trains."""
    return vars(module).get("train") is _stay


@contextmanager
def unchanged(model: torch.nn.Module, training: bool | None = None) -> Iterator[None]:
    """Within the context the model trains, or not, or as before; at its end modes, buffers and random streams are as before.

    So are the attributes of its modules, such as a count of its forwards.
    """
    modes = [(module, module.training) for module in model.modules()]
    with buffers_kept(model), attributes_kept(*model.modules()), streams.apart():
        try:
            if training is not None:
                model.train(training)
            yield
        finally:
            for module, mode in modes:
                module.training = mode


@contextmanager
def buffers_kept(*owners: object) -> Iterator[None]:
    """At the end of the context, restore the owners that are tensors, and the buffers of owners that are modules."""
    modules = [m for owner in owners if isinstance(owner, torch.nn.Module) for m in owner.modules()]
    kept = [(m, name, b, b.clone()) for m in modules for name, b in m._buffers.items() if b is not None]
    tensors = [(owner, owner.clone()) for owner in owners if isinstance(owner, torch.Tensor)]
    try:
        yield
    finally:
        with torch.no_grad():
            for module, name, buffer, before in kept:
                module._buffers[name] = buffer
                buffer.copy_(before)
            for tensor, before in tensors:
                tensor.copy_(before)


@contextmanager
def attributes_kept(*owners: object) -> Iterator[None]:
    """At the end of the context the attributes of these objects, and lists and the like among them, hold what they held.

    What torch itself keeps in a module stays as it is, and so does a module whose first forward decides its weights.
    """
    kept = []
    for owner in owners:
        if hasattr(owner, "__dict__") and not isinstance(owner, type | ModuleType | torch.nn.modules.lazy.LazyModuleMixin):
            of_torch = {*vars(torch.nn.Module())} if isinstance(owner, torch.nn.Module) else set()
            before = {name: value for name, value in vars(owner).items() if name not in of_torch}
            held = [(v, copy.copy(v)) for v in before.values() if type(v) in CONTAINERS and len(v) <= MOST]
            kept.append((vars(owner), of_torch, before, held))
    try:
        yield
    finally:
        for now, of_torch, before, held in kept:
            for name in now.keys() - before.keys() - of_torch:
                del now[name]
            now.update(before)
            for container, items in held:
                container.clear()
                (container.extend if hasattr(container, "extend") else container.update)(items)
