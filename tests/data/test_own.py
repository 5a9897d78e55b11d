"""A Dataset of the user's own: by name, trusted on the command line, its samples as batches: targets apart, stacked or padded."""

import dataclasses
import re

import numpy as np
import pytest
import torch

from drivetrain.core.errors import DataError, UserError
from drivetrain.data.collation import OwnCollate, Stack, padding_for, split_sample
from drivetrain.data.own import OwnDataset
from drivetrain.launch.job import prepare
from tests.data.test_packed import CPU
from tests.support import command
from tests.support.to_end import continued

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

class Needs(Base):
    def __init__(self, split, folder):
        super().__init__()

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
    answers = [0, 7, 3]

    def __getitem__(self, index):
        return torch.zeros(5), self.answers[index % 3]

class Listed(Silent):
    def __init__(self, *given):
        super().__init__(*given)
        self.targets = [index % 3 for index in range(self.count)]

class Rated(Silent):
    answers = [0.5, 1.5, 2.0]

class Graded(Silent):
    answers = [0.0, 1.0, 2.0]

class Columns(Silent):
    answers = [torch.tensor([0]), torch.tensor([1]), torch.tensor([1])]

class Truths(Silent):
    answers = [torch.tensor(False), torch.tensor(True), torch.tensor(True)]

class Gaps(Silent):
    answers = [0.5, float("nan"), 2.0]

class Signs(Silent):
    answers = [-1, 1, 1]

class Scaled(Silent):
    answers = [torch.eye(4) / 255] * 3

class Floats(Silent):
    answers = [torch.eye(4)] * 3

class Masks(Silent):
    answers = [torch.eye(4).long()] * 3

class Several(Silent):
    answers = [torch.tensor([1.0, 0.0, 1.0]), torch.tensor([0.0, 1.0, 0.0]), torch.zeros(3)]

class Spans(Silent):
    answers = [torch.tensor([0.0, 9.5])] * 3

class Partly(Split):
    def __getitem__(self, index):
        return {"image": torch.zeros(3, 8, 8), "more": None, "label": 0}

def made(first=0, count=40):
    return Base(first, count)

NO_CLASS = 3
'''


@pytest.fixture(autouse=True)
def theirs(own_module):
    own_module("theirs_data", THEIRS)


def own(name, **settings):
    return OwnDataset(target=f"theirs_data.{name}", train={}, test={}, **settings)


def values(source) -> list[float]:
    return source.fetch(torch.arange(len(source)))[0][:, 0, 0, 0].tolist()


def test_both_sets_are_made_by_split_by_train_or_by_what_is_given():
    by_split = OwnDataset(target="theirs_data.Split", kwargs={"scale": 2}).load(CPU)
    assert values(by_split.train) == list(range(40))
    assert values(by_split.test) == list(range(2000, 2040))
    by_train = OwnDataset(target="theirs_data.Train").load(CPU)
    assert values(by_train.test) == [1000 % 7 + i for i in range(40)]
    given = OwnDataset(target="theirs_data.made", kwargs={"count": 9}, train={"first": 5}, test={"first": 50, "count": 3}).load(
        CPU
    )
    assert values(given.train) == list(range(5, 14))
    assert values(given.test) == [50, 51, 52]


def test_classes_shape_and_normalising_come_from_the_set():
    assert OwnDataset(target="theirs_data.Split").load(CPU).classes == 4
    assert OwnDataset(target="theirs_data.Split", classes=7).load(CPU).classes == 7
    assert OwnDataset(target="theirs_data.Split").load(CPU).normalize is None  # floats are ready
    splits = OwnDataset(target="theirs_data.Train").load(CPU)
    assert (splits.classes, splits.names, splits.shape) == (3, ["a", "b", "c"], (3, 8, 8))
    x, y = splits.train.fetch(torch.arange(40))
    assert (x.dtype, y.dtype) == (torch.uint8, torch.int64)
    assert splits.normalize(x).mean().abs() < 1e-4
    assert OwnDataset(target="theirs_data.Train", normalize=False).load(CPU).normalize is None


def test_a_batch_is_asked_for_at_once_where_that_can_be():
    source = OwnDataset(target="theirs_data.Batched", train={}, test={}).load(CPU).train
    x, y = source.fetch(torch.tensor([7, 3, 7]))
    assert x[:, 0, 0, 0].tolist() == [7, 3, 7]
    assert y.tolist() == [3, 3, 3]
    assert source.dataset.asked == [7, 3, 7]


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (lambda: OwnDataset(target="theirs_data.Nothing"), r"data\.target=theirs_data\.Nothing cannot be imported"),
        (lambda: OwnDataset(target="theirs_nothing.Base"), "cannot be imported"),
        (lambda: OwnDataset(target="theirs_data.NO_CLASS"), "is int: name a class"),
        (lambda: OwnDataset(target="theirs_data.Base"), r"takes neither split nor train: .*'data.train=\{folder: a\}'"),
        (lambda: OwnDataset(target="theirs_data.Split", kwargs={"depth": 3}), r"cannot be built with \['depth', 'split'\]"),
        (lambda: OwnDataset(target="theirs_data.Needs"), r"wants folder: set data\.kwargs\.folder="),
        (lambda: OwnDataset(target="theirs_data.Stream", train={}, test={}), "must be a map-style Dataset"),
        (lambda: OwnDataset(target="theirs_data.made", train={}, test={"count": 0}), "has no test samples"),
        (lambda: own("Silent"), r"are from 0 to 7, .*: set data\.classes=8 if none is higher, or give"),
        (lambda: own("Rated"), r"numbers from 0\.5 to 2 with fractions: set task=regression"),
        (
            lambda: own("Graded"),
            r"classes=3 if none is higher, and give int\(y\) in place of torch.float\d\d \(n,\), or task=regression",
        ),
        (lambda: own("Columns"), r"set data\.classes=2 if none is higher, and give int\(y\) in place of torch.int64 \(n, 1\)"),
        (lambda: own("Truths"), r"set data\.classes=2 if none is higher, and give int\(y\) in place of torch.bool \(n,\)"),
        (lambda: own("Gaps"), "are not all finite: leave those samples out, or fill their targets"),
        (lambda: own("Signs"), r"from -1 to 1, .* set data\.classes=2 if none is higher, numbered from 0, or give it"),
        (lambda: own("Scaled", targets="mask"), r"with fractions: give class numbers \(int64; mask\)"),
        (
            lambda: own("Floats", targets="mask"),
            r"classes=2 if none is higher, and give y.long\(\) in place of torch.float32 \(n, 4, 4\), or give it",
        ),
        (lambda: own("Masks", targets="mask"), r"set data\.classes=2 if none is higher, or give it an attribute"),
        (lambda: own("Several"), r"3 numbers from 0 to 1: set data\.classes=3, and task=multilabel where they are labels"),
        (lambda: own("Several", targets="labels"), r"set data\.classes=3"),
        (lambda: own("Spans"), r"2 numbers from 0 to 9\.5: set task=regression"),
    ],
)
def test_what_cannot_be_used_is_refused(data, says):
    with pytest.raises(UserError, match=says):
        data().load(CPU)


def test_outputs_are_counted_where_the_targets_say_them():
    assert own("Listed").load(CPU).classes == 3
    assert own("Several", targets="values").load(CPU).classes == 3


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["data.target=theirs_data.Several", "data.classes=3"], "sum to 2 in a sample, .*set task=multilabel"),
        (["data.target=theirs_data.Spans", "data.classes=2"], "are numbers from 0 to 9.5, .*: set task=regression"),
        (["data.target=theirs_data.Partly"], r"takes one tensor, and the inputs of a sample are several \(image\)"),
    ],
)
def test_targets_and_inputs_of_another_kind_are_refused_by_what_they_are(train, words, says):
    made = [] if "Partly" in words[0] else ["data.train={first: 0}", "data.test={first: 9}"]
    with pytest.raises(UserError, match=says):
        train("data=own", "trust=[theirs_data]", "model=mlp", *made, *words)


def test_samples_that_make_no_batch_are_said():
    with pytest.raises(DataError, match=r"samples \[0, 1\] … do not make a batch of \(x, y\)"):
        OwnDataset(target="theirs_data.Ragged", train={}, test={}).load(CPU)


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

    first = train("data=own", "data.target=theirs_data.Split", "trust=[theirs_data]", "optimizer.lr=1e-6", updates=2)
    continued(first.run_dir, "updates=3", updates=3)


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
    assert result.flops_per_sample is not None


@pytest.fixture(autouse=True)
def _sets(monkeypatch):
    monkeypatch.syspath_prepend(command.HERE)


def test_a_collate_gets_what_it_names():
    samples = [([1, 2], 0), ([3], 1)]

    def whole(batch):
        return torch.tensor([sum(x) for x, _ in batch]), [y for _, y in batch]

    def parts(y, x, pad_to=1):
        return [[*row, *[0] * (2 * pad_to - len(row))] for row in x], y

    assert [t.tolist() for t in OwnCollate(whole, "data.collate=f", None)(samples)] == [[3, 3], [0, 1]]
    assert [t.tolist() for t in OwnCollate(parts, "data.collate=f", None)(samples)] == [[[1, 2], [3, 0]], [0, 1]]
    assert OwnCollate(parts, "data.collate=f", None)(samples, 2)[0].shape == (2, 4)
    with pytest.raises(UserError, match=r"data.collate=f takes no argument `pad_to`"):
        OwnCollate(whole, "data.collate=f", None)(samples, 2)


@dataclasses.dataclass
class Boxes:
    """A target of one's own."""

    corners: list[float]
    kind: int
    note: str | None = None


@dataclasses.dataclass
class Shot:
    """A sample of one's own."""

    image: torch.Tensor
    target: Boxes


def test_samples_and_targets_may_be_dataclasses():
    x, y = Stack()([Shot(torch.full((3,), float(i)), Boxes([0.0, float(i)], i)) for i in range(2)])
    assert x.tolist() == [[0, 0, 0], [1, 1, 1]]
    assert isinstance(y, Boxes)
    assert y.corners.tolist() == [[0, 0], [0, 1]]
    assert y.note is None
    with pytest.raises(DataError, match="y is None: give the inputs again"):
        Stack()([(torch.zeros(3), None)])
    assert y.kind.tolist() == [0, 1]


@pytest.mark.parametrize(
    ("sample", "key", "x", "y"),
    [
        ((1, 2), None, 1, 2),
        ([1, 2], None, 1, 2),
        (((1, 2), 3), None, (1, 2), 3),
        ((1, 2, 3), None, (1, 2), 3),
        ({"a": 1, "b": 2, "label": 3}, None, {"a": 1, "b": 2}, 3),
        ({"image": 1, "target": 3}, None, 1, 3),
        ({"a": 1, "label": 2, "far": 3}, "far", {"a": 1, "label": 2}, 3),
        ({"a": 1, "from": 2, "to": 3}, ["from", "to"], 1, {"from": 2, "to": 3}),
    ],
)
def test_the_target_is_taken_out_of_a_sample(sample, key, x, y):
    assert split_sample(sample, key) == (x, y)


@pytest.mark.parametrize(
    ("sample", "key", "says"),
    [
        ({"a": 1, "b": 2}, None, "the keys a, b, none of label, .*: set data.target_key"),
        ({"a": 1, "label": 2, "y": 3}, None, r"several that could be its target \(label, y\): set data.target_key"),
        ({"a": 1, "label": 2}, "far", "data.target_key=far: a sample has only the keys a, label"),
        ({"label": 2}, None, "has only its target, label"),
        ((1, 2), "label", "names a key, and a sample is a tuple"),
        (torch.zeros(3), None, "is a Tensor, which does not say what its target is"),
        ((1,), None, "is a tuple, which does not say what its target is"),
    ],
)
def test_a_sample_without_a_target_is_refused(sample, key, says):
    with pytest.raises(UserError, match=says):
        split_sample(sample, key)


def test_samples_are_stacked_leaf_by_leaf():
    samples = [({"a": np.full(2, n), "b": (torch.tensor([n]), {"c": n})}, (n, 2 * n)) for n in range(3)]
    x, y = Stack()(samples)
    assert x["a"].dtype == torch.int64
    assert x["a"].tolist() == [[0, 0], [1, 1], [2, 2]]
    assert isinstance(x["b"], tuple)
    assert x["b"][0].tolist() == [[0], [1], [2]]
    assert x["b"][1]["c"].tolist() == [0, 1, 2]
    assert y.tolist() == [[0, 0], [1, 2], [2, 4]]  # numbers are no structure


def test_numpys_float64_becomes_the_models_type():
    x, y = Stack()([(np.ones(2), 0.5)] * 2)
    assert (x.dtype, y.dtype) == (torch.float32, torch.float32)


@pytest.mark.parametrize(
    ("samples", "says"),
    [
        ([({"a": "text", "b": 1}, 0)] * 2, r"x\.a is a str, which is no tensor"),
        ([(torch.eye(2).to_sparse(), 0)] * 2, r"x is a sparse_coo tensor: give a dense one"),
        ([({"a": None, "b": 1}, 0), ({"a": 1, "b": 1}, 0)], r"x\.a is not of the same structure"),
        ([({"a": 1, "b": 1}, 0), ({"a": 1, "c": 1}, 0)], "x is not of the same structure"),
        ([(torch.zeros(2), 0), (torch.zeros(3), 0)], r"x has the shapes \[2\] and \[3\]: data.pad=true pads"),
        ([(torch.zeros(1, 2), 0), (torch.zeros(1, 3), 0)], r"x has the shapes \[1, 2\] and \[1, 3\]: resize or pad"),
    ],
)
def test_what_makes_no_batch_is_named(samples, says):
    with pytest.raises(DataError, match=says):
        Stack()(samples)


# --- samples of several lengths ---


def ragged(name: str, **settings):
    return OwnDataset(target=f"tree_sets.{name}", **settings).load(CPU)


def test_sequences_are_padded_and_a_mask_says_where_they_are_real():
    source = ragged("Words").train
    x, y = source.fetch(torch.tensor([0, 1, 2]))  # of 3, 10 and 6 tokens
    assert x["mask"].sum(1).tolist() == x["size"].tolist() == [3, 10, 6]
    assert x["ids"].shape == x["weights"].shape == x["mask"].shape == (3, 10)
    assert x["weights"].dtype == torch.float32
    assert torch.equal(x["mask"], x["ids"] > 0)
    assert (x["weights"][~x["mask"]] == 0).all()
    assert source.dataset[1]["ids"] == x["ids"][1].tolist()
    assert y.tolist() == [0, 1, 2]
    assert source.lengths.tolist() == [len(source.dataset[i]["ids"]) for i in range(53)]


def test_lengths_are_multiples_but_not_beyond_the_longest():
    source = ragged("Words").train
    assert source.fetch(torch.tensor([0]), 8)[0]["ids"].shape == (1, 8)
    assert source.fetch(torch.tensor([1]), 8)[0]["ids"].shape == (1, 13)  # the longest of all
    assert source.fetch(torch.tensor([0]))[0]["ids"].shape == (1, 3)


def test_targets_along_a_sequence_are_padded_with_what_the_loss_ignores():
    x, y = ragged("Tagged").train.fetch(torch.tensor([0, 1]))
    assert y.shape == x["ids"].shape == (2, 10)
    assert torch.equal(y == -100, ~x["mask"])


def test_a_set_that_tells_its_lengths_is_not_read_for_them(monkeypatch):
    import tree_sets

    read = []
    monkeypatch.setattr(tree_sets.Known, "__getitem__", lambda self, i: read.append(i) or tree_sets.Words.__getitem__(self, i))
    told = ragged("Known")
    assert len(set(read)) < 30
    masks = [source.fetch(torch.tensor([4, 5]))[0]["mask"] for source in (told.train, ragged("Words").train)]
    assert torch.equal(*masks)


def test_wrong_lengths_and_wrong_names_are_refused():
    import tree_sets

    with pytest.raises(UserError, match=r"data.pad=far, and the parts .* x.ids, x.weights: name one"):
        padding_for(tree_sets.Words("train"), "far", None)
    wrong = tree_sets.Known("train")
    wrong.lengths[0] = 99
    with pytest.raises(UserError, match=r"the Dataset's lengths say 99 for sample 0, whose x\.ids has a length of 3"):
        padding_for(wrong, None, None)


def test_only_what_differs_is_padded():
    import tree_sets

    assert padding_for(tree_sets.Dicts("train"), None, None) is None
    assert padding_for(tree_sets.Words("train"), False, None) is None
    found, lengths = padding_for(tree_sets.Words("train"), "weights", None)
    assert (found.sequence, found.along, found.longest) == ("x.weights", {"x.ids", "x.weights"}, 13)
    assert len(lengths) == 53


def test_an_own_function_makes_the_batch():
    splits = ragged("Words", collate="tree_sets.collate")
    x, y = splits.train.fetch(torch.tensor([0, 1]))
    assert x.keys() == {"ids", "mask"}
    assert (x["ids"][0, :7] == 0).all()  # on the left
    assert y.tolist() == [0, 1]
    with pytest.raises(UserError, match="takes no argument `pad_to`, the multiple that batch=bucketed"):
        splits.train.fetch(torch.tensor([0]), 32)


def test_shapes_are_those_of_the_inputs(caplog):
    caplog.set_level("INFO")
    splits = ragged("Dicts")
    assert "the target of a sample is label, the model gets image, person (data.target_key)" in caplog.messages
    assert splits.shape == {"image": (3, 8, 8), "person": {"age": (), "size": (3,)}}
    assert splits.images == "image"
    assert splits.normalize is not None
    zeros = splits.two_samples(CPU)
    assert zeros["image"].dtype == torch.float32  # as the model gets it
    assert zeros["image"].shape == (2, 3, 8, 8)
    assert not zeros["image"].any()
    assert ragged("Words").two_samples(CPU)["mask"].all()  # a mask of nothing would divide by 0


def test_looking_at_samples_draws_no_random_numbers(monkeypatch):
    import tree_sets

    monkeypatch.setattr(tree_sets.Words, "sample", lambda self, noise, i: (torch.rand(3 + i), i % 4))
    before = torch.get_rng_state()
    ragged("Words", normalize=False)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_stream_of_samples_is_refused_with_what_to_do(own_module):
    own_module(
        "streams_of_mine",
        "import torch\nclass Stream(torch.utils.data.IterableDataset):\n    def __iter__(self):\n        return iter(())\n",
    )
    with pytest.raises(UserError, match=r"an IterableDataset has not.* resumes at any of them.*list\(your_dataset\)"):
        OwnDataset(target="streams_of_mine.Stream", train={}, test={}).load(CPU)


def test_settings_that_cannot_be_are_refused(problems):
    words = ["data=own", "data.target=tree_sets.Words", "trust=[tree_sets]"]
    assert any("data.collate=elsewhere.collate is code" in p for p in problems(*words, "data.collate=elsewhere.collate"))
    assert any("data.pad=true and data.collate" in p for p in problems(*words, "data.pad=true", "data.collate=tree_sets.collate"))
    assert any("forward_input=both" in p for p in problems("forward_input=both"))
