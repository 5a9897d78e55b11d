"""Runs that tests of saving share."""

from pathlib import Path

import pytest

from tests.support import small_runs
from tests.support.small_runs import SmallRun


@pytest.fixture(scope="session")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> SmallRun:
    """A small run on images."""
    return small_runs.pictures(tmp_path_factory.mktemp("pictures"))


@pytest.fixture(scope="session")
def once(pictures: SmallRun) -> Path:
    """The directory of a run of four updates with two checkpoints, which tests copy."""
    return pictures.run_dir


@pytest.fixture(scope="session")
def small(pictures: SmallRun, tmp_path_factory: pytest.TempPathFactory) -> dict[str, SmallRun]:
    """A small run of each kind, which tests copy."""
    others = {"table": small_runs.table, "texts": small_runs.texts}
    return {"pictures": pictures, **{kind: train(tmp_path_factory.mktemp(kind)) for kind, train in others.items()}}
