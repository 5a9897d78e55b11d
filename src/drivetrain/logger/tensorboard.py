"""logger=[tensorboard]: curves in TensorBoard."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from drivetrain.core.files import folder_in
from drivetrain.core.option import RunSpec, needs_extra
from drivetrain.core.typed import JsonObject
from drivetrain.logger.base import Logger, numbers


class TensorBoard(Logger):
    """Write event files for `tensorboard --logdir outputs`."""

    def validate(self, run: RunSpec) -> Iterator[str]:
        yield from needs_extra("tensorboard", "tensorboard", "logger=tensorboard")

    def start(self, run_dir: Path, update: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder_in(run_dir, "tensorboard")), purge_step=update + 1 if update else None)

    def log(self, record: JsonObject) -> None:
        for name, value in numbers(record).items():
            self._writer.add_scalar(name, value, record["update"], walltime=record["time"])

    def log_image(self, name: str, update: int, path: Path) -> None:
        import numpy as np
        from PIL import Image

        self._writer.add_image(name, np.asarray(Image.open(path).convert("RGB")), update, dataformats="HWC")

    def close(self) -> None:
        self._writer.close()
