"""A process that is forked where torch has computed can compute too."""

import os

import pytest
import torch

from drivetrain.core.forking import ForkedProcess
from drivetrain.launch import launcher


def compute() -> None:
    torch.nn.Linear(300, 300)(torch.randn(300, 300)).sum().backward()
    torch.randn(1_000_000).exp_()


@pytest.fixture
def _two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    compute()
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("_two_threads")
def test_a_forked_process_computes_after_this_one_has():
    process = ForkedProcess(target=compute)
    process.start()
    process.join(60)
    process.kill()
    assert process.exitcode == 0


@pytest.mark.usefixtures("_two_threads")
def test_a_forked_process_forks():
    def parent() -> None:
        child = ForkedProcess(target=compute)
        child.start()
        child.join(60)
        os._exit(5 if child.exitcode == 0 else 6)

    process = ForkedProcess(target=parent)
    process.start()
    process.join(60)
    assert process.exitcode == 5


@pytest.mark.usefixtures("_two_threads")
def test_ranks_compute_after_this_process_has(tiny):
    """As in a notebook, where torch's launcher forks."""
    launched = launcher.launch(launcher.prepare(tiny("parallel=ddp", "parallel.nproc=2", "runtime.threads=2")), quiet=True)
    assert launched.result.status == "completed", launched.result.error
    compute()
