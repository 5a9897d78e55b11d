"""How many launches an update is, counted at the operations, and that several in one launch are the same updates."""

import numpy as np
import pytest
import torch

from drivetrain.core.errors import UserError
from drivetrain.launch.job import prepare
from tests.support.launches import Launches
from tests.support.sets import cifar

DEEP = ["model=mlp", "model.hidden=[8,8,8,8]", "batch.global_batch=4", "data.samples=48", "epochs=4", "evaluate_every=9"]
LONG = [*DEEP, "log_every=1000", "saving=none", "updates=30"]
IMAGES = ["data=digits", "augment=[flip_crop]", "model=resnet9", "model.width=4", "surgery=[channels_last]", "epochs=9"]
STEP = ["compile=step"]


@pytest.fixture
def count(make, trainer_of, monkeypatch):
    """`count(*words)`: the operations of each update of a run, and its trainer."""

    def counted(*words, settings=()):
        launches = Launches()
        launches.simulate(monkeypatch)
        trainer = trainer_of(prepare(list(words))) if words[0].startswith("recipe=") else make(*words)
        for name, value in dict(settings).items():
            setattr(trainer.compiler._step, name, value)
        trainer.stream_watchers.append(launches.watch)
        with launches:
            trainer.fit()
        return launches.updates, trainer

    return counted


@pytest.fixture(autouse=True)
def as_recorded(monkeypatch):
    """The step's graphs run as they were recorded: inductor's own work is left out."""
    import torch._inductor

    monkeypatch.setattr(torch._inductor, "compile", lambda graph, inputs, options=None: graph)


def usual(updates):
    """The operations of an update that is like most: neither the first ones nor one at an epoch's end."""
    return sorted(updates[13:-1], key=lambda each: sum(each.values()))[len(updates[13:-1]) // 2]


@pytest.mark.parametrize(
    ("words", "most"),
    [
        ([], 60),
        (["precision=amp"], 80),
        (["precision=amp", "ema=ema", "clip=norm"], 100),
        (STEP, 1),
        ([*STEP, "precision=amp"], 1),
        ([*STEP, "precision=amp", "ema=ema"], 2),
        ([*STEP, "scheduler=cosine"], 2),
        ([*STEP, "scheduler=cosine", "optimizer=adamw", "clip=norm"], 2),
        ([*STEP, "batch=accumulate", "batch.accumulation_steps=2"], 2),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_an_update_is_so_many_launches(count, words, most):
    updates, _ = count(*LONG, *words)
    of_one = usual(updates)
    assert 0 < sum(of_one.values()) <= most, of_one


def test_the_speed_run_of_cifar10_is_two_launches_an_update(count, tmp_path):
    """Its rate moves at each update; with eager updates in float16 it was 98 operations, of eight convolutions."""
    cifar(tmp_path / "cifar", np.random.default_rng(0))
    words = ["recipe=cifar10_fast", f"data.root={tmp_path / 'cifar'}", "model.width=4", "batch.global_batch=2", "epochs=2"]
    words += ["saving=none", "log_every=1000", "evaluate_every=9"]
    updates, _ = count(*words)
    assert sum(usual(updates).values()) == 2
    updates, _ = count(*words, "compile=none", "precision=amp", "updates=24")
    assert sum(usual(updates).values()) > 90


def ends(trainer):
    """All that the updates have moved, and the records."""
    state = [p.detach().clone() for p in (*trainer.model.parameters(), *trainer.model.buffers())]
    moments = [t.clone() for of in trainer.optimizer.state.values() for t in of.values()]
    records = [{k: r.get(k) for k in ("event", "update", "epoch", "loss", "lr")} for r in trainer.log.writers[0]]
    saved = sorted(int(each.name) for each in (trainer.run_dir / "checkpoints").glob("*"))
    return torch.cat([t.double().flatten() for t in (*state, *moments)]), records, saved


@pytest.mark.parametrize("more", [[], ["batch=accumulate", "batch.accumulation_steps=2"]], ids=["", "accumulated"])
def test_updates_that_are_replayed_together_are_those_of_one_by_one(count, more):
    """Also where an epoch, a record or a checkpoint is due between two of them, and where they are too few."""
    words = [*DEEP, *STEP, *more, "scheduler=cosine", "optimizer=adamw", "updates=33", "log_every=7"]
    words += ["saving.every_updates=5", "saving.keep=99"]
    _, alone = count(*words)
    updates, together = count(*words, settings={"_together": 3})
    assert torch.equal(ends(alone)[0], ends(together)[0])
    assert ends(alone)[1:] == ends(together)[1:]
    assert ends(alone)[2][:3] == [5, 10, 12]
    assert len(together.timer.steps) == 33
    updates, _ = count(*LONG, *more, *STEP, "scheduler=cosine", settings={"_together": 3})
    replays = [each["replay"] for each in updates[13:25]]
    assert sum(replays) == len(replays) / 3
    launches = sorted(sum(each.values()) for each in updates[13:25])
    assert launches[:-3] == [0] * 7 + [2] * 2, "rates and graph; the last ones fetch an epoch, take it, and write a record"


def test_a_graph_gathers_images_in_their_order_of_memory(count, fitted):
    """As the loader hands them over one by one."""
    words = [*IMAGES, "compile=step", "loader=resident", "updates=9", "batch.global_batch=16", "saving=none", "log_every=99"]
    plain = fitted(*words)
    updates, graph = count(*words, settings={"_together": 2})
    assert torch.equal(ends(plain)[0], ends(graph)[0])
    assert sum(each["replay"] for each in updates) == 2  # of nine: eager, recorded, alone, two loading kernels, 2 × 2 replayed


def test_what_wants_each_update_is_refused(problems, make):
    several = ["compile=step", "compile.updates_per_replay=4"]
    for words, why in (
        (["loader=threads", "data=digits"], "loader=threads brings each batch by itself"),
        (["precision=amp"], "precision=amp decides at each update"),
        (["ema=ema"], "ema=ema averages the weights of each update"),
        (["compile.cudagraph=false"], "compile.cudagraph=false replays nothing"),
        (["runtime.device=cpu"], "the device is of type cpu"),
    ):
        assert any(why in line and "set it to 1" in line for line in problems(*several, *words)), words
    trainer = make("compile=step")
    trainer.compiler.updates_per_replay = 4
    assert trainer.compiler.checked(trainer.compiler._step) is trainer.compiler._step
    with pytest.raises(UserError, match="PlainStep needs each update separately"):
        trainer.compiler.checked(trainer.compiler._step.inner)
