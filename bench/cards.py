"""Time and memory of an update with each technique, beside the option that is off, in a case that it is made for.

`python -m bench.cards [--minutes N] [--rounds N] [--block-s S] [--cards OVERRIDE …] [--out FILE]` measures the options that the
file does not hold yet, those of most worth first, and stops when the time is over: called again, it goes on. It writes
bench/results/cards-cpu.json, and conf/measured.json, which `drivetrain list GROUP=OPTION` and the site's cards read.

Options are compared as `drivetrain compare` does, in rounds of fresh processes. An option that this machine cannot run, or whose
gain does not show in an update, has the reason in place of a figure. Data, models, tasks and metrics are no techniques, and of
losses only those that take the place of another one. A card also says what `python -m bench.techniques` found of the results.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tests.support import pairwise

from bench import harness, loader

FILE = harness.RESULTS / "cards-cpu.json"
CARDS = harness.ROOT / "conf" / "measured.json"
MOST = 6  # options beside one base: more keep the machine from being idle between two blocks for too long
MIB = 2**20
ALL = ("runtime.threads=1", "epochs=1000", "evaluate_every=1000")
MLP = (
    "data=synthetic",
    "data.shape=[512]",
    "data.samples=2048",
    "model=mlp",
    "model.hidden=[1024,1024]",
    "batch.global_batch=64",
)
NET = ("data=synthetic", "data.shape=[3,32,32]", "data.samples=512", "model=resnet9", "model.width=16", "model.bias=true",
       "batch.global_batch=64", "optimizer=sgd")  # fmt: skip
DIGITS = ("data=digits", "data.size=32", "model=resnet9", "model.width=16", "batch.global_batch=64")
GPT = ("data=stdlib", "data.max_files=60", "data.length=128", "data.test_samples=8", "loss=next_token", "model=gpt",
       "model.width=64", "model.depth=4", "model.heads=4", "batch.global_batch=16")  # fmt: skip
PHOTOS = ("data=imagefolder", "data.root={photos}", "data.size=64", "model=mlp", "model.hidden=[64]", "batch.global_batch=32")
OWN = ("data=synthetic", "data.shape=[512]", "data.samples=2048", "model=own", "model.target=pairwise_net.Net",
       "trust=[pairwise_net]", "batch.global_batch=64")  # fmt: skip


class Case(NamedTuple):
    """The words that all have, those of the first one, and those that the option wants beside itself."""

    base: tuple[str, ...]
    off: str
    beside: tuple[str, ...] = ()


# Those of most worth first. What compiles, or starts several processes, takes longest, and comes after what does not.
GROUPS = {
    "precision": Case((*MLP, "batch.global_batch=256"), "precision=fp32"),
    "checkpointing": Case(GPT, "checkpointing=none"),
    "optimizer": Case(MLP, "optimizer=sgd"),
    "surgery": Case(NET, "surgery=[]"),
    "loader": Case((*PHOTOS, "augment=[random_resized_crop]"), "loader=sync"),
    "batch": Case(GPT, "batch=fixed"),
    "adapter": Case(GPT, "adapter=none"),
    "clip": Case(MLP, "clip=none"),
    "ema": Case(MLP, "ema=none"),
    "augment": Case(DIGITS, "augment=[]"),
    "saving": Case((*MLP, "log_every=1"), "saving=none"),
    "logger": Case((*MLP, "log_every=1"), "logger=[]"),
    "compile": Case(GPT, "compile=none"),
    "parallel": Case(NET, "parallel=single"),
    "scheduler": Case(MLP, "scheduler=constant"),
}
OPTIONS = {
    "surgery=[fused_norm]": Case(OWN, "surgery=[]"),
    "batch=accumulate": Case((*GPT, "batch.global_batch=32"), "batch=fixed", ("batch.accumulation_steps=4",)),
    "augment=[random_erasing]": Case(DIGITS, "augment=[]", ("augment.random_erasing.fill=mean",)),
    **{f"augment=[{name}]": Case(PHOTOS, "augment=[]") for name in ("randaugment", "trivialaugment", "three_augment")},
    "augment=[color_jitter]": Case(PHOTOS, "augment=[]"),
    "augment=[random_resized_crop]": Case(PHOTOS, "augment=[]"),
    "optimizer=muon": Case(GPT, "optimizer=adamw"),
    "optimizer=soap": Case(GPT, "optimizer=adamw"),
    "optimizer=shampoo": Case(GPT, "optimizer=adamw"),
    "optimizer=schedulefree": Case((*MLP, "scheduler=constant"), "optimizer=sgd"),
    "logger=[images]": Case((*NET, "log_every=1"), "logger=[]"),
    "ema=post_hoc": Case((*MLP, "saving=last"), "ema=none"),
    "compile=jit": Case(NET, "compile=none"),
    "parallel=ddp": Case(NET, "parallel=single", ("parallel.nproc=2",)),
    "parallel=fsdp": Case(NET, "parallel=single", ("parallel.nproc=2",)),
}
SMALL = ("task={}", "model.width=8", "data.samples=400", "batch.global_batch=32")
# Keys that are techniques of their own, and losses in the place of others.
KEYS = {
    **dict.fromkeys(
        ("optimizer=muon optimizer.normalize=neurons", "optimizer=muon optimizer.cautious_decay=true"),
        Case(GPT, "optimizer=muon"),
    ),
    **dict.fromkeys(
        (f"adapter=lora adapter.{word}" for word in ("scale=stabilized", "init=pissa", "lr_ratio=16")), Case(GPT, "adapter=lora")
    ),
    "model=gpt model.embedding_noise=5": Case(GPT, "model=gpt"),
    "parallel=ddp parallel.shard_optimizer=true": Case(
        (*MLP, "model.hidden=[2048,2048,2048]", "optimizer=adamw", "parallel.nproc=2"), "parallel=ddp"
    ),
    "loss=arcface": Case(MLP, "loss=cross_entropy"),
    "loss=asymmetric": Case(tuple(word.format("multilabel") for word in SMALL), "loss=bce"),
    "loss=tversky": Case(tuple(word.format("segmentation") for word in SMALL), "loss=dice"),
    "loss=siglip": Case(("task=contrastive", "model.width=8"), "loss=contrastive"),
    "loss=supcon": Case(("data=digits", "model=mlp", "model.hidden=[64]"), "loss=triplet"),
    "loss=gaussian_nll": Case(("task=regression", "data=diabetes", "metrics=[]", "select=loss"), "loss=mse"),
}
GPU = "not measurable on a CPU"
NONE = {  # no figure → why
    "precision=tf32": f"{GPU}: its matrix units are a GPU's",
    "precision=fp8": f"{GPU}: its matrix units are a GPU's",
    "compile=cudagraph": f"{GPU}: it records a GPU's kernels",
    "loader=device": f"{GPU}: it copies beside a GPU's step",
    "loader=dali": f"{GPU}: it decodes on a GPU",
    "loader=auto": "it measures the loaders and takes the fastest: see these",
    "batch=auto": "it looks for a batch before the first update, which costs the look",
    "batch=critical": "it chooses the batch before the first update: docs/scaling.md has what that brings",
    **dict.fromkeys(
        ("checkpointing=blocks", "checkpointing=every_k", "checkpointing=selective"),
        f"{GPU}: a process's peak does not show what activations take: `drivetrain forecast` does",
    ),
    "checkpointing=budget": f"{GPU}: it chooses what to recompute by times of a GPU's kernels",
    "checkpointing=offload": f"{GPU}: activations are in the host's memory there",
    "surgery=[sync_bn]": f"{GPU}: it is for several devices",
    **{f"parallel={name}": f"{GPU}: it is for several devices" for name in ("dp", "split", "tensor", "pipeline")},
    **{f"optimizer=apex_{name}": f"{GPU}: apex is CUDA code" for name in ("adam", "lamb", "novograd", "sgd")},
    **{f"logger=[{name}]": "it talks to a service, whose time is not ours" for name in ("wandb", "mlflow")},
    "optimizer=sparse_adam": "without weights that have sparse gradients it is AdamW",
    "loss=ctc": "no other loss takes its targets, sequences of classes",
    "loss=distill": "a teacher is what it costs: one forward more",
    "optimizer=lbfgs": "an update of it has as many forwards as it needs: compare it by time to target",
}


def cards() -> dict[str, Case]:
    """Override → its case, of every technique that is not off by itself, in the order of their worth."""
    words = {group: [w for w in each if "/" not in w] for group, each in pairwise.factors().items()}
    every = [(word, case) for group, case in GROUPS.items() for word in words[group] if word not in (case.off, f"{group}=none")]
    options = {word: OPTIONS.get(word, case) for word, case in every if "=[]" not in word and "." not in word.partition("=")[0]}
    return options | KEYS | {word: Case((), "") for word in NONE if word.startswith("loss=")}


def comparisons(wanted: Sequence[str]) -> Iterator[tuple[Case, list[str]]]:
    """Yield the options that are measured beside the same base, some at a time."""
    known = cards()
    together: dict[tuple[tuple[str, ...], str], list[str]] = {}
    for word in wanted:
        together.setdefault(known[word][:2], []).append(word)
    for (base, off), words in together.items():
        for first in range(0, len(words), MOST):
            yield Case(base, off), words[first : first + MOST]


def measured(case: Case, words: Sequence[str], folder: Path, rounds: int, block_s: float) -> dict[str, dict[str, Any]]:
    """Measure options beside the one that is off: for each one its figures, or why there are none."""
    from drivetrain.core.errors import UserError
    from drivetrain.measure.benchmark import compare, variants

    given = {word.partition("=")[0]: word.format(photos=folder / "photos") for word in case.base}  # the last one counts
    base = [*ALL, *given.values(), f"output_dir={folder}/runs"]
    specs = [variants.compose(case.off, [*base, case.off])]
    specs += [variants.compose(word, [*base, *word.split(), *cards()[word].beside]) for word in words]
    try:
        found = compare.measure(specs, compare.CompareSettings(rounds=rounds, block_s=block_s), base)
    except UserError as error:  # nothing is written: it may run the next time
        print(f"{case.off} does not run: {error}")
        return {}
    first, *rest = found.rows
    return {row.label: figures(first, row, case) for row in rest}


def figures(first: Any, row: Any, case: Case) -> dict[str, Any]:
    """The ratio of an option's speed, and the memory that it takes more, with 95 % intervals."""
    from drivetrain.measure import intervals

    if row.error is not None or row.ratio is None:
        return {"reason": str(row.error).splitlines()[0] if row.error else "it ended before it was measured"}
    more = [(mine - theirs) / MIB for mine, theirs in zip(row.peaks_bytes, first.peaks_bytes, strict=False)]
    memory = intervals.mean(more) if len(more) > 1 else None
    return {
        "against": case.off,
        "case": " ".join(case.base),
        "beside": [*cards()[row.label].beside],
        "ratio": [*row.ratio] if row.ratio.low else [row.ratio.middle, None, None],
        "memory_mib": [*memory] if memory else None,
        "of_mib": statistics.median(first.peaks_bytes) / MIB,
        "rates": [first.rates, row.rates],
    }


def sentence(card: dict[str, Any], cpu: str) -> str:
    """The sentence of a card on a technique."""
    if "reason" in card:
        return str(card["reason"])
    middle, low, high = card["ratio"]
    said = f"{middle:.2f} × as fast as {card['against']}" + (f" ({low:.2f} to {high:.2f})" if low else "")
    if card["memory_mib"]:
        more, least, most = card["memory_mib"]
        certain = least > 0 or most < 0
        amount = f"{abs(more):,.0f} MiB {'more' if more > 0 else 'less'} memory ({least:+,.0f} to {most:+,.0f})"
        said += f", {amount}" if certain and abs(more) >= 1 else ", as much memory"
    with_words = f" {' '.join(card['beside'])}" if card["beside"] else ""
    last = {word.partition("=")[0]: word for word in card["case"].split()}
    shape = " ".join(word for key, word in last.items() if key in ("task", "data", "model", "batch.global_batch"))
    return f"{said};{with_words and f' with{with_words},'} {shape}, one thread, {cpu}"


def said() -> dict[str, str]:
    """What the cards say: time and memory by this campaign, and results by that of bench.techniques."""
    from bench import techniques

    record = harness.before(FILE)
    found = {word: sentence(card, record["cpu"]) for word, card in record.get("cards", {}).items()}
    for word, results in techniques.sentences(harness.before(techniques.FILE)).items():
        found[word] = "; ".join([*([found[word]] if word in found else []), *results])
    return found


def write(content: dict[str, Any], out: Path) -> None:
    """Write the record, and beside the options what their cards say."""
    harness.write(out, content)
    if out == FILE:
        CARDS.write_text(json.dumps(said(), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def main(argv: Sequence[str] | None = None) -> None:
    """Measure what the file does not hold yet."""
    given = harness.parse(__doc__, "cards-cpu.json", argv, minutes=12.0, rounds=6, block_s=0.1, cards=list(cards()))
    cpu, began = harness.machine()["cpu"], time.monotonic()
    before = harness.before(given.out)
    content: dict[str, Any] = {"cpu": cpu, "cards": {}}
    if before.get("cpu") == cpu:  # figures of two kinds of CPU are not beside each other
        content["cards"] = before["cards"]
    content["cards"] |= {word: {"reason": NONE[word]} for word in given.cards if word in NONE}
    wanted = [word for word in given.cards if word not in content["cards"]]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        pairwise.prepare_folder(folder)
        loader.write_photographs(folder / "photos", 200)
        sys.path.insert(0, name)
        for case, words in comparisons(wanted):
            if time.monotonic() - began > 60 * given.minutes:
                break
            content["cards"] |= measured(case, words, folder, given.rounds, given.block_s)
            write(content, given.out)
    left = [word for word in given.cards if word not in content["cards"]]
    write(content, given.out)
    for word in given.cards:
        if word in content["cards"]:
            print(f"{word}: {sentence(content['cards'][word], cpu)}")
    print(f"{len(left)} are left: call it again" if left else "all are measured")


if __name__ == "__main__":
    main()
