"""optimizer=adamw8bit: close to AdamW, in 8 bits, resumed bit for bit from plain tensors. All but the refusals need torchao."""

from __future__ import annotations

import importlib.util
import io
from typing import Any

import pytest
import torch

from drivetrain import optimizer as options

needs_torchao = pytest.mark.skipif(not importlib.util.find_spec("torchao"), reason="needs torchao")
KNOBS = {"lr": 0.01, "weight_decay": 0.1}


def net() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 64))


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, first: int, last: int) -> list[float]:
    losses = []
    for step in range(first, last):
        x = torch.randn(32, 64, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        loss = (model(x) - x.roll(1, 1)).square().mean()
        loss.backward()
        for group in optimizer.param_groups:
            group["lr"] *= 0.99  # a float, as schedules set it
        optimizer.step()
        losses.append(loss.item())
    return losses


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    return sum(t.nbytes for values in optimizer.state_dict()["state"].values() for t in values.values())


@needs_torchao
def test_small_tensors_keep_float32_moments_and_are_adamw() -> None:
    torch.manual_seed(0)
    models = [torch.nn.Linear(20, 20) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    for model, option in zip(models, (options.AdamW8bit, options.AdamW), strict=True):
        optimizer = option(**KNOBS).create(model)
        for step in range(5):
            for p in model.parameters():
                p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(step))
            optimizer.step()
    for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@needs_torchao
def test_it_trains_as_adamw_with_a_quarter_of_the_state() -> None:
    losses, sizes, weights = {}, {}, {}
    for option in (options.AdamW8bit, options.AdamW):
        model = net()
        optimizer = option(**KNOBS).create(model)
        losses[option], sizes[option] = train(model, optimizer, 0, 100), state_bytes(optimizer)
        weights[option] = torch.cat([p.detach().flatten() for p in model.parameters()])
    assert losses[options.AdamW][-1] < 0.5 * losses[options.AdamW][0]
    assert losses[options.AdamW8bit][-1] == pytest.approx(losses[options.AdamW][-1], rel=0.05)
    apart = (weights[options.AdamW8bit] - weights[options.AdamW]).norm() / weights[options.AdamW].norm()
    assert 0 < apart < 0.1  # rounded, and no more than that
    packed = 2 * (64 * 128 + 4 * 64 * 128 // 256) * 2  # two moments of two weights: a byte each, and 4 for each block of 256
    assert sizes[options.AdamW8bit] == packed + (128 + 64) * 2 * 4 + 4 * 4  # biases in float32; steps
    assert sizes[options.AdamW8bit] < 0.28 * sizes[options.AdamW]


@needs_torchao
def test_it_resumes_exactly_from_a_file_of_plain_tensors() -> None:
    def fresh() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        model = net()
        return model, options.AdamW8bit(**KNOBS).create(model)

    straight, optimizer = fresh()
    train(straight, optimizer, 0, 9)
    first, optimizer = fresh()
    train(first, optimizer, 0, 5)
    state: Any = optimizer.state_dict()
    assert {type(t) for values in state["state"].values() for t in values.values()} == {torch.Tensor}
    file = io.BytesIO()
    torch.save((first.state_dict(), state), file)
    file.seek(0)
    weights, state = torch.load(file, weights_only=True)
    second, optimizer = fresh()
    second.load_state_dict(weights)
    optimizer.load_state_dict(state)
    train(second, optimizer, 5, 9)
    for a, b in zip(straight.parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b)


@needs_torchao
def test_sparse_gradients_are_refused() -> None:
    model = torch.nn.Linear(4, 4)
    optimizer = options.AdamW8bit().create(model)
    model.weight.grad = torch.ones(4, 4).to_sparse()
    with pytest.raises(TypeError, match="sparse=False"):
        optimizer.step()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["compile=step"], "optimizer=adamw8bit and compile=step exclude each other"),
        (["optimizer.fused=true", "runtime.device=cpu"], "optimizer=adamw8bit has no fused implementation on cpu"),
        (["optimizer.foreach=true"], "optimizer=adamw8bit has no multi-tensor implementation"),
    ],
)
def test_what_excludes_it_is_refused(problems: Any, monkeypatch: pytest.MonkeyPatch, words: list[str], says: str) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: object() if name == "torchao" else found(name, *a))
    refusals = problems("optimizer=adamw8bit", *words)
    assert any(says in p for p in refusals), refusals


def test_without_torchao_the_line_to_install_it_is_named(problems: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "torchao" else found(name, *a))
    assert problems("optimizer=adamw8bit") == [
        "optimizer=adamw8bit needs the package 'torchao', which is not installed: pip install 'drivetrain[torchao]'"
    ]
