"""The hyperparameters that every optimizer has.

This module has no `from __future__ import annotations`: the annotations of the fields must be types, not strings, so that
the signature of a subclass in another module can be read without importing the names that are used here.
"""

from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

from annotated_types import Gt, Le

from drivetrain.core.allowed import NAME_PATTERN, Entries, NamePattern
from drivetrain.core.option import NonNegative, Option, Positive

LayerDecay = Annotated[float, Gt(0), Le(1)]


@dataclass(kw_only=True, eq=False)
class Hyperparameters(Option):
    """Learning rate, weight decay, the parameters that they apply to, and the implementation.

    Each option gives `lr` and `weight_decay` their defaults.
    """

    stage_keys: ClassVar[tuple[str, ...]] = ("*",)
    stays: ClassVar[str] = "its state goes on into the next stage"
    lr: Positive
    weight_decay: NonNegative
    final_weight_decay: NonNegative | None = None
    decay_norm_and_bias: bool = False
    no_weight_decay: list[NamePattern] = field(default_factory=list)
    layer_decay: LayerDecay | None = None
    lr_multipliers: Annotated[dict[str, Any], Entries(NAME_PATTERN)] = field(default_factory=dict)
    fused: bool | None = None
    foreach: bool | None = None
