"""Planted costs of which nobody told the doctor: does it name them with their right share, and call a clean model clean?

    python -m bench.attribution --seeds 20

Each seed draws a program with a planted line: some work × a place × a share of the step, of kinds that the doctor's code does
not know. One process measures what the line costs, by updates with and without it in turns (`REPEATS` says how often the line
does its work in an update, 0 takes it out), and profiles the run. The doctor must name the line first, and its share should be
that cost. The same program without the cost must not have a line named.

A line can cost more than the time within it: it can slow down the rest of the step, by what it does to caches, to the allocator
or to sleeping cores. Where time is spent does not tell that. So the time within the line is measured too, where its work has no
backward. The campaign writes its results after each seed, and resumes.
"""

from __future__ import annotations

import random
import statistics
import sys
import tempfile
from collections.abc import Iterator
from contextlib import chdir, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from bench.harness import before, parse, table, write

MIN_COST = 0.12  # a cost below is too near to the least share that the doctor names
PAIRS = 15
STEADY, ATTEMPTS = 0.03, 4  # the cost before the profile and after it may differ by so much, else both are measured again
MAX_REPEATS = 3**14

# Work that needs nothing of the model: it can stand anywhere.
WAITS = {
    "sleep": "time.sleep(0.0005)",
    "lock": "LOCK.acquire(timeout=0.0005)",
    "event": "EVENT.wait(0.0005)",
    "select": "select.select([], [], [], 0.0005)",
    "socket": "(SOCKETS[0].send(b'x'), SOCKETS[0].recv(1))",
    "process": "subprocess.run(['true'])",
    "fsync": "(FILE.write(BLOB), FILE.seek(0), os.fsync(FILE.fileno()))",
}
HOST = {
    "collect": "gc.collect(0)",
    "json": "json.dumps(RECORDS)",
    "hash": "hashlib.sha256(BLOB).digest()",
    "compress": "zlib.compress(BLOB[:20000])",
    "regex": "re.findall(r'[a-f]+9', TEXT)",
    "pickle": "pickle.dumps(RECORDS)",
    "sort": "sorted(NUMBERS)",
    "sum": "sum(i * i for i in range(2000))",
    "copy": "copy.deepcopy(RECORDS[:20])",
    "fractions": "sum(Fraction(1, n) for n in range(1, 40))",
    "files": "os.listdir('/proc/self')",
    "numpy": "np.sort(ARRAY)",
    "svd of numpy": "np.linalg.svd(SQUARE.numpy())",
    "format": "[f'{n:.3f}' for n in NUMBERS[:1000]]",
}
TENSORS = {
    "randperm": "torch.randperm(20000)",
    "zeros": "torch.zeros(300000)",
    "svd": "torch.linalg.svd(SQUARE)",
    "sort of tensors": "torch.sort(VECTOR)",
    "float64": "SQUARE.double() @ SQUARE.double()",
    "clone": "VECTOR.clone()",
    "fourier": "torch.fft.fft(VECTOR)",
    "unique": "torch.unique(COUNTS)",
    "lists": "VECTOR[:5000].tolist()",
    "product": "WIDE @ WIDE",
    "layout": "WIDE.t().contiguous()",
    "save": "torch.save(VECTOR, io.BytesIO())",
    "cat": "torch.cat([VECTOR, VECTOR])",
}
# Work on what the model computes, so that it has a backward: `x` is a tensor (n, …).
ON_PATH = {
    "sine in float64": "x = x + 0 * torch.sin(x.double()).float()",
    "copies": "x = x.clone()",
    "running sums": "x = x + 0 * torch.cumsum(x, -1)",
    "flips": "x = x.flip(-1)",
    "sorting": "x = torch.sort(x, -1).values",
    "where": "x = torch.where(x > 0, x, 0.9 * x)",
    "stacking": "x = torch.stack([x, x]).mean(0)",
    "casting": "x = x.double().float()",
    "rows": "x = torch.stack([row * 1.0 for row in x])",
    "unused layers": "self.spare(x)",
}
ANYWHERE = {**WAITS, **HOST, **TENSORS}
PLACES = ("head", "tail", "helper", "spread", "forward hook", "backward hook", "own backward", "loss", "data", "callback")
MODELS = {
    "mlp": ("(256,)", 256, "torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 512), torch.nn.ReLU(), "
        "torch.nn.Linear(512, 2)"),
    "convnet": (
        "(3, 16, 16)", 64,
        "torch.nn.Conv2d(3, 32, 3, padding=1), torch.nn.BatchNorm2d(32), torch.nn.ReLU(), torch.nn.Conv2d(32, 32, 3, padding=1), "
        "torch.nn.ReLU(), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(32, 2)",
    ),
    "transformer": (
        "(16, 64)", 64,
        "torch.nn.TransformerEncoderLayer(64, 4, 256, 0.0, batch_first=True), torch.nn.Flatten(), torch.nn.Linear(1024, 2)",
    ),
}  # fmt: skip

PROGRAM = """\
import copy, gc, hashlib, io, json, os, pickle, re, select, socket, subprocess, tempfile, threading, time, zlib
from fractions import Fraction

import numpy as np
import torch

import drivetrain

REPEATS = 0
LOCK, EVENT, SOCKETS = threading.Lock(), threading.Event(), socket.socketpair()
FILE = tempfile.TemporaryFile()
BLOB, TEXT = os.urandom(100000), os.urandom(20000).hex()
RECORDS = [{{"name": str(n), "value": [n] * 8}} for n in range(200)]
VECTOR, SQUARE, WIDE = torch.rand(100000), torch.rand(48, 48), torch.rand(256, 256)
NUMBERS, ARRAY, COUNTS = VECTOR[:5000].tolist(), VECTOR[:50000].numpy(), torch.randint(0, 1000, (20000,))
LOCK.acquire()


def times():
    return range(REPEATS)


def echo():
    while True:
        SOCKETS[1].send(SOCKETS[1].recv(1))


class Data(torch.utils.data.Dataset):
    classes = ("a", "b")

    def __init__(self, split):
        self.x = torch.rand(512, *{shape})

    def __len__(self):
        return 512

    def __getitem__(self, index):
        if index % 16 == 0:
            {data}
        return self.x[index], index % 2


def on_gradient(gradient):
    {backward_hook}


def on_forward(module, args, output):
    {forward_hook}


def helped(x):
    {helper}
    return x


class Same(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        {own_backward}
        return gradient


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body = torch.nn.Sequential({body})
        self.spare = torch.nn.Linear({last}, 64)
        self.body[0].register_forward_hook(on_forward)
        threading.Thread(target=echo, daemon=True).start()

    def forward(self, x):
        {head}
        x = helped(x)
        x = self.body(x)
        if x.requires_grad:
            x.register_hook(on_gradient)
        x = Same.apply(x)
        {tail}
        return x


def loss(output, y):
    {loss}
    return torch.nn.functional.cross_entropy(output, y)


class Watch(drivetrain.Callback):
    every_update = True

    def update(self, event):
        {callback}
"""


@dataclass(frozen=True)
class Drawn:
    """A program with a planted line, and the share of the step that the line should take."""

    seed: int
    kind: str
    place: str
    model: str
    share: float
    text: str
    differentiated: bool  # the work has a backward, elsewhere than in the line

    @property
    def module(self) -> str:
        """The program's name."""
        return f"drawn_{self.seed}"

    @property
    def planted(self) -> list[int]:
        """The numbers of the planted lines."""
        return [n for n, line in enumerate(self.text.splitlines(), 1) if line.endswith("# planted")]

    @property
    def marks(self) -> list[str]:
        """The planted lines, as the doctor names them."""
        return [f"{self.module}.py:{n} " for n in self.planted]

    def write(self, folder: Path) -> list[str]:
        """Write the program, and return the overrides of its run."""
        (folder / f"{self.module}.py").write_text(self.text)
        name = self.module
        return [
            "data=own", f"data.target={name}.Data", "model=own", f"model.target={name}.Net",
            "loss=own", f"loss.target={name}.loss",
            f"callbacks=[{name}.Watch]", f"trust=[{name}]", f"batch.global_batch={MODELS[self.model][1]}", "saving=none",
            f"loader={'sync' if self.place == 'data' else 'resident'}",
            "evaluate_every=1000", "epochs=1000", "log_every=100", "runtime.device=cpu", "optimizer=sgd",
        ]  # fmt: skip


# Costs of about a tenth of the step, at the head of the forward: the doctor must name each, however busy the machine is.
TENTHS = {
    "a tensor built anew": "torch.linspace(0, 1, 20000)",
    "a collection of garbage": "gc.collect(0)",
    "a sleep": "time.sleep(0.0002)",
    "an fsync": WAITS["fsync"],
    "a detour through float64": ON_PATH["sine in float64"],
}


def tenth(kind: str) -> Drawn:
    """A program of an mlp with one of the TENTHS."""
    line = f"for _ in times(): {TENTHS[kind]}  # planted"
    return _program(0, kind, "head", "mlp", 0.1, [line], kind == "a detour through float64")


def draw(seed: int) -> Drawn:
    """Draw a program: one or two kinds of work, a place, a model and a share."""
    random_ = random.Random(seed)
    place = random_.choice(PLACES)
    on_path = place in ("head", "helper", "spread") and random_.random() < 0.5
    kinds = random_.sample(sorted(ON_PATH if on_path else ANYWHERE), random_.choice((1, 1, 2)))
    if on_path and place != "head":
        kinds = [k for k in kinds if "self." not in ON_PATH[k]] or ["copies"]
    works = [(ON_PATH if on_path else ANYWHERE)[kind] for kind in kinds]
    line = f"for _ in times(): {'; '.join(works)}  # planted"
    lines = [line] * (3 if place == "spread" else 1)
    model = random_.choice(sorted(MODELS))
    return _program(seed, " + ".join(kinds), place, model, round(random_.uniform(0.18, 0.6), 2), lines, on_path)


def _program(seed: int, kind: str, place: str, model: str, share: float, lines: list[str], differentiated: bool) -> Drawn:
    shape, _, body = MODELS[model]
    where = "helper" if place == "spread" else place
    filled = {p.replace(" ", "_"): "pass" for p in PLACES}
    indent = " " * (4 if where in ("helper", "loss", "forward hook", "backward hook") else 8)
    filled[where.replace(" ", "_")] = f"\n{indent}".join(lines)
    last = {"mlp": 256, "convnet": 16, "transformer": 64}[model]
    text = PROGRAM.format(shape=shape, body=body, last=last, **filled)
    return Drawn(seed, kind, place, model, share, text, differentiated)


def main() -> None:
    """Run the campaign, or the rest of it."""
    given = parse(__doc__, "attribution-cpu.json", seeds=20, first=0, profile_s=2.0)
    content: dict[str, Any] = {"seeds": {}, **before(given.out)}
    for seed in range(given.first, given.first + given.seeds):
        if str(seed) not in content["seeds"]:
            content["seeds"][str(seed)] = found = examine(draw(seed), given.profile_s)
            print(f"{seed:3d} {found}", flush=True)
            content["summary"] = summary(content["seeds"])
            write(given.out, content)
    rows = [
        (f"{f['kind']}, {f['place']}, {f['model']}", f"{f['cost']:.0%}", f"{f['told']:.0%}",
         "–" if f["inside"] is None else f"{f['inside']:.0%}", "yes" if f["named"] else "no", "yes" if f["clean"] else "no")
        for f in content["seeds"].values()
    ]  # fmt: skip
    table("drawn costs", ("planted", "costs", "told", "within it", "named first", "clean without it"), rows)
    print(content["summary"])


def summary(seeds: dict[str, Any]) -> dict[str, Any]:
    """The figures of all seeds."""
    off = sorted(abs(f["told"] - f["cost"]) for f in seeds.values())
    inside = [abs(f["told"] - f["inside"]) for f in seeds.values() if f["inside"] is not None]
    return {
        "named": sum(f["named"] for f in seeds.values()), "clean": sum(f["clean"] for f in seeds.values()), "of": len(seeds),
        "within 5 points": sum(o <= 0.05 for o in off), "median points off": round(100 * statistics.median(off), 1),
        "within 5 points of the time within the line": sum(o <= 0.05 for o in inside), "that have it": len(inside),
    }  # fmt: skip


def examine(drawn: Drawn, profile_s: float) -> dict[str, Any]:
    """The cost of the planted line, and the doctor's words on it and on the program without it."""
    from drivetrain.engine import child
    from drivetrain.measure.profile.doctor import diagnose

    # One thread: what else runs on the machine disturbs it less. Whether more would help is no question here.
    with _job_of(drawn, threads=1) as job:
        measure = partial(_measure, drawn=drawn, profile_s=profile_s)
        repeats, costs, inside, planted, clean = child.ask(job.run, measure, drawn.kind)
        problems = sorted(diagnose(planted, job), key=lambda p: -p.share)
        without = sorted(diagnose(clean, job), key=lambda p: -p.share)
    marks = drawn.marks
    told = sum(line.share for line in planted.lines if any(mark in line.place for mark in marks))
    return {
        "kind": drawn.kind, "place": drawn.place, "model": drawn.model, "repeats": repeats,
        "step_ms": round(clean.step_ms, 2), "cost": round(costs, 3), "told": round(told, 3),
        "inside": None if drawn.differentiated else round(inside, 3),
        "named": any(mark in problems[0].evidence for mark in marks), "verdict": problems[0].verdict,
        "evidence": problems[0].evidence,
        "clean": without[0].name in ("compute", "batch"), "verdict without it": without[0].verdict,
    }  # fmt: skip


def tenths(profile_s: float) -> dict[str, str]:
    """The doctor's verdict on each of the TENTHS and on none of them; "" where it is not the right one."""
    found = {kind: examine(tenth(kind), profile_s) for kind in TENTHS}
    said = {kind: f["evidence"] if f["named"] else "" for kind, f in found.items()}
    said["none"] = "" if (bad := [f for f in found.values() if not f["clean"]]) else "no bottleneck"
    print({kind: (f["cost"], f["told"], f["verdict"]) for kind, f in found.items()}, bad, flush=True)
    return said


def _measure(trainer: Any, drawn: Drawn, profile_s: float) -> tuple[int, float, float, Any, Any]:
    """In the run's process: the repeats that make the share, the line's cost, the time within it, and two profiles."""
    from drivetrain.measure.profile import step
    from drivetrain.measure.profile.phases import TrackedStream, update
    from drivetrain.measure.profile.sampler import thread_clock
    from drivetrain.measure.profile.step import profile_step

    program, clock = sys.modules[drawn.module], thread_clock()
    step.usable_cores = lambda: 1
    trainer.endless()
    trainer.model.train()
    trainer.callbacks.start()
    stream = TrackedStream(trainer.read())

    def updates_s(repeats: int, block_s: float = 0.08) -> list[float]:
        """Return the seconds of each update of a block, less those in which the process waited for a core."""
        program.REPEATS, times, began = repeats, [], clock()
        while clock().own - began.own < block_s or len(times) < 2:
            before = clock().own
            update(trainer, stream)
            times.append(clock().own - before)
        return times[1:]

    def cost(repeats: int) -> float:
        """Return the planted line's share of the time, by updates with and without it in turns.

        By means, as the doctor's shares are: what a line costs now and then is a part of its cost.
        """
        pairs = [(updates_s(0), updates_s(repeats)) for _ in range(PAIRS)]
        without, with_it = (statistics.fmean(chain(*blocks)) for blocks in zip(*pairs, strict=True))
        return 1 - without / with_it

    def inside(repeats: int) -> float:
        """Return the share of the time that is spent within the line."""
        before, own = program.times, [0.0]

        def clocked() -> Iterator[int]:
            began = clock().own
            yield from range(program.REPEATS)
            own[0] += clock().own - began

        program.times = clocked
        updates_s(repeats, 0.2)
        own[0], began = 0.0, clock().own
        updates_s(repeats, 1.0)
        program.times = before
        return own[0] / (clock().own - began)

    updates_s(0, 0.5)
    repeats, none = 1, statistics.median(updates_s(0, 0.3))
    while statistics.median(updates_s(repeats, 0.05)) < 1.2 * none:
        repeats *= 3
        if repeats > MAX_REPEATS:
            raise RuntimeError(f"{drawn.kind} in {drawn.place}: the planted line costs nothing")
    costs = max(cost(repeats), 0.05)
    repeats = max(1, round(repeats * drawn.share / (1 - drawn.share) / (costs / (1 - costs))))
    while (before := cost(repeats)) < min(MIN_COST, 0.8 * drawn.share):
        repeats *= 2
    for _ in range(ATTEMPTS):
        planted = profile_step(trainer, profile_s)
        after = cost(repeats)
        if abs(after - before) < STEADY:
            break
        before = after  # the machine's speed changed meanwhile: there is no one share to compare with
    within = inside(repeats)
    program.REPEATS = 0
    return repeats, (before + after) / 2, within, planted, profile_step(trainer, profile_s)


@contextmanager
def _job_of(drawn: Drawn, threads: int) -> Iterator[Any]:
    """The job of a program, which is in a folder that is the working directory, and on the import path."""
    from drivetrain.launch.job import prepare

    with tempfile.TemporaryDirectory() as folder, chdir(folder):
        sys.path.insert(0, folder)
        try:
            yield prepare([*drawn.write(Path(folder)), f"runtime.threads={threads}"], [])
        finally:
            sys.path.remove(folder)


if __name__ == "__main__":
    main()
