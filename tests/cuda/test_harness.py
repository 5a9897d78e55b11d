"""The fake device catches what the tests beside this one rely on: each check is seen to fail."""

import contextlib

import pytest
import torch

from drivetrain.core.machine.device import reads_device_on_purpose
from drivetrain.data import Normalize
from drivetrain.engine.step import PlainStep
from drivetrain.loader import base
from tests.support import fake_device

KINDS = pytest.mark.parametrize("kind", fake_device.KINDS)
MIXED = "on the same device|different from other tensors|two different devices"  # as versions of torch say it


@pytest.fixture
def at_work(pretend):
    """`at_work(kind)`: a fake device in a step that is watched."""

    @contextlib.contextmanager
    def working(kind):
        device = pretend(kind)
        with device:
            device.in_step = device.watching = True
            yield device

    return working


@KINDS
def test_mixed_devices_fail_and_scalars_of_the_cpu_do_not(at_work, kind):
    with at_work(kind) as device:
        x, cpu = torch.zeros(2, 3, device=device.device), torch.ones(2, 3)
        with pytest.raises(RuntimeError, match=MIXED):
            x + cpu
        with pytest.raises(RuntimeError, match=MIXED):
            torch._foreach_add_([x], [cpu])
        with pytest.raises(RuntimeError, match=MIXED):
            torch.nn.Linear(3, 1)(x)  # its weights are on the CPU
        assert (x + torch.tensor(1.0)).device == device.device  # a number: torch reads it on the CPU
        assert (cpu + 1).tolist() == [[2.0] * 3] * 2  # the CPU is real
    assert not device.waits


READS = {
    "item": lambda x: x.sum().item(),
    "float": lambda x: float(x[0]),
    "bool": lambda x: bool((x > 0).all()),
    "tolist": lambda x: x.tolist(),
    "cpu": lambda x: x.cpu(),
    "numpy": lambda x: x.cpu().numpy(),
    "equal": lambda x: torch.equal(x, x),
    "nonzero": lambda x: x.nonzero(),
    "mask": lambda x: x[x > 0],
    "unique": lambda x: x.unique(),
    "bincount": lambda x: x.long().bincount(),
    "a tensor of a Python number": lambda x: torch.tensor(0.5, device=x.device),
    "as_tensor of a Python number": lambda x: torch.as_tensor(0.5, device=x.device),
    "a copy of a CPU tensor": lambda x: torch.ones(3).to(x.device),
    "copy_ of a CPU tensor": lambda x: x.copy_(torch.ones(3)),
    "an index on the CPU": lambda x: x[torch.tensor([0, 1])],
    "repeat_interleave": lambda x: x.long().repeat_interleave(x.long()),
}


@KINDS
@pytest.mark.parametrize("read", READS)
def test_what_makes_the_host_wait_is_found(at_work, kind, read):
    with at_work(kind) as device, contextlib.suppress(Exception):  # a fake tensor has no values to go on with
        READS[read](torch.ones(3, device=device.device))
    assert len(device.waits) >= 1
    assert all("test_harness.py" in wait for wait in device.waits)


FREE = {
    "fill": lambda x: torch.full((), 0.5, device=x.device),
    "arange": lambda x: torch.arange(3, device=x.device),
    "copy beside the host": lambda x: torch.ones(3).to(x.device, non_blocking=True),
    "a CPU tensor's item": lambda x: torch.ones(3).sum().item(),
    "a mask that fills": lambda x: x.masked_fill_(x > 0, 0.0),
    "where": lambda x: torch.where(x > 0, x, 0.5),
    "an index on the device": lambda x: x[torch.arange(2, device=x.device)],
    "repeat_interleave of known size": lambda x: x.repeat_interleave(x.long(), output_size=3),
    "a read on purpose": reads_device_on_purpose(lambda x: x.tolist()),
}


@KINDS
@pytest.mark.parametrize("call", FREE)
def test_what_does_not_wait_is_not_found(at_work, kind, call):
    with at_work(kind) as device:
        FREE[call](torch.ones(3, device=device.device))
    assert not device.waits


def test_autocast_is_on_and_the_backward_that_is_played_reaches_the_leaves(at_work):
    with at_work("cuda") as device:
        net, x = torch.nn.Linear(3, 2).to(device.device), torch.ones(4, 3, device=device.device)
        with torch.autocast("cuda", torch.bfloat16):
            out = net(x)
        assert out.dtype == torch.bfloat16
        fake_device.give_gradients(out.float().sum(), torch.ones((), device=device.device))
        assert net.weight.grad.shape == (2, 3)
        assert net.weight.grad.device == device.device


@KINDS
def test_a_defect_in_the_code_is_found_by_a_run(fake_run, monkeypatch, kind):
    """The means of a data set on the CPU."""
    monkeypatch.setattr(Normalize, "to", lambda self, device: self)
    with pytest.raises(RuntimeError, match=MIXED):
        fake_run(kind, "data=digits", "saving=none")


@KINDS
def test_a_read_in_an_update_is_found_by_a_run(fake_run, monkeypatch, kind):
    update = PlainStep.update
    monkeypatch.setattr(
        PlainStep, "update", lambda self: self.optimizer.param_groups[0]["params"][0].sum().item() == 0 or update(self)
    )
    _, device = fake_run(kind, "saving=none")
    (wait,) = device.waits
    assert wait.endswith("_local_scalar_dense")


@KINDS
def test_a_weight_on_the_cpu_is_found_by_a_run(fake_run, monkeypatch, kind):
    """The backward would copy it to the device, and wait."""
    to_device = base.Loader.to_device

    def defective(self, *arguments):
        micro = to_device(self, *arguments)
        micro.weight = torch.ones(())
        return micro

    monkeypatch.setattr(base.Loader, "to_device", defective)
    try:
        found = bool(fake_run(kind, "saving=none")[1].waits)
    except RuntimeError:
        found = True
    assert found
