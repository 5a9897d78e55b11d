"""Runs' directories as a training leaves them, without training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

DATA = {"hash": "deadbeef0123", "of": "content", "samples": 1150}
VERSIONS = {"torch": "2.15.0", "timm": "1.0"}
RECIPE = "defaults:\n  - override /model: mlp\nruntime:\n  seed: {seed}\n"


def made_run(
    name: str,
    seed: int,
    accuracy: float = 0.9,
    reached: int | None = 40,
    config: str = "",
    environment: dict[str, Any] | None = None,
    **result: Any,
) -> Path:
    """A run that ended with this accuracy, and had 0.8 after `reached` updates, one a second."""
    folder = Path(name)
    folder.mkdir(parents=True)
    (folder / "recipe.yaml").write_text(RECIPE.format(seed=seed))
    (folder / "config.yaml").write_text(f"runtime:\n  seed: {seed}\nmodel:\n  hidden: [8]\n{config}")
    about = {"time": 1.7e9 + seed, "versions": VERSIONS, "drivetrain": "0.1.0", "python": "3.11"}
    (folder / "environment.json").write_text(json.dumps({**about, **(environment or {})}))
    figures = {"accuracy": accuracy, "loss": 1 - accuracy}
    content = {
        "status": "completed", "updates": 100, "device": "cpu", "device_name": "a chip, 2 threads", "data": DATA,
        "metrics": {"validation": {"final": figures}, "test": {"final": {"accuracy": accuracy - 0.1, "loss": 0.5}}},
        "selection": {"metric": "accuracy", "better": "max"}, "peak_memory_bytes": (400 + seed) * 2**20,
        "own_process": True,
    }  # fmt: skip
    (folder / "result.json").write_text(json.dumps({**content, **result}))
    lines = [
        {"event": "evaluate", "update": n, "epoch": 1, "set": "validation", "time": 1000.0 + n,
         "accuracy": 0.8 if reached is not None and n >= reached else 0.1, "loss": 0.5}
        for n in range(10, 101, 10)
    ]  # fmt: skip
    lines.insert(0, {"event": "train", "update": 0, "epoch": 0, "time": 1000.0, "samples": 0})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder
