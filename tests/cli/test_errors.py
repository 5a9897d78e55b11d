"""Bad input gets one clear answer: exit 2, the setting named, no traceback, nothing on disk, and torch only where it must be."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.command import OWN, ROOT, SRC_TRAIN, TINY, Done, empty, result, run, runs, train, with_own_nets
from tests.support.fork_server import MODULES_TO

Command = Callable[..., tuple[Done, set[str]]]
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
    "Hydra's settings": (("hydra.job.chdir=true",), ("hydra.job.chdir", "output_dir")),
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
    "a key given twice": ("epochs: 1\nepochs: 2\n", ("@:2", "epochs")),
    "a claim that sets what is not a recipe's": (
        "claim:\n  speed:\n    ratio: -1\n    against:\n      trust: [posix]\n      model._target_: posix.system\n  devise: x\n",
        ("@:3", "claim.speed.ratio=-1", "@:5", "'trust'", "@:6", "model._target_", "'device'", "claim.speed has no interval"),
    ),
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


def answered(done: Done, names: tuple[str, ...]) -> None:
    """One clear answer."""
    assert done.code == 2, done
    assert not [name for name in names if name not in done.err], done.err
    assert "Traceback" not in done.err + done.out
    assert done.out == "", "a refusal says nothing on standard output"


def imported(done: Done) -> set[str]:
    """The packages and modules that `python -X importtime` reports; torch's own line may be missing, its parts' are not."""
    modules = {line.rpartition("|")[2].strip() for line in done.err.splitlines() if line.startswith("import time:")}
    return modules | {module.partition(".")[0] for module in modules}


def timed(*words: str, cwd: Path, env: dict[str, str] | None = None) -> tuple[Done, set[str]]:
    """`drivetrain train …` and what it imported."""
    done = run("train", *words, cwd=cwd, how=("-X", "importtime", "-m", "drivetrain"), env=env)
    told = "".join(f"{line}\n" for line in done.err.splitlines() if not line.startswith("import time:"))
    return Done(done.code, done.out, told), imported(done)


def forked(*words: str, cwd: Path, env: dict[str, str] | None = None) -> tuple[Done, set[str]]:
    """The same by a child of a process that has imported what commands import, and not torch."""
    modules = cwd.with_name("modules")
    done = run("train", *words, cwd=cwd, env={**(env or {}), MODULES_TO: str(modules)})
    return done, set(modules.read_text().split())


def at_once(
    tmp_path: Path, words: tuple[str, ...], names: tuple[str, ...], env: dict[str, str] | None = None, by: Command = forked
) -> str:
    """Answered without torch, and nothing is left; what was said."""
    cwd = empty(tmp_path / "here")
    done, modules = by(*words, cwd=cwd, env=env)
    answered(done, names)
    assert "drivetrain.core.errors" in modules, "the list of imports is there"
    assert modules & {"torch", "timm", "torchvision", "sklearn"} == set()
    assert list(cwd.rglob("*")) == []
    return done.err


@pytest.mark.parametrize("case", WITHOUT_A_MODEL)
def test_bad_words(case: str, tmp_path: Path) -> None:
    at_once(tmp_path, *WITHOUT_A_MODEL[case])


def test_bad_words_in_an_interpreter_of_its_own(tmp_path: Path) -> None:
    """The list of imports is Python's own, from its start to its end."""
    at_once(tmp_path, *WITHOUT_A_MODEL["two wrong words"], by=timed)


@pytest.mark.slow
def test_a_good_command_imports_torch(tmp_path: Path) -> None:
    """The other side of every "without torch" above: the list would show it."""
    done, modules = timed("-q", *TINY, "updates=1", cwd=empty(tmp_path / "here"))
    assert done.code == 0, done
    assert {"torch", "drivetrain.engine.trainer"} <= modules
    assert not modules & {"timm", "torchvision"}, "a model and data that need neither do not wait for them"


@pytest.mark.parametrize("case", RECIPES)
def test_bad_recipes(case: str, tmp_path: Path) -> None:
    text, names = RECIPES[case]
    file = empty(tmp_path / "given") / "recipe.yaml"
    file.write_text(text)
    said = at_once(tmp_path, (f"recipe={file}",), tuple(n.replace("@", str(file)) for n in names), env={"SECRET": SECRET})
    assert SECRET not in said
    assert len(said) < 2000, "a refusal is short"


def test_recipe_that_is_no_text(tmp_path: Path) -> None:
    file = empty(tmp_path / "given") / "recipe.yaml"
    file.write_bytes(b"epochs: \xff\xfe\n")
    at_once(tmp_path, (f"recipe={file}",), (str(file), "UTF-8"))


@pytest.mark.parametrize("case", SWEPT)
def test_a_recipe_sweeps_only_what_a_recipe_may_set(case: str, tmp_path: Path) -> None:
    """`sweep:` is as untrusted as the rest of the file; `recipe check` refuses what a run refuses."""
    file = empty(tmp_path / "given") / "recipe.yaml"
    file.write_text(f"epochs: 1\nsweep:\n  {SWEPT[case]}\n")
    cwd = empty(tmp_path / "here")
    for words in (("train", "-q", f"recipe={file}", "updates=1"), ("recipe", "check", str(file))):
        done = run(*words, cwd=cwd)
        assert not list(cwd.rglob("*")), "nothing is written, least of all by the recipe's own code"
        answered(done, (f"{file}:{6 if case == 'own code' else 3}: ",))


def test_a_wrong_recipe_and_a_wrong_word_are_told_together(tmp_path: Path) -> None:
    file = empty(tmp_path / "given") / "recipe.yaml"
    file.write_text("optimizer:\n  lrr: 3\n")
    at_once(tmp_path, (f"recipe={file}", "precision=ampp", "epochs=0"), (f"{file}:2", "precision=ampp", "epochs=0"))


@pytest.mark.parametrize("words", [("precision=ampp", "optimizer.lrr=3"), ("recipe=nope",), ("model=own",)])
def test_both_entries_answer_alike(words: tuple[str, ...], tmp_path: Path) -> None:
    place = f"output_dir={tmp_path / 'runs'}"
    by_checkout = run(*words, place, cwd=ROOT, how=SRC_TRAIN)
    by_command = run("train", *words, place, cwd=empty(tmp_path / "here"))
    assert by_checkout == by_command
    assert by_command.errors
    assert not (tmp_path / "runs").exists()


def test_fp8_without_its_extra(tmp_path: Path) -> None:
    """As on a machine where torchao is not installed."""
    (empty(tmp_path / "hides") / "sitecustomize.py").write_text("import sys\nsys.modules['torchao'] = None\n")
    at_once(
        tmp_path,
        ("precision=fp8",),
        ("precision=fp8", "drivetrain[torchao]"),
        env={"PYTHONPATH": str(tmp_path / "hides")},
        by=timed,
    )


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_read_only_output_dir(tmp_path: Path) -> None:
    empty(tmp_path / "locked").chmod(0o555)
    at_once(tmp_path, (f"output_dir={tmp_path / 'locked' / 'runs'}",), ("output_dir",))


def test_a_key_given_two_values_is_said(tmp_path: Path) -> None:
    """A shell that expands {a,b} gives both: the last holds, and not in silence."""
    done = train(*TINY, "updates=1", "updates=2", cwd=empty(tmp_path / "here"))
    assert done.code == 0, done
    assert "updates is given 2 times: updates=2 holds" in done.err


def test_a_place_that_may_not_be_written_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same for whoever may write anywhere: what the system would say is put in its mouth."""
    from drivetrain.core.errors import UserError
    from drivetrain.launch.job import prepare

    locked, access = empty(tmp_path / "locked"), os.access
    monkeypatch.setattr(os, "access", lambda path, *how: Path(path) != locked and access(path, *how))
    with pytest.raises(UserError) as refused:
        prepare([f"output_dir={locked / 'runs'}", "precision=ampp"])
    assert [p for p in refused.value.problems if "output_dir" in p and "may not be written to" in p]
    assert [p for p in refused.value.problems if "precision=ampp" in p]
    assert not list(locked.iterdir())


@pytest.mark.parametrize(
    ("words", "names"),
    [
        (("+resume=.",), ("resume=.", "no run")),
        (("++resume=.",), ("resume=.", "no run")),
        (("-m", "+resume=.", "epochs=1,2"), ("resume=", "-m")),
        (("--resolve",), ("--resolve", "--cfg")),
        (("--package", "optimizer"), ("--package", "--cfg")),
        (("-m", "optimizer.lr=interval(0,1)"), ("optimizer.lr=interval(0,1)",)),
        (("-m", "epochs=glob(*)"), ("epochs=glob(*)",)),
    ],
)
def test_no_word_is_ignored_silently(words: tuple[str, ...], names: tuple[str, ...], tmp_path: Path) -> None:
    at_once(tmp_path, (*words, "-q", *TINY, "updates=1"), names)


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

    file.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (8, 8), (shade, 255 - shade, shade)).save(file)


def folder(root: Path, classes: int = 2, images: int = 6) -> Path:
    """An image folder."""
    for c in range(classes):
        for i in range(images):
            image(root / f"class{c}" / f"{i}.png", 40 * i)
    return root


FOLDER = ("data=imagefolder", "data.size=8", "data.holdout=0.4", "batch.global_batch=2", *TINY, "epochs=1")


def test_image_folder_that_is_whole(tmp_path: Path) -> None:
    """The other side of the four that follow."""
    done = run("train", "-q", *FOLDER, f"data.root={folder(tmp_path / 'images')}", cwd=empty(tmp_path / "here"))
    assert done.code == 0, done


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
