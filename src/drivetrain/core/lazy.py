"""`from drivetrain.core.lazy import torch`: torch, loaded at its first use; and other packages that take long.

Importing torch takes two seconds. Modules that a config is checked with take it from here, so a
bad option is answered at once; modules that only training needs import torch as usual.
"""

from __future__ import annotations

import importlib
import logging
import types
from typing import TYPE_CHECKING, Any


class _Lazy(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__version__":  # inspect and doctest look around; do not load for them
            raise AttributeError(name)
        module = importlib.import_module(self.__name__)
        self.__dict__.update(module.__dict__)  # from now on a plain attribute read
        return getattr(module, name)


def import_torchao(module: str) -> Any:
    """Import a module of torchao without the deprecation warnings that torch logs at it."""
    start_autograd_engine()
    logger = logging.getLogger("torch.utils._pytree")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        return importlib.import_module(module)
    finally:
        logger.setLevel(level)


if TYPE_CHECKING:
    import numpy as numpy
    import pyarrow as pyarrow
    import torch as torch
    from pyarrow import compute, csv
    from torch.utils import _pytree

    arrow_compute, arrow_csv, pytree = compute, csv, _pytree
else:
    arrow_compute, arrow_csv = _Lazy("pyarrow.compute"), _Lazy("pyarrow.csv")
    numpy, pyarrow, torch, pytree = _Lazy("numpy"), _Lazy("pyarrow"), _Lazy("torch"), _Lazy("torch.utils._pytree")


def start_autograd_engine() -> None:
    """Run a backward, if this process has not: torch starts a thread for each device then, and a forked process cannot go on.

    Importing torch's compiler makes torch count a device that is not there. So this comes before it.
    """
    torch.autograd.backward(torch.ones((), device="cpu", requires_grad=True))
