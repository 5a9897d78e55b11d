"""Activation checkpointing: drop activations and recompute them in the backward (Chen et al. 2016)."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from annotated_types import Ge

from drivetrain.core.errors import UserError
from drivetrain.core.lazy import torch
from drivetrain.core.options import groups
from drivetrain.core.options.allowed import Name
from drivetrain.core.options.option import Count, CountOrZero, Effect, Option, Positive, RunSpec, Share
from drivetrain.core.options.protocols import Trials
from drivetrain.core.step.blocks import blocks_for, describe_blocks
from drivetrain.core.typed import JsonMapping, fits

if TYPE_CHECKING:
    from drivetrain.checkpointing.recompute import Policy

KEY = "checkpointing.memory_gb"

logger = logging.getLogger(__name__)


class Checkpointing(Option, groups.Checkpointing):
    """checkpointing=none: every activation is kept."""

    stage_option: ClassVar[bool] = True
    stage_keys: ClassVar[tuple[str, ...]] = ("*",)
    effect: ClassVar[Effect] = "exact"
    found: JsonMapping | None = None  # the forecast and the choice

    def apply(self, model: torch.nn.Module) -> None:
        """Patch the model's forward in place. Its parameters keep their names."""


class Blocks(Checkpointing):
    """Keeps only the input of each repeated block (a transformer's layers, a ResNet's bottlenecks).

    `block` is the class name of the blocks; null means the blocks that the model repeats. With `memory_gb` it recomputes only the
    first blocks, as many as a forecast before the run needs for a rank's step to fit.
    """

    effect: ClassVar[Effect] = "exact"
    active = True
    needs_trial: ClassVar[bool] = True  # if `untried` is not empty
    name = "blocks"

    def __init__(self, block: Name | None = None, memory_gb: Positive | None = None) -> None:
        self.block, self.memory_gb = block, memory_gb

    def validate(self, run: RunSpec) -> Iterator[str]:
        parallel = run.parallel
        divided = not (parallel.one_process or parallel.distributed) or not parallel.own_forward or not parallel.whole_model
        if self.memory_gb is not None and divided:
            yield f"{KEY} is for ranks with the whole model, but {run.named('parallel')} divides it: set {KEY}=null"
        if self.memory_gb is not None and not run.batch.fixed_micro_batches:
            yield f"{KEY} needs micro-batches of one size, and {run.named('batch')} finds its own: set batch=accumulate"
        if run.compile.torchscript:
            yield (
                f"{run.named('checkpointing')} and compile=jit exclude each other (TorchScript keeps every activation): "
                "set compile=inductor or checkpointing=none"
            )

    def apply(self, model: torch.nn.Module) -> None:
        from drivetrain.checkpointing.recompute import checkpoint_forward

        blocks = self.select(blocks_for(f"checkpointing={self.name}", "checkpointing.block", model, self.block))
        for block in blocks:
            checkpoint_forward(block, self.policy_factory())
        what = describe_blocks(blocks) if self.found is None else f"{len(blocks)} of {self.found['blocks']} blocks"
        logger.info("%s recomputed in the backward%s", what, self.describe_kept())

    def select(self, blocks: list[torch.nn.Module]) -> list[torch.nn.Module]:
        """Return the blocks to recompute, out of the model's blocks."""
        return blocks if self.found is None else blocks[: self.found["recomputed"]]

    @property
    def untried(self) -> str:  # type: ignore[override]
        return "" if self.memory_gb is None else f"{KEY}=null"

    def choose(self, trials: Trials, recorded: JsonMapping | None = None) -> Blocks:
        if self.memory_gb is None:
            return self
        given = recorded if recorded and recorded.get("memory_gb") == self.memory_gb else {}
        if all(fits(given.get(key), int) and given[key] >= 0 for key in ("recomputed", "blocks", "bytes")):
            return self.with_values(found=given)
        found = trials.fewest_blocks(self.block, self.memory_gb)
        if found["bytes"] > self.memory_gb * 2**30:
            raise UserError(self.too_little(found, trials.micro_batch()))
        return self.with_values(found={"memory_gb": self.memory_gb, **found})

    def too_little(self, found: Mapping[str, float], micro_batch: int) -> str:
        """Return the message for a step that does not fit even with all blocks recomputed."""
        return (
            f"{KEY}={self.memory_gb:g} is too little: a step of {micro_batch} samples is forecast to take at least "
            f"{rounded_up(found['bytes'] / 2**30):g} GiB, with {found['recomputed']} of {found['blocks']} blocks recomputed: "
            "raise it, or split the update into more micro-batches (batch=accumulate)"
        )

    def policy_factory(self) -> Callable[[], Policy] | None:
        """Return a function that makes the policy of kept results; None keeps only a block's input."""
        return None

    def describe_kept(self) -> str:
        """Return the log's description of the results kept in memory."""
        if self.found is None:
            return ""
        gib = self.found["bytes"] / 2**30
        return f": the step is forecast to take {gib:.3g} GiB, within {KEY}={self.memory_gb:g}"


def rounded_up(value: float) -> float:
    """A positive number rounded up to three digits."""
    unit = 10.0 ** (math.floor(math.log10(value)) - 2)
    rounded = float(f"{value:.3g}")
    return rounded if rounded >= value else float(f"{rounded + unit:.3g}")


class EveryK(Blocks):
    """Recomputes every k-th block, starting with the first; the others keep their activations.

    It recomputes single blocks, not segments of k, because segments would need the code that calls the blocks.
    """

    effect = "exact"
    name = "every_k"

    def __init__(self, k: Annotated[int, Ge(2)] = 2, block: Name | None = None) -> None:
        super().__init__(block)
        self.k = k

    def select(self, blocks: list[torch.nn.Module]) -> list[torch.nn.Module]:
        return blocks[:: self.k]


class Selective(Blocks):
    """Keeps a block's expensive results, and recomputes its cheap ones.

    `products` keeps matrix products, convolutions and attention that sum over at least `min_depth` terms, and recomputes
    activations, normalisations, dropout, resampling and shallow products. `half` keeps every second of these products (as
    torchtitan does); `attention` keeps only attention.
    """

    effect = "exact"
    name = "selective"
    asks_for_each_operation = True

    def __init__(
        self,
        policy: Literal["products", "half", "attention"] = "products",
        min_depth: Count = 32,
        block: Name | None = None,
    ) -> None:
        super().__init__(block)
        self.policy, self.min_depth = policy, min_depth

    def policy_factory(self) -> Callable[[], Policy]:
        from drivetrain.checkpointing import recompute

        policies = {"products": recompute.products, "half": recompute.half, "attention": recompute.attention}
        return lambda: policies[self.policy](self.min_depth)

    def describe_kept(self) -> str:
        return f", {self.policy} kept"


class Budget(Checkpointing):
    """Lets the compiler choose what to recompute, the cheapest first, so that about `budget` of the activations are kept.

    1 keeps as much as the compiler does by default, 0 as much as `blocks` (torch._functorch.config.activation_memory_budget).
    """

    effect = "close"
    changes = "the compiler computes some activations twice, and may round them differently"
    active = True
    chosen_by_compiler = True
    needs_real_tensors = "compilers generate and run code for a device"

    def __init__(self, budget: Share = 0.5) -> None:
        self.budget = budget

    def validate(self, run: RunSpec) -> Iterator[str]:
        if not run.compile.partitions_activations:
            yield (
                f"checkpointing=budget is applied by the compiler, and {run.named('compile')} has none that splits the forward "
                "from the backward: set compile=inductor or regional, or checkpointing=selective"
            )

    def apply(self, model: torch.nn.Module) -> None:
        logger.info("the compiler keeps about %g of the activations that it would keep", self.budget)


class Offload(Checkpointing):
    """Moves saved activations to the host's memory, and back for the backward. Nothing is computed twice.

    Weights and tensors of less than `min_kb` KiB stay on the device.
    """

    effect: ClassVar[Effect] = "exact"
    active = True
    keeps_on_host = True
    needs_real_tensors = "it copies values to pinned memory of the host"

    def __init__(self, min_kb: CountOrZero = 64) -> None:
        self.min_kb = min_kb

    def validate(self, run: RunSpec) -> Iterator[str]:
        if run.compile.active:
            yield (
                f"checkpointing=offload and {run.named('compile')} exclude each other (a compiled graph keeps its own "
                "activations): set compile=none, or checkpointing=budget with compile=inductor"
            )
        if not run.parallel.own_forward:
            yield (
                f"checkpointing=offload and {run.named('parallel')} exclude each other (it follows the forward of a whole model, "
                "and here a rank has a part of it): set checkpointing=blocks"
            )

    def validate_device(self, run: RunSpec) -> Iterator[str]:
        if run.runtime.device_type() in ("cpu", "mps"):
            yield (
                "checkpointing=offload needs a CUDA device or one like it: here activations are in the host's memory already; "
                "set checkpointing=none"
            )

    def apply(self, model: torch.nn.Module) -> None:
        from drivetrain.checkpointing.recompute import offload_forward

        offload_forward(model, self.min_kb * 1024)
        logger.info("activations of at least %d KiB wait for the backward in the host's memory", self.min_kb)
