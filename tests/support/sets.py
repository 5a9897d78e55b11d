"""Small data sets in the forms that options read, for the tests that run every option."""

import io
import json
import tarfile
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image


def images_of(files: Sequence[tuple[Path | str, int]], *how: Any) -> Any:
    """Image files, each with its class, as a source; `how` begins with the size."""
    import torch

    from drivetrain.data.decoding import Decoding
    from drivetrain.data.images import Images

    return Images("", [str(path) for path, _ in files], torch.tensor([label for _, label in files]), Decoding(*how))


def write(folder: Path, size: int = 8, samples: int = 50, with_hub: bool = True) -> None:
    """Write two classes of noise, `samples` or so in all, in every form.

    cifar/, shard.tar, packed/, hub/ (empty without its library), masked/, table.csv with its images, words.jsonl, texts.jsonl and
    texts.txt.
    """
    noise = np.random.default_rng(0)
    images = noise.integers(0, 255, (samples, size, size, 3), dtype=np.uint8)
    cifar(folder / "cifar", noise)
    shard(folder / "shard.tar", images)
    packed(folder / "packed", images)
    table_and_masks(folder, images)
    texts = [{"text": f"line {i} of {len(images)}: {'ab' * (i % 9)}", "kind": "ab"[i % 2]} for i in range(len(images))]
    tagged = [{"tokens": text["text"].split(), "tags": ["XY"[len(w) % 2] for w in text["text"].split()]} for text in texts]
    (folder / "words.jsonl").write_text("".join(json.dumps(text) + "\n" for text in tagged))
    (folder / "texts.jsonl").write_text("".join(json.dumps(text) + "\n" for text in texts))
    (folder / "texts.txt").write_text("".join(text["text"] + "\n" for text in texts))
    (folder / "hub").mkdir()
    if with_hub and find_spec("datasets") is not None:
        hub(folder / "hub", images)


def table_and_masks(folder: Path, images: np.ndarray) -> None:
    """masked/images and masked/masks, and a table with a row for each image."""
    rows = ["image,kind,x"]
    for kind in ("images", "masks"):
        (folder / "masked" / kind).mkdir(parents=True)
    for i, image in enumerate(images):
        (folder / "masked" / "images" / f"{i}.png").write_bytes(png(image))
        (folder / "masked" / "masks" / f"{i}.png").write_bytes(png(image[..., 0] % 3))
        rows.append(f"masked/images/{i}.png,{'ab'[i % 2]},{i / 7}")
    (folder / "table.csv").write_text("\n".join(rows) + "\n")


def cifar(folder: Path, noise: np.random.Generator) -> None:
    """The binary version, ten records a file."""
    folder.mkdir()
    for name in (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"):
        records = noise.integers(0, 255, (10, 3073), dtype=np.uint8)
        records[:, 0] = np.arange(10)
        (folder / f"{name}.bin").write_bytes(records.tobytes())


def png(image: np.ndarray) -> bytes:
    out = io.BytesIO()
    Image.fromarray(image).save(out, "PNG")
    return out.getvalue()


def shard(path: Path, images: np.ndarray) -> None:
    """One tar shard."""
    with tarfile.open(path, "w") as tar:
        for number, image in enumerate(images):
            for name, content in ((f"{number}.png", png(image)), (f"{number}.cls", str(number % 2).encode())):
                member = tarfile.TarInfo(name)
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))


def packed(folder: Path, images: np.ndarray) -> None:
    """The folder that `drivetrain pack` writes."""
    import torch

    from drivetrain.data import Normalize, Splits, Tensors, packed

    folder.mkdir()
    x = torch.from_numpy(images).permute(0, 3, 1, 2).contiguous()
    source = Tensors(x, torch.arange(len(x)) % 2)
    splits = Splits(train=source, test=source, shape=tuple(x.shape[1:]), classes=2, normalize=Normalize([127.0] * 3, [70.0] * 3))
    packed.pack(splits, folder, packed.Raw(), splits.shape, "", 1, lambda *_: None)


def hub(folder: Path, images: np.ndarray) -> None:
    """A dataset as Hugging Face's library saves it."""
    import datasets

    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["cat", "dog"])})
    rows = {"image": [{"bytes": png(i), "path": None} for i in images], "label": [n % 2 for n in range(len(images))]}
    split = datasets.Dataset.from_dict(rows, features=features)
    datasets.DatasetDict({"train": split, "test": split}).save_to_disk(str(folder))
