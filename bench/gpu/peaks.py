"""What a device can do at most: by its data sheet, and measured.

The share of it that a model's own operations reach is the MFU (model FLOPs utilization, Chowdhery et al. 2022, PaLM).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


def data_sheet_tflops(device_name: str) -> float | None:
    """Dense 16-bit TFLOP/s by the data sheet (float16 before Ampere); None for a device that the table does not have."""
    from drivetrain.core.peak_flops import from_table

    return from_table(device_name, "bfloat16") or from_table(device_name, "float16")


def ceilings(device: str) -> dict[str, float]:
    """In a child, measured: TFLOP/s of large matrix products in bfloat16 and float32, GB/s of copies (read and written)."""
    import torch

    size, elements = (8192, 2**30) if device == "cuda" else (256, 2**22)
    found = {}
    for name, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32)):
        a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
        found[f"{name}_matmul_tflops"] = 2 * size**3 / _best_s(lambda a=a, b=b: a @ b) / 1e12
    source = torch.randint(255, (elements,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return found | {"copy_gb_per_s": 2 * elements / _best_s(lambda: target.copy_(source)) / 1e9}


def _best_s(run: Callable[[], Any], repeats: int = 5, times: int = 10) -> float:
    """The shortest mean of `repeats` calls."""
    taken = []
    for _ in range(times):
        synchronize()
        began = time.perf_counter()
        for _ in range(repeats):
            run()
        synchronize()
        taken.append((time.perf_counter() - began) / repeats)
    return min(taken[1:])


def synchronize() -> None:
    """Wait until the CUDA device, if there is one, has done all its work."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def adamw_ms(device: str, rounds: int) -> dict[str, float]:
    """In a child: milliseconds of one AdamW update over ViT-B's parameters, in a loop, foreach and fused, interleaved."""
    import timm
    import torch

    from bench import harness

    shapes = [p.shape for p in timm.create_model("vit_base_patch16_224" if device == "cuda" else "test_vit").parameters()]
    taken: dict[str, list[float]] = {}
    arms = {}
    for kind, options in (("loop", {"foreach": False}), ("foreach", {"foreach": True}), ("fused", {"fused": True})):
        parameters = [torch.randn(s, device=device, requires_grad=True) for s in shapes]
        for p in parameters:
            p.grad = torch.randn_like(p)
        arms[kind] = torch.optim.AdamW(parameters, **options)
    for _ in range(rounds):
        for kind, optimizer in arms.items():
            taken.setdefault(kind, []).append(1e3 * _best_s(optimizer.step, times=3))
    return {kind: harness.spread(times)["median"] for kind, times in taken.items()}


def flops_per_sample(model: Any, batch: Any, loss: Callable[[Any], Any]) -> float:
    """FLOP of one sample's forward and backward by torch's counter, on fake tensors: of matrix products and convolutions."""
    from torch.utils.flop_counter import FlopCounterMode

    model, batch = model.to("meta"), batch.to("meta")
    with FlopCounterMode(display=False) as counter:
        loss(model(batch)).backward()
    return counter.get_total_flops() / len(batch)
