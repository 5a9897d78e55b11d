"""A user's own networks, copied beside the runs that name them (`model=own model.target=my_nets.Net trust=[my_nets]`)."""

import math
import os
import signal
import sys
import time
from pathlib import Path

import torch
from torch import nn

from drivetrain.core.machine.signals import StopFlag

GATE_TIMEOUT_S = 240.0


def wait_at_the_gate():
    """Say that this rank has arrived, and wait for the file GATE/go, or with GATE/told until it is told to stop."""
    gate = Path(os.environ["GATE"])
    (gate / f"arrived-{os.environ.get('RANK', '0')}-{os.getpid()}").touch()
    deadline = time.monotonic() + GATE_TIMEOUT_S
    while not (gate / "go").exists() and time.monotonic() < deadline:
        if (gate / "told").exists() and StopFlag.told_to_stop():
            break
        time.sleep(0.01)


class Net(nn.Module):
    """Images (n, …) to logits (n, classes), with all that a resume must restore: buffers, dropout, weights."""

    def __init__(self, shape, classes):
        super().__init__()
        self.hidden = nn.Linear(math.prod(shape), 32)
        self.norm = nn.BatchNorm1d(32)
        self.dropout = nn.Dropout(0.1)
        self.head = nn.Linear(32, classes)
        self.trained = 0  # forwards in training, in this process

    def forward(self, x):
        if self.training and torch.is_grad_enabled():
            self.trained += 1
            self.event()
        return self.head(self.dropout(torch.relu(self.norm(self.hidden(x.flatten(1))))))

    def event(self):
        """The event at each forward in training."""


class Gated(Net):
    """Waits in forward number GATE_AT, so that a signal comes at a known update; with GATE_AT=build, before the first."""

    def __init__(self, shape, classes):
        super().__init__(shape, classes)
        self.gate_at = os.environ.get("GATE_AT", "")
        if self.gate_at == "build":
            wait_at_the_gate()

    def event(self):
        if self.gate_at == str(self.trained):
            wait_at_the_gate()


class Raises(Net):
    """An error in the third forward, of two lines."""

    def event(self):
        if self.trained == 3:
            raise RuntimeError("the third forward is too much\nsecond line of the same error")


class RaisesOnRank1(Net):
    """The same, on one rank alone."""

    def event(self):
        if self.trained == 3 and os.environ.get("RANK") == "1":
            raise RuntimeError("this one is unwell")


class KilledOnRank1(Net):
    """Memory runs out on one rank."""

    def event(self):
        if self.trained == 3 and os.environ.get("RANK") == "1":
            os.kill(os.getpid(), signal.SIGKILL)


class Exits(Net):
    """Code that ends the process politely, as scripts do."""

    def event(self):
        sys.exit(0)


class Dies(Net):
    """Code that ends the process without a word, as a crash in C does."""

    def event(self):
        os._exit(9)


class Killed(Net):
    """The end that the kernel makes when memory runs out."""

    def event(self):
        os.kill(os.getpid(), signal.SIGKILL)


class Diverges(Net):
    """The loss is NaN from the third update on."""

    def forward(self, x):
        output = super().forward(x)
        return output * math.nan if self.trained >= 3 else output


class NanInEvaluation(Net):
    """Trains well and evaluates to NaN."""

    def forward(self, x):
        return super().forward(x) * (1.0 if self.training else math.nan)


class Noted(Net):
    """Takes an argument of its own."""

    def __init__(self, shape, classes, note):
        super().__init__(shape, classes)
        self.note = note


NO_CLASS = "a name that is nothing to build"
