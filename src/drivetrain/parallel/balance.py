"""Splits a sequence of blocks into stages of about equal cost."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import accumulate, pairwise

from drivetrain.core.device import synchronize
from drivetrain.core.errors import UserError
from drivetrain.core.lazy import torch
from drivetrain.core.trees import Tree, call, first

REPEATS = 3  # forwards; the fastest counts


def measure_costs(model: torch.nn.Module, blocks: Sequence[torch.nn.Module], example: Tree) -> list[float]:
    """Measure the seconds of each block's forward on `example`, in evaluation mode, so that the model does not change.

    Raises UserError if the model's forward does not call a block.
    """
    started: dict[int, float] = {}
    seconds = {id(block): float("inf") for block in blocks}

    def now() -> float:
        synchronize(first(example).device)
        return time.perf_counter()

    def before_forward(module: torch.nn.Module, *_: object) -> None:
        started[id(module)] = now()

    def after_forward(module: torch.nn.Module, *_: object) -> None:
        seconds[id(module)] = min(seconds[id(module)], now() - started[id(module)])

    training = model.training
    with ExitStack() as hooks, torch.no_grad():
        for block in blocks:
            hooks.callback(block.register_forward_pre_hook(before_forward).remove)
            hooks.callback(block.register_forward_hook(after_forward).remove)
        model.eval()
        for _ in range(REPEATS):
            call(model, example)
    model.train(training)
    if uncalled := [i for i, block in enumerate(blocks) if id(block) not in started]:
        raise UserError(
            f"block {uncalled[0]} ({type(blocks[uncalled[0]]).__name__}) of the model's sequence of {len(blocks)} is not called "
            "in its forward, so it cannot be cut: name the class of its blocks in parallel.block, or set parallel=ddp or fsdp"
        )
    return [seconds[id(block)] for block in blocks]


def balanced_boundaries(costs: Sequence[float], parts: int) -> list[int]:
    """Return the parts + 1 boundaries that split `costs` into `parts` non-empty ranges with the lowest possible maximum."""
    total = [0.0, *accumulate(costs)]
    best = {1: [(total[i], [0, i]) for i in range(len(costs) + 1)]}
    for n in range(2, parts + 1):
        best[n] = [
            min(
                ((max(best[n - 1][j][0], total[i] - total[j]), [*best[n - 1][j][1], i]) for j in range(n - 1, i)),
                default=(float("inf"), []),
            )
            for i in range(len(costs) + 1)
        ]
    return best[parts][len(costs)][1]


def describe_split(boundaries: Sequence[int], costs: Sequence[float]) -> str:
    """Describe the ranges and their shares of the cost, as in "4 + 5 blocks (48 % + 52 % of their forward)"."""
    total = sum(costs) or 1.0
    ranges = list(pairwise(boundaries))
    shares = " + ".join(f"{sum(costs[a:b]) / total:.0%}".replace("%", " %") for a, b in ranges)
    return f"{' + '.join(str(b - a) for a, b in ranges)} blocks ({shares} of their forward)"
