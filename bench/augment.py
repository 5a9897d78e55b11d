"""Images per second of every augmentation: ours, a batch at a time, against torchvision's v2, a sample at a time.

`python -m bench.augment [--quick] [--rows flip_crop,…] [--rounds N] [--threads N] [--out FILE]`

uint8 in memory, 32×32 and 224×224. Both arms of a row are interleaved, A B B A; ratios are of one round. torchvision's mixup and
cutmix take a batch, with one share for all of it. `read` is the path of small images: fetched by index, cropped, flipped.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from bench import harness
from drivetrain import augment
from drivetrain.batch import Batch
from drivetrain.core.world import World
from drivetrain.data import Tensors
from drivetrain.loader import Pipeline

CLASSES = 10
MARK = 100_000  # images per second of `read` at 32×32, on two cores
OPTIONS: dict[str, Callable[[], Any]] = {
    "flip_crop": augment.FlipCrop,
    "random_resized_crop": augment.RandomResizedCrop,
    "color_jitter": augment.ColorJitter,
    "randaugment": augment.RandAugment,
    "random_erasing": augment.RandomErasing,
    "mixup": augment.Mixup,
    "cutmix": augment.CutMix,
}
BlockSync = Callable[[], torch.Tensor]


def theirs(name: str, size: int) -> Callable[[torch.Tensor], Any]:
    """torchvision's transform of the same name."""
    from torchvision.transforms import v2

    makes: dict[str, Callable[[], Any]] = {
        "flip_crop": lambda: v2.Compose([v2.RandomHorizontalFlip(), v2.RandomCrop(size, 4, padding_mode="reflect")]),
        "random_resized_crop": lambda: v2.RandomResizedCrop(size),
        "color_jitter": lambda: v2.ColorJitter(0.4, 0.4, 0.4, 0.1),
        "randaugment": lambda: v2.RandAugment(),
        "random_erasing": lambda: v2.RandomErasing(0.25),
        "mixup": lambda: v2.MixUp(alpha=0.2, num_classes=CLASSES),
        "cutmix": lambda: v2.CutMix(num_classes=CLASSES),
    }
    return makes[name]()


def part(batch: int) -> int:
    """How many of a batch an arm works on that takes one image at a time: its speed is the same for any number."""
    return min(batch, max(8, batch // 8))


def arms(name: str, size: int, batch: int) -> dict[str, BlockSync]:
    """Both arms of a row, each a function that works on one batch."""
    x = torch.randint(256, (batch, 3, size, size), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    y = torch.arange(batch) % CLASSES
    if name == "read":
        return {"ours": _pipeline(Tensors(x, y), augment.FlipCrop(), batch), "torchvision": _read(x, theirs("flip_crop", size))}
    step = OPTIONS[name]()
    transform = theirs(name, size)
    if step.mixes:
        return {"ours": _pipeline(Tensors(x, y), step, batch), "torchvision": lambda: transform(x.float(), y)[0]}
    indices = torch.arange(batch)
    return {"ours": lambda: step(x, 0, 0, indices), "torchvision": lambda: torch.stack([transform(i) for i in x[: part(batch)]])}


def _pipeline(source: Tensors, step: Any, batch: int) -> BlockSync:
    requests = Batch(batch)
    requests.pairs = step.mixes
    (request,) = requests.requests(len(source), 0, 0, World(), True)
    pipeline = Pipeline(source, (step,), None, 0, CLASSES)
    return lambda: pipeline(request)[0]


def _read(x: torch.Tensor, transform: Any) -> BlockSync:
    order = torch.randperm(len(x))[: part(len(x))].tolist()
    return lambda: torch.stack([transform(x[i]) for i in order])


def measure(name: str, size: int, batch: int, rounds: int) -> dict[str, Any]:
    """Images per second of both arms, and how many times faster ours is."""
    blocks = arms(name, size, batch)
    images = {arm: len(block()) for arm, block in blocks.items()}
    seconds: dict[str, list[float]] = {arm: [] for arm in blocks}  # of one image
    for round_ in range(rounds):
        for arm in blocks if round_ % 2 == 0 else reversed(blocks):
            begin = time.perf_counter()
            blocks[arm]()
            seconds[arm].append((time.perf_counter() - begin) / images[arm])
    found: dict[str, Any] = {
        "batch": batch,
        "images_per_second": {arm: harness.spread([1 / s for s in taken]) for arm, taken in seconds.items()},
        "times_faster": harness.against(seconds["torchvision"], seconds["ours"])["ratio"],
    }
    return found


def main() -> None:
    """Measure, show, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two rounds of small batches: whether it works")
    parser.add_argument("--rows", help="options, such as flip_crop,mixup")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--threads", type=int, help="torch's threads")
    parser.add_argument("--out", type=Path, default=harness.RESULTS / "augment-cpu.json")
    given = parser.parse_args()
    if given.threads:
        torch.set_num_threads(given.threads)
    rounds = given.rounds or (2 if given.quick else 9)
    found: dict[str, Any] = {}
    for size, batch in ((32, 16), (224, 4)) if given.quick else ((32, 512), (224, 64)):
        names = [name for name in ("read", *OPTIONS) if not given.rows or name in given.rows.split(",")]
        rows = {name: measure(name, size, batch, rounds) for name in names}
        show(f"{size}×{size}, {batch} images, {torch.get_num_threads()} threads", rows)
        found[str(size)] = rows
    read = found["32"].get("read")
    met = None if read is None or given.quick else read["images_per_second"]["ours"]["median"] >= MARK
    content = {"machine": harness.machine(), "threads": torch.get_num_threads(), "rounds": rounds, "sizes": found}
    harness.write(given.out, content | {"mark": {"read_32": MARK, "met": met}})


def show(title: str, rows: dict[str, Any]) -> None:
    """One size's table."""
    harness.table(title, ["option", "ours img/s", "torchvision img/s", "times faster"], [
        [name, *(f"{row['images_per_second'][arm]['median']:,.0f}" for arm in ("ours", "torchvision")),
         f"{row['times_faster']['median']:.2f} ({row['times_faster']['low']:.2f} … {row['times_faster']['high']:.2f})"]
        for name, row in rows.items()
    ])  # fmt: skip


if __name__ == "__main__":
    main()
