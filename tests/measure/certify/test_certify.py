"""`drivetrain certify`: its two sides, its answers and their exit codes, and what it refuses. With ranks in the slow suite."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from drivetrain.cli import completion, measuring
from drivetrain.core.errors import UserError
from drivetrain.core.microbatch import Request
from drivetrain.measure.certify import certify as verb
from drivetrain.measure.certify import judge, record
from drivetrain.measure.certify.judge import Entry, Floors, Trace, of_tensor
from drivetrain.measure.certify.record import plan_of
from drivetrain.precision import cpu_half
from tests.support import json_keys
from tests.support.certified import SMALL, Break, certified, traced
from tests.support.slow import but

MLP = [*SMALL, "model=mlp", "model.hidden=[16,16]", "scheduler=linear"]
CONV = [*SMALL, "model=resnet9", "model.width=4", "scheduler=constant"]
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
    monkeypatch.setattr(cpu_half, "measure", lambda model, example, dtype: cpu_half.Slowness(1.0, 3.0))
    _, lines = certified([*MLP, "precision=bf16", "ema=ema"], [*MLP, "ema=ema"])
    assert lines[0].startswith("exact: bit for bit")
    assert lines[1].startswith(
        "  precision of this run: everything stays in float32: on this CPU bfloat16 takes 3 times as long. "
    )
    assert "There it has no effect" in lines[1]


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
        return Trace({(1, "weights", "w"): Entry(np.array([value]), rounding=1e-9)})

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


def test_the_other_side(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert measuring.certify(["--help"]) == 0
    assert "exit codes" in capsys.readouterr().out


def test_the_other_side_keeps_what_ranks_the_run() -> None:
    """A task chooses metrics and the one that ranks its models; without them the other run would be refused."""
    assert verb.plain_changes(verb.prepare_job(["task=regression", "precision=bf16"]).run) == ["precision=fp32"]
    assert "metrics=[]" in verb.plain_changes(verb.prepare_job(["metrics=[f1]", "precision=bf16"]).run)


def test_completion_offers_against_once() -> None:
    assert "against" in completion.candidates(["drivetrain certify precision=bf16 ag"])
    assert completion.candidates(["drivetrain certify precision=bf16 against ag"]) == []
    assert completion.candidates(["drivetrain certify precision=bf16 against precision=fp3"]) == ["precision=fp32"]


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
GPT = [
    "data=stdlib", "data.max_files=10", "data.length=32", "data.test_samples=8", "loss=next_token", "model=gpt", "model.width=16",
    "model.heads=2", "model.depth=2", "batch.global_batch=8", "scheduler=constant", "runtime.threads=1", "updates=20",
    "optimizer=sgd", "optimizer.lr=0.1",
]  # fmt: skip


def run(*words: str) -> tuple[int, dict[str, Any], str]:
    """A command in a process of its own: its exit code, its certify.json and its output."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([*sys.path, str(Path.cwd())])}
    command = [sys.executable, "-m", "drivetrain", "certify", *words]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    files = sorted(Path("outputs/certify").rglob("certify.json"))
    return done.returncode, json.loads(files[-1].read_text()) if files else {}, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "pipeline"])
def test_two_ranks_are_the_same_mathematics(strategy: str) -> None:
    words = [w for w in MLP if not w.startswith("saving")]
    code, found, said = run(*words, f"parallel={strategy}", "parallel.nproc=2", "against", "parallel=single")
    assert (code, found.get("answer")) == (0, "exact"), said
    assert {"samples", "loss", "gradient", "weights", "evaluation"} <= set(found["phases"])


@pytest.mark.slow
def test_faults_of_ranks_are_named(tmp_path: Path) -> None:
    from drivetrain.core.paths import conf_dir

    (tmp_path / "faulty_ranks.py").write_text(RANKS)
    (tmp_path / "conf/parallel").mkdir(parents=True)
    ddp = (conf_dir() / "parallel/ddp.yaml").read_text()
    for name, kind in (("ddp_sums", "Sums"), ("ddp_per_rank", "PerRank")):
        text = ddp.replace("drivetrain.parallel.ddp.Ddp", f"faulty_ranks.{kind}")
        assert text != ddp
        (tmp_path / f"conf/parallel/{name}.yaml").write_text(text)
    own = ["--config-dir", "conf", "trust=[faulty_ranks]", "parallel.nproc=2"]
    code, found, said = run(*own, *GPT, "parallel=ddp_sums", "against", "parallel=single")
    assert (code, found["first"]["phase"], found["first"]["update"]) == (1, "gradient", 1), said
    assert "it is 2 times the other run's" in said
    uneven = [*(w for w in MLP if not w.startswith("saving")), "data.samples=15", "data.drop_last=false"]  # 2 and 1 of the last 3
    code, found, said = run(*own, *uneven, "parallel=ddp_per_rank", "against", "parallel=single")
    assert (code, found["first"]["phase"], found["first"]["update"]) == (1, "loss", 2), said


@pytest.mark.slow
def test_the_command_answers(tmp_path: Path) -> None:
    words = [w for w in MLP if not w.startswith("saving")]
    code, found, said = run(*words, "precision=bf16_pure", "against", "precision=fp32")  # autocast is for CPUs that compute in it
    assert (code, found["answer"]) == (0, "within rounding"), said
    code, found, said = run(*words, "optimizer.momentum=0.8", "against", "optimizer.momentum=0.9")
    assert (code, found["first"]["phase"]) == (1, "weights"), said  # Nesterov's momentum looks ahead in the first update
    assert "momentum of layers.0.linear.weight is 0.8, and 0.9 in the other run" in said
    code, _, said = run(*words, "model.dropout=0.3", "batch=accumulate", "against", "batch=fixed")
    assert code == 2
    assert "set model.dropout=0 for both" in said


# --- the verdict on two traces, and the plan of samples: on made-up entries ---

W1, W2, INSIDE = (1, "weights", "w"), (2, "weights", "w"), (1, "forward", "layer")


def trace(values: dict, rounding: float = 1e-6) -> Trace:
    return Trace({key: Entry(np.array([value]), rounding) for key, value in values.items()})


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
