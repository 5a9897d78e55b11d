"""Some of a source's samples, as a source: nothing is read or copied."""

from __future__ import annotations

from typing import Any

from drivetrain.core.lazy import torch
from drivetrain.core.order import index_of
from drivetrain.core.source import Source
from drivetrain.core.trees import Tree


def subset(source: Any, indices: torch.Tensor) -> Source:
    """Return a source of the samples `indices` (n,) of another one, which may know best how (its own method `subset`)."""
    own = getattr(source, "subset", None)
    made: Source = own(indices) if own is not None else Subset(source, indices)
    return made


class Subset:
    """A view of a source, which reads through it. What else the source can do for its samples, it can do for these."""

    def __init__(self, source: Any, indices: torch.Tensor) -> None:
        self.source, self.indices = source, indices
        lengths = getattr(source, "lengths", None)
        self.lengths = None if lengths is None else lengths[indices]
        self.parallel_read, self.crops = getattr(source, "parallel_read", False), getattr(source, "crops", False)
        self.own_code = getattr(source, "own_code", False)
        if hasattr(source, "order"):
            self.order = self._order
        if hasattr(source, "name"):
            self.name = self._name

    def __len__(self) -> int:
        return len(self.indices)

    def fetch(self, indices: torch.Tensor, *options: Any) -> tuple[Tree, Tree]:
        """Return the samples at these positions of the view."""
        again = indices - index_of(indices)  # which samples come again (core/order.py)
        read: tuple[Tree, Tree] = self.source.fetch(self.indices[index_of(indices)] + again, *options)
        return read

    def labels(self) -> torch.Tensor | None:
        """Return the classes (n,) of these samples, where the source knows them."""
        labels = getattr(self.source, "labels", lambda: None)()
        return None if labels is None else torch.as_tensor(labels)[self.indices]

    def weights(self) -> torch.Tensor | None:
        """Return the weights (n,) of these samples, where a user's code gives some."""
        weights = self.source.weights() if self.own_code else None
        return None if weights is None else torch.as_tensor(weights)[self.indices]

    def keeps(self) -> dict[str, Any]:
        """Return what a user brought, where they are read by a user's code."""
        kept: dict[str, Any] = self.source.keeps() if self.own_code else {}
        return kept

    def draws(self, indices: torch.Tensor | None = None) -> list[str]:
        """Return what these samples draw from, where they are read by a user's code."""
        drawn: list[str] = self.source.draws(None if indices is None else self.indices[indices])
        return drawn

    def share(self, watch_torch: bool) -> None:
        """Prepare a source of a user's code for reads by threads."""
        self.source.share(watch_torch)

    def suspected(self) -> bool:
        """Return whether samples that threads have read since the last question may have drawn."""
        return bool(self.source.suspected())

    def skipped(self) -> list[str]:
        """Return the names of the source's samples that could not be read."""
        names: list[str] = self.source.skipped() if hasattr(self.source, "skipped") else []
        return names

    def _order(self, seed: int, epoch: int) -> torch.Tensor:
        """Return the order of these samples in the source's own order."""
        position = torch.full((len(self.source),), -1)
        position[self.indices] = torch.arange(len(self.indices))
        ordered = position[self.source.order(seed, epoch)]
        return ordered[ordered >= 0]

    def _name(self, index: int) -> str:
        name: str = self.source.name(int(self.indices[index]))
        return name
