"""Who writes a run's checkpoints, when, and beside what."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_map

from drivetrain.core.protocols import Checkpointed, Strategy
from drivetrain.run import directory
from drivetrain.saving import checkpoint_io, sharded_checkpoint
from drivetrain.saving.options import Saving


class Writer:
    """Writes a trainer's state as `saving` says: whole by rank 0 or in parts by all, at once or beside the training."""

    def __init__(
        self, run_dir: Path, saving: Saving, parallel: Strategy, eval_weights: Callable[[], AbstractContextManager[None]]
    ) -> None:
        self._run_dir, self._saving, self._parallel, self._eval_weights = run_dir, saving, parallel, eval_weights
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._ranks: Any = None

    def start(self) -> None:
        """Called on all ranks. Raises UserError where not all of them can write."""
        if self._saving.active and self._saving.sharded:
            self._ranks = self._parallel.saving_group()
            self._run_dir = directory.same_on_all_ranks(self._run_dir, self._parallel)

    def save(self, trainer: Checkpointed) -> None:
        """The state as it is now. Called on all ranks."""
        if not self._saving.active:
            return
        state = trainer.state()  # gathers from all ranks, as does full_state_dict
        with self._eval_weights():
            if self._saving.sharded:
                weights, state = sharded_checkpoint.apart(trainer.model.state_dict(), state, self._parallel.as_distributed)
            else:
                weights, state = self._parallel.full_state_dict(trainer.model, state)
            if self._saving.asynchronous:
                weights, state = tree_map(_copied, (weights, state))
            self.wait()
            update, best = trainer.progress.updates, trainer.progress.best
            write = self._shards if self._saving.sharded else self._whole
            if self._saving.asynchronous:
                self._thread = threading.Thread(target=self._beside, args=(write, update, weights, state, best), name="saving")
                self._thread.start()
            else:
                write(update, weights, state, best)

    def wait(self) -> None:
        """Until what is being written is there. Raises what went wrong with it."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def finish(self, seconds: float) -> None:
        """Give what is being written so long to be there, after a failure: its own does not matter any more."""
        if self._thread is not None:
            self._thread.join(seconds)

    def _beside(self, write: Callable[..., None], *what: Any) -> None:
        try:
            write(*what)
        except BaseException as error:  # raised where the loop is: a full disk ends the run here as there
            self._error = error

    def _whole(self, update: int, weights: Any, state: Any, best: Any) -> None:
        if self._parallel.world.rank == 0:
            checkpoint_io.save(self._run_dir, update, weights, state)
            self._prune(best)

    def _shards(self, update: int, pieces: Any, rest: Any, best: Any) -> None:
        checkpoint_io.save_sharded(self._run_dir, update, pieces, rest, self._ranks)
        if self._parallel.world.rank == 0:
            self._prune(best)

    def _prune(self, best: Any) -> None:
        kept = int(best["update"]) if self._saving.keep_best and best else None
        checkpoint_io.prune(self._run_dir, self._saving.keep, kept)


def _copied(value: Any) -> Any:
    return value.detach().to("cpu", copy=True) if isinstance(value, torch.Tensor) else value
