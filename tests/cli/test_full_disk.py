"""A disk that is full, or may not be written, where no run trains: one line that says so, whichever library wrote."""

import errno
import os

import pytest
from safetensors import SafetensorError

from drivetrain.cli import main

FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/mnt/predictions.csv")
READ_ONLY = OSError(errno.EROFS, "Read-only file system", "/mnt/m.onnx")
OF_RUST = SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (FULL, "error: /mnt/predictions.csv cannot be written: No space left on device. Make room, or give another place"),
        (OF_RUST, "error: what this command writes cannot be written: No space left on device. Make room, or give another place"),
        (
            READ_ONLY,
            "error: /mnt/m.onnx cannot be written: Read-only file system",
        ),
    ],
    ids=["full", "full, told by safetensors", "read-only"],
)
def test_a_disk_that_cannot_be_written_is_told(monkeypatch, capsys, error, says):
    def dispatch(argv: list[str]) -> int:
        raise error

    monkeypatch.setattr(main, "_dispatch", dispatch)
    assert main.main(["export"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(says)


def test_another_error_is_not_the_disks(monkeypatch, capsys):
    def dispatch(argv: list[str]) -> int:
        raise FileNotFoundError(errno.ENOENT, "No such file or directory", "x")

    monkeypatch.setattr(main, "_dispatch", dispatch)
    assert main.main(["export"]) == 1
    assert "cannot be written" not in capsys.readouterr().err
