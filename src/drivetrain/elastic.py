"""The ranks of one machine, started by torch's elastic launcher from the one composed config."""

from __future__ import annotations

import json
import logging
import os
import sys
import time
import uuid
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drivetrain.errors import FAILED, INTERRUPTED
from drivetrain.measure.result import Result, write_json
from drivetrain.signals import ASKED_TO_STOP, StopFlag

if TYPE_CHECKING:
    from drivetrain.job import Job


def run(job: Job, run_dir: Path, ranks: int, quiet: bool) -> tuple[Result, int]:
    """Run the job on `ranks` processes; rank 0's result, or the reason of the rank that failed first.

    The ranks are forked: this process has imported torch and run nothing of it, so they start in 0.1 s.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # its tables repeat what we say once
    told = run_dir / "ranks"
    told.mkdir(exist_ok=True)
    for old in told.glob("*.json"):
        old.unlink()
    sys.stdout.flush()
    signals = ",".join(s.name for s in ASKED_TO_STOP)
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = signals
    newer: dict[str, Any] = {"signals_to_handle": signals} if "signals_to_handle" in LaunchConfig.__dataclass_fields__ else {}
    config = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=ranks, run_id=uuid.uuid4().hex, rdzv_backend="c10d",
        rdzv_endpoint="localhost:0", max_restarts=0, monitor_interval=0.1, start_method="fork", local_addr="localhost",
        logs_specs=DefaultLogsSpecs(log_dir=str(told), redirects=dict.fromkeys(range(1, ranks), Std.ALL)), **newer,
    )  # fmt: skip
    died: set[int] = set()
    try:
        elastic_launch(config, _entry)(job, run_dir, quiet)
    except ChildFailedError as error:  # the ranks have told why, but those that could not
        died = set(error.failures)
    except SignalException:
        pass
    return _outcome(told, ranks, died)


def _entry(job: Job, run_dir: Path, quiet: bool) -> None:
    """One rank: its result goes to ranks/<rank>.json, its exit code to the launcher."""
    from drivetrain.launch import _rank, _world_of_environment

    world = _world_of_environment()
    with StopFlag() as stop:
        result, code = _rank(job, world, run_dir, stop, quiet)
    content = {**asdict(result), "code": code, "time": time.time(), "run_dir": None}
    write_json(run_dir / "ranks" / f"{world.rank}.json", content)
    if code:
        sys.stdout.flush()
        os._exit(code)  # at once: the launcher ends the ranks that wait for this one


def _outcome(told: Path, ranks: int, died: set[int]) -> tuple[Result, int]:
    """What the ranks came to; `died` are those whose end made the launcher end the others."""
    ended = {}
    for rank in range(ranks):
        try:
            ended[rank] = json.loads((told / f"{rank}.json").read_text())
        except (OSError, ValueError):
            continue
    main = ended.get(0)
    if main is not None and (main["code"] == INTERRUPTED or (len(ended) == ranks and not any(e["code"] for e in ended.values()))):
        rank, content = 0, main
    else:
        failed = {r: e for r, e in ended.items() if e["code"]}
        lost = sorted(set(range(ranks)) - set(ended))
        if not failed or (lost and _is_consequence(failed)):
            names = " and ".join(f"rank {r}" for r in sorted(died.intersection(lost)) or lost) or "a rank"
            base = main or {"world_size": ranks}
            content = {
                **base,
                "status": "failed",
                "error": f"{names} died without a word (killed, or out of memory)",
                "code": FAILED,
            }
            rank = 0
        else:
            own = {r: e for r, e in failed.items() if not _is_consequence({r: e})} or failed
            rank = min(own, key=lambda r: own[r]["time"])
            content = {
                **(main or {}),
                **{k: own[rank][k] for k in ("status", "error", "code", "world_size", "overrides", "config_hash")},
            }
            if rank:
                content["error"] = f"rank {rank}: {content['error']}"
    code = content.pop("code")
    content.pop("time", None)
    return Result(**content), code


def _is_consequence(failed: dict[int, dict[str, object]]) -> bool:
    """Whether all of these ranks failed only because another was gone."""
    signs = ("Connection closed by peer", "Connection reset", "gloo", "NCCL", "Broken pipe")
    return all(any(sign in str(e["error"]) for sign in signs) for e in failed.values())
