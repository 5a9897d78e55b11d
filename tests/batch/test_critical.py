"""batch=critical: the noise scale chooses the global batch, once and for the whole run."""

import json
import math
from types import SimpleNamespace

import pytest
import torch

from drivetrain.batch import Critical
from drivetrain.core.errors import UserError
from drivetrain.core.step import WrappingStep
from drivetrain.core.world import World
from drivetrain.launch import launcher, trials
from drivetrain.launch.trials import Trials
from drivetrain.run.result import Result

WORDS = [
    "batch=critical",
    "batch.by=noise",
    "batch.global_batch=6",
    "batch.max=24",
    "updates=null",
    "epochs=2",
    "optimizer=adamw",
]


class Told:
    """Trials of a run with so many ranks, whose look finds this; it notes what it was asked."""

    def __init__(self, noise_scale, samples=10_000, seconds=(), ranks=1):
        self.found = {"noise_scale": noise_scale, "samples": samples, "update_seconds": list(seconds)}
        self.run = SimpleNamespace(parallel=SimpleNamespace(data_ranks=lambda: ranks))
        self.asked = []

    def look(self, *given):
        self.asked.append(given)
        return {**self.found, "updates": given[1] or 50}


@pytest.fixture
def measured(monkeypatch):
    """Let the look of a run find this noise scale; the list gets what it was asked."""

    def let(noise_scale):
        told = Told(noise_scale, 48)
        monkeypatch.setattr(launcher, "Trials", lambda job: told)
        return told.asked

    return let


@pytest.fixture
def here(tiny):
    """Train in this process, where the trials are those of the test."""
    return lambda *words: launcher.launch(launcher.prepare(tiny(*words)), quiet=True).result


def weights(result):
    from safetensors.torch import load_file

    return load_file(result.run_dir / "checkpoints" / str(result.updates) / "model.safetensors")


CHOSEN = [
    (3.0, 10_000, 32), (32.0, 10_000, 32), (33.0, 10_000, 64), (128.0, 10_000, 128), (1e9, 10_000, 512), (1e9, 200, 128),
    (None, 9999, 32),
]  # fmt: skip


@pytest.mark.parametrize(("noise_scale", "samples", "size"), CHOSEN)
def test_the_batch_is_doubled_while_the_noise_scale_is_above_it(noise_scale, samples, size):
    chosen = Critical(global_batch=32, max=600, by="noise", lr_scaling="linear").choose(Told(noise_scale, samples))
    assert chosen.global_batch == chosen.size(0) == size
    assert chosen.micro_batch(World()) == 32  # memory does not grow
    assert chosen.lr_factor() == size / 256
    assert chosen.found["global_batch"] == size


def test_ranks_split_what_was_chosen():
    told = Told(100.0, seconds=(1.0, 1.0, 1.9), ranks=4)
    given = {"global_batch": 32, "look_updates": 7, "accumulation_steps": 2, "max": 200}
    chosen = Critical(**given, by="noise").choose(told)
    assert chosen.global_batch == 128
    assert chosen.micro_batch(World(size=4)) == 4
    chosen = Critical(**given).choose(told)
    assert chosen.global_batch == 64
    assert chosen.micro_batch(World(size=4)) == 8
    assert told.asked == [(8, 7, []), (8, 7, [4, 8, 16])]  # the micro-batches of the run itself


TIMED = [
    (100.0, [1.0, 1.0, 1.0, 1.0], 256),  # a device that is not full: the larger the sooner
    (100.0, [1.0, 2.0, 4.0, 8.0], 32),  # a full one: more updates for the same samples
    (100.0, [1.0, 1.2, 1.6, 2.4], 128),
    (100.0, [1.0, 1.2], 64),  # no larger batch fits
    (1.0, [1.0, 1.2, 1.6, 2.4], 32),
    (None, [], 32), (100.0, [], 32),
]  # fmt: skip


@pytest.mark.parametrize(("noise_scale", "seconds", "size"), TIMED)
def test_the_batch_comes_to_a_target_soonest(noise_scale, seconds, size):
    """Its updates, 1 + noise scale / batch in units of the fewest, times the seconds of one are the least."""
    chosen = Critical(global_batch=32, max=256).choose(Told(noise_scale, seconds=seconds))
    assert chosen.global_batch == chosen.found["global_batch"] == size
    assert chosen.accumulation_steps == 1


def test_what_the_run_has_recorded_is_not_measured_again():
    batch = Critical(global_batch=32, by="noise")
    first = batch.choose(Told(120.0))
    again = batch.choose(Told(1e9), json.loads(json.dumps(first.found)))
    assert again.found == first.found
    assert again.global_batch == 128
    other = Critical(global_batch=32, max=4096, by="noise").choose(Told(1e9), first.found)  # the run goes on with other limits
    assert other.global_batch == 4096
    wrong = [{"noise_scale": value} for value in ("many", -1.0, math.nan, math.inf)]
    wrong += [{name: value} for name in ("updates", "samples") for value in ("many", 0, -5, 1.5, None)]
    wrong += [{"update_seconds": value} for value in (None, ["many"], [0.0], [math.nan], [1.0] * 7)]
    for damaged in ({}, [], *({**first.found, **each} for each in wrong)):
        assert batch.choose(Told(64.0), damaged).global_batch == 64


def test_the_run_is_that_of_the_batch_that_was_chosen(train, here, measured, caplog):
    asked = measured(11.0)
    with caplog.at_level("INFO"):
        chosen = here(*WORDS, "log_every=1")
    fixed = train("batch=accumulate", "batch.global_batch=12", "batch.accumulation_steps=2", "batch.lr_scaling=sqrt", *WORDS[4:])
    assert asked == [(2, None, [])]
    assert chosen.updates == fixed.updates == 8
    assert all(torch.equal(weights(fixed)[name], weight) for name, weight in weights(chosen).items())
    limits = {"smallest": 6, "largest": 24, "look_updates": None, "by": "noise"}
    found = {**limits, "noise_scale": 11.0, "updates": 50, "samples": 48, "update_seconds": [], "global_batch": 12}
    assert Result.read(chosen.run_dir).batch == chosen.batch == found
    assert fixed.batch is None
    assert "batch=critical: gradient noise scale 11 by 50 updates of 6 samples: 12 samples an update, of 6 to 24" in caplog.text
    assert "gradient noise scale 11" in (chosen.run_dir / "log.txt").read_text()


def test_a_resumed_run_goes_on_with_its_batch(here, measured):
    """Also where a measurement would find another one now; the bits are those of the run in one piece."""
    measured(25.0)
    whole = here(*WORDS)
    half = here(*WORDS, "updates=1")  # within the first epoch
    asked = measured(6.0)
    resumed = launcher.launch(launcher.prepare_run([f"resume={half.run_dir}", "updates=null"]), quiet=True).result
    assert asked == []
    assert resumed.status == "completed", resumed.error
    assert resumed.updates == whole.updates == 4
    assert resumed.batch == whole.batch
    assert all(torch.equal(weights(whole)[name], weight) for name, weight in weights(resumed).items())


def test_the_look_measures_the_beginning_of_the_run(make):
    """It trains as the run does with the smallest batch and gives the same figure each time; random labels are noisier."""
    words = ("batch=accumulate", "batch.global_batch=16", "batch.accumulation_steps=2", "updates=null", "epochs=9")
    digits, of_none = ("data=digits", "model.hidden=[16]"), ("data.samples=160", "model.hidden=[16]")
    clean, again = (trials.at_beginning(make(*words, *digits), 30) for _ in range(2))
    noisy = trials.at_beginning(make(*words, *of_none), 30)
    assert clean == again
    assert (noisy["updates"], noisy["samples"]) == (30, 160)
    assert noisy["noise_scale"] is None or clean["noise_scale"] < noisy["noise_scale"]
    looked, trained = make(*words), make(*words)
    trials.at_beginning(looked, 4)
    trained.max_updates = 4
    trained.fit()
    assert all(torch.equal(a, b) for a, b in zip(looked.model.parameters(), trained.model.parameters(), strict=True))


def test_the_look_is_a_process_of_its_own(tiny, monkeypatch):
    words = tiny("batch=critical", "batch.global_batch=6", "batch.max=24", "parallel=ddp", "runtime.device=cpu")
    found = Trials(launcher.prepare(words)).look(2, 2, [6, 12])
    assert (found["updates"], found["samples"]) == (2, 48)
    assert len(found["update_seconds"]) == (0 if found["noise_scale"] is None else 2)
    monkeypatch.setattr(trials, "at_beginning", lambda *given: [].pop())
    with pytest.raises(UserError, match="look at the first updates for the batch failed: IndexError: pop from empty list"):
        Trials(launcher.prepare(words)).look(2, 2, [])


def test_updates_are_timed_as_far_as_a_larger_batch_may_be_sooner(make, monkeypatch):
    """Also no further than the data goes, and than the memory does."""
    trainer, sizes = make("batch.global_batch=4", "updates=null", "epochs=9"), []

    def timed(trainer, micro_batch, steps):
        sizes.append(micro_batch)
        if micro_batch == 32:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        yield seconds[len(sizes) - 1]

    monkeypatch.setattr(trials, "_timed", timed)
    doubles, beyond = [4, 8, 16, 32], [4, 8, 16, 64]
    cases = [(100.0, [1.0] * 3, doubles), (4.0, [1.0, 2.0], doubles), (None, [], doubles), (100.0, [1.0] * 3, beyond)]
    for noise_scale, seconds, micro_batches in cases:
        sizes.clear()
        assert trials.update_seconds(trainer, micro_batches, 1, noise_scale) == seconds


def test_an_update_is_timed_with_the_steps_of_the_run(make):
    trainer, seen = make("batch.global_batch=4", "updates=null", "epochs=9"), []

    class Watched(WrappingStep):
        def micro_batch(self, batch, loss_sum):
            seen.append(len(batch.x))
            self.inner.micro_batch(batch, loss_sum)

    trainer.step = Watched(trainer.step)
    before = [parameter.clone() for parameter in trainer.model.parameters()]
    assert all(seconds > 0 for seconds in trials._timed(trainer, 6, 2))
    assert seen == [6, 6] * trials.TIMED
    assert not any(torch.equal(a, b) for a, b in zip(before, trainer.model.parameters(), strict=True))


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


def test_a_rate_that_does_not_follow_is_advised_upon():
    notices = launcher.prepare(["batch=critical", "batch.lr_scaling=none"]).notices
    assert any("batch.lr_scaling=none keeps" in line for line in notices)
