"""The state of an optimizer: resumed bit for bit, loadable without pickles, skipped where there is no gradient, never sparse."""

import importlib.util
import io
import subprocess
import sys
from typing import Any

import pytest
import torch

from drivetrain.optimizer import flat, muon, packages, timm, torch_optim

OURS = [flat.Lars, flat.Lamb, flat.NvLamb, flat.NovoGrad, flat.Lion, flat.ScheduleFree, muon.Muon]
TORCHS = [torch_optim.Sgd, torch_optim.Adam, torch_optim.AdamW, torch_optim.RmsProp, torch_optim.Adagrad, torch_optim.Adafactor]
TIMMS = ["nadamw", "lookahead_lamb"]
needs_torchao = pytest.mark.skipif(not importlib.util.find_spec("torchao"), reason="needs torchao")
ROOTS = {"precondition_frequency": 2, "start": 2}  # of Shampoo
ALL = [
    pytest.param(packages.Soap, {"precondition_frequency": 2}, "plain", id="Soap"),
    *(pytest.param(packages.Shampoo, {**ROOTS, "graft": g}, "plain", id=f"Shampoo {g}") for g in ("sgd", "rmsprop")),
    pytest.param(packages.Shampoo, {**ROOTS, "block_size": 4}, "bf16", id="Shampoo bf16"),
    *(pytest.param(o, {}, "plain", id=o.__name__) for o in (*TORCHS, *OURS)),
    pytest.param(muon.Muon, {"normalize": "neurons", "cautious_decay": True}, "channels_last", id="NorMuon"),
    *(pytest.param(timm.TimmOptimizer, {"name": n}, "plain", id=n) for n in TIMMS),
    *(
        pytest.param(o, {}, layout, id=f"{o.__name__} {layout}", marks=[] if o is muon.Muon else pytest.mark.slow)
        for o in OURS
        for layout in ("channels_last", "bf16")
    ),
]


def net() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Conv2d(1, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.ReLU(), torch.nn.Conv2d(4, 4, 3), torch.nn.Flatten(),
        torch.nn.Linear(64, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4),
    )  # fmt: skip


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, first: int, last: int) -> None:
    for step in range(first, last):
        generator = torch.Generator().manual_seed(step)
        x, y = torch.randn(8, 1, 8, 8, generator=generator), torch.randint(0, 4, (8,), generator=generator)
        for p in model.parameters():
            p.grad = None
        torch.nn.functional.cross_entropy(model(x), y).backward()
        for group in optimizer.param_groups:
            group["lr"] *= 0.9
        if step in (2, 5):
            next(model.parameters()).grad = None
        optimizer.step()


def feed(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Three steps of given gradients: those of a bias before BatchNorm would be noise."""
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        for p in model.parameters():
            p.grad = torch.empty_like(p).copy_(torch.randn(p.shape, generator=generator))
        optimizer.step()


def through_a_file(*state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize(("option", "settings", "layout"), ALL)
def test_resume_is_exact(option: type, settings: dict[str, Any], layout: str) -> None:
    def fresh() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        model = net()
        model = model.to(memory_format=torch.channels_last) if layout == "channels_last" else model
        model = model.bfloat16() if layout == "bf16" else model
        if layout == "bf16":
            model.register_forward_pre_hook(lambda _, x: (x[0].bfloat16(),))
            model.register_forward_hook(lambda _, x, y: y.float())
        return model, option(**settings).create(model)

    straight, optimizer = fresh()
    torch.manual_seed(1)
    train(straight, optimizer, 0, 9)

    first, optimizer = fresh()
    torch.manual_seed(1)
    train(first, optimizer, 0, 5)
    weights, state, random = through_a_file(first.state_dict(), optimizer.state_dict(), torch.get_rng_state())
    second, optimizer = fresh()
    second.load_state_dict(weights)
    optimizer.load_state_dict(state)
    torch.set_rng_state(random)
    train(second, optimizer, 5, 9)

    start = fresh()[0]
    assert any(not torch.equal(a, b) for a, b in zip(start.parameters(), straight.parameters(), strict=True))
    for (name, a), b in zip(straight.named_parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b), name


@pytest.mark.parametrize("option", [o for o in OURS if o is not muon.Muon])
def test_memory_order_and_width_change_nothing(option: type) -> None:
    """Channels-last parameters are updated like others; a bfloat16 parameter like a float32 one, then rounded."""
    plain, last = net(), net().to(memory_format=torch.channels_last)
    for model in (plain, last):
        feed(model, option().create(model))
    for a, b in zip(plain.parameters(), last.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)

    torch.manual_seed(0)
    wide = torch.nn.Linear(20, 20).bfloat16().float()
    narrow = torch.nn.Linear(20, 20).bfloat16()
    narrow.load_state_dict(wide.state_dict())
    for model in (wide, narrow):
        optimizer = option().create(model)
        model.weight.grad = torch.linspace(-1, 1, 400).bfloat16().to(model.weight.dtype).view(20, 20)
        model.bias.grad = torch.ones_like(model.bias)
        optimizer.step()
    torch.testing.assert_close(narrow.weight, wide.weight.bfloat16(), rtol=0, atol=0)


@pytest.mark.parametrize("option", [*OURS, pytest.param(packages.AdamW8bit, marks=needs_torchao)])
def test_sparse_gradients_are_refused(option: type) -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(4)))
    optimizer = option().create(model)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    model[1].weight.grad = torch.ones(4, 4).to_sparse()
    with pytest.raises(TypeError, match="sparse=False"):
        optimizer.step()


@pytest.mark.parametrize("option", [*TORCHS, *OURS])
def test_an_overflow_is_skipped_and_the_next_step_is_whole(option: type) -> None:
    """GradScaler, with the lean step: inf leaves weights and state; unscaled gradients give the unscaled update."""
    plain, scaled = net(), net()
    a, b = option().create(plain), option().create(scaled)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    x, y = torch.randn(8, 1, 8, 8), torch.randint(0, 4, (8,))
    for overflow in (True, False, False):
        for model, factor in ((plain, 1.0), (scaled, scaler.get_scale())):
            for p in model.parameters():
                p.grad = None
            (torch.nn.functional.cross_entropy(model(x), y) * factor).backward()
        if overflow:
            before = [p.detach().clone() for p in scaled.parameters()]
            next(scaled.parameters()).grad.fill_(float("inf"))
        scaler._lazy_init_scale_growth_tracker(torch.device("cpu")) if scaler._scale is None else None
        scaler.unscale_(b)
        scaler.step(b)
        scaler.update()
        if overflow:
            assert all(torch.equal(p, q) for p, q in zip(scaled.parameters(), before, strict=True))
        else:
            a.step()
    for p, q in zip(plain.parameters(), scaled.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("option", OURS)
def test_the_learning_rate_may_be_a_tensor(option: type) -> None:
    """As a whole-step graph sets it; nothing is read back to the host for it."""
    models = net(), net()
    for model, tensor in zip(models, (False, True), strict=True):
        optimizer = option().create(model)
        for group in optimizer.param_groups:
            group["lr"] = torch.tensor(group["lr"], dtype=torch.float64) if tensor else group["lr"]
        feed(model, optimizer)
    for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_gradients_that_come_and_go() -> None:
    """A parameter without a gradient keeps weight, state and its own count; its neighbours are not touched by that."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    optimizer = flat.Lamb(weight_decay=0.1).create(model)
    for step in range(4):
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        if step in (1, 2):
            model[0].weight.grad = None
            held = model[0].weight.detach().clone()
        optimizer.step()
        if step in (1, 2):
            assert torch.equal(model[0].weight, held)
    counts = [int(optimizer.state[p]["step"]) for p in model.parameters()]
    assert counts == [2, 4, 4, 4]


def test_new_storage_is_found() -> None:
    """A parameter whose tensor was exchanged behind the optimizer's back is updated where it now lies."""
    model = torch.nn.Linear(3, 3)
    optimizer = flat.Lars(lr=10.0).create(model)
    for _ in range(2):
        model.weight.data = model.weight.data.clone()
        before = model.weight.detach().clone()
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()
        assert not torch.equal(model.weight, before)


def test_schedulefree_comes_back_on_an_exception() -> None:
    model = net()
    settings = flat.ScheduleFree()
    optimizer = settings.create(model)
    train(model, optimizer, 0, 4)
    trained = [p.detach().clone() for p in model.parameters()]

    def look() -> None:
        assert any(not torch.equal(p, q) for p, q in zip(model.parameters(), trained, strict=True))
        params = [p for g in optimizer.param_groups for p in g["params"]]
        saved = {params[i]: state["y"] for i, state in optimizer.state_dict()["state"].items()}
        assert all(torch.equal(saved[p], q) for p, q in zip(model.parameters(), trained, strict=True))
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), settings.eval_weights(optimizer):
        look()
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), trained, strict=True))


@pytest.mark.slow
def test_steps_do_not_import_the_compiler() -> None:
    """1.4 s of every start: building and stepping any of ours must not import torch._dynamo."""
    code = (
        "import sys, torch\nfrom drivetrain.optimizer import flat, muon, torch_optim\n"
        "own = (flat.Lamb, flat.Lars, flat.NovoGrad, flat.Lion, muon.Muon, flat.ScheduleFree)\n"
        "for option in (torch_optim.AdamW, *own):\n"
        "    model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(3)))\n"
        "    optimizer = option().create(model)\n"
        "    model(torch.ones(2, 4)).sum().backward()\n"
        "    optimizer.step(); optimizer.load_state_dict(optimizer.state_dict())\n"
        "print('torch._dynamo' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


# --- optimizer=adamw8bit: close to AdamW, in 8 bits, resumed bit for bit from plain tensors ---


SETTINGS = {"lr": 0.01, "weight_decay": 0.1}


def net_of_large_layers() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 64))


def train_eight_bits(model: torch.nn.Module, optimizer: torch.optim.Optimizer, first: int, last: int) -> list[float]:
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
    for model, option in zip(models, (packages.AdamW8bit, torch_optim.AdamW), strict=True):
        optimizer = option(**SETTINGS).create(model)
        for step in range(5):
            for p in model.parameters():
                p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(step))
            optimizer.step()
    for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@needs_torchao
def test_it_trains_as_adamw_with_a_quarter_of_the_state() -> None:
    losses, sizes, weights = {}, {}, {}
    for option in (packages.AdamW8bit, torch_optim.AdamW):
        model = net_of_large_layers()
        optimizer = option(**SETTINGS).create(model)
        losses[option], sizes[option] = train_eight_bits(model, optimizer, 0, 100), state_bytes(optimizer)
        weights[option] = torch.cat([p.detach().flatten() for p in model.parameters()])
    assert losses[torch_optim.AdamW][-1] < 0.5 * losses[torch_optim.AdamW][0]
    assert losses[packages.AdamW8bit][-1] == pytest.approx(losses[torch_optim.AdamW][-1], rel=0.05)
    apart = (weights[packages.AdamW8bit] - weights[torch_optim.AdamW]).norm() / weights[torch_optim.AdamW].norm()
    assert 0 < apart < 0.1  # rounded, and no more than that
    packed = 2 * (64 * 128 + 4 * 64 * 128 // 256) * 2  # two moments of two weights: a byte each, and 4 for each block of 256
    assert sizes[packages.AdamW8bit] == packed + (128 + 64) * 2 * 4 + 4 * 4  # biases in float32; steps
    assert sizes[packages.AdamW8bit] < 0.28 * sizes[torch_optim.AdamW]


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


def test_without_torchao_the_line_to_install_it_is_named(problems: Any, lacking: Any) -> None:
    lacking("torchao")
    assert problems("optimizer=adamw8bit") == [
        "optimizer=adamw8bit needs the package 'torchao', which is not installed: pip install 'drivetrain[torchao]'"
    ]
