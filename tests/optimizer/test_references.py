"""Every optimizer against its paper: float64, twelve steps, two kinds of groups, gradients that are missing or zero."""

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from drivetrain.core.errors import UserError
from drivetrain.core.options.option import RunSpec
from drivetrain.model.shipped import Mlp
from drivetrain.optimizer import flat, muon, packages, torch_optim
from drivetrain.optimizer.algorithms.flat_optimizer import Chunk
from drivetrain.optimizer.algorithms.muon import Muon, orthogonalised
from tests.support.context import context

STEPS = 12
State = dict[str, Any]


class Net(torch.nn.Module):
    """Parameters of every kind: kernel, matrices, vectors, a scalar, one that starts at zero, sizes around a row's."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = torch.nn.Conv2d(2, 3, 3)
        self.norm = torch.nn.BatchNorm2d(3)
        self.body = torch.nn.Linear(13, 65)
        self.zero = torch.nn.Linear(64, 2, bias=False)
        self.scale = torch.nn.Parameter(torch.tensor(0.7))
        self.head = torch.nn.Linear(5, 4)
        torch.nn.init.zeros_(self.zero.weight)


def net(dtype: torch.dtype = torch.float64) -> Net:
    torch.manual_seed(1)
    return Net().to(dtype)


def gradient(name: str, shape: torch.Size, step: int) -> np.ndarray | None:
    """norm.bias has none in some steps; the first of zero, whose weights are zero too, and of head is zero."""
    if name == "norm.bias" and step in (1, 4, 5):
        return None
    noise = np.random.default_rng([step, *name.encode()]).normal(size=tuple(shape)) * 0.1
    return noise * 0 if name in ("zero.weight", "head.weight") and step == 1 else noise


def sgd(s: State, w: Any, g: Any, t: int, lr: float, decay: float, k: Any) -> Any:
    g = g + decay * w
    s["v"] = k.momentum * s.get("v", 0) + g
    return w - lr * (g + k.momentum * s["v"] if k.nesterov else s["v"])


def adam_direction(s: State, g: Any, t: int, k: Any, correct: bool = True) -> Any:
    s["m"] = k.beta1 * s.get("m", 0) + (1 - k.beta1) * g
    s["v"] = k.beta2 * s.get("v", 0) + (1 - k.beta2) * g * g
    c1, c2 = (1 - k.beta1**t, 1 - k.beta2**t) if correct else (1, 1)
    return s["m"] / c1 / (np.sqrt(s["v"] / c2) + k.eps)


def adam(s: State, w: Any, g: Any, t: int, lr: float, decay: float, k: Any) -> Any:
    return w - lr * adam_direction(s, g + decay * w, t, k)


def adamw(s: State, w: Any, g: Any, t: int, lr: float, decay: float, k: Any) -> Any:
    return w - lr * (adam_direction(s, g, t, k) + decay * w)


def rmsprop(s: State, w: Any, g: Any, t: int, lr: float, decay: float, k: Any) -> Any:
    g = g + decay * w
    s["v"] = k.alpha * s.get("v", 0) + (1 - k.alpha) * g * g
    s["mean"] = k.alpha * s.get("mean", 0) + (1 - k.alpha) * g
    s["b"] = k.momentum * s.get("b", 0) + g / (np.sqrt(s["v"] - s["mean"] ** 2 * k.centered) + k.eps)
    return w - lr * s["b"]


def adagrad(s: State, w: Any, g: Any, t: int, lr: float, decay: float, k: Any) -> Any:
    g = g + decay * w
    s["sum"] = s.get("sum", k.initial_accumulator_value) + g * g
    return w - lr / (1 + (t - 1) * k.lr_decay) * g / (np.sqrt(s["sum"]) + k.eps)


def adafactor(s: State, w: Any, g: Any, t: int, lr: float, decay: float, k: Any) -> Any:
    eps1, new = k.eps1, t**k.beta2_decay
    size = max(k.eps2, np.sqrt((w**2).mean()))
    if g.ndim > 1:
        s["r"] = (1 - new) * s.get("r", 0) + new * (g * g).mean(-1, keepdims=True)
        s["c"] = (1 - new) * s.get("c", 0) + new * (g * g).mean(-2, keepdims=True)
        second = s["r"] @ s["c"] / np.maximum(s["r"].mean(-2, keepdims=True), eps1)
    else:
        second = s["v"] = (1 - new) * s.get("v", 0) + new * g * g
    u = g / np.maximum(np.sqrt(second), eps1)
    u = u / max(1, np.sqrt((u**2).mean()) / k.d)
    return w - lr * decay * w - size * min(lr, 1 / math.sqrt(t)) * u


def lars(s: State, w: Any, g: Any, t: int, lr: float, decay: float, k: Any) -> Any:
    w_norm, g_norm = np.linalg.norm(w), np.linalg.norm(g)
    adapt = w.ndim > 1 and w_norm > 0 and g_norm > 0
    rate = lr * (k.trust * w_norm / (g_norm + decay * w_norm) if adapt else 1)
    step = rate * (g + decay * w)
    s["v"] = k.momentum * s.get("v", 0) + step
    return w - (step + k.momentum * s["v"] if k.nesterov else s["v"])


def lamb(s: State, w: Any, g: Any, t: int, lr: float, decay: float, k: Any, adapt_all: bool = False) -> Any:
    u = adam_direction(s, g, t, k, k.bias_correction) + decay * w
    w_norm, u_norm = np.linalg.norm(w), np.linalg.norm(u)
    adapt = (adapt_all or w.ndim > 1) and w_norm > 0 and u_norm > 0
    return w - lr * (w_norm / u_norm if adapt else 1) * u


def nvlamb(s: State, w: Any, g: Any, t: int, lr: float, decay: float, k: Any) -> Any:
    return lamb(s, w, g, t, lr, decay, k, adapt_all=True)  # pre-normalised in `follow`


def novograd(s: State, w: Any, g: Any, t: int, lr: float, decay: float, k: Any) -> Any:
    squared = (g * g).sum()
    s["v"] = k.beta2 * s["v"] + (1 - k.beta2) * squared if s.get("v") else squared
    step = g / (np.sqrt(s["v"]) + k.eps) + decay * w
    s["m"] = k.beta1 * s.get("m", 0) + step * (1 - k.beta1 if k.grad_averaging else 1)
    return w - lr * s["m"]


def lion(s: State, w: Any, g: Any, t: int, lr: float, decay: float, k: Any) -> Any:
    m = s.get("m", 0)
    s["m"] = k.beta2 * m + (1 - k.beta2) * g
    return w - lr * (np.sign(k.beta1 * m + (1 - k.beta1) * g) + decay * w)


def schedulefree(s: State, w: Any, g: Any, t: int, lr: float, decay: float, k: Any) -> Any:
    """w is y; the result is s["x"]."""
    z, x = s.get("z", w), s.get("x", w)
    s["v"] = k.beta2 * s.get("v", 0) + (1 - k.beta2) * g * g
    s["z"] = z - lr * (g / (np.sqrt(s["v"] / (1 - k.beta2**t)) + k.eps) + decay * w)
    s["total"] = s.get("total", 0) + lr**2
    c = lr**2 / s["total"]
    s["x"] = (1 - c) * x + c * s["z"]
    return (1 - k.beta1) * s["z"] + k.beta1 * s["x"]


CASES: dict[str, tuple[type, dict[str, Any], Callable[..., Any]]] = {
    "sgd": (torch_optim.Sgd, {}, sgd),
    "sgd plain": (torch_optim.Sgd, {"nesterov": False, "momentum": 0.5}, sgd),
    "adam": (torch_optim.Adam, {"weight_decay": 0.1}, adam),
    "adamw": (torch_optim.AdamW, {"weight_decay": 0.1}, adamw),
    "rmsprop": (torch_optim.RmsProp, {"weight_decay": 0.1}, rmsprop),
    "rmsprop centered": (torch_optim.RmsProp, {"momentum": 0.9, "centered": True}, rmsprop),
    "adagrad": (torch_optim.Adagrad, {"lr_decay": 0.1, "initial_accumulator_value": 0.1, "weight_decay": 0.1}, adagrad),
    "adafactor": (torch_optim.Adafactor, {"weight_decay": 0.1, "eps1": 1e-16}, adafactor),
    "lars": (flat.Lars, {"weight_decay": 0.1}, lars),
    "lars nesterov": (flat.Lars, {"nesterov": True, "trust": 0.02}, lars),
    "lamb": (flat.Lamb, {"weight_decay": 0.1}, lamb),
    "lamb uncorrected": (flat.Lamb, {"bias_correction": False, "weight_decay": 0.0}, lamb),
    "nvlamb": (flat.NvLamb, {"weight_decay": 0.1}, nvlamb),
    "nvlamb loose": (flat.NvLamb, {"max_grad_norm": 1e6}, nvlamb),
    "novograd": (flat.NovoGrad, {"weight_decay": 0.1}, novograd),
    "novograd averaging": (flat.NovoGrad, {"grad_averaging": True}, novograd),
    "lion": (flat.Lion, {}, lion),
    "schedulefree": (flat.ScheduleFree, {"weight_decay": 0.1}, schedulefree),
}
FORMS = {
    "fused": {"fused": True},
    "foreach": {"foreach": True},
    "loop": {"fused": False, "foreach": False},
}


def follow(settings: Any, rule: Callable[..., Any], lr: float) -> tuple[dict[str, Any], dict[str, State]]:
    """(weights, states) after all steps by the paper, the learning rate as `schedule` sets it."""
    weights = {n: p.detach().numpy().copy() for n, p in net().named_parameters()}
    states: dict[str, State] = {n: {"t": 0} for n in weights}
    for step in range(1, STEPS + 1):
        grads = {n: gradient(n, w.shape, step) for n, w in weights.items()}
        there = {n: g for n, g in grads.items() if g is not None}
        if hasattr(settings, "max_grad_norm"):
            norm = math.sqrt(sum((g**2).sum() for g in there.values()))
            there = {n: g / max(1, norm / settings.max_grad_norm) for n, g in there.items()}
        for n, g in there.items():
            states[n]["t"] += 1
            decay = settings.weight_decay if weights[n].ndim > 1 else 0.0
            rate = lr * (3 if n.startswith("head.") else 1) * schedule(step)
            weights[n] = rule(states[n], weights[n], g, states[n]["t"], rate, decay, settings)
    return weights, states


def schedule(step: int) -> float:
    return min(step, 4) / 4 if step < 8 else 1.5


def steps(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    base = [group["lr"] for group in optimizer.param_groups]
    for step in range(1, STEPS + 1):
        for name, p in model.named_parameters():
            g = gradient(name, p.shape, step)
            p.grad = None if g is None else torch.as_tensor(g, dtype=p.dtype)
        for group, lr in zip(optimizer.param_groups, base, strict=True):
            group["lr"] = lr * schedule(step)
        optimizer.step()


def largest_difference(model: torch.nn.Module, weights: dict[str, Any]) -> float:
    return max(float(np.abs(p.detach().double().numpy() - weights[n]).max()) for n, p in model.named_parameters())


def forms(option: type) -> list[str]:
    return [f for f in FORMS if f != "fused" or option.fused_on]


@pytest.mark.parametrize("case", CASES)
def test_equals_the_paper(case: str) -> None:
    option, given, rule = CASES[case]
    lr = 1.0 if "lars" in case else 0.01
    given = {"lr": lr, "lr_multipliers": {"head": 3}, **given}
    weights, states = follow(option(**given), rule, lr)
    for form, (dtype, tolerance) in itertools.product(forms(option), {torch.float64: 1e-12, torch.float32: 2e-5}.items()):
        settings, model = option(**given, **FORMS[form]), net(dtype)
        optimizer = settings.create(model)
        steps(model, optimizer)
        assert largest_difference(net(dtype), weights) > 1e-3  # it moved
        assert largest_difference(model, weights) < tolerance, (form, dtype)
        if case == "schedulefree":
            trained = {n: p.detach().clone() for n, p in model.named_parameters()}
            with settings.eval_weights(optimizer):
                assert largest_difference(model, {n: s["x"] for n, s in states.items()}) < tolerance * 10
                assert largest_difference(model, weights) > 1e-4
            assert all(torch.equal(p, trained[n]) for n, p in model.named_parameters())


def eigenbases(products: list[Any]) -> list[Any]:
    return [np.linalg.eigh(product)[1][:, ::-1] for product in products]


def turned(g: Any, bases: list[Any], back: bool = False) -> Any:
    left, right = bases
    return left @ g @ right.T if back else left.T @ g @ right


@pytest.mark.parametrize(("frequency", "tolerance"), [(100, 1e-12), (3, 2e-6)])
def test_soap_equals_the_paper(frequency: int, tolerance: float) -> None:
    """A matrix by algorithm 3 of Vyas et al. 2024, with its power iteration; a vector by Adam. The library's QR is in float32."""
    torch.manual_seed(3)
    model = torch.nn.Linear(5, 4).double()
    settings = packages.Soap(lr=0.01, weight_decay=0.1, precondition_frequency=frequency)
    optimizer = settings.create(model)
    w, bias = (p.detach().numpy().copy() for p in model.parameters())
    beta, products, bases = 0.95, [np.zeros((4, 4)), np.zeros((5, 5))], []
    m, v, vector = 0 * w, 0 * w, {"m": 0 * bias, "v": 0 * bias}
    for t in range(12):
        g, g_bias = gradient("w", w.shape, t), gradient("b", bias.shape, t)
        model.weight.grad, model.bias.grad = torch.tensor(g), torch.tensor(g_bias)
        optimizer.step()
        if t > 0:
            m, v = beta * m + (1 - beta) * g, beta * v + (1 - beta) * turned(g, bases) ** 2
            rate = 0.01 * math.sqrt(1 - beta**t) / (1 - beta**t)
            w = (w - rate * turned(turned(m, bases) / (np.sqrt(v) + 1e-8), bases, back=True)) * (1 - 0.01 * 0.1)
            vector = {"m": beta * vector["m"] + (1 - beta) * g_bias, "v": beta * vector["v"] + (1 - beta) * g_bias**2}
            bias = bias - rate * vector["m"] / (np.sqrt(vector["v"]) + 1e-8)
        products = [beta * p + (1 - beta) * part for p, part in zip(products, (g @ g.T, g.T @ g), strict=True)]
        bases = bases or eigenbases(products)
        if t > 0 and t % frequency == 0:
            for axis, (product, basis) in enumerate(zip(products, bases, strict=True)):
                order = np.argsort(-(basis * (product @ basis)).sum(0))
                v = np.take(v, order, axis)
                bases[axis] = np.linalg.qr((product @ basis)[:, order])[0]
    np.testing.assert_allclose(model.weight.detach().numpy(), w, rtol=0, atol=tolerance)
    np.testing.assert_allclose(model.bias.detach().numpy(), bias, rtol=0, atol=1e-12)


def inverse_root(matrix: Any, p: int, ridge_epsilon: float) -> Any:
    values, vectors = np.linalg.eigh(matrix)
    return vectors * (values + values.max() * ridge_epsilon) ** (-1 / p) @ vectors.T


@pytest.mark.parametrize(("exact", "tolerance"), [(True, 1e-12), (False, 1e-5)])
def test_shampoo_equals_the_paper(monkeypatch: pytest.MonkeyPatch, exact: bool, tolerance: float) -> None:
    """A matrix by Gupta et al. 2018 with averaged moments and SGD's length; a vector by SGD. The library iterates its roots."""
    if exact:
        root = lambda mat_g, p, ridge_epsilon: torch.tensor(inverse_root(mat_g.numpy(), p, ridge_epsilon))  # noqa: E731
        monkeypatch.setattr("pytorch_optimizer.optimizer.utils.preconditioner.compute_power_schur_newton", root)
    torch.manual_seed(3)
    model = torch.nn.Linear(5, 4).double()
    optimizer = packages.Shampoo(lr=0.01, weight_decay=0.1, beta2=0.9, start=2, precondition_frequency=1, eps=1e-3).create(model)
    w, bias = (p.detach().numpy().copy() for p in model.parameters())
    left, right, m, m_sgd, m_bias = 1e-3 * np.eye(4), 1e-3 * np.eye(5), 0 * w, 0 * w, 0 * bias
    for t in range(4):
        g, g_bias = gradient("w", w.shape, t), gradient("b", bias.shape, t)
        model.weight.grad, model.bias.grad = torch.tensor(g), torch.tensor(g_bias)
        optimizer.step()
        left, right = 0.9 * left + 0.1 * g @ g.T, 0.9 * right + 0.1 * g.T @ g
        direction = inverse_root(left, 4, 1e-3) @ g @ inverse_root(right, 4, 1e-3)
        direction *= np.linalg.norm(g) / np.linalg.norm(direction)
        m, m_sgd, m_bias = 0.9 * m + direction, 0.9 * m_sgd + g, 0.9 * m_bias + g_bias
        moved = 0.9 * m + direction if t >= 1 else 0.9 * m_sgd + g
        w = w * (1 - 0.01 * 0.1) - 0.01 * moved
        bias = bias - 0.01 * (0.9 * m_bias + g_bias)
    np.testing.assert_allclose(model.weight.detach().numpy(), w, rtol=0, atol=tolerance)
    np.testing.assert_allclose(model.bias.detach().numpy(), bias, rtol=0, atol=1e-12)


def test_the_forms_are_taken() -> None:
    """A setting that is not in effect would make all forms equal."""
    sgd = {f: torch_optim.Sgd(**FORMS[f]).create(net()).param_groups[0] for f in FORMS}
    assert [(g["fused"], g["foreach"]) for g in sgd.values()] == [(True, False), (False, True), (False, False)]
    lamb = {f: flat.Lamb(**FORMS[f]).create(net()) for f in FORMS}
    assert [o.loop for o in lamb.values()] == [False, False, True]
    assert lamb["fused"]._moments is not lamb["foreach"]._moments
    assert flat.Lamb().create(net())._moments is lamb["fused"]._moments


def test_muon_equals_torch_on_matrices() -> None:
    for scale, adjust in (("original", "original"), ("match_rms_adamw", "match_rms_adamw")):
        for shape in ((12, 40), (40, 12), (16, 16)):
            torch.manual_seed(0)
            start = [torch.randn(shape) for _ in range(3)]
            ours, theirs = ([torch.nn.Parameter(w.clone()) for w in start] for _ in range(2))
            plain: Any = {"normalize": "none", "normalize_beta": 0.0, "cautious_decay": False}
            a = Muon(ours, lr=0.05, weight_decay=0.1, momentum=0.95, nesterov=True, scale=scale, ns_steps=5, **plain)
            b = torch.optim.Muon(theirs, lr=0.05, weight_decay=0.1, adjust_lr_fn=adjust)
            for step in range(STEPS):
                for p, q in zip(ours, theirs, strict=True):
                    p.grad = q.grad = torch.as_tensor(gradient("w", p.shape, step), dtype=p.dtype)
                a.step()
                b.step()
            moved = torch.stack([(q - w).norm() for q, w in zip(theirs, start, strict=True)])
            apart = torch.stack([(p - q).norm() for p, q in zip(ours, theirs, strict=True)])
            assert (apart < 0.02 * moved).all(), (scale, shape)  # bfloat16 in another order


def orthogonal(g: np.ndarray) -> np.ndarray:
    """Five quintic Newton-Schulz steps in float64."""
    x = g.T if g.shape[0] > g.shape[1] else g
    x = x / np.linalg.norm(x)
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.T if g.shape[0] > g.shape[1] else x


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("cautious", [False, True])
@pytest.mark.parametrize("normalize", ["none", "neurons"])
def test_muons_variants_are_their_papers_updates(normalize: str, cautious: bool, transposed: bool, monkeypatch: Any) -> None:
    """In float64, with an iteration that is not in 16 bits. A stack of two, whose neurons are rows, or columns."""
    exact = lambda g, steps: torch.from_numpy(np.stack([orthogonal(m) for m in g.numpy()]))  # noqa: E731
    monkeypatch.setattr("drivetrain.optimizer.algorithms.muon.orthogonalised", exact)
    rng = np.random.default_rng(0)
    start = rng.normal(size=(2, 5, 3))
    p = torch.nn.Parameter(torch.from_numpy(start.swapaxes(1, 2).copy() if transposed else start.copy()))
    optimizer = Muon(
        [{"params": [p], "stacked": True, "transposed": transposed}], lr=0.1, weight_decay=0.2, momentum=0.9, nesterov=True,
        scale="original", ns_steps=5, normalize=normalize, normalize_beta=0.8, cautious_decay=cautious,
    )  # fmt: skip
    w, m, v = start.copy(), np.zeros_like(start), np.zeros((2, 5, 1))
    for _ in range(STEPS):
        g = rng.normal(size=start.shape)
        p.grad = torch.from_numpy(g.swapaxes(1, 2).copy() if transposed else g.copy())
        optimizer.step()
        m = 0.9 * m + 0.1 * g
        o = np.stack([orthogonal(each) for each in 0.1 * g + 0.9 * m])
        if normalize == "neurons":
            v = 0.8 * v + 0.2 * (o**2).mean(2, keepdims=True)
            scaled = o / np.sqrt(v)
            o = scaled * np.linalg.norm(o, axis=(1, 2), keepdims=True) / np.linalg.norm(scaled, axis=(1, 2), keepdims=True)
        move = 0.1 * np.sqrt(5 / 3) * o
        w = w - 0.1 * 0.2 * w * ((move * w >= 0) | (not cautious)) - move
    found = p.detach().numpy()
    np.testing.assert_allclose(found.swapaxes(1, 2) if transposed else found, w, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("channels_last", [False, True])
def test_muon_on_kernels_and_adamw_for_the_rest(channels_last: bool) -> None:
    torch.manual_seed(0)
    conv, linear = torch.nn.Conv2d, torch.nn.Linear
    model = torch.nn.Sequential(conv(2, 4, 3), conv(4, 8, 3), torch.nn.BatchNorm2d(8), linear(8, 24), linear(24, 3)).double()
    if channels_last:
        model = model.to(memory_format=torch.channels_last)
    settings = muon.Muon(lr=0.1, adamw_lr=0.01, weight_decay=0.1, nesterov=True)
    weights = {n: p.detach().numpy().copy() for n, p in model.named_parameters()}
    states: dict[str, State] = {n: {} for n in weights}
    optimizer = settings.create(model)
    for step in range(1, 11):
        for n, p in model.named_parameters():
            g = gradient(n, p.shape, step)
            p.grad = torch.empty_like(p).copy_(torch.as_tensor(g))
            decay = 0.1 if g.ndim > 1 else 0.0
            if n in ("1.weight", "3.weight"):
                s, matrix = states[n], g.reshape(len(g), -1)
                s["m"] = 0.95 * s.get("m", 0) + 0.05 * matrix
                u = orthogonal(0.05 * matrix + 0.95 * s["m"]) * math.sqrt(max(1, len(g) / matrix.shape[1]))
                weights[n] = weights[n] * (1 - 0.1 * decay) - 0.1 * u.reshape(g.shape)
            else:
                weights[n] = adamw(states[n], weights[n], g, step, 0.01, decay, settings)
        optimizer.step()
    start = dict(model.named_parameters())
    for n, p in start.items():
        apart = float((p.detach() - torch.as_tensor(weights[n])).norm())
        if n in ("1.weight", "3.weight"):
            assert apart < 0.03 * float(p.detach().norm()), n  # the iteration is in bfloat16
        else:
            assert apart < 1e-10, n


class Reader(torch.nn.Module):
    """A head, a table, a norm, and three hidden matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(9, 8)
        self.body = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(3)), torch.nn.LayerNorm(8))
        self.places = torch.nn.Parameter(torch.randn(4, 8))
        self.head = torch.nn.Linear(8, 9)


def built(settings: muon.Muon, model: torch.nn.Module) -> Any:
    batch = type("Batch", (), {"lr_factor": lambda self: 2.0, "decay_factor": lambda self: 1.0})()
    return settings.build(context(run=RunSpec({}, {"phases": {}}, {"model": Mlp()}), model=model, batch=batch))


def test_muons_adamw_has_a_rate_for_each_kind() -> None:
    """As nanochat sets them: embeddings, the head, vectors and the rest. The batch's factor applies to all of them."""
    torch.manual_seed(0)
    model = Reader().double()
    rates = {"embedding_lr": 0.2, "head_lr": 0.004, "scalar_lr": 0.5}
    settings = muon.Muon(adamw_lr=0.01, weight_decay=0.1, **rates)
    of = {"table.weight": 0.2, "head.weight": 0.004, "head.bias": 0.004, "places": 0.01}
    of |= {n: 0.5 for n, p in model.named_parameters() if p.ndim == 1 and n != "head.bias"}
    hidden = {f"body.{n}.weight" for n in range(3)}
    assert of.keys() | hidden == dict(model.named_parameters()).keys()
    weights = {n: p.detach().numpy().copy() for n, p in model.named_parameters()}
    states: dict[str, State] = {n: {} for n in weights}
    optimizer = built(settings, model)
    for step in range(1, 6):
        for n, p in model.named_parameters():
            g = gradient(n, p.shape, step)
            p.grad = torch.as_tensor(g)
            if n in of:
                weights[n] = adamw(states[n], weights[n], g, step, 2 * of[n], 0.1 if p.ndim > 1 else 0.0, settings)
        optimizer.step()
    for n in of:
        np.testing.assert_allclose(dict(model.named_parameters())[n].detach().numpy(), weights[n], rtol=1e-10, atol=1e-10)
    plain = built(muon.Muon(adamw_lr=0.01), Reader())
    assert [g["lr"] for member in plain.members for g in member.param_groups] == [0.04, 0.02, 0.02]


def test_a_rate_for_what_a_model_has_not_is_refused() -> None:
    with pytest.raises(UserError, match=r"optimizer\.embedding_lr=0\.2: the model has no trainable embedding"):
        muon.Muon(embedding_lr=0.2).create(torch.nn.Sequential(*(torch.nn.Linear(3, 3) for _ in range(4))))
    tied = Reader()
    tied.head.weight, tied.head.bias = tied.table.weight, None
    with pytest.raises(UserError, match=r"optimizer\.head_lr=0\.1: the model has no trainable weight of an output layer"):
        built(muon.Muon(head_lr=0.1), tied)


def test_orthogonalised_has_singular_values_near_one() -> None:
    torch.manual_seed(0)
    for shape in ((2, 8, 30), (2, 30, 8)):
        values = torch.linalg.svdvals(orthogonalised(torch.randn(shape), 5))
        assert values.min() > 0.6
        assert values.max() < 1.3


@pytest.mark.parametrize("case", ["lars", "lars nesterov"])
def test_lars_on_vectors_equals_lars_on_tensors(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a device and in 16 bits; with a kernel whose memory is in another order."""
    of_tensors, of_vectors = (net().to(memory_format=torch.channels_last) for _ in range(2))
    option, given, _ = CASES[case]
    optimizers = [option(lr=1.0, **given).create(model) for model in (of_tensors, of_vectors)]
    steps(of_tensors, optimizers[0])
    made = Chunk.__init__

    def by_vectors(chunk: Chunk, params: list[torch.Tensor]) -> None:
        made(chunk, params)
        assert chunk.by_tensors
        chunk.by_tensors = False

    monkeypatch.setattr(Chunk, "__init__", by_vectors)
    steps(of_vectors, optimizers[1])
    assert largest_difference(of_vectors, {n: p.detach().numpy() for n, p in of_tensors.named_parameters()}) < 1e-12


def test_lars_keeps_the_learning_rate_inside_the_momentum() -> None:
    """After lr falls to almost nothing the momentum goes on with its old size: that is the paper's, not SGD's, order."""
    model = torch.nn.Linear(8, 8, bias=False)
    optimizer = flat.Lars(lr=1.0).create(model)
    model.weight.grad = torch.ones(8, 8)
    before = model.weight.detach().clone()
    optimizer.step()
    first = (model.weight.detach() - before).norm()
    optimizer.param_groups[0]["lr"] = 1e-9
    before = model.weight.detach().clone()
    optimizer.step()
    torch.testing.assert_close((model.weight.detach() - before).norm(), 0.9 * first, rtol=1e-4, atol=0)


def test_lamb_adapts_without_decay_where_its_kind_decays() -> None:
    """weight_decay=0 does not turn LAMB into Adam, and NVLAMB adapts vectors too."""
    for option, bias_adapts in ((flat.Lamb, False), (flat.NvLamb, True)):
        model = net()
        with torch.no_grad():
            model.head.bias.fill_(5.0)
        before = {n: p.detach().clone() for n, p in model.named_parameters()}
        optimizer = option(lr=0.01, weight_decay=0.0).create(model)
        for n, p in model.named_parameters():
            p.grad = torch.as_tensor(gradient(n, p.shape, 2))
        optimizer.step()
        size = {n: float((p.detach() - before[n]).norm() / before[n].norm()) for n, p in model.named_parameters()}
        assert abs(size["body.weight"] - 0.01) < 1e-6
        assert (abs(size["head.bias"] - 0.01) < 1e-6) == bias_adapts
