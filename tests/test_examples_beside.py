"""examples/multitask and examples/detection: the run's losses and figures are those of the loop beside it."""

from __future__ import annotations

import copy
import re
import shlex
from pathlib import Path

import pytest
import torch

from drivetrain.core.context import BuildContext
from drivetrain.core.world import World
from drivetrain.engine import build
from drivetrain.launch.job import prepare
from tests.conftest import Sink
from tests.support.command import ROOT

# The example → the module of its own code, the losses of its records, and its figures.
EXAMPLES = {
    "multitask": ("tasks", ("loss", "loss_digit", "loss_ink"), ("right", "off")),
    "detection": ("boxes", ("loss",), ("found",)),
}


def command(name: str) -> list[str]:
    """Return the words of the example's command in examples/README.md."""
    text = (ROOT / "examples/README.md").read_text()
    given = re.search(rf"cd examples/{name}\n    drivetrain train (.*?)\n\n", text, re.S)
    assert given is not None
    return shlex.split(given[1].replace("\\\n", " "))


@pytest.mark.parametrize("name", EXAMPLES)
def test_it_trains_as_the_loop_beside_it(name, import_from):
    """Both begin with the same weights."""
    _, losses, figures = EXAMPLES[name]
    import_from(ROOT / "examples" / name)
    sink, words = Sink(), [word for word in command(name) if not word.startswith("epochs=")]
    words += ["epochs=2", "data.order=sequential", "log_every=1", "saving=none", "runtime.threads=1"]
    context = BuildContext(prepare(words).run, World(), Path("unused"))
    trainer = build.build(context, [sink])
    import plain

    found = list(plain.train(model := copy.deepcopy(trainer.model), epochs=2))
    trainer.fit()
    records = [[record[key] for key in losses] for record in sink if record["event"] == "train"]
    evaluations = [[record[key] for key in figures] for record in sink if record["event"] == "evaluate"]
    rows = [list(row.values()) if isinstance(row, dict) else [row] for row in found]
    each = len(rows) // 2
    by_hand = [row for n, row in enumerate(rows) if (n + 1) % each]
    assert len(records) == len(by_hand) > 4
    for ours, theirs in zip(records, by_hand, strict=True):
        assert ours == pytest.approx(theirs, abs=1e-6, rel=1e-6)
    for ours, theirs in zip(evaluations, rows[each - 1 :: each], strict=True):
        assert ours == pytest.approx(theirs, abs=1e-6)
    for key, weight in trainer.model.named_parameters():
        torch.testing.assert_close(weight, model.get_parameter(key), atol=1e-6, rtol=1e-5)
    context.on_exit.close()
