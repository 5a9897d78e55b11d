"""Runs on dicts and tuples on a fake device: nothing mixes devices, and no step waits."""

import pytest

from tests.support import command


@pytest.mark.parametrize(
    "words",
    [
        ["data.target=tree_sets.Dicts", "model.target=tree_sets.Images", "augment=[flip_crop]", "loader=device",
         "surgery=[channels_last]"],
        ["data.target=tree_sets.Tuples", "model.target=tree_sets.Net", "precision=bf16_pure", "loader=workers"],
        ["data.target=tree_sets.Words", "model.target=tree_sets.Reader", "batch=bucketed", "loader=threads", "ema=ema"],
        ["data.target=tree_sets.Words", "model.target=tree_sets.Reader", "loader=resident"],
    ],
    ids=str,
)  # fmt: skip
def test_they_train_on_a_device_and_their_steps_do_not_wait(fake_run, monkeypatch, words):
    monkeypatch.syspath_prepend(command.HERE)
    trainer, device = fake_run("cuda", "data=own", "trust=[tree_sets]", "model=own", "saving=none", *words)
    assert trainer.progress.updates == 2
    assert {p.device.type for p in trainer.model.parameters()} == {"cuda"}
    assert not device.waits
