"""Data sets whose files were changed: indices, tables, lines, masks, headers of archives; loaded, and read to the end."""

from __future__ import annotations

import functools
import os
import random
import shutil
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.support import sets

from bench.fuzz import damage
from bench.fuzz.judged import Example

HEADER = 512  # bytes of a tar archive's


def examples(place: Path, count: int, seed: int) -> Iterator[Example]:
    """Yield data sets in every form, each with one or two damaged files, loaded as a run does."""
    whole = place / "whole"
    whole.mkdir()
    sets.write(whole, samples=20, with_hub=False)
    draw = random.Random(seed)
    for form in FORMS:  # imports, and what libraries allocate once
        folder = place / f"first-{form}"
        shutil.copytree(whole, folder)
        read(form, folder)
        damage.remove(folder)
    for number in range(count):
        form = draw.choice(list(FORMS))
        folder = place / f"case{number}"
        files = sorted(p.relative_to(whole) for pattern in FORMS[form][0] for p in whole.glob(pattern))
        for file in sorted(p.relative_to(whole) for pattern in (*FORMS[form][0], *FORMS[form][1]) for p in whole.glob(pattern)):
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(whole / file, folder / file)
        if form == "index":
            (folder / "cache").mkdir()
            read(form, folder)
            files = [p.relative_to(folder) for p in (folder / "cache").iterdir()]
        told = [f"{file} {change(draw, folder / file)}" for file in draw.sample(files, min(len(files), draw.choice([1, 1, 2])))]
        readable = (folder, *linked(folder))
        yield Example(f"{form}: {'; '.join(told)}", functools.partial(read, form, folder), readable, (folder,))
        damage.remove(folder)


def linked(folder: Path) -> list[Path]:
    """What the links in a data folder lead to. They are the user's own, and are followed."""
    return [folder / os.readlink(path) for path in folder.rglob("*") if path.is_symlink()]


def change(draw: random.Random, file: Path) -> str:
    """Damage a file in a way that suits it; return how."""
    if file.suffix == ".tar" and draw.random() < 0.7:
        return _tar(draw, file)
    table = file.with_name("train.table")  # which an earlier change may have made a folder or a link
    if file.name == "index.json" and draw.random() < 0.3 and table.is_file() and not table.is_symlink():
        return _digested(draw, file)
    how = damage.damage(draw, file)
    return f"{how} {damage.beginning(file)[:150]!r}"


def _tar(draw: random.Random, file: Path) -> str:
    """Change fields of a member's header, whose checksum is right again."""
    content = bytearray(file.read_bytes())
    with tarfile.open(file) as tar:
        at = draw.choice(tar.getmembers()).offset
    begin, length = draw.choice([(0, 100), (100, 8), (124, 12), (156, 1), (157, 100), (257, 8), (345, 155)])
    value = draw.choice(
        [b"../../x", b"/etc/passwd", b"\xff" * 12, b"77777777777", b"\x80" + b"\x7f" * 11, b"00000000000",
         b"x", b"L", b"S", b"2", b"1",
         b"g", b"K", b"", b"-1", b"\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\x00", b"a" * 155,
         bytes(draw.randrange(256) for _ in range(8))]
    )[:length]  # fmt: skip
    content[at + begin : at + begin + length] = value.ljust(length, b"\0")
    header = content[at : at + HEADER]
    header[148:156] = b" " * 8
    content[at + 148 : at + 156] = f"{sum(header):06o}\0 ".encode()
    file.write_bytes(content)
    return f"header at {at}, {begin}: {value!r}"


def _digested(draw: random.Random, file: Path) -> str:
    """Change a table of packed images, and its hash in the index."""
    import hashlib
    import json

    index = json.loads(file.read_bytes())
    table = file.with_name("train.table")
    changed = damage.of_bytes(draw, table.read_bytes())
    table.write_bytes(changed)
    index["splits"]["train"]["table"] = hashlib.blake2b(changed).hexdigest()
    file.write_text(json.dumps(index))
    return "and its table"


def read(form: str, folder: Path) -> None:
    """Load a data set, and fetch each sample of each split."""
    import torch

    splits = FORMS[form][2](folder).load_sets(torch.device("cpu"))
    for source in (splits.train, splits.test, splits.validation):
        if source is not None:
            for begin in range(0, min(len(source), 200), 16):
                source.fetch(torch.arange(begin, min(begin + 16, len(source))))


def _options() -> Any:
    from drivetrain import data

    return data


# The files that are damaged, those that go with them, and the option that reads them.
FORMS: dict[str, tuple[tuple[str, ...], tuple[str, ...], Callable[[Path], Any]]] = {
    "packed": (("packed/*",), (), lambda f: _options().Packed(root=str(f / "packed"))),
    "jsonl": (("texts.jsonl",), (), lambda f: _options().Jsonl(str(f / "texts.jsonl"), length=8, holdout=0.2)),
    "labelled": (("texts.jsonl",), (), lambda f: _options().Jsonl(str(f / "texts.jsonl"), label="kind", length=8, holdout=0.2)),
    "labels_csv": (
        ("table.csv",), ("masked/images/*",),
        lambda f: _options().LabelsCsv(str(f / "table.csv"), root=str(f), target="kind", size=8, holdout=0.2),
    ),
    "tabular": (("table.csv",), (), lambda f: _options().Tabular(str(f / "table.csv"), target="kind", columns=["x"])),
    "masks": (
        ("masked/masks/*", "masked/images/*"), (),
        lambda f: _options().Masks(str(f / "masked"), classes=3, size=8, holdout=0.2),
    ),
    "webdataset": (
        ("shard.tar",), (),
        lambda f: _options().WebDataset(str(f / "shard.tar"), size=8, holdout=0.2, cache=str(f / "cache")),
    ),
    "index": (
        ("cache/*",), ("shard.tar",),
        lambda f: _options().WebDataset(str(f / "shard.tar"), size=8, holdout=0.2, cache=str(f / "cache")),
    ),
    "cifar10": (("cifar/*",), (), lambda f: _options().Cifar10(root=str(f / "cifar"))),
}  # fmt: skip
