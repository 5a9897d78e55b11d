"""The cuts of a model's row of blocks: estimated, balanced, and only where the stages come to the model's own output."""

import itertools
from collections.abc import Callable

import pytest
import torch

from drivetrain.core.errors import UserError
from drivetrain.core.step.blocks import sequential_blocks
from drivetrain.parallel import onehost, pipeline_stages
from drivetrain.parallel.pipeline_stages import StagedForward, check_stages, stages_match_model
from tests.support.refusals import problems_of

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


def around(blocks, x):
    """The inputs of the first half are added to those of the second half, block by block."""
    before = []
    for block in blocks[:2]:
        before.append(x)
        x = x + block(x)
    for block in blocks[2:]:
        x = x + block(x) + before.pop()
    return x


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
        assert stages_match_model(model, row, list(itertools.pairwise(cuts)), example) == can_be, cuts
    assert stages_match_model(model, row, [(0, 4)], example), "one stage is the model"
    assert model.training
    assert not any(m._forward_hooks or m._forward_pre_hooks or "forward" in vars(m) for m in model.modules()), "left as it was"
    for name, t in model.state_dict().items():
        assert torch.equal(t, before[name])


def scale_of_branches(model, scale):
    for block in model.blocks:
        for p in block.parameters():
            p.data *= scale


@pytest.mark.parametrize("hide", ["branches that begin as nothing", "branches that begin small", "a head of zeros", "nothing"])
@pytest.mark.parametrize("way", [around, with_a_sum])
def test_what_an_untrained_model_hides_is_seen(way, hide):
    """Skips past a cut count for as little in an untrained model as the branches that they lead around."""
    model = Own(way)
    if hide == "a head of zeros":
        torch.nn.init.zeros_(model.head.weight)
    elif hide != "nothing":
        scale_of_branches(model, 0.0 if "nothing" in hide else 1e-5)
    before = {name: t.clone() for name, t in model.state_dict().items()}
    assert not stages_match_model(model, list(model.blocks), [(0, 2), (2, 4)], torch.zeros(2, WIDTH))
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())


@pytest.mark.parametrize(("way", "can_be"), [(in_a_row, True), (with_a_sum, False)])
def test_a_model_that_is_not_finite_everywhere_is_judged_by_the_rest(way, can_be):
    class Roots(Own):
        def forward(self, x):
            return super().forward(x).sqrt()

    model, example = Roots(way), torch.zeros(16, WIDTH)
    assert stages_match_model(model, list(model.blocks), [(0, 2), (2, 4)], example) == can_be


class Residual(torch.nn.Linear):
    """x + Wx."""

    def forward(self, x):
        return x + super().forward(x)


@pytest.mark.parametrize("scale", [1.0, 1e-5, 0.0])
def test_residual_blocks_are_cut_however_they_begin(scale):
    model = Own(in_a_row)
    model.blocks = torch.nn.ModuleList(Residual(WIDTH, WIDTH) for _ in range(4))
    scale_of_branches(model, scale)
    assert stages_match_model(model, list(model.blocks), [(0, 1), (1, 3), (3, 4)], torch.zeros(2, WIDTH))


def test_what_cannot_be_cut_is_refused_with_its_reason():
    def reason(model, row, ranges=((0, 2), (2, 4)), example=None):
        return "\n".join(
            problems_of(check_stages, model, row, list(ranges), torch.zeros(2, WIDTH) if example is None else example)
        )

    model = Own(in_a_row)
    model.blocks[3][0].weight = model.blocks[0][0].weight
    assert "blocks.0.0.weight and blocks.3.0.weight are one weight" in reason(model, list(model.blocks))
    text = torch.nn.Sequential(torch.nn.Embedding(5, WIDTH), torch.nn.Linear(WIDTH, 5, bias=False))
    text[1].weight = text[0].weight
    assert "0.weight and 1.weight are one weight" in reason(
        text, list(text), [(0, 1), (1, 2)], torch.zeros(2, 3, dtype=torch.long)
    )
    model = Own(in_a_row)
    model.head.weight = model.blocks[0][0].weight
    assert "blocks.0.0.weight and head.weight are one weight" in reason(model, list(model.blocks))
    pools = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU(), torch.nn.Tanh(), torch.nn.Linear(WIDTH, 2))
    assert "stage 1 of 3 would have no weights to train" in reason(pools, list(pools), [(0, 1), (1, 3), (3, 4)])
    model = Own(in_a_row)
    model.register_forward_hook(lambda _, args, out: (out, out))
    assert "takes models that give one tensor, but this one gives a tuple" in reason(model, list(model.blocks))
    model = Own(lambda blocks, x: in_a_row(blocks[2:], blocks[1](blocks[0](x)[0])))
    model.blocks[0].register_forward_hook(lambda _, args, out: None)
    inner = model.blocks[0].forward
    model.blocks[0].forward = lambda x: (inner(x), x)
    assert "a block of this model gives a tuple" in reason(model, list(model.blocks))
    model = Own(with_a_sum)
    assert "cannot cut this model: its sequence of 4 Sequential does not only pass on" in reason(model, list(model.blocks))
    one = torch.nn.Linear(WIDTH, WIDTH)
    assert "stands in the model's sequence several times" in reason(torch.nn.Sequential(one, one), [one, one], [(0, 1), (1, 2)])


def test_a_text_model_is_cut():
    text = torch.nn.Sequential(
        torch.nn.Embedding(2, WIDTH, padding_idx=0), torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, 2)
    )
    check_stages(text, list(text), [(0, 1), (1, 3)], torch.zeros(2, 3, dtype=torch.long))


def test_a_forward_of_a_blocks_own_comes_back():
    model = Own(in_a_row)
    own = model.blocks[1].forward
    model.blocks[1].forward = lambda x: own(x) + 1
    patched, x = model.blocks[1].forward, torch.rand(2, WIDTH)
    want = model(x)
    StagedForward(model, list(model.blocks)).remove()
    assert model.blocks[1].forward is patched
    assert torch.equal(model(x), want)


def test_a_block_that_is_not_called_is_named():
    model = Own(lambda blocks, x: in_a_row([blocks[0], blocks[1], blocks[3]], x))
    with pytest.raises(UserError, match=r"block 2 \(Sequential\) of the model's sequence of 4 is not called in its forward"):
        onehost.estimate_costs(model, list(model.blocks), torch.zeros(2, WIDTH))


def test_costs_are_counted_and_not_timed():
    """The cut decides which rank draws which random numbers: a resumed run has to be cut as it was."""
    wide, narrow = torch.nn.Linear(64, 64, bias=False), torch.nn.Linear(64, 8, bias=False)
    model = torch.nn.Sequential(wide, narrow, torch.nn.ReLU())
    costs = onehost.estimate_costs(model, list(model), torch.zeros(2, 64))
    # Weights, inputs and outputs, of 4 bytes each: so small, their FLOPs take less time.
    assert costs == [4.0 * (64 * 64 + 2 * 64 + 2 * 64), 4.0 * (64 * 8 + 2 * 64 + 2 * 8), 4.0 * (2 * 8 + 2 * 8)]
    many = 100_000
    of_products = onehost.estimate_costs(model, [wide], torch.zeros(many, 64))
    assert of_products == [4.0 * (64 * 64 + 2 * many * 64)]
    deep = torch.nn.Sequential(torch.nn.Linear(512, 512, bias=False))
    assert onehost.estimate_costs(deep, list(deep), torch.zeros(4096, 512)) == [2 * 4096 * 512**2 / onehost.FLOPS_PER_BYTE]


def test_what_holds_numbers_is_not_copied_to_its_other_places():
    """A pooling that stands in a row twice may be two; a BatchNorm without weights counts, and is one."""
    pool, norm = torch.nn.MaxPool1d(1), torch.nn.BatchNorm1d(WIDTH, affine=False)
    row = sequential_blocks("parallel=pipeline", torch.nn.Sequential(pool, norm, pool, norm), None)
    assert row[0] is not row[2]
    assert row[1] is row[3]


@pytest.mark.parametrize("costs", [[1, 1, 1, 1], [4, 1, 1, 1, 1], [1, 2, 3, 4, 5, 6], [5, 1, 1, 5, 1]])
@pytest.mark.parametrize("parts", [2, 3])
def test_no_other_cut_has_a_cheaper_dearest_part(costs, parts):
    def dearest(places):
        return max(sum(costs[a:b]) for a, b in itertools.pairwise(places))

    every = [(0, *inner, len(costs)) for inner in itertools.combinations(range(1, len(costs)), parts - 1)]
    assert dearest(onehost.balanced_boundaries(costs, parts)) == min(map(dearest, every))


def test_a_schedule_of_as_many_micro_batches_as_stages(monkeypatch):
    """1F1B can run from there on; with fewer micro-batches all forwards come first."""
    for name in ("Schedule1F1B", "ScheduleGPipe"):
        monkeypatch.setattr(f"torch.distributed.pipelining.{name}", lambda *_, name=name, **__: name)
    made = {
        (name, n): pipeline_stages.schedule(name, [None], 4, n, torch.nn.MSELoss())
        for name in ("1f1b", "gpipe")
        for n in (3, 4, 5)
    }
    assert made == {
        ("1f1b", 3): "ScheduleGPipe", ("1f1b", 4): "Schedule1F1B", ("1f1b", 5): "Schedule1F1B",
        ("gpipe", 3): "ScheduleGPipe", ("gpipe", 4): "ScheduleGPipe", ("gpipe", 5): "ScheduleGPipe",
    }  # fmt: skip
