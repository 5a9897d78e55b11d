"""Every loss over micro-batches and ranks is that of one big batch, in float64: the same loss, parts and gradients."""

import pytest
import torch

from drivetrain.core.options.horizon import Horizon
from drivetrain.core.step.tensors import Tensors
from drivetrain.loss.classification import Asymmetric, Bce, CrossEntropy, Focal
from drivetrain.loss.ctc import Ctc
from drivetrain.loss.embedding import Contrastive, Siglip, SupCon, Triplet
from drivetrain.loss.language import NextToken
from drivetrain.loss.margin import ArcFace
from drivetrain.loss.own import OwnLoss
from drivetrain.loss.regression import L1, DiceLoss, GaussianNll, Huber, Mse, Quantile, Tversky
from drivetrain.loss.sum import Sum
from tests.loss.exactness import update
from tests.support.context import context

N, CLASSES = 11, 4
WHOLE = [[range(N)]]
SPLITS = {
    "three micro-batches": [[range(4), range(4, 8), range(8, N)]],
    "two ranks, uneven": [[range(6)], [range(6, N)]],
    "two ranks of two": [[range(3), range(3, 6)], [range(6, 9), range(9, N)]],
    "three ranks, one with fillers": [[range(5), range(5, 9)], [range(9, 10), range(10, N)], [[], []]],
}


@pytest.fixture(autouse=True)
def _float64(float64):
    """Equal means equal to the last digits."""


def images(generator):
    """Masks in which every image ignores a different number of pixels, and the last one all of them."""
    y = torch.randint(CLASSES, (N, 5, 6), generator=generator)
    for i in range(N):
        y[i].view(-1)[: 3 * i] = -100
    y[N - 1] = -100
    return torch.randn(N, 2, 5, 6, generator=generator), y


def tokens(generator):
    y = torch.randint(CLASSES, (N, 7), generator=generator)
    for i in range(N):
        y[i, max(1, 7 - i) :] = -100
    return torch.randint(9, (N, 7), generator=generator), y


def samples(generator):
    return torch.randn(N, 6, generator=generator), torch.randint(CLASSES, (N,), generator=generator)


def values(generator, k=1):
    return torch.randn(N, 6, generator=generator), torch.randn(N, k, generator=generator)


def labels(generator):
    return torch.randn(N, 6, generator=generator), torch.randint(2, (N, CLASSES), generator=generator)


def sequences(generator):
    y = torch.randint(CLASSES, (N, 3), generator=generator)
    for i in range(N):
        y[i, i % 4 :] = -100  # some are empty
    return torch.randn(N, 7, 6, generator=generator), y


def views(generator):
    return torch.randn(N, 2, 6, generator=generator), torch.zeros(N, dtype=torch.int64)


def rows_loss(output, y):
    """An own loss of two parts over the counted rows."""
    counted = (y >= 0).to(output.dtype)
    each = torch.nn.functional.cross_entropy(output, y.clamp(min=0), reduction="none")
    n = counted.sum().clamp(min=1)
    return {"fit": (each * counted).sum() / n, "size": 0.1 * (output.square().mean(1) * counted).sum() / n}


class RowsLoss:
    """The same, with the number of the rows that count."""

    def __call__(self, output, y):
        return rows_loss(output, y)

    def count(self, y):
        return (y >= 0).sum()


def batch_loss(output, batch):
    """An own loss that reads the inputs."""
    return ((output - batch.y) ** 2).mean() + (output * batch.x[:, :1]).mean()


class SomeOfDict:
    """An own loss over a dict of targets, one of which says what counts; it names the inputs too."""

    def __call__(self, y, output, x):
        counted = (y["kind"] >= 0).to(output.dtype)
        each = (output[:, 0] - y["value"] * x[:, 0]).square()
        return (each * counted).sum() / counted.sum().clamp(min=1)

    def count(self, y, batch):
        assert len(batch.x) == len(y["value"])
        return (y["kind"] >= 0).sum()


def dict_targets(generator):
    x, kind = some_rows(generator)
    return x, {"kind": kind, "value": torch.randn(N, generator=generator)}


def some_rows(generator):
    x, y = samples(generator)
    y[[1, 2, 3, 9]] = -1
    return x, y


WEIGHTS = [0.2, 1.0, 3.0, 0.5]
CASES = {
    "cross entropy": (lambda: CrossEntropy(0.1), samples, "class"),
    "cross entropy, ignoring": (lambda: CrossEntropy(ignore_index=-1), some_rows, None),
    "cross entropy, weights": (lambda: CrossEntropy(0.1, WEIGHTS), samples, "class"),
    "cross entropy, balanced": (lambda: CrossEntropy(class_weights="balanced"), samples, "class"),
    "cross entropy of pixels": (lambda: CrossEntropy(0.1), images, "mask"),
    "cross entropy of pixels, weights": (lambda: CrossEntropy(class_weights=WEIGHTS), images, "mask"),
    "focal of pixels": (Focal, images, "mask"),
    "focal, weights": (lambda: Focal(class_weights=WEIGHTS), samples, "class"),
    "dice": (DiceLoss, images, "mask"),
    "dice and cross entropy": (
        lambda: Sum({"dice": DiceLoss(), "cross_entropy": CrossEntropy(class_weights=WEIGHTS)}, [0.5, 2.0]), images, "mask"
    ),
    "next token": (NextToken, tokens, "tokens"),
    "next token, z, smoothed": (lambda: NextToken(1, 0.1, 0.2), tokens, "tokens"),
    "cross entropy, weights, z": (lambda: CrossEntropy(0.1, WEIGHTS, z_loss=0.1), samples, "class"),
    "cross entropy of pixels, z": (lambda: CrossEntropy(z_loss=0.1), images, "mask"),
    "bce": (lambda: Bce(0.1, WEIGHTS), labels, "labels"),
    "bce of classes": (lambda: Bce(0.1), samples, "class"),
    "bce, balanced": (lambda: Bce(pos_weight="balanced"), labels, "labels"),
    "mse": (Mse, values, "values"),
    "l1": (L1, lambda g: values(g, CLASSES), "values"),
    "huber": (lambda: Huber(0.5), lambda g: values(g, CLASSES), "values"),
    "quantile": (Quantile, values, "values"),
    "sum of regressions": (lambda: Sum({"mse": Mse(), "l1": L1()}), values, "values"),
    "own": (lambda: OwnLoss(f"{__name__}.batch_loss"), values, None),
    "own, counted": (lambda: OwnLoss(f"{__name__}.RowsLoss"), some_rows, None),
    "own, a dict of targets": (lambda: OwnLoss(f"{__name__}.SomeOfDict"), dict_targets, None),
    "contrastive": (Contrastive, views, "pair"),
    "contrastive, between views": (lambda: Contrastive(0.5, within_views=False), views, "pair"),
    "siglip": (Siglip, views, "pair"),
    "supcon": (SupCon, samples, "class"),
    "arcface": (lambda: ArcFace(scale=4.0), samples, "class"),
    "asymmetric": (Asymmetric, labels, "labels"),
    "tversky": (Tversky, images, "mask"),
    "gaussian_nll": (GaussianNll, lambda g: values(g, 2), "values"),
    "ctc": (Ctc, sequences, "sequence"),
    "triplet": (lambda: Triplet(0.5), samples, "class"),
    "triplet, plain distances": (lambda: Triplet(0.5, normalize=False), samples, "class"),
}  # fmt: skip


def model_for(kind, x, y, loss):
    """A small model with dropout-free layers whose outputs fit."""
    torch.manual_seed(0)
    if kind == "mask":
        return torch.nn.Conv2d(2, CLASSES, 3, padding=1)
    if kind == "tokens":
        return torch.nn.Sequential(torch.nn.Embedding(9, 6), torch.nn.Linear(6, CLASSES))
    if kind == "sequence":
        return torch.nn.Linear(6, loss.outputs(CLASSES))
    outputs = y.shape[1] if isinstance(y, torch.Tensor) and y.dim() == 2 else CLASSES
    return torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, loss.outputs(outputs)))


class Run:
    """The parts of a run that losses ask."""

    def __init__(self, kind):
        self.data = type("Data", (), {"targets": kind, "byte_tokens": True})
        self.values = {"epochs": 1, "trust": [], "phases": None}


def prepared(kind, y, capacity=N):
    def setup(loss, parallel):
        size = parallel.world.size
        batch = type("Batch", (), {"lengths": None, "weighs_by_length": False, "size": lambda self, epoch: capacity * size})()
        data = type("Data", (), {"classes": y.shape[1] if kind == "labels" else CLASSES, "train": Tensors(y, y)})
        vars(loss).update(vars(loss.resolve(Run(kind))))
        made = context(run=Run(kind), batch=batch, data=data, horizon=Horizon(1, [1]))
        made.parallel = parallel
        loss.setup(made)

    return setup


@pytest.mark.parametrize("name", CASES)
def test_micro_batches_and_ranks_are_one_big_batch(name):
    make, data, kind = CASES[name]
    x, y = data(torch.Generator().manual_seed(3))
    loss = make()
    model = model_for(kind, x, y, loss)
    big, big_parts, big_gradients = update(loss, model, x, y, WHOLE, prepared(kind, y))
    assert big > 0
    assert next(iter(big_gradients.values())).abs().max() > 1e-3
    for split in SPLITS.values():
        found, parts, gradients = update(loss, model, x, y, split, prepared(kind, y))
        assert found == pytest.approx(big, rel=1e-12)
        assert parts == pytest.approx(big_parts, rel=1e-12)
        for key, gradient in gradients.items():
            torch.testing.assert_close(gradient, big_gradients[key], rtol=1e-10, atol=1e-13)


def test_without_the_counts_it_is_another_loss():
    """The comparison above can fail: the same pixels, each micro-batch weighted by its samples."""
    x, y = images(torch.Generator().manual_seed(3))
    loss = CrossEntropy()
    model = model_for("mask", x, y, loss)

    def by_samples(own, parallel):
        prepared("mask", y)(own, parallel)
        own.count = lambda target: torch.tensor(float(len(target)))

    big, *_ = update(loss, model, x, y, WHOLE, prepared("mask", y))
    found, *_ = update(loss, model, x, y, SPLITS["three micro-batches"], by_samples)
    assert found != pytest.approx(big, rel=1e-3)
