"""Asks torch's kernels on this CPU whether a gradient depends on what freed memory held, and how far it is from float64.

`python -m bench.kernels [--draws N] [--seed S] [--jobs N] [--out FILE]`. Linux with glibc.

Draws convolutions, linear layers, pools and norms of small sizes, and computes output and gradients in each dtype of a precision
option, each in a process of its own, under several fills of freed memory (glibc's MALLOC_PERTURB_) and at 1 and 2 threads. A
layer is wrong where the fills give other bits, where the process ends, or where a figure is far from float64's.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import subprocess
import sys
from typing import Any

from bench import harness

FILLS, THREADS, DTYPES = (0, 65, 255), (1, 2), ("float32", "bfloat16", "float16")
ROUNDOFF = {"float32": 2.0**-23, "bfloat16": 2.0**-8, "float16": 2.0**-11}
FAR = 100  # units of roundoff, times the root of the terms of a sum
LIMIT_S = 120
Drawn = dict[str, Any]


def drawn(draw: random.Random) -> Drawn:
    """A layer and the shape of its input."""
    kind, n, channels = draw.choice(["Conv", "Conv", "ConvTranspose", "Linear", "Pool", "Norm"]), draw.choice([1, 2, 3]), 8
    channels *= draw.choice([1, 2, 4, 8])
    k, s = draw.choice([1, 2, 3, 4, 7]), draw.choice([1, 2, 3, 4])
    size = [draw.choice([1, 2, 3, 5, 8])] * n
    shape = [draw.choice([2, 8]), channels, *size]
    if kind == "Linear":
        return {"name": "Linear", "args": [channels, draw.choice([1, 10, 64])], "shape": shape[:2]}
    if kind == "Norm":
        return {"name": f"BatchNorm{n}d", "args": [channels], "shape": [*shape[:2], *(max(2, each) for each in size)]}
    if kind == "Pool":
        return {"name": f"{draw.choice(['Avg', 'Max'])}Pool{n}d", "args": [k, s, k // 2], "shape": shape}
    return {"name": f"{kind}{n}d", "args": [channels, draw.choice([1, 16, 48]), k, s, k // 2], "shape": shape}


def compute(layer: Drawn, dtype: str) -> Drawn:
    """What one process finds: a hash of output and gradients, and the largest distance from float64 in units of roundoff."""
    import torch

    def results(wanted: torch.dtype) -> list[torch.Tensor]:
        torch.manual_seed(0)
        module, x = getattr(torch.nn, layer["name"])(*layer["args"]).to(wanted), torch.randn(layer["shape"]).to(wanted)
        out = module(x.requires_grad_())
        weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(wanted)
        return [out.detach(), *torch.autograd.grad(out, [x, *module.parameters()], weight)]

    given = getattr(torch, dtype)
    [torch.full((2**power,), 1e30) for power in range(4, 18)]  # freed at once: what a kernel may read
    found, exact = results(given), results(torch.float64)
    distances = [
        float((a.double() - b).abs().max() / b.abs().max().clamp(min=1.0)) / ROUNDOFF[dtype] / max(1, b.numel()) ** 0.5
        for a, b in zip(found, exact, strict=True)
    ]
    content = b"".join(t.contiguous().view(torch.uint8).numpy().tobytes() for t in found)
    return {"bits": hashlib.sha256(content).hexdigest()[:12], "far": max(distances, key=lambda d: d if d == d else float("inf"))}


def asked(layer: Drawn, dtype: str) -> Drawn:
    """The answers of all processes to one layer in one dtype."""
    wrong, words = list[str](), [sys.executable, "-m", "bench.kernels", json.dumps(layer), dtype]
    for threads in THREADS:
        bits = set[str]()
        for fill in FILLS:
            env = {**os.environ, "MALLOC_PERTURB_": str(fill), "OMP_NUM_THREADS": str(threads)}
            done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=LIMIT_S)
            if done.returncode:
                refused = "not implemented" in done.stderr or "Error" in done.stderr
                wrong += [] if refused else [f"exit {done.returncode} with fill {fill}, {threads} threads"]
                continue
            answer = json.loads(done.stdout.splitlines()[-1])
            bits.add(answer["bits"])
            if not answer["far"] < FAR:
                wrong.append(f"{answer['far']:.1e} roundoffs from float64 with fill {fill}, {threads} threads")
        wrong += ["other bits by what freed memory held"] if len(bits) > 1 else []
    return {**layer, "dtype": dtype, "wrong": wrong}


def main() -> None:
    """Ask, show, write."""
    if len(sys.argv) == 3 and sys.argv[1].startswith("{"):
        print(json.dumps(compute(json.loads(sys.argv[1]), sys.argv[2])))
        return
    given = harness.parse(__doc__, "kernels-cpu.json", draws=40, seed=0, jobs=2)
    draw = random.Random(given.seed)
    rows = [(drawn(draw), dtype) for _ in range(given.draws) for dtype in DTYPES]
    answers = list(harness.at_once(rows, asked, given.jobs, float("inf")))
    wrong = [answer for answer in answers if answer["wrong"]]
    for answer in wrong:
        print(f"{answer['dtype']} {answer['name']}{tuple(answer['args'])} over {answer['shape']}: {'; '.join(answer['wrong'])}")
    print(f"{len(wrong)} of {len(answers)} layers are wrong")
    harness.write(given.out, {"seed": given.seed, "layers": len(answers), "wrong": wrong})
    raise SystemExit(bool(wrong))


if __name__ == "__main__":
    main()
