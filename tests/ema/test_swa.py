"""The mean of the last weights: as torch's AveragedModel and update_bn, also where a run goes on and on several ranks."""

import copy
import json

import pytest
import torch
from torch.optim import swa_utils

from drivetrain.core.order import shuffled
from drivetrain.saving import checkpoint_io

MLP = ["ema=swa", "ema.every=1", "updates=8"]  # 4 updates an epoch
RESNET = ["model=resnet9", "model.width=4", *MLP]


def tensors(trainer) -> dict[str, torch.Tensor]:
    return {name: t.clone() for name, t in trainer.ema.state_dict()["tensors"].items()}


def same(a, b) -> bool:
    return a.keys() == b.keys() and all(torch.equal(t, b[name]) for name, t in a.items())


@pytest.mark.parametrize(
    ("start", "every", "averaged"),
    [("0.5", "1", [5, 6, 7, 8]), ("0.25", "3", [5, 8]), ("2", "1ep", [4, 8]), ("1ep", "2", [6, 8]), ("0.875", "5", [8])],
)
def test_it_equals_torchs_averaged_model_over_the_updates_that_are_due(make, each_update, float64, start, every, averaged):
    trainer = make("ema=swa", f"ema.start={start}", f"ema.every={every}", "updates=8")
    reference = swa_utils.AveragedModel(trainer.model)

    def average() -> tuple[bool, int]:
        at = trainer.progress.updates
        if at in averaged:
            reference.update_parameters(trainer.model)
        return trainer.ema.started, at

    seen = each_update(trainer, average)
    trainer.fit()
    assert seen == [(at >= averaged[0], at) for at in range(1, 9)]
    found, last = tensors(trainer), trainer.model.state_dict()
    for name, value in reference.module.state_dict().items():
        torch.testing.assert_close(found[name], value, rtol=1e-13, atol=1e-15)
        assert torch.equal(found[name], last[name]) == (len(averaged) == 1)


def test_batch_norms_statistics_are_those_of_torchs_update_bn(make, float64):
    """Over the batches of the first epoch, with dropout; nothing of the training moves by it."""
    trainer = make(*RESNET, "ema.statistics_updates=3", "updates=7")
    trainer.fit()
    reference = copy.deepcopy(trainer.model)
    found, random, live = tensors(trainer), torch.get_rng_state(), copy.deepcopy(trainer.model.state_dict())
    reference.load_state_dict(found)
    requests = list(trainer.batch.over(shuffled(48)).requests(trainer.seed, 0, trainer.parallel.data_world, True))[:3]
    swa_utils.update_bn((trainer.train_data(request)[0] for request in requests), reference)
    for name, value in reference.state_dict().items():
        torch.testing.assert_close(found[name], value, rtol=1e-12, atol=1e-14)
    assert found["features.0.1.num_batches_tracked"] == 3
    assert not torch.allclose(found["features.0.1.running_mean"], live["features.0.1.running_mean"], rtol=1e-3)
    trainer.ema.stale = True  # an estimate more, which is the same
    assert same(found, tensors(trainer))
    assert torch.equal(random, torch.get_rng_state())
    assert same(live, trainer.model.state_dict())
    assert trainer.model.features[0][1].momentum == 0.1


def test_without_them_they_are_averaged_as_weights_are(make, each_update, float64):
    trainer = make(*RESNET, "ema.statistics_updates=0", "ema.start=0.75")
    seen = each_update(trainer, lambda: trainer.model.state_dict()["features.0.1.running_var"].clone())
    trainer.fit()
    torch.testing.assert_close(tensors(trainer)["features.0.1.running_var"], (seen[6] + seen[7]) / 2, rtol=1e-13, atol=0.0)


def test_frozen_norms_keep_their_statistics(make):
    trainer = make(*RESNET, "model.freeze=[features.0]")
    trainer.fit()
    found, live = tensors(trainer), trainer.model.state_dict()
    for name in ("features.0.1.running_mean", "features.0.1.num_batches_tracked"):
        assert torch.equal(found[name], live[name])
    assert not torch.equal(found["features.1.1.running_mean"], live["features.1.1.running_mean"])


def test_it_is_evaluated_beside_the_weights_once_there_is_one(make):
    trainer = make(*RESNET, "epochs=3", "updates=12", "ema.start=0.5")
    trainer.fit()
    first, *later = [r for r in trainer.log.writers[0] if r["event"] == "evaluate"]
    assert first["ema_loss"] == first["loss"]  # after 4 updates
    assert [r["ema_loss"] == r["loss"] for r in later] == [False, False]
    alone = make(*RESNET)
    alone.model.load_state_dict(trainer.ema.state_dict()["tensors"])
    assert later[-1]["ema_loss"] == pytest.approx(alone.evaluator.metrics()["loss"], rel=1e-6)


@pytest.mark.parametrize("before", [2, 6])
def test_a_run_that_goes_on_is_the_run_that_was_not_stopped(make, before):
    """From before the first weights are averaged, and from between two; with dropout, whose random numbers an estimate draws."""
    words = ["model.dropout=0.2", *MLP, "ema.start=0.5"]
    whole = make(*words)
    whole.fit()
    part = make(*words)
    part.max_updates = before
    part.fit()
    saved = copy.deepcopy((dict(part.model.state_dict()), part.state()))
    again = make(*words)
    again.restore(*saved)
    again.fit()
    assert same(whole.model.state_dict(), again.model.state_dict())
    assert same(tensors(whole), tensors(again))
    assert again.ema.state_dict()["updates"] == 4


def test_it_does_not_change_the_training(make):
    """Nor the random numbers of dropout, which an estimate draws too."""
    ends = []
    for words in (["ema=none", "updates=8"], [*MLP, "ema.start=0.25", "ema.statistics_updates=1"]):
        trainer = make("model=resnet9", "model.width=4", *words)
        trainer.model.features[0].append(torch.nn.Dropout(0.3))
        trainer.fit()
        ends.append(trainer.model.state_dict())
    assert same(*ends)


@pytest.mark.parametrize(
    "loader", ["threads", *(pytest.param(name, marks=pytest.mark.slow) for name in ("workers", "resident", "device"))]
)
def test_an_estimate_reads_beside_the_training_with_any_loader(make, loader):
    found = []
    for option in ("sync", loader):
        trainer = make("data=digits", *RESNET, f"loader={option}", "ema.statistics_updates=2", "updates=3")
        trainer.fit()
        found.append(tensors(trainer))
    assert same(*found)


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("ema.start=8", "ema.start=8 is update 8, and the run ends with update 8, so that nothing would be averaged"),
        ("ema.start=1.5", "ema.start=1.5 is no length"),
        ("ema.every=often", "ema.every=often"),
        ("ema.statistics_updates=-1", "ema.statistics_updates=-1"),
    ],
)
def test_what_cannot_be_is_refused(problems, word, says):
    assert any(p.startswith(says) for p in problems(*MLP, word))


@pytest.mark.slow
def test_two_ranks_have_the_average_of_one_process(make, train):
    """With the same micro-batches, as BatchNorm takes its statistics of each."""
    words = [*RESNET, "ema.start=0.5", "ema.statistics_updates=3", "precision=fp32"]
    alone = train(*words, "batch=accumulate", "batch.accumulation_steps=2")
    two = train(*words, "parallel=ddp", "parallel.nproc=2")
    states = [checkpoint_io.load(result.run_dir / "checkpoints" / "8")[1]["ema"] for result in (alone, two)]
    for name, value in states[0]["tensors"].items():
        if "tracked" not in name:
            torch.testing.assert_close(states[1]["tensors"][name], value, rtol=1e-4, atol=1e-5)
    lines = [json.loads(line) for line in (two.run_dir / "metrics.jsonl").read_text().splitlines()]
    (said,) = [r for r in lines if r["event"] == "evaluate"][-1:]
    evaluated = make(*words)
    evaluated.model.load_state_dict(states[1]["tensors"])
    assert said["ema_loss"] == pytest.approx(evaluated.evaluator.metrics()["loss"], rel=1e-5)
