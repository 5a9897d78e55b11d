"""checkpointing.memory_gb: a forecast chooses how many blocks are recomputed, before the run."""

import json
import subprocess

import pytest
import torch

import drivetrain
from drivetrain.checkpointing import Blocks, Checkpointing
from drivetrain.core.blocks import repeated_blocks
from drivetrain.core.errors import UserError
from drivetrain.engine.rehearsal.fake_step import one_sample
from drivetrain.engine.rehearsal.recomputation import fewest, fewest_recomputed
from drivetrain.launch import batch_probe, launcher
from drivetrain.launch.recompute_forecast import Share, fewest_blocks
from tests.checkpointing.test_live_bytes import Live

DEEP = ["model=mlp", "model.hidden=[64,64,64,64,64,64]", "model.dropout=0.1", "optimizer=sgd", "batch.global_batch=16"]


def chosen(recomputed, blocks):
    option = Blocks(memory_gb=1.0)
    option.found = {"memory_gb": 1.0, "recomputed": recomputed, "blocks": blocks, "bytes": 1}
    return option


@pytest.mark.parametrize("limit", [5, 20, 44, 61, 100, 200])
def test_the_fewest_that_fit_by_halving(limit):
    peaks = [100, 90, 75, 62, 50, 48, 44, 44]  # the last one saves nothing
    asked = []
    count, peak = fewest(lambda n: asked.append(n) or peaks[n], 7, limit)
    assert peak == peaks[count]
    assert len(asked) == len(set(asked)) <= 5
    fitting = [n for n, p in enumerate(peaks) if p <= limit]
    assert count == min(fitting) if fitting else peaks[count] == 44


def test_less_memory_recomputes_more_blocks_and_keeps_fewer_bytes(make):
    """By the forecast, and by the bytes of the tensors of the real step."""

    def measured(limit):
        trainer = make(*DEEP)
        blocks, sample = repeated_blocks(trainer.model), one_sample(trainer).x
        count, forecast = fewest_recomputed(trainer, blocks, 512, 1, limit)
        model = make(*DEEP).model.train()
        chosen(count, len(blocks)).apply(model)
        with Live(model) as live:
            model(torch.ones(512, *sample.shape[1:])).sum().backward()
        return count, forecast, live.peak

    none, all_ = measured(1e12), measured(1.0)
    some = measured((none[1] + all_[1]) / 2)
    assert none[0] == 0 < some[0] < all_[0]
    for before, after in ((none, some), (some, all_)):
        assert before[1] > after[1]
        assert before[2] > after[2]


@pytest.mark.parametrize("count", [0, 2, 6])
def test_the_chosen_blocks_compute_the_same(count):
    """Gradients are those without recomputation, to the bit."""
    gradients = []
    for option in (Checkpointing(), chosen(count, 6)):
        torch.manual_seed(0)
        layers = [torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.3), torch.nn.ReLU()) for _ in range(6)]
        blocks = [Block(layer) for layer in layers]
        model = torch.nn.Sequential(*blocks)
        option.apply(model)
        model(torch.ones(4, 8)).sum().backward()
        assert sum("forward" in vars(block) for block in blocks) == (count if option.active else 0)
        gradients.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


class Block(torch.nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x)


def test_a_resumed_run_keeps_what_was_chosen_for_the_same_limit():
    found = {"memory_gb": 2.0, "recomputed": 3, "blocks": 6, "bytes": 5}
    option, asked = Blocks("Layer", 2.0), []

    def forecast(block, memory_gb):
        asked.append((block, memory_gb))
        return {**found, "recomputed": 1}

    assert option.choose(forecast, found).found == found
    for other in (None, {}, {**found, "memory_gb": 1.0}, {**found, "recomputed": -1}, {**found, "recomputed": "3"}):
        assert option.choose(forecast, other).found["recomputed"] == 1
    assert asked == [("Layer", 2.0)] * 5
    assert option.found is None
    assert Blocks().choose(forecast, found).found is None


def test_too_little_is_told_with_the_least_and_a_failed_forecast_with_its_reason(monkeypatch):
    def child(code, out, err=""):
        return lambda *given: subprocess.CompletedProcess([], code, out, err)

    monkeypatch.setattr(batch_probe, "run_child", child(0, json.dumps({"blocks": 8, "recomputed": 8, "bytes": 3 * 2**30})))
    assert fewest_blocks([], [], Share(16, 2), None, 4.0)["recomputed"] == 8
    with pytest.raises(UserError, match=r"memory_gb=2 is too little: a step of 16 samples is forecast to take at least 3 GiB"):
        fewest_blocks([], [], Share(16, 2), None, 2.0)
    monkeypatch.setattr(batch_probe, "run_child", child(1, "", "RuntimeError: no values"))
    with pytest.raises(UserError, match=r"cannot be forecast \(RuntimeError: no values\)"):
        fewest_blocks([], [], Share(16, 2), None, 2.0)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["parallel=fsdp", "parallel.nproc=2"], "parallel=fsdp divides it"),
        (["batch=auto", "batch.memory_gb=4"], "batch=auto finds its own"),
        (["stages=[{until: 1ep, model.freeze: [stem]}]"], "stages and checkpointing.memory_gb exclude each other"),
    ],
)
def test_what_cannot_be_forecast_is_refused(words, reason):
    with pytest.raises(UserError, match=reason):
        launcher.prepare(["data=digits", "model=resnet9", "checkpointing=blocks", "checkpointing.memory_gb=4", *words])


@pytest.mark.slow
def test_a_run_says_what_it_recomputes_and_a_resumed_one_does_the_same(train, monkeypatch):
    words = [*DEEP, "checkpointing=blocks", "checkpointing.memory_gb=16"]
    result = train(*words, "epochs=1", "saving=last")
    read = json.loads((result.run_dir / "environment.json").read_text())["checkpointing"]
    assert read["recomputed"] == 0 < read["bytes"] < 2**30
    assert (
        f"0 of {read['blocks']} blocks recomputed in the backward: the step is forecast"
        in (result.run_dir / "log.txt").read_text()
    )
    monkeypatch.setattr(
        launcher.recompute_forecast, "fewest_blocks", lambda *given: pytest.fail("asked")
    )  # it is not asked again
    assert drivetrain.train([f"resume={result.run_dir}", "epochs=2"]).status == "completed"
