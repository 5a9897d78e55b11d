"""Adapters in the files of peft: a folder with adapter_config.json and adapter_model.safetensors."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import safetensors.torch
import torch

from drivetrain.adapter.layers import LoraLinear
from drivetrain.core import files
from drivetrain.core.errors import UserError

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
BEFORE = "base_model.model."  # a name of the model
PARTS = {"lora_a": "lora_A.weight", "lora_b": "lora_B.weight", "dora_magnitude": "lora_magnitude_vector"}
# Settings that change the mathematics, and have no counterpart here: a file must have one of these values.
PLAIN: dict[str, tuple[object, ...]] = {
    "peft_type": ("LORA",), "bias": ("none", None), "use_rslora": (False, None), "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None), "trainable_token_indices": (None,), "lora_bias": (False, None), "layer_replication": (None,),
}  # fmt: skip


def write(folder: Path, weights: dict[str, torch.Tensor], heads: Collection[str], base: str | None) -> None:
    """Write the adapters among a run's weights, and the modules `heads` that trained as a whole. `base` names the model."""
    layers = [name.removesuffix(".lora_a") for name in weights if name.endswith(".lora_a")]
    first = f"{layers[0]}."
    rank = len(weights[first + "lora_a"])
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
        "lora_alpha": round(float(weights[first + "lora_scale"]) * rank, 6), "lora_dropout": 0.0, "bias": "none",
        "target_modules": layers, "modules_to_save": sorted(heads) or None, "use_dora": first + "dora_magnitude" in weights,
        "fan_in_fan_out": first + "lora_transposed" in weights,
    }  # fmt: skip
    safetensors.torch.save_file(tensors, folder / WEIGHTS, {"format": "pt"})
    files.write_json(folder / CONFIG, config)


def load_into(model: torch.nn.Module, folder: Path, rank: int, alpha: float, dora: bool) -> str:
    """Load the adapters of a folder into a model whose layers have theirs already; return a line to log. Raises UserError."""
    setting = f"adapter.weights={folder}"
    if not ((folder / CONFIG).is_file() and (folder / WEIGHTS).is_file()):
        raise UserError(f"{setting} is no folder with {CONFIG} and {WEIGHTS}, as peft's save_pretrained writes them")
    config = files.read_json(folder / CONFIG)
    if odd := [f"{key}={config[key]}" for key, values in PLAIN.items() if config.get(key, values[0]) not in values]:
        raise UserError(f"{setting} has {', '.join(odd)}, which adapter=lora and adapter=dora do not know: save it merged")
    own = {"adapter.rank": rank, "adapter.alpha": alpha, "adapter": "dora" if dora else "lora"}
    theirs = {
        "adapter.rank": config["r"],
        "adapter.alpha": config["lora_alpha"],
        "adapter": "dora" if config.get("use_dora") else "lora",
    }
    if other := [f"{key}={value}" for key, value in theirs.items() if value != own[key]]:
        raise UserError(f"{setting} was trained with {' '.join(other)}: set that")
    given = {name.removeprefix(BEFORE): t for name, t in safetensors.torch.load_file(folder / WEIGHTS).items()}
    layers = {name: m for name, m in model.named_modules() if isinstance(m, LoraLinear)}
    wanted = {
        f"{layer}.{part}": getattr(m, ours) for layer, m in layers.items() for ours, part in PARTS.items() if hasattr(m, ours)
    }
    parameters = dict(model.named_parameters())
    wanted |= {name: parameters[name] for name in given if name in parameters}
    unlike = sorted(wanted.keys() ^ given.keys()) or [n for n, t in given.items() if t.shape != wanted[n].shape]
    if unlike:
        raise UserError(
            f"{setting} does not fit the adapters of this model: {', '.join(unlike[:4])}: in one of both alone, "
            "or of another shape: set adapter.targets to its target_modules, and the model that it was trained on"
        )
    with torch.no_grad():
        for name, parameter in wanted.items():
            parameter.copy_(given[name])
    return f"adapters of {folder}: {len(layers)} layers"
