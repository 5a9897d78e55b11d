"""The run's target: what is none, when it was reached, also by a resumed run and on ranks, and the end of the run there."""

import json

import pytest

import drivetrain
from drivetrain.core.target import Reach
from drivetrain.launch import launcher
from drivetrain.measure.benchmark import quality
from drivetrain.run.result import Result

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


def test_the_result_says_when_it_was_reached(train, accuracies):
    accuracies([0.1, 0.7, 0.6, 0.9, 0.5, 0.8])
    result = train(*RUN, "target=accuracy>=0.65")
    assert (result.target["update"], result.target["samples"], result.updates) == (8, 96, 24)
    assert 0 < result.target["seconds"] <= result.wall_s
    assert result.time_to_target.startswith("accuracy>=0.65 after 8 updates, 96 samples, ")
    assert "accuracy&gt;=0.65 after" in result._repr_html_()
    assert Result.read(result.run_dir).target == result.target


def test_a_target_that_is_not_reached_is_told(train, accuracies):
    accuracies([0.1, 0.2, 0.3, 0.4, 0.5, 0.6])
    result = train(*RUN, "target=accuracy>=0.65", "stop.at_target=true")
    assert (result.target["update"], result.updates, result.time_to_target) == (None, 24, "accuracy>=0.65 was not reached")


@pytest.mark.parametrize("stop", ["none", "early"])
def test_the_run_ends_there_where_asked(train, accuracies, stop):
    accuracies([0.1, 0.7, 0.9, 0.9, 0.9, 0.9])
    result = train(*RUN, "target=accuracy>=0.65", "stop.at_target=true", f"stop={stop}")
    assert (result.status, result.updates, result.stopped) == ("completed", 8, "target accuracy>=0.65 reached")


def test_a_target_alone_changes_nothing_in_training(train):
    plain, noted = train(*RUN), train(*RUN, "target=accuracy>=0.01")
    assert plain.metrics == noted.metrics
    assert noted.target["update"] == 4
    assert plain.target is None


def test_a_resumed_run_keeps_what_was_reached(train, accuracies):
    accuracies([0.1, 0.7, 0.6, 0.9, 0.5, 0.8, 0.9, 0.9])
    first = train(*RUN, "target=accuracy>=0.65")
    longer = drivetrain.train([f"resume={first.run_dir}", "epochs=8"])
    assert (longer.updates, longer.target) == (32, first.target)
    other = drivetrain.train([f"resume={first.run_dir}", "epochs=8", "resume_changed=true", "target=accuracy>=0.95"])
    assert other.target["update"] is None


def test_verdicts_take_the_target_of_the_run_or_their_own(tiny):
    run = launcher.prepare(tiny("target=accuracy>=0.5")).run
    assert str(quality.reach_of(quality.Plan(), run)) == "accuracy>=0.5"
    assert str(quality.reach_of(quality.Plan(target=0.7), run)) == "accuracy>=0.7"
    assert str(quality.reach_of(quality.Plan(target="loss<=0.1"), run)) == "loss<=0.1"
    assert quality.reach_of(quality.Plan(), launcher.prepare(tiny()).run) is None


def test_a_file_that_no_run_wrote_is_no_result(train, tmp_path):
    run_dir = train("target=accuracy>=0.01").run_dir
    path = run_dir / "result.json"
    good = json.loads(path.read_text())
    for spoilt in ({"reach": 1}, {"reach": "a>=1", "update": 3, "samples": "many", "seconds": 1.0}, {}):
        path.write_text(json.dumps({**good, "target": spoilt}))
        assert Result.read(run_dir) is None
