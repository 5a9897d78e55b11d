"""The average under loss scaling, on several ranks, and when an evaluation fails."""

from typing import Any

import pytest
import torch

RESNET = ["model=resnet9", "model.width=8", "ema=ema", "ema.decay=0.6"]


def test_a_skipped_update_does_not_move_it(make, each_update):
    trainer = make(
        *RESNET,
        "precision=amp",
        "precision.init_scale=1e12",
        "updates=3",
        "epochs=40",
        "optimizer.lr=0.01",
        "optimizer.fused=false",
    )
    start = {name: t.clone() for name, t in trainer.ema.state_dict()["tensors"].items()}

    def moved() -> tuple[int, bool]:
        now = trainer.ema.state_dict()["tensors"]
        return trainer.progress.updates, any(not torch.equal(now[n], t) for n, t in start.items())

    seen = each_update(trainer, moved)
    trainer.fit()
    assert trainer.progress.skipped > 3
    assert trainer.progress.updates == trainer.ema.state_dict()["updates"] == 3
    assert all(was_moved == (updates > 0) for updates, was_moved in seen)


def test_the_raw_weights_come_back_when_the_evaluation_of_the_average_fails(make):
    trainer = make(*RESNET, "updates=3")
    evaluate, calls = trainer.evaluator.metrics, []

    def fails_second(*given: Any, **knobs: Any) -> dict[str, float]:
        calls.append({n: t.clone() for n, t in trainer.model.state_dict().items()})
        if len(calls) == 2:
            raise KeyboardInterrupt
        return evaluate(*given, **knobs)

    trainer.evaluator.metrics = fails_second
    with pytest.raises(KeyboardInterrupt):
        trainer.fit()
    raw, averaged = calls
    assert any(not torch.equal(raw[n], averaged[n]) for n in raw)
    assert all(torch.equal(t, raw[n]) for n, t in trainer.model.state_dict().items())
