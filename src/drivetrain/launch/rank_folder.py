"""The folder of the ranks' files, <run>/ranks: their heartbeats, stacks, results, and what they print."""

from __future__ import annotations

import contextlib
import re
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from drivetrain.core import files

PRINTED = re.compile(r"\d+\.log", re.ASCII)  # what a rank printed in this run and those before, which is kept


@contextlib.contextmanager
def rank_folder(run_dir: Path, several_machines: bool) -> Iterator[Path]:
    """Yield <run>/ranks, emptied. With several machines they are copied there at the end, if the run's directory is here."""
    folder = run_dir / "ranks"
    if not several_machines:
        _empty(folder)
        try:
            yield folder
        finally:
            _gather_output(folder)
        return
    temporary = Path(tempfile.mkdtemp(prefix="drivetrain-ranks-"))
    try:
        yield temporary
    finally:
        _gather_output(temporary)
        if run_dir.is_dir():
            _empty(folder)
            shutil.copytree(temporary, folder, dirs_exist_ok=True)
        shutil.rmtree(temporary, ignore_errors=True)


def _empty(folder: Path) -> None:
    """Make the folder, with nothing in it but ordinary files of what ranks printed.

    The run's directory may have come from anybody: files are not written through a link, nor are strange ones gathered.
    """
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        folder.unlink()
    folder.mkdir(exist_ok=True)
    for old in folder.iterdir():
        mode = old.lstat().st_mode
        if stat.S_ISDIR(mode):
            shutil.rmtree(old, ignore_errors=True)
        elif not (stat.S_ISREG(mode) and PRINTED.fullmatch(old.name)):
            old.unlink()


def _gather_output(folder: Path) -> None:
    """Append what each rank printed, in all its attempts, to <rank>.log, and remove the folders of torch's launcher."""
    for launched in folder.glob("drivetrain_*"):
        for printed in sorted(launched.glob("attempt_*/*/std*.log")):
            if printed.stat().st_size:
                with files.opened(printed, "rb") as part, files.opened(folder / f"{printed.parent.name}.log", "ab") as whole:
                    shutil.copyfileobj(part, whole)
        shutil.rmtree(launched, ignore_errors=True)
