"""Selective recomputation holds fewer bytes at its peak than none on a ResNet: counted, tensor by tensor."""

import weakref

import pytest
import timm
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from drivetrain.checkpointing import Blocks, Checkpointing, Selective


class Live(TorchDispatchMode):
    """The bytes of all tensors that operations have made and that are still alive, and their peak."""

    def __init__(self, model):
        super().__init__()
        self.known = {t.untyped_storage()._cdata for t in (*model.parameters(), *model.buffers())}
        self.now = self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for storage in (t.untyped_storage() for t in tree_leaves(out) if isinstance(t, torch.Tensor)):
            if storage._cdata not in self.known:
                self.known.add(storage._cdata)
                weakref.finalize(storage, self.freed, storage._cdata, storage.nbytes())
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
        return out

    def freed(self, key, size):
        self.known.discard(key)
        self.now -= size


def peak(name, size, option):
    model = timm.create_model(name, num_classes=10).train()
    option.apply(model)
    with Live(model) as live:
        model(torch.randn(8, 3, size, size)).sum().backward()
    return live.peak


@pytest.mark.parametrize(
    ("name", "size"), [("resnet10t", 64), pytest.param("resnet18", 128, marks=pytest.mark.slow)], ids=["resnet10t", "resnet18"]
)
def test_on_a_resnet_selective_holds_less_than_none(name, size):
    none, products, half, blocks = (peak(name, size, o) for o in (Checkpointing(), Selective(), Selective("half"), Blocks()))
    assert max(blocks, half, products) < 0.99 * none, (none, products, half, blocks)
