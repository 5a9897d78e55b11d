"""result.json: the outcome of a run. Every run writes one, also one that fails."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from html import escape
from pathlib import Path
from typing import Any

from drivetrain.core.files import write_json


@dataclass
class Result:
    """A run's outcome. Times in seconds unless the name says otherwise; null where the run did not get that far."""

    status: str = "failed"  # completed, failed, diverged, interrupted
    error: str | None = None
    # By evaluation: final, best, and at the end of a run those of the best checkpoint (best_weights) and of averaged weights.
    metrics: dict[str, dict[str, float]] = field(default_factory=lambda: {"final": {}, "best": {}})
    selection: dict[str, str] | None = None  # the metric that ranks models, and which of two values is better: min or max
    tables: dict[str, dict[str, Any]] = field(default_factory=dict)  # of the same evaluations: name → rows, columns, values
    stopped: str | None = None  # why the run ended before its last epoch
    updates: int = 0
    epochs: float = 0.0
    samples_per_second: float | None = None
    step_ms_p50: float | None = None
    step_ms_p95: float | None = None
    data_wait_fraction: float | None = None
    flops_per_sample: float | None = None  # floating-point operations of the model, forward and backward
    mfu: float | None = None  # model FLOPs utilization
    mfu_note: str | None = None  # the peak that it is a share of, or why it is null
    skipped_samples: int | None = None  # that could not be read; null where the data cannot skip
    peak_memory_bytes: int | None = None
    time_to_first_step_s: float | None = None
    compile_s: float | None = None
    wall_s: float = 0.0
    world_size: int = 1
    device: str | None = None  # its type
    device_name: str | None = None
    overrides: list[str] = field(default_factory=list)
    config_hash: str | None = None
    run_dir: Path | None = None  # its directory; not in the file

    def write(self, run_dir: Path) -> None:
        """Write run_dir/result.json atomically."""
        content = asdict(self)
        del content["run_dir"]
        write_json(run_dir / "result.json", content)

    def judged(self, evaluation: str = "final") -> dict[str, Any]:
        """Return the figures that this run is judged by: those of the validation set, or of the test set where it has none.

        `evaluation` is final, best, or averaged; {} where there was none.
        """
        figures: dict[str, Any] = self.metrics.get("validation") or self.metrics.get("test") or self.metrics
        return figures.get(evaluation, {})

    def _repr_html_(self) -> str:
        """The result as a table, for notebooks."""
        final, best = self.judged("final"), self.judged("best")
        rows: list[tuple[str, Any]] = [
            ("status", self.status),
            ("error", self.error),
            ("updates", f"{self.updates:,} in {self.epochs:g} epochs"),
        ]
        rows += [(name, f"{value:.4g} (best {best.get(name, value):.4g})") for name, value in final.items()]
        rows += [("samples/s", self.samples_per_second and f"{self.samples_per_second:,.0f}"), ("time", f"{self.wall_s:.1f} s")]
        rows += [("device", self.device_name), ("ranks", self.world_size), ("overrides", " ".join(self.overrides))]
        rows += [("run", self.run_dir)]
        cells = (
            f"<tr><th>{escape(name)}</th><td>{escape(str(value))}</td></tr>" for name, value in rows if value not in (None, "")
        )
        return f"<table>{''.join(cells)}</table>"

    @classmethod
    def read(cls, run_dir: Path) -> Result | None:
        """The result in a run's directory; None where there is none."""
        try:
            return cls(**json.loads((run_dir / "result.json").read_text()), run_dir=run_dir)
        except (OSError, ValueError, TypeError):
            return None
