"""examples/dino: the run's losses, teacher and centre are those of the loop beside it, also killed and resumed."""

import copy
import re
import shlex
from pathlib import Path

import pytest
import torch

from drivetrain.core import rng
from drivetrain.core.context import BuildContext
from drivetrain.core.world import World
from drivetrain.engine import build
from drivetrain.launch.job import prepare
from tests.conftest import Sink
from tests.support.command import ROOT

HERE = ROOT / "examples/dino"


@pytest.fixture
def words(import_from):
    """The command of examples/README.md, for two epochs."""
    import_from(HERE)
    page = (ROOT / "examples/README.md").read_text()
    (text,) = re.findall(r"drivetrain train (data=own data\.target=dino.*?)\n\n", page, re.S)
    given = shlex.split(text.replace("\\\n", " "))
    return [*(word for word in given if not word.startswith("epochs=")), "epochs=2", "runtime.threads=1"]


@pytest.fixture
def dino(words):
    contexts = []

    def built(*given):
        job = prepare([*words, "saving=none", *given])
        contexts.append(BuildContext(job.run, World(), Path("unused")))
        return build.build(contexts[-1], [Sink()])

    yield built
    for context in reversed(contexts):
        context.on_exit.close()


def test_it_trains_as_the_loop_beside_it(dino):
    trainer = dino("data.order=sequential", "log_every=1")
    from plain import train

    model = copy.deepcopy(trainer.model)
    trainer.fit()
    torch.manual_seed(rng.mix(0, 4, 0))  # a run's stream, from its first update on
    losses = list(train(model, epochs=2))
    assert len(losses) == 24
    assert [r["loss"] for r in trainer.log.writers[0] if r["event"] == "train"] == pytest.approx(losses, abs=1e-6)
    for name, weight in trainer.model.named_parameters():
        torch.testing.assert_close(weight, model.get_parameter(name), atol=1e-6, rtol=0)
    moved = (model.teacher[0].weight - model.student[0].weight).abs().max()
    assert 0 < moved < model.student[0].weight.abs().max()


def test_it_goes_on_from_the_middle(dino):
    (whole := dino()).fit()
    half = dino()
    half.max_updates = 17
    half.fit()
    state = half.state()  # with the random streams of this process, which building a run seeds
    rest = dino()
    rest.restore(half.model.state_dict(), state)
    rest.fit()
    for name, weight in whole.model.state_dict().items():
        assert torch.equal(weight, rest.model.state_dict()[name]), name
    centres = [trainer.evaluator.loss.function.centre for trainer in (whole, rest)]
    assert torch.equal(*centres)
    assert centres[0].abs().max() > 0
