"""`python -m bench.gpu lease|smoke|right|clock|speed`: what a machine with a CUDA device is asked (docs/gpu.md).

A call ends after `--minutes`; the next one goes on. `--results` is the folder of the JSON files, `--out` one that travels: what
changes is copied there at once. `--rows` names rows, by commas, with * for anything (with `lease`: rows of all stages); without
it all run on a device, and some on a CPU. `--jobs` rows run at a time, where nothing is timed. `--cpu` runs the form of a CPU
also where there is a device, `--retry` runs rows again that failed or were killed.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path

from bench import harness
from bench.gpu import campaign
from bench.gpu.campaign import Campaign, Row

PRELOADED = (
    "torch", "torch._dynamo", "torch._inductor.config", "torch.utils.flop_counter", "torchvision", "timm", "timm.data.loader",
    "timm.optim", "drivetrain.config.validate", "drivetrain.engine.build", "drivetrain.launch.elastic",
    "drivetrain.launch.launcher", "drivetrain.measure.benchmark.compare", "drivetrain.measure.profile.doctor",
    "drivetrain.measure.tune.tune",
)  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Run one stage; 1 if a row failed or was killed."""
    given = harness.parse(
        __doc__, None, argv, stage=("lease", *campaign.STAGES), minutes=9.0, results=harness.RESULTS, rows=str, jobs=int,
        cpu=False, retry=False,
    )  # fmt: skip
    if missing := campaign.missing(campaign.MODULES):
        sys.exit(f"not installed here: {', '.join(missing)}. Carry their wheels, and put them on PYTHONPATH (docs/gpu.md)")
    if given.cpu:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the children are ended too
    if given.out is None:
        return run(given)
    cache = campaign.cache_folder()
    try:
        return run(given)
    finally:
        campaign.keep_cache(cache, given.out)


def run(given: argparse.Namespace) -> int:
    """Run what is open of a stage, or of the lease."""
    until = time.monotonic() + 60 * given.minutes  # the imports count: a cold disk takes a minute for them
    _preload()
    modules = {
        name: import_module(f"bench.gpu.{name}") for name in (campaign.STAGES if given.stage == "lease" else (given.stage,))
    }
    facts = harness.in_process(campaign.device_facts)
    about = {**facts, "machine": harness.machine(), "commit": campaign.commit(), "missing": campaign.missing(campaign.OF_USE)}
    name = facts["device_name"].lower().replace(" ", "-")
    summaries = {name: module.summary for name, module in modules.items()}
    work = Campaign(given.results, name, about, until, summaries, given.out)
    cores = os.cpu_count() or 1
    jobs = given.jobs or max(1, cores // 2)
    with tempfile.TemporaryDirectory() as folder:
        work.hidden += [f"{folder}/", *([str(given.out), f"{os.environ['TORCHINDUCTOR_CACHE_DIR']}/"] if given.out else [])]
        found: dict[str, list[Row]] = {}
        for name, module in modules.items():
            place = Path(folder) / name
            place.mkdir()
            found[name] = [replace(row, stage=name) for row in module.rows(facts["device"], place)]
        if given.stage == "lease":
            rows = [row for stage in found.values() for row in stage] if given.rows else campaign.ordered(found)
        else:
            rows = found[given.stage]
            if facts["device"] == "cpu" and not given.rows:
                rows = campaign.chosen(rows, modules[given.stage].CPU_ROWS)
        rows = campaign.chosen(rows, given.rows.split(",")) if given.rows else rows
        left = work.run(rows, jobs, given.retry, max(1, 3 * cores // (2 * jobs)))
    bad = [row.name for row in rows if work.rows(row.stage).get(row.name, {}).get("status") in ("failed", "killed")]
    print(f"{len(rows) - len(left)} of {len(rows)} rows are done, {len(bad)} failed", *bad, sep="\n  ")
    print("written to", *dict.fromkeys(str(file) for row in rows for file in work.files(row.stage)), sep="\n  ")
    if left:
        print(f"the same command goes on with the other {len(left)}")
    return int(bool(bad))


def _preload() -> None:
    """Import what the children need, once for all of them. Nothing of torch runs here, so that they can use CUDA and fork."""
    for name in PRELOADED:
        import_module(name)
    import_module("drivetrain.launch.job").prepare([])  # what reads the config has parsed its grammars then


if __name__ == "__main__":
    sys.exit(main())
