"""A Dataset of the user's own: by name, trusted on the command line, read a batch at a time where it can be."""

import re

import pytest
import torch

from drivetrain.core.errors import DataError, UserError
from drivetrain.data.own import Own
from drivetrain.launch.job import prepare
from tests.data.test_packed import CPU

THEIRS = '''
"""Somebody's own data."""
import numpy as np
import torch

class Base(torch.utils.data.Dataset):
    num_classes = 4

    def __init__(self, first=0, count=40):
        self.first, self.count, self.calls = first, count, 0

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        self.calls += 1
        return torch.full((3, 8, 8), float(self.first + index)), index % 4

class Split(Base):
    def __init__(self, split, scale=1):
        super().__init__({"train": 0, "test": 1000}[split] * scale)

class Train(Base):
    """As torchvision's."""
    classes = ["a", "b", "c"]
    num_classes = None

    def __init__(self, train=True):
        super().__init__(0 if train else 1000)

    def __getitem__(self, index):
        return np.full((3, 8, 8), self.first % 7 + index, np.uint8), np.int64(index % 3)

class Batched(Base):
    def __getitems__(self, indices):
        self.asked = list(indices)
        return [(torch.full((3, 8, 8), float(self.first + i)), i % 4) for i in indices]

    def __getitem__(self, index):
        raise AssertionError("one at a time")

class Ragged(Base):
    def __getitem__(self, index):
        return torch.zeros(3, 8, 8 + index % 2), 0

class Stream(torch.utils.data.IterableDataset):
    num_classes = 4

    def __iter__(self):
        return iter(())

class Views(Split):
    def __getitem__(self, index):
        return torch.rand(2, 3, 8, 8), 0

class Rows(Split):
    def __getitem__(self, index):
        return torch.zeros(5), 0

class Tokens(Split):
    def __getitem__(self, index):
        return torch.arange(5), 0

class Silent(Base):
    num_classes = None

    def __getitem__(self, index):
        return torch.zeros(5), 0

def made(first=0, count=40):
    return Base(first, count)

NO_CLASS = 3
'''


@pytest.fixture(autouse=True)
def theirs(tmp_path, monkeypatch):
    (tmp_path / "theirs_data.py").write_text(THEIRS)
    monkeypatch.syspath_prepend(tmp_path)


def values(source) -> list[float]:
    return source.fetch(torch.arange(len(source)))[0][:, 0, 0, 0].tolist()


def test_both_sets_are_made_by_split_by_train_or_by_what_is_given():
    by_split = Own(target="theirs_data.Split", kwargs={"scale": 2}).load(CPU)
    assert values(by_split.train) == list(range(40))
    assert values(by_split.test) == list(range(2000, 2040))
    by_train = Own(target="theirs_data.Train").load(CPU)
    assert values(by_train.test) == [1000 % 7 + i for i in range(40)]
    given = Own(target="theirs_data.made", kwargs={"count": 9}, train={"first": 5}, test={"first": 50, "count": 3}).load(CPU)
    assert values(given.train) == list(range(5, 14))
    assert values(given.test) == [50, 51, 52]


def test_classes_shape_and_normalising_come_from_the_set():
    assert Own(target="theirs_data.Split").load(CPU).classes == 4
    assert Own(target="theirs_data.Split", classes=7).load(CPU).classes == 7
    assert Own(target="theirs_data.Split").load(CPU).normalize is None  # floats are ready
    splits = Own(target="theirs_data.Train").load(CPU)
    assert (splits.classes, splits.names, splits.shape) == (3, ["a", "b", "c"], (3, 8, 8))
    x, y = splits.train.fetch(torch.arange(40))
    assert (x.dtype, y.dtype) == (torch.uint8, torch.int64)
    assert splits.normalize(x).mean().abs() < 1e-4
    assert Own(target="theirs_data.Train", normalize=False).load(CPU).normalize is None


def test_a_batch_is_asked_for_at_once_where_that_can_be():
    source = Own(target="theirs_data.Batched", train={}, test={}).load(CPU).train
    x, y = source.fetch(torch.tensor([7, 3, 7]))
    assert x[:, 0, 0, 0].tolist() == [7, 3, 7]
    assert y.tolist() == [3, 3, 3]
    assert source.dataset.asked == [7, 3, 7]


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (lambda: Own(target="theirs_data.Nothing"), r"data\.target=theirs_data\.Nothing cannot be imported"),
        (lambda: Own(target="theirs_nothing.Base"), "cannot be imported"),
        (lambda: Own(target="theirs_data.NO_CLASS"), "is int: name a class"),
        (lambda: Own(target="theirs_data.Base"), r"takes neither split nor train: .*'data.train=\{folder: a\}'"),
        (lambda: Own(target="theirs_data.Split", kwargs={"depth": 3}), r"cannot be built with \['depth', 'split'\]"),
        (lambda: Own(target="theirs_data.Stream", train={}, test={}), "must be a map-style Dataset"),
        (lambda: Own(target="theirs_data.made", train={}, test={"count": 0}), "has no test samples"),
        (lambda: Own(target="theirs_data.Silent", train={}, test={}), r"set data\.classes"),
    ],
)
def test_what_cannot_be_used_is_refused(data, says):
    with pytest.raises(UserError, match=says):
        data().load(CPU)


def test_samples_that_make_no_batch_are_said():
    with pytest.raises(DataError, match=r"samples \[0, 1\] … do not make a batch of \(x, y\)"):
        Own(target="theirs_data.Ragged", train={}, test={}).load(CPU)


def test_code_is_named_and_trusted_by_the_operator(problems):
    assert any("data=own needs data.target" in p for p in problems("data=own"))
    assert any("set trust=[theirs_data]" in p for p in problems("data=own", "data.target=theirs_data.Split"))
    words = ["data=own", "data.target=theirs_data.Split", "trust=[theirs_data]"]
    assert any("belong together" in p for p in problems(*words, "data.train={split: train}"))


CHOICE, SWEEP = "defaults:\n  - override /data: own\n", "sweep:\n  data: [digits, own]\n"


@pytest.mark.parametrize("text", [CHOICE, SWEEP], ids=["choice", "sweep"])
def test_a_recipe_may_not_choose_it(tmp_path, text):
    (tmp_path / "shared.yaml").write_text(f"description: shared\n{text}")
    with pytest.raises(UserError, match="a recipe cannot choose 'data=own'"):
        prepare([f"recipe={tmp_path / 'shared.yaml'}"])


def test_a_choice_of_it_is_left_to_the_command_line(tmp_path, capsys):
    from drivetrain.cli import recipe

    (tmp_path / "shared.yaml").write_text(f"description: shared\n{CHOICE}")
    assert recipe.command(["check", str(tmp_path / "shared.yaml")]) == 0
    left = (
        r"left to the command line: .* a recipe cannot choose 'data=own' .*: choose it on the command line too, with its target"
    )
    assert re.search(left, capsys.readouterr().out)


def test_its_own_runs_recipe_goes_on(train):
    import drivetrain

    first = train("data=own", "data.target=theirs_data.Split", "trust=[theirs_data]", "optimizer.lr=1e-6")
    assert (first.status, first.updates) == ("completed", 2), first.error
    again = drivetrain.train([f"resume={first.run_dir}", "updates=3"])
    assert (again.status, again.updates) == ("completed", 3), again.error


@pytest.mark.parametrize("model", ["resnet9", "unet"])
def test_a_model_of_images_is_not_fed_rows(train, model):
    with pytest.raises(UserError, match=rf"model={model} .*wants images of at least .* but the data gives \[5\]: set model=mlp"):
        train("data=own", "trust=[theirs_data]", "data.target=theirs_data.Rows", f"model={model}", "data.classes=3")


def test_a_model_of_tokens_is_not_fed_pictures(train):
    with pytest.raises(UserError, match=r"model=gpt reads sequences of tokens, and cannot take the numbers of shape \(3, 8, 8\)"):
        train("data=own", "trust=[theirs_data]", "data.target=theirs_data.Split", "model=gpt", "loss=cross_entropy")


def test_a_model_of_numbers_is_not_fed_tokens(train):
    with pytest.raises(UserError, match=r"model=mlp does not read tokens, and cannot take the whole numbers of shape \(5,\)"):
        train("data=own", "trust=[theirs_data]", "data.target=theirs_data.Tokens", "data.classes=3")


@pytest.mark.parametrize("words", [["precision=amp"], ["debug=gradcheck"], ["surgery=[channels_last]"]])
def test_a_model_of_own_views_is_tried_with_one_view(train, words):
    result = train(
        "data=own",
        "trust=[theirs_data]",
        "data.target=theirs_data.Views",
        "model=resnet9",
        "model.width=4",
        "loss=contrastive",
        *words,
    )
    assert (result.status, result.flops_per_sample is not None) == ("completed", True), result.error
