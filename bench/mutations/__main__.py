"""How many of the faults that a programmer could make do the tests see?

`python -m bench.mutations [--only NAME …] [--part PART] [--unseen] [--trust] [--limit SECONDS] [--out FILE]`

Each fault is planted in a copy of the checkout, never in the checkout itself. The tests that should see it run in a process
of their own, which ends at the first failure, or after `--limit` seconds. There are three outcomes:

- seen: a test fails;
- unseen: all pass;
- timeout: the limit came first, which counts as unseen.

The tests that have seen a fault run once more without any: one that fails there too has seen nothing; `--trust` leaves that
out. Where only some faults are run (`--only` takes parts of names, `--unseen` those that were not seen at last), the other
results stay.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from bench import harness
from bench.mutations import faults, page
from bench.mutations.workshop import SEEN, Workshop

RESULTS = harness.RESULTS / "mutations-cpu.json"


def main() -> None:
    """Plant, run, show, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[])
    parser.add_argument("--part", choices=list(faults.PARTS))
    parser.add_argument("--unseen", action="store_true")
    parser.add_argument("--trust", action="store_true")
    parser.add_argument("--limit", type=float, default=120.0)
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args()
    before = json.loads(given.out.read_text(encoding="utf-8"))["faults"] if given.out.exists() else {}
    chosen = [
        fault
        for fault in (faults.PARTS[given.part] if given.part else faults.ALL)
        if (not given.only or any(part in fault.name for part in given.only))
        and not (given.unseen and before.get(fault.name, {}).get("outcome") == SEEN)
    ]
    found, wrong = {}, []
    with Workshop(harness.ROOT) as workshop:
        for number, fault in enumerate(chosen, 1):
            outcome = workshop.judge(fault, given.limit)
            found[fault.name] = outcome._asdict()
            print(f"{number}/{len(chosen)} {outcome.outcome:8}{outcome.seconds:5.1f} s  {fault.name}: {outcome.by}", flush=True)
            given.out.write_text(json.dumps(content_of({**before, **found})), encoding="utf-8")  # what is known if it is stopped
        if not given.trust:
            wrong = workshop.failing_without_fault(sorted({f["by"] for f in found.values() if f["outcome"] == SEEN}))
    content = {**content_of({**before, **found}), "fail_without_fault": wrong}
    harness.write(given.out, content)
    if given.out == RESULTS:
        page.write(content)
    print(f"{content['seen']} of {content['count']} faults are seen ({content['share']:.1%})")
    for test in wrong:
        print(f"fails without any fault: {test}")
    sys.exit(bool(wrong) or content["share"] < page.WANTED)


def content_of(results: dict[str, Any]) -> dict[str, Any]:
    """Return what is written: the results of all faults that have run, in the order of the list."""
    known = {fault.name: results[fault.name] for fault in faults.ALL if fault.name in results}
    seen = sum(result["outcome"] == SEEN for result in known.values())
    return {"machine": harness.machine(), "count": len(known), "seen": seen, "share": seen / max(1, len(known)), "faults": known}


if __name__ == "__main__":
    main()
