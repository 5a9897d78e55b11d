"""`python -m bench.replays`: how often `drivetrain replay` names the cause first, of faults in small runs.

Bad samples, layers that break in mid-run, and learning rates that are too high. Nobody tells the command where to look.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from bench.harness import RESULTS, machine, write
from drivetrain import train
from drivetrain.core.machine.forking import answer_of
from drivetrain.measure.replay import ReplaySettings, replay
from drivetrain.measure.replay_cause import cause
from drivetrain.run.result import interval

TRAIN, TEST, CLASSES, WORDS = 512, 128, 4, 60
BATCH, EPOCHS, AT = 32, 12, 70  # a layer breaks in update AT
TASKS = ("pictures", "table", "texts")


class Samples(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Samples of four classes that can be told apart, one of them bad."""

    num_classes = CLASSES

    def __init__(self, split: str = "train", task: str = "pictures", seed: int = 0, bad: str = "", row: int = 0) -> None:
        random = torch.Generator().manual_seed(seed)
        self.y = torch.randint(CLASSES, (TRAIN + TEST,), generator=random)
        if task == "texts":
            lengths = torch.randint(3, 11, (len(self.y), 1), generator=random)
            tokens = (
                torch.randint(1, WORDS // CLASSES, (len(self.y), 10), generator=random) + (self.y * (WORDS // CLASSES))[:, None]
            )
            other = torch.rand(tokens.shape, generator=random) < 0.3  # words that say nothing
            tokens[other] = torch.randint(1, WORDS, (int(other.sum()),), generator=random)
            self.x = tokens * (torch.arange(10) < lengths)
        else:
            shape = (3, 8, 8) if task == "pictures" else (8,)
            of_class = torch.randn(CLASSES, *shape, generator=random)
            self.x = of_class[self.y] + 0.4 * torch.randn(len(self.y), *shape, generator=random)
        if bad == "label":
            self.y[row] = (self.y[row] + 1 + seed % 3) % CLASSES
        elif bad:
            count, value = {"pixels": (5, float("nan")), "huge": (1, 1e5), "empty": (None, 0)}[bad]
            self.x[row].view(-1)[:count] = value
        self.x, self.y = (all_[:TRAIN] if split == "train" else all_[TRAIN:] for all_ in (self.x, self.y))

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.x[number], self.y[number]


class Breaking(nn.Linear):
    """A layer that breaks in an update."""

    def __init__(self, width: int, fault: str) -> None:
        super().__init__(width, width)
        self.fault = fault
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += self.training
        now = int(self.seen) if self.training else 0
        if now == AT and self.fault == "scaled":
            self.weight.data.mul_(-300)
        out = super().forward(x)
        if now == AT and self.fault == "backward" and out.requires_grad:
            out.register_hook(lambda gradient: gradient * 1e5)
        if now < AT or self.fault not in ("log", "dead", "overflow") or (self.fault == "overflow" and now > AT):
            return out
        return {"log": (out - out.mean()).log(), "dead": out * 0, "overflow": out * -1e4}[self.fault]


class Net(nn.Module):
    """A network of pictures, tables or texts, with a layer that may break."""

    def __init__(self, task: str = "pictures", fault: str = "", width: int = 32) -> None:
        super().__init__()
        pool = nn.Sequential(nn.BatchNorm2d(width), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(4 * width, width))
        kinds = {"texts": nn.Embedding(WORDS, width), "table": nn.Linear(8, width), "pictures": nn.Conv2d(3, width, 3)}
        self.first = nn.Sequential(kinds[task], pool) if task == "pictures" else kinds[task]
        self.middle, self.last, self.head = Breaking(width, fault), nn.Linear(width, width), nn.Linear(width, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        if not x.is_floating_point():  # the mean over the words that are there
            here = (x > 0)[..., None].to(h.dtype)
            h = (h * here).sum(1) / here.sum(1)
        return self.head(self.last(self.middle(h.relu()).relu()).relu())


class Case(NamedTuple):
    """A run with a fault, and what is to be named first."""

    fault: str
    kind: str  # sample, layer or rate
    of: str
    words: tuple[str, ...]


def cases(first: int) -> Iterator[Case]:
    """50 bad samples, 20 layers that break, 20 rates that are too high and 20 healthy runs, with seeds from `first` on."""
    for n in range(first, first + 50):
        bad = ("pixels", "label", "huge", "empty")[n % 4]
        task = "texts" if bad == "empty" else TASKS[n // 4 % 3] if bad == "label" else TASKS[n // 4 % 2]
        row = 37 * n % TRAIN
        yield Case(bad, "sample", f"row {row}", (*_words(task, n), f"data.kwargs.bad={bad}", f"data.kwargs.row={row}"))
    for n in range(first, first + 20):
        fault, sgd = ("dead", "scaled", "log", "overflow", "backward")[n % 5], ("optimizer=sgd", "optimizer.lr=0.1")
        yield Case(
            fault,
            "layer",
            "middle",
            (*_words(TASKS[n % 3], n), f"model.kwargs.fault={fault}", *(sgd if n % 2 or n % 5 == 4 else ())),
        )
    for n in range(first, first + 20):
        yield Case("healthy", "none", "", _words(TASKS[n % 3], n))
        rate = (
            "optimizer=adamw optimizer.lr=3",
            "optimizer=sgd optimizer.lr=30",
            "optimizer=adamw optimizer.lr=0.5",
            "optimizer=sgd optimizer.lr=5",
        )[n % 4]
        yield Case(
            "rate", "rate", "", (*_words(TASKS[n % 3], n), *rate.split(), "scheduler=constant" if n % 3 else "scheduler=onecycle")
        )


def _words(task: str, seed: int) -> tuple[str, ...]:
    return (
        "data=own", "trust=[bench]", "data.target=bench.replays.Samples", "data.validation=test", "model=own",
        "model.target=bench.replays.Net", f"data.kwargs.task={task}", f"data.kwargs.seed={seed}", f"model.kwargs.task={task}",
        f"batch.global_batch={BATCH}", f"epochs={EPOCHS}", "runtime.device=cpu", "runtime.threads=1", f"runtime.seed={seed}",
        f"log_every={1 if seed % 2 else 5}",
    )  # fmt: skip


def examined(case: Case, place: Path) -> dict[str, object]:
    """Train a case and replay it; what was named."""
    run = train([*case.words, f"hydra.run.dir={place / 'run'}", f"output_dir={place}"])
    done = replay(place / "run", (), (), ReplaySettings())[1]
    named = cause(done)
    return {
        "fault": case.fault, "kind": case.kind, "of": case.of, "status": run.status, "updates": run.updates,
        "update": done.update, "bits": [len(done.same), len(done.other)], "named": named._asdict(),
        "first": case.kind == "sample" and done.samples[0].name == case.of,
        "right": named.kind == case.kind and f"{named.of}.".startswith(f"{case.of}."),
    }  # fmt: skip


def main() -> None:
    """Examine all cases, one process each, and write the shares."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="faults of this kind or name")
    parser.add_argument("--first", type=int, default=1000, help="the first seed: those from 0 on chose the thresholds")
    given, found, shares = parser.parse_args(), [], {}
    only = given.only
    for case in (case for case in cases(given.first) if only in ("", case.fault, case.kind)):
        with tempfile.TemporaryDirectory() as folder:
            row = answer_of(lambda answer, case=case, place=Path(folder): answer(examined(case, place)), case.fault)
        print(
            "right" if row["right"] else "WRONG",
            *(row[key] for key in ("fault", "status", "update", "bits", "named", "first")),
            flush=True,
        )
        found.append(row)
    for name in dict.fromkeys(row[key] for key in ("kind", "fault") for row in found):
        of = [row for row in found if name in (row["kind"], row["fault"])]
        count = {key: sum(bool(row[key]) for row in of) for key in ("right", "first")}
        shares[name] = {"of": len(of), **count, "interval": interval(count["right"] / len(of), len(of))}
        print(name, shares[name])
    if not only:
        write(RESULTS / "replays-cpu.json", {"machine": machine(), "first_seed": given.first, "shares": shares, "runs": found})


if __name__ == "__main__":
    main()
