"""What a run does when its loader gives up between two updates: it saves first, since nothing is half done."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NoReturn

from drivetrain.core.errors import Interrupted
from drivetrain.core.host_reads import reads_device_on_purpose
from drivetrain.core.microbatch import MicroBatch
from drivetrain.core.signals import StopFlag

if TYPE_CHECKING:
    from drivetrain.engine.trainer import Trainer


def stream(trainer: Trainer) -> Iterator[MicroBatch]:
    """Yield the micro-batches of the trainer's loader. One process that was told to stop saves instead of waiting for the next.

    The same where a reader is stuck or was killed. Several ranks would have to agree on it, and some wait for one another.
    """
    batches = trainer.loader.stream(trainer.train_data, trainer.requests(), trainer.device, trainer.memory_format)
    between = alone = trainer.parallel.world.size == 1
    while True:
        StopFlag.can_save_now(between)
        try:
            batch = next(batches)
        except StopIteration:
            return
        except Interrupted as error:
            if between and trainer.progress.updates:
                _save_and_stop(trainer, str(error))
            raise
        finally:
            StopFlag.can_save_now(False)
        between = alone and batch.last
        yield batch


@reads_device_on_purpose
def _save_and_stop(trainer: Trainer, reason: str) -> NoReturn:
    progress = trainer.progress
    samples = len(trainer.train_data.source)
    progress.samples = trainer.batch.consumed(samples, progress.epoch, progress.window, trainer.drop_last)
    trainer.log.train(trainer.optimizer.param_groups[0]["lr"])
    trainer.save()
    trainer.writer.wait()
    raise Interrupted(reason, saved=trainer.saving.active)
