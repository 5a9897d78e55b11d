"""Gradients are bounded once an update, after unscaling, as by hand."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

SGD = ["optimizer.momentum=0.0", "optimizer.nesterov=false", "optimizer.weight_decay=0.0", "optimizer.lr=0.1", "updates=1"]


def flat(tensors) -> torch.Tensor:
    return torch.cat([t.detach().flatten() for t in tensors])


def gradient_of_the_first_update(make, *words: str) -> torch.Tensor:
    """By hand: the mean loss over the samples of update 0, in one backward."""
    trainer = make(*words)
    request = next(trainer.requests())
    x, y = trainer.train_data.source.fetch(request.indices)
    with trainer.precision.autocast():
        loss = torch.nn.functional.cross_entropy(trainer.model(x), y)
    loss.backward()
    return flat(p.grad for p in trainer.model.parameters())


@pytest.mark.parametrize("norm_type", [1.0, 2.0])
@pytest.mark.parametrize("split", [[], ["batch=accumulate", "batch.accumulation_steps=3"]], ids=["whole", "accumulated"])
def test_norm_equals_the_hand_computation(make, float64, norm_type, split):
    gradient = gradient_of_the_first_update(make, *SGD)
    norm = torch.linalg.vector_norm(gradient, norm_type)
    limit = float(norm) / 4
    trainer = make(*SGD, *split, "clip=norm", f"clip.max_norm={limit}", f"clip.norm_type={norm_type}")
    start = flat(trainer.model.parameters())
    trainer.fit()
    expected = start - 0.1 * gradient * limit / (norm + 1e-6)  # torch's formula, its 1e-6 included
    torch.testing.assert_close(flat(trainer.model.parameters()), expected, rtol=1e-10, atol=1e-13)
    assert norm > 0.01


def test_a_record_has_the_mean_norm_of_its_updates_before_clipping(make, float64):
    gradient = gradient_of_the_first_update(make, *SGD)
    trainer, records = make(*SGD, "clip=norm", "clip.max_norm=0.001"), []
    trainer.log.writers = [SimpleNamespace(log=records.append)]
    trainer.fit()
    assert records[0]["grad_norm"] == pytest.approx(float(gradient.norm()))


def test_a_norm_below_the_limit_is_left_alone(make, float64):
    ends = []
    for words in ([], ["clip=norm", "clip.max_norm=1e6"]):
        trainer = make(*SGD, *words)
        trainer.fit()
        ends.append(flat(trainer.model.parameters()))
    assert torch.equal(*ends)


@pytest.mark.parametrize("fused", ["true", "false"])
@pytest.mark.parametrize("scale", [1.0, 1024.0])
def test_the_norm_is_that_of_the_unscaled_gradients(make, each_update, fused, scale):
    """With a scale of 1,024 in place, a fused optimizer that unscales itself must not get clipped scaled gradients."""
    amp = [*SGD, "precision=amp", f"precision.init_scale={scale}", f"optimizer.fused={fused}"]
    trainer = make(*amp, "clip=norm", "clip.max_norm=0.1")
    before = []
    clip = trainer.step.clip
    seen = lambda: (before.append(flat(p.grad for p in trainer.model.parameters())), clip())  # noqa: E731
    trainer.step = replace(trainer.step, clip=seen)
    gradients = each_update(trainer, lambda: flat(p.grad for p in trainer.model.parameters()))
    start = flat(trainer.model.parameters())
    trainer.fit()
    assert len(before) == len(gradients) == 1
    by_hand = gradient_of_the_first_update(make, *SGD)
    assert float((before[0] - by_hand).norm() / by_hand.norm()) < 0.05  # float16 against float32
    assert float(gradients[0].norm()) == pytest.approx(0.1, rel=1e-4)
    torch.testing.assert_close(flat(trainer.model.parameters()), start - 0.1 * gradients[0], rtol=1e-4, atol=1e-7)


def test_clipping_happens_once_an_update_not_once_a_micro_batch(make):
    trainer = make("clip=norm", "batch=accumulate", "batch.accumulation_steps=3", "updates=2")
    calls, step = [], trainer.step.inner  # within the measurement of the noise scale
    trainer.step = replace(trainer.step, inner=replace(step, clip=lambda: (calls.append(1), step.clip())))
    trainer.fit()
    assert len(calls) == trainer.progress.updates == 2


@pytest.mark.parametrize("word", ["clip.max_norm=0", "clip.max_norm=-1", "clip.norm_type=0"])
def test_what_cannot_be_is_refused(problems, word):
    assert any(p.startswith(word) for p in problems("clip=norm", word))
