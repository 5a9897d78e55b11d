"""Speed: our loop beside a hand-written one and timm's, on the same network and data, and technique by technique.

All variants of a row run short blocks in turn. Each rate stands beside the model's own operations a second (MFU) and beside
what this device was measured to do.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from bench import harness
from bench.gpu import campaign, loops, target
from bench.gpu.campaign import Row
from bench.gpu.loops import Work
from bench.harness import Variant
from drivetrain.measure.intervals import MIN_PAIRS

Loop = tuple[Callable[..., None], tuple[Any, ...]]  # a function and its arguments; `sync` is added
Take = dict[str, list[float]]  # the seconds of the blocks of variants that were live together, the base first, by round
Memory = dict[str, float]  # peak bytes by variant
WARMUP = 2  # blocks
BESIDE = 2  # variants that are live with the base: a device's memory holds no more of the large ones
MIN_ROUNDS = 2
NO_TIME = "no time was left to begin it"


@dataclass
class Interleaved:
    """The variants of a row: groups that took turns, each with the base first, and why others failed."""

    groups: list[list[Variant]] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)  # the traceback and all that the variant wrote


def run(
    loops: dict[str, Loop], rounds: int, seconds: float, folder: Path, on_round: Callable[[Interleaved], None] = lambda _: None
) -> Interleaved:
    """Measure the variants, the first of them the base.

    Where `seconds` get short, each group runs fewer rounds, and no other group begins. `on_round` gets what is measured after
    each round. Raises RuntimeError where the base fails.
    """
    found, (base, *waiting), until = Interleaved(), loops, time.monotonic() + seconds

    def fail(variant: Variant, error: RuntimeError) -> None:
        variant.kill()
        found.failed[variant.name] = f"{error}\n{(folder / f'{variant.name}.txt').read_text(errors='replace')}"
        if variant.name == base:
            raise RuntimeError(found.failed[base])

    while waiting and (not found.groups or time.monotonic() < until):
        live: list[Variant] = []
        try:
            for name in (base, *waiting[:BESIDE]):
                (folder / f"{name}.txt").write_bytes(b"")
                live.append(variant := Variant(name, *loops[name], str(folder / f"{name}.txt"), method="fork", answers_s=240.0))
                try:
                    variant.ready()
                    for _ in harness.turns([variant], WARMUP):
                        pass
                    variant.blocks.clear()
                except RuntimeError as error:
                    live.remove(variant)
                    fail(variant, error)
                    if "OutOfMemoryError" in found.failed[name] and len(live) > 1:  # it may fit beside the base alone
                        del found.failed[name]
                        break
                waiting = [each for each in waiting if each != name]
            found.groups.append(list(live))
            ends = time.monotonic() + len(live) / (len(live) + len(waiting)) * (until - time.monotonic())
            for number, _ in enumerate(harness.turns(live, rounds, fail), 1):
                on_round(found)
                if number >= MIN_ROUNDS and time.monotonic() > ends:
                    break
            for variant in live:
                variant.stop()
        finally:
            for variant in live:
                variant.kill()
    found.failed |= dict.fromkeys(waiting, NO_TIME)
    on_round(found)
    return found


ROUNDS = 8
LIMIT_S = 500.0


def image_network(name: str, batch: int, steps: int, conv: bool) -> Work:
    """A network of timm's at 224 × 224."""
    return Work(("model=timm", f"model.name={name}"), (3, 224, 224), 1000, batch, steps, conv=conv)


GPT = ("model=gpt", "model.width=768", "model.depth=12", "model.heads=12")
WORKS = {
    "resnet50": image_network("resnet50", 256, 12, True),
    "mlp": Work(("model=mlp", f"model.hidden={[256] * 8}".replace(" ", "")), (3, 8, 8), 10, 64, 200, half=False),
    "vit_b": image_network("vit_base_patch16_224", 256, 8, False),
    "gpt": Work(GPT, (1024,), 256, 32, 8, tokens=True),
    "gpt2": Work(GPT, (1024,), 50304, 16, 8, tokens=True, adamw=True),  # GPT-2 124M with its true head
    "convnext_b": image_network("convnext_base", 256, 6, True),
    "vit_s": image_network("vit_small_patch16_224", 256, 12, False),
}
LORA = (  # a 7B of random weights
    "task=language_modelling", "data=synthetic", "data.tokens=true", "model=transformers", "model.name=llama", "adapter=lora",
    "adapter.rank=16", "precision=bf16_pure", "checkpointing=blocks", "saving=none", "updates=3", "evaluate_every=1000",
)  # fmt: skip
LORA_SIZES = {  # hidden, layers, heads, intermediate, length, vocabulary
    "cuda": (4096, 32, 32, 11008, 2048, 32000), "cpu": (16, 2, 2, 32, 16, 32),
}  # fmt: skip
SMALL_IMAGES = Work(("model=resnet9", "model.width=64"), (3, 32, 32), 10, 512, 32, conv=True)  # as CIFAR-10
SMALL_GPT = ("model=gpt", "model.width=16", "model.depth=1", "model.heads=2")
SMALL = {  # of the CPU's form
    "resnet50": Work(
        ("model=timm", "model.name=test_resnet"), (3, 32, 32), 10, 4, 2, "cpu", conv=True, compile=False, half=False
    ),
    "mlp": Work(("model=mlp", "model.hidden=[16]"), (3, 8, 8), 10, 8, 4, "cpu", half=False),
    "vit_b": Work(("model=timm", "model.name=test_vit"), (3, 160, 160), 10, 4, 2, "cpu", compile=False),
    "gpt": Work(SMALL_GPT, (16,), 32, 4, 2, "cpu", tokens=True, compile=False),
    "gpt2": Work(SMALL_GPT, (16,), 96, 4, 2, "cpu", tokens=True, compile=False, adamw=True),
}
LADDER = (  # each rung adds its overrides to those before it
    ("naive", ("recipe=naive",)),
    ("fused update", ("optimizer.fused=true", "runtime.zero_grad=none")),
    ("cudnn benchmark", ("runtime.cudnn_benchmark=true",)),
    ("tf32", ("precision=tf32",)),
    ("bf16", ("precision=bf16",)),
    ("channels last", ("surgery=[channels_last]",)),
    ("compiled", ("compile=inductor",)),
    ("whole step", ("compile=step", "optimizer.fused=null", "optimizer.foreach=null")),
)
# (row, our variants by their first letters, the other variant, the ratio of their samples a second that is asked for)
MARKS = (
    ("resnet50", "ours", "timm", 1.25),
    ("resnet50", "ours", "timm fast", 1.0),
    ("mlp", "ours", "ours none", 4.0),
    ("ladder", "whole step", "naive", 5.4),
    ("fed", "packed", "synthetic", 0.97),
    ("small images", "resident", "threads, none", 2.0),
)
CPU_ROWS = ("ceilings", "mlp", "resnet50", "resnet50 more", "vit_b", "gpt", "small images", "ladder", "fed")


def rows(device: str, folder: Path) -> list[Row]:
    """The device's ceilings, the networks, each by its first variants and by more of them, the ladder, and data from a disk."""
    cuda = device == "cuda"
    works, small = (
        (WORKS, SMALL_IMAGES) if cuda else (SMALL, replace(SMALL["resnet50"], network=("model=resnet9", "model.width=4")))
    )
    images = works["resnet50"]
    found = {"ceilings": Row("ceilings", loops.ceilings, (device,), alone=True)}

    def add(name: str, run: Callable[..., Any], *args: Any) -> None:
        found[name] = Row(name, run, args, LIMIT_S, 60.0 if cuda else 5.0, alone=True)

    for name, work in works.items():
        add(name, measure, work, head_variants(work) if name == "gpt2" else variants(work))
        if name != "gpt2":
            add(f"{name} more", measure, work, more_variants(work))
    add("small images", small_images, small, folder / "small")
    add("ladder", measure, images, ladder(images))
    add("fed", fed, images, folder / "packed")
    add("lora 7b", lora, device, folder)
    add("time to target", target.to_target, device)
    add("jpeg", jpeg, device, folder / "jpeg")
    add("jpeg fed", jpeg_fed, images, folder / "files")
    return list(found.values())


def variants(work: Work) -> dict[str, Loop]:
    """The first variants of a network: the hand-tuned loop as the base, timm's at its best flags, and ours."""
    kinds = ["inductor", "step"] if work.compile else []
    if not work.half or not kinds:  # launches bound it: what a graph saves is asked too
        kinds.append("none")
    return {
        "hand": (loops.hand, (work, False, "")), "timm fast": (loops.timm, (work, True)),
        **{f"ours {kind}": ours(work, f"compile={kind}") for kind in kinds},
        **(several_at_once(work) if not work.half and work.compile else {}),
    }  # fmt: skip


def several_at_once(work: Work, name: str = "ours step", *words: str) -> dict[str, Loop]:
    """Whole steps of which a launch makes several."""
    if work.device != "cuda":
        return {}
    return {f"{name} × {k}": ours(work, *words, "compile=step", f"compile.updates_per_replay={k}") for k in (4, 8)}


def head_variants(work: Work) -> dict[str, Loop]:
    """A language model with a large head: loops at their best flags, and ours with and without all logits at once."""
    found: dict[str, Loop] = {"hand": (loops.hand, (work, True, "")), "ours none": ours(work)}
    for kind in ("inductor", "step") if work.compile else ():
        found[f"ours {kind}"] = ours(work, f"compile={kind}")
    found["ours, all logits at once"] = ours(work, *(["compile=inductor"] if work.compile else []), "loss.chunks=1")
    return found


def more_variants(work: Work) -> dict[str, Loop]:
    """Further variants beside the base: loops without what makes them fast, and what might be faster but is no default yet."""
    found = {
        "hand": (loops.hand, (work, False, "")), "naive": (loops.naive, (work,)), "timm": (loops.timm, (work, False)),
        "ours none": ours(work),
    }  # fmt: skip
    if work.compile:
        found["timm fast"] = loops.timm, (work, True)
        found |= {f"ours {kind}": ours(work, f"compile={kind}") for kind in ("inductor", "step")}
        found["hand, loss and update inside"] = loops.hand, (work, True, "")
        if work.conv:
            for where in ("before", "inside"):
                found[f"hand, bytes normalised {where}"] = loops.hand, (work, False, where)
        found["ours autotuned"] = ours(work, "compile=inductor", "compile.mode=max-autotune-no-cudagraphs")
        if not work.conv and work.half:
            for kernel in ("cudnn", "flash"):
                found[f"ours {kernel} attention"] = ours(work, "compile=inductor", f"runtime.attention={kernel}")
    return found


def ours(work: Work, *words: str) -> Loop:
    """Our loop with what makes it fast, and these overrides."""
    return loops.ours, (work, [*loops.fast_overrides(work), *words])


def ladder(work: Work) -> dict[str, Loop]:
    """Our loop with one technique more on each rung."""
    found: dict[str, Loop] = {}
    overrides: list[str] = []
    for name, added in LADDER:
        overrides = [*overrides, *added]
        if work.device == "cuda" or not added[0].startswith(("compile=", "precision=")):
            found[name] = (loops.ours, (work, overrides))
    # The fastest first: it is the base, which runs beside each group. The slowest comes next, however little time is left.
    order = [name for name in ("compiled", "naive", "whole step") if name in found]
    return {name: found[name] for name in (*order, *(name for name in found if name not in order))}


def fed(work: Work, folder: Path) -> None:
    """Our fastest loop on images from a disk, against the same on data that is made on the device."""
    harness.in_process(pack, work, folder)
    fast = ["compile=inductor"] if work.compile else []
    loaders = {
        f"packed, {name}": ours(work, *fast, "data=packed", f"data.root={folder}", f"loader={name}")
        for name in ("device", "threads", "resident")
    }
    measure(work, {"synthetic": ours(work, *fast), **loaders})


def small_images(work: Work, folder: Path) -> None:
    """Crops and flips of small images, which launches bound: each way to run them, against the one that should be fastest."""
    harness.in_process(pack, work, folder)
    words = ("data=packed", f"data.root={folder}", "augment=[flip_crop]")
    kinds = ("step", "inductor", "none") if work.compile else ("none",)
    ways = [(loader, kind) for loader in ("resident", "device", "threads") for kind in kinds]
    found = {f"{loader}, {kind}": ours(work, *words, f"loader={loader}", f"compile={kind}") for loader, kind in ways}
    measure(work, found | (several_at_once(work, "resident, step", *words, "loader=resident") if work.compile else {}))


def lora(device: str, folder: Path) -> dict[str, Any]:
    """In a child: a LoRA fine-tune's peak memory, and what was forecast of it for this machine."""
    from drivetrain.measure.forecast.forecast import forecast

    names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
    *sizes, length, classes = LORA_SIZES[device]
    config = ", ".join(f"{name}: {size}" for name, size in zip(names, sizes, strict=True))
    words = [
        *LORA, f"model.config={{{config}}}", f"data.shape=[{length}]", f"data.classes={classes}", "data.samples=8",
        "data.test_samples=1", "batch.global_batch=1", f"runtime.device={device}",
    ]  # fmt: skip
    (found,) = forecast(words)[1]
    campaign.report({"forecast_bytes": found.peak_bytes, "forecast_step_s": found.step_s})
    result = campaign.train([*words, f"output_dir={folder}/runs"])
    low, high = found.peak_bytes[1:]
    return {**campaign.facts(result), "peak_within_forecast": low <= result.peak_memory_bytes <= high}


def jpeg(device: str, folder: Path) -> dict[str, Any]:
    """In a child: images a second of JPEG files alone, beside torch's DataLoader."""
    from bench import loader

    quick = device == "cpu"
    names = ("DataLoader, 2 workers", "ours, threads", "ours, workers")
    variants = {name: run for name, run in loader.jpeg_variants(folder, quick).items() if name in names}
    variants["timm's loader"] = loader.timms, (folder / "images", os.cpu_count() or 1)
    return {"loaders": loader.measure(variants, 2 if quick else MIN_PAIRS)}


def jpeg_fed(work: Work, folder: Path) -> None:
    """Our fastest loop fed from JPEG files that are decoded meanwhile, against the same on data that is made on the device."""
    from bench import loader

    harness.in_process(loader.write_photographs, folder, max(64, work.samples))
    fast = ["compile=inductor"] if work.compile else []
    words = (
        "data=imagefolder", f"data.root={folder}", "data.holdout=0.05", "data.verify=0", "augment=[random_resized_crop]",
    )  # fmt: skip
    ways = {f"files, {name}": ours(work, *fast, *words, f"loader={name}") for name in ("threads", "workers")}
    measure(work, {"synthetic": ours(work, *fast), **ways})


def pack(work: Work, folder: Path) -> None:
    """In a child: a block's images of noise, as `drivetrain pack` writes them."""
    import torch

    from drivetrain.data import Normalize, Splits, Tensors, packed

    folder.mkdir()
    x = torch.randint(256, (work.samples, *work.shape), dtype=torch.uint8)
    source = Tensors(x, torch.arange(work.samples) % work.classes)
    splits = Splits(
        train=source, test=Tensors(x[:8], source.y[:8]), shape=work.shape, classes=work.classes,
        normalize=Normalize([127.0] * 3, [70.0] * 3),
    )  # fmt: skip
    packed.pack(splits, folder, packed.Raw(), work.shape, "", 8, lambda *_: None)


def measure(work: Work, variants: dict[str, Loop]) -> None:
    """In a child: report the row's figures after each round of the variants. One that fails says why, the others go on."""
    flops = harness.in_process(loops.count_flops, work)["flops"]
    name = harness.in_process(campaign.device_facts)["device_name"]
    peak = loops.data_sheet_tflops(name)
    campaign.report({"work": asdict(work), "gflop_per_sample": flops / 1e9, "data_sheet_bf16_tflops": peak})
    take_turns(variants, 2 if work.device == "cpu" else ROUNDS, lambda takes, memory: figures(takes, memory, work, flops, peak))


def take_turns(variants: dict[str, Loop], rounds: int, table: Callable[[list[Take], Memory], dict[str, Any]]) -> None:
    """In a child: run what has too few rounds so far, and report after each round what the `table` makes of all takes.

    The row stays open until each variant that works has the rounds of an interval.
    """
    before, memory = list(campaign.earlier().get("takes", [])), dict(campaign.earlier().get("memory", {}))
    base, *others = variants
    least = [name for name in sorted(others, key=lambda name: rounds_of(before, name)) if rounds_of(before, name) < rounds]

    def keep(found: Interleaved) -> None:
        takes = [*before, *({each.name: [wall for wall, _ in each.blocks] for each in group} for group in found.groups)]
        memory.update({each.name: each.marker["loss_last"] for group in found.groups for each in group if each.marker})
        works = [name for name in variants if found.failed.get(name, NO_TIME) == NO_TIME]
        few = any(rounds_of(takes, name) < min(rounds, MIN_PAIRS) for name in works)
        campaign.report({
            "open": few, "takes": takes, "memory": memory, "failed_variants": found.failed, "variants": table(takes, memory),
        })  # fmt: skip

    keep(Interleaved(failed=dict.fromkeys(least, NO_TIME)))
    if least or not before:
        with tempfile.TemporaryDirectory() as folder:
            run({name: variants[name] for name in (base, *least)}, rounds, 0.8 * campaign.left_s(), Path(folder), keep)


def rounds_of(takes: Sequence[Take], name: str) -> int:
    """The rounds of a variant in all takes."""
    return sum(len(take.get(name, ())) for take in takes)


def figures(takes: Sequence[Take], memory: Memory, work: Work, flops: float, peak: float | None) -> dict[str, Any]:
    """Of each variant: its rounds, samples a second, its step, MFU, memory, and its ratio to the base."""
    table = {}
    for name in dict.fromkeys(name for take in takes for name in take if rounds_of(takes, name)):
        pairs = [pair for take in takes if name in take for pair in zip(take[name], next(iter(take.values())), strict=False)]
        blocks, of_base = ([pair[side] for pair in pairs] for side in (0, 1))
        spread = harness.spread(blocks)
        rate = work.samples / spread["median"]
        table[name] = {
            "rounds": len(blocks),
            "samples_per_s": rate,
            "step_ms": {key: 1e3 * value / work.steps for key, value in spread.items()},
            "over_base": harness.against(blocks, of_base)["ratio"],
            "model_tflops": rate * flops / 1e12,
            "mfu": None if peak is None else rate * flops / 1e12 / peak,
            "peak_memory_bytes": memory.get(name),  # known once its group has ended
        }
    return table


def summary(rows: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Shares of the measured ceiling, and the marks: the ratio that was asked for, and the one that was reached."""
    ceiling = rows.get("ceilings", {}).get("bf16_matmul_tflops")
    measured = {name: row["variants"] for name, row in rows.items() if "variants" in row}
    shares = {
        row: {variant: round(f["model_tflops"] / ceiling, 4) for variant, f in of.items()}
        for row, of in measured.items()
        if ceiling
    }
    marks = []
    for row, our, other, asked in MARKS:
        both = {**measured.get(f"{row} more", {}), **measured.get(row, {})}  # which have the base in common
        times = {name: figures["over_base"]["median"] for name, figures in both.items()}
        ours = {name: time for name, time in times.items() if name.startswith(our) and name != other}
        if ours and other in times:
            best = min(ours, key=ours.__getitem__)
            marks.append({"row": row, "variant": best, "against": other, "asked": asked, "reached": times[other] / ours[best]})
    failed = {f"{name}: {variant}": why for name, row in rows.items() for variant, why in row.get("failed_variants", {}).items()}
    return {"of_measured_bf16_matmul": shares, "marks": marks, "failed_variants": sorted(failed)}
