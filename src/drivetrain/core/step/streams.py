"""The random streams of a process: torch's, numpy's, Python's, and generators that objects keep."""

from __future__ import annotations

import ctypes
import functools
import itertools
import pickle
import random
import sys
import types
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

from drivetrain.core.lazy import numpy as np
from drivetrain.core.lazy import torch
from drivetrain.core.step import rng

MOST = 10_000  # objects searched for generators
ITEMS = 64  # of each container
LIBRARIES = frozenset({*sys.stdlib_module_names, "torch", "torchvision", "numpy", "PIL", "drivetrain"})
_WORD = (1 << 32) - 1
_BYTES = 4 * 625  # of a Mersenne Twister in numpy: 624 words and a position


class RandomStream(Protocol):
    """A source of random numbers whose state can be read and set."""

    name: str  # its name in messages

    def save(self) -> object:
        """Return its state."""

    def moved(self, saved: Any) -> bool:
        """Return whether its state differs from this one, as after a draw."""

    def restore(self, saved: Any) -> None:
        """Restore a saved state."""

    def seed(self, number: int) -> None:
        """Seed it by a number of 63 bits."""


class TorchStream:
    """A torch.Generator of the CPU."""

    name = "torch"

    def __init__(self, generator: torch.Generator) -> None:
        self._generator = generator
        self.save = generator.get_state

    def moved(self, saved: torch.Tensor) -> bool:
        """See `RandomStream`."""
        return not torch.equal(self._generator.get_state(), saved)

    def restore(self, saved: torch.Tensor) -> None:
        """See `RandomStream`."""
        self._generator.set_state(saved)

    def seed(self, number: int) -> None:
        """See `RandomStream`."""
        self._generator.manual_seed(number)


class PythonStream:
    """A random.Random."""

    name = "random"

    def __init__(self, generator: random.Random) -> None:
        self.save, self.restore = generator.getstate, generator.setstate
        self.seed = generator.seed

    def moved(self, saved: object) -> bool:
        """See `RandomStream`."""
        return bool(self.save() != saved)


class NumpyStream:
    """A numpy.random.RandomState, such as the one of numpy.random.rand.

    numpy takes 70 µs to copy a state, so the words are compared in place. The state is read only after other code has drawn, or
    where a normal number is kept for the next draw, which moves no word.
    """

    name = "numpy"

    def __init__(self, generator: np.random.RandomState) -> None:
        self._generator = generator
        state = self._state()
        self._bits: Any = generator._bit_generator  # it must not be moved
        self._address: int = self._bits.ctypes.state_address if type(self._bits).__name__ == "MT19937" else 0
        if self._address and self._read() != state["state"]["key"].tobytes() + bytes(
            ctypes.c_int(state["state"]["pos"])
        ):  # another layout
            self._address = 0
        self._known = self._read(), state

    def _state(self) -> Any:
        return self._generator.get_state(legacy=False)

    def _read(self) -> bytes:
        return ctypes.string_at(self._address, _BYTES) if self._address else b""

    def _keeps_a_number(self, state: Any) -> bool:
        return not self._address or bool(state["has_gauss"])

    def save(self) -> tuple[bytes, Any]:
        """See `RandomStream`."""
        words, state = self._known
        if self._read() != words or self._keeps_a_number(state):
            self._known = self._read(), self._state()
        return self._known

    def moved(self, saved: tuple[bytes, Any]) -> bool:
        """See `RandomStream`."""
        words, state = saved
        if self._read() != words:
            return True
        return self._keeps_a_number(state) and pickle.dumps(self._state()) != pickle.dumps(state)

    def restore(self, saved: tuple[bytes, Any]) -> None:
        """See `RandomStream`."""
        words, state = saved
        if self._keeps_a_number(state):
            self._generator.set_state(state)
        else:
            self._generator.seed(0)  # drops the kept number
            ctypes.memmove(self._address, words, _BYTES)

    def seed(self, number: int) -> None:
        """See `RandomStream`."""
        if self._address:
            self._generator.seed(number & _WORD)
        else:
            self._generator.set_state({**type(self._bits)(number).state, "has_gauss": 0, "gauss": 0.0})


class NumpyGeneratorStream:
    """A numpy.random.Generator."""

    name = "a generator of numpy"

    def __init__(self, generator: np.random.Generator) -> None:
        self._bits: Any = generator.bit_generator

    def save(self) -> Any:
        """See `RandomStream`."""
        return self._bits.state

    def moved(self, saved: object) -> bool:
        """See `RandomStream`."""
        return pickle.dumps(self._bits.state) != pickle.dumps(saved)

    def restore(self, saved: object) -> None:
        """See `RandomStream`."""
        self._bits.state = saved

    def seed(self, number: int) -> None:
        """See `RandomStream`."""
        self._bits.state = type(self._bits)(number).state


@functools.cache
def of_process() -> Sequence[RandomStream]:
    """Return the three streams of this process: torch's on the CPU, numpy's and Python's."""
    python: Any = random
    legacy: Any = np.random.mtrand
    return [TorchStream(torch.random.default_generator), NumpyStream(legacy._rand), PythonStream(python._inst)]


def kept_by(*roots: object) -> list[RandomStream]:
    """Return the generators that objects keep: as attributes, in containers, closures, partials, and globals of their code."""
    kinds: list[tuple[type, type]] = [
        (torch._C.Generator, TorchStream), (np.random.RandomState, NumpyStream), (np.random.Generator, NumpyGeneratorStream),
        (random.Random, PythonStream),
    ]  # fmt: skip
    python: Any = random
    legacy: Any = np.random.mtrand
    seen = {id(torch.random.default_generator), id(python._inst), id(legacy._rand)}
    found: list[RandomStream] = []
    waiting = list(roots)
    for _ in range(MOST):
        if not waiting:
            break
        value = waiting.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        stream = next((stream for kind, stream in kinds if isinstance(value, kind)), None)
        if stream is not None:
            if not isinstance(value, random.SystemRandom) and getattr(value, "device", torch.device("cpu")).type == "cpu":
                found.append(stream(value))
        else:
            waiting += [part for _, part in parts(value)]
    return found


def parts(value: object) -> list[tuple[object, object]]:
    """Return an object's parts with their names: of large containers the first items, of libraries no code."""
    if isinstance(value, str | bytes | int | float | types.ModuleType | torch.Tensor) or type(value).__module__ == "numpy":
        return []
    if isinstance(value, dict):
        return list(itertools.islice(value.items(), ITEMS))
    if isinstance(value, list | tuple):
        return list(enumerate(value[:ITEMS]))
    if isinstance(value, partial):
        return [("func", value.func), *enumerate(value.args), *value.keywords.items()]
    if isinstance(value, types.MethodType):
        return [("self", value.__self__), ("func", value.__func__)]
    if isinstance(value, types.FunctionType):
        cells = [("closure", _contents(cell)) for cell in value.__closure__ or ()]
        names = () if is_library(value.__module__) else value.__code__.co_names
        return cells + [(name, value.__globals__[name]) for name in names if name in value.__globals__]
    if isinstance(value, type):
        functions = [(name, part) for name, part in vars(value).items() if isinstance(part, types.FunctionType)]
        return [] if is_library(value.__module__) else list(functions)
    slots = [(name, getattr(value, name, None)) for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())]
    return [*getattr(value, "__dict__", {}).items(), *slots, *enumerate(type(value).__mro__)]


def _contents(cell: types.CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # it is empty
        return None


def is_library(module: str | None) -> bool:
    """Return whether a module is a library's: its code is not searched."""
    return (module or "").partition(".")[0] in LIBRARIES


def salt(number: int) -> int:
    """Return a number to add to the seed of stream `number`, because two generators of one kind would draw alike."""
    return rng.mix(6, number) if number else 0


def seed_all(number: int) -> None:
    """Seed all streams of this process, including its accelerator's if it is in use."""
    for position, stream in enumerate(of_process()):
        stream.seed(number ^ salt(position))
    for device in devices_in_use().values():
        device.manual_seed(number)


def state() -> dict[str, torch.Tensor]:
    """Return the state of all streams of this process, as tensors: a checkpoint holds nothing else."""
    _, words, gauss = random.getstate()
    legacy: Any = np.random.get_state(legacy=True)
    _, key, *rest, number = legacy
    bits = int(np.float64(gauss or 0.0).view(np.int64))
    return {
        "cpu": torch.get_rng_state(),
        "numpy": torch.from_numpy(np.concatenate([key.astype(np.int64), rest, [np.float64(number).view(np.int64)]])),
        "python": torch.tensor([*words, gauss is not None, bits]),
        **{kind: device.get_rng_state() for kind, device in devices_in_use().items()},
    }


def restore(saved: Mapping[str, torch.Tensor]) -> None:
    """Restore a `state()`."""
    torch.set_rng_state(saved["cpu"])
    *key, position, has, number = saved["numpy"].tolist()
    np.random.set_state(("MT19937", np.array(key, np.uint32), position, has, np.int64(number).view(np.float64)))
    *words, has, number = saved["python"].tolist()
    random.setstate((3, tuple(words), float(np.int64(number).view(np.float64)) if has else None))
    for kind, device in devices_in_use().items():
        if kind in saved:
            device.set_rng_state(saved[kind])


@contextmanager
def apart() -> Iterator[None]:
    """Within the context draws move no stream of this process: all are restored afterwards."""
    before = [(stream, stream.save()) for stream in of_process()]  # makes no tensors: another device may be active
    of_devices = {kind: device.get_rng_state() for kind, device in devices_in_use().items()}
    try:
        yield
    finally:
        for stream, saved in before:
            stream.restore(saved)
        for kind, device in devices_in_use().items():
            if kind in of_devices:
                device.set_rng_state(of_devices[kind])


def devices_in_use() -> dict[str, types.ModuleType]:
    """Return torch's module of the accelerator by its type, such as "cuda", if this process has started it."""
    from torch import get_device_module

    device = torch.accelerator.current_accelerator()  # the type that torch was built for, present or not
    if device is None:
        return {}
    module = get_device_module(device)
    in_use = module.is_available() if device.type == "mps" else getattr(module, "is_initialized", bool)()
    return {device.type: module} if in_use else {}
