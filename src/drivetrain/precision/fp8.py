"""float8 training with torchao."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator
from typing import Literal

from drivetrain.core.errors import UserError
from drivetrain.core.lazy import import_torchao, torch
from drivetrain.core.option import Count, RunSpec, needs_extra
from drivetrain.core.trees import Tree
from drivetrain.precision.base import Bf16

ROCM = (9, 4)  # AMD's first architecture with float8 products, gfx942

logger = logging.getLogger(__name__)


class Fp8(Bf16):
    """float8 matrix products in large Linear layers (torchao's float8 training), bfloat16 elsewhere.

    Layers of fewer than `min_features` inputs or outputs stay in bfloat16, because the casts would cost more than the product
    gains; so do layers of sizes that 16 does not divide. `scaling` is torchao's recipe; `emulate` runs on any device, slowly.
    """

    effect = "close"
    changes = "rounds the inputs of large products to float8, and the rest to bfloat16"
    owns_weights = True
    replaces_linears = True

    def __init__(
        self,
        scaling: Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"] = "tensorwise",
        min_features: Count = 128,
        emulate: bool = False,
    ) -> None:
        self.scaling, self.min_features, self.emulate = scaling, min_features, emulate

    def roundoff(self) -> float:
        return 2.0**-3  # e5m2, of gradients

    def validate(self, run: RunSpec) -> Iterator[str]:
        yield from needs_extra("torchao", "torchao", "precision=fp8")

    def advise(self, run: RunSpec) -> Iterator[str]:
        if self.emulate:
            yield "precision.emulate=true computes float8 products in float32: for trying out, slower than any other precision"
        elif not run.compile.active:
            yield "precision=fp8 casts with kernels of their own that cost what it gains: compile=inductor fuses them"

    def validate_device(self, run: RunSpec) -> Iterator[str]:
        found = run.runtime.accelerator()
        needed = (8, 9) if self.scaling == "tensorwise" else (9, 0)
        needed = ROCM if found.rocm else needed
        if not self.emulate and (found.type != "cuda" or found.capability < needed):
            here = f"here it is {'.'.join(map(str, found.capability))}" if found.type == "cuda" else "here is none"
            yield (
                f"precision=fp8 needs a CUDA device of compute capability {needed[0]}.{needed[1]} or newer, and {here} "
                f"(precision.scaling={self.scaling}): set precision=bf16, or precision.emulate=true to try it out"
            )

    def convert(self, model: torch.nn.Module, example: Tree) -> torch.nn.Module:
        model = super().convert(model, example)
        import_torchao("torchao.float8")
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        linears = [m for m in model.modules() if isinstance(m, torch.nn.Linear)]
        convertible = [m for m in linears if self._is_convertible(m)]
        if not convertible:
            sizes = ", ".join(sorted({f"{m.in_features}→{m.out_features}" for m in linears})) or "it has none"
            raise UserError(
                f"precision=fp8 finds no Linear layer to convert ({sizes}): it wants ≥ {self.min_features} inputs and outputs "
                "(precision.min_features) that 16 divides; set precision=bf16"
            )
        # The backward's inner dimension is the batch size, which may not be a multiple of 16: it is padded.
        config = dataclasses.replace(Float8LinearConfig.from_recipe_name(self.scaling), emulate=self.emulate, pad_inner_dim=True)
        logger.info(f"{len(convertible)} of {len(linears)} Linear layers compute in float8")
        model = convert_to_float8_training(model, config=config, module_filter_fn=lambda m, _: self._is_convertible(m))
        if self._device.type != "cuda":  # torchao respects only CUDA's autocast
            for layer in (m for m in model.modules() if isinstance(m, torch.nn.Linear) and self._is_convertible(m)):
                layer.register_forward_pre_hook(lambda _, args: (args[0].to(torch.bfloat16),))
        return model

    def _is_convertible(self, layer: torch.nn.Linear) -> bool:
        sizes = layer.in_features, layer.out_features
        return min(sizes) >= self.min_features and all(n % 16 == 0 for n in sizes)
