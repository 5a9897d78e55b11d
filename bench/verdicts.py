"""`python -m bench.verdicts`: how often comparisons of quality are wrong, and what they can see, by simulated programs."""

from __future__ import annotations

import argparse
import math
from collections import Counter
from collections.abc import Iterator

import numpy as np

from bench.harness import RESULTS, machine, write
from drivetrain.measure.benchmark.quality import JudgedFigure, QualitySettings, Trial, sequentially
from drivetrain.measure.benchmark.variants import TrainedRun
from drivetrain.run.result import interval

SHARED = (0.0, 0.5, 0.9)  # correlation between the variants of a seed
WORSE = (2.0, 1.0, 0.5, 0.0, -0.5, -1.0, -2.0)  # by how many standard deviations the variant is worse
PLAN = QualitySettings(seeds=5, max_seeds=20)


def compared(rng: np.random.Generator, shared: float, worse: float, asks: str) -> tuple[str, str, int]:
    """The outcome, what is known of the difference, and the seeds, of one comparison of a made-up program with another."""
    of_seed = rng.standard_normal(PLAN.max_seeds)

    def train(variant: int, number: int) -> TrainedRun:
        noise = math.sqrt(shared) * of_seed[number] + math.sqrt(1 - shared) * rng.standard_normal()
        return TrainedRun(number, 0, {"loss": 10.0 + noise + variant * worse})

    trial = Trial.of("loss", {1: ("changes", [])}, {1: [JudgedFigure("loss")]}, asks)
    sequentially(trial, PLAN, train)
    verdict = trial.verdicts[1]
    return verdict.outcome, verdict.differs or "", len(verdict.runs)


def rows(experiments: int) -> Iterator[dict[str, object]]:
    """A row for each correlation, difference and question."""
    for shared in SHARED:
        for worse in WORSE:
            for asks in ("as good", "better"):
                rng = np.random.default_rng([int(10 * shared), int(10 * worse) + 100])
                found = [compared(rng, shared, worse, asks) for _ in range(experiments)]
                counts = Counter(outcome for outcome, _, _ in found) + Counter(differs for _, differs, _ in found if differs)
                shares = {
                    name: (count / experiments, *interval(count / experiments, experiments)) for name, count in counts.items()
                }
                seeds = sum(seeds for *_, seeds in found) / experiments
                yield {"shared": shared, "worse_by_deviations": worse, "asks": asks, "shares": shares, "seeds": seeds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--experiments", type=int, default=400)
    experiments = parser.parse_args().experiments
    found = []
    for row in rows(experiments):
        found.append(row)
        told = "  ".join(f"{name} {100 * share[0]:.1f} %" for name, share in sorted(row["shares"].items()))
        print(
            f"shared {row['shared']}  worse by {row['worse_by_deviations']:+}  {row['asks']:7}  {told}  seeds {row['seeds']:.1f}"
        )
    write(RESULTS / "verdicts-cpu.json", {"machine": machine(), "experiments": experiments, "rows": found})


if __name__ == "__main__":
    main()
