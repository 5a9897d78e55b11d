"""The tensors of low-rank adapters in a file of weights, and how they are merged into plain weights."""

from __future__ import annotations

from drivetrain.core.lazy import torch

TENSORS = (
    "lora_a",
    "lora_b",
    "lora_scale",
    "lora_transposed",
    "lora_weight_scale",
    "dora_magnitude",
)  # beside a layer's weight, under its name


def is_adapters(name: str) -> bool:
    """Whether a tensor of this name is a part of an adapter."""
    return name.rpartition(".")[2] in TENSORS


def row_norms(weight: torch.Tensor) -> torch.Tensor:
    """The length of each row; the smallest number for a row of zeros, so that it can be divided by."""
    norms: torch.Tensor = torch.linalg.vector_norm(weight, dim=1)
    return norms.clamp(min=torch.finfo(weight.dtype).tiny)


def merged(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The weights with their adapters merged in, as the plain model has them; they themselves where there is none."""
    plain = {name: tensor for name, tensor in weights.items() if not is_adapters(name)}
    for layer in (name.removesuffix("lora_b") for name in weights if name.rpartition(".")[2] == "lora_b"):
        weight, a, b, scale = (weights[layer + part].double() for part in ("weight", "lora_a", "lora_b", "lora_scale"))
        transposed = f"{layer}lora_transposed" in weights
        whole = weight.T if transposed else weight
        if (steps := weights.get(f"{layer}lora_weight_scale")) is not None:
            whole = whole * steps.double().unsqueeze(1)
        whole = whole + scale * (b @ a)
        if (magnitude := weights.get(f"{layer}dora_magnitude")) is not None:
            whole *= (magnitude.double() / row_norms(whole)).unsqueeze(1)
        plain[f"{layer}weight"] = (whole.T.contiguous() if transposed else whole).to(
            weights[f"{layer}{'weight' if steps is None else 'lora_a'}"].dtype
        )
    return plain
