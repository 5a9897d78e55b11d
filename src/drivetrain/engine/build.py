"""Config → Trainer: the only owner of the build order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from drivetrain import surgery
from drivetrain.core import horizon as horizons
from drivetrain.core.errors import UserError
from drivetrain.core.horizon import Horizon
from drivetrain.core.option import RunSpec
from drivetrain.core.world import World
from drivetrain.engine import dry_run, input_checks
from drivetrain.engine.step_timer import StepTimer
from drivetrain.engine.trainer import Trainer
from drivetrain.loader import Pipeline
from drivetrain.saving.writer import Writer


def build(run: RunSpec, world: World, run_dir: Path, sinks: list[Any]) -> Trainer:
    """One rank's trainer, ready to fit or to be restored. Raises UserError where model and data do not fit the run."""
    values = run.values
    # Device and seed before anything that allocates or draws.
    device = run.runtime.start(world)
    run.parallel.start(world, device)
    data_world = run.parallel.data
    run.precision.start(device)
    run.debug.start()

    data = run.data.load(device)
    seed = run.runtime.seed
    # How long the samples are may decide how many of them make an update, and so how many updates the run has.
    untold = horizons.horizon(run) is None
    lengths = run.batch.start(data.train, seed, data_world)
    horizon, said = _horizon(run, len(data.train), data_world, untold)
    said += lengths
    train_data = Pipeline(data.train, tuple(run.augment), data.normalize, seed, data.classes)
    run.batch.pairs = any(step.mixes for step in run.augment)

    model = run.model.build(data.shape, data.classes).to(device)
    # Edits of the module tree first: every later step works on the modules that remain. The memory format is one of
    # them, and precedes compiling, which specialises on strides.
    formats = [e.memory_format for e in run.surgery if e.memory_format is not None]
    memory_format = getattr(torch, formats[-1] if formats else "contiguous_format")
    example = torch.zeros(2, *data.shape, device=device, dtype=data.dtype)
    said += surgery.apply_all(run.surgery, model, example)
    model = run.precision.convert(model, example)
    # Gradients are checked on a copy of the modules, before anything patches their forwards.
    checked = run.debug.examine(model, run.loss, train_data)
    # Recomputation changes forwards in place, inside what compile traces and DDP wraps; names stay plain.
    said += run.checkpointing.apply(model)
    # Sharding is in place too, and what compile traces are the shards' modules.
    said += run.parallel.shard(model, run.precision.dtype, example)
    said += surgery.own_statistics(model, run.batch.micro_batch(data_world), run.batch.size(0), data_world.size)
    # Compile before DDP: each bucket's all-reduce still starts as its gradients appear, and evaluation keeps the plain model.
    forward = run.parallel.wrap(run.compile.apply(model, example, run.checkpointing.budget))
    # The optimizer after every edit that may replace or move parameters; the average after the weights are final.
    with run.parallel.local(model):
        optimizer = run.precision.optimizer(run.optimizer, model, run.batch.lr_factor())
        run.ema.start(model)
    run.scheduler.start(optimizer, *horizon)
    # The model's start was shared; its dropout is each rank's own, but where ranks compute the same activations.
    run.runtime.seed_rank(data_world)

    said += run.loader.autotune(train_data, run.batch.micro_batch(data_world), device)

    parameters = [p for p in model.parameters() if p.requires_grad]
    updated = [p for group in optimizer.param_groups for p in group["params"]]
    trainer = Trainer(
        model=model, forward=forward, infer=run.parallel.infer(model), loss=run.loss, optimizer=optimizer,
        eval_weights=run.precision.eval_weights(run.optimizer.eval_weights), scheduler=run.scheduler, precision=run.precision,
        parallel=run.parallel, clip=run.clip.build(updated, run.parallel.norm), ema=run.ema,
        zero_grad=lambda: run.runtime.zero(parameters), batch=run.batch, loader=run.loader,
        train_data=train_data, test_data=Pipeline(data.test, (), data.normalize, seed),
        device=device, memory_format=memory_format, seed=seed, drop_last=run.data.drop_last,
        epochs=values["epochs"], max_updates=horizon.updates, log_every=values["log_every"],
        evaluate_every=values["evaluate_every"], eval_batches=run.debug.eval_batches,
        saving=run.saving, run_dir=run_dir, writer=Writer(run_dir, run.saving, run.parallel), sinks=sinks,
        timer=StepTimer(run.compile.warmup),
        said=[*said, *run.compile.said(), *run.precision.said, *checked],
    )  # fmt: skip
    run.parallel.attach(trainer)
    run.compile.attach(trainer)  # it may take the whole step over
    if run.batch.preallocate:
        dry_run.preallocate(trainer)

    # Last: what watches a run wraps what is there, and sees nothing of the preparations.
    def remark(line: str) -> None:
        trainer.log_event("remark", text=line)

    helps = run.loader.advice(train_data)
    trainer.watch = lambda stream: input_checks.on_time(input_checks.looked_at(stream, remark), trainer.timer, helps, remark)
    run.debug.attach(trainer)
    return trainer


def _horizon(run: RunSpec, samples: int, world: World, untold: bool) -> tuple[Horizon, list[str]]:
    """The run's length, and what its schedule has to say to it, where that was `untold` before the data was read."""
    if samples < world.size:
        raise UserError(f"{world.size} ranks, but only {samples} training samples: lower parallel.nproc")
    horizon = horizons.horizon(run, samples)
    if horizon is None:
        raise UserError(
            f"batch.global_batch={run.batch.size(run.values['epochs'] - 1)} is more than the {samples} training samples, and "
            f"data.drop_last drops the short batch: set batch.global_batch to {samples} or less, or data.drop_last=false"
        )
    said: list[str] = []
    if untold and run.debug.updates is None:
        if problems := list(run.scheduler.rules(horizon)):
            raise UserError(problems)
        said = list(run.scheduler.advice(horizon, run))
    return horizon.at_most(run.debug.updates), said
