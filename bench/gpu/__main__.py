"""`python -m bench.gpu smoke|right|clock|speed|verbs [--minutes M] [--out DIR]`: docs/gpu.md."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from bench import harness
from bench.gpu import campaign, children
from bench.gpu.campaign import Campaign

PRELOADED = (
    "torch", "torch._dynamo", "torch.utils.flop_counter", "torchvision", "timm", "timm.data.loader", "timm.optim",
    "drivetrain.config.validate", "drivetrain.engine.build", "drivetrain.launch.elastic", "drivetrain.launch.launcher",
    "drivetrain.measure.benchmark.compare", "drivetrain.measure.profile.doctor", "drivetrain.measure.tune.tune",
)  # fmt: skip
STAGES = ("smoke", "right", "clock", "speed", "verbs")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one stage; 1 if a row failed or was killed."""
    parser = argparse.ArgumentParser(prog="bench.gpu", description="What a machine with a CUDA device is asked; see docs/gpu.md.")
    parser.add_argument("stage", choices=STAGES)
    parser.add_argument("--minutes", type=float, default=9.0, help="this call ends after so long; the next one goes on")
    parser.add_argument("--out", type=Path, default=harness.RESULTS, help="folder of the JSON file")
    parser.add_argument("--rows", help="comma-separated names, * for anything; all on a device, some on a CPU")
    parser.add_argument("--jobs", type=int, help="rows at a time, where nothing is timed")
    parser.add_argument("--cpu", action="store_true", help="the CPU's form also where there is a device")
    parser.add_argument("--retry", action="store_true", help="run failed rows again")
    given = parser.parse_args(argv)
    if missing := campaign.missing(campaign.MODULES):
        parser.error(f"not installed here: {', '.join(missing)}. Carry their wheels, and put them on PYTHONPATH (docs/gpu.md)")
    if given.cpu:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the children are ended too
    return run(given.stage, given)


def run(stage: str, given: argparse.Namespace) -> int:
    """Run what is open of a stage."""
    _preload()
    module = import_module(f"bench.gpu.{stage}")
    device = children.call(campaign.device_facts)
    about = {key: value for key, value in device.items() if key not in ("status", "seconds", "output")}
    name = about["device_name"].lower().replace(" ", "-")
    about |= {
        "stage": stage,
        "machine": harness.machine(),
        "commit": campaign.commit(),
        "missing": campaign.missing(campaign.OF_USE),
    }
    work = Campaign(given.out / f"gpu-{stage}-{name}.json", about, given.minutes)
    patterns = given.rows.split(",") if given.rows else ["*"] if about["device"] == "cuda" else module.CPU_ROWS
    with tempfile.TemporaryDirectory() as folder:
        rows = campaign.chosen(module.rows(about["device"], Path(folder)), patterns)
        work.hidden.append(f"{folder}/")
        left = work.run(rows, _jobs(stage, given), given.retry)
    work.content["summary"] = module.summary(work.rows)
    work.content["open"] = left
    work.write()
    bad = [row.name for row in rows if work.rows.get(row.name, {}).get("status") in ("failed", "killed")]
    print(f"written to {work.file}: {len(rows) - len(left)} of {len(rows)} rows are done, {len(bad)} failed", *bad, sep="\n  ")
    if left:
        print(f"the same command goes on with the other {len(left)}")
    return int(bool(bad))


def _preload() -> None:
    """Import what the children need, once for all of them. Nothing of torch runs here, so that they can use CUDA and fork."""
    for name in PRELOADED:
        import_module(name)
    import_module("drivetrain.launch.job").prepare([])  # what reads the config has parsed its grammars then


def _jobs(stage: str, given: argparse.Namespace) -> int:
    if stage not in ("smoke", "right"):  # what is timed runs alone
        return 1
    return given.jobs or max(1, (os.cpu_count() or 1) // 4)


if __name__ == "__main__":
    sys.exit(main())
