"""Saving and going on: whole or not there, verified, and bit for bit what the uninterrupted run comes to."""

import random
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from bench import faults

import drivetrain
from drivetrain.core.errors import CannotSave
from drivetrain.core.step import streams
from drivetrain.engine.trainer import Trainer
from drivetrain.launch import launcher
from drivetrain.saving import checkpoint_io, manifest, sharded_checkpoint
from tests.batch.test_batch import GPT
from tests.conftest import TINY
from tests.core.test_rng import draws
from tests.model.test_freezing import STAGES
from tests.precision.test_options import ALL as PRECISIONS
from tests.precision.test_options import PURE
from tests.support import drawing_sets
from tests.support.command import everything, records
from tests.support.refusals import problems_of
from tests.support.same_end import differences, saved
from tests.support.to_end import continued

LENGTH = ["data.samples=53", "data.drop_last=false", "updates=null", "epochs=2"]  # 5 updates an epoch
RUNS = {
    "plain": [],
    "dropout": ["model.dropout=0.5"],
    "adamw, cosine": ["optimizer=adamw", "scheduler=cosine", "scheduler.warmup=3"],
    "accumulated, clipped": ["batch=accumulate", "batch.accumulation_steps=3", "clip=norm", "clip.max_norm=0.1"],
    "augmented, batch norm, average": [
        "model=resnet9", "model.width=4", "augment=[flip_crop]", "ema=ema", "surgery=[channels_last]", "optimizer=adamw",
    ],
    "overflows": ["precision=amp", f"precision.init_scale={2.0**19}", "precision.growth_interval=2", "optimizer=adamw"],
    "bf16, recomputed dropout": ["precision=bf16", "checkpointing=blocks", "model.dropout=0.3"],
    "workers": ["data=digits", "loader=workers", "augment=[flip_crop]", "batch.global_batch=230"],
    "samples and a model that draw": [
        "data=own", "data.target=drawing_sets.All", "data.validation=null", "data.drop_last=false", "loader=workers",
        "loader.num_workers=1", "model=own", "model.target=drawing_sets.Net", "model.kwargs={noise: 0.1}", "trust=[drawing_sets]",
    ],
    "mean of the last weights": ["ema=swa", "ema.every=1", "ema.start=0.5", "model.dropout=0.2"],
    "stored averages": ["ema=post_hoc", "ema.snapshots=4"],
    "own parts with a state": [
        "data=own", "data.target=stateful_parts.Curriculum", "data.validation=null",
        "data.drop_last=false", "model=own", "model.target=drawing_sets.Net", "loss=own", "loss.target=stateful_parts.Holder",
        "metrics=[own]", "metrics.own.target=stateful_metric.Evaluations",
        "trust=[drawing_sets,stateful_parts,stateful_metric]",
    ],
}  # fmt: skip


def newest(run_dir: Path) -> Path:
    found, complaints = manifest.newest_valid(run_dir)
    assert found is not None
    assert not complaints
    return found


NORMAL = (
    "accumulated, clipped",
    "augmented, batch norm, average",
    "overflows",
    "samples and a model that draw",
    "mean of the last weights",
    "stored averages",
    "own parts with a state",
)


@pytest.mark.parametrize("name", [n if n in NORMAL else pytest.param(n, marks=pytest.mark.slow) for n in RUNS])
def test_a_stopped_and_resumed_run_is_the_uninterrupted_one(train, stop_at, name, monkeypatch):
    monkeypatch.syspath_prepend(Path(drawing_sets.__file__).parent)
    words = [w for w in LENGTH if not (w.startswith("data.") and any(own.startswith("data=") for own in RUNS[name]))] + RUNS[name]
    whole = train(*words)
    told = [records(whole.run_dir, event) for event in ("train", "evaluate")]
    assert sum(map(len, told)) == 12 + (name == "workers")  # digits have a validation set, and the test set at the end
    assert (told[0][-1]["skipped"] > 0) == (name == "overflows")
    go_on = partial(train, *words)
    for step in (3, 5, 7):  # within an epoch, at its end, within the second
        stop_at(step)
        stopped = go_on(ends="interrupted")
        go_on = partial(continued, stopped.run_dir)
        assert "resume=" in stopped.error
        assert stopped.epochs == step / 5
    stop_at(None)
    resumed = go_on(updates=whole.updates)
    assert resumed.run_dir == stopped.run_dir
    assert differences(resumed.run_dir, whole.run_dir) == []
    averages = [{file.name: file.read_bytes() for file in r.run_dir.glob("averages/*")} for r in (whole, resumed)]
    assert averages[0] == averages[1]
    assert bool(averages[0]) == (name == "stored averages")
    noise = ([r.get("noise_scale") for r in records(run.run_dir, "train")] for run in (whole, resumed))
    assert next(noise) == next(noise)


def test_the_log_falls_on_the_same_updates_after_a_resume(train, stop_at):
    words = ["data.samples=240", "updates=null", "epochs=1", "log_every=5"]
    whole = train(*words)
    stop_at(7)
    stopped = train(*words, ends="interrupted")
    stop_at(None)
    continued(stopped.run_dir)
    a, b = ({r["update"]: r["loss"] for r in records(run.run_dir, "train")} for run in (whole, stopped))
    assert list(a) == [5, 10, 15, 20]
    assert list(b) == [5, 7, 10, 15, 20]  # 7: what was done when it stopped
    assert {u: b[u] for u in (5, 15, 20)} == {u: a[u] for u in (5, 15, 20)}


DORA = ["model.hidden=[16,16]", "adapter=dora", "ema=ema", "optimizer=adamw"]
EVERYTHING = ["optimizer=adamw", "optimizer.lr=0.01", "model.dropout=0.1", "ema=ema", "clip=norm", "batch=accumulate",
              "batch.accumulation_steps=2"]  # fmt: skip
DRAWS = ["model.hidden=[8]", "model.dropout=0.5"]
NEEDS = {"adamw8bit": "torchao", "fp8": "torchao", "timm": "timm"}
LONGER: dict[str, tuple[int | tuple[int, ...], list[str]]] = {  # what runs: the update at which its first part ends; words
    "plain": (3, []),
    "drop path": (3, ["model=timm", "model.name=test_resnet", "data.shape=[3,32,32]", "model.drop_path=0.5"]),
    "mixtures": (3, ["augment=[cutmix,mixup]", "augment.mixup.alpha=1.0"]),
    "overfit": (3, ["debug=overfit"]),
    "adamw8bit": (3, ["optimizer=adamw8bit", "optimizer.lr=0.01", "model.hidden=[64]"]),
    "schedulefree": (3, ["optimizer=schedulefree", "ema=ema"]),
    "batches that grow": (5, ["batch.grow_every=1", "batch.grow_until=48"]),
    "buckets": (4, [*GPT, "batch.tokens=512", "batch.preallocate=true"]),
    "dora": (3, [*DORA, "precision=bf16_pure", "adapter.dropout=0.3"]),
    "lbfgs": (3, ["optimizer=lbfgs", "optimizer.lr=0.5", "optimizer.max_iter=4", *DRAWS]),  # its forwards must draw alike
    "sam": (3, ["optimizer=sam", "optimizer.lr=0.1", "optimizer.rho=0.1", *DRAWS]),
    "unfreezing": ((1, 2, 3), [*STAGES, "optimizer=adamw", "optimizer.lr=0.01"]),
    **{f"precision {name}": (3, [*EVERYTHING, *words]) for name, words in PRECISIONS.items()},
    **{f"schedulefree, {master}": (2, ["precision=bf16_pure", master, "optimizer=schedulefree"]) for master in PURE.values()},
}
SLOW = {
    "buckets of samples": (4, [*GPT, "batch.preallocate=true"]),
    "dora, amp": (3, [*DORA, "precision=amp", "checkpointing=blocks", "adapter.dropout=0.3"]),
    "dora, inductor": (3, [*DORA, "compile=inductor"]),
    "dora, ddp": (3, [*DORA, "parallel=ddp", "parallel.nproc=2"]),
    "dora, fsdp": (3, [*DORA, "parallel=fsdp", "parallel.nproc=2"]),
    **{name: (3, [f"optimizer={name}", "ema=ema"]) for name in ("lamb", "muon", "novograd")},
    **{f"{name}, {master}": (2, ["precision=bf16_pure", master, f"optimizer={name}"])
       for name in ("adagrad", "muon", "lamb") for master in PURE.values()},
}  # fmt: skip


@pytest.mark.parametrize("name", [*LONGER, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_a_run_that_is_made_longer_is_the_long_one(train, name):
    ends, words = {**LONGER, **SLOW}[name]
    for package in (package for word, package in NEEDS.items() if any(word in each for each in words)):
        pytest.importorskip(package)
    whole = train(*words, "epochs=9", "updates=6", updates=6)
    for at in ends if isinstance(ends, tuple) else (ends,):
        short = train(*words, "epochs=9", f"updates={at}", updates=at)
        longer = continued(short.run_dir, "updates=6", updates=6)
        one, two = (saved(run.run_dir) for run in (whole, longer))
        kept = (".weights", ".state.optimizer", ".state.precision", ".state.ema")  # how the run went is another story
        assert [key for key in {*one, *two} if key.startswith(kept) and one.get(key) != two.get(key)] == []
        assert whole.judged("final") == longer.judged("final")


def test_a_finished_run_stays_finished(train):
    run = train()
    before = {p: p.read_bytes() for p in newest(run.run_dir).iterdir()}
    assert continued(run.run_dir, updates=2).metrics == run.metrics
    assert {p: p.read_bytes() for p in newest(run.run_dir).iterdir()} == before
    assert [r["update"] for r in records(run.run_dir, "train")] == [1, 2]


# --- what may differ ---


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    return drivetrain.train([*TINY, f"output_dir={tmp_path_factory.mktemp('finished')}"]).run_dir


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["precision=bf16"], ["precision: Precision → Bf16"]),
        (["optimizer=adamw"], ["optimizer: Sgd → AdamW."]),
        (["optimizer.lr=0.01", "model.hidden=[16]"], ["optimizer.lr: 0.05 → 0.01", "model.hidden: [256, 256] → [16]"]),
        (["updates=3", "ema=ema"], ["ema"]),
        (["recipe=naive"], ["model"]),
        (["updates=1"], ["updates: 2 → 1: a run may only become longer"]),
    ],
)
def test_a_changed_config_or_a_shorter_run_is_refused_with_the_difference(finished, words, shown):
    before = everything(finished)
    (problem,) = problems_of(launcher.prepare, [f"resume={finished}", *words])
    assert all(text in problem for text in shown)
    assert "resume_changed=true" in problem
    assert everything(finished) == before


CHANGES: dict[str, tuple[float, Callable[[Trainer], float]]] = {
    "optimizer.lr": (0.5, lambda t: t.optimizer.param_groups[0]["lr"]),
    "optimizer.weight_decay": (0.25, lambda t: t.optimizer.param_groups[0]["weight_decay"]),
    "optimizer.momentum": (0.5, lambda t: t.optimizer.param_groups[0]["momentum"]),
    "precision.growth_interval": (7, lambda t: t.precision.scaler.get_growth_interval()),
    "ema.decay": (0.5, lambda t: t.ema.decay),
}


def test_a_change_that_was_insisted_on_takes_effect(train, monkeypatch):
    run = train("precision=amp", "precision.init_scale=8.0", "ema=ema")
    trainers, fit = [], Trainer.fit
    monkeypatch.setattr(Trainer, "fit", lambda self, stop: (trainers.append(self), fit(self, stop))[1])
    words = [f"{key}={value}" for key, (value, _) in CHANGES.items()]
    continued(run.run_dir, "resume_changed=true", "updates=4", *words, updates=4)
    for key, (value, read) in CHANGES.items():
        assert read(trainers[0]) == pytest.approx(value), key


# --- the files ---


@pytest.fixture(scope="module")
def saved_often() -> list[Path]:
    """The directory of a run with three checkpoints, once a test has trained it, in 16 bits as every test."""
    return []


@pytest.fixture
def run_dir(train, saved_often, tmp_path, tmp_path_factory) -> Path:
    if not saved_often:
        words = ["updates=3", "saving.every_updates=1", "saving.keep=9", "ema=ema", "precision=amp"]
        saved_often.append(train(*words, f"output_dir={tmp_path_factory.mktemp('often')}").run_dir)
    return shutil.copytree(*saved_often, tmp_path / "run")


def manifest_says(checkpoint, **changed):
    """Write a manifest, with its own hash, that says something else."""
    said = {k: v for k, v in manifest.read(checkpoint).items() if k != manifest.OWN}
    (checkpoint / "manifest.json").write_text(manifest.text({**said, **changed}))


DAMAGE = {
    "a flipped bit in the weights": (lambda c: faults.flip(c / "model.safetensors"), "damaged model.safetensors"),
    "a flipped bit in the state": (lambda c: faults.flip(c / "state.pt"), "damaged state.pt"),
    "no weights": (lambda c: (c / "model.safetensors").unlink(), "lacks model.safetensors"),
    "no state": (lambda c: (c / "state.pt").unlink(), "lacks state.pt"),
    "a truncated state": (lambda c: (c / "state.pt").write_bytes((c / "state.pt").read_bytes()[:100]), "damaged state.pt"),
    "another length": (lambda c: (c / "state.pt").open("ab").write(b"x"), "its length differs"),
    "no manifest": (lambda c: (c / "manifest.json").unlink(), "no readable manifest.json"),
    "half a manifest": (lambda c: (c / "manifest.json").write_text('{"format": 3, "sha'), "no readable manifest.json"),
    "a manifest of another format": (
        lambda c: manifest_says(c, format=99),
        "has format 99",
    ),
    "a manifest without the weights": (
        lambda c: manifest_says(c, sha256={"state.pt": manifest.sha256(c / "state.pt")}),
        "is incomplete",
    ),
    "a manifest that leads outside": (
        lambda c: manifest_says(c, sha256={"../3/state.pt": "0"}),
        "names a file outside itself",
    ),
}


@pytest.mark.parametrize("how", DAMAGE)
def test_a_damaged_checkpoint_is_named_and_passed_over(run_dir, how):
    damage, says = DAMAGE[how]
    checkpoint = run_dir / "checkpoints" / "3"
    whole = (checkpoint / "model.safetensors").read_bytes()
    assert manifest.verify(checkpoint) is None
    damage(checkpoint)
    assert says in manifest.verify(checkpoint)
    job = launcher.prepare([f"resume={run_dir}"])
    assert job.checkpoint == run_dir / "checkpoints" / "2"
    assert any(str(checkpoint) in line and says in line and "passed over" in line for line in job.notices)
    continued(run_dir, updates=3)
    assert manifest.verify(checkpoint) is None  # written anew
    assert (checkpoint / "model.safetensors").read_bytes() == whole
    assert [r["update"] for r in records(run_dir, "train")] == [1, 2, 3]


def test_with_no_checkpoint_left_it_starts_over_and_says_so(run_dir):
    shutil.rmtree(run_dir / "checkpoints")
    job = launcher.prepare([f"resume={run_dir}"])
    assert job.checkpoint is None
    assert any("starts from the beginning" in line for line in job.notices)
    continued(run_dir, updates=3)


def test_the_state_is_plain_tensors_and_containers(run_dir):
    state = torch.load(run_dir / "checkpoints/3/state.pt", weights_only=True)
    assert state["progress"]["updates"] == 3
    assert state["optimizer"]["state"]
    assert state["precision"]["scale"] > 0
    assert state["ema"]["tensors"].keys() == safetensors.torch.load_file(run_dir / "checkpoints/3/model.safetensors").keys()
    assert state["random"] == {}  # nothing has drawn, so that the streams follow from the seed
    assert not list((run_dir / "checkpoints").glob(".*"))  # nothing half-written is left


def test_a_state_has_the_random_streams_that_were_drawn_from(make, fitted):
    trainer = fitted("model.dropout=0.5", "updates=1", "saving=none")
    random.random()
    state = trainer.state()
    ((rank, drawn),) = state["random"].items()
    assert (rank, drawn.keys()) == (0, {"cpu", "python"})
    again = make("model.dropout=0.5", "updates=1", "saving=none")
    np.random.rand()  # another machine's checks may draw
    again.restore(trainer.model.state_dict(), state)
    first = draws()
    streams.restore({**trainer._seeded(), **drawn})
    assert draws() == first


def test_a_rank_maps_the_state_of_all_and_lets_the_file_go(make, fitted, tmp_path):
    """It reads its own part alone; a mapped file that was removed would take its room on the disk until the run ends."""
    fitted("optimizer=adamw", "ema=ema", "updates=1", "saving=last")
    file = tmp_path / "run/checkpoints/1/state.pt"
    again = make("optimizer=adamw", "ema=ema", "updates=1", "saving=last")
    found = checkpoint_io.load(file.parent, again.parallel)
    assert str(file) in Path("/proc/self/maps").read_text()
    again.restore(*found)
    del found
    assert str(file) not in Path("/proc/self/maps").read_text()


def test_a_save_that_fails_leaves_the_last_good_one(tmp_path, monkeypatch):
    weights = {"w": torch.ones(3)}
    checkpoint_io.save(tmp_path, 1, weights, {"a": 1})
    with monkeypatch.context() as m:
        m.setattr(torch, "save", lambda *a: (_ for _ in ()).throw(OSError("No space left on device")))
        for update in (1, 2):
            with pytest.raises(CannotSave, match="No space"):
                checkpoint_io.save(tmp_path, update, weights, {"a": 2})
            assert not list((tmp_path / "checkpoints").glob(".*")), "what was half-written takes the space that is missing"
    assert manifest.newest_valid(tmp_path) == (tmp_path / "checkpoints" / "1", [])
    assert checkpoint_io.load(tmp_path / "checkpoints" / "1")[1] == {"a": 1}
    checkpoint_io.save(tmp_path, 2, weights, {"a": 3})  # what was left half-written is no hindrance
    assert checkpoint_io.load(newest(tmp_path))[1] == {"a": 3}


def test_tied_and_strided_weights_are_saved_under_each_name(tmp_path):
    tied = torch.randn(3, 4)
    weights = {"a": tied, "b": tied, "c": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last), "d": tied.T}
    loaded, _ = checkpoint_io.load(checkpoint_io.save(tmp_path, 1, weights, {}))
    assert loaded.keys() == weights.keys()
    assert all(torch.equal(loaded[name], weights[name]) for name in weights)


def test_pruning_keeps_the_newest_by_number_and_those_that_are_chosen(tmp_path):
    for update in (2, 9, 10, 100):
        checkpoint_io.save(tmp_path, update, {"w": torch.ones(1)}, {})
    checkpoint_io.prune(tmp_path, lambda saved: [saved[0], 10])
    assert checkpoint_io.updates(tmp_path) == [2, 10, 100]
    checkpoint_io.prune(tmp_path, lambda saved: [])
    assert checkpoint_io.updates(tmp_path) == [100]


def test_an_optimizers_state_is_matched_by_the_names_of_the_parameters():
    """The config of the resumed run may give the parameters in another order, as other weight decay rules do."""

    def adam(names):
        weights = {"wide": torch.ones(3, requires_grad=True), "narrow": torch.ones(2, requires_grad=True)}
        optimizer = torch.optim.Adam([{"params": [weights[name]], "param_names": [name]} for name in names])
        return weights, optimizer

    weights, saved = adam(["wide", "narrow"])
    for name, value in (("wide", 1.0), ("narrow", 2.0)):
        weights[name].grad = torch.full_like(weights[name], value)
    saved.step()
    other_weights, other = adam(["narrow", "wide"])
    saved.state["of no parameter"] = 3
    state = sharded_checkpoint.by_name(saved.state_dict())
    assert sharded_checkpoint.by_name(state) == state
    assert state["state"].keys() == {"wide", "narrow", "of no parameter"}
    checkpoint_io.load_optimizer(other, state)
    for name in weights:
        torch.testing.assert_close(other.state[other_weights[name]]["exp_avg"], saved.state[weights[name]]["exp_avg"])
