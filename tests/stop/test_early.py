"""Early stopping: when it ends a run, also after a resume, and what it says."""

import json

import pytest

import drivetrain
from drivetrain.core.options.selection import Reach, Selection
from drivetrain.engine.trainer import Trainer
from drivetrain.launch import launcher
from drivetrain.run import records
from drivetrain.run.result import Result
from drivetrain.stop.base import Early
from tests.support.to_end import continued


@pytest.fixture
def accuracies(monkeypatch):
    """`accuracies(values)`: what the evaluations of the next runs give, by their epoch."""

    evaluate = Trainer.record_evaluation

    def give(values):
        def evaluated(trainer, stops):
            value = values[round(trainer.progress.updates / 4) - 1]
            trainer.evaluator.evaluate = lambda stops: {"loss": 1.0 - value, "accuracy": value}
            evaluate(trainer, stops)

        monkeypatch.setattr(Trainer, "record_evaluation", evaluated)

    return give


EPOCHS = ["updates=null", "epochs=9"]  # 4 updates each


@pytest.mark.parametrize(
    ("values", "better", "settings", "ends"),
    [
        ([0.1, 0.2, 0.2, 0.1, 0.3, 0.3, 0.2, 0.3, 0.9], max, {"patience": 3}, 8),
        ([0.5, 0.4], max, {"patience": 1}, 2),
        ([3.0, 2.0, 2.5, 2.1, 1.9], min, {"patience": 2}, 4),
        ([1.0, 2.0, 3.0], max, {"patience": 1}, None),
        ([0.1, 0.15, 0.19, 0.9], max, {"patience": 2, "min_delta": 0.1}, 3),
        ([0.1, 0.15, 0.21, 0.9], max, {"patience": 2, "min_delta": 0.1}, None),  # against the best, not against the last
        ([1.0, 0.95, 0.85, 0.75], min, {"patience": 2, "min_delta": 0.1}, None),
    ],
)
def test_it_ends_after_so_many_evaluations_in_a_row_without_improvement(values, better, settings, ends):
    stop = Early(**settings)
    stop._name, stop._better = Selection("accuracy", better)
    stop._selected = stop._name
    reasons = [(stop.evaluated({"accuracy": value}), stop.reason)[1] for value in values]
    assert next((n for n, reason in enumerate(reasons, 1) if reason is not None), None) == ends


RISES_AND_FALLS = [0.1, 0.2, 0.5, 0.4, 0.5, 0.3, 0.6, 0.7, 0.8]


def test_a_run_ends_early_completed_and_says_why(train, accuracies):
    accuracies(RISES_AND_FALLS)
    run = train(*EPOCHS, "stop=early", "stop.patience=3", "scheduler=plateau", "optimizer=adamw", updates=24)
    assert run.epochs == 6
    assert run.stopped == "stop=early: accuracy has not improved in the last 3 evaluations (best: 0.5)"
    assert json.loads((run.run_dir / "result.json").read_text())["stopped"] == run.stopped
    assert run.stopped in (run.run_dir / "log.txt").read_text()
    assert run.judged("best")["update"] == 12
    assert sorted(int(p.name) for p in (run.run_dir / "checkpoints").iterdir())[-1] == 24
    # It stays finished, until it is given more patience.
    assert continued(run.run_dir, updates=24).stopped == run.stopped
    assert continued(run.run_dir, "resume_changed=true", "stop.patience=5", updates=36).stopped is None


@pytest.mark.parametrize("step", [14, 20])
def test_a_resumed_run_ends_where_the_whole_one_does(train, accuracies, stop_at, step):
    accuracies(RISES_AND_FALLS)
    stop_at(step)
    run = train(*EPOCHS, "stop=early", "stop.metric=loss", updates=step, ends="interrupted")
    stop_at(None)
    run = continued(run.run_dir, updates=24)
    assert run.stopped == "stop=early: loss has not improved in the last 3 evaluations (best: 0.5)"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["stop.metric=acuracy"], "stop.metric=acuracy is not evaluated: did you mean 'accuracy'?"),
        (
            ["evaluate_every=15"],
            "stop=early looks at evaluations, and evaluate_every=15 leaves only that at the end of epochs=15",
        ),
        (["stop.patience=0"], "stop.patience=0: must be ≥ 1"),
        (["stop.min_delta=-1"], "stop.min_delta=-1: must be ≥ 0"),
    ],
)
def test_what_cannot_stop_a_run_is_refused(problems, words, says):
    assert any(problem.startswith(says) for problem in problems("stop=early", *words))


def test_a_schedule_that_is_cut_and_a_patience_that_cannot_end_are_told():
    told = "\n".join(launcher.prepare(["stop=early", "epochs=4"]).notices)
    assert "before scheduler=onecycle has brought the learning rate to its end" in told
    assert "stop.patience=3 and 4 evaluations in all" in told
    for scheduler in ("constant", "plateau"):
        assert launcher.prepare(["stop=early", f"scheduler={scheduler}"]).notices == []


# --- the run's target: what is none, when it was reached, also by a resumed run and on ranks, and the end of the run there ---

RUN = ["updates=null", "epochs=6"]  # 4 updates each


def test_a_target_is_read_and_compared():
    assert Reach.parse("accuracy>=0.98") == ("accuracy", True, 0.98)
    assert Reach.parse("loss<=1e-2").reached(0.01)
    assert not Reach.parse("accuracy>=0.98").reached(0.97)
    assert not Reach.parse("accuracy>=0.98").reached(float("nan"))
    assert [Reach.parse(text) for text in ("0.98", "accuracy=0.98", "accuracy>0.9", "accuracy>=one", "a>=1e999")] == [None] * 5


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["target=good"], "target=good: give a metric and a value"),
        (["target=accuracy>0.9"], "target=accuracy>0.9: give a metric and a value"),
        (["target=accuracy"], "in quotes, as a shell takes < and > for redirections"),
        (["target=acuracy>=0.9"], "did you mean 'accuracy'"),
        (["target=accuracy<=0.9"], "higher accuracy is better: set 'target=accuracy>=0.9'"),
        (["target=0.9"], "target=0.9: must be a text"),
        (["stop.at_target=true"], "target is null: set one"),
    ],
)
def test_what_is_no_target_is_refused(problems, words, said):
    assert any(said in problem for problem in problems(*words)), problems(*words)


END_THERE = ["stop.at_target=true"]


@pytest.mark.parametrize(
    ("values", "words", "reached", "updates"),
    [
        ([0.1, 0.7, 0.6, 0.9, 0.5, 0.8], [], 8, 24),
        ([0.1, 0.2, 0.3, 0.4, 0.5, 0.6], END_THERE, None, 24),
        *(([0.1, 0.7, 0.9, 0.9, 0.9, 0.9], [*END_THERE, f"stop={stop}"], 8, 8) for stop in ("none", "early")),
    ],
)
def test_the_result_says_when_it_was_reached_and_the_run_ends_there_where_asked(
    train, accuracies, values, words, reached, updates
):
    accuracies(values)
    result = train(*RUN, "target=accuracy>=0.65", *words, updates=updates)
    assert (result.target["update"], result.target["samples"]) == (reached, reached and 12 * reached)
    assert reached is None or 0 < result.target["seconds"] <= result.wall_s
    says = f"after {reached} updates, {12 * reached} samples, " if reached else "was not reached"
    assert result.time_to_target.startswith(f"accuracy>=0.65 {says}")
    assert f"accuracy&gt;=0.65 {says}" in result._repr_html_()
    assert result.stopped == ("target accuracy>=0.65 reached" if updates == 8 else None)
    assert Result.read(result.run_dir).target == result.target


def test_a_target_alone_changes_nothing_in_training(train):
    plain, noted = train(*RUN), train(*RUN, "target=accuracy>=0.01")
    assert plain.metrics == noted.metrics
    assert noted.target["update"] == 4
    assert plain.target is None
    continued(plain.run_dir, "resume_changed=true", "stop=early", "stop.patience=9", "epochs=7", updates=28)
    # stop=early may be chosen for a resume


def test_a_resumed_run_keeps_what_was_reached(train, accuracies):
    accuracies([0.1, 0.7, 0.6, 0.9, 0.5, 0.8, 0.9, 0.9])
    first = train(*RUN, "target=accuracy>=0.65")
    longer = drivetrain.train([f"resume={first.run_dir}", "epochs=8"])
    assert (longer.updates, longer.target) == (32, first.target)
    other = drivetrain.train([f"resume={first.run_dir}", "epochs=8", "resume_changed=true", "target=accuracy>=0.95"])
    assert other.target["update"] is None


# --- a metric that ranks models and has no finite value: once, the run goes on; for long, it has diverged ---


METRIC = """
values = []  # of the next evaluations

def said(output, target):
    return values.pop(0) if len(output) != 12 else 0.0  # a run tries it on a micro-batch
"""
NAN = float("nan")
RUN_UNDEFINED = [
    "metrics=[own]", "metrics.own.target=their_metric.said", "metrics.own.better=max", "trust=[their_metric]", "select=said",
    "epochs=5", "updates=null", "data.validation=0.1",
]  # fmt: skip


@pytest.fixture
def values(own_module):
    """The figures of the next evaluations: a list to fill."""
    own_module("their_metric", METRIC)
    import their_metric  # type: ignore[import-not-found]

    their_metric.values.clear()
    return their_metric.values


def test_a_metric_without_a_value_once_ends_no_run(train, values):
    values += [NAN, 0.5, NAN, 0.4, 0.3, 0.2, 0.1]
    follows = ["stop=early", "stop.patience=4", "scheduler=plateau", "scheduler.metric=said", "scheduler.mode=max"]
    run = train(*RUN_UNDEFINED, *follows, "saving=best", "saving.keep=2")
    best = run.judged("best")
    assert best["said"] == 0.5
    assert best["update"] * 5 == run.updates * 2
    said = (run.run_dir / "log.txt").read_text()
    assert said.count("said of the trained weights on the validation set is nan") == 2
    assert "models are ranked by it, so that this evaluation cannot be the best" in said
    written = (r for r in records.read(run.run_dir / "metrics.jsonl").records if r.get("set") == "validation")
    assert [r.get("said") for r in written if "weights" not in r] == [None, 0.5, None, 0.4, 0.3]


def test_a_metric_that_stays_without_a_value_has_diverged(train, values):
    values += [0.5, NAN, NAN, NAN, NAN]
    run = train(*RUN_UNDEFINED, "stop.nan_patience=2", ends="diverged")
    assert run.error.startswith(
        "said, which ranks the run's models, had no finite value in the last 2 evaluations (stop.nan_patience=2)"
    )
    assert run.judged("best")["said"] == 0.5
    values[:] = [NAN, NAN, NAN, NAN, NAN, NAN]
    assert train(*RUN_UNDEFINED, ends="diverged").error.startswith(
        "said, which ranks the run's models, had no finite value in the last 3 evaluations"
    )


def test_a_resumed_run_counts_on(train, values):
    values += [NAN, NAN]
    half = train(*[word for word in RUN_UNDEFINED if word != "epochs=5"], "epochs=1")
    values[:] = [NAN, NAN, NAN]
    run = continued(half.run_dir, "resume_changed=true", "epochs=5", "stop.nan_patience=2", ends="diverged")
    assert run.epochs == 2
