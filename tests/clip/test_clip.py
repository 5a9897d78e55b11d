"""Gradients are bounded once an update, after unscaling, as by hand."""

from dataclasses import dataclass, field

import pytest
import torch
from timm.utils.agc import adaptive_clip_grad

from drivetrain.clip import Clip
from drivetrain.clip.base import Agc, Norm, SpikeGuard, Value
from drivetrain.core.step.step import WrappingStep
from drivetrain.parallel import Parallel

PLAIN_SGD = ["optimizer.momentum=0.0", "optimizer.nesterov=false", "optimizer.weight_decay=0.0", "optimizer.lr=0.1"]
SGD = [*PLAIN_SGD, "updates=1"]


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


def test_a_record_has_the_mean_norm_of_its_updates_before_clipping(make, fitted, float64):
    trainer = fitted(*SGD, "clip=norm", "clip.max_norm=0.001")
    by_hand = float(gradient_of_the_first_update(make, *SGD).norm())
    assert trainer.log.writers[0][0]["grad_norm"] == pytest.approx(by_hand)


def test_a_norm_below_the_limit_is_left_alone(fitted, float64):
    plain, clipped = fitted(*SGD), fitted(*SGD, "clip=norm", "clip.max_norm=1e6")
    assert torch.equal(flat(plain.model.parameters()), flat(clipped.model.parameters()))


# --- clipping by value and by the size of the weights: by hand, against timm, and the same however an update is split ---


total_norm = Parallel().norm
# bounds that bite at the tiny run's gradients
BITES = {
    "norm": ["clip=norm", "clip.max_norm=0.05"],
    "value": ["clip=value", "clip.clip_value=0.002"],
    "agc": ["clip=agc", "clip.clip_factor=0.002"],
}


def network() -> torch.nn.Sequential:
    """A convolution, a norm, a vector, a final layer and a scalar that is zero, with gradients of zero and from tiny to large."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.Flatten(), torch.nn.Linear(8, 4))
    model.register_parameter("scale", torch.nn.Parameter(torch.tensor(0.0)))
    for number, p in enumerate(model.parameters()):
        p.grad = torch.randn_like(p) * 10.0 ** (number - 3)
    model[0].weight.grad[:2] *= torch.tensor([0.0, 1e-6]).view(2, 1, 1, 1)
    return model


def gradients(model: torch.nn.Module) -> list[torch.Tensor]:
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def test_agc_bounds_biases_too_though_the_optimizer_has_them_in_a_group_after_all_weights(fitted, monkeypatch):
    bounded: list[torch.Tensor] = []
    monkeypatch.setattr(Agc, "_clip", lambda self, weights, *_: bounded.extend(weights))
    trainer = fitted("clip=agc", "optimizer=adamw", "optimizer.weight_decay=0.1", "model.hidden=[16,16]", "updates=1")
    names = {p.data_ptr(): name for name, p in trainer.model.named_parameters()}
    assert [names[weight.data_ptr()] for weight in bounded] == [name for name in names.values() if not name.startswith("head.")]


def clamp(parameters: list[torch.nn.Parameter]) -> None:
    for p in parameters:
        p.grad.clamp_(-0.01, 0.01)


@pytest.mark.parametrize(
    ("clip", "theirs"), [(Value(0.01), clamp), (Agc(0.02, 1e-3), lambda p: adaptive_clip_grad(p, 0.02, 1e-3))]
)
def test_value_is_that_by_hand_and_agc_that_of_timm(clip, theirs):
    ours, other = network(), network()
    before = gradients(ours)
    clip.create(list(ours.parameters())[:-2], total_norm)()
    theirs(list(other.parameters())[:-2])
    for mine, expected in zip(gradients(ours), gradients(other), strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-6, atol=0)
    assert 0 < sum(not torch.equal(mine, old) for mine, old in zip(gradients(ours), before, strict=True)) < len(before)


@pytest.mark.parametrize("clip", [Clip(), Norm(), Value(), Agc()], ids=lambda c: type(c).__name__)
def test_parameters_without_a_gradient_are_passed_over(clip):
    held, without = torch.nn.Parameter(torch.ones(2, 2)), torch.nn.Parameter(torch.ones(2, 2))
    held.grad = torch.full((2, 2), 9.0)
    clip.create([without, held, torch.nn.Parameter(torch.ones(2, 2))], total_norm)()
    assert without.grad is None
    assert bool((held.grad < 9.0).all()) == (type(clip) is not Clip)


@pytest.mark.parametrize("kind", BITES)
def test_it_bites_and_accumulation_changes_nothing(fitted, float64, kind):
    ends = []
    for words in (["clip=none"], BITES[kind], [*BITES[kind], "batch=accumulate", "batch.accumulation_steps=3"]):
        trainer = fitted(*PLAIN_SGD, *words, "updates=3")
        assert trainer.progress.updates == 3
        ends.append(flat(trainer.model.parameters()))
    assert float((ends[0] - ends[1]).abs().max()) > 1e-4
    torch.testing.assert_close(ends[1], ends[2], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("kind", BITES)
@pytest.mark.parametrize("fused", ["true", "false"])
def test_it_works_on_unscaled_gradients(make, kind, fused):
    """Under a scale of 4,096 the bounds would bite 4,096 times harder. A fused optimizer might unscale them itself, too late."""
    ends = []
    for scale in (1.0, 4096.0):
        trainer = make(
            *PLAIN_SGD, *BITES[kind], "precision=amp", f"precision.init_scale={scale}", f"optimizer.fused={fused}", "updates=3"
        )
        start = flat(trainer.model.parameters())
        trainer.fit()
        assert trainer.progress.updates == 3
        ends.append(flat(trainer.model.parameters()) - start)
    assert float((ends[0] - ends[1]).norm() / ends[0].norm()) < 0.02  # float16's own rounding differs by scale


@pytest.mark.parametrize(
    "words",
    [
        ["clip=value", "clip.clip_value=0"], ["clip=agc", "clip.clip_factor=-1"], ["clip=agc", "clip.eps=0"],
        *(["clip=norm", word] for word in ("clip.max_norm=0", "clip.max_norm=-1", "clip.norm_type=0")),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(problems, words):
    assert any(p.startswith(words[1]) for p in problems(*words))


@dataclass(eq=False)
class Planted(WrappingStep):
    """Makes the gradients of some attempts a thousand times as large, and notes each attempt's learning rate."""

    trainer: object
    at: tuple[int, ...]
    rates: list[tuple[int, float, bool]] = field(default_factory=list)

    def update(self) -> bool:
        number, rate = self.trainer.progress.updates, self.trainer.optimizer.param_groups[0]["lr"]
        if len(self.rates) in self.at:
            for p in self.trainer.model.parameters():
                p.grad.mul_(1000)
        self.rates.append((number, rate, self.inner.update()))
        return self.rates[-1][2]


SPIKE = ["clip=spike", "clip.window=8", "clip.factor=6", "optimizer.lr=0.01", "scheduler=linear", "updates=16"]


@pytest.mark.parametrize("words", [["precision=fp32"], ["precision=amp", "precision.init_scale=1.0"], ["precision=bf16_pure"]])
def test_an_update_whose_gradient_stands_out_is_skipped_and_nothing_moves(make, words):
    trainer = make(*SPIKE, *words)
    planted = trainer.step = Planted(trainer.step, trainer, (9,))
    trainer.fit()
    assert (trainer.progress.updates, trainer.progress.skipped) == (16, 1)
    assert [n for n, row in enumerate(planted.rates) if not row[2]] == [9]
    assert planted.rates[9][:2] == planted.rates[10][:2]  # the next attempt is of the same update, at the same rate


def test_without_spikes_it_is_exact_and_its_norms_are_saved(fitted, float64):
    plain, guarded = fitted("clip=none", *SPIKE[3:]), fitted(*SPIKE)
    assert torch.equal(flat(plain.model.parameters()), flat(guarded.model.parameters()))
    (state,) = guarded.owned.state_dict()["ranks"]
    assert len(state["clip"]["norms"]) == 8
    guard = SpikeGuard(6.0, 8)
    guard.load_state_dict(state["clip"])
    assert list(guard.norms) == state["clip"]["norms"]
    assert not guard.allows(1e3)
    assert guard.allows(float("inf"))  # the precision's


def test_a_norm_that_stays_high_is_soon_ordinary():
    guard = SpikeGuard(6.0, 16)
    assert all(guard.allows(1.0 + n % 3 / 10) for n in range(16))
    made = [guard.allows(50.0) for _ in range(20)]
    assert not made[0]
    assert all(made[3:])


@pytest.mark.parametrize(
    "words", [["compile=step"], ["optimizer=lbfgs"], ["phases={a: {parameters: [head.*]}, b: {parameters: ['*']}}"]]
)
def test_what_spikes_cannot_be_skipped_with(problems, words):
    assert any("clip=spike" in problem for problem in problems("clip=spike", *words))
