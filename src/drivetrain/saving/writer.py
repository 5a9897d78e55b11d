"""Writes a run's checkpoints, by one rank or all, in the training loop or in a thread."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_map

from drivetrain.core.errors import CannotSave
from drivetrain.core.options import groups
from drivetrain.core.options.protocols import Checkpointed
from drivetrain.core.typed import JsonMapping, JsonObject, StateDict
from drivetrain.run import directory
from drivetrain.run.directory import RunDirHandle
from drivetrain.saving import checkpoint_io, sharded_checkpoint
from drivetrain.saving.options import Saving

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

logger = logging.getLogger(__name__)


class HostCopy:
    """A copy of all tensors in nested containers at this moment. `wait` returns it; any thread may call it.

    The copies are queued on the devices, behind earlier work and before the next update overwrites the tensors.
    From CUDA, torch copies to pinned memory; to other memory the device could not write by itself. Pinned memory is costly
    to allocate, so torch keeps what one copy has released for the next one.
    """

    def __init__(self, values: object) -> None:
        self._devices: set[torch.device] = set()
        self._values = tree_map(self._copy, values)
        self._events = [torch.Event(device) for device in self._devices if device.type != "cpu"]
        for event in self._events:
            event.record()

    def _copy(self, value: object) -> object:
        if not isinstance(value, torch.Tensor):
            return value
        self._devices.add(value.device)
        return value.detach().to("cpu", copy=True, non_blocking=True)

    def wait(self) -> Any:
        """Return the copies, once the devices have written them."""
        for event in self._events:
            event.synchronize()
        return self._values


class Writer:
    """Writes a trainer's state as the `saving` option sets: full by rank 0 or sharded by all, synchronously or in a thread."""

    def __init__(
        self,
        run_dir: Path,
        saving: Saving,
        parallel: groups.Parallel,
        eval_weights: Callable[[], AbstractContextManager[None]],
        about: JsonMapping | None = None,
    ) -> None:
        self.about = about  # description of the weights for use without the run
        self.data: JsonObject | None = None  # the fingerprint of the training set
        self._run_dir, self._saving, self._parallel, self._eval_weights = run_dir, saving, parallel, eval_weights
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._group: ProcessGroup | None = None  # process group of the saving threads
        self._held: RunDirHandle | None = None  # the run's directory, on the ranks that write

    def start(self) -> None:
        """Prepare to write. Called on all ranks. Raises UserError if one of them cannot write."""
        if not self._saving.active:
            return
        if self._saving.sharded:
            self._group = self._parallel.saving_group()
            self._run_dir = directory.same_on_all_ranks(self._run_dir, self._parallel)
        if self._parallel.world.rank == 0:
            self._hold()
            checkpoint_io.remove_unfinished(self._run_dir)

    def trains_on(self, data: JsonObject | None) -> None:
        """Take the training set's fingerprint. Warn if the state was trained on other samples."""
        if self.data and data and self.data.get("hash") != data["hash"]:
            logger.warning("the training data has changed since the run was trained on it: it goes on with other samples")
        self.data = data

    def _hold(self) -> RunDirHandle:
        if self._held is None:
            self._run_dir.mkdir(parents=True, exist_ok=True)  # a trainer without a run has none
            self._held = RunDirHandle(self._run_dir)
        return self._held

    def _place(self) -> tuple[Path, str | None]:
        """Return the folder to write to and, if it is not the run's own, the reason on rank 0: "moved" or "removed"."""
        held = self._hold()
        folder = held.folder()
        if folder == held.path:
            return folder, None
        what = "removed" if folder is None else f"moved to {folder}"
        return held.place(), f"{held.path} was {what} while the run trained"

    def save(self, trainer: Checkpointed) -> None:
        """Save the current state. Called on all ranks."""
        if not self._saving.active:
            return
        if self._saving.sharded:  # any rank may write shared tensors, so they have to be equal on all
            self._parallel.broadcast_buffers(trainer.model)
        state = trainer.state()  # gathers from all ranks, like full_state_dict
        with self._eval_weights():
            if self._saving.sharded:
                weights, state = sharded_checkpoint.flatten_state(trainer.model.state_dict(), state, self._parallel)
                state = self._parallel.with_states_of_all(state)
            else:
                weights, state = self._parallel.full_state_dict(trainer.model, state)
            self.wait()
            gone = None
            if self._parallel.world.rank == 0:
                self._run_dir, gone = self._place()
            if self._saving.sharded:
                self._run_dir, gone = self._parallel.broadcast_object((self._run_dir, gone))
            update = trainer.progress.updates
            writes, ranked = self._saving.sharded or self._parallel.world.rank == 0, list(trainer.progress.ranked)
            if writes and self._saving.asynchronous:
                copy = HostCopy((weights, state))
                self._thread = threading.Thread(target=self._write_in_thread, args=(update, copy, ranked), name="saving")
                self._thread.start()
            elif writes:
                self._write(update, weights, state, ranked)
        if gone is not None:
            self.wait()
            saved = self._run_dir / "checkpoints" / str(update)
            raise CannotSave(f"{gone}: its state is saved in {saved}, go on with resume={self._run_dir}")

    def _write(self, update: int, weights: StateDict, state: StateDict, ranked: list[int]) -> None:
        about = self.about and {**self.about, "data": self.data}
        if self._saving.sharded:
            checkpoint_io.save_sharded(self._run_dir, update, weights, state, self._group, about)
        else:
            checkpoint_io.save(self._run_dir, update, weights, state, about)
        if self._parallel.world.rank == 0:
            recent = self._saving.keep_recent or 1  # the newest stays, to resume from
            checkpoint_io.prune(self._run_dir, lambda saved: [*self._saving.chosen(saved, ranked), *saved[-recent:]])

    def wait(self) -> None:
        """Wait until the current write is complete. Raises its error."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def finish(self, seconds: float) -> None:
        """Wait up to `seconds` for the current write, after a failure of the run. Ignores the write's own error."""
        if self._thread is not None:
            self._thread.join(seconds)

    def _write_in_thread(self, update: int, copy: HostCopy, ranked: list[int]) -> None:
        try:
            weights, state = copy.wait()
            self._write(update, weights, state, ranked)
        except BaseException as error:  # `wait` raises it in the training loop, so that a full disk ends the run
            self._error = error
