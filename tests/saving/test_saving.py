"""When states are saved, and which are kept."""

import contextlib
import errno
import json
import os
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import safetensors.torch
import torch

import drivetrain
from drivetrain.core.errors import CannotSave, UserError
from drivetrain.core.machine import files
from drivetrain.core.options.horizon import Progress
from drivetrain.inference.finished import checkpoint_of
from drivetrain.launch.job import prepare
from drivetrain.launch.worker import AVERAGED
from drivetrain.logger.files import Files
from drivetrain.parallel import Parallel
from drivetrain.run import records
from drivetrain.run.directory import RunDirHandle
from drivetrain.run.result import Result
from drivetrain.saving import checkpoint_io, manifest, options, space
from drivetrain.saving.content import whole
from drivetrain.saving.options import Best, Last
from drivetrain.saving.writer import HostCopy, Writer
from tests.support.command import records as records_of
from tests.support.to_end import continued, run_to_end
from tests.support.waiting import LIMIT_S

EPOCHS = ["updates=null", "epochs=4"]  # of four updates each


@pytest.mark.parametrize(
    ("words", "updates"),
    [
        ([*EPOCHS, "saving.keep=1"], [16]),
        ([*EPOCHS, "saving.keep=2"], [12, 16]),  # the newest epochs
        # Ten updates an epoch; counted from the last save.
        (["data.samples=120", "updates=null", "epochs=2", "saving.every_updates=4"], [4, 8, 10, 14, 18, 20]),
        (["data.samples=120", "updates=7", "saving.every_updates=3"], [3, 6, 7]),  # also the end of a run within an epoch
    ],
)
def test_last_saves_every_so_many_updates_and_at_the_end_of_each_epoch(make, tmp_path, words, updates):
    make("saving.keep=50", *words).fit()
    assert checkpoint_io.updates(tmp_path / "run") == updates


def test_the_sooner_of_the_two_counts(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    last = options.Last(every_updates=10, every_minutes=2.0)
    last.restart(5)
    assert not last.counted(14)
    assert last.counted(15)
    now[0] += 119
    assert not last.due()
    now[0] += 1
    assert last.due()


def test_what_cannot_be_is_refused(problems):
    assert any("saving=best picks by evaluations" in p for p in problems("saving=best", "evaluate_every=20", "epochs=10"))
    for word in ("saving.keep=0", "saving.every_updates=0", "saving.every_minutes=0"):
        assert any(p.startswith(word) for p in problems(word))
    assert problems("saving=last", "saving.keep=2", "saving.keep_recent=2")[0].startswith("saving.keep_recent=2 has no effect")
    for words in (["saving=last", "saving.keep=2", "saving.keep_recent=3"], ["saving=best", "saving.keep_recent=2"],
                  ["saving=best", "evaluate_every=10", "epochs=10"]):  # fmt: skip
        prepare(words)


@pytest.mark.parametrize("option", ["last", "best"])
def test_each_state_is_saved_once(make, monkeypatch, option):
    writes, save = [], checkpoint_io.save
    monkeypatch.setattr(
        checkpoint_io, "save", lambda run_dir, update, *rest: writes.append(update) or save(run_dir, update, *rest)
    )
    make(*EPOCHS, f"saving={option}", "saving.every_updates=2").fit()
    assert writes == sorted(set(writes))
    assert len(writes) == 8


def test_the_umask_says_who_can_read_a_checkpoint(tmp_path):
    before = os.umask(0o027)
    try:
        folder = checkpoint_io.save(tmp_path, 1, {"a": torch.zeros(2)}, {})
        checkpoint_io.write_weights({"a": torch.zeros(2)}, tmp_path / "averaged.safetensors")
    finally:
        os.umask(before)
    files = [*folder.iterdir(), tmp_path / "averaged.safetensors"]
    assert {path.name: oct(path.stat().st_mode & 0o777) for path in files} == {path.name: "0o640" for path in files}


# --- a save that is killed or repeated ---

WEIGHTS = {"w": torch.arange(4.0)}


def left_in(run_dir: Path) -> list[str]:
    """All that stands beside the checkpoints, too."""
    return sorted(p.name for p in (run_dir / "checkpoints").iterdir())


def test_what_a_killed_save_left_is_removed(tmp_path: Path) -> None:
    root, elsewhere = tmp_path / "checkpoints", tmp_path / "elsewhere"
    for folder in (root / "2", root / ".writing-4", root / ".replaced-2", root / ".replaced-3", elsewhere):
        folder.mkdir(parents=True)
        (folder / "state.pt").touch()
    (root / ".writing-6").symlink_to(elsewhere)
    Writer(tmp_path, Last(), Parallel(), contextlib.nullcontext).start()
    assert {p.name for p in root.iterdir()} - {".writing-6"} == {"2", "3"}, "3 was to be replaced, and was not"
    assert (elsewhere / "state.pt").exists()


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
    target = checkpoint_io.save(tmp_path, 3, {"w": torch.ones(2)}, {"a": 2})
    assert calls[0] == "remove .writing-3"
    assert calls[1].startswith("sync .manifest.json.writing-")
    assert sorted(calls[2:5]) == ["sync manifest.json", "sync model.safetensors", "sync state.pt"]
    assert calls[5:] == [
        "sync .writing-3", "remove .replaced-3", "3 → .replaced-3", ".writing-3 → 3", "sync checkpoints", "remove .replaced-3",
    ]  # fmt: skip
    monkeypatch.undo()
    weights, state = checkpoint_io.load(target)
    assert (weights["w"].tolist(), state, left_in(tmp_path)) == ([1.0, 1.0], {"a": 2}, ["3"])


def test_a_kill_while_a_checkpoint_is_replaced_leaves_it(tmp_path, monkeypatch):
    checkpoint_io.save(tmp_path, 2, WEIGHTS, {"a": 1})
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
            checkpoint_io.save(tmp_path, 2, WEIGHTS, {})
    assert (tmp_path / "checkpoints/.replaced-2").is_dir()
    assert not (tmp_path / "checkpoints/2").exists()
    assert manifest.newest_valid(tmp_path) == (tmp_path / "checkpoints/2", [])
    assert "a" in checkpoint_io.load(tmp_path / "checkpoints/2")[1]


# --- asynchronous saving: the state of the save is written while training goes on, one write after the other ---


@pytest.fixture
def held(monkeypatch) -> tuple[threading.Event, threading.Event, list[str]]:
    """Writes wait for a word: (a write has begun, it may go on, what happened)."""
    begun, go_on, calls = threading.Event(), threading.Event(), []
    save = checkpoint_io.save

    def waits(run_dir, update, *rest):
        calls.append(f"begins {update}")
        begun.set()
        assert go_on.wait(LIMIT_S)
        save(run_dir, update, *rest)
        calls.append(f"ends {update}")

    monkeypatch.setattr(checkpoint_io, "save", waits)
    return begun, go_on, calls


def test_what_is_written_is_a_copy_of_the_save(tmp_path, held):
    """The optimizer changes weights in place, and its own state, while the thread has written nothing yet."""
    begun, go_on, _ = held
    writer, progress = Writer(tmp_path, Last(asynchronous=True), Parallel(), contextlib.nullcontext), Progress(updates=1)
    weights, moment = torch.zeros(3), torch.zeros(3)
    trainer = stub(weights, progress)
    trainer.state().update(optimizer={"moment": moment})
    writer.save(trainer)
    assert begun.wait(LIMIT_S), "the loop goes on while the write has not ended"
    weights.add_(1)
    moment.add_(1)
    go_on.set()
    writer.wait()
    assert safetensors.torch.load_file(tmp_path / "checkpoints/1/model.safetensors")["w"].tolist() == [0, 0, 0]
    assert checkpoint_io.load(tmp_path / "checkpoints/1")[1]["optimizer"]["moment"].tolist() == [0, 0, 0]


def test_a_save_waits_for_the_write_before(tmp_path, held, monkeypatch):
    begun, go_on, calls = held
    writer, progress = Writer(tmp_path, Last(asynchronous=True), Parallel(), contextlib.nullcontext), Progress(updates=1)
    writer.save(stub(torch.zeros(3), progress))
    assert begun.wait(LIMIT_S)
    join = threading.Thread.join

    def joined(thread: threading.Thread, timeout: float | None = None) -> None:
        calls.append(f"waits for {thread.name}")
        go_on.set()
        join(thread, timeout)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "join", joined)
        progress.updates = 2
        writer.save(stub(torch.ones(3), progress))
    writer.wait()
    assert calls == ["begins 1", "waits for saving", "ends 1", "begins 2", "ends 2"]
    assert safetensors.torch.load_file(tmp_path / "checkpoints/2/model.safetensors")["w"].tolist() == [1, 1, 1]


def test_an_error_of_a_write_is_raised_by_the_next_save(tmp_path, monkeypatch):
    def refuses(*_: object) -> None:
        raise RuntimeError("refused")

    monkeypatch.setattr(checkpoint_io, "save", refuses)
    writer = Writer(tmp_path, Last(asynchronous=True), Parallel(), contextlib.nullcontext)
    writer.save(stub(torch.zeros(3), Progress(updates=1)))
    with pytest.raises(RuntimeError, match="refused"):
        writer.save(stub(torch.zeros(3), Progress(updates=2)))


# --- a disk that is full, or refuses to write: one message, nothing half-written, and a result ---

MB = 2**20


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 4 MB."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = os.geteuid() == 0 and shutil.which("mount") is not None
    if not mounted or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "none", place], check=False).returncode:
        pytest.skip("only root may mount a small disk")
    yield place
    subprocess.run(["umount", "-l", place], check=True)


def fill(disk: Path, left: int = 0) -> None:
    """Leave this many bytes."""
    (disk / "filled").write_bytes(bytes(max(0, shutil.disk_usage(disk).free - left)))


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("told", [True, False], ids=["the disk tells its space", "it does not"])
def test_a_full_disk_keeps_the_last_checkpoint_and_no_part_of_the_next(disk, sharded, told, monkeypatch):
    weights = {"w": torch.ones(MB // 4 // 2)}
    state = {"optimizer": {}, "ema": {}}

    def save(update: int) -> None:
        if sharded:
            checkpoint_io.save_sharded(disk, update, {f"model/{n}": whole(t) for n, t in weights.items()}, state, None)
        else:
            checkpoint_io.save(disk, update, weights, state)

    save(1)
    fill(disk, MB // 4)
    if not told:  # a quota is not in what a disk tells
        monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(total=0, free=0))
    with pytest.raises(CannotSave, match=r"checkpoint 2 could not be written to .*528 kB are needed") as error:
        save(2)
    assert f"The last checkpoint, {disk / 'checkpoints/1'}, is safe: go on with resume={disk}" in str(error.value)
    assert left_in(disk) == ["1"]
    assert manifest.newest_valid(disk) == (disk / "checkpoints/1", [])


def test_a_full_disk_ends_an_asynchronous_save_with_the_same_message(disk):
    writer = Writer(disk, Last(asynchronous=True), Parallel(), contextlib.nullcontext)
    writer.start()
    fill(disk)
    writer.save(stub(torch.zeros(MB // 4), Progress(updates=1)))
    with pytest.raises(CannotSave, match=r"checkpoint 1 could not be written.*There is no checkpoint before it"):
        writer.wait()


def test_a_run_on_a_full_disk_has_a_result_a_log_and_its_last_checkpoint(disk, tiny, monkeypatch):
    """The loss of each update is logged, so metrics.jsonl may meet the full disk first: the outcome is the same."""
    save = Writer.save

    def saved(self: Writer, trainer) -> None:
        save(self, trainer)
        fill(disk)

    with monkeypatch.context() as m:
        m.setattr(Writer, "save", saved)
        ended = run_to_end(tiny("updates=6", "saving.every_updates=2", f"output_dir={disk}"), ends="failed")
    assert "could not be written" in ended.error
    assert "is safe: go on with resume=" in ended.error
    assert Result.read(ended.run_dir).error == ended.error
    assert left_in(ended.run_dir) == ["2"]
    (disk / "filled").unlink()
    again = continued(ended.run_dir, updates=6)
    assert not (again.run_dir / ".reserve").exists()
    assert [r["update"] for r in records.read(again.run_dir / "metrics.jsonl").records if r["event"] == "train"] == [*range(1, 7)]


def test_a_run_does_not_begin_on_a_full_disk(disk, tiny):
    fill(disk, 100_000)
    with pytest.raises(UserError, match=r"output_dir: no run can be written to .*No space left on device.*free"):
        drivetrain.train(tiny(f"output_dir={disk}"))
    assert sorted(p.name for p in disk.iterdir()) == ["filled"]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO])
def test_an_error_of_the_disk_names_the_file_of_a_record_and_of_anything_else(tmp_path, code):
    def refuses(_: str) -> None:
        raise OSError(code, os.strerror(code))

    log = Files()
    log.start(tmp_path, 0)
    log._file = SimpleNamespace(write=refuses, flush=lambda: None, close=log._file.close)
    (tmp_path / space.RESERVE).write_bytes(bytes(10))
    with pytest.raises(CannotSave, match=f"metrics.jsonl could not be written to {tmp_path}: {os.strerror(code)}"):
        log.log({"update": 1})
    assert not (tmp_path / space.RESERVE).exists(), "the result needs the space"
    log.close()
    error = OSError(code, os.strerror(code), str(tmp_path / "images/a.png"))
    assert space.explain(error, tmp_path).startswith(f"a.png could not be written to {tmp_path}: {os.strerror(code)}")
    assert space.explain(FileNotFoundError(errno.ENOENT, "No such file"), tmp_path) is None


def test_a_checkpoint_that_is_asked_for_and_damaged_is_named(tmp_path):
    folder = checkpoint_io.save(tmp_path, 3, {"a": torch.zeros(2)}, {})
    assert checkpoint_of(tmp_path, 3) == folder
    (folder / "model.safetensors").write_bytes(b"cut off")
    for update, said in ((3, f"checkpoint {folder} "), (4, "no checkpoint of update 4: it has those of 3")):
        with pytest.raises(UserError, match=re.escape(said)):
            checkpoint_of(tmp_path, update)


def test_torchs_and_safetensors_errors_in_writing_are_known(disk):
    fill(disk, 1000)
    for write in (lambda: torch.save({"w": torch.ones(MB)}, disk / "state.pt"),
                  lambda: checkpoint_io.write_weights({"w": torch.ones(MB)}, disk / "averaged.safetensors")):  # fmt: skip
        with pytest.raises((RuntimeError, OSError)) as error:
            write()
        assert isinstance(error.value, CannotSave) or space.reason_of(error.value) is not None
    assert space.reason_of(RuntimeError("shape mismatch")) is None
    assert not list(disk.glob("*averaged*"))
    with pytest.raises(CannotSave, match=r"averaged\.safetensors could not be written to .*: No such file or directory"):
        checkpoint_io.write_weights({"w": torch.ones(1)}, disk / "away" / "averaged.safetensors")


# --- a run's directory that is moved away or removed while the run trains ---


def test_a_directory_is_found_where_it_went(tmp_path):
    (tmp_path / "run").mkdir()
    held = RunDirHandle(tmp_path / "run")
    assert held.folder() == held.place() == tmp_path / "run"
    (tmp_path / "run").rename(tmp_path / "elsewhere")
    assert held.folder() == held.place() == tmp_path / "elsewhere"
    (tmp_path / "run").mkdir()  # another one of its name
    assert held.folder() == tmp_path / "elsewhere"
    (tmp_path / "elsewhere").rmdir()
    assert held.folder() is None
    assert held.place() == tmp_path / "run-rescued"
    assert held.place().is_dir()


@pytest.mark.parametrize("asynchronous", [False, True])
def test_the_first_save_after_a_move_is_in_the_new_place_and_the_last_one(tmp_path, asynchronous):
    run, gone = tmp_path / "run", tmp_path / "gone"
    writer = Writer(run, Last(asynchronous=asynchronous), Parallel(), contextlib.nullcontext)
    writer.start()
    progress = Progress(updates=1)
    writer.save(stub(torch.zeros(2), progress))
    writer.wait()
    run.rename(gone)
    progress.updates = 2
    with pytest.raises(CannotSave, match=f"moved to {gone} while the run trained: .*{gone}/checkpoints/2, .*resume={gone}"):
        writer.save(stub(torch.ones(2), progress))
    assert not run.exists()
    assert manifest.newest_valid(gone) == (gone / "checkpoints/2", [])
    saved = safetensors.torch.load_file(gone / "checkpoints/2/model.safetensors")
    assert torch.equal(saved["w"], torch.ones(2))


def lose(monkeypatch: pytest.MonkeyPatch, how) -> None:
    """Do this to a run's directory after its first save."""
    save, done = Writer.save, []

    def saved(self: Writer, trainer) -> None:
        save(self, trainer)
        if not done:
            self.wait()
            done.append(how(Path(self._run_dir)))

    monkeypatch.setattr(Writer, "save", saved)


@pytest.mark.parametrize("how", ["moved", "removed"])
def test_a_run_whose_directory_was_lost_ends_with_its_result_elsewhere_and_goes_on(tiny, tmp_path, monkeypatch, how):
    with monkeypatch.context() as m:
        lose(m, shutil.rmtree if how == "removed" else lambda run: run.rename(tmp_path / "kept"))
        ended = run_to_end(tiny("updates=6", "saving.every_updates=2"), updates=4, ends="failed")
    assert ended.run_dir == tmp_path / "kept" if how == "moved" else ended.run_dir.name.endswith("-rescued")
    said = "was moved to" if how == "moved" else "was removed while the run trained: its state is saved in"
    assert said in ended.error
    assert f"go on with resume={ended.run_dir}" in ended.error
    assert (ended.run_dir / "metrics.csv").is_file() == (how == "moved")
    continued(ended.run_dir, updates=6)


# --- saving=best: which checkpoints are kept, and what a run evaluates at its end ---


EPOCHS_OF_FOUR = ["updates=null", "epochs=4", "data.samples=48", "optimizer.lr=0.2"]  # 4 updates each


def test_the_best_are_chosen_by_their_metric():
    assert Best(keep=2).chosen([4, 8, 12, 16], [8, 20, 4, 16]) == [4, 8]
    assert Last(keep=2).chosen([4, 8, 12, 16], [8]) == [12, 16]
    assert Best(keep=3).chosen([4, 6], [4]) == [4]  # update 6 was saved without an evaluation


def test_the_three_best_and_the_newest_are_kept(make, tmp_path, monkeypatch):
    accuracies = iter([0.5, 0.7, 0.2, 0.6, 0.7, 0.1])
    trainer = make(*EPOCHS_OF_FOUR, "epochs=6", "saving=best", "saving.keep=3")
    monkeypatch.setattr(type(trainer.evaluator), "evaluate", lambda self, stops: {"loss": 1.0, "accuracy": next(accuracies)})
    trainer.fit()
    assert list(trainer.progress.ranked) == [8, 20, 16, 4, 12, 24]  # of equal ones the earlier first
    assert checkpoint_io.updates(tmp_path / "run") == [8, 16, 20, 24]
    assert trainer.state()["progress"]["ranked"] == trainer.progress.ranked


RANKED = {  # what a run selects by, what each epoch's end gives, and the updates from the best to the worst
    "of equal ones that of the least loss": (
        ["saving=best"], "accuracy", [{"loss": loss, "accuracy": 1.0} for loss in (0.9, 0.8, 0.2, 0.3)], [12, 16, 8, 4],
    ),
    "an average of its own": (
        ["ema=ema", "select=accuracy"], "ema_accuracy",
        [{"loss": 1.0, "accuracy": raw, "ema_loss": 1.0, "ema_accuracy": averaged}
         for raw, averaged in ((0.9, 0.2), (0.8, 0.6), (0.7, 0.7), (0.6, 0.5))], [12, 8, 16, 4],
    ),
    "less is better": (
        ["select=loss"], "loss", [{"loss": loss, "accuracy": 0.0} for loss in (0.5, 0.2, 0.4, 0.9)], [8, 12, 4, 16],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", RANKED)
def test_epochs_are_ranked_by_what_a_run_selects_by(make, monkeypatch, case):
    words, name, figures, ranked = RANKED[case]
    left = iter(figures)
    trainer = make(*EPOCHS_OF_FOUR, *words)
    monkeypatch.setattr(type(trainer.evaluator), "evaluate", lambda self, stops: next(left))
    trainer.fit()
    assert (list(trainer.progress.ranked), trainer.progress.best["update"]) == (ranked, ranked[0])
    assert (trainer.selection.name, trainer.selection.across_runs.name) == (name, name.removeprefix("ema_"))


RUNS_WITH_A_BEST = {
    "plain": [],
    "average": ["ema=ema", "select=ema_loss"],
    "schedule free, norm": ["optimizer=schedulefree", "model=resnet9", "model.width=4"],
    "pure bfloat16": ["precision=bf16_pure", "optimizer=adamw"],
}


@pytest.mark.parametrize("name", RUNS_WITH_A_BEST)
def test_the_best_checkpoint_evaluates_to_the_recorded_best_at_the_end(train, name):
    run = train(*EPOCHS_OF_FOUR, "saving=best", "metrics=[f1,per_class]", "optimizer.lr=0.5", *RUNS_WITH_A_BEST[name])
    (recorded,) = (
        r for r in records_of(run.run_dir, "evaluate") if r["update"] == run.judged("best")["update"] and "weights" not in r
    )
    assert run.tested("best") == {name: recorded[name] for name in run.tested("best")}
    assert run.judged("final") != run.judged("best") or recorded["update"] == 16
    assert {name: set(of_set) for name, of_set in run.tables.items()} == {"test": {"final", "best"}}
    again = drivetrain.train([f"resume={run.run_dir}"])
    assert (again.metrics, again.updates, again.tables) == (run.metrics, 16, run.tables)


@pytest.mark.slow
def test_two_ranks_load_the_best_checkpoint(train):
    run = train(*EPOCHS_OF_FOUR, "epochs=2", "saving=best", "saving.average_kept=true", "parallel=ddp", "parallel.nproc=2")
    assert {*run.judged("averaged"), "update"} == run.tested("best").keys()


@pytest.mark.parametrize("option", ["last", "best"])
def test_the_mean_of_the_kept_weights_is_evaluated_and_written(train, make, option):
    words = [*EPOCHS_OF_FOUR, f"saving={option}", "saving.keep=3", "saving.average_kept=true", "model=resnet9", "model.width=4"]
    run = train(*words)
    kept = [run.run_dir / f"checkpoints/{n}/model.safetensors" for n in checkpoint_io.updates(run.run_dir)]
    if option == "best":
        evaluations = [json.loads(line) for line in (run.run_dir / "metrics.jsonl").read_text().splitlines()]
        curve = [r for r in evaluations if r["event"] == "evaluate" and "weights" not in r]
        ranked = sorted(curve, key=lambda r: (-r["accuracy"], r["loss"]))
        kept = [run.run_dir / f"checkpoints/{r['update']}/model.safetensors" for r in ranked[:3]]
    weights = [safetensors.torch.load_file(path) for path in kept]
    assert len(weights) == 3
    averaged = safetensors.torch.load_file(run.run_dir / AVERAGED)
    assert averaged.keys() == weights[0].keys()
    for name, tensor in averaged.items():
        if tensor.is_floating_point():
            torch.testing.assert_close(tensor, torch.stack([w[name].double() for w in weights]).mean(0).to(tensor.dtype))
    trainer = make(*words)
    trainer.model.load_state_dict(averaged)
    assert trainer.evaluator.metrics() == run.judged("averaged")
    assert run.judged("averaged") not in (run.judged("final"), run.judged("best"))


# --- saving beside the training: on a simulated device, which works through a queue of its own, and on the CPU ---


class Queue:
    """The work that the simulated device has not done yet."""

    def __init__(self) -> None:
        self.work = []

    def run(self, count: int) -> None:
        for job in self.work[:count]:
            job()
        del self.work[:count]


class Event:
    """torch.Event of the simulated device."""

    queue: Queue

    def __init__(self, device) -> None:
        assert device.type == "cuda"

    def record(self) -> None:
        self.behind = len(self.queue.work)

    def synchronize(self) -> None:
        self.queue.run(self.behind)


class OnDevice(torch.Tensor):
    """A tensor that says it is on CUDA; copies of it are written when the queue is run."""

    @staticmethod
    def __new__(cls, values, queue):
        return torch.Tensor._make_wrapper_subclass(cls, values.shape, dtype=values.dtype, device="cuda")

    def __init__(self, values, queue) -> None:
        self.values, self.queue = values, queue

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        (given, *_), kwargs = args, kwargs or {}
        if func is torch.ops.aten.detach.default:
            return OnDevice(given.values, given.queue)
        assert func is torch.ops.aten._to_copy.default, func
        copy = torch.full_like(given.values, torch.nan)
        given.queue.work.append(lambda: copy.copy_(given.values))
        if not kwargs.get("non_blocking"):
            given.queue.run(len(given.queue.work))
        return copy


@pytest.fixture
def queue(monkeypatch):
    queue = Queue()
    monkeypatch.setattr(Event, "queue", queue, raising=False)
    monkeypatch.setattr(torch, "Event", Event)
    return queue


def test_a_copy_is_of_its_moment_and_the_loop_does_not_wait(queue):
    values = torch.arange(3.0)
    copy = HostCopy({"weights": [OnDevice(values, queue)], "step": 7})
    queue.work.append(lambda: values.add_(1))  # the next update
    assert len(queue.work) == 2, "nothing waited for the device"
    taken = copy.wait()
    assert taken["step"] == 7
    assert torch.equal(taken["weights"][0], torch.arange(3.0))
    assert len(queue.work) == 1, "the update is not waited for"


def stub(weights, progress):
    state = {"optimizer": {"state": {}, "param_groups": []}, "ema": {}}
    return SimpleNamespace(model=SimpleNamespace(state_dict=lambda: {"w": weights}), state=lambda: state, progress=progress)


def test_the_thread_writes_the_weights_of_the_save(queue, tmp_path):
    values, progress = torch.arange(3.0), Progress()
    writer = Writer(tmp_path, Last(asynchronous=True), Parallel(), contextlib.nullcontext)
    for update in (1, 2):
        progress.updates = update
        writer.save(stub(OnDevice(values, queue), progress))
        queue.work.append(lambda: values.add_(1))
    writer.wait()
    saved = [safetensors.torch.load_file(tmp_path / f"checkpoints/{n}/model.safetensors")["w"] for n in (1, 2)]
    assert torch.equal(saved[0], torch.arange(3.0))
    assert torch.equal(saved[1], torch.arange(3.0) + 1)


def test_only_the_rank_that_writes_copies(tmp_path, monkeypatch):
    monkeypatch.setattr("drivetrain.saving.writer.HostCopy", lambda values: pytest.fail("rank 1 copied what rank 0 writes"))
    parallel = Parallel()
    parallel.world = SimpleNamespace(rank=1, size=2)
    Writer(tmp_path, Last(asynchronous=True), parallel, contextlib.nullcontext).save(stub(torch.zeros(2), Progress()))


def test_ranks_that_share_the_writing_share_their_buffers_before(tmp_path, monkeypatch):
    """Each rank's BatchNorm has statistics of its own, and any rank may write any of them."""
    calls = []
    parallel = Parallel()
    monkeypatch.setattr(parallel, "broadcast_buffers", calls.append, raising=False)
    monkeypatch.setattr("drivetrain.saving.checkpoint_io.save_sharded", lambda *_: calls.append("written"))
    trainer = stub(torch.zeros(2), Progress())
    Writer(tmp_path, Last(sharded=True), parallel, contextlib.nullcontext).save(trainer)
    assert calls == [trainer.model, "written"]
