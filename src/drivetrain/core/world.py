"""Rank and world size of a process."""

from __future__ import annotations

from typing import NamedTuple


class World(NamedTuple):
    """Rank and world size of this process, over all machines and on this one (local)."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
