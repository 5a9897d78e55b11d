"""Whether a model can be cut between its blocks: what cannot would train as another function, and nobody would be told."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from typing import Any

import torch

from drivetrain.core.errors import UserError
from drivetrain.parallel.stages import Row, back

Ranges = Sequence[tuple[int, int]]  # of the blocks in the row: each stage's first, and the one after its last


def refuse(model: torch.nn.Module, blocks: Sequence[torch.nn.Module], ranges: Ranges, example: torch.Tensor) -> None:
    """Raise UserError where the stages would not train what the model is."""
    if len({id(block) for block in blocks}) < len(blocks):
        raise UserError(
            "parallel=pipeline: a block with weights stands in the model's row several times, and would lie on several "
            "ranks: set parallel=fsdp"
        )
    if of_one := tied(model, blocks):
        raise UserError(
            f"parallel=pipeline: {' and '.join(of_one)} are one weight, and would lie on several ranks: set parallel=fsdp"
        )
    idle = [n for n, (first, end) in enumerate(ranges) if not _trained(blocks[first:end])]
    if idle and not _trained([model], but=blocks):
        raise UserError(
            f"parallel=pipeline: stage {idle[0]} of {len(ranges)} would have no weights to train: set parallel.stages to less "
            "(and parallel.nproc with it)"
        )
    if not same_as_whole(model, blocks, ranges, example):
        raise UserError(
            f"parallel=pipeline cannot cut this model: its row of {len(blocks)} {type(blocks[0]).__name__} does not only hand on "
            "what each block gives (it adds to it, takes them in another order, or brings something past them): name the "
            "class of blocks that stand in a plain row in parallel.block, or set parallel=ddp, fsdp or tensor"
        )


def same_as_whole(model: torch.nn.Module, blocks: Sequence[torch.nn.Module], ranges: Ranges, example: torch.Tensor) -> bool:
    """Whether stages that hand on what their last block gave come to the model's own output.

    They do not where the forward does something of its own between two blocks (a sum with what went in, say), takes them in
    another order, or brings something past them. Raises UserError where the output is no tensor.
    """
    noise = torch.Generator(example.device).manual_seed(0)
    like: Any = {"generator": noise, "device": example.device}
    real = example.is_floating_point()
    x = torch.rand(example.shape, dtype=example.dtype, **like) if real else torch.randint(0, 2, example.shape, **like).to(example)
    training = model.training
    with torch.no_grad(), ExitStack() as undo:
        undo.callback(model.train, training)
        model.eval()
        _show_all(model, blocks, noise, undo)
        whole: Any = model(x)
        if not isinstance(whole, torch.Tensor):
            raise UserError(f"parallel=pipeline takes models that give one tensor, and this one gives a {type(whole).__name__}")
        row, h = Row(model, blocks), x
        undo.callback(row.remove)
        try:
            for stage in ranges:
                h = row.run(*stage, h, x)
        except Exception:  # what a model says to a shape that does not fit
            return False
        scale = float(whole.nan_to_num(0, 0, 0).abs().max())  # what is not finite must be so in both
        return whole.shape == h.shape and torch.allclose(whole, h, rtol=0, atol=1e-4 * scale, equal_nan=True)


def _show_all(model: torch.nn.Module, blocks: Sequence[torch.nn.Module], noise: torch.Generator, undo: ExitStack) -> None:
    """Make visible what an untrained model may hide: weights of zero let nothing through, and blocks may begin as nothing."""
    for p in model.parameters():
        if not p.any():
            undo.callback(p.zero_)
            p.normal_(generator=noise)
    for block in blocks:
        undo.callback(back(block))
        block.forward = _noisy(block.forward, noise)  # type: ignore[method-assign]


def _noisy(forward: Callable[..., Any], noise: torch.Generator) -> Callable[..., Any]:
    """A forward to whose output the same noise is added at each call."""
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


def tied(model: torch.nn.Module, blocks: Sequence[torch.nn.Module]) -> list[str]:
    """The names of one weight that stands in several blocks, or in one and outside of all; none if there is none."""
    inside = {id(m): i for i, block in enumerate(blocks) for m in block.modules()}
    places: dict[int, dict[int, str]] = {}
    for prefix, module in model.named_modules():
        for name, p in module.named_parameters(prefix, recurse=False, remove_duplicate=False):
            places.setdefault(id(p), {})[inside.get(id(module), -1)] = name
    return next((list(of_one.values()) for of_one in places.values() if len(of_one) > 1), [])


def _trained(modules: Iterable[torch.nn.Module], but: Iterable[torch.nn.Module] = ()) -> bool:
    """Whether there are weights to train in these modules, outside of others."""
    others = {id(p) for module in but for p in module.parameters()}
    return any(p.requires_grad and id(p) not in others for module in modules for p in module.parameters())
