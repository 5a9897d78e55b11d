"""Streams: an IterableDataset that keeps its place, read once from its beginning to its end, and then again."""

from __future__ import annotations

import inspect
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from copy import copy
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any, Literal, Self

from drivetrain.core.errors import DataError, Interrupted, UserError
from drivetrain.core.lazy import torch
from drivetrain.core.machine.open_files import apart_after_fork
from drivetrain.core.options.allowed import Arguments, Name
from drivetrain.core.options.option import Count, CountOrZero, RunSpec, needs_extra
from drivetrain.core.order import Sampling
from drivetrain.core.step import rng, streams, trees
from drivetrain.core.step.source import OwnCode, Source
from drivetrain.core.step.trees import Tree, map_tensors
from drivetrain.core.user import code as user_code
from drivetrain.core.user import state as owned
from drivetrain.core.world import World
from drivetrain.data.collation import tensors_of
from drivetrain.data.own import OwnDataset, OwnSource, is_map_style

logger = logging.getLogger(__name__)

TOGETHER = 32  # samples that a worker reads in its turn
LOOKED_AT = 2**16  # samples from a stream's beginning that a look may read
STREAM = 14  # of the keys of a stream's random draws


@dataclass(kw_only=True, eq=False)
class OwnStream(OwnDataset):
    """The user's own stream `target`, of a package named in `trust`: an IterableDataset with `state_dict` and `load_state_dict`.

    An epoch is `updates` long, wherever the stream ends and begins again. Each rank and worker reads a part of it. It continues
    where a checkpoint left it, with the same number of ranks and workers. The sets to evaluate may be map-style Datasets, or
    streams; their first `eval_samples` are read.
    """

    pad: bool = field(init=False, default=False)
    order: Sampling = field(init=False, default="sequential")  # its own
    folds: None = field(init=False, default=None)  # because it has no sample numbers
    fold: int = field(init=False, default=0)
    validation: Name | Arguments | None = None
    updates: Count = 1000
    eval_samples: Count = 1000
    workers: CountOrZero = 0
    split: Literal["samples", "own"] = "samples"
    approximate: bool = False
    _samples = 0

    def resolve(self, run: RunSpec) -> Self:
        return super().resolve(run).with_values(_samples=self.updates * int(run.batch.global_batch))

    def validate_device(self, run: RunSpec) -> Iterator[str]:
        yield from needs_extra("torchdata", "stream", "data=stream")

    def loaded_samples(self) -> int:
        return self._samples

    def _dataset(self, target: Callable[..., object], split: str, given: object) -> Any:
        made = partial(self._made, target, split, given)
        if split == "train":
            return made
        dataset = made()
        if not is_map_style(dataset):
            dataset = list(islice(iter(dataset), self.eval_samples))
        if not len(dataset):
            raise UserError(f"data.target={self.target} has no {split} samples")
        return dataset

    def _made(self, target: Callable[..., object], split: str, given: object) -> Any:
        kwargs = {**(self.kwargs or {}), **self._split_arguments(target, split, given)}
        return user_code.make(f"data.target={self.target}", target, kwargs)

    def _sources(self, train: Any, *others: Any) -> list[Any]:
        setting, together = f"data.target={self.target}", self._together()
        dataset = train()
        self._check(dataset)
        stream = StreamSource(Reads(train, self, together), self._samples, dataset)
        return [stream, *(OwnSource(each, setting, together) for each in others)]

    def _check(self, dataset: Any) -> None:
        """Raise UserError where a stream cannot continue where it was stopped."""
        setting = f"data.target={self.target}"
        if is_map_style(dataset) or not hasattr(dataset, "__iter__"):
            raise UserError(f"{setting} is a {type(dataset).__name__}, which is no stream (an IterableDataset): set data=own")
        if not all(callable(getattr(dataset, name, None)) for name in ("state_dict", "load_state_dict")):
            raise UserError(
                f"{setting} is a {type(dataset).__name__} without state_dict and load_state_dict, so a run that is stopped could "
                "not go on where it was: give it both, or take a stream that has them (Hugging Face's, torchdata's)"
            )
        try:
            inspect.signature(dataset.state_dict).bind()
        except TypeError as error:  # as with mosaicml-streaming
            raise UserError(
                f"{setting} is a {type(dataset).__name__}, whose state_dict wants what its loader knows ({error}): let the "
                "target return that loader for training, such as StreamingDataLoader"
            ) from None
        if not _has_shuffle_buffer(dataset):
            return
        if not self.approximate:
            raise UserError(
                f"{setting} shuffles in a buffer (Hugging Face's shuffle), which is not in its state: a resumed run would lose "
                "and repeat samples. Shuffle the files before, or set data.approximate=true to resume approximately"
            )
        logger.warning("%s shuffles in a buffer: a resumed run goes on approximately, and loses and repeats samples", setting)


def _has_shuffle_buffer(dataset: object) -> bool:
    """Return whether a Hugging Face set shuffles its samples in a buffer."""
    waiting = [getattr(dataset, "_ex_iterable", None)]
    for each in waiting:
        if type(each).__name__ == "BufferShuffledExamplesIterable":
            return True
        waiting += [part for part in (getattr(each, "ex_iterable", None), *getattr(each, "ex_iterables", ())) if part is not None]
    return False


class StreamSource(Source):
    """A stream as a source. Training takes its samples one after the other (`taken`); all other code reads a separate pass."""

    in_order = True
    takes = False  # whether training reads

    def __init__(self, reads: Reads, samples: int, dataset: Any) -> None:
        self.reads, self.samples, self.dataset = reads, samples, dataset
        self.own_code: OwnCode = self

    def __len__(self) -> int:
        return self.samples

    def taken(self, world: World, seed: int, on_exit: ExitStack) -> StreamSource:
        on_exit.callback(self.reads.park)  # ends its workers with the run
        made = copy(self)
        made.takes, made.own_code = True, made
        self.reads.world, self.reads.seed = world, seed
        return made

    def fetch(self, indices: torch.Tensor, pad_to: int = 1, draws: tuple[int, int] | None = (0, 0)) -> tuple[Tree, Tree]:
        """Return the next samples for training; else the samples at these places."""
        if not self.takes or draws is None:
            return self.reads.look(indices.tolist())
        return self.reads.take((draws[1], int(indices[0])), len(indices))

    def keeps(self) -> dict[str, object]:
        return {"data": self.reads}

    def drawn(self) -> list[str]:
        return []

    def unshareable(self, threads: bool) -> str | None:
        return None

    def share(self, watch_torch: bool) -> None:
        """Threads do not read it, because it has a state."""

    def suspected(self) -> bool:
        return False


class Reads:
    """The reads of training from a stream, and their state. At its end a stream begins again, as a new object."""

    def __init__(self, make: Callable[[], Any], option: OwnStream, together: Any) -> None:
        self.make, self.together, self.target_key = make, together, option.target_key
        self.workers, self.by_samples = option.workers, option.split == "samples"
        self.setting = f"data.target={option.target}"
        self.world, self.seed = World(), 0
        self._passes, self._served = 0, 0  # completed passes; samples taken from the batch
        self._loader: Any = None
        self._batches: Iterator[Any] = iter(())
        self._batch: tuple[Tree, Tree] | None = None
        self._before: Any = None  # the loader's state before the batch; None: at its beginning
        self._parked: Mapping[str, Any] | None = None  # the state to continue from, where nothing is open
        self._last = (-1, -1)  # epoch and number of the last sample taken
        self._looks: Iterator[tuple[Tree, Tree]] = iter(())
        self._looked = LOOKED_AT  # samples that `_looks` has returned

    def __deepcopy__(self, memo: object) -> Reads:
        return self

    def take(self, place: tuple[int, int], count: int) -> tuple[Tree, Tree]:
        """Return the next samples, for a place (epoch, number) in the run. Raises UserError for an earlier place."""
        if place <= self._last:
            raise UserError(
                f"{self.setting} is a stream, and cannot be read a second time within a run, as after memory has run out: set "
                "batch=accumulate with smaller micro-batches, and resume the run"
            )
        self._last = place
        if self._parked is not None:
            self._open(self._parked)
        parts: list[tuple[Tree, Tree]] = []
        while count:
            if self._batch is None or self._served == trees.length(self._batch[1]):
                self._read()
            assert self._batch is not None
            end = min(self._served + count, trees.length(self._batch[1]))
            parts.append(_rows(self._batch, self._served, end))
            count -= end - self._served
            self._served = end
        return self._joined(parts)

    def look(self, places: Sequence[int]) -> tuple[Tree, Tree]:
        """Return the samples at these places, from a new reading of the stream."""
        parts = []
        with streams.apart():
            for place in (place % LOOKED_AT for place in places):
                if place < self._looked:
                    self._looks, self._looked = self._each(), 0
                for row in self._looks:
                    self._looked += 1
                    if self._looked > place:
                        parts.append(row)
                        break
                else:  # the stream is shorter
                    if not self._looked:
                        raise self._empty()
                    self._looks, self._looked = self._each(), 0
                    parts.append(next(self._looks))
                    self._looked = 1
        return self._joined(parts)

    def _each(self) -> Iterator[tuple[Tree, Tree]]:
        """Yield each sample, as a batch of one."""
        loader, batched = self._opened(World(), 0, 1)
        for batch in loader:
            pair = tensors_of(batch, self.target_key) if batched else batch
            yield from (_rows(pair, n, n + 1) for n in range(trees.length(pair[1])))

    def _opened(self, world: World, workers: int, together: int = TOGETHER) -> tuple[Any, bool]:
        """Return a loader of a pass over a rank's part, and whether its batches are the user's own."""
        from torchdata.stateful_dataloader import StatefulDataLoader

        from drivetrain.data.stream_part import StreamPart, begin_worker

        dataset = self.make()
        if callable(set_epoch := getattr(dataset, "set_epoch", None)):
            set_epoch(self._passes)
        if isinstance(dataset, torch.utils.data.DataLoader):  # a loader batches, divides and keeps its state itself
            return dataset, True
        divided = not self.by_samples
        if self.by_samples and type(dataset).__module__.partition(".")[0] == "datasets":
            from datasets.distributed import split_dataset_by_node

            dataset, divided = split_dataset_by_node(dataset, world.rank, world.size), True
        part = StreamPart(dataset, rng.mix(self.seed, STREAM, self._passes), world.rank, 0 if divided else world.size)
        generator = torch.Generator()  # else it draws its base seed from the model's random stream
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "'set_vital' is deprecated")  # torchdata 0.11 calls it, with torch from 2.13 on
            loader: Any = StatefulDataLoader(
                part, together, num_workers=workers, collate_fn=self.together, generator=generator, worker_init_fn=begin_worker
            )
        return loader, False

    def _begin(self, before: object = None) -> None:
        """Begin a pass, or continue at the state of its loader."""
        self._loader, self._batched = self._opened(self.world, self.workers)
        if before is not None:
            self._loader.load_state_dict(before)
        with apart_after_fork():
            self._batches = iter(self._loader)
        self._before, self._served = before, 0

    def _read(self) -> None:
        """Read the next batch. Raises DataError if there is none."""
        if self._loader is None:
            self._begin()
        else:
            self._before, self._served = self._loader.state_dict(), 0
        if (found := self._next()) is None:
            self._passes += 1
            self._begin()
            if (found := self._next()) is None:
                raise self._empty()
        if self._batch is None and (problems := list(owned.unsavable(self.setting, self._loader))):
            raise UserError(problems)
        self._batch = found

    def _next(self) -> tuple[Tree, Tree] | None:
        try:
            batch = next(self._batches, None)
        except RuntimeError as error:
            if str(error).startswith("DataLoader worker"):
                raise Interrupted(f"a worker of {self.setting} was killed ({str(error).strip().splitlines()[0]})") from None
            raise
        return tensors_of(batch, self.target_key) if self._batched and batch is not None else batch

    def _joined(self, parts: Sequence[tuple[Tree, Tree]]) -> tuple[Tree, Tree]:
        if len(parts) == 1:
            return parts[0]
        try:
            x, y = trees.concatenate(parts)
            return x, y
        except (RuntimeError, ValueError) as error:
            raise DataError(f"{self.setting} gives batches of several shapes ({error}): let data.collate pad to one") from None

    def _empty(self) -> DataError:
        return DataError(
            f"{self.setting} gives no samples to rank {self.world.rank} of {self.world.size}: give it more, or fewer ranks"
        )

    def state_dict(self) -> dict[str, object]:
        """Return the position of the reads: the state before the batch, and the samples taken from it."""
        at = {"rank": self.world.rank, "ranks": self.world.size, "workers": self.workers}
        if self._parked is not None:  # perhaps by a trial of a sample before the ranks were known
            return {**self._parked, **at}
        return {**at, "passes": self._passes, "before": self._before, "served": self._served}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where a `state_dict()` was. Raises UserError if the number of ranks or workers has changed."""
        for what, now in (("ranks", self.world.size), ("workers", self.workers)):
            if now != state[what]:
                setting = "parallel.nproc" if what == "ranks" else "data.workers"
                raise UserError(
                    f"{self.setting} was read by {state[what]} {what}, and now there are {now}: each has a place in its part, so "
                    f"resume with {setting}={state[what]}"
                )
        self._parked = state

    def park(self) -> None:
        """Close the open files: the next read continues there."""
        self._parked, self._loader, self._batches, self._batch = self.state_dict(), None, iter(()), None

    def _open(self, state: Mapping[str, Any]) -> None:
        self._parked, self._passes = None, state["passes"]
        self._begin(state["before"])
        if state["served"]:
            self._batch, self._served = self._next(), state["served"]


def _rows(batch: tuple[Tree, Tree], begin: int, end: int) -> tuple[Tree, Tree]:
    x, y = (map_tensors(lambda tensor: tensor[begin:end], tree) for tree in batch)
    return x, y
