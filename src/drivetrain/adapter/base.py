"""Low-rank adapters: LoRA (Hu et al. 2021) and DoRA (Liu et al. 2024)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, ClassVar, Literal, Self

from drivetrain.core.errors import UserError
from drivetrain.core.lazy import torch
from drivetrain.core.machine import guards
from drivetrain.core.machine.paths import expanded
from drivetrain.core.options import groups
from drivetrain.core.options.allowed import NamePattern
from drivetrain.core.options.option import BuildContext, Count, Effect, Momentum, Option, Positive, RunSpec
from drivetrain.core.step import low_rank
from drivetrain.core.step.architecture import Architecture
from drivetrain.core.step.modules import put_in_place

if TYPE_CHECKING:
    from drivetrain.adapter.layers import LoraLinear

BITS = {"bf16": 16, "int8": 8, "nf4": 4}  # of a frozen weight


class Adapter(Option, groups.Adapter):
    """adapter=none: the model's own weights train."""

    stage_keys: ClassVar[tuple[str, ...]] = ("dropout",)
    why_fixed: ClassVar[str] = "its parameters continue in the next stage"
    effect: ClassVar[Effect] = "exact"

    def apply(self, model: torch.nn.Module, context: BuildContext) -> Iterator[str]:
        """Add the adapters to the model, in place. Its own parameters keep their names. Yields lines to log."""
        return iter(())


class Lora(Adapter):
    """Corrects the weights of linear layers by products of two thin matrices: W + alpha / rank · B A. Only A and B train.

    With `scale` stabilized the factor is alpha / √rank (rsLoRA, Kalajdzievski 2023). With `init` pissa A and B begin with W's
    largest singular values, and W loses these (Meng et al. 2024). B learns at `lr_ratio` × the learning rate (LoRA+, Hayou et
    al. 2024).

    `targets` are patterns of layers; null means every Linear in the forward except the output layer. The output layer
    trains as a whole, unless another layer shares its weight; `train_also` names other parameters instead. `weights` is a
    folder of peft whose adapters are the start. With `base` bf16, int8 or nf4 the weights of the corrected layers are kept in 16,
    8 or 4 bits; by default in 16 if autocast computes in bfloat16, because it would round them so in each forward.
    """

    effect = "changes"
    changes = "low-rank corrections train instead of the weights"
    active = True
    name = "lora"
    machine_local_keys = identifying_keys = ("weights",)

    def __init__(
        self,
        rank: Count = 8,
        alpha: Positive = 16.0,
        dropout: Momentum = 0.0,
        targets: Sequence[NamePattern] | None = None,
        train_also: Sequence[NamePattern] | None = None,
        base: Literal["auto", "full", "bf16", "int8", "nf4"] = "auto",
        weights: str | None = None,
        scale: Literal["plain", "stabilized"] = "plain",
        init: Literal["random", "pissa"] = "random",
        lr_ratio: Positive = 1.0,
    ) -> None:
        self.base, self.scale, self.init, self.lr_ratio = base, scale, init, lr_ratio
        self.rank, self.alpha, self.dropout, self.weights = rank, alpha, dropout, weights
        self.targets, self.train_also = targets, train_also

    def resolve(self, run: RunSpec) -> Self:
        """Choose the base: 16 bits if the step rounds to 16 bits and every rank has whole weights."""
        rounds = run.precision.dtype == "bfloat16" and self.true_gradient and run.parallel.whole_model
        return self.with_values(base="bf16" if rounds else "full") if self.base == "auto" else self

    def validate(self, run: RunSpec) -> Iterator[str]:
        name = run.named("adapter")
        if run.model.freeze or run.model.unfreeze:
            yield (
                f"{name} freezes all of the model's own parameters, so that model.freeze and model.unfreeze have nothing to say: "
                "leave them out, and name in adapter.train_also further parameters to train"
            )
        if run.optimizer.for_whole_weights:
            yield (
                f"{name} and {run.named('optimizer')} exclude each other (its updates are for whole weights of layers, and an "
                "adapter has thin factors of them): set optimizer=adamw"
            )
        if self.base != "full" and not self.true_gradient:
            yield (
                f"adapter.base={self.base} and {name} exclude each other (it needs the lengths of the weights' rows): set "
                "adapter=lora"
            )
        if self.base != "full" and not run.parallel.whole_model:
            yield (
                f"adapter.base={self.base} and {run.named('parallel')} exclude each other (such weights are not divided among "
                "ranks): set parallel=ddp"
            )
        if run.precision.replaces_linears:
            yield (
                f"{name} and {run.named('precision')} exclude each other (both replace a Linear layer by their own "
                "layer): set precision=bf16"
            )

    def advise(self, run: RunSpec) -> Iterator[str]:
        if not run.model.given_weights:
            yield (
                f"{run.named('adapter')} trains corrections to frozen weights, and these are random: set "
                "model.weights=PATH, or model.pretrained=true of model=timm or model=transformers"
            )

    def apply(self, model: torch.nn.Module, context: BuildContext) -> Iterator[str]:
        from drivetrain.adapter import layers

        heads = Architecture.of(model).heads
        chosen = layers.choose(model, context.example, self.targets, heads)
        if not chosen:
            run = context.run
            raise UserError(
                f"{run.named('adapter')} finds no Linear layer to correct in {run.named('model')}, except the one that gives the "
                "outputs: set adapter=none, or a transformer or multilayer perceptron as model"
            )
        own = sum(p.numel() for p in model.parameters())
        room = guards.memory_bytes() // ((2 + context.run.optimizer.states) * context.world.local_size)
        with guards.model_within(room, f"adapter.rank={self.rank}", ", with their gradients and the optimizer's state"):
            new = {layer: self.adapted(layer) for layer in chosen.values()}
            if self.base != "full":
                for layer in new.values():
                    layer.narrow(BITS[self.base])
            put_in_place(model, new.items())
        added = sum(p.numel() for name, p in model.named_parameters() if low_rank.is_adapters(name))
        yield (
            f"{len(chosen)} linear layers have adapters of rank {self.rank}: {added:,} parameters, next to the model's {own:,}"
        )
        if self.weights is not None:
            keys = ("rank", "alpha", "scale", "init")
            settings = {"adapter": self.name, **{f"adapter.{key}": getattr(self, key) for key in keys}}
            yield layers.load_peft(model, expanded(self.weights), settings)

    def trained_whole(self, model: torch.nn.Module) -> set[str]:
        """Return the modules whose own parameters train in addition to the adapters."""
        kept = set(self.frozen(model))
        return {name.rpartition(".")[0] for name, _ in model.named_parameters() if name not in kept}

    def adapted(self, layer: torch.nn.Linear) -> LoraLinear:
        """Return a Linear layer as one with an adapter."""
        alpha = self.alpha * math.sqrt(self.rank) if self.scale == "stabilized" else self.alpha
        made = self.kind().of(layer, self.rank, alpha, self.dropout)
        if self.init == "pissa":
            made.take_principal()
        return made

    def kind(self) -> type[LoraLinear]:
        """Return the class of its layers."""
        from drivetrain.adapter import layers

        return layers.LoraLinear

    def in_peft(self) -> dict[str, object]:
        """Return peft's settings of scale and init."""
        return {"use_rslora": self.scale == "stabilized", "init_lora_weights": self.init if self.init == "pissa" else True}

    def frozen(self, model: torch.nn.Module) -> list[str]:
        from drivetrain.adapter import layers

        also = layers.unshared(model, Architecture.of(model).heads) if self.train_also is None else self.train_also
        return layers.frozen_names(model, also)


class Dora(Lora):
    """As lora, of the weights' directions alone; the length of each row of a weight is a separate parameter.

    A length's derivative by the correction is left out, as the paper does it (section 4.3): it costs memory and changes little.
    """

    effect = "changes"
    changes = "low-rank corrections of the weights' directions and their lengths train in their place"
    name = "dora"
    true_gradient = False

    def kind(self) -> type[LoraLinear]:
        from drivetrain.adapter import layers

        return layers.DoraLinear
