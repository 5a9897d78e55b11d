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
)  # next to a layer's weight, under its name

FACTOR = "*.lora_b"  # the names of an adapter's factors that are 0 at first

# The 16 numbers that 4 bits encode: quantiles of the normal distribution, and 0 (NF4 of QLoRA, Dettmers et al. 2023).
LEVELS = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
GROUP = 64  # numbers of 4 bits with one scale


def is_adapters(name: str) -> bool:
    """True if a tensor of this name is a part of an adapter."""
    return name.rpartition(".")[2] in TENSORS


def row_norms(weight: torch.Tensor) -> torch.Tensor:
    """The length of each row; the smallest positive number for a row of zeros, so that a division works."""
    norms: torch.Tensor = torch.linalg.vector_norm(weight, dim=1)
    return norms.clamp(min=torch.finfo(weight.dtype).tiny)


def narrowed(rows: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight (outputs, inputs) in 8 or 4 bits and its scales: (outputs, 1), or one for each GROUP of a row's numbers.

    8 bits are int8. With 4 bits a byte (uint8) has two numbers, each an index of LEVELS.
    """
    size = rows.shape[1] if bits == 8 else GROUP
    groups = torch.nn.functional.pad(rows, (0, -rows.shape[1] % size)).reshape(len(rows), -1, size)
    scale = (groups.abs().amax(2, keepdim=True) / (127.5 if bits == 8 else 1.0)).clamp(min=torch.finfo(rows.dtype).tiny)
    groups = groups * (1 / scale)
    if bits == 8:
        return groups.round().clamp(-128, 127).to(torch.int8).flatten(1), scale.squeeze(2)
    levels = torch.tensor(LEVELS, device=rows.device)
    codes = torch.bucketize(groups.float(), (levels[1:] + levels[:-1]) / 2).to(torch.uint8).flatten(1)
    return codes[:, ::2] | codes[:, 1::2] << 4, scale.squeeze(2)


def widened(
    weight: torch.Tensor, scale: torch.Tensor | None, levels: torch.Tensor | None, inputs: int, dtype: torch.dtype
) -> torch.Tensor:
    """The inverse of `narrowed`: the weight (outputs, inputs) in `dtype`; `levels` belong to 4 bits.

    A weight in 16 bits has no scale.
    """
    if scale is None:
        return weight.to(dtype)
    if levels is not None:
        weight = levels[torch.stack([weight & 15, weight >> 4], 2).flatten(1).int()]
    groups: torch.Tensor = weight.to(dtype).reshape(*scale.shape, -1) * scale.to(dtype).unsqueeze(2)
    return groups.flatten(1)[:, :inputs]


def merged(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The weights with their adapters merged in, as in the plain model; without adapters the weights themselves."""
    plain = {name: tensor for name, tensor in weights.items() if not is_adapters(name)}
    for layer in (name.removesuffix("lora_b") for name in weights if name.rpartition(".")[2] == "lora_b"):
        a, b, scale = (weights[layer + part].double() for part in ("lora_a", "lora_b", "lora_scale"))
        transposed, weight = f"{layer}lora_transposed" in weights, weights[f"{layer}weight"]
        if (steps := weights.get(f"{layer}lora_weight_scale")) is not None:
            levels = torch.tensor(LEVELS) if weight.dtype == torch.uint8 else None
            whole = widened(weight, steps, levels, a.shape[1], torch.float64)
        else:
            whole = weight.T.double() if transposed else weight.double()
        whole = whole + scale * (b @ a)
        if (magnitude := weights.get(f"{layer}dora_magnitude")) is not None:
            whole *= (magnitude.double() / row_norms(whole)).unsqueeze(1)
        dtype = weights[f"{layer}lora_a"].dtype
        plain[f"{layer}weight"] = (whole.T.contiguous() if transposed else whole).to(dtype)
    return plain
