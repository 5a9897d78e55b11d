"""Activation checkpointing: what each option saves in memory, and what it costs in time.

`python -m bench.memory [--quick] [--rows vit,…] [--rounds N] [--out FILE]`

Every arm is our own loop in a process of its own, on the same network and batch; arms run short blocks in turn. Memory is the
process's peak over training, above its peak when the network stood and nothing had been trained.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench import harness
from bench.gpu.loops import Work, ours

ARMS: dict[str, tuple[str, ...]] = {
    "none": (),
    "every_k": ("checkpointing=every_k",),
    "blocks": ("checkpointing=blocks",),
    "selective, products": ("checkpointing=selective",),
    "selective, half": ("checkpointing=selective", "checkpointing.policy=half"),
    "selective, attention": ("checkpointing=selective", "checkpointing.policy=attention"),
    "compiled": ("compile=inductor",),
    "compiled, budget 0.5": ("compile=inductor", "checkpointing=budget"),
    "compiled, budget 0": ("compile=inductor", "checkpointing=budget", "checkpointing.budget=0"),
}


def network(name: str, batch: int, device: str) -> Work:
    """A network of timm's at 224 × 224, two updates a block."""
    return Work(("model=timm", f"model.name={name}"), (3, 224, 224), 100, batch, 2, device)


def rows(device: str, quick: bool) -> dict[str, Work]:
    """What is trained: small enough for the device to run a block in seconds."""
    if quick:
        return {"resnet9": Work(("model=resnet9", "model.width=8"), (3, 32, 32), 10, 32, 2, "cpu")}
    if device == "cuda":
        return {"vit": network("vit_small_patch16_224", 256, device), "resnet": network("resnet50", 256, device)}
    return {"vit": network("vit_tiny_patch16_224", 16, device), "resnet": network("resnet18", 16, device)}


def measure(work: Work, arms: dict[str, tuple[str, ...]], rounds: int) -> dict[str, Any]:
    """Per arm: peak memory above the start, milliseconds an update, and both against the first arm."""
    seconds, markers = harness.run_rounds({name: (ours, (work, overrides)) for name, overrides in arms.items()}, rounds, warmup=2)
    grown = {name: markers[name]["loss_last"] - markers[name]["loss_first"] for name in arms}
    base = next(iter(arms))
    return {
        name: {
            "overrides": list(arms[name]),
            "peak_bytes": grown[name],
            "memory_ratio": grown[name] / grown[base],
            "ms": harness.spread([1e3 * wall / work.steps for wall, _ in seconds[name]]),
            "time_ratio": harness.against([s[0] for s in seconds[name]], [s[0] for s in seconds[base]])["ratio"],
        }
        for name in arms
    }


def main() -> None:
    """Measure, show, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a small network, two rounds, nothing compiled: whether it works")
    parser.add_argument("--rows", help="networks, such as vit,resnet")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    found = {}
    for name, work in rows(device, given.quick).items():
        if given.rows and name not in given.rows.split(","):
            continue
        arms = {arm: overrides for arm, overrides in ARMS.items() if not given.quick or not arm.startswith("compiled")}
        if not name.startswith("vit"):
            del arms["selective, attention"]
        found[name] = {"work": asdict(work), "arms": measure(work, arms, given.rounds or (2 if given.quick else 8))}
        show(f"{name}, {work.batch} samples", found[name]["arms"])
    out = given.out or harness.RESULTS / f"memory-{device}.json"
    harness.write(out, {"machine": harness.machine(), "device": device, "rows": found})


def show(title: str, arms: dict[str, Any]) -> None:
    """One network's table."""
    header = ["checkpointing", "peak MiB", "of none's", "ms", "time against none"]
    harness.table(title, header, [
        [name, f"{a['peak_bytes'] / 2**20:,.0f}", f"{a['memory_ratio']:.2f}", f"{a['ms']['median']:.0f}",
         f"{a['time_ratio']['median']:.2f} ({a['time_ratio']['low']:.2f} … {a['time_ratio']['high']:.2f})"]
        for name, a in arms.items()
    ])  # fmt: skip


if __name__ == "__main__":
    main()
