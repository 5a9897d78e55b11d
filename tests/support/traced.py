"""Small pictures for runs that are killed: `data=own data.target=traced.Pictures trust=[traced]`, with this file beside the run.

Where TRACED is in the environment, importing this asks the kernel to halt the process at the calls that change files, and at
no other, for the tracer of bench.syscalls. Without a tracer these calls fail, so nothing else may set it.
"""

import ctypes
import hashlib
import json
import os
import struct

import torch
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

CALLS = (1, 2, 18, 20, 74, 75, 76, 77, 82, 83, 84, 85, 87, 257, 258, 263, 264, 285, 316)  # as bench.syscalls names them
TRACE, ALLOW = 0x7FF00000, 0x7FFF0000


def halt_at_calls() -> None:
    """Install a filter of system calls (seccomp) in this process, all its threads, and all that it starts."""
    rules = [(0x20, 0, 0, 0)]  # load the call's number
    rules += [(0x15, len(CALLS) - at, 0, number) for at, number in enumerate(CALLS)]  # jump to the last rule where it is this one
    rules += [(0x06, 0, 0, ALLOW), (0x06, 0, 0, TRACE)]
    program = ctypes.create_string_buffer(b"".join(struct.pack("<HBBI", *rule) for rule in rules))
    header = ctypes.create_string_buffer(struct.pack("<HxxxxxxQ", len(rules), ctypes.addressof(program)))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(38, 1, 0, 0, 0) or libc.syscall(317, 1, 1, ctypes.byref(header)):
        raise OSError(ctypes.get_errno(), "no filter of system calls")


if os.environ.pop("TRACED", ""):
    halt_at_calls()


HASHED = "bf16_pure"  # the precision whose gradients are hashed
HASHES = "gradients-{}.jsonl"  # beside the run, of each process


def own_part(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank has of a tensor."""
    return tensor.detach().to_local() if isinstance(tensor, DTensor) else tensor.detach()


def hash_gradients(optimizer: torch.optim.Optimizer, *_: object) -> None:
    """Append to a file the hashes of an optimizer's weights and gradients, before it steps: equal weights tell equal updates."""
    weights = [each for group in optimizer.param_groups for each in group["params"]]
    sums = [
        [hashlib.sha256(own_part(each).contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()[:16] for each in tensors]
        for tensors in (weights, [each.grad for each in weights if each.grad is not None])
    ]
    with open(HASHES.format(os.getpid()), "a", encoding="utf-8") as file:
        file.write(json.dumps(dict(zip(("weights", "gradients"), sums, strict=True))) + "\n")


if os.environ.get("HASHES") == "1":
    register_optimizer_step_pre_hook(hash_gradients)


class Pictures(torch.utils.data.Dataset[tuple[torch.Tensor, int]]):
    """Noise of 4 by 4 pixels, brighter by its class."""

    classes = ("a", "b", "c")

    def __init__(self, train: bool) -> None:
        draw = torch.Generator().manual_seed(int(train))
        self.pixels = torch.randint(0, 100, (60 if train else 12, 1, 4, 4), generator=draw, dtype=torch.uint8)

    def __len__(self) -> int:
        return len(self.pixels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.pixels[index] + 50 * (index % 3), index % 3
