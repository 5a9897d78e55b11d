"""One example: whatever tries the model before it trains takes the arguments of the first call that training makes."""

import copy
import json
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import drivetrain
from drivetrain.core.errors import UserError
from drivetrain.core.user.call import bound
from drivetrain.core.world import World
from drivetrain.inference.loaded import load
from tests.parallel.conftest import ranks  # noqa: F401 (fixture)
from tests.support import odd_calls
from tests.support.refusals import problems_of
from tests.support.to_end import run_to_end

WORDS = [
    "data=own", "data.validation=null", "model=own", "trust=[odd_calls]", "batch.global_batch=16", "updates=2", "log_every=1",
    "saving=none", "runtime.threads=1", "runtime.device=cpu", "data.order=sequential", "optimizer.lr=0.05",
]  # fmt: skip
VALUES = ["data.target=odd_calls.Points", "data.targets=values", "loss=own"]
RUNS_MODEL = {  # kind → the run's words
    "keywords of its own": [*VALUES, "model.target=odd_calls.Noisy", "loss.target=odd_calls.noisy"],
    "dicts taken apart": [
        *VALUES, "data.kwargs.kind=dict", "data.target_key=target", "model.target=odd_calls.Half", "loss.target=odd_calls.halves",
    ],
    "a method of the module": [*VALUES, "model.target=odd_calls.Stepping", "loss.target=odd_calls.stepping"],
    "parts alone": [*VALUES, "model.target=odd_calls.Parts", "loss.target=odd_calls.parts"],
    "remembers": [*VALUES, "model.target=odd_calls.Counts", "loss.target=odd_calls.Remembers"],
    "other weights": [*VALUES, "model.target=odd_calls.Net", "loss.target=odd_calls.elsewhere"],
    "a forward that needs gradients": [*VALUES, "model.target=odd_calls.Slope", "loss.target=odd_calls.slope"],
}  # fmt: skip
KINDS = RUNS_MODEL | {
    "a forward that differentiates": [*VALUES, "model.target=odd_calls.Energy", "loss.target=odd_calls.error"],
    "one at a time": [
        *VALUES, "model.target=odd_calls.One", "loss.target=odd_calls.error", "batch.global_batch=1",
    ],
    "ends": ["data.target=odd_calls.Texts", "model.target=odd_calls.Ends"],
    "a number": ["data.target=odd_calls.Points", "data.kwargs.kind=number", "model.target=odd_calls.Users"],
}  # fmt: skip
# What takes the example. jit traces the forward, which a run of parts alone has none of.
TAKERS = [
    "precision=bf16", "precision=amp", "precision=bf16_pure", "adapter=lora", "adapter=dora", "surgery=[no_bias_before_norm]",
    "debug=gradcheck", "compile=jit",
]  # fmt: skip


@pytest.fixture(autouse=True)
def mine(tmp_path, monkeypatch):
    """The module beside the run, where its ranks can import it too."""
    shutil.copy(odd_calls.__file__, tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    yield
    sys.modules.pop("odd_calls", None)


@pytest.fixture
def built(trainer_of: Callable[..., Any]) -> Callable[..., Any]:
    """`built(*words)`: the trainer of a run, not started."""
    from drivetrain.launch.job import prepare

    return lambda *words, **where: trainer_of(prepare([*WORDS, *words]), **where)


def losses(*words: str) -> list[float]:
    result = run_to_end([*WORDS, *words])
    lines = [json.loads(line) for line in (Path(result.run_dir) / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if line["event"] == "train"]


def refused(*words: str) -> str:
    return "\n".join(problems_of(drivetrain.train, [*WORDS, *words]))


NO_NORM = ("one at a time", "ends", "a number")  # kinds of networks without a BatchNorm


@pytest.mark.parametrize("taker", TAKERS)
@pytest.mark.parametrize("kind", KINDS)
def test_whatever_takes_the_example_can_try_the_model(built, kind, taker):
    """It is built, or refused in a sentence: no part has an example of its own, which the model could not take."""
    if kind in NO_NORM and taker.startswith("surgery"):
        with pytest.raises(UserError, match="has no effect"):
            built(*KINDS[kind], taker)
    elif taker == "compile=jit":
        try:
            built(*KINDS[kind], taker)
        except UserError as error:
            found = str(error)
            assert "compile=jit c" in found or "compile=jit has recorded" in found  # cannot trace, or compiles the forward
    else:
        built(*KINDS[kind], taker)


@pytest.mark.parametrize("kind", KINDS)
def test_such_runs_have_an_mfu_and_train_the_same(built, kind, monkeypatch):
    """Without the example, which is then zeros, the weights after some updates are the same."""
    from drivetrain.engine import first_call

    trainer = built(*KINDS[kind])
    assert trainer.log.mfu.model.per_sample > 0, trainer.log.mfu.model.reason
    trainer.fit()
    with monkeypatch.context() as patch:
        patch.setattr(first_call, "read", lambda *_: (_ for _ in ()).throw(UserError("unread")))
        patch.setattr("drivetrain.engine.build.run_once", lambda *_, **__: None)
        plain = built(*KINDS[kind])
        plain.fit()
    for (name, ours), theirs in zip(trainer.model.state_dict().items(), plain.model.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs), name


def test_operations_are_those_of_all_calls(built):
    """Of one sample: the loss that calls the network twice with half of it each takes as many as both calls."""
    twice = built(*KINDS["dicts taken apart"]).log.mfu.model.per_sample
    once = 3 * 2 * (4 * 12 + 12 * 12 + 12) - 2 * 4 * 12  # the inputs have no gradients
    assert twice == 2 * once


def test_a_batch_that_is_a_number_in_the_code_is_tried_whole(built):
    words = [*VALUES, "model.target=odd_calls.Fixed", "loss.target=odd_calls.error"]
    assert built(*words, "batch.global_batch=8").log.mfu.model.per_sample > 0
    failed = run_to_end([*WORDS, *words, "batch.global_batch=16"], ends="failed")
    assert re.search(r"odd_calls\.py:\d+.*RuntimeError: The size", str(failed.error)), failed.error
    assert not list(Path().glob("outputs/*/*/checkpoints"))


def test_what_the_loss_keeps_and_draws_is_as_before(built):
    """It is called for the example, and the first update is that of its first call all the same."""
    words = [*VALUES, "model.target=odd_calls.Net", "loss.target=odd_calls.Drawing", "updates=1"]
    trainer = built(*words)
    loss = trainer.evaluator.loss.function
    assert (loss.steps, loss.draws.initial_seed()) == (0, 3)
    assert torch.equal(loss.draws.get_state(), torch.Generator().manual_seed(3).get_state())


def test_what_model_and_loss_remember_is_as_before(built):
    """Counts, lists and copies of the model that a trial makes are no part of the training."""
    trainer = built(*KINDS["remembers"])
    trainer.evaluator.check()
    assert vars(trainer.evaluator.loss.function) == {"calls": 0, "queue": []}
    assert (trainer.model.calls, trainer.model.means, trainer.model.seen) == (0, [], None)


def test_what_was_called_is_what_a_call_takes():
    def given(*given, **keywords):
        return bound(lambda x, y=0, *, z=0: None, given, keywords)

    x = torch.ones(2)
    assert given(x) is x
    assert given(x, 1) == (x, 1) == given(x, y=1) == given(y=1, x=x)
    assert given(x, z=1) == {"x": x, "z": 1}
    with pytest.raises(TypeError):
        given(x, w=1)
    with pytest.raises(ValueError, match="zip"):
        bound(lambda *x, **more: None, (x,), {"z": 1})


@pytest.mark.parametrize("kind", RUNS_MODEL)
def test_a_finished_run_of_such_a_loss_is_loaded(kind):
    result = run_to_end([*WORDS, *KINDS[kind], "saving=last", "precision=bf16"])
    assert sum(p.numel() for p in load(result.run_dir).model.parameters()) > 100


def test_an_edit_of_a_finished_run_tries_the_call_of_its_loss():
    words = [*KINDS["keywords of its own"], "surgery=[no_bias_before_norm]", "saving=last"]
    assert load(run_to_end([*WORDS, *words]).run_dir).model.first.bias is None


@pytest.mark.parametrize(("loss", "told"), [("alike", False), ("Alike", True), ("Weighed", False), ("Told", True)])
def test_an_update_that_is_split_is_the_same_or_refused(loss, told):
    model = "Pairs" if "like" in loss else "Single"
    words = [*VALUES, f"model.target=odd_calls.{model}", f"loss.target=odd_calls.{loss}", "data.drop_last=false", "updates=4"]
    split = [*words, "batch=accumulate", "batch.accumulation_steps=4"]
    if not told:
        said = refused(*split)
        assert "loss=own is " in said
        assert "`compares_samples = True`" in said
        assert "`count`" in said
        return
    assert losses(*split) == pytest.approx(losses(*words), rel=1e-5)


@pytest.mark.parametrize("words", [
    [*VALUES, "model.target=odd_calls.Pairs", "loss.target=odd_calls.Alike"],
    [*VALUES, "model.target=odd_calls.Single", "loss.target=odd_calls.Told"],
    [*VALUES, "model.target=odd_calls.Single", "loss.target=odd_calls.elsewhere"],
], ids=["Alike", "Told", "other weights"])  # fmt: skip
def test_two_ranks_make_the_updates_of_one(built, ranks, words):  # noqa: F811
    """Also in two micro-batches each, and where an epoch's last batch is smaller."""
    words = [*words, "data.drop_last=false", "updates=4"]

    def trained(world: World) -> tuple[list[float], list[Any]]:
        split = ["batch=accumulate", "batch.accumulation_steps=2", "parallel=ddp", "parallel.nproc=2"] if world.size > 1 else []
        trainer = built(*words, *split, world=world)
        trainer.fit()
        losses = trainer.log.writers[0].losses
        return losses, [p.detach().numpy() for p in trainer.model.parameters()]

    expected, weights = trained(World())
    first, second = ranks(trained)
    assert first[0] == pytest.approx(expected, rel=1e-5)
    for one, other, of_one in zip(first[1], second[1], weights, strict=True):
        assert one.tolist() == other.tolist()
        assert one == pytest.approx(of_one, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize(
    "kind",
    [
        kind if kind == "dicts taken apart" else pytest.param(kind, marks=pytest.mark.slow)
        for kind in RUNS_MODEL
        if kind != "remembers"  # a graph holds no copies
    ],
)
def test_a_step_that_calls_the_model_is_a_graph(built, kind, recorded):
    """Recorded as compile=step does, and run as recorded: the weights are those of the plain step."""
    plain = built(*KINDS[kind])
    plain.fit()
    compiled = built(*KINDS[kind], "compile=step")
    compiled.fit()
    assert recorded or kind in ("keywords of its own",)
    for (name, ours), theirs in zip(compiled.model.state_dict().items(), plain.model.state_dict().values(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "one at a time"])
def test_losses_of_single_samples_may_be_split(built, kind):
    """Also those that draw, of which nothing can be said."""
    built(*KINDS[kind], "batch=accumulate", "batch.accumulation_steps=4")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["batch=accumulate", "batch.accumulation_steps=2", "compile=inductor"], "dropout may differ between the two"),
        (["phases={a: {parameters: [one]}, b: {parameters: [two]}}"], "it is computed from all samples at once"),
    ],
)
def test_what_a_loss_that_compares_samples_excludes_is_said(built, words, says):
    with pytest.raises(UserError, match=says):
        built(*VALUES, "model.target=odd_calls.Pairs", "loss.target=odd_calls.Alike", *words)


def test_an_evaluation_compares_groups(built):
    """They are the same on any number of ranks, and micro-batches hold whole groups."""
    trainer = built(*VALUES, "model.target=odd_calls.Pairs", "loss.target=odd_calls.Alike", "batch.global_batch=8")
    assert trainer.batch.together == 16
    data, model = odd_calls.Points(train=False), copy.deepcopy(trainer.model).eval()
    x = data.x.split(16)
    with torch.no_grad():
        by_hand = [float(odd_calls.alike(model(part), part[:, :1])) for part in x]
    assert trainer.evaluator.on("test").evaluate()["loss"] == pytest.approx(sum(by_hand) / len(by_hand), rel=1e-6)


@pytest.mark.parametrize("optimizer", ["sam", "lbfgs"])
def test_buffers_change_once_in_an_update(built, optimizer):
    """Of a closure's passes, the first is at the weights that the model has."""
    words = ["data.target=odd_calls.Points", "data.kwargs.kind=class", "model.target=odd_calls.Net", "model.kwargs.outputs=2"]
    rate = ["optimizer.lr=1"] if optimizer == "lbfgs" else []
    trainer = built(*words, f"optimizer={optimizer}", *rate, "updates=1")
    twin = copy.deepcopy(trainer.model)
    twin(odd_calls.Points().x[:16])
    trainer.fit()
    assert int(trainer.model.norm.num_batches_tracked) == 1
    for name, buffer in twin.named_buffers():
        torch.testing.assert_close(trainer.model.get_buffer(name), buffer)
