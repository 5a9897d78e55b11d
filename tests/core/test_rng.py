"""Randomness as a function of (seed, epoch, index, stream)."""

import torch

from drivetrain.core import rng

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
