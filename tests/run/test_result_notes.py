"""What tables say of a run's best evaluation beside its last one."""

import shutil

import pytest

import drivetrain
from drivetrain.run.result import Result
from drivetrain.saving import manifest
from drivetrain.ui import terminal


def result(best: float, at: int, **final: float) -> Result:
    validation = {"final": {"loss": 0.5, "accuracy": 0.8, **final}, "best": {"loss": 0.6, "accuracy": best, "update": at}}
    test = {"final": {"accuracy": 0.7}, "best": {"accuracy": 0.75, "update": at}}
    selection = {"metric": "accuracy", "better": "max"}
    return Result("completed", metrics={"validation": validation, "test": test}, selection=selection, updates=80, epochs=10)


def test_the_best_is_named_with_its_epoch_and_what_does_not_select_with_its_value_there():
    run = result(0.9, at=48)
    assert run.note_on_best("validation", "accuracy") == "(best 0.9 after epoch 6)"
    assert run.note_on_best("validation", "loss") == "(0.6 at the best epoch)"
    assert run.note_on_best("test", "accuracy") == "(0.75 at the best epoch)"
    assert run.note_on_best("test", "loss") == ""
    last = result(0.8, at=80)
    assert [last.note_on_best(s, n) for s in ("validation", "test") for n in ("accuracy", "loss")] == ["(the best)", "", "", ""]
    assert result(0.9, at=47).when({"update": 47}) == " at update 47"


def test_a_sweep_shows_by_what_it_ranks_and_marks_the_winner(capsys):
    terminal.show_jobs([(0, "a", result(0.85, at=80)), (1, "b", result(0.9, at=48))], "accuracy", 1)
    header, first, second, *_ = (line for line in capsys.readouterr().out.splitlines() if line.strip())
    assert header.split() == [
        "job", "overrides", "status", "validation", "loss", "validation", "accuracy", "best", "validation", "accuracy",
        "samples/s", "time",
    ]  # fmt: skip
    assert "0.8500 after epoch 10" in first
    assert second.split()[:2] == ["1", "*"]
    assert "0.9000 after epoch 6" in second


def test_a_rate_that_jumps_is_told(train, caplog):
    """Where the schedule is that of a longer run now."""
    first = train("epochs=2", "updates=null", "scheduler=cosine")
    caplog.clear()
    drivetrain.train([f"resume={first.run_dir}", "epochs=6"])
    (said,) = [message for message in caplog.messages if "the learning rate goes up" in message]
    assert "the schedule is now that of" in said
    assert f"model.weights={first.run_dir}" in said
    assert float(said.split(" to ")[1].split(":")[0]) > 1e-3 * 0.5


@pytest.mark.parametrize("words", [("scheduler=cosine",), ("scheduler=cyclic", "scheduler.up=1")])
def test_a_rate_that_goes_on_as_its_schedule_has_it_is_not_told(words, train, caplog):
    first = train("epochs=4", "updates=null", "saving.keep=99", "saving.every_updates=1", *words)
    for checkpoint in sorted(manifest.checkpoints(first.run_dir), key=lambda path: int(path.name))[1:]:
        shutil.rmtree(checkpoint)
    again = drivetrain.train([f"resume={first.run_dir}"])
    assert again.resumed_at == 1
    assert not [message for message in caplog.messages if "goes up" in message]
