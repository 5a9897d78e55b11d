"""examples/diffusion: the run's losses, averaged weights and images are those of the loop beside it."""

import copy
import re
import shlex
from pathlib import Path

import pytest
import torch

import drivetrain
from drivetrain.core import rng
from drivetrain.core.context import BuildContext
from drivetrain.core.world import World
from drivetrain.engine import build
from drivetrain.launch.job import prepare
from tests.conftest import Sink
from tests.support.command import ROOT

HERE = ROOT / "examples/diffusion"


@pytest.fixture
def words(import_from):
    """The command of examples/README.md, for two epochs."""
    import_from(HERE)
    text = re.search(r"drivetrain train (data=own data\.target=denoise.*?)\n\n", (ROOT / "examples/README.md").read_text(), re.S)[
        1
    ]
    given = shlex.split(text.replace("\\\n", " "))
    return [*(word for word in given if not word.startswith("epochs=")), "epochs=2", "runtime.threads=1"]


def test_it_trains_as_the_loop_beside_it(words):
    """Both begin with the same weights and draw from the same stream."""
    sink = Sink()
    job = prepare([*words, "data.order=sequential", "log_every=1", "callbacks=[]", "saving=none"])
    context = BuildContext(job.run, World(), Path("unused"))
    trainer = build.build(context, [sink])
    from denoise import sample
    from plain import train

    model = copy.deepcopy(trainer.model)
    trainer.fit()
    torch.manual_seed(rng.mix(0, 4, 0))  # a run's stream, from its first update on
    found = list(train(model, epochs=2))
    losses = [value for value in found if isinstance(value, float)]
    assert [record["loss"] for record in sink if record["event"] == "train"] == pytest.approx(losses, abs=1e-6)
    assert len(losses) == 24
    for name, weight in trainer.model.named_parameters():
        torch.testing.assert_close(weight, model.get_parameter(name), atol=1e-6, rtol=0)
    with trainer.evaluator.holding() as averaged:
        torch.manual_seed(0)
        torch.testing.assert_close(sample(averaged, 32), found[-1], atol=1e-4, rtol=1e-4)
    context.on_exit.close()


def test_it_draws_at_each_evaluation_and_resumes_exactly(words, tmp_path):
    whole = drivetrain.train(words)
    assert (whole.status, whole.error) == ("completed", None)
    half = drivetrain.train([*words, "epochs=1", "output_dir=half"])
    rest = drivetrain.train([f"resume={half.run_dir}", "epochs=2"])
    assert rest.metrics == whole.metrics
    pictures = [(run.run_dir / "drawn.png").read_bytes() for run in (whole, rest)]
    assert pictures[0] == pictures[1]
    assert whole.metrics["test"]["final"]["ema_loss"] != whole.metrics["test"]["final"]["loss"]
