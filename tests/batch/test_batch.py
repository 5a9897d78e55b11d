"""The samples of each update, and that splitting an update does not change it."""

import itertools
import math

import pytest
import torch

from drivetrain.batch import Batch
from drivetrain.batch.base import Accumulate
from drivetrain.core import order as orders
from drivetrain.core import rng
from drivetrain.core.microbatch import Request
from drivetrain.core.order import Order, shuffled
from drivetrain.core.world import World
from drivetrain.launch import launcher

WORLDS = (1, 2, 3)


def requests(batch: Batch, samples: int, size: int, drop_last: bool, **more: int) -> list[list[Request]]:
    """The requests of one epoch, a list for each rank."""
    return [list(batch.over(shuffled(samples)).requests(0, 0, World(rank, size), drop_last, **more)) for rank in range(size)]


def by_update(mine: list[Request]) -> list[list[Request]]:
    """One rank's requests as a list for each update."""
    ends = [0, *(i for i, request in enumerate(mine, 1) if request.last)]
    return [mine[a:b] for a, b in itertools.pairwise(ends)]


ORDERS = {
    "sequential": orders.sequential(64),
    "balanced": orders.balanced(torch.arange(64) % 3),
    "weighted": orders.weighted(torch.arange(64.0)),
    "repeated": orders.shuffled(64, 3),
    "own, of another length": Order(80, lambda seed, epoch: torch.arange(80) % 64, repeats=True),
}


def test_ranks_and_a_resumed_run_take_their_parts_of_any_order():
    for name, order in ORDERS.items():
        whole, batch = order(5, 2), Batch(global_batch=16).over(order)
        for skip in (0, 2):
            ranks = [list(batch.requests(5, 2, World(rank, 2), True, skip)) for rank in range(2)]
            read = torch.cat([torch.cat([one.indices, other.indices]) for one, other in zip(*ranks, strict=True)])
            assert torch.equal(read, whole[16 * skip : len(whole) // 16 * 16]), name


@pytest.mark.parametrize("samples", [60, 61, 65, 71], ids=["no tail", "tail of 1", "tail of 5", "tail of 11"])
def test_ranks_and_micro_batches_split_each_update_and_cover_it(samples):
    for size, steps in itertools.product(WORLDS, (1, 2)):
        check_split(size, steps, samples)


def check_split(size: int, steps: int, samples: int) -> None:
    batch = Accumulate(global_batch=12, accumulation_steps=steps)
    ranks = [by_update(mine) for mine in requests(batch, samples, size, drop_last=False)]
    order = rng.permutation(0, 0, samples)
    assert {len(updates) for updates in ranks} == {math.ceil(samples / 12)}
    for u, updates in enumerate(zip(*ranks, strict=True)):
        real = [micro for mine in updates for micro in mine if micro.weight]
        read = torch.cat([micro.indices for micro in real]).tolist()
        assert sorted(read) == sorted(order[12 * u : 12 * u + 12].tolist())  # each sample once: disjoint and covering
        # A micro-batch weighs by its samples; DDP averages over the ranks, hence × size.
        for micro in real:
            assert float(micro.weight) == pytest.approx(len(micro.indices) * size / len(read), rel=1e-6)
            assert len(micro.indices) <= 12 // (steps * size)


def test_a_rank_without_a_share_of_the_tail_joins_in_with_weight_zero():
    for size in WORLDS:
        tails = [mine[-1] for mine in requests(Batch(global_batch=12), 13, size, drop_last=False)]
        assert [float(tail.weight) for tail in tails] == [float(size), *[0.0] * (size - 1)]
        assert all(len(tail.indices) == 1 and tail.last and tail.epoch_end for tail in tails)


def test_every_rank_makes_as_many_micro_batches_of_any_tail():
    """A rank with one more would wait for ever, as forwards may wait for each other."""
    batch = Accumulate(global_batch=24, accumulation_steps=3)
    for size, samples in itertools.product((2, 3, 4), range(25, 48)):
        ranks = [by_update(mine) for mine in requests(batch, samples, size, drop_last=False)]
        for updates in zip(*ranks, strict=True):
            assert len({len(micros) for micros in updates}) == 1, (size, samples)
            assert all(len(micro.indices) <= math.ceil(24 / (3 * size)) for micros in updates for micro in micros)


@pytest.mark.parametrize("drop_last", [True, False])
def test_only_the_last_micro_batch_ends_the_epoch(drop_last):
    for mine in requests(Accumulate(global_batch=12, accumulation_steps=2), 53, 2, drop_last):
        assert [request.epoch_end for request in mine] == [False] * (len(mine) - 1) + [True]
        assert mine[-1].last


def test_the_tail_is_left_out_where_asked_for():
    (mine,) = requests(Batch(global_batch=12), 53, 1, drop_last=True)
    assert [len(request.indices) for request in mine] == [12] * 4


def test_epochs_and_seeds_have_orders_of_their_own():
    def first(seed: int, epoch: int) -> list[int]:
        return next(iter(Batch(global_batch=12).over(shuffled(60)).requests(seed, epoch, World(), True))).indices.tolist()

    assert len({tuple(first(*key)) for key in ((0, 0), (0, 1), (1, 0))}) == 3
    assert first(0, 0) == first(0, 0)


@pytest.mark.parametrize("tail", [0, 1, 5], ids=lambda n: f"tail of {n}")
def test_accumulation_equals_one_big_batch(float64, make, tail):
    length = [f"data.samples={48 + tail}", "data.drop_last=false", "epochs=2", "updates=null"]
    whole, parts = make(*length), make(*length, "batch=accumulate", "batch.accumulation_steps=3")
    start = [p.clone() for p in whole.model.parameters()]
    forwards = {}
    for name, trainer in (("whole", whole), ("parts", parts)):
        trainer.model.register_forward_hook(lambda m, *_, name=name: forwards.update({name: forwards.get(name, 0) + m.training}))
        trainer.fit()
    updates = 8 + 2 * bool(tail)
    assert whole.progress.updates == parts.progress.updates == updates
    assert forwards == {"whole": updates, "parts": 24 + 2 * math.ceil(tail / 4)}
    losses = [[r["loss"] for r in t.log.writers[0] if r["event"] == "train"] for t in (whole, parts)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-12)
    for begun, a, b in zip(start, whole.model.parameters(), parts.model.parameters(), strict=True):
        torch.testing.assert_close(b, a, rtol=1e-11, atol=1e-14)
        assert not torch.equal(a, begun)


def test_a_global_batch_that_does_not_divide_is_refused_with_the_nearest_that_do(problems):
    (problem,) = problems("batch=accumulate", "batch.accumulation_steps=5")
    assert problem.startswith("batch.global_batch=12 does not divide")
    assert "set batch.global_batch to 10 or 15" in problem
    (problem,) = problems("parallel=ddp", "parallel.nproc=24")
    assert "set batch.global_batch to 24" in problem


@pytest.mark.parametrize(
    ("rule", "factor"), [("none", 1.0), ("linear", 4.0), ("sqrt", 2.0)], ids=lambda v: v if isinstance(v, str) else ""
)
def test_the_learning_rate_follows_the_batch(make, rule, factor):
    for split in ([], ["batch=accumulate", "batch.accumulation_steps=3"]):
        trainer = make(f"batch.lr_scaling={rule}", "batch.base_batch=3", "optimizer.lr=0.01", *split)
        assert trainer.optimizer.param_groups[0]["lr"] == pytest.approx(0.01 * factor)


@pytest.mark.parametrize("rule", ["none", "linear", "sqrt"])
def test_the_timescale_of_weight_decay_stays_as_many_epochs(make, rule):
    """Wang & Aitchison 2024: 1 / (lr × decay) updates of a batch are as many samples at any batch."""
    words = [
        "optimizer=adamw",
        "optimizer.weight_decay=0.1",
        "optimizer.lr=0.01",
        f"batch.lr_scaling={rule}",
        "batch.base_batch=3",
    ]
    for size in (3, 12, 24, 48):
        trainer = make(*words, f"batch.global_batch={size}", "batch.decay_scaling=timescale")
        decaying, exempt = trainer.optimizer.param_groups
        assert size / (decaying["lr"] * decaying["weight_decay"]) == pytest.approx(3 / (0.01 * 0.1)), size
        assert exempt["weight_decay"] == 0.0
    assert make(*words).optimizer.param_groups[0]["weight_decay"] == 0.1


TEXT = ["data=stdlib", "data.max_files=10", "data.length=64", "loss=next_token", "model=gpt", "model.width=16", "model.heads=2"]
REFUSED = [
    *(([word], word) for word in ("batch.decay_scaling=linear", "batch.global_batch=0", "batch.global_batch=1.5")),
    *((["batch=accumulate", word], word) for word in ("batch.lr_scaling=cubic", "batch.accumulation_steps=0")),
    (["batch.grow_until=64"], "batch.grow_until=64 needs batch.grow_every"),
    (["batch.grow_until=13", "batch.grow_every=1"], "nothing would grow"),
    (["batch=bucketed"], "batch=bucketed sorts by length, and all samples of data=synthetic are alike: set batch=fixed"),
    (["batch.tokens=300"], "batch.tokens=300 sorts by length, and all samples of data=synthetic are alike"),
    ([*TEXT, "batch.tokens=300", "data.order=repeated"], "data.order=repeated and batch.tokens=300 exclude each other"),
    ([*TEXT, "batch.tokens=300", "batch=auto", "batch.memory_gb=1"], "batch.tokens and batch=auto exclude each other"),
    (["batch=auto", "runtime.device=cpu"], "set batch.memory_gb"),
    (["batch=critical", "batch.global_batch=32", "batch.max=50"], "set it to 64 or more"),
    (["batch=critical", "batch.global_batch=1"], "set it to 2 or more"),
    (["batch=critical", "loss=contrastive"], "no gradient noise scale"),
    (["batch=critical", "parallel=ddp", "parallel.nnodes=2", "parallel.rendezvous=there:29500"], "let one find it"),
]


def test_what_cannot_be_is_refused(problems):
    for words, problem in REFUSED:
        assert any(problem in line for line in problems(*words)), words


def test_a_decay_that_lr_does_not_scale_is_advised_against(tiny):
    def advice(*words: str) -> list[str]:
        run = launcher.prepare(tiny(*words)).run
        return list(run.batch.advise(run))

    says = "batch.decay_scaling is for a decay of lr × weight_decay, and optimizer=adam has another"
    assert advice("optimizer=adam", "batch.decay_scaling=timescale") == [says]
    assert advice("optimizer=adamw", "batch.decay_scaling=timescale") == advice("optimizer=adam") == []
    (said,) = advice("batch=critical", "batch.lr_scaling=none")
    assert "batch.lr_scaling=none keeps" in said


def test_a_split_that_was_halved_is_restored_unless_the_config_sets_another_one():
    saved = Accumulate(accumulation_steps=2).state_dict() | {"steps": 4}  # memory ran out once
    same, other = Accumulate(accumulation_steps=2).copied(), Accumulate(accumulation_steps=3).copied()
    same.load_state_dict(saved)
    other.load_state_dict(saved)
    assert (same.accumulation_steps, other.accumulation_steps) == (4, 3)
