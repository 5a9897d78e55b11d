"""`python -m bench.triples`: random options of three groups, trained two updates and saved, or refused with a reason.

What else happens is open (`bench.rows` runs them). A tenth of those that trained in one process are certified against the same
run with its exact and close techniques switched off.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

from tests.support import pairwise

from bench import harness
from bench.rows import OPEN, REFUSED, SLOW, TRAINED, Ended, Words, before, keep, run

SEED = 27
SMALLER = "a BatchNorm sees smaller micro-batches"
CERTIFIED = 10  # one in so many of those that trained in one process
STEPS = 2  # updates that are certified
SLOW_IN = 20  # one triple in so many may have a slow option


def drawn(seed: int, able: Callable[[str], bool], slow: bool = True) -> Iterator[Words]:
    """Triples without an end, the same ones for the same seed, of options that this machine can run."""
    dice, groups = random.Random(seed), pairwise.factors()
    for n in itertools.count():
        allowed = slow and n % SLOW_IN == 0
        words: Words = ()
        while not words or not all(able(word) and (allowed or word not in SLOW) for word in words):
            words = tuple(dice.choice(groups[group]) for group in dice.sample(sorted(groups), 3))
        yield words


def certified(number: int, overrides: list[str], run: Any) -> str | None:
    """Certify one run in ten beside its plain twin: the answer, or why there is none."""
    if number % CERTIFIED:
        return None
    from drivetrain.core.errors import UserError
    from drivetrain.launch.job import prepare
    from drivetrain.measure.benchmark import arms
    from drivetrain.measure.certify import certify, explain
    from drivetrain.measure.overrides import apply

    try:
        changes = certify.plain_changes(run)
        if not changes:
            return "none of its techniques claims to be exact or close"
        words = arms.without_saving(overrides)
        done = certify.certify(prepare(words), prepare(apply(words, changes)), STEPS)
        if explain.first_batch_norm(done.verdict, done.reference) and any(word.startswith("batch=") for word in changes):
            # Other micro-batches have other statistics. The other techniques are judged at these.
            changes = [word for word in changes if not word.startswith("batch=")]
            if not changes:
                return SMALLER
            done = certify.certify(prepare(words), prepare(apply(words, changes)), STEPS)
    except UserError as error:
        return f"cannot be judged: {error}"
    except Exception as error:
        return f"{OPEN}: {type(error).__name__}: {error}"
    return str(done.verdict.answer)


def summary(ended: Sequence[Ended]) -> dict[str, Any]:
    """Counts, and every open triple."""
    counts = Counter(each.outcome for each in ended)
    cpu = sorted(each.cpu for each in ended)
    answers = Counter(each.certified.partition(":")[0] for each in ended if each.certified is not None)
    return {
        "triples": len(ended),
        **{outcome: counts[outcome] for outcome in (TRAINED, REFUSED, OPEN)},
        "certified": dict(answers),
        "cpu_seconds": {"median": cpu[len(cpu) // 2], "mean": sum(cpu) / len(cpu)} if cpu else None,
        "open_triples": [asdict(each) for each in ended if each.outcome == OPEN or wrong(each)],
        "not_judged": [asdict(each) for each in ended if (each.certified or "").startswith("cannot be judged")],
    }


def wrong(ended: Ended) -> bool:
    """Whether it was certified and is not the same mathematics."""
    return ended.certified is not None and ended.certified.startswith(("differs", OPEN))


def main() -> None:
    """Try, show, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--triples", type=int, default=5000)
    parser.add_argument("--begin", type=int, default=0, help="the number of the first one: those below have run elsewhere")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--jobs", type=int, default=1, help="triples at a time")
    parser.add_argument("--minutes", type=float, default=600.0)
    parser.add_argument(
        "--journal", type=Path, help="a file to which each ended triple goes, and from which a later call goes on"
    )
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ["XDG_STATE_HOME"] = f"{name}/state"
        pairwise.prepare_folder(folder)
        able = cache(lambda word: pairwise.refused([word], folder) is None)
        ended = before(given.journal)
        done = {each.number for each in ended}
        numbered = enumerate(itertools.islice(drawn(given.seed, able), given.triples))
        left = ((number, words) for number, words in numbered if number >= given.begin and number not in done)
        for each in run(left, folder, given.jobs, given.minutes * 60, certified):
            ended.append(each)
            keep(each, given.journal)
            print(
                f"{len(ended)} {each.outcome}, {each.cpu:.1f} s: {' '.join(each.words)} {each.said} {each.certified or ''}",
                flush=True,
            )
    found = summary(ended)
    rows = [[name, str(found[name])] for name in ("triples", TRAINED, REFUSED, OPEN, "certified", "cpu_seconds")]
    harness.table("triples of options", ["", ""], rows)
    numbers = [min(each.number for each in ended), max(each.number for each in ended)] if ended else None
    content = {"environment": harness.machine(), "seed": given.seed, "numbers": numbers, **found}
    harness.write(given.out or harness.RESULTS / "triples-cpu.json", content)
    raise SystemExit(any(each.outcome == OPEN or wrong(each) for each in ended))


if __name__ == "__main__":
    main()
