"""What a refused call says."""

from collections.abc import Callable
from typing import Any

import pytest

from drivetrain.core.errors import UserError


def problems_of(act: Callable[..., object], *args: Any, **settings: Any) -> list[str]:
    """The problems for which a call is refused; it must be."""
    with pytest.raises(UserError) as refused:
        act(*args, **settings)
    return refused.value.problems
