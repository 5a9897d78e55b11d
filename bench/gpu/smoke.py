"""Starts: every option of every group, and the risky pairs, train two updates, and the verbs that measure say what they find.

The options are those of the catalog, plugins' too. What an option wants beside it is what the tests of pairs give it.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.support import pairwise

from bench import harness
from bench.gpu import campaign
from bench.gpu.campaign import Row
from drivetrain.config.catalog import LISTS, option_keys, options

RISKY = ("loader", "compile", "precision", "parallel")  # each option of one with each option of another
COMPILES_S, LIMIT_S = 180.0, 90.0
SPECIAL: dict[str, tuple[str, ...]] = {
    "batch=auto with all memory": ("batch=auto", "batch.memory_gb=null"),
    "the profiler's window": ("debug=profile", "debug.skip=0", "debug.warmup=1", "debug.window=2", "updates=4"),
    "host_sync from the start": ("debug=host_sync", "debug.skip=0", "updates=4", "log_every=2"),
    "nvtx's window": ("debug=nvtx", "debug.skip=0", "debug.window=2", "updates=4"),
    "amp compiled ddp device": ("loader=device", "compile=inductor", "precision=amp", "parallel=ddp"),
    "bf16 regional fsdp threads": ("loader=threads", "compile=regional", "precision=bf16", "parallel=fsdp"),
    "amp whole step resident": ("loader=resident", "compile=step", "precision=amp", "data=digits"),
    "bf16 CUDA graph workers": ("loader=workers", "compile=cudagraph", "precision=bf16"),
}
DIGITS = ("data=digits", "model=resnet9")
VERBS: dict[str, tuple[str, ...]] = {
    "compare": (*DIGITS, "precision=fp32,bf16", "compile=none,inductor,step", "rounds=6", "block_s=0.3"),
    "doctor": (*DIGITS, "profile_s=1", "rounds=6", "block_s=0.2"),
    "tune": (*DIGITS, "budget_s=150", "rounds=4", "block_s=0.2", "quality=false", "lr_updates=60"),
}
TINY = ("data=digits", "model=mlp", "model.hidden=[16]", "optimizer=sgd", "batch.global_batch=64", "runtime.threads=1")
SMALL_VERBS: dict[str, tuple[str, ...]] = {  # of the CPU's form
    "compare": (*TINY, "precision=fp32,bf16", "rounds=1", "block_s=0.02"),
    "doctor": (*TINY, "prove=false", "profile_s=0.1"),
    "tune": (*TINY, "what=batch", "rounds=1", "block_s=0.02", "quality=false", "budget_s=20"),
}
KEPT = ("compare.json", "doctor.json", "tune.json")
CPU_ROWS = (
    "optimizer=lion", "augment=[mixup]", "parallel=ddp", "compile=cudagraph", "loader=threads precision=bf16", "save and resume",
    "the profiler's window", *SMALL_VERBS,
)  # fmt: skip


def rows(device: str, folder: Path) -> list[Row]:
    """All rows of the stage."""
    harness.in_process(pairwise.prepare_folder, folder)
    words = {
        group: [f"{group}=[{name}]" if group in LISTS else f"{group}={name}" for name in names]
        for group, names in options().items()
    }
    pairs = [p for a, b in itertools.combinations(RISKY, 2) for p in itertools.product(words[a], words[b])]
    alone: list[tuple[str, ...]] = [(word,) for word in itertools.chain(*words.values())]
    found = [Row(" ".join(given), two_updates, (given, device, folder), _limit_s(given)) for given in [*alone, *pairs]]
    found += [Row(name, two_updates, (given, device, folder), _limit_s(given)) for name, given in SPECIAL.items()]
    found.append(Row("save and resume", save_and_resume, (device, folder), LIMIT_S))
    found.append(Row("torchrun", torchrun, (device, folder), LIMIT_S))
    for name, given in (VERBS if device == "cuda" else SMALL_VERBS).items():
        wanted = (name, *given, f"runtime.device={device}", f"output_dir={folder}/{name}")
        found.append(Row(name, verb, (wanted, folder / name), 280.0, keep_output=True, alone=True))
    return [*found, Row("tests marked cuda", cuda_tests, (), 240.0, keep_output=True, alone=True)]


def two_updates(words: Sequence[str], device: str, folder: Path) -> dict[str, Any]:
    """Train with these options."""
    sys.path.insert(0, str(folder))
    return campaign.facts(campaign.train(overrides(words, device, folder)))


def overrides(words: Sequence[str], device: str, folder: Path) -> list[str]:
    """The words of a small run on this device, each key once."""
    given = [*pairwise.complete(words, folder), f"runtime.device={device}", f"output_dir={folder}/runs"]
    for word in words:
        group, _, name = word.partition("=")
        if "nproc" in option_keys(group, name):
            given.append(f"{group}.nproc=1")
    if device == "cuda":
        given = [word.replace("[cpu,cpu]", "[cuda:0,cuda:0]") for word in given]
    return campaign.distinct([*given, *words])


def save_and_resume(device: str, folder: Path) -> dict[str, Any]:
    """Two updates and a checkpoint; a resume goes on to the fourth."""
    words = ["optimizer=adamw", "precision=amp", "ema=ema", "saving=last", "model=resnet9"]
    first = campaign.train(overrides(words, device, folder))
    again = campaign.train([f"resume={first.run_dir}", "updates=4"])
    if again.updates != 4:
        raise campaign.RunFailed(f"the resumed run ended after {again.updates} of 4 updates")
    return campaign.facts(again)


def torchrun(device: str, folder: Path) -> dict[str, Any]:
    """Under torch's own launcher."""
    words = overrides(["parallel=ddp", "model=mlp"], device, folder)
    launcher = ("-m", "torch.distributed.run", "--nproc-per-node", "1", "-m", "drivetrain", "train", "-q")
    path = os.pathsep.join([str(harness.ROOT / "src"), *sys.path])
    done = subprocess.run([sys.executable, *launcher, *words], env={**os.environ, "PYTHONPATH": path}, check=False)
    if done.returncode:
        raise campaign.RunFailed(f"torchrun ended with {done.returncode}")
    return {"overrides": words}


def verb(words: Sequence[str], folder: Path) -> dict[str, Any]:
    """Run a verb as the command line does; what it wrote as JSON."""
    from drivetrain.cli.main import main

    os.environ["DRIVETRAIN_TRACEBACK"] = "1"
    code = main(words)
    written = {file.name: json.loads(file.read_text()) for file in sorted(folder.rglob("*.json")) if file.name in KEPT}
    campaign.report({"command": f"drivetrain {' '.join(words)}", "written": written})  # of a failed comparison too
    if code:
        raise campaign.RunFailed(f"drivetrain {' '.join(words)} ended with code {code}")
    return {}


def cuda_tests() -> dict[str, Any]:
    """The suite's own tests for a CUDA device."""
    path = os.pathsep.join([str(harness.ROOT / "src"), str(harness.ROOT), *sys.path])
    files = [file for file in sorted((harness.ROOT / "tests").rglob("test_*.py")) if "mark.cuda" in file.read_text()]
    where = [str(file) for file in (harness.ROOT / "tests" / "cuda", *files)]  # the whole suite takes long to collect
    command = [sys.executable, "-m", "pytest", "-q", "-m", "cuda", "-p", "no:cacheprovider", *where]
    done = subprocess.run(command, cwd=harness.ROOT, env={**os.environ, "PYTHONPATH": path}, check=False)
    if done.returncode not in (0, 5):  # 5: there are none
        raise campaign.RunFailed(f"pytest ended with {done.returncode}")
    return {"exit_code": done.returncode}


def summary(rows: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The names of the rows by status."""
    found: dict[str, list[str]] = {}
    for name, row in rows.items():
        found.setdefault(row["status"], []).append(name)
    return {"counts": {status: len(names) for status, names in found.items()}} | {
        status: names for status, names in found.items() if status not in ("ok", "refused")
    }


def _limit_s(words: Sequence[str]) -> float:
    return COMPILES_S if any(word.startswith(("compile=", "checkpointing=budget")) for word in words) else LIMIT_S
