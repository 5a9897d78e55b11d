"""A model's outputs as labels and probabilities."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import torch

from drivetrain.core.typed import JsonObject
from drivetrain.data.base import Units
from drivetrain.ui.sheet import Table

SHOWN = 10  # rows in a notebook


@dataclass
class Predictions:
    """The predictions for a batch."""

    output: torch.Tensor  # of the model
    kind: str  # class, labels, values, tokens, mask, …
    classes: Sequence[str]
    probabilities: torch.Tensor | None = None  # (n, classes), of the last token for sequences; None for numbers
    units: Units | None = None

    @classmethod
    def of(cls, output: torch.Tensor, kind: str, classes: Sequence[str], units: Units | None = None) -> Predictions:
        """The predictions from a model's output; `units` restores numbers that training standardised."""
        if kind not in ("class", "labels", "tokens", "mask"):
            return cls(output, kind, classes, units=units)
        values = output[:, -1].float() if kind == "tokens" else output.float()
        return cls(output, kind, classes, values.sigmoid() if kind == "labels" else values.softmax(1))

    def __len__(self) -> int:
        return len(self.output)

    @property
    def labels(self) -> torch.Tensor | list[str] | list[list[str]]:
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

    @property
    def are_finite(self) -> torch.Tensor:
        """True for samples with finite answers, bool (n,)."""
        found = torch.as_tensor(self.labels) if self.probabilities is None else self.probabilities
        return found.reshape(len(found), -1).isfinite().all(1)

    def rows(self) -> Iterator[JsonObject]:
        """The columns of each sample's row in a table, in their order."""
        if self.probabilities is None:
            names = ["value"] if len(self.classes) == 1 else [f"value_{name}" for name in self.classes]
            for values in torch.as_tensor(self.labels).flatten(1).tolist():
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
        rows = [{k: f"{v:.4f}" if isinstance(v, float) else str(v) for k, v in row.items()} for row in islice(self.rows(), SHOWN)]
        more = f"<p>and {len(self) - SHOWN} more</p>" if len(self) > SHOWN else ""
        return Table(list(rows[0]) if rows else [], [list(row.values()) for row in rows], "Predictions").html + more
