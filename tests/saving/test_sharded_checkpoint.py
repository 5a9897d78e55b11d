"""Checkpoints in parts: written, read back, and not believed."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import pytest
import torch

from drivetrain.core.errors import UserError
from drivetrain.saving import sharded_checkpoint


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    folder = tmp_path / "parts"
    folder.mkdir()
    sharded_checkpoint.write(
        folder, {"model/a": torch.arange(6.0).view(2, 3), "ema/a": torch.ones(2, 3, dtype=torch.bfloat16)}, None
    )
    return folder


ABOUT = {"model/a": ((2, 3), torch.float32), "ema/a": ((2, 3), torch.bfloat16)}


def plain(name, shape, dtype):
    return torch.empty(shape, dtype=dtype)


def test_what_was_written_is_read(saved):
    read = sharded_checkpoint.read(saved, ABOUT, plain)
    assert torch.equal(read["model/a"], torch.arange(6.0).view(2, 3))
    assert read["ema/a"].dtype == torch.bfloat16


@pytest.mark.parametrize("alone", [True, False])
def test_one_rank_may_read_by_itself(saved, monkeypatch, alone):
    """Where the others do not see the file they take no part, and nobody may wait for them."""
    asked = {}
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.checkpoint.load", lambda *_, **how: asked.update(how))
    sharded_checkpoint.read(saved, ABOUT, plain, alone)
    assert asked["no_dist"] == alone


class Command:
    """Runs when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self):
        return os.mkdir, (str(self.mark),)


def test_metadata_that_would_run_a_command_is_refused(saved, tmp_path):
    (saved / ".metadata").write_bytes(pickle.dumps(Command(tmp_path / "run")))
    with pytest.raises(UserError, match=r"names posix\.mkdir, which is no part of a checkpoint"):
        sharded_checkpoint.read(saved, ABOUT, plain)
    assert not (tmp_path / "run").exists()


class Reach:
    """Asks for an attribute when it is unpickled."""

    def __reduce__(self):
        return getattr, (torch.Size, "__base__")


def test_metadata_that_reaches_for_attributes_is_refused(saved):
    (saved / ".metadata").write_bytes(pickle.dumps(Reach()))
    with pytest.raises(UserError, match=r"asks for .*Size.*__base__, which is no part of a checkpoint"):
        sharded_checkpoint.read(saved, ABOUT, plain)


@pytest.mark.parametrize("place", ["../elsewhere", "/etc/passwd"])
def test_metadata_that_names_files_elsewhere_is_refused(saved, place):
    metadata = pickle.loads((saved / ".metadata").read_bytes())
    for stored in metadata.storage_data.values():
        stored.relative_path = place
    (saved / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(UserError, match="names a file outside of its checkpoint"):
        sharded_checkpoint.read(saved, ABOUT, plain)


def test_a_state_taken_apart_and_put_together_is_itself():
    group = {"lr": 0.1, "params": [0, 1], "param_names": ["a", "b"]}
    state = {
        "optimizer": {"state": {0: {"step": torch.tensor(3.0), "m": torch.rand(2)}, 1: {}}, "param_groups": [group]},
        "ema": {"tensors": {"a": torch.rand(2)}, "updates": 4}, "progress": {"updates": 7},
    }  # fmt: skip
    weights = {"a": torch.rand(2), "b": torch.rand(1)}
    of_all, rest = sharded_checkpoint.flatten_state(weights, state, lambda name, tensor: tensor)
    assert set(of_all) == {"model/a", "model/b", "optimizer/a/m", "ema/a"}
    assert rest["optimizer"]["state"] == {0: {"step": torch.tensor(3.0)}, 1: {}}
    again, whole = sharded_checkpoint.unflatten_state(of_all, rest)
    assert again == weights
    assert whole["optimizer"]["state"][0]["m"] is state["optimizer"]["state"][0]["m"]
    assert whole["ema"]["tensors"]["a"] is state["ema"]["tensors"]["a"]
    assert whole["progress"] == {"updates": 7}


def test_states_of_parts_are_merged_by_names():
    def part(lr, names, held):
        group = {"lr": lr, "params": list(range(len(names))), "param_names": names}
        return {"state": dict(enumerate(held)), "param_groups": [group]}

    one, two = part(0.1, ["a", "b"], [{"m": 1}, {"m": 2}]), part(0.1, ["b", "c"], [{"m": 2}, {"m": 3}])
    whole = sharded_checkpoint.merge_optimizer_states([one, two, part(0.2, ["d"], [{"m": 4}])])
    names = sharded_checkpoint.parameter_names(whole)
    assert {names[i]: s["m"] for i, s in whole["state"].items()} == {"a": 1, "b": 2, "c": 3, "d": 4}
    assert [(g["lr"], g["param_names"]) for g in whole["param_groups"]] == [(0.1, ["a", "b", "c"]), (0.2, ["d"])]
