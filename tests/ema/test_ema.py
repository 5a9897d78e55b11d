"""The average of the weights: as by hand, swapped in and back, saved and gone on with."""

import contextlib
from types import SimpleNamespace

import pytest
import torch

from drivetrain.ema import Average, PostHoc
from tests.support.context import context

RESNET = ["model=resnet9", "model.width=8", "ema=ema", "ema.decay=0.6", "updates=4"]


def state(model) -> dict[str, torch.Tensor]:
    return {name: t.detach().clone() for name, t in model.state_dict().items()}


@pytest.mark.parametrize("buffers", ["average", "copy"])
@pytest.mark.parametrize("warmup", ["true", "false"])
def test_the_average_equals_the_hand_computation(make, each_update, float64, buffers, warmup):
    trainer = make(*RESNET, f"ema.buffers={buffers}", f"ema.warmup={warmup}")
    expected = state(trainer.model)
    weights = each_update(trainer, lambda: state(trainer.model))
    trainer.fit()
    parameters = dict(trainer.model.named_parameters())
    assert len(weights) == 4
    for n, now in enumerate(weights, 1):
        decay = min(0.6, (1 + n) / (10 + n)) if warmup == "true" else 0.6
        for name, value in now.items():
            averaged = name in parameters or (value.is_floating_point() and buffers == "average")
            expected[name] = decay * expected[name] + (1 - decay) * value if averaged else value
    average = trainer.ema.state_dict()["tensors"]
    assert average.keys() == expected.keys()
    assert "features.0.1.num_batches_tracked" in average
    for name, value in expected.items():
        torch.testing.assert_close(average[name], value, rtol=1e-12, atol=1e-14)
    assert not torch.allclose(average["head.weight"], weights[-1]["head.weight"])
    assert average["features.0.1.num_batches_tracked"] == 4


class Keeps(torch.nn.Module):
    """A network with buffers that have no mean."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.utils.parametrizations.spectral_norm(torch.nn.Linear(4, 4))
        self.norm = torch.nn.BatchNorm1d(4)
        self.register_buffer("mask", torch.full((4, 4), -torch.inf).triu(1))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))


@pytest.mark.parametrize("kind", [Average(decay=0.5), PostHoc()])
def test_buffers_that_have_no_mean_are_copied(kind):
    model = Keeps()
    average = kind.build(context(model=model, horizon=SimpleNamespace(updates=3)))
    for n in range(3):
        with torch.no_grad():
            model.linear.parametrizations.weight.original.normal_()
            model.norm.running_mean += 1
            model.seen += 1
            model.linear(torch.ones(2, 4))  # moves the vectors
        average.update()
        kept = average.state_dict()["tensors"]
        assert torch.equal(kept["mask"], model.mask)
        assert kept["seen"] == n + 1
        vectors = model.linear.parametrizations.weight[0]
        assert torch.equal(kept["linear.parametrizations.weight.0._u"], vectors._u)
    assert (kept["norm.running_mean"] < model.norm.running_mean).all()
    with average.swapped():
        assert torch.equal(model.mask, Keeps().mask)


def test_it_stands_in_the_model_only_while_swapped_also_on_an_exception(make):
    trainer = make(*RESNET)
    trainer.fit()
    raw, average = state(trainer.model), {k: v.clone() for k, v in trainer.ema.state_dict()["tensors"].items()}
    with contextlib.suppress(KeyError), trainer.ema.swapped():
        assert all(torch.equal(t, average[name]) for name, t in trainer.model.state_dict().items())
        raise KeyError
    assert all(torch.equal(t, raw[name]) for name, t in trainer.model.state_dict().items())
    assert all(torch.equal(t, average[name]) for name, t in trainer.ema.state_dict()["tensors"].items())
    assert any(not torch.equal(raw[name], average[name]) for name in raw)


def test_it_is_evaluated_beside_the_weights(make):
    trainer = make(*RESNET)
    trainer.fit()
    (record,) = [r for r in trainer.log.writers[0] if r["event"] == "evaluate"]
    average = trainer.ema.state_dict()["tensors"]
    other = make(*RESNET)
    other.model.load_state_dict(average)
    alone = other.evaluator.metrics()
    assert record["ema_loss"] == pytest.approx(alone["loss"], rel=1e-6)
    assert record["ema_loss"] != record["loss"]
    assert record["ema_accuracy"] == alone["accuracy"]


def test_it_goes_on_where_it_was(make):
    trainer = make(*RESNET)
    trainer.fit()
    saved = trainer.state()
    again = make(*RESNET)
    fresh = again.ema.state_dict()["tensors"]["head.weight"].clone()
    again.restore(trainer.model.state_dict(), saved)
    assert again.ema.state_dict()["updates"] == 4
    for name, value in saved["ema"]["tensors"].items():
        assert torch.equal(again.ema.state_dict()["tensors"][name], value)
    assert not torch.equal(fresh, again.ema.state_dict()["tensors"]["head.weight"])


def test_it_does_not_change_the_training(make):
    ends = []
    for words in (["ema=none"], ["ema=ema"]):
        trainer = make("model.dropout=0.5", *words)
        trainer.fit()
        assert trainer.progress.updates == 2
        ends.append(state(trainer.model))
    assert all(torch.equal(a, b) for a, b in zip(ends[0].values(), ends[1].values(), strict=True))


def test_it_keeps_no_graph(make):
    trainer = make(*RESNET)
    trainer.fit()
    assert not any(t.requires_grad for t in trainer.ema.state_dict()["tensors"].values())


@pytest.mark.parametrize("word", ["ema.decay=1.5", "ema.decay=-0.1", "ema.buffers=forget"])
def test_what_cannot_be_is_refused(problems, word):
    assert any(p.startswith(word) for p in problems("ema=ema", word))
