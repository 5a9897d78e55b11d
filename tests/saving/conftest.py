"""What tests of saving share."""

from __future__ import annotations

from pathlib import Path

import pytest
from bench import flips


@pytest.fixture(scope="session")
def once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four updates with two checkpoints, which tests copy."""
    return flips.train(tmp_path_factory.mktemp("once"))
