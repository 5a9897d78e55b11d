"""The cost of a loop for a step: ours against hand-written loops, Lightning Fabric, accelerate and Lightning.

`python -m bench.overhead [--quick] [--variants hand ours …] [--out FILE]`

The model is so small that the loop shows: an MLP 32 → 64 → 64 → 10, batch 64, SGD with momentum, one thread. Every variant
holds the same amount of data in memory and picks each batch by a shuffled index. A block is a few epochs.

- bare: one update a batch, nothing else. `ours`, `lightning` and the others with all their extras off; `…_default` as
  they come: ours logs to files every 20 updates and shows its live line; Lightning has its logger, checkpoint and bar.
- everyday: four micro-batches of 64 to an update, gradients clipped by norm, the loss to a JSONL every 20 updates,
  progress in the terminal.

Ours is driven through `Trainer.fit()` itself, the trainer being built by `build` from a checked config: the variant only adds
a sink, whose `log` is called at each epoch's end and ends the block there. Nothing is added to a step.
"""

from __future__ import annotations

import itertools
import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any

from bench import harness
from bench.harness import BlockSync

LR = 0.05
LOG_EVERY = 20


@dataclass(frozen=True)
class Work:
    """The work of every variant of a group."""

    updates: int  # of an epoch
    epochs: int  # of a block
    steps: int = 1  # micro-batches of an update
    batch: int = 64  # samples of a micro-batch

    @property
    def samples(self) -> int:
        """Samples of the training set."""
        return self.updates * self.steps * self.batch


def start(work: Work, sync: BlockSync, fused: bool | None = None) -> tuple[Any, Any, Any, Any]:
    """One thread; data (n, 32) and (n,); the model; its optimizer, with torch's own defaults where `fused` is None."""
    import torch
    from torch import nn

    torch.set_num_threads(1)
    torch.manual_seed(0)
    x, y = torch.randn(work.samples, 32), torch.randint(10, (work.samples,))
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    sync.watch(lambda: mean_loss(model, x, y))
    return x, y, model, torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9, fused=fused)


def mean_loss(model: Any, x: Any, y: Any) -> float:
    """Cross entropy over the whole training set."""
    import torch

    with torch.no_grad():
        return float(torch.nn.functional.cross_entropy(model(x), y))


def epochs(work: Work, sync: BlockSync, x: Any) -> Iterator[Any]:
    """A shuffled index for each epoch, without end; `sync` is called between blocks."""
    import torch

    for epoch in itertools.count():
        if epoch % work.epochs == 0:
            sync(epoch * work.updates)
        yield torch.randperm(len(x))


def bare(work: Work, sync: BlockSync, x: Any, y: Any, model: Any, optimizer: Any, backward: Callable[[Any], None]) -> None:
    """The loop that everyone writes; each library has its own backward."""
    from torch.nn.functional import cross_entropy

    for order in epochs(work, sync, x):
        for begin in range(0, len(x), work.batch):
            optimizer.zero_grad()
            picked = order[begin : begin + work.batch]
            loss = cross_entropy(model(x[picked]), y[picked])
            backward(loss)
            optimizer.step()


def hand(work: Work, sync: BlockSync, fused: bool | None = None) -> None:
    """By hand. Its loop is written out: a call of `backward` more would be a part of what is measured."""
    from torch.nn.functional import cross_entropy

    x, y, model, optimizer = start(work, sync, fused)
    for order in epochs(work, sync, x):
        for begin in range(0, len(x), work.batch):
            optimizer.zero_grad()
            picked = order[begin : begin + work.batch]
            loss = cross_entropy(model(x[picked]), y[picked])
            loss.backward()
            optimizer.step()


def fabric(work: Work, sync: BlockSync) -> None:
    """Lightning Fabric as its guide says."""
    from lightning.fabric import Fabric

    x, y, module, sgd = start(work, sync)
    runner = Fabric(accelerator="cpu", devices=1)
    runner.launch()
    bare(work, sync, x, y, *runner.setup(module, sgd), runner.backward)


def accelerate(work: Work, sync: BlockSync) -> None:
    """accelerate as its guide says."""
    from accelerate import Accelerator

    x, y, module, sgd = start(work, sync)
    accelerator = Accelerator(cpu=True)
    bare(work, sync, x, y, *accelerator.prepare(module, sgd), accelerator.backward)


def lightning(work: Work, sync: BlockSync) -> None:
    """Lightning's Trainer with all it can leave out left out (`barebones`)."""
    _lightning(work, sync, log=False, barebones=True)


def lightning_default(work: Work, sync: BlockSync) -> None:
    """Lightning's Trainer as it comes: logger, checkpoints at an epoch's end, progress bar, and a loss to show."""
    with tempfile.TemporaryDirectory() as folder:
        _lightning(work, sync, log=True, default_root_dir=folder)


def _lightning(work: Work, sync: BlockSync, log: bool, **options: Any) -> None:
    from lightning.pytorch import LightningModule, Trainer
    from torch.nn.functional import cross_entropy

    x, y, model, sgd = start(work, sync)

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: Any, number: int) -> Any:
            loss = cross_entropy(self.model(batch[0]), batch[1])
            if log:
                self.log("loss", loss, prog_bar=True)
            return loss

        def configure_optimizers(self) -> Any:
            return sgd

    class Batches:
        def __len__(self) -> int:
            return work.updates * work.steps

        def __iter__(self) -> Iterator[Any]:
            order = next(orders)
            for begin in range(0, len(x), work.batch):
                picked = order[begin : begin + work.batch]
                yield x[picked], y[picked]

    orders = epochs(work, sync, x)
    Trainer(accelerator="cpu", devices=1, max_epochs=-1, **options).fit(Module(), Batches())


def ours(overrides: Sequence[str], default_logging: bool, work: Work, sync: BlockSync) -> None:
    """drivetrain's loop: nothing logged but each epoch's mean loss, or as it comes, with files and the live line."""
    harness.ours([
        "data=synthetic", "data.shape=[32]", f"data.samples={work.samples}", "model=mlp", "model.hidden=[64,64]",
        "optimizer=sgd", f"optimizer.lr={LR}", "optimizer.nesterov=false", "optimizer.weight_decay=0", "scheduler=constant",
        "saving=none", "runtime.device=cpu", "runtime.threads=1", f"batch.global_batch={work.batch * work.steps}",
        "epochs=10000", "evaluate_every=10000", f"log_every={work.updates}", *overrides,
    ], work.updates * work.epochs, _loss_of, sync, default_logging)  # fmt: skip


def _loss_of(trainer: Any) -> float:
    return mean_loss(trainer.model, trainer.train_data.source.x, trainer.train_data.source.y)


def hand_everyday(work: Work, sync: BlockSync, fused: bool | None = None) -> None:
    """The parts that an everyday run needs, by hand."""
    import torch
    from torch.nn.functional import cross_entropy

    x, y, model, optimizer = start(work, sync, fused)
    parameters = list(model.parameters())
    window, updates, total = work.steps * work.batch, 0, torch.zeros(())
    with reporting(work) as report:
        for order in epochs(work, sync, x):
            for begin in range(0, len(x), window):
                for at in range(begin, begin + window, work.batch):
                    picked = order[at : at + work.batch]
                    loss = cross_entropy(model(x[picked]), y[picked]) / work.steps
                    loss.backward()
                    total += loss.detach()
                torch.nn.utils.clip_grad_norm_(parameters, 1.0)
                optimizer.step()
                optimizer.zero_grad()
                updates += 1
                if updates % LOG_EVERY == 0:
                    report(updates, float(total) / LOG_EVERY)
                    total.zero_()


def accelerate_everyday(work: Work, sync: BlockSync) -> None:
    """accelerate's own accumulation and clipping; logging and progress by hand."""
    import torch
    from accelerate import Accelerator
    from torch.nn.functional import cross_entropy

    x, y, module, sgd = start(work, sync)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=work.steps)
    model, optimizer = accelerator.prepare(module, sgd)
    updates, total = 0, torch.zeros(())
    with reporting(work) as report:
        for order in epochs(work, sync, x):
            for begin in range(0, len(x), work.batch):
                with accelerator.accumulate(model):
                    picked = order[begin : begin + work.batch]
                    loss = cross_entropy(model(x[picked]), y[picked])
                    accelerator.backward(loss)
                    total += loss.detach()
                    if accelerator.sync_gradients:
                        accelerator.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                    optimizer.zero_grad()
                if accelerator.sync_gradients:
                    updates += 1
                    if updates % LOG_EVERY == 0:
                        report(updates, float(total) / LOG_EVERY / work.steps)
                        total.zero_()


def lightning_everyday(work: Work, sync: BlockSync) -> None:
    """Lightning's accumulation, clipping, logging and progress bar; its logger writes our JSONL."""
    from lightning.pytorch.loggers.logger import Logger

    with reporting(work, progress=False) as report:

        class Jsonl(Logger):
            name, version = "jsonl", 0

            def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
                report(step or 0, metrics["loss"])

            def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
                pass

        _lightning(
            work, sync, log=True, logger=Jsonl(), enable_checkpointing=False, enable_model_summary=False,
            accumulate_grad_batches=work.steps, gradient_clip_val=1.0, log_every_n_steps=LOG_EVERY,
        )  # fmt: skip


@contextmanager
def reporting(work: Work, progress: bool = True) -> Iterator[Callable[[int, float], None]]:
    """The loss to a JSONL and a line in the terminal: the least that a person would write."""
    with tempfile.TemporaryFile("w") as file:

        def report(updates: int, loss: float) -> None:
            file.write(json.dumps({"update": updates, "loss": loss, "lr": LR}) + "\n")
            file.flush()
            if progress:
                print(f"\repoch {updates // work.updates}  update {updates}  loss {loss:.4f}", end="", flush=True)

        yield report


EVERYDAY = ("batch=accumulate", "batch.accumulation_steps=4", "clip=norm", f"log_every={LOG_EVERY}")
Loop = Callable[[Work, BlockSync], None]
GROUPS: dict[str, dict[str, Loop]] = {
    "bare": {
        "hand": hand, "hand_fused": partial(hand, fused=True), "ours": partial(ours, (), False),
        "ours_default": partial(ours, (f"log_every={LOG_EVERY}",), True), "fabric": fabric, "accelerate": accelerate,
        "lightning": lightning, "lightning_default": lightning_default,
    },
    "everyday": {
        "hand": hand_everyday, "hand_fused": partial(hand_everyday, fused=True), "ours": partial(ours, EVERYDAY, True),
        "accelerate": accelerate_everyday, "lightning": lightning_everyday,
    },
}  # fmt: skip
NEEDS = {"fabric": "lightning", "accelerate": "accelerate", "lightning": "lightning", "lightning_default": "lightning"}


def main() -> int:
    """Measure both groups; exit code 1 if a variant did not train."""
    everyone = list(dict.fromkeys(name for loops in GROUPS.values() for name in loops))
    given = harness.parse(__doc__, "overhead-cpu.json", quick=False, variants=everyone, groups=GROUPS, rounds=int)
    if given.quick:
        works, rounds, warmup = {"bare": Work(20, 1), "everyday": Work(20, 1, steps=4)}, given.rounds or 4, 1
    else:  # an everyday block spans several refreshes of a live progress line
        works, rounds, warmup = {"bare": Work(500, 1), "everyday": Work(240, 2, steps=4)}, given.rounds or 30, 3
    requested = ["hand", *given.variants]
    skipped = {name: f"{NEEDS[name]} is not installed" for name in requested if name in NEEDS and find_spec(NEEDS[name]) is None}
    for name, why in skipped.items():
        print(f"skipped {name}: {why}")
    found = {}
    for group in given.groups:
        work, loops = works[group], {n: loop for n, loop in GROUPS[group].items() if n in requested and n not in skipped}
        found[group] = harness.steps(group, loops, work, work.updates * work.epochs, rounds, warmup, "us")
    harness.write(given.out, {"unit": "µs per update", "skipped": skipped, "groups": found})
    return harness.untrained(found)


if __name__ == "__main__":
    raise SystemExit(main())
