"""Linear layers with low-rank adapters, the choice of a model's layers to adapt, and files in peft's format.

A layer with an adapter replaces the model's own and holds its weight under the same name. So files of weights still fit, and a
checkpoint has the adapter's tensors in addition (core/step/low_rank.py).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import safetensors
import safetensors.torch
import torch
from torch import nn
from torch.nn.functional import dropout, linear

from drivetrain.core.errors import UserError, refuse
from drivetrain.core.machine import files
from drivetrain.core.options.allowed import check_patterns, matches
from drivetrain.core.step.architecture import is_transposed
from drivetrain.core.step.low_rank import LEVELS, is_adapters, narrowed, row_norms, widened
from drivetrain.core.step.modules import run_once, taken_over
from drivetrain.core.step.trees import Tree


class NarrowProduct(torch.autograd.Function):
    """x @ weightᵀ of a weight in 16, 8 or 4 bits. The backward needs only these, so that no wider weight is kept."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor | None, levels: torch.Tensor | None
    ) -> torch.Tensor:
        """The product, in the dtype of x."""
        ctx.save_for_backward(weight, scale, levels)
        ctx.inputs = x.shape[-1]
        return linear(x, widened(weight, scale, levels, ctx.inputs, x.dtype))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        """The gradient of x."""
        weight, scale, levels = ctx.saved_tensors
        return grad @ widened(weight, scale, levels, ctx.inputs, grad.dtype), None, None, None


class LoraLinear(nn.Linear):
    """y = W x + bias + scale · B A x, with A (rank, inputs) and B (outputs, rank). B is 0 at first, so that y is the base's.

    A Conv1D of transformers has the weight W transposed: the tensor `lora_transposed` marks this for merging a file.
    """

    lora_a: nn.Parameter
    lora_b: nn.Parameter
    lora_scale: torch.Tensor  # 0-d; a buffer, so that a file of weights can be merged without the config
    lora_dropout: float
    lora_weight_scale: torch.Tensor  # (outputs, groups), where the base's weight has 8 or 4 bits
    lora_levels: torch.Tensor | None  # of 4 bits

    @classmethod
    def of(cls, linear: nn.Module, rank: int, alpha: float, dropout: float) -> Self:
        """Return a Linear layer as one of this class."""
        layer = taken_over(linear, cls)
        weight = layer.weight
        if not isinstance(linear, nn.Linear):
            layer.in_features, layer.out_features = weight.shape
            layer.register_buffer("lora_transposed", torch.ones((), dtype=torch.bool, device=weight.device))
        layer.lora_a = nn.Parameter(weight.new_empty(rank, layer.in_features))
        layer.lora_b = nn.Parameter(weight.new_zeros(layer.out_features, rank))
        layer.register_buffer("lora_scale", weight.new_tensor(alpha / rank))
        layer.lora_dropout = dropout
        nn.init.kaiming_uniform_(layer.lora_a, a=math.sqrt(5))  # as Linear layers and the paper's code do
        return layer

    @torch.no_grad()
    def take_principal(self) -> None:
        """Move the weight's largest singular values into the adapter; the base keeps the rest (PiSSA, Meng et al. 2024)."""
        u, s, vh = torch.linalg.svd(self.rows.to(torch.promote_types(self.weight.dtype, torch.float32)), full_matrices=False)
        rank = min(len(self.lora_a), len(s))
        root = (s[:rank] / self.lora_scale).sqrt()
        self.lora_a[:rank] = root[:, None] * vh[:rank]
        self.lora_b[:, :rank] = u[:, :rank] * root
        self.rows.sub_(self.lora_scale * (self.lora_b @ self.lora_a))

    def narrow(self, bits: int) -> None:
        """Keep the base's weight in bfloat16, or in 8 or 4 bits with its scales; as (outputs, …) even where it was transposed."""
        if bits == 16:
            half = self.weight.detach().bfloat16()
            del self.weight  # it never trains
            self.register_buffer("weight", half)
            return
        weight, scale = narrowed(self.rows.detach(), bits)
        del self.weight  # it never trains: a buffer of the same name replaces it
        self.register_buffer("weight", weight)
        self.register_buffer("lora_weight_scale", scale)
        levels = torch.tensor(LEVELS, device=weight.device) if bits == 4 else None
        self.register_buffer("lora_levels", levels, persistent=False)

    @property
    def rows(self) -> torch.Tensor:
        """The base's weight (outputs, inputs)."""
        return self.weight.T if hasattr(self, "lora_transposed") else self.weight

    def correction(self, x: torch.Tensor) -> torch.Tensor:
        """The term that the adapter adds to the layer's output."""
        if self.lora_dropout:
            x = dropout(x, self.lora_dropout, self.training)
        return linear(linear(x, self.lora_a), self.lora_b) * self.lora_scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kind = x.device.type
        cast = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
        dtype = torch.get_autocast_dtype(kind) if cast else x.dtype
        if "weight" in self._parameters or self.weight.dtype == dtype:
            return linear(x, self.rows, self.bias) + self.correction(x)
        product: Any = NarrowProduct.apply
        stored = (
            (self.rows, None, None)
            if self.weight.is_floating_point()
            else (self.weight, self.lora_weight_scale, self.lora_levels)
        )
        y: torch.Tensor = product(x.to(dtype), *stored) + self.correction(x)
        return y if self.bias is None else y + self.bias.to(y.dtype)


class DoraLinear(LoraLinear):
    """y = m · V x / |V| + bias, with V = W + scale · B A and the length |V| of each of its rows. m is |W| at first."""

    dora_magnitude: nn.Parameter  # (outputs,)

    @classmethod
    def of(cls, linear: nn.Module, rank: int, alpha: float, dropout: float) -> Self:
        layer = super().of(linear, rank, alpha, dropout)
        layer.dora_magnitude = nn.Parameter(row_norms(layer.rows.detach()))
        return layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        along = linear(x, self.rows) + self.correction(x)
        with torch.no_grad():  # the paper's section 4.3
            length = row_norms(self.rows + self.lora_scale * (self.lora_b @ self.lora_a))
        y = along * (self.dora_magnitude / length).to(along.dtype)
        return y if self.bias is None else y + self.bias.to(y.dtype)


def choose(model: nn.Module, example: Tree, targets: Sequence[str] | None, heads: Collection[str]) -> dict[str, nn.Linear]:
    """The Linear layers to adapt, by name. Raises UserError for a target that cannot be adapted."""
    linears = {name: m for name, m in model.named_modules() if type(m) is nn.Linear or is_transposed(m)}
    called = _called(model, example, linears)
    if targets is None:
        found = {n: m for n, m in linears.items() if n in called and not _in_any(n, heads) and not _shares(model, m)}
    else:
        check_patterns(linears, {"adapter.targets": targets}, "Linear layer")
        found = {n: m for n, m in linears.items() if _in_any(n, targets)}
        problems = [
            f"adapter.targets: {name} cannot have an adapter, because {why}: leave it out"
            for name, layer in found.items()
            if (why := _obstacle(model, name, layer, called))
        ]
        refuse(problems)
    return found


def unshared(model: nn.Module, heads: Collection[str]) -> list[str]:
    """The output layers whose weight no other layer shares."""
    modules = dict(model.named_modules())
    return [name for name in heads if name in modules and not any(_shares(model, m) for m in modules[name].modules())]


def frozen_names(model: nn.Module, also: Sequence[str]) -> list[str]:
    """The names of the model's own parameters, except matches of `also`."""
    own = [name for name, _ in model.named_parameters() if not is_adapters(name)]
    check_patterns(own, {"adapter.train_also": also}, "parameter")
    return [name for name in own if not _in_any(name, also)]


def _in_any(name: str, patterns: Collection[str]) -> bool:
    return any(matches(name, pattern) for pattern in patterns)


def _called(model: nn.Module, example: Tree, linears: dict[str, nn.Linear]) -> set[str]:
    """The layers whose forward is called. Other modules use a layer's weight directly, past its adapter."""
    called: set[str] = set()
    hooks = [m.register_forward_hook(lambda *_, name=name: called.add(name)) for name, m in linears.items()]
    run_once(model, example, hooks)
    return called


def _obstacle(model: nn.Module, name: str, layer: nn.Linear, called: Collection[str]) -> str:
    if name not in called:
        return "the model's forward does not call it, but uses its weight directly"
    return "another layer shares its weight" if _shares(model, layer) else ""


def _shares(model: nn.Module, layer: nn.Module) -> bool:
    """True if a parameter of the layer is another module's too."""
    own = {id(p) for p in layer.parameters(recurse=False)}
    return any(id(p) in own for m in model.modules() if m is not layer for p in m.parameters(recurse=False))


CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
BEFORE = "base_model.model."  # a name of the model
PARTS = {"lora_a": "lora_A.weight", "lora_b": "lora_B.weight", "dora_magnitude": "lora_magnitude_vector"}
# Settings that change the mathematics and have no counterpart here: a file must have one of these values.
PLAIN: dict[str, tuple[object, ...]] = {
    "peft_type": ("LORA",), "bias": ("none", None), "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None), "trainable_token_indices": (None,), "lora_bias": (False, None), "layer_replication": (None,),
    "init_lora_weights": (True, False, None, "gaussian", "orthogonal", "eva", "pissa"),
}  # fmt: skip


def write_peft(
    folder: Path, weights: dict[str, torch.Tensor], heads: Collection[str], base: str | None, settings: Mapping[str, object]
) -> None:
    """Write a run's adapters, and the modules `heads` that were trained as a whole. `base` names the model.

    `settings` are peft's `use_rslora` and `init_lora_weights`.
    """
    layers = [name.removesuffix(".lora_a") for name in weights if name.endswith(".lora_a")]
    first = f"{layers[0]}."
    rank = len(weights[first + "lora_a"])
    alpha = float(weights[first + "lora_scale"]) * (math.sqrt(rank) if settings["use_rslora"] else rank)
    tensors = {
        f"{BEFORE}{layer}.{theirs}": weights[f"{layer}.{ours}"].contiguous()
        for layer in layers
        for ours, theirs in PARTS.items()
        if f"{layer}.{ours}" in weights
    }
    of_heads = {name: tensor for name, tensor in weights.items() if any(name.startswith(f"{head}.") for head in heads)}
    tensors |= {BEFORE + name: tensor.contiguous() for name, tensor in of_heads.items()}
    config = {
        "peft_type": "LORA", "base_model_name_or_path": base, "task_type": None, "inference_mode": True, "r": rank,
        "lora_alpha": round(alpha, 6), "lora_dropout": 0.0, "bias": "none",
        "target_modules": layers, "modules_to_save": sorted(heads) or None, "use_dora": first + "dora_magnitude" in weights,
        "fan_in_fan_out": first + "lora_transposed" in weights, **settings,
    }  # fmt: skip
    safetensors.torch.save_file(tensors, folder / WEIGHTS, {"format": "pt"})
    files.write_json(folder / CONFIG, config)


def load_peft(model: torch.nn.Module, folder: Path, own: Mapping[str, object]) -> str:
    """Load the adapters of a folder into a model that has adapters already; `own` are the model's settings, by key.

    Return a line to log. Raises UserError.
    """
    setting = f"adapter.weights={folder}"
    if not ((folder / CONFIG).is_file() and (folder / WEIGHTS).is_file()):
        raise UserError(f"{setting} is no folder with {CONFIG} and {WEIGHTS}, as peft's save_pretrained writes them")
    try:  # it may be anybody's
        config = files.read_json(folder / CONFIG)
        odd = [f"{key}={config[key]}" for key, values in PLAIN.items() if config.get(key, values[0]) not in values]
        theirs = {
            "adapter.rank": config["r"],
            "adapter.alpha": config["lora_alpha"],
            "adapter": "dora" if config.get("use_dora") else "lora",
            "adapter.scale": "stabilized" if config.get("use_rslora") else "plain",
            "adapter.init": "pissa" if config.get("init_lora_weights") == "pissa" else "random",
        }
        heads = [f".{head}." for head in config.get("modules_to_save") or ()]
        given = {name.removeprefix(BEFORE): t for name, t in safetensors.torch.load_file(folder / WEIGHTS).items()}
    except (OSError, ValueError, AttributeError, KeyError, TypeError, MemoryError, safetensors.SafetensorError) as error:
        raise UserError(f"{setting} is not in the format of peft's save_pretrained ({type(error).__name__}: {error})") from None
    if odd:
        raise UserError(f"{setting} has {', '.join(odd)}, which adapter=lora and adapter=dora do not know: save it merged")
    if other := [f"{key}={value}" for key, value in theirs.items() if value != own[key]]:
        raise UserError(f"{setting} was trained with {' '.join(other)}: set that")
    layers = {name: m for name, m in model.named_modules() if isinstance(m, LoraLinear)}
    wanted = {
        f"{layer}.{part}": getattr(m, ours) for layer, m in layers.items() for ours, part in PARTS.items() if hasattr(m, ours)
    }
    parameters = dict(model.named_parameters())
    wanted |= {name: parameters[name] for name in given if name in parameters and any(head in f".{name}" for head in heads)}
    unlike = sorted(wanted.keys() ^ given.keys())
    unlike = unlike or [n for n, t in given.items() if t.shape != wanted[n].shape or not t.float().isfinite().all()]
    if unlike:
        raise UserError(
            f"{setting} does not fit the adapters of this model: {', '.join(unlike[:4])}: in only one of the two, of another "
            "shape, or not finite: set adapter.targets to its target_modules, and the model that it was trained on"
        )
    with torch.no_grad():
        for name, parameter in wanted.items():
            parameter.copy_(given[name])
    return f"adapters of {folder}: {len(layers)} layers"
