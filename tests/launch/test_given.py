"""Classes, functions and objects in place of names: what a notebook gives to drivetrain.train."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

import drivetrain
from drivetrain.core.errors import UserError
from drivetrain.core.user import given
from drivetrain.measure.claims.export import export
from tests.support import command

X = torch.randn(60, 5, generator=torch.Generator().manual_seed(0))
Y = (X[:, 0] > 0).long()
WORDS = ("epochs=2", "batch.global_batch=8", "runtime.device=cpu", "data.targets=class")


class Rows(torch.utils.data.Dataset):
    num_classes = 2

    def __init__(self, first: int, end: int) -> None:
        self.x, self.targets = X[first:end], Y[first:end]

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, number: int):
        return self.x[number], self.targets[number]


class Net(torch.nn.Module):
    def __init__(self, width: int = 4, num_classes: int = 2) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(5, width), torch.nn.ReLU(), torch.nn.Linear(width, num_classes))

    def forward(self, x):
        return self.layers(x)


def my_loss(output, target):
    return torch.nn.functional.cross_entropy(output, target)


def hits(output, target):
    return (output.argmax(1) == target).float().mean()


def misses(output, target):
    return 1 - hits(output, target)


class Watch(drivetrain.Callback):
    def __init__(self) -> None:
        self.seen: list[str] = []

    def evaluation(self, event) -> None:
        self.seen.append("evaluation")


SETS = (Rows(0, 40), Rows(40, 50), Rows(50, 60))
OBJECTS = {"model": Net, "loss": my_loss, "data": SETS}


@pytest.fixture
def in_main(monkeypatch):
    """Their names lead nowhere, as those of what a notebook's cells define."""
    for each in (Net, my_loss, hits, misses, Watch):
        monkeypatch.setattr(each, "__module__", "__main__")


@pytest.fixture
def module(monkeypatch):
    """A module my_things, with the same by name."""
    made = ModuleType("my_things")
    sets = dict(zip(("train", "validation", "test"), SETS, strict=True))
    vars(made).update(Net=Net, my_loss=my_loss, sets=lambda split: sets[split])
    monkeypatch.setitem(sys.modules, "my_things", made)
    return made


def test_objects_train_as_their_names_do(in_main, module):
    by_name = drivetrain.train([
        *WORDS, "model=own", "model.target=my_things.Net", "loss=own", "loss.target=my_things.my_loss", "data=own",
        "data.target=my_things.sets", "data.validation=validation", "trust=[my_things]",
    ])  # fmt: skip
    found = drivetrain.train([*WORDS], **OBJECTS)
    assert found.status == by_name.status == "completed"
    assert command.weights(found.run_dir) == command.weights(by_name.run_dir)


def test_a_module_is_copied_as_it_is(in_main):
    net = Net(3)
    before = {name: value.clone() for name, value in net.state_dict().items()}
    result = drivetrain.train([*WORDS], model=net, data=SETS, **{"optimizer": "sgd", "optimizer.lr": 1e-12, "epochs": 1})
    for name, value in net.state_dict().items():
        assert torch.equal(value, before[name])
        torch.testing.assert_close(result.model().state_dict()[name], value)
    assert not result.model().training


def test_ranks_get_objects_by_fork(in_main):
    one = drivetrain.train([*WORDS], **OBJECTS)
    two = drivetrain.train([*WORDS, "parallel=ddp", "parallel.nproc=2"], **OBJECTS)
    assert (two.status, two.world_size) == ("completed", 2)
    of_two = two.model().state_dict()
    for name, value in one.model().state_dict().items():
        torch.testing.assert_close(of_two[name], value, rtol=1e-5, atol=1e-6)


def test_metrics_and_callbacks(in_main):
    watch, whole = Watch(), pytest.importorskip("torchmetrics").classification.MulticlassAccuracy(2, average="micro")
    result = drivetrain.train([*WORDS], **OBJECTS, metrics=["accuracy", hits, misses, whole], callbacks=[watch])
    final = result.metrics["test"]["final"]
    assert final["hits"] == final["MulticlassAccuracy"] == pytest.approx(final["accuracy"])
    assert final["misses"] == pytest.approx(1 - final["hits"])
    assert watch.seen == ["evaluation"] * 2
    alone = drivetrain.train([*WORDS], **OBJECTS, metrics=hits, select="hits", **{"metrics.own.better": "max"})
    assert alone.selection["metric"] == "hits"


def test_two_sets_are_said_to_select_on_the_test_set(in_main, capfd):
    assert drivetrain.train([*WORDS], model=Net, data=SETS[:2]).judged_by == "test"
    assert "looks at the test set" in capfd.readouterr().err


def test_what_only_the_program_can_repeat_is_said(in_main, tmp_path, capsys):
    result = drivetrain.train([*WORDS], **OBJECTS)
    recipe = (result.run_dir / "recipe.yaml").read_text()
    assert f"# made by a program, with its data.target={given.PACKAGE}." in recipe
    assert drivetrain.load(result.run_dir).predict(X[:3]).labels
    with pytest.raises(UserError, match="was made by a program"):
        export([result.run_dir])
    done = command.run("train", f"resume={result.run_dir}", "epochs=3", cwd=tmp_path)
    assert done.code == 2
    assert "only that program can build it" in done.err


def test_another_object_of_a_name_has_another_name(in_main):
    class Other(Net):
        pass

    Other.__name__ = "Net"
    first, second = (given.words([], {"model": each})[1]["model.target"] for each in (Net, Other))
    assert first != second
    assert given.words([], {"model": Net})[1]["model.target"] == first
    assert given.find(first) is Net
    assert given.find(second) is Other


def test_packages_of_names_are_trusted_beside_others(module):
    module.Net.__module__, before = "my_things", module.Net.__module__
    try:
        words, plain = given.words(["epochs=2", "trust=[other]"], {"model": module.Net})
    finally:
        module.Net.__module__ = before
    assert words == ["epochs=2"]
    assert plain == {"model": "own", "model.target": "my_things.Net", "trust": ["my_things", "other"]}


@pytest.mark.parametrize(
    ("keywords", "said"),
    [
        (
            {"optimizer": torch.optim.SGD},
            "optimizer takes no object (SGD), but a name, as optimizer=NAME: model, loss, data, metrics, callbacks take objects",
        ),
        ({"data": (1, Rows(0, 9), 3, 4)}, "data takes (training set, test set)"),
        ({"metrics": [hits, Net]}, "make it an object, as Net()"),
        ({"metrics": ["accuracy", object()]}, "callable objects, not object"),
    ],
)
def test_what_takes_no_object_says_so(keywords, said, tmp_path):
    with pytest.raises(UserError) as error:
        drivetrain.train([*WORDS], **keywords)
    assert said in str(error.value)
    assert not list(tmp_path.iterdir())


def test_a_notebook_shows_a_chart_while_it_trains_and_the_page_after(in_main, monkeypatch):
    shown: list[dict[str, str]] = []
    handle = SimpleNamespace(update=lambda data, raw: shown.append(data))
    notebook = ModuleType("IPython")
    notebook.get_ipython = lambda: SimpleNamespace(kernel=True)
    notebook.display = ModuleType("IPython.display")
    notebook.display.display = lambda data, raw, display_id: shown.append(data) or handle
    monkeypatch.setitem(sys.modules, "IPython", notebook)
    monkeypatch.setitem(sys.modules, "IPython.display", notebook.display)
    result = drivetrain.train([*WORDS, "log_every=1"], **OBJECTS)
    assert result.status == "completed", result.error
    assert len(shown) > 1
    assert shown[-1]["text/plain"] == "update 10 of 10"
    assert "Loss over updates: training" in shown[-1]["text/html"]
    html = result._repr_html_()
    assert html.startswith("<iframe srcdoc=")
    assert "The worst" in html
    assert "<table><tr><th>status</th><td>completed</td></tr>" in html
    assert result.page == result.run_dir / "report.html"
