"""Bad input gets one clear answer: exit 2, the setting named, no traceback, nothing on disk, and torch only where it must be."""

import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from safetensors import SafetensorError

from drivetrain.cli import main
from drivetrain.core.errors import UserError, without_logins
from drivetrain.launch.job import prepare
from tests.support.command import (
    OWN,
    PACKAGE,
    ROOT,
    SRC_TRAIN,
    TINY,
    Done,
    empty,
    environment,
    result,
    run,
    runs,
    train,
    with_own_nets,
)  # fmt: skip
from tests.support.put import put
from tests.support.refusals import problems_of

SECRET = "sesame-open-4711"
WITHOUT_A_MODEL: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    # what it is: the words, what the answer must name
    "unknown option": (("precision=ampp",), ("precision=ampp", "'amp'")),
    "unknown key": (("optimizer.lrr=3",), ("optimizer.lrr=3", "'lr'")),
    "unknown key with plus": (("+optimizer.lrr=3",), ("optimizer.lrr=3", "'lr'")),
    "unknown option, and a key that none has": (
        ("parallel=pipelin", "parallel.stagse=2"), ("'pipeline'", "no option of parallel has 'stagse'", "'stages'"),
    ),
    "unknown top key": (("epoch=3",), ("epoch=3", "'epochs'")),
    "unknown group": (("optimiser=sgd",), ("optimiser=sgd", "'optimizer'")),
    "out of range": (("optimizer.lr=-1",), ("optimizer.lr=-1", "> 0")),
    "wrong type": (("optimizer.lr=fast",), ("optimizer.lr=fast", "number")),
    "number as text": (("optimizer.lr='0.1'",), ("optimizer.lr=0.1", "number")),
    "not finite": (("optimizer.lr=nan",), ("optimizer.lr=nan", "finite")),
    "half an epoch": (("epochs=1.5",), ("epochs=1.5", "whole number")),
    "no epoch": (("epochs=0",), ("epochs=0", "≥ 1")),
    "no choice": (("parallel=ddp", "parallel.nproc=many"), ("parallel.nproc=many", "auto")),
    "no steps": (("batch=accumulate", "batch.accumulation_steps=0"), ("batch.accumulation_steps=0", "≥ 1")),
    "another option's key": (("batch.accumulation_steps=0",), ("batch.accumulation_steps=0", "batch=accumulate")),
    "a key of an option that is not in the list": (("augment.mixup.alpha=1",), ("augment.mixup.alpha=1", "augment=[mixup]")),
    "another model's key": (("model.name=resnet9000",), ("model.name=resnet9000", "model=timm")),
    "batch does not divide": (
        ("batch=accumulate", "batch.accumulation_steps=3", "batch.global_batch=100"),
        ("batch.global_batch=100", "3 steps", "99 or 102"),
    ),
    "exclusive settings": (
        ("runtime.deterministic=true",), ("runtime.deterministic=true", "runtime.cudnn_benchmark=false"),
    ),
    "data.root is not there": (("data=imagefolder", "data.root=/nowhere"), ("data.root=/nowhere",)),
    "data.root is not given": (("data=imagefolder",), ("data.root",)),
    "recipe unknown": (("recipe=nope",), ("recipe=nope", "naive")),
    "recipe misspelt": (("recipe=fats",), ("recipe=fats", "'fast'")),
    "recipe file is not there": (("recipe=no/such.yaml",), ("recipe=no/such.yaml", "no such file")),
    "recipe is a directory": (("recipe=./",), ("recipe=./", "directory")),
    "resume of no run": (("resume=.",), ("resume=.", "no run")),
    "resume of nothing": (("resume=/nowhere",), ("resume=/nowhere", "no run")),
    "resume of several": (("-m", "resume=.", "epochs=1,2"), ("resume=", "-m")),
    "own model without trust": (("model=own", "model.target=posix.system"), ("model.target=posix.system", "trust=[posix]")),
    "own model without a target": (("model=own",), ("model.target",)),
    "target by hand": (("model._target_=posix.system",), ("model._target_", "model=own")),
    "Hydra's settings": (("hydra.job.chdir=true",), ("hydra.job.chdir", "hydra.run.dir")),
    "Hydra's groups": (("hydra/launcher=joblib",), ("hydra/launcher",)),
    "deletion": (("~optimizer",), ("~optimizer", "optimizer=NAME")),
    "package": (("optimizer@elsewhere=sgd",), ("optimizer@elsewhere=sgd", "optimizer=sgd")),
    "no assignment": (("epochs",), ("'epochs'", "key=value")),
    "several values without -m": (("epochs=1,2",), ("epochs=1,2", "-m")),
    "reference to nothing": (("optimizer.lr=${nope}",), ("nope",)),
    "unknown flag": (("--fast",), ("--fast",)),
    "unknown thing to show": (("--cfg", "everything"), ("everything", "job")),
    "config dir is not there": (("--config-dir", "/nowhere", "epochs=1"), ("/nowhere",)),
    "output_dir below a file": (("output_dir=/dev/null/runs",), ("output_dir", "/dev/null/runs")),
    "two wrong words": (("precision=ampp", "optimizer.lrr=3"), ("precision=ampp", "optimizer.lrr=3")),
    "a wrong word and a wrong value": (("precision=ampp", "optimizer.lr=-1"), ("precision=ampp", "optimizer.lr=-1")),
    "a recipe there is not and a wrong word": (("recipe=nope", "precision=ampp"), ("recipe=nope", "precision=ampp")),
    "three wrong values": (
        ("epochs=0", "optimizer.lr=-1", "model.width=wide"), ("epochs=0", "optimizer.lr=-1", "model.width=wide"),
    ),
    "two broken rules": (
        ("data=imagefolder", "batch.global_batch=3", "parallel=ddp"), ("data.root", "batch.global_batch=3"),
    ),
    "too many epochs": (("epochs=1000001",), ("epochs=1000001",)),
    "too many cycles": (("scheduler=cosine", "scheduler.cycles=10001"), ("scheduler.cycles=10001",)),
    "cycles that grow beyond all numbers": (
        ("scheduler=cosine", "scheduler.cycles=20", "scheduler.cycle_mult=1e30"), ("scheduler.cycle_mult=1e+30",),
    ),
    "cycles that shrink to nothing": (
        ("scheduler=cosine", "scheduler.cycles=20", "scheduler.cycle_decay=1e-30"), ("scheduler.cycle_decay=1e-30",),
    ),
    "a number of 400 digits": ((f"updates={10**400}",), ("updates: a whole number must be below 2^63",)),
    "an extra that is not installed": (("precision=fp8",), ("precision=fp8", "drivetrain[torchao]")),
    # No word is ignored in silence.
    "resume with a plus": (("+resume=.", *TINY), ("resume=.", "no run")),
    "resume with two": (("++resume=.", *TINY), ("resume=.", "no run")),
    "resume of several with a plus": (("-m", "+resume=.", "epochs=1,2", *TINY), ("resume=", "-m")),
    "resolve without cfg": (("--resolve", *TINY), ("--resolve", "--cfg")),
    "package without cfg": (("--package", "optimizer", *TINY), ("--package", "--cfg")),
    "an interval in a grid": (("-m", "optimizer.lr=interval(0,1)", *TINY), ("optimizer.lr=interval(0,1)",)),
    "glob": (("-m", "epochs=glob(*)", *TINY), ("epochs=glob(*)",)),
}  # fmt: skip

BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{b}: &{b} [{', '.join([f'*{a}'] * 9)}]\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True)
)
RECIPES: dict[str, tuple[str, tuple[str, ...]]] = {
    # what it is: the file, what the answer must name; @ stands for the file's path
    "typo in a key": ("description: mine\n\noptimizer:\n  lrr: 3\n", ("@:4", "'lr'")),
    "typo in a group": ("defaults:\n  - override /optimiser: sgd\n", ("@:2", "'optimizer'")),
    "typo in an option": ("defaults:\n  - override /optimizer: sgdd\n", ("@:2", "'sgd'")),
    "two typos": ("epoch: 3\noptimizer:\n  lrr: 3\n", ("@:1", "@:3", "'epochs'", "'lr'")),
    "value out of range": ("optimizer:\n  lr: -1\n", ("optimizer.lr=-1", "> 0")),
    "target": ("model:\n  _target_: posix.system\n", ("@:2", "_target_")),
    "target as a dotted key": ("model._target_: posix.system\n", ("@:1", "_target_")),
    "target within a value": (
        "defaults:\n  - override /model: timm\nmodel:\n  kwargs:\n    a: [{_target_: posix.system}]\n", ("@:5", "_target_"),
    ),
    "partial": ("model:\n  _partial_: true\n", ("@:2", "_partial_")),
    "hydra": ("hydra:\n  run:\n    dir: /nowhere\n", ("@:1", "'hydra'")),
    "hydra as a dotted key": ("epochs: 1\nhydra.run.dir: /nowhere\n", ("@:2", "hydra")),
    "hydra's launcher": ("defaults:\n  - override /hydra/launcher: x\n", ("@:2", "hydra/launcher")),
    "hydra's launcher as a key": ("hydra/launcher: x\n", ("@:1", "hydra/launcher")),
    "a list": ("- epochs\n- 3\n", ("@", "list", "mapping")),
    "a single value": ("hello\n", ("@", "single value", "mapping")),
    "no YAML": ("optimizer: [1\nepochs: 3\n", ("@:", "YAML")),
    "two documents": ("epochs: 1\n---\nepochs: 2\n", ("@:2", "YAML")),
    "YAML bomb": (BOMB, ("@:1", "alias")),
    "tag": ("epochs: !!python/object/apply:posix.system [ls]\n", ("@:1", "tag")),
    "environment": ("model:\n  width: ${oc.env:SECRET}\n", ("@:2", "oc.env", "environment")),
    "environment, nested": ("model:\n  width: ${oc.decode:${oc.env:SECRET}}\n", ("@:2", "environment")),
    "too large": ("# " + "x" * 70_000 + "\n", ("@", "64 KiB")),
    "too deep": ("a: " + "[" * 30 + "]" * 30 + "\n", ("@:1", "deep")),
    "far too deep": ("a: " + "[" * 30_000 + "\n", ("@:1", "deep")),
    "too many values": ("model:\n  hidden: [" + "1, " * 3000 + "1]\n", ("@:2", "2000")),
    "a path as option": ("defaults:\n  - override /optimizer: ../../sgd\n", ("@:2", "optimizer")),
    "defaults as a mapping": ("defaults:\n  optimizer: sgd\n", ("@:1", "defaults", "list")),
    "a group as a value": ("optimizer: sgd\n", ("@:1", "override /optimizer: sgd")),
    "another recipe": ("recipe: fast\n", ("@:1", "'recipe'")),
    "logger": ("logger: [tensorboard]\n", ("@:1", "'logger'")),
    "logger in defaults": ("defaults:\n  - override /logger: [tensorboard]\n", ("@:2", "'logger'")),
    "output_dir": ("output_dir: /nowhere\n", ("@:1", "'output_dir'")),
    "trust": ("trust: [posix]\n", ("@:1", "'trust'")),
    "resume": ("resume: auto\n", ("@:1", "'resume'")),
    "data.root": ("defaults:\n  - override /data: imagefolder\ndata:\n  root: /tmp\n", ("@:4", "'data.root'")),
    "runtime.device": ("runtime:\n  device: cpu\n", ("@:2", "'runtime.device'")),
    "own model": ("defaults:\n  - override /model: own\nmodel:\n  target: posix.system\n", ("model",)),
    "a date where a number belongs": ("optimizer:\n  lr: 2020-01-01\n", ("@:2", "optimizer.lr")),
    "no date": ("optimizer:\n  lr: 2020-99-99\n", ("@:2", "optimizer.lr")),
    "an equals sign": ("optimizer:\n  lr: =\n", ("@:2", "optimizer.lr")),
    "a number of 5,000 digits": ("epochs: " + "1" * 5000 + "\n", ("@:1", "epochs")),
    "a key given twice": ("epochs: 1\nepochs: 2\n", ("@:2: 'epochs' is given twice",)),
    "twice in a group": ("optimizer:\n  lr: 1\n  lr: 2\n", ("@:3: 'lr' is given twice",)),
    "twice, once dotted": ("optimizer:\n  lr: 1\noptimizer.lr: 2\n", ("@:3: 'optimizer.lr' is given twice: here and in line 2",)),
    "an empty group": ("optimizer:\n", ("as '- override /optimizer: adamw', or leave the empty line out",)),
    "a claim that sets what is not a recipe's": (
        "claim:\n  speed:\n    ratio: -1\n    against:\n      trust: [posix]\n      model._target_: posix.system\n  devise: x\n",
        ("@:3", "claim.speed.ratio=-1", "@:5", "'trust'", "@:6", "model._target_", "'device'", "claim.speed has no interval"),
    ),
    "a key that is a list": ("? [a, b]\n: 1\n", ("is not a key",)),
    "what is unchanged as a list": ("unchanged: [1]\n", ("@:1: unchanged: must be",)),
    "a key of two lines": ('"a\\nerror: b": 1\n"a\\nerror: b": 2\n', ("@:1",)),  # no line of the message is the file's
    "a tag of two lines": ("epochs: !%0Aerror 3\n", ("@:1", "tag")),
    **{  # a number that YAML reads otherwise than a person
        f"the number {text}": (f"epochs: {text}\n", (f"@:1: epochs: YAML reads {text} as ",))
        for text in ("010", "0x1f", "0b11", "1:30", "+0_7", "1:30.5", "00.5")
    },
    **{  # YAML ends a comment at line breaks that editors do not show as such: it would hide a line
        f"U+{ord(hidden):04X}": (
            f"description: x\n# fast{hidden}epochs: 3\n", (f"@:2: a recipe may not have the character U+{ord(hidden):04X}",),
        )
        for hidden in ("\r", "\x85", "\u2028", "\u2029", "\u202e", "\ufeff")
    },
    "an option chosen twice": ("defaults:\n  - override /optimizer: sgd\n  - override /optimizer: adamw\n", ("@:3", "optimizer")),
}  # fmt: skip
SWEPT = {  # a grid reaches the config as the command line does, and is still a stranger's
    "trust": "trust: [[posix]]",
    "own model": "model: [own]",
    "own code": "model: [own]\n  model.target: [posix.system]\n  model.kwargs: [{command: touch PWNED}]\n  trust: [[posix]]",
    "output_dir": "output_dir: [elsewhere]",
    "logger": "logger: [[tensorboard]]",
    "runtime.device": "runtime.device: [cpu]",
    "runtime.threads": "runtime.threads: [1]",
    "target": "model._target_: [posix.system]",
    "resume": "resume: [auto]",
    "hydra": "hydra.run.dir: [elsewhere]",
    "typo": "optimizer.lrr: [1, 2]",
}


def answered(done: Done, names: tuple[str, ...], case: str = "") -> None:
    """One clear answer."""
    assert done.code == 2, (case, done)
    assert not [name for name in names if name not in done.err], (case, done.err)
    assert "Traceback" not in done.err + done.out, case
    assert done.out == "", f"{case}: a refusal says nothing on standard output"


def asked(commands: Sequence[tuple[Path, tuple[str, ...]]]) -> list[tuple[Done, list[str]]]:
    """What commands, each in its folder, came to in one interpreter, and the heavy packages that were imported by then."""
    env = environment({"SECRET": SECRET, "PYTHONPATH": f"{PACKAGE}{os.pathsep}{ROOT}"})
    program = [sys.executable, "-m", "tests.support.asked"]
    given = json.dumps([(str(place), words) for place, words in commands])
    done = subprocess.run(program, input=given, cwd=ROOT, env=env, capture_output=True, text=True, check=True)
    return [(Done(*found), heavy) for *found, heavy in json.loads(done.stdout)]


def test_refusals(tmp_path: Path) -> None:
    """Each is answered without torch, in short, and nothing is left; `recipe check` refuses what a run refuses.

    A schedule is shown without torch, too.
    """
    given, commands, wanted = empty(tmp_path / "given"), list[tuple[Path, tuple[str, ...]]](), list[tuple[str, tuple[str, ...]]]()

    def of_file(case: str, names: tuple[str, ...], content: bytes, *words: str) -> None:
        file = put(given / f"{len(commands)}.yaml", content)
        refused(case, tuple(name.replace("@", str(file)) for name in names), *(word.replace("FILE", str(file)) for word in words))

    def refused(case: str, names: tuple[str, ...], *words: str) -> None:
        commands.append((empty(tmp_path / str(len(commands))), words))
        wanted.append((case, names))

    for case, (words, names) in WITHOUT_A_MODEL.items():
        refused(case, names, "train", *words)
    for case, (text, names) in RECIPES.items():
        of_file(case, names, text.encode(), "train", "recipe=FILE")
    of_file("no text", ("@", "UTF-8"), b"epochs: \xff\xfe\n", "train", "recipe=FILE")
    words, names = ("precision=ampp", "epochs=0"), ("@:2", "precision=ampp", "epochs=0")
    of_file("a wrong recipe and wrong words", names, b"optimizer:\n  lrr: 3\n", "train", "recipe=FILE", *words)
    for case, axis in SWEPT.items():
        at, content = (f"@:{6 if case == 'own code' else 3}: ",), f"epochs: 1\nsweep:\n  {axis}\n".encode()
        of_file(f"{case}, swept", at, content, "train", "-q", "recipe=FILE", "updates=1")
        of_file(f"{case}, swept and checked", at, content, "recipe", "check", "FILE")
    *refusals, (shown, heavy) = asked([*commands, (tmp_path, ("show", "recipe=fast"))])
    assert (shown.code, "scheduler=wsd optimizer=sgd" in shown.out, heavy) == (0, True, [])
    for (done, heavy), (place, _), (case, names) in zip(refusals, commands, wanted, strict=True):
        answered(done, names, case)
        assert not heavy, case
        assert SECRET not in done.err, case
        assert len(done.err) < 2000, case
        assert [*dict.fromkeys(done.errors)] == done.err.splitlines() != [], f"{case}: each line is a problem, and is told once"
        assert not list(place.rglob("*")), case


@pytest.mark.slow
def test_a_good_command_imports_torch(tmp_path: Path) -> None:
    """The other side of every "without torch" above: the list would show it."""
    ((done, heavy),) = asked([(tmp_path, ("train", "-q", *TINY, "updates=1"))])
    assert done.code == 0, done
    assert {"torch"} <= {*heavy} <= {"torch", "sklearn"}, "a model and data that need neither do not wait for the others"


@pytest.mark.parametrize("words", [("precision=ampp", "optimizer.lrr=3"), ("recipe=nope",), ("model=own",)])
def test_both_entries_answer_alike(words: tuple[str, ...], tmp_path: Path) -> None:
    place = f"output_dir={tmp_path / 'runs'}"
    by_checkout = run(*words, place, cwd=ROOT, how=SRC_TRAIN)
    by_command = run("train", *words, place, cwd=empty(tmp_path / "here"))
    assert by_checkout == by_command
    assert by_command.errors
    assert not (tmp_path / "runs").exists()


def test_a_key_given_two_values_is_said(tmp_path: Path) -> None:
    """A shell that expands {a,b} gives both: the last holds, and not in silence."""
    done = train(*TINY, "updates=1", "updates=2", cwd=empty(tmp_path / "here"), code=0)
    assert "updates is given 2 times: updates=2 holds" in done.err


def test_a_place_that_may_not_be_written_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same for whoever may write anywhere: what the system would say is put in its mouth."""
    locked, access = empty(tmp_path / "locked"), os.access
    monkeypatch.setattr(os, "access", lambda path, *how: Path(path) != locked and access(path, *how))
    refused = problems_of(prepare, [f"output_dir={locked / 'runs'}", "precision=ampp"])
    assert [p for p in refused if "output_dir" in p and "may not be written to" in p]
    assert [p for p in refused if "precision=ampp" in p]
    assert not list(locked.iterdir())


# What the model or the data must be asked for; torch is imported.


def refused(tmp_path: Path, *words: str) -> str:
    """Answered after a look at model and data, and nothing is left; what was said."""
    cwd = with_own_nets(tmp_path / "here")
    done = run("train", "-q", *words, cwd=cwd)
    answered(done, ())
    assert [p.name for p in cwd.rglob("*") if "__pycache__" not in p.parts] == ["my_nets.py"]
    return done.err


REFUSED = {
    "an unknown timm model": (("model=timm", "model.name=resnet9000"), ("model.name=resnet9000", "did you mean", "resnet")),
    "more ranks than samples": (
        (*TINY, "data=synthetic", "data.samples=2", "parallel=ddp", "parallel.nproc=3", "batch.global_batch=3"),
        ("3 ranks", "2 training samples", "parallel.nproc"),
    ),
    "a batch larger than the data": ((*TINY, "batch.global_batch=4096"), ("batch.global_batch=4096", "data.drop_last")),
    "an own class that is not there": ((*OWN, "model.target=my_nets.Nett"), ("model.target=my_nets.Nett",)),
    "arguments that an own class does not take": (
        (*OWN, "model.target=my_nets.Net", "model.kwargs.depth=3"), ("model.target=my_nets.Net", "depth"),
    ),
    "an own name that is no class": ((*OWN, "model.target=my_nets.NO_CLASS"), ("model.target=my_nets.NO_CLASS",)),
    "a model that does not fit the data": (
        ("model=resnet9", "data=synthetic", "data.shape=[5]"), ("model=resnet9", "model=mlp"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_the_model_or_the_data_refuses(case: str, tmp_path: Path) -> None:
    words, names = REFUSED[case]
    said = refused(tmp_path, *words)
    assert not [name for name in names if name not in said], said


@pytest.mark.parametrize("kept", [True, False])
def test_what_was_made_for_a_refused_run_is_taken_away(kept: bool, tmp_path: Path) -> None:
    """Folders that the run made go with it; a folder that was there stays."""
    cwd = empty(tmp_path / "here")
    if kept:
        (cwd / "mine").mkdir()
    done = run("train", *TINY, "batch.global_batch=4096", "output_dir=mine/runs" if not kept else "output_dir=mine", cwd=cwd)
    answered(Done(done.code, "", done.err), ("batch.global_batch=4096",))
    assert [p.name for p in cwd.rglob("*")] == (["mine"] if kept else [])


def image(file: Path, shade: int) -> None:
    """An 8×8 image."""
    from PIL import Image

    put(file, Image.new("RGB", (8, 8), (shade, 255 - shade, shade)))


def folder(root: Path, classes: int = 2, images: int = 6) -> Path:
    """An image folder."""
    for c in range(classes):
        for i in range(images):
            image(root / f"class{c}" / f"{i}.png", 40 * i)
    return root


FOLDER = ("data=imagefolder", "data.size=8", "data.holdout=0.4", "batch.global_batch=2", *TINY, "epochs=1")


def test_image_folder_that_is_whole(tmp_path: Path) -> None:
    """The other side of the four that follow."""
    run("train", "-q", *FOLDER, f"data.root={folder(tmp_path / 'images')}", cwd=empty(tmp_path / "here"), code=0)


BROKEN = {
    "an empty file": lambda images: (images / "class1/3.png").write_bytes(b""),
    "no image": lambda images: (images / "class1/3.png").write_bytes(b"no image at all"),
    "half an image": lambda images: (images / "class1/3.png").write_bytes(b"\x89PNG\r\n\x1a\n\x00\x00"),
    "an empty class": lambda images: (images / "class2").mkdir(),
    "no class": shutil.rmtree,
}


@pytest.mark.parametrize("case", BROKEN)
def test_image_folder_that_is_broken(case: str, tmp_path: Path) -> None:
    images = folder(tmp_path / "images")
    BROKEN[case](images)
    said = refused(tmp_path, *FOLDER, f"data.root={images}")
    assert {"an empty class": f"{images}/class2", "no class": "data.root"}.get(case, f"{images}/class1/3.png") in said


def test_corrupt_file_that_only_training_finds(tmp_path: Path) -> None:
    """Beyond data.verify files a broken one is named when it is reached, by a worker process too; the run is kept."""
    images, cwd = folder(tmp_path / "images"), empty(tmp_path / "here")
    for i in range(6):
        (images / "class1" / f"{i}.png").write_bytes(b"no image at all")
    done = train(*FOLDER, "data.verify=0", "loader=workers", f"data.root={images}", cwd=cwd)
    answered(Done(done.code, "", done.err), (str(images / "class1"),))
    for run_dir in runs(cwd / "outputs"):  # none, if it was the first batch: a run that never began leaves nothing
        assert result(run_dir)["updates"] > 0
        assert (result(run_dir)["status"], str(images / "class1") in result(run_dir)["error"]) == ("failed", True)


# A disk that is full, or may not be written, where no run trains: one line that says so, whichever library wrote.

PLACE = "error: /mnt/{} cannot be written: {}"
ROOM = "No space left on device. Make room, or give another place"


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/mnt/predictions.csv"), PLACE.format("predictions.csv", ROOM)),
        (
            SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"),
            f"error: what this command writes cannot be written: {ROOM}",
        ),
        (OSError(errno.EROFS, "Read-only file system", "/mnt/m.onnx"), PLACE.format("m.onnx", "Read-only file system")),
        (FileNotFoundError(errno.ENOENT, "No such file or directory", "x"), "raise error: FileNotFoundError: "),  # not the disk's
    ],
    ids=["full", "full, told by safetensors", "read-only", "another error"],
)
def test_a_disk_that_cannot_be_written_is_told(
    error: Exception, says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def dispatch(argv: list[str]) -> int:
        raise error

    monkeypatch.setattr(main, "_dispatch", dispatch)
    assert main.main(["export"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert says in line


@pytest.mark.parametrize(
    "words",
    [
        ["model.weights=https://bob:s3cret@host/w.safetensors"], ["model.weights='s3://bob:s3cret@host/w'"],
        ["resume=https://bob:s3cret@host/run"], ["recipe=https://bob:s3cret@host/r.yaml"], ["recipe=login"],
        ["data=webdataset", "data.train=https://bob:s3cret@host/x-0.tar"], ["nosuch=https://bob:s3cret@host"],
        ["https://bob:s3cret@host/x"], ["logger=[mlflow]", "logger.mlflow.uri=https://bob:s3cret@host"],
        ["output_dir=https://s3cret@host/x"],
    ],
    ids=" ".join,
)  # fmt: skip
def test_a_login_in_an_address_is_neither_shown_nor_kept(refused, tmp_path, words):
    (tmp_path / "login.yaml").write_text("model: {weights: 'https://bob:s3cret@host/w'}\n")
    said = refused("train", *words)
    assert "error:" in said
    assert "s3cret" not in said


def test_a_login_in_an_address_is_hidden_in_what_is_printed():
    assert without_logins("at https://bob:pw@host/x, s3://key@bucket") == "at https://<redacted>@host/x, s3://<redacted>@bucket"
    assert without_logins("https:/bob:p@w@host") == "https:/<redacted>@host"
    for text in ("https://host/a@b", "mail me@host: now", "models:/name@best", "C:/x@y", "a:b@c"):
        assert without_logins(text) == text


def test_a_message_holds_no_control_characters() -> None:
    assert UserError(["a\x1b[2Jb", "c\u202ed"]).problems == ["a\N{REPLACEMENT CHARACTER}[2Jb", "c\N{REPLACEMENT CHARACTER}d"]
    assert str(UserError("two\nlines\tand a tab")) == "two\nlines\tand a tab"
