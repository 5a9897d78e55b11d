"""Networks to which something happens in training, once, on one rank: used with trust=[faulty_nets]."""

import multiprocessing
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import torch


class Faulty(torch.nn.Module):
    """A linear layer. At forward FAULT_AT of training rank FAULT_RANK does what FAULT says, unless FAULT_ONCE is there."""

    def __init__(self, shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.only = torch.nn.Linear(shape[0] * shape[1] * shape[2], classes)
        self.dropout = torch.nn.Dropout(0.1)
        self.forwards = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.forwards += self.training
        y = self.only(self.dropout(x.flatten(1)))
        if self.training and self._now():
            changed = getattr(self, os.environ["FAULT"])(y)
            return y if changed is None else changed
        return y

    def _now(self) -> bool:
        once = Path(os.environ.get("FAULT_ONCE", "nowhere/at/all"))
        if self.forwards != int(os.environ.get("FAULT_AT", "0")) or os.environ.get("RANK") != os.environ.get("FAULT_RANK"):
            return False
        if once.exists() or not once.parent.exists():
            return False
        once.touch()
        return True

    @staticmethod
    def killed(y: torch.Tensor) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    @staticmethod
    def stopped(y: torch.Tensor) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)

    @staticmethod
    def not_a_number(y: torch.Tensor) -> torch.Tensor:
        return y * float("nan")

    @staticmethod
    def out_of_memory(y: torch.Tensor) -> torch.Tensor:
        return y + torch.empty(1 << 50)

    @staticmethod
    def raises(y: torch.Tensor) -> None:
        raise RuntimeError("this forward is too much\nsecond line of the same error")

    @staticmethod
    def exits(y: torch.Tensor) -> None:
        sys.exit(0)

    @staticmethod
    def ends_at_once(y: torch.Tensor) -> None:
        os._exit(9)

    @staticmethod
    def told_to_end(y: torch.Tensor) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    @staticmethod
    def worker_killed(y: torch.Tensor) -> None:
        os.kill(multiprocessing.active_children()[0].pid, signal.SIGKILL)

    @staticmethod
    def worker_stopped(y: torch.Tensor) -> None:
        os.kill(multiprocessing.active_children()[0].pid, signal.SIGSTOP)

    @staticmethod
    def told_to_end_while_waiting(y: torch.Tensor) -> None:
        os.kill(multiprocessing.active_children()[0].pid, signal.SIGSTOP)
        threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGTERM)).start()

    @staticmethod
    def logger_fails(y: torch.Tensor) -> None:
        from drivetrain.logger.files import Csv

        def log(self: Csv, record: object) -> None:
            raise ConnectionError("the server is gone")

        Csv.log = log

    @staticmethod
    def run_moved(y: torch.Tensor) -> None:
        _run_dir().rename("elsewhere")

    @staticmethod
    def run_removed(y: torch.Tensor) -> None:
        shutil.rmtree(_run_dir())

    @staticmethod
    def disk_full(y: torch.Tensor) -> None:
        Path("outputs/filled").write_bytes(bytes(shutil.disk_usage("outputs").free))

    @staticmethod
    def read_only(y: torch.Tensor) -> None:
        subprocess.run(["chattr", "+i", _run_dir() / "checkpoints"], check=True)  # root may write what is only read-only

    @staticmethod
    def no_descriptors(y: torch.Tensor) -> None:
        used = len(os.listdir("/proc/self/fd"))
        resource.setrlimit(resource.RLIMIT_NOFILE, (used - 1, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))

    @staticmethod
    def clock_set_back(y: torch.Tensor) -> None:
        now = time.time
        time.time = lambda: now() - 86_400


def _run_dir() -> Path:
    (found,) = Path("outputs").glob("*/*")
    return found


class Summing(torch.nn.Module):
    """Linear layers, each of which is added to what went into it."""

    def __init__(self, shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        size = shape[0] * shape[1] * shape[2]
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(size, size) for _ in range(3))
        self.head = torch.nn.Linear(size, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.flatten(1)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)
