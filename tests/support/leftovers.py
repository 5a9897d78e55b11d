"""Whatever a test starts ends with pytest, also where pytest is killed: a process beside it waits for that."""

import os
import subprocess
import sys
import time

MARK = "STARTED_BY_TESTS"  # in the environment of all that the tests start
KILLER = """
import os, select, signal, sys
mark = sys.argv[2].encode()
select.select([int(sys.argv[1])], [], [])
for name in filter(str.isdigit, os.listdir("/proc")):
    try:
        with open(f"/proc/{name}/environ", "rb") as file:
            if mark in file.read() and int(name) != os.getpid():
                os.kill(int(name), signal.SIGKILL)
    except OSError:
        pass
"""


def end_with_pytest() -> None:
    """Mark what this process starts, and have it killed once this process is gone. A worker's is the controller's already."""
    if MARK in os.environ or not hasattr(os, "pidfd_open"):
        return
    os.environ[MARK] = f"{os.getpid()}-{time.time_ns()}"
    mark = f"{MARK}={os.environ[MARK]}"
    this = os.pidfd_open(os.getpid())  # opened here: the killer may begin after this process has ended
    subprocess.Popen([sys.executable, "-S", "-c", KILLER, str(this), mark], start_new_session=True, pass_fds=[this])
    os.close(this)
