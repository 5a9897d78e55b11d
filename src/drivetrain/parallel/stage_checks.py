"""Checks that a model can be split into pipeline stages. One that cannot would silently train as another function."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from typing import Any

import torch

from drivetrain.core.errors import UserError
from drivetrain.core.torch_patches import wrap_forward
from drivetrain.parallel.stages import StagedForward

Ranges = Sequence[tuple[int, int]]  # each stage's first block, and the one after its last


def check_stages(model: torch.nn.Module, blocks: Sequence[torch.nn.Module], ranges: Ranges, example: torch.Tensor) -> None:
    """Raise UserError if the stages would not train the same function as the model."""
    if len({id(block) for block in blocks}) < len(blocks):
        raise UserError(
            "parallel=pipeline: a block with weights stands in the model's sequence several times, and would lie on several "
            "ranks: set parallel=fsdp"
        )
    if names := shared_weight_names(model, blocks):
        raise UserError(
            f"parallel=pipeline: {' and '.join(names)} are one weight, and would lie on several ranks: set parallel=fsdp"
        )
    untrained = [n for n, (first, end) in enumerate(ranges) if not _has_trainable(blocks[first:end])]
    if untrained and not _has_trainable([model], excluding=blocks):
        raise UserError(
            f"parallel=pipeline: stage {untrained[0]} of {len(ranges)} would have no weights to train: set parallel.stages to "
            "less (and parallel.nproc with it)"
        )
    if not stages_match_model(model, blocks, ranges, example):
        raise UserError(
            f"parallel=pipeline cannot cut this model: its sequence of {len(blocks)} {type(blocks[0]).__name__} does not only "
            "pass on each block's output (it adds to it, calls them in another order, or passes something around them): name the "
            "class of blocks that form a plain sequence in parallel.block, or set parallel=ddp, fsdp or tensor"
        )


def stages_match_model(model: torch.nn.Module, blocks: Sequence[torch.nn.Module], ranges: Ranges, example: torch.Tensor) -> bool:
    """Return whether stages that pass on only their last block's output compute the model's own output.

    They do not if the forward computes something between two blocks (such as a residual sum), calls the blocks in another
    order, or passes something around them. Raises UserError if the output is not a tensor.
    """
    noise = torch.Generator(example.device).manual_seed(0)
    like: Any = {"generator": noise, "device": example.device}
    real = example.is_floating_point()
    x = torch.rand(example.shape, dtype=example.dtype, **like) if real else torch.randint(0, 2, example.shape, **like).to(example)
    training = model.training
    with torch.no_grad(), ExitStack() as undo:
        undo.callback(model.train, training)
        model.eval()
        _perturb(model, blocks, noise, undo)
        whole: Any = model(x)
        if not isinstance(whole, torch.Tensor):
            raise UserError(f"parallel=pipeline takes models that give one tensor, and this one gives a {type(whole).__name__}")
        staged, h = StagedForward(model, blocks), x
        undo.callback(staged.remove)
        try:
            for stage in ranges:
                h = staged.run(*stage, h, x)
        except Exception:  # a model may fail on a shape that does not fit
            return False
        scale = float(whole.nan_to_num(0, 0, 0).abs().max())  # values that are not finite must agree as such
        return whole.shape == h.shape and torch.allclose(whole, h, rtol=0, atol=1e-4 * scale, equal_nan=True)


def _perturb(model: torch.nn.Module, blocks: Sequence[torch.nn.Module], noise: torch.Generator, undo: ExitStack) -> None:
    """Randomise zero weights and add noise to block outputs: an untrained model may hide differences behind zeros."""
    for p in model.parameters():
        if not p.any():
            undo.callback(p.zero_)
            p.normal_(generator=noise)
    for block in blocks:
        undo.callback(wrap_forward(block, functools.partial(_noisy, noise)))


def _noisy(noise: torch.Generator, forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return a forward that adds the same noise to its output at each call."""
    added: list[torch.Tensor] = []

    def noisy(*args: Any, **kwargs: Any) -> Any:
        out = forward(*args, **kwargs)
        if not isinstance(out, torch.Tensor):
            raise UserError(
                "parallel=pipeline hands one tensor from block to block, and a block of this model gives a "
                f"{type(out).__name__}: set parallel=ddp or fsdp"
            )
        if not added:
            added.append(torch.empty_like(out).normal_(generator=noise))
        return out + added[0]

    return noisy


def shared_weight_names(model: torch.nn.Module, blocks: Sequence[torch.nn.Module]) -> list[str]:
    """Return the names of a weight that several blocks share, or a block and the rest of the model; empty if none is."""
    block_of = {id(m): i for i, block in enumerate(blocks) for m in block.modules()}
    users: dict[int, dict[int, str]] = {}
    for prefix, module in model.named_modules():
        for name, p in module.named_parameters(prefix, recurse=False, remove_duplicate=False):
            users.setdefault(id(p), {})[block_of.get(id(module), -1)] = name
    return next((list(names.values()) for names in users.values() if len(names) > 1), [])


def _has_trainable(modules: Iterable[torch.nn.Module], excluding: Iterable[torch.nn.Module] = ()) -> bool:
    """Return whether these modules have weights to train that are not in `excluding`."""
    excluded = {id(p) for module in excluding for p in module.parameters()}
    return any(p.requires_grad and id(p) not in excluded for module in modules for p in module.parameters())
