"""Reads the samples of a user's own Dataset: their random draws follow from seed, epoch and index."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

from drivetrain.core.errors import DataError, UserError
from drivetrain.core.lazy import torch
from drivetrain.core.step import rng, streams
from drivetrain.core.step.streams import RandomStream
from drivetrain.core.user import code as user_code
from drivetrain.core.user import state as owned
from drivetrain.data import sharing

STREAM = 10  # of the keys of samples
TOGETHER = 11  # of the key of the function that makes a batch; the rest is its first sample's key
B = TypeVar("B")  # a batch


class MapStyle(Protocol):
    """A Dataset whose samples are read by their numbers."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> object: ...


class Reader(Generic[B]):
    """Reads samples of a map-style Dataset with draws by key. `together` makes a batch of a list of them.

    Streams belong to a process: a copy in a worker finds its own.
    """

    def __init__(self, dataset: MapStyle, together: Callable[..., B]) -> None:
        self.dataset, self.together = dataset, together
        self.used: list[int] = []  # the positions of the streams that were seen to move
        self.stateful = bool(owned.find({"data": dataset, "data.collate": together}))  # each read counts: none is repeated
        self._streams: list[RandomStream] = []
        self.watched: list[RandomStream] = []  # streams that only the Dataset draws from, where threads read it
        self._suspected = False  # whether one of them has moved
        self._unshareable: dict[bool, str | None] = {}  # what `unshareable` has found
        self._constant = {0}  # memory that several samples share and none overwrites

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.dataset, self.together)

    def keeps(self) -> dict[str, object]:
        """Return the user's objects by name."""
        return {"data": self.dataset, "data.collate": getattr(self.together, "collate", None)}

    def drawn(self) -> list[str]:
        """Return the random streams that the samples were seen to draw from, such as numpy's."""
        return sorted({self._streams[number].name for number in self.used})

    def unshareable(self, threads: bool) -> str | None:
        """Return why threads, or else forked processes, cannot read the samples at once; None: they can."""
        if threads not in self._unshareable:
            check = sharing.between_threads if threads else sharing.between_processes
            with streams.apart():
                self._unshareable[threads] = check(lambda index: self._unkeyed([index], ()), len(self.dataset), self.keeps())
        return self._unshareable[threads]

    def _find(self, index: int) -> list[RandomStream]:
        """Return the streams that the Dataset may draw from, including those made at its first sample."""
        if not self._streams:
            if not self.stateful:
                with streams.apart():
                    self._samples([index])
            self._streams = [*streams.of_process(), *streams.kept_by(self.dataset, self.together)]
            self.used = list(range(len(self._streams))) if self.stateful else []
        return self._streams

    def read(self, indices: Sequence[int], keys: Sequence[int], *options: object) -> B:
        """Return a batch whose samples draw by their keys; the streams are restored afterwards. Raises DataError."""
        found = self._find(indices[0])
        saved = [stream.save() for stream in found]
        try:
            batch = self._keyed(indices, keys, options) if self.used else self._unkeyed(indices, options)
            while moved := [n for n, stream in enumerate(found) if n not in self.used and stream.moved(saved[n])]:
                self.used += moved
                batch = self._keyed(indices, keys, options)
            return batch
        finally:
            for n, stream in enumerate(found):
                if n in self.used or stream.moved(saved[n]):
                    stream.restore(saved[n])

    def look(self, indices: Sequence[int]) -> B:
        """Return a batch for inspection: its samples draw the same in every run. Raises DataError."""
        return self.read(indices, keys(0, 0, torch.tensor(indices)).tolist())

    def share(self, watch_torch: bool) -> None:
        """Prepare for reads by threads. They share the streams, so only the fact of a draw is seen."""
        self.watched = [s for n, s in enumerate(self._find(0)) if n or watch_torch]

    def suspected(self) -> bool:
        """Return whether samples that threads have read since the last call may have drawn random numbers."""
        suspected, self._suspected = self._suspected, False
        return suspected

    def plain(self, indices: Sequence[int], *options: object) -> B:
        """Return a batch whose samples draw from the streams as they are. Raises DataError."""
        saved = [stream.save() for stream in self.watched]
        batch = self._unkeyed(indices, options)
        if any(stream.moved(state) for stream, state in zip(self.watched, saved, strict=True)):
            self._suspected = True
        return batch

    def _unkeyed(self, indices: Sequence[int], options: Sequence[object]) -> B:
        samples = self._samples(indices)
        self._check_memory(indices, samples)
        return self._together(indices, samples, options)

    def _check_memory(self, indices: Sequence[int], samples: Sequence[object]) -> None:
        """Raise UserError where a sample overwrites another one of its batch, which would then hold one sample twice."""
        owners: dict[int, int] = {}
        for other, sample in zip(indices, samples, strict=False) if len(samples) > 1 and not self.stateful else ():
            for place in map(sharing.address, sharing.arrays(sample)):
                if (one := owners.setdefault(place, other)) == other or place in self._constant:
                    continue
                with streams.apart():
                    if sharing.overwritten(lambda number: self._samples([number])[0], one, other):
                        raise UserError(
                            f"{type(self.dataset).__name__} returns samples {one} and {other} in the same memory, so that the "
                            "second overwrites the first and a batch would hold it twice: return a copy of each"
                        )
                self._constant.add(place)

    def _keyed(self, indices: Sequence[int], keys: Sequence[int], options: Sequence[object]) -> B:
        samples = []
        for index, key in zip(indices, keys, strict=True):
            self._seed(key)
            samples += self._samples([index])
        self._check_memory(indices, samples)
        self._seed(rng.mix(keys[0], TOGETHER))
        return self._together(indices, samples, options)

    def _together(self, indices: Sequence[int], samples: list[object], options: Sequence[object]) -> B:
        try:
            return self.together(samples, *options)
        except DataError as error:
            raise DataError(f"samples {list(indices[:4])} … do not make a batch of (x, y): {error}") from None

    def _seed(self, key: int) -> None:
        for number in self.used:
            self._streams[number].seed(key ^ streams.salt(number))

    def _samples(self, indices: Sequence[int]) -> list[object]:
        """Return samples, at once where the Dataset can. A StopIteration would end the loop that reads, and the training."""
        many = getattr(self.dataset, "__getitems__", None)
        samples: list[object] = []
        try:
            for index in indices if many is None else ():
                samples.append(self.dataset[index])
            return samples if many is None else list(many(indices))
        except Exception as error:
            which = f"sample {indices[len(samples)]}" if many is None else f"a sample of {indices[0]} … {indices[-1]}"
            if not isinstance(error, StopIteration):
                error.add_note(f"{user_code.READING}{which}")
                raise
            raise DataError(
                f"{type(self.dataset).__name__} raised StopIteration for {which}, and says that it has {len(self.dataset)}: its "
                "__getitem__ must return a sample for each index"
            ) from None


def keys(seed: int, epoch: int, indices: torch.Tensor) -> torch.Tensor:
    """Return the key of each sample (n,) in an epoch."""
    return rng.keys(seed, epoch, indices, STREAM)
