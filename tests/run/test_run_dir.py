"""The files that a run leaves, to the letter: a run that is done, runs that fail, and four that start at the same moment."""

import csv
import errno
import hashlib
import json
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import yaml
from omegaconf import OmegaConf

from drivetrain.core.machine import files
from drivetrain.launch.job import prepare
from drivetrain.logger.files import as_rows
from drivetrain.recipe import write
from drivetrain.run import directory, reader, recipe_file
from tests.support.command import (
    OWN,
    TINY,
    Done,
    checkpoints,
    empty,
    finish,
    losses,
    only_run,
    records,
    result,
    run,
    runs,
    start,
    strict_json,
    train,
    weights,
    with_own_nets,
)  # fmt: skip

RESULT_KEYS = {
    "status", "error", "metrics", "updates", "epochs", "samples_per_second", "step_ms_p50", "step_ms_p95", "data_wait_fraction",
    "peak_memory_bytes", "time_to_first_step_s", "compile_s", "wall_s", "world_size", "device", "device_name",
    "overrides", "config_hash",
    "skipped_samples", "flops_per_sample", "mfu", "mfu_note", "selection", "stopped", "tables", "data",
    "energy_joules", "resumed_at", "target", "batch", "own_process", "remarks", "shares",
}  # fmt: skip
TRAIN_KEYS = {
    "event",
    "update",
    "epoch",
    "loss",
    "lr",
    "samples",
    "skipped",
    "samples_per_second",
    "mfu",
    "data_wait",
    "decode_ms",
    "queue_depth",
    "memory_bytes",
    "noise_scale",
    "cpu_cores",
    "grad_norm",
}
EVALUATE_KEYS = {"event", "update", "epoch", "set", "loss", "accuracy", "ema_loss", "ema_accuracy"}
FILES = {
    ".lock", "checkpoints", "config.yaml", "environment.json", "log.txt", "metrics.csv", "metrics.jsonl", "recipe.yaml",
    "report.html", "result.json", ".hydra",
}  # fmt: skip
SECRET = "sesame-open-4711"
WORDS = (
    "precision=bf16", "model=mlp", "model.hidden=[32,16]", "model.dropout=0.1", "optimizer=sgd", "optimizer.lr=0.05",
    "scheduler=cosine", "scheduler.warmup=3", "batch=accumulate", "batch.accumulation_steps=2", "clip=norm", "ema=ema",
    "loss.label_smoothing=0.1", "augment=[flip_crop]", "augment.flip_crop.flip=0.0", "augment.flip_crop.pad=1",
    "runtime.seed=7", "epochs=2", "log_every=4", "data.validation=0.1", "output_dir=${oc.env:RUNS_PLACE}",
)  # fmt: skip


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that set something in most groups, and took its output_dir from the environment."""
    place = tmp_path_factory.mktemp("done")
    train(*WORDS, cwd=place, env={"RUNS_PLACE": str(place / SECRET)}, code=0)
    return only_run(place / SECRET)


def test_place_and_files(done: Path) -> None:
    assert re.fullmatch(r"\d{4}-\d\d-\d\d/\d\d-\d\d-\d\d-[0-9a-f]{6}", f"{done.parent.name}/{done.name}")
    assert {p.name for p in done.iterdir()} == FILES


def test_result(done: Path) -> None:
    left = result(done)
    assert set(left) == RESULT_KEYS
    assert (left["status"], left["error"], left["updates"], left["epochs"]) == ("completed", None, 20, 2.0)
    assert (left["world_size"], left["compile_s"], left["overrides"]) == (1, None, list(WORDS))
    assert left["device"] in ("cpu", "cuda")
    assert re.fullmatch(r"[0-9a-f]{16}", left["config_hash"])
    positive = ("samples_per_second", "step_ms_p50", "step_ms_p95", "peak_memory_bytes", "time_to_first_step_s", "wall_s")
    assert all(left[key] > 0 for key in positive)
    assert left["step_ms_p50"] <= left["step_ms_p95"]
    assert 0 <= left["data_wait_fraction"] <= 1
    assert left["time_to_first_step_s"] < left["wall_s"]
    assert (left["energy_joules"], left["resumed_at"]) == (None, None)
    assert left["data"]["of"] == "content"


def test_metrics(done: Path) -> None:
    """A line for each log_every updates and each epoch's end, one for each evaluation, and the same as CSV."""
    left, trained, (*evaluated, tested) = result(done), records(done, "train"), records(done, "evaluate")
    assert [r["update"] for r in trained] == [4, 8, 10, 12, 16, 20]
    assert [(r["update"], r["epoch"], r["set"]) for r in evaluated] == [(10, 1, "validation"), (20, 2, "validation")]
    assert (tested["update"], tested["set"], tested["weights"]) == (20, "test", "final")
    assert all(set(r) == TRAIN_KEYS for r in trained)
    assert all(set(r) == EVALUATE_KEYS for r in evaluated)
    assert [r["samples"] for r in trained] == [128 * r["update"] for r in trained]
    assert trained[-1]["loss"] < trained[0]["loss"]
    own = {"event", "update", "epoch", "set", "weights"}
    for name, last in (("validation", evaluated[-1]), ("test", tested)):
        assert left["metrics"][name]["final"] == {k: v for k, v in last.items() if k not in own}
    best = max(evaluated, key=lambda r: r["accuracy"])
    assert left["metrics"]["validation"]["best"] == {k: v for k, v in best.items() if k not in ("event", "epoch", "set")}
    rows = list(csv.DictReader((done / "metrics.csv").open()))
    lines = list(map(json.loads, (done / "metrics.jsonl").read_text().splitlines()))
    assert [{k: v for k, v in row.items() if v} for row in rows] == [
        {k: str(v) for k, v in line.items()} for line in as_rows(lines)
    ]


def test_recipe_replays_the_run(done: Path, tmp_path: Path) -> None:
    """The run's own recipe.yaml, elsewhere: the same config and, bit for bit, the same training."""
    assert run("recipe", "check", str(done / "recipe.yaml"), cwd=tmp_path).code == 0
    train(f"recipe={done / 'recipe.yaml'}", "output_dir=again", cwd=tmp_path, code=0)
    again = only_run(tmp_path / "again")
    assert result(again)["config_hash"] == result(done)["config_hash"]
    assert result(again)["metrics"] == result(done)["metrics"]
    assert losses(again) == losses(done)
    assert len(losses(done)) == 6
    assert weights(again) == weights(done)
    assert (again / "recipe.yaml").read_text() == (done / "recipe.yaml").read_text()


def test_recipe_holds_what_a_recipe_may_hold(done: Path) -> None:
    text = (done / "recipe.yaml").read_text()
    assert "override /precision: bf16" in text
    assert "dropout: 0.1" in text
    for machine_local_keys in ("_target_", "output_dir", "logger", "device", "trust", "resume"):
        assert machine_local_keys not in text


def test_config_is_whole_and_unresolved(done: Path, tmp_path: Path) -> None:
    config = yaml.safe_load((done / "config.yaml").read_text())
    assert config["output_dir"] == "${oc.env:RUNS_PLACE}"
    assert (config["epochs"], config["optimizer"]["momentum"], config["clip"]["max_norm"]) == (2, 0.9, 1.0)
    shown = run("train", "--cfg", "job", *WORDS, cwd=tmp_path, env={"RUNS_PLACE": "elsewhere"}, code=0)
    assert shown.out.strip() == (done / "config.yaml").read_text().strip()


ODD = [
    "1e-3", "1e5", ".5", "5.", "nan", "inf", ".nan", "1_000", "0x1f", "010", "0b1", "12:30:00", "y", "n", "Yes", "off", "TRUE",
    "null", "~", "", " ", " x", "x ", "a: b", "a:b", "- x", "-", "#c", "'q'", '"q"', "${a}", "???", "=", "é", "a\nb",
    "2024-01-01", "{a}", "[a]", "@x", "%x", "&x", "*x", "!x", "|", ">", "words of a line that is longer than a line of YAML " * 2,
]  # fmt: skip


def test_a_config_is_written_as_omegaconf_writes_it() -> None:
    others = [1, 1.5, 1e-3, 1e20, True, None, [], {}, [[1], {"a": [2]}]]
    tree = {"odd": {text: text for text in ODD if text}, "list": [*ODD, *others], "x": {}}
    assert write.plain(tree) == OmegaConf.to_yaml(tree)


def test_what_a_run_chose_is_known_without_reading_its_files(done: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its page is made of that."""
    monkeypatch.setenv("RUNS_PLACE", "elsewhere")
    job = prepare(WORDS)
    assert recipe_file.compared(job.composed, job.machine_local_keys) == reader._read_config(done)


def test_no_secret_of_the_environment_is_written(done: Path) -> None:
    """The variable's name may stand there, its value nowhere."""
    files = [p for p in done.rglob("*") if p.is_file()]
    assert any(b"RUNS_PLACE" in p.read_bytes() for p in files)
    assert [p.name for p in files if SECRET.encode() in p.read_bytes()] == []


def test_environment(done: Path) -> None:
    import torch

    about = json.loads((done / "environment.json").read_text())
    assert about["versions"]["torch"] == torch.__version__.split("+")[0] or about["versions"]["torch"] == torch.__version__
    assert about["config_hash"] == result(done)["config_hash"]
    assert about["overrides"] == list(WORDS)
    assert about["command"][-len(WORDS) :] == list(WORDS)
    assert {"python", "platform", "processor", "git_commit", "lock_hash", "drivetrain"} <= set(about)


def test_checkpoints(done: Path) -> None:
    """One for each epoch's end, with plain names, checked sums, and weights that a plain torch module takes."""
    import safetensors.torch
    import torch

    from drivetrain.model.nets import Mlp

    assert [p.name for p in checkpoints(done)] == ["10", "20"]
    for checkpoint in checkpoints(done):
        assert {p.name for p in checkpoint.iterdir()} == {"model.safetensors", "state.pt", "manifest.json"}
        manifest = json.loads((checkpoint / "manifest.json").read_text())
        assert manifest["update"] == int(checkpoint.name)
        assert manifest["sha256"] == {
            name: hashlib.sha256((checkpoint / name).read_bytes()).hexdigest() for name in ("model.safetensors", "state.pt")
        }
    Mlp((1, 8, 8), 10, [32, 16], 0.1).load_state_dict(safetensors.torch.load_file(checkpoints(done)[-1] / "model.safetensors"))
    state = torch.load(checkpoints(done)[-1] / "state.pt", weights_only=True)
    assert state["progress"]["updates"] == 20


def fail(place: Path, target: str, *words: str, code: int) -> tuple[Done, Path, dict[str, Any]]:
    """Run one of the user's networks that fails; what it left, with what all failures have in common checked."""
    ended = train(*OWN, f"model.target=my_nets.{target}", *words, "epochs=1", cwd=with_own_nets(place))
    run_dir = only_run(place / "outputs")
    left = strict_json((run_dir / "result.json").read_text())
    assert ended.code == code, ended
    assert len(ended.err.splitlines()) == 1, "one line says why"
    assert "Traceback" not in ended.err + ended.out
    assert set(left) == RESULT_KEYS
    assert left["error"].splitlines()[0] in ended.err
    assert left["config_hash"] == json.loads((run_dir / "environment.json").read_text())["config_hash"]
    assert FILES - {"checkpoints", "log.txt"} <= {p.name for p in run_dir.iterdir()}
    assert run("recipe", "check", str(run_dir / "recipe.yaml"), cwd=place).code in (0, 2)
    return ended, run_dir, left


def test_an_error_while_training(tmp_path: Path) -> None:
    """Exit 1; the line on stderr, the traceback in log.txt, and all that was logged before."""
    ended, run_dir, left = fail(tmp_path / "here", "Raises", code=1)
    assert left["status"] == "failed"
    assert "RuntimeError: the third forward is too much" in left["error"]
    assert "log.txt" in ended.err
    log = (run_dir / "log.txt").read_text()
    assert "Traceback" in log
    assert "second line of the same error" in log
    assert "my_nets.py" in log
    assert [r["update"] for r in records(run_dir, "train")] == [1, 2]
    assert left["updates"] == 2


def test_a_loss_that_is_not_finite(tmp_path: Path) -> None:
    """Exit 3, "diverged", and the update."""
    _, run_dir, left = fail(tmp_path / "here", "Diverges", code=3)
    assert left["status"] == "diverged"
    assert "nan" in left["error"]
    assert "3" in left["error"]
    assert [r["update"] for r in records(run_dir, "train")] == [1, 2]


def test_code_that_exits(tmp_path: Path) -> None:
    """sys.exit(0) in the user's own code does not pass for a finished run."""
    _, _, left = fail(tmp_path / "here", "Exits", code=1)
    assert left["status"] == "failed"


def test_an_evaluation_that_is_not_finite(here: Path) -> None:
    """Whatever it is called, the files stay JSON."""
    ended = train(*OWN, "model.target=my_nets.NanInEvaluation", "epochs=1", cwd=here)
    assert "Traceback" not in ended.err
    run_dir = only_run(here / "outputs")
    assert strict_json((run_dir / "result.json").read_text())["updates"] == 8
    assert [strict_json(line)["update"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()][-1] == 8


def test_a_reader_that_goes_away_does_not_end_the_run(tmp_path: Path) -> None:
    """`drivetrain train | head -1`."""
    process = start("train", *TINY, "epochs=2", cwd=tmp_path)
    assert process.stdout is not None
    process.stdout.close()
    process.stdout = None
    finish(process)
    assert result(only_run(tmp_path / "outputs"))["status"] == "completed"


def test_four_at_the_same_moment(tmp_path: Path) -> None:
    processes = [start("train", "-q", *TINY, "updates=1", cwd=tmp_path) for _ in range(4)]
    assert [finish(p).code for p in processes] == [0, 0, 0, 0]
    left = runs(tmp_path / "outputs")
    assert len(left) == 4
    assert [result(d)["status"] for d in left] == ["completed"] * 4
    assert len({weights(d) for d in left}) == 1, "and they did the same"


def test_a_run_with_awkward_paths(tmp_path: Path) -> None:
    """Spaces, commas, quotes, braces and letters beyond ASCII in the place of the runs; resuming finds it."""
    place = empty(tmp_path / "my runs, v=1 {a} [b] (c) ü")
    train(*TINY, "updates=2", f"output_dir='{place}'", cwd=tmp_path, code=0)
    run_dir = only_run(place)
    train(f"resume={run_dir}", "updates=3", cwd=tmp_path, code=0)
    assert result(run_dir)["updates"] == 3


def test_a_full_disk_is_told_with_the_file_that_it_has_no_room_for(tmp_path, monkeypatch):
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left") as refused:
        files.write_text(tmp_path / "out.csv", "a")
    assert refused.value.filename == str(tmp_path / "out.csv")
    assert [*tmp_path.iterdir()] == []


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux has a file that is always full")
def test_a_run_that_cannot_print_its_recipe_leaves_nothing(tmp_path):
    """Standard output is a file on a full disk; the folder would hold the space that a run reserves."""
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "drivetrain", "train", *TINY], cwd=tmp_path, stdout=full, stderr=subprocess.PIPE, check=False
        )
    assert done.returncode == 1
    assert b"error: what this command writes cannot be written: No space left on device" in done.stderr
    assert [*tmp_path.iterdir()] == []


def test_temporary_folders_of_killed_runs_go_with_the_next_run(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for name in (
        "drivetrain-run-12345678",
        "drivetrain-run-lives___",
        "drivetrain-run-mine",
        ".drivetrain-run-00000000",
        ".drivetrain-run-11111111",
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / ".lock").touch()
    os.utime(tmp_path / ".drivetrain-run-00000000", (0, 0))  # the other may just begin
    (tmp_path / "drivetrain-run-a_link__").symlink_to(tmp_path / "drivetrain-run-mine")
    os.mkfifo(tmp_path / "drivetrain-run-a_pipe__")  # anybody may put one there, and nobody waits for it
    with directory.locked(tmp_path / "drivetrain-run-lives___"), directory.temporary() as folder:
        kept = {"drivetrain-run-lives___", "drivetrain-run-mine", "drivetrain-run-a_link__", ".drivetrain-run-11111111"}
        assert {path.name for path in tmp_path.iterdir()} == {folder.name, *kept}
        assert (tmp_path / "drivetrain-run-mine" / ".lock").exists()
        assert multiprocessing.util.get_temp_dir() == str(folder)
        with directory.temporary():
            assert folder.is_dir()
        (tmp_path / "drivetrain-run-the_own_").mkdir()  # of a process that this one has started and killed
    assert {path.name for path in tmp_path.iterdir()} == kept
    assert multiprocessing.current_process()._config.get("tempdir") != str(folder)


def test_the_place_of_a_run_is_no_part_of_its_config(tiny):
    hashes = [prepare(tiny(*words)).config_hash for words in (["output_dir=a"], ["output_dir=b"], ["optimizer.lr=0.5"])]
    assert hashes[0] == hashes[1] != hashes[2]
