"""Every augmentation works on a fake device, as loader=device uses it: nothing mixes devices, and nothing waits."""

import pytest
import torch

from drivetrain.core.microbatch import Request
from drivetrain.data import Normalize, Tensors
from drivetrain.loader import Pipeline
from tests.cuda.test_options import CLASSES, OPTIONS
from tests.support import fake_device

AUGMENTATIONS = {name: CLASSES[group, name] for group, name in OPTIONS if group == "augment"}
IMAGES = {"bytes": torch.randint(256, (8, 3, 16, 16), dtype=torch.uint8), "floats": torch.rand(8, 3, 16, 16)}
NORMALIZE = Normalize([127.0] * 3, [70.0] * 3)


def batch_of(device, names, images):
    """A batch that was augmented and normalised on the device: once for the tables that are made once, then watched."""
    steps = tuple(AUGMENTATIONS[name]() for name in names)
    pipeline = Pipeline(Tensors(IMAGES[images], torch.arange(8) % 4), steps, NORMALIZE, seed=0, classes=4)
    mixes = any(step.mixes for step in steps)
    request = Request(0, torch.arange(6), 1.0, mix_with=torch.arange(6) ^ 1 if mixes else None)
    on_device = pipeline.to(device.device)
    for watched in (False, True):
        x, y = (t.to(device.device) for t in pipeline.read(request))
        device.in_step = device.watching = watched
        x, y = on_device.augment(x, y, request)
        x = on_device.normalized(x)
        device.in_step = device.watching = False
    return x, y


@pytest.mark.parametrize("kind", fake_device.KINDS)
@pytest.mark.parametrize("images", IMAGES)
@pytest.mark.parametrize("names", [[name] for name in AUGMENTATIONS] + [["flip_crop", "mixup", "cutmix"]], ids=",".join)
def test_it_works_on_a_device_without_waiting(pretend, kind, images, names):
    with pretend(kind) as device:
        x, y = batch_of(device, names, images)
    assert x.device == y.device == device.device
    assert x.dtype == torch.float32
    assert len(x) == len(y) == 6
    assert not device.waits
