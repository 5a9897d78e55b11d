"""Costs drawn by a seed, written into a program as a user would write it: some work × a place × a share of the step.

The doctor's code knows none of these kinds. Each program has `REPEATS`, which says how often its planted line does its work
in an update; 0 takes the line out. So what the line really costs is measured beside what the doctor says. `times` gives the
line its passes; the campaign puts another in its place that measures the time within the line.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

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
    shape, _, body = MODELS[model]
    where = "helper" if place == "spread" else place
    filled = {p.replace(" ", "_"): "pass" for p in PLACES}
    indent = " " * (4 if where in ("helper", "loss", "forward hook", "backward hook") else 8)
    filled[where.replace(" ", "_")] = f"\n{indent}".join(lines)
    last = {"mlp": 256, "convnet": 16, "transformer": 64}[model]
    text = PROGRAM.format(shape=shape, body=body, last=last, **filled)
    return Drawn(seed, " + ".join(kinds), place, model, round(random_.uniform(0.18, 0.6), 2), text, on_path)
