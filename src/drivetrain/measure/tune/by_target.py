"""Trains what `drivetrain tune target=…` tries, shows it, and writes it."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from drivetrain.core.errors import DONE, UserError
from drivetrain.core.files import write_json
from drivetrain.core.overrides import format_value
from drivetrain.launch.job import Job
from drivetrain.launch.trials import Trials
from drivetrain.measure.benchmark import arms, quality
from drivetrain.measure.benchmark.times_to_target import HEADER, TimesToTarget, proven, ranked
from drivetrain.measure.overrides import apply
from drivetrain.measure.training import trainings
from drivetrain.measure.tune import times_to_target
from drivetrain.run import directory
from drivetrain.ui import terminal
from drivetrain.ui.output import echo
from drivetrain.ui.progress import Steps

LOOK_UPDATES = 50


def command(target: str, seeds: int, budget_s: float, overrides: list[str], config_dirs: Sequence[str], job: Job) -> int:
    """Measure the noise scale, train the batches near it to the target, rank them, and say what is sooner beyond doubt."""
    reach = quality.reach_of(quality.Plan(target=target), job.run)
    if not job.run.batch.fixed_micro_batches or reach is None:
        raise UserError(f"tune target={target} tries values of batch.global_batch: set batch=fixed or batch=accumulate")
    steps = max(2, job.run.batch.accumulation_steps * job.run.parallel.data_ranks())
    look = Trials(job).look(steps, LOOK_UPDATES, micro_batches=())
    scale = look["noise_scale"]
    echo(f"gradient noise scale: {f'{scale:,.0f} samples' if scale else 'hidden by the noise'}, over {look['updates']} updates")
    words = ["", *times_to_target.candidates(job.run, scale, look["samples"])]
    ends = ["stop.at_target=true", f"target={format_value(str(reach))}"]
    tried = [arms.compose(w or "as it is", [*apply(overrides, w.split(), config_dirs), *ends], config_dirs) for w in words]
    specs = [spec for spec in tried if spec.job is not None]
    found = [TimesToTarget(spec.label) for spec in specs]
    with Steps() as progress, trainings("tune", job, reach, progress) as run:

        def train(arm: int, number: int) -> tuple[float, int] | None:
            result = run(specs[arm], job.run.runtime.seed + number).result
            when = (result.target or {}) if result is not None else {}
            return (when["seconds"], when["update"]) if when.get("update") is not None else None

        times_to_target.train_all(found, train, seeds, budget_s)
    terminal.table(HEADER, [arm.cells(found[0]) for arm in ranked(found)])
    best = proven(found)
    if best is None:
        echo(f"none reaches {reach} sooner beyond doubt: the run stays as it is")
    else:
        changed = apply(overrides, best.label.split(), config_dirs)
        echo(f"sooner at {reach}:\n  drivetrain train {shlex.join(changed)}")
    content = {"target": str(reach), "look": look, "arms": [asdict(arm) for arm in found], "kept": best and best.label}
    folder = directory.create(Path(job.run.values["output_dir"]), "tune")
    write_json(folder / "tune.json", content)
    echo(f"written to {folder}/tune.json")
    return DONE
