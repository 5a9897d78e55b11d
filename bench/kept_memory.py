"""What `runtime.keep_memory` gains on a CPU, and the memory it keeps: each model with and without, interleaved.

python -m bench.kept_memory
"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path

from bench.harness import RESULTS, machine, table, write
from drivetrain.measure.benchmark import arms, comparison
from drivetrain.measure.benchmark.row import Row

MODELS = {
    "resnet9, naive": ["recipe=naive", "data=digits", "model=resnet9"],
    "resnet9, fast": ["recipe=fast", "data=digits", "model=resnet9"],
    "mlp": ["data=digits", "model=mlp"],
    "vit_tiny, 64 pixels": [
        "data=synthetic", "data.shape=[3,64,64]", "model=timm", "model.name=vit_tiny_patch16_224", "model.kwargs.img_size=64",
        "batch.global_batch=32",
    ],
    "gpt": ["recipe=stdlib_gpt"],
}  # fmt: skip


def main() -> None:
    """Measure and write bench/results/kept_memory-cpu.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--block-s", type=float, default=0.5)
    parser.add_argument("--only", nargs="*", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--out", type=Path, default=RESULTS / "kept_memory-cpu.json")
    given = parser.parse_args()
    found, rows = {}, []
    for name in given.only:
        overrides = [*MODELS[name], "runtime.device=cpu"]
        specs = [arms.compose(kept, [*overrides, f"runtime.keep_memory={kept}"]) for kept in ("false", "true")]
        done = comparison.measure(specs, comparison.Settings(rounds=given.rounds, block_s=given.block_s), overrides)
        found[name] = {row.label: asdict(row) for row in done.rows}
        without, kept = done.rows
        rows.append((name, *_rates(without, kept), f"{_gib(without):.2f} → {_gib(kept):.2f}"))
        print(rows[-1], flush=True)
    write(given.out, {"machine": machine(), "rounds": given.rounds, "block_s": given.block_s, "models": found})
    table("runtime.keep_memory=false and true", ("model", "samples/s", "kept", "times as fast", "peak GiB"), rows)


def _rates(without: Row, kept: Row) -> tuple[str, str, str]:
    """Raises RuntimeError where an arm did not run."""
    if kept.ratio is None or without.samples_per_second is None or kept.samples_per_second is None:
        raise RuntimeError(without.error or kept.error)
    ratio = "{:.2f} ({:.2f} … {:.2f})".format(*kept.ratio)
    return f"{without.samples_per_second:,.0f}", f"{kept.samples_per_second:,.0f}", ratio


def _gib(row: Row) -> float:
    return (row.peak_memory_bytes or 0) / 2**30


if __name__ == "__main__":
    main()
