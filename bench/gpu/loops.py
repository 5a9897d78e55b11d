"""The variants of a speed row: a naive loop, a hand-tuned one, timm's, and ours. All train the same network on the same data.

A variant calls `sync` at the end of each block, when the device has done all its work.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from bench import harness
from bench.gpu import campaign
from bench.harness import BlockSync

ENDLESS = 1_000_000  # epochs; a variant ends after its last block
LR, MOMENTUM, DECAY, ADAMW_LR = 0.01, 0.9, 5e-4, 3e-4


@dataclass(frozen=True)
class Work:
    """A network, and what one block of it is."""

    network: tuple[str, ...]  # our overrides that choose it
    shape: tuple[int, ...]
    classes: int
    batch: int
    steps: int  # updates of a block
    device: str = "cuda"
    tokens: bool = False
    conv: bool = False  # channels_last is of use
    compile: bool = True
    half: bool = True  # in bfloat16
    adamw: bool = False  # in place of SGD, as language models have it

    @property
    def samples(self) -> int:
        """Samples of the training set: a block is one epoch."""
        return self.batch * self.steps


def base_overrides(work: Work) -> list[str]:
    """The overrides that all of our variants have in common."""
    shape = ",".join(map(str, work.shape))
    sgd = ["optimizer=sgd", f"optimizer.lr={LR}", f"optimizer.momentum={MOMENTUM}"]
    update = ["optimizer=adamw", f"optimizer.lr={ADAMW_LR}"] if work.adamw else sgd
    text = ["data.tokens=true", "loss=next_token"] if work.tokens else []
    return [
        *work.network, *text, "data=synthetic", f"data.shape=[{shape}]", f"data.classes={work.classes}",
        f"data.samples={work.samples}", "data.test_samples=1", *update, f"optimizer.weight_decay={DECAY}",
        "scheduler=constant", "saving=none",
        f"epochs={ENDLESS}", f"evaluate_every={ENDLESS}", f"batch.global_batch={work.batch}", f"log_every={work.steps}",
        f"runtime.device={work.device}", *(["runtime.threads=1"] if work.device == "cpu" else []),
    ]  # fmt: skip


def fast_overrides(work: Work) -> list[str]:
    """bfloat16 or TensorFloat-32, as all variants, and channels_last for convolutions. The update is fused where there is one."""
    layout = ["surgery=[channels_last]"] if work.conv else []
    return [f"precision={'bf16' if work.half else 'tf32'}", *layout]


def overrides(work: Work, more: Sequence[str]) -> list[str]:
    """The overrides of a variant of ours, each key once."""
    words = campaign.distinct([*base_overrides(work), *more])
    made = "data=synthetic" in words
    return [w for w in words if made or not w.startswith(("data.shape", "data.classes", "data.samples", "data.test_samples"))]


def ours(work: Work, more: Sequence[str], sync: BlockSync) -> None:
    """drivetrain's own `fit`; a block ends with the training record of its last update."""
    harness.ours(overrides(work, more), work.steps, lambda _: peak_memory(work), sync)


def naive(work: Work, sync: BlockSync) -> None:
    """The loop of a first tutorial: float32, eager, an update that loops over the parameters."""
    import torch

    x, y, model = start(work)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM, weight_decay=DECAY, foreach=False)
    for blocks in blocks_of(work, sync):
        for picked in blocks:
            optimizer.zero_grad(set_to_none=False)
            loss_of(model(x[picked]), y[picked]).backward()
            optimizer.step()


def hand(work: Work, inside: bool, bytes_normalised: str, sync: BlockSync) -> None:
    """The loop that a good engineer writes by hand: bfloat16 or TensorFloat-32, channels_last, compiled, fused.

    `inside` compiles the loss with the model, and the update. Images are bytes where `bytes_normalised` says that they are
    normalised "before" the compiled model or "inside" it; "" for floats.
    """
    import torch

    torch.backends.cuda.matmul.allow_tf32 = True
    torch.backends.cudnn.benchmark = True
    x, y, model = start(work, work.conv)
    compiled = torch.compile if work.compile else lambda function: function
    kind = {"foreach": True} if inside else {"fused": True}
    sgd = partial(torch.optim.SGD, lr=LR, momentum=MOMENTUM, nesterov=True)
    adamw = partial(torch.optim.AdamW, lr=ADAMW_LR)
    optimizer = (adamw if work.adamw else sgd)(model.parameters(), weight_decay=DECAY, **kind)
    update = compiled(optimizer.step) if inside else optimizer.step
    whole = (lambda x: model(normalised(x))) if bytes_normalised == "inside" else model
    forward = whole if inside else compiled(whole)
    x = as_bytes(x) if bytes_normalised else x

    def loss_on(x: Any, y: Any) -> Any:
        return loss_of(forward(x), y)

    loss_on = compiled(loss_on) if inside else loss_on
    for blocks in blocks_of(work, sync):
        for picked in blocks:
            batch = x[picked].contiguous(memory_format=torch.channels_last) if work.conv else x[picked]
            batch = normalised(batch) if bytes_normalised == "before" else batch
            with torch.autocast(work.device, torch.bfloat16, enabled=work.half):
                loss = loss_on(batch, y[picked])
            loss.backward()
            update()
            optimizer.zero_grad()


def timm(work: Work, fast: bool, sync: BlockSync) -> None:
    """timm's loop, as its train.py puts it together with --amp --amp-dtype bfloat16: its optimizer, its prefetching loader.

    The loader gets uint8 batches that are on the device already, so that no variant reads data. `fast` adds what train.py has
    for speed: --channels-last --torchcompile --opt-kwargs fused=True.
    """
    import torch
    from timm.data.loader import PrefetchLoader
    from timm.optim import create_optimizer_v2

    torch.backends.cuda.matmul.allow_tf32 = True
    torch.backends.cudnn.benchmark = True
    x, y, model = start(work)
    if fast and work.conv:
        model = model.to(memory_format=torch.channels_last)
    options = {"fused": True} if fast else {}
    optimizer = create_optimizer_v2(model, opt="sgd", lr=LR, momentum=MOMENTUM, weight_decay=DECAY, **options)
    forward = torch.compile(model) if fast and work.compile else model
    autocast = partial(torch.autocast, device_type=work.device, dtype=torch.bfloat16, enabled=work.half)
    source = Batches(work, x if work.tokens else as_bytes(x), y)
    loader: Any = source if work.tokens else PrefetchLoader(source, channels=work.shape[0], device=torch.device(work.device))
    model.train()
    for _ in blocks_of(work, sync):
        for batch, target in loader:
            if fast and work.conv:
                batch = batch.contiguous(memory_format=torch.channels_last)
            with autocast():
                loss = loss_of(forward(batch), target)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()


def as_bytes(x: Any) -> Any:
    """Images (n, c, h, w) of standardised floats as bytes."""
    return x.mul(64).add(128).clamp(0, 255).byte()


def normalised(x: Any) -> Any:
    """The floats again: what `as_bytes` made."""
    return (x - 128.0) / 64.0


class Batches:
    """An epoch of shuffled batches (n, …) and targets (n,)."""

    def __init__(self, work: Work, x: Any, y: Any) -> None:
        self.work, self.x, self.y = work, x, y

    def __len__(self) -> int:
        return self.work.steps

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        for picked in shuffled(self.work):
            yield self.x[picked], self.y[picked]


def start(work: Work, channels_last: bool = False) -> tuple[Any, Any, Any]:
    """The data, on the device, and the network, both those of our variants."""
    import torch

    device, run = torch.device(work.device), _run(work)
    torch.manual_seed(0)
    data, model = run.data.load(device).train, run.model.create(work.shape, work.classes).to(device)
    x, y = data.x, data.y
    if channels_last:
        model, x = model.to(memory_format=torch.channels_last), x.contiguous(memory_format=torch.channels_last)
    return x, y, model


def blocks_of(work: Work, sync: BlockSync) -> Iterator[Iterator[Any]]:
    """For each block the indices of its batches, without end."""
    sync.watch(lambda: peak_memory(work))
    sync(0)
    for number in range(1, ENDLESS):
        yield shuffled(work)
        sync(number * work.steps)


def shuffled(work: Work) -> Iterator[Any]:
    """An epoch's indices, a batch at a time, on the device."""
    import torch

    yield from torch.randperm(work.samples).to(work.device).split(work.batch)


def loss_of(output: Any, target: Any) -> Any:
    """Cross entropy of logits (n, classes) or (n, length, classes)."""
    import torch

    return torch.nn.functional.cross_entropy(output.flatten(0, -2), target.flatten())


def peak_memory(work: Work) -> float:
    """Bytes at this variant's peak: the marker that variants here hand over at their end."""
    import torch

    from drivetrain.core.machine.device import peak_memory as peak

    return float(peak(torch.device(work.device)))


def count_flops(work: Work) -> dict[str, Any]:
    """In a child: FLOP of one training sample."""
    import torch

    batch = torch.zeros(2, *work.shape, dtype=torch.int64 if work.tokens else torch.float32)
    targets = torch.zeros(batch.shape if work.tokens else (2,), dtype=torch.int64, device="meta")
    model = _run(work).model.create(work.shape, work.classes)
    return {"flops": flops_per_sample(model, batch, lambda output: loss_of(output, targets))}


def _run(work: Work) -> Any:
    from drivetrain.launch import launcher

    return launcher.prepare(base_overrides(work)).run


# --- what a device can do at most, by its data sheet, and measured ---
# The share of it that a model's own operations reach is the MFU (model FLOPs utilization, Chowdhery et al. 2022, PaLM).


def data_sheet_tflops(device_name: str) -> float | None:
    """Dense 16-bit TFLOP/s by the data sheet (float16 before Ampere); None for a device that the table does not have."""
    from drivetrain.engine.flops import from_table

    return from_table(device_name, "bfloat16") or from_table(device_name, "float16")


def ceilings(device: str) -> dict[str, float]:
    """In a child, measured: TFLOP/s of large matrix products in bfloat16 and float32, GB/s of copies (read and written)."""
    import torch

    from drivetrain.engine.flops import measured

    elements = 2**30 if device == "cuda" else 2**22
    source = torch.randint(255, (elements,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return {
        "bf16_matmul_tflops": measured(torch.device(device), "bfloat16") / 1e12,
        "fp32_matmul_tflops": measured(torch.device(device), "float32") / 1e12,
        "copy_gb_per_s": 2 * elements / _best_s(lambda: target.copy_(source)) / 1e9,
    }


def _best_s(run: Callable[[], Any], repeats: int = 5, times: int = 10) -> float:
    """The shortest mean of `repeats` calls."""
    taken = []
    for _ in range(times):
        harness.synchronize()
        began = time.perf_counter()
        for _ in range(repeats):
            run()
        harness.synchronize()
        taken.append((time.perf_counter() - began) / repeats)
    return min(taken[1:])


def flops_per_sample(model: Any, batch: Any, loss: Callable[[Any], Any]) -> float:
    """FLOP of one sample's forward and backward by torch's counter, on fake tensors: of matrix products and convolutions."""
    from torch.utils.flop_counter import FlopCounterMode

    model, batch = model.to("meta"), batch.to("meta")
    with FlopCounterMode(display=False) as counter:
        loss(model(batch)).backward()
    return counter.get_total_flops() / len(batch)
