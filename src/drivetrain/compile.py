"""Compiling the model."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any, Literal

from drivetrain.lazy import torch
from drivetrain.spec import Part, Run


class Compile(Part):
    """compile=none: the model runs op by op."""

    def apply(self, model: torch.nn.Module) -> Any:
        """The callable that training calls; evaluation and saving keep the plain model."""
        return model


class Inductor(Compile):
    """torch.compile: fused kernels, at the cost of a compilation that `compile_s` reports."""

    def __init__(
        self,
        mode: Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] = "default",
        dynamic: bool | None = None,
        fullgraph: bool = False,
    ) -> None:
        self.mode, self.dynamic, self.fullgraph = mode, dynamic, fullgraph

    def check(self, run: Run) -> Iterator[str]:
        if not any(shutil.which(c) for c in ("c++", "g++", "clang++")):
            yield f"{run.named('compile')} needs a C++ compiler (g++ or clang++) on the PATH: install one or set compile=none"
        if run.choices["debug"] == "anomaly":
            yield (
                f"{run.named('compile')} and debug=anomaly exclude each other (a compiled backward has no lines to name): "
                "set compile=none"
            )

    def apply(self, model: torch.nn.Module) -> Any:
        return torch.compile(model, mode=self.mode, dynamic=self.dynamic, fullgraph=self.fullgraph)
