"""Activations in the host's memory: the same gradients, and nothing but weights and small tensors stays on the device."""

import copy

import pytest
import timm
import torch

from drivetrain.checkpointing.offload import offload_forward


@pytest.fixture
def net():
    torch.manual_seed(0)
    model = timm.create_model(
        "vit_tiny_patch16_224", img_size=16, patch_size=4, depth=2, embed_dim=24, num_heads=2, num_classes=4
    )
    return model.train()


class Moves:
    """Which tensors go to another place of memory, by watching the copies to the host."""

    def __init__(self, monkeypatch):
        self.out, empty_like = [], torch.empty_like

        def watched(tensor, **given):
            if "pin_memory" in given:
                self.out.append(tensor)
            return empty_like(tensor, **given)

        monkeypatch.setattr(torch, "empty_like", watched)


def backward(model, x):
    torch.manual_seed(1)
    loss = model(x).square().mean()
    loss.backward()
    return [p.grad for p in model.parameters()]


@pytest.mark.parametrize("autocast", [False, True])
def test_gradients_are_the_same_bit_for_bit(net, autocast):
    twin, x = copy.deepcopy(net), torch.randn(3, 3, 16, 16)
    offload_forward(twin, 0)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        plain, offloaded = backward(net, x), backward(twin, x)
    assert all(torch.equal(a, b) for a, b in zip(plain, offloaded, strict=True))
    assert net.state_dict().keys() == twin.state_dict().keys()


def test_all_but_weights_and_small_tensors_go(net, monkeypatch):
    """What autograd saves of the plain model is counted by hand."""
    weights = {p.untyped_storage().data_ptr() for p in net.parameters()}
    expected, x = [], torch.randn(3, 3, 16, 16)

    def pack(tensor):
        if tensor.untyped_storage().data_ptr() not in weights and tensor.nbytes >= 2048:
            expected.append(tensor.nbytes)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        net(x)
    offload_forward(net, 2048)
    moves = Moves(monkeypatch)
    net(x)
    assert sum(expected) > 50_000
    assert sorted(t.nbytes for t in moves.out) == sorted(expected)
    moves.out.clear()
    with torch.no_grad():
        net(x)
    assert not moves.out


def test_autocasts_copies_of_weights_stay(net, monkeypatch):
    """As many and as large tensors go as without autocast, in half the bytes: no weight is among them."""
    moves, x = Moves(monkeypatch), torch.randn(3, 3, 16, 16)
    offload_forward(net, 0)
    shapes = {tuple(p.shape) for p in net.parameters() if p.ndim == 2}
    with torch.autocast("cpu", torch.bfloat16):
        net(x)
    gone = {tuple(t.shape) for t in moves.out if t.dtype is torch.bfloat16}
    assert gone
    assert not gone & {*shapes, *(shape[::-1] for shape in shapes)}


def test_strides_are_kept(net):
    x = torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last)
    conv, seen = torch.nn.Conv2d(3, 4, 3), []
    offload_forward(conv, 0)
    y = conv(x)
    saved = y.grad_fn._saved_input
    seen.append(saved)
    assert saved.is_contiguous(memory_format=torch.channels_last)
    assert saved.data_ptr() != x.data_ptr()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "checkpointing=offload needs a CUDA device"),
        (["compile=inductor"], "checkpointing=offload and compile=inductor exclude each other"),
        (["parallel=pipeline", "parallel.nproc=2"], "checkpointing=offload and parallel=pipeline exclude each other"),
    ],
)
def test_refusals(problems, words, says):
    assert any(says in problem for problem in problems("checkpointing=offload", *words))
