"""A forecast as text for the terminal, and as plain values for JSON."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

from drivetrain.measure.forecast.devices import FORECAST_ONLY, Figure
from drivetrain.measure.forecast.what_if import best
from drivetrain.ui.terminal import duration

MIB, GIB = 2**20, 2**30


def as_dict(answer: Any) -> dict[str, Any]:
    """The forecast as plain values. A figure is [value, low, high]; seconds, bytes and samples."""
    if hasattr(answer, "stages"):
        stages = [{"stage": each.title, "share": each.share, **as_dict(each.answer)} for each in answer.stages]
        return {"fits": answer.fits, "run_s": answer.whole, "stages": stages}
    found = answer.forecast
    return {
        "device": found.device,
        "source": found.source,
        "ranks": found.ranks,
        "micro_batch": found.micro_batch,
        "micro_batches": found.micro_batches,
        "peak_bytes": found.memory.peak,
        "memory": found.memory.parts,
        "memory_limit_bytes": found.memory_limit,
        "fits": found.fits,
        "flops": found.flops,
        "moved_bytes": found.moved_bytes,
        "operations": found.operations,
        "step_s": found.step,
        "compute_s": found.compute,
        "data_wait_s": found.reading,
        "network_s": found.network,
        "shares": found.shares,
        "timed_share": found.timed_share,
        "limit": found.limit,
        "updates": found.updates,
        "run_s": found.whole,
        "samples_per_second": found.samples / found.step.value,
        "data_bytes_per_second": found.sample_bytes * found.samples / found.step.value,
        "largest_micro_batch": found.largest,
        "what_if": [asdict(row) for row in answer.rows],
        "notes": answer.notes,
    }


def text(answer: Any) -> str:
    """The forecast in words and two tables."""
    if hasattr(answer, "stages"):
        return "\n".join(_staged(answer))
    found = answer.forecast
    return "\n".join(
        [*_title(found), "", *_memory(found), "", *_time(found), "", *_what_if(answer.rows, found.fits), *_notes(answer)]
    )


def _staged(answer: Any) -> Iterator[str]:
    """A run with stages: what a stage is forecast to be, the time of all, and the one that needs the most memory."""
    for number, stage in enumerate(answer.stages):
        found = stage.answer.forecast
        yield f"stage {number + 1} of {len(answer.stages)}, {100 * stage.share:.0f} % of the updates: {stage.title}"
        yield f"  peak memory   {_figure(found.memory.peak, size)}: {'fits' if found.fits else 'does NOT fit'}"
        yield f"  an update     {_figure(found.step, seconds)}; {found.samples / found.step.value:,.0f} samples a second"
        yield f"  limited by    {found.limit}"
    found = max((stage.answer.forecast for stage in answer.stages), key=lambda each: each.memory.peak.high)
    yield f"whole run     {_figure(answer.whole, run_time)}"
    yield f"peak memory   {_figure(found.memory.peak, size)} of {size(found.memory_limit)} on {found.device}"
    yield from dict.fromkeys(note for stage in answer.stages for note in _notes(stage.answer))


def _title(found: Any) -> Iterator[str]:
    ranks = f"{found.ranks} × " if found.ranks > 1 else ""
    split = f" in {found.micro_batches} micro-batches" if found.micro_batches > 1 else ""
    yield f"forecast for {ranks}{found.device} ({found.source})"
    yield f"an update has {found.samples:,} samples: {math.ceil(found.samples / found.ranks):,} on each rank{split}"


def _memory(found: Any) -> Iterator[str]:
    peak, limit = found.memory.peak, found.memory_limit
    verdict = "fits" if found.fits else "does NOT fit"
    yield f"peak memory   {_figure(peak, size)} of {size(limit)}: {verdict}"
    for kind, nbytes in found.memory.parts.items():
        yield f"  {kind:<16}{size(nbytes):>10}  {100 * nbytes / (sum(found.memory.parts.values()) or 1):3.0f} %"
    if found.largest is not None:
        yield f"largest micro-batch that fits: {_figure(found.largest, lambda n: f'{n:,.0f}')} samples"


def _time(found: Any) -> Iterator[str]:
    step = found.step
    yield f"an update     {_figure(step, seconds)}; {found.samples / step.value:,.0f} samples a second"
    yield (
        f"  {found.flops / 1e9:,.4g} GFLOP, {found.moved_bytes / 1e9:,.3g} GB moved, {found.operations:,} operations on each "
        f"rank; {found.flops / step.value / 1e12:.3g} TFLOP/s"
    )
    shares = sorted(found.shares.items(), key=lambda item: -item[1])
    yield f"  limited by {found.limit}: {', '.join(f'{name} {100 * share:.0f} %' for name, share in shares if share > 0.005)}"
    if found.timed_share:
        yield f"  {100 * found.timed_share:.0f} % of it was timed here, operation by operation; the rest is a roofline"
    pace = found.samples / step.value
    yield f"data needed   {pace:,.0f} samples a second, {size(found.sample_bytes * pace)}/s as the model gets them"
    yield f"whole run     {_figure(found.whole, run_time)} for {found.updates:,} updates and the evaluations"


def _what_if(rows: list[Any], fits: bool) -> Iterator[str]:
    if not rows:
        return
    width = max(len(row.override) for row in rows)
    yield f"{'what if':<{width}}    speed   memory"
    for row in rows:
        if row.why_not:
            yield f"{row.override:<{width}}    {row.why_not}"
        else:
            yield f"{row.override:<{width}}  × {row.speed:5.2f}  × {row.memory:5.2f}{'' if row.fits else '   does not fit'}"
    if not fits and (enough := next((row for row in rows if row.fits), None)) is not None:
        yield f"it fits with: {enough.override}"
    faster, smaller = best(rows)
    if faster is not None:
        yield f"most speed: {faster.override}"
    if smaller is not None:
        yield f"least memory: {smaller.override}"


def _notes(answer: Any) -> Iterator[str]:
    for note in answer.notes:
        yield f"note: {note}"
    if FORECAST_ONLY in answer.forecast.source:
        yield "note: no step of this device was measured: the intervals are those of efficiencies that are usual in training"


def _figure(figure: Figure, show: Callable[[float], str]) -> str:
    return f"{show(figure.value)} ({show(figure.low)} … {show(figure.high)})"


def size(nbytes: float) -> str:
    """Bytes in few characters."""
    if nbytes >= GIB:
        return f"{nbytes / GIB:.3g} GiB"
    return f"{nbytes / MIB:.3g} MiB" if nbytes >= MIB / 10 else f"{nbytes / 1024:.3g} KiB"


def seconds(value: float) -> str:
    """A short time in few characters."""
    if value >= 1:
        return f"{value:.3g} s"
    return f"{1e3 * value:.3g} ms" if value >= 1e-3 else f"{1e6 * value:.3g} µs"


def run_time(value: float) -> str:
    """The time of a run in few characters, however short it is."""
    return duration(value) if value >= 1 else seconds(value)
