"""logger=[tensorboard]: curves in TensorBoard."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from drivetrain.core.option import RunSpec, needs_extra
from drivetrain.logger.base import Logger


class TensorBoard(Logger):
    """Write event files for `tensorboard --logdir outputs`."""

    def validate(self, run: RunSpec) -> Iterator[str]:
        yield from needs_extra("tensorboard", "tensorboard", "logger=tensorboard")

    def start(self, run_dir: Path, update: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(run_dir / "tensorboard"), purge_step=update + 1 if update else None)

    def log(self, record: dict[str, Any]) -> None:
        for key, value in record.items():
            if key not in ("event", "update") and isinstance(value, int | float):
                self._writer.add_scalar(f"{record['event']}/{key}", value, record["update"])

    def close(self) -> None:
        self._writer.close()
