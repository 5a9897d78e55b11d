"""The return value of `drivetrain.train`: a run's result, its model and its page."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Self

from drivetrain.core.errors import UserError
from drivetrain.run.result import Result

if TYPE_CHECKING:
    import torch


class TrainedRun(Result):
    """The result of a run started by a program. A notebook shows its figures and its page."""

    _has_samples = False

    @classmethod
    def of(cls, result: Result) -> Self:
        """Return the result with a program's attributes."""
        made = cls(**{each.name: getattr(result, each.name) for each in fields(result) if each.init})
        made.code, made.signal = result.code, result.signal
        return made

    def model(self) -> torch.nn.Module:
        """Return the model in evaluation mode, with the best saved weights. Raises UserError if there are none."""
        from drivetrain.inference.loaded import load

        if self.run_dir is None:
            raise UserError(f"the run has no folder, and so no model: it is {self.status}")
        return load(self.run_dir).model

    @property
    def page(self) -> Path | None:
        """The HTML page of the run, with its worst samples; None if it has none."""
        from drivetrain.measure.report import report
        from drivetrain.ui.pages import runs

        if not self._has_samples:
            self._has_samples = True
            report.add_samples(self)
        place = self.run_dir / runs.FILE if self.run_dir is not None else None
        return place if place is not None and place.exists() else None

    def _repr_html_(self) -> str:
        """The page, and the figures as a table for viewers without frames."""
        from drivetrain.ui import notebook

        page, table = self.page, super()._repr_html_()
        if page is None:
            return table
        shown = notebook.framed(page.read_text(encoding="utf-8"), 700)
        return f"{shown}<details><summary>{self.status}: all figures</summary>{table}</details>"
