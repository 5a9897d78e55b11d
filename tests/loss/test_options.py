"""Losses in runs: how they are chosen, refused and logged."""

import json
import os
import sys
import types

import pytest
import safetensors.torch
import torch

from drivetrain.config.compose import compose
from drivetrain.core.errors import UserError
from drivetrain.core.step.microbatch import MicroBatch
from drivetrain.engine.step import PlainStep
from drivetrain.engine.update_step import TwoPasses, Weighed
from drivetrain.launch import launcher
from drivetrain.loss import distill
from drivetrain.loss.classification import Focal
from drivetrain.loss.embedding import Contrastive
from drivetrain.loss.own import OwnLoss
from drivetrain.loss.sum import Sum

BOTH = "loss=[cross_entropy,focal]"


class Numbers(torch.utils.data.Dataset):
    """Six numbers and a target of a kind."""

    num_classes = 3
    targets = "class"

    def __init__(self, split, kind="class"):
        self.kind = kind

    def __len__(self):
        return 24

    def __getitem__(self, i):
        x = torch.linspace(0, 1, 6) * i
        return x, {"class": i % 3, "beyond": 3, "fractions": 0.5, "int32": torch.tensor(i % 3, dtype=torch.int32),
                   "labels": torch.tensor([1, 0, i % 2]), "pair": torch.zeros(2),
                   "beyond at 11": 3 if i == 11 else i % 3, "column": [i % 3],
                   "several": {"kind": i % 3, "size": torch.tensor([i / 24])}}[self.kind]  # fmt: skip


def parted(output, y):
    """An own loss of two parts."""
    return {"fit": torch.nn.functional.cross_entropy(output, y), "size": output.square().mean()}


def each(output, y):
    """A loss that forgets its mean."""
    return torch.nn.functional.cross_entropy(output, y, reduction="none")


def with_inputs(output, batch):
    """An own loss that reads the inputs."""
    assert batch.x.shape[0] == batch.y.shape[0] == output.shape[0]
    return torch.nn.functional.cross_entropy(output, batch.y)


def several(output, target):
    """An own loss of two targets."""
    return torch.nn.functional.cross_entropy(output, target["kind"]) + (output[:, :1] - target["size"]).square().mean()


class Several:
    """The same over some of the samples, whose number the targets tell."""

    def __init__(self, kind):
        self.kind = kind

    def __call__(self, y, output):
        of_kind = y["kind"] == self.kind
        return ((output[:, :1] - y["size"]).square()[:, 0] * of_kind).sum() / of_kind.sum().clamp(min=1)

    def count(self, x, y):
        assert x.shape == (len(y["kind"]), 6)
        return (y["kind"] == self.kind).sum()


def told(output, y, progress, scale, x):
    """An own loss that is told how far the run is."""
    seen.append((progress.update, progress.updates, progress.epoch, progress.epochs, progress.training))
    return scale * (output[:, :1] - x[:, :1]).square().mean() + 0 * y.sum()


seen: list[tuple[int, int, int, int, bool]] = []


class Moving(torch.nn.Module):
    """A loss with a buffer that training moves, and a part that does not train."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.frozen = torch.nn.Dropout().eval()

    def forward(self, output, y):
        assert not self.frozen.training
        if self.training:
            self.calls += 1
        return torch.nn.functional.cross_entropy(output, y) + 0 * self.calls


def misled(prediction, batch):
    """It names what it would get only if the first were called output."""
    return prediction.mean()


def asking(output, target, extra):
    """It wants what nobody gives."""
    return output.mean()


class WithParameters(torch.nn.Module):
    """A loss that nobody would train."""

    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(()))

    def forward(self, output, y):
        return self.scale * output.sum()


@pytest.fixture
def mine(monkeypatch):
    """This file as a package of the user's."""
    module = types.ModuleType("my_losses")
    vars(module).update({k: v for k, v in globals().items() if getattr(v, "__module__", None) == __name__})
    monkeypatch.setitem(sys.modules, "my_losses", module)
    return ["trust=[my_losses]", "data=own", "data.target=my_losses.Numbers", "data.normalize=false"]


def records(result):
    assert result.status == "completed", result.error
    return [json.loads(line) for line in (result.run_dir / "metrics.jsonl").read_text().splitlines()]


# --- several at once ---


def test_several_losses_are_composed_below_their_names():
    job = launcher.prepare([BOTH, "loss.focal.gamma=3", "loss.weights=[1,0.5]", "loss.cross_entropy.label_smoothing=0.1"])
    loss = job.run.loss
    assert isinstance(loss, Sum)
    assert (loss.losses["focal"].gamma, loss.losses["cross_entropy"].label_smoothing, loss.factors) == (3, 0.1, [1, 0.5])
    assert job.run.named("loss") == BOTH
    assert loss.metrics == ("loss", "loss_cross_entropy", "loss_focal", "accuracy")
    assert loss.best == ("accuracy", max)


def test_one_loss_in_a_list_is_that_loss():
    assert compose(["loss=[focal]"]).plain["loss"] == compose(["loss=focal"]).plain["loss"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([BOTH, "loss.gamma=3"], "set loss.focal.gamma"),
        ([BOTH, "loss.focal.gama=3"], "did you mean 'gamma'"),
        ([BOTH, "loss.focal.gamma=-3"], "loss.focal.gamma=-3: must be ≥ 0"),
        ([BOTH, "loss.weights=[1]"], "1 weights for the 2 losses"),
        (["loss=[cross_entropy,foca]"], "did you mean 'focal'"),
        (["loss=[focal,focal]"], "twice"),
        (["loss=[cross_entropy,mse]"], "take different kinds of targets"),
        (["loss=[focal,triplet]"], "cannot be added to others"),
        (["loss=[focal,own]", "loss.own.target=a.b"], "trust=[a]"),
        (["loss=mse"], "set loss=cross_entropy"),
        *(([word], word) for word in ("loss.label_smoothing=-0.1", "loss.label_smoothing=1.5", "loss.label_smoothing=much")),
        (["loss=quantile", "loss.quantiles=[0.5,0.1]"], "give ascending numbers"),
        (["loss=triplet", "parallel=pipeline"], "loss=triplet and parallel=pipeline exclude each other"),
        (["loss=triplet", "compile=inductor", "batch=accumulate"], "runs the forward of each of several micro-batches twice"),
    ],
)
def test_what_does_not_fit_is_refused(problems, words, says):
    assert any(says in problem for problem in problems(*words))


def test_the_parts_are_logged_and_add_up_and_the_runs_recipe_repeats_the_sum(train):
    words = [BOTH, "loss.weights=[1,0.5]", "loss.focal.gamma=3", "loss.cross_entropy.class_weights=balanced"]
    split, one = train(*words, "parallel=ddp", "batch=accumulate", "batch.accumulation_steps=3"), train(*words)
    for record, other in zip(records(split), records(one), strict=True):
        assert record["loss"] == pytest.approx(record["loss_cross_entropy"] + 0.5 * record["loss_focal"], rel=1e-5)
        for name in ("loss", "loss_cross_entropy", "loss_focal"):
            assert record[name] == pytest.approx(other[name], rel=1e-5)
    job = launcher.prepare([f"recipe={one.run_dir / 'recipe.yaml'}"])
    assert job.config_hash == one.config_hash
    assert job.run.loss.losses["focal"].gamma == 3
    assert launcher.prepare([f"resume={one.run_dir}", "updates=3"]).run.loss.factors == [1, 0.5]


# --- which step ---


@pytest.mark.parametrize(
    ("words", "step"),
    [
        ([], PlainStep),
        (["loss.class_weights=balanced"], Weighed),
        ([BOTH], Weighed),
        (["loss=focal"], PlainStep),
        (["loss=triplet"], TwoPasses),
    ],
)
def test_a_plain_mean_over_samples_needs_no_step_of_its_own(make, words, step):
    made = make(*words).step
    assert type(getattr(made, "passes", made)) is step


def test_an_update_that_is_repeated_forgets_what_waits(make):
    for words in ([BOTH], ["loss=triplet"]):
        step = make(*words, "batch=accumulate").step
        step.micro_batch(
            MicroBatch(torch.zeros(2, 3, 8, 8), torch.zeros(2, dtype=torch.int64), torch.ones(()), False, False), None
        )
        assert len(step.waiting) == 1
        step.zero_grad()
        assert step.waiting == []


def test_two_passes_draw_the_same_numbers_and_count_statistics_once(make):
    trainer = make("loss=triplet", "batch=accumulate", "batch.accumulation_steps=3", "updates=1")
    dropout = torch.nn.Dropout(0.5)
    norm = torch.nn.BatchNorm1d(4)
    outputs = []

    def changed(module, args, output):
        outputs.append(norm(dropout(output)))
        return outputs[-1]

    trainer.model.register_forward_hook(changed)
    trainer.model.extra = norm  # its statistics are among the model's buffers
    trainer.fit()
    assert len(outputs) >= 6
    for first, second in zip(outputs[:3], outputs[3:6], strict=True):
        assert not first.requires_grad
        assert torch.equal(first, second)
    assert int(norm.num_batches_tracked) == 3


# --- a loss of one's own ---


def test_an_own_loss_over_classes_names_the_metric_that_it_lacks(tiny):
    def said(*words: str) -> list[str]:
        return [line for line in launcher.prepare(tiny(*words, "trust=[mine]")).notices if "loss=own" in line]

    own = ("loss=own", "loss.target=mine.f")
    (line,) = said(*own)
    assert "metrics=[accuracy] reports the share of right answers too, and select=accuracy ranks by it" in line
    assert not said(*own, "metrics=[accuracy]")
    assert not said(*own, "data=diabetes")
    assert not said("loss=[own,focal]", "loss.own.target=mine.f")


def test_an_own_loss_logs_its_parts(train, mine):
    result = train(*mine, "loss=own", "loss.target=my_losses.parted", "batch=accumulate", "batch.accumulation_steps=2")
    record = records(result)[0]
    assert record["loss"] == pytest.approx(record["loss_fit"] + record["loss_size"], rel=1e-6)
    assert result.judged("final")["loss"] > 0


def test_an_own_loss_may_read_the_inputs(train, mine):
    own, plain = (train(*mine, *words) for words in (["loss=own", "loss.target=my_losses.with_inputs"], []))
    assert own.judged("final")["loss"] == pytest.approx(plain.judged("final")["loss"], rel=1e-6)


@pytest.mark.parametrize(
    ("target", "says"),
    [
        ("my_losses.each", r"returned a tensor of shape \(2,\): return a mean"),
        ("my_losses.WithParameters", "no optimizer sees those of a loss"),
        ("my_losses.missing", "cannot be imported"),
        ("my_losses.misled", "names `batch`, and gets what it names only if output or model is among it"),
        (
            "my_losses.asking",
            "has a parameter `extra`, and it is called with those of output, y_pred, target, y, ",
        ),
        ("my_losses.Numbers", "cannot be built with"),
    ],
)
def test_an_own_loss_that_cannot_be_is_one_line(make, mine, target, says):
    with pytest.raises(UserError, match=says):
        make(*mine, "loss=own", f"loss.target={target}").fit()


def test_targets_that_are_a_dict_train_exactly(train, mine):
    words = [*mine, "data.kwargs={kind: several}", "loss=own", "optimizer.lr=0.001"]
    one = train(*words, "loss.target=my_losses.several")
    split = train(*words, "loss.target=my_losses.several", "batch=accumulate", "batch.accumulation_steps=3")
    for kept in ("final", "best"):
        assert split.judged(kept)["loss"] == pytest.approx(one.judged(kept)["loss"], rel=1e-5)
    train(*words, "loss.target=my_losses.Several", "loss.kwargs={kind: 1}", "data.validation=null", "batch=accumulate")


def test_a_loss_of_one_tensor_names_the_parts_of_a_dict_of_targets(make, mine):
    with pytest.raises(UserError, match=r"are several \(kind, size\): choose one of them \(data.target_key\), or set loss=own"):
        make(*mine, "data.kwargs={kind: several}").fit()


def test_a_loss_is_told_how_far_the_run_is(fitted, mine):
    seen.clear()
    words = ["loss=own", "loss.target=my_losses.told", "loss.kwargs={scale: 2.0}", "epochs=2", "updates=null"]
    trainer = fitted(*mine, *words)
    updates = trainer.max_updates
    trained = [row for row in seen if row[4]]
    assert [row[0] for row in trained] == list(range(updates))
    assert {row[1::2] for row in trained} == {(updates, 2)}
    assert {row[2] for row in trained} == {0, 1}
    assert any(not row[4] for row in seen)


def test_an_evaluation_moves_no_buffer_of_a_loss(fitted, mine):
    trainer = fitted(*mine, "loss=own", "loss.target=my_losses.Moving", "epochs=3", "updates=null")
    function = trainer.evaluator.loss.function
    assert int(function.calls) == trainer.max_updates
    assert function.training
    assert not function.frozen.training


# --- targets that do not fit ---


@pytest.mark.parametrize(
    ("kind", "loss", "says"),
    [
        ("fractions", "cross_entropy", "set loss=mse for regression"),
        ("beyond", "cross_entropy", "are class numbers from 3 to 3, but the model has 3 outputs"),
        ("beyond at 11", "cross_entropy", "The first of them is sample 11 of data=own \\(in the training set\\)"),
        ("column", "cross_entropy", r"have shape \(n, 1\), and it wants one class number for each sample, \(n,\)"),
        ("int32", "cross_entropy", "convert them in your data"),
        ("labels", "cross_entropy", "set loss=bce for labels"),
        ("fractions", "mse", "fit outputs of size 1, but the model gives 3 for each sample"),
        ("class", "bce", "it wants a 0 or a 1 for each of the 3 labels"),
        ("class", "dice", "a class for each pixel"),
        ("pair", "triplet", "one class number for each sample"),
    ],
)
def test_targets_that_do_not_fit_are_found_before_the_first_update(make, mine, kind, loss, says):
    trainer = make(*mine, f"loss={loss}", f"data.kwargs={{kind: {kind}}}")
    with pytest.raises(UserError, match=says):
        trainer.fit()
    assert trainer.progress.updates == 0


def test_the_options_that_add_up_keep_their_own_settings():
    loss = Sum({"focal": Focal(), "own": OwnLoss("a.b")})
    assert loss.machine_local_keys == ("own.target",)
    assert loss.takes == ("class", "mask")
    assert Contrastive().evaluated_together == 16


# --- the file of a teacher: it may come from a stranger's run ---


def test_a_teachers_file_is_an_ordinary_one(tmp_path):
    file = tmp_path / "model.safetensors"
    safetensors.torch.save_file({"w": torch.ones(2)}, file)
    assert distill._weights(file, "loss.teacher")["w"].tolist() == [1, 1]
    content = file.read_bytes()
    for make in (os.mkfifo, lambda path: path.symlink_to("/dev/zero"), lambda path: path.write_bytes(content[:-1])):
        file.unlink()
        make(file)
        with pytest.raises(UserError, match=r"loss.teacher=.*is no safetensors file"):
            distill._weights(file, "loss.teacher")
