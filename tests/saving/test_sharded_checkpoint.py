"""Checkpoints in parts: written, read back, and not believed."""

from __future__ import annotations

import io
import json
import zipfile
from pathlib import Path

import pytest
import torch

from drivetrain.core.errors import UserError
from drivetrain.saving import sharded_checkpoint
from drivetrain.saving.content import Divided, Part, Undivided, whole


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    folder = tmp_path / "parts"
    folder.mkdir()
    tensors = {"model/a": whole(torch.arange(6.0).view(2, 3)), "ema/a": whole(torch.ones(2, 3, dtype=torch.bfloat16))}
    assert sharded_checkpoint.write(folder, tensors, None) == ABOUT
    return folder


ABOUT = {"model/a": ((2, 3), torch.float32), "ema/a": ((2, 3), torch.bfloat16)}
PLAIN = Undivided()


def test_what_was_written_is_read(saved):
    read = sharded_checkpoint.read(saved, ABOUT, PLAIN)
    assert torch.equal(read["model/a"], torch.arange(6.0).view(2, 3))
    assert read["ema/a"].dtype == torch.bfloat16


@pytest.mark.parametrize("alone", [True, False])
def test_one_rank_may_read_by_itself(saved, monkeypatch, alone):
    """The others, who do not see the file, take no part, and nobody may wait for them."""
    asked = {}
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.checkpoint.state_dict_loader.load", lambda *_, **how: asked.update(how))
    sharded_checkpoint.read(saved, ABOUT, PLAIN, alone)
    assert asked["no_dist"] == alone


def test_no_pickle_is_read_or_written(saved):
    """A .metadata of ten bytes took 6.6 GB: a memo with one large number."""
    assert {p.name for p in saved.iterdir()} == {"__0_0.distcp", "pieces.json"}
    (saved / ".metadata").write_bytes(b"\x80\x02Nr\xff\xff\xff\x6f.")
    assert torch.equal(sharded_checkpoint.read(saved, ABOUT, PLAIN)["model/a"], torch.arange(6.0).view(2, 3))


def changed(saved: Path, name: str, key: str, value: object) -> None:
    """Change what pieces.json says of a tensor, or of its only part."""
    file = saved / "pieces.json"
    content = json.loads(file.read_text())
    entry = content[name]
    (entry if key in ("dtype", "pieces") else entry["pieces"][0])[key] = value
    file.write_text(json.dumps(content))


WRONG = {
    "a path upwards": ("file", "../elsewhere", "names a file outside of its checkpoint"),
    "an absolute path": ("file", "/etc/passwd", "names a file outside of its checkpoint"),
    "a file that is not there": ("file", "absent", "No such file"),
    "more bytes than the file has": ("bytes", 10**12, "names a part outside of __0_0.distcp"),
    "a negative place": ("at", -1, "names a part outside"),
    "a place that is no number": ("at", True, "names a part outside"),
    "a part outside of its tensor": ("offsets", [1, 1], "is outside of a tensor"),
    "a part that is not all": ("shape", [1, 3], "are not all of it"),
    "no part": ("pieces", [], "are not all of it"),
    "another shape": ("shape", [2, 10**12], "is outside of a tensor"),
    "another type": ("dtype", "float64", "the state says"),
    "words for numbers": ("offsets", "00", "is outside|offsets"),
    "no list": ("pieces", 3, "is no list of a checkpoint's parts"),
}


@pytest.mark.parametrize("how", WRONG)
def test_a_list_of_parts_that_does_not_fit_is_refused(saved, how):
    key, value, says = WRONG[how]
    changed(saved, "model/a", key, value)
    with pytest.raises(UserError, match=says):
        sharded_checkpoint.read(saved, ABOUT, PLAIN)


def test_a_list_that_is_nested_too_deep_or_no_ordinary_file_is_refused(saved):
    (saved / "pieces.json").write_text("[" * 100_000)
    with pytest.raises(UserError, match="nested too deep"):
        sharded_checkpoint.read(saved, ABOUT, PLAIN)
    (saved / "pieces.json").unlink()
    (saved / "pieces.json").symlink_to("/dev/zero")
    with pytest.raises(UserError, match="it is a link"):
        sharded_checkpoint.read(saved, ABOUT, PLAIN)


def test_a_part_that_inflates_is_refused(saved):
    part = json.loads((saved / "pieces.json").read_text())["model/a"]["pieces"][0]
    file, inner = saved / part["file"], io.BytesIO()
    content = io.BytesIO(file.read_bytes()[part["at"] : part["at"] + part["bytes"]])
    with zipfile.ZipFile(content) as archive, zipfile.ZipFile(inner, "w", zipfile.ZIP_DEFLATED) as other:
        for entry in archive.infolist():
            other.writestr(entry.filename, archive.read(entry))
    file.write_bytes(inner.getvalue())
    changed(saved, "model/a", "at", 0)
    changed(saved, "model/a", "bytes", len(inner.getvalue()))
    changed(saved, "ema/a", "at", 0)
    changed(saved, "ema/a", "bytes", len(inner.getvalue()))
    with pytest.raises(UserError, match="it is compressed"):
        sharded_checkpoint.read(saved, ABOUT, PLAIN)


def test_a_state_taken_apart_and_put_together_is_itself():
    group = {"lr": 0.1, "params": [0, 1], "param_names": ["a", "b"]}
    state = {
        "optimizer": {"state": {0: {"step": torch.tensor(3.0), "m": torch.rand(2)}, 1: {}}, "param_groups": [group]},
        "ema": {"tensors": {"a": torch.rand(2)}, "updates": 4}, "progress": {"updates": 7},
        "precision": {"masters": {"b": torch.rand(1)}},
    }  # fmt: skip
    weights = {"a": torch.rand(2), "b": torch.rand(1)}
    of_all, rest = sharded_checkpoint.flatten_state(weights, state, PLAIN)
    assert set(of_all) == {"model/a", "model/b", "optimizer/a/m", "ema/a", "masters/b"}
    assert rest["optimizer"]["state"] == {0: {"step": torch.tensor(3.0)}, 1: {}}
    assert rest["precision"] == {"masters": {}}
    again, merged = sharded_checkpoint.unflatten_state({key: divided.parts[0].tensor for key, divided in of_all.items()}, rest)
    assert again == weights
    assert merged["optimizer"]["state"][0]["m"] is state["optimizer"]["state"][0]["m"]
    assert merged["ema"]["tensors"]["a"] is state["ema"]["tensors"]["a"]
    assert merged["precision"]["masters"]["b"] is state["precision"]["masters"]["b"]
    assert merged["progress"] == {"updates": 7}


def test_states_of_parts_are_merged_by_names():
    def part(lr, names, held):
        group = {"lr": lr, "params": list(range(len(names))), "param_names": names}
        return {"state": dict(enumerate(held)), "param_groups": [group]}

    one, two = part(0.1, ["a", "b"], [{"m": 1}, {"m": 2}]), part(0.1, ["b", "c"], [{"m": 2}, {"m": 3}])
    whole = sharded_checkpoint.merge_optimizer_states([one, two, part(0.2, ["d"], [{"m": 4}])])
    names = sharded_checkpoint.parameter_names(whole)
    assert {names[i]: s["m"] for i, s in whole["state"].items()} == {"a": 1, "b": 2, "c": 3, "d": 4}
    assert [(g["lr"], g["param_names"]) for g in whole["param_groups"]] == [(0.1, ["a", "b", "c"]), (0.2, ["d"])]


def test_each_state_is_taken_apart_by_the_layout_of_its_own_weight():
    """`divided` gets the kind of a tensor and the name of the weight that it belongs to. What is on other ranks is left out."""
    tensors = [torch.ones(2), torch.zeros(2)]
    optimizer = {"state": {n: {"m": t} for n, t in enumerate(tensors)},
                 "param_groups": [{"params": [0, 1], "param_names": ["a", "b"]}]}  # fmt: skip
    asked = []

    class Asked(Undivided):
        def divided(self, kind, name, tensor):
            asked.append((kind, name, tensor))
            return whole(tensor)

    elsewhere = {"a": torch.ones(2, device="meta")}
    found, _ = sharded_checkpoint.flatten_state(elsewhere, {"optimizer": optimizer, "ema": {}}, Asked())
    assert [asking[:2] for asking in asked] == [("model", "a"), ("optimizer", "a"), ("optimizer", "b")]
    assert all(given is t for (_, _, given), t in zip(asked[1:], tensors, strict=True))
    assert set(found) == {"optimizer/a/m", "optimizer/b/m"}


class TwoMatrices(Undivided):
    """A rank that holds a row of each of the two matrices of which a weight is made, the first or the second."""

    def __init__(self, row: int) -> None:
        self.row = row

    def empty_shard(self, kind, name, shape, dtype):
        return torch.empty(2, shape[1], dtype=dtype)

    def divided(self, kind, name, tensor):
        return Divided((4, 3), [Part((2 * i + self.row, 0), matrix[None]) for i, matrix in enumerate(tensor)])


def test_a_tensor_of_several_parts_is_written_and_read_in_any_cut(tmp_path):
    """As the ranks of parallel=tensor hold a fused projection: rows of each of its matrices."""
    full = torch.arange(12.0).view(4, 3)
    parts = [*TwoMatrices(0).divided("", "", full[[0, 2]]).parts, *TwoMatrices(1).divided("", "", full[[1, 3]]).parts]
    shapes = sharded_checkpoint.write(tmp_path, {"model/a": Divided((4, 3), parts)}, None)
    assert shapes == {"model/a": ((4, 3), torch.float32)}
    assert torch.equal(sharded_checkpoint.read(tmp_path, shapes, PLAIN)["model/a"], full)
    assert torch.equal(sharded_checkpoint.read(tmp_path, shapes, TwoMatrices(1))["model/a"], full[[1, 3]])


def test_parts_that_are_more_than_the_whole_are_refused(saved):
    file = saved / "pieces.json"
    content = json.loads(file.read_text())
    content["model/a"]["pieces"] *= 2
    file.write_text(json.dumps(content))
    with pytest.raises(UserError, match="are not all of it"):
        sharded_checkpoint.read(saved, ABOUT, PLAIN)
