"""`drivetrain pack`: images decoded once, for data=packed."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from drivetrain.config.compose import compose
from drivetrain.core.errors import DONE, UserError
from drivetrain.data import packing
from drivetrain.launch.job import Job, prepare
from drivetrain.run import directory
from drivetrain.ui import terminal

SIZE = 256
HELP = """\
drivetrain pack SOURCE FOLDER [data=option] [data.key=value] …      decode the images of SOURCE once, for data=packed

  drivetrain pack ~/imagenet packed --size 256           train data=packed data.root=packed
  drivetrain pack ~/imagenet packed --jpeg --quality 90   keeps JPEGs, at most so large: less disk, decoded when read
  drivetrain pack ~/cifar packed data=cifar10             any data that gives images; its root is SOURCE
  drivetrain pack 'train-{000..009}.tar' packed data=webdataset
  drivetrain pack --verify packed                         every sample's checksum

  --size N              the square that images are resized to (with --jpeg: their shorter side); default 256
  --jpeg                store JPEGs; those at or below the size are kept byte for byte
  --quality Q           of the JPEGs that are made smaller, 1 to 100; default 90
  --threads N           that decode; default: one for each core
  -h, --help            this

A packing that was killed goes on when the same command is given again, and comes to the same bytes.
"""


def command(argv: Sequence[str]) -> int:
    """Run `drivetrain pack …`. Raises UserError."""
    given = _parse(argv)
    if given.help:
        print(HELP)
        return DONE
    if given.verify:
        if len(given.words) != 1:
            raise UserError("drivetrain pack --verify wants one folder that was packed")
        with _shown("verified") as step:
            count = packing.verify(Path(given.words[0]), step)
        print(f"{given.words[0]}: all {count:,} samples are as they were packed")
        return DONE
    places = [w for w in given.words if "=" not in w]
    if len(places) != 2:
        raise UserError("drivetrain pack wants a source and a folder to write: drivetrain pack ~/images packed --size 256")
    if not 1 <= given.quality <= 100 or (given.size is not None and given.size < 1) or given.threads < 1:
        raise UserError("drivetrain pack: --quality is from 1 to 100, --size and --threads from 1 on")
    _pack(places[0], Path(places[1]), [w for w in given.words if "=" in w], given)
    return DONE


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    from drivetrain.core.cpus import usable_cores

    parser = argparse.ArgumentParser(prog="drivetrain pack", add_help=False)
    parser.add_argument("words", nargs="*")
    parser.add_argument("--size", type=int)
    parser.add_argument("--jpeg", action="store_true")
    parser.add_argument("--quality", type=int, default=90)
    parser.add_argument("--threads", type=int, default=usable_cores())
    parser.add_argument("--verify", action="store_true")
    parser.add_argument("-h", "--help", action="store_true")
    return parser.parse_intermixed_args(argv)


def _pack(source: str, out: Path, words: list[str], given: argparse.Namespace) -> None:
    job = _job(source, words, given.size, given.jpeg)
    if problems := list(job.run.data.validate(job.run)):
        raise UserError(problems)
    if (out / "index.json").exists():
        raise UserError(f"{out} is packed already: remove it, or give another folder")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{out} cannot be made ({error.strerror}): give a folder you can write to") from None
    import torch

    started = time.monotonic()
    with directory.locked(out):
        splits = job.run.data.load(torch.device("cpu"))
        shape = tuple(splits.shape)
        store: Any = packing.Raw()
        if given.jpeg:
            size = given.size or SIZE
            store, shape = packing.Jpeg(size, given.quality), (3, size, size)
        about = json.dumps([job.composed.plain["data"], store.kind, vars(store), _listing(splits)], sort_keys=True)
        with _shown("packed") as step:
            packing.pack(splits, out, store, shape, about, given.threads, step)
    samples = len(splits.train) + len(splits.test)
    size = sum(p.stat().st_size for p in out.iterdir())
    print(f"{out}: {samples:,} samples, {size / 2**20:,.1f} MiB, in {time.monotonic() - started:.1f} s")
    for lost in {name for s in (splits.train, splits.test) if hasattr(s, "skipped") for name in s.skipped()}:
        terminal.say(f"could not be read, and another stands for it: {lost}")
    print(f"train with: data=packed data.root={out}")


def _job(source: str, words: list[str], size: int | None, jpeg: bool) -> Job:
    """The job whose data is to be packed: SOURCE in the option's own place for it."""
    chosen = words if any(w.startswith("data=") for w in words) else ["data=imagefolder", *words]
    knobs = compose(chosen).plain["data"]
    place = "train" if "root" not in knobs else "root"
    if place not in knobs:
        raise UserError(f"drivetrain pack cannot give SOURCE to {chosen[0]}, which has neither data.root nor data.train")
    own = [f"data.{place}={json.dumps(os.path.expanduser(source))}"]
    if "size" in knobs and not any(w.startswith("data.size=") for w in words):
        own.append(f"data.size={size or SIZE}")
    elif size is not None and not jpeg:
        raise UserError(f"drivetrain pack: --size {size} has no effect on {chosen[0]}: leave it out, or say --jpeg or data.size")
    return prepare([*chosen, *own])


def _listing(splits: Any) -> str:
    """What tells one set of samples from another: how many, and their names where they have some."""
    digest = hashlib.sha256()
    for source in (splits.train, splits.test):
        digest.update(f"{len(source)}\n".encode())
        for i in range(len(source) if hasattr(source, "name") else 0):
            digest.update(f"{source.name(i)}\n".encode())
    return digest.hexdigest()[:16]


@contextmanager
def _shown(verb: str) -> Iterator[packing.OnProgress]:
    """Progress: a bar with its rate in a terminal, a line every ten seconds elsewhere."""
    if not terminal.is_live():
        yield _Lines(verb)
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = [TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[rate]}")]
    with Progress(*columns, TimeRemainingColumn()) as bar:
        tasks: dict[str, tuple[Any, float, int]] = {}

        def step(split: str, done: int, total: int) -> None:
            if split not in tasks:
                tasks[split] = bar.add_task(split, total=total, rate=""), time.monotonic(), done
            task, began, first = tasks[split]
            rate = (done - first) / max(1e-9, time.monotonic() - began)
            bar.update(task, completed=done, rate=f"{rate:,.0f} samples/s" if done > first else "")

        yield step


class _Lines:
    """Progress in plain lines."""

    def __init__(self, verb: str) -> None:
        self.verb, self.said, self.began = verb, time.monotonic(), time.monotonic()

    def __call__(self, split: str, done: int, total: int) -> None:
        if time.monotonic() - self.said > 10 or done == total:
            self.said = time.monotonic()
            print(f"{split}: {done:,} of {total:,} {self.verb}", flush=True)
