"""Commands run as a user runs them: minutes, so `make test-slow` runs them."""

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what lies in this folder as slow."""
    for item in items:
        if "/tests/cli/" in str(item.path):
            item.add_marker(pytest.mark.slow)
