"""Save and restore everything that has state. A save is whole or not there; a load verifies every byte."""

from __future__ import annotations

import itertools
import json
import os
import shutil
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from drivetrain.saving import sharded_checkpoint as parts
from drivetrain.saving.manifest import FORMAT, checkpoints, sha256


def save(run_dir: Path, update: int, weights: dict[str, torch.Tensor], state: dict[str, Any]) -> Path:
    """Write checkpoints/<update>/ atomically: weights under plain names, training state, manifest of SHA-256 sums."""
    temporary = _begin(run_dir, update)
    safetensors.torch.save_file(_contiguous(weights), temporary / "model.safetensors")
    torch.save(state, temporary / "state.pt")
    return _finish(run_dir, update)


def save_sharded(run_dir: Path, update: int, pieces: dict[str, torch.Tensor], rest: dict[str, Any], ranks: Any) -> None:
    """The same in files of every rank, called on all of them: `pieces` are tensors or this rank's parts of DTensors.

    `ranks` is a process group of gloo's; None where there is one process.
    """
    import torch.distributed as dist

    first = ranks is None or dist.get_rank(ranks) == 0
    folder = _begin(run_dir, update) if first else run_dir / "checkpoints" / f".writing-{update}"
    if ranks is not None:
        dist.barrier(ranks)
    parts.write(folder, pieces, ranks)
    if first:
        torch.save({**rest, "pieces": {name: (tuple(t.shape), t.dtype) for name, t in pieces.items()}}, folder / "state.pt")
        _finish(run_dir, update)
    if ranks is not None:
        dist.barrier(ranks)


def _begin(run_dir: Path, update: int) -> Path:
    temporary = run_dir / "checkpoints" / f".writing-{update}"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    return temporary


def _finish(run_dir: Path, update: int) -> Path:
    """From here on it is a checkpoint."""
    root = run_dir / "checkpoints"
    target, temporary = root / str(update), root / f".writing-{update}"
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


def load(checkpoint: Path, room: parts.Room | None = None) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Weights and state of a verified checkpoint; the state as plain tensors and containers, never a pickled object.

    Of a sharded one all ranks read, each what `room(name of the weight, shape, dtype)` has a place for. Without that it is
    one process that reads all of it.
    """
    state = torch.load(checkpoint / "state.pt", map_location="cpu", weights_only=True)
    if (checkpoint / "model.safetensors").exists():
        return safetensors.torch.load_file(checkpoint / "model.safetensors"), state
    about = state.pop("pieces")
    if room is None:
        return parts.together(parts.read(checkpoint, about, lambda _, *of: torch.empty(of[0], dtype=of[1]), alone=True), state)
    return parts.together(parts.read(checkpoint, about, room), state)


def prune(run_dir: Path, keep: int, best: int | None) -> None:
    """Remove all but the newest `keep` checkpoints and the best one."""
    for old in sorted(checkpoints(run_dir), key=lambda p: int(p.name))[:-keep]:
        if old.name != str(best):
            shutil.rmtree(old)


def load_optimizer(optimizer: Any, state: dict[str, Any]) -> None:
    """Take back what the state holds of this optimizer's weights, told by their names.

    Its settings stay those of the config, which a resumed run may have changed.
    """
    settings = [{k: v for k, v in group.items() if k in optimizer.defaults} for group in optimizer.param_groups]
    optimizer.load_state_dict(_of_its_weights(optimizer, state))
    for group, own in zip(optimizer.param_groups, settings, strict=True):
        group.update(own)


def _of_its_weights(optimizer: Any, state: dict[str, Any]) -> dict[str, Any]:
    """A state whose groups are this optimizer's: that may be of other weights, in another order."""
    if "members" in state:
        pairs = zip(optimizer.members, state["members"], strict=True)
        return {"members": [_of_its_weights(member, of_member) for member, of_member in pairs]}
    number = {name: i for i, name in parts.names_of(state).items()}
    settings = {name: group for group in state["param_groups"] for name in group["param_names"]}
    groups: list[dict[str, Any]] = []
    held: dict[int, Any] = {}
    for group, numbers in zip(optimizer.param_groups, _numbered(optimizer), strict=True):
        names = group["param_names"]
        groups.append({**settings[names[0]], "params": numbers, "param_names": names})
        mine = {i: number[name] for i, name in zip(numbers, names, strict=True)}
        held |= {i: state["state"][before] for i, before in mine.items() if before in state["state"]}
    return {**state, "state": held, "param_groups": groups}


def _numbered(optimizer: torch.optim.Optimizer) -> list[list[int]]:
    """The numbers of each group's weights, as in a state_dict."""
    numbers = itertools.count()
    return [[next(numbers) for _ in group["params"]] for group in optimizer.param_groups]


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
