"""data.baseline=true: scikit-learn's gradient boosting beside a model of a table, measured as that is."""

from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.metrics import log_loss

import drivetrain
from drivetrain.core.step.tensors import Tensors
from drivetrain.data.baseline import Baseline
from tests.support.to_end import run_to_end

WORDS = ["epochs=1", "updates=2", "data.baseline=true"]


def rows(count: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(0).normal(size=(count, 3)).astype("f"))


def test_its_outputs_are_those_of_a_model():
    """Logits of all classes, also of one that no training row has; of labels, also of one that each row has; values."""
    x = rows(200)
    classes = (x[:, 0] > 0).long() * 2
    output = Baseline(Tensors(x, classes), "class", 3)(x)
    assert (output.shape, output.dtype) == ((200, 3), torch.float32)
    assert log_loss(classes, output.softmax(-1), labels=[0, 1, 2]) < 0.1
    assert output.softmax(-1)[:, 1].max() < 1e-6
    labels = torch.stack([x[:, 0] > 0, torch.ones(200, dtype=torch.bool)], 1).float()
    assert ((Baseline(Tensors(x, labels), "labels", 2)(x) > 0) == labels).float().mean() > 0.95
    values = torch.stack([x[:, 0] * 3, x[:, 1] - x[:, 2]], 1)
    assert (Baseline(Tensors(x, values), "values", 2)(x) - values).abs().mean() < 0.3


def test_it_is_fitted_on_so_many_rows_and_no_more(monkeypatch):
    monkeypatch.setattr("drivetrain.data.baseline.MOST", 50)
    assert Baseline(Tensors(rows(80), torch.arange(80) % 2), "class", 2).rows == 50


@pytest.mark.parametrize(
    ("words", "figure", "said"),
    [
        (["data=wine", "epochs=1", "updates=2", "optimizer.lr=1e-9"], "accuracy", "is better"),
        (
            ["data=diabetes", "task=regression", "loss=mse", "epochs=10", "updates=null", "optimizer.lr=0.01"],
            "r2",
            "is not better",
        ),
    ],
)
def test_the_judgement_says_which_is_better(words, figure, said, tiny):
    result = drivetrain.train(tiny(*words, "model=mlp", "batch.global_batch=16", "data.baseline=true"))
    base, ours = (result.tested(of)[figure] for of in ("baseline", "final"))
    assert (base > ours) == (said == "is better")
    assert set(result.metrics["validation"]["baseline"]) == set(result.judged())
    (line,) = [remark for remark in result.remarks if "baseline" in remark]
    rows = result.data["samples"]
    assert line.startswith(
        f"the baseline {said}: scikit-learn's HistGradientBoosting on {rows} of the same rows has {figure} {base:.4g}"
    )
    assert result.remarks[0 if base > ours else -1] == line
    assert "scikit-learn&#x27;s HistGradientBoosting</th>" in (Path(result.run_dir) / "report.html").read_text()
    assert any(name == "test, baseline" and f"{figure} {base:.4g}" in cell for name, cell in result.rows())


def test_a_loss_that_it_has_no_outputs_for_costs_no_run(tiny, caplog):
    words = ["data=diabetes", "task=regression", "model=mlp", "loss=gaussian_nll", "metrics=[]", "select=loss"]
    assert "baseline" not in run_to_end(tiny(*words, *WORDS)).metrics["test"]
    assert "data.baseline=true: it cannot be measured" in caplog.text


def test_a_model_that_reads_texts_is_compared_with_none(problems, tmp_path):
    words = [f"data.path={tmp_path}/t.csv", "data.target=kind", "data.columns=[note:text]", "model=gpt"]
    assert "data.baseline=true is fitted on columns" in "".join(problems("data=tabular", *words, "data.baseline=true"))
