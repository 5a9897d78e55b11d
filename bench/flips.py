"""Flipped bits and lost ends: whether any file of a run, damaged in one place, changes what a resumed run computes.

`python -m bench.flips [--cases N] [--seed N] [--out FILE]`

Small runs of each kind of tests/support/small_runs.py are trained. Each case then flips one bit of one of their files, or cuts
end off, and reads the run as `resume=`, `report`, `drivetrain.load` and `predict` do. There are four outcomes:

- rejected: a UserError refuses it, or the checkpoint is passed over for the one before;
- no effect: the resumed run has the same config, starts from the same bytes and goes on with the same runs of trackers, the
  model predicts the same, and what `report` reads is the same;
- figures: the resumed run computes the same, but a figure that `report` shows differs: logs and results are not signed;
- effect, untyped: the resumed run or a prediction would differ, or the reader raises another error. There must be none.

What belongs to the machine (paths, devices, loggers) is not compared: where its record is not signed any more, the command
line's settings hold, as for a stranger's run.
"""

from __future__ import annotations

import collections
import random
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tests.support import small_runs
from tests.support.small_runs import SmallRun

from bench import harness

CASES = 2_000
REJECTED, SAME, FIGURES, EFFECT, UNTYPED = "rejected", "no effect", "figures", "effect", "untyped"
ALLOWED = (REJECTED, SAME, FIGURES)


class Case(NamedTuple):
    """A damage, and what came of it."""

    file: str
    damage: str
    outcome: str
    said: str


def damages(runs: Mapping[str, SmallRun], count: int, seed: int) -> Iterator[tuple[str, str, str, bytes]]:
    """Yield this many damages: a kind of run, a file, what is done to it, and its bytes then. Files come in turn."""
    draw = random.Random(seed)
    files = [
        (kind, file.relative_to(run.run_dir))
        for kind, run in runs.items()
        for file in sorted(run.run_dir.rglob("*"))
        if file.is_file() and file.stat().st_size
    ]
    draw.shuffle(files)
    for number in range(count):
        kind, file = files[number % len(files)]
        content = bytearray((runs[kind].run_dir / file).read_bytes())
        place = draw.randrange(len(content))
        if draw.random() < 0.2:
            yield kind, str(file), f"cut to {place} bytes", bytes(content[:place])
        else:
            bit = draw.randrange(8)
            content[place] ^= 1 << bit
            yield kind, str(file), f"bit {bit} of byte {place}", bytes(content)


def judge(whole: Whole, file: str, content: bytes) -> tuple[str, str]:
    """Damage one file, read the run, and put the file back. Return the outcome and what was said."""
    from drivetrain.core.errors import UserError

    path = whole.run.run_dir / file
    before = path.read_bytes()
    path.write_bytes(content)
    try:
        if wrong := whole.passed_over():
            return REJECTED, wrong
        seen = whole.read(file)
    except UserError as error:
        return REJECTED, str(error).splitlines()[0]
    except Exception as error:
        return UNTYPED, f"{type(error).__name__}: {error}"
    finally:
        path.write_bytes(before)
    if seen.used != whole.seen.used:
        return EFFECT, f"{seen.used} instead of {whole.seen.used}"
    return (SAME, "") if seen.shown == whole.seen.shown else (FIGURES, "")


class Seen(NamedTuple):
    """What readers take from a run."""

    used: Any  # the config of a resumed run, the bytes that it starts from, its trackers, and the model's predictions
    shown: str  # what a report reads


class Whole:
    """A run as it was before any damage."""

    def __init__(self, run: SmallRun) -> None:
        self.run = run
        self._config: Any = None
        self.seen = self.read("")

    def passed_over(self) -> str | None:
        """What is wrong with a checkpoint, or None."""
        from drivetrain.saving import manifest

        checkpoints = sorted(manifest.checkpoints(self.run.run_dir))
        return next((wrong for each in checkpoints if (wrong := manifest.verify(each)) is not None), None)

    def read(self, damaged: str) -> Seen:
        """Read the run as resuming, reporting and predicting do. Composing is slow: a damaged checkpoint changes no config."""
        from drivetrain.launch import launcher
        from drivetrain.run import identity, reader
        from drivetrain.saving import manifest

        run_dir, of_checkpoint = self.run.run_dir, damaged.startswith("checkpoints/")
        if self._config is None or not of_checkpoint:
            job = launcher.prepare([f"resume={run_dir}"])
            config = job.config_hash, str(identity.without_machine_local(job.composed, job.not_compared))
            self._config = self._config or config
        else:
            config = self._config
        found, _ = manifest.newest_valid(run_dir)
        start = None if found is None else (found.name, [(f.name, manifest.sha256(f)) for f in sorted(found.iterdir())])
        used = (config, start, self.run.trackers(), self.run.predictions())
        return Seen(used, "" if of_checkpoint else repr(reader.read(run_dir)))


def campaign(runs: Mapping[str, SmallRun], count: int, seed: int) -> list[Case]:
    """Damage the runs so often, once at a time."""
    wholes = {kind: Whole(run) for kind, run in runs.items()}
    return [
        Case(f"{kind}/{file}", damage, *judge(wholes[kind], file, content))
        for kind, file, damage, content in damages(runs, count, seed)
    ]


def summary(cases: Sequence[Case]) -> dict[str, dict[str, int]]:
    """How often each outcome came, for each file."""
    found: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for case in cases:
        found[case.file][case.outcome] += 1
    return {file: dict(counts) for file, counts in sorted(found.items())}


def main() -> None:
    """Train, damage, show, write."""
    given = harness.parse(__doc__, "flips-cpu.json", cases=CASES, seed=0)
    folder = Path(tempfile.mkdtemp())
    try:
        cases = campaign(small_runs.train_all(folder), given.cases, given.seed)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    table = summary(cases)
    outcomes = (*ALLOWED, EFFECT, UNTYPED)
    rows = [[file, *(str(counts.get(outcome, 0)) for outcome in outcomes)] for file, counts in table.items()]
    harness.table(f"{len(cases)} damages", ["file", *outcomes], rows)
    totals = collections.Counter(case.outcome for case in cases)
    wrong = [case._asdict() for case in cases if case.outcome not in ALLOWED]
    content = {"seed": given.seed, "cases": len(cases), "outcomes": dict(totals), "files": table, "wrong": wrong}
    harness.write(given.out, content)
    raise SystemExit(bool(wrong))


if __name__ == "__main__":
    main()
