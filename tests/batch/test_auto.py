"""batch=auto, growth, preallocation, and running out of memory in mid-run."""

import json
import math
import sys
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor

import drivetrain
from drivetrain.batch import Batch
from drivetrain.batch.auto import AutoBatch, Critical
from drivetrain.core.errors import UserError
from drivetrain.core.options.context import NO_RUN_DIR
from drivetrain.core.order import shuffled
from drivetrain.core.step.step import WrappingStep
from drivetrain.core.world import World
from drivetrain.engine.rehearsal import largest_micro_batch
from drivetrain.launch import launcher, trials
from drivetrain.launch.trials import JobTrials
from drivetrain.run.result import Result
from tests.support.command import tensors

NETS = """
import torch

class Net(torch.nn.Module):
    '''A linear model that runs out of memory above `most` samples, or in one of its forwards of training.'''
    def __init__(self, shape, classes, most=1000, fails_at=0):
        super().__init__()
        self.most, self.fails_at, self.calls, self.linear = most, fails_at, 0, torch.nn.Linear(shape[0], classes)

    def forward(self, x):
        self.calls += self.training
        if self.training and (len(x) > self.most or self.calls == self.fails_at):
            raise torch.OutOfMemoryError(f"{len(x)} samples")
        return self.linear(x.flatten(1))

class Reads(Net):
    def forward(self, x):
        assert x.detach().numpy().size  # tensors without values have none
        return super().forward(x)

class Wrong(Net):
    def forward(self, x):
        raise KeyError("no such layer")
"""
TINY = ["data=synthetic", "data.shape=[8]", "data.samples=96", "optimizer=sgd", "scheduler=constant", "epochs=2", "log_every=1"]


@pytest.fixture
def net(own_module):
    """The words of a model of the given class."""
    own_module("batch_nets", NETS)
    yield lambda name: ["model=own", f"model.target=batch_nets.{name}", "trust=[batch_nets]"]
    sys.modules.pop("batch_nets", None)


def train(tmp_path, *words):
    return drivetrain.train([*TINY, f"output_dir={tmp_path}", *words])


@pytest.mark.parametrize(
    ("words", "plain", "cut"),
    [
        ([], {"most": 32}, {"most": 9}),
        # The third micro-batch of the third update: the gradients and the loss of the first ones are dropped.
        (["batch=accumulate", "batch.accumulation_steps=4"], {"fails_at": 0}, {"fails_at": 11}),
    ],
    ids=["first", "later"],
)
def test_out_of_memory_doubles_the_steps_and_repeats_the_update(fitted, net, caplog, words, plain, cut):
    ends = []
    for given in (plain, cut):
        kwargs = ", ".join(f"{key}: {value}" for key, value in given.items())
        own = [*TINY, *net("Net"), f"model.kwargs={{{kwargs}}}", "updates=6", "saving=none"]
        trainer = fitted(*own, *words, "batch.global_batch=32")
        ends.append((trainer.model.state_dict(), trainer.log.writers[0].losses))
        assert any("out of memory" in line for line in caplog.messages) == (given is cut)
    (whole, losses), (split, of_cut) = ends
    for name, weight in whole.items():
        torch.testing.assert_close(split[name], weight)
    assert of_cut == pytest.approx(losses, rel=1e-5)
    assert len(losses) == 6


def test_out_of_memory_with_one_sample_ends_the_run(make, net):
    with pytest.raises(torch.OutOfMemoryError, match="1 samples"):
        make(*TINY, *net("Net"), "model.kwargs={most: 0}", "batch.global_batch=8").fit()


class Device:
    """Trials on a device that holds `true_limit` samples; it counts the samples that are tried."""

    resumes = False

    def __init__(self, true_limit, expected, ranks=1):
        self.true_limit, self.expected, self.tried = true_limit, expected, 0
        self.run = SimpleNamespace(parallel=SimpleNamespace(ranks=lambda: ranks))

    def forecast_micro_batch(self, most, limit_gb):
        return self.expected

    def count_fitting(self, sizes, most, limit_gb):
        assert list(sizes) == sorted(set(sizes))
        assert sizes[-1] <= most
        count = sum(size <= self.true_limit for size in sizes)
        self.tried += sum(sizes[: count + 1])
        return count


def search(true_limit, expected, global_batch=256, ranks=1):
    device = Device(true_limit, expected, ranks)
    return AutoBatch(global_batch=global_batch).choose(device), device.tried


@pytest.mark.parametrize("true_limit", [2, 3, 7, 50, 100, 127, 128, 1000])
def test_auto_comes_within_a_tenth_of_the_limit_whatever_is_forecast(true_limit, caplog):
    for expected in (None, 0, 2, 40, 50, 55, 128, 10**6):
        caplog.clear()
        batch, _ = search(true_limit, expected, ranks=2)
        (said,) = caplog.messages
        said = said.removeprefix("batch=auto: ")
        micro = batch.micro_batch(World(size=2))
        assert micro <= true_limit, expected
        assert f"all {128} samples" in said or int(said.split()[0]) * 1.1 + 1 >= true_limit, expected
        assert batch.accumulation_steps == -(-128 // micro)
        assert said.endswith(f": {batch.accumulation_steps} steps of {micro} samples on each rank")
        assert ("forecast" in said) == (expected is not None)


def test_a_forecast_saves_trials():
    for true_limit in (50, 300, 1000):
        without = search(true_limit, None, global_batch=1024)[1]
        for error, share in ((1.0, 0.4), (0.9, 1.0), (1.1, 1.0)):
            assert search(true_limit, int(error * true_limit), global_batch=1024)[1] < share * without, (true_limit, error)


def test_auto_says_when_nothing_fits():
    for expected in (None, 0, 1, 2, 100):
        with pytest.raises(UserError, match="not even 2 samples fit"):
            search(1, expected)


def test_a_resumed_run_has_the_micro_batch_of_its_checkpoint():
    device = Device(50, 50)
    device.resumes, batch = True, AutoBatch(global_batch=256)
    assert batch.choose(device) is batch
    assert not device.tried


def trials_of(*words):
    return JobTrials(launcher.prepare([*TINY, "runtime.device=cpu", "batch.global_batch=96", *words]))


def test_trials_forecast_try_and_tell(net, caplog):
    """A step that needs values is not forecast, and is tried; what fits is counted until memory does not do."""
    caplog.set_level("INFO")
    assert trials_of("model=mlp").forecast_micro_batch(96, 16.0) == 96
    own = trials_of(*net("Reads"), "model.kwargs={most: 9}")
    assert own.forecast_micro_batch(96, 16.0) is None
    assert "the step cannot be forecast (it fails: " in caplog.text
    assert own.count_fitting([2, 8, 16, 32], 96, 16.0) == 2
    assert own.count_fitting([2, 8], 96, 0.001) == 0  # the process itself takes more
    with pytest.raises(UserError, match="no such layer"):
        trials_of(*net("Wrong")).count_fitting([2], 96, 16.0)


@pytest.mark.parametrize("question", ["_forecast_micro_batch", "_fewest_blocks"])
def test_a_forecast_fills_no_weights(question, monkeypatch):
    """A model that is larger than the machine's memory can be forecast."""

    def real(*given):
        return sum(p.nbytes for p in given[-1].model.parameters() if not isinstance(p, FakeTensor))

    monkeypatch.setattr(trials, question, real)
    own = trials_of("model=mlp", "precision=bf16", "batch=accumulate")
    assert (own.forecast_micro_batch(96, 16.0) if "micro" in question else own.fewest_blocks(None, 1.0)) == 0


def test_auto_tries_in_processes_and_keeps_the_update(tmp_path):
    wide = ["model=mlp", "model.hidden=[64]", "data.shape=[3,64,64]", "data.samples=64", "batch.global_batch=64"]
    plain = train(tmp_path, *wide)
    auto = train(tmp_path, *wide, "batch=auto", "batch.memory_gb=16")
    assert plain.status == auto.status == "completed"
    for name, weight in tensors(plain).items():
        torch.testing.assert_close(tensors(auto)[name], weight)


def test_growth_multiplies_updates_not_micro_batches():
    batch = Batch(global_batch=8, grow_every=2, grow_by=2, grow_until=20)
    assert [batch.size(epoch) for epoch in range(6)] == [8, 8, 16, 16, 16, 16]
    assert [Batch(global_batch=8, grow_every=1, grow_until=16).size(epoch) for epoch in range(4)] == [8, 16, 16, 16]
    for epoch, size in ((0, 8), (2, 16)):
        requests = list(batch.over(shuffled(40)).requests(0, epoch, World(), drop_last=False))
        assert max(len(r.indices) for r in requests) == 8
        assert sum(r.last for r in requests) == batch.updates(40, epoch, False) == -(-40 // size)
        assert torch.cat([r.indices for r in requests]).sort().values.tolist() == list(range(40))
    assert batch.consumed(40, 3, 1, drop_last=True) == 40 + 40 + 32 + 16


def test_preallocation_changes_nothing_but_memory(fitted):
    words = ["model=resnet9", "model.width=4"]
    plain, claimed = (fitted(*words, f"batch.preallocate={claims}").model.state_dict() for claims in ("false", "true"))
    assert all(torch.equal(claimed[name], weight) for name, weight in plain.items())


def test_the_settings_of_what_a_trial_goes_without_go_too():
    words = ["parallel=fsdp", "parallel.nproc=4", "parallel.replicate=2", "compile=inductor", "compile.mode=default"]
    job = launcher.prepare([*TINY, "batch.global_batch=32", "model=mlp", "saving.every_updates=3", *words])
    run = trials.trial_run(job)
    assert (run.choices["parallel"], run.choices["compile"], run.choices["saving"]) == ("single", "none", "last")
    # Trials run without a compiler, whose the budget is; the run itself has both.
    budget = launcher.prepare([*TINY, "model=mlp", "checkpointing=budget", "compile=inductor"])
    assert trials.trial_run(budget).choices["checkpointing"] == "none"


def test_a_trial_may_have_averages_that_are_stored_with_checkpoints(make):
    """Its updates store nothing."""
    job = launcher.prepare(["data=synthetic", "data.shape=[3,8,8]", "model=mlp", "ema=post_hoc", "saving=last"])
    assert trials.trial_run(job).saving.active
    trainer = make("ema=post_hoc", "saving=last", "updates=3", run_dir=NO_RUN_DIR)
    assert largest_micro_batch(trainer, 8, 2.0**40) == 8


def test_any_other_error_is_no_want_of_memory(make):
    trainer, error = make("saving=none"), RuntimeError("another")
    with pytest.raises(RuntimeError, match="another"):
        trainer._halve_micro_batch(error)
    assert trainer.batch.accumulation_steps == 1


# --- batch=critical: the noise scale chooses the global batch, once and for the whole run ---


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
        monkeypatch.setattr(trials, "JobTrials", lambda job: told)
        return told.asked

    return let


@pytest.fixture
def here(tiny):
    """Train in this process, where the trials are those of the test."""
    return lambda *words: launcher.launch(launcher.prepare(tiny(*words)), quiet=True)


CHOSEN = [
    (3.0, 10_000, 32), (32.0, 10_000, 32), (33.0, 10_000, 64), (128.0, 10_000, 128), (1e9, 10_000, 512), (1e9, 200, 128),
    (None, 9999, 32),
]  # fmt: skip


def test_the_batch_is_doubled_while_the_noise_scale_is_above_it():
    for noise_scale, samples, size in CHOSEN:
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


def test_the_batch_comes_to_a_target_soonest():
    """Its updates, 1 + noise scale / batch in units of the fewest, times the seconds of one are the least."""
    for noise_scale, seconds, size in TIMED:
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
    assert all(torch.equal(tensors(fixed)[name], weight) for name, weight in tensors(chosen).items())
    limits = {"smallest": 6, "largest": 24, "look_updates": None, "by": "noise"}
    found = {**limits, "noise_scale": 11.0, "updates": 50, "samples": 48, "update_seconds": [], "global_batch": 12}
    assert Result.read(chosen.run_dir).batch == chosen.batch == found
    assert fixed.batch is None
    assert "batch=critical: gradient noise scale 11 by 50 updates of 6 samples: 12 samples an update, of 6 to 24" in caplog.text
    assert "gradient noise scale 11" in (chosen.run_dir / "log.txt").read_text()


def test_a_noise_that_hides_the_gradient_is_reported(here, measured, caplog):
    measured(None)
    with caplog.at_level("INFO"):
        assert here(*WORDS).status == "completed"
    assert "the noise of 50 updates of 6 samples hides the gradient: 6 samples an update, of 6 to 24; a larger" in caplog.text


def test_a_resumed_run_goes_on_with_its_batch(here, measured):
    """Also where a measurement would find another one now; the bits are those of the run in one piece."""
    measured(25.0)
    whole = here(*WORDS)
    half = here(*WORDS, "updates=1")  # within the first epoch
    asked = measured(6.0)
    resumed = launcher.launch(launcher.prepare_run([f"resume={half.run_dir}", "updates=null"]), quiet=True)
    assert asked == []
    assert resumed.status == "completed", resumed.error
    assert resumed.updates == whole.updates == 4
    assert resumed.batch == whole.batch
    assert all(torch.equal(tensors(whole)[name], weight) for name, weight in tensors(resumed).items())


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
    found = JobTrials(launcher.prepare(words)).look(2, 2, [6, 12])
    assert (found["updates"], found["samples"]) == (2, 48)
    assert len(found["update_seconds"]) == (0 if found["noise_scale"] is None else 2)
    monkeypatch.setattr(trials, "at_beginning", lambda *given: [].pop())
    with pytest.raises(UserError, match="look at the first updates for the batch failed: IndexError: pop from empty list"):
        JobTrials(launcher.prepare(words)).look(2, 2, [])


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
