"""What an optimizer's step costs: a plain loop over the parameters, ours in every form, timm's, the plain loop compiled.

`python -m bench.optimizers [--quick] [--only lamb,…] [--no-compile] [--threads N] [--out FILE]`

Two lists of about 150 tensors, those of a vision transformer: `small` is 64 wide (0.6 M parameters: the calls cost), `vit_s`
is ViT-S (22 M: memory's bandwidth does). The loop is each paper's rule in plain torch operations, one parameter after the
other. All arms of an algorithm are interleaved, A B C … C B A, on equal weights and gradients, and must end at equal weights:
`difference` is the largest one to the loop's, relative to how far that moved. Wall and CPU time are recorded; on a CPU the
ratios are those of CPU time, which other processes disturb less.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench import harness
from drivetrain import optimizer as options
from drivetrain.core.device import keep_freed_memory

LR, DECAY = 0.01, 0.05
Step = Callable[[], Any]
State = dict[str, Tensor]


# --- the papers' rules, one parameter at a time; c1 and c2 are Adam's bias corrections ---


def lars(p: Tensor, g: Tensor, s: State, decay: float, adapt: bool, c1: Any, c2: Any) -> None:
    g = g.add(p, alpha=decay)
    if adapt:
        w_norm, g_norm = p.norm(), s["g"].norm()
        g.mul_(torch.where((w_norm > 0) & (g_norm > 0), 0.001 * w_norm / (g_norm + decay * w_norm), 1.0))
    s["v"].mul_(0.9).add_(g, alpha=LR)
    p.sub_(s["v"])


def lamb(p: Tensor, g: Tensor, s: State, decay: float, adapt: bool, c1: Any, c2: Any) -> None:
    s["m"].mul_(0.9).add_(g, alpha=0.1)
    s["v"].mul_(0.999).addcmul_(g, g, value=0.001)
    u = (s["m"] / c1).div_((s["v"] / c2).sqrt_().add_(1e-6))
    if decay:
        u.add_(p, alpha=decay)
    if adapt:
        w_norm, u_norm = p.norm(), u.norm()
        u.mul_(torch.where((w_norm > 0) & (u_norm > 0), w_norm / u_norm, 1.0))
    p.add_(u, alpha=-LR)


def novograd(p: Tensor, g: Tensor, s: State, decay: float, adapt: bool, c1: Any, c2: Any) -> None:
    squared = g.square().sum()
    s["n"].copy_(torch.where(s["n"] == 0, squared, torch.lerp(s["n"], squared, 0.02)))
    u = g / s["n"].sqrt().add_(1e-8)
    if decay:
        u.add_(p, alpha=decay)
    s["m"].mul_(0.95).add_(u)
    p.add_(s["m"], alpha=-LR)


def lion(p: Tensor, g: Tensor, s: State, decay: float, adapt: bool, c1: Any, c2: Any) -> None:
    u = s["m"].lerp(g, 0.1).sign_()
    if decay:
        p.mul_(1 - LR * decay)
    p.add_(u, alpha=-LR)
    s["m"].lerp_(g, 0.01)


RULES: dict[str, Callable[..., None]] = {"lars": lars, "lamb": lamb, "nvlamb": lamb, "novograd": novograd, "lion": lion}
OURS: dict[str, Any] = {
    "lars": options.Lars, "lamb": options.Lamb, "nvlamb": options.NvLamb, "novograd": options.NovoGrad, "lion": options.Lion,
    "adamw": options.AdamW, "sgd": options.Sgd, "muon": options.Muon,
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

    def __init__(self, sizes: Sequence[tuple[int, ...]], device: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        made = [torch.randn(size) for size in sizes]
        grads = [0.01 * torch.randn(size) for size in sizes]
        self.held = torch.nn.ParameterList([torch.nn.Parameter(w.to(device)) for w in made])
        for p, g in zip(self.held, grads, strict=True):
            p.grad = g.to(device)


class Linears(torch.nn.Module):
    """The matrices of the same shapes as linear layers: what Muon takes."""

    def __init__(self, sizes: Sequence[tuple[int, ...]], device: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.held = torch.nn.ModuleList([torch.nn.Linear(s[1], s[0], bias=False) for s in sizes if len(s) == 2]).to(device)
        for p in self.parameters():
            p.grad = 0.01 * torch.randn_like(p)


def plain(rule: Callable[..., None], model: torch.nn.Module, pre_normalise: bool, compiled: bool) -> Step:
    """The rule over all parameters, one after the other; as one compiled graph if asked for."""
    params = [p.detach() for p in model.parameters()]
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    names = ("m", "v")
    states = [
        {**{n: torch.zeros_like(p) for n in names}, "n": p.new_zeros(()), "g": g} for p, g in zip(params, grads, strict=True)
    ]
    count = 0

    def update(c1: Any, c2: Any) -> None:
        scaled = grads
        if pre_normalise:
            divisor = torch.stack([g.norm() for g in grads]).norm().clamp(min=1.0)
            scaled = [g / divisor for g in grads]
        for p, g, s in zip(params, scaled, states, strict=True):
            matrix = p.ndim > 1
            rule(p, g, s, DECAY if matrix else 0.0, matrix or pre_normalise, c1, c2)

    run = torch.compile(update) if compiled else update

    @torch.no_grad()
    def step() -> None:
        nonlocal count
        count += 1
        c1, c2 = 1 - 0.9**count, 1 - 0.999**count
        run(*((torch.tensor(c1), torch.tensor(c2)) if compiled else (c1, c2)))

    return step


def option(cls: Any, **knobs: Any) -> Callable[[torch.nn.Module], Step]:
    """One of our options, as a run builds it."""
    return lambda model: cls(lr=LR, weight_decay=DECAY, **knobs).create(model).step


def arms(algorithm: str, compiled: bool) -> dict[str, Callable[[torch.nn.Module], Step]]:
    """Name → what makes a step over a model. The first is the one to compare with."""
    found: dict[str, Callable[[torch.nn.Module], Step]] = {}
    cls = OURS[algorithm]
    if algorithm in RULES:
        rule, pre = RULES[algorithm], algorithm == "nvlamb"
        found["reference loop"] = lambda model: plain(rule, model, pre, compiled=False)
    if algorithm == "muon":
        found["torch's Muon"] = lambda model: torch.optim.Muon(model.parameters(), lr=LR, weight_decay=DECAY).step
        found["ours"] = matrices
        return found
    own = {"nesterov": False} if algorithm == "sgd" else {}  # torch's foreach Nesterov adds to the gradients, which are held here
    for form, knobs in FORMS.items():
        if form != "fused" or cls.fused_on:
            found[f"{'ours' if algorithm in RULES else 'torch'}, {form}"] = option(cls, **knobs, **own)
    if algorithm in TIMM:
        takes = ["foreach"] if algorithm != "novograd" else []
        found["timm"] = option(options.Timm, **TIMM[algorithm], **dict.fromkeys(takes, True))
    if compiled and algorithm in RULES:
        found["reference loop, compiled"] = lambda model: plain(rule, model, pre, compiled=True)
    return found


def matrices(model: torch.nn.Module) -> Step:
    """Our Muon over all matrices alike."""
    from drivetrain.optimizer.algorithms.muon import Muon

    return Muon(model.parameters(), lr=LR, weight_decay=DECAY, momentum=0.95, nesterov=True, scale="original", ns_steps=5).step


def measure(algorithm: str, sizes: Sequence[tuple[int, ...]], rounds: int, compiled: bool, device: str) -> dict[str, Any]:
    """Milliseconds of every arm, their ratio to the first, and the difference of the final weights."""
    make = Linears if algorithm == "muon" else Weights
    start = [p.detach().clone() for p in make(sizes, device).parameters()]
    models: dict[str, torch.nn.Module] = {}
    steps: dict[str, Step] = {}
    first: dict[str, float] = {}
    failed: dict[str, str] = {}
    for name, build in arms(algorithm, compiled).items():
        model = make(sizes, device)
        try:
            step = build(model)
            first[name] = timed(step, device)[0]  # lays out, compiles
        except Exception as error:  # an arm that does not work is a finding, not the end
            failed[name] = f"{type(error).__name__}: {str(error).splitlines()[0]}"
            continue
        models[name], steps[name] = model, step
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in steps}
    for number in range(rounds):
        for name in steps if number % 2 else reversed(list(steps)):
            seconds[name].append(timed(steps[name], device))
    clock = 1 if device == "cpu" else 0
    base = next(iter(steps))
    found: dict[str, Any] = {name: {"failed": why} for name, why in failed.items()}
    for name in steps:
        wall, cpu = ([1e3 * pair[n] for pair in seconds[name]] for n in (0, 1))
        ratio = harness.interval([b[clock] / a[clock] for a, b in zip(seconds[name], seconds[base], strict=True)])
        found[name] = {"ms": harness.spread(wall), "cpu_ms": harness.spread(cpu), "times_faster": ratio,
                       "first_s": first[name], "difference": difference(models[base], models[name], start)}  # fmt: skip
    return found


def timed(step: Step, device: str) -> tuple[float, float]:
    """Seconds of a step: the wall's, this process's on a CPU."""
    began = time.perf_counter(), time.process_time()
    step()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began[0], time.process_time() - began[1]


def difference(base: torch.nn.Module, model: torch.nn.Module, start: list[Tensor]) -> float:
    """The largest difference of two models' weights, relative to the largest move from the start."""
    pairs = [(p.detach(), q.detach(), w) for p, q, w in zip(base.parameters(), model.parameters(), start, strict=True)]
    return max(float((p - q).abs().max()) for p, q, _ in pairs) / max(float((p - w).abs().max()) for p, _, w in pairs)


def main() -> None:
    """Measure, show, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two small blocks, five rounds: whether it works")
    parser.add_argument("--only", help="algorithms, such as lamb,lars", default=",".join(OURS))
    parser.add_argument("--no-compile", action="store_true", help="without the compiled loop, a minute for each list")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, help="blocks of every arm")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    keep_freed_memory()  # as runs do
    device = "cuda" if torch.cuda.is_available() else "cpu"
    results: dict[str, Any] = {}
    for name, sizes in (QUICK if given.quick else LISTS).items():
        rounds = given.rounds or (5 if given.quick else 100 if name == "small" else 20)
        results[name] = {"tensors": len(sizes), "elements": sum(torch.Size(s).numel() for s in sizes), "algorithms": {}}
        for algorithm in given.only.split(","):
            found = measure(algorithm, sizes, rounds, not given.no_compile and not given.quick, device)
            results[name]["algorithms"][algorithm] = found
            show(f"{algorithm}, {name}: {len(sizes)} tensors", found)
    out = given.out or harness.RESULTS / f"optimizers-{device}.json"
    harness.write(out, {"machine": harness.machine(), "device": device, "threads": given.threads, "lists": results})


def show(title: str, found: dict[str, Any]) -> None:
    """One algorithm's table."""
    rows = []
    for arm, r in found.items():
        if "failed" in r:
            rows.append([arm, "–", "–", "–", "–", r["failed"]])
            continue
        ratio = r["times_faster"]
        rows.append([arm, f"{r['ms']['median']:.2f}", f"{r['cpu_ms']['median']:.2f}",
                     f"{ratio['median']:.2f} ({ratio['low']:.2f} … {ratio['high']:.2f})", f"{r['first_s']:.1f}",
                     f"{r['difference']:.0e}"])  # fmt: skip
    harness.table(title, ["arm", "ms", "CPU ms", "times faster", "first step s", "difference"], rows)


if __name__ == "__main__":
    main()
