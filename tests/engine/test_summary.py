"""The line of facts at a run's start, and the advice on small data."""

import re
from types import SimpleNamespace

import pytest
import torch

from drivetrain.batch import Batch
from drivetrain.core import order as orders
from drivetrain.core.errors import UserError
from drivetrain.engine import summary
from drivetrain.launch import launcher
from drivetrain.measure.benchmark import variants


def small(samples: int, size: int, epochs: int = 10, drop_last: bool = True, ranks: int = 1) -> SimpleNamespace:
    batch = Batch(global_batch=size).over(orders.shuffled(samples))
    return SimpleNamespace(
        batch=batch, drop_last=drop_last, progress=SimpleNamespace(epoch=0),
        max_updates=epochs * batch.updates(samples, 0, drop_last),
        parallel=SimpleNamespace(data_world=SimpleNamespace(size=ranks)),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("trainer", "said"),
    [
        (small(1150, 128), None),  # the default recipe
        (small(200, 128), "an epoch of 200 samples has 1 update of 128, and leaves out 36 % of them (data.drop_last): "
         "set batch.global_batch=16 for more updates"),
        (small(200, 128, drop_last=False), "an epoch of 200 samples has 2 updates of 128: set batch.global_batch=16"),
        (small(200, 128, ranks=3), "set batch.global_batch=18"),
        (small(200, 128, epochs=1), None),  # one update was wanted
        (small(40, 8), None),  # no smaller batch would do
        (small(31, 16, epochs=5), "set batch.global_batch=8"),
        (small(120, 13), None),
        (small(15, 8), "leaves out 47 % of its 15 samples, which fill no batch of 8: set data.drop_last=false"),
    ],
)  # fmt: skip
def test_the_advice_on_small_data(trainer, said):
    told = " ".join(summary.advice(trainer))
    assert (said or "") in told
    assert bool(told) == bool(said)


def test_the_smaller_batch_gives_ten_updates_where_it_can():
    assert [summary.smaller_batch(n) for n in (5, 79, 160, 1150, 50_000)] == [8, 8, 16, 64, 4096]
    assert all(n // summary.smaller_batch(n) >= 10 for n in range(80, 5000))


def test_a_batch_that_is_too_large_names_one_that_is_not(make):
    with pytest.raises(UserError, match=r"set batch\.global_batch=8, or data\.drop_last=false"):
        make("data.samples=53", "batch.global_batch=64", "updates=null")


def test_the_line_of_facts(train, caplog):
    caplog.set_level("INFO", "drivetrain")
    train("data=digits", "data.classes=[3,1,4]", "model=mlp", "model.freeze=['*.bias']", "batch.global_batch=32", "updates=1")
    (line,) = (r.getMessage() for r in caplog.records if r.name == "drivetrain.launch.worker" and "parameters" in r.getMessage())
    assert re.match(r"samples: \d+ training, \d+ validation \(0\.2 of training\), \d+ test; 3 classes: 3, 1, 4; ", line)
    assert re.search(r"; [\d,]+ parameters, [\d,]+ trained; cpu \(\d+ threads?\); \d+ updates an epoch, 1 in all$", line)


@pytest.mark.parametrize(
    ("tokens", "says"), [(True, "inputs: sequences of 2 to 9 tokens"), (False, "inputs: sequences of 2 to 9")]
)
def test_sequences_are_told_with_their_lengths(tokens, says):
    source, run = SimpleNamespace(lengths=torch.tensor([4, 2, 9])), SimpleNamespace(data=SimpleNamespace(tokens=tokens))
    data, pipeline = SimpleNamespace(inputs=""), SimpleNamespace(source=source)
    assert summary._inputs(SimpleNamespace(data=data, train_data=pipeline, run=run)) == says


def test_many_classes_are_not_all_named():
    data = SimpleNamespace(names=[*"abcdefg"], classes=7)
    run = SimpleNamespace(target_kind="labels")
    assert summary._outputs(SimpleNamespace(data=data, run=run)) == "7 labels: a, b, c, d, e, …"
    data.names, data.classes, run.target_kind = None, 1, "values"
    assert summary._outputs(SimpleNamespace(data=data, run=run)) == "1 value"


def test_the_rows_of_a_resumed_run():
    trainer = small(200, 20)
    trainer.progress = SimpleNamespace(epoch=1, updates=10)
    assert summary._updates(trainer) == "10 updates an epoch, 100 in all, 10 of them done"
    trainer.model = torch.nn.Linear(3, 2)
    assert summary._parameters(trainer) == "8 parameters"


def test_seeds_after_the_first_do_not_repeat_the_advice(tiny, monkeypatch, caplog):
    """Runs of several seeds, as of `recipe verify`: what the user should know of them is said once."""
    spec = variants.compose("it", tiny("data.samples=64", "batch.global_batch=48", "epochs=3", "updates=3"), ())

    def run_here(job, folder, signals, quiet):
        folder.mkdir(parents=True, exist_ok=True)
        job.job.notices.append("a notice of composing")
        return launcher.launch(job.job, folder, quiet)

    monkeypatch.setattr(variants, "run_one", run_here)
    with variants.trainings("compare", spec.job) as train:
        for number in range(2):
            caplog.clear()
            train(spec, number)
            said = " ".join(record.getMessage() for record in caplog.records)
            assert ("set batch.global_batch=8 for more updates" in said, "a notice of composing" in said) == (not number,) * 2
