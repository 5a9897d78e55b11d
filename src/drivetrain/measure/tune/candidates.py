"""What could make a run faster without changing what it computes: words to try, from the run as it is."""

from __future__ import annotations

from collections.abc import Sequence

from drivetrain.compile import op_by_op
from drivetrain.config.catalog import LISTS, option_keys, options
from drivetrain.core.cpus import usable_cores
from drivetrain.core.overrides import key_of
from drivetrain.launch.job import Job
from drivetrain.parallel import cuda_devices

MOST_STEPS = 16


def over(words: Sequence[str], more: Sequence[str], config_dirs: Sequence[str] = ()) -> list[str]:
    """`more` laid over `words`: of one key the later holds, and knobs that a newly chosen option does not have go."""
    return [*under(words, more, config_dirs), *more]


def under(words: Sequence[str], more: Sequence[str], config_dirs: Sequence[str] = ()) -> list[str]:
    """Those of `words` that still hold with `more` laid over them."""
    groups = options(tuple(config_dirs))
    keys = {key_of(word) for word in more}
    chosen = {key_of(w): w.partition("=")[2] for w in more if key_of(w) in groups and key_of(w) not in LISTS}

    def stays(word: str) -> bool:
        group, _, knob = key_of(word).partition(".")
        if key_of(word) in keys:
            return False
        return not knob or group not in chosen or knob.split(".")[0] in option_keys(group, chosen[group], config_dirs)

    return [word for word in words if stays(word)]


def loaders(job: Job) -> list[str]:
    """Every loader, and how many readers, workers or threads, where it has any."""
    cores = usable_cores()
    counts = sorted({1, max(1, cores // 2), cores, 2 * cores})  # more than the cores: for readers that wait and do not compute
    found = []
    for option in options()["loader"]:
        counted = sorted(key for key in option_keys("loader", option, ()) if key.startswith("num_"))
        found += [f"loader={option} loader.{counted[0]}={n}" for n in counts] if counted else [f"loader={option}"]
    return _others([words for words in found if words != "loader=auto"], job, "loader")  # auto chooses among them itself


def splits(job: Job) -> list[str]:
    """Micro-batches of the same global batch."""
    if job.run.choices["batch"] not in ("fixed", "accumulate"):
        return []
    ranks, size = job.run.parallel.data_ranks(), job.run.batch.size(0)
    steps = [n for n in (2**k for k in range(1, MOST_STEPS.bit_length())) if size % (n * ranks) == 0]
    return _others(["batch=fixed", *(f"batch=accumulate batch.accumulation_steps={n}" for n in steps)], job, "batch")


def arithmetic(job: Job) -> list[str]:
    """Precision and memory layout: together, for one may pay only with the other."""
    choices = job.run.choices
    layouts = [] if "channels_last" in choices["surgery"] else [f"surgery=[{','.join([*choices['surgery'], 'channels_last'])}]"]
    # float16 is for CUDA devices without bfloat16: CPUs hardly have it.
    faster = ("bf16", "amp") if cuda_devices() else ("bf16",)
    precisions = [f"precision={name}" for name in faster] if choices["precision"] in ("fp32", "tf32") else []
    return [*precisions, *layouts, *(f"{precision} {layout}" for precision in precisions for layout in layouts)]


def compilers(job: Job) -> list[str]:
    """Every way to compile the step; what it would make in its own way is left open to it."""
    open_ = {"step": "".join(f" {key}={free}" for key, (_, free) in op_by_op(job.run).items())}
    return _others([f"compile={option}{open_.get(option, '')}" for option in options()["compile"]], job, "compile")


def updates(job: Job) -> list[str]:
    """The optimizer's step in one kernel, and less recomputing."""
    found = ["optimizer.fused=true"] if getattr(job.run.optimizer, "fused", None) is False else []  # null takes the fastest
    return found + (["checkpointing=none"] if job.run.choices["checkpointing"] != "none" else [])


def _others(found: Sequence[str], job: Job, group: str) -> list[str]:
    """Those that are not what the run has."""

    def is_now(words: str) -> bool:
        option, *knobs = words.split()
        values = [knob.partition("=") for knob in knobs]
        part = getattr(job.run, group)
        return option == f"{group}={job.run.choices[group]}" and all(
            str(getattr(part, key.partition(".")[2], None)) == value for key, _, value in values
        )

    return [words for words in found if not is_now(words)]
