"""Number formats: truly in effect, close to float32, and an overflow that moves nothing."""

import json

import pytest
import torch

from drivetrain.core import accelerators
from drivetrain.core.accelerators import Accelerator
from drivetrain.core.errors import Diverged
from drivetrain.precision import Amp
from drivetrain.precision.fp8 import Fp8
from tests.support.context import context


def matmul_types(trainer, tmp_path) -> set[str]:
    """The element types that the matrix products of a run work on, from a profiler's trace."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profile:
        trainer.fit()
    profile.export_chrome_trace(str(tmp_path / "trace.json"))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    seen = [e["args"]["Input type"] for e in events if e.get("name") in ("aten::addmm", "aten::mm") and "args" in e]
    return {kind for types in seen for kind in types if kind not in ("", "Scalar")}


@pytest.mark.parametrize(
    ("precision", "kind"), [("fp32", "float"), ("bf16", "c10::BFloat16"), ("amp", "c10::Half")], ids=["fp32", "bf16", "amp"]
)
def test_the_matrix_products_are_in_this_format_forward_and_backward(make, tmp_path, precision, kind):
    trainer = make(f"precision={precision}", "saving=none")
    trainer.evaluator.max_batches = 0  # the products of the training step alone
    trainer.progress.evaluated = 2
    assert matmul_types(trainer, tmp_path) == {kind}
    assert all(p.dtype == torch.float32 for p in trainer.model.parameters())


@pytest.mark.parametrize("model", [["model=mlp"], ["model=resnet9", "model.width=8"]], ids=["mlp", "resnet9"])
@pytest.mark.parametrize(
    ("words", "away"),
    [
        (["precision=bf16"], 0.02), (["precision=amp"], 0.003), (["precision=bf16_pure"], 0.03),
        (["precision=bf16_pure", "precision.master=stochastic"], 0.03),
    ],
    ids=str,
)  # fmt: skip
def test_sixteen_bits_stay_close_to_float32_and_are_not_it(make, words, away, model):
    length = [*model, "updates=3", "optimizer.lr=0.001"]  # small, so that rounding is not amplified
    reference, trainer = make(*length), make(*words, *length)
    reference.fit()
    trainer.fit()
    losses = [[r["loss"] for r in t.log.writers[0] if r["event"] == "train"] for t in (reference, trainer)]
    assert len(losses[1]) == 3
    assert losses[1] == pytest.approx(losses[0], rel=away)
    assert losses[1] != losses[0]


def test_evaluation_runs_in_the_same_format(make):
    trainer = make("precision=bf16")
    kinds = set()
    trainer.model.head.register_forward_hook(lambda m, i, output: kinds.add(output.dtype))
    trainer.evaluator.metrics()
    assert kinds == {torch.bfloat16}


def snapshot(trainer) -> dict:
    """All that an update may move."""
    return {
        "updates": trainer.progress.updates,
        "weights": [p.detach().clone() for p in trainer.model.parameters()],
        "average": {k: v.clone() for k, v in trainer.ema.state_dict()["tensors"].items()},
        "averaged": trainer.ema.state_dict()["updates"],
    }


def moved(before: dict, after: dict) -> set[str]:
    """What is different."""
    differs = {k for k in ("updates", "averaged") if before[k] != after[k]}
    if any(not torch.equal(a, b) for a, b in zip(before["weights"], after["weights"], strict=True)):
        differs.add("weights")
    if any(not torch.equal(v, after["average"][k]) for k, v in before["average"].items()):
        differs.add("average")
    return differs


OVERFLOW = ["precision=amp", f"precision.init_scale={2.0**24}"]  # gradients of about 0.1 overflow float16 at first


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_an_overflow_moves_nothing_but_the_scale(make, each_update, steps, optimizer):
    trainer = make(
        *OVERFLOW, "updates=3", "epochs=5", "scheduler=cosine", "ema=ema", f"optimizer={optimizer}",
        "batch=accumulate", f"batch.accumulation_steps={steps}",
    )  # fmt: skip
    seen = each_update(trainer, lambda: (snapshot(trainer), trainer.precision.scaler.get_scale()))
    before, scale = snapshot(trainer), trainer.precision.scaler.get_scale()
    trainer.fit()
    skips, counted = 0, []
    for after, new_scale in seen:
        changed = moved(before, after)
        if new_scale < scale:
            skips += 1
            assert not changed
        else:
            assert changed == {"updates", "weights", "average", "averaged"}
        before, scale = after, new_scale
        counted.append(skips)
    assert skips == trainer.progress.skipped > 0
    assert trainer.progress.updates == 3
    assert len(seen) == 3 + skips
    records = [r for r in trainer.log.writers[0] if r["event"] == "train"]
    assert [r["skipped"] for r in records] == counted
    made = [n - skipped for n, skipped in enumerate([0, *counted[:-1]])]  # updates before each
    assert [r["lr"] for r in records] == [
        trainer.scheduler._base[0] * trainer.scheduler.lr_factor(u) for u in made
    ]  # an overflow moves no rate
    assert trainer.progress.samples == 12 * len(seen)  # a skipped update has consumed its samples


def test_an_overflow_at_the_first_update_leaves_no_momentum_behind(make, each_update):
    # deterministic: torch then fills memory that nobody wrote with NaN, which makes what is left behind visible
    trainer = make(*OVERFLOW, "epochs=5", "updates=1", "runtime.deterministic=true", "runtime.cudnn_benchmark=false")
    gradients = each_update(trainer, lambda: [p.grad.clone() for p in trainer.model.parameters()])
    trainer.fit()
    assert trainer.progress.skipped > 0
    assert trainer.progress.updates == 1
    groups = {id(p): group["weight_decay"] for group in trainer.optimizer.param_groups for p in group["params"]}
    for p, grad in zip(trainer.model.parameters(), gradients[-1], strict=True):
        momentum = trainer.optimizer.state[p]["momentum_buffer"]
        assert momentum.isfinite().all()
        if not groups[id(p)]:
            torch.testing.assert_close(momentum, grad)  # the first real gradient and nothing before it


def test_a_run_of_overflows_ends_it_as_diverged(train):
    result = train("precision=amp", "precision.init_scale=1e38", "epochs=50", "updates=100")
    assert result.status == "diverged"
    assert "50 updates in a row" in result.error
    assert result.updates == 0


def test_skips_end_a_run_only_in_a_row(make):
    """49, an update, 49 more: the run goes on. The 50th in a row ends it."""
    trainer = make("precision=amp", "epochs=50", "updates=2", "saving=none", "evaluate_every=1000")
    skips = [False] * 49 + [True] + [False] * 49 + [True]
    trainer.precision.step = lambda *_: skips.pop(0)
    trainer.fit()
    assert (trainer.progress.updates, trainer.progress.skipped) == (2, 98)
    trainer = make("precision=amp", "epochs=50", "updates=2", "saving=none", "evaluate_every=1000")
    made = []
    trainer.precision.step = lambda *_: made.append(0)
    with pytest.raises(Diverged, match="50 updates in a row"):
        trainer.fit()
    assert len(made) == 50


def test_the_scale_grows_and_is_saved(make):
    trainer = make("precision=amp", "precision.init_scale=8.0", "precision.growth_interval=2", "updates=4")
    trainer.fit()
    assert trainer.progress.updates == 4
    assert trainer.precision.scaler.get_scale() == 32.0
    again = make("precision=amp", "precision.init_scale=8.0", "precision.growth_interval=2", "updates=8")
    again.restore(trainer.model.state_dict(), trainer.state())
    assert again.precision.scaler.get_scale() == 32.0
    assert again.precision.state_dict() == trainer.precision.state_dict()
    slower = make("precision=amp", "precision.growth_interval=5", "updates=8")
    slower.restore(trainer.model.state_dict(), trainer.state())
    assert (slower.precision.scaler.get_scale(), slower.precision.scaler.get_growth_interval()) == (32.0, 5)


def test_scaling_does_not_change_the_update(make):
    """Scales that float16 holds exactly give the same weights, whatever they are."""
    ends = []
    for scale in (1024.0, 4096.0):
        trainer = make("precision=amp", f"precision.init_scale={scale}", "updates=3", "clip=norm", "clip.max_norm=0.5")
        start = [p.detach().clone() for p in trainer.model.parameters()]
        trainer.fit()
        assert trainer.progress.skipped == 0
        ends.append([p.detach() for p in trainer.model.parameters()])
    for begun, a, b in zip(start, *ends, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)
        assert not torch.equal(a, begun)


def test_the_weight_of_a_micro_batch_multiplies_its_gradients():
    from drivetrain.precision import Precision

    x = torch.tensor([2.0, -3.0], requires_grad=True)
    precision = Precision()
    for weight in (0.25, 0.5):
        precision.backward((x**2).sum(), torch.tensor(weight))
    torch.testing.assert_close(x.grad, 2 * x.detach() * 0.75)


def test_it_does_so_with_a_scaled_loss_too():
    x = torch.tensor([2.0, -3.0], requires_grad=True)
    precision = Amp(init_scale=8.0)
    precision.setup(context())
    for weight in (0.25, 0.5):
        precision.backward((x**2).sum(), torch.tensor(weight))
    torch.testing.assert_close(x.grad, 8 * 2 * x.detach() * 0.75)


@pytest.mark.parametrize("word", ["precision.init_scale=0", "precision.init_scale=big", "precision.growth_interval=0"])
def test_what_cannot_be_is_refused(problems, word):
    assert any(p.startswith(word) for p in problems("precision=amp", word))


def test_fp8_without_its_library_or_device_is_refused(problems, monkeypatch):
    import importlib.util

    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "torchao" else find_spec(name, *a))
    (problem,) = problems("precision=fp8")
    assert "precision=fp8 needs the package 'torchao'" in problem
    assert "pip install 'drivetrain[torchao]'" in problem
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: object() if name == "torchao" else find_spec(name, *a))
    for found, here in (
        (Accelerator(), "here is none"),
        (Accelerator("xpu", 1), "here is none"),
        (Accelerator("cuda", 1, (8, 6)), "here it is 8.6"),
        (Accelerator("cuda", 1, (9, 0), rocm=True), "9.4 or newer, and here it is 9.0"),
    ):
        monkeypatch.setattr(accelerators, "find", lambda found=found: found)
        (problem,) = problems("precision=fp8")
        assert "precision=fp8 needs a CUDA device" in problem
        assert here in problem


def test_an_update_that_runs_out_of_memory_can_be_repeated_with_loss_scaling(make):
    """torch counts gradients as unscaled until the scaler's update, and refuses to unscale them twice."""
    trainer = make("precision=amp")
    step, x = trainer.optimizer.step, torch.ones(2, 4)
    weights = trainer.optimizer.param_groups[0]["params"]

    def out_of_memory() -> None:
        raise torch.OutOfMemoryError("no memory for the optimizer's state")

    for p in weights:
        p.grad = torch.zeros_like(p)
    trainer.precision.scaler.scale(x)
    trainer.optimizer.step = out_of_memory
    with pytest.raises(torch.OutOfMemoryError):
        trainer.precision.step(trainer.optimizer, lambda: None)
    trainer.optimizer.step = step
    assert trainer.precision.step(trainer.optimizer, lambda: None)


@pytest.mark.parametrize(("sizes", "converted"), [((64, 48), True), ((32, 32), True), ((64, 40), False), ((16, 64), False)])
def test_fp8_converts_what_is_large_enough_and_sixteen_divides(sizes, converted):
    """Needs no torchao."""
    assert Fp8(min_features=32)._is_convertible(torch.nn.Linear(*sizes)) is converted
