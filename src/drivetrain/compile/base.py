"""The off switch of compiling, and what all that compile have in common."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from drivetrain.core.lazy import torch
from drivetrain.core.option import Option, RunSpec
from drivetrain.core.step import Step

if TYPE_CHECKING:
    from drivetrain.core.context import BuildContext


class Compile(Option):
    """compile=none: the model runs op by op."""

    active = False
    captures_step = False  # the whole step is one graph
    cuda_graphs = False
    torchscript = False
    partitions_activations = False  # splits a graph into forward and backward, and chooses what to keep between them
    specializes_on_shapes = False  # compiles anew, or slower code, where shapes change
    ranks_meet_in_forward = False  # collectives may stand in the compiled forward
    crosses_devices = True  # activations may move between devices within the forward
    whole_forward = False  # the model's forward is compiled as a whole, not block by block
    warmup = 1  # steps after which all of them are alike
    dynamic: bool | None = False  # whether code is made for shapes in general; None: where the compiler sees that they change

    def apply(self, model: torch.nn.Module, example: torch.Tensor, budget: float) -> Any:
        """The callable that training calls. `example` is a batch of two zeros; `budget` the share of activations to keep."""
        return model

    def wrap_step(self, step: Step, context: BuildContext) -> Step:
        """The step, or one graph in its place."""
        return step

    def seconds(self) -> float | None:
        """What compiling has taken so far."""
        return None

    def advice(self, error: BaseException) -> str:
        """What to set where this error is the compiler's own."""
        return ""


class Compiled(Compile):
    """What all that compile have in common."""

    active = True
    specializes_on_shapes = True
    ranks_meet_in_forward = True
    whole_forward = True

    def validate(self, run: RunSpec) -> Iterator[str]:
        if run.debug.names_backward_lines:
            yield (
                f"{run.named('compile')} and {run.named('debug')} exclude each other (a compiled backward has no lines to name): "
                "set compile=none"
            )


def dynamo_seconds() -> float:
    """Seconds that this process has spent in torch.compile, forward and backward graphs together."""
    from torch._dynamo.utils import calculate_time_spent

    return float(calculate_time_spent().get("total_wall_time", 0.0))
