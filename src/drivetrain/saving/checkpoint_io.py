"""Saves and restores everything that has state. Saves are atomic; loads verify every byte."""

from __future__ import annotations

import logging
import math
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import safetensors.torch
import torch

from drivetrain.core.errors import CannotSave, UserError
from drivetrain.core.machine import files
from drivetrain.core.typed import JsonMapping, JsonObject, StateDict
from drivetrain.saving import manifest, sharded_checkpoint, space
from drivetrain.saving.content import Divided, Malformed, Shards, Undivided
from drivetrain.saving.manifest import checkpoints

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

logger = logging.getLogger(__name__)


def save(
    run_dir: Path, update: int, weights: dict[str, torch.Tensor], state: StateDict, about: JsonMapping | None = None
) -> Path:
    """Write checkpoints/<update>/ atomically: weights under plain names, training state, and a manifest of SHA-256 sums.

    `about` describes the weights for use without the run. It is in the manifest and in the weights' file.
    Raises CannotSave if the disk refuses; then nothing half-written is left.
    """
    needed = space.size_of(weights, state)
    with space.writing(run_dir, update, _temporary(run_dir, update), needed):
        temporary = _begin(run_dir, update)
        space.check(run_dir, update, needed)
        with files.mode_of_umask(temporary / "model.safetensors") as file:
            safetensors.torch.save_file(_contiguous(weights), file, manifest.as_metadata(about or {}))
        torch.save(state, temporary / "state.pt")
        return _finish(run_dir, update, about)


def save_sharded(
    run_dir: Path,
    update: int,
    tensors: dict[str, Divided],
    rest: JsonObject,
    group: ProcessGroup | None,
    about: JsonMapping | None = None,
) -> None:
    """Write a checkpoint; every rank writes its parts of `tensors`. Called on all ranks.

    `rest` is the state without these tensors; `group` is a gloo process group, None for a single process.
    Raises CannotSave on all ranks if the disk refuses one of them.
    """
    import torch.distributed as dist

    is_first = group is None or dist.get_rank(group) == 0
    folder, needed = _temporary(run_dir, update), _size_on_all_ranks(tensors, group) + space.size_of(rest)

    def begin() -> None:
        _begin(run_dir, update)
        space.check(run_dir, update, needed)

    def finish() -> None:
        torch.save({**rest, "pieces": shapes}, folder / "state.pt")
        _finish(run_dir, update, about)

    with space.writing(run_dir, update, folder if is_first else None, needed):
        _first_and_then_all(begin if is_first else None, group)
        shapes = sharded_checkpoint.write(folder, tensors, group)
        _first_and_then_all(finish if is_first else None, group)


def _size_on_all_ranks(tensors: dict[str, Divided], group: ProcessGroup | None) -> int:
    """Return the bytes of the whole tensors behind the ranks' parts."""
    sizes = {name: math.prod(t.shape) * t.parts[0].tensor.element_size() for name, t in tensors.items()}
    if group is not None:
        import torch.distributed as dist

        ranks: list[dict[str, int]] = [{}] * dist.get_world_size(group)
        dist.all_gather_object(ranks, sizes, group=group)
        sizes = {name: size for rank in ranks for name, size in rank.items()}
    return sum(sizes.values())


def _first_and_then_all(work: Callable[[], None] | None, group: ProcessGroup | None) -> None:
    """Let the first rank work while the others wait. Raise its error on all ranks, otherwise they would wait for ever."""
    error: Exception | None = None
    try:
        if work is not None:
            work()
    except Exception as raised:
        if group is None:
            raise
        error = raised
    if group is None:
        return
    import torch.distributed as dist

    told = [None if error is None else str(error)]
    dist.broadcast_object_list(told, dist.get_global_rank(group, 0), group)
    if error is not None:
        raise error
    if told[0] is not None:
        raise CannotSave(told[0])


def _temporary(run_dir: Path, update: int) -> Path:
    return run_dir / "checkpoints" / f".writing-{update}"


def _begin(run_dir: Path, update: int) -> Path:
    temporary = _temporary(run_dir, update)
    if temporary.parent.is_symlink():
        raise CannotSave(f"{temporary.parent} is a link: a run's checkpoints are written into its own directory")
    files.remove(temporary)
    temporary.mkdir(parents=True)
    return temporary


def _finish(run_dir: Path, update: int, about: Mapping[str, object] | None) -> Path:
    """Write the manifest and rename the temporary folder: only then it is a checkpoint."""
    root = run_dir / "checkpoints"
    target, temporary = root / str(update), _temporary(run_dir, update)
    manifest.write(temporary, update, about or {})
    for file in temporary.iterdir():
        _fsync(file)
    _fsync(temporary)
    replaced = root / f".replaced-{update}"
    if target.exists() or target.is_symlink():
        files.remove(replaced)
        target.rename(replaced)
    temporary.rename(target)
    _fsync(root)
    files.remove(replaced)
    return target


def load(checkpoint: Path, shards: Shards | None = None) -> tuple[dict[str, torch.Tensor], JsonObject]:
    """Load weights and state of a verified checkpoint. The state holds plain tensors and containers, never a pickled object.

    Every rank reads its `shards` of a sharded checkpoint, and maps the tensors of the state that it uses, which keeps the file
    open. Without `shards` a single process reads everything. Raises Malformed if torch or safetensors refuses to read.
    """
    weights: dict[str, torch.Tensor] | None = None
    try:
        state = torch.load(checkpoint / "state.pt", map_location="cpu", weights_only=True, mmap=shards is not None)
        if (checkpoint / "model.safetensors").exists():
            weights = safetensors.torch.load_file(checkpoint / "model.safetensors")
    except Exception as error:  # damaged bytes may raise anything in a reader
        why = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise Malformed(f"{checkpoint} cannot be read: {why}") from error
    if weights is None:
        shapes = state.pop("pieces")
        tensors = sharded_checkpoint.read(checkpoint, shapes, shards or Undivided(), alone=shards is None)
        weights, state = sharded_checkpoint.unflatten_state(tensors, state)
    return weights, state


def prune(run_dir: Path, chosen: Callable[[list[int]], list[int]]) -> None:
    """Remove all checkpoints except the newest, to resume from, and the ones `chosen` from all updates, the oldest first."""
    saved = updates(run_dir)
    for update in {*saved[:-1]}.difference(chosen(saved)):
        try:
            shutil.rmtree(run_dir / "checkpoints" / str(update))
        except OSError as error:
            logger.warning("checkpoint %d of %s is no longer needed, but cannot be removed (%s)", update, run_dir, error.strerror)


def remove_unfinished(run_dir: Path) -> None:
    """Remove the rest of a killed process's last save. Called by the process with the run's lock, before it saves."""
    manifest.recover(run_dir)
    root = run_dir / "checkpoints"
    if root.is_symlink():  # the first save refuses it
        return
    for left in [*root.glob(".writing-*"), *root.glob(".replaced-*")]:
        files.remove(left)


def updates(run_dir: Path) -> list[int]:
    """Return the updates of a run's checkpoints, the oldest first."""
    return sorted(int(p.name) for p in checkpoints(run_dir))


def read_weights(path: Path) -> dict[str, torch.Tensor]:
    """Read a safetensors file of a run. Raises OSError unless it is an ordinary file, SafetensorError for a damaged one."""
    with files.opened(path, "rb"):
        pass
    return safetensors.torch.load_file(path)


def write_weights(weights: dict[str, torch.Tensor], path: Path) -> None:
    """Write weights as one safetensors file, atomically."""
    temporary = path.with_name(f".writing-{path.name}")
    temporary.unlink(missing_ok=True)  # it may be a link
    try:
        with files.mode_of_umask(temporary):
            safetensors.torch.save_file(_contiguous(weights), temporary)
        temporary.replace(path)
    except Exception as error:
        temporary.unlink(missing_ok=True)
        if (reason := space.reason_of(error)) is None:
            raise
        raise space.cannot_write(path.name, path.parent, reason, space.size_of(weights)) from error


def load_optimizer(optimizer: torch.optim.Optimizer, state: StateDict) -> None:
    """Load the state of this optimizer's parameters, matched by name.

    Settings come from the config, because a resumed run may have changed them. They are part of the loaded state, because
    `fused` decides whether torch puts the step counters on the device or on the CPU.
    """
    optimizer.load_state_dict(_state_for(optimizer, state))


def with_new_parameters(optimizer: torch.optim.Optimizer, state: StateDict) -> JsonObject:
    """Return a saved state that also names this optimizer's untrained parameters, which have no state yet."""
    known = {name: group for group in state["param_groups"] for name in group["params"]}
    groups = list(state["param_groups"])
    for group in optimizer.param_groups:
        if new := [name for name in group["param_names"] if name not in known]:
            beside = next((known[name] for name in group["param_names"] if name in known), group)  # the setting may count updates
            groups.append({**beside, "param_names": new, "params": new})
    return {**state, "param_groups": groups}


def _state_for(optimizer: torch.optim.Optimizer, state: StateDict) -> StateDict:
    """Return the saved state rearranged into this optimizer's groups. It may hold other parameters, in another order."""
    settings = {name: group for group in state["param_groups"] for name in group["params"]}
    if new := [name for group in optimizer.param_groups for name in group["param_names"] if name not in settings]:
        raise UserError(
            f"the checkpoint has no optimizer state of {', '.join(new[:10])}: the run did not train these parameters "
            "(model.freeze). To train them from its weights, start a new run by model.weights=<run's directory>"
        )
    groups: list[StateDict] = []
    for group in optimizer.param_groups:
        names, own = group["param_names"], {k: v for k, v in group.items() if k in optimizer.defaults}
        groups.append({**settings[names[0]], **own, "params": names, "param_names": names})
    states = {name: state["state"][name] for group in groups for name in group["params"] if name in state["state"]}
    return {**state, "state": states, "param_groups": groups}


def _contiguous(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copy the weights to the CPU as contiguous tensors: safetensors keeps neither strides nor shared storage.

    Tied weights are written once for each name.
    """
    return {name: t.detach().to("cpu", copy=True).contiguous() for name, t in weights.items()}


def _fsync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
