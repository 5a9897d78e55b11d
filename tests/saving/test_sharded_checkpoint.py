"""Checkpoints in parts: cut into them and merged, written and read in any cut, and refused where parts do not fit."""

import io
import json
import zipfile
from pathlib import Path

import pytest
import torch

from drivetrain.core.errors import UserError
from drivetrain.saving import sharded_checkpoint
from drivetrain.saving.content import Divided, TensorPart, Undivided, whole


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    folder = tmp_path / "parts"
    folder.mkdir()
    tensors = {"model/a": whole(torch.arange(6.0).view(2, 3)), "ema/a": whole(torch.ones(2, 3, dtype=torch.bfloat16))}
    assert sharded_checkpoint.write(folder, tensors, None) == OF_PARTS
    return folder


OF_PARTS = {"model/a": ((2, 3), torch.float32), "ema/a": ((2, 3), torch.bfloat16)}


PLAIN = Undivided()


def test_what_was_written_is_read(saved):
    read = sharded_checkpoint.read(saved, OF_PARTS, PLAIN)
    assert torch.equal(read["model/a"], torch.arange(6.0).view(2, 3))
    assert read["ema/a"].dtype == torch.bfloat16


@pytest.mark.parametrize("alone", [True, False])
def test_one_rank_may_read_by_itself(saved, monkeypatch, alone):
    """The others, who do not see the file, take no part, and nobody may wait for them."""
    asked = {}
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.checkpoint.state_dict_loader.load", lambda *_, **how: asked.update(how))
    sharded_checkpoint.read(saved, OF_PARTS, PLAIN, alone)
    assert asked["no_dist"] == alone


def test_no_pickle_is_read_or_written(saved):
    """A .metadata of ten bytes took 6.6 GB: a memo with one large number."""
    assert {p.name for p in saved.iterdir()} == {"__0_0.distcp", "pieces.json"}
    (saved / ".metadata").write_bytes(b"\x80\x02Nr\xff\xff\xff\x6f.")
    assert torch.equal(sharded_checkpoint.read(saved, OF_PARTS, PLAIN)["model/a"], torch.arange(6.0).view(2, 3))


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
    "a part that is not all": ("shape", [1, 3], "do not cover it"),
    "no part": ("pieces", [], "do not cover it"),
    "another shape": ("shape", [2, 10**12], "is outside of a tensor"),
    "another type": ("dtype", "float64", "but in the state"),
    "words for numbers": ("offsets", "00", "is outside|offsets"),
    "no list": ("pieces", 3, "is no list of a checkpoint's parts"),
}


def test_a_list_of_parts_that_does_not_fit_is_refused(saved):
    """One that is nested too deep, is no ordinary file, or names parts that are more than the whole, too."""
    file = saved / "pieces.json"
    twice = 2 * json.loads(file.read_bytes())["model/a"]["pieces"]
    ways = [(lambda key=key, value=value: changed(saved, "model/a", key, value), says) for key, value, says in WRONG.values()]
    ways += [(lambda: changed(saved, "model/a", "pieces", twice), "do not cover it")]
    ways += [(lambda: file.write_text("[" * 100_000), "nested too deep"), (lambda: file.symlink_to("/dev/zero"), "it is a link")]
    whole = file.read_bytes()
    for change, says in ways:
        file.write_bytes(whole)
        if says == "it is a link":
            file.unlink()
        change()
        with pytest.raises(UserError, match=says):
            sharded_checkpoint.read(saved, OF_PARTS, PLAIN)


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
        sharded_checkpoint.read(saved, OF_PARTS, PLAIN)


def test_a_state_taken_apart_and_put_together_is_itself():
    group = {"lr": 0.1, "params": ["a", "b"], "param_names": ["a", "b"]}
    state = {
        "optimizer": {"state": {"a": {"step": torch.tensor(3.0), "m": torch.rand(2)}, "b": {}}, "param_groups": [group]},
        "ema": {"tensors": {"a": torch.rand(2)}, "updates": 4}, "progress": {"updates": 7},
        "precision": {"masters": {"b": torch.rand(1)}},
    }  # fmt: skip
    weights = {"a": torch.rand(2), "b": torch.rand(1)}
    of_all, rest = sharded_checkpoint.flatten_state(weights, state, PLAIN)
    assert set(of_all) == {"model/a", "model/b", "optimizer/a/m", "ema/a", "masters/b"}
    assert rest["optimizer"]["state"] == {"a": {"step": torch.tensor(3.0)}, "b": {}}
    assert rest["precision"] == {"masters": {}}
    again, merged = sharded_checkpoint.unflatten_state({key: divided.parts[0].tensor for key, divided in of_all.items()}, rest)
    assert again == weights
    assert merged["optimizer"]["state"]["a"]["m"] is state["optimizer"]["state"]["a"]["m"]
    assert merged["ema"]["tensors"]["a"] is state["ema"]["tensors"]["a"]
    assert merged["precision"]["masters"]["b"] is state["precision"]["masters"]["b"]
    assert merged["progress"] == {"updates": 7}


def test_states_of_parts_are_merged_by_names():
    def part(lr, names, held):
        group = {"lr": lr, "params": list(range(len(names))), "param_names": names}
        return sharded_checkpoint.by_name({"state": dict(enumerate(held)), "param_groups": [group]})

    one, two = part(0.1, ["a", "b"], [{"m": 1}, {"m": 2}]), part(0.1, ["b", "c"], [{"m": 2}, {"m": 3}])
    whole = sharded_checkpoint.merge_optimizer_states([one, two, part(0.2, ["d"], [{"m": 4}])])
    assert {name: s["m"] for name, s in whole["state"].items()} == {"a": 1, "b": 2, "c": 3, "d": 4}
    assert [(g["lr"], g["params"]) for g in whole["param_groups"]] == [(0.1, ["a", "b", "c"]), (0.2, ["d"])]
    assert all(g["params"] == g["param_names"] for g in whole["param_groups"])


def test_each_state_is_taken_apart_by_the_layout_of_its_own_weight():
    """`divided` gets the kind of a tensor and the name of the weight that it belongs to. What is on other ranks is left out."""
    tensors = [torch.ones(2), torch.zeros(2)]
    optimizer = {"state": {n: {"m": t} for n, t in zip("ab", tensors, strict=True)}, "param_groups": [{"params": ["a", "b"]}]}
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
        return Divided((4, 3), [TensorPart((2 * i + self.row, 0), matrix[None]) for i, matrix in enumerate(tensor)])


def test_a_tensor_of_several_parts_is_written_and_read_in_any_cut(tmp_path):
    """As the ranks of parallel=tensor hold a fused projection: rows of each of its matrices."""
    full = torch.arange(12.0).view(4, 3)
    parts = [*TwoMatrices(0).divided("", "", full[[0, 2]]).parts, *TwoMatrices(1).divided("", "", full[[1, 3]]).parts]
    shapes = sharded_checkpoint.write(tmp_path, {"model/a": Divided((4, 3), parts)}, None)
    assert shapes == {"model/a": ((4, 3), torch.float32)}
    assert torch.equal(sharded_checkpoint.read(tmp_path, shapes, PLAIN)["model/a"], full)
    assert torch.equal(sharded_checkpoint.read(tmp_path, shapes, TwoMatrices(1))["model/a"], full[[1, 3]])
