"""The output of a model may be a tree: loss and metrics take it, or the run is refused before the first update."""

import collections
import dataclasses
import sys
import types
from typing import Any

import pytest
import torch

import drivetrain
from drivetrain.core.errors import UserError
from drivetrain.core.step import trees


@dataclasses.dataclass
class Found:
    """An output of one's own."""

    logits: Any
    features: Any = None


class Pair(collections.namedtuple("Pair", ["main", "aux"])):
    """An output with names and positions."""


class Odd:
    """It has no tensors that torch knows of."""

    def __init__(self, scores):
        self.scores = scores


class Net(torch.nn.Module):
    """Returns its logits in one structure or another."""

    def __init__(self, shape, classes, kind):
        super().__init__()
        self.kind, self.head = kind, torch.nn.Linear(shape[0] * shape[1] * shape[2], classes)

    def forward(self, x):
        logits = self.head(x.flatten(1))
        return {
            "tensor": lambda: logits, "dict": lambda: {"logits": logits, "features": x}, "dataclass": lambda: Found(logits),
            "tuple": lambda: (x, logits), "named": lambda: Pair(logits, x), "nested": lambda: {"a": [logits]},
            "odd": lambda: Odd(logits),
        }[self.kind]()  # fmt: skip


def loss(output, y):
    """Takes any of them."""
    logits = output["logits"] if isinstance(output, dict) else output.logits
    return torch.nn.functional.cross_entropy(logits, y)


@pytest.fixture
def words(monkeypatch):
    module = types.ModuleType("my_outputs")
    vars(module).update(Net=Net, loss=loss)
    monkeypatch.setitem(sys.modules, "my_outputs", module)
    return lambda kind, *more: [
        "trust=[my_outputs]",
        "model=own",
        "model.target=my_outputs.Net",
        f"model.kwargs={{kind: {kind}}}",
        *more,
    ]


PARTS = {"dict": "logits", "dataclass": "logits", "tuple": "1", "named": "main", "nested": "a.0", "odd": "scores"}


@pytest.mark.parametrize("kind", PARTS)
def test_a_part_of_the_output_trains_as_the_tensor(make, words, kind):
    plain, other = (
        make(*words(kind, *more), "metrics=[f1]") for kind, more in (("tensor", []), (kind, [f"forward_output={PARTS[kind]}"]))
    )
    other.model.load_state_dict(plain.model.state_dict())
    for trainer in (plain, other):
        trainer.fit()
    assert other.progress.final == plain.progress.final
    for one, two in zip(plain.model.parameters(), other.model.parameters(), strict=True):
        assert torch.equal(one, two)


@pytest.mark.parametrize(
    ("kind", "more", "says"),
    [
        ("dict", [], r"takes one tensor, and model=own returns a dict of logits \(n, 4\), features \(n, 3, 8, 8\): "
                     "set forward_output=logits, or loss=own"),
        ("dataclass", [], r"returns a Found of logits \(n, 4\): set forward_output=logits"),
        ("tuple", [], "set forward_output=0"),
        ("odd", [], "returns a Odd, in which no tensors are found: set forward_output=NAME"),
        ("dict", ["forward_output=logit"], "forward_output=logit: the model returns a dict of logits"),
        ("dict", ["loss=own", "loss.target=my_outputs.loss", "metrics=[f1]"],
         r"metrics=\[f1\] cannot take .*set forward_output to a part"),
    ],
)  # fmt: skip
def test_an_output_that_nobody_takes_is_named_before_the_first_update(make, words, kind, more, says):
    with pytest.raises(UserError, match=says):
        make(*words(kind, *more)).fit()


@pytest.mark.parametrize("kind", ["dict", "dataclass"])
def test_an_own_loss_takes_the_output_as_it_is(fitted, words, kind):
    assert fitted(*words(kind, "loss=own", "loss.target=my_outputs.loss")).progress.updates == 2


def test_a_prediction_is_of_the_part_too(train, words):
    run = train(*words("dict", "forward_output=logits"))
    x = torch.rand(5, 3, 8, 8)
    assert drivetrain.load(run.run_dir).predict(x).output.shape == (5, 4)
    loaded = drivetrain.load(run.run_dir, ["forward_output=null"])
    with pytest.raises(
        UserError, match=r"returns a dict of logits .* but a prediction is one tensor: name a part of it by forward_out"
    ):
        loaded.predict(x)


def test_a_dataclass_is_a_tree():
    found = Found(torch.ones(2, 3), {"a": torch.zeros(2)})
    doubled = trees.map_tensors(lambda t: t * 2, {"x": found})["x"]
    assert isinstance(doubled, Found)
    assert torch.equal(doubled.logits, torch.full((2, 3), 2.0))
    assert [name for name, _ in trees.named_leaves(found)] == ["logits", "features.a"]
    assert trees.length(found) == 2
    assert trees.select(found, torch.tensor([1])).logits.shape == (1, 3)
