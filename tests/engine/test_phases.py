"""Phases of an update: the WGAN of examples/gan against its own loop, with the techniques around it; what is refused."""

import itertools
import math
import re
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import drivetrain
from drivetrain.core.errors import UserError
from drivetrain.core.step import rng
from drivetrain.launch.job import prepare
from tests.support.command import ROOT, records, tensors
from tests.support.same_end import resumed

HERE = ROOT / "examples/gan"
WORDS = [
    "data=own", "data.target=wgan.Digits", "data.targets=values",
    "data.validation=null", "model=own", "model.target=wgan.Gan", "loss=own",
    "loss.target=wgan.loss", "trust=[wgan]", "optimizer=adam", "optimizer.lr=0.0005", "optimizer.beta1=0", "optimizer.beta2=0.9",
    "scheduler=constant", "batch.global_batch=64", "epochs=2", "runtime.threads=1", "data.order=sequential", "log_every=1",
    "phases={critic: {parameters: [critic], lr: 0.001}, generator: {parameters: [generator], every: 3}}",
]  # fmt: skip


@pytest.fixture(autouse=True)
def _importable(import_from):
    import_from(HERE)


@pytest.fixture
def gan(trainer_of):
    return lambda *words: trainer_of(prepare([*WORDS, "saving=none", *words]))


class Pair(nn.Module):
    """A classifier, and a second one that is trained to disagree with it."""

    def __init__(self, shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.first, self.second = (nn.Linear(math.prod(shape), classes) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x.flatten(1))


class PairLoss:
    """Each of the two needs the other one's weights, but only one has gradients in a phase."""

    def __call__(self, model, x, y, phase):
        first, second = model(x), model.second(x.flatten(1))
        if torch.is_grad_enabled():
            assert (first.requires_grad, second.requires_grad) == (phase == "first", phase == "second")
        weight = (y + 1.0) / (y + 1.0).sum()
        apart = (weight * (first.softmax(1) * second.softmax(1)).sum(1)).sum()
        fit = (weight * F.cross_entropy(first if phase == "first" else second, y, reduction="none")).sum()
        return {"fit": fit, "apart": apart}

    def count(self, y):
        return (y + 1.0).sum()


PAIR = ["model=own", f"model.target={__name__}.Pair", "loss=own", f"loss.target={__name__}.PairLoss", "trust=[tests]", "epochs=4",
        "updates=7", "optimizer.lr=0.1", "scheduler=cosine",
        "phases={first: {parameters: [first.*]}, second: {parameters: [second], every: 2, lr: 0.03, max_norm: 0.2}}"]  # fmt: skip


def figures(result):
    return [{k: v for k, v in r.items() if k.startswith("loss") or k == "lr"} for r in records(Path(result.run_dir), "train")]


@pytest.fixture(scope="module")
def one(tiny, tmp_path_factory):
    """A run in one process, with one micro-batch in each update."""
    return drivetrain.train(tiny(*PAIR, "log_every=1", f"output_dir={tmp_path_factory.mktemp('one')}"))


@pytest.mark.parametrize(
    "words",
    [
        ["batch=accumulate", "batch.accumulation_steps=3"],
        ["parallel=ddp", "parallel.nproc=2"],
        ["parallel=ddp", "parallel.nproc=2", "batch=accumulate", "batch.accumulation_steps=2"],
        ["compile=step", "compile.cudagraph=false"],
        ["compile=inductor"],
    ],
    ids=" ".join,
)
def test_an_update_is_the_same_however_it_is_split(train, one, words):
    other = train(*PAIR, "log_every=1", *words)
    weights = tensors(one)
    for name, value in tensors(other).items():
        torch.testing.assert_close(value, weights[name], atol=1e-6, rtol=1e-5)
    for mine, theirs in zip(figures(one), figures(other), strict=True):
        assert mine == pytest.approx(theirs, abs=1e-5)
    assert {"loss_first", "loss_first_fit", "loss_second_apart"} < mine.keys()
    for mine in figures(one):
        assert mine["loss_first"] == pytest.approx(mine["loss_first_fit"] + mine["loss_first_apart"], abs=1e-6)


class WithRare(Pair):
    """A part of the first phase is used only where a sample has class 0."""

    def __init__(self, shape: tuple[int, ...], classes: int) -> None:
        super().__init__(shape, classes)
        self.first = nn.ModuleDict({"all": self.first, "rare": nn.Linear(math.prod(shape), 1)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.first["all"](x.flatten(1))


def rare_loss(model, x, y, phase):
    loss = F.cross_entropy(model(x) if phase == "first" else model.second(x.flatten(1)), y)
    if phase == "first" and (y == 0).any():
        loss = loss + model.first["rare"](x[y == 0].flatten(1)).square().sum() / len(y)
    return loss


def test_a_rank_whose_samples_leave_weights_out_has_zeros_for_them(train):
    words = [w.replace("PairLoss", "rare_loss").replace(f"{__name__}.Pair", f"{__name__}.WithRare") for w in PAIR]
    words += ["batch.global_batch=4"]
    ranks = ["parallel=ddp", "parallel.nproc=2"]
    one, two = tensors(train(*words)), tensors(train(*words, *ranks, "parallel.find_unused_parameters=true"))
    for name, value in two.items():
        torch.testing.assert_close(value, one[name], atol=1e-6, rtol=1e-5)
    with pytest.raises(UserError, match=r"first.rare.weight, first.rare.bias got none .*find_unused_parameters=true"):
        train(*words, *ranks)


def test_a_phase_has_its_own_rate_clip_and_pace(make, each_update):
    trainer = make(*PAIR, "optimizer=sgd", "optimizer.momentum=0", "optimizer.nesterov=false", "optimizer.weight_decay=0")
    weights = {name: [p.detach().clone()] for name, p in trainer.model.named_parameters()}
    moved = each_update(trainer, lambda: [weights[n].append(p.detach().clone()) for n, p in trainer.model.named_parameters()])
    trainer.fit()
    assert len(moved) == 7
    steps = {n: [(b - a).norm() for a, b in itertools.pairwise(w)] for n, w in weights.items()}
    assert all(steps["first.weight"])
    assert [bool(each) for each in steps["second.weight"]] == [False, True, False, True, False, True, False]
    norms = [math.hypot(a, b) for a, b in zip(steps["second.weight"], steps["second.bias"], strict=True)]
    factors = [trainer.scheduler.lr_factor(u) for u in range(7)]
    assert norms[1] == pytest.approx(0.2 * 0.03 * factors[1], rel=1e-3)  # clipped: max_norm × its rate
    assert all(norm <= 0.2 * 0.03 * factor * 1.001 for norm, factor in zip(norms, factors, strict=True))
    assert [g["lr"] for g in trainer.optimizer.param_groups] == pytest.approx([0.1 * factors[6], 0.03 * factors[6]])


def test_the_average_moves_only_with_what_an_update_has_trained(make, each_update):
    trainer = make(*PAIR, "ema=ema", "ema.decay=0.5", "ema.warmup=false")
    expected = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    weights = each_update(trainer, lambda: {name: p.detach().clone() for name, p in trainer.model.named_parameters()})
    trainer.fit()
    for number, after in enumerate(weights, 1):
        for name, mean in expected.items():
            if name.startswith("first") or number % 2 == 0:
                mean.lerp_(after[name], 0.5)
    for name, mean in expected.items():
        torch.testing.assert_close(trainer.ema.state_dict()["tensors"][name], mean)


def test_an_overflow_skips_its_own_phase(make):
    """Each phase has a scale of its own, which the resumed run goes on with."""
    words = [*PAIR, "precision=amp", "precision.init_scale=1024", "precision.growth_interval=2"]
    trainer = make(*words, "updates=5")
    seen, first = [], trainer.step.inner.phases[0] if hasattr(trainer.step, "inner") else trainer.step.phases[0]

    def overflown(batch, total, real=first.step.micro_batch):
        real(batch, total)
        seen.append(trainer.progress.updates)
        if len(seen) == 2:
            trainer.model.first.weight.grad[0, 0] = torch.inf

    first.step = type(
        "Step", (), {"micro_batch": staticmethod(overflown), "update": first.step.update, "zero_grad": first.step.zero_grad}
    )
    trainer.fit()
    assert seen == [0, 1, 2, 3, 4]  # the second one counts: the other phase was made
    scales = {name: phase["scale"] for name, phase in trainer.precision.state_dict()["phases"].items()}
    assert scales == {"first": 1024.0, "second": 2048.0}
    rest = make(*words, "updates=7")
    rest.restore(trainer.model.state_dict(), trainer.state())
    assert rest.precision.state_dict() == trainer.precision.state_dict()


@pytest.mark.parametrize("words", [[], ["precision=amp"], ["ema=ema", "clip=norm"]], ids=lambda words: " ".join(words) or "plain")
def test_a_run_resumes_in_the_middle_of_a_cycle(tiny, words):
    resumed(tiny(*PAIR, "scheduler.length=7", *words), 5, 7)


def test_the_gan_draws_the_same_after_a_resume(gan):
    whole, rest = resumed(WORDS, 4, 10)
    assert whole.metrics == rest.metrics
    assert figures(whole) == figures(rest)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["phases={first: {parameters: [first], every: 2}}"], "none of first runs in every update"),
        (["phases={first: {every: 2}}"], "give the parameters that it trains"),
        (["phases={first: {parameters: [first], often: 2}}"], "phases.first.often: Phase takes no such argument"),
        (["phases={first: {parameters: [first], every: 0}}"], "phases.first.every=0"),
        (["precision=bf16_pure"], "phases={first, second} and precision=bf16_pure exclude each other"),
        (["parallel=fsdp"], "phases={first, second} and parallel=fsdp exclude each other"),
        (["batch=auto"], "phases={first, second} and batch=auto exclude each other"),
        (["stages=[{until: 2}, {optimizer.lr: 0.01}]"], "phases={first, second} and stages exclude each other"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_starts(problems, words, says):
    assert any(says in problem for problem in problems(*PAIR, *words)), problems(*PAIR, *words)


@pytest.mark.parametrize(
    ("phases", "says"),
    [
        ("{first: {parameters: [first]}}", "second.weight is trained by no phase"),
        ("{first: {parameters: [first]}, all: {parameters: ['*']}}", "first.weight is trained by first and all"),
        ("{first: {parameters: [frist]}, all: {parameters: ['*']}}", "phases.first.parameters: 'frist' matches no"),
    ],
)
def test_each_parameter_is_of_one_phase(make, phases, says):
    with pytest.raises(UserError, match=re.escape(says)):
        make(*PAIR, f"phases={phases}")


def logged(trainer, name):
    return [r[name] for r in trainer.log.writers[0] if r["event"] == "train"]


def test_the_losses_are_those_of_its_own_loop(gan):
    trainer = gan()
    from plain import train
    from wgan import Gan

    with torch.random.fork_rng():
        model = Gan()
    model.load_state_dict(trainer.model.state_dict())
    trainer.fit()
    torch.manual_seed(rng.mix(0, 4, 0))
    found = list(train(model, 2))
    assert len(found) == trainer.progress.updates == 48
    assert logged(trainer, "loss_critic") == pytest.approx([each["critic"] for each in found], abs=1e-6)
    assert logged(trainer, "loss_generator") == pytest.approx([each.get("generator") for each in found], abs=1e-6)
    assert logged(trainer, "loss") == pytest.approx([sum(each.values()) for each in found], abs=2e-6)
    for name, value in trainer.model.state_dict().items():
        torch.testing.assert_close(value, model.state_dict()[name], atol=1e-6, rtol=0)
    assert trainer.progress.final["loss"] == pytest.approx(
        trainer.progress.final["loss_critic"] + trainer.progress.final["loss_generator"], abs=1e-6
    )
