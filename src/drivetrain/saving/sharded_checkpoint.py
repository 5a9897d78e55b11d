"""Flattens a training state into named tensors, and reads and writes checkpoints of which every rank holds its shards."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable, Sequence
from enum import Enum
from pathlib import Path
from typing import Any

from drivetrain.core.errors import UserError
from drivetrain.core.lazy import torch

State = dict[str, Any]
Allocate = Callable[[str, tuple[int, ...], Any], Any]  # (weight's name, shape, dtype) → the tensor to read into
# The classes that torch.distributed.checkpoint's .metadata may contain: it is a pickle, so no others are loaded.
_METADATA = {
    "pathlib": {"Path", "PosixPath", "PurePosixPath"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.metadata": {
        "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties", "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.serialization": {"_get_layout"},
}  # fmt: skip


def parameter_names(optimizer: State) -> dict[int, str]:
    """Return an optimizer state's parameter names by parameter index."""
    return {i: n for g in optimizer["param_groups"] for i, n in zip(g["params"], g["param_names"], strict=True)}


def flatten_state(weights: State, state: State, as_distributed: Callable[[str, Any], Any]) -> tuple[State, State]:
    """Return all tensors of a weight's size by name ("optimizer/<weight>/<key>"), and the state without them.

    What an optimizer keeps outside of torch's own "state" is not flattened.
    """
    tensors = {f"model/{name}": t for name, t in weights.items()}
    optimizer, ema = state["optimizer"], state["ema"]
    names = parameter_names(optimizer) if "state" in optimizer else {}
    small: dict[int, State] = {}
    for i, parameter_state in optimizer.get("state", {}).items():
        large = {k for k, v in parameter_state.items() if isinstance(v, torch.Tensor) and v.ndim}
        tensors |= {f"optimizer/{names[i]}/{k}": as_distributed(names[i], parameter_state[k]) for k in large}
        small[i] = {k: v for k, v in parameter_state.items() if k not in large}
    rest = {**state, "optimizer": {**optimizer, "state": small} if names else optimizer}
    if ema:
        tensors |= {f"ema/{name}": as_distributed(name, t) for name, t in ema["tensors"].items()}
        rest["ema"] = {**ema, "tensors": {}}
    return tensors, rest


def unflatten_state(tensors: State, state: State) -> tuple[State, State]:
    """Undo `flatten_state`: return weights and state."""
    indices = {name: i for i, name in parameter_names(state["optimizer"]).items()} if "state" in state["optimizer"] else {}
    weights: State = {}
    for key, tensor in tensors.items():
        kind, name, *state_key = key.split("/")
        if kind == "model":
            weights[name] = tensor
        elif kind == "ema":
            state["ema"]["tensors"][name] = tensor
        else:
            state["optimizer"]["state"].setdefault(indices[name], {})[state_key[0]] = tensor
    return weights, state


def merge_optimizer_states(states: Sequence[State]) -> State:
    """Merge the optimizer states of parts of a model into that of one optimizer over all its parameters."""
    groups: list[State] = []
    state: dict[int, Any] = {}
    indices: dict[str, int] = {}
    for part in states:
        for group in part["param_groups"]:
            settings = {k: v for k, v in group.items() if k not in ("params", "param_names")}
            merged = next((g for g in groups if {k: g[k] for k in settings} == settings), None)
            if merged is None:
                merged = {**settings, "params": [], "param_names": []}
                groups.append(merged)
            for i, name in zip(group["params"], group["param_names"], strict=True):
                if name in indices:
                    continue
                indices[name] = len(indices)
                merged["params"].append(indices[name])
                merged["param_names"].append(name)
                if i in part["state"]:
                    state[indices[name]] = part["state"][i]
    return {**states[0], "param_groups": groups, "state": state}


def write(folder: Path, tensors: State, group: Any) -> None:
    """Write every rank's shards into one folder on a shared disk. `group` is a process group, None for a single process."""
    import torch.distributed.checkpoint as dcp

    dcp.save(tensors, checkpoint_id=str(folder), process_group=group, no_dist=group is None)


def read(folder: Path, shapes: dict[str, tuple[tuple[int, ...], Any]], allocate: Allocate, alone: bool = False) -> State:
    """Read tensors into those that `allocate` returns. `shapes` gives shape and dtype by name.

    All ranks read their shards, unless a single process reads `alone`. Raises UserError if a file is not a checkpoint's.
    """
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp

    metadata = _metadata(folder / ".metadata")

    class Reader(dcp.FileSystemReader):
        """torch's reader with safely loaded metadata: torch's own would unpickle any class that the file names."""

        def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
            metadata.storage_meta.load_id = self.load_id
            return metadata

    tensors = {key: allocate(key.split("/")[1], shape, dtype) for key, (shape, dtype) in shapes.items()}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # intended where a single process reads
        dcp.load(tensors, storage_reader=Reader(str(folder)), no_dist=alone or not dist.is_initialized())
    return tensors


def _enum_member(kind: Any, name: str) -> Any:
    """Stand in for getattr, by which the first releases of Python 3.11 pickle enum members; allows enum members only."""
    if not (isinstance(kind, type) and issubclass(kind, Enum)):
        raise UserError(f"a checkpoint's metadata asks for {kind!r}.{name}, which is no part of a checkpoint")
    return kind[name]


def _metadata(file: Path) -> Any:
    class RestrictedUnpickler(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            module = "pathlib" if module == "pathlib._local" else module  # its name in Python 3.13
            if (module, name) == ("builtins", "getattr"):
                return _enum_member
            found = super().find_class(module, name) if name in _METADATA.get(module, ()) else getattr(torch, name, None)
            if name in _METADATA.get(module, ()) or (module == "torch" and (found is torch.Size or type(found) is torch.dtype)):
                return found
            raise UserError(f"{file} names {module}.{name}, which is no part of a checkpoint")

    with file.open("rb") as stream:
        metadata = RestrictedUnpickler(stream).load()
    for stored in metadata.storage_data.values():
        if Path(stored.relative_path).name != str(stored.relative_path):
            raise UserError(f"{file} names a file outside of its checkpoint: {stored.relative_path}")
    return metadata
