"""Former names of options and keys, and those of other frameworks: the answer to them gives drivetrain's name."""

from __future__ import annotations

from collections.abc import Iterable

from drivetrain.core.errors import did_you_mean
from drivetrain.recipe.migrations import RENAMED as RENAMED

ELSEWHERE = {  # names of other frameworks → drivetrain's: Lightning's, Hugging Face's, timm's, and what people say
    "batch.size": "batch.global_batch",
    "batch.batch_size": "batch.global_batch",
    "batch_size": "batch.global_batch",
    "bs": "batch.global_batch",
    "data.batch_size": "batch.global_batch",
    "loader.batch_size": "batch.global_batch",
    "global_batch_size": "batch.global_batch",
    "train_batch_size": "batch.global_batch",
    "per_device_train_batch_size": "batch.global_batch",
    "per_gpu_train_batch_size": "batch.global_batch",
    "accumulate_grad_batches": "batch.accumulation_steps",
    "gradient_accumulation_steps": "batch.accumulation_steps",
    "grad_accum": "batch.accumulation_steps",
    "grad_accum_steps": "batch.accumulation_steps",
    "gradient_checkpointing": "checkpointing=blocks",
    "grad_checkpointing": "checkpointing=blocks",
    "learning_rate": "optimizer.lr",
    "optimizer.learning_rate": "optimizer.lr",
    "model.lr": "optimizer.lr",
    "model.learning_rate": "optimizer.lr",
    "train.lr": "optimizer.lr",
    "scheduler.lr": "optimizer.lr",
    "wd": "optimizer.weight_decay",
    "optim": "optimizer",
    "opt": "optimizer",
    "sched": "scheduler",
    "lr_scheduler": "scheduler",
    "lr_scheduler_type": "scheduler",
    "warmup_steps": "scheduler.warmup",
    "warmup_ratio": "scheduler.warmup",
    "warmup_epochs": "scheduler.warmup",
    "max_epochs": "epochs",
    "num_epochs": "epochs",
    "epochs_num": "epochs",
    "n_epochs": "epochs",
    "num_train_epochs": "epochs",
    "max_steps": "updates",
    "steps": "updates",
    "num_workers": "loader.num_workers",
    "workers": "loader.num_workers",
    "data.num_workers": "loader.num_workers",
    "dataloader_num_workers": "loader.num_workers",
    "gradient_clip_val": "clip.max_norm",
    "max_grad_norm": "clip.max_norm",
    "clip_grad": "clip.max_norm",
    "gpus": "parallel.nproc",
    "num_gpus": "parallel.nproc",
    "devices": "parallel.nproc",
    "nproc_per_node": "parallel.nproc",
    "num_nodes": "parallel.nnodes",
    "strategy": "parallel",
    "accelerator": "runtime.device",
    "torch_compile": "compile=inductor",
    "channels_last": "surgery=[channels_last]",
    "bf16": "precision=bf16",
    "fp16": "precision=amp",
    "amp": "precision=amp",
    "precision=fp16": "precision=amp",
    "precision=16": "precision=amp",
    "precision=16-mixed": "precision=amp",
    "precision=bf16-mixed": "precision=bf16",
    "precision=32": "precision=fp32",
    "data=csv": "data=tabular",
    "data=txt": "data=text",
    "data=folder": "data=imagefolder",
    "data=image_folder": "data=imagefolder",
    "data=images": "data=imagefolder",
    "loss=ce": "loss=cross_entropy",
    "loss=label_smoothing": "loss.label_smoothing",
    "scheduler=cosineannealing": "scheduler=cosine",
    "scheduler=cosine_annealing": "scheduler=cosine",
    "scheduler=CosineAnnealingLR": "scheduler=cosine",
    "parallel=deepspeed": "parallel=fsdp",
    "augment=hflip": "augment=flip_crop",
    "logger=tb": "logger=tensorboard",
    "task=lm": "task=language_modelling",
    "task=language_modeling": "task=language_modelling",
    "resume_from_checkpoint": "resume",
    "ckpt_path": "resume",
    "checkpoint": "resume",
    "data_dir": "data.root",
    "num_classes": "data.classes",
    "image_size": "data.size",
    "img_size": "data.size",
    "model_ema": "ema=ema",
    "swa": "ema=swa",
    "fsdp": "parallel=fsdp",
    "mixup": "augment=[mixup]",
    "cutmix": "augment=[cutmix]",
    "smoothing": "loss.label_smoothing",
    "label_smoothing_factor": "loss.label_smoothing",
    "drop_path": "model.drop_path",
    "load_best_model_at_end": "saving=best",
    "metric_for_best_model": "select",
    "full_determinism": "runtime.deterministic",
    "log_wandb": "logger=[files,wandb]",
    "log_every_n_steps": "log_every",
    "logging_steps": "log_every",
    "report_to": "logger",
    "output": "output_dir",
    "save_dir": "output_dir",
    "name": "hydra.job.name",
    "run_name": "hydra.job.name",
    "run_dir": "hydra.run.dir",
    "experiment": "recipe",
}
SECTIONS = ("trainer", "train", "training", "args", "hparams")  # other frameworks' sections, whose keys have none here
NOTES = {  # of those that mean another amount, or need more
    "drop_path": "with model=timm or model=gpt",
    "per_device_train_batch_size": "of all devices together",
    "per_gpu_train_batch_size": "of all devices together",
    "global_batch_size": "of all devices together",
}
SETTINGS = {"turn_s": "block_s", "look_s": "profile_s"}  # of the measuring commands


def present_name(given: str) -> str:
    """What a key, or group=option, is called here and now; itself where it was never called otherwise."""
    return RENAMED.get(given) or ELSEWHERE.get(given) or given


def suggestion(given: str, name: str, known: Iterable[str]) -> str:
    """What to write instead of `given` (a key, or group=option), whose last part is `name`: its present or a similar name."""
    if present := RENAMED.get(given) or SETTINGS.get(given):
        return f"it is called {present} now"
    note = f" ({NOTES[given]})" if given in NOTES else ""
    return f"it is called {ELSEWHERE[given]} here{note}" if given in ELSEWHERE else did_you_mean(name, known)
