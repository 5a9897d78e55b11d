"""One process among the ranks of a run."""

from __future__ import annotations

from typing import NamedTuple


class World(NamedTuple):
    """This process among the ranks of the run."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
