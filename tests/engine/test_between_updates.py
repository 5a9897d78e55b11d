"""A run that is told to stop while it waits for data: what it has is saved, and a resumed run ends with the same bits."""

import json
import os
import re
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
from torch.utils._pytree import tree_map_only

import drivetrain
from drivetrain.core.machine import signals
from drivetrain.core.machine.signals import StopFlag
from drivetrain.core.step.tensors import Tensors
from drivetrain.saving import checkpoint_io
from tests.support.to_end import continued, run_to_end
from tests.support.waiting import LIMIT_S

RUN = ["data=digits", "batch.global_batch=128", "model.dropout=0.2", "updates=9", "epochs=2", "log_every=3", "evaluate_every=2"]
STOPPED = r"stopped by a signal while .* delivered nothing, of a batch that begins with sample \d+: go on with resume="
fetch = Tensors.fetch
pytestmark = pytest.mark.usefixtures("own_handlers")


@pytest.fixture
def stuck(monkeypatch, tmp_path):
    """`stuck(number)`: the read of this number tells the run to end, and then lasts until the test is over."""
    over = threading.Event()

    def at(number: int, told: signal.Signals = signal.SIGTERM) -> None:
        def read(self, indices):
            with (tmp_path / "reads").open("a") as reads:
                reads.write("x")
            if (tmp_path / "reads").stat().st_size < number:
                return fetch(self, indices)
            os.kill(os.getpid() if torch.utils.data.get_worker_info() is None else os.getppid(), told)
            ends = time.monotonic() + LIMIT_S
            while time.monotonic() < ends and not over.is_set():
                time.sleep(0.01)
            return fetch(self, indices)

        monkeypatch.setattr(Tensors, "fetch", read)

    monkeypatch.setattr(signals, "SOON_S", 0.01)
    monkeypatch.setattr(signals, "NUDGE_S", 0.01)
    yield at
    over.set()


@pytest.fixture(scope="module")
def whole(tiny, tmp_path_factory):
    """The run that nobody stops."""
    return drivetrain.train(tiny(*RUN, f"output_dir={tmp_path_factory.mktemp('whole')}"))


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["loader=sync"], signal.SIGTERM),
        (["loader=threads", "loader.num_threads=1", "loader.prefetch_factor=1"], signal.SIGINT),
        (["loader=workers", "loader.num_workers=1", "loader.prefetch_factor=1", "loader.timeout_s=0"], signal.SIGTERM),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else value.name,
)
def test_it_saves_between_updates_and_goes_on_with_the_same_bits(tiny, whole, stuck, monkeypatch, words, told):
    stuck(6 if words == ["loader=sync"] else 7, told)  # read in the first epoch, or ahead of it
    stopped = run_to_end(tiny(*RUN, *words), ends="interrupted")
    saved = [int(path.name) for path in (Path(stopped.run_dir) / "checkpoints").iterdir()]
    assert stopped.updates == max(saved) > 0
    monkeypatch.setattr(Tensors, "fetch", fetch)
    again = drivetrain.train([f"resume={stopped.run_dir}"])
    ends = [Path(run.run_dir) / "checkpoints/9/model.safetensors" for run in (whole, again)]
    assert ends[0].read_bytes() == ends[1].read_bytes()


def test_a_wait_between_updates_is_ended_and_says_so(tiny, stuck):
    stuck(4)
    stopped = drivetrain.train(tiny(*RUN))
    assert re.match(STOPPED, stopped.error), stopped.error
    assert [path.name for path in (Path(stopped.run_dir) / "checkpoints").iterdir()] == [str(stopped.updates)]


def test_in_the_middle_of_an_update_nothing_can_be_saved(tiny, stuck, monkeypatch):
    """The random numbers of half an update are drawn: it ends later, for the last checkpoint."""
    monkeypatch.setattr(signals, "STOP_WAIT_S", 0.3)
    stuck(7)  # the first read is that of the example
    stopped = run_to_end(tiny(*RUN, "batch=accumulate", "batch.accumulation_steps=2"), updates=2, ends="interrupted")
    assert not (Path(stopped.run_dir) / "checkpoints").exists()


def test_an_update_that_lasts_longer_than_any_wait_is_finished_and_saved(tiny, monkeypatch):
    """Each read takes six seconds of ten, and the signal comes at the second one of an update of four."""
    clock, reads = time.monotonic, []

    def read(self, indices):
        reads.append(indices)
        if len(reads) == 7:  # the first is that of the example
            signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signals.NUDGE)
        return fetch(self, indices)

    monkeypatch.setattr(Tensors, "fetch", read)
    monkeypatch.setattr(time, "monotonic", lambda: clock() + len(reads) * 0.6 * signals.STOP_WAIT_S)
    stopped = drivetrain.train(tiny(*RUN, "loader=sync", "batch=accumulate", "batch.accumulation_steps=4"))
    assert stopped.error.startswith("stopped by a signal at update 2: go on with resume=")
    assert [path.name for path in (Path(stopped.run_dir) / "checkpoints").iterdir()] == ["2"]
    assert len(reads) == 9


def test_a_process_that_was_not_told_to_stop_reads_on():
    with StopFlag() as flag:
        StopFlag.can_save_now(True)
        with StopFlag.ends_reads():
            signal.raise_signal(signals.NUDGE)
        assert not flag.raised


EVALUATED = ["data=digits", "batch.global_batch=256", "updates=null", "epochs=3", "log_every=2"]
RUNS = {  # words, and before which batch of all evaluations a signal comes
    "between two epochs": (["model.dropout=0.2"], 1),
    "of averages": (["ema=ema", "saving=best"], 2),
    "of averages with statistics": (["model=resnet9", "model.width=2", "ema=swa", "ema.start=0.3"], 4),
    "of the last epoch": (["scheduler=plateau", "scheduler.patience=1", "stop=early", "stop.patience=1"], 3),
    "of a stage": (["stages=[{until: 1ep, optimizer.lr: 0.01}, {batch.global_batch: 128, precision: bf16}]"], 1),
    "of a run that ends within an epoch": (["updates=8"], 2),
}  # fmt: skip


def the_end(run_dir):
    """The last checkpoint, its tensors as bytes, and all records, without the times."""
    weights, state = checkpoint_io.load(max((Path(run_dir) / "checkpoints").iterdir(), key=lambda path: int(path.name)))
    lines = [json.loads(line) for line in (Path(run_dir) / "metrics.jsonl").read_text().splitlines()]
    lines = [line for line in lines if line["event"] not in ("stage", "resume")]  # a stage is told when a run goes on, too
    keys = ("event", "update", "epoch", "loss", "lr", "samples", "set", "ema_loss", "accuracy")
    plain = tree_map_only(torch.Tensor, lambda t: t.contiguous().numpy().tobytes(), [weights, state])
    return plain, [[line.get(key) for key in keys] for line in lines]


@pytest.mark.parametrize("name", RUNS)
def test_an_evaluation_that_a_signal_cut_short_is_done_first_when_the_run_goes_on(tiny, monkeypatch, name):
    words, number = RUNS[name]
    whole = run_to_end(tiny(*EVALUATED, *words))
    asked, stop_here = [], StopFlag.stop_here

    def told(stops):
        asked.append(stops)
        if len(asked) == number:
            signal.raise_signal(signal.SIGTERM)
        stop_here(stops)

    monkeypatch.setattr(StopFlag, "stop_here", told)
    stopped = run_to_end(tiny(*EVALUATED, *words), ends="interrupted")
    assert stopped.error.startswith(f"stopped by a signal before the evaluation of update {stopped.updates}: go on with resume=")
    assert len(asked) == number
    assert continued(stopped.run_dir).metrics == whole.metrics
    assert the_end(stopped.run_dir) == the_end(whole.run_dir)


TELLING = """
import os, pathlib, signal, torch

class Net(torch.nn.Module):
    def __init__(self, shape, classes):
        super().__init__()
        self.only, self.evaluated = torch.nn.Linear(16, classes), 0

    def forward(self, x):
        self.evaluated += not self.training
        told = pathlib.Path("told")
        if self.evaluated == 1 and os.environ.get("RANK") == "1" and told.exists():
            told.unlink()
            signal.raise_signal(signal.SIGTERM)
        return self.only(x.flatten(1))
"""


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_ranks_stop_at_the_same_batch_of_an_evaluation(tiny, tmp_path, strategy):
    """Of nine batches the second rank has four, and is told at its first."""
    (tmp_path / "telling.py").write_text(TELLING)
    words = [
        "data.shape=[1,4,4]", "data.test_samples=90", "batch.global_batch=20", f"parallel={strategy}", "parallel.nproc=2",
        "model=own", "model.target=telling.Net", "trust=[telling]", "updates=null", "epochs=2",
    ]  # fmt: skip
    whole = drivetrain.train(tiny(*words))
    (tmp_path / "told").touch()
    stopped = run_to_end(tiny(*words), ends="interrupted")
    assert "before the evaluation of update" in stopped.error
    assert continued(stopped.run_dir).metrics == whole.metrics
    assert the_end(stopped.run_dir) == the_end(whole.run_dir)
