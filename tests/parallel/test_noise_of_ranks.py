"""Each rank's share of the noise scale is that of one process which has the rank's micro-batch as its first one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from drivetrain.core.world import World
from drivetrain.parallel.base import OwnGradients

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
    trainer.log.noise.every = 1
    trainer.log.restart = lambda: None  # keeps the sums
    trainer.fit()
    weights = trainer.parallel.full_state_dict(trainer.model, trainer.state())[0]
    return trainer.log.noise.sums.tolist(), [w.tolist() for w in weights.values() if w is not None]


def of_ranks(ranks: Any, make: Any, words: list[str], count: int = 2) -> list[tuple[list[float], list[Any]]]:
    def work(world: World) -> Any:
        return sums(make, [*words, f"parallel.nproc={count}"], world=world, run_dir=Path(f"rank{world.rank}"))

    return ranks(work, count)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("unequal", ["batch.global_batch=12", "data.samples=45"])  # the last update of an epoch has 9 samples
def test_it_is_that_of_accumulation(ranks, make, strategy, unequal):
    (first, weights), (second, _) = of_ranks(ranks, make, [f"parallel={strategy}", *MLP, unequal])
    accumulated, same = sums(make, [*HALVES, *MLP, unequal])
    assert first == pytest.approx(accumulated, rel=1e-4)
    assert second != pytest.approx(first, rel=1e-2)  # of other samples
    assert all(torch.allclose(torch.tensor(a), torch.tensor(b)) for a, b in zip(weights, same, strict=True))


@pytest.mark.parametrize(
    "words",
    [
        ["parallel=fsdp"],  # gradients are summed up whole on each rank
        pytest.param(["parallel=fsdp", "parallel.sync_each_micro=true"], marks=pytest.mark.slow),
        pytest.param(["parallel=fsdp", "parallel.reshard_after_forward=false", "checkpointing=blocks"], marks=pytest.mark.slow),
        pytest.param(["parallel=ddp"], marks=pytest.mark.slow),
    ],
    ids=lambda words: " ".join(words),
)
def test_ranks_that_accumulate_too_measure_their_first_micro_batch(ranks, make, words):
    model = VIT if "checkpointing=blocks" in words else MLP
    (first, _), (second, _) = of_ranks(ranks, make, [*words, *HALVES, *model])
    assert first == pytest.approx(sums(make, [*QUARTERS, *model])[0], rel=1e-4)
    assert second != pytest.approx(first, rel=1e-2)


def test_ranks_of_one_block_count_each_weight_once(ranks, make):
    first, second = (found[0] for found in of_ranks(ranks, make, ["parallel=tensor", *HALVES, *VIT]))
    assert first == pytest.approx(second, rel=1e-6)  # they have the same samples
    assert first == pytest.approx(sums(make, [*HALVES, *VIT])[0], rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "groups"),
    [(["parallel=tensor", "parallel.size=2"], [0, 0, 1, 1]), (["parallel=fsdp", "parallel.replicate=2"], [0, 1, 2, 3])],
    ids=["tensor × fsdp", "hybrid"],
)
def test_four_ranks(ranks, make, words, groups):
    found = [sums_ for sums_, _ in of_ranks(ranks, make, [*words, *VIT], count=4)]
    one = sums(make, [*(HALVES if 2 not in groups else QUARTERS), *VIT])[0]
    for rank, group in enumerate(groups):
        if group == 0:
            assert found[rank] == pytest.approx(one, rel=1e-4)
        else:
            assert found[rank] != pytest.approx(one, rel=1e-2)


def test_measuring_leaves_no_hook_and_changes_nothing(ranks, make):
    """The weights are the same, bit for bit, as where the first update alone is measured."""

    def work(world: World, every: int) -> Any:
        trainer = make(*COMMON, *MLP, "parallel=fsdp", "parallel.nproc=2", world=world, run_dir=Path(f"{every} {world.rank}"))
        trainer.log.noise.every = every
        trainer.fit()
        hooks = sum(len(module._forward_pre_hooks) for module in trainer.model.modules())
        return [p.to_local().tolist() for p in trainer.model.parameters()], hooks

    assert ranks(lambda world: work(world, 1)) == ranks(lambda world: work(world, 100))


def test_a_gradient_that_is_taken_twice_counts_once():
    weight = torch.ones(3, requires_grad=True)
    own = OwnGradients()
    own.watch(weight)
    own.watch(weight)  # as where recomputation runs the forward again
    (weight * torch.arange(3.0)).sum().backward()
    assert own.squares()[()] == pytest.approx(5.0)
    own.leave()
    assert not weight._backward_hooks
