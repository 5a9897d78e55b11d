"""Optimizers that run an update's forward and backward themselves: L-BFGS and SAM against loops by hand."""

import copy
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch.nn.functional import cross_entropy

import drivetrain
from drivetrain.core.errors import UserError
from drivetrain.optimizer import Sam
from tests.support.command import checkpoints

OPTIONS = {
    "lbfgs": ["optimizer=lbfgs", "optimizer.lr=0.5", "optimizer.max_iter=4"],
    "lbfgs, steps": ["optimizer=lbfgs", "optimizer.lr=0.1", "optimizer.line_search_fn=null", "optimizer.max_iter=3"],
    "sam": ["optimizer=sam", "optimizer.lr=0.1", "optimizer.rho=0.1"],
    "sam, adaptive": ["optimizer=sam", "optimizer.lr=0.1", "optimizer.rho=1.0", "optimizer.adaptive=true", "clip=norm"],
}
LINEAR = ["model=mlp", "model.hidden=[8]", "scheduler=constant", "updates=4", "epochs=4"]


def by_hand(model, name, batches):
    """The loop that torch's documentation, and the paper's authors, show; yields the loss of each update."""
    if name.startswith("lbfgs"):
        steps = name == "lbfgs, steps"
        lr, most, search = (0.1, 3, None) if steps else (0.5, 4, "strong_wolfe")
        optimizer = torch.optim.LBFGS(model.parameters(), lr, max_iter=most, history_size=10, line_search_fn=search)
        for batch in batches:

            def closure(batch=batch):
                optimizer.zero_grad()
                loss = cross_entropy(model(batch.x), batch.y)
                loss.backward()
                return loss

            yield optimizer.step(closure).item()
        return
    adaptive = name == "sam, adaptive"
    groups = [{"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 5e-4},
              {"params": [p for p in model.parameters() if p.ndim <= 1], "weight_decay": 0.0}]  # fmt: skip
    optimizer = torch.optim.SGD(groups, 0.1, momentum=0.9, nesterov=True)
    for batch in batches:
        loss = cross_entropy(model(batch.x), batch.y)
        loss.backward()
        if adaptive:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        weights = [p.detach().clone() for p in model.parameters()]
        around = [p.abs() if adaptive else torch.ones_like(p) for p in weights]
        norm = torch.stack([(a * p.grad).norm() for a, p in zip(around, model.parameters(), strict=True)]).norm()
        with torch.no_grad():
            for a, p in zip(around, model.parameters(), strict=True):
                p.add_(a.square() * p.grad * (1.0 if adaptive else 0.1) / (norm + 1e-12))
        optimizer.zero_grad()
        cross_entropy(model(batch.x), batch.y).backward()
        if adaptive:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        with torch.no_grad():
            for p, w in zip(model.parameters(), weights, strict=True):
                p.copy_(w)
        optimizer.step()
        optimizer.zero_grad()
        yield loss.item()


@pytest.mark.parametrize("name", OPTIONS)
def test_a_run_is_the_loop_by_hand(make, name):
    trainer = make(*LINEAR, *OPTIONS[name], "log_every=1")
    model = copy.deepcopy(trainer.model)
    stream = trainer.loader.stream(trainer.train_data, trainer.requests(), trainer.device, trainer.memory_format)
    losses = list(by_hand(model, name, (batch for batch, _ in zip(stream, range(4), strict=False))))
    trainer.fit()
    assert [r["loss"] for r in trainer.log.writers[0] if r["event"] == "train"] == pytest.approx(losses, abs=1e-6)
    for ours, theirs in zip(trainer.model.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


def weights(result):
    assert result.status == "completed", result.error
    return safetensors.torch.load_file(checkpoints(Path(result.run_dir))[-1] / "model.safetensors")


@pytest.mark.parametrize("name", ["lbfgs", "sam"])
@pytest.mark.parametrize(
    "words",
    [["batch=accumulate", "batch.accumulation_steps=3"], ["parallel=ddp", "parallel.nproc=2"], ["loss.class_weights=[1,2,1,2]"]],
    ids=lambda words: words[0],
)
def test_its_runs_are_the_same_however_an_update_is_split(train, name, words):
    given = [*LINEAR, *OPTIONS[name], *(words if "loss" in words[0] else [])]
    split = words if "loss" not in words[0] else ["batch=accumulate", "batch.accumulation_steps=3"]
    one, other = weights(train(*given)), weights(train(*given, *split))
    for key, value in one.items():
        torch.testing.assert_close(other[key], value, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", ["lbfgs", "sam"])
def test_each_run_draws_alike_and_a_resume_goes_on(train, name):
    """With dropout a line search would compare different losses, were each of its forwards to draw anew."""
    given = [*LINEAR, *OPTIONS[name], "model.dropout=0.5", "saving=last", "evaluate_every=1", "updates=null"]
    whole, half = train(*given, "epochs=2"), train(*given, "epochs=1")
    rest = drivetrain.train([f"resume={half.run_dir}", "epochs=2"])
    one, two = weights(whole), weights(rest)
    assert all(torch.equal(value, two[key]) for key, value in one.items())


@pytest.mark.parametrize("words", [["precision=amp"], ["compile=step"], ["parallel=fsdp"], ["batch=auto"]], ids=lambda w: w[0])
def test_what_cannot_run_again_is_refused(problems, words):
    said = problems("optimizer=lbfgs", *words)
    assert any("optimizer=lbfgs and" in p and "several times" in p for p in said), said


def test_an_option_whose_optimizer_wants_a_closure_has_to_say_so():
    option = type("Silent", (Sam,), {"takes_closure": False})()
    with pytest.raises(UserError, match="Sam makes its update by a closure: set takes_closure = True in Silent"):
        option.create(torch.nn.Linear(2, 2))


def test_lbfgs_has_no_decay(problems):
    assert any("set optimizer.weight_decay=0" in p for p in problems("optimizer=lbfgs", "optimizer.weight_decay=0.1"))
