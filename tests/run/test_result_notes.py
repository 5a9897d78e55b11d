"""What tables say of a run's best evaluation beside its last one."""

from types import SimpleNamespace

import pytest

from drivetrain.launch import kept
from drivetrain.run.result import Result
from drivetrain.ui import terminal


def result(best: float, at: int, **final: float) -> Result:
    validation = {"final": {"loss": 0.5, "accuracy": 0.8, **final}, "best": {"loss": 0.6, "accuracy": best, "update": at}}
    test = {"final": {"accuracy": 0.7}, "best": {"accuracy": 0.75, "update": at}}
    selection = {"metric": "accuracy", "better": "max"}
    return Result("completed", metrics={"validation": validation, "test": test}, selection=selection, updates=80, epochs=10)


def test_the_best_is_named_with_its_epoch_and_what_does_not_select_with_its_value_there():
    run = result(0.9, at=48)
    assert run.note_on_best("validation", "accuracy") == "(best 0.9 after epoch 6)"
    assert run.note_on_best("validation", "loss") == "(0.6 at the best)"
    assert run.note_on_best("test", "accuracy") == "(0.75 at the best)"
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


def schedule(before: float, after: float) -> SimpleNamespace:
    group = {"lr": before}
    return SimpleNamespace(
        optimizer=SimpleNamespace(param_groups=[group]), progress=SimpleNamespace(updates=16), max_updates=32, run_dir="RUN",
        scheduler=SimpleNamespace(step=lambda update: group.update(lr=after)),
    )  # fmt: skip


@pytest.mark.parametrize(("before", "after", "told"), [(1e-8, 2.6e-4, True), (1e-3, 1e-3, False), (1e-3, 9e-4, False)])
def test_a_rate_that_jumps_is_told(before, after, told):
    said = kept.rate_jump(schedule(before, after))
    assert bool(said) == told
    if told:
        assert said.startswith("the learning rate goes up from 1.00e-08 to 2.60e-04: the schedule is now that of 32 updates")
        assert "model.weights=RUN" in said
