"""A loss that names `model` is a training step: it calls the model itself, and nothing else about the run changes."""

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch

from drivetrain.core.errors import UserError
from tests.support import my_losses

OWN = ["trust=[my_losses]", "model=own", "model.target=my_losses.Parts", "loss=own", "optimizer.lr=0.1", "updates=4"]
PLAIN_SGD = ["optimizer.momentum=0", "optimizer.nesterov=false", "optimizer.weight_decay=0"]


@pytest.fixture(autouse=True)
def mine(tmp_path, monkeypatch):
    """The losses as a file beside the run, which its ranks can import too."""
    shutil.copy(my_losses.__file__, tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    yield
    sys.modules.pop("my_losses", None)


def losses(result):
    assert result.status == "completed", result.error
    return [json.loads(line)["loss"] for line in (Path(result.run_dir) / "metrics.jsonl").read_text().splitlines()]


def test_a_step_that_calls_the_model_once_is_the_plain_loss(train):
    assert losses(train(*OWN, "loss.target=my_losses.step")) == losses(train(*OWN, "loss.target=my_losses.plain"))


@pytest.mark.parametrize("target", ["twice", "parts", "penalty"])
def test_a_step_is_the_same_however_the_batch_is_split(train, target):
    """Parts that are called outside of the forward, several forwards and second derivatives: all get their gradients averaged."""
    given = [*OWN, f"loss.target=my_losses.{target}", "batch=accumulate"]
    one = losses(train(*given, "batch.accumulation_steps=1"))
    assert losses(train(*given, "batch.accumulation_steps=3")) == pytest.approx(one, rel=2e-6)
    assert losses(train(*given, "batch.accumulation_steps=2", "parallel=ddp", "parallel.nproc=2")) == pytest.approx(one, rel=2e-6)


def test_the_gradient_penalty_is_that_of_a_loop_by_hand(make):
    trainer = make(*OWN, "loss.target=my_losses.penalty", "updates=3", *PLAIN_SGD)
    twin = my_losses.Parts((3, 8, 8), 4)
    twin.load_state_dict(trainer.model.state_dict())
    batches = [(batch.x.clone(), batch.y.clone()) for batch, _ in zip(_stream(trainer), range(3), strict=False)]
    trainer.fit()
    for x, y in batches:
        loss = my_losses.penalty(twin, x, y)
        twin.zero_grad()
        loss.backward()
        with torch.no_grad():
            for parameter in twin.parameters():
                parameter -= 0.1 * parameter.grad
    for found, expected in zip(trainer.model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)


def _stream(trainer):
    return trainer.read()


@pytest.mark.parametrize(
    ("target", "words", "says"),
    [
        ("step", ["parallel=pipeline"], "names `model`, and with parallel=pipeline no rank has a forward of the whole model"),
        (
            "parts",
            ["compile=inductor"],
            "compile=inductor compiles the model's forward, and loss.target=my_losses.parts calls only",
        ),
        ("parts", ["parallel=fsdp", "parallel.nproc=2"], "takes `model.head`, and with parallel=fsdp each rank holds a part"),
        ("detached", [], "the loss does not depend on trained weights"),
        ("penalty", ["compile=inductor"], "compile=inductor cannot differentiate a gradient of the model"),
        ("told", ["compile=step"], "names `progress`, which would be a constant in the graph of compile=step"),
    ],
)
def test_a_strategy_that_cannot_run_it_is_refused(train, target, words, says):
    with pytest.raises(UserError, match=says):
        train(*OWN, f"loss.target=my_losses.{target}", *words)


def test_a_step_is_no_part_of_a_sum(make):
    with pytest.raises(UserError, match="is the whole training step: it cannot be added to other losses"):
        make("trust=[my_losses]", "loss=[own,cross_entropy]", "loss.own.target=my_losses.step")
