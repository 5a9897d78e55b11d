"""A training state by the names of its weights, and checkpoints of which every rank writes its part."""

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
Room = Callable[[str, tuple[int, ...], Any], Any]  # (weight's name, shape, dtype) → the tensor to read into
# What torch.distributed.checkpoint's .metadata is made of, and nothing else: it is a pickle.
_METADATA = {
    "pathlib": {"Path", "PosixPath", "PurePosixPath"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.metadata": {
        "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties", "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.serialization": {"_get_layout"},
}  # fmt: skip


def names_of(optimizer: State) -> dict[int, str]:
    """An optimizer state's numbers of weights → their names."""
    return {i: n for g in optimizer["param_groups"] for i, n in zip(g["params"], g["param_names"], strict=True)}


def apart(weights: State, state: State, as_piece: Callable[[str, Any], Any]) -> tuple[State, State]:
    """All tensors of a weight's size under one name each ("optimizer/<weight>/<what>"), and the state without them.

    What an optimizer keeps beside torch's own "state" stays with the rest.
    """
    pieces = {f"model/{name}": t for name, t in weights.items()}
    optimizer, ema = state["optimizer"], state["ema"]
    names = names_of(optimizer) if "state" in optimizer else {}
    left: dict[int, State] = {}
    for i, of_weight in optimizer.get("state", {}).items():
        large = {k for k, v in of_weight.items() if isinstance(v, torch.Tensor) and v.ndim}
        pieces |= {f"optimizer/{names[i]}/{k}": as_piece(names[i], of_weight[k]) for k in large}
        left[i] = {k: v for k, v in of_weight.items() if k not in large}
    rest = {**state, "optimizer": {**optimizer, "state": left} if names else optimizer}
    if ema:
        pieces |= {f"ema/{name}": as_piece(name, t) for name, t in ema["tensors"].items()}
        rest["ema"] = {**ema, "tensors": {}}
    return pieces, rest


def together(pieces: State, state: State) -> tuple[State, State]:
    """What `apart` took apart: weights and state."""
    numbers = {name: i for i, name in names_of(state["optimizer"]).items()} if "state" in state["optimizer"] else {}
    weights: State = {}
    for key, tensor in pieces.items():
        kind, name, *what = key.split("/")
        if kind == "model":
            weights[name] = tensor
        elif kind == "ema":
            state["ema"]["tensors"][name] = tensor
        else:
            state["optimizer"]["state"].setdefault(numbers[name], {})[what[0]] = tensor
    return weights, state


def merged(states: Sequence[State]) -> State:
    """The optimizer states of parts of a model as the one of an optimizer over all its weights."""
    groups: list[State] = []
    state: dict[int, Any] = {}
    numbers: dict[str, int] = {}
    for part in states:
        for group in part["param_groups"]:
            about = {k: v for k, v in group.items() if k not in ("params", "param_names")}
            whole = next((g for g in groups if {k: g[k] for k in about} == about), None)
            if whole is None:
                whole = {**about, "params": [], "param_names": []}
                groups.append(whole)
            for i, name in zip(group["params"], group["param_names"], strict=True):
                if name in numbers:
                    continue
                numbers[name] = len(numbers)
                whole["params"].append(numbers[name])
                whole["param_names"].append(name)
                if i in part["state"]:
                    state[numbers[name]] = part["state"][i]
    return {**states[0], "param_groups": groups, "state": state}


def write(folder: Path, pieces: State, ranks: Any) -> None:
    """Every rank its part, into one folder on a disk that all share; `ranks` is a process group, None of one process."""
    import torch.distributed.checkpoint as dcp

    dcp.save(pieces, checkpoint_id=str(folder), process_group=ranks, no_dist=ranks is None)


def read(folder: Path, about: dict[str, tuple[tuple[int, ...], Any]], room: Room, alone: bool = False) -> State:
    """The tensors that `about` gives shape and dtype of, into what `room` has for them. Raises UserError of a strange file.

    All ranks read, each its part, but where one reads `alone`.
    """
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp

    metadata = _metadata(folder / ".metadata")

    class Reader(dcp.FileSystemReader):
        """torch's, which would unpickle whatever the metadata names."""

        def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
            metadata.storage_meta.load_id = self.load_id
            return metadata

    pieces = {key: room(key.split("/")[1], *of_tensor) for key, of_tensor in about.items()}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # so it is meant, where one reads alone
        dcp.load(pieces, storage_reader=Reader(str(folder)), no_dist=alone or not dist.is_initialized())
    return pieces


def _member(kind: Any, name: str) -> Any:
    """What the first Pythons 3.11 pickle a member of an enumeration as: getattr, of which this is the harmless part."""
    if not (isinstance(kind, type) and issubclass(kind, Enum)):
        raise UserError(f"a checkpoint's metadata asks for {kind!r}.{name}, which is no part of a checkpoint")
    return kind[name]


def _metadata(file: Path) -> Any:
    class Plain(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            module = "pathlib" if module == "pathlib._local" else module  # as Python 3.13 has it
            if (module, name) == ("builtins", "getattr"):
                return _member
            found = super().find_class(module, name) if name in _METADATA.get(module, ()) else getattr(torch, name, None)
            if name in _METADATA.get(module, ()) or (module == "torch" and (found is torch.Size or type(found) is torch.dtype)):
                return found
            raise UserError(f"{file} names {module}.{name}, which is no part of a checkpoint")

    with file.open("rb") as stream:
        metadata = Plain(stream).load()
    for stored in metadata.storage_data.values():
        if Path(stored.relative_path).name != str(stored.relative_path):
            raise UserError(f"{file} names a file outside of its checkpoint: {stored.relative_path}")
    return metadata
