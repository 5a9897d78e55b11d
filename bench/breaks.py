"""What makes a run worse, planted in a trainer before it fits, and changes that are harmless: for verdicts on quality."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from drivetrain.core.microbatch import MicroBatch
from drivetrain.data import Normalize
from drivetrain.engine.trainer import Trainer

Plant = Callable[[Trainer], None]


class Arm(NamedTuple):
    """An arm: what its overrides say, from which its claim follows, and what is planted beside them."""

    overrides: tuple[str, ...] = ()
    plant: Plant | None = None


def _each_batch(change: Callable[[MicroBatch], MicroBatch]) -> Plant:
    def watch(stream: Iterator[MicroBatch]) -> Iterator[MicroBatch]:
        return (change(batch) for batch in stream)

    return lambda trainer: trainer.stream_watchers.append(watch)


def _shift_labels(batch: MicroBatch) -> MicroBatch:
    """One row in ten has the label of the row before it."""
    y = batch.y.clone()
    rows = torch.arange(0, len(y), 10)
    y[rows] = batch.y[rows - 1]
    return replace(batch, y=y)


def _drop_half(batch: MicroBatch) -> MicroBatch:
    """The second half of each batch is the first one again, as where two ranks read the same part."""
    half = len(batch.y) // 2
    return replace(batch, x=torch.cat([batch.x[:half]] * 2), y=torch.cat([batch.y[:half]] * 2))


def _keep_first_label(trainer: Trainer) -> None:
    """Images are mixed, and labels are not."""
    (step,) = trainer.train_data.steps
    mix = step.mix  # type: ignore[attr-defined]

    def mixed(x: torch.Tensor, other: torch.Tensor, share: torch.Tensor, *draws: torch.Tensor) -> Any:
        return mix(x, other, share, *draws)[0], torch.ones_like(share)

    step.mix = mixed  # type: ignore[attr-defined]


def _stay_at_first_lr(trainer: Trainer) -> None:
    step = trainer.scheduler.step
    trainer.scheduler.step = lambda updates: step(0)  # type: ignore[method-assign, assignment]


def _no_average(trainer: Trainer) -> None:
    trainer.ema.update = lambda: None  # type: ignore[method-assign]


def _lose_first_gradient(trainer: Trainer) -> None:
    for parameter in next(m for m in trainer.model.modules() if isinstance(m, torch.nn.Linear)).parameters():
        parameter.register_hook(torch.zeros_like)


def _forget_moments(trainer: Trainer) -> None:
    def watch(stream: Iterator[MicroBatch]) -> Iterator[MicroBatch]:
        for batch in stream:
            yield batch  # control returns after the step
            if batch.last:
                trainer.optimizer.state.clear()

    trainer.stream_watchers.append(watch)


def _dropout_in_evaluation(trainer: Trainer) -> None:
    trainer.model.eval = lambda: trainer.model  # type: ignore[method-assign]


def _no_normalisation_in_evaluation(trainer: Trainer) -> None:
    trainer.evaluator.data = trainer.evaluator.data._replace(normalize=Normalize([0.0], [1.0]))


def _overwrite_gradients(trainer: Trainer) -> None:
    """Each micro-batch's gradient replaces the one before it instead of being added to it."""

    def watch(stream: Iterator[MicroBatch]) -> Iterator[MicroBatch]:
        for batch in stream:
            trainer.step.zero_grad()
            yield batch

    trainer.stream_watchers.append(watch)


BREAKS = {
    "labels of one row in ten are shifted": Arm((), _each_batch(_shift_labels)),
    "half of each batch is not seen": Arm((), _each_batch(_drop_half)),
    "mixup without mixing labels": Arm(("augment=[mixup]", "augment.mixup.alpha=1"), _keep_first_label),
    "the learning rate stays at its start": Arm((), _stay_at_first_lr),
    "ema is never updated": Arm(("ema=ema",), _no_average),
    "the first layer's gradient is lost": Arm((), _lose_first_gradient),
    "the optimizer forgets its moments": Arm((), _forget_moments),
    "dropout also in the evaluation": Arm(("model.dropout=0.5",), _dropout_in_evaluation),
    "no normalisation in the evaluation": Arm((), _no_normalisation_in_evaluation),
    "accumulation overwrites gradients": Arm(("batch=accumulate", "batch.accumulation_steps=8"), _overwrite_gradients),
    "a learning rate 30 times as high": Arm(("optimizer.lr=1.0",)),
    "a weight decay 500 times as high": Arm(("optimizer.weight_decay=5.0",)),
}
HARMLESS = {
    "label smoothing 0.1": Arm(("loss.label_smoothing=0.1",)),
    "dropout 0.3": Arm(("model.dropout=0.3",)),
    "mixup": Arm(("augment=[mixup]",)),
    "ema": Arm(("ema=ema",)),
    "accumulation": Arm(("batch=accumulate",)),
}
