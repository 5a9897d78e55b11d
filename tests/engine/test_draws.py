"""Whole runs of code that draws random numbers: what differs between two of them is what was asked for."""

import itertools
from pathlib import Path

import pytest
import torch

import drivetrain
from drivetrain.core.errors import UserError
from drivetrain.core.order import AGAIN, index_of
from drivetrain.core.step.microbatch import Request
from drivetrain.inference.evaluation import evaluate
from drivetrain.inference.finished import Choice
from tests.support import drawing_sets
from tests.support.command import tensors

WORDS = [
    "data=own", "data.target=drawing_sets.All", "data.validation=null", "model=own", "model.target=drawing_sets.Net",
    "trust=[drawing_sets]", "runtime.device=cpu", "runtime.threads=1", "epochs=2", "updates=null",
]  # fmt: skip


@pytest.fixture(autouse=True)
def _importable(monkeypatch):
    monkeypatch.syspath_prepend(Path(drawing_sets.__file__).parent)


@pytest.fixture
def weights(train):
    """The weights that a run of these words ends with."""

    def ended(*words: str) -> torch.Tensor:
        return torch.cat([w.flatten() for w in tensors(train(*WORDS, *words)).values()])

    return ended


def test_ranks_workers_and_micro_batches_draw_as_one_process_does(weights):
    alone = weights()
    assert torch.equal(weights("loader=workers", "loader.num_workers=3"), alone)
    assert torch.equal(weights("loader=workers", "loader.persistent_workers=false"), alone)
    ranks = ("parallel=ddp", "parallel.nproc=2", "loader=workers")
    assert torch.allclose(weights(*ranks), alone, atol=1e-6)
    assert torch.allclose(weights("batch=accumulate", "batch.accumulation_steps=3"), alone, atol=1e-6)
    assert not torch.allclose(weights("runtime.seed=1"), alone, atol=1e-3)


def test_an_update_is_the_mean_over_the_rows_that_came(weights, caplog):
    """However it is split: a function that makes the batches leaves samples out, and no two parts lack as many."""
    words = (
        "data.target=drawing_sets.Quiet",
        "metrics=[]",
        "data.collate=drawing_sets.some",
        "data.targets=values",
        "data.classes=1",
        "loss=mse",
    )
    alone = weights(*words)
    assert any("data.collate made" in line and "the mean over the actual rows" in line for line in caplog.messages)
    assert torch.allclose(weights(*words, "batch=accumulate", "batch.accumulation_steps=3"), alone, atol=1e-6)
    assert torch.allclose(weights(*words, "parallel=ddp", "parallel.nproc=2"), alone, atol=1e-6)


NOISY = ("data.target=drawing_sets.Nothing", "model.kwargs={noise: 0.3}", "data.validation=0.2")


def test_the_number_of_evaluations_does_not_change_the_training(weights):
    often = weights(*NOISY, "ema=ema")
    assert torch.equal(weights(*NOISY, "ema=ema", "evaluate_every=2"), often)
    assert not torch.equal(weights(*NOISY, "ema=ema", "model.kwargs={noise: 0.2}"), often)


def test_evaluations_draw_the_same_for_both_kinds_of_weights_and_for_evaluate(train):
    """With a decay of 0 the average is the weights, so that only the draws could differ."""
    result = train(*WORDS, *NOISY, "ema=ema", "ema.decay=0", "ema.warmup=false")
    final = result.tested("final")
    assert final["ema_loss"] == final["loss"]
    assert final["loss"] != result.judged("final")["loss"]
    assert evaluate(result.run_dir, ["trust=[drawing_sets]"]).metrics == final
    split = Choice(split="validation")
    assert evaluate(result.run_dir, ["trust=[drawing_sets]"], choice=split).metrics == result.judged("final")


def test_a_forward_may_take_gradients_in_an_evaluation(train):
    result = train(*WORDS, "data.target=drawing_sets.Nothing", "model.target=drawing_sets.Forces")
    found = drivetrain.load(result.run_dir, ["trust=[drawing_sets]"]).predict(torch.rand(2, 3))
    assert found.probabilities.shape == (2, 4)


@pytest.mark.parametrize("order", ["sequential", "balanced", "weighted", "repeated", "own"])
def test_an_order_is_that_of_one_process_for_ranks_and_workers(weights, order):
    words = ("data.target=drawing_sets.Ordered", f"data.order={order}", "epochs=1")
    alone = weights(*words)
    assert torch.equal(weights(*words, "loader=workers"), alone)
    assert torch.allclose(weights(*words, "batch=accumulate", "batch.accumulation_steps=3"), alone, atol=1e-6)
    assert not torch.allclose(weights(*words, "data.order=shuffled"), alone, atol=1e-5)


@pytest.mark.parametrize("order", ["balanced", "2"])
def test_an_order_is_for_all_data_and_draws_from_the_training_set(make, order):
    trainer = make("data=digits", f"data.order={order}", "batch.global_batch=64")
    numbers = torch.cat([request.indices for request in itertools.islice(trainer.requests(), 17)])
    labels = trainer.train_data.source.fetch(index_of(numbers))[1]
    shares = labels.bincount(minlength=10) / len(labels)
    assert trainer.batch.order.length == len(trainer.train_data.source)
    assert shares.min() > 0.07
    assert len(numbers.unique()) == len(numbers)
    assert (len(index_of(numbers).unique()) == len(numbers) // 2) is (order == "2")


def test_an_order_of_its_own_may_have_another_length(train):
    with pytest.raises(UserError, match=r"as often: set data.validation to a set of its own, or null"):  # before the first update
        train(*WORDS, "data.target=drawing_sets.Ordered", "data.order=own", "data.validation=0.3")
    result = train(*WORDS, "data.target=drawing_sets.Ordered", "data.order=own", "data.drop_last=false")
    assert result.updates == 2 * 6  # of 64 samples in updates of 12
    assert result.epochs == 2


def test_a_sample_that_comes_again_draws_anew():
    from drivetrain.data.collation import Stack
    from drivetrain.data.own import OwnSource
    from drivetrain.loader import Loader, Pipeline

    source = OwnSource(drawing_sets.All(), "data.target", Stack())
    request = Request(0, torch.tensor([5, 5 + AGAIN]), 1.0)
    ((x, y, _),) = Loader().batches(Pipeline(source, (), None, 0), [request], torch.device("cpu"))
    assert y.tolist() == [1, 1]
    assert not torch.equal(x[0], x[1])


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("balanced", "the class of each sample, .* a list `targets`"),
        ("weighted", "a list `weights`"),
        ("own", r"a method `order\(seed, epoch\)`"),
    ],
)
def test_an_order_wants_what_it_goes_by(train, word, says):
    with pytest.raises(UserError, match=says):
        train(*WORDS, f"data.order={word}")


def test_a_run_in_threads_is_refused_with_what_to_set(train):
    with pytest.raises(UserError, match=r"the samples draw from numpy, random, torch, .*: set loader=workers"):
        train(*WORDS, "loader=threads")
