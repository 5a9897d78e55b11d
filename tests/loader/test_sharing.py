"""A Dataset's files, connections and buffers: every loader reads what one process reads, or says what cannot be shared."""

import functools
import multiprocessing
import os
import socket
import sqlite3
import subprocess
import tarfile
import threading
import types
import zipfile
from io import BytesIO

import numpy as np
import pytest
import torch

from drivetrain.batch.base import Accumulate
from drivetrain.core.errors import DataError, UserError
from drivetrain.core.machine import open_files
from drivetrain.core.order import shuffled
from drivetrain.core.world import World
from drivetrain.data.collation import OwnCollate, Stack
from drivetrain.data.own import OwnSource
from drivetrain.loader import Loader, Pipeline
from drivetrain.loader.threads import Threads
from drivetrain.loader.workers import Workers
from tests.loader.test_loader import LOADERS
from tests.parallel.conftest import ranks  # noqa: F401 (fixture)

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")  # more workers than cores: on purpose
CPU = torch.device("cpu")
COUNT, WIDTH = 24, 512  # rows of 2 KiB: no buffer of a file holds all


def values() -> np.ndarray:
    return np.repeat(np.arange(COUNT, dtype=np.float32), WIDTH).reshape(COUNT, WIDTH)


class Rows:
    """Rows of a file by their numbers, each with its number as the target."""

    def __init__(self, path) -> None:
        self.path = path
        self.opens(path)

    def opens(self, path):
        """What a kind keeps open."""

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index):
        return torch.from_numpy(np.frombuffer(self.read(index), np.float32).copy()), torch.tensor(float(index))


class Opened(Rows):
    mode, buffering = "rb", -1

    def opens(self, path):
        self.f = open(path, self.mode, buffering=self.buffering)  # noqa: SIM115

    def read(self, index):
        self.f.seek(4 * WIDTH * index)
        return self.f.read(4 * WIDTH)


class Lazy(Opened):
    def opens(self, path):
        self.f = None

    def read(self, index):
        if self.f is None:
            self.f = open(self.path, "rb")  # noqa: SIM115
        return super().read(index)


class Behind(Rows):
    """A handle that a function keeps."""

    def read(self, index):
        file = kept_open(self.path)
        file.seek(4 * WIDTH * index)
        return file.read(4 * WIDTH)


@functools.lru_cache
def kept_open(path):
    return open(path, "rb")


class Writable(Opened):
    mode, buffering = "r+b", 0


class Tar(Rows):
    def opens(self, path):
        with tarfile.open(f"{path}.tar", "w") as tar:
            for number, row in enumerate(values()):
                info = tarfile.TarInfo(str(number))
                info.size = row.nbytes
                tar.addfile(info, BytesIO(row.tobytes()))
        self.tar = tarfile.open(f"{path}.tar")  # noqa: SIM115

    def read(self, index):
        return self.tar.extractfile(str(index)).read()


class Zip(Rows):
    """Python's own zip files hold a lock."""

    def opens(self, path):
        with zipfile.ZipFile(f"{path}.zip", "w") as file:
            for number, row in enumerate(values()):
                file.writestr(str(number), row.tobytes())
        self.zip = zipfile.ZipFile(f"{path}.zip")

    def read(self, index):
        return self.zip.read(str(index))


class Anew(Rows):
    def read(self, index):
        with open(self.path, "rb") as file:
            file.seek(4 * WIDTH * index)
            return file.read(4 * WIDTH)


class Pread(Opened):
    def read(self, index):
        return os.pread(self.f.fileno(), 4 * WIDTH, 4 * WIDTH * index)


class Locked(Opened):
    def opens(self, path):
        super().opens(path)
        self.guard = {"of the file": threading.Lock()}

    def read(self, index):
        with self.guard["of the file"]:
            return super().read(index)


class EachThread(Rows):
    def opens(self, path):
        self.local = threading.local()

    def read(self, index):
        if not hasattr(self.local, "f"):
            self.local.f = open(self.path, "rb")  # noqa: SIM115
        self.local.f.seek(4 * WIDTH * index)
        return self.local.f.read(4 * WIDTH)


class Mapped(Rows):
    def opens(self, path):
        self.rows = np.memmap(path, np.float32, "r").reshape(COUNT, WIDTH)

    def read(self, index):
        return self.rows[index].tobytes()


class Scratch(Rows):
    """One array that every sample is written to, and copied from."""

    def opens(self, path):
        self.rows, self.scratch = np.fromfile(path, np.float32).reshape(COUNT, WIDTH), np.zeros(WIDTH, np.float32)

    def read(self, index):
        np.copyto(self.scratch, self.rows[index])
        return self.scratch.tobytes()


class Database(Rows):
    def opens(self, path):
        self.db = sqlite3.connect(f"{path}.db", check_same_thread=type(self) is Database)
        self.db.execute("create table if not exists rows (n integer primary key, x blob)")
        self.db.executemany("insert or ignore into rows values (?, ?)", [(n, row.tobytes()) for n, row in enumerate(values())])
        self.db.commit()

    def read(self, index):
        return self.db.execute("select x from rows where n = ?", [index]).fetchone()[0]


class Cursor(Database):
    """One cursor for all threads."""

    def opens(self, path):
        super().opens(path)
        self.asks = self.db.cursor()

    def read(self, index):
        self.asks.execute("select x from rows where n = ?", [index])
        return self.asks.fetchone()[0]


class Server(Rows):
    """A database at the other end of a connection."""

    def opens(self, path):
        self.db, self.theirs = socket.socketpair()

    def read(self, index):
        self.db.sendall(bytes([index]))
        return values()[self.theirs.recv(1)[0]].tobytes()


class Guarded(Rows):
    """The same, with a lock."""

    def opens(self, path):
        self.pool = types.SimpleNamespace(lock=threading.Lock())
        self.pool.db, self.pool.theirs = socket.socketpair()

    def read(self, index):
        with self.pool.lock:
            self.pool.db.sendall(bytes([index]))
            return values()[self.pool.theirs.recv(1)[0]].tobytes()


class Program(Rows):
    """Another program that answers; a lock of other things is beside it."""

    def opens(self, path):
        self.parts = {"program": subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)}
        self.counts = types.SimpleNamespace(lock=threading.Lock())

    def read(self, index):
        self.parts["program"].stdin.write(bytes([index]))
        return values()[self.parts["program"].stdout.read(1)[0]].tobytes()

    def __del__(self) -> None:
        self.parts["program"].kill()
        self.parts["program"].communicate()


class Piped(Rows):
    """A pipe's two ends, as those of a program."""

    def opens(self, path):
        ours, theirs = os.pipe()
        self.answers, self.asks = open(ours, "rb"), open(theirs, "wb", buffering=0)  # noqa: SIM115

    def read(self, index):
        self.asks.write(bytes([index]))
        return values()[self.answers.read(1)[0]].tobytes()


class Proxied(Rows):
    """A pipe of multiprocessing."""

    def opens(self, path):
        self.pool = types.SimpleNamespace(ends=multiprocessing.Pipe())

    def read(self, index):
        self.pool.ends[0].send(index)
        return values()[self.pool.ends[1].recv()].tobytes()


class Managed(Rows):
    """A value in another process, which multiprocessing's proxy asks by a connection of each thread and process."""

    def opens(self, path):
        self.manager = multiprocessing.Manager()
        self.rows, self.done = self.manager.list([row.tobytes() for row in values()]), multiprocessing.Queue()

    def read(self, index):
        return self.rows[index]


class Hdf5(Rows):
    def opens(self, path):
        h5py = pytest.importorskip("h5py")
        with h5py.File(f"{path}.h5", "w") as file:
            file.create_dataset("x", data=values(), chunks=(3, WIDTH), compression="gzip")
        self.file = h5py.File(f"{path}.h5", "r")

    def read(self, index):
        return self.file["x"][index].tobytes()


class Lmdb(Rows):
    def opens(self, path):
        self.env = pytest.importorskip("lmdb").open(f"{path}.lmdb", map_size=1 << 24)
        with self.env.begin(write=True) as transaction:
            for number, row in enumerate(values()):
                transaction.put(str(number).encode(), row.tobytes())

    def read(self, index):
        with self.env.begin() as transaction:
            return transaction.get(str(index).encode())


class Zarr(Rows):
    def opens(self, path):
        zarr = pytest.importorskip("zarr")
        zarr.save_array(f"{path}.zarr", values())
        self.rows = zarr.open_array(f"{path}.zarr", mode="r")

    def read(self, index):
        return self.rows[index].tobytes()


NOT_BY_THREADS = {
    Opened: "data.f", Lazy: "data.f", Behind: "", Writable: "data.f", Tar: "data.tar.fileobj", Scratch: "",
    Database: "data.db (Connection) is a connection", Cursor: "data.db (Connection) is a connection",
    Server: "data.db (socket) is a connection", Program: "data.parts.program (Popen) is a connection",
    Piped: "data.answers (BufferedReader) is a connection", Proxied: "data.pool.ends.0 (Connection) is a connection",
}  # fmt: skip
NOT_BY_PROCESSES = {
    Writable: "data.f is an open file", Server: r"data.db \(socket\) is a connection",
    Program: r"data.parts.program \(Popen\) is a connection", Piped: r"data.answers \(BufferedReader\) is a connection",
    Proxied: r"data.pool.ends.0 \(Connection\) is a connection", Guarded: r"data.pool.db \(socket\) is a connection",
}  # fmt: skip
BY_ALL = [Managed, Zip, Anew, Pread, Locked, EachThread, Mapped, Hdf5, Lmdb, Zarr]


@pytest.fixture
def path(tmp_path):
    values().tofile(tmp_path / "rows")
    yield tmp_path / "rows"
    kept_open.cache_clear()


def pipeline(kind, path) -> Pipeline:
    return Pipeline(OwnSource(kind(path), "data.target", Stack()), (), None, 0)


def read(loader: Loader, work: Pipeline, epochs: int = 1) -> torch.Tensor:
    """Return whether each sample that is read has the values of its number."""
    batch = Accumulate(global_batch=8, accumulation_steps=2).over(shuffled(COUNT))
    requests = [each for epoch in range(epochs) for each in batch.requests(0, epoch, World(), drop_last=False)]
    batches = list(loader.stream(work, iter(requests), CPU, torch.contiguous_format))
    assert sum(len(each.y) for each in batches) == epochs * COUNT
    return torch.cat([(each.x == each.y.unsqueeze(1)).all(1) for each in batches])


FEW = ("workers(1)", "threads(3)", "resident")  # those that the normal suite asks


ROWS = [
    pytest.param(kind, name, marks=[] if name in FEW else pytest.mark.slow)
    for kind in (*NOT_BY_THREADS, Guarded, *BY_ALL)
    for name in LOADERS
]


@pytest.mark.parametrize(("kind", "name"), ROWS)
def test_every_loader_reads_right_or_refuses(kind, name, path, monkeypatch):
    monkeypatch.setattr("drivetrain.loader.auto.ROUNDS", 1)
    loader, work = LOADERS[name](), pipeline(kind, path)
    loader.autotune(work, 4, 6, CPU)
    if not (refused := loader.refusal(work)):
        assert read(loader, work, epochs=2).all()
    by_threads = name == "device, threads" or isinstance(loader, Threads)
    by_processes = name == "device, workers" or isinstance(loader, Workers)
    assert bool(refused) is ((by_threads and kind in NOT_BY_THREADS) or (by_processes and kind in NOT_BY_PROCESSES))


@pytest.mark.parametrize("kind", [Opened, Tar, Hdf5, Lmdb, Zarr])
def test_ranks_read_right_what_was_opened_before_them(kind, path, ranks):  # noqa: F811
    """Each by itself, and with workers of its own."""
    work = pipeline(kind, path)
    work.source.fetch(torch.arange(2))
    assert ranks(lambda _: [bool(read(each, work).all()) for each in (Loader(), Workers(num_workers=1))]) == [[True, True]] * 2


@pytest.mark.parametrize("kind", NOT_BY_THREADS)
def test_what_threads_cannot_read_at_once_is_named(kind, path):
    problem = Threads(num_threads=2).refusal(pipeline(kind, path))
    assert ("two threads at once" in problem) is ("connection" not in problem)
    assert NOT_BY_THREADS[kind] in problem
    assert ": set loader=workers" in problem


@pytest.mark.parametrize("kind", NOT_BY_PROCESSES)
def test_what_processes_cannot_share_is_named(kind, path):
    with pytest.raises(UserError, match=f"{NOT_BY_PROCESSES[kind]}.* or set loader=sync"):
        Workers(num_workers=2).check([pipeline(kind, path)])


def test_without_descriptors_to_open_again_kept_files_are_refused(path, monkeypatch):
    monkeypatch.setattr(open_files, "DESCRIPTORS", "/no such folder")
    assert "data.f is an open file" in Workers(num_workers=2).refusal(pipeline(Lazy, path))
    assert Workers(num_workers=2).refusal(pipeline(Anew, path)) is None


class Refilled(Rows):
    """Returns the array that it fills."""

    def opens(self, path):
        self.rows, self.buffer = values(), np.zeros(WIDTH, np.float32)

    def __getitem__(self, index):
        self.buffer[:] = self.rows[index]
        return self.shown(index)

    def shown(self, index):
        return torch.from_numpy(self.buffer), index


class RefilledDict(Refilled):
    def shown(self, index):
        return {"x": {"deep": self.buffer[:]}, "y": index}


class Two(Refilled):
    """Two buffers in turn: each other sample is overwritten."""

    def opens(self, path):
        super().opens(path)
        self.buffers, self.turn = [np.zeros(WIDTH, np.float32) for _ in range(2)], 0

    def shown(self, index):
        self.turn = 1 - self.turn
        self.buffers[self.turn][:] = self.rows[index]
        return self.buffers[self.turn], index


class Late(Refilled):
    """Of some kinds of samples only, which the first batch lacks."""

    def shown(self, index):
        return (torch.from_numpy(self.buffer) if index > 15 else torch.from_numpy(self.buffer.copy())), index


@pytest.mark.parametrize("kind", [Refilled, RefilledDict, Late])
def test_a_buffer_that_is_filled_again_is_refused(kind, path):
    with pytest.raises(UserError, match=f"{kind.__name__} returns samples .* in the same memory.*: return a copy of each"):
        read(Loader(), pipeline(kind, path))


class Constants(Refilled):
    """Memory that many samples have and none writes: a constant, an empty one, a row of a table of classes."""

    def opens(self, path):
        super().opens(path)
        self.ones, self.classes, self.reads = torch.ones(3), torch.eye(4), 0

    def __getitem__(self, index):
        self.reads += 1
        x = {
            "row": torch.from_numpy(self.rows[index]),
            "ones": self.ones,
            "none": torch.zeros(0),
            "kind": self.classes[index % 4],
        }
        return x, torch.tensor(index)


def test_memory_that_nobody_overwrites_may_be_shared(path):
    work = pipeline(Constants, path)
    for _ in range(2):
        before = work.source.dataset.reads
        x, y = work.source.fetch(torch.arange(COUNT))
        assert torch.equal(x["row"][:, 0], y.float())
    assert work.source.dataset.reads - before == COUNT, "what is known is not asked again"


class Broken(Rows):
    def __getitem__(self, index):
        if index == 17:
            raise KeyError("no such column")
        return torch.zeros(3), index


@pytest.mark.parametrize("loader", ["workers(1)", "threads(1)"])
def test_an_error_names_its_sample(loader, path):
    from drivetrain.core.user.code import first_lines

    with pytest.raises(KeyError) as raised:
        list(
            LOADERS[loader]().stream(
                pipeline(Broken, path),
                list(Accumulate(global_batch=8, accumulation_steps=2).over(shuffled(COUNT)).requests(0, 0, World(), False)),
                CPU,
                torch.contiguous_format,
            )
        )
    assert first_lines(raised.value).endswith("'no such column' (while reading sample 17)")


def some(samples):
    """Leave out what cannot be used."""
    kept = [(x, y) for x, y in samples if y % 3]
    return torch.stack([x for x, _ in kept]) if kept else torch.zeros(0, WIDTH), torch.tensor([y for _, y in kept])


def test_rows_that_a_collate_leaves_out_are_counted(path, caplog):
    work = Pipeline(OwnSource(Anew(path), "data.target", OwnCollate(some, "data.collate=some", None)), (), None, 0)
    batch = Accumulate(global_batch=8, accumulation_steps=2).over(shuffled(COUNT))
    for _ in range(2):  # said once
        list(Loader().stream(work, batch.requests(0, 0, World(), False), CPU, torch.contiguous_format))
    (said,) = caplog.messages
    assert said == "data.collate made 16 rows of 24 samples: an update is the mean over the actual rows"
    nothing = Accumulate(global_batch=1, accumulation_steps=1).over(shuffled(COUNT))
    with pytest.raises(DataError, match="made no row of the samples"):
        list(Loader().stream(work, nothing.requests(0, 0, World(), False), CPU, torch.contiguous_format))
