"""Model edits: found by following the data, and outputs that stay the same."""

import copy
import re

import pytest
import torch
from torch import nn

from drivetrain.core.errors import UserError
from drivetrain.surgery.base import ChannelsLast, apply_all
from drivetrain.surgery.fused_norm import FusedNorm, fused_form, recognise
from drivetrain.surgery.no_bias_before_norm import NoBiasBeforeNorm
from drivetrain.surgery.rank_norms import synchronised
from drivetrain.surgery.sync_bn import SyncBn, partial_statistics
from tests.support.command import tensors

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
    assert NoBiasBeforeNorm().apply(after, torch.zeros(2, 3, 8, 8)).startswith(f"{count} biases")
    assert len(biases(after)) == len(had) - count
    assert sum(p.numel() for p in after.parameters()) < sum(p.numel() for p in before.parameters())
    assert_same_outputs(before, after, IMAGES)


@pytest.mark.parametrize("name", KEPT)
def test_any_other_bias_stays(name):
    before = lived_in(KEPT[name]())
    after = copy.deepcopy(before)
    assert NoBiasBeforeNorm().apply(after, torch.zeros(2, 3, 8, 8)).startswith(("0 biases", "no bias"))
    assert biases(after) == biases(before) != []
    assert_same_outputs(before, after, IMAGES)


def test_resnet9_loses_all_eight_and_is_left_as_it_was_else(make, caplog):
    model = make(*RESNET, "surgery=[no_bias_before_norm]").model
    assert caplog.messages == ["8 biases before a BatchNorm removed"]
    assert biases(model) == ["head"]
    before = lived_in(make(*RESNET).model.train())
    after = copy.deepcopy(before)
    NoBiasBeforeNorm().apply(after, torch.zeros(2, 3, 8, 8))
    assert after.training
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in after.modules())
    left = {name: b for name, b in after.named_buffers() if "mean" not in name}
    assert all(torch.equal(b, left[name]) for name, b in before.named_buffers() if name in left)
    assert_same_outputs(before, after, IMAGES)


def test_tensors_that_are_gone_are_not_taken_for_those_that_follow():
    for _ in range(10):  # an id is free again when its tensor is; which tensor gets it is chance
        model = Net(after_many, c=conv(), n=nn.BatchNorm2d(4))
        assert NoBiasBeforeNorm().apply(model, torch.zeros(2, 3, 8, 8)).startswith("1 biases")


def test_training_with_edits_equals_training_without(fitted):
    """Biases that a norm subtracts have no gradient to speak of, so the runs are one but for rounding."""
    words = [*RESNET, "optimizer.lr=0.001", "updates=3"]
    edits = ("[]", "[no_bias_before_norm]", "[channels_last]", "[channels_last,no_bias_before_norm]")
    losses = [fitted(*words, f"surgery={edit}").log.writers[0].losses for edit in edits]
    assert len(losses[0]) == 3
    assert all(found == pytest.approx(losses[0], rel=1e-3) for found in losses)


def test_an_edit_without_effect_is_refused():
    with pytest.raises(UserError, match=r"no_bias_before_norm has no effect on this model.*leave it out"):
        apply_all([NoBiasBeforeNorm()], nn.Sequential(nn.Conv2d(3, 4, 3), nn.LayerNorm(6)), IMAGES)
    with pytest.raises(UserError, match=r"surgery=channels_last has no effect.*leave it out"):
        apply_all([ChannelsLast()], nn.Sequential(nn.Flatten(), nn.Linear(192, 4)), IMAGES)
    with pytest.raises(UserError, match=r"surgery=sync_bn has no effect"):
        apply_all([SyncBn()], nn.Linear(2, 2), torch.zeros(2, 2))


def test_a_model_that_is_built_without_such_biases_is_left_as_it_is():
    """The edit that was asked for is made already: that is said, and the model trains."""
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


def test_images_are_needed(problems):
    (problem,) = problems("surgery=[channels_last]", "data.shape=[12]")
    assert "surgery=[channels_last] wants images" in problem
    assert any("twice" in p for p in problems("surgery=[channels_last,channels_last]"))
    assert any("did you mean 'channels_last'" in p for p in problems("surgery=[chanels_last]"))


# --- sync_bn and fused_norm: statistics over all ranks, and norms by torch's own kernels ---


ACCUMULATE = ["batch=accumulate"]
RESNET_OF_RANKS = ["model=resnet9", "model.width=8", "updates=3", "epochs=2", "data.test_samples=6"]


def test_two_ranks_with_sync_bn_see_the_whole_batch(train):
    """Weights and running statistics equal one process's; without sync_bn the statistics are those of half a batch."""
    whole = tensors(train(*RESNET_OF_RANKS))
    synced = tensors(train(*RESNET_OF_RANKS, "parallel=ddp", "surgery=[sync_bn]"))
    apart = tensors(train(*RESNET_OF_RANKS, "parallel=ddp"))
    assert whole.keys() == synced.keys() == apart.keys()
    for name, value in whole.items():
        torch.testing.assert_close(synced[name], value, rtol=2e-3, atol=2e-4)
    variances = [name for name in whole if name.endswith("running_var")]
    assert len(variances) == 8
    assert max(float((apart[n] - whole[n]).abs().max()) for n in variances) > 100 * max(
        float((synced[n] - whole[n]).abs().max()) for n in variances
    )


def test_one_process_needs_no_synchronising(make, caplog):
    make(*RESNET_OF_RANKS, "surgery=[sync_bn]")
    assert any("unchanged" in line for line in caplog.messages)


def test_batch_norms_that_see_a_part_of_the_update_are_told_of(logged):
    def lines(*words: str) -> list[str]:
        return [line for line in logged(*words) if "statistics" in line]

    net = ("model=resnet9", "model.width=8")
    assert lines(*net) == []
    assert lines("model=mlp", "batch=accumulate", "batch.accumulation_steps=2") == []
    (line,) = lines(*net, "batch=accumulate", "batch.accumulation_steps=2", "batch.global_batch=24")
    assert line == "8 BatchNorms compute their statistics from 12 samples at a time, not from an update's 24"
    norm = nn.Sequential(nn.BatchNorm1d(2))
    assert partial_statistics(norm, 12, 24, 2)[0].endswith("24; surgery=[sync_bn] joins those of the ranks")
    norm[0] = synchronised(norm[0], by_torch=False)
    assert partial_statistics(norm, 12, 24, 2) == []


class Tabular(nn.Module):
    """Its BatchNorm gets one value of a sample for each channel; the one of pixels has more."""

    def __init__(self) -> None:
        super().__init__()
        self.pixels, self.of_sample, self.head = nn.BatchNorm2d(3), nn.BatchNorm1d(3), nn.Linear(3, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.of_sample(self.pixels(x).mean((2, 3))))


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["data.samples=25", "data.drop_last=false"], "the last batch of an epoch has 1 of the 25 samples"),
        (["data.samples=27", "data.drop_last=false", "parallel=ddp"], "the last batch of an epoch has 3 of the 27 samples"),
        (["data.samples=26", "data.drop_last=false", *ACCUMULATE, "batch.accumulation_steps=3"], ""),  # its two samples stay one
        (["data.samples=25", "data.drop_last=false", "updates=2"], ""),  # which ends before that batch
        (["data.samples=25"], ""),
        ([*ACCUMULATE, "batch.accumulation_steps=12"], "set batch.global_batch=24 or more"),
        (["data.samples=8", "batch.global_batch=2", "parallel=ddp", "surgery=[sync_bn]"], ""),
        (["batch.global_batch=2", "parallel=ddp"], "gives it one over 2 ranks and 1 micro-batches: set batch.global_batch=4"),
    ],
)
def test_one_sample_under_batch_norm_is_known_before_the_run(train, words, says):
    given = ["updates=null", "epochs=1", "model=own", f"model.target={__name__}.Tabular", "trust=[tests]", *words]
    if not says:
        assert train(*given).status == "completed"
        return
    with pytest.raises(UserError, match=re.escape(says)) as refused:
        train(*given)
    assert "the BatchNorm of_sample of model=own needs two samples" in str(refused.value)


def test_what_cannot_be_is_refused_with_both_names(problems):
    for words, names in (
        (["surgery=[sync_bn,no_bias_before_norm]"], ("sync_bn", "no_bias_before_norm", "first")),
        (["surgery=[sync_bn]", "parallel=ddp", "compile=jit"], ("sync_bn", "compile=jit")),
    ):
        said = " ".join(problems(*words))
        assert all(name in said for name in names), said


class HandLayerNorm(nn.Module):
    """LayerNorm as it is written in papers' code."""

    def __init__(self, width: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.scale, self.shift, self.eps = nn.Parameter(torch.rand(width)), nn.Parameter(torch.rand(width)), eps

    def forward(self, x):
        mean = x.mean(-1, keepdim=True)
        variance = (x - mean).pow(2).mean(-1, keepdim=True)
        return (x - mean) / torch.sqrt(variance + self.eps) * self.scale + self.shift


class HandChannelNorm(nn.Module):
    """The same over the channels of images."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.bias, self.eps = nn.Parameter(torch.rand(width)), nn.Parameter(torch.rand(width)), 1e-6

    def forward(self, x):
        u = x.mean(1, keepdim=True)
        s = (x - u).pow(2).mean(1, keepdim=True)
        x = (x - u) / torch.sqrt(s + self.eps)
        return self.weight[:, None, None] * x + self.bias[:, None, None]


class HandRmsNorm(nn.Module):
    """RMSNorm, as language models write it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(torch.rand(width)), 1e-6

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon) * self.weight


class GemmaRmsNorm(HandRmsNorm):
    """RMSNorm with its weight kept around 0."""

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon) * (1.0 + self.weight)


class MeanDeviation(HandLayerNorm):
    """Looks like a norm and divides by the mean deviation."""

    def forward(self, x):
        centred = x - x.mean(-1, keepdim=True)
        return centred / (centred.abs().mean(-1, keepdim=True) + self.eps) * self.scale + self.shift


class OtherEps(HandLayerNorm):
    """LayerNorm with another epsilon than its attribute."""

    def forward(self, x):
        variance, mean = torch.var_mean(x, -1, correction=0, keepdim=True)
        return (x - mean) / torch.sqrt(variance + 2 * self.eps) * self.scale + self.shift


class NoisyInTraining(HandLayerNorm):
    """LayerNorm in evaluation only."""

    def forward(self, x):
        out = super().forward(x)
        return out + torch.randn_like(out) if self.training else out


class Kernel(HandLayerNorm):
    """torch's kernel already."""

    def forward(self, x):
        return nn.functional.layer_norm(x, self.scale.shape, self.scale, self.shift, self.eps)


class TwoInputs(HandLayerNorm):
    """LayerNorm with a second argument."""

    def forward(self, x, more=0.0):
        return super().forward(x) + more


def calls(model: nn.Module, x: torch.Tensor) -> int:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Count(TorchDispatchMode):
        n = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.n += "view" not in str(func) and "permute" not in str(func)
            return func(*args, **(kwargs or {}))

    with Count() as count, torch.no_grad():
        model(x)
    return count.n


HAND_WRITTEN = [(HandLayerNorm(12), (12,)), (HandChannelNorm(6), (6, 5, 5))]


@pytest.mark.parametrize(("norm", "shape"), HAND_WRITTEN, ids=["last", "channels"])
def test_a_norm_written_by_hand_becomes_one_kernel(norm, shape):
    model = nn.Sequential(nn.Identity(), norm)
    x = torch.randn(4, *shape, requires_grad=True)
    before, x_before = model(x), x.grad
    before.square().sum().backward()
    gradient, x.grad = x.grad.clone(), None
    many, plain = calls(model, x), copy.deepcopy(model)
    (said,) = apply_all([FusedNorm()], model, torch.zeros(2, *shape))
    assert "1 hand-written norms fused" in said
    assert "layer_norm" in said
    after = model(x)
    torch.testing.assert_close(after, before)
    after.square().sum().backward()
    torch.testing.assert_close(x.grad, gradient)
    assert calls(model, x) == 1 < many
    assert list(model.state_dict()) == list(plain.state_dict())
    assert x_before is None


def test_on_a_cpu_rms_norm_stays_and_it_is_said():
    model = nn.Sequential(HandRmsNorm(8), HandLayerNorm(8))
    (said,) = apply_all([FusedNorm()], model, torch.zeros(2, 8))
    assert "1 RMSNorms left" in said
    assert "1 hand-written norms fused" in said


@pytest.mark.parametrize("norm", [HandRmsNorm, GemmaRmsNorm])
def test_rms_norms_are_recognised_and_computed_by_the_kernel(norm):
    module, x = norm(8), torch.randn(4, 3, 8)
    form = recognise(module)
    assert (form.kernel, form.eps, form.offset) == ("rms_norm", 1e-6, float(norm is GemmaRmsNorm))
    torch.testing.assert_close(copy.deepcopy(fused_form(module, form))(x), module(x))


@pytest.mark.parametrize("norm", [MeanDeviation, OtherEps, NoisyInTraining, Kernel, TwoInputs])
def test_what_is_no_norm_written_out_by_hand_stays(norm):
    with pytest.raises(UserError, match="surgery=fused_norm has no effect"):
        apply_all([FusedNorm()], nn.Sequential(norm(8)), torch.zeros(2, 8))


def test_torchs_and_timms_own_norms_stay():
    import timm.layers as timm

    norms = [nn.LayerNorm(8), nn.LayerNorm(8, elementwise_affine=False), nn.RMSNorm(8), nn.GroupNorm(2, 8), nn.BatchNorm1d(8),
             nn.BatchNorm1d(8, track_running_stats=False), timm.LayerNorm2d(8), timm.RmsNorm(8), timm.SimpleNorm(8)]  # fmt: skip
    assert [type(n).__name__ for n in norms if recognise(n) is not None] == []


def test_a_fused_model_trains_to_the_same_weights(train):
    words = ["model=own", "model.target=tests.surgery.test_surgery.Normed", "trust=[tests]", "updates=4"]
    plain, fused = tensors(train(*words)), tensors(train(*words, "surgery=[fused_norm]"))
    assert plain.keys() == fused.keys()
    for name, value in plain.items():
        torch.testing.assert_close(fused[name], value, rtol=1e-4, atol=1e-6)


class Normed(nn.Module):
    """Two layers with a norm between them."""

    def __init__(self, shape, classes):
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(shape[0] * shape[1] * shape[2], 16), HandLayerNorm(16), nn.ReLU())
        self.head = nn.Linear(16, classes)

    def forward(self, x):
        return self.head(self.body(x))
