"""The knobs that every optimizer has, written once.

No `from __future__ import annotations` here: the types stay objects, so that a subclass's module need not know them.
"""

from dataclasses import dataclass, field
from typing import Annotated, Any

from annotated_types import Gt, Le

from drivetrain.core.option import NonNegative, Option, Positive

Falling = Annotated[float, Gt(0), Le(1)]  # above 0 … 1


@dataclass(kw_only=True, eq=False)
class Knobs(Option):
    """Learning rate, decay, who gets how much of them, and the implementation."""

    lr: Positive
    weight_decay: NonNegative
    decay_norm_and_bias: bool = False
    no_weight_decay: list[str] = field(default_factory=list)
    layer_decay: Falling | None = None
    lr_multipliers: dict[str, Any] = field(default_factory=dict)
    fused: bool | None = None
    foreach: bool | None = None
