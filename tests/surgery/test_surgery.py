"""Model edits: found by following the data, and outputs that stay the same."""

import copy

import pytest
import torch
from torch import nn

from drivetrain.core.errors import UserError
from drivetrain.surgery import ChannelsLast, NoBiasBeforeNorm, apply_all

RESNET = ["model=resnet9", "model.width=8", "model.bias=true"]
IMAGES = torch.randn(6, 3, 8, 8, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    """A model out of a forward function and named layers."""

    def __init__(self, forward, **layers: nn.Module) -> None:
        super().__init__()
        self.function = forward
        for name, layer in layers.items():
            self.add_module(name, layer)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self, x)


def after_many(m: Net, x: torch.Tensor) -> torch.Tensor:
    """Tensors that were read and freed leave their ids to the ones that follow."""
    many = [x * i for i in range(100)]
    x = torch.stack(many).mean(0)
    del many
    return m.n(m.c(x))


class ConvReLU(nn.Conv2d):
    """A convolution that is more than one."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(super().forward(x))


def conv(inputs: int = 3, outputs: int = 4) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, 3, padding=1)


def lived_in(model: nn.Module) -> nn.Module:
    """Biases, statistics and scales as after some training, none of them 0 or 1."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if tensor.is_floating_point() and tensor.ndim == 1:
                tensor.copy_(torch.rand(tensor.shape, generator=generator) + (0.5 if "var" in name else 0.1))
    return model


def biases(model: nn.Module) -> list[str]:
    return [n for n, m in model.named_modules() if isinstance(m, nn.Conv2d | nn.Linear) and m.bias is not None]


def assert_same_outputs(before: nn.Module, after: nn.Module, x: torch.Tensor) -> None:
    """In evaluation, in training, and in evaluation with the statistics of that training."""
    for training in (False, True, False):
        a, b = before.train(training)(x), after.train(training)(x)
        torch.testing.assert_close(b, a, rtol=1e-4, atol=1e-5)
        assert a.std() > 1e-3


class FrozenNorm(nn.BatchNorm2d):
    """Normalises by its running figures in training too, as in fine-tuning: the bias before it trains."""

    def train(self, mode=True):
        return super().train(False)


REMOVED = {
    "one after the other": (
        lambda: Net(lambda m, x: m.b(m.d(m.a(m.c(x)).relu())), c=conv(), a=nn.BatchNorm2d(4), d=conv(4, 5), b=nn.BatchNorm2d(5)),
        2,
    ),
    "a linear layer": (lambda: Net(lambda m, x: m.n(m.l(x.flatten(1))), l=nn.Linear(192, 7), n=nn.BatchNorm1d(7)), 1),
    "a norm without running statistics": (
        lambda: Net(lambda m, x: m.n(m.c(x)), c=conv(), n=nn.BatchNorm2d(4, track_running_stats=False)),
        1,
    ),
    "a norm without scale and shift": (lambda: Net(lambda m, x: m.n(m.c(x)), c=conv(), n=nn.BatchNorm2d(4, affine=False)), 1),
    "a residual block": (
        lambda: Net(
            lambda m, x: m.c(x) + m.b(m.e(m.a(m.d(m.c(x))).relu())),
            c=conv(), d=conv(4, 4), a=nn.BatchNorm2d(4), e=conv(4, 4), b=nn.BatchNorm2d(4),
        ),
        2,
    ),
    "through pools": (
        lambda: nn.Sequential(
            *(layer for i in range(3) for layer in (conv(3 if not i else 4), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2)))
        ),
        3,
    ),
}  # fmt: skip


def two_layers_of_one_bias():
    net = Net(lambda m, x: m.n(m.c(x)), c=conv(), d=conv(), n=nn.BatchNorm2d(4))  # this forward calls one of them
    net.d.bias = net.c.bias
    return net


KEPT = {
    "a bias that two layers share": two_layers_of_one_bias,
    "pre-activation": lambda: Net(
        lambda m, x: x + m.d(m.b(x + m.c(m.a(x).relu())).relu()),
        a=nn.BatchNorm2d(3), c=conv(3, 3), b=nn.BatchNorm2d(3), d=conv(3, 3),
    ),
    "read by a norm and by something else": lambda: Net(
        lambda m, x: (lambda y: m.n(y) + y.mean((2, 3), keepdim=True))(m.c(x)), c=conv(), n=nn.BatchNorm2d(4)
    ),
    "read by a norm and given out": lambda: Net(
        lambda m, x: (lambda y: torch.cat([m.n(y), y], 1))(m.c(x)), c=conv(), n=nn.BatchNorm2d(4)
    ),
    "called twice": lambda: Net(lambda m, x: m.n(m.c(m.c(x))), c=conv(3, 3), n=nn.BatchNorm2d(3)),
    "called twice with two norms": lambda: Net(
        lambda m, x: m.a(m.c(x)) + m.b(m.c(2 * x)), c=conv(), a=nn.BatchNorm2d(4), b=nn.BatchNorm2d(4)
    ),
    "a norm of two layers": lambda: Net(lambda m, x: m.n(m.c(x)) + m.n(m.d(x)), c=conv(), d=conv(), n=nn.BatchNorm2d(4)),
    "an activation between": lambda: Net(lambda m, x: m.n(m.c(x).relu()), c=conv(), n=nn.BatchNorm2d(4)),
    "a frozen norm": lambda: Net(lambda m, x: m.n(m.c(x)), c=conv(), n=FrozenNorm(4)),
    "a group norm": lambda: Net(lambda m, x: m.n(m.c(x)), c=conv(), n=nn.GroupNorm(2, 4)),
    "an activation within the layer's class": lambda: Net(
        lambda m, x: m.n(m.c(x)), c=ConvReLU(3, 4, 3, padding=1), n=nn.BatchNorm2d(4)
    ),
    "a norm over another dimension": lambda: Net(
        lambda m, x: m.n(m.l(x.flatten(2))), l=nn.Linear(64, 3), n=nn.BatchNorm1d(3)
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REMOVED)
def test_a_bias_that_a_batch_norm_subtracts_goes_and_outputs_stay(name):
    build, count = REMOVED[name]
    before = lived_in(build())
    after = copy.deepcopy(before)
    had = biases(after)
    said = NoBiasBeforeNorm().apply(after, torch.zeros(2, 3, 8, 8))
    assert said.startswith(f"{count} biases")
    assert len(biases(after)) == len(had) - count
    assert sum(p.numel() for p in after.parameters()) < sum(p.numel() for p in before.parameters())
    assert_same_outputs(before, after, IMAGES)


@pytest.mark.parametrize("name", KEPT)
def test_any_other_bias_stays(name):
    before = lived_in(KEPT[name]())
    after = copy.deepcopy(before)
    said = NoBiasBeforeNorm().apply(after, torch.zeros(2, 3, 8, 8))
    assert said.startswith(("0 biases", "no bias"))
    assert biases(after) == biases(before) != []
    assert_same_outputs(before, after, IMAGES)


def test_resnet9_loses_all_eight(make, caplog):
    plain, edited = make(*RESNET), make(*RESNET, "surgery=[no_bias_before_norm]")
    assert caplog.messages == ["8 biases before a BatchNorm removed"]
    assert biases(edited.model) == ["head"]
    assert len(biases(plain.model)) == 9


def test_tensors_that_are_gone_are_not_taken_for_those_that_follow():
    for _ in range(10):  # an id is free again when its tensor is; which tensor gets it is chance
        model = Net(after_many, c=conv(), n=nn.BatchNorm2d(4))
        assert NoBiasBeforeNorm().apply(model, torch.zeros(2, 3, 8, 8)).startswith("1 biases")


def test_resnet9_gives_the_same_outputs_without_them(make):
    model = lived_in(make(*RESNET).model)
    edited = copy.deepcopy(model)
    NoBiasBeforeNorm().apply(edited, torch.zeros(2, 3, 8, 8))
    assert_same_outputs(model, edited, IMAGES)


def test_looking_for_them_leaves_nothing_behind(make):
    model = make(*RESNET).model.train()
    buffers = {name: b.clone() for name, b in model.named_buffers()}
    NoBiasBeforeNorm().apply(model, torch.zeros(2, 3, 8, 8))
    assert model.training
    assert all(torch.equal(b, buffers[name]) for name, b in model.named_buffers() if "mean" not in name)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_training_without_them_equals_training_with_them(make):
    """The removed biases had no gradient to speak of, so the two runs are one but for rounding."""
    losses = []
    for surgery in ("[]", "[no_bias_before_norm]"):
        trainer = make(*RESNET, f"surgery={surgery}", "optimizer.lr=0.001", "updates=3")
        trainer.fit()
        losses.append([r["loss"] for r in trainer.log.writers[0] if r["event"] == "train"])
    assert len(losses[0]) == 3
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)


def test_an_edit_without_effect_is_refused():
    with pytest.raises(UserError, match=r"no_bias_before_norm has no effect on this model.*leave it out"):
        apply_all([NoBiasBeforeNorm()], nn.Sequential(nn.Conv2d(3, 4, 3), nn.LayerNorm(6)), IMAGES)
    with pytest.raises(UserError, match=r"surgery=channels_last has no effect.*leave it out"):
        apply_all([ChannelsLast()], nn.Sequential(nn.Flatten(), nn.Linear(192, 4)), IMAGES)


def test_a_model_that_is_built_without_such_biases_is_left_as_it_is():
    """What was asked for holds already: that is said, and the model trains."""
    (said,) = apply_all([NoBiasBeforeNorm()], nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4)), IMAGES)
    assert said.startswith("no bias before a BatchNorm to remove")


def test_channels_last_reaches_weights_images_and_activations(make):
    trainer = make("model=resnet9", "model.width=8", "surgery=[channels_last]")
    seen = []
    for m in trainer.model.modules():
        if isinstance(m, nn.Conv2d):
            m.register_forward_hook(lambda m, i, o: seen.extend([i[0], o, m.weight]))
    trainer.fit()
    assert len(seen) >= 3 * 8 * 3
    wide = [t for t in seen if t.shape[1] > 1 and t.shape[2] > 1]  # a 1×1 image is contiguous in every order
    assert len(wide) > 20
    assert all(t.is_contiguous(memory_format=torch.channels_last) and not t.is_contiguous() for t in wide)


def test_channels_last_computes_the_same(make):
    ends = []
    for surgery in ("[]", "[channels_last]"):
        trainer = make("model=resnet9", "model.width=8", f"surgery={surgery}", "optimizer.lr=0.001", "updates=3")
        trainer.fit()
        assert trainer.progress.updates == 3
        ends.append(trainer.log.writers[0][-1]["loss"])
    assert ends[1] == pytest.approx(ends[0], rel=1e-3)


def test_both_edits_together(make, caplog):
    trainer = make(*RESNET, "surgery=[channels_last,no_bias_before_norm]")
    assert len(caplog.messages) == 2
    assert trainer.memory_format == torch.channels_last
    trainer.fit()
    assert trainer.progress.updates == 2


def test_images_are_needed(problems):
    (problem,) = problems("surgery=[channels_last]", "data.shape=[12]")
    assert "surgery=[channels_last] wants images" in problem
    assert any("twice" in p for p in problems("surgery=[channels_last,channels_last]"))
    assert any("did you mean 'channels_last'" in p for p in problems("surgery=[chanels_last]"))
