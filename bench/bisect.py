"""Planted causes among 15 changes, many times over: does `drivetrain bisect` name the right settings?

    python -m bench.bisect                       # 40 repeats of each kind, with simulated rounds: a minute
    python -m bench.bisect --true single,pair    # and these kinds once more with true processes: minutes each; --quality KINDS

The simulated rounds have the noise of compare's as it was measured on two cores: the same against itself was known to 1.9 % on
each side after 20 rounds of the first variant and three others, about 4 % in a round. Some rounds are outliers.
A true run bisects a model with 15 settings (Planted), of which the guilty ones make each forward sleep.
"""

from __future__ import annotations

import json
import math
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from bench.harness import before, machine, parse, table, write
from drivetrain.measure.bisect.search import LEAST_ROUNDS, BisectSettings, ChangeSearch, Measured, Subset
from drivetrain.measure.intervals import EQUIVALENCE, Interval, middle

CHANGES = 15
NOISE = 0.04  # standard deviation of a round's ratio, in logarithms
OUTLIERS, OUTLIER = 0.05, 4.0  # their share of the rounds, and how much larger their noise is
SHARES = (0.3, 0.2, 0.1, 0.05)  # of the samples a second that are planted away

KINDS = {"single": 1, "pair": 2, "two that add up": 2, "triple": 3, "none": 0}  # kind → how many changes are guilty


def share_of(kind: str, guilty: list[int], chosen: Subset) -> float:
    """The share of the whole planted effect that a subset has: two add up, else it takes all that are guilty."""
    found, size = len(chosen.intersection(guilty[: KINDS[kind]])), KINDS[kind]
    return found / 2 if kind == "two that add up" else float(0 < found == size)


class Simulated:
    """Rounds drawn from the noise model, judged as the true ones are."""

    margin = math.log1p(EQUIVALENCE)

    def __init__(self, effect: Callable[[Subset], float], draw: random.Random, rounds: int) -> None:
        self.effect, self.draw, self.rounds = effect, draw, rounds
        self.rates: dict[Subset, list[float]] = {}

    def measure(self, chosen: Subset, decided: Callable[[Interval], bool]) -> Measured:
        """Add rounds until the interval decides the question, or the rounds are used."""
        mine = self.rates.setdefault(chosen, [])
        while len(mine) < LEAST_ROUNDS or (len(mine) < self.rounds and not decided(middle([*map(math.log, mine)]))):
            wide = OUTLIER if self.draw.random() < OUTLIERS else 1.0
            mine.append(math.exp(self.effect(chosen) + self.draw.gauss(0.0, wide * NOISE)))
        return Measured(middle([*map(math.log, mine)]), len(mine))


def repeat(kind: str, share: float, seed: int, rounds: int) -> dict[str, Any]:
    """One bisection of a planted cause, with simulated rounds."""
    draw = random.Random(f"{kind} {share} {seed}")
    guilty = draw.sample(range(CHANGES), 3)
    effect = Simulated(lambda chosen: math.log(1 - share) * share_of(kind, guilty, chosen), draw, rounds)
    search = ChangeSearch(CHANGES, effect)
    search.run()
    named = sorted(number for cause in search.causes for number in cause)
    return {
        "guilty": sorted(guilty[: KINDS[kind]]), "named": named, "outcome": search.outcome, "comparisons": search.comparisons,
        "rounds": sum(found.pairs for found in search.tried.values()),
    }  # fmt: skip


def simulate(repeats: int, rounds: int) -> dict[str, Any]:
    """All kinds and shares, so many times each."""
    found = {}
    for kind in KINDS:
        for share in SHARES if kind != "none" else (0.0,):
            runs = [repeat(kind, share, seed, rounds) for seed in range(repeats)]
            found[f"{kind}, {100 * share:.0f} %" if share else kind] = _summary(runs)
    return found


def _summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    comparisons = [run["comparisons"] for run in runs]
    return {
        "repeats": len(runs), "right": sum(run["named"] == run["guilty"] for run in runs),
        "named others": sum(not set(run["named"]) <= set(run["guilty"]) for run in runs),
        "not resolved": sum(run["outcome"] == "not resolved" for run in runs),
        "comparisons": {"median": statistics.median(comparisons), "max": max(comparisons)},
        "rounds": {"median": statistics.median(run["rounds"] for run in runs), "max": max(run["rounds"] for run in runs)},
        "columns of runs": list(runs[0]), "runs": [list(run.values()) for run in runs],
    }  # fmt: skip


class Planted(torch.nn.Module):
    """A small net with 15 settings that do nothing, but for `extra_ms` that each forward sleeps when all `slow` ones are on.

    With `noisy` the guilty settings make the result worse instead: that share of the outputs is replaced by noise.
    """

    def __init__(
        self, shape: tuple[int, ...], classes: int, slow: list[int], extra_ms: float = 0.0, noisy: float = 0.0, **settings: int
    ) -> None:  # fmt: skip
        super().__init__()
        guilty = all(settings[f"k{number:02d}"] for number in slow)
        self.extra, self.noisy = (extra_ms / 1e3, noisy) if guilty else (0.0, 0.0)
        layers = torch.nn.Flatten(), torch.nn.LazyLinear(64), torch.nn.ReLU(), torch.nn.Linear(64, classes)
        self.body = torch.nn.Sequential(*layers)
        self.body(torch.zeros(1, *shape))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(n, channels, height, width) → (n, classes)."""
        out = self.body(x)
        if self.extra:
            time.sleep(self.extra)
        if self.noisy:
            out = torch.where(torch.rand(len(out), 1) < self.noisy, torch.randn_like(out), out)
        return out


def true_run(kind: str, extra_ms: float, quality: bool, seed: int = 0) -> dict[str, Any]:
    """One bisection of a planted cause by the command itself."""
    from drivetrain.measure.bisect import bisect

    size = KINDS[kind]
    guilty = sorted(random.Random(f"{kind} {seed}").sample(range(1, CHANGES + 1), max(size, 1)))
    sides = [" ".join(f"model.kwargs.k{number:02d}={value}" for number in range(1, CHANGES + 1)) for value in (0, 1)]
    planted = f"model.kwargs.noisy={0.3 if size else 0.0}" if quality else f"model.kwargs.extra_ms={extra_ms if size else 0.0}"
    settings = ["quality=true", "seeds=12"] if quality else ["block_s=0.1", "budget_s=1200"]
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        words = [
            *sides, f"data={'digits' if quality else 'synthetic'}",
            "model=own", "model.target=bench.bisect.Planted", "trust=[bench]", "runtime.device=cpu",
            f"model.kwargs.slow=[{','.join(map(str, guilty))}]", planted, "updates=60", "runtime.threads=1", "optimizer=sgd",
            "optimizer.lr=0.1", "scheduler=constant", f"output_dir={folder}", *settings,
        ]  # fmt: skip
        bisect.command(words)
        found = json.loads(next(Path(folder).rglob("bisect.json")).read_text())
    named = sorted(int(key.rpartition(".k")[2]) for cause in found["causes"] for key in cause["changes"])
    keep = ("outcome", "unit", "whole", "rest", "causes", "comparisons", "tried")
    return {
        "kind": kind, "guilty": guilty if size else [], "named": named, "pairs": sum(tried["pairs"] for tried in found["tried"]),
        "seconds": round(time.monotonic() - began, 1), **{key: found[key] for key in keep},
    }  # fmt: skip


def main() -> None:
    """Run the campaign and write bench/results/bisect-cpu.json."""
    given = parse(__doc__, "bisect-cpu.json", repeats=40, true="", quality="", extra_ms=3.0)
    found = before(given.out)
    noise = {"sd": NOISE, "outliers": OUTLIERS, "outlier": OUTLIER}
    if given.repeats:
        found["simulated"] = {"changes": CHANGES, "noise": noise, "kinds": simulate(given.repeats, BisectSettings.rounds)}
    for name, kinds in (("true", given.true), ("quality", given.quality)):
        for kind in filter(None, kinds.split(",")):
            run = {"machine": machine(), **true_run(kind, given.extra_ms, name == "quality")}
            found[name] = {**found.get(name, {}), kind: run}
            write(given.out, found, None)
    write(given.out, found, None)  # without line breaks: it holds every run of the campaign
    _show(found)


def _show(found: dict[str, Any]) -> None:
    header = ("planted among 15", "named rightly", "of", "others named", "comparisons", "at most", "rounds")
    rows = [
        (
            kind, str(s["right"]), str(s["repeats"]), str(s["named others"]), f"{s['comparisons']['median']:g}",
            str(s["comparisons"]["max"]), f"{s['rounds']['median']:g}",
        )
        for kind, s in found.get("simulated", {"kinds": {}})["kinds"].items()
    ]  # fmt: skip
    table(f"bisect, simulated rounds ({2 * math.log2(CHANGES):.1f} = 2 log2 {CHANGES})", header, rows)
    for name in ("true", "quality"):
        for kind, run in found.get(name, {}).items():
            verdict = "right" if run["named"] == run["guilty"] else "WRONG"
            print(f"{name} {kind}: {verdict}: planted {run['guilty']}, named {run['named']}, {run['comparisons']} comparisons, "
                  f"{run['pairs']} pairs, {run['seconds']} s")  # fmt: skip


if __name__ == "__main__":
    main()
