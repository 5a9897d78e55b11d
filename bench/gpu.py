"""One command for a machine with a CUDA device: the CUDA tests, training speed beside other loops, and the ladder.

`python -m bench.gpu [--smoke] [--minutes 9] [--rows resnet50,…] [--out FILE]`

Rows are networks; the arms of a row are live processes on the same device that run short blocks in turn, so that what drifts
cancels: a naive torch loop, a hand-tuned one, ours, Lightning and accelerate (those at the hand-tuned settings). The
ladder is our own loop from the naive recipe to the fast one, a technique at a time. Each figure stands beside the
ceilings of this device, measured here: matrix products in bfloat16 and copies of memory.

`--smoke` runs all of it in small on a CPU: does it still work?
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from bench import harness
from bench.harness import BlockSync

EPOCHS = 1_000_000  # arms end after their last block


@dataclass(frozen=True)
class Work:
    """A network and what one block of it is."""

    name: str
    model: tuple[str, ...]  # our overrides that choose it
    shape: tuple[int, ...]
    classes: int
    batch: int
    steps: int  # of a block
    device: str = "cuda"
    conv: bool = True  # channels-last is of use
    compile: bool = True

    @property
    def samples(self) -> int:
        """Samples of the training set, on the device."""
        return self.batch * self.steps


def timm_row(name: str, batch: int, steps: int, conv: bool) -> Work:
    """A network of timm's at 224 × 224."""
    return Work(name, ("model=timm", f"model.name={name}"), (3, 224, 224), 1000, batch, steps, conv=conv)


ROWS = {
    "resnet50": timm_row("resnet50", 256, 12, True),
    "vit_b": timm_row("vit_base_patch16_224", 256, 8, False),
    "convnext_b": timm_row("convnext_base", 256, 6, True),
    "vit_s": timm_row("vit_small_patch16_224", 256, 12, False),
    "launch_bound": Work("resnet9", ("model=resnet9", "model.width=16"), (3, 32, 32), 10, 64, 60),
}
SMOKE = {"launch_bound": Work("resnet9", ("model=resnet9", "model.width=4"), (3, 16, 16), 10, 8, 2, "cpu", compile=False)}
LADDER = (  # each rung adds its overrides to those before it
    ("naive", ("recipe=naive",)),
    ("fused update", ("optimizer.fused=true", "runtime.zero_grad=none")),
    ("cudnn autotuner", ("runtime.cudnn_benchmark=true",)),
    ("bf16", ("precision=bf16",)),
    ("channels last", ("surgery=[channels_last]",)),
    ("compiled", ("compile=inductor",)),
)


def base_overrides(work: Work) -> list[str]:
    """What all our arms of a row share."""
    shape = ",".join(map(str, work.shape))
    return [
        *work.model, "data=synthetic", f"data.shape=[{shape}]", f"data.classes={work.classes}", f"data.samples={work.samples}",
        "data.test_samples=1", "optimizer=sgd", "optimizer.lr=0.01", "scheduler=constant", "saving=none", f"epochs={EPOCHS}",
        f"evaluate_every={EPOCHS}", f"batch.global_batch={work.batch}", f"log_every={work.steps}",
        f"runtime.device={work.device}",
    ]  # fmt: skip


def tuned_overrides(work: Work) -> list[str]:
    """The settings of the hand-tuned loop, as overrides."""
    overrides = ["precision=bf16", "compile=inductor" if work.compile else "compile=none"]
    return [*overrides, "surgery=[channels_last]"] if work.conv else overrides


def ours(work: Work, overrides: Sequence[str], sync: BlockSync) -> None:
    """drivetrain's own `fit`; a block ends where its last update is logged."""
    from drivetrain.core.context import BuildContext
    from drivetrain.core.world import World
    from drivetrain.engine import build
    from drivetrain.launch import launcher

    job = launcher.prepare(_last_of_each_key([*base_overrides(work), *overrides]))
    sinks: list[Any] = []
    with tempfile.TemporaryDirectory() as folder:
        trainer = build.build(BuildContext(job.run, World(), Path(folder)), sinks)
        sync.watch(peak_memory)
        sinks.append(_BlockSink(sync))
        sync(0)
        trainer.fit()


def _last_of_each_key(overrides: Sequence[str]) -> list[str]:
    return list({override.partition("=")[0]: override for override in overrides}.values())


class _BlockSink:
    def __init__(self, sync: BlockSync) -> None:
        self.sync = sync

    def log(self, record: dict[str, Any]) -> None:
        _synchronize()
        self.sync(record["update"])


def peak_memory() -> float:
    """Bytes at this arm's peak: the marker that arms here hand over at their end."""
    import torch

    from drivetrain.core.device import peak_memory as peak

    return peak(torch.device("cuda" if torch.cuda.is_available() else "cpu"))


def _synchronize() -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def start(work: Work, channels_last: bool, fused: bool | None) -> tuple[Any, Any, Any, Any]:
    """Data on the device, the same network as ours, its optimizer."""
    import torch

    from drivetrain.launch import launcher

    device = torch.device(work.device)
    job = launcher.prepare(base_overrides(work))
    model = job.run.model.create(work.shape, work.classes).to(device)
    x = torch.randn(work.samples, *work.shape, device=device)
    y = torch.randint(work.classes, (work.samples,), device=device)
    if channels_last:
        model, x = model.to(memory_format=torch.channels_last), x.contiguous(memory_format=torch.channels_last)
    return x, y, model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, nesterov=True, weight_decay=5e-4, fused=fused)


def naive(work: Work, sync: BlockSync) -> None:
    """float32, NCHW, eager: the loop of a first tutorial."""
    import torch

    x, y, model, optimizer = start(work, False, False)
    sync.watch(peak_memory)
    sync(0)
    for block in range(1, EPOCHS):
        for picked in torch.randperm(work.samples).to(x.device).split(work.batch):
            optimizer.zero_grad(set_to_none=False)
            loss = torch.nn.functional.cross_entropy(model(x[picked]), y[picked])
            loss.backward()
            optimizer.step()
        _synchronize()
        sync(block * work.steps)


def tuned(work: Work, sync: BlockSync) -> None:
    """What a good engineer writes by hand: bfloat16, channels-last, compiled, fused."""
    import torch

    torch.backends.cudnn.benchmark = True
    x, y, model, optimizer = start(work, work.conv, True)
    forward = torch.compile(model) if work.compile else model
    sync.watch(peak_memory)
    sync(0)
    for block in range(1, EPOCHS):
        for picked in torch.randperm(work.samples).to(x.device).split(work.batch):
            with torch.autocast(work.device, torch.bfloat16):
                loss = torch.nn.functional.cross_entropy(forward(x[picked]), y[picked])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        _synchronize()
        sync(block * work.steps)


def accelerate(work: Work, sync: BlockSync) -> None:
    """accelerate at the tuned settings."""
    import torch
    from accelerate import Accelerator

    torch.backends.cudnn.benchmark = True
    accelerator = Accelerator(mixed_precision="bf16", cpu=work.device == "cpu")
    x, y, model, optimizer = start(work, work.conv, True)
    forward, optimizer = accelerator.prepare(torch.compile(model) if work.compile else model, optimizer)
    sync.watch(peak_memory)
    sync(0)
    for block in range(1, EPOCHS):
        for picked in torch.randperm(work.samples).to(x.device).split(work.batch):
            with accelerator.accumulate(forward):
                with accelerator.autocast():
                    loss = torch.nn.functional.cross_entropy(forward(x[picked]), y[picked])
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
        _synchronize()
        sync(block * work.steps)


def lightning(work: Work, sync: BlockSync) -> None:
    """Lightning's Trainer at the tuned settings, its extras off."""
    import torch
    from lightning.pytorch import LightningModule, Trainer

    torch.backends.cudnn.benchmark = True
    x, y, model, optimizer = start(work, work.conv, True)

    class Batches:
        def __len__(self) -> int:
            return work.steps

        def __iter__(self) -> Any:
            for picked in torch.randperm(work.samples).to(x.device).split(work.batch):
                yield x[picked], y[picked]

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = torch.compile(model) if work.compile else model

        def training_step(self, batch: Any, _: int) -> Any:
            return torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            return optimizer

        def on_train_epoch_end(self) -> None:
            _synchronize()
            sync(self.trainer.global_step)

    sync.watch(peak_memory)
    sync(0)
    Trainer(
        accelerator="gpu" if work.device == "cuda" else "cpu", devices=1, precision="bf16-mixed", max_epochs=EPOCHS, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    ).fit(Module(), Batches())  # fmt: skip


def ceilings(device: str) -> dict[str, float]:
    """This device's own limits, measured: bfloat16 matrix products in TFLOP/s, copies in GB/s (read + written)."""
    import torch

    size, elements = (8192, 2**30) if device == "cuda" else (512, 2**22)
    a = torch.randn(size, size, device=device, dtype=torch.bfloat16)
    source = torch.empty(elements, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)

    def best(run: Any) -> float:
        taken = []
        for _ in range(12):
            _synchronize()
            began = time.perf_counter()
            for _ in range(5):
                run()
            _synchronize()
            taken.append((time.perf_counter() - began) / 5)
        return min(taken)

    matmul, copy = best(lambda: a @ a), best(lambda: target.copy_(source))
    return {"matmul_tflops": 2 * size**3 / matmul / 1e12, "copy_gb_per_s": 2 * elements / copy / 1e9}


def flops_per_sample(work: Work) -> float:
    """FLOP of one training sample: forward counted by torch, backward taken as twice that."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    from drivetrain.launch import launcher

    model = launcher.prepare(base_overrides(work)).run.model.create(work.shape, work.classes).eval()
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.zeros(1, *work.shape))
    return 3.0 * counter.get_total_flops()


def adamw(device: str) -> dict[str, float]:
    """Milliseconds of one AdamW update over ViT-B's parameters: a loop, foreach, fused."""
    import timm
    import torch

    name = "vit_base_patch16_224" if device == "cuda" else "test_vit"
    shapes = [p.shape for p in timm.create_model(name).parameters()]
    arms = {}
    for kind, options in (("loop", {"foreach": False}), ("foreach", {"foreach": True}), ("fused", {"fused": True})):
        parameters = [torch.randn(s, device=device, requires_grad=True) for s in shapes]
        for p in parameters:
            p.grad = torch.randn_like(p)
        arms[kind] = torch.optim.AdamW(parameters, **options)  # type: ignore[arg-type]
    taken: dict[str, list[float]] = {kind: [] for kind in arms}
    for _ in range(20):  # interleaved
        for kind, optimizer in arms.items():
            _synchronize()
            began = time.perf_counter()
            for _ in range(5):
                optimizer.step()
            _synchronize()
            taken[kind].append(1e3 * (time.perf_counter() - began) / 5)
    return {kind: harness.spread(times[3:])["median"] for kind, times in taken.items()}


def measure(work: Work, arms: dict[str, Any], rounds: int, limits: dict[str, float]) -> dict[str, Any]:
    """samples/s, spread and share of the ceiling of each arm; ratio to the first arm. An arm that fails says why."""
    alive, failed = dict(arms), {}
    while alive:
        try:
            seconds, markers = harness.run_rounds(alive, rounds, warmup=2)
            break
        except RuntimeError as error:
            broken = next((name for name in alive if f"arm {name}:" in str(error)), None)
            if broken is None:
                raise
            failed[broken] = str(error)
            del alive[broken]
    flops = flops_per_sample(work)
    walls = {name: [wall for wall, _ in taken] for name, taken in (seconds if alive else {}).items()}
    figures: dict[str, Any] = {"work": asdict(work), "gflop_per_sample": flops / 1e9, "failed": failed, "arms": {}}
    first = next(iter(walls), None)
    for name, taken in walls.items():
        rate = work.samples / harness.spread(taken)["median"]
        figures["arms"][name] = {
            "samples_per_s": rate,
            "peak_memory_bytes": markers[name]["loss_last"],
            "step_ms": {k: 1e3 * v / work.steps for k, v in harness.spread(taken).items()},
            "of_matmul_ceiling": rate * flops / (limits["matmul_tflops"] * 1e12),
            "speed_over_first": {k: 1 / v for k, v in harness.against(taken, walls[first or name])["ratio"].items()},
        }
    return figures


def row_arms(work: Work) -> dict[str, Any]:
    """The arms of a row; peers that are not installed are left out."""
    arms: dict[str, Any] = {
        "naive": (naive, (work,)),
        "tuned": (tuned, (work,)),
        "ours": (ours, (work, tuple(tuned_overrides(work)))),
    }
    for name, run in (("lightning", lightning), ("accelerate", accelerate)):
        if find_spec(name) is not None:
            arms[name] = (run, (work,))
    return arms


def ladder_arms(work: Work) -> dict[str, Any]:
    """Our loop with one technique more on each rung."""
    arms, overrides = {}, []
    for name, added in LADDER:
        if name == "compiled" and not work.compile:
            continue
        overrides += added
        arms[name] = (ours, (work, tuple(overrides)))
    return arms


def show(title: str, figures: dict[str, Any]) -> None:
    """A row as a table."""
    from rich.console import Console
    from rich.table import Table

    grid = Table("arm", "samples/s", "× first", "step ms (p10 – p90)", "of matmul ceiling", "GiB", title=title)
    for name, a in figures["arms"].items():
        ms, over = a["step_ms"], a["speed_over_first"]
        grid.add_row(
            name, f"{a['samples_per_s']:,.0f}", f"{over['median']:.2f}",
            f"{ms['median']:.2f} ({ms['p10']:.2f} – {ms['p90']:.2f})",
            f"{100 * a['of_matmul_ceiling']:.1f} %", f"{a['peak_memory_bytes'] / 2**30:.2f}",
        )  # fmt: skip
    for name, why in figures["failed"].items():
        grid.add_row(name, "failed", why.splitlines()[0][:60], "", "", "")
    Console().print(grid)


def main(argv: Sequence[str] | None = None) -> int:
    """Run it; 1 if a CUDA test failed."""
    parser = argparse.ArgumentParser(prog="bench.gpu", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="in small, on the CPU")
    parser.add_argument("--minutes", type=float, default=9.0, help="start nothing new after so long")
    parser.add_argument("--rows", help=f"comma-separated, of {', '.join(ROWS)}")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args(argv)
    import torch

    device = "cpu" if given.smoke else "cuda"
    if device == "cuda" and not torch.cuda.is_available():
        parser.error("torch finds no CUDA device here; --smoke runs in small on a CPU")
    rows = SMOKE if given.smoke else {name: ROWS[name] for name in (given.rows.split(",") if given.rows else ROWS)}
    rounds = 2 if given.smoke else given.rounds
    name = torch.cuda.get_device_name() if device == "cuda" else "cpu-smoke"
    out = given.out or harness.RESULTS / f"{name.lower().replace(' ', '-')}-{time.strftime('%Y-%m-%d')}.json"
    began, content = time.monotonic(), {"device": name, "machine": harness.machine(), "rows": {}}

    tests = 0
    if device == "cuda":
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-m", "cuda", "tests"], capture_output=True, text=True, check=False
        )
        tests = done.returncode
        content["cuda_tests"] = done.stdout.strip().splitlines()[-1:]
        print(*done.stdout.strip().splitlines()[-15:], sep="\n")
    content["ceilings"] = limits = ceilings(device)
    content["adamw_ms"] = adamw(device)
    print(limits, content["adamw_ms"])
    first = next(iter(rows.values()))
    plans = [(row, work, row_arms(work)) for row, work in rows.items()] + [("ladder", first, ladder_arms(first))]
    plans.insert(1, plans.pop())  # the ladder is worth more than the last rows, should time run out
    for row, work, arms in plans:
        if time.monotonic() - began > 60 * given.minutes:
            content["rows"][row] = {"skipped": f"{given.minutes:g} minutes were over"}
            continue
        content["rows"][row] = measure(work, arms, rounds, limits)
        show(f"{row}: {work.name}, batch {work.batch}", content["rows"][row])
        harness.write(out, content)  # what is measured is kept, whatever comes next
    print(f"written to {out}")
    return int(tests not in (0, 5))


if __name__ == "__main__":
    raise SystemExit(main())
