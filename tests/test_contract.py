"""The duties of every option of every group: they are found in conf/, so that a new one is tested by being there."""

import importlib
import inspect
import json
import math
import os
import pkgutil
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
from PIL import Image

from drivetrain.config import catalog, schema
from drivetrain.config import validate as check
from drivetrain.config.catalog import LISTS, key_lines, option_files, options, shipped_targets
from drivetrain.config.compose import compose
from drivetrain.core.errors import UserError
from drivetrain.core.machine.paths import conf_dir
from drivetrain.core.user.code import import_name
from drivetrain.launch import launcher
from drivetrain.model.shipped import Mlp
from drivetrain.optimizer import algorithms
from drivetrain.optimizer.torch_optim import Sgd
from drivetrain.precision import Precision
from drivetrain.precision.base import Amp
from drivetrain.saving import manifest
from drivetrain.testing import contract_problems
from tests.support import sets
from tests.support.pairwise import TARGETS
from tests.support.to_end import continued, run_to_end

Option = tuple[str, str]  # group, name
FILES = {(group, name): file for group, files in option_files().items() for name, file in files.items()}
OPTIONS = list(FILES)
SHIPPED = [option for option, file in FILES.items() if file.is_relative_to(conf_dir())]

# What options want beside them to be of use, for a whole group or for one option: a new technique's row goes here.
RESNET = ["model=resnet9", "model.width=8", "model.bias=true"]
PHOTOGRAPHS = ["data=imagefolder", "data.root=images", "data.size=8", "data.holdout=0.3"]
TEXT = [
    "data=stdlib", "data.max_files=10", "data.length=32", "data.test_samples=8", "loss=next_token",
    "model=gpt", "model.width=16", "model.heads=2", "model.depth=2",
]  # fmt: skip
BERT = [
    "model=transformers", "model.name=bert",
    "model.config={hidden_size: 16, num_hidden_layers: 2, num_attention_heads: 2, intermediate_size: 32}",
]  # fmt: skip
SCENES = ["data=digit_scenes", "data.samples=48", "data.test_samples=20"]
TINY_VIT = "{hidden_size: 16, num_hidden_layers: 2, num_attention_heads: 2, intermediate_size: 32, patch_size: 4}"
SMALL_VIT = "model.kwargs={img_size: 8, patch_size: 4, depth: 2, embed_dim: 24, num_heads: 2}"
MASKS = ["data=own", "data.target=outside.Masks", "trust=[outside]"]
PIXELS = [*MASKS, "model=own", "model.target=outside.each_pixel"]
NUMBERS = ["data=own", "data.target=outside.Numbers", "loss=mse", "trust=[outside]"]
BESIDE = {
    "surgery": RESNET,
    ("surgery", "fused_norm"): ["model=own", "model.target=outside.Normed", "trust=[outside]"],
    ("checkpointing", "budget"): ["compile=inductor"],
    "adapter": ["model.hidden=[8,8]"],
    ("ema", "post_hoc"): ["saving=last"],
    "loader": ["data=own", "data.target=outside.Pictures", "trust=[outside]"],
    "augment": ["model=resnet9", "model.width=4"],
    ("model", "resnet9"): ["model.width=8"],
    ("model", "timm"): ["model.name=test_resnet", "data.shape=[3,32,32]"],
    ("model", "transformers"): ["model.name=vit", f"model.config={TINY_VIT}"],
    ("model", "own"): ["model.target=outside.Net", "trust=[outside]"],
    ("data", "imagefolder"): PHOTOGRAPHS[1:],
    ("data", "cifar10"): ["data.root=cifar"],
    ("data", "packed"): ["data.root=packed"],
    ("data", "webdataset"): ["data.train=shard.tar", "data.test=shard.tar", "data.size=8", "data.cache=cache"],
    ("data", "own"): ["data.target=outside.Pictures", "trust=[outside]"],
    ("data", "stream"): ["data.target=outside.Streamed", "data.updates=4", "trust=[outside]"],
    ("data", "huggingface"): ["data.root=hub", "data.size=8"],
    ("data", "stdlib"): TEXT,
    ("model", "gpt"): TEXT,
    ("loss", "next_token"): TEXT,
    ("loss", "masked_token"): [*TEXT[:4], *BERT],
    ("loss", "token"): ["data=words", "data.path=words.jsonl", "data.length=32", *BERT],
    ("data", "words"): ["data.path=words.jsonl", "data.length=32", "loss=token", *BERT],
    **{("loss", name): ["data=own", f"data.target=outside.{data}", "trust=[outside]"] for name, data in TARGETS.items()},
    ("loss", "dice"): PIXELS,
    ("loss", "tversky"): PIXELS,
    ("loss", "ctc"): [
        "data=own",
        "data.target=outside.Sequences",
        "trust=[outside]",
        "model=own",
        "model.target=outside.EachColumn",
    ],
    ("loss", "distill"): [
        "data=synthetic",
        "data.shape=[3,8,8]",
        "data.classes=4",
        "data.samples=48",
        "model=mlp",
        "loss.teacher=teacher/model.safetensors",
    ],
    ("loss", "own"): ["loss.target=outside.my_loss", "trust=[outside]"],
    ("batch", "bucketed"): TEXT,
    **{("metrics", name): NUMBERS for name in ("mae", "rmse", "r2")},
    **{("metrics", name): [*PIXELS, "loss=dice"] for name in ("iou", "dice")},
    ("metrics", "perplexity"): TEXT,
    ("metrics", "bits_per_byte"): TEXT,
    ("metrics", "own"): ["metrics.own.target=outside.errors", "trust=[outside]", "data=digits"],
    ("data", "tabular"): ["data.path=table.csv", "data.target=kind", "data.columns=[x]"],
    ("data", "labels_csv"): ["data.path=table.csv", "data.target=kind", "data.size=8"],
    ("data", "masks"): ["data.root=masked", "data.size=8", "data.holdout=0.3", "model=unet", "model.width=4"],
    ("data", "text"): ["data.path=texts.txt", "data.length=32", *TEXT[4:]],
    ("data", "mix"): [
        "data.sources={a: {option: text, path: texts.txt, length: 32}, b: {option: text, path: texts.txt, length: 32}}",
        *TEXT[4:],
    ],
    ("data", "instructions"): ["data.length=128", *TEXT[4:]],
    ("data", "jsonl"): ["data.path=texts.jsonl", "data.length=32", *TEXT[4:]],
    ("data", "diabetes"): ["loss=mse"],
    ("data", "digit_scenes"): [*SCENES[1:], "loss=bce", "model=resnet9", "model.width=4"],
    ("model", "unet"): [*MASKS, "model.width=4"],
    ("task", "multilabel"): [*SCENES, "model=resnet9", "model.width=4"],
    ("task", "regression"): ["data=diabetes", "model.hidden=[8]"],
    ("task", "segmentation"): PIXELS,
    ("task", "language_modelling"): TEXT,
    ("task", "instruction"): ["data=instructions", "data.length=128", *TEXT[4:]],
    ("task", "text_classification"): ["data=stdlib", "data.length=32", "data.test_samples=8", "model=gpt", "model.width=16"],
    ("task", "contrastive"): ["data=digits", "model=resnet9", "model.width=4"],
    ("optimizer", "adamw8bit"): ["debug=none"],  # a profile of its small operations takes seconds
    ("optimizer", "lbfgs"): ["optimizer.max_iter=3"],
    ("parallel", "split"): ["parallel.devices=[cpu,cpu]"],
    ("parallel", "tensor"): ["model=timm", "model.name=vit_tiny_patch16_224", SMALL_VIT],
    ("parallel", "pipeline"): ["model.hidden=[16,16]"],
    ("batch", "auto"): ["batch.memory_gb=64"],
    ("loader", "dali"): PHOTOGRAPHS,
    **{("augment", name): PHOTOGRAPHS for name in ("randaugment", "trivialaugment", "three_augment")},
    ("logger", "mlflow"): ["logger.mlflow.uri=mlruns"],  # a new database takes ten seconds
    ("logger", "images"): ["data.shape=[3,8,8]"],
    ("augment", "color_jitter"): PHOTOGRAPHS,
}
# Options that this machine may lack a package or a device for. They must say which; any other refusal is a failure.
LACKING = ("which is not installed", "needs a CUDA device")
STRICT = "DRIVETRAIN_TEST_STRICT"  # set to 1 on a machine that should have everything: what is lacking then fails
# They compile, start processes or write for seconds. Their own tests train them, save and go on.
SLOW = {
    *(("compile", name) for name in ("inductor", "regional", "step")),
    *(("parallel", name) for name in ("ddp", "fsdp", "tensor", "pipeline")),
    *(("logger", name) for name in ("wandb", "mlflow")),
    ("batch", "auto"),
    ("batch", "critical"),
    ("checkpointing", "budget"),
}
# Groups whose options keep something from update to update, or give what a checkpoint holds another form: they are resumed.
WITH_STATE = {
    "batch", "ema", "loader", "logger", "model", "optimizer", "parallel", "precision", "saving", "scheduler", "stop", "surgery",
}  # fmt: skip

NET = '''
"""Somebody's own network."""
import torch

class Net(torch.nn.Module):
    def __init__(self, shape, classes):
        super().__init__()
        self.only = torch.nn.Linear(torch.Size(shape).numel(), classes)

    def forward(self, x):
        return self.only(x.flatten(1))

class LayerNorm(torch.nn.Module):
    def __init__(self, size):
        super().__init__()
        self.weight, self.bias = torch.nn.Parameter(torch.ones(size)), torch.nn.Parameter(torch.zeros(size))
        self.eps = 1e-5

    def forward(self, x):
        x = x - x.mean(-1, keepdim=True)
        return x / torch.sqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight + self.bias

class Normed(Net):
    def __init__(self, shape, classes):
        super().__init__(shape, classes)
        self.norm = LayerNorm(torch.Size(shape).numel())

    def forward(self, x):
        return self.only(self.norm(x.flatten(1)))

def errors(output, target):
    return (output.argmax(1) != target).sum()

class Pictures(torch.utils.data.Dataset):
    classes = ("cat", "dog")

    def __init__(self, split):
        self.offset = {"train": 0, "test": 100}[split]

    def __len__(self):
        return 50

    def __getitem__(self, index):
        return torch.full((3, 8, 8), (self.offset + index) / 150), index % 2

class Streamed(torch.utils.data.IterableDataset):
    classes = ("a", "b")

    def __init__(self, split):
        self.at = 0

    def __iter__(self):
        while self.at < 40:
            self.at += 1
            yield torch.full((3, 8, 8), self.at / 40), self.at % 2
        self.at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]

class Labels(Pictures):
    classes = ("striped", "furry", "wild")

    def __getitem__(self, index):
        return super().__getitem__(index)[0], torch.tensor([index % 2, 1, index // 25])

class Numbers(Pictures):
    classes = ("age",)

    def __getitem__(self, index):
        return super().__getitem__(index)[0], index / 50

class Masks(Pictures):
    def __getitem__(self, index):
        picture, label = super().__getitem__(index)
        mask = torch.full((8, 8), label)
        mask[: index % 5] = -100
        return picture, mask

class Views(Pictures):
    def __getitem__(self, index):
        picture, label = super().__getitem__(index)
        return torch.stack([picture, 1 - picture]), label

class Sequences(Pictures):
    def __getitem__(self, index):
        picture, label = super().__getitem__(index)
        return picture, torch.tensor([label, 1, index % 2 * 101 - 100])

class EachColumn(torch.nn.Module):
    def __init__(self, shape, classes):
        super().__init__()
        self.only = torch.nn.Linear(shape[0] * shape[1], classes)

    def forward(self, x):
        return self.only(x.flatten(1, 2).mT)

def each_pixel(shape, classes):
    return torch.nn.Conv2d(shape[0], classes, 1)

def my_loss(output, y):
    return {"fit": torch.nn.functional.cross_entropy(output, y), "size": 0.01 * output.square().mean()}
'''


def word(group: str, option: str) -> str:
    return f"{group}=[{option}]" if group in LISTS else f"{group}={option}"


def ids(pairs) -> list[str]:
    return [word(*pair) for pair in pairs]


@pytest.fixture
def outside(data_folder, tmp_path, monkeypatch):
    """Things outside of drivetrain: images, and a class of one's own."""
    for each in data_folder.iterdir():
        (tmp_path / each.name).symlink_to(each)
    monkeypatch.syspath_prepend(tmp_path)


def write_outside(folder: Path) -> None:
    sets.write(folder)
    (folder / "outside.py").write_text(NET)
    write_teacher(folder / "teacher")
    for label, name in enumerate(("cat", "dog")):
        of_class = folder / "images" / name
        of_class.mkdir(parents=True)
        for i in range(25):
            Image.new("RGB", (12, 10), (100 * label, 5 * i, 50)).save(of_class / f"{i}.png")


def write_teacher(folder: Path) -> None:
    """The file that a run leaves of its model: the multilayer perceptron of a tiny run."""
    folder.mkdir()
    model = Mlp()
    safetensors.torch.save_file(model.create((3, 8, 8), 4).state_dict(), folder / "model.safetensors")
    settings = "".join(f"  {name}: {json.dumps(value)}\n" for name, value in vars(model).items())
    (folder / "config.yaml").write_text(f"model:\n  _target_: drivetrain.model.shipped.Mlp\n{settings}")


def class_of(option: Option) -> type[Any]:
    """The class of an option."""
    return import_name(catalog.target(FILES[option]))


def words_of(option: Option) -> list[str]:
    """An option, and what it wants beside it: its own words take the place of its group's."""
    own = BESIDE.get(option, [])
    chosen = {w.partition("=")[0] for w in own}
    of_group = [w for w in BESIDE.get(option[0], []) if w.partition("=")[0].partition(".")[0] not in chosen]
    return [*of_group, word(*option), *own]


def settings_of(option: Option) -> dict[str, str]:
    """What its words set, by key; a group that it takes as it usually is has "as usual", one that a task sets has the task.

    Metrics are left out: several can be chosen.
    """
    found = dict(w.split("=", 1) for w in words_of(option))
    for key in catalog.content(FILES[option]).get("preset") or {}:
        found.setdefault(key.partition(".")[0], word(*option))
    for key in list(found):
        found.setdefault(key.partition(".")[0], "as usual")
    return {key: value for key, value in found.items() if key != "metrics"}


def in_rows(given: Iterable[Option], alone: Container[Option] = ()) -> list[list[Option]]:
    """The options in rows, in each as many as have words that go together; those to be `alone` have a row of their own."""
    rows: list[tuple[list[Option], dict[str, str]]] = []
    for option in sorted(given, key=lambda option: -len(settings_of(option))):
        own, fitting = settings_of(option), []
        for row, taken in rows if option not in alone else ():
            if row[0] not in alone and all(taken.get(key, value) == value for key, value in own.items()):
                fitting.append((row, taken))
        # Options with a state find one another first, as it is their runs that are resumed.
        row, taken = min(fitting, key=lambda each: is_resumed(each[0]) != (option[0] in WITH_STATE), default=([], {}))
        if not row:
            rows.append((row, taken))
        row.append(option)
        taken.update(own)
    return [row for row, _ in rows]


def is_resumed(row: Iterable[Option]) -> bool:
    """True if something in a row has a state."""
    return any(group in WITH_STATE for group, _ in row)


def words_of_row(row: Iterable[Option], beside: bool = True) -> list[str]:
    """The options of a row, and what they want `beside` them."""
    words = dict.fromkeys(w for option in row for w in (words_of(option) if beside else [word(*option)]))
    metrics = [name for group, name in row if group == "metrics"]
    chosen = [w for w in words if not w.startswith("metrics=")]
    return [*chosen, *([f"metrics=[{','.join(metrics)}]"] if metrics else [])]


def train_row(tiny: Callable[..., list[str]], row: Sequence[Option], resumes: bool = False) -> None:
    """Two updates and a checkpoint that is whole; a resume goes on with the third. Raises UserError for a refusal."""
    words = words_of_row(row)
    first = run_to_end(tiny(*words), updates=2)
    run_dir = Path(first.run_dir)
    loss = next(value for name, value in first.judged("final").items() if name.rpartition("/")[2] == "loss")
    assert math.isfinite(loss)
    assert loss != 0  # a likelihood's may be below
    saved = run_dir / "checkpoints" / "2"
    problem = None if ("saving", "none") in row else manifest.verify(saved)
    assert problem is None, problem
    assert saved.exists() != (("saving", "none") in row)
    if resumes or is_resumed(row):
        assert continued(run_dir, "updates=3", updates=3).run_dir.resolve() == run_dir.resolve()
        records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
        assert [r["update"] for r in records if r["event"] == "train"] == [1, 2, 3]
        if saved.exists():
            before, after = (p / "model.safetensors" for p in (saved, run_dir / "checkpoints" / "3"))
            assert before.read_bytes() != after.read_bytes()
    alone = [option for option in row if words_of(option) == [word(*option)]]
    if alone and len(alone) < len(row):  # they need nothing of what another of the row has beside it
        launcher.prepare(tiny(*words_of_row(alone)))


def in_parts(row: Sequence[Option], train: Callable[[Sequence[Option]], None]) -> Iterator[str]:
    """Train a row of options, and its parts where it is refused or fails, down to the option that is to blame.

    Yields what this machine lacks for some of them. Raises what an option by itself, or a row of several, fails with.
    """
    try:
        train(row)
    except Exception as error:
        problems = error.problems if isinstance(error, UserError) else []
        lacking = [p for p in problems if any(lack in p for lack in LACKING)]
        yield from lacking
        named = [o for o in row if any(word(*o) in p or "=".join(o) in p for p in lacking or problems)]
        if lacking and named:
            parts = [[o for o in row if o not in named]]
        elif len(row) == 1:
            raise
        elif named:  # some that exclude each other
            parts = [[o for o in row if o != named[-1]], named[-1:]]
        else:
            parts = [[*row[: len(row) // 2]], [*row[len(row) // 2 :]]]
        for part in filter(None, parts):
            yield from in_parts(part, train)
        if not problems:
            raise  # the options fail together


def skip_or_fail(lacking: Iterable[str | None]) -> None:
    """Skip the test where something is lacking, with the reasons; in strict mode it fails."""
    if reasons := "; ".join(filter(None, lacking)):
        (pytest.fail if os.environ.get(STRICT) == "1" else pytest.skip)(reasons)


ROWS = in_rows(option for option in OPTIONS if option not in SLOW)


NO_TECHNIQUES = {"data", "logger", "loss", "metrics", "model", "runtime", "task"}  # what is trained and recorded, not how


def test_a_technique_says_when_to_use_it() -> None:
    """In one line under the first comment, with no full stop: `drivetrain list` and the cards print it."""
    for file in (FILES[option] for option in SHIPPED if option[0] not in NO_TECHNIQUES):
        comments = [line for line in file.read_text().splitlines() if line.startswith("#") and "@package" not in line]
        second = "".join(comments[1:2])
        assert second.startswith("# when: "), f"{file}: a second comment '# when: …' says when to use it"
        when = catalog.when(file)
        assert len(when.split()) >= 3, (file, when)
        assert not when.endswith("."), (file, when)
        assert not catalog.summary(file).startswith("when:"), file


@pytest.mark.parametrize("row", ROWS, ids=[" ".join(ids(row)) for row in ROWS])
def test_options_compose_build_train_save_and_go_on(tiny, outside, row):
    """Several options in one run, and in several where they are refused together."""
    skip_or_fail(in_parts(row, partial(train_row, tiny)))


@pytest.mark.slow
@pytest.mark.parametrize("option", OPTIONS, ids=ids(OPTIONS))
def test_an_option_by_itself(tiny, outside, option):
    """As above, and every option is resumed."""
    skip_or_fail(in_parts([option], partial(train_row, tiny, resumes=True)))


def test_what_is_lacking_is_named_and_fails_where_nothing_may_be(monkeypatch):
    monkeypatch.delenv(STRICT, raising=False)
    skip_or_fail([None, None])
    with pytest.raises(pytest.skip.Exception, match=r"optimizer=x needs the package 'y', which is not installed; .*CUDA"):
        skip_or_fail(["optimizer=x needs the package 'y', which is not installed", None, "debug=z needs a CUDA device"])
    monkeypatch.setenv(STRICT, "1")
    skip_or_fail([None])
    with pytest.raises(pytest.fail.Exception, match="needs a CUDA device"):
        skip_or_fail(["debug=z needs a CUDA device"])


def test_a_refusal_for_another_reason_is_no_lack(tiny, outside, monkeypatch):
    monkeypatch.delitem(BESIDE, ("surgery", "fused_norm"))  # its words: the model beside it then has no such norm
    with pytest.raises(UserError, match="has no effect on this model"):
        list(in_parts([("surgery", "fused_norm")], partial(train_row, tiny)))


def test_every_option_is_in_a_row_and_chosen_there():
    for group, name in OPTIONS:
        *_, chosen = (w for w in words_of((group, name)) if w.startswith(f"{group}="))
        assert chosen == word(group, name)
    assert sorted(option for row in ROWS for option in row) == sorted(set(OPTIONS) - SLOW)
    for row in ROWS:
        groups = [group for group, _ in row if group != "metrics"]
        assert len(set(groups)) == len(groups)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["data=imagefolder"], "data=imagefolder needs data.root"),
        (["data=imagefolder", "data.root=/nowhere"], "data.root=/nowhere"),
        (["data=cifar10"], "data=cifar10 needs data.root"),
        (["data=packed"], "data=packed needs data.root"),
        (["data=webdataset"], "data=webdataset needs data.train"),
        (["data=own"], "data=own needs data.target"),
        (["data=own", "data.target=outside.Pictures"], "trust=[outside]"),
        (["data=huggingface"], "data=huggingface needs"),
        (["metrics=[own]"], "metrics=[own] needs metrics.own.target"),
        (["loss=own"], "loss=own needs loss.target"),
        (["loss=own", "loss.target=outside.my_loss"], "trust=[outside]"),
        (["loss=distill"], "loss=distill needs loss.teacher"),
        (["model=own"], "model=own needs model.target"),
        (["model=transformers"], "model=transformers needs model.name"),
        (["model=own", "model.target=outside.Net"], "trust=[outside]"),
    ],
)
def test_an_option_without_what_it_needs_is_refused(problems, outside, words, says):
    assert any(says in problem for problem in problems(*words))


def test_its_yaml_is_its_constructors_signature():
    for row in in_rows(OPTIONS, alone=[option for option in OPTIONS if option[0] == "task"]):  # which may set values of others
        config = compose(words_of_row(row, beside=False)).plain
        for group, option in row:
            assert contract_problems(group, option) == []
            section = dict(config[group][option] if group in LISTS else config[group])
            cls = import_name(section.pop("_target_"))
            made, parameters = vars(cls()), inspect.signature(cls).parameters  # from Python as from the command line
            defaults = {k: made.get(k, parameters[k].default) for k in section}
            assert {k: list(v) if isinstance(v, tuple) else v for k, v in defaults.items()} == section, f"{group}={option}"


def test_what_a_class_does_not_say_it_does_not_claim():
    class Plugin(Precision):
        """An option of somebody else's."""

    class Ours(Amp):
        """An option whose base class says what it changes, which is not what this one does."""

    class Optimizer(Sgd):
        """An optimizer is another one anyway."""

    assert (Precision.effect, Plugin.effect, Plugin().effect_as_set()) == ("exact", "changes", "changes")
    assert (Amp.effect, Ours.effect, Ours.changes) == ("close", "changes", "")
    assert (Optimizer.effect, Optimizer.changes) == ("changes", Sgd.changes)


IMPLEMENTATIONS = {
    "optimizer": [f"drivetrain.optimizer.algorithms.{m.name}" for m in pkgutil.iter_modules(algorithms.__path__)],
    "model": ["drivetrain.model.gpt", "drivetrain.model.nets"],
}


@pytest.mark.parametrize("group", IMPLEMENTATIONS)
def test_what_an_option_builds_has_no_second_default(group):
    """The option gives every hyperparameter, so that its default is the only one."""
    given = (inspect.signature(class_of(option)).parameters for option in OPTIONS if option[0] == group)
    settings = {"betas"}.union(*given)
    for module in map(importlib.import_module, IMPLEMENTATIONS[group]):
        classes = [c for _, c in inspect.getmembers(module, inspect.isclass) if c.__module__ == module.__name__]
        assert classes
        for cls in classes:
            parameters = inspect.signature(cls).parameters.values()
            assert [p.name for p in parameters if p.name in settings and p.default is not p.empty] == [], cls


def test_the_checks_of_settings_do_find_what_is_wrong():
    """The contract above trusts them."""
    from drivetrain.clip.base import Norm

    assert len(list(schema.of(Norm).problems("clip", {"max_norm": -1.0, "norm_type": "two", "extra": 1}))) == 3


# Names that say it all wherever they stand.
OBVIOUS = {
    "lr", "momentum", "nesterov", "weight_decay", "beta1", "beta2", "eps", "classes", "samples", "test_samples", "shape",
    "drop_last", "updates", "eval_batches", "check_nan", "max_norm", "norm_type", "seed",
}  # fmt: skip


def test_its_yaml_says_what_it_buys_and_what_each_setting_does():
    keys = {option: key_lines(file) for option, file in FILES.items()}
    for (group, option), file in FILES.items():
        lines = file.read_text().splitlines()
        comments = [line for line in lines if line.startswith("#") and not line.startswith("# @package")]
        assert lines[0].startswith("#"), file
        assert len(comments[0]) > 12, file
        for line in keys[group, option]:
            setting, colon, rest = line.partition(":")
            if colon and "#" not in rest and not line.startswith(" ") and setting not in OBVIOUS:
                siblings = (s for (g, _), of_option in keys.items() if g == group for s in of_option)
                assert any(s.startswith(f"{setting}:") and "#" in s for s in siblings), f"{file}: {setting} has no comment"


def test_a_key_that_options_share_is_said_once():
    """It stands in a file such as `_shared.yaml`, of which a file of an option differs where it wants to."""
    for group in options():
        lines = [line for (g, _), path in FILES.items() if g == group for line in path.read_text().splitlines()]
        for shared in (conf_dir() / group).glob("_*.yaml"):
            keys = [line for line in shared.read_text().splitlines() if not line.startswith(("#", "defaults"))]
            assert keys
            assert not {" ".join(line.split()) for line in lines} & {" ".join(line.split()) for line in keys}, shared
            assert sum(shared.stem in line for line in lines if line.startswith("defaults")) > 1 or any(
                shared.stem in other.read_text() for other in shared.parent.glob("_*.yaml") if other != shared
            ), f"{shared} has one user"


def test_its_targets_are_drivetrains_own():
    for option in SHIPPED:
        targets = [line.partition(":")[2].strip() for line in FILES[option].read_text().splitlines() if "_target_" in line]
        assert len(targets) == 1, option
        assert targets[0].startswith("drivetrain."), option
        assert targets[0] in shipped_targets(), option


def test_every_group_has_its_off_switch_or_a_default():
    groups = options()
    assert set(groups) >= {
        "precision", "optimizer", "scheduler", "loader", "parallel", "checkpointing", "batch", "compile", "surgery", "clip",
        "ema", "model", "data", "augment", "debug", "saving", "logger", "runtime", "metrics", "stop",
    }  # fmt: skip
    defaults = compose([]).choices
    assert set(defaults) == set(groups)
    for group, chosen in defaults.items():
        assert set(chosen if isinstance(chosen, list) else [chosen]) <= set(groups[group])
    names = {name for options_ in groups.values() for name in options_}
    assert not names & {"on", "off", "yes", "no", "true", "false", "null", "y", "n"}  # YAML reads those as something else


def test_the_defaults_are_a_good_run():
    job = launcher.prepare([])
    assert not job.notices
    check.validate_device(job.run)


def test_its_settings_are_set_once():
    """Whoever wants other values takes a copy; what is built for a run is its own."""
    for cls in map(class_of, OPTIONS):
        made = cls()
        for name in vars(made).keys() & inspect.signature(cls).parameters.keys():
            with pytest.raises(AttributeError, match=f"{name} is a setting of {cls.__name__}"):
                setattr(made, name, None)
            assert vars(made.with_values(**{name: "other"})) == {**vars(made), name: "other"}, cls
            in_run = made.copied()
            setattr(in_run, name, "other")
            assert getattr(in_run, name) == "other", cls
