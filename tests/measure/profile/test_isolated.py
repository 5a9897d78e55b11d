"""A probe in a process of its own: its answer, its errors, and nothing left when the program is ended."""

import os
import signal
import threading
import time
from pathlib import Path

import pytest

from drivetrain.core.errors import UserError
from drivetrain.launch.job import prepare
from drivetrain.measure.profile.isolated import run_isolated


def failing(trainer):
    raise ValueError("no such thing")


def test_an_answer_and_an_error(tiny, tmp_path):
    job = prepare(tiny(f"output_dir={tmp_path}"))
    assert run_isolated(lambda trainer: trainer.max_updates, job) > 0
    with pytest.raises(UserError, match="ValueError: no such thing"):
        run_isolated(failing, job)


def test_sigterm_leaves_no_process_behind(tiny, tmp_path):
    told = tmp_path / "process"

    def stuck(trainer):
        told.write_text(str(os.getpid()))
        time.sleep(60)

    def end():
        while not told.exists() or not told.read_text():
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=end, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        run_isolated(stuck, prepare(tiny(f"output_dir={tmp_path}")))
    assert not Path(f"/proc/{told.read_text()}").exists()
