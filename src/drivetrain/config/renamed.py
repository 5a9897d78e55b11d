"""Former names of options and keys, and those of other frameworks: the answer to them gives drivetrain's name."""

from __future__ import annotations

from collections.abc import Iterable

from drivetrain.core.errors import did_you_mean
from drivetrain.recipe.migrations import RENAMED as RENAMED

ELSEWHERE = {  # names of other frameworks → drivetrain's
    "batch.size": "batch.global_batch",
    "batch.batch_size": "batch.global_batch",
    "batch_size": "batch.global_batch",
    "data.batch_size": "batch.global_batch",
    "global_batch_size": "batch.global_batch",
    "accumulate_grad_batches": "batch.accumulation_steps",
    "gradient_accumulation_steps": "batch.accumulation_steps",
    "learning_rate": "optimizer.lr",
    "optimizer.learning_rate": "optimizer.lr",
    "wd": "optimizer.weight_decay",
    "max_epochs": "epochs",
    "num_epochs": "epochs",
    "num_train_epochs": "epochs",
    "max_steps": "updates",
    "steps": "updates",
    "num_workers": "loader.num_workers",
    "data.num_workers": "loader.num_workers",
    "gradient_clip_val": "clip.max_norm",
    "max_grad_norm": "clip.max_norm",
    "gpus": "parallel.nproc",
    "devices": "parallel.nproc",
    "accelerator": "runtime.device",
    "torch_compile": "compile=inductor",
    "bf16": "precision=bf16",
    "fp16": "precision=amp",
    "precision=fp16": "precision=amp",
    "precision=16": "precision=amp",
    "precision=32": "precision=fp32",
    "name": "hydra.job.name",
    "run_name": "hydra.job.name",
    "run_dir": "hydra.run.dir",
    "experiment": "recipe",
}
SETTINGS = {"turn_s": "block_s", "look_s": "profile_s"}  # of the measuring commands


def present_name(given: str) -> str:
    """What a key, or group=option, is called here and now; itself where it was never called otherwise."""
    return RENAMED.get(given) or ELSEWHERE.get(given) or given


def suggestion(given: str, name: str, known: Iterable[str]) -> str:
    """What to write instead of `given` (a key, or group=option), whose last part is `name`: its present or a similar name."""
    if present := RENAMED.get(given) or SETTINGS.get(given):
        return f"it is called {present} now"
    return f"it is called {ELSEWHERE[given]} here" if given in ELSEWHERE else did_you_mean(name, known)
