"""Planted faults: each is named, by its phase and the place in the model. The same runs without them are the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from tests.support.certified import SMALL, Break, certified

MLP = [*SMALL, "model=mlp", "model.hidden=[16,16]", "scheduler=linear"]
CONV = [*SMALL, "model=resnet9", "model.width=4", "scheduler=constant"]
ADAM = [*[w for w in MLP if not w.startswith("optimizer")], "optimizer=adamw", "optimizer.lr=0.01", "optimizer.weight_decay=0.1"]
GPT = [
    "data=stdlib", "data.max_files=10", "data.length=32", "data.test_samples=8", "loss=next_token", "model=gpt", "model.width=16",
    "model.heads=2", "model.depth=2", "batch.global_batch=8", "saving=none", "scheduler=constant", "runtime.threads=1",
    "updates=20", "optimizer=sgd", "optimizer.lr=0.1",
]  # fmt: skip


@dataclass(eq=False)
class Faulty:
    """A step with a fault in one of its methods."""

    inner: Any
    micro: Callable[[Any, Any, torch.Tensor], None] | None = None  # (inner step, batch, loss_sum)
    before: Callable[[], None] = lambda: None
    after: Callable[[], None] = lambda: None
    zero: bool = True

    def micro_batch(self, batch: Any, loss_sum: torch.Tensor) -> None:
        if self.micro is None:
            self.inner.micro_batch(batch, loss_sum)
        else:
            self.micro(self.inner, batch, loss_sum)

    def update(self) -> bool:
        self.before()
        made = self.inner.update()
        self.after()
        return bool(made)

    def zero_grad(self) -> None:
        if self.zero:
            self.inner.zero_grad()


def in_step(make: Callable[[Any], dict[str, Any]]) -> Break:
    """A fault in the step: `make(trainer)` gives the parts of Faulty."""

    def broken(trainer: Any) -> None:
        trainer.step = Faulty(trainer.step, **make(trainer))

    return broken


def in_stream(change: Callable[[Any], Any]) -> Break:
    """A fault in what the loader delivers."""

    def changed(stream: Iterator[Any]) -> Iterator[Any]:
        yield from map(change, stream)

    return lambda trainer: trainer.stream_watchers.append(changed)


def in_model(change: Callable[[torch.nn.Module], None], kind: type | None = None, name: str = "") -> Break:
    """A fault in the modules of a class, or in the module of a name."""

    def broken(trainer: Any) -> None:
        for found, module in trainer.model.named_modules():
            if (kind is not None and isinstance(module, kind)) or (kind is None and found == name):
                change(module)

    return broken


def weight_of_one(trainer: Any) -> dict[str, Any]:
    return {"micro": lambda inner, b, total: inner.micro_batch(replace(b, weight=torch.ones_like(b.weight)), total)}


def gradient_of_sums(trainer: Any) -> None:
    """The gradients of micro-batches are added up, not averaged; the loss that is shown is right."""
    right = trainer.precision.backward
    trainer.precision.backward = lambda loss, weight: right(loss, torch.ones_like(weight))


def clipped_before_unscaling(trainer: Any) -> None:
    def step(optimizer: Any, clip: Callable[[], None]) -> bool:
        clip()
        return bool(right(optimizer, lambda: None))

    right = trainer.precision.step
    trainer.precision.step = step


def stale_average(trainer: Any) -> None:
    right, kept = trainer.ema.update, [p.detach().clone() for p in trainer.model.parameters()]

    def update() -> None:
        now = [p.detach().clone() for p in trainer.model.parameters()]
        for p, old in zip(trainer.model.parameters(), kept, strict=True):
            p.data.copy_(old)
        right()
        for p, new in zip(trainer.model.parameters(), now, strict=True):
            p.data.copy_(new)
        kept[:] = now

    trainer.ema.update = update


def setting(key: str, value: Any, name: str = "") -> Break:
    """Another setting of the optimizer, of the groups that have a parameter whose name ends so."""

    def broken(trainer: Any) -> None:
        for group in trainer.optimizer.param_groups:
            if any(n.endswith(name) for n in group["param_names"]):
                group[key] = value

    return broken


def late_schedule(trainer: Any) -> None:
    right = trainer.scheduler.step
    trainer.scheduler.step = lambda update: right(max(0, update - 1))


def forgets(trainer: Any) -> dict[str, Any]:
    return {"before": trainer.optimizer.state.clear}


def decays_twice(trainer: Any) -> dict[str, Any]:
    def after() -> None:
        for group in trainer.optimizer.param_groups:
            for p in group["params"]:
                p.data.mul_(1 - float(group["lr"]) * group["weight_decay"])

    return {"after": after}


def uncorrected(trainer: Any) -> None:
    """Adam without its correction of the first averages, which start at zero."""

    def step() -> None:
        for group in trainer.optimizer.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                state = trainer.optimizer.state[p]
                if not state:
                    state |= {"step": torch.zeros(()), "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
                state["step"] += 1
                state["exp_avg"].lerp_(p.grad, 1 - beta1)
                state["exp_avg_sq"].mul_(beta2).addcmul_(p.grad, p.grad, value=1 - beta2)
                p.data.mul_(1 - group["lr"] * group["weight_decay"])
                p.data.addcdiv_(state["exp_avg"], state["exp_avg_sq"].sqrt() + group["eps"], value=-float(group["lr"]))

    trainer.optimizer.step = step


def one_kept_gradient(trainer: Any) -> dict[str, Any]:
    return {"zero": False}


def without_mask(attention: torch.nn.Module) -> None:
    from torch.nn.functional import scaled_dot_product_attention

    from drivetrain.model.gpt import apply_rotary

    def forward(x: torch.Tensor, rotary: torch.Tensor) -> torch.Tensor:
        n, length, _ = x.shape
        q, k, v = attention.qkv(x).view(n, length, 3, -1, attention.head).permute(2, 0, 3, 1, 4)  # type: ignore[operator]
        mixed = scaled_dot_product_attention(apply_rotary(q, rotary), apply_rotary(k, rotary), v)
        return attention.out(mixed.transpose(1, 2).flatten(2))  # type: ignore[operator]

    attention.forward = forward  # type: ignore[method-assign]


def drop_tail(trainer: Any) -> None:
    trainer.drop_last = not trainer.drop_last


def never_evaluates(trainer: Any) -> None:
    trainer.model.eval = trainer.model.train


def next_label(batch: Any) -> Any:
    return replace(batch, y=(batch.y + 1) % 4)


def normalised_again(batch: Any) -> Any:
    return replace(batch, x=(batch.x - 0.1) / 0.9)


def detached(module: torch.nn.Module) -> None:
    module.register_forward_hook(lambda _, args, output: output.detach())


def frozen(module: torch.nn.Module) -> None:
    for p in module.parameters():
        p.requires_grad_(False)


def no_statistics(module: torch.nn.Module) -> None:
    module.momentum = 0.0  # type: ignore[assignment]


def leaky(module: torch.nn.Module) -> None:
    module.forward = torch.nn.functional.leaky_relu  # type: ignore[assignment]


ACCUMULATED = ["batch=accumulate", "batch.accumulation_steps=3"]
CLIPPED = ["clip=norm", "clip.max_norm=0.5"]
# fault: (the run, what it has beside the other, fault, update, phase, place)
FAULTS: dict[str, tuple[list[str], list[str], Break, int, str, str]] = {
    "accumulation weight wrong": (MLP, ACCUMULATED, in_step(weight_of_one), 1, "loss", ""),
    "gradients summed": (MLP, ACCUMULATED, gradient_of_sums, 1, "gradient", "head"),
    "clip before unscale": ([*MLP, *CLIPPED], ["precision=amp"], clipped_before_unscaling, 1, "clipped gradient", "head"),
    "ema stale": ([*MLP, "ema=ema", "ema.decay=0.5"], [], stale_average, 1, "average", "layers.0"),
    "decay on norms": (CONV, [], setting("weight_decay", 0.1, "features.0.1.weight"), 1, "optimizer state", "features.0.1"),
    "dropped tail": ([*MLP, "data.samples=50"], [], drop_tail, 0, "samples", "number of updates"),
    "lr one update late": (MLP, [], late_schedule, 2, "learning rate", "layers.0"),
    "wrong mask": (GPT, [], in_model(without_mask, name="blocks.1.attention"), 1, "forward", "blocks.1.attention.out"),
    "momentum buffer reset": (MLP, [], in_step(forgets), 2, "optimizer state", "momentum_buffer"),
    "BatchNorm statistics not updated": (CONV, [], in_model(no_statistics, torch.nn.BatchNorm2d), 1, "buffers", "features.0.1"),
    "evaluated in train mode": (CONV, [], never_evaluates, 5, "evaluation", "loss"),
    "weight decay twice": (ADAM, [], in_step(decays_twice), 1, "weights", "layers.0"),
    "bias correction missing": (ADAM, [], uncorrected, 1, "weights", "layers.0"),
    "wrong beta": (ADAM, [], setting("betas", (0.9, 0.99)), 1, "optimizer state", "exp_avg_sq"),
    "one layer frozen": (MLP, [], in_model(frozen, name="layers.1.linear"), 1, "gradient", "layers.1.linear"),
    "one layer detached": (MLP, [], in_model(detached, name="layers.0"), 1, "gradient", "layers.0"),
    "labels shifted": (MLP, [], in_stream(next_label), 1, "targets", ""),
    "normalised twice": (MLP, [], in_stream(normalised_again), 1, "inputs", ""),
    "gradients not cleared": (MLP, [], in_step(one_kept_gradient), 2, "gradient", "head"),
    "another activation": (CONV, [], in_model(leaky, name="features.1.2"), 1, "forward", "features.1.2"),
}  # fmt: skip
QUICK = ("accumulation weight wrong", "lr one update late", "weight decay twice", "one layer detached")  # the normal suite's


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in FAULTS])
def test_a_planted_fault_is_named(name: str) -> None:
    words, beside, broken, update, phase, place = FAULTS[name]
    done, lines = certified([*words, *beside], words, broken)
    first = done.verdict.first
    assert first is not None, lines
    assert first.key[:2] == (update, phase), lines
    assert place in first.key[2], lines


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_without_the_fault_it_is_the_same(name: str) -> None:
    words, beside, *_ = FAULTS[name]
    done, lines = certified([*words, *beside], words)
    assert done.verdict.first is None, lines
