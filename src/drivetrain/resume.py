"""Save and restore everything that has state. A save is whole or not there; a load verifies every byte."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from drivetrain.manifest import FORMAT, checkpoints, sha256


def save(run_dir: Path, update: int, weights: dict[str, torch.Tensor], state: dict[str, Any]) -> Path:
    """Write checkpoints/<update>/ atomically: weights under plain names, training state, manifest of SHA-256 sums."""
    root = run_dir / "checkpoints"
    target, temporary = root / str(update), root / f".writing-{update}"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    safetensors.torch.save_file(_contiguous(weights), temporary / "model.safetensors")
    torch.save(state, temporary / "state.pt")
    hashes = {f.name: sha256(f) for f in sorted(temporary.iterdir())}
    (temporary / "manifest.json").write_text(json.dumps({"format": FORMAT, "update": update, "sha256": hashes}, indent=2))
    for file in temporary.iterdir():
        _fsync(file)
    _fsync(temporary)
    replaced = root / f".replaced-{update}"
    if target.exists():
        target.rename(replaced)
    temporary.rename(target)
    _fsync(root)
    shutil.rmtree(replaced, ignore_errors=True)
    return target


def load(checkpoint: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Weights and state of a verified checkpoint; the state as plain tensors and containers, never a pickled object."""
    weights = safetensors.torch.load_file(checkpoint / "model.safetensors")
    return weights, torch.load(checkpoint / "state.pt", map_location="cpu", weights_only=True)


def prune(run_dir: Path, keep: int, best: int | None) -> None:
    """Remove all but the newest `keep` checkpoints and the best one."""
    for old in sorted(checkpoints(run_dir), key=lambda p: int(p.name))[:-keep]:
        if old.name != str(best):
            shutil.rmtree(old)


def load_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Take the optimizer's state back; its settings stay those of the config, which a resumed run may have changed."""
    settings = [{k: v for k, v in group.items() if k in optimizer.defaults} for group in optimizer.param_groups]
    optimizer.load_state_dict(state)
    for group, own in zip(optimizer.param_groups, settings, strict=True):
        group.update(own)


def random_state() -> dict[str, torch.Tensor]:
    """This process's random streams (the model's: the data has none)."""
    state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def restore_random_state(states: list[dict[str, torch.Tensor]], rank: int = 0) -> None:
    """Take this rank's `random_state()` back; a rank that was not there when they were saved keeps its own."""
    if rank >= len(states):
        return
    state = states[rank]
    torch.set_rng_state(state["cpu"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def _contiguous(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """safetensors keeps neither strides nor shared storage: tied weights are written once for each name."""
    return {name: t.detach().to("cpu", copy=True).contiguous() for name, t in weights.items()}


def _fsync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
