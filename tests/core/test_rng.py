"""Randomness as a function of (seed, epoch, index, stream)."""

import itertools
import math
import random
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from drivetrain.core import order as orders
from drivetrain.core.errors import UserError
from drivetrain.core.order import AGAIN, Order, checked, index_of, numbered
from drivetrain.core.step import rng, streams

WORD = 2**64


def splitmix(index: int, key: int) -> float:
    """rng.uniform of one index in Python's whole numbers, which have no sign bit to go wrong."""
    x = (index ^ key) % WORD
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % WORD
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % WORD
    x ^= x >> 31
    return (x >> 40) / 2**24


def test_uniform_is_splitmix64_in_exact_arithmetic():
    indices = torch.tensor([0, 1, 2, 63, 10**6, 2**40 + 7])
    drawn = rng.uniform(7, 3, indices, 11)
    assert drawn.tolist() == [splitmix(i, rng.mix(7, 3, 11, 2)) for i in indices.tolist()]
    assert len(set(drawn.tolist())) == len(indices)


def test_uniform_belongs_to_the_sample_not_to_its_batch():
    whole = rng.uniform(0, 1, torch.arange(100), 10)
    some = torch.tensor([17, 3, 99])
    assert rng.uniform(0, 1, some, 10).tolist() == whole[some].tolist()


def test_uniform_is_uniform_and_streams_are_independent():
    indices = torch.arange(100_000)
    a, b = rng.uniform(0, 0, indices, 10), rng.uniform(0, 0, indices, 11)
    assert a.dtype == torch.float32
    assert a.min() >= 0
    assert a.max() < 1
    counts = torch.histc(a, 20, 0, 1)  # 5,000 expected in each, with a deviation of 69
    assert (counts - 5000).abs().max() < 400
    assert torch.corrcoef(torch.stack([a, b]))[0, 1].abs() < 0.02
    assert torch.corrcoef(torch.stack([a[1:], a[:-1]]))[0, 1].abs() < 0.02


def test_seed_epoch_and_stream_each_change_the_draw():
    indices = torch.arange(50)
    draws = [rng.uniform(*key[:2], indices, key[2]) for key in ((0, 0, 10), (1, 0, 10), (0, 1, 10), (0, 0, 11))]
    assert all(not torch.equal(a, b) for i, a in enumerate(draws) for b in draws[:i])


def test_an_epochs_order_is_a_permutation_of_its_own():
    orders = [rng.permutation(seed, epoch, 500) for seed, epoch in ((0, 0), (0, 1), (1, 0))]
    assert all(sorted(order.tolist()) == list(range(500)) for order in orders)
    assert all(not torch.equal(a, b) for i, a in enumerate(orders) for b in orders[:i])
    assert torch.equal(orders[0], rng.permutation(0, 0, 500))


def test_the_order_does_not_touch_the_models_random_stream():
    before = torch.get_rng_state()
    rng.permutation(0, 0, 100)
    rng.uniform(0, 0, torch.arange(100), 10)
    assert torch.equal(torch.get_rng_state(), before)


def test_mix_tells_apart_order_number_and_sign_of_its_words():
    seeds = [rng.mix(*words) for words in ((1, 2), (2, 1), (1,), (1, 0), (-1,), (2**63,), (0,))]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)


# --- orders of samples: pure functions of seed and epoch, with the frequencies that they state ---

LABELS = torch.tensor([0] * 80 + [1] * 15 + [2] * 5)
KINDS = {
    "shuffled": orders.shuffled(100), "sequential": orders.sequential(100), "balanced": orders.balanced(LABELS),
    "weighted": orders.weighted(torch.arange(100.0)), "repeated": orders.shuffled(100, 3),
    "in blocks": orders._keyed(100, 1), "repeated in blocks": orders._keyed(100, 3),
}  # fmt: skip


@pytest.mark.parametrize("name", KINDS)
def test_an_order_follows_from_seed_and_epoch_alone(name):
    order = KINDS[name]
    assert order.length == len(order(0, 0)) == 100
    assert torch.equal(order(3, 4), order(3, 4))
    assert len(order(3, 4).unique()) == 100  # what comes again has another number
    assert ((index_of(order(3, 4)) >= 0) & (index_of(order(3, 4)) < 100)).all()
    same = torch.equal(order(0, 0), order(0, 1)), torch.equal(order(0, 0), order(1, 0))
    assert same == ((True, True) if name == "sequential" else (False, False))


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("block", [7, 1000])
def test_parts_of_an_order_are_those_of_the_whole(name, block, monkeypatch):
    monkeypatch.setattr(orders, "BLOCK", block)
    order, ends = KINDS[name], [0, 3, 3, 40, 41, 100]
    parts = list(order.reader(3, 4)(itertools.pairwise(ends)))
    assert torch.equal(torch.cat(parts), order(3, 4))
    assert [len(part) for part in parts] == [b - a for a, b in itertools.pairwise(ends)]
    assert len(next(order.reader(3, 4)([(50, 60)]))) == 10  # where a resumed run goes on


def test_an_order_of_a_billion_samples_is_read_where_it_is_asked():
    order = orders.shuffled(10**9)
    parts = list(order.reader(0, 0)([(0, 32), (10**9 - 32, 10**9)]))
    assert [len(part) for part in parts] == [32, 32]
    assert all(0 <= int(number) < 10**9 for part in parts for number in part)
    assert torch.equal(next(order.reader(0, 0)([(5, 9)])), parts[0][5:9])


def permuted_up_to(most: int) -> None:
    for n in range(1, most + 1):
        assert torch.equal(rng.permuted(3, 1, n, torch.arange(n)).sort().values, torch.arange(n)), n


def test_a_keyed_permutation_has_every_sample_once():
    permuted_up_to(130)


@pytest.mark.slow
def test_keyed_permutations_of_all_sizes_have_every_sample_once():
    permuted_up_to(3000)


def unevenness(counts: torch.Tensor, freedom: int) -> float:
    """The deviations by which chi² of these counts is above that of equal chances."""
    expected = counts.sum() / counts.numel()
    return float(((counts - expected) ** 2 / expected).sum() - freedom) / math.sqrt(2 * freedom)


def look_random(permuted: Callable[[int, int], torch.Tensor], n: int, draws: int) -> dict[str, float]:
    first, steps, crossed = torch.zeros(n), torch.zeros(n), torch.zeros(n)
    places = torch.zeros(100)
    for seed in range(draws):
        one, next_epoch = permuted(seed, 0), permuted(seed, 1)
        first[one[0]] += 1
        steps += ((one[1:] - one[:-1]) % n).bincount(minlength=n)
        crossed += ((next_epoch - one) % n).bincount(minlength=n)
        places += (torch.arange(n) * 10 // n * 10 + one * 10 // n).bincount(minlength=100)
    return {
        "first": unevenness(first, n - 1), "neighbours": unevenness(steps[1:], n - 2),
        "epochs": unevenness(crossed, n - 1), "place and sample": unevenness(places, 81),
    }  # fmt: skip


def check_random(draws: int) -> None:
    """As torch.randperm's, chi² of a keyed permutation is no further from chance than five deviations; a poor one's is."""
    n = 120
    found = look_random(lambda seed, epoch: rng.permuted(seed, epoch, n, torch.arange(n)), n, draws)
    assert all(abs(z) < 5 for z in found.values()), found
    rotated = look_random(lambda seed, epoch: (torch.arange(n) + rng.mix(seed, epoch)) % n, n, draws)
    assert rotated["neighbours"] > 100


def test_a_keyed_permutation_looks_random():
    check_random(60)


@pytest.mark.slow
def test_many_keyed_permutations_look_random():
    check_random(4000)


def test_fewer_rounds_do_not_look_random(monkeypatch):
    monkeypatch.setattr(rng, "ROUNDS", 3)
    with pytest.raises(AssertionError):
        check_random(60)


def drawn(order: Order, epochs: int = 200) -> torch.Tensor:
    return torch.stack([index_of(order(0, epoch)) for epoch in range(epochs)])


def test_frequencies_are_those_that_are_stated():
    shares = LABELS[drawn(KINDS["balanced"])].flatten().bincount() / 20_000
    assert (shares - 1 / 3).abs().max() < 0.015
    counts = drawn(KINDS["weighted"]).flatten().bincount(minlength=100) / 200
    assert counts[0] == 0  # of weight 0
    assert (counts - torch.arange(100) / 49.5).abs().max() < 0.45
    repeated = drawn(KINDS["repeated"], 1)[0]
    assert torch.equal(repeated[:99].view(33, 3), repeated[:99:3, None].expand(33, 3))
    assert len(repeated.unique()) == 34


def test_what_comes_again_is_numbered_in_its_order():
    assert numbered(torch.tensor([5, 2, 5, 5, 2])).tolist() == [5, 2, 5 + AGAIN, 5 + 2 * AGAIN, 2 + AGAIN]


@pytest.mark.parametrize("weights", [[], [0.0, 0.0], [1.0, -1.0], [1.0, float("inf")], [1.0, float("nan")]])
def test_weights_that_cannot_be_drawn_by_are_refused(weights):
    with pytest.raises(UserError, match="needs weights that are finite"):
        orders.weighted(torch.tensor(weights))


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (torch.rand(3), r"gives \[3\] of torch.float32"),
        (torch.zeros(3, 1, dtype=torch.int64), r"gives \[3, 1\]"),
        ((i for i in [0, 1]), r"gives no whole numbers \(n,\): .* generator"),
        ([0, 1, 10], "gives sample 10 in epoch 2, and there are 0 to 9"),
        ([0, -1, 3], "gives sample -1 in epoch 2"),
    ],
)
def test_an_order_that_is_none_is_refused(given, says):
    with pytest.raises(UserError, match=says):
        checked(lambda seed, epoch: given, 10, "order", 0, 1)


def test_an_order_of_another_length_in_another_epoch_is_refused():
    with pytest.raises(UserError, match=r"gives 3 samples in epoch 3 of seed 0, and 4 in the first one .*data\.validation"):
        Order(4, lambda seed, epoch: torch.arange(5 - epoch))(0, 2)


def test_a_keyed_order_repeats_each_sample_in_a_row():
    once, thrice = orders._keyed(64, 1)(7, 2), orders._keyed(64, 3)(7, 2)
    assert index_of(thrice).tolist() == once.repeat_interleave(3)[:64].tolist()
    assert (thrice // AGAIN).tolist() == [position % 3 for position in range(64)]


# --- the streams of the process ---


def draws() -> list[float]:
    return [torch.rand(4).tolist(), np.random.randn(3).tolist(), random.gauss(0, 1), random.random()]


def test_random_streams_come_back():
    np.random.randn()  # the second number of the pair is kept for the next draw
    random.gauss(0, 1)
    state = streams.state()
    first = draws()
    streams.restore(state)
    assert draws() == first
    with streams.apart():
        draws()
    streams.restore(state)
    assert draws() == first


@pytest.mark.parametrize("started", [False, True])
def test_only_a_device_that_was_started_has_a_random_state(monkeypatch, started):
    """Reading the state would start it: in a run on the CPU, and in a process that forks."""
    states = [torch.ones(2)]
    device = SimpleNamespace(
        is_initialized=lambda: started, get_rng_state=lambda: states[-1].clone(), set_rng_state=states.append
    )
    with monkeypatch.context() as patch:  # what isolates tests asks for the devices afterwards
        patch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
        patch.setattr(torch, "get_device_module", lambda _: device)
        saved = streams.state()
        assert set(saved) - {"cpu", "numpy", "python"} == ({"cuda"} if started else set())
        streams.restore({**saved, "cuda": torch.zeros(2)})
    assert len(states) == (2 if started else 1)
