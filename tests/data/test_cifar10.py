"""CIFAR-10's archives in both of their true forms, written by the tests; and what pretends to be one."""

import functools
import hashlib
import http.server
import io
import os
import pickle
import struct
import tarfile
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from drivetrain.core.errors import DataError, UserError
from drivetrain.data import cifar10
from drivetrain.data.cifar10 import Cifar10

CPU = torch.device("cpu")
EACH = 8  # images in a file; the real ones have 10,000
TRAIN = [f"data_batch_{i}" for i in range(1, 6)]


def content(name: str) -> tuple[np.ndarray, np.ndarray]:
    """The images (n, 3072) and labels of a file."""
    noise = np.random.default_rng(len(name) + ord(name[-1]))
    return noise.integers(0, 256, (EACH, 3072), dtype=np.uint8), noise.integers(0, 10, EACH)


def python2_pickle(x: np.ndarray, y: np.ndarray) -> bytes:
    """The bytes that Python 2's pickle gave the real files: protocol 2, strings as SHORT_BINSTRING, numpy's old module."""

    def string(text: bytes) -> bytes:
        return b"U" + bytes([len(text)]) + text if len(text) < 256 else b"T" + struct.pack("<i", len(text)) + text

    def number(n: int) -> bytes:
        return b"K" + bytes([n]) if n < 256 else b"J" + struct.pack("<i", n)

    array = b"cnumpy.core.multiarray\n_reconstruct\n" + b"cnumpy\nndarray\n" + number(0) + b"\x85" + string(b"b") + b"\x87R"
    kind = b"cnumpy\ndtype\n" + string(b"u1") + number(0) + number(1) + b"\x87R"
    kind += b"(" + number(3) + string(b"|") + b"NNN" + b"J\xff\xff\xff\xff" * 2 + number(0) + b"tb"
    array += b"(" + number(1) + number(x.shape[0]) + number(x.shape[1]) + b"\x86" + kind + b"\x89" + string(x.tobytes()) + b"tb"
    labels = b"](" + b"".join(number(int(label)) for label in y) + b"e"
    return b"\x80\x02}(" + string(b"data") + array + string(b"labels") + labels + b"u."


def file(form: str, name: str) -> bytes:
    x, y = content(name)
    if form == "bin":
        return np.column_stack([y.astype(np.uint8), x]).tobytes()
    if form == "py":
        return python2_pickle(x, y)
    return pickle.dumps({b"data": x, b"labels": y.tolist(), b"filenames": [b"a.png"] * EACH}, protocol=2)  # as Python 3 writes it


def write(root: Path, form: str, packed: bool, change=None) -> Path:
    """An archive or its folder in `root`; `change(files)` may spoil them."""
    ending, folder = (".bin", "cifar-10-batches-bin") if form == "bin" else ("", "cifar-10-batches-py")
    files = {f"{name}{ending}": file(form, name) for name in [*TRAIN, "test_batch"]}
    if change is not None:
        change(files)
    if not packed:
        (root / folder).mkdir(parents=True)
        for name, data in files.items():
            (root / folder / name).write_bytes(data)
        return root
    root.mkdir(exist_ok=True)
    archive = root / ("cifar-10-binary.tar.gz" if form == "bin" else "cifar-10-python.tar.gz")
    with tarfile.open(archive, "w:gz") as tar:
        for name, data in files.items():
            member = tarfile.TarInfo(f"{folder}/{name}")
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return root


@pytest.mark.parametrize("packed", [False, True], ids=["folder", "tar.gz"])
@pytest.mark.parametrize("form", ["bin", "py", "py3"])
def test_both_forms_give_the_same_images(tmp_path, form, packed):
    root = write(tmp_path / "set", form, packed)
    inner = next(root.iterdir())
    for place in (root, inner):  # the folder that holds it, or itself
        splits = Cifar10(root=str(place)).load(CPU)
        x = np.concatenate([content(name)[0] for name in TRAIN]).reshape(-1, 3, 32, 32)
        assert np.array_equal(splits.train.x.numpy(), x)
        assert np.array_equal(splits.test.y.numpy(), content("test_batch")[1])
        assert np.array_equal(splits.train.y.numpy(), np.concatenate([content(name)[1] for name in TRAIN]))
    assert (splits.shape, splits.classes, splits.train.x.dtype) == ((3, 32, 32), 10, torch.uint8)
    assert splits.names[3] == "cat"
    x = splits.normalize(splits.train.x)
    assert x.mean((0, 2, 3)).abs().max() < 1e-4
    raw = Cifar10(root=str(root), normalize=False).load(CPU)
    assert torch.equal(raw.normalize(raw.train.x), raw.train.x.float())


def test_files_that_are_not_the_published_ones_are_told(tmp_path, monkeypatch, caplog):
    root = write(tmp_path / "set", "bin", True)
    digests = {f"{name}.bin": hashlib.sha256(file("bin", name)).hexdigest() for name in [*TRAIN, "test_batch"]}
    monkeypatch.setattr(cifar10, "FILES", digests)
    Cifar10(root=str(root)).load(CPU)
    assert caplog.messages == []
    monkeypatch.setitem(cifar10.FILES, "data_batch_2.bin", "0" * 64)
    Cifar10(root=str(root)).load(CPU)
    (told,) = caplog.messages
    assert "not as CIFAR-10 was published (another SHA-256): data_batch_2.bin." in told


def test_nothing_is_fetched_that_was_not_asked_for(tmp_path, monkeypatch):
    """The files may be gone between the check of the config and their reading."""
    monkeypatch.setattr(cifar10, "download", lambda *_: pytest.fail("fetched"))
    with pytest.raises(UserError, match="holds no CIFAR-10"):
        Cifar10(root=str(tmp_path)).load(CPU)


class Evil:
    def __reduce__(self):
        return os.system, ("touch pwned",)


class EvilCodec:
    def __reduce__(self):
        import _codecs

        return _codecs.encode, ("a", "zlib")


def pickled(value) -> bytes:
    return pickle.dumps(value, protocol=2)


X, Y = content("data_batch_1")


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (pickled({b"data": Evil()}), "asks for posix.system, which no image needs: refused"),
        (pickled(Evil()), "asks for posix.system"),
        (b"cbuiltins\neval\n(V1\ntR.", "asks for builtins.eval"),
        (b"cnumpy\nload\n(Vx\ntR.", "asks for numpy.load"),
        (pickled({b"data": EvilCodec()}), "holds no 'data'"),
        (pickled({b"data": X.astype(object), b"labels": Y.tolist()}), "(uint8)"),
        (pickled({b"data": X.astype(np.float64), b"labels": Y.tolist()}), "(uint8)"),
        (pickled({b"data": X[:, :100], b"labels": Y.tolist()}), "holds no 'data' of 3072 bytes"),
        (pickled({b"data": X, b"labels": Y.tolist()[1:]}), "with as many 'labels'"),
        (pickled({b"data": X, b"labels": [b"cat"] * EACH}), "with as many 'labels'"),
        (pickled({b"data": X, b"labels": [10] * EACH}), "labels from 10 to 10"),
        (pickled([1, 2]), "holds no 'data'"),
        (pickled({b"data": X, b"labels": Y.tolist()})[:-5], "cannot be read as a batch"),
        (b"\x80\x02r\xff\xff\xff\xff.", "holds no 'data'"),  # a memo of four thousand million places
        (b"", "cannot be read as a batch"),
    ],
)
@pytest.mark.parametrize("packed", [False, True], ids=["folder", "tar.gz"])
def test_a_pickle_that_asks_for_more_is_refused_by_name(tmp_path, data, says, packed):
    root = write(tmp_path / "set", "py", packed, lambda files: files.update(data_batch_3=data))
    with pytest.raises(DataError, match="data_batch_3") as raised:
        Cifar10(root=str(root)).load(CPU)
    assert says in str(raised.value)
    assert not Path("pwned").exists()


@pytest.mark.parametrize(
    ("data", "says"),
    [(b"\x01" * 3072, "no whole number of records of 3073"), (b"\x0b" * 3073, "labels from 11 to 11"), (b"", "no images")],
)
def test_a_binary_that_is_not_one_is_refused(tmp_path, data, says):
    root = write(tmp_path / "set", "bin", False, lambda files: files.update({"data_batch_2.bin": data}))
    with pytest.raises(DataError, match=rf"data_batch_2\.bin .*{says}"):
        Cifar10(root=str(root)).load(CPU)


def test_what_is_missing_is_named(tmp_path):
    root = write(tmp_path / "set", "bin", True, lambda files: files.pop("test_batch.bin"))
    with pytest.raises(DataError, match=r"lacks test_batch\.bin"):
        Cifar10(root=str(root)).load(CPU)


HOSTILE = {
    "symlink": "'x' is a link", "hardlink": "'x' is a link", "dots": "points out of the archive",
    "absolute": "points out of the archive", "device": "neither a file nor a folder", "truncated": "cannot be read as a tar",
    "bomb": "unpacks to more than 10,000 bytes",
}  # fmt: skip


@pytest.mark.parametrize("how", HOSTILE)
def test_a_hostile_archive_is_refused(tmp_path, how, monkeypatch):
    root = write(tmp_path / "set", "bin", True)
    archive = root / "cifar-10-binary.tar.gz"
    member = tarfile.TarInfo({"dots": "cifar/../../x", "absolute": "/tmp/x"}.get(how, "x"))
    member.type = {"symlink": tarfile.SYMTYPE, "hardlink": tarfile.LNKTYPE, "device": tarfile.CHRTYPE}.get(how, tarfile.REGTYPE)
    member.linkname = "/etc/passwd"
    if how == "truncated":
        archive.write_bytes(archive.read_bytes()[:5000])
    elif how == "bomb":
        monkeypatch.setattr(cifar10, "MAX_BYTES", 10_000)
    else:
        with tarfile.open(archive, "w:gz") as tar:
            tar.addfile(member)
    with pytest.raises(DataError, match=rf"cifar-10-binary\.tar\.gz.*{HOSTILE[how]}"):
        Cifar10(root=str(root)).load(CPU)


@pytest.fixture
def server(tmp_path):
    """The address of a web server over tmp_path/web."""
    (tmp_path / "web").mkdir()
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(tmp_path / "web"))
    handler.log_message = lambda *a: None
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as httpd:
        threading.Thread(target=httpd.serve_forever, args=(0.02,), daemon=True).start()
        yield f"http://127.0.0.1:{httpd.server_port}"
        httpd.shutdown()


def test_download_fetches_once_and_checks_what_came(tmp_path, server, monkeypatch):
    write(tmp_path / "web", "bin", True)
    archive = tmp_path / "web/cifar-10-binary.tar.gz"
    monkeypatch.setattr(cifar10, "URL", f"{server}/{archive.name}")
    data = Cifar10(root=str(tmp_path / "new/set"), download=True)
    with pytest.raises(UserError, match=rf"another SHA-256 .*{cifar10.SHA256}.*: it was not kept"):
        data.load(CPU)
    assert not list((tmp_path / "new/set").glob("*.gz"))
    monkeypatch.setattr(cifar10, "SHA256", hashlib.sha256(archive.read_bytes()).hexdigest())
    assert len(data.load(CPU).train) == 5 * EACH
    assert [p.name for p in (tmp_path / "new/set").glob("[!.]*")] == [archive.name]
    archive.unlink()
    assert len(data.load(CPU).train) == 5 * EACH  # not fetched again
    with pytest.raises(UserError, match=r"could not be fetched .*404.*by hand"):
        Cifar10(root=str(tmp_path / "other"), download=True).load(CPU)


def test_what_is_not_there_is_said_before_anything_is_loaded(problems, tmp_path):
    assert any("needs data.root" in p for p in problems("data=cifar10"))
    assert any("holds no CIFAR-10" in p and "data.download=true" in p for p in problems("data=cifar10", f"data.root={tmp_path}"))
