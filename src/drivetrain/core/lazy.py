"""`from drivetrain.core.lazy import torch`: torch, imported at its first use, and other packages with a long import.

Importing torch takes two seconds. Modules that check a config take it from here, so that a bad option is refused at once; modules
used only in training import torch as usual.
"""

from __future__ import annotations

import importlib
import logging
import types
from typing import TYPE_CHECKING, Any


class _Lazy(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__version__":  # do not load for inspect and doctest
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
    """Start torch's autograd engine by a backward, before torch's compiler is imported.

    The engine starts a thread for each device. Importing the compiler makes torch count a device that is not there, and a
    forked process fails at the thread for it.
    """
    torch.autograd.backward(torch.ones((), device="cpu", requires_grad=True))
