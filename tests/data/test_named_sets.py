"""Several validation or test sets with names: loaded, evaluated, selected by, resumed and evaluated again."""

import json
import re
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import drivetrain
from drivetrain.core.errors import UserError
from drivetrain.core.options.selection import Selection, selected
from drivetrain.data.base import HeldOut
from drivetrain.data.huggingface import HuggingFace
from drivetrain.data.images import ImageFolder, LabelsCsv
from drivetrain.data.instructions import Instructions
from drivetrain.data.jsonl import Jsonl, Words
from drivetrain.data.own import OwnDataset
from drivetrain.data.tabular import Tabular
from drivetrain.data.webdataset import WebDataset
from drivetrain.inference.evaluation import evaluate
from drivetrain.inference.finished import Choice
from drivetrain.inference.loaded import load
from drivetrain.launch import launcher
from drivetrain.logger.base import numbers
from drivetrain.measure.benchmark import quality
from drivetrain.run import reader
from drivetrain.run import records as run_records
from drivetrain.ui.pages.run_table import verdict
from drivetrain.ui.pages.runs import sheet_of
from tests.data.test_packed import CPU
from tests.support import later
from tests.support.to_end import continued

datasets = later.package("datasets")

OWN = '''
import torch

class Marks(torch.utils.data.Dataset):
    """Four classes that the mean of an input tells, more or less noisily."""
    num_classes = 4
    made = []

    def __init__(self, split, noise=0.0, count=24):
        type(self).made.append(split)
        drawn = torch.Generator().manual_seed(len(split))
        self.y = torch.arange(count) % 4
        self.x = self.y.view(-1, 1, 1, 1) + 0.1 * torch.randn(count, 3, 8, 8, generator=drawn)
        self.x += noise * torch.randn(count, 3, 8, 8, generator=drawn)

    def __len__(self):
        return len(self.y)

    def __getitem__(self, index):
        return self.x[index].float(), int(self.y[index])

def size(output, y):
    return output.square().mean()

class Ignored(Marks):
    def __getitem__(self, index):
        return self.x[index].float(), int(self.y[index]) if self.noise == 0 else -100

    def __init__(self, split, noise=0.0, count=24):
        super().__init__(split, noise, count)
        self.noise = noise
'''
SETS = "{clean: {split: clean}, noisy: {split: noisy, noise: 3.0}}"
RUN = ["data=own", "data.target=their_marks.Marks", "trust=[their_marks]", "epochs=2", "updates=null", "ema=ema"]


@pytest.fixture
def their_marks(own_module) -> None:
    own_module("their_marks", OWN)


@pytest.fixture
def tables(tmp_path: Path) -> Path:
    """A table of 60 rows, and two of 20 and 12 rows beside it."""
    for name, rows in (("train", 60), ("near", 20), ("far", 12)):
        lines = [f"{i},{i * i % 5},{'abc'[i % 3]}" for i in range(rows)]
        (tmp_path / f"{name}.csv").write_text("\n".join(["a,b,kind", *lines]) + "\n")
    return tmp_path


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same samples in every form: a training set, the sets near and far beside it, and odd, which has a class of its own."""
    root = tmp_path_factory.mktemp("forms")
    splits = {}
    for name, count in (("train", 60), ("near", 20), ("far", 12), ("odd", 2)):
        rows, images, kinds = range(count), [], "zab" if name == "odd" else "abc"
        for i in rows:
            (root / "images" / name / kinds[i % 3]).mkdir(parents=True, exist_ok=True)
            images.append(root / "images" / name / kinds[i % 3] / f"{i}.png")
            Image.fromarray(np.full((8, 8, 3), 3 * i, np.uint8)).save(images[-1])
        lines = [f"{i},{i * i % 5},{kinds[i % 3]},{images[i]}" for i in rows]
        (root / f"{name}.csv").write_text("\n".join(["a,b,kind,image", *lines]) + "\n")
        texts = [
            {"text": f"text {i}", "kind": "abc".find(kinds[i % 3]), "tokens": [f"w{i}"], "tags": [kinds[i % 3]]} for i in rows
        ]
        talks = [[{"role": "user", "content": f"{i}?"}, {"role": "assistant", "content": f"{i}!"}] for i in rows]
        both = ({**text, "messages": talk} for text, talk in zip(texts, talks, strict=True))
        (root / f"{name}.jsonl").write_text("\n".join(map(json.dumps, both)))
        with tarfile.open(root / f"{name}.tar", "w") as tar:
            for i in rows:
                (root / "label.cls").write_text(str(i % 3))
                tar.add(images[i], f"{name}{i}.png")
                tar.add(root / "label.cls", f"{name}{i}.cls")
        splits[name] = datasets.Dataset.from_dict({"caption": [f"text {i}" for i in rows], "label": [i % 3 for i in rows]})
    datasets.DatasetDict(splits).save_to_disk(str(root / "saved"))
    return root


FORMS = {
    "tabular": (Tabular, "csv", {"target": "kind", "columns": ["a", "b"]}),
    "labels_csv": (LabelsCsv, "csv", {"target": "kind", "size": 8}),
    "jsonl": (Jsonl, "jsonl", {"length": 8}),
    "jsonl, labelled": (Jsonl, "jsonl", {"length": 8, "label": "kind"}),
    "words": (Words, "jsonl", {"length": 8}),
    "instructions": (Instructions, "jsonl", {"length": 64}),
    "webdataset": (WebDataset, "tar", {"size": 8}),
    "imagefolder": (ImageFolder, "", {"size": 8, "root": "images"}),
    "huggingface": (HuggingFace, "", {"image": None, "text": "caption", "root": "saved"}),
}


def of_training(files: Path, form: str) -> tuple[type[HeldOut], dict[str, Any]]:
    """The option's class, and its settings for the training set."""
    cls, ending, settings = FORMS[form]
    place = {"root": f"{files}/{settings['root']}"} if "root" in settings else {"path": f"{files}/train.{ending}"}
    return cls, {**settings, **({"train": place["path"]} if ending == "tar" else place)}


@pytest.mark.parametrize("form", FORMS)
def test_a_test_set_that_would_be_empty_is_refused(files, form):
    cls, settings = of_training(files, form)
    settings |= {"root": f"{settings['root']}/train"} if form == "imagefolder" else {}
    with pytest.raises(UserError, match=r"gives 60 training and 0 test .*: set data\.test or data\.holdout, or add more"):
        cls(**settings, holdout=1e-9).load_sets(CPU)


@pytest.mark.parametrize("form", FORMS)
def test_each_set_is_loaded_as_it_is_alone_and_training_is_read_once(files, form, monkeypatch):
    (cls, settings), ending = of_training(files, form), FORMS[form][1]
    near, far = (f"{files}/{name}.{ending}" if ending else name for name in ("near", "far"))
    beside = f"far.{ending}".rstrip(".")
    read, whole = [], cls.read
    monkeypatch.setattr(cls, "read", lambda self: read.append(1) or whole(self))
    data = cls(**settings, test={"near": near, "far": far}, validation={"held": 0.1, "far": beside}).load_sets(CPU)
    assert read == [1]
    sizes = {split: {name: len(source) for name, source in data.sets(split).items()} for split in ("test", "validation")}
    assert sizes == {"test": {"near": 20, "far": 12}, "validation": {"held": 60 - len(data.train), "far": 12}}
    assert 50 <= len(data.train) <= 56
    alone = cls(**settings, test=far, validation=0.1).load_sets(CPU)
    for got, wanted in ((data.sets("test")["far"], alone.test), (data.train, alone.train)):
        for one, other in zip(*(source.fetch(torch.arange(12)) for source in (got, wanted)), strict=True):
            assert torch.equal(one, other)


def test_own_data_makes_one_dataset_for_each_set(their_marks):
    option = OwnDataset(
        target="their_marks.Marks",
        test={"one": {"split": "one"}, "two": {"split": "two", "count": 8}},
        train={"split": "train"},
        validation={"split": "val"},
    )
    assert (option.several("test").keys(), dict(option.several("validation"))) == ({"one", "two"}, {})
    data = option.load_sets(CPU)
    import their_marks as module

    assert sorted(module.Marks.made) == ["one", "train", "two", "val"]
    assert {name: len(source) for name, source in data.sets("test").items()} == {"one": 24, "two": 8}


@pytest.mark.parametrize(
    ("form", "says"),
    {
        "tabular": "odd.csv:2: no training row has the class z of kind",
        "labels_csv": "odd.csv:2: no training row has the class z of kind",
        "jsonl, labelled": "odd.jsonl:1: no training row has the class -1 of kind",
        "words": "odd.jsonl:1: no training row has the class z of tags",
        "imagefolder": "images/odd/: no training image has the class z",
    }.items(),
)
def test_a_class_that_training_has_not_is_named_with_its_place(files, form, says):
    (cls, settings), ending = of_training(files, form), FORMS[form][1]
    odd = f"{files}/odd.{ending}" if ending else "odd"
    for sets in ({"test": odd}, {"test": {"far": odd.replace("odd", "far"), "odd": odd}}):
        with pytest.raises(UserError, match=re.escape(says)):
            cls(**settings, **sets).load_sets(CPU)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["data.validation={}"], "data.validation={} names no set"),
        (["data.validation={a: 0.1, b: 0.2}"], "a and b are shares of training, and one can be held out"),
        (["data.test={a-b: near.csv}"], "'a-b' is no name of a set"),
        (["data.test={near: near.csv, gone: gone.csv}"], "data.test=gone.csv is no file"),
        (["data.validation={far: gone.csv, near: near.csv}"], "gone.csv is no file"),
        (["data.test={near: near.csv}", "select=near/accuracy"], "models are selected by one set, which has no name"),
        (["data.validation={near: near.csv, far: far.csv}", "select=f1"], "select=f1 is not evaluated"),
        (["data.validation={near: near.csv, far: far.csv}", "select=far/ema_loss"], "far/ema_loss is of averaged weights"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_said_before_the_run(tables, problems, words, says):
    found = problems("data=tabular", "data.path=train.csv", "data.target=kind", *words)
    assert [line for line in found if says in line], found


def test_a_run_measures_each_set_selects_by_one_and_is_evaluated_again(train, their_marks):
    run = train(
        *RUN,
        "data.train={split: train}",
        f"data.test={SETS}",
        f"data.validation={SETS}",
        "select=noisy/ema_accuracy",
        "saving=best",
        "metrics=[confusion_matrix]",
        "data.targets=class",
    )
    names = [
        f"{name}/{weights}{metric}" for name in ("clean", "noisy") for weights in ("", "ema_") for metric in ("loss", "accuracy")
    ]
    for split in ("validation", "test"):
        assert set(run.metrics[split]["final"]) == set(names)
        assert run.metrics[split]["final"]["noisy/loss"] != run.metrics[split]["final"]["clean/loss"]
    assert run.selection == {"metric": "noisy/ema_accuracy", "better": "max"}
    assert run.metrics["validation"]["best"]["noisy/ema_accuracy"] >= run.metrics["validation"]["final"]["noisy/ema_accuracy"]
    assert {"clean/confusion_matrix", "noisy/confusion_matrix", "noisy/ema_confusion_matrix"} <= set(run.tables["test"]["final"])
    assert (run.run_dir / "images" / "noisy").is_dir()
    records = [json.loads(line) for line in (run.run_dir / "metrics.jsonl").read_text().splitlines()]
    assert set(names) <= set(next(r for r in records if r["event"] == "evaluate"))
    assert "validation/noisy/ema_accuracy" in numbers(next(r for r in records if r["event"] == "evaluate"))  # as trackers have it
    found = evaluate(run.run_dir, choice=Choice(update="last"))
    assert found.metrics == run.metrics["test"]["final"]
    assert found.samples == 48
    again = evaluate(run.run_dir, choice=Choice(update="last", split="validation"))
    assert again.metrics == run.metrics["validation"]["final"]
    files = reader.find([run.run_dir])[0]
    assert files.metric == ("noisy/accuracy", True)
    said = verdict([files])
    assert "ema_accuracy" in said
    assert "on the test set clean" in said
    assert "on the test set noisy" in said
    page = sheet_of([files]).page()
    assert all(f"validation set {name}" in page for name in ("clean", "noisy"))
    panels = run_records._panels(records, run.selection["metric"])
    assert {"training", "validation clean", "validation noisy", "test noisy"} <= set(panels["loss"])
    assert {"validation clean", "validation noisy"} <= set(panels["noisy/ema_accuracy"])
    assert run.loss == run.judged()["noisy/loss"]
    assert quality.figures_for("changes", Selection("noisy/ema_accuracy", max))[1].name == "noisy/loss"
    blocks, count = load(run.run_dir).blocks_of("test", 1)
    assert [name for block in blocks for name in block.names][23:25] == ["test/clean[23]", "test/noisy[0]"]
    assert count == 48


def test_a_set_alone_has_the_figures_that_it_has_beside_others(train, their_marks):
    several = train(*RUN, "data.train={split: train}", f"data.test={SETS}", f"data.validation={SETS}")
    one = train(
        *RUN, "data.train={split: train}", "data.test={split: noisy, noise: 3.0}", "data.validation={split: noisy, noise: 3.0}"
    )
    assert {f"noisy/{name}": value for name, value in one.metrics["validation"]["final"].items()}.items() <= several.metrics[
        "validation"
    ]["final"].items()
    assert several.selection["metric"] == "clean/ema_accuracy"


def test_a_resumed_run_ends_with_the_same_figures(train, their_marks):
    words = [
        *RUN,
        "data.train={split: train}",
        f"data.test={SETS}",
        f"data.validation={SETS}",
        "stop=early",
        "stop.metric=noisy/loss",
    ]
    whole = train(*words)
    half = train(*words[:-2], "updates=1", "epochs=15")
    resumed = drivetrain.train(
        [f"resume={half.run_dir}", "resume_changed=true", "updates=null", "epochs=2", "stop=early", "stop.metric=noisy/loss"]
    )
    assert resumed.metrics["validation"]["final"] == whole.metrics["validation"]["final"]


def test_a_run_on_tables_is_resumed_and_evaluated_on_other_sets(train, tables):
    path = "data.path=train.csv"
    words = [
        "data=tabular",
        path,
        "data.target=kind",
        "data.test={near: near.csv, far: far.csv}",
        "data.validation={held: 0.1, far: far.csv}",
    ]
    half = train(*words, "updates=1")
    run = continued(half.run_dir, "resume_changed=true", "updates=3", updates=3)
    assert next(iter(run.metrics["test"]["final"])) == "near/loss"
    assert run.selection["metric"] == "held/accuracy"
    assert evaluate(run.run_dir).metrics == run.metrics["test"]["final"]
    other = evaluate(run.run_dir, ["data.path=near.csv", "data.test={one: far.csv, two: near.csv}"])
    assert {name.partition("/")[0] for name in other.metrics} == {"one", "two"}
    assert other.metrics["one/loss"] == pytest.approx(run.metrics["test"]["final"]["far/loss"])


def test_a_set_whose_targets_are_all_ignored_gets_a_sentence(train, their_marks):
    """The run ends if models are selected by it; else its figures are left out."""
    words = [word.replace("Marks", "Ignored") for word in RUN]
    run = train(*words, "data.train={split: train}", f"data.test={SETS}", "data.validation={split: val}")
    assert set(run.metrics["test"]["final"]) == {f"clean/{name}" for name in run.metrics["validation"]["final"]}
    assert "the test set noisy has no target that counts (all are ignored)" in (run.run_dir / "log.txt").read_text()
    run = train(*words, "data.train={split: train}", f"data.test={SETS}", "data.validation={split: val, noise: 1}", ends="failed")
    assert "the validation set has no target that counts (all are ignored)" in run.error
    assert (run.run_dir / "checkpoints").is_dir()  # what was trained is kept


def test_a_metric_without_targets_is_left_out_beside_a_loss_that_has_some(train, their_marks):
    words = [word.replace("Marks", "Ignored") for word in RUN]
    run = train(
        *words, "data.train={split: train}", "data.test={split: test, noise: 1}", "data.validation=0.2", "data.targets=class",
        "loss=own", "loss.target=their_marks.size", "metrics=[accuracy,f1]",
    )  # fmt: skip
    assert set(run.metrics["validation"]["final"]) == {"loss", "accuracy", "f1", "ema_loss", "ema_accuracy", "ema_f1"}
    assert set(run.metrics["test"]["final"]) == {"loss", "ema_loss"}
    assert "accuracy of the averaged weights on the test set is nan" in (run.run_dir / "log.txt").read_text()


def test_folders_of_images_are_sets_by_their_names(train, tmp_path):
    for n, folder in enumerate(("train", "test", "near", "far")):
        for kind in ("a", "b"):
            place = tmp_path / "images" / folder / kind
            place.mkdir(parents=True)
            for i in range(4 + n):
                Image.fromarray(np.full((8, 8, 3), 20 * i + 10 * (kind == "b"), np.uint8)).save(place / f"{i}.png")
    words = ["data=imagefolder", "data.root=images", "data.size=8", "batch.global_batch=4", "log_every=1"]
    run = train(*words, "data.test={test: test, far: far}", "data.validation={near: near, held: 0.25}")
    said = (run.run_dir / "log.txt").read_text()
    assert "8 training" not in said
    assert "12 validation near" in said
    assert "2 validation held" in said
    assert "10 test test, 14 test far" in said
    assert "not read" not in said


def test_a_metric_of_a_preset_is_that_of_the_first_set(tables, tiny):
    """A task sets select=…, and knows of no sets."""
    words = ("data=tabular", "data.path=train.csv", "data.target=kind", "data.validation={near: near.csv, far: far.csv}")
    assert selected(launcher.prepare(tiny(*words, "select=accuracy")).run).name == "near/accuracy"
