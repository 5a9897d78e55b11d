"""Only ordinary files are opened, and what stands in their place is never written through."""

from __future__ import annotations

import errno
import os

import pytest

from drivetrain.core import files


def test_a_link_is_not_followed_and_a_write_replaces_it(tmp_path):
    (tmp_path / "own").write_text("kept")
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "own")
    for attempt in (lambda: files.read_text(link), lambda: files.opened(link, "a"), lambda: files.opened(link, "w")):
        with pytest.raises(OSError, match="it is a link"):
            attempt()
    files.write_text(link, "new")
    assert ((tmp_path / "own").read_text(), link.read_text(), link.is_symlink()) == ("kept", "new", False)


def test_a_fifo_holds_up_nobody(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    for mode in ("rb", "ab"):
        with pytest.raises(OSError, match="it is no ordinary file"):
            files.opened(tmp_path / "fifo", mode)


def test_a_file_is_read_up_to_its_limit_and_no_further(tmp_path):
    (tmp_path / "a").write_bytes(bytes(11))
    assert len(files.read_bytes(tmp_path / "a", 11)) == 11
    with pytest.raises(OSError, match="larger than") as error:
        files.read_bytes(tmp_path / "a", 10)
    assert error.value.errno == errno.EFBIG
