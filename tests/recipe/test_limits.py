"""Bounds of the work that a recipe can ask for: sizes of files, sweeps, epochs, growth and cycles."""

from __future__ import annotations

import os
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace

import pytest

from drivetrain.batch import Batch
from drivetrain.cli import recipe
from drivetrain.core.errors import UserError
from drivetrain.core.horizon import run_horizon
from drivetrain.launch.job import prepare
from drivetrain.recipe import reader as recipes
from tests.support.effects import limited


@pytest.mark.parametrize("samples", [1, 50, 1000])
@pytest.mark.parametrize("epochs", [1, 2, 7, 50])
@pytest.mark.parametrize("growth", [{}, {"grow_every": 1}, {"grow_every": 3, "grow_by": 3}, {"grow_every": 2, "grow_until": 100}])
def test_epochs_of_one_size_are_counted_together(samples: int, epochs: int, growth: dict[str, int]) -> None:
    """The sums are those of a loop over the epochs."""
    batch = Batch(global_batch=16, **growth)
    assert [epoch for stretch in batch.stretches(epochs) for epoch in stretch] == list(range(epochs))
    each = [batch.updates(samples, epoch, False) for epoch in range(epochs)]
    assert batch.total_updates(samples, epochs, False) == sum(each)
    seen = [min(samples, updates * batch.size(epoch)) for epoch, updates in enumerate(each)]
    assert batch.consumed(samples, epochs, 0, False) == sum(seen)


def test_a_horizon_ends_each_epoch_where_a_loop_does() -> None:
    run = prepare(["epochs=9", "batch.grow_every=2", "batch.global_batch=100", "data.drop_last=false"]).run
    horizon = run_horizon(run)
    assert horizon is not None
    samples = run.data.train_samples()
    assert list(horizon.ends) == list(accumulate(run.batch.updates(samples, epoch, False) for epoch in range(9)))


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["epochs=1000001"], "epochs=1000001"),
        (["scheduler=cosine", "scheduler.cycles=10001"], "scheduler.cycles=10001"),
        (["scheduler=cosine", "scheduler.cycles=20", "scheduler.cycle_mult=1e30"], "scheduler.cycle_mult=1e+30"),
        (["scheduler=cosine", "scheduler.cycles=20", "scheduler.cycle_decay=1e-30"], "scheduler.cycle_decay=1e-30"),
        ([f"updates={10**400}"], "updates: a whole number must be below 2^63"),
    ],
)
def test_numbers_have_bounds_on_the_command_line_too(words: list[str], named: str) -> None:
    with pytest.raises(UserError) as refused:
        prepare(words)
    assert any(named in problem for problem in refused.value.problems), refused.value.problems


def test_a_large_sweep_is_checked_in_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each value once, beside the first of the others; a small sweep in all its combinations."""
    file, seen = tmp_path / "sweep.yaml", []
    monkeypatch.setattr(recipe, "compose", lambda words, dirs, base: base.values)
    nothing = SimpleNamespace(composed=SimpleNamespace(notices=[]), shared=None, run=SimpleNamespace(values={"trust": []}))
    monkeypatch.setattr(recipe, "checked", lambda values: seen.append(values) or nothing)
    file.write_text("sweep:\n  epochs: [1, 2, 3]\n  updates: [1, 2, 3, 4]\n")
    assert recipe.check(recipes.read(file)) == []
    assert len(seen) == 12
    seen.clear()
    file.write_text("sweep:\n  epochs: [1, 2, 3, 4, 5, 6]\n  updates: [1, 2, 3, 4, 5, 6, 7]\n")
    assert recipe.check(recipes.read(file)) == ["12 of its 42 combinations were checked"]
    assert {values["epochs"] for values in seen} == set(range(1, 7))
    assert {values["updates"] for values in seen} == set(range(1, 8))


def test_a_file_that_is_no_plain_file_or_has_no_end_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo.yaml")
    (tmp_path / "zero.yaml").symlink_to("/dev/zero")
    with (tmp_path / "sparse.yaml").open("w") as sparse:
        sparse.truncate(6 << 30)
    refusals = {"fifo": "no regular file", "zero": "no regular file", "sparse": "larger than 64 KiB", "none": "cannot be read"}
    for name, said in refusals.items():
        with limited(), pytest.raises(UserError, match=said):
            recipes.read(tmp_path / f"{name}.yaml")


def test_a_message_holds_no_control_characters() -> None:
    assert UserError(["a\x1b[2Jb", "c\u202ed"]).problems == ["a\N{REPLACEMENT CHARACTER}[2Jb", "c\N{REPLACEMENT CHARACTER}d"]
    assert str(UserError("two\nlines\tand a tab")) == "two\nlines\tand a tab"
