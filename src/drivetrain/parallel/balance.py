"""Splits a sequence of blocks into stages of about equal cost."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import accumulate, pairwise
from typing import Any

from drivetrain.core.errors import UserError
from drivetrain.core.lazy import torch
from drivetrain.core.trees import Tree, call

FLOPS_PER_BYTE = 100  # that a device computes in the time in which it moves one byte: H200 80, A100 200


def estimate_costs(model: torch.nn.Module, blocks: Sequence[torch.nn.Module], example: Tree) -> list[float]:
    """Estimate the cost of each block's forward on `example`, in evaluation mode, so that the model does not change.

    An operation costs the bytes that it reads and writes, or its FLOPs if they take longer. Times would differ from run to run,
    and so would the cut and the random numbers that each rank draws: a resumed run would not be the run that was broken off.
    Raises UserError if the model's forward does not call a block.
    """
    costs = dict.fromkeys(map(id, blocks), 0.0)
    started: dict[int, float] = {}
    training = model.training
    with ExitStack() as undo, torch.no_grad(), torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        count = undo.enter_context(_counted())
        for block in blocks:
            before = block.register_forward_pre_hook(lambda module, *_: started.update({id(module): count()}))
            after = block.register_forward_hook(
                lambda module, *_: costs.update({id(module): costs[id(module)] + count() - started[id(module)]})
            )
            undo.callback(before.remove)
            undo.callback(after.remove)
        model.eval()
        call(model, example)
    model.train(training)
    if uncalled := [i for i, block in enumerate(blocks) if id(block) not in started]:
        raise UserError(
            f"block {uncalled[0]} ({type(blocks[uncalled[0]]).__name__}) of the model's sequence of {len(blocks)} is not called "
            "in its forward, so it cannot be cut: name the class of its blocks in parallel.block, or set parallel=ddp or fsdp"
        )
    return [costs[id(block)] for block in blocks]


@contextmanager
def _counted() -> Iterator[Callable[[], float]]:
    """Within the context torch's operations are counted; the function returns what they cost so far."""
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves
    from torch.utils.flop_counter import flop_registry

    total = 0.0

    class Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]
        @classmethod
        def _should_skip_dynamo(cls) -> bool:
            """Return False: nothing is compiled here, and else torch imports its compiler for this mode."""
            return False

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal total
            kwargs = kwargs or {}
            out = func(*args, **kwargs)
            if not func.is_view:
                formula = flop_registry.get(func._overloadpacket)
                flops = formula(*args, **kwargs, out_val=out) if formula is not None else 0
                tensors = [leaf for leaf in tree_leaves((args, kwargs, out)) if isinstance(leaf, torch.Tensor)]
                total += max(sum(t.numel() * t.element_size() for t in tensors), flops / FLOPS_PER_BYTE)
            return out

    with Counter():  # type: ignore[no-untyped-call]
        yield lambda: total


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
