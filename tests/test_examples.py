"""The examples do what they tell: their commands are good, their losses equal, and the doctor finds what was planted."""

import re
import shlex
import sys
from pathlib import Path

import pytest
import torch

from drivetrain import sweep
from drivetrain.core.paths import add_own_places
from drivetrain.recipe import reader as recipe
from tests.support.command import ROOT, only_run, records, run

HERE = ROOT / "examples/slow_loss"
GIVEN = ("-cd", str(HERE / "conf"), f"recipe={HERE / 'find.yaml'}", "trust=[anomaly]", "runtime.threads=1")
SHORT = ("saving=none", "data.train={first: 0, count: 96}", "data.test={first: 96, count: 32}")


@pytest.fixture
def anomaly(monkeypatch):
    monkeypatch.syspath_prepend(HERE)
    monkeypatch.delitem(sys.modules, "anomaly", raising=False)
    import anomaly

    return anomaly


def test_both_losses_are_the_same_with_their_gradients(anomaly, float64):
    target = torch.stack([anomaly.Textures(0, 4, 16)[n][1] for n in range(4)]).double()
    for scale in (1.0, 30.0):  # small margins, and such as are -1 and 1
        values, gradients = [], []
        for loss in (anomaly.Slow(16), anomaly.Mended(16)):
            torch.manual_seed(0)
            output = (scale * torch.randn(4, 16, 16)).requires_grad_()
            value = loss(output, target)
            value.backward()
            values.append(value.detach())
            gradients.append(output.grad)
        torch.testing.assert_close(*values, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-12)
        assert gradients[0].abs().sum() > 0


def test_the_third_term_wants_defects_above_the_rest(anomaly):
    loss, target = anomaly.Mended(), torch.zeros(1, 64)
    target[0, :32] = 1
    torch.manual_seed(0)
    good, bad = loss.apart(target, target), loss.apart(1 - target, target)
    assert 0 <= good < 0.01 < 0.9 < bad <= 1


def test_a_texture_and_where_its_defect_is(anomaly):
    sound, torn = (anomaly.Textures(0, 2)[n] for n in range(2))
    assert sound[0].shape == torn[0].shape == (1, 32, 32)
    assert sound[1].sum() == 0 < torn[1].sum() < 200
    again = anomaly.Textures(1, 1)[0]
    assert torch.equal(again[0], torn[0])


def test_both_train_through_the_command_and_come_to_the_same(tmp_path):
    found = []
    for loss in ("slow", "mended"):
        words = (f"loss={loss}", "loss.levels=8", "optimizer.lr=0.02", "log_every=1", "epochs=4", f"output_dir={loss}")
        done = run("train", "-q", *GIVEN, *SHORT, *words, cwd=tmp_path)
        assert done.code == 0, done
        found.append([record["loss"] for record in records(only_run(tmp_path / loss), "train")])
    assert found[0] == pytest.approx(found[1], rel=1e-3)
    assert found[0][-1] < 0.9 * found[0][0]


def test_the_doctor_names_the_line(tmp_path):
    done = run("doctor", *GIVEN, *SHORT, "loss=slow", "prove=false", "profile_s=0.3", "evaluate_every=1000", cwd=tmp_path)
    assert done.code == 0, done
    verdict, evidence = done.out.split("verdict: ")[1].splitlines()[:2]
    lines = (HERE / "anomaly.py").read_text().splitlines()
    named = int(re.search(r"anomaly\.py:(\d+) in graded", evidence)[1])
    assert "loop over elements" in verdict
    assert "costs = costs + inside" in lines[named - 1]


def test_the_commands_of_its_readme_are_good(monkeypatch):
    monkeypatch.chdir(HERE)
    monkeypatch.setattr(sys, "path", [*sys.path])
    add_own_places(["conf"])
    commands = re.findall(r"^    drivetrain (train|compare|doctor) (.*)$", (HERE / "README.md").read_text(), re.M)
    assert {verb for verb, _ in commands} == {"train", "compare", "doctor"}
    for _, text in commands:
        words = [w for w in shlex.split(text.replace("-cd conf", "")) if not w.startswith(("prove=", "output_dir="))]
        for job in sweep.prepare(words, ["conf"]):
            assert job.problems == []
    assert recipe.read(Path("find.yaml")).description
