"""Rows of blocks, cut where the work on both sides is equal."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import accumulate, pairwise

from drivetrain.core.errors import UserError
from drivetrain.core.lazy import torch

TIMES = 3  # the quickest of so many forwards counts


def measured(model: torch.nn.Module, blocks: Sequence[torch.nn.Module], example: torch.Tensor) -> list[float]:
    """Seconds of each block's forward on `example`, the model in evaluation: nothing of it changes.

    Raises UserError where a block is not part of the forward.
    """
    began: dict[int, float] = {}
    seconds = {id(block): float("inf") for block in blocks}

    def now() -> float:
        if example.is_cuda:
            torch.cuda.synchronize(example.device)
        return time.perf_counter()

    def enter(module: torch.nn.Module, *_: object) -> None:
        began[id(module)] = now()

    def leave(module: torch.nn.Module, *_: object) -> None:
        seconds[id(module)] = min(seconds[id(module)], now() - began[id(module)])

    training = model.training
    with ExitStack() as hooks, torch.no_grad():
        for block in blocks:
            hooks.callback(block.register_forward_pre_hook(enter).remove)
            hooks.callback(block.register_forward_hook(leave).remove)
        model.eval()
        for _ in range(TIMES):
            model(example)
    model.train(training)
    if idle := [i for i, block in enumerate(blocks) if id(block) not in began]:
        raise UserError(
            f"block {idle[0]} ({type(blocks[idle[0]]).__name__}) of the model's row of {len(blocks)} is not called in its "
            "forward, so the row cannot be cut: name the class of its blocks in parallel.block, or set parallel=ddp or fsdp"
        )
    return [seconds[id(block)] for block in blocks]


def cuts(costs: Sequence[float], parts: int) -> list[int]:
    """Where a row of costs is cut into `parts` runs, none empty, whose dearest is as cheap as can be: parts + 1 places."""
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


def described(places: Sequence[int], costs: Sequence[float]) -> str:
    """The runs, and what each takes of the whole: "4 + 5 blocks (48 % + 52 % of the forward)"."""
    whole = sum(costs) or 1.0
    runs = list(pairwise(places))
    shares = " + ".join(f"{sum(costs[a:b]) / whole:.0%}".replace("%", " %") for a, b in runs)
    return f"{' + '.join(str(b - a) for a, b in runs)} blocks ({shares} of their forward)"
