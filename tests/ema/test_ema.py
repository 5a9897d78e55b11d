"""The average of the weights: as by hand, swapped in and back, saved and gone on with."""

import contextlib
import copy
import itertools
import json
import math
import os
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import safetensors.torch
import torch
from torch.optim import swa_utils

from drivetrain.core.errors import CannotSave, UserError
from drivetrain.core.order import shuffled
from drivetrain.ema import Average, profiles
from drivetrain.ema.post_hoc import PostHoc
from drivetrain.ema.profiles import StoredAverage
from drivetrain.inference.finished import checkpoint_of, chosen_weights
from drivetrain.saving import checkpoint_io, manifest
from tests.support.context import context

RESNET = ["model=resnet9", "model.width=8", "ema=ema", "ema.decay=0.6", "updates=4"]


def state(model) -> dict[str, torch.Tensor]:
    return {name: t.detach().clone() for name, t in model.state_dict().items()}


@pytest.mark.parametrize("buffers", ["average", "copy"])
@pytest.mark.parametrize("warmup", ["true", "false"])
def test_the_average_equals_the_hand_computation(make, each_update, float64, buffers, warmup):
    trainer = make(*RESNET, f"ema.buffers={buffers}", f"ema.warmup={warmup}")
    expected = state(trainer.model)
    weights = each_update(trainer, lambda: state(trainer.model))
    trainer.fit()
    parameters = dict(trainer.model.named_parameters())
    assert len(weights) == 4
    for n, now in enumerate(weights, 1):
        decay = min(0.6, (1 + n) / (10 + n)) if warmup == "true" else 0.6
        for name, value in now.items():
            averaged = name in parameters or (value.is_floating_point() and buffers == "average")
            expected[name] = decay * expected[name] + (1 - decay) * value if averaged else value
    average = trainer.ema.state_dict()["tensors"]
    assert average.keys() == expected.keys()
    assert "features.0.1.num_batches_tracked" in average
    for name, value in expected.items():
        torch.testing.assert_close(average[name], value, rtol=1e-12, atol=1e-14)
    assert not torch.allclose(average["head.weight"], weights[-1]["head.weight"])
    assert average["features.0.1.num_batches_tracked"] == 4


class Keeps(torch.nn.Module):
    """A network with buffers that have no mean."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.utils.parametrizations.spectral_norm(torch.nn.Linear(4, 4))
        self.norm = torch.nn.BatchNorm1d(4)
        self.register_buffer("mask", torch.full((4, 4), -torch.inf).triu(1))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))


@pytest.mark.parametrize("kind", [Average(decay=0.5), PostHoc()])
def test_buffers_that_have_no_mean_are_copied(kind):
    model = Keeps()
    average = kind.build(context(model=model, horizon=SimpleNamespace(updates=3)))
    for n in range(3):
        with torch.no_grad():
            model.linear.parametrizations.weight.original.normal_()
            model.norm.running_mean += 1
            model.seen += 1
            model.linear(torch.ones(2, 4))  # moves the vectors
        average.update()
        kept = average.state_dict()["tensors"]
        assert torch.equal(kept["mask"], model.mask)
        assert kept["seen"] == n + 1
        vectors = model.linear.parametrizations.weight[0]
        assert torch.equal(kept["linear.parametrizations.weight.0._u"], vectors._u)
    assert (kept["norm.running_mean"] < model.norm.running_mean).all()
    with average.swapped():
        assert torch.equal(model.mask, Keeps().mask)


def test_it_stands_in_the_model_only_while_swapped_also_on_an_exception(fitted):
    trainer = fitted(*RESNET)
    raw, average = state(trainer.model), {k: v.clone() for k, v in trainer.ema.state_dict()["tensors"].items()}
    with contextlib.suppress(KeyError), trainer.ema.swapped():
        assert all(torch.equal(t, average[name]) for name, t in trainer.model.state_dict().items())
        raise KeyError
    assert all(torch.equal(t, raw[name]) for name, t in trainer.model.state_dict().items())
    assert same(average, trainer.ema.state_dict()["tensors"])
    assert not any(t.requires_grad for t in trainer.ema.state_dict()["tensors"].values())
    assert any(not torch.equal(raw[name], average[name]) for name in raw)


def test_a_skipped_update_does_not_move_it(make, each_update):
    trainer = make(*RESNET, "precision=amp", "precision.init_scale=1e12", "updates=3", "epochs=40", "optimizer.lr=0.01",
                   "optimizer.fused=false")  # fmt: skip
    start = {name: t.clone() for name, t in trainer.ema.state_dict()["tensors"].items()}
    seen = each_update(trainer, lambda: (trainer.progress.updates, not same(start, trainer.ema.state_dict()["tensors"])))
    trainer.fit()
    assert trainer.progress.skipped > 3
    assert trainer.progress.updates == trainer.ema.state_dict()["updates"] == 3
    assert all(moved == (updates > 0) for updates, moved in seen)


@pytest.mark.parametrize("word", ["ema.decay=1.5", "ema.decay=-0.1", "ema.buffers=forget"])
def test_what_cannot_be_is_refused(problems, word):
    assert any(p.startswith(word) for p in problems("ema=ema", word))


# --- the mean of the last weights: as torch's AveragedModel and update_bn, also where a run goes on and on several ranks ---


MLP = ["ema=swa", "ema.every=1", "updates=8"]  # 4 updates an epoch
RESNET_SWA = ["model=resnet9", "model.width=4", *MLP]


def tensors(trainer) -> dict[str, torch.Tensor]:
    return {name: t.clone() for name, t in trainer.ema.state_dict()["tensors"].items()}


def same(a, b) -> bool:
    return a.keys() == b.keys() and all(torch.equal(t, b[name]) for name, t in a.items())


@pytest.mark.parametrize(
    ("start", "every", "averaged"),
    [("0.5", "1", [5, 6, 7, 8]), ("0.25", "3", [5, 8]), ("2", "1ep", [4, 8]), ("1ep", "2", [6, 8]), ("0.875", "5", [8])],
)
def test_it_equals_torchs_averaged_model_over_the_updates_that_are_due(make, each_update, float64, start, every, averaged):
    trainer = make("ema=swa", f"ema.start={start}", f"ema.every={every}", "updates=8")
    reference = swa_utils.AveragedModel(trainer.model)

    def average() -> tuple[bool, int]:
        at = trainer.progress.updates
        if at in averaged:
            reference.update_parameters(trainer.model)
        return trainer.ema.started, at

    seen = each_update(trainer, average)
    trainer.fit()
    assert seen == [(at >= averaged[0], at) for at in range(1, 9)]
    found, last = tensors(trainer), trainer.model.state_dict()
    for name, value in reference.module.state_dict().items():
        torch.testing.assert_close(found[name], value, rtol=1e-13, atol=1e-15)
        assert torch.equal(found[name], last[name]) == (len(averaged) == 1)


def test_batch_norms_statistics_are_those_of_torchs_update_bn(fitted, float64):
    """Over the batches of the first epoch, with dropout; nothing of the training moves by it."""
    trainer = fitted(*RESNET_SWA, "ema.statistics_updates=3", "updates=7")
    reference = copy.deepcopy(trainer.model)
    found, random, live = tensors(trainer), torch.get_rng_state(), copy.deepcopy(trainer.model.state_dict())
    reference.load_state_dict(found)
    requests = list(trainer.batch.over(shuffled(48)).requests(trainer.seed, 0, trainer.parallel.data_world, True))[:3]
    swa_utils.update_bn((trainer.train_data(request)[0] for request in requests), reference)
    for name, value in reference.state_dict().items():
        torch.testing.assert_close(found[name], value, rtol=1e-12, atol=1e-14)
    assert found["features.0.1.num_batches_tracked"] == 3
    assert not torch.allclose(found["features.0.1.running_mean"], live["features.0.1.running_mean"], rtol=1e-3)
    trainer.ema.stale = True  # an estimate more, which is the same
    assert same(found, tensors(trainer))
    assert torch.equal(random, torch.get_rng_state())
    assert same(live, trainer.model.state_dict())
    assert trainer.model.features[0][1].momentum == 0.1


def test_without_them_they_are_averaged_as_weights_are(make, each_update, float64):
    trainer = make(*RESNET_SWA, "ema.statistics_updates=0", "ema.start=0.75")
    seen = each_update(trainer, lambda: trainer.model.state_dict()["features.0.1.running_var"].clone())
    trainer.fit()
    torch.testing.assert_close(tensors(trainer)["features.0.1.running_var"], (seen[6] + seen[7]) / 2, rtol=1e-13, atol=0.0)


def test_frozen_norms_keep_their_statistics(fitted):
    trainer = fitted(*RESNET_SWA, "model.freeze=[features.0]")
    found, live = tensors(trainer), trainer.model.state_dict()
    for name in ("features.0.1.running_mean", "features.0.1.num_batches_tracked"):
        assert torch.equal(found[name], live[name])
    assert not torch.equal(found["features.1.1.running_mean"], live["features.1.1.running_mean"])


def test_it_is_evaluated_beside_the_weights_once_there_is_one(make, fitted):
    trainer = fitted(*RESNET_SWA, "epochs=3", "updates=12", "ema.start=0.5")
    first, *later = [r for r in trainer.log.writers[0] if r["event"] == "evaluate"]
    assert first["ema_loss"] == first["loss"]  # after 4 updates
    assert [r["ema_loss"] == r["loss"] for r in later] == [False, False]
    alone = make(*RESNET_SWA)
    alone.model.load_state_dict(trainer.ema.state_dict()["tensors"])
    assert later[-1]["ema_loss"] == pytest.approx(alone.evaluator.metrics()["loss"], rel=1e-6)


CURVES = {"linear": lambda t: 1 - t, "cosine": lambda t: (1 + math.cos(math.pi * t)) / 2, "sqrt": lambda t: 1 - t**0.5}


@pytest.mark.parametrize(("start", "every", "merged"), [("0.5", "1", [5, 6, 7, 8]), ("0.25", "2", [4, 6, 8]), ("0.9", "1", [8])])
@pytest.mark.parametrize("shape", CURVES)
def test_merged_weights_move_as_those_of_the_decay(make, each_update, float64, shape, start, every, merged):
    """By hand: the first of the merged weights, and each later move times the curve at its number."""
    trainer = make("ema=merge", f"ema.shape={shape}", f"ema.start={start}", f"ema.every={every}", "updates=8")
    weights = each_update(trainer, lambda: torch.cat([p.detach().flatten() for p in trainer.model.parameters()]))
    trainer.fit()
    kept = [weights[n - 1] for n in merged]
    by_hand = kept[0].clone()
    for number, (before, after) in enumerate(itertools.pairwise(kept), 1):
        by_hand += CURVES[shape](number / len(kept)) * (after - before)
    with trainer.ema.swapped():
        found = torch.cat([p.detach().flatten() for p in trainer.model.parameters()])
    torch.testing.assert_close(found, by_hand, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("words", [["ema=ema"], [*MLP, "ema.start=0.25", "ema.statistics_updates=1"]], ids=["ema", "swa"])
def test_it_does_not_change_the_training(make, words):
    """Nor the random numbers of dropout, which an estimate draws too."""
    ends = []
    for average in (["ema=none"], words):
        trainer = make("model=resnet9", "model.width=4", "updates=8", *average)
        trainer.model.features[0].append(torch.nn.Dropout(0.3))
        trainer.fit()
        ends.append(trainer.model.state_dict())
    assert same(*ends)


@pytest.mark.parametrize(
    "loader", ["threads", *(pytest.param(name, marks=pytest.mark.slow) for name in ("workers", "resident", "device"))]
)
def test_an_estimate_reads_beside_the_training_with_any_loader(fitted, loader):
    words = ["data=digits", *RESNET_SWA, "ema.statistics_updates=2", "updates=3"]
    assert same(*(tensors(fitted(*words, f"loader={option}")) for option in ("sync", loader)))


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("ema.start=8", "ema.start=8 is update 8, and the run ends with update 8, so that nothing would be averaged"),
        ("ema.start=1.5", "ema.start=1.5 is no length"),
        ("ema.every=often", "ema.every=often"),
        ("ema.statistics_updates=-1", "ema.statistics_updates=-1"),
    ],
)
def test_what_swa_cannot_be_is_refused(problems, word, says):
    assert any(p.startswith(says) for p in problems(*MLP, word))


@pytest.mark.slow
def test_two_ranks_have_the_average_of_one_process(make, train):
    """With the same micro-batches, as BatchNorm takes its statistics of each."""
    words = [*RESNET_SWA, "ema.start=0.5", "ema.statistics_updates=3", "precision=fp32"]
    alone = train(*words, "batch=accumulate", "batch.accumulation_steps=2")
    two = train(*words, "parallel=ddp", "parallel.nproc=2")
    states = [checkpoint_io.load(result.run_dir / "checkpoints" / "8")[1]["ema"] for result in (alone, two)]
    for name, value in states[0]["tensors"].items():
        if "tracked" not in name:
            torch.testing.assert_close(states[1]["tensors"][name], value, rtol=1e-4, atol=1e-5)
    lines = [json.loads(line) for line in (two.run_dir / "metrics.jsonl").read_text().splitlines()]
    (said,) = [r for r in lines if r["event"] == "evaluate"][-1:]
    evaluated = make(*words)
    evaluated.model.load_state_dict(states[1]["tensors"])
    assert said["ema_loss"] == pytest.approx(evaluated.evaluator.metrics()["loss"], rel=1e-5)


# --- averages of any width afterwards: as the average of that width which is kept directly, to the error that is told ---


WORDS = ["ema=post_hoc", "updates=32", "ema.snapshots=8"]


@pytest.mark.parametrize("width", [0.03, 0.05, 0.1, 0.25])
def test_the_power_gives_the_width(width):
    """The standard deviation of the density in proportion to x^γ on 0 … 1, by its moments."""
    power = profiles.power(width)
    mean, square = (power + 1) / (power + 2), (power + 1) / (power + 3)
    assert np.sqrt(square - mean**2) == pytest.approx(width, rel=1e-9)


def test_the_overlap_is_the_integral_of_the_product():
    a, b = StoredAverage(70.0, 4.0), StoredAverage(100.0, 9.5)
    x = (np.arange(700_000) + 0.5) / 10_000
    product = (5.0 * x**4 / 70**5) * (10.5 * x**9.5 / 100**10.5)
    assert profiles.overlap(a, b) == profiles.overlap(b, a) == pytest.approx(product.sum() / 10_000, rel=1e-6)


@pytest.mark.parametrize(("width", "error"), [(0.05, 1e-6), (0.07, 0.004), (0.1, 1e-6), (0.2, 0.03), (0.01, 0.5)])
def test_sixteen_pairs_give_widths_to_the_error_that_the_docs_name(width, error):
    stored = [StoredAverage(1000 * k / 16, profiles.power(w)) for k in range(1, 17) for w in (0.05, 0.1)]
    found = profiles.shares(stored, StoredAverage(1000.0, profiles.power(width)))[1]
    assert error / 3 < found < error or found < 1e-6 == error


def test_both_averages_equal_the_hand_computation(make, each_update, float64):
    trainer = make(*WORDS)
    seen = each_update(trainer, lambda: {n: p.detach().clone() for n, p in trainer.model.named_parameters()})
    trainer.fit()
    state = trainer.ema.state_dict()
    for key, width in (("tensors", 0.05), ("wider", 0.1)):
        power = profiles.power(width) + 1
        shares = [(k / 32) ** power - ((k - 1) / 32) ** power for k in range(1, 33)]
        for name in seen[0]:
            expected = sum(share * weights[name] for share, weights in zip(shares, seen, strict=True))
            torch.testing.assert_close(state[key][name], expected, rtol=1e-12, atol=1e-14)
    assert sorted(int(f.stem) for f in Path("run/averages").iterdir()) == [4, 8, 12, 16, 20, 24, 28, 32]


def test_a_width_afterwards_is_the_average_that_was_kept(make, float64):
    """The difference of the averages, relative to how far they are from the last weights, is small as the profile's error is."""
    kept = make("ema=post_hoc", "ema.width=0.07", "updates=32", run_dir=Path("other"))
    kept.fit()
    run_dir = Path("stored")
    make(*WORDS, run_dir=run_dir).fit()
    checkpoint = checkpoint_of(run_dir)
    weights, state = checkpoint_io.load(checkpoint)
    made = chosen_weights(checkpoint, weights, state, 0.07)
    for name, direct in kept.ema.state_dict()["tensors"].items():
        error = (made[name] - direct).norm() / (weights[name] - direct).norm()
        nearest = (state["ema"]["tensors"][name] - direct).norm() / (weights[name] - direct).norm()
        assert error < 0.03 < nearest
    assert same(chosen_weights(checkpoint, weights, state, True), state["ema"]["tensors"])
    with pytest.raises(UserError, match=r"^average=0.004: the 8 pairs of averages of this run give this width to .* only"):
        chosen_weights(checkpoint, weights, state, 0.004)
    file = run_dir / "averages" / "4.safetensors"
    content = bytearray(file.read_bytes())
    content[-3] ^= 8  # one bit of one weight
    file.write_bytes(content)
    with pytest.raises(UserError, match=r"do not fit the run \(the SHA-256 of 4.safetensors differs\)"):
        chosen_weights(checkpoint, weights, state, 0.07)
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(UserError, match=r"average=0.07: .*4.safetensors cannot be read \(it is no ordinary file\)"):
        chosen_weights(checkpoint, weights, state, 0.07)
    file.unlink()
    file.write_bytes(b"no tensors")
    state["ema"]["stored"]["4"] = manifest.sha256(file)
    with pytest.raises(UserError, match=r"do not fit the run \(Error while deserializing header"):
        chosen_weights(checkpoint, weights, state, 0.07)
    with file.open("wb") as large:
        large.truncate(2**40)  # a terabyte, of which nothing is read
    with pytest.raises(UserError, match=r"do not fit the run \(4.safetensors has 1,099,511,627,776 bytes\)"):
        chosen_weights(checkpoint, weights, state, 0.07)
    with pytest.raises(UserError, match="the run needs ema=post_hoc"):
        chosen_weights(checkpoint, weights, {"ema": {"tensors": {}}}, 0.07)


@pytest.mark.parametrize(
    "wrong",
    [
        {"updates": "x"}, {"updates": 0}, {"updates": 1.5}, {"widths": []}, {"widths": [0.0, 0.1]}, {"widths": {}},
        {"widths": [float("nan"), 0.1]}, {"wider": {"q": torch.ones(2)}}, {"wider": 5}, {"tensors": []}, {"tensors": {"x": 5}},
        {"tensors": {"w": torch.ones(7)}}, {"stored": None}, {"stored": {"../4": "0"}}, {"stored": {"0": "0"}},
        {"stored": {"4": 4}},
    ],
)  # fmt: skip
def test_a_state_that_no_run_writes(tmp_path, wrong):
    """Of a stranger's run: refused, and not in Python's words."""
    good = {"updates": 8, "widths": [0.05, 0.1], "tensors": {"w": torch.ones(2)}, "wider": {"w": torch.zeros(2)}, "stored": {}}
    checkpoint = tmp_path / "checkpoints/8"
    assert chosen_weights(checkpoint, {"w": torch.zeros(2)}, {"ema": good}, 0.07).keys() == {"w"}
    with pytest.raises(UserError, match="do not fit"):
        chosen_weights(checkpoint, {"w": torch.zeros(2)}, {"ema": {**good, **wrong}}, 0.07)


@pytest.mark.parametrize("width", [0.0, -1.0, float("nan"), float("inf"), 1e-300, 5.0, [0.1, 0.2]])
def test_a_stored_average_of_no_width(tmp_path, width):
    (tmp_path / "averages").mkdir()
    stored = {"0/w": torch.ones(2), "1/w": torch.ones(2), "width/1": torch.tensor(0.1)}
    file = tmp_path / "averages/4.safetensors"
    safetensors.torch.save_file({**stored, "width/0": torch.tensor(width)}, file)
    state = {"updates": 8, "widths": [0.05, 0.1], "tensors": {"w": torch.ones(2)}, "wider": {"w": torch.zeros(2)}}
    state["stored"] = {"4": manifest.sha256(file)}
    with pytest.raises(UserError, match=r"average=0.07: the averages in .* do not fit the run \((a width of|only one element)"):
        chosen_weights(tmp_path / "checkpoints/8", {"w": torch.zeros(2)}, {"ema": state}, 0.07)


def test_averages_are_not_written_through_a_link(make, tmp_path):
    """A run's directory may come from a stranger: one that is resumed would write where its link leads."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    trainer = make(*WORDS, run_dir=Path("linked"))
    Path("linked").mkdir()
    (Path("linked") / "averages").symlink_to(elsewhere)
    with pytest.raises(CannotSave, match="averages could not be written to linked: it is a link"):
        trainer.fit()
    with pytest.raises(UserError, match="averages is a link"):
        make(*WORDS, run_dir=Path("linked"))
    assert list(elsewhere.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["ema.wider=0.04"], "ema.wider=0.04 is not above ema.width=0.05"),
        (["ema.width=0.3"], "ema.width=0.3"),
        (["parallel=fsdp", "parallel.nproc=2"], "ema=post_hoc stores averages of the whole model, and with parallel=fsdp"),
        (["saving=none"], "ema=post_hoc stores averages for use with a checkpoint, but saving=none"),
    ],
)
def test_what_stored_averages_cannot_be_is_refused(problems, words, says):
    assert any(p.startswith(says) for p in problems("ema=post_hoc", *words))
