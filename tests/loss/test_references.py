"""Each loss against torch's, torchvision's, scikit-learn's or its paper's formula, in float64."""

import itertools
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torchvision.ops import sigmoid_focal_loss

from drivetrain.core.errors import UserError
from drivetrain.core.step.microbatch import MicroBatch
from drivetrain.core.step.source import Source
from drivetrain.loss.classification import Asymmetric, Bce, CrossEntropy, Focal, positive_weights_for, weights_for
from drivetrain.loss.ctc import Ctc, decoded
from drivetrain.loss.distill import Distill
from drivetrain.loss.embedding import Contrastive, Siglip, SupCon, Triplet
from drivetrain.loss.language import NextToken
from drivetrain.loss.margin import ArcFace
from drivetrain.loss.regression import L1, DiceLoss, GaussianNll, Huber, Mse, Quantile, Tversky
from tests.support import later

sk, class_weight = later.package("sklearn.metrics"), later.package("sklearn.utils.class_weight")


@pytest.fixture(autouse=True)
def _float64(float64):
    torch.manual_seed(1)


def close(found, expected):
    torch.testing.assert_close(found, torch.as_tensor(expected), rtol=1e-12, atol=1e-14)


def weighted(loss, *weights):
    loss.counted, loss.weight = True, torch.tensor(weights)
    return loss


def test_cross_entropy_with_weights_and_smoothing_is_torchs():
    output, target = torch.randn(9, 3), torch.randint(3, (9,))
    target[4] = -100
    weight = torch.tensor([0.2, 1.0, 3.0])
    found = weighted(CrossEntropy(0.1, [0.2, 1.0, 3.0]), 0.2, 1.0, 3.0)(output, target)
    close(found, F.cross_entropy(output, target, weight, label_smoothing=0.1))


def test_cross_entropy_of_pixels_is_torchs():
    output, target = torch.randn(2, 3, 4, 5), torch.randint(3, (2, 4, 5))
    target[0, :2] = 255
    loss = CrossEntropy(ignore_index=255)
    loss.counted = True
    close(loss(output, target), F.cross_entropy(output, target, ignore_index=255))
    total, correct, count = loss.sums(output, target).tolist()
    assert (correct, count) == (int(((output.argmax(1) == target) & (target != 255)).sum()), 30)
    assert total / count == pytest.approx(float(F.cross_entropy(output, target, ignore_index=255)), rel=1e-12)


def test_focal_of_two_classes_is_torchvisions_of_their_difference():
    output, target = torch.randn(9, 2), torch.randint(2, (9,))
    expected = sigmoid_focal_loss(output[:, 1] - output[:, 0], target.double(), alpha=-1, gamma=2.0, reduction="mean")
    close(Focal(2.0)(output, target), expected)
    close(Focal(0.0)(output, target), F.cross_entropy(output, target))


def test_dice_is_its_formula():
    output, target = torch.randn(2, 3, 4, 5), torch.randint(3, (2, 4, 5))
    target[1, 1] = -100
    p = output.softmax(1)
    losses = []
    for image in range(2):
        counts = target[image] != -100
        for c in range(3):
            t, q = (target[image][counts] == c).double(), p[image, c][counts]
            losses.append(1 - (2 * (t * q).sum() + 0.5) / (t.sum() + q.sum() + 0.5))
    close(DiceLoss(0.5)(output, target), torch.stack(losses).mean())


def test_bce_is_torchs():
    output, target = torch.randn(9, 3), torch.randint(2, (9, 3))
    weight = torch.tensor([0.2, 1.0, 3.0])
    loss = Bce(pos_weight=[0.2, 1.0, 3.0])
    loss.weight = weight
    close(loss(output, target), F.binary_cross_entropy_with_logits(output, target.double(), pos_weight=weight))
    smooth = target * 0.8 + 0.1
    close(Bce(0.2)(output, target), F.binary_cross_entropy_with_logits(output, smooth))
    total, right, count = Bce(0.2, [1.0, 2.0, 3.0]).sums(output, target).tolist()
    assert total / count == pytest.approx(float(F.binary_cross_entropy_with_logits(output, target.double())))
    assert right == int(((output > 0) == (target == 1)).sum())


def test_bce_of_classes_is_timms():
    """Its labels, smoothed, and mixed ones above a threshold; the accuracy is that of the highest output."""
    timm_loss = pytest.importorskip("timm.loss").BinaryCrossEntropy
    output, classes, mixed = torch.randn(9, 5), torch.randint(5, (9,)), torch.rand(9, 5).softmax(1)
    run = type("Run", (), {"data": type("Data", (), {"targets": "class"})})
    for smoothing, threshold, target in itertools.product((0.0, 0.2), (None, 0.2), (classes, mixed)):
        if smoothing and target is mixed:
            continue  # timm smooths mixed targets where it mixes them
        loss = Bce(smoothing, target_threshold=threshold if target is mixed else None)
        loss = loss.resolve(run)
        loss.labels = 5
        theirs = timm_loss(smoothing=smoothing, target_threshold=threshold if target is mixed else None)
        close(loss(output, target), theirs(output, target))
    total, right, count = loss.sums(output, classes).tolist()
    assert right / count == pytest.approx(float((output.argmax(1) == classes).float().mean()))
    assert total / count == pytest.approx(float(timm_loss(smoothing=0.0)(output, classes)))
    assert loss.metrics == ("loss", "accuracy")
    assert "class numbers from" in loss.problem(classes + 1, 5)
    assert loss.problem(classes, 5) is loss.problem(mixed, 5) is None


@pytest.mark.parametrize(
    ("loss", "reference"), [(Mse(), F.mse_loss), (L1(), F.l1_loss), (Huber(0.4), lambda a, b: F.huber_loss(a, b, delta=0.4))]
)
def test_regression_is_torchs(loss, reference):
    output, target = torch.randn(9, 2), torch.randn(9, 2)
    close(loss(output, target), reference(output, target))
    close(loss(output[:, :1], target[:, 0]), reference(output[:, 0], target[:, 0]))
    close(loss(output[:, 0], target[:, :1]), reference(output[:, 0], target[:, 0]))


@pytest.mark.parametrize("shapes", [((9, 2), (9,)), ((9, 2), (9, 1)), ((9, 1), (9, 2)), ((9,), (9, 2))])
def test_regression_never_broadcasts(shapes):
    output, target = (torch.randn(shape) for shape in shapes)
    with pytest.raises(UserError, match="loss=mse compares each output with one target"):
        Mse()(output, target)


def test_quantiles_are_scikit_learns():
    output, target = torch.randn(9, 6), torch.randn(9, 2)
    expected = [
        sk.mean_pinball_loss(target[:, k], output[:, 3 * k + i], alpha=q) for k in range(2) for i, q in enumerate((0.1, 0.5, 0.9))
    ]
    close(Quantile()(output, target), sum(expected) / 6)
    loss, covered, count = Quantile().sums(output, target).tolist()
    inside = (target >= output[:, ::3]) & (target <= output[:, 2::3])
    assert loss / count == pytest.approx(sum(expected) / 6)
    assert covered / count == pytest.approx(float(inside.double().mean()))


def test_info_nce_is_its_formula():
    output = torch.randn(10, 4)  # five samples, two views each, one after the other
    z = F.normalize(output, dim=1)
    losses = []
    for i in range(10):
        others = [math.exp(float(z[i] @ z[j]) / 0.3) for j in range(10) if j != i]
        losses.append(-math.log(math.exp(float(z[i] @ z[i ^ 1]) / 0.3) / sum(others)))
    close(Contrastive(0.3)(output, None), sum(losses) / 10)


def test_info_nce_between_views_is_clips():
    output = torch.randn(5, 4), torch.randn(5, 4)  # a model of two inputs
    scores = F.normalize(output[0], dim=1) @ F.normalize(output[1], dim=1).T / 0.3
    numbers = torch.arange(5)
    expected = (F.cross_entropy(scores, numbers) + F.cross_entropy(scores.T, numbers)) / 2
    close(Contrastive(0.3, within_views=False)(output, None), expected)
    loss, right, count = Contrastive(0.3, within_views=False, group=5).sums(output, None).tolist()
    assert (right, count) == (int((scores.argmax(1) == numbers).sum()), 5)
    assert loss == pytest.approx(5 * float(expected))


def test_triplet_is_its_formula():
    output, target = torch.randn(7, 3), torch.tensor([0, 0, 1, 1, 1, 0, 2])  # the last class has one sample
    losses = []
    for i in range(6):
        far = max(float((output[i] - output[j]).norm()) for j in range(7) if j != i and target[j] == target[i])
        near = min(float((output[i] - output[j]).norm()) for j in range(7) if target[j] != target[i])
        losses.append(max(0.0, far - near + 0.5))
    close(Triplet(0.5, normalize=False)(output, target), sum(losses) / 6)


def test_triplet_of_one_class_alone_is_zero_with_finite_gradients():
    output = torch.randn(4, 3, requires_grad=True)
    loss = Triplet()(output, torch.zeros(4, dtype=torch.int64))
    (gradient,) = torch.autograd.grad(loss, output)
    assert float(loss.detach()) == 0
    assert torch.equal(gradient, torch.zeros_like(gradient))


def test_the_sigmoid_loss_is_its_formula():
    output = torch.randn(5, 4), torch.randn(5, 4)
    model, loss = torch.nn.Linear(1, 1), Siglip(group=5)
    loss.add_parameters(model)
    assert [float(p.detach()) for p in (model.logit_scale, model.logit_bias)] == pytest.approx([math.log(10), -10])
    with torch.no_grad():
        model.logit_bias.fill_(-3.0)
    first, second = (F.normalize(each, dim=1) for each in output)
    total = 0.0
    for i, j in itertools.product(range(5), repeat=2):
        logit = 10 * float(first[i] @ second[j]) - 3
        total -= math.log(1 / (1 + math.exp(-logit if i == j else logit)))
    found = loss(output, None)
    close(found.detach(), total / 5)
    scale, bias = torch.autograd.grad(found, [model.logit_scale, model.logit_bias])
    assert scale != 0
    assert bias != 0
    _, right, count = loss.sums(output, None).tolist()
    assert (right, count) == (int(((first @ second.T).argmax(1) == torch.arange(5)).sum()), 5)


def test_supervised_contrast_is_its_formula():
    output, target = torch.randn(7, 3), torch.tensor([0, 0, 1, 1, 1, 0, 2])  # the last class has one sample
    z = F.normalize(output, dim=1)
    losses = []
    for i in range(6):
        others = [j for j in range(7) if j != i]
        among = sum(math.exp(float(z[i] @ z[j]) / 0.2) for j in others)
        same = [j for j in others if target[j] == target[i]]
        losses.append(-sum(math.log(math.exp(float(z[i] @ z[j]) / 0.2) / among) for j in same) / len(same))
    close(SupCon(0.2)(output, target), sum(losses) / 6)


def test_asymmetric_is_timms():
    """timm computes in float32."""
    reference = pytest.importorskip("timm.loss").AsymmetricLossMultiLabel
    target = torch.randint(2, (9, 3))
    for settings in ((4.0, 1.0, 0.05), (2.0, 0.0, 0.0), (0.0, 0.0, 0.0)):
        output = torch.randn(9, 3, requires_grad=True)
        found, expected = Asymmetric(*settings)(output, target), reference(*settings, reduction="mean")(output, target)
        torch.testing.assert_close(found, expected.double(), rtol=1e-5, atol=1e-7)
        gradients = [torch.autograd.grad(loss, output)[0] for loss in (found, expected)]
        torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-6)
    close(Asymmetric(0, 0, 0)(output, target), F.binary_cross_entropy_with_logits(output, target.double()).detach())


def test_asymmetric_is_its_formula():
    output, target = 3 * torch.randn(9, 3), torch.randint(2, (9, 3))
    losses = []
    for o, t in zip(output.flatten().tolist(), target.flatten().tolist(), strict=True):
        p = 1 / (1 + math.exp(-o))
        q = max(p - 0.1, 0)
        losses.append(-((1 - p) ** 1.5) * math.log(p) if t else -(q**3) * math.log(1 - q))
    close(Asymmetric(3.0, 1.5, 0.1)(output, target), sum(losses) / 27)


def test_tversky_is_its_formula_and_dice_at_a_half():
    output, target = torch.randn(2, 3, 4, 5), torch.randint(3, (2, 4, 5))
    p, losses = output.softmax(1), []
    for image, c in itertools.product(range(2), range(3)):
        t, q = (target[image] == c).double(), p[image, c]
        overlap, extra, missed = (t * q).sum(), ((1 - t) * q).sum(), (t * (1 - q)).sum()
        losses.append(1 - (overlap + 0.5) / (overlap + 0.2 * extra + 0.9 * missed + 0.5))
    close(Tversky(0.2, 0.9, 0.5)(output, target), torch.stack(losses).mean())
    close(Tversky(0.5, 0.5, 0.5)(output, target), DiceLoss(1.0)(output, target))


def test_the_likelihood_of_a_normal_distribution_is_torchs():
    output, target = torch.randn(9, 4, requires_grad=True), torch.randn(9, 2)
    found = GaussianNll(0.3)(output, target)
    expected = F.gaussian_nll_loss(output[:, ::2], target, output[:, 1::2].exp(), eps=0.3)
    close(found.detach(), expected.detach())
    close(
        GaussianNll(0.3)(output[:, :2], target[:, 0]).detach(),
        F.gaussian_nll_loss(output[:, 0], target[:, 0], output[:, 1].exp(), eps=0.3).detach(),
    )
    with pytest.raises(UserError, match="loss=gaussian_nll compares each output with one target"):
        GaussianNll()(output, target[:, 0])


class OneLayer(torch.nn.Module):
    """A network with a body, and a head that has a bias."""

    def __init__(self):
        super().__init__()
        self.body, self.head = torch.nn.Linear(3, 6), torch.nn.Linear(6, 5)

    def forward(self, x):
        return self.head(self.body(x).tanh())


@pytest.mark.parametrize("margin", [0.0, 0.5, 1.4])
def test_the_angular_margin_is_its_formula(margin):
    model, loss = OneLayer(), ArcFace(margin, 4.0)
    centres = F.normalize(model.head.weight.detach(), dim=1)
    loss.add_parameters(model)
    x, target = torch.randn(40, 3), torch.randint(5, (40,))
    output, z = model(x), F.normalize(model.body(x).tanh(), dim=1)
    close(output.detach(), (4 * z @ centres.T).detach())
    losses = []
    for row, t in zip(output.tolist(), target.tolist(), strict=True):
        angle = math.acos(row[t] / 4)
        row[t] = 4 * (math.cos(angle + margin) if angle + margin < math.pi else row[t] / 4 - margin * math.sin(margin))
        losses.append(math.log(sum(map(math.exp, row))) - row[t])
    close(loss(output, target).detach(), sum(losses) / 40)
    total, right, count = loss.sums(output, target).tolist()
    assert total / count == pytest.approx(float(F.cross_entropy(output, target)), rel=1e-9)
    assert right == int((output.argmax(1) == target).sum())
    assert set(model.state_dict()) == {"body.weight", "body.bias", "head.weight", "head.cosine_scale"}
    with pytest.raises(UserError, match="makes cosines of the linear layer"):
        loss.add_parameters(torch.nn.Conv2d(1, 1, 1))


def test_ctc_is_torchs_and_the_sum_over_all_paths():
    """Blank last; by hand: the probabilities of all paths that the target is left of."""
    output, target = torch.randn(3, 4, 3), torch.tensor([[0, 1], [1, 1], [1, -100]])
    p, losses = output.softmax(2), []
    for sample, wanted in enumerate(([0, 1], [1, 1], [1])):
        total = 0.0
        for path in itertools.product(range(3), repeat=4):
            left = [c for i, c in enumerate(path) if c != 2 and (i == 0 or path[i - 1] != c)]
            total += math.prod(float(p[sample, i, c]) for i, c in enumerate(path)) if left == wanted else 0.0
        losses.append(-math.log(total) / len(wanted))
    close(Ctc()(output, target), sum(losses) / 3)
    lengths = torch.tensor([2, 2, 1])
    theirs = F.ctc_loss(output.log_softmax(2).transpose(0, 1), target.clamp(min=0), torch.tensor([4] * 3), lengths, blank=2)
    close(Ctc()(output, target), theirs)
    assert Ctc(zero_infinity=True)(output[:, :2], target).isfinite()
    assert Ctc()(output[:, :2], target).isinf()  # 1, 1 wants a blank between


def test_ctc_counts_whole_sequences():
    paths = torch.tensor([[0, 0, 2, 1], [1, 2, 1, 1], [2, 2, 2, 2], [0, 1, 0, 1]])
    assert decoded(F.one_hot(paths, 3), 4).tolist() == [[0, 1, -100, -100], [1, 1, -100, -100], [-100] * 4, [0, 1, 0, 1]]
    for target, right in (
        ([[0, 1], [1, 1], [-100, -100], [0, 1]], 3),
        ([[0, 1, -1, -1, -1], [1, -1, -1, -1, -1], [0, -1, -1, -1, -1], [0, 1, 0, 1, 0]], 1),
    ):
        assert Ctc(True).sums(F.one_hot(paths, 3).double(), torch.tensor(target)).tolist()[1:] == [right, 4]


def test_distillation_is_its_formula():
    output, teacher, y = torch.randn(6, 4), torch.randn(6, 4), torch.randint(4, (6,))
    loss = Distill(temperature=3.0, soft=0.7, label_smoothing=0.1)
    loss._hard = CrossEntropy(0.1)
    p, q = (teacher / 3).softmax(1), (output / 3).softmax(1)
    soft = 9 * (p * (p / q).log()).sum(1).mean()
    expected = 0.3 * F.cross_entropy(output, y, label_smoothing=0.1) + 0.7 * soft
    loss._teacher = lambda x: x
    close(loss.step(lambda x: output, MicroBatch(teacher, y, torch.tensor(0.5), True, False)), expected)
    close(loss.parts()["loss_soft"], soft / 2)


class Targets(Source):
    """Training data that is read."""

    def __init__(self, y):
        self._y = y

    def __len__(self):
        return len(self._y)

    def fetch(self, indices):
        return None, self._y[indices]


def test_balanced_weights_are_scikit_learns():
    y = torch.tensor([0] * 300 + [2] * 30 + [1] * 7 + [-100] * 5)
    expected = torch.tensor(class_weight.compute_class_weight("balanced", classes=np.arange(3), y=y[y >= 0].numpy())).float()
    for classes, more in ((3, []), (4, [0.0])):  # a class that does not occur
        found = weights_for("balanced", Targets(y), classes, -100, "loss.class_weights")
        factor = 3 / classes  # the number of classes is in the formula
        torch.testing.assert_close(found, torch.cat([expected * factor, torch.tensor(more, dtype=torch.float32)]))


def test_balanced_labels_weigh_as_much_where_present_as_where_absent():
    y = torch.tensor([[1, 0], [0, 0], [0, 0], [1, 1]])
    assert positive_weights_for("balanced", Targets(y), 2, "key").tolist() == [1.0, 3.0]


def test_weights_for_another_number_of_classes_are_refused():
    with pytest.raises(UserError, match="2 weights for 3 classes"):
        weights_for([1.0, 2.0], Targets(torch.zeros(3)), 3, -100, "loss.class_weights")
    with pytest.raises(UserError, match="counts classes from 0 to 2"):
        weights_for("balanced", Targets(torch.tensor([3])), 3, -100, "loss.class_weights")


BITS16 = {
    "focal": (Focal(), torch.randint(4, (8,))),
    "z": (weighted(CrossEntropy(z_loss=0.3), 1.0, 1.0, 1.0, 2.0), torch.randint(4, (8,))),
    "bce": (Bce(), torch.randint(2, (8, 4))),
    "mse": (Mse(), torch.randn(8, 4, dtype=torch.float32)),
    "quantile": (Quantile([0.2, 0.5, 0.6, 0.8]), torch.randn(8, dtype=torch.float32)),
    "contrastive": (Contrastive(), None),
    "triplet": (Triplet(), torch.randint(3, (8,))),
    "supcon": (SupCon(), torch.randint(3, (8,))),
    "asymmetric": (Asymmetric(), torch.randint(2, (8, 4))),
    "gaussian_nll": (GaussianNll(), torch.randn(8, 2, dtype=torch.float32)),
    "arcface": (ArcFace(scale=4.0), torch.randint(4, (8,))),
}


@pytest.mark.parametrize("name", BITS16)
def test_sixteen_bit_outputs_are_computed_in_float32(name):
    loss, target = BITS16[name]
    output = torch.randn(8, 4).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        found = loss(output, target)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, loss(output.float(), target), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    "loss", [Focal(), DiceLoss(), CrossEntropy(), Tversky()], ids=["focal", "dice", "cross_entropy", "tversky"]
)
def test_a_batch_of_which_nothing_counts_costs_nothing(loss):
    loss.counted = True
    output = torch.randn(2, 3, 4, 4, requires_grad=True)
    value = loss(output, torch.full((2, 4, 4), -100))
    (gradient,) = torch.autograd.grad(value, output)
    assert float(value.detach()) == 0
    assert not gradient.any()


# --- loss.z_loss is PaLM's penalty by hand: with smoothing, weights, ignored items and soft targets ---


Z = 0.3


def by_hand(output):
    """The square of the logarithm of the sum of exponentials, of each item; classes come second."""
    return output.exp().sum(1).log() ** 2


@pytest.mark.parametrize("counted", [False, True])
def test_over_samples_with_smoothing_and_ignored_ones(counted):
    output, target = torch.randn(9, 3) + 2, torch.randint(3, (9,))
    target[4] = -100
    loss = CrossEntropy(0.1, z_loss=Z)
    loss.counted = counted
    kept = target != -100
    close(loss(output, target), F.cross_entropy(output, target, label_smoothing=0.1) + Z * by_hand(output)[kept].mean())
    close(loss.sums(output, target), CrossEntropy(0.1).sums(output, target))  # an evaluation is without it


def test_over_pixels_with_weights_of_classes():
    output, target, weight = torch.randn(2, 3, 4, 5), torch.randint(3, (2, 4, 5)), [0.2, 1.0, 3.0]
    target[0, :2] = -100
    each = torch.tensor(weight)[target.clamp(min=0)] * (target != -100)
    expected = F.cross_entropy(output, target, torch.tensor(weight)) + Z * (by_hand(output) * each).sum() / each.sum()
    close(weighted(CrossEntropy(class_weights=weight, z_loss=Z), *weight)(output, target), expected)


@pytest.mark.parametrize("counted", [False, True])
def test_with_soft_targets(counted):
    output, target = torch.randn(6, 4), torch.rand(6, 4).softmax(1)
    loss = CrossEntropy(z_loss=Z)
    loss.counted = counted
    close(loss(output, target), F.cross_entropy(output, target) + Z * by_hand(output).mean())


@pytest.mark.parametrize("counted", [False, True])
def test_over_tokens(counted):
    output, target = torch.randn(3, 5, 7, requires_grad=True), torch.randint(7, (3, 5))
    target[1, 3:] = -100
    loss = NextToken(1, Z)
    loss.counted = counted
    flat, kept = output.flatten(0, 1), target.flatten() != -100
    expected = F.cross_entropy(flat, target.flatten()) + Z * by_hand(flat)[kept].mean()
    found = loss(output, target)
    close(found, expected)
    close(torch.autograd.grad(found, output)[0], torch.autograd.grad(expected, output)[0])
    close(loss.sums(output, target), NextToken().sums(output, target))


def test_no_penalty_leaves_the_loss_bit_for_bit(monkeypatch):
    output, target = torch.randn(9, 3).float(), torch.randint(3, (9,))
    monkeypatch.setattr(torch.Tensor, "logsumexp", lambda *_: 1 / 0)
    assert torch.equal(CrossEntropy(0.1)(output, target), F.cross_entropy(output, target, label_smoothing=0.1))
    NextToken()(output.view(3, 3, 3), target.view(3, 3))
