"""A model's outputs as labels and probabilities."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import torch

from drivetrain.core.typed import JsonObject
from drivetrain.data.base import Units

SHOWN = 10  # rows in a notebook


@dataclass
class Predictions:
    """The predictions for a batch."""

    output: torch.Tensor  # of the model
    kind: str  # class, labels, values, tokens, mask, …
    classes: Sequence[str]
    probabilities: torch.Tensor | None = None  # (n, classes); of the last token, where inputs are sequences; None for numbers
    units: Units | None = None

    @classmethod
    def of(cls, output: torch.Tensor, kind: str, classes: Sequence[str], units: Units | None = None) -> Predictions:
        """The predictions that a model's output stands for; `units` are those of numbers that training standardised."""
        values = output.float()
        if kind == "class":
            return cls(output, kind, classes, values.softmax(-1))
        if kind == "labels":
            return cls(output, kind, classes, values.sigmoid())
        if kind == "tokens":
            return cls(output, kind, classes, values[:, -1].softmax(-1))
        if kind == "mask":
            return cls(output, kind, classes, values.softmax(1))
        return cls(output, kind, classes, units=units)

    def __len__(self) -> int:
        return len(self.output)

    @property
    def labels(self) -> Any:
        """The likeliest class of each sample by name, all labels above 0.5, the mask, or the numbers in their units."""
        if self.probabilities is None:
            return self.output.float() if self.units is None else self.units(self.output.float())
        if self.kind == "mask":
            return self.probabilities.argmax(1)
        if self.kind == "labels":
            return [
                [name for name, on in zip(self.classes, row, strict=True) if on] for row in (self.probabilities > 0.5).tolist()
            ]
        return [self.classes[n] for n in self.probabilities.argmax(-1).tolist()]

    def rows(self) -> Iterator[JsonObject]:
        """The columns of each sample's row in a table, in their order."""
        if self.probabilities is None:
            names = ["value"] if len(self.classes) == 1 else [f"value_{name}" for name in self.classes]
            for values in self.labels.flatten(1).tolist():
                yield dict(zip(names, values, strict=True))
            return
        for label, row in zip(self.labels, self.probabilities.tolist(), strict=True):
            text = ";".join(label) if isinstance(label, list) else label
            likeliest = {} if self.kind == "labels" else {"probability": max(row)}
            each = () if self.kind == "tokens" else zip(self.classes, row, strict=True)  # a vocabulary makes no columns
            yield {"label": text, **likeliest, **{f"p_{name}": p for name, p in each}}

    def _repr_html_(self) -> str:
        if self.kind == "mask":
            return f"<p>{len(self)} masks of {len(self.classes)} classes</p>"
        rows = [row for row, _ in zip(self.rows(), range(SHOWN), strict=False)]
        header = "".join(f"<th>{escape(name)}</th>" for name in rows[0]) if rows else ""
        cells = ["".join(f"<td>{escape(_cell(value))}</td>" for value in row.values()) for row in rows]
        more = f"<p>and {len(self) - SHOWN} more</p>" if len(self) > SHOWN else ""
        return f"<table><tr>{header}</tr>{''.join(f'<tr>{row}</tr>' for row in cells)}</table>{more}"


def _cell(value: object) -> str:
    return f"{value:.4f}" if isinstance(value, float) else str(value)
