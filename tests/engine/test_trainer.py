"""The loop: what it counts, tells, evaluates and saves, in which order, and how it ends."""

import math
import re
import signal
from dataclasses import replace
from itertools import islice

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import drivetrain
from drivetrain.core.errors import Diverged, Interrupted, UserError
from drivetrain.core.machine import process
from drivetrain.core.machine.signals import StopFlag
from drivetrain.core.world import World
from drivetrain.engine import kernels
from drivetrain.run.result import Result
from drivetrain.saving import checkpoint_io

TAIL = ["data.samples=53", "data.drop_last=false", "updates=null", "epochs=2"]  # five updates an epoch, the last of 5


def told(trainer, event: str) -> list[dict]:
    return [r for r in trainer.log.writers[0] if r["event"] == event]


# --- counting ---


@pytest.mark.parametrize(
    ("words", "samples"),
    [
        (["batch=accumulate", "batch.accumulation_steps=3"], [12, 24, 36, 48, 53, 65, 77, 89, 101, 106]),
        (["data.drop_last=true"], [12, 24, 36, 48, 60, 72, 84, 96]),  # the dropped tail is not counted
    ],
)
def test_updates_epochs_and_samples_are_counted(fitted, words, samples):
    trainer = fitted(*TAIL, *words)
    records, updates = told(trainer, "train"), len(samples)
    assert [r["update"] for r in records] == list(range(1, updates + 1))
    assert [r["samples"] for r in records] == samples
    assert [r["epoch"] for r in records] == [0] * (updates // 2) + [1] * (updates // 2)
    assert (trainer.progress.epoch, trainer.progress.window, trainer.progress.updates) == (2, 0, updates)
    assert trainer.max_updates == updates


def test_each_epoch_reads_each_sample_once(make):
    trainer = make(*TAIL)
    read, fetch = [], trainer.train_data.source.fetch
    trainer.train_data.source.fetch = lambda indices: (read.append(indices), fetch(indices))[1]
    trainer.fit()
    epochs = [torch.cat(read[:5]), torch.cat(read[5:])]
    assert all(sorted(e.tolist()) == list(range(53)) for e in epochs)
    assert not torch.equal(*epochs)


@pytest.mark.parametrize(
    ("words", "updates"),
    [(["epochs=3", "updates=null"], 12), (["epochs=3", "updates=5"], 5), (["epochs=1", "updates=50"], 4)],
    ids=["epochs", "updates", "whichever is first"],
)
def test_the_run_is_as_long_as_was_said(fitted, words, updates):
    trainer = fitted(*words)
    assert trainer.progress.updates == trainer.max_updates == updates


# --- the step ---


def test_the_order_within_an_update(make):
    """The rate is set for the last micro-batch; after it once: clip, step, average, forget."""
    trainer = make("batch=accumulate", "batch.accumulation_steps=2", "updates=1", "clip=norm", "ema=ema", "saving=none")
    events = []

    def spied(name, original):
        return lambda *a, **k: (events.append(name), original(*a, **k))[1]

    for owner, name in ((trainer.precision, "backward"), (trainer.optimizer, "step"), (trainer.ema, "update")):
        setattr(owner, name, spied(name, getattr(owner, name)))
    step = trainer.step.inner  # within the measurement of the noise scale
    spying = replace(step, clip=spied("clip", step.clip), clear_gradients=spied("zero_grad", step.clear_gradients))
    trainer.step = replace(trainer.step, inner=spying)
    schedule = trainer.scheduler.step
    trainer.scheduler.step = lambda update: (events.append(f"schedule {update}"), schedule(update))
    trainer.fit()
    assert events == ["backward", "schedule 0", "backward", "clip", "step", "update", "zero_grad"]


class Reads(TorchDispatchMode):
    """Counts what makes the host wait for a number."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["precision=bf16", "batch=accumulate", "batch.accumulation_steps=3"],
        ["clip=norm", "ema=ema", "optimizer=adamw", "scheduler=onecycle"],
        ["model=resnet9", "model.width=8", "checkpointing=blocks"],
        ["optimizer.fused=false", "optimizer.foreach=true"],
    ],
    ids=lambda words: " ".join(words) or "plain",
)
def test_a_step_reads_nothing_back(make, words):
    trainer = make(*words, "data.samples=120", "updates=8", "log_every=50", "saving=none")
    with Reads() as reads:
        mark, after = [], trainer._after_update
        trainer._after_update = lambda *a: (mark.append(reads.count), after(*a))[1]
        trainer.fit()
    assert len(mark) == 8
    assert mark[-1] == mark[0] == 0
    assert reads.count > 0  # the last log and the evaluation: reads are seen


# --- evaluation ---


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("samples", [20, 7, 1, 24])
def test_evaluation_sees_each_sample_once_on_any_number_of_ranks(make, size, samples):
    trainer = make(f"data.test_samples={samples}", "saving=none")
    alone = trainer.evaluator.metrics()
    read, sums = [], []
    fetch = trainer.evaluator.data.source.fetch
    trainer.evaluator.data.source.fetch = lambda indices: (read.append(indices), fetch(indices))[1]
    for rank in range(size):
        trainer.parallel.data_world = World(rank, size)
        trainer.parallel.all_reduce_sum = lambda s: (sums.append(s), s)[1]
        try:
            trainer.evaluator.metrics()
        except UserError:  # this rank had no batch; the others' sums are missing here
            assert samples <= 12 // size * rank
    assert sorted(torch.cat(read).tolist()) == list(range(samples))
    loss, correct, count = sum(sums).tolist()
    assert count == samples
    assert loss / count == pytest.approx(alone["loss"], rel=1e-6)
    assert correct / count == pytest.approx(alone["accuracy"])


def test_evaluation_leaves_no_trace_in_the_model(make):
    trainer = make("model=resnet9", "model.width=8", "saving=none")
    state = {k: v.clone() for k, v in trainer.model.state_dict().items()}
    trainer.model.train()
    modes = []
    trainer.model.register_forward_hook(lambda m, i, o: modes.append((m.training, torch.is_grad_enabled(), o.grad_fn)))
    before = torch.get_rng_state()
    trainer.evaluator.metrics()
    assert set(modes) == {(False, False, None)}
    assert trainer.model.training
    assert all(torch.equal(v, state[k]) for k, v in trainer.model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("updates", "every", "at"), [("null", 1, [4, 8, 12, 16, 20]), ("null", 2, [8, 16, 20]), ("null", 9, [20]), (6, 1, [4, 6])]
)
def test_evaluations_come_as_often_as_asked_for_and_at_the_end(fitted, updates, every, at):
    trainer = fitted(f"updates={updates}", "epochs=5", f"evaluate_every={every}")
    assert [r["update"] for r in told(trainer, "evaluate")] == at
    assert trainer.progress.final == {k: told(trainer, "evaluate")[-1][k] for k in ("loss", "accuracy")}


def test_training_goes_on_as_if_there_had_been_no_evaluation(fitted):
    words = ["model.dropout=0.5", "updates=null", "epochs=3", "saving=none"]
    often, once = (fitted(*words, f"evaluate_every={every}").log.writers[0].losses for every in (1, 5))
    assert often == once
    assert len(often) == 12


def test_a_loss_that_is_not_finite_says_of_which_weights_and_set(make):
    trainer = make("ema=ema", "data.validation=0.1")
    trainer.ema.started = True
    for mean in trainer.ema._mean:
        mean.fill_(float("nan"))
    with pytest.raises(
        Diverged,
        match="the loss of the averaged weights on the validation set is not finite",
    ):
        trainer.evaluator.evaluate()


# --- logging ---


def test_the_log_comes_every_n_updates_and_at_the_end_of_an_epoch(fitted):
    assert [r["update"] for r in told(fitted(*TAIL, "log_every=3"), "train")] == [3, 5, 6, 9, 10]


def test_the_logged_loss_is_the_mean_over_the_samples(make):
    trainer = make(*TAIL, "optimizer.lr=1e-30", "batch=accumulate", "batch.accumulation_steps=3")  # the weights stand still
    requests = list(trainer.requests())
    trainer.fit()
    by_hand, seen = [], []
    for request in requests:
        seen.append(request.indices)
        if request.last:
            x, y = trainer.train_data.source.fetch(torch.cat(seen))
            by_hand.append(torch.nn.functional.cross_entropy(trainer.model(x), y).item())
            seen = []
    assert [r["loss"] for r in told(trainer, "train")] == pytest.approx(by_hand, rel=1e-5)


# --- how it ends ---


@pytest.mark.parametrize("updates", [4, 1])
def test_a_loss_that_is_not_finite_ends_the_run_as_diverged(train, updates):
    """The loss of update 1 is finite; what it made of the weights shows in the next one, or in the evaluation alone."""
    result = train("optimizer.lr=1e30", f"updates={updates}", ends="diverged")
    assert re.search("the loss .*is (nan|inf|not finite)", result.error)
    assert result.updates <= 3


@pytest.mark.parametrize("wrong", [math.nan, 1e9, 1.0])
def test_a_kernel_that_is_wrong_is_named_instead_of_the_rate(make, wrong):
    trainer = make()
    name, weight = next((name, each) for name, each in trainer.model.named_parameters() if each.dim() > 1)
    weight.register_hook(lambda grad: grad * (wrong if torch.backends.mkldnn.enabled else 1.0))
    before = {name: each.clone() for name, each in trainer.model.state_dict().items()}
    said = kernels.explained(Diverged("the loss is nan", ": lower the rate"), trainer)
    assert ("lower the rate" in said) == (wrong == 1.0)
    assert (f"{name} (Linear)" in said) == (wrong != 1.0)
    assert all(torch.equal(each, before[name]) for name, each in trainer.model.state_dict().items())


def test_a_loss_that_is_not_finite_is_not_saved(make, tmp_path):
    trainer = make("optimizer.lr=1e30", "updates=4", "saving.every_updates=1", "saving.keep=9")
    with pytest.raises(Diverged):
        trainer.fit()
    assert [p.name for p in (tmp_path / "run" / "checkpoints").iterdir()] == ["1"]  # its loss was finite still


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
@pytest.mark.parametrize("saving", ["saving.every_updates=null", "saving.every_updates=1"])
def test_a_signal_is_answered_at_the_next_update_with_a_saved_state(make, tmp_path, number, saving):
    trainer = make("updates=9", "epochs=9", saving)
    step = trainer.optimizer.step
    trainer.optimizer.step = lambda: (step(), signal.raise_signal(number) if trainer.progress.updates == 2 else None)
    before = signal.getsignal(number)
    with pytest.raises(Interrupted, match="at update 3") as stopped, StopFlag() as stop:
        trainer.fit(stop)
    assert stopped.value.saved
    assert (tmp_path / "run" / "checkpoints" / "3" / "manifest.json").is_file()
    assert signal.getsignal(number) is before
    assert [r["update"] for r in told(trainer, "train")] == [1, 2, 3]


def test_a_signal_at_the_last_update_leaves_the_evaluation_to_the_resumed_run(make, tmp_path):
    trainer = make("updates=3")
    step = trainer.optimizer.step
    trainer.optimizer.step = lambda: (step(), signal.raise_signal(signal.SIGTERM) if trainer.progress.updates == 2 else None)
    with pytest.raises(Interrupted, match="before the evaluation of update 3") as stopped, StopFlag() as stop:
        trainer.fit(stop)
    assert stopped.value.saved
    assert not told(trainer, "evaluate")
    trainer.restore(*checkpoint_io.load(tmp_path / "run" / "checkpoints" / "3"))
    trainer.fit()
    assert [r["update"] for r in told(trainer, "evaluate")] == [3]
    assert not trainer.progress.evaluation_due


def test_two_runs_of_one_process_do_not_know_of_each_other(train):
    first, second = train(), train()
    assert first.metrics == second.metrics
    assert first.config_hash == second.config_hash
    assert first.run_dir != second.run_dir


def test_a_run_of_a_process_that_is_old_already_counts_its_own_time(train, monkeypatch):
    monkeypatch.setattr(process, "started", process.started - 10_000)
    result = train()
    assert 0 < result.time_to_first_step_s < result.wall_s < 5_000


def test_a_loader_that_ends_early_ends_the_run(train, monkeypatch):
    """Else a run that saw a part of its data would count as completed."""
    from drivetrain.loader import Loader

    whole = Loader.batches
    monkeypatch.setattr(Loader, "batches", lambda *args, **kwargs: islice(whole(*args, **kwargs), 1))
    assert "stream ended after 1 of 2 updates" in train(ends="failed").error


def test_a_loss_that_is_not_finite_is_null_where_the_update_was_skipped_and_ends_the_run_elsewhere(make):
    trainer = make()
    written = trainer.log.writers = [Written()]
    trainer.log.loss_sum.fill_(math.inf)
    trainer.progress.skipped = 1
    trainer.log.train(0.1)
    trainer.log.loss_sum.fill_(math.inf)
    trainer.progress.updates = 1
    with pytest.raises(Diverged):
        trainer.log.train(0.1)
    assert [record["loss"] for record in written[0]] == [None]


class Written(list):
    def log(self, record):
        self.append(record)


@pytest.mark.parametrize("log_every", [1, 3])
def test_a_run_whose_loss_has_exploded_says_so(train, log_every):
    words = ["optimizer.lr=2", "updates=8", f"log_every={log_every}", "data.validation=0.2"]
    run = train(*words)
    assert run.judged("final")["loss"] > 1e6
    assert run.remarks[0].startswith(f"the loss has exploded: loss is {run.judged('final')['loss']:.4g} at the end")
    assert "the loss of the first update was 1.391" in run.remarks[0]
    assert run.remarks[0] in (run.run_dir / "log.txt").read_text()
    assert Result.read(run.run_dir).remarks == run.remarks
    half = train(*words[:1], "updates=4", *words[2:])
    assert drivetrain.train([f"resume={half.run_dir}", "updates=8"]).remarks == run.remarks
    assert not any("exploded" in line for line in train(*words[1:]).remarks)
