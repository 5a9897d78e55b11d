"""Metrics in runs: which are reported, on any number of ranks, and which one ranks models."""

import json
import math
from pathlib import Path

import pytest
import torch

import drivetrain
from drivetrain.cli import main
from drivetrain.core.errors import UserError
from drivetrain.core.step.microbatch import Request
from drivetrain.launch import launcher
from drivetrain.metrics import states
from drivetrain.run import reader
from drivetrain.ui import terminal
from tests.support import later

sk = later.package("sklearn.metrics")
OWN = '''
"""Somebody's own metrics."""
import torch
import torchmetrics

class Right(torchmetrics.Metric):
    def __init__(self, num_classes, factor=1):
        super().__init__()
        self.factor = factor * num_classes
        self.add_state("right", torch.tensor(0.0), dist_reduce_fx="sum")

    def update(self, output, target):
        self.right += (output.argmax(1) == target).sum()

    def compute(self):
        return {"right": self.right, "scaled": self.right * self.factor}

def worst(output, target):
    """The largest of the set, which no mean of batches is."""
    return torch.nn.functional.cross_entropy(output, target, reduction="none").max()

def several(output, target):
    right = (output.argmax(1) == target).float()
    return {"right": right.mean(), "rank": right.sum()}

def alike(model, x, target, output):
    """A mean over samples, which names what else it wants."""
    assert not model.training
    return {"same": (model(x) == output).all(1).float().mean(), "loss_of": torch.nn.functional.cross_entropy(output, target)}

def plain_mean(output, target):
    return torch.nn.functional.cross_entropy(output, target)

def of_many(output, target):
    """It is defined for more samples than two."""
    return output.flatten().topk(50).values.mean()

def of_more(output, target):
    return output.flatten().topk(10**4).values.mean()

def norm_of_weights(model):
    return float(next(model.parameters()).norm())

def of_a_dict(output, target):
    return output["logits"].mean()

class Two(torch.nn.Module):
    def __init__(self, classes, shape):
        super().__init__()
        self.layer = torch.nn.Linear(torch.Size(shape).numel(), classes)

    def forward(self, x):
        logits = self.layer(x.flatten(1))
        return {"logits": logits, "norms": (logits.norm(dim=1), None)}

def loss_of_two(output, target):
    return torch.nn.functional.cross_entropy(output["logits"], target)

def of_two(output, target):
    """A median and a maximum, which no mean of batches is."""
    each = torch.nn.functional.cross_entropy(output["logits"], target, reduction="none")
    assert len(each) == len(output["norms"][0])
    return {"median": each.median(), "longest": output["norms"][0].max()}

class Retrieval(torchmetrics.Metric):
    def update(self, preds, target, indexes):
        pass

    def compute(self):
        return 0

def words(output, target):
    return "many"

class Other:
    pass

number = 3
'''


@pytest.fixture
def own(own_module):
    own_module("my_metrics", OWN)
    return lambda target, *more: ["metrics=[own]", f"metrics.own.target=my_metrics.{target}", "trust=[my_metrics]", *more]


def outputs_of(trainer) -> tuple[torch.Tensor, torch.Tensor]:
    """The model's outputs for the test set, and its targets."""
    data = trainer.evaluator.data
    x, y = data(Request(0, torch.arange(len(data.source)), 1.0))
    trainer.model.eval()
    with torch.no_grad():
        return trainer.model(x), y


def test_on_the_digits_they_are_scikit_learns(fitted):
    words = ["data=digits", "epochs=3", "updates=null", "optimizer.lr=0.1"]
    trainer = fitted(*words, "metrics=[accuracy,f1,precision,recall,auroc,average_precision,confusion_matrix]", "ema=ema")
    output, target = outputs_of(trainer)
    predicted, probabilities = output.argmax(1), output.softmax(1)
    final = trainer.progress.final
    assert 0.5 < final["accuracy"] < 1
    expected = {
        "accuracy": sk.accuracy_score(target, predicted),
        "f1": sk.f1_score(target, predicted, average="macro"),
        "precision": sk.precision_score(target, predicted, average="macro", zero_division=0),
        "recall": sk.recall_score(target, predicted, average="macro"),
        "auroc": sk.roc_auc_score(target, probabilities, multi_class="ovr"),
        "average_precision": sk.average_precision_score(torch.nn.functional.one_hot(target), probabilities),
    }
    assert {name: final[name] for name in expected} == pytest.approx(expected, abs=1e-6)
    assert trainer.progress.tables["confusion_matrix"]["values"] == sk.confusion_matrix(target, predicted).tolist()
    with trainer.ema.swapped():
        averaged = outputs_of(trainer)[0].argmax(1)
    assert final["ema_f1"] == pytest.approx(sk.f1_score(target, averaged, average="macro"), abs=1e-12)
    assert final["ema_f1"] != final["f1"]
    assert set(trainer.progress.tables) == {"confusion_matrix", "ema_confusion_matrix"}


def test_three_ranks_give_the_figures_of_one_also_if_one_has_no_batch(train, own):
    words = ["data.test_samples=8", "updates=1", "optimizer.lr=1e-30", "metrics.own.kwargs={}", "saving=none"]
    words += [w.replace("[own]", "[own,f1,auroc,calibration_error,confusion_matrix]") for w in own("worst")]
    one = train(*words)
    three = train(*words, "parallel=ddp", "parallel.nproc=3")
    assert len(one.judged("final")) == 6
    assert three.judged("final") == pytest.approx(one.judged("final"), abs=1e-6)
    assert three.tables == one.tables
    assert sum(map(sum, one.tables["test"]["final"]["confusion_matrix"]["values"])) == 8


def test_a_batch_that_only_fills_up_does_not_count(make, monkeypatch):
    trainer = make("metrics=[f1,auroc,confusion_matrix]")
    first, tables = trainer.evaluator.metrics(), trainer.evaluator.tables
    batch = type(trainer.batch)
    plain = batch.evaluation_requests

    def filled(self, *args, **kwargs):
        requests = list(plain(self, *args, **kwargs))
        return [*requests, Request(0, requests[0].indices, 0.0)]

    monkeypatch.setattr(batch, "evaluation_requests", filled)
    assert trainer.evaluator.metrics() == first
    assert trainer.evaluator.tables == tables
    assert sum(map(sum, tables["confusion_matrix"]["values"])) == 20


def test_the_losss_own_figures_stay_as_they_are(make):
    plain, more = (make(*words) for words in ([], ["metrics=[accuracy,f1]"]))
    assert plain.evaluator.meters == []
    figures = plain.evaluator.evaluate()
    assert set(figures) == {"loss", "accuracy"}
    assert {name: more.evaluator.evaluate()[name] for name in figures} == figures


# --- select ---


def test_the_selected_metric_ranks_the_evaluations(train, capsys):
    words = ["metrics=[f1,mae]", "select=f1"]
    with pytest.raises(UserError, match=r"metrics=\[mae\] measures numbers"):
        launcher.prepare(words)
    run = train("metrics=[recall]", "select=recall", "updates=8", "epochs=2", "data.samples=48")
    evaluations = [json.loads(line) for line in (run.run_dir / "metrics.jsonl").read_text().splitlines()]
    recalls = [record["recall"] for record in evaluations if record["event"] == "evaluate"]
    assert run.judged("best")["recall"] == max(recalls)
    assert run.selection == {"metric": "recall", "better": "max"}
    (run.run_dir / "result.json").unlink()  # as of a run that is under way
    found = reader.read(run.run_dir)
    assert (found.metric, found.best()) == (("recall", True), max(recalls))


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["select=accurracy"], "select=accurracy is not evaluated: did you mean 'accuracy'?"),
        (["select=f1"], "select=f1 is not evaluated: there is: accuracy, loss (metrics=[…] adds others)"),
        (["select=ema_loss"], "select=ema_loss is of averaged weights, and ema=none keeps none: set ema=ema"),
        (["select=3"], "select=3: must be a text"),
        (["metrics=[confusion_matrix]", "select=confusion_matrix"], "select=confusion_matrix is not evaluated"),
        (["metrics=[f1,rmse]"], "metrics=[rmse] measures numbers for each sample (regression), but the targets of"
         " data=synthetic and loss=cross_entropy are one class for each sample"
         ": take it out of metrics; accuracy, "),
        (["metrics=[iou]"], "metrics=[iou] measures a class for each pixel"),
        (["metrics=[perplexity]"], "metrics=[perplexity] measures the next token at each position"),
        (["metrics=[top5]", "metrics.top5.k=0"], "metrics.top5.k=0: must be ≥ 1"),
        (["metrics=[own]"], "metrics=[own] needs metrics.own.target"),
        (["metrics=[own]", "metrics.own.target=my_metrics.Right"], "set trust=[my_metrics] on the command line"),
    ],
)  # fmt: skip
def test_what_cannot_be_measured_or_selected_is_refused(problems, words, says):
    assert any(problem.startswith(says) or says in problem for problem in problems(*words)), problems(*words)


def test_the_package_of_an_extra_is_named(problems, lacking):
    lacking("torchmetrics")
    (problem,) = problems("metrics=[f1,top5,auroc]")  # the others need none
    assert problem.startswith("metrics=[auroc] needs the package 'torchmetrics'")
    assert "pip install 'drivetrain[metrics]'" in problem


def test_a_figure_that_is_not_finite_is_left_out(make, caplog):
    trainer = make("metrics=[auroc]", "data.test_samples=1")  # one sample: no class has both kinds
    assert set(trainer.evaluator.evaluate()) == {"loss", "accuracy"}
    assert any("auroc of the trained weights on the test set is nan" in line for line in caplog.messages)


# --- own ---


def test_an_own_class_and_an_own_function(make, own):
    trainer = make(
        *own("Right", "metrics.own.kwargs={factor: 2}", "metrics.own.name=right", "metrics.own.better=max", "select=right")
    )
    output, target = outputs_of(trainer)
    figures = trainer.evaluator.evaluate()
    assert figures["right"] == (output.argmax(1) == target).sum()
    assert figures["scaled"] == 4 * 2 * figures["right"]
    figures = make(*own("worst")).evaluator.evaluate()
    losses = torch.nn.functional.cross_entropy(output, target, reduction="none")
    assert figures["worst"] == pytest.approx(float(losses.max()))
    assert not math.isclose(figures["worst"], figures["loss"])


def test_a_function_of_the_whole_set_takes_trees(train, own):
    words = ["model=own", "model.target=my_metrics.Two", "loss=own", "loss.target=my_metrics.loss_of_two", *own("of_two")]
    words += ["data.test_samples=8", "updates=1", "optimizer.lr=1e-30", "saving=none"]
    one, two = train(*words), train(*words, "parallel=ddp", "parallel.nproc=2")  # of 6 and 2 samples
    assert {"median", "longest"} <= set(one.judged("final"))
    assert two.judged("final") == pytest.approx(one.judged("final"), abs=1e-6)


def test_a_dict_of_figures_may_rank_by_one_of_them(train, own):
    words = own("several", "metrics.own.better={right: max}", "select=right")
    assert {"right", "rank"} <= train(*words).judged("final").keys()
    with pytest.raises(
        UserError, match=r"metrics.own.better is of wrong, and metrics.own.target=my_metrics.several gives right, rank"
    ):
        train(*own("several", "metrics.own.better={wrong: max}"))


def test_a_mean_over_samples_is_that_of_each_batch(train, own):
    """Batches of 12 and of 8: the mean is over samples."""
    result = train(*own("alike", "metrics.own.mean=true", "data.test_samples=20"))
    found = result.judged("final")
    assert found["same"] == 1
    assert found["loss_of"] == pytest.approx(found["loss"], rel=1e-6)
    with pytest.raises(
        UserError, match=r"names `input`, and only a function called with each batch gets that: set metrics.own.mean=true"
    ):
        train(*own("alike"))


def test_two_ranks_give_a_mean_as_one_does_also_if_one_has_no_batch(train, own):
    words = own("plain_mean", "metrics.own.mean=true", "data.test_samples=6", "updates=1", "optimizer.lr=1e-30", "saving=none")
    one, two = train(*words), train(*words, "parallel=ddp", "parallel.nproc=2")
    assert two.judged("final")["plain_mean"] == pytest.approx(one.judged("final")["plain_mean"], rel=1e-6)


def test_a_metric_over_a_whole_set_is_tried_on_up_to_64_samples_and_may_be_undefined_there(make, own, caplog):
    """What it raises for a few samples says nothing of a set. It is told, and the first evaluation shows it."""
    words = ("data.test_samples=80", "batch.global_batch=40")
    make(*own("of_many", *words)).evaluator.check()
    assert not [line for line in caplog.messages if "cannot be tried" in line]
    make(*own("of_more", *words)).evaluator.check()
    (line,) = [line for line in caplog.messages if "cannot be tried" in line]
    assert "metrics.own.target=my_metrics.of_more cannot be tried on 40 samples (RuntimeError: " in line


def test_a_metric_that_names_no_output_does_not_run_the_network_on_the_batch(make, own):
    trainer = make(*own("norm_of_weights", "metrics.own.mean=true"))

    def evaluate(forward, batch, need_output):
        assert not need_output
        return None, torch.ones(trainer.evaluator.loss.evaluation_sums())

    trainer.evaluator.loss.evaluate = evaluate
    trainer.evaluator.check()
    assert trainer.evaluator.evaluate()["norm_of_weights"] == pytest.approx(float(next(trainer.model.parameters()).norm()))


def test_a_metric_that_cannot_take_the_output_is_refused_before_the_first_update(make, own):
    trainer = make(*own("of_a_dict", "metrics.own.mean=true"))
    with pytest.raises(
        UserError, match=r"metrics=\[own\] cannot take what the model returns, a tensor \(n, 4\), and the targets"
    ):
        trainer.fit()
    assert trainer.progress.updates == 0


def test_an_own_metric_that_cannot_rank_is_refused(problems, own):
    (problem,) = problems(*own("worst", "select=worst"))
    assert "neither a high nor a low worst is known to be better" in problem


@pytest.mark.parametrize(
    ("target", "says"),
    [
        ("Other", "is no torchmetrics.Metric: derive from it, or name a function"),
        ("missing", "cannot be imported"),
        ("number", "is int: name a class or a function"),
        ("Retrieval", r"the method update of metrics.own.target=my_metrics.Retrieval cannot be called as \(output, target\)"),
        ("words", "gives str: it must give a number, or a dict of numbers"),
    ],
)
def test_an_own_metric_that_is_none_is_refused(make, own, target, says):
    with pytest.raises(UserError, match=says):
        make(*own(target)).evaluator.evaluate()


def test_a_function_does_not_get_texts_of_several_lengths(make, own, tmp_path):
    (tmp_path / "texts.jsonl").write_text("\n".join(json.dumps({"text": "word " * n}) for n in range(2, 60)))
    words = ["task=language_modelling", "data=jsonl", f"data.path={tmp_path}/texts.jsonl", "model=gpt"]
    words += ["model.width=16", "model.depth=1", "model.heads=2", "loss=next_token"]
    with pytest.raises(UserError, match=r"texts of data=jsonl differ in length: name a torchmetrics.Metric class"):
        make(*words, *own("worst"), run_dir=tmp_path)
    (tmp_path / "texts.jsonl").write_text("\n".join(json.dumps({"text": f"word {n:02}"}) for n in range(60)))  # of one length
    make(*words, *own("words"), run_dir=tmp_path)


def test_ranks_whose_outputs_differ_in_shape_are_told(monkeypatch):
    """One may have got the short samples, and one the long ones."""

    def gathered(layouts, mine, group=None):
        layouts[:] = [mine, ((3, 7), torch.float32)]

    monkeypatch.setattr(states.dist, "get_world_size", lambda group=None: 2)
    monkeypatch.setattr(states.dist, "all_gather_object", gathered)
    with pytest.raises(UserError, match="differ in shape between ranks"):
        states.gather(torch.zeros(3, 5))


# --- tables ---


def test_tables_are_in_the_result_the_terminal_and_the_report(train, capsys):
    run = train("metrics=[confusion_matrix,per_class]", "data.classes=3")
    written = json.loads((run.run_dir / "result.json").read_text())["tables"]["test"]["final"]
    assert written["confusion_matrix"]["rows"] == written["per_class"]["rows"] == ["0", "1", "2"]
    terminal.show_result(run)
    said = capsys.readouterr().out
    assert "confusion matrix (row: the class, column: predicted)" in said
    assert "precision" in said
    again = drivetrain.train([f"resume={run.run_dir}"])  # it is finished: nothing is evaluated, and nothing lost
    assert again.tables == run.tables
    terminal.show_result(again)
    said = capsys.readouterr().out
    assert "nothing was left to train; resume it with a larger epochs=…" in said
    assert "–" not in said.replace("– ", "")
    assert "those since" not in said
    assert main.main(["report", "outputs", "out=page"]) == 0
    page = (Path("page") / "report.html").read_text()
    assert "Confusion matrix, test set" in page
    assert 'class="confusion"' in page
    assert "Per class, test set" in page


@pytest.mark.parametrize("name", ["mae", "rmse", "r2"])
def test_quantiles_are_no_values(name):
    """task=regression names these metrics, and they would compare three outputs with one value."""
    with pytest.raises(UserError, match=rf"metrics=\[{name}\] compares each value with one output, and loss=quantile gives 3"):
        launcher.prepare(["task=regression", "data=diabetes", "loss=quantile", f"metrics=[{name}]", "model=mlp"])
    launcher.prepare(["task=regression", "data=diabetes", "loss=quantile", "metrics=[]", "select=loss", "model=mlp"])


def test_an_own_loss_takes_all_and_metrics_and_predictions_the_part(train, own):
    """Also where it is added to a loss of ours, which takes the part."""
    words = ["model=own", "model.target=my_metrics.Two", "trust=[my_metrics]", "metrics=[accuracy]"]
    whole = ("loss.target=my_metrics.loss_of_two", "loss=own")
    plain = train(*words, *whole, "forward_output=logits", "select=accuracy")
    assert drivetrain.load(plain.run_dir).predict(torch.rand(3, 3, 8, 8)).output.shape == (3, 4)
    added = train(*words, "loss=[own,cross_entropy]", "loss.own.target=my_metrics.loss_of_two", "forward_output=logits")
    found = added.judged("final")
    assert found["loss_own"] == pytest.approx(found["loss_cross_entropy"], rel=1e-6)
