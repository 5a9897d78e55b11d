"""The loss of a large vocabulary, of all logits and in parts: the peak of what its tensors take, forward and backward.

    python -m bench.vocabulary

Peaks are of the storages that operations make, without weight and inputs: those of tensors without values, so that it takes
no time. `--rounds` measures CPU seconds of float32 too, in turns.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from bench.harness import parse, write
from drivetrain.core.step.trees import leaves
from drivetrain.loss.language import PART, _token_loss
from drivetrain.loss.parted_head import PartedHead, Tail

CLASSES, WIDTH, TOKENS = 50_304, 768, 4_096


class Peak(TorchDispatchMode):
    """Adds up the bytes of the storages that operations make, while they live."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self.known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {id(t.untyped_storage()) for t in leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        out = func(*args, **(kwargs or {}))
        for t in leaves(out):
            if isinstance(t, torch.Tensor) and (key := id(storage := t.untyped_storage())) not in self.known | given:
                self.known.add(key)
                self.now += storage.nbytes()
                weakref.finalize(storage, self._freed, key, storage.nbytes())
        self.most = max(self.most, self.now)
        return out

    def _freed(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.now -= size


def step(how: str, dtype: torch.dtype) -> tuple[float, float]:
    """Forward and backward of an output layer and its loss: the peak in MiB, and CPU seconds."""
    x, y = torch.randn(TOKENS, WIDTH, requires_grad=True), torch.zeros(TOKENS, dtype=torch.int64)
    layer = torch.nn.Linear(WIDTH, CLASSES, bias=False)
    head = PartedHead(layer, Tail())
    layer.register_forward_pre_hook(head.before)
    layer.register_forward_hook(head.after)
    began = time.process_time()
    with Peak() as peak:
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
            loss = WAYS[how](head, x, y)
        loss.backward()
    return peak.most / 2**20, time.process_time() - began


def _whole(head: PartedHead, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return _token_loss(head.layer(x), y, "mean")


def _softmax_in_parts(head: PartedHead, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """What `loss.chunks=8` was: the softmax again in the backward, of logits that are there as a whole."""
    rows = zip(head.layer(x).chunk(8), y.chunk(8), strict=True)
    return torch.stack([checkpoint(_token_loss, *row, "sum", use_reentrant=False) for row in rows]).sum() / len(y)


def _parted(head: PartedHead, x: torch.Tensor, y: torch.Tensor, parts: int) -> torch.Tensor:
    sums, output = head.sums(lambda: head.layer(x), y, parts, 0.0, 0.0)
    return (sums[0] + output.sum()) / len(y)


AUTO = -(-CLASSES * TOKENS // PART)
WAYS: dict[str, Callable[..., torch.Tensor]] = {
    "all logits": _whole,
    "before: the softmax in 8 parts": _softmax_in_parts,
    **{f"in {parts} parts": partial(_parted, parts=parts) for parts in (8, AUTO, 32)},
}


def main(argv: Sequence[str] | None = None) -> None:
    args = parse(__doc__, "vocabulary-cpu.json", argv, rounds=0)
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    for dtype in (torch.float32, torch.bfloat16):
        with FakeTensorMode():
            rows += [{"way": how, "dtype": str(dtype)[6:], "peak_mib": round(step(how, dtype)[0]), "cpu_s": []} for how in WAYS]
    for _ in range(args.rounds):  # in turns
        for row in rows[: len(WAYS)]:
            row["cpu_s"].append(round(step(row["way"], torch.float32)[1], 1))
    sizes = {"classes": CLASSES, "width": WIDTH, "tokens": TOKENS}
    write(args.out, {"sizes": sizes, "rows": rows})
    for row in rows:
        print(row)


if __name__ == "__main__":
    main()
