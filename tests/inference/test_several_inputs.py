"""Runs whose samples are dicts, tuples and padded sequences: evaluated, predicted, loaded without their data, exported."""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import pytest
import torch
from torch.utils._pytree import tree_map

import drivetrain
from drivetrain.cli import main
from drivetrain.core.trees import map_tensors
from drivetrain.data.own import Own
from drivetrain.inference.evaluation import evaluate
from tests.support import command

OWN = ("data=own", "trust=[tree_sets]", "model=own", "updates=5", "epochs=2", "data.drop_last=false", "scheduler=constant")
RUNS = {
    "dicts": ("data.target=tree_sets.Dicts", "model.target=tree_sets.Net"),
    "tuples": ("data.target=tree_sets.Tuples", "model.target=tree_sets.Net"),
    "padded": ("data.target=tree_sets.Words", "model.target=tree_sets.Reader"),
}


@pytest.fixture(autouse=True)
def _sets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(command.__file__).parent))
    sys.modules.pop("tree_sets", None)


@pytest.mark.parametrize("name", RUNS)
def test_the_figures_and_the_rows_are_those_of_training(name, finished, tmp_path, monkeypatch):
    result = finished(*OWN, *RUNS[name])
    assert evaluate(result.run_dir).metrics == result.tested("final")
    assert main.main(["predict", str(result.run_dir), "--data", "test", "--batch", "3", "--out", str(tmp_path / "p.csv")]) == 0
    rows = list(csv.DictReader((tmp_path / "p.csv").open()))
    assert sum(row["label"] == row["target"] for row in rows) / len(rows) == result.tested("final")["accuracy"]
    monkeypatch.setattr(Own, "load", lambda *_: pytest.fail("the data was read"))
    run = drivetrain.load(result.run_dir)
    assert len(run.predict(run.example())) == 2


def test_a_dict_from_python_and_exports(finished, tmp_path, capsys):
    result = finished(*OWN, *RUNS["dicts"])
    run = drivetrain.load(result.run_dir)
    x = map_tensors(lambda t: torch.zeros(3, *t.shape[1:], dtype=t.dtype), run.example())
    assert len(run.predict(tree_map(torch.Tensor.numpy, x))) == 3
    assert main.main(["export", str(result.run_dir), str(tmp_path / "w.safetensors")]) == 0
    assert main.main(["export", str(result.run_dir), str(tmp_path / "m.onnx"), "--format", "onnx"]) == 2
    assert "takes models of one input tensor" in capsys.readouterr().err
    (tmp_path / "x.npy").write_bytes(b"")
    assert main.main(["predict", str(result.run_dir), str(tmp_path / "p.png")]) == 2
