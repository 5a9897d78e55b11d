"""sync_bn and fused_norm: statistics over all ranks, and norms by torch's own kernels."""

import copy
import re

import pytest
import safetensors.torch
import torch
from torch import nn

from drivetrain.core.errors import UserError
from drivetrain.surgery import FusedNorm, apply_all, partial_statistics
from drivetrain.surgery.fused_norm import fuse, recognise
from drivetrain.surgery.sync_batchnorm import synchronise

ACCUMULATE = ["batch=accumulate"]
RESNET = ["model=resnet9", "model.width=8", "updates=3", "epochs=2", "data.test_samples=6"]


def weights(result) -> dict[str, torch.Tensor]:
    assert result.status == "completed", result.error
    return safetensors.torch.load_file(result.run_dir / f"checkpoints/{result.updates}/model.safetensors")


def test_two_ranks_with_sync_bn_see_the_whole_batch(train):
    """Weights and running statistics equal one process's; without sync_bn the statistics are those of half a batch."""
    whole = weights(train(*RESNET))
    synced = weights(train(*RESNET, "parallel=ddp", "surgery=[sync_bn]"))
    apart = weights(train(*RESNET, "parallel=ddp"))
    assert whole.keys() == synced.keys() == apart.keys()
    for name, value in whole.items():
        torch.testing.assert_close(synced[name], value, rtol=2e-3, atol=2e-4)
    variances = [name for name in whole if name.endswith("running_var")]
    assert len(variances) == 8
    assert max(float((apart[n] - whole[n]).abs().max()) for n in variances) > 100 * max(
        float((synced[n] - whole[n]).abs().max()) for n in variances
    )


def test_one_process_needs_no_synchronising(make, caplog):
    make(*RESNET, "surgery=[sync_bn]")
    assert any("left as they are" in line for line in caplog.messages)


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
    synchronise(norm[0], by_torch=False)
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
        (["batch.global_batch=2", "parallel=ddp", "surgery=[sync_bn]"], ""),
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


def test_a_model_without_batch_norm_is_refused():
    from drivetrain.core.errors import UserError
    from drivetrain.surgery import SyncBn

    with pytest.raises(UserError, match=r"surgery=sync_bn has no effect"):
        apply_all([SyncBn()], nn.Linear(2, 2), torch.zeros(2, 2))


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
    expected = module(x)
    fuse(module, form)
    torch.testing.assert_close(copy.deepcopy(module)(x), expected)


@pytest.mark.parametrize("norm", [MeanDeviation, OtherEps, NoisyInTraining, Kernel, TwoInputs])
def test_what_is_no_norm_written_out_by_hand_stays(norm):
    from drivetrain.core.errors import UserError

    with pytest.raises(UserError, match="surgery=fused_norm has no effect"):
        apply_all([FusedNorm()], nn.Sequential(norm(8)), torch.zeros(2, 8))


def test_torchs_and_timms_own_norms_stay():
    import timm.layers as timm

    norms = [nn.LayerNorm(8), nn.LayerNorm(8, elementwise_affine=False), nn.RMSNorm(8), nn.GroupNorm(2, 8), nn.BatchNorm1d(8),
             nn.BatchNorm1d(8, track_running_stats=False), timm.LayerNorm2d(8), timm.RmsNorm(8), timm.SimpleNorm(8)]  # fmt: skip
    assert [type(n).__name__ for n in norms if recognise(n) is not None] == []


def test_a_fused_model_trains_to_the_same_weights(train):
    words = ["model=own", "model.target=tests.surgery.test_norms.Normed", "trust=[tests]", "updates=4"]
    plain, fused = weights(train(*words)), weights(train(*words, "surgery=[fused_norm]"))
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
