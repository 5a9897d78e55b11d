"""Time to a target beside Hugging Face's Trainer and Lightning: the same network, data, batches and optimizer, several seeds.

An epoch ends with an evaluation, and a program with the first one that is good enough. Imports are not counted.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from bench.gpu import campaign

LR, BATCH, EPOCHS = 0.002, 64, 60


@dataclass(frozen=True)
class Task:
    """What is learnt, and what share of the held-out samples has to be right."""

    name: str
    target: float


class Samples:
    """Scikit-learn's digits, or texts of 16 tokens whose first one tells their class; every fifth is held out."""

    def __init__(self, split: str, name: str) -> None:
        if name == "digits":
            from sklearn.datasets import load_digits

            images, labels = load_digits(return_X_y=True)
            x, y = torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels, dtype=torch.int64)
        else:
            x = torch.randint(32, (2000, 16), generator=torch.Generator().manual_seed(0))
            y = x[:, 0] % 8
        held = torch.arange(len(x)) % 5 == 0
        self.x, self.y, self.num_classes = x[held == (split != "train")], y[held == (split != "train")], int(y.max()) + 1

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.x[i], self.y[i]


class Net(nn.Module):
    """Two layers, after an embedding where inputs are tokens."""

    def __init__(self, name: str, classes: int) -> None:
        super().__init__()
        first = nn.Identity() if name == "digits" else nn.Embedding(32, 8)
        self.layers = nn.Sequential(first, nn.Flatten(), nn.LazyLinear(128), nn.ReLU(), nn.Linear(128, classes))
        self.layers(torch.zeros(1, 64) if name == "digits" else torch.zeros(1, 16, dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layers(x)
        return out


def accuracy(net: nn.Module, held: Samples, device: str) -> float:
    """The share of right answers."""
    with torch.no_grad():
        return float((net(held.x.to(device)).argmax(1) == held.y.to(device)).double().mean())


def ours(task: Task, seed: int, device: str) -> float:
    """drivetrain."""
    classes = Samples("train", task.name).num_classes
    with tempfile.TemporaryDirectory() as folder:
        result = campaign.train([
            "data=own", "trust=[bench]", "data.target=bench.gpu.target.Samples", f"data.kwargs={{name: {task.name}}}",
            "data.validation=null", "data.targets=class", "loss=cross_entropy", "model=own", "model.target=bench.gpu.target.Net",
            f"model.kwargs={{name: {task.name}, classes: {classes}}}", "optimizer=adamw", f"optimizer.lr={LR}",
            "optimizer.weight_decay=0", "scheduler=constant", "saving=none", f"runtime.device={device}", f"runtime.seed={seed}",
            f"batch.global_batch={BATCH}", f"epochs={EPOCHS}", f"target=accuracy>={task.target}", "stop.at_target=true",
            "loader=resident", f"output_dir={folder}",
        ])  # fmt: skip
    return float(result.judged("final")["accuracy"])


def trainer(task: Task, seed: int, device: str) -> float:
    """Hugging Face's Trainer."""
    import transformers

    train, held = Samples("train", task.name), Samples("held", task.name)
    transformers.set_seed(seed)

    class WithLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net(task.name, train.num_classes)

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            logits = self.net(x)
            return {"loss": cross_entropy(logits, labels), "logits": logits}

    class Rows:
        def __init__(self, samples: Samples) -> None:
            self.samples = samples

        def __len__(self) -> int:
            return len(self.samples)

        def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
            x, y = self.samples[i]
            return {"x": x, "labels": y}

    class Until(transformers.TrainerCallback):  # type: ignore[misc]
        def on_evaluate(self, args: Any, state: Any, control: Any, metrics: dict[str, float], **_: Any) -> None:
            control.should_training_stop = metrics["eval_accuracy"] >= task.target

    model = WithLoss()
    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            output_dir=folder, per_device_train_batch_size=BATCH, per_device_eval_batch_size=512, num_train_epochs=EPOCHS,
            learning_rate=LR, weight_decay=0.0, lr_scheduler_type="constant", max_grad_norm=0.0, eval_strategy="epoch",
            logging_strategy="no", save_strategy="no", report_to=[], disable_tqdm=True, use_cpu=device == "cpu", seed=seed,
        )  # fmt: skip
        metrics: Callable[[Any], dict[str, float]] = lambda found: {  # noqa: E731
            "accuracy": float((found.predictions.argmax(1) == found.label_ids).mean())
        }
        transformers.Trainer(
            model, arguments, train_dataset=Rows(train), eval_dataset=Rows(held), compute_metrics=metrics, callbacks=[Until()]
        ).train()
    return accuracy(model.net, held, device)


def lightning(task: Task, seed: int, device: str) -> float:
    """Lightning's Trainer."""
    import lightning as framework

    train, held = Samples("train", task.name), Samples("held", task.name)
    framework.seed_everything(seed, verbose=False)

    class Module(framework.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = Net(task.name, train.num_classes)

        def training_step(self, batch: Any, _: int) -> torch.Tensor:
            return cross_entropy(self.net(batch[0]), batch[1])

        def validation_step(self, batch: Any, _: int) -> None:
            self.log("accuracy", (self.net(batch[0]).argmax(1) == batch[1]).float().mean())

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=LR, weight_decay=0.0)

    until = framework.pytorch.callbacks.EarlyStopping(
        "accuracy", mode="max", patience=EPOCHS, stopping_threshold=task.target - 1e-9, check_finite=False
    )
    module, of = Module(), torch.utils.data.DataLoader
    framework.Trainer(
        max_epochs=EPOCHS, accelerator="cpu" if device == "cpu" else "gpu", devices=1, callbacks=[until], logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    ).fit(module, of(train, BATCH, shuffle=True, drop_last=True), of(held, 512))  # fmt: skip
    return accuracy(module.to(device).net, held, device)


PROGRAMS: dict[str, tuple[Callable[[Task, int, str], float], tuple[str, ...]]] = {  # and the packages that it needs
    "ours": (ours, ()), "trainer": (trainer, ("transformers", "accelerate")), "lightning": (lightning, ("lightning",)),
}  # fmt: skip


def to_target(device: str) -> dict[str, Any]:
    """In a child: the seconds of each program and seed to the target, and who could not be asked."""
    tasks = (Task("digits", 0.97), Task("text", 0.95))
    found: dict[str, Any] = {}
    for task in tasks:
        for name, (program, needed) in PROGRAMS.items():
            if lacking := [package for package in needed if find_spec(package) is None]:
                found[f"{task.name}, {name}"] = {"skipped": f"not installed: {', '.join(lacking)}"}
                continue
            seconds, reached = [], []
            for seed in range(-1, 1 if device == "cpu" else 5):  # the first one loads what is loaded once, and does not count
                began = time.monotonic()
                reached.append(program(task, max(seed, 0), device) >= task.target)
                seconds.append(time.monotonic() - began)
            found[f"{task.name}, {name}"] = {
                "seconds": seconds[1:], "median": statistics.median(seconds[1:]), "reached": sum(reached[1:]),
            }  # fmt: skip
            campaign.report({"programs": found})
    return {"programs": found}
