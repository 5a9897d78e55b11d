"""Every pair of options of all groups: trained together, or refused up front with a reason that names both.

`python -m tests.support.pairwise [JOURNAL]` runs the whole cover and writes docs/pairwise.md; the suite runs a sample of it.
With a journal it can be broken off and gone on with.
"""

from __future__ import annotations

import itertools
import json
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path

from drivetrain.config.catalog import LISTS, options
from tests.support import sets

ROOT = Path(__file__).resolve().parents[2]
SMALL = ["updates=2", "epochs=2", "log_every=1", "batch.global_batch=8", "runtime.threads=1"]
SMALL_VIT = "{img_size: 32, patch_size: 4, dynamic_img_size: true, depth: 2, embed_dim: 16, num_heads: 2}"
OWN_NET = """
import torch

class Block(torch.nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.conv = torch.nn.Conv2d(channels, channels, 3, padding=1)
        self.norm = torch.nn.BatchNorm2d(channels)

    def forward(self, x):
        return torch.relu(self.norm(self.conv(x)))

class Net(torch.nn.Module):
    def __init__(self, shape, classes):
        super().__init__()
        self.text = len(shape) == 1 and classes > 100
        if len(shape) == 1:
            self.body = torch.nn.Embedding(classes, 8) if self.text else torch.nn.Linear(*shape, 8)
        else:
            self.body = torch.nn.Sequential(Block(shape[0]), Block(shape[0]))
        width = 8 if self.text else self.body(torch.zeros(1, *shape)).numel()
        self.norm = Norm(width)
        self.head = torch.nn.Linear(width, classes)

    def forward(self, x):
        return self.head(self.norm(self.body(x) if self.text else self.body(x).flatten(1)))

class Norm(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight, self.eps = torch.nn.Parameter(torch.ones(width)), 1e-6

    def forward(self, x):
        mean = x.mean(-1, keepdim=True)
        return self.weight * (x - mean) / torch.sqrt((x - mean).pow(2).mean(-1, keepdim=True) + self.eps)

class Pictures(torch.utils.data.Dataset):
    classes = ("a", "b")

    def __init__(self, split):
        self.noise = torch.rand(32, 3, 32, 32, generator=torch.Generator().manual_seed(len(split)))

    def __len__(self):
        return 32

    def __getitem__(self, index):
        return self.noise[index], index % 2

class Labels(Pictures):
    def __getitem__(self, index):
        return self.noise[index], torch.tensor([index % 2, 1])

class Numbers(Pictures):
    classes = ("age",)

    def __getitem__(self, index):
        return self.noise[index], index / 32

class Masks(Pictures):
    def __getitem__(self, index):
        return self.noise[index], (self.noise[index, 0] > 0.5).long()

class Views(Pictures):
    def __getitem__(self, index):
        return torch.stack([self.noise[index], 1 - self.noise[index]]), index % 2

class Teacher(torch.nn.Module):
    def __init__(self, classes):  # its weights fit every data set
        super().__init__()
        self.scale, self.classes = torch.nn.Parameter(torch.ones(())), classes

    def forward(self, x):
        return self.scale * x.flatten(1).float().mean(1, keepdim=True) * torch.linspace(-1, 1, self.classes)

def each_pixel(shape, classes):
    return torch.nn.Conv2d(shape[0], classes, 1)

def errors(output, target):
    return (output.argmax(-1) != target).sum()

def my_loss(output, y):
    if y.is_floating_point():
        return torch.nn.functional.mse_loss(output, y.view_as(output))
    if y.ndim > 1 and output.ndim == y.ndim + 1:  # a class for each position of a text
        output = output.movedim(-1, 1) if output.shape[1] == y.shape[1] else output
    return torch.nn.functional.cross_entropy(output, y)
"""

TARGETS = {"bce": "Labels", "mse": "Numbers", "l1": "Numbers", "huber": "Numbers", "quantile": "Numbers", "contrastive": "Views"}
Pair = frozenset[str]


def needs(folder: Path) -> dict[str, list[str]]:
    """What an option wants besides its name, to be tried at all and to be small; options give way to those of a row."""
    own = ["data=own", "trust=[pairwise_net]"]
    each_pixel = ["model=own", "model.target=pairwise_net.each_pixel"]
    shards = [f"data.{split}={folder}/shard.tar" for split in ("train", "test")]
    return {
        "data=synthetic": ["data.shape=[3,32,32]", "data.samples=32", "data.test_samples=16"],
        "data=imagefolder": [f"data.root={folder}/images", "data.size=32", "data.holdout=0.3"],
        "data=cifar10": [f"data.root={folder}/cifar"],
        "data=packed": [f"data.root={folder}/packed"],
        "data=webdataset": [*shards, "data.size=32", f"data.cache={folder}/cache"],
        "data=own": ["data.target=pairwise_net.Pictures", "trust=[pairwise_net]"],
        "data=huggingface": [f"data.root={folder}/hub", "data.size=32"],
        "data=stdlib": [
            "data.max_files=10",
            "data.length=32",
            "data.test_samples=8",
            "model=gpt",
            "loss=next_token",
            "augment=[]",
        ],
        "data=tabular": [f"data.path={folder}/table.csv", "data.target=kind", "data.columns=[x]", "model=mlp"],
        "data=labels_csv": [f"data.path={folder}/table.csv", "data.target=kind", "data.size=32"],
        "data=masks": [f"data.root={folder}/masked", "data.size=32", "data.holdout=0.3", "model=unet"],
        "data=jsonl": [f"data.path={folder}/texts.jsonl", "data.length=32", "model=gpt", "loss=next_token"],
        "data=text": [f"data.path={folder}/texts.txt", "data.length=32", "model=gpt", "loss=next_token"],
        "data=diabetes": ["loss=mse", "model=mlp"],
        "data=wine": ["model=mlp"],
        "data=digit_scenes": ["data.samples=32", "data.test_samples=16", "loss=bce"],
        "model=unet": ["model.width=4", "data=masks"],
        "task=multilabel": ["data=digit_scenes", "loss=bce"],
        "task=regression": ["data=diabetes", "loss=mse", "model=mlp"],
        "task=segmentation": ["data=masks", "model=unet"],
        "task=language_modelling": ["data=stdlib", "model=gpt", "loss=next_token"],
        "task=text_classification": ["data=stdlib", "model=gpt", "loss=cross_entropy"],
        "task=contrastive": ["augment=[random_resized_crop]", "loss=contrastive"],
        "model=gpt": ["model.width=16", "model.depth=2", "model.heads=2", "data=stdlib", "loss=next_token"],
        "loader=dali": ["data=imagefolder"],
        "loss=next_token": ["data=stdlib", "model=gpt"],
        **{f"loss={name}": [f"data.target=pairwise_net.{kind}", *own] for name, kind in TARGETS.items()},
        "loss=dice": ["data.target=pairwise_net.Masks", *own, *each_pixel],
        "loss=distill": [f"loss.teacher={folder}/teacher/model.safetensors", "trust=[pairwise_net]"],
        "loss=own": ["loss.target=pairwise_net.my_loss", "trust=[pairwise_net]"],
        **{f"metrics=[{name}]": ["data.target=pairwise_net.Numbers", *own, "loss=mse"] for name in ("mae", "rmse", "r2")},
        **{f"metrics=[{name}]": ["data.target=pairwise_net.Masks", *own, "loss=dice", *each_pixel] for name in ("iou", "dice")},
        **{f"metrics=[{name}]": ["data=stdlib", "model=gpt", "loss=next_token"] for name in ("perplexity", "bits_per_byte")},
        "metrics=[own]": ["metrics.own.target=pairwise_net.errors", "trust=[pairwise_net]"],
        "batch=bucketed": ["data=stdlib", "model=gpt", "loss=next_token", "runtime.cudnn_benchmark=false"],
        "model=timm": ["model.name=test_resnet"],
        "model=resnet9": ["model.width=4", "model.bias=true"],
        "model=mlp": ["model.hidden=[16,16,16]"],
        "model=own": ["model.target=pairwise_net.Net", "trust=[pairwise_net]"],
        "parallel=tensor": ["model=timm", "model.name=vit_tiny_patch16_224", f"model.kwargs={SMALL_VIT}"],
        "parallel=split": ["parallel.devices=[cpu,cpu]"],
        "batch=accumulate": ["batch.accumulation_steps=2"],
        "batch=auto": ["batch.memory_gb=16"],
        "checkpointing=budget": ["compile=inductor"],
        "surgery=[fused_norm]": ["model=own"],
        "optimizer=schedulefree": ["scheduler=constant"],
        "adapter=lora": ["model=mlp"],
        "adapter=dora": ["model=mlp"],
        "augment=[randaugment]": ["data=imagefolder"],
        "augment=[color_jitter]": ["data=imagefolder"],
        "augment=[random_erasing]": ["augment.random_erasing.fill=mean"],
    }


def complete(words: Iterable[str], folder: Path) -> list[str]:
    """The words of a run, with what they need: first come, first served."""
    done, waiting = list(SMALL), sorted(words, key=lambda word: word != "parallel=tensor")  # it knows certain models alone
    chosen = {_key(word): word for word in waiting}
    while waiting:
        done.append(waiting.pop(0))
        needed = needs(folder).get(done[-1], [])
        # An option that gives way to another one takes its knobs along.
        gone = {_key(word) for word in needed if chosen.get(_key(word), word) != word}
        brought = [word for word in needed if _key(word) not in chosen and word.partition(".")[0] not in gone]
        chosen |= {_key(word): word for word in brought}  # options may bring each other
        waiting += brought
    return done


def _key(word: str) -> str:
    return word.partition("=")[0]


def prepare_folder(folder: Path) -> None:
    """Images, a model of the user's own and a trained teacher, for the options that want them."""
    import numpy as np
    import torch
    from PIL import Image
    from safetensors.torch import save_file

    (folder / "pairwise_net.py").write_text(OWN_NET)
    (folder / "teacher").mkdir()
    (folder / "teacher" / "config.yaml").write_text("model: {_target_: drivetrain.model.Own, target: pairwise_net.Teacher}\n")
    save_file({"scale": torch.ones(())}, folder / "teacher" / "model.safetensors")
    noise = np.random.default_rng(0)
    for label in ("a", "b"):
        (folder / "images" / label).mkdir(parents=True)
        for number in range(16):
            Image.fromarray(noise.integers(0, 255, (32, 32, 3), dtype=np.uint8)).save(folder / f"images/{label}/{number}.png")
    sets.write(folder, 32)


def factors(config_dirs: Sequence[str] = ()) -> dict[str, list[str]]:
    """group → its options as words; a list group is off or has one of its options."""
    found = {}
    for group, names in options(config_dirs).items():
        if group in LISTS:
            found[group] = [f"{group}=[]", *(f"{group}=[{n}]" for n in names if n != "none")]
        else:
            found[group] = [f"{group}={n}" for n in names]
    return {group: words for group, words in found.items() if len(words) > 1}


@dataclass
class Outcome:
    """What became of one combination."""

    words: tuple[str, ...]
    status: str  # trained, refused or broken
    reason: str = ""


def try_one(words: tuple[str, ...], folder: str) -> Outcome:
    """Train two updates with these options and save, in this process."""
    import drivetrain
    from drivetrain.core.errors import UserError

    sys.path.insert(0, folder)
    try:
        result = drivetrain.train([*complete(words, Path(folder)), f"output_dir={folder}/runs"])
    except UserError as error:
        return Outcome(words, "refused", str(error))
    except BaseException as error:
        return Outcome(words, "broken", f"{type(error).__name__}: {error}")
    finally:
        sys.path.remove(folder)
    saved = "saving=none" in words or any((result.run_dir / "checkpoints").glob("[0-9]*/manifest.json"))
    if result.status == "completed" and result.updates >= 1 and saved:
        return Outcome(words, "trained")
    return Outcome(words, "broken", f"{result.status}, {result.updates} updates: {result.error}")


def refused(words: Iterable[str], folder: Path, config_dirs: Sequence[str] = ()) -> str | None:
    """The reason why these options cannot be, told before anything is built; None if they can."""
    from drivetrain.config import validate as check
    from drivetrain.core.errors import UserError
    from drivetrain.launch.job import prepare

    try:
        check.validate_device(prepare(complete(words, folder), config_dirs).run)
    except UserError as error:
        return str(error)
    return None


@dataclass
class Cover:
    """Which options cannot be here at all, which pairs cannot be together, and rows that cover all other pairs."""

    alone: dict[str, str] = field(default_factory=dict)
    together: dict[Pair, str] = field(default_factory=dict)
    rows: list[tuple[str, ...]] = field(default_factory=list)
    pairs: set[Pair] = field(default_factory=set)  # that the rules allow


def cover(folder: Path, say: Callable[[str], None] = lambda _: None, workers: int = 2) -> Cover:
    """Ask the rules about every option and every pair, then cover the allowed pairs with as few rows as allpairspy finds."""
    from allpairspy import AllPairs

    result, groups = Cover(), factors()
    for word in itertools.chain(*groups.values()):
        if reason := refused([word], folder):
            result.alone[word] = reason
    able = {group: [w for w in words if w not in result.alone] for group, words in groups.items()}
    pairs = [p for a, b in itertools.combinations(able, 2) for p in itertools.product(able[a], able[b])]
    say(f"{len(pairs)} pairs of {sum(map(len, able.values()))} options")
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        reasons = pool.map(refused, pairs, itertools.repeat(folder), chunksize=64)
        result.together = {frozenset(pair): reason for pair, reason in zip(pairs, reasons, strict=True) if reason}
    say(f"{len(result.together)} pairs refused")

    def allowed(row: list[str]) -> bool:
        return not any(frozenset(p) in result.together for p in itertools.combinations(row, 2))

    result.rows = [tuple(row) for row in AllPairs(list(able.values()), filter_func=allowed)]
    result.pairs = {frozenset(p) for p in pairs} - set(result.together)
    return result


def trained_pairs(outcomes: Iterable[Outcome]) -> set[Pair]:
    """The pairs that have trained together in some row."""
    return {frozenset(p) for o in outcomes if o.status == "trained" for p in itertools.combinations(o.words, 2)}


def run(rows: Iterable[tuple[str, ...]], folder: Path, workers: int = 2) -> Iterator[Outcome]:
    """Try the rows, a few processes at a time; one that dies is a broken row, not the end."""
    waiting = list(rows)
    while waiting:
        with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
            futures = {pool.submit(try_one, row, str(folder)): row for row in waiting}
            try:
                for future in as_completed(futures):
                    outcome = future.result()
                    waiting.remove(futures[future])
                    yield outcome
            except BrokenProcessPool:
                pass
        if waiting and len(waiting) == len(futures):  # nobody got through: the first one kills
            yield Outcome(waiting.pop(0), "broken", "the process died")


def names_both(pair: Pair, reason: str) -> bool:
    """Whether a refusal names both settings, by group and option or by a knob of the group, or by what the setting brings."""
    brings = {word: [word, *(w for w in needs(Path()).get(word, []) if "." not in w.partition("=")[0])] for word in pair}
    return all(any(word.split("=")[0] in reason for word in words) for words in brings.values())


def matrix(found: Cover, outcomes: list[Outcome]) -> str:
    """docs/pairwise.md."""
    trained = trained_pairs(outcomes) - set(found.together)  # a journal may know of a time before a refusal
    groups = factors()
    lines = ["# Which options go together", ""]
    total = sum(len(a) * len(b) for a, b in itertools.combinations(groups.values(), 2))
    alone = sum(
        any(w in found.alone for w in pair)
        for a, b in itertools.combinations(groups.values(), 2)
        for pair in itertools.product(a, b)
    )
    rest = total - len(trained) - len(found.together) - alone
    lines += [
        f"{total} pairs of options: {len(trained)} trained together, two updates and a save; {len(found.together)} refused",
        f"with a reason that names both, {alone} with an option that this machine cannot run, {rest} open.",
        f"{len(outcomes)} runs covered them.",
        "", "Written by `python -m tests.support.pairwise` on a CPU.",
        "", "## Refused together", "", "| pair | reason |", "|---|---|",
    ]  # fmt: skip
    lines += [f"| {' · '.join(sorted(p))} | {' '.join(r.split())} |" for p, r in sorted(found.together.items(), key=str)]
    lines += ["", "## Not on this machine", "", "| option | reason |", "|---|---|"]
    lines += [f"| {w} | {' '.join(r.split())} |" for w, r in found.alone.items()]
    lines += ["", "## Tried", "", "| group | options |", "|---|---|"]
    lines += [f"| {group} | {' '.join(words)} |" for group, words in groups.items()]
    broken = [o for o in outcomes if o.status == "broken"]
    if broken:
        lines += ["", "## Broken", ""] + [f"- `{' '.join(o.words)}`: {' '.join(o.reason.split())}" for o in broken]
    return "\n".join(lines) + "\n"


def main(journal: Path | None = None) -> int:
    """Run the whole cover; 1 if anything broke. What has trained by a journal, which an earlier run kept, is not run again."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare_folder(folder)
        found = cover(folder, print)
        print(f"{len(found.rows)} rows")
        outcomes = _kept(journal)
        done = trained_pairs(outcomes)
        rows = [row for row in found.rows if not {frozenset(p) for p in itertools.combinations(row, 2)} & found.pairs <= done]
        _try(rows, folder, outcomes, journal)
        # What a row of many options was refused for is not every pair's in it: the rest by itself.
        rest = [tuple(sorted(pair)) for pair in sorted(found.pairs - trained_pairs(outcomes), key=sorted)]
        print(f"{len(rest)} pairs by themselves")
        alone: list[Outcome] = []
        _try(rest, folder, alone, journal)
        found.together |= {frozenset(o.words): o.reason for o in alone if o.status == "refused"}
        outcomes += alone
        text = matrix(found, outcomes).replace(name, "…")
    (ROOT / "docs").mkdir(exist_ok=True)
    (ROOT / "docs" / "pairwise.md").write_text(text)
    print(text.split("##")[0])
    broken = any(o.status == "broken" for o in outcomes)
    return int(broken or not all(names_both(pair, reason) for pair, reason in found.together.items()))


def _kept(journal: Path | None) -> list[Outcome]:
    """What has trained already."""
    lines = journal.read_text().splitlines() if journal is not None and journal.exists() else []
    known = {word for words in factors().values() for word in words}
    found = [Outcome(tuple(words), "trained") for words in map(json.loads, lines)]
    return [o for o in found if known.issuperset(o.words)]


def _try(rows: list[tuple[str, ...]], folder: Path, outcomes: list[Outcome], journal: Path | None) -> None:
    for number, outcome in enumerate(run(rows, folder), 1):
        outcomes.append(outcome)
        if outcome.status == "trained" and journal is not None:
            with journal.open("a") as kept:
                kept.write(json.dumps(outcome.words) + "\n")
        print(f"{number:4d}/{len(rows)} {outcome.status}: {' '.join(outcome.words)} {outcome.reason}", flush=True)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]) if len(sys.argv) > 1 else None))
