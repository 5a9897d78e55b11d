"""Does the doctor name a cost that nobody told it of, with its right share? And does it call a clean model clean?

    python -m bench.attribution --seeds 20

Each seed draws a program with a planted line (bench/drawn.py). One process measures what the line costs, by updates with and
without it in turns, and profiles the run. The doctor must name the line first, and its share should be that cost. The same
program without the cost must not have a line named.

A line can cost more than the time within it: it can slow down the rest of the step, by what it does to caches, to the allocator
or to sleeping cores. Where time is spent does not tell that. So the time within the line is measured too, where its work has no
backward. The campaign writes its results after each seed, and resumes.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from bench.drawn import Drawn, draw
from bench.harness import before, machine, parse, table, write

MIN_COST = 0.12  # a cost below is too near to the least share that the doctor names
PAIRS = 15
STEADY, ATTEMPTS = 0.03, 4  # the cost before the profile and after it may differ by so much, else both are measured again
MAX_REPEATS = 3**14


def main() -> None:
    """Run the campaign, or the rest of it."""
    given = parse(__doc__, "attribution-cpu.json", seeds=20, first=0, profile_s=2.0)
    content: dict[str, Any] = {"machine": machine(), "seeds": {}, **before(given.out)}
    for seed in range(given.first, given.first + given.seeds):
        if str(seed) not in content["seeds"]:
            content["seeds"][str(seed)] = found = examine(draw(seed), given.profile_s)
            print(f"{seed:3d} {found}", flush=True)
            content["summary"] = summary(content["seeds"])
            given.out.write_text(json.dumps(content, indent=2))
    write(given.out, content)
    rows = [
        (f"{f['kind']}, {f['place']}, {f['model']}", f"{f['cost']:.0%}", f"{f['told']:.0%}",
         "–" if f["inside"] is None else f"{f['inside']:.0%}", "yes" if f["named"] else "no", "yes" if f["clean"] else "no")
        for f in content["seeds"].values()
    ]  # fmt: skip
    table("drawn costs", ("planted", "costs", "told", "within it", "named first", "clean without it"), rows)
    print(content["summary"])


def summary(seeds: dict[str, Any]) -> dict[str, Any]:
    """The figures of all seeds."""
    off = sorted(abs(f["told"] - f["cost"]) for f in seeds.values())
    inside = [abs(f["told"] - f["inside"]) for f in seeds.values() if f["inside"] is not None]
    return {
        "named": sum(f["named"] for f in seeds.values()), "clean": sum(f["clean"] for f in seeds.values()), "of": len(seeds),
        "within 5 points": sum(o <= 0.05 for o in off), "median points off": round(100 * statistics.median(off), 1),
        "within 5 points of the time within the line": sum(o <= 0.05 for o in inside), "that have it": len(inside),
    }  # fmt: skip


def examine(drawn: Drawn, profile_s: float) -> dict[str, Any]:
    """What the planted line costs, what the doctor says of it, and what it says of the program without it."""
    from drivetrain.engine import child
    from drivetrain.launch.job import prepare
    from drivetrain.measure.profile.diagnose import diagnose

    with tempfile.TemporaryDirectory() as folder, _within(folder):
        # One thread: what else runs on the machine disturbs it less. Whether more would help is no question here.
        job = prepare([*drawn.write(Path(folder)), "runtime.threads=1"], [])
        measure = partial(_measure, drawn=drawn, profile_s=profile_s)
        repeats, costs, inside, planted, clean = child.ask(job.run, measure, drawn.kind)
        problems = sorted(diagnose(planted, job), key=lambda p: -p.share)
        without = sorted(diagnose(clean, job), key=lambda p: -p.share)
    marks = [f"{drawn.module}.py:{n} " for n in drawn.planted]
    told = sum(line.share for line in planted.lines if any(mark in line.place for mark in marks))
    return {
        "kind": drawn.kind, "place": drawn.place, "model": drawn.model, "repeats": repeats,
        "step_ms": round(clean.step_ms, 2), "cost": round(costs, 3), "told": round(told, 3),
        "inside": None if drawn.differentiated else round(inside, 3),
        "named": any(mark in problems[0].evidence for mark in marks), "verdict": problems[0].verdict,
        "evidence": problems[0].evidence,
        "clean": without[0].name in ("compute", "batch"), "verdict without it": without[0].verdict,
    }  # fmt: skip


def _measure(trainer: Any, drawn: Drawn, profile_s: float) -> tuple[int, float, float, Any, Any]:
    """In the run's process: the repeats that make the share, the line's cost, the time within it, and two profiles."""
    from drivetrain.measure.profile import step
    from drivetrain.measure.profile.lines import TrackedStream, update
    from drivetrain.measure.profile.sampler import thread_clock
    from drivetrain.measure.profile.step import profile_step

    program, clock = sys.modules[drawn.module], thread_clock()
    step.usable_cores = lambda: 1
    trainer.endless()
    trainer.model.train()
    trainer.callbacks.start()
    stream = TrackedStream(trainer.loader.stream(trainer.train_data, trainer.requests(), trainer.device, trainer.memory_format))

    def updates_s(repeats: int, block_s: float = 0.08) -> list[float]:
        """Return the seconds of each update of a block, less those in which the process waited for a core."""
        program.REPEATS, times, began = repeats, [], clock()
        while clock().own - began.own < block_s or len(times) < 2:
            before = clock().own
            update(trainer, stream)
            times.append(clock().own - before)
        return times[1:]

    def cost(repeats: int) -> float:
        """Return the planted line's share of the time, by updates with and without it in turns.

        By means, as the doctor's shares are: what a line costs now and then is a part of its cost.
        """
        pairs = [(updates_s(0), updates_s(repeats)) for _ in range(PAIRS)]
        without, with_it = (statistics.fmean(chain(*blocks)) for blocks in zip(*pairs, strict=True))
        return 1 - without / with_it

    def inside(repeats: int) -> float:
        """Return the share of the time that is spent within the line."""
        before, own = program.times, [0.0]

        def clocked() -> Iterator[int]:
            began = clock().own
            yield from range(program.REPEATS)
            own[0] += clock().own - began

        program.times = clocked
        updates_s(repeats, 0.2)
        own[0], began = 0.0, clock().own
        updates_s(repeats, 1.0)
        program.times = before
        return own[0] / (clock().own - began)

    updates_s(0, 0.5)
    repeats, none = 1, statistics.median(updates_s(0, 0.3))
    while statistics.median(updates_s(repeats, 0.05)) < 1.2 * none:
        repeats *= 3
        if repeats > MAX_REPEATS:
            raise RuntimeError(f"{drawn.kind} in {drawn.place}: the planted line costs nothing")
    costs = max(cost(repeats), 0.05)
    repeats = max(1, round(repeats * drawn.share / (1 - drawn.share) / (costs / (1 - costs))))
    while (before := cost(repeats)) < MIN_COST:
        repeats *= 2
    for _ in range(ATTEMPTS):
        planted = profile_step(trainer, profile_s)
        after = cost(repeats)
        if abs(after - before) < STEADY:
            break
        before = after  # the machine's speed changed meanwhile: there is no one share to compare with
    within = inside(repeats)
    program.REPEATS = 0
    return repeats, (before + after) / 2, within, planted, profile_step(trainer, profile_s)


@contextmanager
def _within(folder: str) -> Iterator[None]:
    before = os.getcwd()
    os.chdir(folder)
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        sys.path.remove(folder)
        os.chdir(before)


if __name__ == "__main__":
    main()
