"""The base of model edits, and how a list of them is applied."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import ClassVar

from drivetrain.core.errors import UserError
from drivetrain.core.lazy import torch
from drivetrain.core.options import groups
from drivetrain.core.options.option import Option, RunSpec
from drivetrain.core.step.trees import Tree


class Edit(Option, groups.Surgery):
    """One model edit. There is no option `none`: surgery=[] turns the group off."""

    why_fixed: ClassVar[str] = "the weights continue in the next stage, so the architecture stays"

    def apply(self, model: torch.nn.Module, example: Tree) -> str:
        """Edit the model in place and return one line that describes the change.

        `example` is the model's input in training, for two samples; `trees.call(model, example)` runs it on them. A line
        that starts with "0 " means that nothing was changed.
        """
        raise self.unwritten("apply")


def apply_all(edits: list[Edit], model: torch.nn.Module, example: Tree) -> list[str]:
    """Apply the edits in the order given and return their lines. Raises UserError for an edit that changes nothing."""
    lines = []
    for edit in edits:
        line = edit.apply(model, example)
        if line.startswith("0 "):
            name = re.sub(r"(?<!^)(?=[A-Z])", "_", type(edit).__name__).lower()  # as typed by the user: fused_norm for FusedNorm
            raise UserError(f"surgery={name} has no effect on this model ({line}): leave it out")
        lines.append(line)
    return lines


class ChannelsLast(Edit):
    """Put weights and images in NHWC order, which convolution kernels read faster; transformers gain nothing."""

    effect = "close"
    changes = "kernels for another layout round differently"
    memory_format = "channels_last"

    def validate_device(self, run: RunSpec) -> Iterator[str]:
        shape = run.data.shape()
        if shape is not None and len(shape) != 3:
            yield f"surgery=[channels_last] wants images, but the data gives {list(shape)}: leave it out"

    def apply(self, model: torch.nn.Module, example: Tree) -> str:
        model.to(memory_format=torch.channels_last)
        return f"{sum(p.ndim == 4 for p in model.parameters())} weights in channels-last order"
