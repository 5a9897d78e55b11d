"""The gradient noise scale: without bias against per-sample gradients, in the log where updates have several micro-batches.

That ranks measure the same is in tests/parallel/test_two_ranks.py.
"""

import json

import pytest
import torch

from drivetrain.core.step.microbatch import MicroBatch
from drivetrain.core.world import World
from drivetrain.engine.noise_scale import NoiseScale, NoiseScaleStep
from drivetrain.parallel import Parallel

GENERATOR = torch.Generator().manual_seed(0)
SAMPLES = torch.randn(4000, 6, generator=GENERATOR, dtype=torch.float64) * 2 + torch.tensor([1.0, 0, 0, 0, 0, 0.5])


class Gradients:
    """A step whose samples are their own gradients. Losses are scaled by 8, as with fp16."""

    def __init__(self, parameter):
        self.parameter = parameter

    def micro_batch(self, batch, loss_sum):
        added = 8 * batch.weight * batch.x.mean(0)
        self.parameter.grad = added if self.parameter.grad is None else self.parameter.grad + added

    def update(self):
        return True

    def zero_grad(self):
        self.parameter.grad = None


def of_ranks(count):
    """A strategy of so many ranks."""
    parallel = Parallel()
    parallel.data_world = World(0, count, 0, count)
    return parallel


def run(sizes, updates, spoilt=()):
    """The estimate after so many updates of micro-batches of these sizes."""
    parameter = torch.nn.Parameter(torch.zeros(6, dtype=torch.float64))
    noise = NoiseScale(torch.device("cpu"), lambda epoch: sum(sizes), every=1)
    noise.sums = noise.sums.double()
    step = NoiseScaleStep(Gradients(parameter), noise, [parameter], of_ranks(1))
    for n in range(updates):
        drawn = SAMPLES[torch.randperm(len(SAMPLES), generator=GENERATOR)[: sum(sizes)]].split(sizes)
        for m, x in enumerate(drawn):
            x = x * float("inf") if n in spoilt else x
            weight = torch.tensor(len(x) / sum(sizes), dtype=torch.float64)
            step.micro_batch(MicroBatch(x, None, weight, m == len(sizes) - 1, False), torch.zeros(()))
        assert step.update()
        step.zero_grad()
    return noise.scale(*noise.sums.tolist(), 0)


@pytest.mark.parametrize("sizes", [(8, 8), (4, 4, 4, 4), (3, 9)])
def test_it_is_the_variance_of_a_sample_over_the_squared_gradient(sizes):
    true = SAMPLES.var(0).sum() / SAMPLES.mean(0).square().sum()
    assert run(sizes, 1500) == pytest.approx(float(true), rel=0.15)


def test_an_overflow_is_left_out():
    assert run((8, 8), 400, spoilt=(3, 77)) == pytest.approx(run((8, 8), 400), rel=0.3)


def test_one_update_in_eight_is_measured(make, monkeypatch):
    measured = []
    trainer = make("batch=accumulate", "updates=17", "epochs=9")
    monkeypatch.setattr(NoiseScaleStep, "_squared_norm", lambda self: measured.append(trainer.progress.updates) or torch.ones(()))
    trainer.fit()
    assert measured == [0, 0, 8, 8, 16, 16]


def test_a_rank_measures_its_own_gradient_before_it_is_averaged_and_leaves_no_hook():
    parameter, other = torch.nn.Parameter(torch.ones(6)), torch.nn.Parameter(torch.ones(2))
    later = torch.nn.Parameter(torch.ones(1), requires_grad=False)  # begins to train later
    noise = NoiseScale(torch.device("cpu"), lambda epoch: 2, every=2)

    class Averaging(Gradients):
        def micro_batch(self, batch, loss_sum):
            ((parameter * batch.x).sum() + (2 * other).sum()).mul(batch.weight).backward()
            parameter.grad /= 2  # with a rank whose gradients are 0
            other.grad /= 2

    step = NoiseScaleStep(Averaging(parameter), noise, [parameter, other, later], of_ranks(2))
    for _ in range(2):
        parameter.grad = other.grad = None
        step.micro_batch(MicroBatch(torch.arange(6.0), None, torch.tensor(1.0), True, False), torch.zeros(()))
        step.update()
        step.zero_grad()
    own = 55.0 + 8
    whole = own / 4
    assert noise.sums.tolist() == pytest.approx([(own - whole) / whole, 2 * (whole - own / 2) / whole])
    assert not parameter._backward_hooks
    assert not other._backward_hooks


def test_one_micro_batch_tells_nothing():
    assert run((16,), 5) is None


def test_it_is_in_the_log_where_updates_have_several_micro_batches(train):
    words = ("updates=12", "log_every=4")
    logged = {}
    for batch in ("fixed", "accumulate"):
        lines = (train(*words, f"batch={batch}").run_dir / "metrics.jsonl").read_text().splitlines()
        logged[batch] = [record for record in map(json.loads, lines) if record["event"] == "train"]
    assert not any("noise_scale" in record for record in logged["fixed"])
    found = [record["noise_scale"] for record in logged["accumulate"]]
    assert len(found) == 3
    assert all(value is None or value > 0 for value in found)
    assert any(found)
    assert [r["loss"] for r in logged["fixed"]] == pytest.approx([r["loss"] for r in logged["accumulate"]], rel=1e-4)


@pytest.mark.parametrize("words", [("batch=accumulate",), ("batch.grow_every=1", "batch.grow_until=24")])
def test_it_is_off_where_the_whole_step_is_one_graph_that_clears_the_gradients_it_would_read(make, words):
    assert make(*words).log.noise is not None
    assert make(*words, "compile=step").log.noise is None


def test_it_changes_nothing(make, monkeypatch):
    """With the measurement taken away the weights are the same, bit for bit."""
    words = ("batch=accumulate", "updates=3")
    with_it, without = make(*words), make(*words)
    assert isinstance(with_it.log.noise, NoiseScale)
    found = []
    for trainer in (with_it, without):
        if trainer is without:
            monkeypatch.setattr(NoiseScaleStep, "_squared_norm", lambda self: torch.ones(()))
        trainer.fit()
        found.append([p.detach().clone() for p in trainer.model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_every_update_counts_the_same_however_long_its_gradient_is():
    """A network that has just begun to learn has long gradients with little noise; they do not drown the rest."""
    noise = NoiseScale(torch.device("cpu"), lambda epoch: 2)
    half = torch.tensor(0.5)
    for first, whole in [(10_100.0, 10_000.0)] * 3 + [(2.0, 1.5)] * 400:
        noise.add(torch.tensor(first), torch.tensor(whole), half)
    assert noise.scale(*noise.sums.tolist(), 0) == pytest.approx(1.0, rel=0.15)  # 2 × (2 - 1.5) / (2 × 1.5 - 2)
