"""A run's folder `ranks` may have come from anybody: nothing is read or written through what stands in it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from drivetrain.launch.elastic import rank_folder
from drivetrain.launch.heartbeat import _failure_in, start_heartbeat


def test_what_stood_there_is_gone_but_for_what_ranks_printed(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("kept")
    folder = tmp_path / "run" / "ranks"
    (folder / "drivetrain_x" / "attempt_0" / "1").mkdir(parents=True)
    (folder / "drivetrain_x" / "attempt_0" / "1" / "stdout.log").symlink_to(secret)
    (folder / "0.json").mkdir()
    (folder / "1.log").write_text("printed before\n")
    (folder / "2.log").symlink_to(secret)
    (folder / "3.heartbeat").symlink_to(secret)
    os.mkfifo(folder / "4.stack")
    with rank_folder(tmp_path / "run", several_machines=False) as found:
        assert found == folder
        assert [p.name for p in folder.iterdir()] == ["1.log"]
        printed = folder / "drivetrain_y" / "attempt_0" / "1"
        printed.mkdir(parents=True)
        (printed / "stdout.log").write_text("and now\n")
    assert (folder / "1.log").read_text() == "printed before\nand now\n"
    assert secret.read_text() == "kept"


def test_a_link_in_place_of_the_folder_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "precious").touch()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "ranks").symlink_to(tmp_path / "elsewhere")
    with rank_folder(tmp_path / "run", several_machines=False) as folder:
        assert folder.is_dir()
        assert not folder.is_symlink()
    assert (tmp_path / "elsewhere" / "precious").exists()


def test_a_result_that_is_a_link_or_a_fifo_is_none(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"code": 1}')
    (tmp_path / "b.json").symlink_to(tmp_path / "a.json")
    os.mkfifo(tmp_path / "c.json")
    assert _failure_in(tmp_path / "a.json") == {"code": 1}
    assert _failure_in(tmp_path / "b.json") is None
    assert _failure_in(tmp_path / "c.json") is None


def test_a_heartbeat_is_not_written_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("kept")
    (tmp_path / "7.heartbeat").symlink_to(tmp_path / "victim")
    with pytest.raises(OSError, match="it is a link"):
        start_heartbeat(tmp_path, 7)
    assert (tmp_path / "victim").read_text() == "kept"
