"""A model's repeated blocks: what activation checkpointing, regional compilation and sharding work on."""

from __future__ import annotations

from collections import Counter

from drivetrain.lazy import torch


def repeated_blocks(model: torch.nn.Module, class_name: str | None = None) -> list[torch.nn.Module]:
    """The outermost modules of class `class_name`; without a name, the outermost that repeat.

    A class repeats if it has submodules and stands at least twice in the model's Sequentials and ModuleLists.
    """
    if class_name is None:
        counts = Counter(
            type(child)
            for parent in model.modules()
            if isinstance(parent, torch.nn.Sequential | torch.nn.ModuleList)
            for child in parent.children()
            if any(True for _ in child.children()) and not isinstance(child, torch.nn.Sequential | torch.nn.ModuleList)
        )
        wanted = {cls for cls, n in counts.items() if n > 1}
    else:
        wanted = {type(m) for m in model.modules() if type(m).__name__ == class_name}
    return _outermost(model, wanted)


def _outermost(module: torch.nn.Module, wanted: set[type]) -> list[torch.nn.Module]:
    found: list[torch.nn.Module] = []
    for child in module.children():
        found += [child] if type(child) in wanted else _outermost(child, wanted)
    return found
