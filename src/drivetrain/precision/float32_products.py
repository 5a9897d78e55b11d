"""How torch computes products of float32 tensors: in float32, or with inputs rounded to TensorFloat-32 or bfloat16."""

from __future__ import annotations

from contextlib import ExitStack, suppress
from typing import Any

from drivetrain.core.lazy import torch


def set_until_exit(on_exit: ExitStack, matmul: str, tf32_convolutions: bool) -> None:
    """Set it for the process, until `on_exit` is closed: another run in this process finds torch as it was.

    torch has two sets of names for these settings. The older names, which are used here, write both sets; the newer ones
    (fp32_precision) write only their own, after which reading an older name raises an error wherever the two disagree.
    """
    on_exit.callback(_restore, _older_settings(), [part.fp32_precision for part in _parts()])
    torch.set_float32_matmul_precision(matmul)
    torch.backends.cudnn.allow_tf32 = tf32_convolutions


def are_rounded(device: torch.device) -> bool:
    """Return whether matrix products on this device round their inputs: computed once, because CPUs and GPUs differ."""
    x = torch.full((256, 256), 1.0 + 2.0**-20, device=device)
    return not torch.equal(x @ torch.eye(256, device=device), x)


def _parts() -> tuple[Any, ...]:
    """Return the holders of the newer settings that the older ones write."""
    cudnn, mkldnn = (getattr(torch.backends, name) for name in ("cudnn", "mkldnn"))  # torch's types do not know their parts
    return torch.backends.cuda.matmul, cudnn.conv, cudnn.rnn, mkldnn.matmul


def _older_settings() -> tuple[str, bool]:
    """Return the older settings, or torch's defaults if the process uses the newer ones."""
    with suppress(RuntimeError):
        return torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    return "highest", True


def _restore(older: tuple[str, bool], newer: list[str]) -> None:
    torch.set_float32_matmul_precision(older[0])
    torch.backends.cudnn.allow_tf32 = older[1]
    for part, value in zip(_parts(), newer, strict=True):
        if part.fp32_precision != value:
            part.fp32_precision = value
