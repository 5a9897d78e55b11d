"""Figures of the recipes that ship, on this machine: `python -m bench.zoo` trains each of them with several seeds.

`--only NAME …` takes these recipes. `--claims` writes into each what it has shown, `--verify` measures again what they claim;
`--shared`, where other programs share this machine, reports and claims no times.

Runs stay in a folder (--runs), so that a second call trains only what is missing there. All figures are of the weights at the
end of training: those of the validation set, by which the settings were chosen, and those of the test set, which are reported
only. A recipe with a grid (`sweep:`) has a row for each of its cells. What a recipe cannot show here says so in its description.
"""

from __future__ import annotations

import math
import re
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from safetensors import safe_open

from bench import harness
from drivetrain.core.errors import UserError, refuse
from drivetrain.core.machine.paths import recipes_dir
from drivetrain.core.options.overrides import format_value, key_of
from drivetrain.measure.benchmark import compare, variants
from drivetrain.measure.benchmark.variants import Facts
from drivetrain.measure.claims import export
from drivetrain.measure.claims.verify import HOLDS, REFUTED, UNTOLD, VerifySettings, rounded, verify
from drivetrain.measure.intervals import mean
from drivetrain.recipe import lookup
from drivetrain.recipe import reader as recipes
from drivetrain.recipe.claims import Claim, Memory, Reach, Speed
from drivetrain.run.reader import RunFiles, find
from drivetrain.sweeps.store import SweepJob
from drivetrain.sweeps.store import prepare as prepare_sweep
from drivetrain.ui.sheet import figure

NOT_HERE = "not verified here"  # in the description of a recipe that needs data or a device which this machine has not
COMMON = ("runtime.device=cpu", "runtime.threads=1")
BUFFERS = ("running_mean", "running_var", "num_batches_tracked")
BEGIN, END = "<!-- python -m bench.zoo writes this table -->\n", "<!-- end of the table -->\n"
BEGIN_VERIFIED = "<!-- python -m bench.zoo --verify writes this table -->\n"


@dataclass(frozen=True)
class Plan:
    """The way in which a recipe is measured."""

    target: str | None = None  # such as accuracy>=0.98: the updates and seconds until then
    seeds: int = 3
    pretrain: tuple[str, ...] = ()  # a run from whose weights it starts
    against: tuple[str, ...] = ()  # what makes the baseline of its speed, which is measured in turns with it


PLANS = {
    "bert_classification": Plan(seeds=1),
    "default": Plan("accuracy>=0.98", 5),
    "digits_best": Plan("accuracy>=0.98"),
    "digits_critical": Plan("accuracy>=0.97", 5),
    "digits_fast": Plan("accuracy>=0.98", 5),
    "digits_robust": Plan("accuracy>=0.95"),
    "digits_small": Plan("accuracy>=0.98", 5),
    "digits_stages": Plan("accuracy>=0.98", 5),
    "digits_target": Plan("accuracy>=0.98", 5),
    "fast": Plan("accuracy>=0.98", 5, against=("recipe=naive",)),
    "fine_tune": Plan("accuracy>=0.9", pretrain=("data.classes=[0,1,2,3,4]", "epochs=8")),
    "large_batch": Plan("accuracy>=0.98"),
    "long_training": Plan("accuracy>=0.98"),
    "memory_budget": Plan("bits_per_byte<=2.8"),
    "naive": Plan("accuracy>=0.98", 5),
}  # fmt: skip


def names() -> list[str]:
    """The recipes that can be measured on this machine."""
    every = sorted(file.stem for file in recipes_dir().glob("*.yaml"))
    return [name for name in every if NOT_HERE not in lookup.read(name).description]


def trained(name: str, plan: Plan, folder: Path) -> dict[str, list[RunFiles]]:
    """The runs of each cell of a recipe, by its label ("" for one without a grid), one for each seed."""
    common = [*COMMON, *_weights(name, plan, folder)]
    seeds = {seed: prepare_sweep([f"recipe={name}", f"runtime.seed={seed}", *common]) for seed in range(plan.seeds)}
    refuse(problem for jobs in seeds.values() for job in jobs for problem in job.problems)
    found = _completed(folder / name)
    missing = [str(seed) for seed, jobs in seeds.items() if any(_hash(job) not in found for job in jobs)]
    if missing:
        _train("-m", f"recipe={name}", f"runtime.seed={','.join(missing)}", *common, f"output_dir={folder / name}")
        found = _completed(folder / name)
    cells: dict[str, list[RunFiles]] = {}
    for jobs in seeds.values():
        for job in jobs:
            cells.setdefault(" ".join(f"{k}={format_value(v)}" for k, v in job.cell.items()), []).append(found[_hash(job)])
    return cells


def _hash(job: SweepJob) -> str:
    assert job.job is not None
    return job.job.config_hash


def _weights(name: str, plan: Plan, folder: Path) -> list[str]:
    """The override that names the weights to start from, which are trained first if they are not there."""
    if not plan.pretrain:
        return []
    return [f"model.weights={_once(folder / f'{name}-weights', *plan.pretrain, *COMMON).path}"]


def _once(place: Path, *words: str) -> RunFiles:
    """The one run in a folder, which is trained if it is not there."""
    if not _completed(place):
        _train(*words, f"output_dir={place}")
    (run,) = _completed(place).values()
    return run


def _train(*words: str) -> None:
    command = [sys.executable, "-m", "src.train", "-q", *words]
    print("$", *command[1:], flush=True)
    subprocess.run(command, cwd=harness.ROOT, check=True)


def _completed(folder: Path) -> dict[str, RunFiles]:
    """The runs in a folder that have completed, by the hashes of their configs."""
    try:
        runs = find([folder])
    except UserError:
        return {}
    return {str(run.result.config_hash): run for run in runs if run.result is not None and run.status == "completed"}


def row(runs: Sequence[RunFiles], plan: Plan, shared: bool) -> dict[str, Any]:
    """The figures of one recipe, or of one cell of its grid, over the seeds; no times of a machine that others share."""
    reach = Reach.parse(plan.target or "")
    facts = [Facts.of(run, seed, reach) for seed, run in enumerate(runs)]
    results = [run.result for run in runs if run.result is not None]
    assert runs[0].metric is not None
    name, more = runs[0].metric
    sets = {kind: [fact.figures[kind][name] for fact in facts] for kind in facts[0].figures}
    reached = [(f.updates_to_target, f.seconds_to_target) for f in facts if f.updates_to_target is not None]
    return {
        "metric": name, "better": "max" if more else "min", "seeds": len(runs),
        **{kind: {**_interval(values), "each": values} for kind, values in sets.items()},
        "target": reach and {
            "reach": str(reach), "reached": len(reached),
            "updates": statistics.median(u for u, _ in reached) if reached else None,
            "seconds": None if shared or not reached else statistics.median(s or 0.0 for _, s in reached),
        },
        "updates": results[0].updates,
        "seconds": None if shared else statistics.median(r.wall_s for r in results),
        "samples_per_second": None if shared else statistics.median(r.samples_per_second or 0.0 for r in results),
        "parameters": parameters(runs[0].path),
        "peak_mib": None,  # of a sweep's job, which shares memory with the others
        "data": results[0].data,
    }  # fmt: skip


def run_of_its_own(name: str, plan: Plan, folder: Path) -> Facts:
    """The facts of a run in a process of its own, whose peak of memory is that of the run alone."""
    words = [f"recipe={name}", "runtime.seed=0", *COMMON, *_weights(name, plan, folder)]
    return Facts.of(_once(folder / f"{name}-memory", *words), 0)


def _interval(values: Sequence[float]) -> dict[str, float | None]:
    """The mean and its 95 % interval, which one value does not have."""
    middle, *bounds = mean(values)
    return dict(zip(("mean", "low", "high"), (middle, *(bounds if len(values) > 1 else (None, None))), strict=True))


def parameters(run: Path) -> int | None:
    """The number of a model's parameters, from the header of its newest checkpoint; None where it saved none."""
    files = sorted((run / "checkpoints").glob("*/model.safetensors"), key=lambda file: int(file.parent.name))
    if not files:
        return None
    with safe_open(files[-1], "pt") as file:
        return sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys() if not name.endswith(BUFFERS))  # noqa: SIM118


# --- claims ---


def speed(name: str, plan: Plan, rounds: int) -> Speed:
    """The speed of a recipe relative to its baseline, measured in turns."""
    given = [f"recipe={name}", *COMMON]
    others = {key_of(word) for word in plan.against}
    base_words = [*(word for word in given if key_of(word) not in others), *plan.against]
    specs = [variants.compose(" ".join(plan.against), base_words), variants.compose(name, given)]
    base, job = (variants.baseline_job([spec]) for spec in specs)
    done = compare.measure(specs, compare.CompareSettings(rounds=rounds), given)
    claim = export.claim_of(done.rows[1], export.against(job, base))
    if claim is None or claim.speed is None:
        raise RuntimeError(f"{name}: {done.rows[1].error or done.rows[0].error}")
    return claim.speed


def claim_of(name: str, runs: Sequence[RunFiles], plan: Plan, given: Any) -> Claim | None:
    """The claim that the runs of a recipe, and its comparison with a baseline, have shown."""
    claim = export.claim_of_runs(runs, export.ExportSettings(target=plan.target))
    if claim is None:
        return None
    if given.shared:
        claim = replace(claim, target=claim.target and replace(claim.target, seconds=None))
    else:
        claim = replace(claim, speed=speed(name, plan, given.rounds) if plan.against else None)
    return with_memory(claim, run_of_its_own(name, plan, given.runs))


def with_memory(claim: Claim, run: Facts) -> Claim:
    """The claim with the peak of memory of a run; without one where it is another device's than the claim."""
    same = run.peak_mib is not None and run.device == claim.device.name
    return replace(claim, memory=Memory(rounded(run.peak_mib), 1) if same and run.peak_mib else None)


def write_claim(name: str, claim: Claim) -> None:
    """Write the claim as the last section of a recipe's file, in place of the one that it has."""
    file, _ = lookup.load(name)
    text = re.sub(r"^claim:\n(?: .*\n)*", "", file.read_text(), flags=re.M)
    file.write_text(text + claim.text())
    recipes.read(file)


# --- the table ---

HEADER = (
    "recipe", "metric", "validation", "test", "until a target", "a training", "samples/s", "parameters", "MiB", "seeds",
)  # fmt: skip


def line(name: str, rows: Sequence[dict[str, Any]]) -> list[str]:
    """The table's row of a recipe: of a grid, the cell that is best on the validation set."""
    best = (max if rows[0]["better"] == "max" else min)(rows, key=lambda r: r["validation"]["mean"])
    return [
        f"`{name}`" + (f", the best of {len(rows)} cells: `{best['cell']}`" if len(rows) > 1 else ""),
        best["metric"], _figure(best["validation"]), _figure(best["test"]), _until(best["target"], best["seeds"]),
        figure(best["seconds"], "{:.1f} s"), figure(best["samples_per_second"], "{:,.0f}"),
        figure(best["parameters"], "{:,}"), figure(best["peak_mib"], "{:,.0f}"), str(best["seeds"]),
    ]  # fmt: skip


def _figure(of_set: dict[str, Any]) -> str:
    return f"{of_set['mean']:.3f}" + (f" ± {of_set['high'] - of_set['mean']:.3f}" if of_set["low"] is not None else "")


def _until(target: dict[str, Any] | None, seeds: int) -> str:
    if target is None:
        return "–"
    if not target["reached"]:
        return f"{target['reach']}: never"
    some = f" ({target['reached']} of {seeds} seeds)" if target["reached"] < seeds else ""
    seconds = f", {target['seconds']:.1f} s" if target["seconds"] is not None else ""
    return f"{target['reach']}: {target['updates']:,.0f} updates{seconds}{some}"


HEADER_VERIFIED = ("recipe", "verified on", "load", "holds", "does not hold", "cannot be told there")


def line_verified(name: str, found: dict[str, Any]) -> list[str]:
    """The table's row of a recipe whose claim was measured again."""
    by_outcome = {outcome: [a for a in found["answers"] if a["outcome"] == outcome] for outcome in (HOLDS, REFUTED, UNTOLD)}
    machine = found["machine"]
    return [
        f"`{name}`", machine["cpu"], f"{machine['load']:.1f}", ", ".join(a["kind"] for a in by_outcome[HOLDS]) or "–",
        "; ".join(f"{a['kind']} ({a['measured']} for {a['claimed']})" for a in by_outcome[REFUTED]) or "–",
        "; ".join(f"{a['kind']} ({_untold(a)})" for a in by_outcome[UNTOLD]) or "–",
    ]  # fmt: skip


def _untold(answer: dict[str, Any]) -> str:
    """The reason why a claim cannot be told. Of one that is another device's the figure is shown: the table names the device."""
    return f"{answer['measured']} for {answer['claimed']}" if "claimed on" in answer["because"] else answer["because"]


def _rank(recipe: tuple[str, dict[str, Any]]) -> tuple[Any, ...]:
    """Recipes with the same target beside each other, the soonest there first where its seconds are known; then the others."""
    name, entry = recipe
    target = next((cell["target"] for cell in entry.get("cells") or () if cell["target"] is not None), None)
    seconds = target and target["seconds"]
    return target is None, target["reach"] if target else "", math.inf if seconds is None else seconds, name


def page(text: str, content: dict[str, Any]) -> str:
    """A page with the tables between their markers."""
    recipes = sorted(content["recipes"].items(), key=_rank)
    achieved = [line(name, entry["cells"]) for name, entry in recipes if entry.get("cells")]
    verified = [line_verified(name, found) for name, entry in sorted(recipes) for found in entry.get("verified") or ()]
    text = harness.between(text, BEGIN, END, harness.markdown(HEADER, achieved))
    return harness.between(text, BEGIN_VERIFIED, END, harness.markdown(HEADER_VERIFIED, verified))


def measure(name: str, plan: Plan, given: Any) -> dict[str, Any]:
    """Train what is missing of a recipe; its entry in the results."""
    cells = trained(name, plan, given.runs)
    recipe = lookup.read(name)
    if given.claims and not recipe.sweep:
        (runs,) = cells.values()
        claim = claim_of(name, runs, plan, given)
        if claim is not None:
            write_claim(name, claim)
    rows = [{"cell": label, **row(runs, plan, given.shared)} for label, runs in cells.items()]
    if not recipe.sweep:
        rows[0]["peak_mib"] = run_of_its_own(name, plan, given.runs).peak_mib
    return {"for": recipe.description, "cells": rows}


def verified(name: str, seeds: int, given: Sequence[str]) -> dict[str, Any] | None:
    """The answers of verifying the claim of a recipe here; None where it claims nothing."""
    recipe = lookup.read(name)
    if recipe.claim is None:
        return None
    return {"machine": harness.machine(), **verify(recipe, [*COMMON, *given], (), VerifySettings(seeds=seeds)).as_dict()}


def main() -> None:
    """Measure and report. The recipes that are not named keep their figures."""
    given = harness.parse(
        __doc__, "zoo-cpu.json", only=[], seeds=int, runs=Path("outputs/zoo"), claims=False, shared=False, verify=False,
        rounds=12, page=harness.ROOT / "docs" / "zoo.md",
    )  # fmt: skip
    content = {"recipes": harness.before(given.out).get("recipes", {})}
    for name in given.only or names():
        plan = PLANS.get(name, Plan())
        plan = replace(plan, seeds=given.seeds or plan.seeds)
        entry = content["recipes"].setdefault(name, {})
        if given.verify:
            if (found := verified(name, given.seeds or 3, _weights(name, plan, given.runs))) is not None:
                others = [each for each in entry.get("verified") or () if each["machine"]["cpu"] != found["machine"]["cpu"]]
                entry["verified"] = [*others, found]  # those of processors of other kinds stay
        else:
            entry.update(machine=harness.machine(), **measure(name, plan, given))
        harness.write(given.out, content)
    if given.page.exists():
        given.page.write_text(page(given.page.read_text(), content))


if __name__ == "__main__":
    main()
