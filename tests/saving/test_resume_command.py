"""A run that was stopped anywhere, by whatever, and gone on with ends as if nothing had happened."""

import json
import os
import shutil
import signal
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from drivetrain.run import directory
from tests.support.command import (
    OWN,
    TINY,
    Done,
    at_the_gate,
    checkpoints,
    everything,
    finish,
    kill_all,
    losses,
    only_run,
    result,
    runs,
    train,
    with_own_nets,
)  # fmt: skip
from tests.support.same_end import differences

TERM, KILL, USR1, INT = signal.SIGTERM, signal.SIGKILL, signal.SIGUSR1, signal.SIGINT
BASE = (
    *OWN, "data.validation=null", "model.target=my_nets.Gated",
    "optimizer=sgd", "optimizer.lr=0.05", "scheduler=cosine", "scheduler.warmup=4",
    "augment=[flip_crop]", "augment.flip_crop.flip=0.0", "augment.flip_crop.pad=1", "epochs=3", "saving.every_updates=5",
)  # fmt: skip
PER_EPOCH = 11
STOP_AT = 19  # the update during which the signal comes: in mid-epoch, some after a save
ACCUMULATE = ("batch=accumulate", "batch.accumulation_steps=2")
ARMS: dict[str, tuple[tuple[str, ...], int, int]] = {
    # what runs: its words, micro-batches an update, ranks
    "sync": ((), 1, 1),
    "workers": (("loader=workers",), 1, 1),
    "amp, ema, accumulation": (("precision=amp", "ema=ema", *ACCUMULATE), 2, 1),
    "ddp": (("parallel=ddp",), 1, 2),
    "onecycle, adamw, clip": (("optimizer=adamw", "optimizer.lr=0.01", "scheduler=onecycle", "clip=norm"), 1, 1),
    "workers not persistent": (("loader=workers", "loader.persistent_workers=false", "loader.num_workers=3"), 1, 1),
    "bf16, checkpointing, best": (("precision=bf16", "checkpointing=blocks", "checkpointing.block=Linear", "saving=best"), 1, 1),
    "ddp, amp, ema, accumulation, workers": (
        ("parallel=ddp", "precision=amp", "ema=ema", *ACCUMULATE, "loader=workers", "data.drop_last=false"), 2, 2,
    ),
}  # fmt: skip
NORMAL = [("amp, ema, accumulation", TERM), ("ddp", KILL)]
MATRIX = [
    *(pytest.param(variant, by, id=f"{variant} {by.name}") for variant, by in NORMAL),
    *(
        pytest.param(variant, by, id=f"{variant} {by.name}", marks=pytest.mark.slow)
        for variant in ARMS for by in (TERM, KILL) if (variant, by) not in NORMAL
    ),
]  # fmt: skip


def stop(place: Path, by: signal.Signals, at: str, *words: str, ranks: int = 1) -> Done:
    """A run that is stopped at the gate: killed with all its processes, or asked to end."""
    with at_the_gate(place, at, *words, ranks=ranks) as (process, go):
        if by == KILL:
            kill_all(process)
        else:
            (go if ranks == 1 else go.with_name("told")).touch()  # a launcher passes it on in its own time
            process.send_signal(by)
        return finish(process)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The run of a variant that nothing stopped."""

    @cache
    def run_of(variant: str) -> Path:
        place = with_own_nets(tmp_path_factory.mktemp("whole") / "here")
        train(*BASE, *ARMS[variant][0], cwd=place, code=0)
        return only_run(place / "outputs")

    return run_of


def assert_same_end(resumed: Path, unbroken: Path) -> None:
    """Bit for bit: weights, everything else that was saved, each update's loss once, evaluations, result."""
    for run_dir in (resumed, unbroken):  # both really trained
        assert result(run_dir)["status"] == "completed"
        assert losses(run_dir)[-1][0] == result(run_dir)["updates"] >= 2 * PER_EPOCH
        assert losses(run_dir)[-1][2] < losses(run_dir)[0][2]
    assert differences(resumed, unbroken) == []


@pytest.mark.parametrize(("variant", "by"), MATRIX)
def test_stopped_in_mid_epoch_and_resumed(variant: str, by: signal.Signals, whole: Callable[[str], Path], here: Path) -> None:
    words, micro_batches, ranks = ARMS[variant]
    ended = stop(here, by, str((STOP_AT - 1) * micro_batches + 1), *BASE, *words, ranks=ranks)
    run_dir = only_run(here / "outputs")
    newest = checkpoints(run_dir)[-1]
    assert int(newest.name) % PER_EPOCH, "stopped in the middle of an epoch"
    assert int(newest.name) < 3 * PER_EPOCH
    if by == KILL:
        assert ended.code == -KILL
        assert not (run_dir / "result.json").exists()
    else:
        assert ended.code == 75, ended
        assert f"resume={run_dir.relative_to(here)}" in ended.err
        left = result(run_dir)
        assert (left["status"], left["updates"]) == ("interrupted", int(newest.name))
    ended = train(f"resume={run_dir}", cwd=here, code=0)
    assert f"resuming from {newest}" in ended.err
    assert_same_end(run_dir, whole(variant))


OTHER_SAMPLES = "the training data has changed since the run was trained on it: it goes on with other samples"


@pytest.mark.parametrize("changed", [True, False])
def test_a_killed_run_that_goes_on_with_other_samples_says_so(changed: bool, tmp_path: Path) -> None:
    def table(factor: int) -> None:
        (place / "t.csv").write_text("x,kind\n" + "".join(f"{factor * i % 17},{'ab'[i % 2]}\n" for i in range(60)))

    place = with_own_nets(tmp_path / "here")
    table(1)
    words = (*OWN, "model.target=my_nets.Gated", "data=tabular", "data.path=t.csv", "data.target=kind", "batch.global_batch=12")
    assert stop(place, KILL, "4", *words, "epochs=2", "saving.every_updates=1").code == -KILL
    table(3 if changed else 1)
    assert (OTHER_SAMPLES in train(f"resume={only_run(place / 'outputs')}", cwd=place, code=0).err) == changed


@pytest.mark.parametrize("update", [1, 2, 3])
def test_a_stage_with_samples_of_its_own_is_no_change(update: int, tmp_path: Path) -> None:
    """Before its boundary, at it and after it; the checkpoints and the result after that are gone, as after a kill."""
    train(
        "data=digits", "model=resnet9", "model.width=2", "batch.global_batch=64", "updates=4", "epochs=1", "data.size=8",
        "stages=[{until: 2, data.size: 8}, {data.size: 10}]", "saving.every_updates=1", "saving.keep=9", cwd=tmp_path, code=0,
    )  # fmt: skip
    run_dir = only_run(tmp_path)
    (run_dir / "result.json").unlink()
    for checkpoint in checkpoints(run_dir)[update:]:
        shutil.rmtree(checkpoint)
    assert OTHER_SAMPLES not in train(f"resume={run_dir}", cwd=tmp_path, code=0).err


@pytest.mark.parametrize(("by", "ranks"), [(USR1, 1), (USR1, 2), (INT, 1)])
def test_other_signals_stop_alike(by: signal.Signals, ranks: int, here: Path) -> None:
    """Slurm's warning and Ctrl-C: the update is finished, the state saved, exit 75; alone and on two ranks."""
    ended = stop(here, by, "5", *BASE, f"parallel={'ddp' if ranks > 1 else 'single'}", ranks=ranks)
    run_dir = only_run(here / "outputs")
    assert ended.code == 75, ended
    assert result(run_dir)["status"] == "interrupted"
    assert checkpoints(run_dir)
    assert "Traceback" not in ended.err


def test_stopped_with_nothing_saved(here: Path) -> None:
    """saving=none: it says that nothing was kept, and does not claim to be resumable."""
    ended = stop(here, TERM, "5", *BASE[:-1], "saving=none")
    run_dir = only_run(here / "outputs")
    assert ended.code == 1, ended
    assert "saving=none kept nothing" in ended.err
    assert "resume=" not in ended.err
    assert result(run_dir)["status"] == "interrupted"
    assert result(run_dir)["updates"] == 5
    assert not checkpoints(run_dir)


@pytest.mark.parametrize("by", [TERM, USR1])
def test_stopped_before_the_first_update(by: signal.Signals, here: Path) -> None:
    """While the model is built, or the data read, a signal is an interruption, too; the run's result says so."""
    ended = stop(here, by, "build", *BASE)
    run_dir = only_run(here / "outputs")
    assert ended.code in (1, 75), ended
    assert result(run_dir)["status"] == "interrupted"
    ended = train(f"resume={run_dir}", cwd=here, code=0)
    assert result(run_dir)["updates"] == 3 * PER_EPOCH


# One finished run, copied and damaged.

SMALL = (*TINY, "data.validation=null", "optimizer=sgd", "scheduler=constant", "epochs=2", "saving.keep=3")


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of two epochs, with a checkpoint at each one's end."""
    place = tmp_path_factory.mktemp("small")
    train(*SMALL, cwd=place, code=0)
    return only_run(place / "outputs")


def copy(run_dir: Path, place: Path, status: str = "interrupted", keep: int = 2) -> Path:
    """A copy of a run, with another status and only its oldest checkpoints."""
    target = place / "outputs" / run_dir.parent.name / f"12-00-00-{len(runs(place)):06x}"
    shutil.copytree(run_dir, target)
    (target / "result.json").write_text(json.dumps({**result(target), "status": status}))
    for checkpoint in checkpoints(target)[keep:]:
        shutil.rmtree(checkpoint)
    return target


def age(run_dir: Path, hours: float) -> Path:
    """Make a run look older."""
    then = time.time() - 3600 * hours
    for path in (run_dir / "environment.json", run_dir):
        os.utime(path, (then, then))
    return run_dir


def test_resume_auto(small: Path, tmp_path: Path) -> None:
    """The newest unfinished run of the same config, that nobody holds; else a new one."""
    older = age(copy(small, tmp_path, "interrupted", keep=1), 5)
    (older / "result.json").unlink()  # killed: it never wrote one
    age(older, 5)
    newer = age(copy(small, tmp_path, "failed", keep=1), 4)
    held = age(copy(small, tmp_path, "interrupted", keep=1), 3)
    other = copy(small, tmp_path, "interrupted", keep=1)  # of another config
    about = json.loads((other / "environment.json").read_text())
    (other / "environment.json").write_text(json.dumps({**about, "config_hash": "0" * 16}))
    age(other, 2)
    age(copy(small, tmp_path, "completed"), 1)
    with directory.locked(held):
        for expected in (newer, older, None):
            ended = train(*SMALL, "resume=auto", cwd=tmp_path, code=0)
            if expected is not None:
                assert f"resuming from outputs/{expected.relative_to(tmp_path / 'outputs')}/checkpoints/11" in ended.err
                assert_same_end(expected, small)
    assert "no unfinished run of this config" in ended.err
    assert len(runs(tmp_path / "outputs")) == 6, "a new one at the end, none before"
    assert [len(checkpoints(left)) for left in (held, other)] == [1, 1], "these were left alone"


def test_resume_auto_without_any_run(tmp_path: Path) -> None:
    train(*TINY, "updates=1", "resume=auto", "output_dir=not/yet/there", cwd=tmp_path, code=0)
    assert result(only_run(tmp_path / "not"))["updates"] == 1


def test_two_processes_in_one_run(here: Path) -> None:
    """The second is refused and changes nothing; the first goes on."""
    with at_the_gate(here, "15", *BASE) as (process, go):
        run_dir = only_run(here / "outputs")
        before = everything(run_dir)
        second = train(f"resume={run_dir}", cwd=here, code=2)
        assert "in use by another process" in second.err
        assert everything(run_dir) == before
        go.touch()
        finish(process, 0)
    assert [u for u, *_ in losses(run_dir)] == list(range(1, 3 * PER_EPOCH + 1))


def test_a_value_of_the_environment_is_asked_for_again(here: Path) -> None:
    """`${oc.env:…}` on the command line: a run that used it can be gone on with."""
    words = (*OWN, "model.target=my_nets.Noted", "model.kwargs.note=${oc.env:NOTE}")
    train(*words, "epochs=1", cwd=here, env={"NOTE": "sesame-open-4711"}, code=0)
    run_dir = only_run(here / "outputs")
    assert not [name for name, raw in everything(run_dir).items() if b"sesame-open-4711" in raw]
    train(f"resume={run_dir}", "epochs=2", cwd=here, env={"NOTE": "sesame-open-4711"}, code=0)
    assert result(run_dir)["updates"] == 2 * 8  # digits, of which a fifth is held out
