"""Reading samples by the usual code and ours, on the same JPEG files, and on small images in memory.

`python -m bench.loader [--quick] [--groups jpeg memory] [--rounds N] [--out FILE]`

The JPEG files are crops of the two photographs that scikit-learn ships, about 500×400, quality 90. Every variant gives
random-resized, mirrored 224×224 uint8 in batches of 64 (`memory`: 32×32, cropped and mirrored, 256), is a live process,
and runs short blocks in turn. `packed` reads shards of the same files. First batch: from the request until
it is there.
"""

from __future__ import annotations

import multiprocessing
import os
import resource
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, count
from pathlib import Path
from typing import Any

from bench import harness
from bench.harness import BlockSync

BATCH, MEMORY_BATCH = 64, 256
JPEG_WORDS = ("augment=[random_resized_crop,flip_crop]", "augment.flip_crop.pad=0")


def write_photographs(folder: Path, number: int) -> None:
    """JPEG files in two class folders."""
    import numpy as np
    from PIL import Image
    from sklearn.datasets import load_sample_images

    draw = np.random.default_rng(0)
    photographs = [Image.fromarray(image) for image in load_sample_images().images]
    for n in range(number):
        photograph = photographs[n % 2]
        width, height = int(draw.integers(440, 560)), int(draw.integers(340, 420))
        left, top = (
            int(draw.integers(0, max(1, full - part))) for full, part in zip(photograph.size, (width, height), strict=True)
        )
        (folder / f"class{n % 2}").mkdir(parents=True, exist_ok=True)
        box = (left, top, min(left + width, photograph.width), min(top + height, photograph.height))
        photograph.crop(box).save(folder / f"class{n % 2}" / f"{n:05d}.jpg", quality=90)


def take(sync: BlockSync, epoch: Callable[[], Iterator[Any]]) -> None:
    """A block is an epoch, begun and drained within it, so that nothing reads ahead during the other variants' blocks."""
    multiprocessing.set_start_method("fork", force=True)  # this process was spawned; a user's is not
    sync.watch(peak_bytes)
    images = 0
    sync(images)
    while True:
        began = time.perf_counter()
        stream = epoch()
        first = next(stream)
        if not images:
            sync.first = time.perf_counter() - began
        assert first.ndim == 4, first.shape
        images += len(first) + sum(map(len, stream))
        sync(images)


def peak_bytes() -> float:
    """This process's peak memory, and that of its largest child times their number."""
    own = 1024.0 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    peaks = []
    for child in harness.descendants(os.getpid()):
        status = Path(f"/proc/{child}/status").read_text()
        peaks += [1024.0 * int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM")]
    return own + sum(peaks)


def usual(folder: Path, workers: int, sync: BlockSync) -> None:
    """torchvision's ImageFolder and transforms in torch's DataLoader: the code that everybody writes."""
    from torchvision import transforms
    from torchvision.datasets import ImageFolder

    chain = [transforms.RandomResizedCrop(224), transforms.RandomHorizontalFlip(), transforms.PILToTensor()]
    drain(ImageFolder(str(folder), transforms.Compose(chain)), BATCH, workers, sync)


def timms(folder: Path, workers: int, sync: BlockSync) -> None:
    """timm's data set, transforms and loader, with the settings of its train.py; its prefetcher needs a CUDA device."""
    import torch
    from timm.data import create_dataset, create_loader

    size, cuda = (3, 224, 224), torch.cuda.is_available()
    loader = create_loader(
        create_dataset("", root=str(folder)), size, BATCH, is_training=True, num_workers=workers, use_prefetcher=cuda,
        pin_memory=cuda, persistent_workers=True,
    )  # fmt: skip
    take(sync, lambda: (x for x, *_ in loader))


def drain(dataset: Any, batch: int, workers: int, sync: BlockSync) -> None:
    """Read a dataset by torch's DataLoader."""
    import torch

    torch.set_num_threads(1)
    more: dict[str, Any] = {"persistent_workers": True} if workers else {}
    loader = torch.utils.data.DataLoader(dataset, batch, shuffle=True, num_workers=workers, drop_last=True, **more)
    take(sync, lambda: (x for x, *_ in loader))


def ours(overrides: Sequence[str], epochs: int, sync: BlockSync) -> None:
    """A loader of ours over a data option of ours, as a run builds them: one stream for many epochs.

    Bytes, not yet normalised, as the others give.
    """
    import torch

    from drivetrain.core.world import World
    from drivetrain.launch.job import prepare
    from drivetrain.loader import Pipeline

    run, cpu = prepare(overrides).run, torch.device("cpu")
    data = run.data.load(cpu)
    pipeline = Pipeline(data.train, tuple(run.augment), None, 0, data.classes)
    batch, numbers = run.batch.over(run.data.order_of(data.train, run)), count()

    def several() -> Iterator[Any]:
        each = (batch.requests(0, next(numbers), World(), True) for _ in range(epochs))
        requests = chain.from_iterable(each)
        for micro in run.loader.stream(pipeline, requests, cpu, torch.contiguous_format):
            yield micro.x

    take(sync, several)


def in_memory(workers: int, sync: BlockSync) -> None:
    """Small images in memory in torch's DataLoader, transformed one at a time."""
    import torch
    from torch.utils.data import Dataset
    from torchvision.transforms import v2

    chain = v2.Compose([v2.RandomCrop(32, padding=4, padding_mode="reflect"), v2.RandomHorizontalFlip()])
    images = torch.randint(256, (10_000, 3, 32, 32), dtype=torch.uint8)

    class Images(Dataset[Any]):
        def __len__(self) -> int:
            return len(images)

        def __getitem__(self, index: int) -> Any:
            return chain(images[index]), 0

    drain(Images(), MEMORY_BATCH, workers, sync)


def jpeg_variants(folder: Path, quick: bool) -> dict[str, Any]:
    """The usual code first."""
    from drivetrain.cli.main import main as drivetrain

    images, packed = folder / "images", folder / "packed"
    write_photographs(images, 140 if quick else 1500)
    if drivetrain(["pack", str(images), str(packed), "--size", "224"]):
        raise SystemExit("packing failed")
    base = (f"batch.global_batch={BATCH}", "model=mlp")
    cropped = (*base, *JPEG_WORDS)
    files = (*cropped, "data=imagefolder", f"data.root={images}", "data.holdout=0.05", "data.verify=0")
    shards = ("data=packed", f"data.root={packed}", "loader=threads")
    return {
        "DataLoader, 2 workers": (usual, (images, 2)),
        "DataLoader, in the loop": (usual, (images, 0)),
        **{f"ours, {name}": (ours, ((*files, f"loader={name}"), 2)) for name in ("sync", "workers", "threads")},
        "ours, packed": (ours, ((*cropped, *shards), 4)),
        "ours, packed, centre": (ours, ((*base, *shards, "augment=[flip_crop]", "augment.flip_crop.pad=0"), 8)),
    }  # fmt: skip


def memory_variants(folder: Path, quick: bool) -> dict[str, Any]:
    """32×32 in memory."""
    write_cifar(folder, 1000 if quick else 10_000)
    overrides = ("data=cifar10", f"data.root={folder}", "augment=[flip_crop]", f"batch.global_batch={MEMORY_BATCH}", "model=mlp")
    return {
        "DataLoader, 2 workers": (in_memory, (2,)),
        "DataLoader, in the loop": (in_memory, (0,)),
        "ours, sync": (ours, ((*overrides, "loader=sync"), 4)),
        "ours, threads": (ours, ((*overrides, "loader=threads"), 4)),
    }


def write_cifar(folder: Path, number: int) -> None:
    """CIFAR-10's binary batches with random pixels."""
    import numpy as np

    place, draw = folder / "cifar-10-batches-bin", np.random.default_rng(0)
    place.mkdir(parents=True)
    (place / "batches.meta.txt").write_text("\n".join(f"class{n}" for n in range(10)) + "\n")
    for name in (*(f"data_batch_{n}" for n in range(1, 6)), "test_batch"):
        records = draw.integers(0, 256, (number // 5, 3073), dtype=np.uint8)
        records[:, 0] %= 10
        (place / f"{name}.bin").write_bytes(records.tobytes())


def measure(variants: dict[str, Any], rounds: int) -> dict[str, Any]:
    """Per variant: images/s, ratio to the best DataLoader variant, seconds to the first batch, peak memory of its processes."""
    seconds, markers = harness.run_rounds(variants, rounds, warmup=2)
    images = {name: markers[name]["updates"] / (2 + rounds) for name in variants}  # of a block
    rates = {name: [images[name] / wall for wall, _ in taken] for name, taken in seconds.items()}
    usual_ones = [name for name in variants if name.startswith("DataLoader")]
    best = max(usual_ones, key=lambda name: harness.spread(rates[name])["median"])
    return {
        name: {
            "rounds": rounds, "blocks_images_per_second": rates[name],
            "images_per_second": harness.spread(rates[name]),
            "to_best_dataloader": harness.against(rates[name], rates[best])["ratio"],
            "first_batch_s": markers[name]["loss_first"],
            "peak_bytes": markers[name]["loss_last"],
        }
        for name in variants
    }  # fmt: skip


def main() -> None:
    """Measure, show, write."""
    groups = {"jpeg": jpeg_variants, "memory": memory_variants}
    given = harness.parse(__doc__, "loader-cpu.json", quick=False, groups=groups, rounds=int)
    found = {}
    for group in given.groups:
        with tempfile.TemporaryDirectory() as folder:
            found[group] = measure(groups[group](Path(folder), given.quick), given.rounds or (2 if given.quick else 8))
        rows = [
            [name, f"{a['images_per_second']['median']:,.0f}", harness.ratio(a["to_best_dataloader"]),
             f"{a['first_batch_s']:.3f}", f"{a['peak_bytes'] / 2**20:,.0f}"] for name, a in found[group].items()
        ]  # fmt: skip
        harness.table(group, [group, "images/s", "of the best DataLoader", "first batch s", "peak MiB"], rows)
    harness.write(given.out, {"device": "cpu", "rows": found})


if __name__ == "__main__":
    main()
