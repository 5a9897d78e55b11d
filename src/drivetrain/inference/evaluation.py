"""Evaluates a finished run again: on any set, any device and any ranks, with training's own evaluation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from drivetrain.core.errors import Interrupted, UserError
from drivetrain.core.machine.files import read_json, write_json
from drivetrain.core.machine.paths import expanded
from drivetrain.core.machine.signals import StopFlag
from drivetrain.core.options.overrides import key_of
from drivetrain.core.step.step import Stream, StreamWatcher
from drivetrain.core.step.target_kinds import TargetKind
from drivetrain.core.step.trees import length
from drivetrain.core.typed import JsonObject
from drivetrain.data.base import Data, OwnData
from drivetrain.engine.summary import recall
from drivetrain.inference.finished import Choice, chosen_weights, find, load_weights
from drivetrain.launch import launcher, worker
from drivetrain.launch.job import Job, recorded_environment
from drivetrain.run import directory
from drivetrain.saving import manifest
from drivetrain.ui.progress import Rate

if TYPE_CHECKING:
    from drivetrain.engine.trainer import Trainer

TOLD = "evaluated.json"  # in the evaluation's own folder: the number and origin of the samples


@dataclass
class Evaluation:
    """The figures of a run's weights on a data set."""

    run: str
    update: int
    average: bool | float  # True for the averaged weights; a number: the average of this width
    split: str  # the set: test or validation
    metrics: dict[str, float]
    overrides: list[str]  # differences from the run's own config
    world_size: int
    device: str | None
    samples: int  # number in the set
    source: str  # their origin
    shares: dict[str, int]  # figure that is a share of samples → their number


def evaluate(
    run_dir: Path | str, overrides: Sequence[str] = (), config_dirs: Sequence[str] = (), choice: Choice | None = None
) -> Evaluation:
    """Evaluate a finished run on its own test set, or on its validation set. Raises UserError, and Interrupted at a signal.

    Overrides change its config, such as `data=…` or `parallel=ddp`. With the run's own ranks, batches and device the figures
    equal training's to the last digit; others add the same numbers in another order.
    """
    choice, run_dir = choice or Choice(), directory.named(run_dir)
    average = ["ema=none"] if choice.average else []  # the averaged weights replace the trained ones
    finished = find("drivetrain evaluate", Path(run_dir), [*average, *overrides], config_dirs, choice)
    checkpoint = finished.checkpoint
    if (about := manifest.about(checkpoint)) and _on_other_data(finished.job, Path(run_dir)):
        own = _own_data(finished.job, overrides, Path(run_dir), about)
        finished.job.run = finished.job.run.with_parts(data=Data.of(finished.job.run).with_values(own=own))
    kind = finished.job.run.target_kind
    finished.job.work = lambda trainer: _restore_and_evaluate(trainer, checkpoint, about, choice, kind)
    with directory.temporary() as folder:
        (place := folder / "run").mkdir()
        result = launcher.launch(finished.job, place, quiet=True)
        told: JsonObject = (
            read_json(place / TOLD) if (place / TOLD).is_file() else {"samples": 0, "origin": "", "shares": {}}
        )  # of rank 0
    if result.status == "interrupted":
        raise Interrupted(str(result.error))
    if result.code:
        raise UserError(str(result.error).splitlines())
    return Evaluation(
        str(run_dir), int(checkpoint.name), choice.average or False, choice.split, result.metrics[choice.split]["final"],
        list(overrides), result.world_size, result.device, told["samples"], _source(finished.job, told["origin"]),
        told["shares"],
    )  # fmt: skip


def _place(data: Data) -> tuple[str, str] | None:
    """The setting for the file or folder of the data, and its value; None without one."""
    return next(((key, str(value)) for key in ("path", "root") if (value := getattr(data, key, None)) is not None), None)


def _on_other_data(job: Job, run_dir: Path) -> bool:
    """True if the command names another file or folder than the run's own."""
    place = _place(Data.of(job.run))
    if place is None:
        return False
    own = (recorded_environment(run_dir).get("machine_local") or {}).get(f"data.{place[0]}")
    return not (isinstance(own, str) and expanded(own).resolve() == Path(place[1]).resolve())


def _own_data(job: Job, overrides: Sequence[str], run_dir: Path, about: JsonObject) -> OwnData:
    """The run's facts about its own data, and the requested share of other data."""
    given = set(map(key_of, overrides))
    holdout = getattr(job.run.data, "holdout", None) if "data.holdout" in given else None
    trained_on = str((about.get("data") or {}).get("hash", ""))
    return OwnData(recall(about, run_dir), trained_on, holdout, "data.test" in given)


def _source(job: Job, origin: str) -> str:
    """The origin of the samples, in words."""
    data = Data.of(job.run)
    place = _place(data)
    named = job.run.named("data") if place is None else place[1]
    if data.own is not None and data.own.test:
        named = str(data.other_file())
    return f"{named}, {origin}" if origin else named


def _restore_and_evaluate(trainer: Trainer, checkpoint: Path, about: JsonObject, choice: Choice, kind: TargetKind | None) -> None:
    """Load the weights without training state, and evaluate them. Called on all ranks."""
    StopFlag.nothing_to_save()
    manifest.check_classes(about, trainer.writer.about)
    weights, state = worker.load(checkpoint, trainer.parallel)
    weights = chosen_weights(checkpoint, weights, state, choice.average or False)
    no_optimizer: JsonObject = {"param_groups": [], "state": {}}
    weights, state = trainer.parallel.shard_state_dict(weights, {**state, "optimizer": no_optimizer})
    load_weights(trainer.model, weights)
    trainer.precision.load_state_dict({})  # its own copies of the weights, if it keeps some
    trainer.batch.load_state_dict(state["batch"])
    if trainer.ema.active:
        trainer.ema.load_state_dict(state["ema"])
    trainer.owned.load_state_dict({"ranks": state.get("owned", {}).get("ranks", [])[:1]})
    trainer.progress.updates = state["progress"]["updates"]
    trainer.evaluator = evaluated = trainer.evaluator.on(choice.split)
    if trainer.parallel.world.rank == 0:
        told = {
            "samples": evaluated.samples(),
            "origin": evaluated.origins.get(choice.split, ""),
            "shares": evaluated.shares(kind),
        }
        write_json(trainer.run_dir / TOLD, told)
    with Rate("sample", None) as rate:  # of this rank's
        shown = rate if trainer.parallel.world.rank == 0 else lambda _: None
        evaluator = replace(trainer.evaluator, watch=_counting(shown))
        trainer.progress.record_evaluation(evaluator.evaluate(), None)


def _counting(show: Callable[[int], None]) -> StreamWatcher:
    """Show the number of delivered samples."""

    def watch(stream: Stream) -> Stream:
        samples = 0
        for batch in stream:
            samples += length(batch.x)
            show(samples)
            yield batch

    return watch
