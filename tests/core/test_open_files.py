"""A forked process has positions of its own in what it reads; what a killed process was writing goes with the next write."""

import gzip
import io
import mmap
import os
import tarfile
import zipfile
from pathlib import Path
from typing import IO

import numpy as np
import pytest

from drivetrain.core.machine import files
from drivetrain.core.machine.forking import answer_of
from drivetrain.core.machine.open_files import apart_after_fork, opened_again, positions
from drivetrain.launch.elastic import Gate

ROWS, SIZE = 40, 256  # larger together than the buffer of a file


def row(number: int) -> bytes:
    return bytes([number]) * SIZE


def plain(path):
    path.write_bytes(b"".join(map(row, range(ROWS))))
    return open(path, "rb", buffering=0)


def read_plain(file, number):
    file.seek(SIZE * number)
    return file.read(SIZE)


def deleted(path):
    file = plain(path)
    path.unlink()
    return file


def packed(path):
    with tarfile.open(path, "w") as tar:
        for number in range(ROWS):
            info = tarfile.TarInfo(str(number))
            info.size = SIZE
            tar.addfile(info, io.BytesIO(row(number)))
    return tarfile.open(path)


def zipped(path):
    with zipfile.ZipFile(path, "w") as file:
        for number in range(ROWS):
            file.writestr(str(number), row(number))
    return zipfile.ZipFile(path)


def squeezed(path):
    with gzip.open(path, "wb") as file:
        for number in range(ROWS):
            file.write(row(number))
    return gzip.open(path)


def mapped(path):
    with plain(path) as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


KINDS = {
    "a file": (plain, read_plain),
    "a buffered file": (lambda path: io.BufferedReader(plain(path), 300), read_plain),
    "a text": (lambda path: io.TextIOWrapper(io.BufferedReader(plain(path), 300), "latin-1"), None),
    "a deleted file": (deleted, read_plain),
    "a tar file": (packed, lambda tar, number: tar.extractfile(str(number)).read()),
    "a zip file": (zipped, lambda file, number: file.read(str(number))),
    "a gzip file": (squeezed, read_plain),
    "a mapped file": (mapped, read_plain),
}


def read_text(file, number):
    file.seek(SIZE * number)
    return file.read(SIZE).encode("latin-1")


@pytest.mark.parametrize("kind", KINDS)
def test_a_forked_process_reads_without_moving_its_parent(kind, tmp_path):
    make, read = KINDS[kind]
    read = read or read_text
    with make(tmp_path / "rows") as file:
        assert read(file, 3) == row(3), "opened and read before the fork"
        before = positions()
        there = answer_of(lambda answer: answer([read(file, n) for n in (30, 0, 39)]), "it reads")
        assert there == [row(n) for n in (30, 0, 39)]
        assert positions() == before
        assert read(file, 39) == row(39)


def test_a_forked_process_goes_on_where_its_parent_was(tmp_path):
    with plain(tmp_path / "rows") as file:
        file.seek(SIZE * 7)
        assert answer_of(lambda answer: answer([file.read(SIZE), file.read(SIZE)]), "it reads") == [row(7), row(8)]
        assert file.read(SIZE) == row(7)


def _moves(fork, file) -> bool:
    """Return whether a read of a process that `fork` makes moves this one's position."""
    before = positions()[file.fileno()]

    def child() -> None:
        if not (pid := os.fork()):
            os.lseek(file.fileno(), 5, os.SEEK_CUR)
            os._exit(0)
        os.waitpid(pid, 0)

    fork(child)
    return positions()[file.fileno()] != before


def test_only_our_forks_open_anything_again(tmp_path):
    """Ranks are forked by torch's launcher; a process that the caller forks is the caller's."""

    def ours(child) -> None:
        with apart_after_fork():
            child()

    with plain(tmp_path / "rows") as file:
        assert not _moves(ours, file)
        assert not _moves(lambda child: Gate().around(child)(), file)
        assert _moves(lambda child: child(), file)


def test_what_is_written_stays_shared(tmp_path):
    """As standard output that a file takes: each goes on behind the other."""
    path = tmp_path / "log"
    reading, writing = os.pipe()
    with open(path, "wb", buffering=0) as file, open(path, "r+b", buffering=0) as both:
        assert opened_again(file.fileno()) is opened_again(both.fileno()) is None
        assert not {reading, writing} & positions().keys(), "pipes have none"
        file.write(b"one ")
        answer_of(lambda answer: answer(file.write(b"two ")), "it writes")
        file.write(b"three")
    os.close(reading)
    os.close(writing)
    assert path.read_text() == "one two three"


def test_a_database_in_a_file_is_opened_again(tmp_path):
    import sqlite3

    path = tmp_path / "rows.db"
    with sqlite3.connect(path) as made:
        made.execute("create table rows (n integer, x blob)")
        made.executemany("insert into rows values (?, ?)", [(n, np.full(64, n, np.float32).tobytes()) for n in range(ROWS)])
    made.close()
    base = sqlite3.connect(f"file:{path}?mode=ro", uri=True)
    ask = "select x from rows where n = 7"
    assert answer_of(lambda answer: answer(base.execute(ask).fetchone()), "it asks") == base.execute(ask).fetchone()
    base.close()


def test_what_a_killed_write_left_goes_with_the_next_one(tmp_path: Path) -> None:
    """Of whoever is dead: a lock ends with its process. A file of another name, and one that is being written, stay."""
    (tmp_path / ".a.json.writing-00000000").touch()
    stay = [
        tmp_path / name
        for name in (".a.json.writing-00000001", ".b.json.writing-00000000", ".a.json.writing-a", "xa.json.writing-00000000")
    ]
    for path in stay:
        path.touch()
    with stay[0].open("ab") as file:
        assert files.locks(file)
        files.write_text(tmp_path / "a.json", "new")
    assert sorted(tmp_path.iterdir()) == sorted([*stay, tmp_path / "a.json"])


def test_a_write_that_is_taken_for_a_left_one_begins_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By another process, which locks the new file first."""
    taken: list[Path] = []

    def locks(file: IO[bytes], wait: bool = False) -> bool:
        if not taken:
            taken.extend(tmp_path.iterdir())
            taken[0].unlink()
        return True

    monkeypatch.setattr(files, "locks", locks)
    files.write_text(tmp_path / "a.json", "new")
    assert len(taken) == 1
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("a.json", "new")]
