"""Nothing that a test starts outlives a suite that is killed."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import fork_server, leftovers
from tests.support.waiting import until

STARTS = """
import subprocess, sys, time
from tests.support import leftovers
leftovers.end_with_pytest()
started = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(999)"], start_new_session=True)
print(started.pid, flush=True)
time.sleep(999)
"""


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="only Linux has pidfd_open")
def test_what_is_started_dies_with_the_process_that_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fork_server.Popen, "forking", False)  # a forked one has the environment of the tests' server
    env = {name: value for name, value in os.environ.items() if name != leftovers.MARK}
    suite = subprocess.Popen(
        [sys.executable, "-c", STARTS], cwd=Path(__file__).parents[1], env=env, stdout=subprocess.PIPE, text=True
    )
    assert suite.stdout is not None
    started = Path("/proc", suite.stdout.readline().strip())
    assert started.exists()
    suite.send_signal(signal.SIGKILL)
    suite.wait()
    until(lambda: not started.exists() or "\nState:\tZ" in started.joinpath("status").read_text())
