"""Trying micro-batches in a process that may die of it. Nothing of a trial reaches the run.

The parent calls `fitting`. The child (`python -m drivetrain.launch.batch_probe`) takes two steps at each size, smallest
first, and says each size that went well, until it is out of memory, is killed, or is through.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from drivetrain.core.errors import FAILED, UserError

OUT_OF_MEMORY = 3  # the child's exit code
FITS = "fits"  # the child's word for one size done
SHARE = 0.95  # of a CUDA device's memory: the rest is for fragmentation and the ranks' communication


def fitting(words: Sequence[str], config_dirs: Sequence[str], sizes: Sequence[int], limit_gb: float | None) -> int:
    """How many of these ascending micro-batch sizes fit, from the first."""
    task = {"words": list(words), "config_dirs": list(config_dirs), "sizes": list(sizes), "limit_gb": limit_gb}
    path = os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])
    env = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")} | {"PYTHONPATH": path}
    done = subprocess.run(
        [sys.executable, "-m", "drivetrain.launch.batch_probe"],
        input=json.dumps(task),
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode == FAILED:
        raise UserError(f"batch=auto: a trial step failed: {done.stderr.strip().splitlines()[-1]}")
    return sum(line == FITS for line in done.stdout.splitlines())


def main() -> None:
    """The child."""
    task = json.load(sys.stdin)
    if task["limit_gb"]:
        threading.Thread(target=_die_above, args=(task["limit_gb"] * 2**30,), daemon=True).start()
    from drivetrain.core.context import BuildContext
    from drivetrain.core.device import is_out_of_memory
    from drivetrain.core.overrides import key_of
    from drivetrain.core.world import World
    from drivetrain.engine import build, dry_run
    from drivetrain.launch.job import prepare

    # Searching eagerly: a compiled graph for each size would take minutes and hold its own memory.
    off = ["parallel=single", "compile=none", "saving=none", "debug=none"]
    if "checkpointing=budget" in task["words"]:  # the compiler's: without one everything is kept
        off.append("checkpointing=none")
    groups = {word.partition("=")[0] for word in off}
    words = [word for word in task["words"] if key_of(word).split(".")[0] not in groups]
    job = prepare([*words, *off], task["config_dirs"])
    trainer = build.build(BuildContext(job.run, World(), Path(os.devnull)), [])
    if trainer.device.type == "cuda":
        import torch

        torch.cuda.set_per_process_memory_fraction(SHARE)
    for size in task["sizes"]:
        try:
            for _ in range(2):  # the second has the optimizer's state in memory
                dry_run.forward_backward(trainer, size)
                trainer.step.update()
                trainer.step.zero_grad()
        except RuntimeError as error:
            if is_out_of_memory(error):
                os._exit(OUT_OF_MEMORY)
            raise
        print(FITS, flush=True)


def _die_above(limit: float) -> None:
    from drivetrain.core.device import peak_memory_of_process

    while True:
        if peak_memory_of_process() > limit:
            os._exit(OUT_OF_MEMORY)
        time.sleep(0.005)


if __name__ == "__main__":
    main()
