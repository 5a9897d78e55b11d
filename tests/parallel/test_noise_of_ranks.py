"""Each rank's share of the noise scale is that of one process which has the rank's micro-batch as its first one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from drivetrain.core.world import World
from drivetrain.parallel.base import OwnGradients
from tests.parallel.test_whole_layers import stay_together
from tests.support import slow

COMMON = ["updates=4", "log_every=100", "runtime.device=cpu", "runtime.threads=1", "saving=none"]
MLP = ["model=mlp", "model.hidden=[15,16]", "data.classes=3"]  # parts that are not equal
VIT = [
    "model=timm", "model.name=vit_tiny_patch16_224", "data.shape=[3,8,8]",
    "model.kwargs={img_size: 8, patch_size: 4, depth: 2, embed_dim: 12, num_heads: 2}",
]  # fmt: skip
HALVES = ["batch=accumulate", "batch.accumulation_steps=2"]
QUARTERS = ["batch=accumulate", "batch.accumulation_steps=4"]


def sums(make: Any, words: list[str], **more: Any) -> tuple[list[float], list[Any]]:
    """The two estimates that a rank has summed, and its weights, where every update is measured."""
    trainer = make(*COMMON, *words, **more)
    stay_together()
    trainer.log.noise.every = 1
    trainer.log.restart = lambda: None  # keeps the sums
    trainer.fit()
    weights = trainer.parallel.full_state_dict(trainer.model, trainer.state())[0]
    trainer.parallel.finish_collectives()
    return trainer.log.noise.sums.tolist(), [w.tolist() for w in weights.values() if w is not None]


def of_ranks(ranks: Any, make: Any, runs: list[list[str]], count: int = 2) -> list[Any]:
    """What `sums` gives on each rank, run by run."""

    def work(world: World) -> Any:
        run_dir = Path(f"rank{world.rank}")
        return [sums(make, [*words, f"parallel.nproc={count}"], world=world, run_dir=run_dir) for words in runs]

    return list(zip(*ranks(work, count), strict=True))


def test_it_is_that_of_accumulation(ranks, make):
    both = [[*MLP, unequal] for unequal in ("batch.global_batch=12", "data.samples=45")]  # an epoch's last update has 9 samples
    found = of_ranks(ranks, make, [[f"parallel={strategy}", *words] for words in both for strategy in ("ddp", "fsdp")])
    for words, of_strategies in zip(both, (found[:2], found[2:]), strict=True):
        accumulated, same = sums(make, [*HALVES, *words])
        for (first, weights), (second, _) in of_strategies:
            assert first == pytest.approx(accumulated, rel=1e-4)
            assert second != pytest.approx(first, rel=1e-2)  # of other samples
            assert all(torch.allclose(torch.tensor(a), torch.tensor(b)) for a, b in zip(weights, same, strict=True))


KEPT = ["parallel=fsdp", "parallel.reshard_after_forward=false", "checkpointing=blocks"]
FIRST = [  # the words of the ranks, those of one process, and which micro-batch each rank has first
    (["parallel=fsdp", *HALVES, *MLP], [*QUARTERS, *MLP], [0, 1]),  # gradients are summed up whole on each rank
    (["parallel=tensor", *HALVES, *VIT], [*HALVES, *VIT], [0, 0]),  # the ranks of a block have the same samples
    (["parallel=fsdp", "parallel.sync_each_micro=true", *HALVES, *MLP], [*QUARTERS, *MLP], [0, 1]),
    ([*KEPT, *HALVES, *VIT], [*QUARTERS, *VIT], [0, 1]),
    (["parallel=ddp", *HALVES, *MLP], [*QUARTERS, *MLP], [0, 1]),
    (["parallel=tensor", "parallel.size=2", *VIT], [*HALVES, *VIT], [0, 0, 1, 1]),
    (["parallel=fsdp", "parallel.replicate=2", *VIT], [*QUARTERS, *VIT], [0, 1, 2, 3]),
]


@pytest.mark.parametrize("cases", slow.but(FIRST[:2].__eq__, [FIRST[:2], *([case] for case in FIRST[2:])]))
def test_a_rank_measures_its_first_micro_batch_and_counts_each_weight_once(ranks, make, cases):
    of_cases = of_ranks(ranks, make, [words for words, *_ in cases], len(cases[0][-1]))
    for found, (_, alone, first) in zip(of_cases, cases, strict=True):
        one = sums(make, alone)[0]
        for (sums_, _), micro_batch in zip(found, first, strict=True):
            assert (sums_ == pytest.approx(one, rel=1e-4)) == (micro_batch == 0)
            assert micro_batch == 0 or sums_ != pytest.approx(one, rel=1e-2)


def test_measuring_leaves_no_hook_and_changes_nothing(ranks, make):
    """The weights are the same, bit for bit, as where the first update alone is measured."""

    def work(world: World) -> Any:
        found = []
        for every in (1, 100):
            trainer = make(*COMMON, *MLP, "parallel=fsdp", "parallel.nproc=2", world=world, run_dir=Path(f"{world.rank}"))
            stay_together()
            trainer.log.noise.every = every
            trainer.fit()
            hooks = sum(len(module._forward_pre_hooks) for module in trainer.model.modules())
            found.append(([p.to_local().tolist() for p in trainer.model.parameters()], hooks))
        return found

    for often, once in ranks(work):
        assert often == once


def test_a_gradient_that_is_taken_twice_counts_once():
    weight = torch.ones(3, requires_grad=True)
    own = OwnGradients()
    own.watch(weight)
    own.watch(weight)  # as where recomputation runs the forward again
    (weight * torch.arange(3.0)).sum().backward()
    assert own.squares()[()] == pytest.approx(5.0)
    own.leave()
    assert not weight._backward_hooks
