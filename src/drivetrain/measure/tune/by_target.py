"""`drivetrain tune target=…`: which global batch reaches a target soonest, by trainings with several seeds."""

from __future__ import annotations

import math
import shlex
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict

from drivetrain.core.errors import DONE, UserError
from drivetrain.core.option import RunSpec
from drivetrain.core.overrides import format_value
from drivetrain.launch.job import Job
from drivetrain.launch.trials import Trials
from drivetrain.measure import leave
from drivetrain.measure.benchmark import arms, quality
from drivetrain.measure.benchmark.comparison import MIN_SEEDS, TimesToTarget, columns, proven, ranked
from drivetrain.measure.overrides import apply
from drivetrain.measure.training import trainings
from drivetrain.run import environment
from drivetrain.ui.progress import Steps
from drivetrain.ui.sheet import Sheet, Table, commands, words

LOOK_UPDATES = 50
NEAR = (0.5, 1.0, 2.0)  # of the noise scale: the batches that are tried


def command(target: str, seeds: int, budget_s: float, overrides: list[str], config_dirs: Sequence[str], job: Job) -> int:
    """Measure the noise scale, train the batches near it to the target, rank them, and say what is sooner beyond doubt."""
    reach = quality.reach_of(quality.Plan(target=target), job.run)
    if not job.run.batch.fixed_micro_batches or reach is None:
        raise UserError(f"tune target={target} tries values of batch.global_batch: set batch=fixed or batch=accumulate")
    steps = max(2, job.run.batch.accumulation_steps * job.run.parallel.data_ranks())
    look = Trials(job).look(steps, LOOK_UPDATES, micro_batches=())
    scale = look["noise_scale"]
    noise = f"gradient noise scale: {f'{scale:,.0f} samples' if scale else 'hidden by the noise'}, over {look['updates']} updates"
    tries = ["", *candidates(job.run, scale, look["samples"])]
    ends = ["stop.at_target=true", f"target={format_value(str(reach))}"]
    tried = [arms.compose(w or "as it is", [*apply(overrides, w.split(), config_dirs), *ends], config_dirs) for w in tries]
    specs = [spec for spec in tried if spec.job is not None]
    found = [TimesToTarget(spec.label) for spec in specs]
    with Steps() as progress, trainings("tune", job, reach, progress) as run:

        def train(arm: int, number: int) -> tuple[float, int] | None:
            result = run(specs[arm], job.run.runtime.seed + number).result
            when = (result.target or {}) if result is not None else {}
            return (when["seconds"], when["update"]) if when.get("update") is not None else None

        train_all(found, train, seeds, budget_s)
    best, order = proven(found), ranked(found)
    answer, told = f"None reaches {reach} sooner beyond doubt: the run stays as it is", []
    if best is not None:
        told = [f"drivetrain train {shlex.join(apply(overrides, best.label.split(), config_dirs))}"]
        answer = f"{best.label} is sooner at {reach}"
    table = Table.of({"batch": [arm.label for arm in order], **columns(order, found[0], str(reach))}, name="The batches")
    sheet = Sheet("Which batch is the soonest – drivetrain tune", answer, [words(noise), table, *map(commands, told)])
    sheet.show()
    content = {"target": str(reach), "look": look, "arms": [asdict(arm) for arm in found], "kept": best and best.label}
    about = environment.describe(overrides, job.config_hash, {})
    leave.leave(leave.folder(job, "tune"), "tune", sheet, ["tune", *overrides, f"target={target}"], about, content)
    return DONE


def candidates(run: RunSpec, noise_scale: float | None, samples: int) -> list[str]:
    """Batches near the noise scale, as overrides, with the learning rate that follows the square root of the batch."""
    size = run.batch.size(0)
    if not noise_scale:
        return []
    parts = run.batch.accumulation_steps * run.parallel.data_ranks()
    found = []
    for share in NEAR:
        doubled = round(math.log2(noise_scale * share / parts))
        batch = int(parts * 2 ** max(0, doubled))
        rate = f"batch.lr_scaling=sqrt batch.base_batch={size}"
        word = f"batch.global_batch={batch} {rate}"
        if batch != size and 2 <= batch <= samples and word not in found:
            found.append(word)
    return found


def train_all(
    arms: Sequence[TimesToTarget], train: Callable[[int, int], tuple[float, int] | None], seeds: int, seconds: float
) -> None:
    """Train each arm with each seed, in turns whose order is reversed each time; after MIN_SEEDS only while there is time.

    `train(arm, number)` returns seconds and updates to the target, or None.
    """
    until = time.monotonic() + seconds
    for number in range(seeds):
        if number >= MIN_SEEDS and time.monotonic() > until:
            return
        for arm in list(range(len(arms)))[:: 1 if number % 2 == 0 else -1]:
            when = train(arm, number)
            arms[arm].seconds.append(when[0] if when else None)
            arms[arm].updates.append(when[1] if when else None)
