"""saving=best: which checkpoints are kept, and what a run evaluates at its end."""

import json

import pytest
import safetensors.torch
import torch

import drivetrain
from drivetrain.launch.worker import AVERAGED
from drivetrain.saving import Best, Last, checkpoint_io
from tests.support.command import records

EPOCHS = ["updates=null", "epochs=4", "data.samples=48", "optimizer.lr=0.2"]  # 4 updates each


def test_the_best_are_chosen_by_their_metric():
    assert Best(keep=2).chosen([4, 8, 12, 16], [8, 20, 4, 16]) == [4, 8]
    assert Last(keep=2).chosen([4, 8, 12, 16], [8]) == [12, 16]
    assert Best(keep=3).chosen([4, 6], [4]) == [4]  # update 6 was saved without an evaluation


def test_the_three_best_and_the_newest_are_kept(make, tmp_path, monkeypatch):
    accuracies = iter([0.5, 0.7, 0.2, 0.6, 0.7, 0.1])
    trainer = make(*EPOCHS, "epochs=6", "saving=best", "saving.keep=3")
    monkeypatch.setattr(type(trainer.evaluator), "evaluate", lambda self, stops: {"loss": 1.0, "accuracy": next(accuracies)})
    trainer.fit()
    assert list(trainer.progress.ranked) == [8, 20, 16, 4, 12, 24]  # of equal ones the earlier first
    assert checkpoint_io.updates(tmp_path / "run") == [8, 16, 20, 24]
    assert trainer.state()["progress"]["ranked"] == trainer.progress.ranked


def test_the_lowest_is_the_best_where_less_is_better(make, monkeypatch):
    losses = iter([0.5, 0.2, 0.4, 0.9])
    trainer = make(*EPOCHS, "select=loss")
    monkeypatch.setattr(type(trainer.evaluator), "evaluate", lambda self, stops: {"loss": next(losses), "accuracy": 0.0})
    trainer.fit()
    assert list(trainer.progress.ranked) == [8, 12, 4, 16]


RUNS = {
    "plain": [],
    "average": ["ema=ema", "select=ema_loss"],
    "schedule free, norm": ["optimizer=schedulefree", "model=resnet9", "model.width=4"],
    "pure bfloat16": ["precision=bf16_pure", "optimizer=adamw"],
}


@pytest.mark.parametrize("name", RUNS)
def test_the_best_checkpoint_evaluates_to_the_recorded_best_at_the_end(train, name):
    run = train(*EPOCHS, "saving=best", "metrics=[f1,per_class]", "optimizer.lr=0.5", *RUNS[name])
    assert run.status == "completed", run.error
    (recorded,) = (
        r for r in records(run.run_dir, "evaluate") if r["update"] == run.judged("best")["update"] and "weights" not in r
    )
    assert run.tested("best") == {name: recorded[name] for name in run.tested("best")}
    assert run.judged("final") != run.judged("best") or recorded["update"] == 16
    assert {name: set(of_set) for name, of_set in run.tables.items()} == {"test": {"final", "best"}}
    again = drivetrain.train([f"resume={run.run_dir}"])
    assert (again.metrics, again.updates, again.tables) == (run.metrics, 16, run.tables)


@pytest.mark.slow
def test_two_ranks_load_the_best_checkpoint(train):
    run = train(*EPOCHS, "epochs=2", "saving=best", "saving.average_kept=true", "parallel=ddp", "parallel.nproc=2")
    assert run.status == "completed", run.error
    assert {*run.judged("averaged"), "update"} == run.tested("best").keys()


@pytest.mark.parametrize("option", ["last", "best"])
def test_the_mean_of_the_kept_weights_is_evaluated_and_written(train, make, option):
    words = [*EPOCHS, f"saving={option}", "saving.keep=3", "saving.average_kept=true", "model=resnet9", "model.width=4"]
    run = train(*words)
    kept = [run.run_dir / f"checkpoints/{n}/model.safetensors" for n in checkpoint_io.updates(run.run_dir)]
    if option == "best":
        evaluations = [json.loads(line) for line in (run.run_dir / "metrics.jsonl").read_text().splitlines()]
        curve = [r for r in evaluations if r["event"] == "evaluate" and "weights" not in r]
        ranked = sorted(curve, key=lambda r: (-r["accuracy"], r["update"]))
        kept = [run.run_dir / f"checkpoints/{r['update']}/model.safetensors" for r in ranked[:3]]
    weights = [safetensors.torch.load_file(path) for path in kept]
    assert len(weights) == 3
    averaged = safetensors.torch.load_file(run.run_dir / AVERAGED)
    assert averaged.keys() == weights[0].keys()
    for name, tensor in averaged.items():
        if tensor.is_floating_point():
            torch.testing.assert_close(tensor, torch.stack([w[name].double() for w in weights]).mean(0).to(tensor.dtype))
    trainer = make(*words)
    trainer.model.load_state_dict(averaged)
    assert trainer.evaluator.metrics() == run.judged("averaged")
    assert run.judged("averaged") not in (run.judged("final"), run.judged("best"))
