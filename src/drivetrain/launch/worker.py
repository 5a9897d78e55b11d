"""One rank of a run: build its trainer, restore it, fit it, and return its result."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from drivetrain.compile import Compile
from drivetrain.core.errors import (
    BAD_CONFIG,
    DIVERGED,
    DONE,
    FAILED,
    INTERRUPTED,
    PEER_GONE,
    CallbackError,
    Diverged,
    Interrupted,
    UserError,
    is_peer_failure,
    wants_traceback,
    without_logins,
)
from drivetrain.core.machine import accelerators, files, process
from drivetrain.core.machine.signals import StopFlag
from drivetrain.core.options import stages
from drivetrain.core.options.option import RunSpec
from drivetrain.core.options.protocols import LogWriter
from drivetrain.core.typed import JsonMapping, JsonObject
from drivetrain.core.user import code as user_code
from drivetrain.core.world import World
from drivetrain.data import Data
from drivetrain.engine import kernels
from drivetrain.engine.context import RunContext
from drivetrain.launch import judgement, machine_limits
from drivetrain.launch.job import Job
from drivetrain.loader import Loader
from drivetrain.logger import Logger
from drivetrain.run import environment, identity
from drivetrain.run.result import Result
from drivetrain.saving import manifest, space
from drivetrain.saving.content import Malformed
from drivetrain.ui import notebook, plots, terminal
from drivetrain.ui.output import echo_traceback

if TYPE_CHECKING:
    import torch

    from drivetrain.engine.staged_run import StagedRun
    from drivetrain.engine.trainer import Trainer
    from drivetrain.parallel import Parallel

AVERAGED = "averaged.safetensors"
JUMP = 2  # factor of the learning rate that counts as much higher
Found = tuple[JsonMapping, Mapping[str, object]]  # the metrics of an evaluation, and its tables

NO_GRADIENT = (
    "the loss does not depend on trained weights: compute it from the model's output, without no_grad, detach, item, "
    "argmax or comparisons"
)
logger = logging.getLogger(__name__)


def load(checkpoint: Path, parallel: Parallel) -> tuple[dict[str, torch.Tensor], JsonObject]:
    """A checkpoint's weights and state, on every rank. Rank 0 sends them if machines share no file system."""
    from drivetrain.saving import checkpoint_io

    here = parallel.gather_object(checkpoint.is_dir())
    if parallel.broadcast_object(all(here)):
        return checkpoint_io.load(checkpoint, parallel)
    loaded: Any = None
    if parallel.world.rank == 0:
        try:
            loaded = checkpoint_io.load(checkpoint)
        except Exception as error:  # all ranks raise it, otherwise they would wait for rank 0
            loaded = error
    if isinstance(loaded := parallel.broadcast_object(loaded), Exception):
        raise loaded
    return loaded  # type: ignore[no-any-return]


def _attempt(parallel: Parallel, work: Callable[[], object]) -> tuple[Any, Exception | None, str | None]:
    """Do `work` on all ranks. Return its value, this rank's error, and the message of the first rank that failed.

    Raises only errors that the operator can mend, such as a changed config.
    """
    value, error = None, None
    try:
        value = work()
    except Exception as raised:
        if isinstance(raised, UserError) and not isinstance(raised, Malformed):
            raise
        error = raised
    told = parallel.gather_object(None if error is None else f"{type(error).__name__}: {error}")
    return value, error, parallel.broadcast_object(next((line for line in told if line), None))


def restore(staged: StagedRun, checkpoint: Path) -> float:
    """Continue from a checkpoint, or from an earlier one if this one does not match its hashes.

    Return the learning rate that its schedule gave to the next update. Called on all ranks. Without a valid checkpoint, raises
    UserError with the newest one's error.
    """
    parallel, first = staged.trainer.parallel, None
    newest: Path | None = checkpoint
    while newest is not None:
        found, error, wrong = _attempt(parallel, partial(load, newest, parallel))
        if wrong is None:  # all ranks restore or none, because entering another stage takes all of them
            found, error, wrong = _attempt(parallel, partial(_restore, staged, *found))
        if wrong is None:
            return float(found)
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


def _restore(staged: StagedRun, weights: JsonObject, state: JsonObject) -> float:
    """Restore a loaded checkpoint; return its learning rate, which is read first, so that a malformed one changes nothing."""
    lr = float(state["optimizer"]["param_groups"][0]["lr"])
    staged.restore(weights, state)
    return lr


def rate_jump(trainer: Trainer, before: float) -> str:
    """The notice if a run resumes at a much higher learning rate, because its schedule now covers a longer run.

    `before` is the rate of the last update by the checkpoint's own schedule.
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


def _record(result: Result, name: str, evaluation: str, found: Found, trainer: Trainer | None = None) -> None:
    """Note the figures and the tables of an evaluation of the set `name`: final, best or averaged; log it by a trainer."""
    metrics, tables = found
    result.metrics.setdefault(name, {})[evaluation] = dict(metrics)
    if tables:
        result.tables.setdefault(name, {})[evaluation] = dict(tables)
    if trainer is not None:
        trainer.log.write("evaluate", set=name, weights=evaluation, **{k: v for k, v in metrics.items() if k != "update"})


def _evaluate(trainer: Trainer, result: Result, name: str, evaluation: str, **more: object) -> None:
    """Evaluate a set on a trainer's current weights, and note and log its figures."""
    evaluator = trainer.evaluator.on(name)
    metrics = evaluator.evaluate()
    _record(result, name, evaluation, ({**metrics, **more}, evaluator.tables), trainer)


def evaluate_kept(staged: StagedRun, result: Result, run_dir: Path) -> None:
    """Evaluate a completed run's kept checkpoints. Called on all ranks, last, because it changes the trainer's weights.

    It evaluates the test set on the best checkpoint, and both sets on the mean of the kept checkpoints' weights.
    """
    from drivetrain.saving import checkpoint_io

    trainer = staged.trainer
    saving, parallel, progress = trainer.saving, trainer.parallel, trainer.progress
    best = progress.best.get("update")
    if best == progress.updates and "final" in result.metrics["test"]:  # the last weights are the best ones
        last = {**result.metrics["test"]["final"], "update": best}
        _record(result, "test", "best", (last, result.tables.get("test", {}).get("final", {})))
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
        _evaluate(trainer, result, "test", "best", update=best)


def _evaluate_average(trainer: Trainer, result: Result, kept: Sequence[Path], run_dir: Path) -> None:
    """Give the model the mean of the checkpoints' weights, write it to averaged.safetensors and evaluate it on every set.

    Statistics of BatchNorm are averaged too; counters come from the newest checkpoint.
    """
    from drivetrain.core.machine.device import sum_dtype
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
    with evaluator.eval_weights():  # the model then holds the weights of an evaluation
        trainer.model.load_state_dict(weights)
        for name in dict.fromkeys((evaluator.set, "test")):
            each = replace(evaluator.on(name), tables={})
            _record(result, name, "averaged", (each.metrics(), each.tables), trainer)
        full, _ = parallel.full_state_dict(trainer.model, state)
    if parallel.world.rank == 0:
        checkpoint_io.write_weights(full, run_dir / AVERAGED)
        logger.info("the mean of %d checkpoints' weights is in %s", len(kept), run_dir / AVERAGED)


LAST_WRITE_S = 30.0  # wait for a checkpoint that is still being written when the run fails


class RunWriter(LogWriter, Protocol):
    """A logger or the terminal's progress line: takes a run's records until it is closed."""

    def close(self, status: str) -> None:
        """The run has ended: completed, failed, diverged or interrupted."""


def run_rank(job: Job, world: World, run_dir: Path, stop: StopFlag, quiet: bool) -> Result:
    """Train one rank to its end; its result. Every exception becomes one.

    Under another launcher, a rank other than 0 does not know the run's directory: its `run_dir` is NO_RUN_DIR.
    """
    result = Result(
        overrides=[environment.redact(word) for word in job.composed.overrides],
        config_hash=job.config_hash,
        world_size=world.size,
    )
    writers: list[RunWriter] = []
    staged: StagedRun | None = None  # it has another trainer in each stage
    config = identity.without_machine_local(job.composed, job.not_compared)
    run = job.run if job.work is None else stages.without(job.run)  # the work does not train, it only reads the run's config
    context = RunContext(run, world, run_dir, job.config_hash, config, resumed=job.checkpoint is not None)
    try:
        staged = _build(job, context, writers, quiet)
        result.resumed_at = context.progress.updates if job.checkpoint is not None else None
        if job.work is None:
            _train(staged, stop, result)
        else:
            job.work(staged.trainer)
        result.status, result.code = "completed", DONE
    except (Exception, SystemExit, KeyboardInterrupt) as error:
        result.status, result.error, result.code = _failure(error, job, run_dir, staged)
    if staged is not None:
        trainer = staged.trainer
        _end_callbacks(trainer, result)
        trainer.writer.finish(LAST_WRITE_S)
        if result.status != "completed" or job.work is not None:  # otherwise it is recorded already
            _record_measurements(result, trainer)
        _count_skipped(result, trainer, world, run_dir)
    for writer in writers:
        writer.close(result.status)
    context.on_exit.close()
    _report(context.findings(), world, run_dir)
    if staged is not None and not result.code:
        staged.trainer.parallel.shutdown()  # a failed rank must not wait here for the others
    return result


def _train(staged: StagedRun, stop: StopFlag, result: Result) -> None:
    """Train to the end, evaluate the kept weights, and fill in the result."""
    staged.trainer.callbacks.start()
    if result.resumed_at is not None:
        staged.trainer.log.write("resume")  # so that a reader leaves out the pause before it
    used_before = accelerators.used(staged.context.device)
    staged.fit(stop)
    trainer = staged.trainer
    result.energy_joules = trainer.parallel.energy(trainer.device, used_before)
    trainer.callbacks.raise_error()
    if trainer.saving.active:
        StopFlag.nothing_to_save()
    _record_measurements(result, trainer)
    if trainer.evaluator.set != "test":  # otherwise the run was evaluated on it all along
        _evaluate(trainer, result, "test", "final")
    trainer.callbacks.end("completed")
    trainer.callbacks.raise_error()
    result.remarks += trainer.log.exploded(trainer.progress.final)
    evaluate_kept(staged, result, trainer.run_dir)
    compared = list(judgement.against_baseline(result, trainer, staged.context))
    if trainer.parallel.world.rank == 0:
        from drivetrain.data.base import fingerprint
        from drivetrain.launch.batch_plan import write_plan

        # Confusion matrices are shown in the loggers that take pictures.
        for name, table in plots.of_result(result.tables)[1].items():
            if plots.is_confusion(table):
                trainer.log.image(name, plots.draw(table, trainer.run_dir / "images" / f"{name}.png"))
        result.data = trainer.writer.data or fingerprint(trainer.train_data.source)
        write_plan(trainer.run_dir, trainer.batch, trainer.epochs)
        result.shares = trainer.evaluator.on("test").shares(staged.context.run.target_kind)
        of_run = result.remarks or judgement.of_curves_and_test(result, trainer)  # a diverged run needs no further remarks
        better, others = ([line for is_better, line in compared if is_better is which] for which in (True, False))
        result.remarks = [*better, *of_run, *others]
        for remark in result.remarks:
            logger.info("%s", remark)


def _failure(error: BaseException, job: Job, run_dir: Path, staged: StagedRun | None) -> tuple[str, str, int]:
    """The status, error and exit code of a rank that an exception ended."""
    if wants_traceback():
        echo_traceback(error)
    if isinstance(error, RuntimeError):
        try:  # torch's signal handler raises a worker's death anywhere, even between two batches
            Loader.of(job.run).raise_if_worker_died(error)
        except Interrupted as interrupted:
            error = interrupted
    if refusal := _refusal(error, job.run):
        return "failed", refusal, BAD_CONFIG
    if isinstance(error, Diverged):
        return "diverged", str(error) if staged is None else kernels.explained(error, staged.trainer), DIVERGED
    if isinstance(error, Interrupted | KeyboardInterrupt):
        why = str(error) or "stopped by the keyboard"
        if job.work is not None:  # nothing to save: it is repeated as a whole
            return "interrupted", why, INTERRUPTED
        saved = isinstance(error, Interrupted) and error.saved
        can_resume = saved or bool(manifest.checkpoints(run_dir))
        hint = f": go on with resume={run_dir}" if can_resume else "" if job.run.saving.active else ": saving=none kept nothing"
        return "interrupted", why + hint, INTERRUPTED if can_resume else FAILED
    if (explained := machine_limits.explain(error) or space.explain(error, run_dir)) is not None:
        return "failed", explained, FAILED
    told = f"{user_code.told(error)}{Compile.of(job.run).advice(error)}"
    if run_dir.is_dir():
        with contextlib.suppress(OSError), files.opened(run_dir / "log.txt", "a") as file:
            echo_traceback(error, file)
        told += f" (traceback in {run_dir / 'log.txt'})"
        if isinstance(error, CallbackError) and manifest.checkpoints(run_dir):
            told += f": the run is saved, go on with resume={run_dir}"
    elif is_peer_failure(told):
        logger.error(PEER_GONE)
    elif not wants_traceback():
        echo_traceback(error)
    return "failed", without_logins(told), FAILED


def _refusal(error: BaseException, run: RunSpec) -> str:
    """The reason of a known limit or a UserError, with the setting to change; else ""."""
    if cannot := Compile.of(run).cannot(error):
        return f"{run.named('compile')} {cannot}"
    if "does not require grad and does not have a grad_fn" in str(error):
        return NO_GRADIENT
    return str(error) if isinstance(error, UserError) else ""


def _end_callbacks(trainer: Trainer, result: Result) -> None:
    """Notify the callbacks of an incomplete run. Its error stays the cause, whatever they raise now."""
    callbacks = trainer.callbacks
    if result.status != "completed" and callbacks.error is None:
        callbacks.end(result.status)
        if callbacks.error is not None:
            logger.error("%s", callbacks.error)


def _report(lines: list[str], world: World, run_dir: Path) -> None:
    """Log the findings of debugging, and write them to debug.txt."""
    if world.rank != 0 or not lines:
        return
    for line in lines:
        logger.warning("%s", line)
    with contextlib.suppress(OSError):  # a full disk loses the copy, not the run
        files.write_text(run_dir / "debug.txt", "".join(line + "\n" for line in lines))


def _build(job: Job, context: RunContext, writers: list[RunWriter], quiet: bool) -> StagedRun:
    """This rank's run, restored if the job has a checkpoint. On rank 0 the loggers start and go into `writers`."""
    from drivetrain.engine import summary
    from drivetrain.engine.staged_run import StagedRun
    from drivetrain.logger.base import guarded
    from drivetrain.logger.files import Files

    staged = StagedRun(context, writers)
    staged.build()
    if (checkpoint := staged.trainer.parallel.broadcast_object(job.checkpoint)) is not None:
        own = staged.trainer.parallel.broadcast_object(manifest.about(checkpoint) if context.world.rank == 0 else {})
        if not context.run.values["resume_changed"]:
            manifest.check_classes(own, staged.trainer.writer.about)
        rate = restore(staged, checkpoint)
        if stages.number_that_made(staged.ends, context.progress) == staged.number:  # else the next stage may have other data
            staged.trainer.writer.data = own.get("data")
        if jump := rate_jump(staged.trainer, rate):
            logger.warning("%s", jump)
    if job.attach is not None:
        job.attach(staged.trainer)
    if context.world.rank == 0:
        writers.append(guarded("files", Files(), context))  # always: resume and report read its files
        named = zip(job.run.names("logger"), Logger.all_of(job.run), strict=True)
        writers.extend(guarded(name, each, context) for name, each in named if not isinstance(each, Files))  # each as it starts
        trainer = staged.trainer
        if not quiet:
            line = terminal.ProgressLine(trainer.max_updates, trainer.epochs, context.progress.updates)
            writers += [line, *notebook.live_charts(trainer.max_updates, trainer.selection.name)]
        writers.append(trainer.callbacks)  # last, so that all files of the run are written
        doubts = list(context.data.doubts) if job.work is None or Data.of(job.run).own is not None else []
        if job.work is None:
            logger.info("%s", summary.line(context, trainer))
            doubts += summary.advice(trainer)
        for doubt in doubts if not job.told else ():
            logger.warning("%s", doubt)
    return staged


def _record_measurements(result: Result, trainer: Trainer) -> None:
    """Fill in metrics, counts, times and memory."""
    from drivetrain.core.machine.device import peak_memory

    progress, timer = trainer.progress, trainer.timer
    result.metrics = {trainer.evaluator.set: {"final": progress.final, "best": progress.best}}
    result.metrics.setdefault("test", {})
    result.selection = trainer.selection.record()
    if tables := trainer.evaluator.tables or progress.tables:  # an already finished run is not evaluated again
        result.tables = {trainer.evaluator.set: {"final": tables}}
    result.stopped, result.target = trainer.stopping.reason, trainer.stopping.target
    result.batch, result.updates = trainer.batch.found, progress.updates
    result.epochs = progress.epoch
    if progress.window:
        result.epochs += progress.window / trainer.batch.updates(trainer.batch.order.length, progress.epoch, trainer.drop_last)
    result.device, result.device_name = trainer.device.type, environment.device_name(trainer.device)
    result.peak_memory_bytes, result.own_process = peak_memory(trainer.device), process.of_one_run
    result.time_to_first_step_s = timer.to_first_step
    if (steady := timer.steady()) is not None:
        _, result.data_wait_fraction = steady
    if (rate := timer.rate(progress.samples)) is not None:
        result.samples_per_second = rate
        result.mfu, result.mfu_note = trainer.log.mfu.at(rate), trainer.log.mfu.note()
    if (percentiles := timer.percentiles()) is not None:
        result.step_ms_p50, result.step_ms_p95 = percentiles
    result.flops_per_sample = trainer.log.mfu.model.per_sample
    result.compile_s = trainer.compile_seconds()


def _count_skipped(result: Result, trainer: Trainer, world: World, run_dir: Path) -> None:
    """If the data may skip samples, count the distinct unreadable ones of all ranks; their names go to log.txt.

    An incomplete run counts only this rank's samples: the others may be gone.
    """
    evaluated = (pipeline for sets in trainer.evaluator.sets.values() for pipeline in sets.values())
    sources = [pipeline.source for pipeline in (trainer.train_data, *evaluated)]
    found = [names for source in sources if (names := source.skipped()) is not None]
    if not found:
        return
    mine = [name for names in found for name in names]
    ranks = trainer.parallel.gather_object(mine) if result.status == "completed" else [mine]
    names = sorted({name for rank in ranks for name in rank})
    result.skipped_samples = len(names)
    if world.rank == 0 and names:
        more = " …" if len(names) > 1 else ""
        logger.warning("%d samples could not be read and were skipped: %s%s", len(names), names[0], more)
        with contextlib.suppress(OSError), files.opened(run_dir / "log.txt", "a") as file:
            file.writelines(f"skipped: {name}\n" for name in names)
