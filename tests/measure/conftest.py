"""Shared by the tests of measuring: the command in a process of its own, and a data set that is slow on purpose."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SLOW = """
import time
import torch

class Slow(torch.utils.data.Dataset):
    classes = ("a", "b")

    def __init__(self, split, pause=0.0):
        self.pause = pause

    def __len__(self):
        return 64

    def __getitem__(self, index):
        time.sleep(self.pause)
        return torch.full((8,), index / 64), index % 2
"""


@pytest.fixture
def command(tmp_path):
    """A command of drivetrain's, with its exit code, in a process of its own: it forks, which one that has run torch may not."""

    def run(*words: str, code: int = 0) -> tuple[subprocess.CompletedProcess[str], dict]:
        env = {**os.environ, "PYTHONPATH": os.pathsep.join([*sys.path, str(tmp_path)])}
        done = subprocess.run([sys.executable, "-m", "drivetrain", *words], env=env, capture_output=True, text=True, check=False)
        assert done.returncode == code, done.stdout + done.stderr
        files = sorted(Path("outputs").glob("*/*/*/*.json"))
        return done, json.loads(files[-1].read_text()) if files else {}

    return run


@pytest.fixture
def slow_set(tmp_path, monkeypatch):
    """A module of the user's with a Dataset that takes `pause` seconds a sample."""
    (tmp_path / "slow_set.py").write_text(SLOW)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "slow_set", raising=False)
