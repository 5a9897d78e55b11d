"""Flipped bits and lost ends: whether any file of a run, damaged in one place, changes what a resumed run computes.

`python -m bench.flips [--cases N] [--seed N] [--out FILE]`

A small run is trained once. Each case then flips one bit of one of its files, or cuts its end off, and reads the run as
`resume=`, `report` and `drivetrain.load` do. There are four outcomes:

- rejected: a UserError refuses it, or the checkpoint is passed over for the one before;
- no effect: the resumed run has the same config and starts from the same bytes, and what `report` reads is the same;
- figures: the resumed run computes the same, but a figure that `report` shows differs: logs and results are not signed;
- effect, untyped: the resumed run would differ, or the reader raises another error. There must be none.

What belongs to the machine (paths, devices, loggers) is not compared: where its record is not signed any more, the command
line's settings hold, as for a stranger's run.
"""

from __future__ import annotations

import argparse
import collections
import random
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bench import harness

RUN = (
    "data=synthetic", "data.shape=[1,2,2]", "data.classes=3", "data.samples=24", "data.test_samples=6", "model=mlp",
    "model.hidden=[4]", "optimizer=adamw", "batch.global_batch=12", "updates=4", "log_every=1", "saving.every_updates=2",
)  # fmt: skip
CASES = 2_000
REJECTED, SAME, FIGURES, EFFECT, UNTYPED = "rejected", "no effect", "figures", "effect", "untyped"
ALLOWED = (REJECTED, SAME, FIGURES)


class Case(NamedTuple):
    """A damage, and what came of it."""

    file: str
    damage: str
    outcome: str
    said: str


def train(folder: Path) -> Path:
    """A run of four updates and two checkpoints."""
    import drivetrain

    return Path(str(drivetrain.train([*RUN, f"output_dir={folder}"]).run_dir))


def damages(run: Path, count: int, seed: int) -> Iterator[tuple[str, str, bytes]]:
    """Yield this many damages: a file, what is done to it, and its bytes then. Every file has as many as any other."""
    draw = random.Random(seed)
    files = sorted(p for p in run.rglob("*") if p.is_file() and p.stat().st_size)
    for number in range(count):
        file = files[number % len(files)]
        content = bytearray(file.read_bytes())
        place = draw.randrange(len(content))
        if draw.random() < 0.2:
            yield str(file.relative_to(run)), f"cut to {place} bytes", bytes(content[:place])
        else:
            bit = draw.randrange(8)
            content[place] ^= 1 << bit
            yield str(file.relative_to(run)), f"bit {bit} of byte {place}", bytes(content)


def judge(run: Path, file: str, content: bytes, whole: Whole) -> tuple[str, str]:
    """Damage one file, read the run, and put the file back. Return the outcome and what was said."""
    from drivetrain.core.errors import UserError

    path = run / file
    before = path.read_bytes()
    path.write_bytes(content)
    try:
        seen = whole.read(run, file)
    except UserError as error:
        return REJECTED, str(error).splitlines()[0]
    except Exception as error:
        return UNTYPED, f"{type(error).__name__}: {error}"
    finally:
        path.write_bytes(before)
    if seen.passed_over:
        return REJECTED, seen.passed_over[0]
    if seen.resumed != whole.seen.resumed:
        return EFFECT, f"{seen.resumed} instead of {whole.seen.resumed}"
    return (SAME, "") if seen.shown == whole.seen.shown else (FIGURES, "")


class Seen(NamedTuple):
    """What readers take from a run."""

    passed_over: list[str]
    resumed: Any  # the config of a resumed run, and the bytes that it starts from
    shown: str  # what a report reads


class Whole:
    """A run as it was before any damage."""

    def __init__(self, run: Path) -> None:
        self._hashes: dict[str, Any] = {}
        self._config: Any = None
        self.seen = self.read(run, "")

    def read(self, run: Path, damaged: str) -> Seen:
        """Read a run as resuming and reporting do. Only a damaged checkpoint is another config's start: composing is slow."""
        from drivetrain.launch import launcher
        from drivetrain.run import identity, reader
        from drivetrain.saving import manifest

        of_checkpoint = damaged.startswith("checkpoints/")
        if self._config is None or not of_checkpoint:
            job = launcher.prepare([f"resume={run}"])
            config = job.config_hash, str(identity.without_machine_local(job.composed, job.not_compared))
            self._config = self._config or config
        else:
            config = self._config
        problems = [wrong for each in sorted(manifest.checkpoints(run)) if (wrong := manifest.verify(each)) is not None]
        found, _ = manifest.newest_valid(run)
        start = None if found is None else (found.name, [(f.name, manifest.sha256(f)) for f in sorted(found.iterdir())])
        return Seen(problems, (config, start), "" if of_checkpoint else repr(reader.read(run)))


def campaign(run: Path, count: int, seed: int) -> list[Case]:
    """Damage a run so often, once at a time."""
    whole = Whole(run)
    return [Case(file, damage, *judge(run, file, content, whole)) for file, damage, content in damages(run, count, seed)]


def summary(cases: Sequence[Case]) -> dict[str, dict[str, int]]:
    """How often each outcome came, for each file."""
    found: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for case in cases:
        found[case.file][case.outcome] += 1
    return {file: dict(counts) for file, counts in sorted(found.items())}


def main() -> None:
    """Train, damage, show, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=CASES)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    folder = Path(tempfile.mkdtemp())
    try:
        cases = campaign(train(folder), given.cases, given.seed)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    table = summary(cases)
    outcomes = (*ALLOWED, EFFECT, UNTYPED)
    rows = [[file, *(str(counts.get(outcome, 0)) for outcome in outcomes)] for file, counts in table.items()]
    harness.table(f"{len(cases)} damages", ["file", *outcomes], rows)
    totals = collections.Counter(case.outcome for case in cases)
    wrong = [case._asdict() for case in cases if case.outcome not in ALLOWED]
    content = {"machine": harness.machine(), "seed": given.seed, "cases": len(cases), "outcomes": dict(totals), "files": table}
    harness.write(given.out or harness.RESULTS / "flips-cpu.json", {**content, "wrong": wrong})
    raise SystemExit(bool(wrong))


if __name__ == "__main__":
    main()
