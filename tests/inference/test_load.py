"""`drivetrain.load` and `drivetrain.runs`, and what notebooks show."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image

import drivetrain
from drivetrain.core.errors import DataError, UserError
from drivetrain.run.result import Result


@pytest.fixture(scope="module")
def images() -> np.ndarray:
    from sklearn.datasets import load_digits

    found: np.ndarray = load_digits().images[:6, None]
    return found


def test_a_loaded_run(digits, images, tmp_path):
    """Model, transforms and classes; predictions by them are those of `predict`."""
    random = torch.get_rng_state()
    run = drivetrain.load(digits.run_dir)
    torch.testing.assert_close(torch.get_rng_state(), random, rtol=0, atol=0)
    assert (run.classes, run.update, run.kind) == ([str(n) for n in range(10)], digits.updates, "class")
    assert not run.model.training
    assert not any(p.requires_grad for p in run.model.parameters())
    found = run.predict(images)
    assert (len(found), found.labels[:3]) == (6, [run.classes[n] for n in found.output.argmax(1)[:3].tolist()])
    assert found.probabilities is not None
    torch.testing.assert_close(run.model(run.transforms(images)).softmax(-1), found.probabilities)
    torch.testing.assert_close(run.predict(images[0]).output, found.output[:1])
    Image.fromarray((images[0, 0] * (255 / 16)).round().astype("uint8")).save(tmp_path / "0.png")
    assert run.predict(str(tmp_path / "0.png")).labels == run.predict([tmp_path / "0.png"]).labels
    assert f"update {digits.updates}" in repr(run)


def test_the_data_is_not_needed(digits, images, monkeypatch):
    """The checkpoint says what a model must know of its data."""
    from drivetrain.data.digits import Digits

    expected = drivetrain.load(digits.run_dir).predict(images).output
    monkeypatch.setattr(Digits, "load", lambda *_: pytest.fail("the data was read"))
    torch.testing.assert_close(drivetrain.load(digits.run_dir).predict(images).output, expected, rtol=0, atol=0)


def test_averaged_weights_and_other_checkpoints(digits, images):
    newest, average, first = (drivetrain.load(digits.run_dir, **k) for k in ({}, {"average": True}, {"update": 8}))
    weight = newest.model.head.weight
    assert not torch.equal(weight, average.model.head.weight)
    assert not torch.equal(weight, first.model.head.weight)
    assert first.update == 8


@pytest.mark.parametrize("shape", [(2, 1, 9, 9), (8, 8), (2, 3, 8, 8)])
def test_inputs_of_another_size(digits, shape):
    with pytest.raises(DataError, match=r"has the shape \(.*\), and the model takes \(n, 1, 8, 8\): resize it"):
        drivetrain.load(digits.run_dir).predict(np.zeros(shape))


def test_notebooks(digits, images):
    """Results and predictions are tables, with what comes from outside escaped."""
    html = drivetrain.load(digits.run_dir).predict(np.concatenate([images] * 3))._repr_html_()
    assert html.count("<tr>") == 11
    assert "and 8 more" in html
    shown = digits._repr_html_()
    assert f"{digits.tested('final')['accuracy']:.4f}" in shown
    assert "completed" in shown
    assert "&lt;b&gt;" in Result(error="<b>")._repr_html_()


def test_runs(tmp_path, train, monkeypatch):
    """A row for each run, the oldest first, with the settings in which they differ."""
    train("output_dir=out", "optimizer.lr=0.1")
    train("output_dir=out", "optimizer.lr=0.2", "model.hidden=[4]")
    frame = drivetrain.runs("out")
    assert list(frame["optimizer.lr"]) == [0.1, 0.2]
    assert list(frame["status"]) == ["completed"] * 2
    assert frame["test.final.loss"].notna().all()
    assert frame["model.hidden"][1] == (4,)
    with pytest.raises(UserError, match="nothing: there is no such folder"):
        drivetrain.runs("nothing")
    monkeypatch.setitem(__import__("sys").modules, "pandas", None)
    with pytest.raises(UserError, match=r"pip install 'drivetrain\[pandas\]'"):
        drivetrain.runs("out")
