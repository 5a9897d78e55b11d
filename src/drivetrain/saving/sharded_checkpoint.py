"""Flattens a training state into named tensors, and reads and writes checkpoints in shards, each rank its own."""

from __future__ import annotations

import contextlib
import io
import math
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from drivetrain.core.lazy import torch
from drivetrain.core.machine.files import opened, read_json, write_json
from drivetrain.core.typed import StateDict
from drivetrain.saving.content import Divided, Malformed, Shards, check_state
from drivetrain.saving.manifest import PIECES

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.checkpoint import metadata as of_torch
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.storage import WriteResult

State = StateDict
Shapes: TypeAlias = "dict[str, tuple[tuple[int, ...], torch.dtype]]"  # shape and dtype by name
MOST_PIECES = 2**30  # bytes of pieces.json


def by_name(optimizer: State) -> State:
    """Return an optimizer's state_dict with parameter names instead of numbers; torch loads both."""
    groups = optimizer["param_groups"]
    names = {i: name for group in groups for i, name in zip(group["params"], group["param_names"], strict=True)}
    states = {names.get(i, i): state for i, state in optimizer["state"].items()}  # some keep state without a parameter
    return {**optimizer, "state": states, "param_groups": [{**group, "params": group["param_names"]} for group in groups]}


def flatten_state(weights: State, state: State, shards: Shards) -> tuple[dict[str, Divided], State]:
    """Return this rank's tensors of a weight's size, by name, and the state without them.

    Names are "<kind>/<weight>", for an optimizer "optimizer/<weight>/<key>". Entries outside of torch's own "state" stay.
    """
    optimizer, ema, precision = state["optimizer"], state["ema"], state.get("precision", {})
    kinds = {"model": weights, "ema": ema.get("tensors", {}), "masters": precision.get("masters", {})}
    tensors = {f"{kind}/{name}": shards.divided(kind, name, t) for kind, of_kind in kinds.items() for name, t in of_kind.items()}
    small: dict[str, State] = {}
    for name, parameter_state in optimizer["state"].items():
        large = {k for k, v in parameter_state.items() if isinstance(v, torch.Tensor) and v.ndim}
        tensors |= {f"optimizer/{name}/{k}": shards.divided("optimizer", name, parameter_state[k]) for k in large}
        small[name] = {k: v for k, v in parameter_state.items() if k not in large}
    rest = {**state, "optimizer": {**optimizer, "state": small}}
    if kinds["ema"]:
        rest["ema"] = {**ema, "tensors": {}}
    if kinds["masters"]:
        rest["precision"] = {**precision, "masters": {}}
    return {key: divided for key, divided in tensors.items() if divided.parts}, rest


def unflatten_state(tensors: State, state: State) -> tuple[State, State]:
    """Undo `flatten_state`: return weights and state."""
    if "state" in state["optimizer"]:
        state["optimizer"] = by_name(state["optimizer"])
    weights: State = {}
    for key, tensor in tensors.items():
        kind, name, *state_key = key.split("/")
        if kind == "model":
            weights[name] = tensor
        elif kind == "ema":
            state["ema"]["tensors"][name] = tensor
        elif kind == "masters":
            state["precision"]["masters"][name] = tensor
        else:
            state["optimizer"]["state"].setdefault(name, {})[state_key[0]] = tensor
    return weights, state


def merge_optimizer_states(states: Sequence[State]) -> State:
    """Merge the ranks' optimizer states, each of some parameters, into the state of one optimizer over all of them."""
    groups: list[State] = []
    known: set[str] = set()
    for group in (group for part in states for group in part["param_groups"]):
        names = [name for name in group["params"] if name not in known]
        known.update(names)
        merged = next((g for g in groups if _settings(g) == _settings(group)), None)
        if merged is None:
            groups.append({**group, "params": names, "param_names": names})
        else:
            merged["params"] += names  # also its "param_names", which is the same list
    return {**states[0], "param_groups": groups, "state": {k: v for part in reversed(states) for k, v in part["state"].items()}}


def _settings(group: State) -> State:
    return {k: v for k, v in group.items() if k not in ("params", "param_names")}


def write(folder: Path, tensors: dict[str, Divided], group: ProcessGroup | None) -> Shapes:
    """Write every rank's parts into one folder on a shared disk; equal parts once. Return all ranks' shapes on the first one.

    `group` is a process group, None for a single process. pieces.json lists the place of each part, because torch's own
    .metadata is a pickle.
    """
    from torch.distributed.checkpoint import metadata as of_torch
    from torch.distributed.checkpoint import planner
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    held = {(name, part.offsets): part.tensor for name, divided in tensors.items() for part in divided.parts}
    shapes: Shapes = {}

    class Planner(DefaultSavePlanner):
        def create_local_plan(self) -> planner.SavePlan:
            self.plan = planner.SavePlan([self._item(name, offsets) for name, offsets in held])
            return self.plan

        def _item(self, name: str, offsets: tuple[int, ...]) -> planner.WriteItem:
            tensor, at = held[name, offsets], torch.Size(offsets)
            about = planner.TensorWriteData(
                chunk=of_torch.ChunkStorageMetadata(at, tensor.shape),
                properties=of_torch.TensorProperties.create_from_tensor(tensor),
                size=torch.Size(tensors[name].shape),
            )
            return planner.WriteItem(of_torch.MetadataIndex(name, at), planner.WriteItemType.SHARD, tensor_data=about)

        def lookup_object(self, index: of_torch.MetadataIndex) -> torch.Tensor:
            return held[index.fqn, tuple(index.offset or ())]

    class Writer(FileSystemWriter):
        def finish(self, metadata: of_torch.Metadata, results: list[list[WriteResult]]) -> None:
            stored = {result.index: result.storage_data for of_rank in results for result in of_rank}
            of_all: State = metadata.state_dict_metadata
            write_json(folder / PIECES, _as_pieces(of_all, stored))
            shapes.update({name: (tuple(t.size), t.properties.dtype) for name, t in of_all.items()})

    with _own_errors():
        planned = Planner(flatten_state_dict=False)
        save({}, storage_writer=Writer(str(folder)), planner=planned, process_group=group, no_dist=group is None)
    return shapes


def read(folder: Path, shapes: Shapes, shards: Shards, alone: bool = False) -> State:
    """Read tensors into the empty ones of `shards`. All ranks read their parts, unless a single process reads `alone`.

    Raises Malformed if a file is not a checkpoint's.
    """
    import torch.distributed as dist
    from torch.distributed.checkpoint import metadata as of_torch
    from torch.distributed.checkpoint import planner
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
    from torch.distributed.checkpoint.state_dict_loader import load

    metadata = _metadata(folder, shapes)
    tensors: State = {}
    parts: dict[tuple[str, tuple[int, ...]], torch.Tensor] = {}
    chunks: dict[str, list[of_torch.ChunkStorageMetadata]] = {}
    for key, (shape, dtype) in shapes.items():
        kind, name, *_ = key.split("/")
        tensors[key] = shards.empty_shard(kind, name, shape, dtype)
        own = shards.divided(kind, name, tensors[key]).parts
        parts |= {(key, part.offsets): part.tensor for part in own}
        chunks[key] = [of_torch.ChunkStorageMetadata(torch.Size(part.offsets), part.tensor.shape) for part in own]

    class Planner(DefaultLoadPlanner):
        def create_local_plan(self) -> planner.LoadPlan:
            stored: State = metadata.state_dict_metadata
            return planner.LoadPlan(
                [item for key, own in chunks.items() for item in create_read_items_for_chunk_list(key, stored[key], own)]
            )

        def lookup_tensor(self, index: of_torch.MetadataIndex) -> torch.Tensor:
            return parts[index.fqn, tuple(index.offset or ())]

    class OrdinaryFiles(FileSystemReader):
        """torch's reader, restricted: it takes nothing from a pickle, and opens only ordinary files of plausible content."""

        def read_metadata(self, *args: object, **kwargs: object) -> of_torch.Metadata:
            metadata.storage_meta = of_torch.StorageMeta(load_id=self.load_id)
            return metadata

        def read_data(self, plan: planner.LoadPlan, planner: planner.LoadPlanner) -> torch.futures.Future[None]:
            for item in plan.items:
                part = _piece(folder, metadata.storage_data[item.storage_index])
                for dimension, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                    part = part.narrow(dimension, start, length)
                target = planner.resolve_tensor(item).detach()
                target.copy_(part)
                planner.commit_tensor(item, target)
            done: torch.futures.Future[None] = torch.futures.Future()
            done.set_result(None)
            return done

    with warnings.catch_warnings(), _own_errors():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # intended for a single process
        no_dist = alone or not dist.is_initialized()
        load({}, storage_reader=OrdinaryFiles(str(folder)), planner=Planner(), no_dist=no_dist)
    return tensors


@contextlib.contextmanager
def _own_errors() -> Iterator[None]:
    """Raise the error of the first failed rank instead of torch's, which is not an Exception."""
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        yield
    except CheckpointException as error:
        for failure, _ in error.failures.values():
            raise failure from None
        raise RuntimeError(str(error)) from None


def _piece(folder: Path, stored: _StorageInfo) -> torch.Tensor:
    """Read one part of a tensor from its part of a file."""
    with opened(folder / stored.relative_path, "rb") as file:
        file.seek(stored.offset)
        part = io.BytesIO(file.read(stored.length))
    check_state(part)
    part.seek(0)
    tensor: torch.Tensor = torch.load(part, map_location="cpu", weights_only=True)
    return tensor


def _as_pieces(tensors: State, stored: dict[of_torch.MetadataIndex, _StorageInfo]) -> State:
    """Return torch's metadata on tensors and their shards as JSON."""
    pieces: State = {
        name: {"dtype": str(t.properties.dtype).removeprefix("torch."), "shape": list(t.size), "pieces": []}
        for name, t in tensors.items()
    }
    sizes = {(name, tuple(chunk.offsets)): list(chunk.sizes) for name, t in tensors.items() for chunk in t.chunks}
    for index, place in stored.items():
        offsets = tuple(index.offset or ())
        where = {"file": str(place.relative_path), "at": place.offset, "bytes": place.length}
        pieces[index.fqn]["pieces"].append({"offsets": list(offsets), "shape": sizes[index.fqn, offsets], **where})
    return pieces


def _metadata(folder: Path, shapes: Shapes) -> of_torch.Metadata:
    """Read pieces.json as torch's metadata. Raises Malformed if it does not fit the state's shapes and the files' lengths."""
    from torch.distributed.checkpoint import metadata as of_torch
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    file = folder / PIECES
    tensors: State = {}
    stored: dict[of_torch.MetadataIndex, _StorageInfo] = {}
    lengths: dict[str, int] = {}
    try:
        content = read_json(file, MOST_PIECES)
        for name, (shape, dtype) in shapes.items():
            entry = content[name]
            if tuple(entry["shape"]) != tuple(shape) or f"torch.{entry['dtype']}" != str(dtype):
                raise ValueError(f"{name} is {entry['dtype']}{entry['shape']}, but in the state {dtype}{list(shape)}")
            chunks = []
            for number, piece in enumerate(entry["pieces"]):
                offsets, sizes = _within(piece, shape)
                place = _place(folder, piece, lengths)
                chunks.append(of_torch.ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)))
                stored[of_torch.MetadataIndex(name, torch.Size(offsets), number)] = _StorageInfo(*place)
            if sum(math.prod(chunk.sizes) for chunk in chunks) != math.prod(shape):
                raise ValueError(f"the parts of {name} do not cover it")
            properties = of_torch.TensorProperties(dtype=dtype)
            tensors[name] = of_torch.TensorStorageMetadata(properties, torch.Size(shape), chunks)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise Malformed(f"{file} is no list of a checkpoint's parts: {error}") from None
    return of_torch.Metadata(tensors, storage_data=stored)


def _within(piece: State, shape: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return a shard's place in its tensor. Raises ValueError if it is outside."""
    offsets, sizes = piece["offsets"], piece["shape"]
    for start, size, whole in zip(offsets, sizes, shape, strict=True):
        if not (type(start) is type(size) is int and 0 <= start <= start + size <= whole and size >= 0):
            raise ValueError(f"a part at {offsets} of {sizes} is outside of a tensor of {list(shape)}")
    return offsets, sizes


def _place(folder: Path, piece: State, lengths: dict[str, int]) -> tuple[str, int, int]:
    """Return a shard's file and its place there. Raises ValueError if it is outside of the file or the checkpoint."""
    name, start, size = piece["file"], piece["at"], piece["bytes"]
    if not isinstance(name, str) or Path(name).name != name:
        raise ValueError(f"it names a file outside of its checkpoint: {name}")
    if name not in lengths:
        lengths[name] = (folder / name).lstat().st_size
    if not (type(start) is type(size) is int and 0 <= start <= start + size <= lengths[name] and size >= 0):
        raise ValueError(f"it names a part outside of {name}")
    return name, start, size
