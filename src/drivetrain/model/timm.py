"""model=timm: any network of timm."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from drivetrain.core.errors import UserError
from drivetrain.core.lazy import torch
from drivetrain.core.option import RunSpec
from drivetrain.model.base import NO_START, Model


@dataclass(eq=False)
class Timm(Model):
    """Any network of timm by name. `kwargs` are further arguments of timm.create_model.

    The numbers of input channels and of classes come from the data, unless `kwargs` sets them.
    """

    name: str = "resnet18"
    pretrained: bool = False
    kwargs: dict[str, Any] = field(default_factory=dict)

    machine_local_keys = identifying_keys = (*Model.machine_local_keys, "pretrained")
    may_be_transformer = True

    def validate(self, run: RunSpec) -> Iterator[str]:
        yield from super().validate(run)
        for key, instead in {"pretrained": "model.pretrained=true", "checkpoint_path": "model.weights=PATH"}.items():
            if key in self.kwargs:
                yield f"model.kwargs.{key} names weights to start from, which a run has a key of its own for: set {instead}"
        if self.pretrained and self.weights is not None:
            yield f"model.pretrained=true and model.weights={self.weights} are two sets of weights to start from: leave one out"

    def validate_device(self, run: RunSpec) -> Iterator[str]:
        import timm

        base = self.name.split(".")[0]
        if not self.name.startswith("hf-hub:") and not timm.is_model(self.name):
            near = difflib.get_close_matches(base, timm.list_models(), n=5, cutoff=0.5)
            yield (f"model.name={self.name} is no model of timm {timm.__version__}: did you mean {', '.join(near) or 'another'}?")

    def untrained(self) -> Timm:
        return replace(self, **NO_START, pretrained=False)

    def create(self, shape: tuple[int, ...], classes: int) -> torch.nn.Module:
        import timm

        kwargs = {"in_chans": shape[0], "num_classes": classes, **self.kwargs}
        try:
            return timm.create_model(self.name, pretrained=self.pretrained, **kwargs)
        except TypeError as error:  # an argument that this network does not take
            raise UserError(f"model.name={self.name} does not take these model.kwargs {self.kwargs}: {error}") from None
