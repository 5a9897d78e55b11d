"""Is it fast? Our loop beside a hand-written one and timm's, on the same network and data, and technique by technique.

All arms of a row run short blocks in turn. Each rate stands beside the model's own operations a second (MFU) and beside
what this device was measured to do.
"""

from __future__ import annotations

import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench import harness
from bench.gpu import children, interleave, loops, peaks
from bench.gpu.campaign import Row
from bench.gpu.interleave import Interleaved, Loop
from bench.gpu.loops import Work

ROUNDS = 8
LIMIT_S = 500.0


def image_network(name: str, batch: int, steps: int, conv: bool) -> Work:
    """A network of timm's at 224 × 224."""
    return Work(("model=timm", f"model.name={name}"), (3, 224, 224), 1000, batch, steps, conv=conv)


GPT = ("model=gpt", "model.width=768", "model.depth=12", "model.heads=12")
WORKS = {
    "resnet50": image_network("resnet50", 256, 12, True),
    "mlp": Work(("model=mlp", f"model.hidden={[256] * 8}".replace(" ", "")), (3, 8, 8), 10, 64, 200, half=False),
    "vit_b": image_network("vit_base_patch16_224", 256, 8, False),
    "gpt": Work(GPT, (1024,), 256, 32, 8, tokens=True),
    "convnext_b": image_network("convnext_base", 256, 6, True),
    "vit_s": image_network("vit_small_patch16_224", 256, 12, False),
}
SMALL = {  # of the CPU's form
    "resnet50": Work(
        ("model=timm", "model.name=test_resnet"), (3, 32, 32), 10, 4, 2, "cpu", conv=True, compile=False, half=False
    ),
    "mlp": Work(("model=mlp", "model.hidden=[16]"), (3, 8, 8), 10, 8, 4, "cpu", compile=False),
    "gpt": Work(
        ("model=gpt", "model.width=16", "model.depth=1", "model.heads=2"), (16,), 32, 4, 2, "cpu", tokens=True, compile=False
    ),
}
LADDER = (  # each rung adds its overrides to those before it
    ("naive", ("recipe=naive",)),
    ("fused update", ("optimizer.fused=true", "runtime.zero_grad=none")),
    ("cudnn benchmark", ("runtime.cudnn_benchmark=true",)),
    ("tf32", ("precision=tf32",)),
    ("bf16", ("precision=bf16",)),
    ("channels last", ("surgery=[channels_last]",)),
    ("compiled", ("compile=inductor",)),
    ("whole step", ("compile=step",)),
)
# (row, our arms by their first letters, the other arm, the ratio of their samples a second that is asked for)
MARKS = (
    ("resnet50", "ours", "timm", 1.25),
    ("resnet50", "ours", "timm fast", 1.0),
    ("mlp", "ours", "ours eager", 4.0),
    ("ladder", "whole step", "naive", 5.4),
    ("fed", "packed", "synthetic", 0.97),
)
CPU_ROWS = ("ceilings", "adamw", "mlp", "resnet50", "gpt", "ladder", "fed")


def rows(device: str, folder: Path) -> list[Row]:
    """The device's ceilings, the networks, the ladder, and data from a disk."""
    works = WORKS if device == "cuda" else SMALL
    found = [Row("ceilings", peaks.ceilings, (device,))]
    found.append(Row("adamw", peaks.adamw_ms, (device, 8 if device == "cuda" else 1)))
    for name, work in works.items():
        found.append(Row(name, measure, (work, arms(work)), LIMIT_S, 60.0 if device == "cuda" else 5.0))
        if name == "resnet50":
            found.append(Row("ladder", measure, (work, ladder(work)), LIMIT_S, found[-1].least_s))
            found.append(Row("fed", fed, (work, folder / "packed"), LIMIT_S, found[-1].least_s))
    return found


def arms(work: Work) -> dict[str, Loop]:
    """The arms of a network, the hand-tuned loop as the base."""
    fast = loops.fast_overrides(work)
    found: dict[str, Loop] = {
        "hand": (loops.hand, (work,)),
        "naive": (loops.naive, (work,)),
        "timm": (loops.timm, (work, False)),
        "timm fast": (loops.timm, (work, True)),
        "ours eager": (loops.ours, (work, fast)),
    }
    if work.compile:
        for kind in ("inductor", "step"):
            found[f"ours {kind}"] = (loops.ours, (work, [*fast, f"compile={kind}"]))
    return found


def ladder(work: Work) -> dict[str, Loop]:
    """Our loop with one technique more on each rung."""
    found: dict[str, Loop] = {}
    overrides: list[str] = []
    for name, added in LADDER:
        overrides = [*overrides, *added]
        if work.device == "cuda" or not added[0].startswith(("compile=", "precision=")):
            found[name] = (loops.ours, (work, overrides))
    return found


def fed(work: Work, folder: Path) -> None:
    """Our fastest loop on images from a disk, against the same on data that is made on the device."""
    children.call(pack, work, folder, limit_s=240.0)
    fast = [*loops.fast_overrides(work), *(["compile=inductor"] if work.compile else [])]
    packed = [*fast, "data=packed", f"data.root={folder}"]
    measure(work, {
        "synthetic": (loops.ours, (work, fast)),
        "packed, device": (loops.ours, (work, [*packed, "loader=device"])),
        "packed, threads": (loops.ours, (work, [*packed, "loader=threads"])),
        "packed, resident": (loops.ours, (work, [*packed, "loader=resident"])),
    })  # fmt: skip


def pack(work: Work, folder: Path) -> None:
    """In a child: a block's images of noise, as `drivetrain pack` writes them."""
    import torch

    from drivetrain.data import Normalize, Splits, Tensors, packing

    folder.mkdir()
    x = torch.randint(256, (work.samples, *work.shape), dtype=torch.uint8)
    source = Tensors(x, torch.arange(work.samples) % work.classes)
    splits = Splits(source, Tensors(x[:8], source.y[:8]), work.shape, work.classes, Normalize([127.0] * 3, [70.0] * 3))
    packing.pack(splits, folder, packing.Raw(), work.shape, "", 8, lambda *_: None)


def measure(work: Work, arms: dict[str, Loop]) -> None:
    """In a child: report the row's figures after each group of arms. An arm that fails says why, and the others go on."""
    flops = children.call(loops.count_flops, work)["flops"]
    name = children.call(_device_name)["name"]
    peak = peaks.data_sheet_tflops(name)
    children.report({"work": asdict(work), "gflop_per_sample": flops / 1e9, "data_sheet_bf16_tflops": peak})

    def keep(found: Interleaved) -> None:
        arms = figures(found, work, flops, peak)
        children.report({"live_together": found.groups, "failed_arms": found.failed, "arms": arms})

    rounds, free = 2 if work.device == "cpu" else ROUNDS, interleave.free_memory(work.device)
    with tempfile.TemporaryDirectory() as folder:
        interleave.run(arms, rounds, 0.8 * children.left_s(), Path(folder), free, keep)


def figures(found: Interleaved, work: Work, flops: float, peak: float | None) -> dict[str, Any]:
    """Of each arm: samples a second, its step, MFU, memory, and its ratio to the base."""
    table = {}
    for name, blocks in found.blocks.items():
        rate = work.samples / harness.spread(blocks)["median"]
        ratios = harness.against(found.base[name], blocks[-len(found.base[name]) :])["ratio"]
        table[name] = {
            "samples_per_s": rate,
            "step_ms": {key: 1e3 * value / work.steps for key, value in harness.spread(blocks).items()},
            "over_base": ratios,
            "model_tflops": rate * flops / 1e12,
            "mfu": None if peak is None else rate * flops / 1e12 / peak,
            "peak_memory_bytes": found.peak_bytes[name],
        }
    return table


def summary(rows: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Shares of the measured ceiling, and the marks: the ratio that was asked for, and the one that was reached."""
    ceiling = rows.get("ceilings", {}).get("bf16_matmul_tflops")
    measured = {name: row["arms"] for name, row in rows.items() if "arms" in row}
    shares = {
        row: {arm: round(f["model_tflops"] / ceiling, 4) for arm, f in of.items()} for row, of in measured.items() if ceiling
    }
    marks = []
    for row, our, other, asked in MARKS:
        rates = {name: f["samples_per_s"] for name, f in measured.get(row, {}).items()}
        ours = {name: rate for name, rate in rates.items() if name.startswith(our) and name != other}
        if ours and other in rates:
            best = max(ours, key=ours.__getitem__)
            marks.append({"row": row, "arm": best, "against": other, "asked": asked, "reached": ours[best] / rates[other]})
    failed = {f"{name}: {arm}": why for name, row in rows.items() for arm, why in row.get("failed_arms", {}).items()}
    return {"of_measured_bf16_matmul": shares, "marks": marks, "failed_arms": sorted(failed)}


def _device_name() -> dict[str, Any]:
    import torch

    return {"name": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"}
