"""Early stopping: when it ends a run, also after a resume, and what it says."""

import json
import signal

import pytest

import drivetrain
from drivetrain.core.selection import Selection
from drivetrain.engine.trainer import Trainer
from drivetrain.launch import launcher
from drivetrain.stop import Early

EPOCHS = ["updates=null", "epochs=9"]  # 4 updates each


def after(values, better=max, **knobs):
    """The number of evaluations after which it ends a run that evaluates to these values; None: it does not."""
    stop = Early(**knobs)
    stop._name, stop._better = Selection("accuracy", better)
    stop._selected = stop._name
    for n, value in enumerate(values, 1):
        stop.evaluated({"accuracy": value})
        if stop.reason is not None:
            return n
    return None


def test_it_ends_after_so_many_evaluations_in_a_row_without_improvement():
    assert after([0.1, 0.2, 0.2, 0.1, 0.3, 0.3, 0.2, 0.3, 0.9], patience=3) == 8
    assert after([0.5, 0.4], patience=1) == 2
    assert after([3.0, 2.0, 2.5, 2.1, 1.9], min, patience=2) == 4
    assert after([1.0, 2.0, 3.0], patience=1) is None


def test_an_improvement_that_is_too_small_is_none():
    assert after([0.1, 0.15, 0.19, 0.9], patience=2, min_delta=0.1) == 3
    assert after([0.1, 0.15, 0.21, 0.9], patience=2, min_delta=0.1) is None  # against the best, not against the last
    assert after([1.0, 0.95, 0.85, 0.75], min, patience=2, min_delta=0.1) is None


RISES_AND_FALLS = [0.1, 0.2, 0.5, 0.4, 0.5, 0.3, 0.6, 0.7, 0.8]


def test_a_run_ends_early_completed_and_says_why(train, accuracies):
    accuracies(RISES_AND_FALLS)
    run = train(*EPOCHS, "stop=early", "stop.patience=3", "scheduler=plateau", "optimizer=adamw")
    assert (run.status, run.epochs, run.updates) == ("completed", 6, 24)
    assert run.stopped == "stop=early: accuracy has not improved in the last 3 evaluations (best: 0.5)"
    assert json.loads((run.run_dir / "result.json").read_text())["stopped"] == run.stopped
    assert run.stopped in (run.run_dir / "log.txt").read_text()
    assert run.judged("best")["update"] == 12
    assert sorted(int(p.name) for p in (run.run_dir / "checkpoints").iterdir())[-1] == 24
    # It stays finished, until it is given more patience.
    again = drivetrain.train([f"resume={run.run_dir}"])
    assert (again.status, again.updates, again.stopped) == ("completed", 24, run.stopped)
    longer = drivetrain.train([f"resume={run.run_dir}", "resume_changed=true", "stop.patience=5"])
    assert (longer.status, longer.updates, longer.stopped) == ("completed", 36, None)


@pytest.mark.parametrize("step", [14, 20])
def test_a_resumed_run_ends_where_the_whole_one_does(train, accuracies, monkeypatch, step):
    accuracies(RISES_AND_FALLS)
    after_update = Trainer._after_update

    def interrupted(self, epoch_end):
        if self.progress.steps == step:
            self._stop.raised = signal.SIGURG  # which ends no program
        return after_update(self, epoch_end)

    monkeypatch.setattr(Trainer, "_after_update", interrupted)
    run = train(*EPOCHS, "stop=early", "stop.metric=loss")
    assert (run.status, run.updates) == ("interrupted", step)
    monkeypatch.setattr(Trainer, "_after_update", after_update)
    run = drivetrain.train([f"resume={run.run_dir}"])
    assert (run.status, run.updates) == ("completed", 24)
    assert run.stopped == "stop=early: loss has not improved in the last 3 evaluations (best: 0.5)"


def test_it_may_be_chosen_for_a_resume(train):
    run = train("updates=4", "epochs=9")
    assert drivetrain.train([f"resume={run.run_dir}", "resume_changed=true", "stop=early", "updates=8"]).updates == 8


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
