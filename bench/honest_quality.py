"""Are the verdicts of `quality=true` honest? `python -m bench.honest --quality` trains and judges many times over.

Each repeat has seeds of its own. The same against itself is trained with other seeds than the first arm, so that nothing but
chance tells them apart. What is planted in a break is no override, so the arm claims what its overrides claim: where it has
none, the same mathematics. Runs are trained in this process, one after the other, and judged as `drivetrain compare` does.
"""

from __future__ import annotations

import multiprocessing
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from bench.breaks import BREAKS, HARMLESS, Arm
from bench.harness import machine, table, write
from drivetrain.core.selection import selected
from drivetrain.core.signals import StopFlag
from drivetrain.core.world import World
from drivetrain.data import digits
from drivetrain.launch.job import Job, prepare
from drivetrain.launch.worker import run_rank
from drivetrain.measure import effects
from drivetrain.measure.benchmark import noninferiority, quality
from drivetrain.measure.benchmark.noninferiority import FAIL, INCONCLUSIVE, PASS, TrainedRun, Trial, Verdict
from drivetrain.run.reader import read

OVERRIDES = (
    "data=digits", "model=mlp", "model.hidden=[128]", "epochs=8", "evaluate_every=8", "log_every=11", "saving=none", "logger=[]",
    "optimizer.lr=0.03", "runtime.device=cpu", "runtime.threads=1",
)  # fmt: skip
SAME = "the same"
SEEDS_OF_A_REPEAT = 1000


def arms_of(kind: str) -> dict[str, Arm]:
    """Name → arm of one kind."""
    return {"same": {SAME: Arm()}, "break": BREAKS, "harmless": HARMLESS}[kind]


def trained(arm: Arm, seed: int) -> TrainedRun:
    """One arm trained with one seed, in this process."""
    job = _job(arm.overrides)
    job.run.runtime.seed, job.attach = seed, arm.plant
    with tempfile.TemporaryDirectory() as folder, StopFlag() as stop:
        result, _ = run_rank(job, World(), Path(folder), stop, quiet=True)
        run = read(Path(folder))
    run.result, run.status = result, result.status
    return quality.trained_run(run, seed)


@cache
def _job(overrides: tuple[str, ...]) -> Job:
    return prepare([*OVERRIDES, *overrides])


@cache
def _base_run(seed: int) -> TrainedRun:
    return trained(Arm(), seed)


def judged(arm: Arm, repeat: int, plan: quality.Plan, shift: int = 0) -> Verdict:
    """The verdict on one arm in one repeat. `shift` is added to its seeds, of which the first arm's are not."""
    base = _job(())
    claim = effects.between(base, _job(arm.overrides))
    selection = selected(base.run)
    trial = Trial.of(selection.name, {1: claim}, {1: noninferiority.figures_for(claim[0], selection)})

    def train(number_of_arm: int, number: int) -> TrainedRun:
        seed = repeat * SEEDS_OF_A_REPEAT + number
        return trained(arm, seed + shift) if number_of_arm else _base_run(seed)

    quality.sequentially(trial, plan, train)
    return trial.verdicts[1]


def _repeat(task: tuple[int, dict[str, int], quality.Plan]) -> list[tuple[str, Verdict]]:
    """All arms of one repeat, those that are repeated so often."""
    import torch

    repeat, repeats, plan = task
    torch.set_num_threads(1)
    digits.read_digits = cache(digits.read_digits)
    found = []
    for kind, times in repeats.items():
        for name, arm in arms_of(kind).items() if repeat < times else ():
            shift = SEEDS_OF_A_REPEAT // 2 if name == SAME else 0
            found.append((name, judged(arm, repeat, plan, shift)))
    return found


def campaign(repeats: dict[str, int], processes: int, out: Path) -> dict[str, Any]:
    """All verdicts, by kind and arm, as the result file has them; the file is written after each repeat."""
    began, plan = time.perf_counter(), quality.Plan()
    verdicts: dict[str, list[Verdict]] = {name: [] for kind in repeats for name in arms_of(kind)}
    tasks = [(number, repeats, plan) for number in range(max(repeats.values()))]
    content: dict[str, Any] = {}
    with multiprocessing.get_context("fork").Pool(processes) as pool:
        for done, found in enumerate(pool.imap_unordered(_repeat, tasks), 1):
            for name, verdict in found:
                verdicts[name].append(verdict)
            print(f"repeat {done} of {len(tasks)}", *(f"{name}: {v.outcome}" for name, v in found), sep="; ", flush=True)
            content = {
                "machine": machine(), "overrides": OVERRIDES, "seeds": plan.seeds, "max_seeds": plan.max_seeds,
                "seconds": time.perf_counter() - began, "repeats": done,
                **{kind: {name: _summary(verdicts[name]) for name in arms_of(kind)} for kind in repeats},
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


def main(repeats: dict[str, int], processes: int, out: Path) -> None:
    """Run the campaign and show it."""
    content = campaign(repeats, processes, out)
    rows = [
        [kind, name, str(row["effect"]), *(str(row[outcome]) for outcome in (PASS, INCONCLUSIVE, FAIL))]
        for kind in repeats
        for name, row in content[kind].items()
    ]
    table("verdicts on quality", ("kind", "arm", "claims", PASS, INCONCLUSIVE, FAIL), rows)
