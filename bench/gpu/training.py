"""Trains in this process, a child of the campaign, and reads what the run left."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any


class RunFailed(Exception):
    """A run ended otherwise than it should have; the message has its error and its whole log."""


def train(overrides: Sequence[str], attach: Callable[[Any], None] | None = None, ends: str = "completed") -> Any:
    """Train to the end, in this process or in ranks that it forks; the Result. Raises RunFailed, and UserError for a refusal."""
    from drivetrain.launch import launcher

    job = launcher.prepare(list(overrides))
    job.attach = attach
    result = launcher.launch(job, quiet=True).result
    if result.status != ends:
        raise RunFailed(f"{' '.join(overrides)}\n{result.status}: {result.error}\n{_log_of(result)}")
    return result


class Sink:
    """A log writer that hands over training records; evaluations and whatever else is logged it leaves out."""

    def __init__(self, on_train: Callable[[dict[str, Any]], None]) -> None:
        self.on_train = on_train

    def log(self, record: dict[str, Any]) -> None:
        if record["event"] == "train":
            self.on_train(record)

    def close(self, status: str = "completed") -> None:
        pass


def distinct(words: Sequence[str]) -> list[str]:
    """The overrides, each key once, with the value that it was given last."""
    return list({word.partition("=")[0]: word for word in words}.values())


def facts(result: Any) -> dict[str, Any]:
    """What a row keeps of a run."""
    names = ("updates", "samples_per_second", "step_ms_p50", "compile_s", "peak_memory_bytes", "time_to_first_step_s")
    return {"overrides": result.overrides, "metrics": result.judged("final"), **{name: getattr(result, name) for name in names}}


def losses(run_dir: Path) -> list[float]:
    """The training loss of each record of a run."""
    records = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return [record["loss"] for record in records if record["event"] == "train"]


def _log_of(result: Any) -> str:
    logs = sorted(result.run_dir.glob("**/*.txt")) if result.run_dir is not None else []
    return "\n".join(f"== {log.name}\n{log.read_text(errors='replace')}" for log in logs)
