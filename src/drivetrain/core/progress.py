"""How far a run is: what it counts, and saves with its state."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Progress:
    """How far the run is. Updates and what was consumed are counted apart: a skipped update consumes its samples."""

    epoch: int = 0
    window: int = 0  # updates' worth of samples consumed in this epoch
    updates: int = 0
    samples: int = 0
    skipped: int = 0
    evaluated: int = -1  # the update of the last evaluation
    final: dict[str, float] = field(default_factory=dict)
    best: dict[str, float] = field(default_factory=dict)
