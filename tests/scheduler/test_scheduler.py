"""Schedules are torch's curves, as pure functions of the update number."""

import math

import pytest
import torch
from torch.optim import lr_scheduler

from drivetrain.scheduler import Cosine, OneCycle, Scheduler

LR = 0.3


def optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=LR)


def curve(scheduler: Scheduler, updates: int) -> list[float]:
    """The learning rate that each update is made with, by ours."""
    optim = optimizer()
    scheduler.bind(optim, updates)
    rates = []
    for update in range(updates):
        scheduler.step(update)
        rates.append(optim.param_groups[0]["lr"])
    return rates


def torchs(make, updates: int) -> list[float]:
    """The same by a scheduler of torch."""
    optim = optimizer()
    scheduler = make(optim)
    rates = []
    for _ in range(updates):
        rates.append(optim.param_groups[0]["lr"])
        optim.step()
        scheduler.step()
    return rates


@pytest.mark.parametrize("updates", [1, 2, 7, 40])
@pytest.mark.parametrize("final", [0.0, 0.1])
def test_cosine_equals_torchs_at_every_update(updates, final):
    rates = curve(Cosine(final=final), updates)
    assert rates == pytest.approx(
        torchs(lambda o: lr_scheduler.CosineAnnealingLR(o, updates, eta_min=final * LR), updates), rel=1e-9
    )
    assert rates[0] == LR


@pytest.mark.parametrize("start", [0.0, 0.25])
def test_cosine_after_a_warm_up_equals_torchs_two_in_sequence(start):
    updates, warm = 40, 8
    first = start + (1 - start) / (warm + 1)

    def reference(o: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
        up = lr_scheduler.LinearLR(o, start_factor=first, total_iters=warm)
        return lr_scheduler.SequentialLR(o, [up, lr_scheduler.CosineAnnealingLR(o, updates - warm)], [warm])

    for given in (8.0, 0.2):  # a number of updates, and a share of them
        assert curve(Cosine(warmup=given, warmup_start=start), updates) == pytest.approx(torchs(reference, updates), rel=1e-9)


@pytest.mark.parametrize("updates", [2, 3, 5, 11, 40])
@pytest.mark.parametrize("warmup", [0.1, 0.3, 0.7])  # torch divides by zero where the first phase ends at update 0
@pytest.mark.parametrize("anneal", ["cos", "linear"])
def test_onecycle_equals_torchs_at_every_update(updates, warmup, anneal):
    def reference(o: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
        return lr_scheduler.OneCycleLR(
            o, LR, total_steps=updates, pct_start=warmup, anneal_strategy=anneal,
            div_factor=20.0, final_div_factor=500.0, cycle_momentum=False,
        )  # fmt: skip

    # torch steps once more than the run has updates; its last step is past the end and is not compared
    optim = optimizer()
    theirs = reference(optim)
    rates = []
    for update in range(updates):
        rates.append(optim.param_groups[0]["lr"])
        optim.step()
        if update < updates - 1:
            theirs.step()
    assert curve(OneCycle(warmup, 20.0, 500.0, anneal), updates) == pytest.approx(rates, rel=1e-9)


def test_onecycle_rises_to_the_peak_and_falls_to_the_end():
    rates = curve(OneCycle(warmup=0.25), 41)
    peak = rates.index(max(rates))
    assert rates[0] == pytest.approx(LR / 25, rel=1e-6)
    assert rates[-1] == pytest.approx(LR / 25e4, rel=1e-6)
    assert 8 <= peak <= 10
    assert rates == sorted(rates[: peak + 1]) + sorted(rates[peak + 1 :], reverse=True)


@pytest.mark.parametrize("scheduler", [Scheduler(0.5), Cosine(0.5, 0.1), OneCycle(0.0), OneCycle(1.0), OneCycle(50.0)])
@pytest.mark.parametrize("updates", [1, 2, 3])
def test_the_shortest_runs_have_a_rate_too(scheduler, updates):
    assert all(0 <= rate <= LR for rate in curve(scheduler, updates))


def test_constant_is_constant_after_its_warm_up():
    assert curve(Scheduler(), 5) == [LR] * 5
    rates = curve(Scheduler(warmup=3.0), 6)
    assert rates == pytest.approx([LR / 4, LR / 2, 3 * LR / 4, LR, LR, LR])


def test_each_group_keeps_its_own_base_rate():
    optim = optimizer()
    optim.add_param_group({"params": [torch.zeros(1, requires_grad=True)], "lr": 0.5 * LR})
    scheduler = Cosine()
    scheduler.bind(optim, 4)
    scheduler.step(2)
    assert [g["lr"] for g in optim.param_groups] == pytest.approx([LR / 2, LR / 4])


def test_a_run_makes_each_update_with_its_rate(make, each_update):
    trainer = make(
        "scheduler=cosine", "scheduler.warmup=2", "updates=6", "epochs=2", "batch=accumulate", "batch.accumulation_steps=3",
        "log_every=1",
    )  # fmt: skip
    used: list[float] = []
    step = trainer.optimizer.step
    trainer.optimizer.step = lambda: (used.append(trainer.optimizer.param_groups[0]["lr"]), step())
    trainer.fit()
    scheduler = Cosine(warmup=2)
    scheduler.bind(trainer.optimizer, 6)
    assert used == pytest.approx([0.05 * scheduler.lr_factor(u) for u in range(6)])
    assert len(set(used)) > 3
    assert [r["lr"] for r in trainer.log.writers[0] if r["event"] == "train"] == used  # and logs that rate


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "muon", "lamb"])
def test_weight_decay_follows_dinos_schedule(make, optimizer):
    """Half a cosine from one value to the other, for the groups that decay; a resumed run goes on in it."""
    words = [f"optimizer={optimizer}", "optimizer.weight_decay=0.04", "optimizer.final_weight_decay=0.4", "updates=5", "epochs=3"]
    words += ["scheduler=cosine", "scheduler.final=0.1"]

    def followed(trainer):
        used, step = [], trainer.optimizer.step
        trainer.optimizer.step = lambda: (used.append([g["weight_decay"] for g in trainer.optimizer.param_groups]), step())
        trainer.fit()
        return used

    used = followed(whole := make(*words))
    expected = [0.4 + (0.04 - 0.4) * (1 + math.cos(math.pi * u / 5)) / 2 for u in range(5)]
    assert [max(each) for each in used] == pytest.approx(expected)
    assert all(min(each) == 0 for each in used)  # norms and biases
    half, rest = make(*words, "updates=3"), make(*words)
    half.max_updates = 3
    half.scheduler.bind(half.optimizer, 5)
    half.scheduler._final_decay = 10
    followed(half)
    rest.restore(half.model.state_dict(), half.state())
    assert followed(rest) == used[3:]
    assert all(torch.equal(a, b) for a, b in zip(whole.model.parameters(), rest.model.parameters(), strict=True))


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["optimizer.weight_decay=0"], "which is 0: set it to a small number"),
        (["compile=step"], "optimizer.final_weight_decay and compile=step exclude each other"),
    ],
)
def test_a_weight_decay_that_cannot_be_moved_is_refused(problems, words, says):
    assert any(says in p for p in problems("optimizer.final_weight_decay=0.1", *words))


@pytest.mark.parametrize(
    "word", ["scheduler.warmup=-1", "scheduler.warmup=2.5", "scheduler.warmup_start=2", "scheduler.final=-0.1"]
)
def test_what_cannot_be_is_refused(problems, word):
    assert any(p.startswith(word) for p in problems("scheduler=cosine", word))
