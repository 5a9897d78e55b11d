"""How many of the faults that a programmer could make do the tests see?

`python -m bench.mutations [--only NAME …] [--unseen] [--limit SECONDS] [--out FILE]`

Each fault is planted in a copy of the checkout, never in the checkout itself. The tests that should see it run in a process
of their own, which ends at the first failure, or after `--limit` seconds. There are three outcomes:

- seen: a test fails;
- unseen: all pass;
- timeout: the limit came first, which counts as unseen.

The tests that have seen a fault run once more without any: one that fails there too has seen nothing. Where only some faults
are run (`--only` takes parts of names, `--unseen` those that were not seen at last), the other results stay.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from bench import harness
from bench.mutations import faults, page
from bench.mutations.workshop import SEEN, Workshop

RESULTS = harness.RESULTS / "mutations-cpu.json"


def main() -> None:
    """Plant, run, show, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[])
    parser.add_argument("--unseen", action="store_true")
    parser.add_argument("--limit", type=float, default=120.0)
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args()
    before = json.loads(given.out.read_text(encoding="utf-8"))["faults"] if given.out.exists() else {}
    chosen = [
        fault
        for fault in faults.ALL
        if (not given.only or any(part in fault.name for part in given.only))
        and not (given.unseen and before.get(fault.name, {}).get("outcome") == SEEN)
    ]
    found = {}
    with Workshop(harness.ROOT) as workshop:
        for number, fault in enumerate(chosen, 1):
            outcome = workshop.judge(fault, given.limit)
            found[fault.name] = outcome._asdict()
            print(f"{number}/{len(chosen)} {outcome.outcome:8}{outcome.seconds:5.1f} s  {fault.name}: {outcome.by}", flush=True)
        wrong = workshop.failing_without_fault(sorted({f["by"] for f in found.values() if f["outcome"] == SEEN}))
    results = {fault.name: found.get(fault.name) or before.get(fault.name) for fault in faults.ALL}
    known = {name: result for name, result in results.items() if result is not None}
    seen = sum(result["outcome"] == SEEN for result in known.values())
    content = {
        "machine": harness.machine(), "count": len(known), "seen": seen, "share": seen / len(known), "faults": known,
        "fail_without_fault": wrong,
    }  # fmt: skip
    harness.write(given.out, content)
    if given.out == RESULTS:
        page.write(content)
    print(f"{seen} of {len(known)} faults are seen ({seen / len(known):.1%})")
    for test in wrong:
        print(f"fails without any fault: {test}")
    sys.exit(bool(wrong) or seen < page.WANTED * len(known))


if __name__ == "__main__":
    main()
