"""Debugging aids: nothing of them in a plain run, and each finds what it is for."""

import re
import subprocess
import sys
import warnings
from pathlib import Path

import torch

import drivetrain

SOURCE = Path(drivetrain.__file__).parents[1]
NAN = '''
"""A model whose backward makes a NaN."""
import torch

class Net(torch.nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.linear = torch.nn.Linear(192, classes)

    def forward(self, x):
        y = self.linear(x.flatten(1))
        return y + torch.sqrt(y * 0)  # sqrt has an infinite slope at 0, times 0
'''


def test_anomaly_names_the_line_that_made_a_nan(train, tmp_path, monkeypatch):
    (tmp_path / "planted.py").write_text(NAN)
    monkeypatch.syspath_prepend(tmp_path)
    words = ["model=own", "model.target=planted.Net", "trust=[planted]"]
    show = warnings.showwarning
    result = train(*words, "debug=anomaly")
    assert warnings.showwarning is show
    found = (result.run_dir / "debug.txt").read_text()
    assert re.search(r"planted\.py.*\n.*return y \+ torch\.sqrt\(y \* 0\)", found)  # the forward, as torch tells it
    assert re.search(r"debug=anomaly: made in .*planted\.py\", line 12, in forward: return y \+ torch", found.splitlines()[-1])
    assert result.status == "failed"
    assert "'MulBackward0' returned nan values" in result.error
    assert not torch.is_anomaly_enabled()  # the process may train another run
    without = train(*words)
    assert without.status == "diverged"
    assert "Backward" not in without.error


def test_anomaly_without_the_nan_check_lets_it_pass(train, tmp_path, monkeypatch):
    (tmp_path / "planted.py").write_text(NAN)
    monkeypatch.syspath_prepend(tmp_path)
    words = ["model=own", "model.target=planted.Net", "trust=[planted]", "debug=anomaly", "debug.check_nan=false"]
    assert train(*words).status == "diverged"


def test_anomaly_is_on_while_training_and_changes_no_number(make):
    plain, watched = make(), make("debug=anomaly")
    assert torch.is_anomaly_enabled()
    watched.fit()
    torch.autograd.set_detect_anomaly(False)
    plain.fit()
    losses = [[r["loss"] for r in t.log.writers[0]] for t in (plain, watched)]
    assert losses[0] == losses[1]
    assert len(losses[0]) == 3


def test_none_installs_nothing(make):
    trainer = make()
    assert not torch.is_anomaly_enabled()
    assert not any(m._forward_hooks or m._forward_pre_hooks or m._backward_hooks for m in trainer.model.modules())
    assert all(p._backward_hooks is None for p in trainer.model.parameters())


def test_an_eager_run_does_not_import_the_compiler(tiny, tmp_path):
    """It costs more than a second of every start."""
    code = f"""
import sys, drivetrain
result = drivetrain.train({tiny()!r})
print("done", result.status, result.updates, "torch" in sys.modules, "torch._dynamo" in sys.modules, "timm" in sys.modules)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False, env={"PYTHONPATH": str(SOURCE)}
    )
    assert "done completed 2 True False False" in done.stdout, done.stdout + done.stderr


def test_fast_walks_the_whole_path_in_a_few_updates(make):
    trainer = make("debug=fast", "debug.updates=3", "debug.eval_batches=1", "updates=null")
    seen = []
    trainer.model.register_forward_hook(lambda m, i, o: None if m.training else seen.append(len(o)))
    trainer.fit()
    assert trainer.progress.updates == 3
    assert seen == [12]
    assert [r["event"] for r in trainer.log.writers[0]] == ["train"] * 3 + ["evaluate"]


def test_what_cannot_be_is_refused(problems):
    assert any(p.startswith("debug.updates=0") for p in problems("debug=fast", "debug.updates=0"))
    assert any(p.startswith("debug.check_nan=1") for p in problems("debug=anomaly", "debug.check_nan=1"))
