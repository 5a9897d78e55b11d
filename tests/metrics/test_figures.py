"""Every metric against scikit-learn, numpy or torch: of random outputs, whole and in batches, of all kinds of targets."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from drivetrain.core.errors import UserError
from drivetrain.metrics import own, shipped
from drivetrain.parallel import Parallel
from drivetrain.ui import plots
from drivetrain.ui.pages import charts
from drivetrain.ui.sheet import joined
from tests.cuda.conftest import pretend  # noqa: F401
from tests.cuda.test_options import CLASSES
from tests.support import fake_device, later

sk = later.package("sklearn.metrics")
COUNT = 5


def built(metric, kind, classes=COUNT, **data):
    """The metric as a run over such targets builds it."""
    metric.kind = kind
    splits = SimpleNamespace(classes=classes, names=None, token_bytes=None)
    vars(splits).update(data)
    return metric.build(SimpleNamespace(data=splits, device=torch.device("cpu"), parallel=Parallel()))


def measured(metric, output, target, batch=7):
    """Figures and tables of outputs that come in batches."""
    for rows in torch.arange(len(output)).split(batch):
        metric.update(output[rows], target[rows])
    return metric.result()


def figure(metric, *given):
    (value,) = measured(metric, *given)[0].values()
    return value


@pytest.fixture
def classified():
    """Logits and classes of 60 samples; half of them right, the last class never there."""
    torch.manual_seed(0)
    target = torch.randint(COUNT - 1, (60,))
    output = torch.randn(60, COUNT)
    output[torch.arange(0, 60, 2), target[::2]] += 3
    return output, target


@pytest.fixture
def labelled():
    torch.manual_seed(1)
    target = torch.randint(2, (50, COUNT)).float()
    return torch.randn(50, COUNT) + 2 * target - 1, target


@pytest.mark.parametrize("average", ["macro", "micro", "weighted"])
@pytest.mark.parametrize("name", ["precision", "recall", "f1"])
def test_scores_of_classes_and_labels_are_scikit_learns(classified, labelled, name, average):
    cls = {"precision": shipped.PrecisionScore, "recall": shipped.Recall, "f1": shipped.F1}[name]
    score, (output, target) = getattr(sk, f"{name}_score"), classified
    expected = score(target, output.argmax(1), average=average, zero_division=0)
    assert figure(built(cls(average), "class"), *classified) == pytest.approx(expected, abs=1e-12)
    output, target = labelled
    expected = score(target, output > 0, average=average, zero_division=0)
    assert figure(built(cls(average), "labels"), *labelled) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("positive", [0, "2"])
def test_one_class_may_count_alone(classified, positive):
    output, target = classified
    there, predicted, share = target == int(positive), output.argmax(1) == int(positive), output.softmax(1)[:, int(positive)]
    for cls, score in (
        (shipped.PrecisionScore, sk.precision_score),
        (shipped.Recall, sk.recall_score),
        (shipped.F1, sk.f1_score),
    ):
        assert figure(built(cls(positive=positive), "class"), *classified) == pytest.approx(score(there, predicted), abs=1e-12)
    for curve, area in ((shipped.AUROC, sk.roc_auc_score), (shipped.AveragePrecision, sk.average_precision_score)):
        assert figure(built(curve(positive=positive), "class"), *classified) == pytest.approx(area(there, share), abs=1e-6)
    with pytest.raises(UserError, match=r"metrics\.f1\.positive=yes is no class of the data"):
        built(shipped.F1(positive="yes"), "class")


def test_accuracies(classified, labelled):
    output, target = classified
    assert figure(built(shipped.Accuracy(), "class"), *classified) == sk.accuracy_score(target, output.argmax(1))
    top2 = sk.top_k_accuracy_score(target, output, k=2, labels=range(COUNT))
    assert measured(built(shipped.TopK(2), "class"), *classified)[0] == {"top2": top2}
    assert figure(built(shipped.TopK(9), "class"), *classified) == 1.0
    output, target = labelled
    assert figure(built(shipped.Accuracy(), "labels"), *labelled) == pytest.approx(1 - sk.hamming_loss(target, output > 0))


@pytest.mark.parametrize(
    ("cls", "name"), [(shipped.AUROC, "roc_auc_score"), (shipped.AveragePrecision, "average_precision_score")]
)
def test_areas_under_curves(classified, labelled, cls, name):
    """One of the classes does not occur, and has no curve."""
    score, probabilities = getattr(sk, name), classified[0].softmax(1)
    expected = np.mean([score(classified[1] == n, probabilities[:, n]) for n in range(COUNT - 1)])
    assert figure(built(cls(), "class"), *classified) == pytest.approx(expected, abs=1e-6)
    assert figure(built(cls(thresholds=2000), "class"), *classified) == pytest.approx(expected, abs=4e-3)
    output, target = labelled
    assert figure(built(cls(), "labels"), *labelled) == pytest.approx(score(target, output), abs=1e-6)


def test_a_batch_of_small_logits_is_no_batch_of_probabilities():
    """torchmetrics takes outputs within 0 and 1 for probabilities, batch by batch."""
    target = torch.tensor([0, 1, 0, 1])
    output = torch.tensor([[0.9, 0.1], [0.6, 0.5], [9.0, -9.0], [-9.0, 9.0]])
    expected = sk.roc_auc_score(target, output.softmax(1)[:, 1])
    assert figure(built(shipped.AUROC(), "class", 2), output, target, 2) == pytest.approx(expected)


def test_calibration(classified, labelled):
    output, target = classified
    confidence, predicted = output.double().softmax(1).max(1)
    right = (predicted == target).double()
    expected, bins = 0.0, torch.bucketize(confidence.float(), torch.linspace(0, 1, 11), right=True)
    for one in bins.unique():
        of_bin = bins == one
        expected += float((right[of_bin].mean() - confidence[of_bin].mean()).abs() * of_bin.double().mean())
    assert figure(built(shipped.CalibrationError(bins=10), "class"), *classified) == pytest.approx(expected, abs=1e-6)
    assert 0 < figure(built(shipped.CalibrationError(), "labels"), *labelled) < 1


def test_tables(classified, labelled):
    output, target = classified
    figures, tables = measured(built(shipped.ConfusionMatrix(), "class", names=list("abcde")), *classified)
    matrix = sk.confusion_matrix(target, output.argmax(1), labels=range(COUNT)).tolist()
    assert (figures, tables) == ({}, {"confusion_matrix": {"rows": [*"abcde"], "columns": [*"abcde"], "values": matrix}})
    (table,) = measured(built(shipped.PerClass(), "class"), *classified)[1].values()
    of_each = sk.precision_recall_fscore_support(target, output.argmax(1), labels=range(COUNT), zero_division=0)
    assert table["columns"] == ["precision", "recall", "f1", "samples"]
    np.testing.assert_allclose(np.array(table["values"]).T, of_each)
    assert table["values"][4][3] == 0

    output, target = labelled
    (table,) = measured(built(shipped.ConfusionMatrix(), "labels"), *labelled)[1].values()
    (tn, fp), (fn, tp) = sk.multilabel_confusion_matrix(target, output > 0).transpose(1, 2, 0)
    assert table["columns"][0] == "true positives"
    np.testing.assert_array_equal(np.array(table["values"]).T, [tp, fp, fn, tn])


def test_values_are_scikit_learns_in_double_precision():
    torch.manual_seed(3)
    target = 1000 + torch.randn(70, 3)
    output = target + torch.randn(70, 3)
    a, b = target.double(), output.double()
    for cls, reference in (
        (shipped.MAE, sk.mean_absolute_error),
        (shipped.RMSE, lambda t, o: math.sqrt(sk.mean_squared_error(t, o))),
        (shipped.R2, sk.r2_score),
    ):
        assert figure(built(cls(), "values"), output, target) == pytest.approx(reference(a, b), rel=1e-9)
        assert figure(built(cls(), "values"), output[:, :1], target[:, 0]) == pytest.approx(reference(a[:, 0], b[:, 0]), rel=1e-9)


def test_pixels():
    """Ignored pixels count nowhere; a mask of one channel has two classes."""
    torch.manual_seed(4)
    output, target = torch.randn(6, 3, 8, 8), torch.randint(3, (6, 8, 8))
    target[:, 0] = -100
    there, predicted = target.flatten(), output.argmax(1).flatten()
    there, predicted = there[there >= 0], predicted[target.flatten() >= 0]
    assert figure(built(shipped.IoU(), "mask", 3), output, target, 4) == pytest.approx(
        sk.jaccard_score(there, predicted, average="macro")
    )
    assert figure(built(shipped.Dice(background=False), "mask", 3), output, target, 4) == pytest.approx(
        sk.f1_score(there, predicted, average="macro", labels=[1, 2])
    )
    assert figure(built(shipped.Accuracy(), "mask", 3), output, target, 4) == sk.accuracy_score(there, predicted)
    (table,) = measured(built(shipped.PerClass(), "mask", 3), output, target)[1].values()
    assert table["columns"] == ["precision", "recall", "f1", "iou", "pixels"]
    assert sum(row[-1] for row in table["values"]) == len(there)

    output, target = output[:, :1], (target == 1).long()
    expected = sk.jaccard_score(target.flatten(), output.flatten() > 0, average="macro")
    assert figure(built(shipped.IoU(), "mask", 1), output, target, 4) == pytest.approx(expected)


def test_tokens():
    torch.manual_seed(5)
    output, target = torch.randn(6, 10, COUNT), torch.randint(COUNT, (6, 10))
    target[:, 8:] = -100
    nats = torch.nn.functional.cross_entropy(output.double().flatten(0, 1), target.flatten()).item()
    assert figure(built(shipped.Perplexity(), "tokens"), output, target, 2) == pytest.approx(math.exp(nats))
    assert figure(built(shipped.BitsPerByte(), "tokens"), output, target, 2) == pytest.approx(nats / math.log(2))
    lengths = torch.tensor([1, 2, 3, 4, 5])
    length = lengths[target[target >= 0]].sum().item()
    expected = nats * 48 / math.log(2) / length
    assert figure(built(shipped.BitsPerByte(), "tokens", token_bytes=lengths), output, target, 2) == pytest.approx(expected)
    right = (output.argmax(-1) == target)[:, :8].double().mean().item()
    assert figure(built(shipped.Accuracy(), "tokens"), output, target, 2) == right


@pytest.mark.parametrize("cls", [shipped.F1, shipped.AUROC, shipped.Accuracy, shipped.CalibrationError])
def test_a_metric_begins_anew_after_a_reset_and_takes_bfloat16_for_float32(classified, cls):
    metric = built(cls(), "class")
    first = measured(metric, *classified)
    metric.reset()
    assert measured(metric, *classified) == first
    output, target = classified[0].bfloat16(), classified[1]
    assert measured(built(cls(), "class"), output, target) == measured(built(cls(), "class"), output.float(), target)


# --- metrics take batches on a device without making the host wait for it ---


BATCHES = {
    "class": lambda: (torch.randn(6, 5), torch.arange(6) % 5),
    "labels": lambda: (torch.randn(6, 5), torch.ones(6, 5)),
    "mask": lambda: (torch.randn(6, 5, 4, 4), torch.ones(6, 4, 4, dtype=torch.int64)),
    "tokens": lambda: (torch.randn(6, 7, 5), torch.ones(6, 7, dtype=torch.int64)),
    "values": lambda: (torch.randn(6, 2), torch.randn(6, 2)),
    "words": lambda: (torch.randn(6, 7, 5), torch.ones(6, 7, dtype=torch.int64)),
}
CASES = [
    (name, kind)
    for (group, name), cls in CLASSES.items()
    if group == "metrics" and cls is not own.OwnMetric
    for kind in cls.takes
]


@pytest.mark.parametrize("device_kind", fake_device.KINDS)
@pytest.mark.parametrize(("name", "kind"), CASES, ids=["-".join(case) for case in CASES])
def test_an_update_does_not_wait_for_the_device(pretend, device_kind, name, kind):  # noqa: F811
    metric = CLASSES["metrics", name]()
    metric.kind = kind
    splits = SimpleNamespace(classes=5, names=None, token_bytes=torch.ones(5))
    with pretend(device_kind) as device:
        metric = metric.build(SimpleNamespace(data=splits, device=device.device, parallel=Parallel()))
        for watched in (False, True):
            output, target = (t.to(device.device) for t in BATCHES[kind]())
            device.in_step = device.watching = watched
            with torch.no_grad():
                metric.update(output, target)
            device.in_step = device.watching = False
    kept = metric.state.metric_state if metric.by_torchmetrics else {"sums": metric.state.sums}
    states = [state for value in kept.values() for state in (value if isinstance(value, list) else [value])]
    assert {state.device.type for state in states} == {device_kind}
    assert not device.waits


# --- tables of an evaluation as text: whole, or what says the most of a large one ---


def test_a_small_confusion_matrix_is_shown_whole():
    table = {"rows": ["cat", "dog"], "columns": ["cat", "dog"], "values": [[1200, 3], [0, 7]]}
    found = plots.shown("confusion_matrix", table)
    title, header, rows = found.name, found.header, found.rows
    assert title.startswith("confusion matrix (row")
    assert header == ["", "cat", "dog"]
    assert rows == [["cat", "1,200", "3"], ["dog", "0", "7"]]


def test_of_a_large_one_the_pairs_that_are_confused_the_most():
    names = [f"c{n}" for n in range(20)]
    values = [[90 if row == column else 0 for column in range(20)] for row in range(20)]
    values[3][5], values[7][1] = 10, 30
    found = plots.shown("confusion_matrix", {"rows": names, "columns": names, "values": values})
    assert found.name == "confusion matrix: the most frequent confusions"
    assert found.rows == [["c7", "c1", "30", "25.0%"], ["c3", "c5", "10", "10.0%"]]


def test_of_many_classes_the_worst():
    table = {
        "rows": [f"c{n}" for n in range(20)], "columns": ["precision", "f1", "samples"],
        "values": [[0.5, 1 - n / 100, n] for n in range(20)],
    }  # fmt: skip
    found = plots.shown("per_class", table, most=2)
    assert found.name == "per class: 2 of 20 classes, the worst by f1"
    assert found.rows == [["c19", "0.5000", "0.8100", "19"], ["c18", "0.5000", "0.8200", "18"]]


def test_a_matrix_on_a_page():
    table = {"rows": ["cat", "<b>"], "columns": ["cat", "<b>"], "values": [[10, 0], [5, 5]]}
    bodies = [each.html for each in charts.sections({"confusion_matrix": table}, "test set")]
    assert bodies[-1].count('style="--share:') == 4
    assert '<td style="--share:0.500">5</td>' in bodies[-1]
    assert "&lt;b&gt;" in bodies[-1]
    names = [str(n) for n in range(50)]
    large = {"rows": names, "columns": names, "values": [[3 if n == m else int(m == 7) for n in range(50)] for m in range(50)]}
    assert "predicted as" in joined(charts.sections({"confusion_matrix": large}, "test set"))
    per_class = {"rows": ["cat", "dog"], "columns": ["f1", "samples"], "values": [[0.5, 9], [1.0, 3]]}
    assert "--part:50%" in joined(charts.sections({"per_class": per_class}, "test set"))


def test_pictures(tmp_path):
    """The picture's cells are as dark as the share of the class."""
    table = {"rows": ["cat", "dog"], "columns": ["cat", "dog"], "values": [[10, 0], [5, 5]]}
    for size in (1, 200):
        large = {"rows": [str(n) for n in range(2 * size)] if size > 1 else ["cat", "dog"]}
        counts = [[value for value in line for _ in range(size)] for line in table["values"] for _ in range(size)]
        picture = Image.open(plots.draw({**large, "values": counts}, tmp_path / f"images{size}" / "matrix.png"))
        assert max(picture.size) < 2000
        colors = {color for _, color in picture.convert("RGB").getcolors(10_000)}
        assert ((62, 99, 221) in colors) == (size == 1)  # a share of 1
        assert (255, 255, 255) in colors
