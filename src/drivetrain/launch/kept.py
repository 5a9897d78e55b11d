"""What a run evaluates at its end: the test set, on its last weights, its best checkpoint, and the mean of those it kept."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from drivetrain.core.errors import UserError
from drivetrain.saving import manifest
from drivetrain.saving.content import Malformed

if TYPE_CHECKING:
    import torch

    from drivetrain.engine.stages import StagedRun
    from drivetrain.engine.trainer import Trainer
    from drivetrain.parallel import Parallel
    from drivetrain.run.result import Result

AVERAGED = "averaged.safetensors"
JUMP = 2  # times the rate before
Found = tuple[Mapping[str, Any], Mapping[str, Any]]  # the metrics of an evaluation, and its tables

logger = logging.getLogger(__name__)


def load(checkpoint: Path, parallel: Parallel) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """A checkpoint's weights and state, on every rank. Rank 0 sends them where machines share no file system."""
    from drivetrain.saving import checkpoint_io

    here = parallel.gather_object(checkpoint.is_dir())
    if parallel.broadcast_object(all(here)):
        return checkpoint_io.load(checkpoint, parallel)
    found: Any = None
    if parallel.world.rank == 0:
        try:
            found = checkpoint_io.load(checkpoint)
        except Exception as error:  # all ranks raise it: the others would wait for what rank 0 does not send
            found = error
    found = parallel.broadcast_object(found)
    if isinstance(found, Exception):
        raise found
    loaded: tuple[dict[str, torch.Tensor], dict[str, Any]] = found
    return loaded


class _Attempt(NamedTuple):
    """What came of a piece of work that every rank did."""

    value: Any
    error: Exception | None  # this rank's
    wrong: str | None  # what the error of the first rank that has one says, on every rank


def _attempt(parallel: Parallel, work: Callable[[], Any]) -> _Attempt:
    """Do `work` on all ranks. Raises only what is the operator's to mend, such as a changed config."""
    value, error = None, None
    try:
        value = work()
    except Exception as raised:
        if isinstance(raised, UserError) and not isinstance(raised, Malformed):
            raise
        error = raised
    told = parallel.gather_object(None if error is None else f"{type(error).__name__}: {error}")
    return _Attempt(value, error, parallel.broadcast_object(next((line for line in told if line), None)))


def restore(staged: StagedRun, checkpoint: Path) -> float:
    """Continue from a checkpoint, or from the one before where this one does not hold what its hashes promise.

    Return the learning rate that its schedule gave to the update after it. Called on all ranks. Raises UserError where there is
    no other, with the newest one's error.
    """
    parallel, first = staged.trainer.parallel, None
    newest: Path | None = checkpoint
    while newest is not None:
        loading = _attempt(parallel, partial(load, newest, parallel))
        # All ranks restore, or none: to enter another stage of the run takes all of them.
        restoring = loading if loading.wrong else _attempt(parallel, partial(_restore, staged, *loading.value))
        if restoring.wrong is None:
            return float(restoring.value)
        wrong, error = restoring.wrong, restoring.error
        first = first or error or RuntimeError(f"another rank cannot restore {newest}")
        before = None
        if parallel.world.rank == 0:
            logger.warning("checkpoint %s cannot be restored (%s): passed over", newest, wrong.splitlines()[0])
            before, _ = manifest.newest_valid(newest.parents[1], below=int(newest.name))
        newest = parallel.broadcast_object(before)
    assert first is not None
    if isinstance(first, UserError):
        raise first
    why = f"{type(first).__name__}: {str(first).splitlines()[0]}" if str(first) else type(first).__name__
    raise UserError(
        f"checkpoint {checkpoint} cannot be restored ({why}), and there is no other: another program wrote it, or changed it"
    ) from first


def _restore(staged: StagedRun, weights: Any, state: Any) -> float:
    """Restore what was loaded; the learning rate in it, which is read first, so that a malformed one changes nothing."""
    from drivetrain.saving import checkpoint_io

    lr = float(checkpoint_io.settings(state["optimizer"])["lr"])
    staged.restore(weights, state)
    return lr


def rate_jump(trainer: Trainer, before: float) -> str:
    """What to know where a run goes on at a much higher rate than it had: its schedule is that of a longer run now.

    `before` is the rate of its last update, by the schedule that the checkpoint was made with.
    """
    group, progress = trainer.optimizer.param_groups[0], trainer.progress
    trainer.scheduler.step(max(0, progress.updates - 1))
    after = float(group["lr"])
    if after <= JUMP * before:
        return ""
    return (
        f"the learning rate goes up from {before:.2e} to {after:.2e}: the schedule is now that of {trainer.max_updates:,} "
        f"updates, and this run has made {progress.updates:,}. For a rate of your own say resume_changed=true scheduler=constant "
        f"optimizer.lr=…, or begin a new run from its weights by model.weights={trainer.run_dir}"
    )


def test_final(trainer: Trainer) -> Found | None:
    """Evaluate the test set on the last weights of a completed run; None where it is what the run was evaluated on all along."""
    if trainer.evaluator.set == "test":
        return None
    tester = trainer.evaluator.on("test")
    metrics = tester.evaluate()
    trainer.log.write("evaluate", set="test", weights="final", **metrics)
    return metrics, tester.tables


def record(result: Result, name: str, evaluation: str, found: Found) -> None:
    """Note the figures and the tables of an evaluation of the set `name`: final, best or averaged."""
    metrics, tables = found
    result.metrics.setdefault(name, {})[evaluation] = dict(metrics)
    if tables:
        result.tables.setdefault(name, {})[evaluation] = dict(tables)


def evaluate_kept(staged: StagedRun, result: Result, run_dir: Path) -> None:
    """Evaluate what a completed run has kept. Called on all ranks, when all else is recorded: the trainer's weights change.

    The test set is evaluated on the best checkpoint, and both sets on the mean of the kept checkpoints' weights.
    """
    from drivetrain.saving import checkpoint_io

    trainer = staged.trainer
    saving, parallel, progress = trainer.saving, trainer.parallel, trainer.progress
    best = progress.best.get("update")
    if best == progress.updates and "final" in result.metrics["test"]:  # the last weights are the best ones
        last = {**result.metrics["test"]["final"], "update": best}
        record(result, "test", "best", (last, result.tables.get("test", {}).get("final", {})))
    if not saving.best and not saving.average_kept:
        return
    chosen = saving.chosen(checkpoint_io.updates(run_dir), list(progress.ranked)) if parallel.world.rank == 0 else []
    kept: list[Path] = parallel.broadcast_object([run_dir / "checkpoints" / str(update) for update in chosen])
    if saving.average_kept and kept:
        _evaluate_average(trainer, result, kept, run_dir)
    if saving.best and best != progress.updates and (found := [path for path in kept if int(path.name) == best]):
        held = progress.state_dict()
        try:
            staged.restore(*load(found[0], parallel), to_evaluate=True)
        finally:
            progress.load_state_dict(held)
        tester = trainer.evaluator.on("test")
        metrics = tester.evaluate()
        _note(trainer, result, "test", "best", ({**metrics, "update": best}, tester.tables))


def _note(trainer: Trainer, result: Result, name: str, evaluation: str, found: Found) -> None:
    """Record an evaluation of the run's end, and log it."""
    record(result, name, evaluation, found)
    trainer.log.write("evaluate", set=name, weights=evaluation, **{k: v for k, v in found[0].items() if k != "update"})


def _evaluate_average(trainer: Trainer, result: Result, kept: Sequence[Path], run_dir: Path) -> None:
    """Give the model the mean of the checkpoints' weights, write it to averaged.safetensors and evaluate it on every set.

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
        for name in dict.fromkeys((evaluator.set, "test")):
            each = replace(evaluator.on(name), tables={})
            _note(trainer, result, name, "averaged", (each.metrics(), each.tables))
        full, _ = parallel.full_state_dict(trainer.model, state)
    if parallel.world.rank == 0:
        checkpoint_io.write_weights(full, run_dir / AVERAGED)
        logger.info("the mean of %d checkpoints' weights is in %s", len(kept), run_dir / AVERAGED)
