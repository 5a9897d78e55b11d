"""Candidates: overrides that could make a run faster without changing what it computes."""

from __future__ import annotations

from collections.abc import Sequence

from drivetrain.compile import eager_only_settings
from drivetrain.config.catalog import option_keys, options
from drivetrain.core import accelerators
from drivetrain.core.cpus import usable_cores
from drivetrain.launch.job import Job
from drivetrain.measure.overrides import with_channels_last

MAX_ACCUMULATION_STEPS = 16


def loaders(job: Job) -> list[str]:
    """Every loader, with several numbers of readers, workers or threads where it has such a key."""
    cores = usable_cores()
    counts = sorted({1, max(1, cores // 2), cores, 2 * cores})  # more than the cores: for readers that wait
    found = []
    for option in options()["loader"]:
        counted = sorted(key for key in option_keys("loader", option, ()) if key.startswith("num_"))
        found += [f"loader={option} loader.{counted[0]}={n}" for n in counts] if counted else [f"loader={option}"]
    return _not_current([c for c in found if c != "loader=auto"], job, "loader")  # auto itself chooses among the others


def micro_batches(job: Job) -> list[str]:
    """Other splits of the same global batch into micro-batches."""
    if not job.run.batch.fixed_micro_batches:
        return []
    ranks, size = job.run.parallel.data_ranks(), job.run.batch.size(0)
    powers = (2**k for k in range(1, MAX_ACCUMULATION_STEPS.bit_length()))
    steps = [n for n in powers if size % (n * ranks) == 0]
    return _not_current(["batch=fixed", *(f"batch=accumulate batch.accumulation_steps={n}" for n in steps)], job, "batch")


def arithmetic(job: Job) -> list[str]:
    """Precision and memory layout, alone and together, because one may be faster only with the other."""
    layouts = with_channels_last(job.run)
    # float16 is for devices without bfloat16; hardly any CPU has it.
    faster = ("bf16", "amp") if accelerators.device_count() else ("bf16",)
    precisions = [f"precision={name}" for name in faster] if job.run.precision.full_float32 else []
    return [*precisions, *layouts, *(f"{precision} {layout}" for precision in precisions for layout in layouts)]


def compilers(job: Job) -> list[str]:
    """Every way to compile the step; a captured step gets the keys reset that would make parts of it run op by op."""
    reset = {"step": "".join(f" {key}={free}" for key, (_, free) in eager_only_settings(job.run).items())}
    return _not_current([f"compile={option}{reset.get(option, '')}" for option in options()["compile"]], job, "compile")


def updates(job: Job) -> list[str]:
    """The optimizer's step in one kernel, and no recomputation in the backward."""
    found = ["optimizer.fused=true"] if getattr(job.run.optimizer, "fused", None) is False else []  # null: already the fastest
    return found + (["checkpointing=none"] if job.run.checkpointing.active else [])


def _not_current(candidates: Sequence[str], job: Job, group: str) -> list[str]:
    """The candidates without the one that the run already uses."""

    def is_current(candidate: str) -> bool:
        option, *keys = candidate.split()
        settings = [key.partition("=") for key in keys]
        current = getattr(job.run, group)
        return option == job.run.named(group) and all(
            str(getattr(current, key.partition(".")[2], None)) == value for key, _, value in settings
        )

    return [candidate for candidate in candidates if not is_current(candidate)]
