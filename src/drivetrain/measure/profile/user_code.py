"""Finds the line of the user's own code that a stack belongs to."""

from __future__ import annotations

import linecache
import os
import sysconfig
import traceback
from functools import cache
from itertools import islice
from pathlib import Path
from types import CodeType, FrameType
from typing import NamedTuple

import torch

from drivetrain.core.machine import process
from drivetrain.precision.base import backpropagate

_LIBRARIES = tuple(
    str(Path(place)) + os.sep
    for place in (
        Path(torch.__file__).parent,
        process.PACKAGE,
        sysconfig.get_paths()["stdlib"],
        sysconfig.get_paths()["purelib"],
        sysconfig.get_paths()["platlib"],
    )
)
_SHOWN = 60  # characters of a line's text


class Site(NamedTuple):
    """One call in the user's own code; a line may have several."""

    code: CodeType
    instruction: int

    @property
    def line(self) -> int:
        """The number of its line."""
        number, *_ = next(islice(self.code.co_positions(), max(0, self.instruction // 2), None), (None,))
        return number or self.code.co_firstlineno

    @property
    def place(self) -> str:
        """`file:line in function`."""
        name = self.code.co_filename
        shown = os.path.relpath(name) if name.startswith(os.getcwd() + os.sep) else name
        return f"{shown}:{self.line} in {self.code.co_name}"

    @property
    def text(self) -> str:
        """The text of its line."""
        text = linecache.getline(self.code.co_filename, self.line).partition("  #")[0].strip()
        return text if len(text) <= _SHOWN else text[: _SHOWN - 1] + "…"


class Found(NamedTuple):
    """The facts that a stack shows."""

    site: Site | None = None  # of the innermost frame in the user's own code
    in_layer: bool = False  # it called a module of a library, such as one of torch.nn
    in_backward: bool = False  # the backward runs, and no user's code within it


@cache
def is_users(code: CodeType) -> bool:
    """True if code is neither of Python's library, nor of torch, an installed package or drivetrain."""
    name = code.co_filename
    return code.co_name != "<module>" and os.sep in name and not name.startswith(("<", *_LIBRARIES))


_MODULE_CALL = torch.nn.Module._call_impl.__code__
_BACKWARD = (torch.autograd.graph._engine_run_backward.__code__, backpropagate.__code__)  # they wait until the backward is done


def find(frame: FrameType | None, root: CodeType | None = None) -> Found:
    """Look for the user's own code in a stack, among the frames called by that of `root`."""
    in_layer = False
    while frame is not None and frame.f_code is not root:
        code = frame.f_code
        if is_users(code):
            within = root is None or any(caller.f_code is root for caller, _ in traceback.walk_stack(frame))
            return Found(Site(code, frame.f_lasti), in_layer) if within else Found()
        if code in _BACKWARD:
            return Found(in_backward=True)
        in_layer = in_layer or code is _MODULE_CALL
        frame = frame.f_back
    return Found()


def user_line(frame: FrameType | None, root: CodeType | None = None) -> str:
    """file:line of the innermost frame that is not in Python's library, torch, an installed package or drivetrain; "": none."""
    site = find(frame, root).site
    return site.place if site is not None else ""
