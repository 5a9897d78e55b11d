"""Images in tar shards, here or on a web server."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

from drivetrain.core import rng
from drivetrain.core.errors import DataError, UserError
from drivetrain.core.lazy import torch
from drivetrain.core.option import Count, RunSpec
from drivetrain.data import bad_samples, shards
from drivetrain.data.bad_samples import MaxSkipped, OnError
from drivetrain.data.base import Data, Fraction, Normalize, Splits, measured
from drivetrain.data.decoding import Decoding
from drivetrain.data.images import IMAGENET

AT_ONCE = 16  # requests to a web server
WINDOW = 1000  # the stream of the draws within windows; augmentation's lie below


class WebDataset(Data):
    """Tar shards in WebDataset's layout (Aizman et al. 2019): files that share a name up to its first dot are a sample.

    Each shard is indexed once, so that samples are read by their place: the order is a function of seed and epoch alone,
    split over ranks and workers without loss, and a resumed run begins where it was. Shards are shuffled, then the samples
    within windows of `buffer`, so that reading stays close together.
    """

    machine_local_keys = ("train", "test", "cache")

    def __init__(
        self,
        train: str | None = None,
        test: str | None = None,
        size: Count = 224,
        holdout: Fraction = 0.1,
        classes: Count | None = None,
        buffer: Count = 10_000,
        cache: str | None = None,
        normalize: Literal["imagenet", "measured"] = "imagenet",
        max_pixels: Count = 100_000_000,
        on_error: OnError = "raise",
        max_skipped: MaxSkipped = 0.01,
        drop_last: bool = True,
    ) -> None:
        self.train, self.test, self.size, self.holdout, self.classes = train, test, size, holdout, classes
        self.buffer, self.cache, self.normalize, self.max_pixels = buffer, cache, normalize, max_pixels
        self.on_error, self.max_skipped, self.drop_last = on_error, max_skipped, drop_last

    def validate(self, run: RunSpec) -> Iterator[str]:
        if not self.train:
            yield "data=webdataset needs data.train, its shards, such as 'data.train=\"train-{000..009}.tar\"'"
        for knob, pattern in (("train", self.train), ("test", self.test)):
            try:
                names = shards.expand(pattern) if pattern else []
            except UserError as error:
                yield f"data.{knob}: {error}"
                continue
            missing = [name for name in names if not shards.is_remote(name) and not os.path.isfile(name)]
            if missing:
                yield f"data.{knob}={pattern}: {missing[0]} is no file ({len(missing)} of {len(names)} shards are not there)"

    def shape(self) -> tuple[int, ...]:
        return (3, self.size, self.size)

    def decodes(self) -> bool:
        return True

    def load(self, device: torch.device) -> Splits:
        cache = Path(os.path.expanduser(self.cache)) if self.cache else _users_cache() / "drivetrain" / "shards"
        train = _Table.of(shards.expand(str(self.train)), cache)
        if self.test:
            test = _Table.of(shards.expand(self.test), cache)
        else:
            held = torch.tensor([self._held_out(name) for name in train.names])
            train, test = train.part(~held), train.part(held)
        if not len(train.names) or not len(test.names):
            raise UserError(
                f"data.train={self.train} gives {len(train.names)} training and {len(test.names)} test images: "
                "give data.test, more samples, or another data.holdout"
            )
        found = 1 + int(max(train.label.max(), test.label.max()))
        if self.classes is not None and found > self.classes:
            raise DataError(f"data.classes={self.classes}, but there are labels up to {found - 1}: raise it to {found} or more")
        sources = [Shards(t, self.size, self.buffer, self.max_pixels, self.on_error, self.max_skipped) for t in (train, test)]
        return Splits(sources[0], sources[1], self.shape(), self.classes or found, self._normalize(sources[0]))

    def _held_out(self, name: str) -> bool:
        word = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")
        return word / 2**64 < self.holdout

    def _normalize(self, source: Shards) -> Normalize:
        if self.normalize == "measured":
            sample = torch.arange(min(len(source), 500)) * (len(source) // min(len(source), 500))
            return measured(source.fetch(sample)[0])
        return Normalize(*IMAGENET)


def _users_cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))


class _Table:
    """All samples of some shards: where each lies, and its label."""

    def __init__(self, files: list[str], names: Any, shard: Any, places: Any, label: torch.Tensor) -> None:
        self.files, self.names, self.shard, self.places, self.label = files, names, shard, places, label

    @classmethod
    def of(cls, files: list[str], cache: Path) -> _Table:
        """The samples of these shards, in their order. Raises DataError naming the first bad shard."""
        import numpy as np

        with ThreadPoolExecutor(AT_ONCE) as pool:  # scanning waits for the disk or the network
            indices = list(pool.map(lambda shard: shards.indexed(shard, cache), files))
        shard = np.repeat(np.arange(len(files)), [len(index.names) for index in indices])
        names, places, labels = (np.concatenate([index[i] for index in indices]) for i in range(3))
        return cls(files, names, torch.from_numpy(shard), torch.from_numpy(places), torch.from_numpy(labels))

    def part(self, chosen: torch.Tensor) -> _Table:
        """Those samples where `chosen` (n,) is true."""
        return _Table(self.files, self.names[chosen.numpy()], self.shard[chosen], self.places[chosen], self.label[chosen])


class Shards(Decoding):
    """Samples of tar shards as a source."""

    def __init__(
        self, table: _Table, size: int, buffer: int, max_pixels: int, on_error: OnError, max_skipped: MaxSkipped
    ) -> None:
        self.table, self.size, self.buffer, self.max_pixels = table, size, buffer, max_pixels
        self.faults = bad_samples.policy(on_error, max_skipped, len(self), self.name)
        self.remote = any(map(shards.is_remote, table.files))

    def __len__(self) -> int:
        return len(self.table.label)

    def order(self, seed: int, epoch: int) -> torch.Tensor:
        """The epoch's order (n,): shards shuffled, then samples within windows of `buffer` that lie differently each time."""
        n = len(self)
        rank = rng.permutation(rng.mix(seed, 6), epoch, len(self.table.files)).argsort()
        by_shard = rank[self.table.shard].argsort(stable=True)
        begin = rng.mix(seed, epoch, 7) % self.buffer
        window = (torch.arange(n) + begin) // self.buffer
        draws = rng.uniform(seed, epoch, torch.arange(n), WINDOW).double()
        return by_shard[(window + draws).argsort(stable=True)]

    def samples(self, indices: list[int], boxes: Sequence[Any]) -> Iterable[tuple[torch.Tensor, int]]:
        if not self.remote:
            return super().samples(indices, boxes)
        with ThreadPoolExecutor(min(AT_ONCE, len(indices))) as pool:
            return list(pool.map(self.sample, indices, boxes))

    def content(self, index: int) -> tuple[bytes, int]:
        start, size = self.table.places[index].tolist()
        return shards.read(self.table.files[int(self.table.shard[index])], start, size), int(self.table.label[index])

    def name(self, index: int) -> str:
        return f"{self.table.files[int(self.table.shard[index])]}: {self.table.names[index]}"
