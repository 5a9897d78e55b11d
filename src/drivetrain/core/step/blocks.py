"""Finds a model's repeated blocks, the units of activation checkpointing, regional compilation, sharding and pipelines."""

from __future__ import annotations

import copy
from collections import Counter
from typing import NamedTuple

from drivetrain.core.errors import UserError, did_you_mean
from drivetrain.core.lazy import torch


class TensorLayout(NamedTuple):
    """The layout of a block over ranks by its heads and hidden units. A block's class returns it from `tensor_layout()`."""

    attention: torch.nn.Module
    qkv: str  # name of its Linear that makes queries, keys and values, one after the other
    out: str  # name of the Linear that joins the heads
    heads: int
    feed_forward: torch.nn.Module
    up: str  # name of its first Linear
    down: str  # and of its second


def repeated_blocks(model: torch.nn.Module, class_name: str | None = None) -> list[torch.nn.Module]:
    """The outermost modules of class `class_name`; without a name, the model's own repeated blocks.

    A model of transformers names its block classes (`_no_split_modules`); those with several instances count. Otherwise a class
    counts as repeated if it has submodules and the model's Sequentials and ModuleLists have at least two members of it. Where a
    stage consists of repeated blocks (ConvNeXt, Swin), its blocks are returned.
    """
    if class_name is not None:
        return _found(model, {type(m) for m in model.modules() if type(m).__name__ == class_name}, stages=False)
    named = next((names for m in model.modules() if (names := getattr(m, "_no_split_modules", None))), ())
    own = Counter(type(m) for m in model.modules() if type(m).__name__ in named)
    if several := {cls for cls, n in own.items() if n > 1}:
        return _found(model, several, stages=False)
    counts = Counter(type(child) for parent in model.modules() for child in _row(parent))
    return _found(model, {cls for cls, n in counts.items() if n > 1}, stages=True)


def blocks_for(setting: str, key: str, model: torch.nn.Module, class_name: str | None) -> list[torch.nn.Module]:
    """The blocks for the option `setting`. Raises UserError if there are none, with the class names that `key` can be set to."""
    blocks = repeated_blocks(model, class_name)
    if not blocks:
        classes = sorted({type(m).__name__ for m in model.modules() if list(m.children())})
        what = f"no module of class {class_name!r}: {did_you_mean(class_name, classes)}" if class_name else "no repeated block"
        name_one = f"set {key} to one of {', '.join(classes)}, or " if classes else ""
        raise UserError(f"{setting} found {what} in the model: {name_one}leave {setting} out")
    return blocks


def sequential_blocks(setting: str, model: torch.nn.Module, class_name: str | None) -> list[torch.nn.Module]:
    """The modules that a forward calls in a row, each with the output of the one before.

    They are the members of the longest Sequential or ModuleList that is in no other one, or the modules of `class_name`.
    """
    if class_name is not None:
        return blocks_for(setting, "parallel.block", model, class_name)
    holder = max(_outermost_rows(model), key=len, default=None)
    row = _without_repetition(holder) if holder is not None else []
    if len(row) < 2:
        raise UserError(
            f"{setting} found no row of blocks (a Sequential or ModuleList of two or more) in the model, so it cannot be cut: "
            "set parallel=ddp or fsdp, or name the class of its blocks in parallel.block"
        )
    return row


def _without_repetition(row: torch.nn.Sequential | torch.nn.ModuleList) -> list[torch.nn.Module]:
    """The members of a row. A module without weights (a pooling) that is in the row several times is replaced by copies."""
    seen: set[int] = set()
    for i, block in enumerate(row):
        if id(block) in seen and not any(True for _ in (*block.parameters(), *block.buffers())):
            row[i] = copy.deepcopy(block)
        seen.add(id(block))
    return list(row)


def _outermost_rows(module: torch.nn.Module) -> list[torch.nn.Sequential | torch.nn.ModuleList]:
    if isinstance(module, torch.nn.Sequential | torch.nn.ModuleList):
        return [module]
    return [row for child in module.children() for row in _outermost_rows(child)]


def describe_blocks(blocks: list[torch.nn.Module]) -> str:
    """The number of blocks of each class, such as "12 Block, 4 Stage"."""
    return ", ".join(f"{n} {name}" for name, n in Counter(type(b).__name__ for b in blocks).items())


def _row(parent: torch.nn.Module) -> list[torch.nn.Module]:
    """The members of a Sequential or ModuleList that can be blocks: those with submodules that are no plain containers."""
    containers = (torch.nn.Sequential, torch.nn.ModuleList)
    if not isinstance(parent, containers):
        return []
    return [c for c in parent.children() if type(c) not in containers and any(True for _ in c.children())]


def _found(module: torch.nn.Module, wanted: set[type], stages: bool) -> list[torch.nn.Module]:
    found: list[torch.nn.Module] = []
    for child in module.children():
        take = type(child) in wanted and not (stages and _is_stage(child, wanted))
        found += [child] if take else _found(child, wanted, stages)
    return found


def _is_stage(module: torch.nn.Module, wanted: set[type]) -> bool:
    return any(n > 1 and cls in wanted for m in module.modules() for cls, n in Counter(map(type, _row(m))).items())
