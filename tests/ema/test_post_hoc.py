"""Averages of any width afterwards: as the average of that width which is kept directly, to the error that is told."""

import copy
import os
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch

from drivetrain.core.errors import CannotSave, UserError
from drivetrain.ema import profiles
from drivetrain.ema.profiles import Stored
from drivetrain.inference.finished import checkpoint_of, chosen_weights
from drivetrain.saving import checkpoint_io, manifest

WORDS = ["ema=post_hoc", "updates=32", "ema.snapshots=8"]


def same(a, b) -> bool:
    return a.keys() == b.keys() and all(torch.equal(t, b[name]) for name, t in a.items())


@pytest.mark.parametrize("width", [0.03, 0.05, 0.1, 0.25])
def test_the_power_gives_the_width(width):
    """The standard deviation of the density in proportion to x^γ on 0 … 1, by its moments."""
    power = profiles.power(width)
    mean, square = (power + 1) / (power + 2), (power + 1) / (power + 3)
    assert np.sqrt(square - mean**2) == pytest.approx(width, rel=1e-9)


def test_the_overlap_is_the_integral_of_the_product():
    a, b = Stored(70.0, 4.0), Stored(100.0, 9.5)
    x = (np.arange(700_000) + 0.5) / 10_000
    product = (5.0 * x**4 / 70**5) * (10.5 * x**9.5 / 100**10.5)
    assert profiles.overlap(a, b) == profiles.overlap(b, a) == pytest.approx(product.sum() / 10_000, rel=1e-6)


@pytest.mark.parametrize(("width", "error"), [(0.05, 1e-6), (0.07, 0.004), (0.1, 1e-6), (0.2, 0.03), (0.01, 0.5)])
def test_sixteen_pairs_give_widths_to_the_error_that_the_docs_name(width, error):
    stored = [Stored(1000 * k / 16, profiles.power(w)) for k in range(1, 17) for w in (0.05, 0.1)]
    found = profiles.shares(stored, Stored(1000.0, profiles.power(width)))[1]
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
    with pytest.raises(UserError, match=r"do not fit the run \(4.safetensors: its header"):
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


def test_a_run_that_goes_on_is_the_run_that_was_not_stopped(make):
    whole = make(*WORDS, run_dir=Path("whole"))
    whole.fit()
    part = make(*WORDS, run_dir=Path("part"))
    part.max_updates = 13
    part.fit()
    saved = copy.deepcopy((dict(part.model.state_dict()), part.state()))
    again = make(*WORDS, run_dir=Path("part"))
    again.restore(*saved)
    again.fit()
    for key in ("tensors", "wider"):
        assert same(whole.ema.state_dict()[key], again.ema.state_dict()[key])
    files = sorted(f.name for f in Path("whole/averages").iterdir())
    assert len(files) == 8
    assert all((Path("whole/averages") / f).read_bytes() == (Path("part/averages") / f).read_bytes() for f in files)


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
        (["saving=none"], "ema=post_hoc stores averages to be used with a checkpoint, and saving=none"),
    ],
)
def test_what_cannot_be_is_refused(problems, words, says):
    assert any(p.startswith(says) for p in problems("ema=post_hoc", *words))
