"""Finished runs for the tests of this folder, each trained once."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from drivetrain.data.digits import read_table


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """`finished(*words)`: the result of a run with these words."""

    from tests.support.to_end import run_to_end

    results: dict[tuple[str, ...], Any] = {}

    def trained(*words: str) -> Any:
        if words not in results:
            place = Path(tmp_path_factory.getbasetemp()) / "finished" / str(len(results))
            before = os.getcwd()
            results[words] = run_to_end([f"output_dir={place}", "logger=[]", *words])
            os.chdir(before)
        return results[words]

    return trained


@pytest.fixture(scope="session")
def digits(finished: Callable[..., Any]) -> Any:
    """A small network on the digits, with averaged weights."""
    return finished("model=mlp", "model.hidden=[32]", "epochs=2", "ema=ema")


@pytest.fixture(scope="session")
def images() -> np.ndarray:
    """Six images of digits, the first of a zero."""
    return read_table()[:6, :64].reshape(-1, 1, 8, 8)
