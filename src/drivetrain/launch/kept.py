"""What a run evaluates at its end: the best checkpoint, and the mean of the kept checkpoints' weights."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from drivetrain.engine.trainer import Trainer
    from drivetrain.parallel import Parallel
    from drivetrain.run.result import Result

AVERAGED = "averaged.safetensors"

logger = logging.getLogger(__name__)


def load(checkpoint: Path, parallel: Parallel) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """A checkpoint's weights and state, on every rank. Rank 0 sends them where machines share no file system."""
    from drivetrain.saving import checkpoint_io

    here = parallel.gather_object(checkpoint.is_dir())
    if parallel.broadcast_object(all(here)):
        return checkpoint_io.load(checkpoint, parallel.empty_shard)
    loaded: tuple[dict[str, torch.Tensor], dict[str, Any]] = parallel.broadcast_object(
        checkpoint_io.load(checkpoint) if parallel.world.rank == 0 else None
    )
    return loaded


def evaluate_kept(trainer: Trainer, result: Result, run_dir: Path) -> None:
    """Evaluate what a completed run has kept. Called on all ranks, when all else is recorded: the trainer's weights change."""
    from drivetrain.saving import checkpoint_io

    saving, parallel, progress = trainer.saving, trainer.parallel, trainer.progress
    if not saving.best and not saving.average_kept:
        return
    chosen = saving.chosen(checkpoint_io.updates(run_dir), list(progress.ranked)) if parallel.world.rank == 0 else []
    kept: list[Path] = parallel.broadcast_object([run_dir / "checkpoints" / str(update) for update in chosen])
    if saving.average_kept and kept:
        _record(result, "averaged", _evaluate_average(trainer, kept, run_dir), trainer)
    if saving.best and (best := [path for path in kept if int(path.name) == progress.best.get("update")]):
        held = progress.state_dict()
        try:
            trainer.restore(*load(best[0], parallel))
        finally:
            progress.load_state_dict(held)
        _record(result, "best_weights", trainer.evaluator.evaluate(), trainer)


def _record(result: Result, name: str, metrics: dict[str, float], trainer: Trainer) -> None:
    result.metrics[name] = metrics
    if trainer.evaluator.tables:
        result.tables[name] = dict(trainer.evaluator.tables)


def _evaluate_average(trainer: Trainer, kept: Sequence[Path], run_dir: Path) -> dict[str, float]:
    """Give the model the mean of the checkpoints' weights, write it to averaged.safetensors and evaluate it.

    Statistics of BatchNorm are averaged too; counters are those of the newest checkpoint.
    """
    from drivetrain.core.device import sum_dtype
    from drivetrain.saving import checkpoint_io

    parallel, evaluator = trainer.parallel, trainer.evaluator
    weights, state = load(kept[-1], parallel)
    for name, newest in weights.items():
        if newest.is_floating_point():
            weights[name] = newest.to(sum_dtype(newest.device))
    for checkpoint in kept[:-1]:
        for name, tensor in load(checkpoint, parallel)[0].items():
            if tensor.is_floating_point():
                weights[name] += tensor
    for name, total in weights.items():
        if total.is_floating_point():
            weights[name] = total / len(kept)
    weights, _ = parallel.shard_state_dict(weights, state)
    state = trainer.state()
    with evaluator.eval_weights():  # in it the model holds the weights that an evaluation uses
        trainer.model.load_state_dict(weights)
        evaluator.tables = {}
        metrics = evaluator.metrics()
        full, _ = parallel.full_state_dict(trainer.model, state)
    if parallel.world.rank == 0:
        checkpoint_io.write_weights(full, run_dir / AVERAGED)
        logger.info("the mean of %d checkpoints' weights is in %s", len(kept), run_dir / AVERAGED)
    return metrics
