"""Precision × memory layout × compilation, each combination against plain float32.

`python -m bench.layout [--quick] [--rows resnet9,…] [--precisions fp32,…] [--rounds N] [--out FILE]`

Every arm is our own loop in a process of its own, on the same network and batch; arms run short blocks in turn. The seconds that
compiling took are listed separately, with the number of updates after which they have paid.
"""

from __future__ import annotations

import argparse
import itertools
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench import harness
from bench.gpu.loops import Work, ours

PRECISIONS = ("fp32", "bf16", "amp", "bf16_pure")
LAYOUTS = {"nchw": "surgery=[]", "channels_last": "surgery=[channels_last]"}
COMPILES = ("none", "inductor", "step")


def rows(device: str, quick: bool) -> dict[str, Work]:
    """What is trained."""
    batch = 256 if device == "cuda" else 64
    if quick:
        return {"resnet9": Work(("model=resnet9", "model.width=4"), (3, 16, 16), 10, 16, 2, "cpu")}
    vit = (
        "model=timm", "model.name=vit_tiny_patch16_224", "+model.kwargs.img_size=32", "+model.kwargs.patch_size=4",
        "+model.kwargs.depth=6",
    )  # fmt: skip
    return {
        "resnet9": Work(("model=resnet9", "model.width=32"), (3, 32, 32), 10, batch, 3, device),
        "vit": Work(vit, (3, 32, 32), 10, batch, 3, device, conv=False),
    }


def combinations(work: Work, quick: bool, precisions: Sequence[str] = PRECISIONS) -> dict[str, list[str]]:
    """Name → overrides of every combination that can be; the plain one first."""
    compiles = COMPILES[:1] if quick else COMPILES
    layouts = LAYOUTS if work.conv else {"nchw": LAYOUTS["nchw"]}
    return {
        f"{precision} {layout} {compile_}": [f"precision={precision}", LAYOUTS[layout], f"compile={compile_}"]
        for precision, layout, compile_ in itertools.product(precisions, layouts, compiles)
        if not (precision == "amp" and compile_ == "step")
    }


def measure(work: Work, arms: dict[str, list[str]], rounds: int) -> dict[str, Any]:
    """Per arm: samples/s, ratio to the first, seconds of the first blocks, and the updates until those have paid."""
    seconds, _ = harness.run_rounds({name: (ours, (work, overrides)) for name, overrides in arms.items()}, rounds + 2, warmup=0)
    walls = {name: [wall for wall, _ in taken] for name, taken in seconds.items()}
    base = next(iter(arms))
    found = {}
    for name in arms:
        steady, plain = walls[name][2:], walls[base][2:]
        ratio = harness.against(plain, steady)["ratio"]  # times faster
        step, plain_step = (harness.spread(w)["median"] / work.steps for w in (steady, plain))
        first = sum(walls[name][:2]) - 2 * step * work.steps  # seconds of the first two blocks besides their steps
        found[name] = {
            "overrides": arms[name],
            "samples_per_second": work.batch / step,
            "times_faster": ratio,
            "first_s": first,
            "pays_after_updates": math.ceil(first / (plain_step - step)) if step < plain_step else None,
        }
    return found


def main() -> None:
    """Measure, show, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a small network, two rounds, nothing compiled: whether it works")
    parser.add_argument("--rows", help="networks, such as resnet9,vit")
    parser.add_argument("--precisions", default=",".join(PRECISIONS), help="some of them: every arm stays in memory")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    found = {}
    for name, work in rows(device, given.quick).items():
        if given.rows and name not in given.rows.split(","):
            continue
        arms = combinations(work, given.quick, given.precisions.split(","))
        found[name] = {"work": asdict(work), "arms": measure(work, arms, given.rounds or (2 if given.quick else 8))}
        show(f"{name}, {work.batch} samples", found[name]["arms"])
    out = given.out or harness.RESULTS / f"layout-{device}.json"
    harness.write(out, {"machine": harness.machine(), "device": device, "rows": found})


def show(title: str, arms: dict[str, Any]) -> None:
    """One network's table."""
    header = ["precision, layout, compile", "samples/s", "times faster", "first s", "pays after updates"]
    harness.table(title, header, [
        [name, f"{a['samples_per_second']:,.0f}",
         f"{a['times_faster']['median']:.2f} ({a['times_faster']['low']:.2f} … {a['times_faster']['high']:.2f})",
         f"{a['first_s']:.1f}", str(a["pays_after_updates"] or "–")]
        for name, a in arms.items()
    ])  # fmt: skip


if __name__ == "__main__":
    main()
