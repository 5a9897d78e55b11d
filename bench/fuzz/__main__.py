"""`python -m bench.fuzz`: each kind in a process of its own, shown in a table and written to bench/results."""

from __future__ import annotations

import argparse
from pathlib import Path

import bench.fuzz
from bench import harness
from bench.fuzz.isolated import KINDS, run
from bench.fuzz.judged import ACCEPTED, DEFECT, EXAMPLES, REFUSED, SEED


def main() -> None:
    """Judge, show, write."""
    parser = argparse.ArgumentParser(description=bench.fuzz.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--examples", type=int, default=EXAMPLES, help="of each kind")
    parser.add_argument("--only", choices=KINDS, action="append")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time")
    parser.add_argument("--journal", type=Path, help="a file to which what was judged goes, and from which a later call goes on")
    parser.add_argument("--again", action="store_true", help="judge again what was a defect by the journal")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    kinds = run(given.only or KINDS, given.examples, given.seed, given.jobs, given.journal, given.again)
    outcomes = ("examples", ACCEPTED, REFUSED, DEFECT)
    harness.table("odd input", ["kind", *outcomes], [[kind, *(str(c[o]) for o in outcomes)] for kind, c in kinds.items()])
    for kind, counts in kinds.items():
        for wrong in counts["wrong"]:
            print(f"{kind}: {wrong['said']}\n    {wrong['made'][:300]}")
    content = {"machine": harness.machine(), "seed": given.seed, "kinds": kinds}
    harness.write(given.out or harness.RESULTS / "fuzz-cpu.json", content)
    raise SystemExit(any(counts[DEFECT] for counts in kinds.values()))


if __name__ == "__main__":
    main()
