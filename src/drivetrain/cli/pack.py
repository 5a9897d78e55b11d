"""`drivetrain pack`: decode images once, for training with data=packed."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from drivetrain.cli.arguments import FILE, FLAG, NUMBER, Command
from drivetrain.config.compose import compose
from drivetrain.core.errors import DONE, UserError, refuse
from drivetrain.core.machine.guards import usable_cores
from drivetrain.data import Data, packed, stored
from drivetrain.launch.job import Job, prepare
from drivetrain.run import directory
from drivetrain.ui import terminal
from drivetrain.ui.output import echo
from drivetrain.ui.progress import Rate

SIZE = 256
HELP = """\
drivetrain pack SOURCE FOLDER [data=option] [data.key=value] …      decode the images of SOURCE once, for data=packed

  drivetrain pack ~/imagenet packed --size 256           train data=packed data.root=packed
  drivetrain pack ~/imagenet packed --jpeg --quality 90   stores JPEGs of at most that size: less disk, decoded when read
  drivetrain pack ~/cifar packed data=cifar10             any image data; SOURCE becomes its root
  drivetrain pack 'train-{000..009}.tar' packed data=webdataset
  drivetrain pack --verify packed                         every sample's checksum

  --out FOLDER          the same as FOLDER
  --size N              the square that images are resized to (with --jpeg: their shorter side); default 256
  --jpeg                store JPEGs; those at or below the size are kept byte for byte
  --quality Q           JPEG quality of images that are made smaller, 1 to 100; default 90
  --threads N           threads that decode; default: one for each core
  -cd, --config-dir DIR your own options: DIR/<group>/<option>.yaml
  -h, --help            this

If packing is interrupted, give the same command again: it continues, and writes the same bytes.
"""


def _command(given: argparse.Namespace) -> int:
    if given.verify:
        if len(given.overrides) != 1:
            raise UserError("drivetrain pack --verify needs one packed folder")
        with _progress("verified") as step:
            count = stored.verify(Path(given.overrides[0]), step)
        echo(f"{given.overrides[0]}: all {count:,} samples are as they were packed")
        return DONE
    paths = [*(w for w in given.overrides if "=" not in w), *([str(given.out)] if given.out is not None else [])]
    if len(paths) != 2:
        raise UserError("drivetrain pack needs a source and a folder to write: drivetrain pack ~/images packed --size 256")
    if not 1 <= given.quality <= 100 or (given.size is not None and given.size < 1) or given.threads < 1:
        raise UserError("drivetrain pack: --quality must be 1 to 100, --size and --threads at least 1")
    _pack(paths[0], Path(paths[1]), [w for w in given.overrides if "=" in w], given)
    return DONE


command = Command("pack", _command, HELP, {
    "--size": NUMBER, "--jpeg": FLAG, "--quality": NUMBER | {"default": 90}, "--threads": NUMBER | {"default": usable_cores()},
    "--verify": FLAG, "--out": FILE,
}, takes_paths=True)  # fmt: skip


def _pack(source: str, out: Path, overrides: list[str], given: argparse.Namespace) -> None:
    job = _job(source, overrides, given)
    data = Data.of(job.run)
    refuse(data.validate_device(job.run))
    if (out / "index.json").exists():
        for journal in out.glob("*.journal"):  # of a command that was killed at its end
            journal.unlink(missing_ok=True)
        raise UserError(f"{out} is packed already: remove it, or give another folder")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{out} cannot be created ({error.strerror}): give a folder you can write to") from None
    import torch

    started = time.monotonic()
    if several := [split for split in ("validation", "test") if data.several(split)]:
        raise UserError(f"drivetrain pack takes one set per split, but data.{several[0]} names several: give one of them")
    with directory.locked(out):
        splits = data.load(torch.device("cpu"))
        shape = tuple(splits.shape)
        store: Any = packed.Raw()
        if given.jpeg:
            size = given.size or SIZE
            store, shape = packed.Jpeg(size, given.quality), (3, size, size)
        key = json.dumps([job.composed.plain["data"], store.kind, vars(store), _listing(splits)], sort_keys=True)
        with _progress("packed") as step:
            packed.pack(splits, out, store, shape, key, given.threads, step)
    samples = len(splits.train) + len(splits.test)
    size = sum(p.stat().st_size for p in out.iterdir())
    echo(f"{out}: {samples:,} samples, {size / 2**20:,.1f} MiB, in {time.monotonic() - started:.1f} s")
    for name in {name for s in (splits.train, *splits.sets("test").values()) for name in s.skipped() or ()}:
        terminal.say(f"unreadable, so another sample was packed instead: {name}")
    echo(f"train with: data=packed data.root={out}")


def _job(source: str, overrides: list[str], given: argparse.Namespace) -> Job:
    """The job whose data is packed: SOURCE is set as the option's data.root or data.train."""
    chosen = overrides if any(w.startswith("data=") for w in overrides) else ["data=imagefolder", *overrides]
    settings = compose(chosen, given.config_dir).plain["data"]
    setting = "train" if "root" not in settings else "root"
    if setting not in settings:
        raise UserError(
            f"drivetrain pack packs images from a folder or file; {chosen[0]} has neither data.root nor data.train for SOURCE "
            "(large texts are tokenized once by themselves)"
        )
    more = [f"data.{setting}={json.dumps(os.path.expanduser(source))}"]
    if "size" in settings and not any(w.startswith("data.size=") for w in overrides):
        more.append(f"data.size={given.size or SIZE}")
    elif given.size is not None and not given.jpeg:
        raise UserError(
            f"drivetrain pack: --size {given.size} has no effect on {chosen[0]}: leave it out, or give --jpeg or data.size"
        )
    return prepare([*chosen, *more], given.config_dir)


def _listing(splits: Any) -> str:
    """A hash of the samples' number and names, if they have any. Other data is packed anew."""
    digest = hashlib.sha256()
    for source in (splits.train, splits.test):
        digest.update(f"{len(source)}\n".encode())
        for name in filter(None, map(source.name, range(len(source)))):
            digest.update(f"{name}\n".encode())
    return digest.hexdigest()[:16]


@contextmanager
def _progress(verb: str) -> Iterator[packed.OnProgress]:
    """The progress of the splits, one after another."""
    with ExitStack() as shown:
        rates: dict[str, Rate] = {}

        def step(split: str, total: int, done: int) -> None:
            if split not in rates:
                shown.close()
                rates[split] = shown.enter_context(Rate("sample", total, done, f" of {split} {verb}"))
            rates[split](done)

        yield step
