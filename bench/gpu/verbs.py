"""compare, doctor and tune on the device, and what they say."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.gpu import campaign
from bench.gpu.campaign import Row

RESNET = (
    "data=synthetic", "data.shape=[3,64,64]", "data.samples=4096", "model=resnet9", "model.width=64", "batch.global_batch=256",
)  # fmt: skip
DIGITS = ("data=digits", "model=resnet9")
SHORT = ("rounds=3", "block_s=0.3")
RUNS: dict[str, tuple[str, ...]] = {
    "compare": ("compare", *RESNET, *SHORT, "precision=fp32,tf32,bf16,amp", "surgery=[],[channels_last]"),
    "compare compilers": ("compare", *RESNET, *SHORT, "precision=bf16", "compile=none,inductor,step,cudagraph"),
    "compare loaders": ("compare", *DIGITS, *SHORT, "loader=sync,threads,device,resident"),
    "compare quality": ("compare", *DIGITS, *SHORT, "precision=fp32,bf16", "quality=true", "seeds=5", "epochs=5"),
    "doctor": ("doctor", *DIGITS, "profile_s=1", "rounds=4", "block_s=0.2"),
    "doctor on synthetic data": ("doctor", *RESNET, "prove=false", "profile_s=1"),
    "tune": ("tune", *DIGITS, "budget_s=150", "rounds=4", "block_s=0.2", "quality=false", "lr_updates=60"),
}
TINY = ("data=digits", "model=mlp", "model.hidden=[16]", "optimizer=sgd", "batch.global_batch=64", "runtime.threads=1")
SMALL: dict[str, tuple[str, ...]] = {
    "compare": ("compare", *TINY, "precision=fp32,bf16", "rounds=1", "block_s=0.02"),
    "doctor": ("doctor", *TINY, "prove=false", "profile_s=0.1"),
    "tune": ("tune", *TINY, "what=batch", "rounds=1", "block_s=0.02", "quality=false", "budget_s=20"),
}
CPU_ROWS = tuple(SMALL)
KEPT = ("compare.json", "tune.json")


def rows(device: str, folder: Path) -> list[Row]:
    """Each verb, its output kept."""
    runs = RUNS if device == "cuda" else SMALL
    return [
        Row(
            name,
            verb,
            ((*words, f"runtime.device={device}"), folder / name.replace(" ", "_")),
            280.0,
            keep_output=True,
            alone=True,
        )
        for name, words in runs.items()
    ]


def verb(words: Sequence[str], folder: Path) -> dict[str, Any]:
    """Run a verb as the command line does; what it wrote as JSON."""
    from drivetrain.cli.main import main

    folder.mkdir()
    os.environ["DRIVETRAIN_TRACEBACK"] = "1"
    code = main([*words, f"output_dir={folder}"])
    written = {file.name: json.loads(file.read_text()) for file in sorted(folder.rglob("*.json")) if file.name in KEPT}
    campaign.report({"command": f"drivetrain {' '.join(words)}", "written": written})  # of a failed comparison too
    if code:
        raise campaign.RunFailed(f"drivetrain {' '.join(words)} ended with code {code}")
    return {}


def summary(rows: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The verbs, and how each ended."""
    return {name: row["status"] for name, row in rows.items()}
