"""The cost of spreading a run over ranks, counted and measured, beside what a simple model predicts.

    python -m bench.scale

Bytes are the kernel's count of what went through the loopback of a network namespace in which the ranks alone live (they
are left out where namespaces are not allowed). Speeds are ratios of whole runs in the order A B B A.
"""

from __future__ import annotations

import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from timeit import repeat
from typing import Any

from bench.harness import ROOT, before, parse, table, train, write

WIDTH, BATCH = 1024, 512
MLP = [
    "data=synthetic", "data.shape=[3,8,8]", "data.classes=10", "data.samples=65536", "data.test_samples=16", "model=mlp",
    f"model.hidden=[{WIDTH},{WIDTH},{WIDTH}]", "optimizer=sgd", "scheduler=constant", f"batch.global_batch={BATCH}",
    "saving=none", "runtime.device=cpu", "runtime.threads=1", "log_every=50", "epochs=9",
]  # fmt: skip
STRATEGIES = {
    "ddp": ["parallel=ddp"],
    "ddp, 4 micro-batches": ["parallel=ddp", "batch=accumulate", "batch.accumulation_steps=4"],
    "ddp, bf16 sent": ["parallel=ddp", "parallel.compress=bf16"],
    "ddp, powersgd": ["parallel=ddp", "parallel.compress=powersgd"],
    "fsdp": ["parallel=fsdp", "parallel.block=Layer"],
    "fsdp, weights kept": ["parallel=fsdp", "parallel.block=Layer", "parallel.reshard_after_forward=false"],
    "pipeline, 4 micro-batches": ["parallel=pipeline", "batch=accumulate", "batch.accumulation_steps=4"],
}  # fmt: skip


def trained(overrides: Sequence[str], updates: int, inside: Sequence[str] = ()) -> dict[str, Any]:
    """result.json of a run in a process of its own, and the bytes that the loopback carried for it."""
    printed, (found,) = train(*overrides, f"updates={updates}", inside=inside)
    carried = re.search(r"lo:\s*(\d+)", printed[printed.rfind("Inter-") :]) if inside else None
    return {**found, "loopback_bytes": int(carried[1]) if carried else None}


def on_ranks(ranks: int, task: str, *words: str) -> str:
    """The last line that a task of this file prints on so many ranks, which torch's launcher starts."""
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "-m", "bench.scale"]
    command = [sys.executable, *launcher, task, *words]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    return done.stdout.strip().splitlines()[-1]


def overhead(rounds: int, updates: int) -> dict[str, Any]:
    """Ours over a hand-written DDP script, the same work on 2 ranks: ratios of the steps' medians, round by round."""
    pairs: list[dict[str, float]] = []
    for n in range(rounds):
        pair: dict[str, float] = {}
        for who in ("ours", "by hand") if n % 2 == 0 else ("by hand", "ours"):
            of_ours = who == "ours"
            step_ms = trained([*MLP, "parallel=ddp"], updates)["step_ms_p50"] if of_ours else on_ranks(2, "by_hand", str(updates))
            pair[who] = float(step_ms)
        pairs.append(pair)
        by_hand = f"by hand {pair['by hand']:.2f} ms: {pair['ours'] / pair['by hand']:.3f}"
        print(f"overhead {n + 1}/{rounds}: {pair['ours']:.2f} ms, {by_hand}", flush=True)
    ours, theirs = ([pair[who] for pair in pairs] for who in ("ours", "by hand"))
    ratios = [mine / other for mine, other in zip(ours, theirs, strict=True)]
    return {"ratios": ratios, "median": statistics.median(ratios), "ours_ms": ours, "by_hand_ms": theirs}


def own_network() -> list[str]:
    """A command before a command: in a network namespace of its own, the loopback up, its counters printed at the end."""
    shell = ["sh", "-c", 'ip link set lo up && "$@"; code=$?; cat /proc/net/dev; exit $code', "sh"]
    inside = ["unshare", "--net", *shell]
    tried = subprocess.run([*inside, "true"], capture_output=True, check=False)
    return inside if tried.returncode == 0 else []


def traffic() -> dict[str, Any]:
    """Bytes of an update for each strategy on 2 ranks: the difference of a longer and a shorter run."""
    inside = own_network()
    weights = 4 * (192 * WIDTH + WIDTH + 2 * (WIDTH * WIDTH + WIDTH) + WIDTH * 10 + 10)
    found: dict[str, Any] = {"bytes_of_weights": weights}
    for name, overrides in STRATEGIES.items() if inside else ():
        short, long = (trained([*MLP, *overrides], updates, inside) for updates in (10, 40))
        update = (long["loopback_bytes"] - short["loopback_bytes"]) / 30
        found[name] = {"bytes_per_update": update, "of_the_weights": update / weights}
        print(f"traffic of {name}: {update / 1e6:.2f} MB an update, {update / weights:.2f} × the weights", flush=True)
    return found


def prediction(rounds: int) -> dict[str, Any]:
    """Step times of 2 ranks from parts measured separately: one rank's share of the work, and collectives of the same bytes.

    ddp: work + an all-reduce of the gradients. fsdp: work + two gatherings and a scattering, layer by layer. Nothing
    overlaps: on a CPU the ranks compute and communicate with the same cores.
    """
    found: dict[str, list[float]] = {}
    for _ in range(rounds):
        costs = json.loads(on_ranks(2, "collectives"))
        half = [*MLP, f"batch.global_batch={BATCH // 2}"]
        with ThreadPoolExecutor(2) as pool:  # two processes at once: they share caches and memory as two ranks do
            work = statistics.mean(run["step_ms_p50"] for run in pool.map(trained, [half, half], [60, 60]))
        measured = {name: trained([*MLP, *STRATEGIES[name]], 60)["step_ms_p50"] for name in ("ddp", "fsdp")}
        expected = {"ddp": work + costs["all_reduce"], "fsdp": work + 2 * costs["gather"] + costs["scatter"]}
        for name in measured:
            found.setdefault(f"{name} measured_ms", []).append(measured[name])
            found.setdefault(f"{name} predicted_ms", []).append(expected[name])
        found.setdefault("work_ms", []).append(work)
        for name, ms in costs.items():
            found.setdefault(f"{name}_ms", []).append(ms)
        print(f"work {work:.2f} ms, collectives {costs}; measured {measured}, predicted {expected}", flush=True)
    ratios = {
        name: statistics.median(p / m for p, m in zip(found[f"{name} predicted_ms"], found[f"{name} measured_ms"], strict=True))
        for name in ("ddp", "fsdp")
    }
    return {"predicted_over_measured": ratios, **found}


def by_hand(updates: str) -> None:
    """One rank of DistributedDataParallel as one writes it by hand; the first prints the milliseconds of a step, p50."""
    import torch
    import torch.distributed as dist
    from torch import nn

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    number, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    x, y = torch.randn(65536, 192), torch.randint(10, (65536,))
    layers = [nn.Linear(192, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU()]
    model = nn.parallel.DistributedDataParallel(nn.Sequential(*layers, nn.Linear(WIDTH, 10)), gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=5e-4, fused=True)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(1))
    share, times = BATCH // ranks, []
    for update in range(int(updates)):
        began = time.perf_counter()
        at = (update * BATCH) % (len(x) - BATCH)
        indices = order[at + number * share : at + (number + 1) * share]
        loss = nn.functional.cross_entropy(model(x[indices]), y[indices])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        times.append(time.perf_counter() - began)
    if number == 0:
        print(1e3 * statistics.median(times[10:]))
    dist.destroy_process_group()


def collectives() -> None:
    """Print what all-reduce, gathering and scattering of the network's weights take on these ranks, in ms, copies included."""
    import torch
    import torch.distributed as dist

    from drivetrain.core.machine.device import keep_freed_memory

    torch.set_num_threads(1)
    keep_freed_memory()  # as a run does
    dist.init_process_group("gloo")
    ranks = dist.get_world_size()
    layers = [count + -count % ranks for count in (193 * WIDTH, (WIDTH + 1) * WIDTH, (WIDTH + 1) * WIDTH, (WIDTH + 1) * 10)]
    wholes, parts = ([torch.zeros(count // share) for count in layers] for share in (1, ranks))
    whole = torch.zeros(sum(layers))

    # ddp's gradients meet in one bucket, fsdp's weights layer by layer.
    def gather() -> None:
        for part in parts:  # into a buffer, and from there to where the weights are used
            buffer = torch.empty(len(part) * ranks)
            dist.all_gather_into_tensor(buffer, part.clone())
            torch.empty_like(buffer).copy_(buffer)

    def scatter() -> None:
        for gradient, part in zip(wholes, parts, strict=True):
            dist.reduce_scatter_tensor(part, torch.cat(gradient.chunk(ranks)))
            part.div_(ranks)

    calls: dict[str, Callable[[], object]] = {"all_reduce": lambda: dist.all_reduce(whole), "gather": gather, "scatter": scatter}
    found = {name: 1e3 * statistics.median(repeat(call, number=1, repeat=15)[3:]) for name, call in calls.items()}
    if dist.get_rank() == 0:
        print(json.dumps(found))
    dist.destroy_process_group()


SPREAD = {
    "fsdp": ["parallel=fsdp"],
    "hybrid": ["parallel=fsdp", "parallel.replicate={machines}"],
    "tensor": ["parallel=tensor", "parallel.size=8"],
}
RANKS, SAMPLES, AT_ONCE, LOCAL = (8, 64, 1024, 8192), (10**6, 10**7, 10**8, 10**9), 2, 8
HELD = 65_536  # samples that are in memory, and stand for all
TOKENS = [
    "task=language_modelling", "model=gpt", "model.width=64", "model.heads=8", "model.depth=2", "data=synthetic",
    "data.tokens=true", "data.classes=256", "data.shape=[16]", "data.test_samples=16", "optimizer=adamw", "scheduler=constant",
    "saving=last",
    "runtime.device=cpu", "runtime.threads=1", "log_every=50", "epochs=1",
]  # fmt: skip


def pretend(count: int) -> None:
    """Make this process the first of so many ranks, whose collectives return at once with what they were given."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    def all_gather_object(values: list[Any], value: Any, group: Any = None) -> None:
        values[:] = [value] * len(values)

    fakes: Any = dist
    join = dist.init_process_group
    os.environ |= {"RANK": "0", "WORLD_SIZE": str(count), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": str(LOCAL)}
    fakes.rendezvous = lambda *_, **__: iter([(FakeStore(), 0, count)])
    fakes.init_process_group = lambda *_, **__: join("fake", store=FakeStore(), rank=0, world_size=count)
    fakes.new_group = lambda *_, **__: dist.group.WORLD
    fakes.all_gather_object = all_gather_object
    fakes.gather_object = lambda value, values, **_: all_gather_object(values, value)
    fakes.broadcast_object_list = lambda values, **_: None


def one_of(strategy: str, ranks: str, samples: str, updates: str) -> None:
    """Train as the first of so many ranks whose collectives return at once, and print what this rank spends, as JSON."""
    import resource
    import tempfile
    from pathlib import Path

    import torch

    from drivetrain.core import order
    from drivetrain.core.step.source import Subset
    from drivetrain.core.world import World
    from drivetrain.engine import build
    from drivetrain.engine.context import RunContext
    from drivetrain.launch import launcher

    class Repeated(Subset):
        """A source of as many samples as are asked for, of which this machine holds some."""

        def fetch(self, indices: torch.Tensor, *options: object) -> tuple[Any, Any]:
            return super().fetch(indices % len(self), *options)

    count = int(ranks)
    pretend(count)
    words = [word.format(machines=count // LOCAL) for word in SPREAD[strategy]]
    begun = time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        size = [f"batch.global_batch={AT_ONCE * count}", f"updates={updates}", f"data.samples={HELD}"]
        run = launcher.prepare([*TOKENS, *words, *size, f"output_dir={folder}"]).run
        context = RunContext(run, World(0, count, 0, LOCAL), Path(folder) / "run")
        trainer = build.build(context, [])
        source = trainer.train_data.source
        trainer.batch = trainer.batch.over(order.shuffled(int(samples)))
        trainer.taken = trainer.train_data.reading(Repeated(source, torch.arange(len(source))))
        built, within = time.process_time(), [0.0]

        def timed(call: Callable[..., Any]) -> Callable[..., Any]:
            def called(*given: Any) -> Any:
                began = time.process_time()
                try:
                    return call(*given)
                finally:
                    within[0] += time.process_time() - began

            return called

        ends: list[tuple[float, float]] = []
        step: Any = trainer.step
        zero = step.zero_grad

        def zero_grad() -> None:
            zero()
            ends.append((time.process_time(), within[0]))

        step.micro_batch, step.update, step.zero_grad = timed(step.micro_batch), timed(step.update), zero_grad
        trainer.fit()
        saved = sum(file.stat().st_size for file in Path(folder).rglob("checkpoints/*/*"))
        state = next(iter(Path(folder).rglob("state.pt"))).stat().st_size
        context.on_exit.close()
    gaps = [(b - a, inside - before_) for (a, before_), (b, inside) in pairwise(ends[2:])]
    found = {
        "start_s": built - begun,
        "first_update_s": ends[0][0] - built,
        "update_us": 1e6 * statistics.median(whole for whole, _ in gaps),
        "own_us": 1e6 * statistics.median(whole - inside for whole, inside in gaps),
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "saved_bytes": saved,
        "state_bytes": state,
    }
    print(json.dumps(found))


def spread(updates: int) -> list[dict[str, Any]]:
    """What the first rank spends in a world of its own whose collectives cost nothing: by strategy, ranks and samples.

    ddp is left out: its reducer does not run on torch's fake process group.
    """
    cases = [(name, ranks, SAMPLES[0]) for name in SPREAD for ranks in RANKS] + [("fsdp", RANKS[-1], n) for n in SAMPLES[1:]]
    found = []
    for name, ranks, samples in cases:
        command = [sys.executable, "-m", "bench.scale", "one_of", name, str(ranks), str(samples), str(updates)]
        done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
        figures = json.loads(done.stdout.strip().splitlines()[-1])
        found.append({"strategy": name, "ranks": ranks, "samples": samples, **figures})
        print(found[-1], flush=True)
    return found


TASKS: dict[str, Callable[..., None]] = {"by_hand": by_hand, "collectives": collectives, "one_of": one_of}  # of a rank
PARTS: dict[str, Callable[[Any], Any]] = {
    "overhead": lambda given: overhead(given.rounds, given.updates),
    "traffic": lambda _: traffic(),
    "prediction": lambda given: prediction(max(1, given.rounds // 2)),
    "spread": lambda given: spread(given.updates // 2),
}


def main() -> None:
    """Run all parts, or those that are named, and write bench/results/scale-cpu.json."""
    if len(sys.argv) > 1 and sys.argv[1] in TASKS:
        return TASKS[sys.argv[1]](*sys.argv[2:])
    os.environ["OMP_NUM_THREADS"] = "1"
    given = parse(__doc__, "scale-cpu.json", rounds=8, updates=120, only=PARTS)
    found = {name: PARTS[name](given) for name in given.only}
    write(given.out, {**before(given.out), "width": WIDTH, "batch": BATCH, **found})
    if "traffic" in found:
        rows = [
            (name, f"{of['bytes_per_update'] / 1e6:.2f}", f"{of['of_the_weights']:.2f}")
            for name, of in found["traffic"].items()
            if isinstance(of, dict)
        ]
        table("on 2 ranks", ("strategy", "MB an update", "× the weights"), rows)
    if "spread" in found:
        figures = "strategy", "ranks", "samples", "start_s", "first_update_s", "own_us", "update_us", "peak_mib", "state_bytes"
        rows = [[f"{v:,.4g}" if isinstance(v, float) else f"{v}" for v in map(each.get, figures)] for each in found["spread"]]
        table("the first of ranks whose collectives cost nothing", figures, rows)
    print(*(found[name].get(key) for name, key in SHOWN if name in found))


SHOWN = ("overhead", "median"), ("prediction", "predicted_over_measured")

if __name__ == "__main__":
    main()
