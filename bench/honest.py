"""The honesty of the verdicts of `quality=true`: `python -m bench.honest [--repeats N]` trains and judges many times over.

Harmless changes are judged half as often as the same against itself, planted breaks a quarter. Each repeat has seeds of its
own. The same against itself is trained with other seeds than the first variant, so that nothing but chance tells them apart. What
is planted in a break is no override, so the variant claims what its overrides claim: where it has none, the same mathematics.
Runs are trained in this process, one after the other, and judged as `drivetrain compare` does.
"""

from __future__ import annotations

import multiprocessing
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from bench.harness import parse, table, write
from drivetrain.core.machine.signals import StopFlag
from drivetrain.core.options.selection import selected
from drivetrain.core.step.microbatch import MicroBatch
from drivetrain.core.world import World
from drivetrain.data import Normalize, digits
from drivetrain.engine.trainer import Trainer
from drivetrain.launch.job import prepare
from drivetrain.launch.worker import run_rank
from drivetrain.measure import changes
from drivetrain.measure.benchmark import quality
from drivetrain.measure.benchmark.quality import FAIL, INCONCLUSIVE, PASS, Trial, Verdict
from drivetrain.measure.benchmark.variants import TrainedRun, trained_run
from drivetrain.run.reader import read

OVERRIDES = (
    "data=digits", "model=mlp", "model.hidden=[128]", "epochs=8", "evaluate_every=8", "log_every=11", "saving=none", "logger=[]",
    "optimizer.lr=0.03", "runtime.device=cpu", "runtime.threads=1",
)  # fmt: skip
SAME = "the same"
SEEDS_OF_A_REPEAT = 1000


# --- what is planted ---

Plant = Callable[[Trainer], None]


class Variant(NamedTuple):
    """A variant: what its overrides say, from which its claim follows, and what is planted beside them."""

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
    wrong = trainer.evaluator.data._replace(normalize=Normalize([0.0], [1.0]))
    trainer.evaluator.sets = {**trainer.evaluator.sets, trainer.evaluator.set: {"": wrong}}


def _overwrite_gradients(trainer: Trainer) -> None:
    """Each micro-batch's gradient replaces the one before it instead of being added to it."""

    def watch(stream: Iterator[MicroBatch]) -> Iterator[MicroBatch]:
        for batch in stream:
            trainer.step.zero_grad()
            yield batch

    trainer.stream_watchers.append(watch)


BREAKS = {
    "labels of one row in ten are shifted": Variant((), _each_batch(_shift_labels)),
    "half of each batch is not seen": Variant((), _each_batch(_drop_half)),
    "mixup without mixing labels": Variant(("augment=[mixup]", "augment.mixup.alpha=1"), _keep_first_label),
    "the learning rate stays at its start": Variant((), _stay_at_first_lr),
    "ema is never updated": Variant(("ema=ema",), _no_average),
    "the first layer's gradient is lost": Variant((), _lose_first_gradient),
    "the optimizer forgets its moments": Variant((), _forget_moments),
    "dropout also in the evaluation": Variant(("model.dropout=0.5",), _dropout_in_evaluation),
    "no normalisation in the evaluation": Variant((), _no_normalisation_in_evaluation),
    "accumulation overwrites gradients": Variant(("batch=accumulate", "batch.accumulation_steps=8"), _overwrite_gradients),
    "a learning rate 30 times as high": Variant(("optimizer.lr=1.0",)),
    "a weight decay 500 times as high": Variant(("optimizer.weight_decay=5.0",)),
}
HARMLESS = {
    "label smoothing 0.1": Variant(("loss.label_smoothing=0.1",)),
    "dropout 0.3": Variant(("model.dropout=0.3",)),
    "mixup": Variant(("augment=[mixup]",)),
    "ema": Variant(("ema=ema",)),
    "accumulation": Variant(("batch=accumulate",)),
}


VARIANTS = {"same": {SAME: Variant()}, "break": BREAKS, "harmless": HARMLESS}  # by kind and name


# --- the campaign ---


def trained(variant: Variant, seed: int) -> TrainedRun:
    """One variant trained with one seed, in this process."""
    job = _job(variant.overrides)
    job.run, job.attach = job.run.with_parts(runtime=job.run.runtime.with_values(seed=seed)), variant.plant
    with tempfile.TemporaryDirectory() as folder, StopFlag() as stop:
        result = run_rank(job, World(), Path(folder), stop, quiet=True)
        run = read(Path(folder))
    run.result, run.status = result, result.status
    return trained_run(run, seed)


_job = cache(lambda overrides: prepare([*OVERRIDES, *overrides]))
_base_run = cache(partial(trained, Variant()))  # of a seed


def judged(variant: Variant, repeat: int, plan: quality.QualitySettings, shift: int = 0) -> Verdict:
    """The verdict on one variant in one repeat. `shift` is added to its seeds, of which the first variant's are not."""
    base = _job(())
    claim = changes.between(base, _job(variant.overrides))
    selection = selected(base.run)
    trial = Trial.of(selection.name, {1: claim}, {1: quality.figures_for(claim[0], selection)})

    def train(number_of_variant: int, number: int) -> TrainedRun:
        seed = repeat * SEEDS_OF_A_REPEAT + number
        return trained(variant, seed + shift) if number_of_variant else _base_run(seed)

    quality.sequentially(trial, plan, train)
    return trial.verdicts[1]


def _repeat(task: tuple[int, dict[str, int], quality.QualitySettings]) -> list[tuple[str, Verdict]]:
    """All variants of one repeat, those that are repeated so often."""
    repeat, repeats, plan = task
    torch.set_num_threads(1)
    digits.read_digits = cache(digits.read_digits)
    found = []
    for kind, times in repeats.items():
        for name, variant in VARIANTS[kind].items() if repeat < times else ():
            shift = SEEDS_OF_A_REPEAT // 2 if name == SAME else 0
            found.append((name, judged(variant, repeat, plan, shift)))
    return found


def campaign(repeats: dict[str, int], processes: int, out: Path) -> dict[str, Any]:
    """All verdicts, by kind and variant, as the result file has them; the file is written after each repeat."""
    began, plan = time.perf_counter(), quality.QualitySettings()
    verdicts: dict[str, list[Verdict]] = {name: [] for kind in repeats for name in VARIANTS[kind]}
    tasks = [(number, repeats, plan) for number in range(max(repeats.values()))]
    content: dict[str, Any] = {}
    with multiprocessing.get_context("fork").Pool(processes) as pool:
        for done, found in enumerate(pool.imap_unordered(_repeat, tasks), 1):
            for name, verdict in found:
                verdicts[name].append(verdict)
            print(f"repeat {done} of {len(tasks)}", *(f"{name}: {v.outcome}" for name, v in found), sep="; ", flush=True)
            content = {
                "overrides": OVERRIDES, "seeds": plan.seeds, "max_seeds": plan.max_seeds,
                "seconds": time.perf_counter() - began, "repeats": done,
                **{kind: {name: _summary(verdicts[name]) for name in VARIANTS[kind]} for kind in repeats},
            }  # fmt: skip
            write(out, content)
    return content


def _summary(verdicts: Sequence[Verdict]) -> dict[str, Any]:
    outcomes = Counter(v.outcome for v in verdicts)
    return {
        "repeats": len(verdicts), **{outcome: outcomes[outcome] for outcome in (PASS, INCONCLUSIVE, FAIL)},
        "effect": verdicts[0].effect if verdicts else None, "seeds": sorted(len(v.runs) for v in verdicts),
        "reasons": [v.reason for v in verdicts],
    }  # fmt: skip


def main() -> None:
    """Run the campaign and show it."""
    given = parse(__doc__, "honest-quality-cpu.json", repeats=40, processes=2)
    repeats = {"same": given.repeats, "harmless": -(-given.repeats // 2), "break": -(-given.repeats // 4)}
    content = campaign(repeats, given.processes, given.out)
    rows = [
        [kind, name, str(row["effect"]), *(str(row[outcome]) for outcome in (PASS, INCONCLUSIVE, FAIL))]
        for kind in repeats
        for name, row in content[kind].items()
    ]
    table("verdicts on quality", ("kind", "variant", "claims", PASS, INCONCLUSIVE, FAIL), rows)


if __name__ == "__main__":
    main()
