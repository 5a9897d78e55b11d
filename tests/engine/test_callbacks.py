"""The user's callbacks: what they are told, when, and what becomes of a run in which one fails."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import drivetrain
from drivetrain.config.callbacks import Told
from drivetrain.config.plugins import CALLBACKS
from drivetrain.core.errors import UserError
from drivetrain.core.user.callback import Event
from drivetrain.core.world import World
from drivetrain.engine.callbacks import CallbackStep
from drivetrain.saving import checkpoint_io
from tests.support.command import run
from tests.support.to_end import continued

HOOKS = '''
"""Somebody's callbacks."""
import os
import drivetrain

class Told(drivetrain.Callback):
    told = []

    def start(self, event): self.note("start", event)
    def update(self, event): self.note("update", event)
    def evaluation(self, event): self.note("evaluation", event)
    def save(self, event): self.note("save", event)
    def end(self, event): self.note(event.status, event)

    def note(self, name, event):
        type(self).told.append((name, event.update, sorted(event.metrics), event.model is not None))

class EveryUpdate(Told):
    told = []
    every_update = needs_model = True

    def update(self, event):
        assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in event.model.parameters())
        super().update(event)

class Logs(drivetrain.Callback):
    def update(self, event):
        event.log({"doubled": 2 * event.metrics["loss"]})

class Fails(drivetrain.Callback):
    def fail(self, event):
        raise ValueError("no such thing")

class FailsInStart(Fails):
    start = Fails.fail

class FailsInUpdate(Fails):
    def update(self, event):
        if event.update == 2:
            self.fail(event)

class FailsInEveryUpdate(FailsInUpdate):
    every_update = True

class FailsInEvaluation(Fails):
    evaluation = Fails.fail

class FailsInSave(Fails):
    save = Fails.fail

class FailsInEnd(Fails):
    end = Fails.fail

class Exits(drivetrain.Callback):
    def update(self, event):
        raise SystemExit(0)

class NoCallback:
    pass

kept = []

def keeps_samples(event):
    import torch
    before, given = torch.get_rng_state(), {}
    for weights in (None, *event.weights):
        with event.eval_model(weights) as model:
            drawn = torch.randn(4, 3, 8, 8)
            made = model(drawn)
            assert not model.training and not made.requires_grad
            given[weights] = (drawn, {name: p.clone() for name, p in model.named_parameters()})
    assert model.training and bool((torch.get_rng_state() == before).all())
    kept.append((event.weights, given))

def wants_the_average(event):
    with event.eval_model("average"):
        pass

async def later(event): pass

class WithoutEvent(drivetrain.Callback):
    def update(self): pass

class WantsMore(drivetrain.Callback):
    def __init__(self, path):
        pass

class WantsTheModel(drivetrain.Callback):
    needs_model = True
'''


@pytest.fixture
def hooks(own_module):
    """The package `hooks` of the user's."""
    own_module("hooks", HOOKS)
    sys.modules.pop("hooks", None)
    import hooks

    yield hooks
    del sys.modules["hooks"]


def given(*names: str) -> list[str]:
    return ["trust=[hooks]", f"callbacks=[{','.join(f'hooks.{name}' for name in names)}]"]


def test_a_callback_is_told_of_all_that_happens(train, hooks):
    train(*given("Told"), "updates=null", "epochs=1", "log_every=2")
    told = hooks.Told.told
    assert [(name, update) for name, update, _, _ in told] == [
        ("start", 0), ("update", 2), ("update", 4), ("evaluation", 4), ("save", 4), ("completed", 4),
    ]  # fmt: skip
    metrics = {name: metrics for name, _, metrics, _ in told}
    assert {"loss", "lr", "samples_per_second"} <= set(metrics["update"])
    assert metrics["evaluation"] == metrics["completed"] == ["accuracy", "loss"]
    assert not any(has_model for *_, has_model in told)


def test_a_class_may_ask_for_every_update_and_the_model(train, hooks):
    plain = train("updates=null", "epochs=1", "log_every=4")
    watched = train(*given("EveryUpdate"), "updates=null", "epochs=1", "log_every=4")
    updates = [update for name, update, _, has_model in hooks.EveryUpdate.told if name == "update" and has_model]
    assert updates == [1, 2, 3, 4]
    assert plain.metrics == watched.metrics


def test_a_function_gets_the_model_where_it_names_it():
    told = []
    event, model = Event(Path(), {}, 1, 1, 1, {}, {}), torch.nn.ReLU()
    for function in (lambda model: told.append(model), lambda said: told.append(said)):
        called = Told.of("callbacks=[f]", {"evaluation": function}, drivetrain.Callback)
        called.tell("update", event, model)
        called.tell("evaluation", event, model)
    assert told == [model, event]


def test_a_function_is_handed_the_weights_that_are_evaluated(train, hooks):
    result = train(
        "epochs=3",
        "updates=null",
        "ema=ema",
        "ema.decay=0.5",
        "ema.warmup=false",
        "callbacks=[hooks.keeps_samples]",
        "trust=[hooks]",
    )
    assert len(hooks.kept) == 3
    draws = [drawn for _, given in hooks.kept for drawn, _ in given.values()]
    assert all(torch.equal(draws[0], other) for other in draws)  # of each weights, in each evaluation
    for weights, given in hooks.kept:
        assert weights == ("plain", "average")
        (_, default), (_, plain), (_, average) = given.values()
        assert all(torch.equal(default[name], average[name]) for name in plain)  # the average, where there is one
        assert not any(torch.equal(plain[name], average[name]) for name in plain)
    saved, state = checkpoint_io.load(result.run_dir / "checkpoints" / str(result.updates))
    assert all(torch.equal(plain[name], saved[name]) for name in plain)
    assert all(torch.equal(average[name], state["ema"]["tensors"][name]) for name in plain)


def test_weights_that_are_not_evaluated_are_refused(train, hooks):
    result = train("callbacks=[hooks.wants_the_average]", "trust=[hooks]", ends="failed")
    assert "callbacks=[hooks.wants_the_average] failed in evaluation" in result.error
    assert "eval_model('average'): this run evaluates the weights plain (see ema)" in result.error


def test_one_rank_cannot_use_weights_that_take_all(make, monkeypatch):
    trainer = make("ema=swa")
    trainer.ema.stale = True  # the statistics of its norms are those of another average
    monkeypatch.setattr(trainer.parallel, "world", World(0, 2))
    with trainer.evaluator.holding("plain"):
        pass
    with pytest.raises(UserError, match="all ranks complete this average when they evaluate it"), trainer.evaluator.holding():
        pass
    monkeypatch.setattr(trainer.parallel, "lockstep_evaluation", True)
    with pytest.raises(UserError, match="set parallel=ddp"), trainer.evaluator.holding("plain"):
        pass


def test_without_callbacks_the_step_is_not_wrapped(make, hooks):
    assert type(make(*given("Told")).step) is type(make().step)
    assert type(make(*given("EveryUpdate")).step) is not type(make().step)


def test_a_callback_logs_figures_of_its_own(train, hooks):
    run_dir = train(*given("Logs")).run_dir
    records = list(map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines()))
    doubled = [r["doubled"] for r in records if r["event"] == "callback"]
    assert doubled == [2 * r["loss"] for r in records if r["event"] == "train"]
    assert len(doubled) == 2


def test_a_resumed_run_keeps_its_callbacks(train, hooks):
    run_dir = train(*given("Told")).run_dir
    assert "callbacks" not in (run_dir / "recipe.yaml").read_text()
    hooks.Told.told.clear()
    assert drivetrain.train([f"resume={run_dir}", "updates=3"]).status == "completed"
    assert [(name, update) for name, update, *_ in hooks.Told.told][:2] == [("start", 2), ("update", 3)]


@pytest.mark.parametrize(
    ("name", "event", "saved"),
    [
        ("FailsInUpdate", "update, after update 2", 3),  # a log point comes after the ranks have agreed: one more update
        ("FailsInEveryUpdate", "update, after update 2", 2),
        ("FailsInEvaluation", "evaluation, after update 4", 5),
        ("FailsInSave", "save, after update 4", 5),
        ("FailsInEnd", "end, after update 8", 8),
    ],
)
def test_an_exception_is_named_and_the_run_is_saved(train, hooks, name, event, saved):
    result = train(*given(name), "updates=8", "epochs=2", ends="failed")
    assert f"callbacks=[hooks.{name}] failed in {event}: ValueError: no such thing" in result.error
    assert f"go on with resume={result.run_dir}" in result.error
    assert max(int(p.name) for p in (result.run_dir / "checkpoints").iterdir() if p.name.isdigit()) == saved
    assert "raise ValueError" in (result.run_dir / "log.txt").read_text()
    continued(result.run_dir, "callbacks=[]", updates=8)


@pytest.mark.parametrize(("name", "event", "updates"), [("Exits", "update", 2), ("FailsInStart", "start", 0)])
def test_a_callback_cannot_end_a_run_as_a_success_and_costs_nothing_before_training(train, hooks, name, event, updates):
    result = train(*given(name), updates=updates, ends="failed")
    assert f"callbacks=[hooks.{name}] failed in {event}" in result.error


def test_on_two_ranks_one_is_told_and_all_end_where_it_fails(tiny, hooks, tmp_path):
    words = tiny(*given("FailsInUpdate"), "updates=8", "parallel=ddp", "parallel.nproc=2")
    done = run("train", "-q", *words, cwd=tmp_path)
    assert done.code == 1, done
    assert "callbacks=[hooks.FailsInUpdate] failed in update, after update 2: ValueError: no such thing" in done.err
    # The flag takes an update.
    assert [p.name for p in Path(tmp_path).glob("outputs/*/*/checkpoints/*") if p.name.isdigit()] == ["4"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["callbacks=[hooks.Told]"], "set trust=[hooks] on the command line"),
        (["callbacks=[watch]"], "callbacks=[watch] is no dotted name"),
        (given("Missing"), "callbacks=[hooks.Missing] cannot be imported: AttributeError"),
        (given("NoCallback"), "derive your class from drivetrain.Callback"),
        (given("later"), "callbacks=[hooks.later] is async, and nobody waits for it"),
        (given("WithoutEvent"), "callbacks=[hooks.WithoutEvent] cannot be called as (event): its parameters are ()"),
        (given("WantsMore"), "callbacks=[hooks.WantsMore] cannot be made: TypeError"),
        ([*given("WantsTheModel"), "parallel=fsdp", "parallel.nproc=2"], "needs the model"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_begins(problems, hooks, words, says):
    assert any(says in problem for problem in problems(*words))


def test_a_recipe_names_no_callbacks(tmp_path, problems):
    (tmp_path / "mine.yaml").write_text("defaults: []\ncallbacks: [os.system]\n")
    assert any("a recipe cannot set 'callbacks'" in problem for problem in problems("recipe=mine.yaml"))


def test_a_plugin_registers_a_callback_by_name(train, hooks, monkeypatch):
    from importlib.metadata import EntryPoint

    from drivetrain.config import plugins

    entry = EntryPoint("told", "hooks:Told", CALLBACKS)
    monkeypatch.setattr(plugins, "_installed", lambda path: (entry,))
    train("callbacks=[told]")
    assert hooks.Told.told


def test_a_skipped_update_is_not_told():
    made, told = [True, False, True], []
    inner = SimpleNamespace(update=lambda: made.pop(0), zero_grad=lambda: None)
    step = CallbackStep(inner, lambda: told.append(len(made)))
    for _ in range(3):
        step.update()
        step.zero_grad()
    assert told == [2, 0]
