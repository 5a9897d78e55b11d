"""result.json: the outcome of a run. Every run writes one, even a failed run."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields
from html import escape
from pathlib import Path
from typing import Any, get_type_hints

from drivetrain.core.errors import EXIT_OF_STATUS, FAILED
from drivetrain.core.machine.files import read_json, write_json
from drivetrain.core.options.selection import Figure
from drivetrain.core.typed import JsonMapping, JsonObject, fits, is_number, is_table

TOLD = 0.02  # from this width on, a figure is shown with its interval


def interval(share: float, count: int) -> tuple[float, float]:
    """The 95 % interval of a share of `count` samples (Wilson 1927)."""
    z = 1.96
    middle, width = share + z * z / (2 * count), z * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    scale = 1 + z * z / count
    return (middle - width) / scale, (middle + width) / scale


def uncertainty(share: float, count: int) -> str:
    """The interval of a share in words; "" with enough samples, or for a figure that is not a share."""
    low, high = interval(share, count) if count > 0 and 0 <= share <= 1 else (0.0, 0.0)
    return f"({count:,} samples: {low:.2f} to {high:.2f})" if high - low > TOLD else ""


@dataclass
class Result:
    """A run's outcome. Times in seconds unless the name says otherwise; null if the run did not get that far."""

    status: str = "failed"  # completed, failed, diverged, interrupted
    error: str | None = None
    remarks: list[str] = field(default_factory=list)  # on its figures: exploded, at chance, overfitted, still improving
    # By set (validation, for selection; test, at the end) and weights: final, best, and averaged if checkpoints were averaged.
    metrics: dict[str, dict[str, JsonObject]] = field(default_factory=lambda: {"test": {}})
    selection: dict[str, str] | None = None  # the metric that ranks models, and its better direction: min or max
    tables: dict[str, dict[str, JsonObject]] = field(default_factory=dict)  # by set and weights: name → rows, columns, values
    stopped: str | None = None  # reason for an end before the last epoch
    target: JsonObject | None = None  # reach, and the update, samples, seconds and energy_joules when it was reached, or null
    batch: JsonObject | None = None  # basis of batch=critical's choice of the global batch
    updates: int = 0
    epochs: float = 0.0
    samples_per_second: float | None = None
    step_ms_p50: float | None = None
    step_ms_p95: float | None = None
    data_wait_fraction: float | None = None
    flops_per_sample: float | None = None  # floating-point operations of the model, forward and backward
    mfu: float | None = None  # model FLOPs utilization
    mfu_note: str | None = None  # the peak as reference, or why mfu is null
    skipped_samples: int | None = None  # unreadable samples; null if the data cannot skip
    peak_memory_bytes: int | None = None
    own_process: bool = False  # its process ran this run alone; otherwise a CPU's peak memory includes other work
    energy_joules: float | None = None  # of the GPUs in training, by their own counters; null without one
    shares: dict[str, int] = field(default_factory=dict)  # figure that is a share of a test set's samples → number of samples
    data: JsonObject | None = None  # the fingerprint of the training set: hash, of (the hashed quantity), samples
    resumed_at: int | None = None  # first update of this part of the run; null for the whole run
    time_to_first_step_s: float | None = None
    compile_s: float | None = None
    wall_s: float = 0.0
    world_size: int = 1
    device: str | None = None  # its type
    device_name: str | None = None
    overrides: list[str] = field(default_factory=list)
    config_hash: str | None = None
    # Not in the file.
    run_dir: Path | None = None  # its directory
    code: int = field(default=FAILED, init=False, repr=False, compare=False)  # the exit code of its process
    signal: int = field(default=0, init=False, repr=False, compare=False)  # signal that stopped the run

    def write(self, run_dir: Path) -> None:
        """Write run_dir/result.json atomically."""
        write_json(run_dir / "result.json", {k: v for k, v in asdict(self).items() if k not in ("run_dir", "code", "signal")})

    @property
    def in_short(self) -> str:
        """Its error in one line, else the main remark on its figures, else ""."""
        return (self.error or next(iter(self.remarks), "").partition(":")[0]).split("\n")[0]

    @property
    def trained_nothing(self) -> bool:
        """True if it was resumed at its end."""
        return bool(self.resumed_at) and self.resumed_at == self.updates

    @property
    def judged_by(self) -> str:
        """The set that judges this run: validation, or test without one."""
        return "validation" if "validation" in self.metrics else "test"

    def judged(self, evaluation: str = "final") -> JsonObject:
        """Return the figures that judge this run: final, best or averaged; {} without any."""
        return self.metrics.get(self.judged_by, {}).get(evaluation, {})

    @property
    def loss(self) -> float | None:
        """The final loss on the selection set; among several sets, on the one with the metric."""
        of_set = Figure.parse((self.selection or {}).get("metric", "")).set
        return self.judged().get(str(Figure("loss", set=of_set)))

    def tested(self, evaluation: str = "final") -> JsonObject:
        """Return the figures of the test set, for reports, never for selection; {} without any."""
        return self.metrics.get("test", {}).get(evaluation, {})

    def interval(self, of_set: str, name: str, value: float) -> tuple[float, float] | None:
        """The 95 % interval of a figure that is a share of a test set's samples; None for other figures."""
        count = self.shares.get(name, 0) if of_set == "test" else 0
        return interval(value, count) if count > 0 and is_number(value) and 0 <= value <= 1 else None

    def uncertainty(self, of_set: str, name: str, value: float) -> str:
        """The range of `interval` in words; "" if the test set is large enough."""
        return uncertainty(value, self.shares[name]) if self.interval(of_set, name, value) else ""

    def note_on_best(self, of_set: str, name: str, number: Callable[[float], str] = "{:.4g}".format) -> str:
        """The best evaluation's value next to a figure's final one; "" if it adds nothing.

        The best evaluation has the best ranking metric on the selection set. `number` writes a value.
        """
        best = self.metrics[of_set].get("best", {})
        selects = of_set == self.judged_by and (self.selection is None or self.selection["metric"] == name)
        if name not in best:
            return ""
        if best.get("update") == self.updates:
            return "(the best)" if selects else ""
        return f"(best {number(best[name])}{self.when(best)})" if selects else f"({number(best[name])} at the best epoch)"

    def when(self, figures: JsonMapping) -> str:
        """The time of an evaluation in words: the epoch if all epochs have one length, else the update."""
        update = figures.get("update")
        if update is None or not self.updates:
            return ""
        epoch = update * self.epochs / self.updates
        return f" after epoch {epoch:.0f}" if abs(epoch - round(epoch)) < 1e-6 else f" at update {update:,}"

    @property
    def passes(self) -> str:
        """The epochs that the run made, in words."""
        whole = abs(self.epochs - round(self.epochs)) < 1e-6
        return f"{self.epochs:,.0f} epoch{'s' * (round(self.epochs) != 1)}" if whole else f"{self.epochs:,.2f} epochs"

    @property
    def time_to_target(self) -> str:
        """The time when the run reached its target, in words; "" without a target."""
        found = self.target or {}
        if (update := found.get("update")) is None:
            return f"{found['reach']} was not reached" if "reach" in found else ""
        return f"{found['reach']} after {update:,} updates, {found['samples']:,} samples, {found['seconds']:.1f} s"

    @property
    def history(self) -> Any:
        """The measurements during training as a pandas DataFrame: a row for each record of metrics.jsonl."""
        from drivetrain.run import records

        return records.history(self.run_dir)

    def plot(self) -> Any:
        """Return a matplotlib figure of the loss, the metric, the learning rate and the speed over the updates."""
        from drivetrain.run import records

        return records.plot(self.run_dir, (self.selection or {}).get("metric", "accuracy"))

    def rows(self, number: Callable[[float], str] = "{:.4g}".format, noted: bool = False) -> list[tuple[str, str]]:
        """The facts of the result as (name, words), without remarks if these are `noted` elsewhere."""
        rate, step, tail, waits = self.samples_per_second, self.step_ms_p50, self.step_ms_p95, self.data_wait_fraction
        page = self.run_dir / "report.html" if self.run_dir is not None else None
        unknown = "" if self.trained_nothing else "–"
        of_metrics, averages = list[tuple[str, str]](), list[tuple[str, str]]()
        for of, by_weights in self.metrics.items():
            for name, value in by_weights.get("final", {}).items():
                notes = " ".join(filter(None, (self.uncertainty(of, name, value), self.note_on_best(of, name, number))))
                of_metrics.append((f"{of} {name}", f"{number(value):<9}{notes}".rstrip()))
            for what in ("averaged", "baseline"):
                figures = "  ".join(f"{name} {number(value)}" for name, value in by_weights.get(what, {}).items())
                averages.append((f"{of}, {what}", figures))
        found = [
            ("status", self.status + (f": {self.error}" if self.error else "")),
            ("stopped", self.stopped),
            *(("note", remark) for remark in self.remarks if not noted),
            *of_metrics,
            ("target", self.time_to_target),
            ("updates", self._length()),
            ("samples/s", number(rate) if rate else unknown),
            ("MFU", f"{100 * self.mfu:.1f} % {self.mfu_note}" if self.mfu is not None else self.mfu_note or unknown),
            ("step", f"{step:.2f} ms (p95 {tail:.2f})" if step and tail else unknown),
            ("data wait", f"{100 * waits:.1f} %" if waits is not None else unknown),
            ("peak memory", f"{self.peak_memory_bytes / 2**30:.2f} GiB" if self.peak_memory_bytes else unknown),
            *averages,
            ("skipped", f"{self.skipped_samples:,} samples that could not be read" if self.skipped_samples else ""),
            ("run", str(self.run_dir or "")),
            ("why", f"drivetrain replay {self.run_dir} shows the update" if self.run_dir and self.status == "diverged" else ""),
            ("page", str(page) if page and page.exists() else f"drivetrain report {self.run_dir} writes it" if page else ""),
        ]
        return [(name, words) for name, words in found if words]

    def _length(self) -> str:
        """The updates and epochs of a run with their seconds, or those of a resumed run's last part."""
        said = f"{self.updates:,} in {self.passes}"
        if self.trained_nothing:
            return f"{said}: nothing was left to train; resume it with a larger epochs=… (or updates=…) to go on"
        since = f"those since {self.resumed_at:,} in " if self.resumed_at else ""
        return f"{said}, {since}{self.wall_s:.1f} s"

    def _repr_html_(self) -> str:
        """The result as a table, for notebooks."""
        rows = [*self.rows(), ("device", self.device_name), ("ranks", self.world_size), ("overrides", " ".join(self.overrides))]
        cells = (
            f"<tr><th>{escape(name)}</th><td>{escape(' '.join(str(words).split()))}</td></tr>" for name, words in rows if words
        )
        return f"<table>{''.join(cells)}</table>"

    @classmethod
    def read(cls, run_dir: Path) -> Result | None:
        """The result in a run's directory; None without one, or for one that this program cannot have written."""
        try:
            result = cls(**read_json(run_dir / "result.json"), run_dir=run_dir)
        except (OSError, ValueError, TypeError, RecursionError):
            return None
        result.code = EXIT_OF_STATUS.get(str(result.status), FAILED)
        return result if result._fits() else None

    def _fits(self) -> bool:
        """True if every field has this program's type. Malformed tables are left out."""
        kinds = get_type_hints(Result)
        if not all(fits(getattr(self, field.name), kinds[field.name]) for field in fields(self)):
            return False
        if self.target is not None and not _is_time_to_target(self.target):
            return False
        for evaluations in self.tables.values():
            for name, found in evaluations.items():
                evaluations[name] = {key: table for key, table in found.items() if is_table(table)}
        return True


def _is_time_to_target(target: dict[str, object]) -> bool:
    """True for a run's record of its target."""
    kind = float if target.get("update") is not None else None
    return isinstance(target.get("reach"), str) and all(
        value is None if kind is None else fits(value, kind) for value in map(target.get, ("update", "samples", "seconds"))
    )
