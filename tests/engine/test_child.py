"""A question to the trainer that a process of its own builds."""

import os
import signal
import tempfile
from pathlib import Path

from drivetrain.core.errors import UserError
from drivetrain.core.machine.forking import ForkedProcess
from drivetrain.engine import child
from drivetrain.launch.job import prepare
from drivetrain.run.directory import is_locked
from tests.support.refusals import problems_of
from tests.support.waiting import until


def test_the_trainer_has_a_run_directory_which_is_gone_afterwards(tiny):
    run = prepare(tiny()).run

    def look(trainer):
        (trainer.run_dir / "checkpoints").mkdir()
        return trainer.max_updates, trainer.run_dir, trainer.run_dir.is_dir()

    updates, place, was_there = child.ask(run, look, "failed")
    assert (updates, was_there) == (2, True)
    assert not place.exists()
    assert not Path("outputs").exists()


def test_what_a_killed_question_leaves_is_removed_by_the_next(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    run = prepare(tiny()).run
    asking = ForkedProcess(target=child.ask, args=(run, lambda _: os.kill(os.getppid(), signal.SIGKILL), "failed"))
    asking.start()
    asking.join()
    assert asking.exitcode == -signal.SIGKILL
    (left,) = tmp_path.glob("drivetrain-run-*")
    until(lambda: not is_locked(left), lambda: "the process that was asked never ended")
    assert child.ask(run, lambda trainer: trainer.run_dir.name, "failed") != left.name
    assert not [*tmp_path.glob("drivetrain-run-*")]


def test_a_failure_and_a_refusal_are_told(tiny):
    def refuse(trainer):
        raise UserError(["one", "two"])

    for question, told in ((lambda trainer: 1 / 0, ["it failed: ZeroDivisionError: division by zero"]), (refuse, ["one", "two"])):
        assert problems_of(child.ask, prepare(tiny()).run, question, "it failed") == told
    assert not Path("outputs").exists()
