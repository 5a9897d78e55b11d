"""The work of a run between two updates, where nothing is half done: it evaluates, saves, and stops where it was told to."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NoReturn

from drivetrain.core.errors import PEER_GONE, CallbackError, Interrupted, UserError
from drivetrain.core.microbatch import MicroBatch
from drivetrain.core.signals import StopFlag

if TYPE_CHECKING:
    from drivetrain.engine.trainer import Trainer

SAVE, STOP, FAIL = 1, 2, 3  # flags that are all-reduced after an update, and at batches of an evaluation; the higher wins


def stream(trainer: Trainer) -> Iterator[MicroBatch]:
    """Yield the micro-batches of the trainer's loader. One process that was told to stop saves instead of waiting for the next.

    The same where a reader is stuck or was killed. Several ranks would have to agree on it, and some wait for one another.
    """
    batches = trainer.loader.stream(trainer.taken, trainer.requests(), trainer.device, trainer.memory_format)
    between = alone = trainer.parallel.world.size == 1
    while True:
        if between:
            StopFlag.can_save_now(True)
        try:
            batch = next(batches)
        except StopIteration:
            return
        except Interrupted as error:
            if not (between and trainer.progress.updates):
                raise
            trainer.record()
            trainer.save()
            _stop(trainer, str(error))
        finally:
            if between:
                StopFlag.can_save_now(False)
        between = alone and batch.last
        yield batch


def evaluate_and_save(trainer: Trainer, agreed: int = 0) -> None:
    """Evaluate where that is due, and save. `agreed` is what the ranks have agreed on so far: SAVE, STOP or FAIL.

    Raises Interrupted, or the error of a callback, where they agree to stop, also at a batch of the evaluation. An evaluation
    that was not done stays due: the resumed run begins with it.
    """
    progress, wrong = trainer.progress, ""
    if progress.evaluation_due and agreed < STOP:
        try:
            agreed, wrong = _evaluate(trainer, agreed)
        except UserError:  # the data cannot be evaluated: what was trained is kept
            trainer.save()
            trainer.writer.wait()
            raise
    trainer.save()
    if wrong:
        _stop(trainer, wrong)
    if agreed >= STOP and (progress.evaluation_due or progress.updates < trainer.max_updates):
        trainer.writer.wait()
        if agreed == FAIL:
            raise trainer.callbacks.error or CallbackError(PEER_GONE)  # of another rank
        where = "before the evaluation of" if progress.evaluation_due else "at"
        _stop(trainer, f"stopped by a signal {where} update {progress.updates}")


def _evaluate(trainer: Trainer, agreed: int) -> tuple[int, str]:
    """Evaluate. Return what the ranks agreed on meanwhile, and why one process got no data, where that stopped it."""
    alone = trainer.parallel.world.size == 1

    def stops() -> bool:
        nonlocal agreed
        agreed = max(agreed, trainer.agree())
        return agreed >= STOP

    StopFlag.can_save_now(alone)
    try:
        record_evaluation(trainer, stops)
    except Interrupted as error:
        if agreed < STOP and not alone:  # the loader's: the others evaluate on
            raise
        return agreed, "" if agreed >= STOP else str(error)
    finally:
        StopFlag.can_save_now(False)
    trainer.progress.evaluation_due = False
    return agreed, ""


def record_evaluation(trainer: Trainer, stops: Callable[[], bool]) -> None:
    """Evaluate, and tell all that goes by it. Raises Interrupted where `stops` says so at a batch."""
    metrics, evaluator = trainer.evaluator.evaluate(stops), trainer.evaluator
    trainer.progress.record_evaluation(metrics, *trainer.selection, evaluator.tables)
    trainer.log.write("evaluate", set=evaluator.set, **metrics)
    trainer.scheduler.evaluated(metrics)
    trainer.stopping.evaluated(metrics)


def _stop(trainer: Trainer, reason: str) -> NoReturn:
    trainer.writer.wait()
    raise Interrupted(reason, saved=trainer.saving.active)
