"""Random configurations, forecast and then measured: does `drivetrain forecast` tell peak memory and time of a step?

python -m bench.forecast [--count 50] [--seed 2026] [--pool test] [--out FILE]

Peak memory is counted by torch's CPU allocator: its own record of every allocation and release (the profiler's memory events,
kernels' temporary buffers included) over the first updates, above the bytes of the tensors that were there before them. The
resident set is no measure of it: it has the interpreter, the libraries and freed memory that the process keeps. A step's time
is the processor time of one thread (runtime.threads=1), because other programs share the cores. Each configuration is forecast
and measured in processes of its own, one after the other, so that both see the same state of the machine.
"""

from __future__ import annotations

import math
import os
import random
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import accumulate
from typing import Any

from bench.harness import at, in_process, parse, table, write

FIGURES = "peak_bytes", "ms"
UPDATES, ENOUGH_S, MOST_S = 5, 1.0, 6.0  # timed updates, at least; seconds of them
IMAGES = ["data=synthetic", "data.samples=512", "data.test_samples=64", "data.classes=10", "model=timm"]
TEXT = ["task=language_modelling", "data=stdlib", "data.test_samples=100", "model=gpt"]
# Networks of timm's for each pool: those by which the intervals were set are not among those that are tested.
NETWORKS = {
    "calibration": ["resnet10t", "mobilenetv3_small_075", "convnext_femto", "vit_tiny_patch16_224", "efficientnet_lite0"],
    "test": [
        "resnet18", "resnet26", "mobilenetv3_small_100", "convnext_atto", "deit_tiny_patch16_224", "efficientnet_b0",
        "regnetx_002", "mobilenetv2_100",
    ],
}  # fmt: skip


def configurations(pool: str, seed: int) -> Iterator[list[str]]:
    """Random configurations without end: model × precision × recomputation × optimizer × batch × accumulation."""
    draw = random.Random(f"{pool} {seed}")
    while True:
        yield _configuration(draw, NETWORKS[pool])


def _configuration(draw: random.Random, networks: list[str]) -> list[str]:
    family = draw.choice(["mlp", "resnet9", "gpt", "unet", "timm", "timm"])
    recomputed = draw.choice(["none", "none", "blocks", "every_k", "selective"])
    if family == "mlp":
        model = ["model=mlp", f"model.hidden={[draw.choice([64, 256, 512, 1024])] * draw.randint(1, 6)}"]
        batch, recomputed = draw.choice([32, 128, 512]), "none"
    elif family == "resnet9":
        model = [f"model.width={draw.choice([8, 16, 24])}", "data=synthetic", f"data.shape=[3,{draw.choice([16, 32])},32]"]
        batch = draw.choice([16, 32, 64, 128])
    elif family == "gpt":
        width = draw.choice([64, 128, 192, 256])
        model = [*TEXT, f"model.width={width}", f"model.depth={draw.randint(2, 6)}", f"data.length={draw.choice([64, 128, 256])}"]
        batch = draw.choice([4, 8, 16, 32])
    elif family == "unet":
        model = ["task=segmentation", "data=digit_scenes", "model=unet", f"model.width={draw.choice([8, 16, 24])}"]
        batch = draw.choice([4, 8, 16])
    else:
        name, size = draw.choice(networks), draw.choice([32, 64, 96])
        model = [*IMAGES, f"data.shape=[3,{size},{size}]", f"model.name={name}"]
        model += [f"model.kwargs.img_size={size}"] if name.startswith(("vit", "deit")) else []
        batch = draw.choice([8, 16, 32])
    steps = draw.choice([1, 1, 2, 4])
    return [
        *model,
        f"precision={draw.choice(['fp32', 'fp32', 'bf16', 'bf16_pure'])}",
        f"checkpointing={recomputed}",
        f"optimizer={draw.choice(['sgd', 'adamw', 'adam', 'lion', 'lamb', 'rmsprop', 'novograd', 'lars'])}",
        f"batch.global_batch={batch}",
        *(["batch=accumulate", f"batch.accumulation_steps={steps}"] if steps > 1 else []),
        *(["ema=ema"] if draw.random() < 0.2 else []),
    ]


def measure(overrides: list[str]) -> dict[str, Any]:
    """Train some updates of a run, as its loop would; peak bytes of the allocator, and milliseconds of an update."""
    from torch.profiler import ProfilerActivity, profile

    from drivetrain.debug.profile import silence_profiler
    from drivetrain.engine import child
    from drivetrain.launch.job import prepare
    from drivetrain.measure.profile.phases import update

    silence_profiler()
    job = prepare([*overrides, "saving=none", "runtime.device=cpu", "runtime.threads=1"])
    taken: list[float] = []
    with ExitStack() as undone:
        before = _storages()
        trainer = child.built(job.run, math.inf, undone)
        trainer.endless()
        trainer.model.train()
        stream, there = trainer.read(), _there(trainer, before)
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            for _ in range(2):
                update(trainer, stream)
        events: Any = profiler.profiler
        memory = sorted((e.start_ns(), e.nbytes()) for e in events.kineto_results.events() if e.name() == "[memory]")
        most = max(accumulate(nbytes for _, nbytes in memory))
        update(trainer, stream)
        while (len(taken) < UPDATES or sum(taken) < ENOUGH_S) and not (sum(taken) > MOST_S and len(taken) >= 3):
            began = time.thread_time()
            update(trainer, stream)
            taken.append(time.thread_time() - began)
    return {"peak_bytes": there + most, "ms": 1e3 * statistics.median(taken), "updates": len(taken)}


def _storages() -> dict[int, int]:
    """The bytes of all tensors of this process, by storage."""
    import gc

    import torch

    gc.collect()
    tensors = [each for each in gc.get_objects() if issubclass(type(each), torch.Tensor) and each.layout == torch.strided]
    return {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}


def _there(trainer: Any, before: dict[int, int]) -> int:
    """The bytes of all tensors that building has made, without the data set's."""
    import gc

    import torch

    alive = {key: nbytes for key, nbytes in _storages().items() if key not in before}
    data: list[Any] = [trainer.train_data, *(p for sets in trainer.evaluator.sets.values() for p in sets.values()), trainer.batch]
    seen: set[int] = set()
    held: set[int] = set()
    while data:
        each = data.pop()
        if id(each) in seen or isinstance(each, type | type(os) | type(measure)):
            continue
        seen.add(id(each))
        if isinstance(each, torch.Tensor):
            held.add(each.untyped_storage()._cdata)
        elif isinstance(each, tuple | list | dict) or type(each).__module__.startswith("drivetrain."):
            data += gc.get_referents(each)
    return sum(nbytes for key, nbytes in alive.items() if key not in held)


LOOK_S = 12.0  # seconds for timing operations: the share of `drivetrain forecast`'s own on a machine that is not shared


def predict(overrides: list[str]) -> dict[str, Any]:
    """Forecast a run on this machine, with a fresh look at it."""

    import torch

    from drivetrain.debug.profile import silence_profiler
    from drivetrain.engine import child
    from drivetrain.measure.forecast.forecast import Subject, examine, plan

    silence_profiler()
    began = time.perf_counter()
    torch.set_num_threads(1)
    planned = plan([*overrides, "runtime.device=cpu", "runtime.threads=1"], (), "here")
    with ExitStack() as undone:
        subject = Subject.of(planned, child.built(planned.look(), math.inf, undone))
        found = examine(subject, LOOK_S)
        record = subject.record(found.micro_batch, ())
    return {
        "peak_bytes": found.tensors_bytes,
        "counted_bytes": sum(record.peak.values()),
        "ms": found.step_s.times(1e3),
        "compute_ms": found.compute_s.times(1e3),
        "reading_ms": found.data_wait_s.times(1e3),
        "host_us": 1e6 * subject.device.host_s.value,
        "operations": found.operations,
        "limit": found.limit,
        "seconds": time.perf_counter() - began,
    }


def judge(row: dict[str, Any]) -> None:
    """Add the errors of a row: measured / forecast, and whether the interval held."""
    for figure in FIGURES:
        value, low, high = row["forecast"][figure]
        measured = row["measured"][figure]
        row[figure] = {"ratio": measured / value, "error": abs(value / measured - 1), "held": low <= measured <= high}


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The share of measured values inside their intervals, and the errors."""
    found: dict[str, Any] = {"configurations": len(rows)}
    for figure in FIGURES:
        errors = sorted(row[figure]["error"] for row in rows)
        ratios = sorted(row[figure]["ratio"] for row in rows)
        found[figure] = {
            "inside": sum(row[figure]["held"] for row in rows) / len(rows),
            "median_error": statistics.median(errors),
            "p90_error": at(errors, 0.9),
            "measured_by_forecast": {"p5": at(ratios, 0.05), "median": statistics.median(ratios), "p95": at(ratios, 0.95)},
        }
    return found


def warm() -> None:
    """Import what forecasts need before processes are forked."""
    import timm  # noqa: F401
    import torch

    from drivetrain.engine import build  # noqa: F401

    torch.set_num_threads(1)


def main() -> None:
    """Forecast, measure, write. An interrupted campaign keeps its rows."""
    given = parse(__doc__, "forecast-cpu.json", count=50, seed=2027, pool="test")
    os.environ.update(OMP_NUM_THREADS="1")
    warm()
    rows: list[dict[str, Any]] = []
    failed: list[dict[str, Any]] = []
    for overrides in configurations(given.pool, given.seed):
        if len(rows) == given.count or len(failed) > given.count:  # the next one comes in place of one that a rule refuses
            break
        row: dict[str, Any] = {"overrides": overrides}
        try:
            row["forecast"], row["measured"] = in_process(predict, overrides), in_process(measure, overrides)
        except Exception as error:
            failed.append({**row, "error": str(error).strip()})
            print("failed:", failed[-1]["error"], " ".join(overrides), flush=True)
            continue
        judge(row)
        rows.append(row)
        said = (f"{name} × {row[name]['ratio']:.3f} {row[name]['held']}" for name in FIGURES)
        print(len(rows), *said, " ".join(overrides), file=sys.stderr, flush=True)
        write(given.out, {
            "pool": given.pool, "seed": given.seed, "clock": "processor time of one thread",
            "memory": "bytes of torch's CPU allocator (the profiler's memory events)", "summary": summary(rows),
            "failed": failed, "rows": rows,
        })  # fmt: skip
    found = summary(rows)
    cells = [(name, f"{100 * found[name]['inside']:.0f} %", f"{100 * found[name]['median_error']:.1f} %") for name in FIGURES]
    table("measured inside the forecast's interval", ("", "inside", "median error"), cells)


if __name__ == "__main__":
    main()
