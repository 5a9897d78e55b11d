"""Whole runs: every optimizer learns the digits, and what is evaluated, saved and resumed are the right weights."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

import drivetrain
from drivetrain.run.result import Result

RATES: dict[str, list[str]] = {
    "sgd": [], "adam": [], "adamw": [], "rmsprop": [], "adagrad": [], "adafactor": [], "lars": ["optimizer.lr=1"],
    "lamb": [], "nvlamb": [], "novograd": [], "muon": [], "lion": [], "schedulefree": ["scheduler=constant"],
    "shampoo": [], "soap": [], "timm": [],
}  # fmt: skip


def short(names: Iterable[str], *normal: str) -> list[Any]:
    """All of the names; those that are not `normal` are slow tests."""
    return [name if name in normal else pytest.param(name, marks=pytest.mark.slow) for name in names]


def run(out: Path, *words: str, epochs: int = 5) -> Result:
    fixed = ["model=mlp", f"epochs={epochs}", f"output_dir={out}", "runtime.threads=1"]
    result = drivetrain.train([*fixed, *words])
    assert result.status == "completed", result.error
    return result


def newest(result: Result) -> Path:
    return max((result.run_dir / "checkpoints").iterdir(), key=lambda p: int(p.name))


def weights(result: Result) -> dict[str, torch.Tensor]:
    return safetensors.torch.load_file(newest(result) / "model.safetensors")


@pytest.mark.parametrize("name", short(RATES, "adamw", "timm"))
def test_learns_the_digits(name: str, tmp_path: Path) -> None:
    result = run(tmp_path, f"optimizer={name}", *RATES[name])
    assert result.judged("final")["accuracy"] > 0.85  # chance is 0.1


def test_schedulefree_evaluates_and_saves_the_average(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from drivetrain.engine.evaluator import Evaluator
    from drivetrain.engine.trainer import Trainer
    from drivetrain.optimizer.algorithms.schedulefree import ScheduleFree

    seen: dict[str, Any] = {}
    metrics, fit = Evaluator.metrics, Trainer.fit

    def watched(evaluator: Evaluator, **knobs: Any) -> dict[str, float]:
        seen["evaluated"] = [p.detach().clone() for p in evaluator.model.parameters()]
        return metrics(evaluator, **knobs)

    def ended(trainer: Trainer, stop: Any) -> None:
        fit(trainer, stop)
        seen["trained"] = {n: p.detach().clone() for n, p in trainer.model.named_parameters()}
        seen["optimizer"], seen["model"] = trainer.optimizer, trainer.model

    monkeypatch.setattr(Evaluator, "metrics", watched)
    monkeypatch.setattr(Trainer, "fit", ended)
    result = run(tmp_path, "optimizer=schedulefree", "scheduler=constant", epochs=2)
    saved = weights(result)
    assert isinstance(seen["optimizer"], ScheduleFree)
    assert all(torch.equal(p, saved[n]) for p, n in zip(seen["evaluated"], seen["trained"], strict=True))
    assert any(not torch.equal(saved[n], p) for n, p in seen["trained"].items())
    kept = torch.load(newest(result) / "state.pt", weights_only=True)["optimizer"]["state"]
    trained = {p: seen["trained"][n] for n, p in seen["model"].named_parameters()}
    order = (p for group in seen["optimizer"].param_groups for p in group["params"])
    assert all(torch.equal(kept[i]["y"], trained[p]) for i, p in enumerate(order))


@pytest.mark.parametrize("name", short(["sgd", "lamb", "novograd", "muon"], "lamb"))
def test_with_loss_scaling(name: str, tmp_path: Path) -> None:
    result = run(tmp_path, f"optimizer={name}", "precision=amp", "batch=accumulate", "batch.accumulation_steps=2", epochs=3)
    assert result.judged("final")["accuracy"] > 0.7


def test_groups_reach_the_run(tmp_path: Path) -> None:
    words = [
        "optimizer=lamb",
        "optimizer.layer_decay=0.7",
        "optimizer.lr_multipliers={head: 2}",
        "optimizer.no_weight_decay=[layers.1]",
    ]
    assert run(tmp_path, *words).judged("final")["accuracy"] > 0.8
