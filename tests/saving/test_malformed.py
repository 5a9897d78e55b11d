"""Checkpoints that are no longer, or never were, what a run writes: named, passed over, and read within limits."""

import io
import os
import shutil
import zipfile
from functools import reduce
from pathlib import Path

import pytest
import safetensors.torch
import torch

from drivetrain.cli import main
from drivetrain.core.errors import UserError
from drivetrain.saving import checkpoint_io, content, manifest
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
    file = run / "checkpoints/2/manifest.json"
    whole = file.read_bytes()
    for place in (*range(240), *range(240, len(whole) * 8, 23)):  # all of the first fields, and some of the rest
        flipped = bytearray(whole)
        flipped[place // 8] ^= 1 << place % 8
        file.write_bytes(flipped)
        assert manifest.verify(file.parent) is not None, f"bit {place}"


OF_OTHER_TYPES: list[dict[str, object]] = [
    {"bytes": "x"}, {"bytes": {"state.pt": "x"}}, {"sha256": None}, {"sha256": {"state.pt": 1}}, {"about": []},
    {"sha256": {"\0": "x"}}, {"sha256": {"\udc80": "x"}},
]  # fmt: skip


def test_a_manifest_of_other_types_is_none(run):
    checkpoint = run / "checkpoints/2"
    content = {k: v for k, v in manifest.read(checkpoint).items() if k != manifest.OWN}
    for change in OF_OTHER_TYPES:
        (checkpoint / "manifest.json").write_text(manifest.text(content | change))
        assert isinstance(manifest.verify(checkpoint), str), change


# --- the content, with the right hashes ---


def pickled(content: bytes):
    return lambda file: replaced(file, content)


STATES = {  # what is seen before torch reads it
    "a state that inflates": (lambda f: archive_of(f, members(f), zipfile.ZIP_DEFLATED), "it is compressed"),
    "no archive": (lambda f: f.write_bytes(b"nothing of the kind"), "it cannot be read"),
    "an archive without a structure": (lambda f: zipfile.ZipFile(f, "w").close(), "it has no readable structure"),
    "a call for empty bytes": (
        pickled(b"\x80\x02cbuiltins\nbytearray\n\x8a\x05\x00\x00\x00\x00\x02\x85R."), "it names bytearray",
    ),
    "the same in the words of Python 2": (pickled(b"c__builtin__\nbytearray\n(I9999999999\ntR."), "it names bytearray"),
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


@pytest.mark.parametrize(("name", "content"), [("state.pt", b"\x80\x02}q\x00("), ("model.safetensors", b"\xff" * 8)])
def test_what_reads_a_malformed_checkpoint_alone_says_so_in_one_line(run, name, content):
    """Of the ways in which a file may be malformed, see HOSTILE and `of_weights` in test_fuzz."""
    file = run / "checkpoints/2" / name
    replaced(file, content) if name == "state.pt" else file.write_bytes(content)
    with pytest.raises(UserError, match="checkpoints/2 cannot be read: ") as refused:
        checkpoint_io.load(file.parent)
    assert len(str(refused.value).splitlines()) == 1


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
