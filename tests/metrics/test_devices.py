"""Metrics take batches on a device without making the host wait for it."""

from types import SimpleNamespace

import pytest
import torch

from drivetrain import metrics
from drivetrain.parallel import Parallel
from tests.cuda.conftest import pretend  # noqa: F401
from tests.cuda.test_options import CLASSES
from tests.support import fake_device

BATCHES = {
    "class": lambda: (torch.randn(6, 5), torch.arange(6) % 5),
    "labels": lambda: (torch.randn(6, 5), torch.ones(6, 5)),
    "mask": lambda: (torch.randn(6, 5, 4, 4), torch.ones(6, 4, 4, dtype=torch.int64)),
    "tokens": lambda: (torch.randn(6, 7, 5), torch.ones(6, 7, dtype=torch.int64)),
    "values": lambda: (torch.randn(6, 2), torch.randn(6, 2)),
}
CASES = [
    (name, kind) for (group, name), cls in CLASSES.items() if group == "metrics" and cls is not metrics.Own for kind in cls.takes
]


@pytest.mark.parametrize("device_kind", fake_device.KINDS)
@pytest.mark.parametrize(("name", "kind"), CASES, ids=["-".join(case) for case in CASES])
def test_an_update_does_not_wait_for_the_device(pretend, device_kind, name, kind):  # noqa: F811
    metric = CLASSES["metrics", name]()
    metric.kind = kind
    splits = SimpleNamespace(classes=5, names=None, token_bytes=torch.ones(5))
    with pretend(device_kind) as device:
        metric = metric.build(SimpleNamespace(data=splits, device=device.device, parallel=Parallel()))
        for watched in (False, True):
            output, target = (t.to(device.device) for t in BATCHES[kind]())
            device.in_step = device.watching = watched
            with torch.no_grad():
                metric.update(output, target)
            device.in_step = device.watching = False
    states = [state for value in metric.state.metric_state.values() for state in (value if isinstance(value, list) else [value])]
    assert {state.device.type for state in states} == {device_kind}
    assert not device.waits
