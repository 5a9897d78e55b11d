"""`drivetrain evaluate` gives the figures of training: on one process, on ranks, of any checkpoint, on other data."""

import json
import re
import shutil
import signal
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import drivetrain
from drivetrain.cli import main
from drivetrain.core.errors import INTERRUPTED, UserError
from drivetrain.core.step.tensors import Tensors
from drivetrain.inference.evaluation import Evaluation, evaluate
from drivetrain.inference.finished import Choice
from tests.support import slow
from tests.support.command import run
from tests.support.put import put
from tests.support.to_end import run_to_end

TEST_SAMPLES = 359  # of data=digits


def test_the_figures_are_those_of_training(digits, tmp_path, capsys):
    """All of them, with those of the averaged weights, to the last digit, in JSON too. The run is left as it was."""
    out, files = tmp_path / "figures" / "e.json", {path: path.stat().st_mtime_ns for path in digits.run_dir.rglob("*")}
    assert main.main(["evaluate", str(digits.run_dir), "--out", str(out)]) == 0
    written, trained = json.loads(out.read_text()), digits.tested("final")
    assert (written["metrics"], written["update"]) == (trained, digits.updates)
    assert set(trained) == {"loss", "accuracy", "ema_loss", "ema_accuracy"}
    assert f"{trained['accuracy']:.6g}" in capsys.readouterr().out
    averaged = evaluate(digits.run_dir, choice=Choice(average=True)).metrics
    assert averaged == {name: trained[f"ema_{name}"] for name in ("loss", "accuracy")}
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
    stopped = run_to_end(words, ends="interrupted")
    assert f"a data set was evaluated: go on with resume={stopped.run_dir}" in stopped.error
    assert drivetrain.train([f"resume={stopped.run_dir}"]).metrics == whole.metrics
    reads.clear()
    assert drivetrain.train([*words, "saving=none"]).metrics == whole.metrics
    assert len(reads) > 1


@pytest.mark.parametrize("words", [("optimizer=schedulefree",), ("precision=bf16_pure",), ("batch=accumulate", "precision=bf16")])
def test_what_training_does_to_weights_is_undone(finished, words):
    """Weights that the optimizer or the precision keeps in two forms are evaluated in the one that training evaluated."""
    result = finished("model=mlp", "model.hidden=[32]", "epochs=1", "scheduler=constant", *words)
    assert evaluate(result.run_dir).metrics == result.tested("final")
    with pytest.raises(UserError, match="no averaged weights: the run had ema=none"):
        evaluate(result.run_dir, choice=Choice(average=True))


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
    assert evaluate(digits.run_dir, ["data.holdout=0.5"]).metrics != digits.tested("final")
    with pytest.raises(UserError, match=r"head\.weight is \[10, 32\], and the model wants \[4, 32\]"):
        evaluate(digits.run_dir, ["data=synthetic", "data.shape=[1,8,8]", "data.classes=4"])


def test_a_folder_of_other_images_is_used_whole(finished, tmp_path, says):
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
        told = says("evaluate", result.run_dir, *words, "--out", tmp_path / "e.json")
        return json.loads((tmp_path / "e.json").read_text())["samples"], told

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
        run("evaluate", str(run_dir), "--out", f"{name}.json", *more, cwd=tmp_path, code=0)
        found[name] = json.loads((tmp_path / f"{name}.json").read_text())
    assert found["two"]["metrics"] == trained
    assert (found["two"]["world_size"], found["one"]["world_size"]) == (2, 1)
    assert found["average"]["metrics"] == {name: trained[f"ema_{name}"] for name in ("loss", "accuracy")}
    assert found["one"]["metrics"] == pytest.approx(trained, rel=1e-5)


def test_a_strangers_run_names_no_code(finished, tmp_path):
    """Code of a run that somebody else recorded is not imported; one message gives the command that allows it."""
    (tmp_path / "nets.py").write_text(
        "from drivetrain.model.nets import Mlp\ndef net(shape, classes):\n    return Mlp(shape, classes, [8], 0.0)\n"
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
    assert evaluate(copy, ["trust=[nets]", "model.target=nets.net"]).metrics == result.tested("final")


# --- `drivetrain evaluate` on another file than the run's own: all of it is judged, encoded as the run's own data ---

SMALL = ("model=mlp", "model.hidden=[8]", "epochs=1", "batch.global_batch=8")
GPT = ("model=gpt", "model.depth=1", "model.width=16", "model.heads=2", "epochs=1", "batch.global_batch=8")
UNET = ("task=segmentation", "model=unet", "model.width=2", "model.depth=1", "epochs=1", "batch.global_batch=8")
OTHER = 11  # samples of the other file
Write = Callable[[Path, int, int], Path]  # (folder, samples, number of the first) → the file or folder of the data


def table(folder: Path, rows: Sequence[str], header: str = "size,color,kind,price") -> Path:
    put(folder / "t.csv", "\n".join([header, *rows]) + "\n")
    return folder / "t.csv"


def houses(folder: Path, count: int, first: int) -> Path:
    """Rows of three colors and three kinds. Of eleven rows, the first has a color that no other file has."""
    colors, kinds = ("red", "blue", "green"), ("barn", "flat", "villa")
    rows = [f"{n * n},{colors[n % 3] if count > OTHER else ('red', 'pink')[n == first]}" for n in range(first, first + count)]
    return table(folder, [f"{row},{kinds[1 + n % 2 if count <= OTHER else n % 3]},{3 * n}" for n, row in enumerate(rows)])


def painted(folder: Path, count: int, first: int) -> list[str]:
    folder.mkdir(parents=True, exist_ok=True)
    names = [f"{n}.png" for n in range(first, first + count)]
    for n, name in enumerate(names, first):
        Image.new("RGB", (8, 8), (n, 3 * n, 255 - n)).save(folder / name)
    return names


def images_in_a_table(folder: Path, count: int, first: int) -> Path:
    names = painted(folder, count, first)
    few = count <= OTHER
    return table(folder, [f"{name},{'dog' if few or n % 3 else 'cat'}" for n, name in enumerate(names)], "image,kind")


def masks(folder: Path, count: int, first: int) -> Path:
    """Three classes; a folder of a few images has only the first two."""
    (folder / "masks").mkdir(parents=True)
    for name in painted(folder / "images", count, first):
        mask = np.zeros((8, 8), dtype=np.uint8)
        mask[:4] = 1
        mask[0] = 1 if count <= OTHER else 2
        Image.fromarray(mask).save(folder / "masks" / name)
    return folder


def json_lines(folder: Path, count: int, first: int) -> Path:
    """Texts of two classes; a file of a few has only the second."""
    folder.mkdir(parents=True, exist_ok=True)
    kinds = ["dog" if count <= OTHER or n % 2 else "cat" for n in range(count)]
    lines = [json.dumps({"text": f"a {kind} of {n}", "kind": kind}) for n, kind in enumerate(kinds, first)]
    (folder / "t.jsonl").write_text("\n".join(lines) + "\n")
    return folder / "t.jsonl"


def plain_text(folder: Path, count: int, first: int) -> Path:
    """Each line is a passage of its own, of one piece."""
    put(folder / "t.txt", "".join(f"line {n:03d}, and {'so on ' * 9}\n" for n in range(first, first + count)))
    return folder / "t.txt"


READERS: dict[str, tuple[Write, str, tuple[str, ...]]] = {
    "tabular": (houses, "path", (*SMALL, "data=tabular", "data.target=kind")),
    "labels_csv": (images_in_a_table, "path", (*SMALL, "data=labels_csv", "data.target=kind", "data.size=8")),
    "masks": (
        masks,
        "root",
        (*UNET, "data=masks", "data.size=8"),
    ),
    "jsonl": (json_lines, "path", (*GPT, "data=jsonl", "task=text_classification", "data.label=kind", "data.length=64")),
    "text": (plain_text, "path", (*GPT, "data=text", "task=language_modelling", "data.length=16")),
}


@pytest.fixture
def trained(finished, tmp_path_factory):
    """`trained(reader)`: the run directory of a run on sixty samples, and its own file or folder."""

    def by(reader: str) -> tuple[Path, Path]:
        write, key, words = READERS[reader]
        folder = tmp_path_factory.getbasetemp() / f"own_{reader}"
        own = folder / {"path": "t.txt" if reader == "text" else "t.jsonl" if reader == "jsonl" else "t.csv"}.get(key, "")
        if not folder.exists():
            own = write(folder, 60, 0)
        return finished(*words, f"data.{key}={own}", "data.holdout=0.3", "augment=[]").run_dir, own

    return by


def judged(run_dir: Path, reader: str, place: Path, *more: str) -> Evaluation:
    return evaluate(run_dir, [f"data.{READERS[reader][1]}={place}", *more])


@pytest.mark.parametrize("reader", READERS)
def test_another_file_is_judged_whole(reader, trained, tmp_path):
    """The run's own file is judged on what was held out, at another place too. A share of another file must be asked for."""
    run_dir, own = trained(reader)
    held_out = evaluate(run_dir)
    assert held_out.samples > 0
    other = judged(run_dir, reader, READERS[reader][0](tmp_path / "other", OTHER, 100))
    pieces = 1 if reader != "text" else other.samples // OTHER  # a passage is cut into pieces
    assert other.samples == OTHER * pieces
    assert "the whole" in other.source
    moved = tmp_path / "moved" / own.name
    shutil.copytree(own if own.is_dir() else own.parent, moved if own.is_dir() else moved.parent)
    again = judged(run_dir, reader, moved)
    assert (again.samples, again.metrics) == (held_out.samples, held_out.metrics)
    place = tmp_path / "other" / (own.name if own.is_file() else "")
    assert judged(run_dir, reader, place, "data.holdout=0.5").samples < other.samples


def test_a_tables_figures_are_those_of_its_predictions(trained, tmp_path):
    """Its means, colors and kinds differ from those of the run's own table, which encode it."""
    run_dir, _ = trained("tabular")
    path = houses(tmp_path, OTHER, 100)
    run = drivetrain.load(run_dir)
    found = run.predict_ready(torch.cat(inputs_of(run, path))).probabilities
    kinds = torch.tensor([run.classes.index(row.split(",")[2]) for row in path.read_text().splitlines()[1:]])
    check(judged(run_dir, "tabular", path), found, kinds)


def test_numbers_are_in_the_units_of_the_runs_own_table(finished, tmp_path):
    own, path = houses(tmp_path / "own", 60, 0), houses(tmp_path / "other", OTHER, 100)
    words = ("task=regression", "data=tabular", "data.target=price", f"data.path={own}")
    result = finished(*SMALL, *words)
    run = drivetrain.load(result.run_dir)
    output = run.predict_ready(torch.cat(inputs_of(run, path))).output
    prices = torch.tensor([float(row.split(",")[3]) for row in path.read_text().splitlines()[1:]])
    mae = (run._units(output).flatten() - prices).abs().mean()
    assert evaluate(result.run_dir, [f"data.path={path}"]).metrics["mae"] == pytest.approx(float(mae), rel=1e-4)


def test_the_figures_of_texts_are_those_of_their_predictions(trained, tmp_path):
    run_dir, _ = trained("jsonl")
    path = json_lines(tmp_path, OTHER, 100)
    run = drivetrain.load(run_dir)
    found = torch.cat([run.predict_ready(x).probabilities for x in inputs_of(run, path)])
    check(judged(run_dir, "jsonl", path), found, torch.full((OTHER,), run.classes.index("dog")))


def inputs_of(run, path: Path) -> list[torch.Tensor]:
    """A file's samples in blocks, as the run's predictions read them."""
    return [read(slice(None)) for _, read in run.run.data.read_inputs(path, run.data, 7).blocks]


def check(other: Evaluation, probabilities: torch.Tensor, classes: torch.Tensor) -> None:
    right = (probabilities.argmax(1) == classes).float().mean()
    assert other.metrics["accuracy"] == pytest.approx(float(right))
    loss = -probabilities[torch.arange(len(classes)), classes].log().mean()
    assert other.metrics["loss"] == pytest.approx(float(loss), rel=1e-4)


@pytest.mark.parametrize(
    ("reader", "content", "says"),
    [
        ("tabular", "size,kind,price\n1,barn,2\n", "has no column color, which the run's own table has"),
        ("tabular", "size,color,kind,price\n1,red,castle,2\n", "no training row has the class castle of kind"),
        ("labels_csv", "image,kind\n0.png,bird\n", "no training row has the class bird of kind"),
        ("labels_csv", "file,kind\n0.png,dog\n", "data.image=image is no column of"),
        ("jsonl", '{"text": "a bird", "kind": "bird"}\n', "no training row has the class bird of kind"),
        ("masks", "", r"masks have the values 7, and the run knows 0, 1, 2: set data.values"),
    ],
)
def test_a_file_that_does_not_fit_is_refused(reader, content, says, trained, tmp_path):
    run_dir, own = trained(reader)
    if reader == "masks":
        place = masks(tmp_path / "other", 2, 0)
        Image.fromarray(np.full((8, 8), 7, dtype=np.uint8)).save(place / "masks" / "0.png")
    else:
        painted(tmp_path, 1, 0)
        (place := tmp_path / own.name).write_text(content)
    with pytest.raises(UserError, match=says) as refused:
        judged(run_dir, reader, place)
    assert len(refused.value.problems) == 1


def test_a_table_for_the_test_is_encoded_as_the_runs_own(trained, tmp_path):
    """Beside another data.path, the file that data.test gives is judged; without it never the run's own data.test."""
    run_dir, own = trained("tabular")
    whole = judged(run_dir, "tabular", path := houses(tmp_path / "other", OTHER, 100))
    train = houses(tmp_path / "train", 30, 200)
    given = judged(run_dir, "tabular", train, f"data.test={path}")
    assert (given.samples, given.metrics, given.source) == (whole.samples, whole.metrics, whole.source)
    tested = drivetrain.train([*READERS["tabular"][2], f"data.path={own}", f"data.test={train}", "output_dir=out", "logger=[]"])
    assert evaluate(tested.run_dir).samples == 30
    assert judged(tested.run_dir, "tabular", path).samples == OTHER


def test_folders_of_some_classes_have_the_runs_numbers(finished, tmp_path):
    """Another folder has no images of the first class; one with a class that the run does not know is refused."""
    for place, kinds in (("own", "abc"), ("other", "bc"), ("more", "abd")):
        for kind in kinds:
            painted(tmp_path / place / kind, 20 if place == "own" else 4, 5 * ord(kind) - 480)
    words = ("data=imagefolder", "data.size=8", "data.normalize=measured", "augment=[]")
    result = finished(*SMALL, *words, f"data.root={tmp_path / 'own'}")
    run = drivetrain.load(result.run_dir)
    files = [sorted((tmp_path / "other" / kind).iterdir()) for kind in "bc"]
    found = run.predict([str(file) for file in (*files[0], *files[1])]).probabilities
    check(evaluate(result.run_dir, [f"data.root={tmp_path / 'other'}"]), found, torch.tensor([1] * 4 + [2] * 4))
    with pytest.raises(UserError, match="no training image has the class d"):
        evaluate(result.run_dir, [f"data.root={tmp_path / 'more'}"])


@pytest.mark.parametrize("changed", [True, False])
def test_a_longer_run_on_other_samples_says_so(changed, tmp_path, caplog):
    def table(factor: int) -> None:
        (tmp_path / "t.csv").write_text("x,kind\n" + "".join(f"{factor * i % 17},{'ab'[i % 2]}\n" for i in range(60)))

    table(1)
    words = ("model=mlp", "model.hidden=[4]", "data=tabular", "data.path=t.csv", "data.target=kind", "batch.global_batch=12")
    result = drivetrain.train([*words, "epochs=1", "output_dir=out"])
    table(3 if changed else 1)
    assert drivetrain.train([f"resume={result.run_dir}", "epochs=2"]).status == "completed"
    said = "the training data has changed since the run was trained on it: it goes on with other samples"
    assert (said in caplog.messages) == changed


@pytest.mark.parametrize("change", slow.but("renamed".__eq__, ["renamed", "added", "removed"]))
def test_a_folder_whose_classes_changed_since_training_is_refused(change, tmp_path):
    """Class 1 would be another one in silence: b was it, and c is. Whoever knows better says so."""
    for kind in "abc":
        painted(tmp_path / "own" / kind, 20, 5 * ord(kind) - 480)
    words = ("data=imagefolder", "data.size=8", "data.normalize=measured", "augment=[]", f"data.root={tmp_path / 'own'}")
    result = drivetrain.train([*SMALL, *words, "saving.every_updates=1", "output_dir=out"])
    if change == "added":
        painted(tmp_path / "own" / "ab", 20, 100)
    else:
        (tmp_path / "away").mkdir()
        (tmp_path / "own" / "b").rename(tmp_path / ("own" if change == "renamed" else "away") / "z")
    resume = [f"resume={result.run_dir}", "epochs=2"]
    says = r"other classes than in training: class 1 is '(c|ab)' and was 'b': give data with the same 3 classes"
    for use in (
        lambda: evaluate(result.run_dir),
        lambda: drivetrain.load(result.run_dir).blocks_of("test", 4),
    ):
        with pytest.raises(UserError, match=says):
            use()
    assert re.search(says, str(run_to_end(resume, ends="failed").error))
    if change == "renamed":
        assert drivetrain.train([*resume, "resume_changed=true"]).status == "completed"
