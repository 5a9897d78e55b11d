"""A sweep that is too large or hopeless is refused at once."""

import pytest

from drivetrain.core.errors import UserError
from drivetrain.sweeps import grid, optuna


@pytest.mark.parametrize("word", ["optimizer.lr=range(0,1e9)", "epochs=range(0,1000000000)", "epochs=range(0,1e999)"])
def test_endless_ranges(word, monkeypatch):
    monkeypatch.setattr(grid, "prepare_one", None)  # nothing is composed
    with pytest.raises(UserError):
        grid.prepare([word])
    with pytest.raises(UserError):
        optuna.read([word])


def test_too_many_combinations(monkeypatch):
    monkeypatch.setattr(grid, "prepare_one", None)
    with pytest.raises(UserError, match=r"100,000,000 combinations"):
        grid.prepare([f"{key}=range(0,10000)" for key in ("epochs", "log_every")])


def test_a_hopeless_sweep_is_not_composed_to_its_end(monkeypatch):
    made = []

    def fail(overrides, *_):
        made.append(overrides)
        raise UserError(f"no such option: {overrides[1]}" if len(made) < 3 else "no such option")

    monkeypatch.setattr(grid, "prepare_job", fail)
    with pytest.raises(UserError) as told:
        grid.prepare(["epochs=range(0,80)", "log_every=range(1,11)"])
    assert len(made) == grid.HOPELESS
    assert told.value.problems[-2:] == [
        "no such option",
        "none of the first 50 jobs of this sweep can run: the others were not tried",
    ]


def test_a_sweep_with_one_good_job_is_composed_to_its_end(monkeypatch):
    def prepare(overrides, *_):
        if overrides[0] != "epochs=3":
            raise UserError("bad")
        return object()

    monkeypatch.setattr(grid, "prepare_job", prepare)
    assert len(grid.prepare(["epochs=range(0,80)"])) == 80


def test_a_range_without_steps():
    with pytest.raises(UserError, match=r"'epochs=range\(1,4,0\)' is no sweep"):
        grid.prepare(["epochs=range(1,4,0)"])
