"""Builds a Trainer from a run's options. The build order is written here and nowhere else, each line with its reason."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

import torch

from drivetrain.adapter import Adapter
from drivetrain.augment.base import Augment
from drivetrain.batch.base import Batch
from drivetrain.checkpointing import Checkpointing
from drivetrain.clip import Clip
from drivetrain.compile import Compile
from drivetrain.core.errors import UserError, refuse
from drivetrain.core.machine import files
from drivetrain.core.machine.device import clock_for
from drivetrain.core.machine.guards import check_batch
from drivetrain.core.options import horizon as horizons
from drivetrain.core.options import stages
from drivetrain.core.options.horizon import Horizon
from drivetrain.core.options.protocols import LogWriter
from drivetrain.core.options.selection import selected
from drivetrain.core.step.architecture import resting
from drivetrain.core.step.model_call import ModelCall
from drivetrain.core.step.modules import keep_in_evaluation, run_once
from drivetrain.core.step.step import Step
from drivetrain.core.step.trees import Tree, described, named_leaves, only_tensors, to
from drivetrain.core.typed import JsonObject
from drivetrain.core.user import state as owned
from drivetrain.core.user.state import OwnState
from drivetrain.data.base import Data, Splits
from drivetrain.debug.base import Debug
from drivetrain.ema.base import Ema
from drivetrain.engine import first_call, flops, input_checks, phased_step, summary
from drivetrain.engine.callbacks import Callbacks
from drivetrain.engine.context import RunContext
from drivetrain.engine.evaluator import Evaluator, evaluated_sets
from drivetrain.engine.flops import Mfu, number_format
from drivetrain.engine.noise_scale import NoiseScale, NoiseScaleStep
from drivetrain.engine.step import PlainStep
from drivetrain.engine.step_timer import StepTimer
from drivetrain.engine.summary import describe
from drivetrain.engine.trainer import Trainer
from drivetrain.engine.training_log import TrainingLog
from drivetrain.engine.update_step import ClosureStep, Passes, TwoPasses, UpdateStep, Weighed
from drivetrain.loader import Loader, Pipeline
from drivetrain.loader.base import FirstTokens
from drivetrain.loss import Loss
from drivetrain.loss.embedding import ComparingLoss
from drivetrain.metrics import Metric
from drivetrain.model import Model
from drivetrain.optimizer import Optimizer
from drivetrain.optimizer.algorithms.muon import ChainedOptimizer
from drivetrain.parallel import Parallel
from drivetrain.precision import Precision
from drivetrain.runtime import Runtime
from drivetrain.saving.options import Saving
from drivetrain.saving.writer import Writer
from drivetrain.scheduler import Scheduler
from drivetrain.stop import Stop
from drivetrain.surgery.base import Edit, apply_all
from drivetrain.surgery.sync_bn import partial_statistics

USUAL_OUTPUTS = ("logits", "output", "out", "prediction")
MORE_OUTPUTS = (
    "give its last layer more outputs. A class of yours (model=own) is told their number where it takes an argument `classes` or "
    "`num_classes`; one that takes it under another name gets it by model.kwargs"
)

logger = logging.getLogger(__name__)


@dataclass
class PreviousStage:
    """The objects that a stage takes over from the one before, such as the process group."""

    parallel: Parallel
    data: Splits | None  # None: the next stage reads its data anew
    timer: StepTimer
    callbacks: Callbacks


def build(context: RunContext, log_writers: Sequence[LogWriter], before: PreviousStage | None = None) -> Trainer:
    """Build one rank's trainer, ready to fit or to be restored. Raises UserError where model or data do not fit the run.

    `before` belongs to the preceding stage.
    """
    run = context.run
    # The device and the seed come before anything that allocates memory or draws random numbers.
    context.device, context.seed = Runtime.of(run).set_up_process(context.world), run.runtime.seed
    # The ranks join before anything is built, so that a difference between their configs ends the run here.
    parallel = context.parallel = Parallel.of(run).build(context) if before is None else before.parallel
    debug: Debug = Debug.of(run).build(context)
    earlier = None if before is None else context.findings  # from earlier stages
    context.findings = debug.report if earlier is None else lambda: [*earlier(), *debug.report()]
    precision = context.precision = debug.wrap_precision(Precision.of(run).build(context))
    batch = _load_data(context, debug, before.data if before is not None else None)
    world = parallel.data_world
    # The loss counts classes in the training data; its teacher is not wrapped, sharded or compiled.
    loss = context.loss = Loss.of(run).build(context)
    batch.together = loss.evaluated_together  # only now a user's loss has declared that it compares samples

    model, model_flops = _build_model(context, debug)
    if (dtype := precision.gathered_dtype()) is not None:
        computes_in = getattr(torch, dtype)
        context.train_data = context.train_data._replace(computes_in=computes_in)
        context.evaluated = {
            split: {name: pipeline._replace(computes_in=computes_in) for name, pipeline in sets.items()}
            for split, sets in context.evaluated.items()
        }
    # Compile before DDP, so that evaluation keeps the plain model. The first call is within DDP's forward: there torch splits
    # the compiled model at DDP's buckets (DDPOptimizer), so that all-reduces still overlap with the backward.
    compiler: Compile = Compile.of(run).build(context)
    takes_batches = context.model_call.taking_batches  # outermost, so that it is the same for training and evaluation
    compiled = compiler.apply(model, context.example, run.checkpointing.budget)
    forward = takes_batches(parallel.wrap_model(compiled, context))
    # The optimizer comes after every edit that may replace or move parameters; the average after the weights are final.
    with parallel.plain_parameters(model):
        phases = context.phases = phased_step.build(context)
        optimizer = context.optimizer = (  # with phases all of theirs as one, for schedules and checkpoints
            ChainedOptimizer(*(phase.optimizer for phase in phases))
            if phases
            else precision.build_optimizer(Optimizer.of(run), context)
        )
        ema = Ema.of(run).build(context)
    scheduler = Scheduler.of(run).build(context)
    # All ranks have initialised the same model; from here on each draws its own dropout, except where ranks share activations.
    rank_seed = Runtime.of(run).seed_rank(world)
    loader: Loader = Loader.of(run).build(context)
    context.read = lambda requests: loader.stream(context.train_data, requests, context.device, context.memory_format)
    batches = context.horizon.updates * batch.accumulation_steps
    _log(loader.autotune(context.train_data, batch.micro_batch(world), batches, context.device))
    loader.check((context.train_data, *(each for sets in context.evaluated.values() for each in sets.values())))

    noise, step = _step(context, loss, batch, compiler, forward, phases)
    # Unfreezing comes before an update, and debugging hooks see all of it.
    step = debug.wrap_step(Model.of(run).wrap_step(step, context))
    eval_weights = precision.eval_weights(Optimizer.of(run), optimizer)
    meters, selection = [metric.build(context) for metric in Metric.all_of(run)], selected(run)
    timer = StepTimer(compiler.warmup, clock_for(context.device)) if before is None else before.timer
    timer.warmup = compiler.warmup
    saving = Saving.of(run).build(context)
    mfu = Mfu(model_flops, context.device, number_format(model, precision.autocast_dtype()), parallel.world.size)
    log = TrainingLog(log_writers, context.progress, parallel, timer, context.device, mfu, context.parts, noise, phases)
    context.log_image = log.image
    # Metrics measure in the data's units.
    units = (lambda values: values) if context.data.units is None else context.data.units.to(context.device)
    evaluator = Evaluator(
        model=model, forward=takes_batches(parallel.inference_model(model)), eval_weights=eval_weights,
        ema=ema, loss=loss, meters=meters, units=units, measured=context.model_call.measured, selected=selection.name,
        precision=precision,
        parallel=parallel, batch=batch, loader=loader, sets=context.evaluated, set=next(iter(context.evaluated)),
        device=context.device, memory_format=context.memory_format, max_batches=run.debug.eval_batches,
        origins=context.data.origins,
    )  # fmt: skip
    context.eval_model = evaluator.holding
    # Callbacks see whole updates, of the step with all its wrappers.
    callbacks = Callbacks.build(context, log, before.callbacks if before is not None else None)
    own = OwnState({**owned.of_run(context, meters), **context.kept}, parallel)
    if saving.active:
        own.check()
    trainer = Trainer(
        model=model, step=compiler.checked(callbacks.wrap_step(step)), selection=selection, optimizer=optimizer,
        scheduler=scheduler, precision=precision, stopping=Stop.of(run).build(context), parallel=parallel, ema=ema, batch=batch,
        loader=loader,
        train_data=context.train_data, taken=context.train_data.taken(world, context.on_exit), evaluator=evaluator,
        device=context.device,
        memory_format=context.memory_format,
        seed=context.seed, drop_last=run.data.drop_last, epochs=run.values["epochs"], max_updates=context.horizon.updates,
        log_every=run.values["log_every"], evaluate_every=run.values["evaluate_every"], saving=saving, run_dir=context.run_dir,
        writer=Writer(context.run_dir, saving, parallel, eval_weights, describe(run, context.data)), progress=context.progress,
        timer=timer, log=log, callbacks=callbacks, owned=own, compiler=compiler, compile_seconds=compiler.seconds,
        rank_seed=rank_seed,
    )  # fmt: skip
    if batch.preallocate:
        trainer.preallocate()
    # Stream watchers come last, so that they do not see the dry run.
    checks = input_checks.watchers(context, trainer, model_flops.reason)
    trainer.stream_watchers = [*checks, log.watch, *debug.stream_watchers()]
    return trainer


def _step(
    context: RunContext,
    loss: Loss,
    batch: Batch,
    compiler: Compile,
    forward: Callable[..., Tree],
    phases: Sequence[phased_step.BuiltPhase],
) -> tuple[NoiseScale | None, Step]:
    """Compose the step, from the inside out, and the measurement of the noise scale.

    The step of one process, gradient synchronisation, one graph of both, and a whole update for losses that need it: each of
    its micro-batches passes through all of those. An update with phases has such a step for each of them.
    """
    run, model, parallel, runtime = context.run, context.model, context.parallel, Runtime.of(context.run)
    parameters = [p for p in model.parameters() if p.requires_grad]

    def graph(loss: Loss, clip: Callable[[], bool | None]) -> Step:
        of_ranks = parallel.wrap_loss(loss, model, context)
        given = forward, of_ranks, context.precision, context.optimizer, clip
        wrapped: Step = parallel.wrap_step(PlainStep(*given, lambda: runtime.zero(parameters)), context)
        return compiler.wrap_step(wrapped, context)

    if not phases:
        clip = Clip.of(run).build(context)
        noise, step = _with_noise_scale(graph(loss, clip), batch, parameters, context)
        return noise, _of_update(parallel.wrap_watched(step, context), loss, clip, forward, context)
    context.sums.clear()  # they belong to each phase's own gradients
    of_run = context.optimizer, context.precision
    for phase in phases:
        context.optimizer, context.precision, of_phase = phase.optimizer, phase.precision, loss.of_phase(phase.name)
        with phased_step.alone(phase.parameters, parameters):
            phase.step = _of_update(graph(of_phase, phase.clip), of_phase, phase.clip, forward, context)
    context.optimizer, context.precision = of_run
    return None, phased_step.PhasedStep(phases, parameters, context.progress)


def _of_update(
    step: Step, loss: Loss, clip: Callable[[], bool | None], forward: Callable[..., Tree], context: RunContext
) -> Step:
    """Wrap the step for a loss that has to see all micro-batches of an update, or for an optimizer that runs them itself."""
    passes: Passes | None = Weighed(loss, context.parallel) if loss.counted or _rows_may_lack(context) else None
    if isinstance(loss, ComparingLoss):
        passes = TwoPasses(loss, forward, context.model, context.precision)
    if context.run.optimizer.takes_closure:
        owners = [context.model, *context.loss.keeps().values()]
        return ClosureStep(step, passes or Passes(), context.optimizer, clip, owners, context.parallel, context.parts)
    return step if passes is None else UpdateStep(step, passes)


def _rows_may_lack(context: RunContext) -> bool:
    """Return whether a user's function makes the batches: it may leave samples out, so the actual rows count."""
    code = context.train_data.own_code
    return code is not None and code.keeps().get("data.collate") is not None and not context.batch.weighs_by_length


def _with_noise_scale(
    step: Step, batch: Batch, parameters: Sequence[torch.nn.Parameter], context: RunContext
) -> tuple[NoiseScale | None, Step]:
    """Measure the gradient noise scale where updates have several micro-batches whose gradients are independent estimates."""
    parallel, compiler = context.parallel, context.run.compile
    several = batch.accumulation_steps > 1 or batch.grow_every is not None or parallel.data_world.size > 1
    # A graph of the whole step has used and cleared the gradients when it returns, and calls no hooks. Within a compiled
    # forward nothing can watch the weights that are gathered for it.
    watched = not compiler.captures_step and (parallel.keeps_own_gradients or not compiler.active)
    once = not isinstance(context.loss, ComparingLoss) and not context.run.optimizer.takes_closure  # each micro-batch is run once
    if not several or not parallel.own_gradients or not watched or not once:
        return None, step
    noise = NoiseScale(context.device, batch.size)
    return noise, NoiseScaleStep(step, noise, parameters, parallel)


def _for_model(data: Splits, views: int, loss: Loss) -> Splits:
    """The data as a model gets it: the loss may pass one view of a sample at a time, or need several outputs for each number."""
    shape = loss.input_shape((views, *data.shape) if views > 1 else data.shape)
    example = data.example
    if shape != data.shape and isinstance(example, torch.Tensor):  # views made by the user's data: one view is an input
        example = example.flatten(0, 1)[: len(example)]
    return replace(data, classes=loss.outputs(data.classes), shape=shape, example=example)


def _load_data(context: RunContext, debug: Debug, loaded: Splits | None) -> Batch:
    """Load the data, if no stage has, and build the batch. Sample lengths may set its size, and so the run's updates."""
    run, loss = context.run, Loss.of(context.run)
    context.loaded = loaded or Data.of(run).load_sets(context.device)
    data = context.data = _for_model(context.loaded, run.data.views, loss)
    known_before = horizons.run_horizon(run) is not None
    batch: Batch = Batch.of(run).build(context)
    bytes_each = 4 if context.device.type == "cpu" else 1  # bytes of a number: images are sent to a device as uint8
    check_batch(
        run.named("batch"), batch.micro_batch(context.parallel.data_world), data.shape, bytes_each, context.world.local_size
    )
    context.batch, context.horizon = batch, _horizon(context, batch, known_before)
    steps = tuple(Augment.all_of(run)) if run.debug.augments else ()
    refuse(_cannot_augment(context, steps, context.loaded.shape))
    shortened = (FirstTokens(run.data.reads_up_to),) if run.data.reads_up_to is not None else ()
    drawn = (*shortened, *loss.steps(data))
    about: JsonObject = {"images": data.images, "views": run.data.views, "masks": run.data.targets == "mask"}
    train = Pipeline(data.train, (*drawn, *steps), data.normalize, context.seed, data.classes, batch.pad_to, **about)
    evaluated = evaluated_sets(data, (*drawn, *(steps if run.data.views > 1 else ())), context.seed, about)
    context.train_data, context.evaluated = train, debug.choose_data(train, evaluated)
    if context.writes_files:
        for name, text in data.files.items():
            files.write_text(context.run_dir / name, text)
    return batch


def _cannot_augment(context: RunContext, steps: Sequence[Augment], shape: Tree) -> list[str]:
    """Return why the run's inputs, of this shape, cannot be augmented: only plain tensors, and the images of a dict can."""
    data, setting = context.data, context.run.named("augment")
    if not isinstance(data.two_samples(torch.device("meta")), torch.Tensor) and steps:
        if data.images is None:
            return [
                f"{setting} changes images, and the inputs of a sample are several, none of them named `image`: set augment=[]"
            ]
        if any(step.mixes for step in steps):
            return [f"{setting} mixes whole samples, and the inputs of a sample are several: leave the mixing ones out"]
        shape = shape[data.images]
    return [problem for step in steps for problem in step.validate_shape(context.run, shape)]


def _build_model(context: RunContext, debug: Debug) -> tuple[torch.nn.Module, flops.ModelFlops]:
    """Build the model: on its device, edited, in the run's precision, with activation checkpointing and sharding applied.

    Return it and the operations that a sample takes.
    """
    run, parallel, precision = context.run, context.parallel, context.precision
    world = parallel.data_world
    model = _edited_model(context)
    # Adapters come after all edits, on the final layers.
    _log(Adapter.of(run).apply(model, context))
    # Parameters are frozen once they are final, and before every use of the trainable ones: the count of operations,
    # master weights, sharding, DDP and the optimizer.
    _log(Model.of(run).freeze_parameters(model, context))
    context.loss.add_parameters(model)  # never frozen
    # Counted before activation checkpointing, which recomputes some, and before sharding, which leaves a part here.
    model_flops = _count_flops(context, model)
    if model_flops.output is not None:
        _check_output(context, context.model_call.output_of(model_flops.output))
    first_call.check_split(context, model)
    model_flops = model_flops._replace(output=None)  # it may be large, and its graph holds the parameters
    model = precision.convert(model, context.example)
    # Gradcheck copies the modules, so it runs before anything patches their forwards.
    debug.check_model(model, context.loss, context.train_data)
    _log(context.loss.read(model, context))
    # Activation checkpointing patches forwards in place, inside what compile traces and DDP wraps; parameter names stay plain.
    Checkpointing.of(run).apply(model)
    # Sharding is in place too; compile traces the sharded modules.
    parallel.shard(model, precision.gathered_dtype(), context.example)
    _log(partial_statistics(model, context.batch.micro_batch(world), context.batch.size(0), world.size))
    context.model = model
    return model, model_flops


def _edited_model(context: RunContext) -> torch.nn.Module:
    """Build the model on its device and edit it; fill in the example and the memory format."""
    run, data = context.run, context.data
    inputs = data.two_samples(context.device)
    if problem := Model.of(run).input_problem(inputs):
        raise UserError(f"{run.named('model')} {problem} of {run.named('data')}: choose a model that takes them")
    model: torch.nn.Module = Model.of(run).build(context)
    for name in resting(model) if context.trains else ():
        keep_in_evaluation(model.get_submodule(name))
        logger.info("%s stays in evaluation mode: the model has frozen it and put it there", name)
    # Edits of the module tree come first: every later step works on the final modules. The memory format is one of
    # them; it is set before compiling, which specialises on strides.
    formats = [e.memory_format for e in run.surgery if e.memory_format is not None]
    context.memory_format = getattr(torch, formats[-1] if formats else "contiguous_format")
    # The form of the forward's call is decided here, for every caller: the step, the evaluation, compilers and checks.
    context.model_call = ModelCall.chosen(
        run.values["forward_input"],
        inputs,
        None if (part := run.values["forward_output"]) is None else str(part),
        run.loss.takes_whole,
    )
    context.example = _example(context, model, inputs)
    _log(apply_all(Edit.all_of(run), model, context.example))
    return model


def _example(context: RunContext, model: torch.nn.Module, inputs: Tree) -> Tree:
    """Return the model's arguments in training for two samples.

    Raises UserError where the model cannot take them. For a finished run, and for unreadable samples (which end the first
    step), these are zeros.
    """
    data, runs_model = context.data, context.trains and context.loss.runs_model
    if data.call is not None and not context.trains:
        return to(data.call, context.device)
    if not runs_model:
        context.model_call.check(model, inputs)
    if context.trains:
        context.first_call = partial(first_call.of, context)
        try:
            context.first = first_call.read(context, torch.arange(first_call.samples(context)))
        except (UserError, OSError) as error:
            logger.debug("the first samples cannot be read: %s", error)
        else:
            arguments = first_call.record(context, model, context.first)
            if runs_model and only_tensors(arguments):
                data.call = arguments
            return arguments
    return context.model_call.arguments(inputs)


def _check_output(context: RunContext, output: object) -> None:
    """Raise UserError where the loss cannot take the model's output for two samples."""
    run, loss = context.run, context.loss
    if isinstance(output, torch.Tensor):
        if problem := loss.output_problem(tuple(output.shape), context.data.classes):
            raise UserError(f"{run.named('model')} has {problem} of {run.named('data')}: {MORE_OUTPUTS}")
    elif not loss.takes_trees and not (loss.compares_samples and isinstance(output, tuple | list)):
        parts = [name for name, _ in named_leaves(output)]
        part = next((name for name in USUAL_OUTPUTS if name in parts), parts[0] if parts else "NAME")
        raise UserError(
            f"{run.named('loss')} takes one tensor, and {run.named('model')} returns {described(output)}: set "
            f"forward_output={part}, or loss=own, with a function that takes it"
        )
    if context.without_values is None and not loss.keeps():
        _try_loss(context, output)


def _try_loss(context: RunContext, output: Tree) -> None:
    """Raise UserError where the loss of the model's output for the first samples cannot be computed."""
    loss, first = context.loss, context.first
    if first is None or not isinstance(first.y, torch.Tensor) or loss.problem(first.y, context.data.classes):
        return  # the first batch names the wrong sample
    try:
        with suppress(torch.OutOfMemoryError), torch.no_grad():
            loss.evaluate(lambda _: output, first, False)
    except UserError:
        raise
    except Exception as error:
        run, said = context.run, next(iter(str(error).strip().splitlines()), "")
        raise UserError(
            f"{run.named('loss')} cannot be computed from the output of {run.named('model')}, {described(output)}, and the "
            f"targets of {run.named('data')}, {described(first.y)} ({type(error).__name__}: {said}): set another loss or model"
        ) from error


def build_for_inference(context: RunContext, data: Splits) -> torch.nn.Module:
    """Build a run's model alone, in evaluation mode: no optimizer, no loader, no ranks. Load its weights afterwards."""
    run = context.run
    context.device, context.seed = Runtime.of(run).set_up_process(context.world), run.runtime.seed
    context.trains = False
    context.parallel, context.data = Parallel.of(run).build(context), data
    precision = context.precision = Precision.of(run).build(context)
    model = _edited_model(context)
    Loss.of(run).copied().add_parameters(model)
    converted: torch.nn.Module = precision.convert(model, context.example)
    return converted.eval()


def _count_flops(context: RunContext, model: torch.nn.Module) -> flops.ModelFlops:
    """Count the operations that a sample takes.

    Called on all ranks, because a forward may have collectives, as with synchronized BatchNorm. Raises UserError where the
    model cannot take the samples of the run.
    """
    lengths, shape, reason = context.data.train.lengths, context.data.shape, ""
    longest = shape[0] if isinstance(shape, tuple) and shape else 0
    # Half of the samples are shorter than most: their operations would be counted too high.
    several = lengths is not None and len(lengths) and (context.data.example is not None or int(lengths.median()) + 1 < longest)
    if several or context.train_data.pad_to > 1:
        reason = f"{context.run.named('batch')}: samples of different lengths take different operations"
    elif context.loss.runs_model and context.run.values["phases"]:
        reason = "each phase runs the model itself"
    counted = first_call.count(context, model)
    if counted.needs_two:
        refuse(summary.single_sample(context, context.batch, counted.needs_two))
    if counted.failed and context.without_values is None:
        # Raise the model's own error, with its line of code, unless the counting failed. After out of memory a micro-batch is
        # halved.
        try:
            with suppress(torch.OutOfMemoryError), context.precision.autocast():
                run_once(model, context.example, training=True)
        except UserError as error:
            raise error.__cause__ or error from None
    return counted._replace(per_sample=None, reason=reason) if reason else counted


def _horizon(context: RunContext, batch: Batch, known_before: bool) -> Horizon:
    """Compute the run's length. Checks the schedule if the length was not known before the data was read. Raises UserError."""
    run, samples = context.run, batch.order.length
    if samples < context.parallel.data_world.size:
        raise UserError(f"{context.parallel.data_world.size} ranks, but only {samples} training samples: lower parallel.nproc")
    horizon = horizons.run_horizon(run, samples, batch)
    if horizon is None:
        raise UserError(summary.too_few_samples(batch, run.values["epochs"], samples))
    if not known_before and run.debug.updates is None:
        refuse([*stages.boundary_problems(run, horizon), *Scheduler.of(run).horizon_problems(horizon)])
        _log(Scheduler.of(run).horizon_advice(horizon, run))
    return horizon.at_most(run.debug.updates)


def _log(lines: Iterable[str]) -> None:
    for line in lines:
        logger.info(line)
