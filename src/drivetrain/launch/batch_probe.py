"""Find out which micro-batches fit into memory, in a child process that may run out of it. The run itself is not touched.

The parent calls `count_fitting`. The child (`python -m drivetrain.launch.batch_probe`) makes two updates at each size, the
smallest first, and prints a line for each size that fits, until it is out of memory, is killed, or has tried all.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from drivetrain.core import forking, process
from drivetrain.core.errors import FAILED, UserError
from drivetrain.core.lazy import torch

if TYPE_CHECKING:
    from drivetrain.engine.trainer import Trainer
    from drivetrain.launch.job import Job

OUT_OF_MEMORY = 3  # the child's exit code
FITS = "fits"  # the child's line for one size that fits
LIMIT_S = 1800.0  # of a child: a step that hangs is not waited for any longer
MEMORY_FRACTION = 0.95  # of a device; the rest is for fragmentation and the ranks' communication


def count_fitting(
    overrides: Sequence[str], config_dirs: Sequence[str], sizes: Sequence[int], most: int, limit_gb: float | None
) -> int:
    """The number of these ascending micro-batch sizes that fit, from the first; a rank's update has `most` samples.

    `limit_gb` limits the device's memory, on a CPU the process's.
    """
    task = {
        "overrides": list(overrides), "config_dirs": list(config_dirs), "sizes": list(sizes), "most": most, "limit_gb": limit_gb
    }  # fmt: skip
    done = run_child("drivetrain.launch.batch_probe", task)
    if done.returncode == FAILED:
        raise UserError(f"batch=auto: a trial step failed: {last_line(done)}")
    return sum(line == FITS for line in done.stdout.splitlines())


def run_child(module: str, task: Mapping[str, Any], limit_s: float | None = None) -> subprocess.CompletedProcess[str]:
    """Run a module in a process of its own, with a task on its standard input. One that hangs is killed, which its end tells.

    Its standard input stays open for as long as this process waits for it: its end would end the child.
    """
    limit_s = limit_s or LIMIT_S
    env = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    env["PYTHONPATH"] = process.import_path()
    command = process.command(module)
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=env, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as child:
        held, child.stdin = child.stdin, None  # else `communicate` would close it
        assert held is not None
        with contextlib.suppress(BrokenPipeError), held:
            try:
                print(json.dumps(task), file=held, flush=True)
                out, err = child.communicate(timeout=limit_s)
            except subprocess.TimeoutExpired:
                late = f"it took longer than {limit_s / 60:.0f} minutes and was ended"
                return subprocess.CompletedProcess(command, FAILED, "", late)
            finally:
                child.kill()
    return subprocess.CompletedProcess(command, child.returncode, out, err)


def receive_task() -> dict[str, Any]:
    """In the child: the task from standard input. It ends with the process that started it."""
    task: dict[str, Any] = json.loads(sys.stdin.readline())
    forking.end_with_input()
    return task


def last_line(done: subprocess.CompletedProcess[str]) -> str:
    """What a process that failed said at its end."""
    line = (done.stderr.strip().splitlines() or [f"code {done.returncode}"])[-1]
    return line.removeprefix("drivetrain.core.errors.UserError: ")


def trial_job(task: Mapping[str, Any], more: Sequence[str] = ()) -> Job:
    """The job of a task's overrides as one process that keeps nothing, with `more` overrides."""
    from drivetrain.core.overrides import key_of
    from drivetrain.launch.job import prepare

    # Not compiled: a graph for each size would take minutes and memory of its own.
    off = ["parallel=single", "compile=none", "debug=none", *more]
    planned = prepare(task["overrides"], task["config_dirs"])
    # Nothing is saved, since there is no directory; averages that are stored with checkpoints want an option that saves.
    off.append("saving=last" if planned.run.saving.active else "saving=none")
    if planned.run.checkpointing.chosen_by_compiler and not any(word.startswith("checkpointing=") for word in more):
        off.append("checkpointing=none")  # without the compiler all activations are kept
    groups = {override.partition("=")[0] for override in off}
    overrides = [override for override in task["overrides"] if key_of(override).split(".")[0] not in groups]
    return prepare([*overrides, *off], task["config_dirs"])


def limit_memory(device: torch.device, limit_gb: float | None = None) -> None:
    """Let this process use most of a device's memory, and no more; nor more than the limit."""
    if device.type != "cpu":
        fraction = device_limit(device, limit_gb) / _total(device) if limit_gb else MEMORY_FRACTION
        torch.get_device_module(device).set_per_process_memory_fraction(fraction)


def device_limit(device: torch.device, limit_gb: float | None) -> float:
    """The bytes that a trial may allocate on a device that is no CPU."""
    most = MEMORY_FRACTION * _total(device)
    return min(most, limit_gb * 2**30) if limit_gb else most


def _total(device: torch.device) -> float:
    if device.type == "mps":
        return float(torch.mps.recommended_max_memory())
    return float(torch.get_device_module(device).get_device_properties(device).total_memory)


def main() -> None:
    """The child: read the task from standard input and try the sizes."""
    task = receive_task()
    job = trial_job(task)
    if task["limit_gb"] and job.run.runtime.device_type() == "cpu":
        threading.Thread(target=_exit_above, args=(task["limit_gb"] * 2**30,), daemon=True).start()
    from drivetrain.core.context import NO_RUN_DIR, BuildContext
    from drivetrain.core.device import is_out_of_memory
    from drivetrain.core.world import World
    from drivetrain.engine import build

    trainer = build.build(BuildContext(job.run, World(), NO_RUN_DIR), [])
    limit_memory(trainer.device, task["limit_gb"])
    for size in task["sizes"]:
        try:
            _try(trainer, size, 2 if size < task["most"] else 1)
        except RuntimeError as error:
            if is_out_of_memory(error):
                os._exit(OUT_OF_MEMORY)
            raise
        print(FITS, flush=True)


def _try(trainer: Trainer, size: int, micro_batches: int) -> None:
    """Make two updates. At the second the optimizer has its state, and a later micro-batch the gradients of those before it."""
    from drivetrain.engine import dry_run

    for count in (1, micro_batches):
        for _ in range(count):
            dry_run.forward_backward(trainer, size)
        trainer.step.update()
        trainer.step.zero_grad()


def _exit_above(limit: float) -> None:
    """Exit as if out of memory once this process has used more than `limit` bytes."""
    from drivetrain.core.device import peak_memory_of_process

    while True:
        if peak_memory_of_process() > limit:
            os._exit(OUT_OF_MEMORY)
        time.sleep(0.005)


if __name__ == "__main__":
    main()
