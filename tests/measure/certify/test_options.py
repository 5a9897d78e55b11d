"""Every option that claims to be exact or close is certified. A new option is certified by being there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from drivetrain.config.catalog import LISTS, default_options, options
from drivetrain.core.errors import UserError
from drivetrain.core.option import Option
from drivetrain.launch import launcher
from tests.measure.certify.test_certify import run
from tests.measure.certify.test_faults import CONV, GPT, MLP
from tests.support.certified import certified

VIT = [
    *[w for w in CONV if not w.startswith("model")], "model=timm", "model.name=vit_tiny_patch16_224",
    "model.kwargs={img_size: 8, patch_size: 4, depth: 2, embed_dim: 24, num_heads: 2}",
]  # fmt: skip
DIGITS = [*[w for w in CONV if not w.startswith("data")], "data=digits", "updates=40"]
NORMS = [*MLP[:-3], "model=own", "model.target=own_norms.Net", "trust=[own_norms]", "scheduler=constant"]
OWN = """
import torch

class Norm(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.bias, self.eps = torch.nn.Parameter(torch.ones(16)), torch.nn.Parameter(torch.zeros(16)), 1e-6

    def forward(self, x):
        mean = x.mean(-1, keepdim=True)
        return self.weight * (x - mean) / torch.sqrt((x - mean).pow(2).mean(-1, keepdim=True) + self.eps) + self.bias

class Net(torch.nn.Module):
    def __init__(self, shape, classes):
        super().__init__()
        self.body, self.norm, self.head = torch.nn.Linear(torch.Size(shape).numel(), 16), Norm(), torch.nn.Linear(16, classes)

    def forward(self, x):
        return self.head(self.norm(self.body(x.flatten(1))))
"""
# The run beside which an option is certified, and what it needs itself; for a whole group or for one option.
BESIDE: dict[Any, tuple[list[str], list[str]]] = {
    "loader": (DIGITS, []),
    "checkpointing": (VIT, []),
    "surgery": (CONV, []),
    "compile": (MLP, []),
    "precision": (GPT, []),
    ("surgery", "fused_norm"): (NORMS, []),
    ("surgery", "no_bias_before_norm"): ([*CONV, "model.bias=true"], []),
    ("parallel", "split"): (MLP, ["parallel.devices=[cpu,cpu]"]),
    ("parallel", "tensor"): (VIT, []),
    ("batch", "auto"): (MLP, ["batch.memory_gb=64"]),
    ("batch", "bucketed"): (GPT, []),
    ("ema", "post_hoc"): ([*[w for w in MLP if not w.startswith("saving")], "saving=last"], []),
    ("checkpointing", "budget"): ([*VIT, "compile=inductor"], []),
}
LACKING = ("which is not installed", "needs a CUDA device")  # what this machine may not have
# Their options compute something else by what they are: other data, another model, another algorithm.
OTHERS = {"task", "data", "model", "loss", "optimizer", "scheduler", "augment"}
# A metric measures one kind of targets: those of classes stand for the others.
METRICS = ("accuracy", "f1", "auroc", "top5", "confusion_matrix", "calibration_error")
CHOICES = [
    (group, name)
    for group, names in options().items()
    for name in names
    if group not in OTHERS
    and name not in ("none", "own", "dali", default_options()[group])  # dali: decodes files in its own way
    and (group != "metrics" or name in METRICS)
]


def claim_of(group: str, name: str, words: list[str]) -> str:
    part = launcher.prepare(words).run.parts[group]
    chosen: Option = part[-1] if isinstance(part, list) else part
    return chosen.effect_as_set()


@pytest.mark.slow
@pytest.mark.parametrize(("group", "name"), [pytest.param(*choice, id="=".join(choice)) for choice in CHOICES])
def test_a_claim_holds(group: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exact: bit for bit, or but for the order of sums. Close: within the rounding of its precision."""
    (tmp_path / "own_norms.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    beside = BESIDE.get((group, name), BESIDE.get(group, (MLP, [])))
    base, own = beside
    words = [*base, f"{group}=[{name}]" if group in LISTS else f"{group}={name}", *own]
    try:
        if (claim := claim_of(group, name, words)) == "changes":
            pytest.skip("it claims to change training")
        if launcher.prepare(words).run.parallel.distributed:
            against = f"{group}={default_options()[group]}"
            code, found, said = run(*(w for w in words if not w.startswith("saving")), "against", against)
            assert code == 0, said
            answer, lines = found["answer"], found["lines"]
        else:
            done, lines = certified(words, base)
            answer = done.verdict.answer
    except UserError as error:
        if not any(reason in str(error) for reason in LACKING):
            raise
        pytest.skip(str(error))
    assert answer in ({"exact": ("exact",), "close": ("exact", "within rounding")}[claim]), lines
