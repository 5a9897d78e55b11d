"""optimizer=adamw8bit: AdamW whose state is kept in 8 bits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from drivetrain.core.lazy import import_torchao, torch
from drivetrain.core.option import Momentum, NonNegative, Positive, RunSpec, needs_extra
from drivetrain.optimizer.base import Implementation, Optimizer


@dataclass(kw_only=True, eq=False)
class AdamW8bit(Optimizer):
    """AdamW with both moments in 8 bits (Dettmers et al. 2022), as torchao has it.

    `fused` compiles its arithmetic to one kernel for each shape; elsewhere the same operations run one by one.
    """

    decays_by_lr = True
    by_parameter = True
    has_foreach = False
    needs_real_tensors = "a compiler makes its code for a device, and runs it"
    fused_on = ("cuda",)
    lr: Positive = 3e-3
    weight_decay: NonNegative = 0.01
    beta1: Momentum = 0.9
    beta2: Momentum = 0.999
    eps: Positive = 1e-8

    def validate(self, run: RunSpec) -> Iterator[str]:
        yield from super().validate(run)
        yield from needs_extra("torchao", "torchao", run.named("optimizer"))
        if run.compile.captures_step:
            yield (
                f"{run.named('optimizer')} and {run.named('compile')} exclude each other (a graph of the whole step wants plain "
                "tensors as state, and torchao's are packed): set compile=inductor"
            )

    def make(self, groups: list[dict[str, object]], implementation: Implementation) -> torch.optim.Optimizer:
        import_torchao("torchao.optim")
        from drivetrain.optimizer.torchao_adamw import AdamW8bit

        return AdamW8bit(groups, compiled=implementation == "fused", **self.arguments())
