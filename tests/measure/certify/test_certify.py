"""`drivetrain certify`: its two sides, its answers and their exit codes, and what it refuses. With ranks in the slow suite."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from drivetrain.cli import measuring
from drivetrain.config.catalog import LISTS, default_options, options
from drivetrain.core.errors import UserError
from drivetrain.core.options.option import Option
from drivetrain.core.step.microbatch import Request
from drivetrain.launch import launcher
from drivetrain.measure.certify import certify as verb
from drivetrain.measure.certify import judge, record
from drivetrain.measure.certify.judge import Floors, Trace, TracedTensor, of_tensor
from drivetrain.measure.certify.record import plan_of
from drivetrain.precision import cpu_half
from tests.support import json_keys
from tests.support.certified import CONV, GPT, MLP, Break, certified, traced
from tests.support.slow import but

# Short: these techniques are the same mathematics, and these are not. All options are in the slow suite.
SAME = {
    "checkpointing": (MLP, ["checkpointing=blocks"], "exact: bit for bit"),
    "accumulation": (MLP, ["batch=accumulate", "batch.accumulation_steps=3"], "exact: the order of sums"),
    "memory format": (CONV, ["surgery=[channels_last]"], "exact: the order of sums"),
    "data parallel": (MLP, ["parallel=dp"], "exact: bit for bit"),
    "average": (MLP, ["ema=ema"], "exact: bit for bit"),
    "logging": (MLP, ["log_every=3"], "exact: the order of sums"),  # the sum of losses begins anew with each record
    "bf16": (MLP, ["precision=bf16"], "within rounding of bfloat16"),
    "loop": ([*MLP, "optimizer.fused=true"], ["optimizer.fused=false", "optimizer.foreach=false"], "exact"),
}
OTHER = {
    "seed": (["runtime.seed=1"], (0, "samples", "which samples")),
    "lr": (["optimizer.lr=0.06"], (1, "learning rate", "layers.0.linear.weight")),
    "shape": (["model.hidden=[16,12]"], (0, "start", "layers.1.linear.weight")),
}


@pytest.mark.parametrize("name", but(lambda name: name != "memory format", SAME))
def test_the_same_mathematics(name: str) -> None:
    base, beside, answer = SAME[name]
    _, lines = certified([*base, *beside], base)
    assert lines[0].startswith(answer)


def test_what_differs_in_float32_alone_is_a_flip(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gradient that is a little larger in float32 alone is no other mathematics; one that is so in float64 too is a fault."""
    monkeypatch.setattr(verb, "measured_floors", lambda *_: Floors())

    def larger(*dtypes: torch.dtype) -> Break:
        def broken(trainer: Any) -> None:
            weight = trainer.model.layers[1].linear.weight
            weight.register_hook(lambda grad: grad * (1 + 1e-5) if grad.dtype in dtypes else grad)

        return broken

    done, lines = certified(MLP, MLP, larger(torch.float32))
    assert (done.verdict.answer, done.verdict.flipped) == ("exact", True), lines
    assert "in float64 the two runs are the same" in lines[0]
    rows = [verb._row(*each, flipped=True) for each in verb.phases(done.verdict)]
    assert {"flipped", "equal"} <= {row[-1] for row in rows}
    assert_json_keys(done)
    done, lines = certified(MLP, MLP, larger(torch.float32, torch.float64))
    assert done.verdict.answer == "differs", lines
    assert_json_keys(done)


def assert_json_keys(done: Any) -> None:
    found = verb.as_dict(replace(done, different=[("model", "mlp", "own")]))
    json_keys.check(found, top=json_keys.CERTIFY, model="this against", forward=f"compared {json_keys.FINDING}")
    if found["first"] is not None:
        json_keys.check(found, first=json_keys.FINDING)


def test_a_format_that_this_cpu_does_not_compute_in_is_not_certified(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_half, "measure", lambda model, example, dtype: 3.0)
    done, lines = certified([*MLP, "precision=bf16", "ema=ema"], [*MLP, "ema=ema"])
    assert done.verdict.answer == "no effect"
    assert re.fullmatch(
        r"no effect here, so nothing was tested: bit for bit the same, in all of \d+ tensors, although one of the two is to "
        "round as bfloat16 does",
        lines[0],
    )
    assert lines[1].startswith(
        "  precision of this run: everything stays in float32: on this CPU bfloat16 takes 3 times as long. "
    )
    assert lines[1].endswith("This answer is not one for machines where it has an effect")


@pytest.mark.parametrize("name", OTHER)
def test_another_run_differs(name: str) -> None:
    beside, first = OTHER[name]
    done, lines = certified([*MLP, *beside], MLP)
    assert done.verdict.first is not None, lines
    assert done.verdict.first.key == first, lines


@pytest.mark.slow
def test_batch_norm_over_micro_batches_is_another_run() -> None:
    _, lines = certified([*CONV, "batch=accumulate", "batch.accumulation_steps=2"], CONV)
    assert "differs: first in update 1, forward of features.0.1 (BatchNorm2d)" in lines[0]


def test_dropout_is_judged_only_where_its_draws_are_the_same() -> None:
    words = [*MLP, "model.dropout=0.2"]
    assert certified([*words, "ema=ema"], words)[0].verdict.bit_for_bit
    with pytest.raises(UserError, match=r"layers.0.dropout, layers.1.dropout draw random numbers.*set model.dropout=0 for both"):
        certified([*words, "batch=accumulate"], words)


def test_random_rounding_is_as_large_as_it_says() -> None:
    x = torch.full((4096,), 3.0, dtype=torch.float64)
    with record.RandomRounding(2.0**-8, seed=0):
        rounded = x * 1.0
    error = (rounded / 3.0 - 1).abs()
    assert 2.0**-9 < float(error.max()) <= 2.0**-8
    assert abs(float(error.mean()) - 2.0**-9) < 2.0**-13


def test_a_sketch_keeps_distances() -> None:
    a, b = torch.randn(300_000), torch.randn(300_000)
    distance = of_tensor(a).distance(of_tensor(a + 1e-3 * b))
    assert distance == pytest.approx(1e-3 * float(b.norm()), rel=0.2)


def test_a_reference_that_is_not_its_own_shadow_gives_no_floor() -> None:
    """A large distance between the reference and its float64 shadow is not rounding: it may not hide a fault."""

    def trace(value: float) -> Trace:
        return Trace({(1, "weights", "w"): TracedTensor(np.array([value]), rounding=1e-9)})

    floors = Floors(shadow=trace(2.0), rounded=[trace(2.0 + 1e-7)])
    found = judge.judge(trace(1.5), trace(1.0), floors)
    assert found.first is not None
    assert found.first.key == (1, "weights", "w")
    assert judge.judge(trace(1.0 + 1e-7), trace(1.0), floors).first is None


def test_both_runs_take_the_same_samples_in_any_split() -> None:
    """Also in the short last update of an epoch, which micro-batches divide unevenly."""
    words = [*MLP, "data.samples=44", "data.drop_last=false"]
    whole, split = traced(words), traced([*words, "batch=accumulate", "batch.accumulation_steps=3"])
    keys = [key for key in whole.entries if key[1] == "samples"]
    assert len(keys) == 4
    assert list(whole.entries[0, "samples", "number of samples"].values) == [12, 12, 12, 8] * 2
    assert all(np.array_equal(whole.entries[key].values, split.entries[key].values) for key in keys)


def test_the_other_side(monkeypatch: pytest.MonkeyPatch) -> None:
    """Words after `against` are set in the other run, on top of the rest; a run beside itself is refused."""
    seen: list[Any] = []

    def certify(tested: Any, reference: Any, record: Any, *others: Any) -> Any:
        seen.extend([tested, reference, record.args[1]])
        raise UserError("enough")

    monkeypatch.setattr(verb, "certify", certify)
    with pytest.raises(UserError, match="enough"):
        measuring.certify([*MLP, "steps=2", "precision=bf16", "ema=ema", "against", "precision=fp32"])
    tested, reference, updates = seen
    assert (tested.named("precision"), reference.named("precision"), updates) == ("precision=bf16", "precision=fp32", 2)
    assert reference.named("ema") == "ema=ema"
    assert reference.named("model") == "model=mlp"
    with pytest.raises(UserError, match="that is the same run"):
        measuring.certify([*MLP, "against", "precision=fp32"])
    with pytest.raises(UserError, match="leave resume= out"):
        measuring.certify([*MLP, "against", "resume=x"])


def test_the_other_side_keeps_what_ranks_the_run() -> None:
    """A task chooses metrics and the one that ranks its models; without them the other run would be refused."""
    assert verb.plain_changes(verb.prepare_job(["task=regression", "precision=bf16"]).run) == ["precision=fp32"]
    assert "metrics=[]" in verb.plain_changes(verb.prepare_job(["metrics=[f1]", "precision=bf16"]).run)


RANKS = '''
"""Two ways in which ranks go wrong."""
from dataclasses import dataclass, replace
import torch
from drivetrain.parallel.ddp import Ddp

@dataclass(eq=False)
class Watched:
    inner: object
    after: object = None
    micro: object = None

    def micro_batch(self, batch, loss_sum):
        self.inner.micro_batch(self.micro(batch) if self.micro else batch, loss_sum)
        if batch.last and self.after:
            self.after()

    def update(self):
        return self.inner.update()

    def zero_grad(self):
        self.inner.zero_grad()

@dataclass(kw_only=True, eq=False)
class Sums(Ddp):
    def wrap_step(self, step, context):
        def add_up():
            for p in context.model.parameters():
                p.grad *= self.world.size
        return Watched(super().wrap_step(step, context), after=add_up)

@dataclass(kw_only=True, eq=False)
class PerRank(Ddp):
    def wrap_step(self, step, context):
        return Watched(super().wrap_step(step, context), micro=lambda b: replace(b, weight=torch.ones_like(b.weight)))
'''


def saved(words: list[str]) -> list[str]:
    """The words of a run that saves, as a command's does by default."""
    return [word for word in words if not word.startswith("saving")]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "pipeline"])
def test_two_ranks_are_the_same_mathematics(strategy: str, command: Any) -> None:
    _, found = command("certify", *saved(MLP), f"parallel={strategy}", "parallel.nproc=2", "against", "parallel=single")
    assert found["answer"] == "exact"
    assert {"samples", "loss", "gradient", "weights", "evaluation"} <= set(found["phases"])


@pytest.mark.slow
def test_faults_of_ranks_are_named(tmp_path: Path, command: Any) -> None:
    from drivetrain.core.machine.paths import conf_dir

    (tmp_path / "faulty_ranks.py").write_text(RANKS)
    (tmp_path / "conf/parallel").mkdir(parents=True)
    ddp = (conf_dir() / "parallel/ddp.yaml").read_text()
    for name, kind in (("ddp_sums", "Sums"), ("ddp_per_rank", "PerRank")):
        text = ddp.replace("drivetrain.parallel.ddp.Ddp", f"faulty_ranks.{kind}")
        assert text != ddp
        (tmp_path / f"conf/parallel/{name}.yaml").write_text(text)
    own = ["--config-dir", "conf", "trust=[faulty_ranks]", "parallel.nproc=2"]
    done, found = command("certify", *own, *saved(GPT), "parallel=ddp_sums", "against", "parallel=single", code=1)
    assert (found["first"]["phase"], found["first"]["update"]) == ("gradient", 1), done.stdout
    assert "it is 2 times the other run's" in done.stdout
    uneven = [*saved(MLP), "data.samples=15", "data.drop_last=false"]  # 2 and 1 of the last 3
    done, found = command("certify", *own, *uneven, "parallel=ddp_per_rank", "against", "parallel=single", code=1)
    assert (found["first"]["phase"], found["first"]["update"]) == ("loss", 2), done.stdout


@pytest.mark.slow
def test_the_command_answers(command: Any) -> None:
    words = saved(MLP)
    _, found = command("certify", *words, "precision=bf16_pure", "against", "precision=fp32")  # autocast is for CPUs of that kind
    assert found["answer"] == "within rounding"
    done, found = command("certify", *words, "optimizer.momentum=0.8", "against", "optimizer.momentum=0.9", code=1)
    assert found["first"]["phase"] == "weights"  # Nesterov's momentum looks ahead in the first update
    assert "momentum of layers.0.linear.weight is 0.8, and 0.9 in the other run" in done.stdout
    done, _ = command("certify", *words, "model.dropout=0.3", "batch=accumulate", "against", "batch=fixed", code=2)
    assert "set model.dropout=0 for both" in done.stderr


# --- the verdict on two traces, and the plan of samples: on made-up entries ---

W1, W2, INSIDE = (1, "weights", "w"), (2, "weights", "w"), (1, "forward", "layer")


def trace(values: dict, rounding: float = 1e-6) -> Trace:
    return Trace({key: TracedTensor(np.array([value]), rounding) for key, value in values.items()})


def verdict(tested: dict, reference: dict, floors: Floors | None = None, coarser: bool = False):
    return judge.judge(trace(tested), trace(reference), floors or Floors(), coarser)


ONE = {W1: 1.0}
NONE, FIGURE = {(1, "evaluation", "accuracy"): 0.0}, {(1, "evaluation", "accuracy"): 0.1}


@pytest.mark.parametrize(
    ("tested", "reference", "more", "answer", "first"),
    [
        # eight times the floor is rounding, and more is not
        ({W1: 1 + 7e-6}, ONE, {}, judge.EXACT, None),
        ({W1: 1 + 9e-6}, ONE, {}, judge.DIFFERS, W1),
        ({W1: 1.1, W2: 1.2}, {W1: 1.0, W2: 1.0}, {}, judge.DIFFERS, W1),
        # a layer inside does not decide, and is named where something does
        ({INSIDE: 2.0, W1: 1.0}, {INSIDE: 1.0, W1: 1.0}, {}, judge.EXACT, None),
        ({INSIDE: 2.0, W1: 2.0}, {INSIDE: 1.0, W1: 1.0}, {}, judge.DIFFERS, INSIDE),
        # other formats are within rounding unless all bits are equal
        ({W1: 1 + 1e-6}, ONE, {"coarser": True}, judge.CLOSE, None),
        (ONE, ONE, {"coarser": True}, judge.EXACT, None),
        # what is nothing in the reference has a floor
        (FIGURE, NONE, {}, judge.DIFFERS, (1, "evaluation", "accuracy")),
        (FIGURE, NONE, {"floors": Floors(permuted=[trace(FIGURE)])}, judge.EXACT, None),
    ],
)
def test_a_verdict(tested: dict, reference: dict, more: dict, answer: str, first: object) -> None:
    found = verdict(tested, reference, **more)
    assert (found.answer, found.first and found.first.key) == (answer, first)
    assert found.bit_for_bit == (tested == reference)


def test_other_data_or_another_loss_is_no_flip():
    gradient = (1, "gradient", "w")
    assert judge.may_have_flipped(verdict({gradient: 2.0, W1: 1.0}, {gradient: 1.0, W1: 1.0}))
    for phase in ("samples", "start", "inputs", "targets", "learning rate", "loss"):
        found = verdict({gradient: 2.0, (1, phase, "x"): 2.0}, {gradient: 1.0, (1, phase, "x"): 1.0})
        assert not judge.may_have_flipped(found)
    assert not judge.may_have_flipped(verdict({W1: 1.0}, {W1: 1.0}))


def test_a_floor_is_the_largest_of_all_updates_up_to_the_next():
    reference = {(n, "weights", "w"): 1.0 for n in range(1, 5)}
    permuted = trace({(n, "weights", "w"): 1.0 + (1e-3 if n == 2 else 1e-6) for n in range(1, 5)})
    floors = Floors(permuted=[permuted]).relative_to(trace(reference, 0.0))
    found = [floors[n, "weights", "w"] for n in range(1, 5)]
    assert np.allclose(found, [1e-3] * 4)


def test_samples_and_weights_of_all_ranks_add_up_and_what_only_fills_up_counts_nothing():
    def requests(rank: int):
        yield Request(0, torch.tensor([2 * rank, 2 * rank + 1]), 4 / 5, last=False)
        yield Request(0, torch.tensor([4]), 2 / 5 if rank == 0 else 0.0, True, True)

    one, other = (plan_of(requests(rank), 2) for rank in range(2))
    assert one["number of samples"] + other["number of samples"] == 5
    assert np.allclose(one["weights of the micro-batches"] + other["weights of the micro-batches"], 1.0)


# --- every option that claims to be exact or close is certified. A new option is certified by being there ---


VIT = [
    *[w for w in CONV if not w.startswith("model")], "model=timm", "model.name=vit_tiny_patch16_224",
    "model.kwargs={img_size: 8, patch_size: 4, depth: 2, embed_dim: 24, num_heads: 2}",
]  # fmt: skip
DIGITS = [*[w for w in CONV if not w.startswith("data")], "data=digits", "updates=40"]
NORMS = [*MLP[:-3], "model=own", "model.target=own_norms.Net", "trust=[own_norms]", "scheduler=constant"]
OWN = """
import torch

class Norm(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.bias, self.eps = torch.nn.Parameter(torch.ones(16)), torch.nn.Parameter(torch.zeros(16)), 1e-6

    def forward(self, x):
        mean = x.mean(-1, keepdim=True)
        return self.weight * (x - mean) / torch.sqrt((x - mean).pow(2).mean(-1, keepdim=True) + self.eps) + self.bias

class Net(torch.nn.Module):
    def __init__(self, shape, classes):
        super().__init__()
        self.body, self.norm, self.head = torch.nn.Linear(torch.Size(shape).numel(), 16), Norm(), torch.nn.Linear(16, classes)

    def forward(self, x):
        return self.head(self.norm(self.body(x.flatten(1))))
"""
# The run beside which an option is certified, and what it needs itself; for a whole group or for one option.
BESIDE: dict[Any, tuple[list[str], list[str]]] = {
    "loader": (DIGITS, []),
    "checkpointing": (VIT, []),
    "surgery": (CONV, []),
    "compile": (MLP, []),
    "precision": (GPT, []),
    ("surgery", "fused_norm"): (NORMS, []),
    ("surgery", "no_bias_before_norm"): ([*CONV, "model.bias=true"], []),
    ("parallel", "split"): (MLP, ["parallel.devices=[cpu,cpu]"]),
    ("parallel", "tensor"): (VIT, []),
    ("batch", "auto"): (MLP, ["batch.memory_gb=64"]),
    ("batch", "bucketed"): (GPT, []),
    ("ema", "post_hoc"): ([*saved(MLP), "saving=last"], []),
    ("checkpointing", "budget"): ([*VIT, "compile=inductor"], []),
}
LACKING = ("which is not installed", "needs a CUDA device")  # what this machine may not have
# Their options compute something else by what they are: other data, another model, another algorithm.
OTHERS = {"task", "data", "model", "loss", "optimizer", "scheduler", "augment"}
# A metric measures one kind of targets: those of classes stand for the others.
METRICS = ("accuracy", "f1", "auroc", "top5", "confusion_matrix", "calibration_error")
CHOICES = [
    (group, name)
    for group, names in options().items()
    for name in names
    if group not in OTHERS
    and name not in ("none", "own", "dali", default_options()[group])  # dali: decodes files in its own way
    and (group != "metrics" or name in METRICS)
]


def claim_of(group: str, name: str, words: list[str]) -> str:
    part = launcher.prepare(words).run.parts[group]
    chosen: Option = part[-1] if isinstance(part, list) else part
    return chosen.effect_as_set()


@pytest.mark.slow
@pytest.mark.parametrize(("group", "name"), [pytest.param(*choice, id="=".join(choice)) for choice in CHOICES])
def test_a_claim_holds(group: str, name: str, command: Any, own_module: Callable[..., Path]) -> None:
    """Exact: bit for bit, or but for the order of sums. Close: within the rounding of its precision."""
    own_module("own_norms", OWN)
    beside = BESIDE.get((group, name), BESIDE.get(group, (MLP, [])))
    base, own = beside
    words = [*base, f"{group}=[{name}]" if group in LISTS else f"{group}={name}", *own]
    try:
        if (claim := claim_of(group, name, words)) == "changes":
            pytest.skip("it claims to change training")
        if launcher.prepare(words).run.parallel.distributed:
            against = f"{group}={default_options()[group]}"
            _, found = command("certify", *saved(words), "against", against)
            answer, lines = found["answer"], found["lines"]
        else:
            done, lines = certified(words, base)
            answer = done.verdict.answer
    except UserError as error:
        if not any(reason in str(error) for reason in LACKING):
            raise
        pytest.skip(str(error))
    assert answer in ({"exact": ("exact",), "close": ("exact", "within rounding")}[claim]), lines


# --- planted faults: each is named, by its phase and the place in the model. The same runs without them are the same ---


ADAM = [*[w for w in MLP if not w.startswith("optimizer")], "optimizer=adamw", "optimizer.lr=0.01", "optimizer.weight_decay=0.1"]


@dataclass(eq=False)
class Faulty:
    """A step with a fault in one of its methods."""

    inner: Any
    micro: Callable[[Any, Any, torch.Tensor], None] | None = None  # (inner step, batch, loss_sum)
    before: Callable[[], None] = lambda: None
    after: Callable[[], None] = lambda: None
    zero: bool = True

    def micro_batch(self, batch: Any, loss_sum: torch.Tensor) -> None:
        if self.micro is None:
            self.inner.micro_batch(batch, loss_sum)
        else:
            self.micro(self.inner, batch, loss_sum)

    def update(self) -> bool:
        self.before()
        made = self.inner.update()
        self.after()
        return bool(made)

    def zero_grad(self) -> None:
        if self.zero:
            self.inner.zero_grad()


def in_step(make: Callable[[Any], dict[str, Any]]) -> Break:
    """A fault in the step: `make(trainer)` gives the parts of Faulty."""

    def broken(trainer: Any) -> None:
        trainer.step = Faulty(trainer.step, **make(trainer))

    return broken


def in_stream(change: Callable[[Any], Any]) -> Break:
    """A fault in what the loader delivers."""

    def changed(stream: Iterator[Any]) -> Iterator[Any]:
        yield from map(change, stream)

    return lambda trainer: trainer.stream_watchers.append(changed)


def in_model(change: Callable[[torch.nn.Module], None], kind: type | None = None, name: str = "") -> Break:
    """A fault in the modules of a class, or in the module of a name."""

    def broken(trainer: Any) -> None:
        for found, module in trainer.model.named_modules():
            if (kind is not None and isinstance(module, kind)) or (kind is None and found == name):
                change(module)

    return broken


def weight_of_one(trainer: Any) -> dict[str, Any]:
    return {"micro": lambda inner, b, total: inner.micro_batch(replace(b, weight=torch.ones_like(b.weight)), total)}


def gradient_of_sums(trainer: Any) -> None:
    """The gradients of micro-batches are added up, not averaged; the loss that is shown is right."""
    right = trainer.precision.backward
    trainer.precision.backward = lambda loss, weight: right(loss, torch.ones_like(weight))


def clipped_before_unscaling(trainer: Any) -> None:
    def step(optimizer: Any, clip: Callable[[], None]) -> bool:
        clip()
        return bool(right(optimizer, lambda: None))

    right = trainer.precision.step
    trainer.precision.step = step


def stale_average(trainer: Any) -> None:
    right, kept = trainer.ema.update, [p.detach().clone() for p in trainer.model.parameters()]

    def update() -> None:
        now = [p.detach().clone() for p in trainer.model.parameters()]
        for p, old in zip(trainer.model.parameters(), kept, strict=True):
            p.data.copy_(old)
        right()
        for p, new in zip(trainer.model.parameters(), now, strict=True):
            p.data.copy_(new)
        kept[:] = now

    trainer.ema.update = update


def setting(key: str, value: Any, name: str = "") -> Break:
    """Another setting of the optimizer, of the groups that have a parameter whose name ends so."""

    def broken(trainer: Any) -> None:
        for group in trainer.optimizer.param_groups:
            if any(n.endswith(name) for n in group["param_names"]):
                group[key] = value

    return broken


def late_schedule(trainer: Any) -> None:
    right = trainer.scheduler.step
    trainer.scheduler.step = lambda update: right(max(0, update - 1))


def forgets(trainer: Any) -> dict[str, Any]:
    return {"before": trainer.optimizer.state.clear}


def decays_twice(trainer: Any) -> dict[str, Any]:
    def after() -> None:
        for group in trainer.optimizer.param_groups:
            for p in group["params"]:
                p.data.mul_(1 - float(group["lr"]) * group["weight_decay"])

    return {"after": after}


def uncorrected(trainer: Any) -> None:
    """Adam without its correction of the first averages, which start at zero."""

    def step() -> None:
        for group in trainer.optimizer.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                state = trainer.optimizer.state[p]
                if not state:
                    state |= {"step": torch.zeros(()), "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
                state["step"] += 1
                state["exp_avg"].lerp_(p.grad, 1 - beta1)
                state["exp_avg_sq"].mul_(beta2).addcmul_(p.grad, p.grad, value=1 - beta2)
                p.data.mul_(1 - group["lr"] * group["weight_decay"])
                p.data.addcdiv_(state["exp_avg"], state["exp_avg_sq"].sqrt() + group["eps"], value=-float(group["lr"]))

    trainer.optimizer.step = step


def one_kept_gradient(trainer: Any) -> dict[str, Any]:
    return {"zero": False}


def without_mask(attention: torch.nn.Module) -> None:
    from torch.nn.functional import scaled_dot_product_attention

    from drivetrain.model.gpt import apply_rotary

    def forward(x: torch.Tensor, rotary: torch.Tensor) -> torch.Tensor:
        n, length, _ = x.shape
        q, k, v = attention.qkv(x).view(n, length, 3, -1, attention.head).permute(2, 0, 3, 1, 4)  # type: ignore[operator]
        mixed = scaled_dot_product_attention(apply_rotary(q, rotary), apply_rotary(k, rotary), v)
        return attention.out(mixed.transpose(1, 2).flatten(2))  # type: ignore[operator]

    attention.forward = forward  # type: ignore[method-assign]


def drop_tail(trainer: Any) -> None:
    trainer.drop_last = not trainer.drop_last


def never_evaluates(trainer: Any) -> None:
    trainer.model.eval = trainer.model.train


def next_label(batch: Any) -> Any:
    return replace(batch, y=(batch.y + 1) % 4)


def normalised_again(batch: Any) -> Any:
    return replace(batch, x=(batch.x - 0.1) / 0.9)


def detached(module: torch.nn.Module) -> None:
    module.register_forward_hook(lambda _, args, output: output.detach())


def frozen(module: torch.nn.Module) -> None:
    for p in module.parameters():
        p.requires_grad_(False)


def no_statistics(module: torch.nn.Module) -> None:
    module.momentum = 0.0  # type: ignore[assignment]


def leaky(module: torch.nn.Module) -> None:
    module.forward = torch.nn.functional.leaky_relu  # type: ignore[assignment]


ACCUMULATED = ["batch=accumulate", "batch.accumulation_steps=3"]
CLIPPED = ["clip=norm", "clip.max_norm=0.5"]
# fault: (the run, what it has beside the other, fault, update, phase, place)
FAULTS: dict[str, tuple[list[str], list[str], Break, int, str, str]] = {
    "accumulation weight wrong": (MLP, ACCUMULATED, in_step(weight_of_one), 1, "loss", ""),
    "gradients summed": (MLP, ACCUMULATED, gradient_of_sums, 1, "gradient", "head"),
    "clip before unscale": ([*MLP, *CLIPPED], ["precision=amp"], clipped_before_unscaling, 1, "clipped gradient", "head"),
    "ema stale": ([*MLP, "ema=ema", "ema.decay=0.5"], [], stale_average, 1, "average", "layers.0"),
    "decay on norms": (CONV, [], setting("weight_decay", 0.1, "features.0.1.weight"), 1, "optimizer state", "features.0.1"),
    "dropped tail": ([*MLP, "data.samples=50"], [], drop_tail, 0, "samples", "number of updates"),
    "lr one update late": (MLP, [], late_schedule, 2, "learning rate", "layers.0"),
    "wrong mask": (GPT, [], in_model(without_mask, name="blocks.1.attention"), 1, "forward", "blocks.1.attention.out"),
    "momentum buffer reset": (MLP, [], in_step(forgets), 2, "optimizer state", "momentum_buffer"),
    "BatchNorm statistics not updated": (CONV, [], in_model(no_statistics, torch.nn.BatchNorm2d), 1, "buffers", "features.0.1"),
    "evaluated in train mode": (CONV, [], never_evaluates, 5, "evaluation", "loss"),
    "weight decay twice": (ADAM, [], in_step(decays_twice), 1, "weights", "layers.0"),
    "bias correction missing": (ADAM, [], uncorrected, 1, "weights", "layers.0"),
    "wrong beta": (ADAM, [], setting("betas", (0.9, 0.99)), 1, "optimizer state", "exp_avg_sq"),
    "one layer frozen": (MLP, [], in_model(frozen, name="layers.1.linear"), 1, "gradient", "layers.1.linear"),
    "one layer detached": (MLP, [], in_model(detached, name="layers.0"), 1, "gradient", "layers.0"),
    "labels shifted": (MLP, [], in_stream(next_label), 1, "targets", ""),
    "normalised twice": (MLP, [], in_stream(normalised_again), 1, "inputs", ""),
    "gradients not cleared": (MLP, [], in_step(one_kept_gradient), 2, "gradient", "head"),
    "another activation": (CONV, [], in_model(leaky, name="features.1.2"), 1, "forward", "features.1.2"),
}  # fmt: skip
QUICK = ("accumulation weight wrong", "lr one update late", "weight decay twice", "one layer detached")  # the normal suite's


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in FAULTS])
def test_a_planted_fault_is_named(name: str) -> None:
    words, beside, broken, update, phase, place = FAULTS[name]
    done, lines = certified([*words, *beside], words, broken)
    first = done.verdict.first
    assert first is not None, lines
    assert first.key[:2] == (update, phase), lines
    assert place in first.key[2], lines


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_without_the_fault_it_is_the_same(name: str) -> None:
    words, beside, *_ = FAULTS[name]
    done, lines = certified([*words, *beside], words)
    assert done.verdict.first is None, lines
