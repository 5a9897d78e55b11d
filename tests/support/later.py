"""Packages of others, imported when a test first uses them: to collect the suite takes none of them."""

from importlib.util import find_spec
from typing import Any

import pytest

from drivetrain.core.lazy import _Lazy


def package(name: str) -> Any:
    """A package, or a part of one; the tests of the module that asks for it are skipped where it is not installed."""
    top = find_spec(name.partition(".")[0])  # which imports nothing; a part's parent would be imported
    there = top is not None and (top.origin is not None or find_spec(name) is not None)
    if not there:
        pytest.skip(f"{name} is not installed", allow_module_level=True)
    return _Lazy(name)
