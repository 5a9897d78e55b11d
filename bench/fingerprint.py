"""Hashes of the weights trained from fixed seeds: equal before and after a change that should change no result.

    python -m bench.fingerprint --out before.json          # on the code before
    python -m bench.fingerprint --against before.json      # on the code after: exit code 1 where a hash differs

The hashes depend on the processor and on torch, so they are compared on one machine and are no constants of a test.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path

from drivetrain.run import environment

SMALL = ["updates=12", "log_every=5", "saving=last", "epochs=3", "data.validation=null"]  # on all training samples
TEXT = ["recipe=stdlib_gpt", "data.max_files=40", "model.depth=2", "model.width=64", "data.test_samples=50"]
CONFIGURATIONS: dict[str, list[str]] = {
    "default": [],
    "bf16": ["precision=bf16", "model=resnet9", "surgery=[channels_last]"],
    "amp": ["precision=amp"],
    "accumulation": ["batch=accumulate", "batch.STEPS=4", "clip=norm"],
    "ddp": ["parallel=ddp", "parallel.nproc=2", "model=resnet9", "surgery=[sync_bn]"],
    "fsdp": ["parallel=fsdp", "parallel.nproc=2", "optimizer=adamw", "clip=norm"],
    "pipeline": [
        "parallel=pipeline",
        "parallel.nproc=2",
        "batch=accumulate",
        "batch.STEPS=4",
        "model=gpt",
        "data=stdlib",
        "loss=next_token",
        "model.width=32",
        "data.max_files=30",
        "data.test_samples=40",
        "batch.global_batch=16",
    ],
    "ema": ["ema=ema", "optimizer=lamb"],
    "whole_step": ["compile=step"],
    "recompute": ["checkpointing=blocks", "model=resnet9", "optimizer=sgd", "optimizer.lr=0.05"],
    "augment": ["augment=[flip_crop,cutmix]", "model=resnet9", "loader=threads"],
    "bucketed_text": TEXT,
}


def main() -> int:
    """Hash every configuration; write or compare the hashes; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--against", type=Path)
    parser.add_argument("--steps-key", default="accumulation_steps", help="name of the key of batch=accumulate")
    given = parser.parse_args()
    found = {}
    for name, overrides in CONFIGURATIONS.items():
        found[name] = hash_of(name, [override.replace("STEPS", given.steps_key) for override in overrides])
    if given.out:
        about = {"machine": environment.processor(), "python": platform.python_version()}
        given.out.write_text(json.dumps({"environment": about, "hashes": found}, indent=1) + "\n")
    if given.against is None:
        return 0
    before = json.loads(given.against.read_text())["hashes"]
    different = [name for name in CONFIGURATIONS if found[name] != before.get(name)]
    print(f"{len(found) - len(different)} of {len(found)} hashes agree", *(f"differs: {name}" for name in different), sep="\n")
    return 1 if different else 0


def hash_of(name: str, overrides: list[str]) -> str:
    """Train one configuration in a process of its own; return the hash of its weights. Raises RuntimeError if it fails."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "drivetrain", "train", *SMALL, *overrides, f"output_dir={folder}", "runtime.threads=1"]
        done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"})
        weights = sorted(Path(folder).rglob("model.safetensors"))
        if done.returncode or not weights:
            raise RuntimeError(f"{name}: {done.stdout[-2000:]}{done.stderr[-2000:]}")
        found = _hash(weights[-1])
    print(f"{name:<14} {found}", flush=True)
    return found


def _hash(file: Path) -> str:
    import torch
    from safetensors.torch import load_file

    digest = hashlib.sha256()
    for name, tensor in sorted(load_file(file).items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.contiguous().flatten().view(dtype=torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


if __name__ == "__main__":
    sys.exit(main())
