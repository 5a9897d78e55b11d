"""The state of a trainer in a checkpoint, beside its weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from drivetrain.core import streams
from drivetrain.core.typed import StateDict
from drivetrain.saving import checkpoint_io

if TYPE_CHECKING:
    from drivetrain.engine.trainer import Trainer

# The parts with a state, restored in this order, after the optimizer.
STATEFUL = ("scheduler", "precision", "ema", "batch", "stopping", "loader", "log", "owned")


def of(trainer: Trainer) -> dict[str, Any]:
    """Return everything except the weights that a resumed run needs. Called on all ranks."""
    return {
        "progress": trainer.progress.state_dict(),
        "optimizer": trainer.optimizer.state_dict(),
        **{part: getattr(trainer, part).state_dict() for part in STATEFUL},
        "random": trainer.parallel.gather_object(streams.state()),
    }


def restore(trainer: Trainer, weights: dict[str, torch.Tensor], state: StateDict) -> None:
    """Continue from a checkpoint. Weights and state are those of the full, unsharded model."""
    weights, state = trainer.parallel.shard_state_dict(weights, state)
    trainer.model.load_state_dict(weights)
    trainer.progress.load_state_dict(state["progress"])
    checkpoint_io.load_optimizer(trainer.optimizer, state["optimizer"])
    for part in STATEFUL:
        getattr(trainer, part).load_state_dict(state.get(part, {}))
    if (rank := trainer.parallel.rng_rank()) < len(state["random"]):  # a rank beyond those that were saved keeps its own
        streams.restore(state["random"][rank])
