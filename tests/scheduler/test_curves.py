"""Every curve against torch's or timm's scheduler at every update, momentum too; lengths, rules and remarks."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from timm.scheduler import CosineLRScheduler, PolyLRScheduler
from torch.optim import lr_scheduler as theirs

from drivetrain import scheduler as ours
from drivetrain.config.catalog import content, option_files
from drivetrain.core.errors import UserError
from drivetrain.core.options.horizon import Horizon, length_problem, run_horizon
from drivetrain.core.options.option import Option
from drivetrain.core.user.code import import_name
from drivetrain.launch import launcher
from drivetrain.scheduler import curves, cycles
from tests.support.refusals import problems_of

UPDATES, LR = 240, 0.5
OVER = Horizon(UPDATES, range(12, UPDATES + 1, 12))  # 20 epochs of 12 updates
Optimizer = torch.optim.Optimizer
OPTIONS = option_files()["scheduler"]


def sgd(**kwargs: Any) -> torch.optim.SGD:
    """Two groups with different rates."""
    a, b = torch.zeros(1, requires_grad=True), torch.zeros(1, requires_grad=True)
    return torch.optim.SGD([{"params": [a], "lr": LR}, {"params": [b], "lr": LR / 10}], momentum=0.9, **kwargs)


def adam() -> torch.optim.Adam:
    return torch.optim.Adam([torch.zeros(1, requires_grad=True)], lr=LR)


def seen(optimizer: Optimizer) -> list[tuple[float, float, float]]:
    """Learning rate, momentum or beta1, and beta2 of each group."""
    return [(g["lr"], *g.get("betas", (g.get("momentum"), 0.0))) for g in optimizer.param_groups]


def our_curve(scheduler: ours.Scheduler, optimizer: Optimizer, updates: int = UPDATES, over: Horizon = OVER) -> list[Any]:
    scheduler.bind(optimizer, *over)
    values = []
    for update in range(updates):
        scheduler.step(update)
        values.append(seen(optimizer))
    return values


def torch_curve(make: Callable[[Optimizer], Any], optimizer: Optimizer, updates: int = UPDATES) -> list[Any]:
    scheduler, values = make(optimizer), []
    for _ in range(updates):
        values.append(seen(optimizer))
        optimizer.step()
        scheduler.step()
    return values


def warmed(make: Callable[[Optimizer], Any], length: int, start: float = 0.0) -> Callable[[Optimizer], Any]:
    """torch's LinearLR before another schedule; it begins where ours does, one part of length + 1 above `start`."""

    def both(optimizer: Optimizer) -> Any:
        first = start + (1 - start) / (length + 1)
        rise = theirs.LinearLR(optimizer, start_factor=first, total_iters=length)
        return theirs.SequentialLR(optimizer, [rise, make(optimizer)], milestones=[length])

    return both


def noam(warmup: int) -> Callable[[int], float]:
    """The formula of Vaswani et al. 2017, section 5.3, divided by its peak: steps from 1."""
    return lambda u: warmup**0.5 * min((u + 1) ** -0.5, (u + 1) * warmup**-1.5)


SAME = {
    "constant": (ours.Scheduler(), lambda o: theirs.ConstantLR(o, factor=1.0)),
    "constant, warm-up": (ours.Scheduler(warmup=24), warmed(lambda o: theirs.ConstantLR(o, factor=1.0), 24)),
    "warm-up from a tenth": (
        ours.Scheduler(warmup="2ep", warmup_start=0.1),
        warmed(lambda o: theirs.ConstantLR(o, 1.0), 24, 0.1),
    ),
    "step": (curves.StepDecay(every="5ep", gamma=0.3), lambda o: theirs.StepLR(o, 60, 0.3)),
    "multistep": (curves.MultiStep([0.25, 100, "15ep"], 0.2), lambda o: theirs.MultiStepLR(o, [60, 100, 180], 0.2)),
    "cosine": (curves.Cosine(), lambda o: theirs.CosineAnnealingLR(o, UPDATES)),
    "cosine, warm-up": (curves.Cosine(warmup=0.1), warmed(lambda o: theirs.CosineAnnealingLR(o, 216), 24)),
    "cosine, 4 cycles": (curves.Cosine(cycles=4), lambda o: theirs.CosineAnnealingWarmRestarts(o, 60)),
    "cosine, 4 doubling cycles": (curves.Cosine(cycles=4, cycle_mult=2), lambda o: theirs.CosineAnnealingWarmRestarts(o, 16, 2)),
    "linear": (curves.Linear(final=0.25), lambda o: theirs.LinearLR(o, 1.0, 0.25, UPDATES)),
    "linear, short": (curves.Linear(length=100), lambda o: theirs.LinearLR(o, 1.0, 0.0, 100)),
    "poly": (curves.Poly(power=2.5), lambda o: theirs.PolynomialLR(o, UPDATES, 2.5)),
    "poly, warm-up": (curves.Poly(power=0.9, warmup=40), warmed(lambda o: theirs.PolynomialLR(o, 200, 0.9), 40)),
    "exponential": (curves.Exponential(gamma=0.98, every=1), lambda o: theirs.ExponentialLR(o, 0.98)),
    "exponential, epochs": (curves.Exponential(gamma=0.9, every="1ep"), lambda o: theirs.ExponentialLR(o, 0.9 ** (1 / 12))),
    "inverse_sqrt": (curves.InverseSqrt(warmup=24), lambda o: theirs.LambdaLR(o, noam(25))),
    "inverse_sqrt, no warm-up": (curves.InverseSqrt(warmup=0), lambda o: theirs.LambdaLR(o, lambda u: (u + 1) ** -0.5)),
    "inverse_sqrt, timescale": (
        curves.InverseSqrt(warmup=24, timescale="5ep"),
        lambda o: theirs.LambdaLR(o, lambda u: (u + 1) / 25 if u < 24 else (60 / (60 + u - 24)) ** 0.5),
    ),
    "wsd": (
        curves.Wsd(warmup=24, decay=0.25),
        lambda o: theirs.SequentialLR(
            o,
            [theirs.LinearLR(o, 1 / 25, 1.0, 24), theirs.ConstantLR(o, 1.0), theirs.LinearLR(o, 1.0, 0.0, 60)],
            [24, 180],
        ),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SAME)
def test_equals_torch_at_every_update(name: str) -> None:
    scheduler, make = SAME[name]
    mine, other = our_curve(scheduler, sgd()), torch_curve(make, sgd())
    assert len({v[0][0] for v in other}) > 1 or name == "constant"
    torch.testing.assert_close(
        torch.tensor(mine, dtype=torch.float64), torch.tensor(other, dtype=torch.float64), atol=1e-12, rtol=1e-9
    )


RANGE = [0.8, 0.95]
M = {"base_momentum": 0.8, "max_momentum": 0.95}


def one_cycle(**kwargs: Any) -> Callable[[Optimizer], Any]:
    return lambda o: theirs.OneCycleLR(o, [g["lr"] for g in o.param_groups], total_steps=UPDATES, **M, **kwargs)


def cyclic(up: int, **kwargs: Any) -> Callable[[Optimizer], Any]:
    def make(o: Optimizer) -> Any:
        rates = [g["lr"] for g in o.param_groups]
        return theirs.CyclicLR(o, [0.1 * r for r in rates], rates, up, **M, **kwargs)

    return make


CYCLING = {
    "onecycle": (lambda m: cycles.OneCycle(momentum=m), one_cycle()),
    "onecycle, linear": (lambda m: cycles.OneCycle(warmup=0.25, div=10, final_div=100, anneal="linear", momentum=m),
                         one_cycle(pct_start=0.25, div_factor=10, final_div_factor=100, anneal_strategy="linear")),
    "onecycle, three phases": (lambda m: cycles.OneCycle(three_phase=True, momentum=m), one_cycle(three_phase=True)),
    "onecycle, at the top": (lambda m: cycles.OneCycle(warmup=0, momentum=m), one_cycle(pct_start=0.0)),
    "cyclic": (lambda m: cycles.Cyclic(up="2ep", momentum=m), cyclic(24)),
    "cyclic, lopsided": (lambda m: cycles.Cyclic(up=0.05, down=30, momentum=m), cyclic(12, step_size_down=30)),
    "cyclic, triangular2": (lambda m: cycles.Cyclic(up=20, mode="triangular2", momentum=m), cyclic(20, mode="triangular2")),
    "cyclic, exp_range": (lambda m: cycles.Cyclic(up=20, mode="exp_range", gamma=0.99, momentum=m),
                          cyclic(20, mode="exp_range", gamma=0.99)),
}  # fmt: skip


@pytest.mark.parametrize("make_optimizer", [sgd, adam])
@pytest.mark.parametrize("name", CYCLING)
def test_cycles_momentum_as_torch_does(name: str, make_optimizer: Callable[[], Optimizer]) -> None:
    make, other = CYCLING[name]
    mine, reference = our_curve(make(RANGE), make_optimizer()), torch_curve(other, make_optimizer())
    assert len({round(v[0][1], 6) for v in reference}) > 10  # the momentum moves, and beta2 stays
    torch.testing.assert_close(
        torch.tensor(mine, dtype=torch.float64), torch.tensor(reference, dtype=torch.float64), atol=1e-12, rtol=1e-9
    )


@pytest.mark.parametrize("name", CYCLING)
def test_leaves_momentum_alone_unless_asked(name: str) -> None:
    make, other = CYCLING[name]
    mine, reference = our_curve(make(None), sgd()), torch_curve(other, sgd())
    assert {m for update in mine for _, m, _ in update} == {0.9}
    rates = [[[lr for lr, *_ in groups] for groups in curve] for curve in (mine, reference)]
    torch.testing.assert_close(torch.tensor(rates[0]), torch.tensor(rates[1]))


@pytest.mark.parametrize(
    ("scheduler", "make"),
    [
        (curves.Cosine(cycles=3, cycle_mult=1.5, cycle_decay=0.6, final=0.05),
         lambda o: CosineLRScheduler(o, 240 / 4.75, 0.05 * LR, 1.5, cycle_decay=0.6, cycle_limit=3, t_in_epochs=False)),
        (curves.Poly(power=0.7, final=0.1),
         lambda o: PolyLRScheduler(o, UPDATES, power=0.7, lr_min=0.1 * LR, t_in_epochs=False)),
    ],
    ids=["cosine with decaying cycles", "poly with a floor"],
)  # fmt: skip
def test_equals_timm(scheduler: ours.Scheduler, make: Callable[[Optimizer], Any]) -> None:
    optimizer = adam()
    other, expected = make(optimizer), []
    for update in range(UPDATES):
        other.step_update(update)
        expected.append(optimizer.param_groups[0]["lr"])
    assert [u[0][0] for u in our_curve(scheduler, adam())] == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize(
    ("shape", "height"),
    [
        ("cosine", lambda t: (1 + math.cos(math.pi * t)) / 2),
        ("sqrt", lambda t: 1 - math.sqrt(t)),
        ("exponential", lambda t: (0.1**t - 0.1) / 0.9),
    ],
)
def test_wsd_shapes(shape: Any, height: Callable[[float], float]) -> None:
    scheduler = curves.Wsd(warmup=0, decay=60, shape=shape, final=0.1)
    scheduler.set_horizon(OVER)
    assert {scheduler.lr_factor(u) for u in range(180)} == {1.0}
    assert [scheduler.lr_factor(180 + u) for u in range(60)] == pytest.approx([0.1 + 0.9 * height(u / 60) for u in range(60)])


@pytest.mark.parametrize(
    ("scheduler", "last"),
    [
        (curves.Cosine(final=0.2), 0.2), (curves.Cosine(cycles=3, final=0.2), 0.2), (curves.Cosine(length=100, final=0.2), 0.2),
        (curves.Linear(final=0.3), 0.3), (curves.Poly(), 0.0), (curves.Wsd(final=0.1), 0.1),
        (cycles.OneCycle(div=5, final_div=4), 0.05), (cycles.OneCycle(div=5, final_div=4, length=0.5), 0.05),
        (cycles.OneCycle(three_phase=True, div=5, final_div=4), 0.05), (curves.MultiStep(), 0.01),
    ],
    ids=lambda v: type(v).__name__,
)  # fmt: skip
def test_the_last_value_holds_after_the_end(scheduler: ours.Scheduler, last: float) -> None:
    scheduler.set_horizon(OVER)
    assert [scheduler.lr_factor(UPDATES + n) for n in (0, 1, 1000)] == pytest.approx([last] * 3)


def test_steps_are_counted_from_the_start_of_the_run_also_where_it_warms_up() -> None:
    scheduler = curves.StepDecay(every=8, gamma=0.5, warmup=6)
    scheduler.set_horizon(OVER)
    assert [scheduler.lr_factor(u) for u in (6, 7, 8, 15, 16, 24)] == [1.0, 1.0, 0.5, 0.5, 0.25, 0.125]


def test_momentum_holds_after_the_end() -> None:
    scheduler = cycles.OneCycle(momentum=RANGE, length=100)
    scheduler.set_horizon(OVER)
    assert [scheduler.momentum_at(u) for u in (99, 150, 300)] == pytest.approx([0.95] * 3)
    assert scheduler.momentum_at(29) == pytest.approx(0.922, abs=0.2)


def test_a_graph_keeps_its_rate_as_a_tensor() -> None:
    rate = torch.tensor(LR)
    optimizer = torch.optim.Adam([torch.zeros(1, requires_grad=True)], lr=rate, capturable=True)
    our_curve(curves.Linear(), optimizer, updates=121)
    assert optimizer.param_groups[0]["lr"] is rate
    assert rate.item() == LR / 2


class TestPlateau:
    LOSSES = (3.0, 2.0, 1.99999, 2.0, 2.5, 2.4, 1.0, 1.2, math.nan, 1.1, 1.3, 1.2, 1.4, 1.5, 0.2, *[0.3] * 6)

    @pytest.mark.parametrize("mode", ["min", "max"])
    @pytest.mark.parametrize("threshold_mode", ["rel", "abs"])
    @pytest.mark.parametrize("cooldown", [0, 2])
    def test_equals_torch(self, mode: Any, threshold_mode: Any, cooldown: int) -> None:
        settings = {"mode": mode, "factor": 0.5, "patience": 1, "threshold": 1e-3}
        settings |= {"threshold_mode": threshold_mode, "cooldown": cooldown}
        optimizer, reference = adam(), adam()
        mine = curves.Plateau(**settings, final=0.1)
        mine.bind(optimizer, *OVER)
        other = theirs.ReduceLROnPlateau(reference, **settings, min_lr=0.1 * LR)
        rates = []
        for epoch, loss in enumerate(self.LOSSES):
            mine.step(12 * epoch)
            mine.evaluated({"loss": loss, "accuracy": 0.0})
            mine.step(12 * epoch + 1)
            other.step(loss)
            rates.append(reference.param_groups[0]["lr"])
            assert optimizer.param_groups[0]["lr"] == pytest.approx(rates[-1]), epoch
        assert len(set(rates)) > 2

    def test_a_resumed_one_goes_on_alike(self) -> None:
        for cut in range(len(self.LOSSES)):
            one, two = curves.Plateau(patience=1), curves.Plateau(patience=1)
            for scheduler in (one, two):
                scheduler.bind(adam(), *OVER)
            for loss in self.LOSSES[:cut]:
                one.evaluated({"loss": loss})
            two.load_state_dict(one.state_dict())
            for loss in self.LOSSES[cut:]:
                one.evaluated({"loss": loss})
                two.evaluated({"loss": loss})
            assert two.state_dict() == one.state_dict()
            assert two.lr_factor(5) == one.lr_factor(5) < 1

    def test_warms_up_to_where_it_stands(self) -> None:
        scheduler = curves.Plateau(warmup=9)
        scheduler.bind(adam(), *OVER)
        assert [scheduler.lr_factor(u) for u in (0, 4, 9)] == [0.1, 0.5, 1.0]


def test_plateau_in_a_run_and_in_its_resumed_half(make: Any) -> None:
    """No evaluation betters by 100, so that the rate falls after each but the first."""
    words = ["scheduler=plateau", "scheduler.patience=0", "scheduler.threshold=100", "scheduler.threshold_mode=abs",
             "scheduler.factor=0.5", "updates=null", "log_every=4"]  # fmt: skip
    whole, half, rest = make(*words, "epochs=5"), make(*words, "epochs=3"), make(*words, "epochs=5")
    whole.fit()
    half.fit()
    rest.restore(half.model.state_dict(), half.state())
    rest.fit()

    def rates(trainer: Any) -> list[float]:
        return [r["lr"] for r in trainer.log.writers[0] if r["event"] == "train"]

    assert rates(whole) == pytest.approx([0.05, 0.05, 0.025, 0.0125, 0.00625])
    assert rates(half) + rates(rest) == rates(whole)
    assert all(torch.equal(a, b) for a, b in zip(whole.model.parameters(), rest.model.parameters(), strict=True))


# lengths


@pytest.mark.parametrize(("length", "updates"), [(0, 0), (0.1, 24), (1, 1), (500, 500), ("5ep", 60), ("0.5ep", 6), (30.0, 30)])
def test_one_notation_for_lengths(length: Any, updates: float) -> None:
    assert list(length_problem("scheduler.warmup", length)) == []
    assert OVER.in_updates(length) == pytest.approx(updates)


def test_epochs_are_counted_where_they_lie_when_the_batch_grows() -> None:
    """Digits: 11, 11, 5, 5, 2 and 2 updates; by epochs from the start, or to the end."""
    words = ["model=mlp", "epochs=6", "batch.grow_every=2", "scheduler=wsd", "scheduler.warmup=1ep", "scheduler.decay=3ep"]
    run = prepare(words).run
    over = run_horizon(run)
    assert over is not None
    assert over == Horizon(36, [11, 22, 27, 32, 34, 36])
    assert [over.in_updates(n) for n in ("1ep", "2.2ep", "3ep", "6ep", "8ep", 0.5)] == pytest.approx([11, 23, 27, 36, 40, 18])
    assert [over.in_updates_at_end(n) for n in ("1ep", "2ep", "3.4ep", "6ep", "9ep", 0.5, 7)] == pytest.approx(
        [2, 4, 11, 36, 36, 18, 7]
    )
    run.scheduler.set_horizon(over)
    assert [run.scheduler.lr_factor(u) for u in (10, 11, 27, 28, 35)] == pytest.approx([11 / 12, 1, 1, 8 / 9, 1 / 9])


def test_past_the_end_epochs_are_as_long_as_the_last() -> None:
    assert [Horizon(20, [11, 18, 20]).in_updates(n) for n in ("2ep", "3ep", "4ep", "5.5ep")] == [18, 20, 22, 25]


@pytest.mark.parametrize(("updates", "epochs"), [(1, 1 / 12), (12, 1), (30, 2.5), (240, 20)])
def test_the_run_in_epochs(updates: int, epochs: float) -> None:
    assert OVER.at_most(updates).epochs == pytest.approx(epochs)
    assert OVER.at_most(None) == OVER


@pytest.mark.parametrize("length", [1.5, -1, -0.1, "5", "ep", "5 epochs", "-1ep", "10%", "1e3ep", ""])
def test_what_is_no_length(length: Any) -> None:
    assert list(length_problem("scheduler.warmup", length)) == [
        f"scheduler.warmup={length} is no length: give a share of the run below 1 (0.1), updates (500) or epochs (5ep)"
    ]


@pytest.mark.parametrize("name", OPTIONS)
def test_every_length_setting_is_looked_at(name: str) -> None:
    """A setting annotated as a length stands in `lengths`, else a bad one would pass the check."""
    cls = import_name(content(OPTIONS[name])["_target_"])
    annotated = {k for k, v in cls.__init__.__annotations__.items() if "Length" in v}
    assert annotated == set(cls.lengths)


# rules: 1,437 training samples of digits / 128 = 11 updates an epoch, 15 epochs = 165 updates


def prepare(words: Sequence[str]) -> Any:
    """A job on the digits, of which one sample validates."""
    return launcher.prepare(["data.validation=0.001", *words])


def problems(*words: str) -> list[str]:
    return problems_of(prepare, ["model=mlp", *words])


REFUSED = {
    "scheduler=cosine scheduler.warmup=5epochs": "scheduler.warmup=5epochs is no length",
    "scheduler=multistep scheduler.milestones=[0.5,x]": "scheduler.milestones=x is no length",
    "scheduler=multistep scheduler.milestones=[100,5ep]": "must increase: they are updates 100, 55",
    "scheduler=multistep scheduler.milestones=[0.5,0.5]": "must increase: they are updates 82, 82",
    "scheduler=multistep scheduler.milestones=[]": "scheduler.milestones",
    "scheduler=wsd scheduler.decay=200": "are 8 + 200 updates, more than the run's 165",
    "scheduler=wsd scheduler.shape=exponential": "set scheduler.final above 0",
    "scheduler=step scheduler.every=0": "scheduler.every=0 is zero updates",
    "scheduler=inverse_sqrt scheduler.timescale=0": "scheduler.timescale=0 is zero updates",
    "scheduler=exponential scheduler.every=0ep": "scheduler.every=0ep is zero updates",
    "scheduler=cyclic scheduler.up=0": "scheduler.up=0 is zero updates",
    "scheduler=cyclic scheduler.down=0": "scheduler.down=0 is zero updates",
    "scheduler=cyclic scheduler.mode=exp_range": "scheduler.mode=exp_range multiplies",
    "scheduler=cyclic scheduler.gamma=0.9": "scheduler.gamma=0.9 is exp_range's",
    "scheduler=cosine scheduler.length=10 scheduler.warmup=10": "scheduler.length=10 ends within scheduler.warmup=10",
    "scheduler=onecycle scheduler.length=40": "scheduler.length=40 ends within scheduler.warmup=0.3",
    "scheduler=cosine scheduler.cycles=9000 scheduler.cycle_mult=2": "cycle_mult=2 to the power of scheduler.cycles=9000 is none",
    "scheduler=cosine scheduler.cycles=200": "makes a cycle shorter than one update",
    "scheduler=onecycle scheduler.three_phase=true scheduler.warmup=0.6": "twice scheduler.warmup=0.6",
    "scheduler=onecycle scheduler.momentum=[0.95,0.85]": "must be [low, high]",
    "scheduler=onecycle scheduler.momentum=[0.9]": "scheduler.momentum=[0.9]",
    "scheduler=onecycle scheduler.momentum=[0.9,1.0]": "must be < 1",
    "scheduler=onecycle epochs=null": "epochs=null: must be a whole number",
    "scheduler=plateau scheduler.metric=accuracy": "set scheduler.mode=max",
    "scheduler=plateau scheduler.metric=acuracy": "did you mean 'accuracy'?",
    "scheduler=plateau scheduler.metric=ema_loss": "ema=none keeps none: set ema=ema",
    "scheduler=cosine scheduler.warmup=-1": "scheduler.warmup=-1",
    "scheduler=cosine scheduler.warmup=2.5": "scheduler.warmup=2.5",
    "scheduler=cosine scheduler.warmup_start=2": "scheduler.warmup_start=2",
    "scheduler=cosine scheduler.final=-0.1": "scheduler.final=-0.1",
    "optimizer.final_weight_decay=0.1 optimizer.weight_decay=0": "which is 0: set it to a small number",
    "optimizer.final_weight_decay=0.1 compile=step": "optimizer.final_weight_decay and compile=step exclude each other",
}  # fmt: skip


@pytest.mark.parametrize("words", REFUSED)
def test_refused(words: str) -> None:
    said = problems(*words.split())
    assert len(said) == 1
    assert REFUSED[words] in said[0]


ADVISED = {
    "scheduler=constant scheduler.warmup=500": "the learning rate never reaches optimizer.lr",
    "scheduler=step scheduler.every=30ep": "is 330 updates and the run has 165: the learning rate never falls",
    "scheduler=multistep scheduler.milestones=[0.5,30ep]": "30ep is update 330 and the run ends at 165",
    "scheduler=cosine scheduler.length=20ep": "scheduler.length=20ep is 220 updates and the run has 165",
    "scheduler=onecycle scheduler.length=200": "scheduler.length=200 is 200 updates",
    "scheduler=cyclic scheduler.up=100": "one cycle is 200 updates",
    "scheduler=exponential scheduler.every=1": "of the learning rate",
    "scheduler=plateau scheduler.patience=14": "the learning rate can hardly fall",
}


@pytest.mark.parametrize("words", ADVISED)
def test_advised(words: str) -> None:
    said = prepare(["model=mlp", *words.split()]).notices
    assert len(said) == 1
    assert ADVISED[words] in said[0]


@pytest.mark.parametrize("name", OPTIONS)
def test_the_options_as_they_come_have_nothing_said_against_them(name: str) -> None:
    assert prepare(["model=mlp", f"scheduler={name}"]).notices == []
    prepare(["model=mlp", f"scheduler={name}", "updates=2"])


def test_a_debugging_run_may_be_shorter_than_its_schedule() -> None:
    words = ["model=mlp", "scheduler=wsd", "scheduler.decay=2000", "debug=fast", "debug.updates=3"]
    scheduler = prepare(words).run.scheduler
    scheduler.set_horizon(Horizon(3, [11]))
    assert [scheduler.lr_factor(u) for u in range(4)] == pytest.approx([1.0, 2 / 3, 1 / 3, 0.0])


def test_momentum_that_cannot_cycle_is_refused_where_it_is_known_and_at_the_start_elsewhere() -> None:
    class Plain(Option):
        def __init__(self, lr: float = 0.1) -> None: ...

    job = prepare(["model=mlp", "scheduler=onecycle", "scheduler.momentum=[0.85,0.95]"])
    job.run.parts["optimizer"] = Plain()
    assert [p for p in job.run.scheduler.validate(job.run) if "neither momentum nor beta1" in p]
    adagrad = torch.optim.Adagrad([torch.zeros(1, requires_grad=True)])
    with pytest.raises(UserError, match="but Adagrad has neither momentum nor beta1"):
        job.run.scheduler.bind(adagrad, *OVER)
    cycles.OneCycle().bind(adagrad, *OVER)  # nothing to cycle, nothing to refuse


def test_rules_are_asked_when_the_data_is_read_where_only_that_tells_the_length(trainer_of, monkeypatch, caplog):
    monkeypatch.setattr("drivetrain.data.digits.Digits.train_samples", lambda self: None)
    job = prepare(["model=mlp", "scheduler=wsd", "scheduler.decay=200"])
    with pytest.raises(UserError, match="more than the run's 165"):
        trainer_of(job)
    job = prepare(["model=mlp", "scheduler=step", "scheduler.every=30ep"])
    assert job.notices == []
    trainer_of(job)
    assert "the learning rate never falls" in caplog.text


@pytest.mark.parametrize("updates", [2, 3, 5, 11, 40])
@pytest.mark.parametrize("warmup", [0.1, 0.3, 0.7])  # torch divides by zero where the first phase ends at update 0
@pytest.mark.parametrize("anneal", ["cos", "linear"])
def test_onecycle_equals_torchs_in_short_runs(updates: int, warmup: float, anneal: Any) -> None:
    settings = {"total_steps": updates, "pct_start": warmup, "anneal_strategy": anneal}
    settings |= {"div_factor": 20.0, "final_div_factor": 500.0, "cycle_momentum": False}
    reference = torch_curve(lambda o: theirs.OneCycleLR(o, [LR, LR / 10], **settings), sgd(), updates)
    mine = our_curve(cycles.OneCycle(warmup, 20.0, 500.0, anneal), sgd(), updates, Horizon(updates, [updates]))
    torch.testing.assert_close(torch.tensor(mine), torch.tensor(reference), rtol=1e-6, atol=0)


SHORT = [ours.Scheduler(0.5), curves.Cosine(0.5, 0.1), cycles.OneCycle(0.0), cycles.OneCycle(1.0), cycles.OneCycle(50.0)]


@pytest.mark.parametrize("scheduler", SHORT)
@pytest.mark.parametrize("updates", [1, 2, 3])
def test_the_shortest_runs_have_a_rate_too(scheduler: ours.Scheduler, updates: int) -> None:
    rates = our_curve(scheduler, sgd(), updates, Horizon(updates, [updates]))
    assert all(0 <= groups[0][0] <= LR for groups in rates)


def test_a_run_makes_each_update_with_its_rate(make, each_update):
    trainer = make(
        "scheduler=cosine", "scheduler.warmup=2", "updates=6", "epochs=2", "batch=accumulate", "batch.accumulation_steps=3",
        "log_every=1",
    )  # fmt: skip
    used: list[float] = []
    step = trainer.optimizer.step
    trainer.optimizer.step = lambda: (used.append(trainer.optimizer.param_groups[0]["lr"]), step())
    trainer.fit()
    scheduler = curves.Cosine(warmup=2)
    scheduler.bind(trainer.optimizer, 6)
    assert used == pytest.approx([0.05 * scheduler.lr_factor(u) for u in range(6)])
    assert len(set(used)) > 3
    assert [r["lr"] for r in trainer.log.writers[0] if r["event"] == "train"] == used  # and logs that rate


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "muon", "lamb"])
def test_weight_decay_follows_dinos_schedule(make, optimizer):
    """Half a cosine from one value to the other, for the groups that decay; a resumed run goes on in it."""
    words = [f"optimizer={optimizer}", "optimizer.weight_decay=0.04", "optimizer.final_weight_decay=0.4", "updates=5", "epochs=3"]
    words += ["scheduler=cosine", "scheduler.final=0.1"]

    def followed(trainer):
        used, step = [], trainer.optimizer.step
        trainer.optimizer.step = lambda: (used.append([g["weight_decay"] for g in trainer.optimizer.param_groups]), step())
        trainer.fit()
        return used

    used = followed(whole := make(*words))
    expected = [0.4 + (0.04 - 0.4) * (1 + math.cos(math.pi * u / 5)) / 2 for u in range(5)]
    assert [max(each) for each in used] == pytest.approx(expected)
    assert all(min(each) == 0 for each in used)  # norms and biases
    half, rest = make(*words, "updates=3"), make(*words)
    half.max_updates = 3
    half.scheduler.bind(half.optimizer, 5)
    half.scheduler._final_decay = 10
    followed(half)
    rest.restore(half.model.state_dict(), half.state())
    assert followed(rest) == used[3:]
    assert all(torch.equal(a, b) for a, b in zip(whole.model.parameters(), rest.model.parameters(), strict=True))
