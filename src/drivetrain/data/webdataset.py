"""Images in tar shards, on local disks or on a web server."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from drivetrain.core import rng
from drivetrain.core.allowed import FileName
from drivetrain.core.errors import OperatorGives, UserError
from drivetrain.core.lazy import numpy as np
from drivetrain.core.lazy import torch
from drivetrain.core.option import Count, RunSpec
from drivetrain.core.order import Sampling
from drivetrain.core.paths import user_cache
from drivetrain.core.source import CropBox
from drivetrain.data import shards
from drivetrain.data.base import SPLITS, Fraction, HeldOut, Sets, Splits, hash_fractions
from drivetrain.data.decoding import ImageFileSource
from drivetrain.data.images import PictureData
from drivetrain.data.schema import TargetReader

MAX_CONCURRENT = 16  # shards that are scanned, or samples that are fetched from a web server, at once
REMOTE_LOOKED_AT = 8  # samples on a web server, for the range of their pixels
MIN_SHARDS = 10  # of which whole ones are held out for the validation
logger = logging.getLogger(__name__)
SHUFFLE_STREAM = 1000  # the random stream of the shuffle within windows; augmentations' streams lie below


@dataclass(kw_only=True, eq=False)
class WebDataset(PictureData, HeldOut["ShardImages", None]):
    """Tar shards in WebDataset's layout (Aizman et al. 2019): files that share a name up to its first dot are a sample.

    Each shard is indexed once, and samples are read by their offsets. So the order is a function of seed and epoch alone,
    ranks and workers share it exactly, and a resumed run continues it. Shards are shuffled, then the samples within windows
    of `buffer`, so that samples near each other in a shard are read near each other in time.
    """

    machine_local_keys = ("train", "test", "cache")

    train: str | None = None
    test: str | dict[str, str] | None = None
    validation: Fraction | FileName | Sets | None = 0.1
    classes: Count | None = None
    buffer: Count = 10_000
    cache: str | None = None
    order: Sampling = "own"

    def validate(self, run: RunSpec) -> Iterator[str]:
        yield from super().validate(run)
        if not self.train:
            yield OperatorGives("data=webdataset needs data.train, its shards, such as 'data.train=\"train-{000..009}.tar\"'")
        given = [("train", self.train), *((split, each) for split in SPLITS for each in self.places(split).values())]
        for setting, pattern in given:
            try:
                names = shards.expand(pattern) if pattern else []
            except UserError as error:
                yield f"data.{setting}: {error}"
                continue
            missing = [name for name in names if not shards.is_remote(name) and not os.path.isfile(name)]
            if missing:
                yield f"data.{setting}={pattern}: {missing[0]} is no file ({len(missing)} of {len(names)} shards are not there)"

    def places(self, split: str, known: Any = None) -> dict[str, str]:
        """Return the shards of a split's sets; those of the validation stand beside those of training."""
        found, folder = super().places(split), str(self.train).rpartition("/")[0]
        return found if split == "test" else {name: os.path.join(folder, each) for name, each in found.items()}

    def read(self) -> tuple[ShardImages, None]:
        return self.read_set(str(self.train), None, "train"), None

    def fractions(self, every: ShardImages) -> np.ndarray:
        return hash_fractions(every.table.names)

    def read_set(self, place: str, known: None, split: str) -> ShardImages:
        cache = Path(os.path.expanduser(self.cache)) if self.cache else (user_cache() or Path(os.devnull)) / "shards"
        return ShardImages(SampleTable.load(shards.expand(place), cache), self)

    def about(self, known: None, sources: Sequence[tuple[str, ShardImages]], own: Splits | None) -> dict[str, Any]:
        reader = TargetReader("class", ["label"], f"data.train={self.train}", numbered=True)
        return {"shape": self.shape(), **reader.about(sources, self.classes), **self.looked_at(sources)}


class SampleTable(NamedTuple):
    """The n samples of some shards, in their order."""

    files: list[str]  # the shards
    names: Any  # (n,) array of text
    shard: torch.Tensor  # (n,) int64: each sample's shard, as a position in `files`
    spans: torch.Tensor  # (n, 2) int64: offset and size of its image
    labels: torch.Tensor  # (n,) int64

    @classmethod
    def load(cls, files: list[str], cache: Path) -> SampleTable:
        """Load the indices of these shards. Raises DataError naming the first bad shard."""
        with ThreadPoolExecutor(MAX_CONCURRENT) as pool:  # scanning waits for the disk or the network
            indices = list(pool.map(lambda shard: shards.load_index(shard, cache), files))
        if empty := [file for file, index in zip(files, indices, strict=True) if not index.names]:
            logger.warning(
                "%d of %d shards hold no samples and are passed over, the first is %s", len(empty), len(files), empty[0]
            )
        names = np.array([name for index in indices for name in index.names])
        shard = torch.arange(len(files)).repeat_interleave(torch.tensor([len(index.names) for index in indices]))
        spans, labels = (torch.from_numpy(np.concatenate([index[i] for index in indices])) for i in (1, 2))
        return cls(files, names, shard, spans, labels)

    def select(self, chosen: torch.Tensor) -> SampleTable:
        """Return the table of the samples `chosen` (m,)."""
        return SampleTable(self.files, self.names[chosen.numpy()], self.shard[chosen], self.spans[chosen], self.labels[chosen])


class ShardImages(ImageFileSource):
    """Images in tar shards as a source."""

    def __init__(self, table: SampleTable, data: WebDataset) -> None:
        self.table, self.buffer = table, data.buffer
        self.remote = any(map(shards.is_remote, table.files))
        self.looked_at = REMOTE_LOOKED_AT if self.remote else self.looked_at
        super().__init__(data.how(), table.labels)

    def order(self, seed: int, epoch: int) -> torch.Tensor:
        """Return the epoch's order (n,): shards shuffled, then samples within windows of `buffer`, which shift every epoch."""
        n = len(self)
        rank = rng.permutation(rng.mix(seed, 6), epoch, len(self.table.files)).argsort()
        by_shard = rank[self.table.shard].argsort(stable=True)
        shift = rng.mix(seed, epoch, 7) % self.buffer
        window = (torch.arange(n) + shift) // self.buffer
        draws = rng.uniform(seed, epoch, torch.arange(n), SHUFFLE_STREAM).double()
        return by_shard[(window + draws).argsort(stable=True)]

    def samples(self, indices: list[int], boxes: Sequence[CropBox | None]) -> Iterable[tuple[torch.Tensor, int]]:
        if not self.remote:
            return super().samples(indices, boxes)
        with ThreadPoolExecutor(min(MAX_CONCURRENT, len(indices))) as pool:
            return list(pool.map(self.sample, indices, boxes))

    def select(self, indices: torch.Tensor) -> None:
        super().select(indices)
        self.table = self.table.select(indices)

    def identities(self) -> list[str]:
        """Return the shard of each sample, so that whole shards are held out; its own name where there are too few shards."""
        files = [os.path.basename(file) for file in self.table.files]
        if len(files) >= MIN_SHARDS:
            return [files[shard] for shard in self.table.shard.tolist()]
        return [str(name) for name in self.table.names]

    def content(self, index: int) -> bytes:
        start, size = self.table.spans[index].tolist()
        return shards.read_range(self._file(index), start, size)

    def name(self, index: int) -> str:
        return f"{self._file(index)}: {self.table.names[index]}"

    def _file(self, index: int) -> str:
        return self.table.files[int(self.table.shard[index])]
