"""Our optimizers are torch's, with the parameter groups that were asked for and a step without its wrappers."""

import pytest
import torch
from torch import nn

from drivetrain import optimizer as ours

IMPLEMENTATIONS = {
    "default": ({}, {"fused": True}),
    "fused": ({"fused": True}, {"fused": True}),
    "foreach": ({"foreach": True}, {"foreach": True}),
    "loop": ({"fused": False, "foreach": False}, {"fused": False, "foreach": False}),
}
OPTIMIZERS = {
    "sgd": (
        lambda how: ours.Sgd(lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01, **how),
        lambda groups, how: torch.optim.SGD(groups, lr=0.1, momentum=0.9, nesterov=True, **how),
    ),
    "sgd without momentum": (
        lambda how: ours.Sgd(lr=0.1, momentum=0.0, nesterov=False, weight_decay=0.01, **how),
        lambda groups, how: torch.optim.SGD(groups, lr=0.1, **how),
    ),
    "adamw": (
        lambda how: ours.AdamW(lr=0.1, beta1=0.8, beta2=0.95, eps=1e-6, weight_decay=0.01, **how),
        lambda groups, how: torch.optim.AdamW(groups, lr=0.1, betas=(0.8, 0.95), eps=1e-6, **how),
    ),
}


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 5))


@pytest.mark.parametrize("how", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_ours_equals_torchs_own_step_for_step(name, how):
    build, reference = OPTIMIZERS[name]
    knobs, torchs = IMPLEMENTATIONS[how]
    a, b = net(), net()
    mine = build(knobs).create(a)
    matrices, vectors = ([p for p in b.parameters() if (p.ndim > 1) == wanted] for wanted in (True, False))
    theirs = reference([{"params": matrices, "weight_decay": 0.01}, {"params": vectors, "weight_decay": 0.0}], torchs)
    start = [p.clone() for p in a.parameters()]
    generator = torch.Generator().manual_seed(1)
    for step in range(5):
        for p, q in zip(a.parameters(), b.parameters(), strict=True):
            p.grad = torch.randn(p.shape, generator=generator)
            q.grad = p.grad.clone()
        for group in (*mine.param_groups, *theirs.param_groups):
            group["lr"] = 0.1 / (step + 1)  # as a schedule does
        mine.step()
        theirs.step()
    for begun, p, q in zip(start, a.parameters(), b.parameters(), strict=True):
        assert torch.equal(p, q)
        assert not torch.equal(p, begun)
    assert not any(p.grad_fn for p in a.parameters())


@pytest.mark.parametrize("how", IMPLEMENTATIONS)
def test_the_implementation_is_the_one_that_was_asked_for(how):
    knobs, torchs = IMPLEMENTATIONS[how]
    built = ours.AdamW(**knobs).create(net())
    assert {k: bool(built.defaults[k]) for k in ("fused", "foreach")} == {"fused": False, "foreach": False, **torchs}


def test_norms_and_biases_are_not_decayed():
    decayed, rest = ours.Sgd(weight_decay=0.1).create(net()).param_groups
    assert (decayed["weight_decay"], rest["weight_decay"]) == (0.1, 0.0)
    assert [p.ndim for p in decayed["params"]] == [4, 2]
    assert [p.ndim for p in rest["params"]] == [1, 1, 1, 1]


def test_norms_and_biases_are_decayed_where_asked_for():
    (group,) = ours.Sgd(weight_decay=0.1, decay_norm_and_bias=True).create(net()).param_groups
    assert group["weight_decay"] == 0.1
    assert len(group["params"]) == 6


def test_decay_without_gradient_moves_matrices_alone():
    model = net()
    start = [p.clone() for p in model.parameters()]
    built = ours.Sgd(lr=1.0, momentum=0.0, nesterov=False, weight_decay=0.1).create(model)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    built.step()
    for begun, p in zip(start, model.parameters(), strict=True):
        torch.testing.assert_close(p, begun * 0.9 if p.ndim > 1 else begun)


def test_the_factor_multiplies_the_learning_rate():
    assert {g["lr"] for g in ours.Sgd(lr=0.1).create(net(), 4.0).param_groups} == {0.4}


def test_its_state_goes_into_torchs_own_optimizer_and_back():
    a = net()
    mine = ours.AdamW().create(a)
    for p in a.parameters():
        p.grad = torch.ones_like(p)
    mine.step()
    theirs = torch.optim.AdamW([{"params": [p for p in net().parameters() if p.ndim > 1]},
                                {"params": [p for p in net().parameters() if p.ndim < 2]}])  # fmt: skip
    theirs.load_state_dict(mine.state_dict())
    back = ours.AdamW().create(net())
    back.load_state_dict(theirs.state_dict())
    states = [list(o.state_dict()["state"].values()) for o in (mine, back)]
    assert len(states[0]) == 6
    for p, q in zip(*states, strict=True):
        assert p["step"] == q["step"] == 1
        assert torch.equal(p["exp_avg"], q["exp_avg"])
        assert p["exp_avg"].any()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["optimizer.lr=-1"], "optimizer.lr=-1"),
        (["optimizer.lr=0"], "optimizer.lr=0"),
        (["optimizer.lr=fast"], "optimizer.lr=fast"),
        (["optimizer.momentum=1.0"], "optimizer.momentum=1.0"),
        (["optimizer.weight_decay=-0.1"], "optimizer.weight_decay=-0.1"),
        (["optimizer.fused=true", "optimizer.foreach=true"], "exclude each other"),
        (["optimizer.momentum=0.0", "optimizer.nesterov=true"], "needs momentum"),
    ],
)
def test_what_cannot_be_is_refused(problems, words, says):
    assert any(says in p and "optimizer." in p for p in problems(*words))
