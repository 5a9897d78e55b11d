"""Checkpoints that are no longer, or never were, what a run writes: named, passed over, and read within limits."""

import contextlib
import io
import json
import os
import pickle
import shutil
import zipfile
from functools import reduce
from pathlib import Path

import pytest
import safetensors.torch
import torch

from drivetrain.cli import main
from drivetrain.core.errors import UserError
from drivetrain.core.machine import files
from drivetrain.launch import launcher
from drivetrain.run import reader
from drivetrain.saving import checkpoint_io, content, manifest, sharded_checkpoint
from drivetrain.saving.content import Divided, TensorPart, Undivided, whole
from tests.saving.test_fuzz import archive_of, members, replaced, sign
from tests.support import odd, slow
from tests.support.put import put
from tests.support.to_end import continued

WEIGHTS = {"w": torch.arange(4.0)}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    for update in (1, 2):
        checkpoint_io.save(tmp_path, update, WEIGHTS, {"a": torch.ones(3), "b": [1, "x", None, 2.5, (1, 2)]})
    return tmp_path


def passed_over(run: Path) -> str:
    found, problems = manifest.newest_valid(run)
    assert found == run / "checkpoints/1"
    (problem,) = problems
    return problem


# --- names and files ---


def test_only_plain_numbers_are_updates(run):
    for name in ("²", "٣", "+3", "03", " 3", "3_0", "1" * 200, ".writing-20"):
        shutil.copytree(run / "checkpoints/2", run / "checkpoints" / name)
        assert sorted(checkpoint_io.updates(run)) == [1, 2], name
    assert manifest.newest_valid(run) == (run / "checkpoints/2", [])


def test_a_link_is_no_checkpoint_and_nothing_is_written_or_removed_through_it(run, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (elsewhere / "precious").write_text("kept")
    (run / "checkpoints/3").symlink_to(elsewhere)
    (run / "checkpoints/.writing-4").symlink_to(elsewhere)
    assert sorted(checkpoint_io.updates(run)) == [1, 2]
    checkpoint_io.save(run, 4, WEIGHTS, {})
    checkpoint_io.prune(run, lambda saved: [])
    assert [p.name for p in elsewhere.iterdir()] == ["precious"]


@pytest.mark.parametrize("name", ["manifest.json", "state.pt", "model.safetensors"])
def test_what_stands_in_place_of_a_file_neither_holds_up_nor_fills_the_memory(run, name):
    file = run / "checkpoints/2" / name
    for how in odd.IN_PLACE.values():
        odd.remove(file)
        how(file)
        assert name in passed_over(run)


PLACES = (
    "checkpoints/.writing-6", "metrics.jsonl", "checkpoints/4", "checkpoints/.replaced-6", "checkpoints", "checkpoints/6",
    "averages", "metrics.csv", "result.json", "trackers.json", "environment.json", "recipe.yaml", "config.yaml", "log.txt",
    ".lock", ".hydra", "report.html", ".reserve", "ranks",
)  # fmt: skip
IN_PLACE = {
    "a FIFO": lambda file, _: os.mkfifo(file),
    "a link to nothing": lambda file, elsewhere: file.symlink_to(elsewhere / "made"),
    "a link to a file": lambda file, elsewhere: file.symlink_to(elsewhere / "precious"),
    "a link to a folder": lambda file, elsewhere: file.symlink_to(elsewhere),
}


@pytest.mark.parametrize("how", IN_PLACE)
@pytest.mark.parametrize("place", slow.but(PLACES[:2].__contains__, PLACES))
def test_a_strangers_run_is_gone_on_with_or_refused_and_nothing_is_touched_outside(once, tmp_path, capsys, place, how):
    elsewhere, run_dir = tmp_path / "elsewhere", tmp_path / "run"
    put(elsewhere / "precious", "kept")
    shutil.copytree(once, run_dir)
    odd.remove(run_dir / place)
    IN_PLACE[how](run_dir / place, elsewhere)
    code = main.main(["train", "-q", f"resume={run_dir}", "updates=6"])
    said = capsys.readouterr().err
    assert code == 0 or (code in (1, 2) and "error: " in said and place not in PLACES[:2]), said
    assert "raceback" not in said
    assert [(file.name, file.read_text()) for file in elsewhere.iterdir()] == [("precious", "kept")]


# --- the manifest ---


def test_every_flipped_bit_of_a_manifest_is_seen(run):
    checkpoint = run / "checkpoints/2"
    file = checkpoint / "manifest.json"
    whole = file.read_bytes()
    for place in range(len(whole) * 8):
        if place % 23 and place > 240:  # all of the first fields, and some of the rest
            continue
        flipped = bytearray(whole)
        flipped[place // 8] ^= 1 << place % 8
        file.write_bytes(flipped)
        assert manifest.verify(checkpoint) is not None, f"bit {place}"
    file.write_bytes(whole)
    assert manifest.verify(checkpoint) is None


def test_a_manifest_of_odd_json_is_no_manifest(run):
    for text in ("[" * 10**6, '{"a":' * 10**5, "9" * 10**5, "[]", "null", '{"format": 3}', "\ud800"):
        (run / "checkpoints/2/manifest.json").write_bytes(text.encode("utf-8", "surrogatepass"))
        assert "has no readable manifest.json" in passed_over(run), text[:20]


# --- the content, with the right hashes ---


def pickled(content: bytes):
    return lambda file: replaced(file, content)


class Command:
    def __reduce__(self):
        return os.mkdir, ("ran",)


STATES = {  # what is seen before torch reads it
    "a state that inflates": (lambda f: archive_of(f, members(f), zipfile.ZIP_DEFLATED), "it is compressed"),
    "no archive": (lambda f: f.write_bytes(b"nothing of the kind"), "it cannot be read"),
    "an archive without a structure": (lambda f: zipfile.ZipFile(f, "w").close(), "it has no readable structure"),
    "a call for empty bytes": (
        pickled(b"\x80\x02cbuiltins\nbytearray\n\x8a\x05\x00\x00\x00\x00\x02\x85R."), "it names bytearray",
    ),
    "the same in the words of Python 2": (pickled(b"c__builtin__\nbytearray\n(I9999999999\ntR."), "it names bytearray"),
}  # fmt: skip
REFUSED = {  # and what torch refuses
    "a command": pickle.dumps(Command(), 2), "a huge memo": b"\x80\x02Nr\xff\xff\xff\x6f" * 3,
    "a huge array of bytes": b"\x80\x02\x96\x00\x00\x00\x00\x02\x00\x00\x00.", "half a pickle": b"\x80\x02}q\x00(",
    "a deep pickle": b"\x80\x02" + b"(" * 10**5, "no pickle": b"", "a name": b"\x80\x04\x8c\x02os\x8c\x06system\x93.",
}  # fmt: skip


def test_a_state_with_the_right_hash_and_malformed_content_is_passed_over(run):
    state = run / "checkpoints/2/state.pt"
    whole = state.read_bytes()
    for change, says in STATES.values():
        state.write_bytes(whole)
        change(state)
        sign(run / "checkpoints/2")
        problem = passed_over(run)
        assert "has a malformed state.pt" in problem
        assert says in problem


ODD = {"empty": b"", "long": b"\xff" * 8, "more": b"\x02" + bytes(7) + b"{}" + bytes(9), "a list": b"\x02" + bytes(7) + b"[]"}


def test_malformed_content_with_the_right_hash_is_refused(run, tmp_path):
    """A resumed run goes on from the checkpoint before it (test_fuzz); what reads this one alone says why not."""
    checkpoint = run / "checkpoints/2"
    for odd_pickle in REFUSED.values():
        replaced(checkpoint / "state.pt", odd_pickle)
        with pytest.raises(UserError, match="checkpoints/2 cannot be read: ") as refused:
            checkpoint_io.load(checkpoint)
        assert len(str(refused.value).splitlines()) == 1
    assert not (tmp_path / "ran").exists()
    shutil.copy(run / "checkpoints/1/state.pt", checkpoint)
    for odd_bytes in ODD.values():
        (checkpoint / "model.safetensors").write_bytes(odd_bytes)
        with pytest.raises(UserError, match="checkpoints/2 cannot be read: "):
            checkpoint_io.load(checkpoint)


DTYPES = [
    torch.float32, torch.bfloat16, torch.float64, torch.uint8, torch.int64, torch.bool, torch.complex64, torch.uint16,
    torch.float8_e4m3fn,
]  # fmt: skip


def test_what_states_hold_passes(tmp_path):
    """Every type of tensor, parameters, strides, shared storages, bytes, sets and nested containers."""
    shared = torch.zeros(4, 4)
    state = {
        **{str(dtype): torch.zeros(3, dtype=dtype) for dtype in DTYPES},
        "shared": [shared, shared.T, shared[1]], "parameter": torch.nn.Parameter(torch.ones(2)), "shape": torch.Size([1, 2]),
        "dtype": torch.float16, "bytes": b"abc", "set": {1, 2}, "device": torch.device("cpu"), "big": 2**200, "none": None,
    }  # fmt: skip
    saved = checkpoint_io.save(tmp_path, 1, WEIGHTS, state)
    assert manifest.verify(saved) is None
    assert checkpoint_io.load(saved)[1]["big"] == 2**200
    file = io.BytesIO()
    torch.save(torch.optim.Adam([torch.nn.Parameter(torch.ones(2))]).state_dict(), file)
    content.check_state(file)


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda state: state.pop("progress"), "KeyError: 'progress'"),
        (lambda state: state["optimizer"]["param_groups"][0].pop("lr"), "KeyError: 'lr'"),
        (lambda state: state["optimizer"]["param_groups"][0].update(lr=torch.ones(2)), "ValueError: only one element"),
    ],
)
def test_a_checkpoint_that_verifies_and_cannot_be_restored_falls_back_to_the_one_before(train, caplog, spoil, why):
    done = train("updates=8", "saving.every_updates=4", "saving.keep=2")
    newest = done.run_dir / "checkpoints/8"
    weights, state = checkpoint_io.load(newest)
    spoil(state)
    torch.save(state, newest / "state.pt")
    sign(newest)
    (done.run_dir / "result.json").unlink()
    continued(done.run_dir, updates=8)
    assert any(f"{newest} cannot be restored ({why}" in line and "passed over" in line for line in caplog.messages)
    written = safetensors.torch.load_file(newest / "model.safetensors")
    assert all(torch.equal(written[name], weights[name]) for name in weights), "the repeated updates give the same bits"


@pytest.mark.parametrize("sharded", ["false", "true"])
def test_a_checkpoint_with_numbers_of_parameters_loses_nothing(train, sharded):
    """As torch writes an optimizer's state: the names are in the groups."""
    done = train("updates=8", "saving.every_updates=4", "saving.keep=2", f"saving.sharded={sharded}", "optimizer=muon")
    whole, _ = checkpoint_io.load(done.run_dir / "checkpoints/8")
    shutil.rmtree(done.run_dir / "checkpoints/8")
    older = done.run_dir / "checkpoints/4/state.pt"
    state = torch.load(older, weights_only=True)
    optimizer = state["optimizer"]
    numbers = {name: n for n, name in enumerate(name for group in optimizer["param_groups"] for name in group["params"])}
    optimizer["state"] = {numbers[name]: values for name, values in optimizer["state"].items()}
    optimizer["param_groups"] = [{**g, "params": [numbers[n] for n in g["params"]]} for g in optimizer["param_groups"]]
    torch.save(state, older)
    sign(older.parent)
    (done.run_dir / "result.json").unlink()
    continued(done.run_dir, updates=8)
    found, _ = checkpoint_io.load(done.run_dir / "checkpoints/8")
    assert all(torch.equal(found[name], value) for name, value in whole.items())


# --- between the two renames ---


def test_a_kill_while_a_checkpoint_is_replaced_leaves_it(run, monkeypatch):
    shutil.rmtree(run / "checkpoints/1")  # saving.keep=1
    rename, calls = Path.rename, []

    def killed(self: Path, target: Path) -> Path:
        calls.append(target)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return rename(self, target)

    with monkeypatch.context() as m:
        m.setattr(Path, "rename", killed)
        m.setattr(shutil, "rmtree", lambda *_, **__: None)  # a kill cleans up nothing
        with pytest.raises(KeyboardInterrupt):
            checkpoint_io.save(run, 2, WEIGHTS, {})
    assert (run / "checkpoints/.replaced-2").is_dir()
    assert not (run / "checkpoints/2").exists()
    assert manifest.newest_valid(run) == (run / "checkpoints/2", [])
    assert "a" in checkpoint_io.load(run / "checkpoints/2")[1]


def test_the_order_of_syncs_and_renames(tmp_path, monkeypatch):
    """The files are on the disk before their folder, the folder before its name, the name before the older one is removed."""
    checkpoint_io.save(tmp_path, 3, WEIGHTS, {"a": 1})
    calls: list[str] = []
    opened: dict[int, str] = {}
    real_open, sync, rename, remove = os.open, os.fsync, Path.rename, files.remove

    def open_(path, *how, **more):
        handle = real_open(path, *how, **more)
        opened[handle] = Path(path).name
        return handle

    monkeypatch.setattr(os, "open", open_)
    monkeypatch.setattr(os, "fsync", lambda handle: (calls.append(f"sync {opened[handle]}"), sync(handle)))
    monkeypatch.setattr(Path, "rename", lambda self, to: (calls.append(f"{self.name} → {to.name}"), rename(self, to))[1])
    monkeypatch.setattr(files, "remove", lambda path: (calls.append(f"remove {path.name}"), remove(path)))
    checkpoint_io.save(tmp_path, 3, WEIGHTS, {"a": 2})
    assert calls[0] == "remove .writing-3"
    assert calls[1].startswith("sync .manifest.json.writing-")
    assert sorted(calls[2:5]) == ["sync manifest.json", "sync model.safetensors", "sync state.pt"]
    assert calls[5:] == [
        "sync .writing-3", "remove .replaced-3", "3 → .replaced-3", ".writing-3 → 3", "sync checkpoints", "remove .replaced-3",
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["config.yaml", "environment.json", "recipe.yaml", "result.json", "metrics.jsonl"])
def test_odd_files_of_a_run_are_refused_or_left_out(once, tmp_path, name):
    run = shutil.copytree(once, tmp_path / "copy")
    swaps = [odd.IN_PLACE[how] for how in ("a FIFO", "a link to /dev/zero")]
    contents = [lambda file, content=content: file.write_bytes(content) for content in (b"\xff\xfe\x00a: \x80", b"[" * 50_000)]
    for spoil in (*swaps, *contents):
        odd.remove(run / name)
        spoil(run / name)
        with contextlib.suppress(UserError):
            launcher.prepare([f"resume={run}"])
        reader.read(run)


def test_a_checkpoint_without_its_weights_is_incomplete(tmp_path):
    torch.save({}, tmp_path / "state.pt")
    manifest.write(tmp_path, 1, {})
    assert manifest.verify(tmp_path) == "is incomplete"


# --- what a manifest says of the model ---

ABOUT = {
    "targets": "class", "shape": [5], "inputs": None, "images": None, "outputs": 2, "classes": ["a", "b"], "dtype": None,
    "vocabulary": None, "normalize": {"mean": [0.5], "std": [1.0]},
}  # fmt: skip
TREE = {"items": [{"shape": [3], "dtype": "int64"}, {"keys": {"mask": {"shape": [], "dtype": "bool"}}}]}


def test_what_a_run_says_of_its_model_is_good():
    for good in (
        {},
        ABOUT,
        {**ABOUT, "shape": None, "inputs": TREE},
        {**ABOUT, "classes": None, "dtype": "uint8", "vocabulary": 9},
    ):
        assert manifest.problem(good) is None


DEEPER_THAN_ANY = reduce(lambda tree, _: {"items": [tree]}, range(50), {"shape": [3], "dtype": "int64"})
NO_MODELS = [
    *(("shape", value) for value in (None, 5, "x", [-3], ["a"], {"a": 1}, 1e300, True, [[1]], [10**12])),
    *(("inputs", value) for value in (5, "x", [3], {"a": 1}, True, DEEPER_THAN_ANY)),
    *(("inputs", value) for value in ({"shape": [3], "dtype": "load"}, {"items": {}}, {"keys": []})),
    *(("outputs", value) for value in (None, -1, 0, [], {}, "x", 1e300, True, 10**30)),
    *(("classes", value) for value in (5, [], {}, "xy", [1, 2], ["a"], {"a": 1, "b": 2})),
    *(("dtype", value) for value in ("load", "_C", 5, [])),
    *(("vocabulary", value) for value in (-1, "x", 1.5)),
    *(("normalize", value) for value in (5, {}, {"mean": [1.0]}, {"mean": [1.0], "std": []}, {"mean": "x", "std": [1.0]})),
    *(("units", value) for value in (5, [], {"mean": [1.0], "std": [1.0, 2.0]})),
    *(("targets", value) for value in ("x", 5, [])),
    *(("images", value) for value in (5, [])),
    ("decodes_images", 1),
]  # fmt: skip


def test_a_manifest_that_describes_no_model(run):
    """Values that are none, and a description without what a model needs."""
    told = [({**ABOUT, **({"shape": None} if name == "inputs" else {}), name: value}, f"{name}=") for name, value in NO_MODELS]
    for about, says in (*told, ({name: value for name, value in ABOUT.items() if name != "shape"}, "no shape")):
        (run / "checkpoints/2/manifest.json").unlink()
        manifest.write(run / "checkpoints/2", 2, about)
        assert f"has a manifest.json with {says}" in passed_over(run), about


# --- checkpoints in parts: written, read back, and not believed ---


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
