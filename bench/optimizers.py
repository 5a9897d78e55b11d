"""What an optimizer's step costs: ours or torch's as a loop, foreach and fused, beside timm's.

`python -m bench.optimizers [--quick] [--only lamb lars …] [--threads N] [--out FILE]`

Two lists of about 150 tensors, those of a vision transformer: `small` is 64 wide (0.6 M parameters: the calls cost), `vit_s`
is ViT-S (22 M: memory's bandwidth does). All arms of an algorithm are interleaved, A B C … C B A. Wall and CPU time are
recorded; ratios to the loop are those of CPU time, which other processes disturb less.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from bench import harness
from drivetrain import optimizer as options
from drivetrain.core.device import keep_freed_memory

LR, DECAY = 0.01, 0.05
OURS: dict[str, Any] = {
    "lars": options.Lars, "lamb": options.Lamb, "nvlamb": options.NvLamb, "novograd": options.NovoGrad, "lion": options.Lion,
    "adamw": options.AdamW, "sgd": options.Sgd,
}  # fmt: skip
TIMM: dict[str, dict[str, Any]] = {  # the same rule with their arguments
    "lars": {"name": "lars", "kwargs": {"momentum": 0.9}},
    "lamb": {"name": "lamb", "kwargs": {"max_grad_norm": None}},
    "nvlamb": {"name": "lamb", "kwargs": {"always_adapt": True}},
    "novograd": {"name": "novograd", "kwargs": {}},
    "lion": {"name": "lion", "kwargs": {}},
}
FORMS: dict[str, dict[str, Any]] = {
    "loop": {"fused": False, "foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True},
}  # fmt: skip


def shapes(width: int, image: int, patch: int, channels: int, classes: int, depth: int = 12) -> list[tuple[int, ...]]:
    """The parameters of a vision transformer, in their order."""
    w, hidden = width, 4 * width
    block = [(w,), (w,), (3 * w, w), (3 * w,), (w, w), (w,), (w,), (w,), (hidden, w), (hidden,), (w, hidden), (w,)]
    ends = [(1, 1, w), (1, (image // patch) ** 2 + 1, w), (w, channels, patch, patch), (w,)]
    return [*ends, *block * depth, (w,), (w,), (classes, w), (classes,)]


LISTS = {"small": shapes(64, 16, 4, 3, 10), "vit_s": shapes(384, 224, 16, 3, 1000)}
QUICK = {"small": shapes(16, 8, 4, 3, 10, depth=2)}


class Weights(torch.nn.Module):
    """Parameters of given shapes with their gradients; the same at every call."""

    def __init__(self, sizes: Sequence[tuple[int, ...]]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.held = torch.nn.ParameterList([torch.nn.Parameter(torch.randn(size)) for size in sizes])
        for p in self.held:
            p.grad = 0.01 * torch.randn_like(p)


def arms(algorithm: str) -> dict[str, Any]:
    """Name → option. The first is the one to compare with."""
    cls, given = OURS[algorithm], {"lr": LR, "weight_decay": DECAY}
    own = {"nesterov": False} if algorithm == "sgd" else {}  # torch's foreach Nesterov adds to the gradients, which are held here
    found = {form: cls(**given, **knobs, **own) for form, knobs in FORMS.items() if form != "fused" or cls.fused_on}
    if algorithm in TIMM:
        foreach = {} if algorithm == "novograd" else {"foreach": True}
        found["timm"] = options.Timm(**given, **TIMM[algorithm], **foreach)
    return found


def measure(algorithm: str, sizes: Sequence[tuple[int, ...]], rounds: int) -> dict[str, Any]:
    """Milliseconds of every arm, and their ratio to the first."""
    steps = {name: option.create(Weights(sizes)).step for name, option in arms(algorithm).items()}
    first = {name: timed(step)[0] for name, step in steps.items()}  # lays out
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in steps}
    for number in range(rounds):
        for name in steps if number % 2 else reversed(list(steps)):
            seconds[name].append(timed(steps[name]))
    base = [cpu for _, cpu in next(iter(seconds.values()))]
    return {
        name: {
            "ms": harness.spread([1e3 * wall for wall, _ in taken]),
            "times_faster": harness.against(base, [cpu for _, cpu in taken])["ratio"],
            "first_s": first[name],
        }
        for name, taken in seconds.items()
    }


def timed(step: Callable[[], Any]) -> tuple[float, float]:
    """Seconds of a step: the wall's, and this process's."""
    began = time.perf_counter(), time.process_time()
    step()
    return time.perf_counter() - began[0], time.process_time() - began[1]


def main() -> None:
    """Measure, show, write."""
    given = harness.parse(__doc__, "optimizers-cpu.json", quick=False, only=OURS, threads=1, rounds=int)
    torch.set_num_threads(given.threads)
    keep_freed_memory()  # as runs do
    results: dict[str, Any] = {}
    for name, sizes in (QUICK if given.quick else LISTS).items():
        results[name] = {"tensors": len(sizes), "elements": sum(torch.Size(s).numel() for s in sizes), "algorithms": {}}
        for algorithm in given.only:
            rounds = given.rounds or (5 if given.quick else 100 if name == "small" else 20)
            results[name]["algorithms"][algorithm] = found = measure(algorithm, sizes, rounds)
            rows = [
                [n, f"{r['ms']['median']:.2f}", harness.ratio(r["times_faster"]), f"{r['first_s']:.2f}"] for n, r in found.items()
            ]
            harness.table(f"{algorithm}, {name}: {len(sizes)} tensors", ["arm", "ms", "times faster", "first step s"], rows)
    harness.write(given.out, {"threads": given.threads, "lists": results})


if __name__ == "__main__":
    main()
