"""A metric that ranks models and has no finite value: once, the run goes on; for long, it has diverged."""

from pathlib import Path

import pytest

import drivetrain
from drivetrain.core.errors import Diverged
from drivetrain.run import records

METRIC = """
values = []  # of the next evaluations

def said(output, target):
    return values.pop(0) if len(output) > 2 else 0.0  # a run tries it on two samples
"""
NAN = float("nan")
RUN = [
    "metrics=[own]", "metrics.own.target=their_metric.said", "metrics.own.better=max", "trust=[their_metric]", "select=said",
    "epochs=5", "updates=null", "data.validation=0.1",
]  # fmt: skip


@pytest.fixture
def values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """What the metric gives in the next evaluations: a list to fill."""
    (tmp_path / "their_metric.py").write_text(METRIC)
    monkeypatch.syspath_prepend(str(tmp_path))
    import their_metric  # type: ignore[import-not-found]

    their_metric.values.clear()
    return their_metric.values


@pytest.mark.parametrize(
    "more", [[], ["stop=early", "stop.patience=4"], ["scheduler=plateau", "scheduler.metric=said", "scheduler.mode=max"]]
)
def test_a_metric_without_a_value_once_ends_no_run(train, values, more):
    values += [NAN, 0.5, NAN, 0.4, 0.3, 0.2, 0.1]
    run = train(*RUN, *more, "saving=best", "saving.keep=2")
    assert (run.status, run.error) == ("completed", None)
    best = run.judged("best")
    assert best["said"] == 0.5
    assert best["update"] * 5 == run.updates * 2
    said = (run.run_dir / "log.txt").read_text()
    assert said.count("said of the trained weights on the validation set is nan") == 2
    assert "models are ranked by it, so that this evaluation cannot be the best" in said
    evaluated = [
        r
        for r in records.read(run.run_dir / "metrics.jsonl").records
        if r["event"] == "evaluate" and r["set"] == "validation" and "weights" not in r
    ]
    assert [r.get("said") for r in evaluated] == [None, 0.5, None, 0.4, 0.3]


def test_a_metric_that_stays_without_a_value_has_diverged(train, values):
    values += [0.5, NAN, NAN, NAN, NAN]
    run = train(*RUN, "stop.nan_patience=2")
    assert run.status == "diverged"
    assert run.error.startswith(
        "said, which ranks the run's models, had no finite value in the last 2 evaluations (stop.nan_patience=2)"
    )
    assert run.judged("best")["said"] == 0.5
    values[:] = [NAN, NAN, NAN, NAN, NAN, NAN]
    assert train(*RUN).error.startswith("said, which ranks the run's models, had no finite value in the last 3 evaluations")


def test_a_resumed_run_counts_on(train, values):
    values += [NAN, NAN]
    half = train(*[word for word in RUN if word != "epochs=5"], "epochs=1")
    values[:] = [NAN, NAN, NAN]
    run = drivetrain.train([f"resume={half.run_dir}", "resume_changed=true", "epochs=5", "stop.nan_patience=2"])
    assert run.status == "diverged"
    assert run.epochs == 2


def test_a_loss_that_is_not_finite_says_of_which_weights_and_set(make):
    trainer = make("ema=ema", "data.validation=0.1")
    trainer.ema.started = True
    for mean in trainer.ema._mean:
        mean.fill_(NAN)
    with pytest.raises(
        Diverged,
        match="the loss of the averaged weights on the validation set is not finite",
    ):
        trainer.evaluator.evaluate()
