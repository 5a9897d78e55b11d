"""checkpointing.memory_gb: a forecast chooses how many blocks are recomputed, before the run."""

import json

import pytest
import torch

from drivetrain.checkpointing import Blocks, Checkpointing
from drivetrain.core.blocks import repeated_blocks
from drivetrain.core.errors import UserError
from drivetrain.engine.rehearsal.fake_step import one_sample
from drivetrain.engine.rehearsal.search import fewest, fewest_recomputed
from drivetrain.launch import launcher, trials
from drivetrain.launch.trials import Trials
from tests.checkpointing.test_checkpointing import Live

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


class Told:
    """Trials that find this, and note what they were asked."""

    def __init__(self, **found):
        self.found, self.asked = found, []

    def fewest_blocks(self, block, limit_gb):
        self.asked.append((block, limit_gb))
        return self.found

    def micro_batch(self):
        return 16


def test_a_resumed_run_keeps_what_was_chosen_for_the_same_limit():
    found = {"memory_gb": 2.0, "recomputed": 3, "blocks": 6, "bytes": 5}
    option, told = Blocks("Layer", 2.0), Told(recomputed=1, blocks=6, bytes=5)
    assert option.choose(told, found).found == found
    for other in (None, {}, {**found, "memory_gb": 1.0}, {**found, "recomputed": -1}, {**found, "recomputed": "3"}):
        assert option.choose(told, other).found == {**found, "recomputed": 1}
    assert told.asked == [("Layer", 2.0)] * 5
    assert option.found is None
    assert Blocks().choose(told, found).found is None


def test_too_little_is_told_with_the_least_and_a_failed_forecast_with_its_reason(tiny, monkeypatch):
    with pytest.raises(UserError, match=r"memory_gb=2 is too little: a step of 16 samples is forecast to take at least 3 GiB"):
        Blocks(None, 2.0).choose(Told(recomputed=8, blocks=8, bytes=3 * 2**30))
    monkeypatch.setattr(trials, "_fewest_blocks", lambda *given: [].pop())
    with pytest.raises(UserError, match=r"cannot be forecast: IndexError: pop from empty list: set checkpointing.memory_gb=null"):
        Trials(launcher.prepare(tiny(*DEEP))).fewest_blocks(None, 2.0)


@pytest.mark.parametrize(
    ("words", "instead"),
    [
        ([*DEEP, "checkpointing=blocks", "checkpointing.memory_gb=4"], r"checkpointing\.memory_gb=null"),
        (["batch=critical", "batch.global_batch=6", "batch.max=24"], ""),
    ],
)
def test_a_launcher_that_has_started_ranks_is_refused(tiny, monkeypatch, words, instead):
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "2")
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.setenv(name, "1")
    job = launcher.prepare(tiny(*words, "parallel=ddp", "runtime.device=cpu"))
    with pytest.raises(UserError, match=f"another launcher has started them: .* or set {instead}"):
        launcher.launch(job)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["parallel=fsdp", "parallel.nproc=2"], "parallel=fsdp divides it"),
        (["batch=auto", "batch.memory_gb=4"], "batch=auto finds its own"),
        (
            ["stages=[{until: 1ep, model.freeze: [stem]}]"],
            "once for the whole run: set checkpointing.memory_gb=null",
        ),
    ],
)
def test_what_cannot_be_forecast_is_refused(words, reason):
    with pytest.raises(UserError, match=reason):
        launcher.prepare(["data=digits", "model=resnet9", "checkpointing=blocks", "checkpointing.memory_gb=4", *words])


def test_a_run_says_what_it_recomputes_and_a_resumed_one_does_the_same(train, monkeypatch):
    words = [*DEEP, "checkpointing=blocks", "checkpointing.memory_gb=16"]
    result = train(*words, "saving=last")  # in a new process, from which it is forecast
    read = json.loads((result.run_dir / "environment.json").read_text())["checkpointing"]
    assert read["recomputed"] == 0 < read["bytes"] < 2**30
    said = (result.run_dir / "log.txt").read_text()
    assert f"0 of {read['blocks']} blocks recomputed in the backward: the step is forecast" in said
    monkeypatch.setattr(Trials, "fewest_blocks", lambda *given: pytest.fail("it is not asked again"))
    again = launcher.launch(launcher.prepare_run([f"resume={result.run_dir}", "updates=3"]), quiet=True).result
    assert again.status == "completed"
