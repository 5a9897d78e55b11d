"""Combinations of options: what each wants beside its name, and what becomes of it: trained, or refused before it starts.

`python -m bench.pairwise` tries every pair and writes outputs/pairwise.md; the suite tries a sample.
"""

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from drivetrain.config.catalog import LISTS, option_files, options, target
from drivetrain.core.user.code import import_name
from tests.support import sets
from tests.support.put import put

SMALL = ["updates=2", "epochs=2", "log_every=1", "batch.global_batch=8", "runtime.threads=1"]
SMALL_VIT = "{img_size: 32, patch_size: 4, dynamic_img_size: true, depth: 2, embed_dim: 16, num_heads: 2}"
TINY_VIT = "{hidden_size: 16, num_hidden_layers: 2, num_attention_heads: 2, intermediate_size: 32, patch_size: 8}"
TINY_BERT = "{hidden_size: 16, num_hidden_layers: 2, num_attention_heads: 2, intermediate_size: 32}"
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
        self.text = len(shape) == 1 and (classes > 100 or shape[0] == 32)  # of bytes, such as words
        if len(shape) == 1:
            self.body = torch.nn.Embedding(max(classes, 300), 8) if self.text else torch.nn.Linear(*shape, 8)
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

class Streamed(torch.utils.data.IterableDataset):
    classes = ("a", "b")

    def __init__(self, split):
        self.at = 0

    def __iter__(self):
        while self.at < 40:
            self.at += 1
            yield torch.full((3, 32, 32), self.at / 40), self.at % 2
        self.at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]

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

class Sequences(Pictures):
    def __getitem__(self, index):
        return self.noise[index], torch.tensor([index % 2, 1, index % 2 * 101 - 100])

class EachColumn(torch.nn.Module):
    def __init__(self, shape, classes):
        super().__init__()
        widths = shape[0] * shape[1], 8, 8, classes
        self.layers = torch.nn.Sequential(*(torch.nn.Linear(a, b) for a, b in zip(widths, widths[1:])))

    def forward(self, x):
        return self.layers(x.flatten(1, 2).mT)

class Teacher(torch.nn.Module):
    def __init__(self, classes):  # its weights fit every data set
        super().__init__()
        self.scale, self.classes = torch.nn.Parameter(torch.ones(())), classes

    def forward(self, x):
        return self.scale * x.flatten(1).float().mean(1, keepdim=True) * torch.linspace(-1, 1, self.classes, device=x.device)

def each_pixel(shape, classes):
    widths = shape[0], 8, 8, classes
    return torch.nn.Sequential(*(torch.nn.Conv2d(a, b, 1) for a, b in zip(widths, widths[1:])))

def largest(output, target):
    return output.max()

def my_loss(output, y):
    if y.is_floating_point():
        return torch.nn.functional.mse_loss(output, y.view_as(output))
    if y.ndim > 1 and output.ndim == y.ndim + 1:  # a class for each position of a text
        output = output.movedim(-1, 1) if output.shape[1] == y.shape[1] else output
    elif output.ndim > y.ndim + 1:  # outputs for each pixel, and a class for the image
        output = output.flatten(2).mean(2)
    elif y.ndim > 1 and output.ndim == 2:  # a class for the image, and a mask
        y = y.flatten(1)[:, 0]
    return torch.nn.functional.cross_entropy(output, y)
"""

SETS = {"labels": "Labels", "values": "Numbers", "pair": "Views"}  # a kind of targets → the made-up set that has such
KINDS = {name: [*import_name(target(file)).takes][:1] for name, file in option_files()["loss"].items()}
# Loss → the set that it is tried on, where class numbers are not what it takes.
TARGETS = {name: SETS[kind] for name, kinds in KINDS.items() for kind in kinds if kind in SETS}
BY_FORECAST = "checkpointing.memory_gb=4"
# Keys that are techniques of their own, and the option that has each.
KEYS = {
    BY_FORECAST: "checkpointing=blocks",
    "parallel.shard_optimizer=true": "parallel=ddp",
    "optimizer.normalize=neurons": "optimizer=muon",
    "optimizer.cautious_decay=true": "optimizer=muon",
    "adapter.scale=stabilized": "adapter=lora",
    "adapter.init=pissa": "adapter=lora",
    "adapter.lr_ratio=16": "adapter=lora",
    "model.embedding_noise=5": "model=gpt",
}
Pair = frozenset[str]


def needs(folder: Path) -> dict[str, list[str]]:
    """The settings that an option wants besides its name, to be tried and to be small; options give way to those of a row."""
    own = ["data=own", "trust=[pairwise_net]"]
    each_pixel = ["model=own", "model.target=pairwise_net.each_pixel"]
    bert = ["model=transformers", "model.name=bert", f"model.config={TINY_BERT}"]
    shards = [f"data.{split}={folder}/shard.tar" for split in ("train", "test")]
    found = {
        "data=synthetic": ["data.shape=[3,32,32]", "data.samples=32", "data.test_samples=16"],
        "data=imagefolder": [f"data.root={folder}/images", "data.size=32", "data.holdout=0.3"],
        "data=cifar10": [f"data.root={folder}/cifar"],
        "data=packed": [f"data.root={folder}/packed"],
        "data=webdataset": [*shards, "data.size=32", f"data.cache={folder}/cache"],
        "data=own": ["data.target=pairwise_net.Pictures", "trust=[pairwise_net]"],
        "data=stream": ["data.target=pairwise_net.Streamed", "data.updates=4", "trust=[pairwise_net]"],
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
        "data=mix": [
            f"data.sources={{a: {{option: text, path: {folder}/texts.txt, length: 32}}}}",
            "model=gpt",
            "loss=next_token",
        ],
        "data=instructions": ["task=instruction"],
        "data=words": [f"data.path={folder}/words.jsonl", "data.length=32", *bert, "loss=token"],
        "data=diabetes": ["loss=mse", "model=mlp"],
        "data=wine": ["model=mlp"],
        "data=digit_scenes": ["data.samples=32", "data.test_samples=16", "loss=bce"],
        "model=unet": ["model.width=4", "data=masks"],
        "task=contrastive": ["data=digits"],
        "task=instruction": ["data=instructions", "model=gpt", "loss=next_token"],
        "task=multilabel": ["data=digit_scenes", "loss=bce"],
        "task=regression": ["data=diabetes", "loss=mse", "model=mlp"],
        "task=segmentation": ["data=masks", "model=unet"],
        "task=language_modelling": ["data=stdlib", "model=gpt", "loss=next_token"],
        "task=text_classification": ["data.max_files=200", "data=stdlib", "model=gpt", "loss=cross_entropy"],
        "model=gpt": ["model.width=16", "model.depth=2", "model.heads=2", "data=stdlib", "loss=next_token"],
        "loader=dali": ["data=imagefolder"],
        "loss=next_token": ["data=stdlib", "model=gpt"],
        "loss=masked_token": ["data=stdlib", *bert],
        "loss=token": ["data=words", *bert],
        **{f"loss={name}": [f"data.target=pairwise_net.{kind}", *own] for name, kind in TARGETS.items()},
        **{f"loss={name}": ["data.target=pairwise_net.Masks", *own, *each_pixel] for name in ("dice", "tversky")},
        "loss=ctc": ["data.target=pairwise_net.Sequences", *own, "model=own", "model.target=pairwise_net.EachColumn"],
        "loss=distill": [f"loss.teacher={folder}/teacher/model.safetensors", "trust=[pairwise_net]"],
        "loss=own": ["loss.target=pairwise_net.my_loss", "trust=[pairwise_net]"],
        **{f"metrics=[{name}]": ["data.target=pairwise_net.Numbers", *own, "loss=mse"] for name in ("mae", "rmse", "r2")},
        **{f"metrics=[{name}]": ["data.target=pairwise_net.Masks", *own, "loss=dice", *each_pixel] for name in ("iou", "dice")},
        **{f"metrics=[{name}]": ["data=stdlib", "model=gpt", "loss=next_token"] for name in ("perplexity", "bits_per_byte")},
        "metrics=[own]": ["metrics.own.target=pairwise_net.largest", "trust=[pairwise_net]"],
        "batch=bucketed": ["data=stdlib", "model=gpt", "loss=next_token", "runtime.cudnn_benchmark=false"],
        "model=timm": ["model.name=test_resnet"],
        "model=transformers": ["model.name=vit", f"model.config={TINY_VIT}"],
        "model=resnet9": ["model.width=4", "model.bias=true"],
        "model=mlp": ["model.hidden=[16,16,16]"],
        "precision=fp8": ["model=mlp", "model.hidden=[128,128]"],
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
        **{f"augment=[{name}]": ["data=imagefolder"] for name in ("randaugment", "trivialaugment", "three_augment")},
        "augment=[color_jitter]": ["data=imagefolder"],
        "augment=[random_erasing]": ["augment.random_erasing.fill=mean"],
    }
    return found | {word: [option, *found.get(option, [])] for word, option in KEYS.items()}


def complete(words: Iterable[str], folder: Path) -> list[str]:
    """The words of a run, with what they need: first come, first served."""
    # A tensor-parallel run knows certain models alone, and a task wants more of its data than the data by itself.
    first = ("parallel=tensor", "task=")
    done, waiting = list(SMALL), sorted(words, key=lambda word: not word.startswith(first))
    chosen = {_key(word): word for word in waiting}
    while waiting:
        done.append(waiting.pop(0))
        needed = needs(folder).get(done[-1], [])
        # An option that gives way to another one takes its settings along.
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
    put(folder / "teacher" / "config.yaml", "model: {_target_: drivetrain.model.own.OwnModel, target: pairwise_net.Teacher}\n")
    save_file({"scale": torch.ones(())}, folder / "teacher" / "model.safetensors")
    noise = np.random.default_rng(0)
    for label in ("a", "b"):
        (folder / "images" / label).mkdir(parents=True)
        for number in range(16):
            Image.fromarray(noise.integers(0, 255, (32, 32, 3), dtype=np.uint8)).save(folder / f"images/{label}/{number}.png")
    sets.write(folder, 32)


def factors(config_dirs: Sequence[str] = ()) -> dict[str, list[str]]:
    """group → its options as words; a list group is off or has one of its options. And keys of the whole config."""
    found = {}
    for group, names in options(config_dirs).items():
        if group in LISTS:
            found[group] = [f"{group}=[]", *(f"{group}=[{n}]" for n in names if n != "none")]
        else:
            found[group] = [f"{group}={n}" for n in names]
    for word in KEYS:
        found[word.partition(".")[0]].append(word)
    found |= {"stages": ["stages=null", "stages=[{until:1},{}]"], "target": ["target=null", "target=loss<=1000"]}
    return {group: words for group, words in found.items() if len(words) > 1}


@dataclass
class Outcome:
    """The end of one combination."""

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


def names_both(pair: Pair, reason: str) -> bool:
    """True if a refusal names both settings, by group and option or by a setting of the group, or by what the setting brings."""
    brings = {word: [word, *(w for w in needs(Path()).get(word, []) if "." not in w.partition("=")[0])] for word in pair}
    return all(any(word.split("=")[0] in reason for word in words) for words in brings.values())
