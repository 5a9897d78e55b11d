"""Frozen parameters: what trains, and from which update on; norms that keep their statistics; with what it is refused."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import drivetrain
from drivetrain.config.catalog import options
from drivetrain.core.errors import UserError
from drivetrain.core.options.horizon import Horizon
from drivetrain.core.step.modules import keep_in_evaluation
from drivetrain.model.freezing import Schedule
from tests.support.refusals import problems_of

RESNET = ["data.shape=[1,8,8]", "model=resnet9", "model.width=4"]
STAGES = ["model.hidden=[5,5]", "model.freeze=[*]", "model.unfreeze={head: 0, layers.1: 2, layers.0.linear.bias: 3}"]


def copied(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: t.clone() for name, t in model.state_dict().items()}


def changed(before: dict[str, torch.Tensor], model: nn.Module) -> set[str]:
    return {name for name, t in model.state_dict().items() if not torch.equal(t, before[name])}


def trained(*names: str) -> set[str]:
    return {f"{name}.{kind}" for name in names for kind in ("weight", "bias")}


# --- what trains ---


def test_frozen_parameters_and_their_norms_do_not_change(make):
    trainer = make(
        *RESNET, "optimizer.weight_decay=0.1", "model.freeze=['features.[01]', 'features.3', '*.body.1.1.weight', head.bias]"
    )
    before = copied(trainer.model)
    trainer.fit()
    same = before.keys() - changed(before, trainer.model)
    frozen = {name for name in before if name.startswith(("features.0.", "features.1.", "features.3."))}
    assert same == frozen | {"features.8.body.1.1.weight", "head.bias"}
    norms = {n: m for n, m in trainer.model.train().named_modules() if isinstance(m, nn.BatchNorm2d)}
    # features.8.body.1.1 has a bias that trains, so its statistics do too.
    assert {n for n, m in norms.items() if not m.training} == {n for n in norms if f"{n}.weight" in frozen}
    assert not trainer.model.eval().training
    assert trainer.model.train().training


def test_freezing_equals_a_loop_by_hand(make, float64):
    """Frozen norms in evaluation mode, no gradient for frozen weights: as in a loop of torch."""
    trainer = make(
        *RESNET, "model.freeze=[features.0, features.1]", "optimizer.nesterov=false", "optimizer.weight_decay=0.0", "updates=3"
    )
    model = copy.deepcopy(trainer.model)
    batches = list(trainer.read())[:3]
    trainer.fit()
    body = [model.features[0], model.features[1]]
    for part in body:
        part.requires_grad_(False)
    optimizer = torch.optim.SGD(
        [p for p in model.parameters() if p.requires_grad], lr=0.05, momentum=trainer.optimizer.defaults["momentum"]
    )
    for batch in batches:
        model.train()
        for part in body:
            part.eval()
        optimizer.zero_grad()
        cross_entropy(model(batch.x), batch.y).backward()
        optimizer.step()
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(trainer.model.state_dict()[name], tensor, rtol=1e-9, atol=1e-12)


def test_the_backward_stops_at_frozen_layers(make):
    """So freezing also saves time and memory: the count of operations shows it."""
    costs = [make(*RESNET, *words).log.mfu.model.per_sample for words in ([], ["model.freeze=[features]"])]
    assert costs[1] < 0.4 * costs[0]


def test_optimizer_and_average_leave_frozen_parameters_alone(make):
    trainer = make("ema=ema", "ema.decay=0.5", "optimizer=adamw", "optimizer.weight_decay=0.5", "model.freeze=[layers]")
    assert [n for group in trainer.optimizer.param_groups for n in group["param_names"]] == ["head.weight", "head.bias"]
    before = copied(trainer.model)
    trainer.fit()
    assert changed(before, trainer.model) == trained("head")
    with trainer.ema.swapped():
        assert changed(before, trainer.model) == trained("head")


@pytest.mark.parametrize("precision", ["amp", "bf16", "bf16_pure"])
def test_in_every_precision(make, precision):
    trainer = make(*RESNET, f"precision={precision}", "model.freeze=[features]", "model.unfreeze={features.8: 1}")
    before = copied(trainer.model)
    trainer.fit()
    after = changed(before, trainer.model)
    assert {name.partition(".body")[0].rpartition(".")[0] or name for name in after} >= {"head"}
    assert {name for name in after if not name.startswith(("features.8.", "head."))} == set()
    assert any(name.startswith("features.8.") for name in after)


# --- from which update on ---


def test_the_schedule_is_a_function_of_the_names_and_the_run():
    horizon = Horizon(40, range(10, 41, 10))
    names = ["a.weight", "a.bias", "b.weight", "c"]
    schedule = Schedule(names, ["a", "b.*"], {"a.*": "1.5ep", "a.bias": 0.1, "b": 7}, horizon)
    assert {name: schedule.start(name) for name in names} == {"a.weight": 15, "a.bias": 4, "b.weight": 7, "c": 0}
    assert Schedule(names, ["*"], {"c": 0}, horizon).start("b.weight") == float("inf")
    error = problems_of(Schedule, names, ["d", "a"], {"b": 1}, horizon)
    assert len(error) == 1
    assert "model.freeze: 'd' matches no parameter of the model" in error[0]
    with pytest.raises(UserError, match=r"model.unfreeze: 'b' matches no parameter that model.freeze freezes"):
        Schedule(names, ["a"], {"b": 1}, horizon)


def test_parameters_begin_to_train_at_their_update(make, each_update):
    trainer = make(*STAGES, "updates=5", "epochs=2")
    before = [copied(trainer.model)]

    def look() -> set[str]:
        found = changed(before[-1], trainer.model)
        before.append(copied(trainer.model))
        return found

    seen = each_update(trainer, look)
    trainer.fit()
    first, second = trained("head"), trained("head", "layers.1.linear")
    assert seen == [first, first, second, *[second | {"layers.0.linear.bias"}] * 2]


def test_norms_follow_their_parameters(make, each_update):
    trainer = make(*RESNET, "model.freeze=[features]", "model.unfreeze={features.8.body.1: 1}", "updates=3")
    norms = {name: m for name, m in trainer.model.named_modules() if isinstance(m, nn.BatchNorm2d)}
    seen = each_update(
        trainer, lambda: ({n for n, m in norms.items() if m.training}, norms["features.8.body.1.1"].running_mean.clone())
    )
    start = norms["features.8.body.1.1"].running_mean.clone()
    trainer.fit()
    assert [names for names, _ in seen] == [set(), {"features.8.body.1.1"}, {"features.8.body.1.1"}]
    assert [torch.equal(mean, start) for _, mean in seen] == [True, False, False]


def test_what_stays_in_evaluation_is_of_its_own_class_and_can_be_copied_and_pickled():
    kept = nn.Sequential(nn.BatchNorm1d(2))
    keep_in_evaluation(kept[0])
    every = kept, copy.deepcopy(kept), pickle.loads(pickle.dumps(kept))
    for one in every:
        one.train()
        assert type(one[0]) is nn.BatchNorm1d
        assert one.training
        assert not one[0].training
    keep_in_evaluation(kept[0], False)
    assert kept[0].training
    assert not kept.eval()[0].training
    assert kept.train()[0].training
    assert not every[1][0].training


class Backbone(nn.Module):
    """Its parts: frozen and in evaluation, frozen, in evaluation, and a norm within what trains."""

    def __init__(self, classes=10):
        super().__init__()
        self.still = nn.Sequential(nn.Flatten(), nn.Linear(192, 8), nn.BatchNorm1d(8), nn.Dropout(0.5))
        self.frozen, self.waits = nn.BatchNorm1d(8), nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5))
        self.norm, self.head = nn.BatchNorm1d(8), nn.Linear(8, classes)
        self.still.requires_grad_(False).eval()
        self.frozen.requires_grad_(False)
        self.waits.eval()
        self.waits[0].requires_grad_(True)
        self.norm.requires_grad_(False).eval()

    def forward(self, x):
        return self.head(self.norm(self.waits(self.frozen(self.still(x)))))


def test_what_a_model_has_frozen_and_put_into_evaluation_stays_there(fitted, caplog):
    """What it froze alone, or put into evaluation alone as transformers' from_pretrained does, trains as in a loop by hand."""
    caplog.set_level("INFO", "drivetrain")
    trainer = fitted("model=own", "model.target=tests.model.test_freezing.Backbone", "trust=[tests]", "updates=2")
    trainer.model.train()
    assert {n for n, m in trainer.model.named_modules() if m.training} == {"", "frozen", "waits", "waits.0", "waits.1", "head"}
    counts = {n: int(m.num_batches_tracked) for n, m in trainer.model.named_modules() if isinstance(m, nn.BatchNorm1d)}
    assert counts == {"still.2": 0, "frozen": 2, "norm": 0}
    assert "still stays in evaluation mode: the model has frozen it and put it there" in caplog.text
    assert "norm stays in evaluation mode" in caplog.text


def test_a_resume_cannot_train_what_the_run_had_frozen(train):
    first = train("model.freeze=[layers.0]", "saving=last")
    resumed = drivetrain.train([f"resume={first.run_dir}", "resume_changed=true", "model.freeze=[]", "updates=3"])
    assert "no optimizer state of layers.0.linear.weight" in resumed.error
    assert "model.weights=" in resumed.error


OPTIMIZERS = [name for name in options()["optimizer"] if not name.startswith("apex")]
SHORT = {"adamw", "muon", "schedulefree", "sgd"}  # of each kind of state one


@pytest.mark.parametrize("optimizer", [pytest.param(o, marks=[] if o in SHORT else pytest.mark.slow) for o in OPTIMIZERS])
def test_every_optimizer_takes_parameters_that_begin_later(make, optimizer):
    if optimizer == "adamw8bit":
        pytest.importorskip("torchao")
    hidden = "model.hidden=[5,5,5]"
    trainer = make(
        f"optimizer={optimizer}",
        "optimizer.lr=0.01",
        hidden,
        "model.freeze=[layers.1, layers.0]",
        "model.unfreeze={layers.1: 2}",
        "updates=4",
    )
    before = copied(trainer.model)
    stream = trainer.read()
    late = []
    for batch in stream:
        trainer.step.micro_batch(batch, trainer.log.loss_sum)
        assert trainer.step.update()
        trainer.step.zero_grad()
        trainer.progress.updates += 1
        late.append(changed(before, trainer.model) & trained("layers.1.linear"))
    assert late[:2] == [set(), set()]
    assert late[3] == trained("layers.1.linear")
    assert changed(before, trainer.model) == trained("layers.1.linear", "layers.2.linear", "head")


# --- words for what cannot be ---


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["model.freeze=[*]"], "model.freeze freezes every parameter of the model, so that nothing trains at the start"),
        (["model.freeze=[*]", "model.unfreeze={head: 1}"], "so that nothing trains at the start"),
        (["model.freeze=[layer]"], "model.freeze: 'layer' matches no parameter of the model: did you mean"),
        (["model.freeze=[layers]", "model.unfreeze={head: 1}"], "matches no parameter that model.freeze freezes"),
    ],
)
def test_what_does_not_fit_the_model_is_one_line(make, words, says):
    with pytest.raises(UserError) as error:
        make(*words)
    assert len(error.value.problems) == 1
    assert says in str(error.value)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["model.unfreeze={head: 1}"], "none is frozen: set model.freeze too"),
        (["model.freeze=[layers]", "model.unfreeze={layers: soon}"], "model.unfreeze.layers=soon is no length"),
        (["model.freeze=[layers]", "model.unfreeze={layers: true}"], "model.unfreeze: layers=True: give the length"),
        (["parallel=fsdp"], "model.unfreeze and parallel=fsdp exclude each other"),
        (["parallel=pipeline"], "model.unfreeze and parallel=pipeline exclude each other"),
        (["parallel=ddp"], "set parallel.find_unused_parameters=true"),
        (["compile=step"], "model.unfreeze and compile=step exclude each other"),
        (["compile=jit"], "model.unfreeze and compile=jit exclude each other"),
    ],
)
def test_what_excludes_gradual_unfreezing_says_what_to_set(problems, words, says):
    both = [] if words[0].startswith("model.") else ["model.freeze=[layers]", "model.unfreeze={layers: 1}"]
    assert any(says in problem for problem in problems(*both, *words))


def test_a_learning_rate_of_0_means_to_freeze(problems):
    assert any("set model.freeze=[head]" in problem for problem in problems("optimizer.lr_multipliers={head: 0}"))


def test_a_start_beyond_the_run_is_logged(logged):
    lines = logged("model.freeze=[layers]", "model.unfreeze={layers: 9}")
    assert "layers trains after update 9 (model.unfreeze=9), which this run does not reach" in lines
    assert any(line.startswith("115,200 of 116,228 parameters are frozen") for line in lines)
