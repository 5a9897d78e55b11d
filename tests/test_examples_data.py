"""examples/balanced, truncated_backpropagation and stream: a run's losses are those of the loop beside it."""

import copy
import importlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import drivetrain
from drivetrain.core.context import BuildContext
from drivetrain.core.world import World
from drivetrain.engine import build
from drivetrain.engine.trainer import Trainer
from drivetrain.launch.job import prepare
from tests.conftest import Sink
from tests.support.command import ROOT, only_run

UPDATES = {"balanced": {"epochs": 2}, "truncated_backpropagation": {"epochs": 2}, "stream": {"updates": 100}}


def words_of(name: str) -> list[str]:
    """The words of an example's command in examples/README.md, in short."""
    text = (ROOT / "examples/README.md").read_text().partition(f"## {name}\n")[2]
    found = re.search(r"drivetrain train (.*?)\n\n", text, re.S)
    assert found is not None
    given = shlex.split(found[1].replace("\\\n", " "))
    return [*(word for word in given if not word.startswith("epochs=")), "epochs=2", "runtime.threads=1", "runtime.device=cpu"]


def built(words: list[str], writers: list[Sink]) -> tuple[BuildContext, Trainer]:
    context = BuildContext(prepare(words).run, World(), Path("unused"))
    return context, build.build(context, writers)


@pytest.fixture
def example(request, import_from):
    """The words of an example, and the function that trains by hand."""
    import_from(ROOT / "examples" / request.param)
    return words_of(request.param), importlib.import_module("plain").train, UPDATES[request.param]


@pytest.mark.parametrize("example", UPDATES, indirect=True)
def test_it_trains_as_the_loop_beside_it(example):
    words, train, length = example
    sink = Sink()
    context, trainer = built([*(word for word in words if not word.startswith("saving.")), "log_every=1", "saving=none"], [sink])
    model = copy.deepcopy(trainer.model)
    trainer.fit()
    losses = list(train(model, **length))
    assert [record["loss"] for record in sink if record["event"] == "train"] == pytest.approx(losses, abs=1e-6)
    assert len(losses) >= 36
    assert sum(losses[-10:]) < 0.9 * sum(losses[:10])
    for name, weight in trainer.model.named_parameters():
        torch.testing.assert_close(weight, model.get_parameter(name), atol=1e-6, rtol=0)
    context.on_exit.close()


@pytest.mark.parametrize("example", ["balanced", "truncated_backpropagation"], indirect=True)
def test_it_resumes_exactly_in_the_middle_of_an_epoch(example):
    words = example[0]
    whole = drivetrain.train(words)
    assert (whole.status, whole.error) == ("completed", None)
    part = drivetrain.train([*words, f"updates={whole.updates // 2 + 3}"])
    rest = drivetrain.train([f"resume={part.run_dir}", f"updates={whole.updates}"])
    assert rest.updates == whole.updates
    assert rest.metrics["test"] == whole.metrics["test"]


KILLER = """
import os, signal
from drivetrain import Callback

class Kill(Callback):
    def update(self, event):
        if event.update == 73 and not os.path.exists(MARK):
            open(MARK, "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("example", ["stream"], indirect=True)
def test_a_stream_that_is_killed_goes_on(example, tmp_path, monkeypatch):
    """The losses after the last checkpoint, of update 60, are those of the loop that nobody stopped."""
    words, train, length = example
    (tmp_path / "killer.py").write_text(KILLER.replace("MARK", repr(str(tmp_path / "killed"))))
    places = os.pathsep.join([str(ROOT / "examples/stream"), str(tmp_path), *sys.path])
    given = [*words, "log_every=1", "trust=[readings,killer]", "callbacks=[killer.Kill]"]
    command = [sys.executable, "-m", "drivetrain", "train", *given]
    ended = subprocess.run(command, env={**os.environ, "PYTHONPATH": places}, check=False)
    assert ended.returncode == -signal.SIGKILL
    run = only_run(tmp_path / "outputs")
    monkeypatch.syspath_prepend(tmp_path)
    rest = drivetrain.train([f"resume={run}"])
    assert (rest.status, rest.updates) == ("completed", 100)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    losses = {line["update"]: line["loss"] for line in lines if line["event"] == "train"}
    context, trainer = built([*words, "log_every=1"], [])
    model = copy.deepcopy(trainer.model)
    context.on_exit.close()
    assert [losses[update] for update in range(1, 101)] == pytest.approx(list(train(model, **length)), abs=1e-6)
