"""A model's own `after_update(progress)`: a teacher that follows, and weights that stay within bounds."""

import copy

import pytest
import torch
from torch import nn

from drivetrain.core.errors import UserError
from tests.support.command import tensors

WORDS = ["model=own", f"model.target={__name__}.Bounded", "trust=[tests]", "updates=5", "epochs=5", "optimizer.lr=0.2"]
BOUND = 0.1


class Bounded(nn.Module):
    """Weights within ± BOUND, and a teacher that is their average with a decay that rises over the run."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(3 * 8 * 8, 4)
        self.teacher = copy.deepcopy(self.head).requires_grad_(False)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x.flatten(1))

    def after_update(self, progress) -> None:
        assert progress.training
        assert progress.updates == 5
        self.calls += 1
        assert progress.update == self.calls
        self.head.weight.clamp_(-BOUND, BOUND)
        for mine, new in zip(self.teacher.parameters(), self.head.parameters(), strict=True):
            mine.lerp_(new, 1 - progress.update / progress.updates)


class Listless(Bounded):
    def after_update(self) -> None:
        raise AssertionError


def test_it_is_called_after_each_update_that_was_made(make, each_update):
    """An overflow calls nothing, and the run's average is over what it leaves of the weights."""
    trainer = make(*WORDS, "ema=ema", "ema.decay=0.5", "ema.warmup=false", "precision=amp", f"precision.init_scale={2.0**24}")
    weights, average = trainer.model.head.weight, trainer.model.head.weight.detach().clone()
    steps = each_update(trainer, lambda: (weights.detach().clone(), int(trainer.model.calls), trainer.progress.updates))
    trainer.fit()
    assert trainer.progress.skipped > 0
    assert all(calls == updates for _, calls, updates in steps)
    assert weights.abs().max() == BOUND
    for now in {calls: now for now, calls, _ in steps if calls}.values():
        average.lerp_(now, 0.5)
    torch.testing.assert_close(trainer.ema.state_dict()["tensors"]["head.weight"], average)


def test_it_equals_a_loop_by_hand(make):
    trainer = make(*WORDS, "optimizer=sgd", "optimizer.momentum=0", "optimizer.nesterov=false", "optimizer.weight_decay=0",
                   "scheduler=constant")  # fmt: skip
    model = copy.deepcopy(trainer.model)
    optimizer = torch.optim.SGD(model.head.parameters(), lr=0.2)
    stream = trainer.read()
    for n, batch in zip(range(1, 6), stream, strict=False):
        nn.functional.cross_entropy(model(batch.x), batch.y).backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            model.head.weight.clamp_(-BOUND, BOUND)
            for mine, new in zip(model.teacher.parameters(), model.head.parameters(), strict=True):
                mine.lerp_(new, 1 - n / 5)
    trainer.fit()
    for ours, plain in zip(trainer.model.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(ours, plain, atol=1e-6, rtol=0)


def test_it_goes_with_ranks_and_a_whole_step_graph(train, recorded):
    one = tensors(train(*WORDS))
    for words in (["parallel=ddp", "parallel.nproc=2"], ["compile=step"]):
        for name, value in tensors(train(*WORDS, *words)).items():
            torch.testing.assert_close(value, one[name], atol=1e-5, rtol=1e-4)
    assert recorded


def test_what_cannot_be_is_refused(make):
    with pytest.raises(UserError, match=r"after_update of model=own cannot be called as \(progress\)"):
        make("model=own", f"model.target={__name__}.Listless", *WORDS[2:])
    with pytest.raises(UserError, match="trains copies of them: set precision=bf16"):
        make(*WORDS, "precision=bf16_pure")
