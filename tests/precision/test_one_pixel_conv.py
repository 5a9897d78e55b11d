"""Strided convolutions over one pixel: the same output, and a gradient that is a number."""

import copy

import pytest
import torch

from drivetrain.precision.one_pixel_conv import without_strides

LAYERS = {
    "image": (torch.nn.Conv2d(8, 4, 3, stride=2, padding=1), (2, 8, 1, 1), (1, 1)),
    "column": (torch.nn.Conv2d(8, 4, 3, stride=2, padding=1), (2, 8, 4, 1), (2, 1)),
    "wide": (torch.nn.Conv2d(8, 4, 5, stride=(2, 3), padding=4, dilation=2), (2, 8, 6, 1), (2, 1)),
    "groups": (torch.nn.Conv2d(8, 4, 3, stride=2, padding=1, groups=2), (2, 8, 1, 1), (1, 1)),
    "sequence": (torch.nn.Conv1d(8, 4, 3, stride=2, padding=1), (2, 8, 1), (1,)),
    "volume": (torch.nn.Conv3d(8, 4, 3, stride=2, padding=1), (2, 8, 1, 1, 1), (1, 1, 1)),
    "larger": (torch.nn.Conv2d(8, 4, 3, stride=2, padding=1), (2, 8, 2, 2), (2, 2)),
    "padded wide": (torch.nn.Conv2d(8, 4, 3, stride=2, padding=2), (2, 8, 1, 1), (2, 2)),  # two pixels come out
}


@pytest.mark.parametrize("name", LAYERS)
def test_the_stride_goes_where_it_does_nothing(name):
    layer, shape, strides = LAYERS[name]
    model = torch.nn.Sequential(copy.deepcopy(layer), torch.nn.ReLU())
    said = without_strides(model, torch.zeros(shape))
    assert model[0].stride == strides
    assert bool(said) == (strides != layer.stride)
    x = torch.randn(shape)
    torch.testing.assert_close(model(x), layer(x).relu())


def test_looking_leaves_the_model_as_it_was():
    model = torch.nn.Sequential(torch.nn.Conv2d(1, 4, 3, stride=2, padding=1), torch.nn.BatchNorm2d(4))
    before = copy.deepcopy(model.state_dict())
    without_strides(model, torch.ones(2, 1, 1, 1))
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert model.training
    assert not model[0]._forward_hooks


def poison() -> None:
    """Memory that is free now holds NaN: who reads it without writing will tell."""
    [torch.full((2**power,), float("nan")) for power in range(4, 18) for _ in range(4)]


@pytest.mark.parametrize("precision", ["bf16", "bf16_pure"])
def test_gradients_are_finite_in_bfloat16(make, precision, caplog):
    """Digits are 8×8: a net that halves them five times has one pixel left to stride over."""
    words = ["data=digits", "model=timm", "model.name=test_resnet", "batch.global_batch=4", "runtime.device=cpu"]
    trainer = make(*words, f"precision={precision}")
    assert any("one pixel" in line or "a pixel" in line for line in caplog.messages)
    trainer.model.train()
    stream = trainer.loader.stream(trainer.train_data, trainer.requests(), trainer.device, trainer.memory_format)
    for micro, _ in zip(stream, range(8), strict=False):
        poison()
        trainer.step.micro_batch(micro, torch.zeros(()))
        poison()
        assert all(p.grad.isfinite().all() for p in trainer.model.parameters() if p.grad is not None)
        trainer.step.zero_grad()
