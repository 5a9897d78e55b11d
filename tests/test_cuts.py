"""Where a model's row of blocks may be cut: measured, balanced, and only where the stages come to the model's own output."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch

from drivetrain.blocks import blocks_in_a_row
from drivetrain.errors import UserError
from drivetrain.parallel import balance
from drivetrain.parallel.stages import Row, same_as_whole

WIDTH = 6


class Own(torch.nn.Module):
    """A row of blocks, called as `way` says."""

    def __init__(self, way: Callable[[torch.nn.ModuleList, torch.Tensor], torch.Tensor], blocks: int = 4) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(
            torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh()) for _ in range(blocks)
        )
        self.head = torch.nn.Linear(WIDTH, 2)
        self.way = way

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.way(self.blocks, x * 2))


def in_a_row(blocks, x):
    for block in blocks:
        x = block(x)
    return x


def with_a_sum(blocks, x):
    for block in blocks:
        x = x + block(x)
    return x


def past_the_blocks(blocks, x):
    return in_a_row(blocks, x) + blocks[0](x)


def backwards(blocks, x):
    return in_a_row(reversed(blocks), x)


def of_the_first(blocks, x):
    """A skip connection from the first half to the end."""
    half = in_a_row(blocks[:2], x)
    return in_a_row(blocks[2:], half) * half


@pytest.mark.parametrize(
    ("way", "can_be"),
    [(in_a_row, True), (with_a_sum, False), (past_the_blocks, False), (backwards, False), (of_the_first, False)],
)
def test_only_a_plain_row_is_cut(way, can_be):
    model = Own(way)
    before = {name: t.clone() for name, t in model.state_dict().items()}
    example, row = torch.zeros(2, WIDTH), list(model.blocks)
    for cuts in ((0, 2, 4), (0, 1, 3, 4), (0, 1, 2, 3, 4)):
        assert same_as_whole(model, row, list(itertools.pairwise(cuts)), example) == can_be, cuts
    assert same_as_whole(model, row, [(0, 4)], example), "one stage is the model"
    assert model.training
    assert not any(m._forward_hooks or m._forward_pre_hooks or "forward" in vars(m) for m in model.modules()), "left as it was"
    for name, t in model.state_dict().items():
        assert torch.equal(t, before[name])


def test_a_forward_of_a_blocks_own_comes_back():
    model = Own(in_a_row)
    own = model.blocks[1].forward
    model.blocks[1].forward = lambda x: own(x) + 1
    patched, x = model.blocks[1].forward, torch.rand(2, WIDTH)
    want = model(x)
    Row(model, list(model.blocks)).remove()
    assert model.blocks[1].forward is patched
    assert torch.equal(model(x), want)


def test_a_block_that_is_not_called_is_named():
    model = Own(lambda blocks, x: in_a_row([blocks[0], blocks[1], blocks[3]], x))
    with pytest.raises(UserError, match=r"block 2 \(Sequential\) of the model's row of 4 is not called in its forward"):
        balance.measured(model, list(model.blocks), torch.zeros(2, WIDTH))


def test_what_holds_numbers_is_not_copied_to_its_other_places():
    """A pooling that stands in a row twice may be two; a BatchNorm without weights counts, and is one."""
    pool, norm = torch.nn.MaxPool1d(1), torch.nn.BatchNorm1d(WIDTH, affine=False)
    row = blocks_in_a_row("parallel=pipeline", torch.nn.Sequential(pool, norm, pool, norm), None)
    assert row[0] is not row[2]
    assert row[1] is row[3]


@pytest.mark.parametrize("costs", [[1, 1, 1, 1], [4, 1, 1, 1, 1], [1, 2, 3, 4, 5, 6], [5, 1, 1, 5, 1]])
@pytest.mark.parametrize("parts", [2, 3])
def test_no_other_cut_has_a_cheaper_dearest_part(costs, parts):
    def dearest(places):
        return max(sum(costs[a:b]) for a, b in itertools.pairwise(places))

    every = [(0, *inner, len(costs)) for inner in itertools.combinations(range(1, len(costs)), parts - 1)]
    assert dearest(balance.cuts(costs, parts)) == min(map(dearest, every))
