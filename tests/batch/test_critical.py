"""batch=critical: the noise scale chooses the global batch, once and for the whole run."""

import json
import math
import subprocess

import pytest
import torch

import drivetrain
from drivetrain.batch import Critical
from drivetrain.core.errors import UserError
from drivetrain.core.world import World
from drivetrain.launch import batch_look, batch_probe, launcher
from drivetrain.run.result import Result

WORDS = ["batch=critical", "batch.global_batch=6", "batch.max=24", "updates=null", "epochs=2", "optimizer=adamw"]


def told(noise_scale, samples=10_000):
    """A stand-in for the measurement."""
    return lambda steps, updates: {"noise_scale": noise_scale, "updates": updates, "samples": samples}


@pytest.fixture
def measured(monkeypatch):
    """Let the look find this noise scale; the list gets what it was asked."""

    def let(noise_scale):
        asked = []

        def measure(overrides, config_dirs, steps, updates):
            asked.append((steps, updates))
            return told(noise_scale, 48)(steps, updates)

        monkeypatch.setattr(batch_look, "measure", measure)
        return asked

    return let


def weights(result):
    from safetensors.torch import load_file

    return load_file(result.run_dir / "checkpoints" / str(result.updates) / "model.safetensors")


CHOSEN = [
    (3.0, 10_000, 32), (32.0, 10_000, 32), (33.0, 10_000, 64), (128.0, 10_000, 128), (1e9, 10_000, 512), (1e9, 200, 128),
    (None, 9999, 32),
]  # fmt: skip


@pytest.mark.parametrize(("noise_scale", "samples", "size"), CHOSEN)
def test_the_batch_is_doubled_while_the_noise_scale_is_above_it(noise_scale, samples, size):
    chosen = Critical(global_batch=32, max=600, lr_scaling="linear").choose(told(noise_scale, samples), ranks=1)
    assert chosen.global_batch == chosen.size(0) == size
    assert chosen.micro_batch(World()) == 32  # memory does not grow
    assert chosen.lr_factor() == size / 256
    assert chosen.found["global_batch"] == size


def test_ranks_split_what_was_chosen():
    asked = []

    def measure(steps, updates):
        asked.append((steps, updates))
        return told(100.0)(steps, updates)

    chosen = Critical(global_batch=32, look_updates=7, accumulation_steps=2).choose(measure, ranks=4)
    assert asked == [(8, 7)]  # the micro-batches of the run itself
    assert chosen.global_batch == 128
    assert chosen.micro_batch(World(size=4)) == 4


def test_what_the_run_has_recorded_is_not_measured_again():
    batch = Critical(global_batch=32)
    first = batch.choose(told(120.0), ranks=1)
    again = batch.choose(told(1e9), 1, json.loads(json.dumps(first.found)))
    assert again.found == first.found
    assert again.global_batch == 128
    other = Critical(global_batch=32, max=4096).choose(told(1e9), 1, first.found)  # the run goes on with other limits
    assert other.global_batch == 4096
    wrong = [{"noise_scale": value} for value in ("many", -1.0, math.nan, math.inf)]
    wrong += [{name: value} for name in ("updates", "samples") for value in ("many", 0, -5, 1.5, None)]
    for damaged in ({}, [], *({**first.found, **each} for each in wrong)):
        assert batch.choose(told(64.0), 1, damaged).global_batch == 64


def test_the_run_is_that_of_the_batch_that_was_chosen(train, measured, caplog):
    asked = measured(11.0)
    with caplog.at_level("INFO"):
        chosen = train(*WORDS, "log_every=1")
    fixed = train("batch=accumulate", "batch.global_batch=12", "batch.accumulation_steps=2", "batch.lr_scaling=sqrt", *WORDS[3:])
    assert asked == [(2, 50)]
    assert chosen.updates == fixed.updates == 8
    assert all(torch.equal(weights(fixed)[name], weight) for name, weight in weights(chosen).items())
    limits = {"smallest": 6, "largest": 24, "look_updates": 50}
    found = {**limits, "noise_scale": 11.0, "updates": 50, "samples": 48, "global_batch": 12}
    assert Result.read(chosen.run_dir).batch == chosen.batch == found
    assert fixed.batch is None
    assert "batch=critical: gradient noise scale 11 by 50 updates of 6 samples: 12 samples an update, of 6 to 24" in caplog.text
    assert "gradient noise scale 11" in (chosen.run_dir / "log.txt").read_text()


def test_a_resumed_run_goes_on_with_its_batch(train, measured):
    """Also where a measurement would find another one now; the bits are those of the run in one piece."""
    measured(25.0)
    whole = train(*WORDS)
    half = train(*WORDS, "updates=1")  # within the first epoch
    asked = measured(6.0)
    resumed = drivetrain.train([f"resume={half.run_dir}", "updates=null"])
    assert asked == []
    assert resumed.status == "completed", resumed.error
    assert resumed.updates == whole.updates == 4
    assert resumed.batch == whole.batch
    assert all(torch.equal(weights(whole)[name], weight) for name, weight in weights(resumed).items())


def test_the_look_measures_the_beginning_of_the_run(make):
    """It trains as the run does with the smallest batch and gives the same figure each time; random labels are noisier."""
    words = ("batch=accumulate", "batch.global_batch=16", "batch.accumulation_steps=2", "updates=null", "epochs=9")
    digits, of_none = ("data=digits", "model.hidden=[16]"), ("data.samples=160", "model.hidden=[16]")
    clean, again = (batch_look.look(make(*words, *digits), 30) for _ in range(2))
    noisy = batch_look.look(make(*words, *of_none), 30)
    assert clean == again
    assert (noisy["updates"], noisy["samples"]) == (30, 160)
    assert noisy["noise_scale"] is None or clean["noise_scale"] < noisy["noise_scale"]
    looked, trained = make(*words), make(*words)
    batch_look.look(looked, 4)
    trained.max_updates = 4
    trained.fit()
    assert all(torch.equal(a, b) for a, b in zip(looked.model.parameters(), trained.model.parameters(), strict=True))


def test_the_look_is_a_process_of_its_own(tiny, monkeypatch):
    words = tiny("batch=critical", "batch.global_batch=6", "batch.max=24", "parallel=ddp", "runtime.device=cpu")
    found = batch_look.measure(words, [], 2, 2)
    assert (found["updates"], found["samples"]) == (2, 48)
    failed = subprocess.CompletedProcess([], 1, "", "…\nMemoryError: none left\n")
    monkeypatch.setattr(batch_probe, "run_child", lambda *given: failed)
    with pytest.raises(UserError, match="its look at the first updates failed: MemoryError: none left"):
        batch_look.measure(words, [], 2, 2)


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["batch.max=50"], "set it to 64 or more"),
        (["batch.global_batch=1"], "set it to 2 or more"),
        (["loss=contrastive"], "no gradient noise scale"),
        (["parallel=ddp", "parallel.nnodes=2", "parallel.rendezvous=there:29500"], "let one find it"),
    ],
)
def test_the_rules_speak(words, problem):
    with pytest.raises(UserError, match=problem):
        launcher.prepare(["batch=critical", *words])


def test_a_launcher_that_has_started_ranks_is_refused(tiny, monkeypatch):
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "2")
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.setenv(name, "1")
    job = launcher.prepare(tiny("batch=critical", "batch.global_batch=6", "batch.max=24", "parallel=ddp", "runtime.device=cpu"))
    with pytest.raises(UserError, match="another launcher has started them"):
        launcher.launch(job)


def test_a_rate_that_does_not_follow_is_advised_upon():
    notices = launcher.prepare(["batch=critical", "batch.lr_scaling=none"]).notices
    assert any("batch.lr_scaling=none keeps" in line for line in notices)
