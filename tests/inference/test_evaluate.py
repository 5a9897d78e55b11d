"""`drivetrain evaluate` gives the figures of training: on one process, on ranks, of any checkpoint, on other data."""

from __future__ import annotations

import json
import shutil
import signal
import tempfile

import pytest
from PIL import Image

import drivetrain
from drivetrain.cli import main
from drivetrain.core.errors import INTERRUPTED, UserError
from drivetrain.core.tensors import Tensors
from drivetrain.inference.evaluation import evaluate
from drivetrain.inference.finished import Choice
from tests.support.command import run

TEST_SAMPLES = 359  # of data=digits


def test_the_figures_are_those_of_training(digits, tmp_path, capsys):
    """All of them, with those of the averaged weights, to the last digit, in JSON too."""
    out = tmp_path / "figures" / "e.json"
    assert main.main(["evaluate", str(digits.run_dir), "--out", str(out)]) == 0
    written = json.loads(out.read_text())
    assert written["metrics"] == digits.tested("final")
    assert set(written["metrics"]) == {"loss", "accuracy", "ema_loss", "ema_accuracy"}
    assert written["update"] == digits.updates
    assert f"{digits.tested('final')['accuracy']:.6g}" in capsys.readouterr().out


def test_it_leaves_the_run_as_it_was(digits):
    files = {path: path.stat().st_mtime_ns for path in digits.run_dir.rglob("*")}
    evaluate(digits.run_dir)
    assert {path: path.stat().st_mtime_ns for path in digits.run_dir.rglob("*")} == files


@pytest.fixture
def told(monkeypatch):
    """`told(number)`: the second read of the test set tells the run to stop, by this signal. Returns the reads."""
    fetch = Tensors.fetch

    def by(number: int) -> list[object]:
        reads: list[object] = []

        def read(self, indices):
            if len(self) == TEST_SAMPLES:
                reads.append(indices)
                if len(reads) == 2:
                    signal.raise_signal(number)
            return fetch(self, indices)

        monkeypatch.setattr(Tensors, "fetch", read)
        return reads

    return by


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_at_the_next_batch(digits, told, tmp_path, monkeypatch, capsys, number):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    reads = told(number)
    assert main.main(["evaluate", str(digits.run_dir), "batch.global_batch=20", "loader=sync"]) == INTERRUPTED
    assert len(reads) == 2
    assert capsys.readouterr().err.splitlines()[-1] == "stopped by a signal while a data set was evaluated"
    assert not list(tmp_path.glob("drivetrain*"))


@pytest.mark.usefixtures("own_handlers")
def test_a_signal_in_the_test_at_a_runs_end_ends_it_where_it_is_saved(told):
    """All is saved then, and resuming tests what the run has come to. A run that saves nothing is tested to its end."""
    words = ["data=digits", "data.validation=0.1", "model=mlp", "model.hidden=[8]", "epochs=1", "loader=sync"]
    whole = drivetrain.train(words)
    reads = told(signal.SIGTERM)
    stopped = drivetrain.train(words)
    assert stopped.status == "interrupted", stopped.error
    assert f"a data set was evaluated: go on with resume={stopped.run_dir}" in stopped.error
    assert drivetrain.train([f"resume={stopped.run_dir}"]).metrics == whole.metrics
    reads.clear()
    assert drivetrain.train([*words, "saving=none"]).metrics == whole.metrics
    assert len(reads) > 1


def test_averaged_weights(digits):
    found = evaluate(digits.run_dir, choice=Choice(average=True)).metrics
    assert found == {name: digits.tested("final")[f"ema_{name}"] for name in ("loss", "accuracy")}


@pytest.mark.parametrize("words", [("optimizer=schedulefree",), ("precision=bf16_pure",), ("batch=accumulate", "precision=bf16")])
def test_what_training_does_to_weights_is_undone(finished, words):
    """Weights that the optimizer or the precision keeps in two forms are evaluated in the one that training evaluated."""
    result = finished("model=mlp", "model.hidden=[32]", "epochs=1", "scheduler=constant", *words)
    assert evaluate(result.run_dir).metrics == result.tested("final")


def test_the_best_checkpoint_is_the_default_where_it_was_kept(finished):
    words = ("model=mlp", "model.hidden=[32]", "epochs=3", "saving.keep=1", "scheduler=constant", "optimizer.lr=1.0")
    result = finished(*words, "saving=best")
    best = {name: value for name, value in result.tested("best").items() if name != "update"}
    found = evaluate(result.run_dir)
    assert (found.update, found.metrics) == (result.judged("best")["update"], best)
    again = {**evaluate(result.run_dir, choice=Choice(split="validation")).metrics, "update": found.update}
    assert again == result.judged("best"), "the validation set is evaluated as in training, too"
    assert evaluate(result.run_dir, choice=Choice("last")).metrics == result.tested("final")
    assert found.update != result.updates, "the test shows nothing where the last one is the best"


def test_other_metrics_than_those_that_training_needed(finished):
    """Metrics that ranked the models and stopped the run need not be measured again."""
    words = ("model=mlp", "model.hidden=[32]", "epochs=2", "metrics=[f1]", "select=f1", "saving=best")
    result = finished(*words, "stop=early", "stop.patience=1", "stop.metric=f1")
    found = evaluate(result.run_dir, ["metrics=[precision]"]).metrics
    assert set(found) == {"loss", "accuracy", "precision"}
    assert found["accuracy"] == result.tested("best")["accuracy"]


def test_other_data(digits, finished):
    """A set of another split gives another figure; one that does not fit is refused by the names of the weights."""
    other = evaluate(digits.run_dir, ["data.holdout=0.5"])
    assert other.metrics != digits.tested("final")
    with pytest.raises(UserError, match=r"head\.weight is \[10, 32\], and the model wants \[4, 32\]"):
        evaluate(digits.run_dir, ["data=synthetic", "data.shape=[1,8,8]", "data.classes=4"])


def test_a_folder_of_other_images_is_used_whole(finished, tmp_path, capsys):
    """The set, its size and its place are printed. A share of a folder is judged only where it is the run's own, or asked for."""

    def photos(name, each, shift=0):
        for label, color in (("cat", "red"), ("dog", "blue")):
            (folder := tmp_path / name / label).mkdir(parents=True)
            for n in range(each):
                Image.new("RGB", (16 + n + shift, 16), color).save(folder / f"{n}.png")
        return tmp_path / name

    own = photos("own", 15)
    data = (f"data.root={own}", "data.size=16", "data.holdout=0.3", "batch.global_batch=4")
    result = finished("model=mlp", "model.hidden=[8]", "epochs=1", "data=imagefolder", *data)

    def judged(*words):
        assert main.main(["evaluate", str(result.run_dir), *words, "--out", str(tmp_path / "e.json")]) == 0
        return json.loads((tmp_path / "e.json").read_text())["samples"], capsys.readouterr().out

    held_out, told = judged()
    assert 0 < held_out < 30
    assert f"test set: {held_out} samples of {own}, 0.3 of the files" in told
    samples, told = judged(f"data.root={photos('others', 11, 7)}")
    assert samples == 22
    assert f"test set: 22 samples of {tmp_path / 'others'}, the whole folder" in told
    assert judged(f"data.root={tmp_path / 'others'}", "data.holdout=0.3")[0] < 22
    moved = shutil.copytree(own, tmp_path / "moved")
    assert judged(f"data.root={moved}")[0] == held_out, "those that it was trained on are not judged"
    assert judged(f"data.root={photos('few', 1)}")[0] == 2, "too few to be divided"


@pytest.mark.slow
def test_two_ranks(tmp_path):
    """A run of two ranks is evaluated by two to the last digit, also from sharded checkpoints; by one to rounding."""
    words = ("model=mlp", "model.hidden=[32]", "epochs=1", "parallel=fsdp", "parallel.nproc=2", "saving.sharded=true", "ema=ema")
    assert run("train", "-q", *words, "output_dir=out", cwd=tmp_path).code == 0
    (run_dir,) = (p.parent for p in tmp_path.glob("out/*/*/result.json"))
    trained = json.loads((run_dir / "result.json").read_text())["metrics"]["test"]["final"]
    found = {}
    for name, more in (("two", ()), ("one", ("parallel=single",)), ("average", ("average=true",))):
        done = run("evaluate", str(run_dir), "--out", f"{name}.json", *more, cwd=tmp_path)
        assert done.code == 0, done
        found[name] = json.loads((tmp_path / f"{name}.json").read_text())
    assert found["two"]["metrics"] == trained
    assert (found["two"]["world_size"], found["one"]["world_size"]) == (2, 1)
    assert found["average"]["metrics"] == {name: trained[f"ema_{name}"] for name in ("loss", "accuracy")}
    assert found["one"]["metrics"] == pytest.approx(trained, rel=1e-5)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["nowhere"], "nowhere is no run's directory"),
        (["RUN", "update=7"], "no checkpoint of update 7"),
        (["RUN", "update=newest"], "update=newest: say update=N"),
        (["RUN", "data=digit"], "did you mean 'digits'"),
        (["RUN", "average=true", "update=best", "extra"], "takes one run"),
        ([], "drivetrain evaluate RUN"),
    ],
)
def test_bad_words(words, says, digits, capsys):
    code = main.main(["evaluate", *(str(digits.run_dir) if word == "RUN" else word for word in words)])
    told = capsys.readouterr()
    assert says in told.err + told.out
    assert code == (2 if words else 0)
    assert len(told.err.splitlines()) == (1 if words else 0)


def test_a_run_without_averages(finished):
    result = finished("model=mlp", "model.hidden=[32]", "epochs=1", "scheduler=constant", "precision=bf16_pure")
    with pytest.raises(UserError, match="no averaged weights: the run had ema=none"):
        evaluate(result.run_dir, choice=Choice(average=True))


def test_a_strangers_run_names_no_code(finished, tmp_path, monkeypatch):
    """Code of a run that somebody else recorded is not imported; one message gives the command that allows it."""
    (tmp_path / "nets.py").write_text(
        "from drivetrain.model.mlp import Mlp\ndef net(shape, classes):\n    return Mlp(shape, classes, [8], 0.0)\n"
    )
    words = ("model=own", "model.target=nets.net", "trust=[nets]", "epochs=1")
    result = finished(*words)
    assert evaluate(result.run_dir).metrics == result.tested("final"), "an own run needs no word"
    copy = shutil.copytree(result.run_dir, tmp_path / "copy")
    file = copy / "environment.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "signature": "another"}))
    with pytest.raises(UserError, match="If you trust it, say: drivetrain evaluate") as refused:
        evaluate(copy)
    (line,) = refused.value.problems
    assert "'trust=[nets]'" in line
    assert "nets.net" in line
    allowed = evaluate(copy, ["trust=[nets]", "model.target=nets.net"])
    assert allowed.metrics == result.tested("final")
