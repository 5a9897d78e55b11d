"""`drivetrain predict`: the answers of the evaluation, a row for each input, in order; and what verbs on a run refuse."""

import csv
import io
import itertools
import json
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils._pytree import tree_map

import drivetrain
from drivetrain.cli import completion, main
from drivetrain.config.catalog import options
from drivetrain.config.compose import compose
from drivetrain.core.errors import DataError, UserError
from drivetrain.core.step.trees import map_tensors
from drivetrain.data.own import OwnDataset
from drivetrain.inference.evaluation import evaluate
from drivetrain.inference.finished import MODEL_ALONE
from drivetrain.inference.inputs import SampleBlock, read_in_batches
from drivetrain.inference.loaded import LoadedRun
from drivetrain.inference.predict import output
from drivetrain.inference.predictions import Predictions
from drivetrain.launch.job import checked
from tests.support import command
from tests.support.put import put


def rows(file: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(file.open(encoding="utf-8")))


def predict(result, *words: object) -> int:
    return main.main(["predict", str(result.run_dir), *map(str, words)])


@pytest.fixture
def asked(capsys, monkeypatch):
    """`asked(result, *words, lines=…)`: the exit code of predict, and the rows that it prints; `lines` are standard input."""

    def ask(result, *words: object, lines: bytes | None = None) -> tuple[int, list[dict[str, str]]]:
        if lines is not None:
            monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(lines)))
        capsys.readouterr()
        return predict(result, *words), list(csv.DictReader(io.StringIO(capsys.readouterr().out)))

    return ask


def test_the_test_set_has_the_accuracy_of_the_evaluation(digits, tmp_path, capsys):
    assert predict(digits, "--data", "test", "--out", tmp_path / "p.csv") == 0
    found = rows(tmp_path / "p.csv")
    right = sum(row["label"] == row["target"] for row in found)
    assert right / len(found) == digits.tested("final")["ema_accuracy"]  # of the weights that the run hands on
    assert [row["input"] for row in found] == [f"test[{n}]" for n in range(len(found))]
    assert all(float(row["probability"]) == max(float(row[f"p_{c}"]) for c in range(10)) for row in found)
    assert "359 predictions" in capsys.readouterr().err


def test_formats(digits, tmp_path, images):
    """JSON lines and Parquet hold what CSV does, and standard output is CSV."""
    from pyarrow import parquet

    np.save(tmp_path / "x.npy", images)
    for kind in ("csv", "jsonl", "parquet"):
        assert predict(digits, tmp_path / "x.npy", "--batch", 4, "--out", tmp_path / f"p.{kind}") == 0
    lines = [json.loads(line) for line in (tmp_path / "p.jsonl").read_text().splitlines()]
    assert parquet.read_table(tmp_path / "p.parquet").to_pylist() == lines
    assert [{k: "" if v is None else str(v) for k, v in line.items()} for line in lines] == rows(tmp_path / "p.csv")
    assert not list(tmp_path.glob(".*")), "temporary files are gone"


def test_arrays(digits, tmp_path, images):
    """The same samples in any file give the same predictions, those of drivetrain.load."""
    np.save(tmp_path / "a.npy", images)
    np.savez(tmp_path / "b.npz", x=images, y=np.zeros(6))
    torch.save(torch.from_numpy(images), tmp_path / "c.pt")
    np.save(tmp_path / "d.npy", images[0])
    files = [tmp_path / name for name in ("a.npy", "b.npz", "c.pt", "d.npy")]
    assert predict(digits, *files, "--out", tmp_path / "p.csv") == 0
    found = rows(tmp_path / "p.csv")
    expected = drivetrain.load(digits.run_dir).predict(images)
    assert [row["label"] for row in found] == [*expected.labels * 3, expected.labels[0]]
    assert [row["input"] for row in found][5:8] == [f"{files[0]}[5]", f"{files[1]}[0]", f"{files[1]}[1]"]
    assert expected.probabilities is not None
    torch.testing.assert_close(torch.tensor([float(row["p_3"]) for row in found[:6]]), expected.probabilities[:, 3])


def test_a_folder_of_images_with_a_broken_one(digits, tmp_path, images, capsys):
    """In the order of the paths; what cannot be read says why in its row, and the exit code says so."""
    folder = tmp_path / "folder"
    (folder / "more").mkdir(parents=True)
    for n, image in enumerate(images):
        pixels = (image[0] * (255 / 16)).round().astype("uint8")
        Image.fromarray(pixels).save(folder / ("more" if n > 3 else "") / f"{n}.png")
    (folder / "2.png").write_bytes(b"no image")
    Image.new("RGB", (20, 30)).save(folder / "9.png")
    (folder / "readme.txt").write_text("not read")
    assert predict(digits, folder, "--batch", 3, "--out", tmp_path / "p.csv") == 1
    found = rows(tmp_path / "p.csv")
    assert [Path(row["input"]).name for row in found] == ["0.png", "1.png", "2.png", "3.png", "9.png", "4.png", "5.png"]
    assert [row["error"] != "" for row in found] == [False, False, True, False, True, False, False]
    assert "2.png cannot be read as an image" in found[2]["error"]
    assert "9.png has 20×30 pixels, and the model takes 8×8" in found[4]["error"]
    assert found[2]["label"] == found[2]["p_0"] == ""
    expected = drivetrain.load(digits.run_dir).predict(images)
    assert [row["label"] for row in found if not row["error"]] == [expected.labels[n] for n in (0, 1, 3, 4, 5)]
    told = capsys.readouterr().err
    assert "5 of 7 predictions, " in told
    assert "2 of the inputs have no answer" in told


def test_a_file_that_is_no_image_is_refused_where_the_run_reads_images(digits, tmp_path, images, capsys):
    (tmp_path / "houses.csv").write_text("a,b\n1,2\n")
    assert predict(digits, tmp_path / "houses.csv") == 2
    assert "houses.csv is no image, and this run reads images: give files such as .jpg" in capsys.readouterr().err
    Image.fromarray((images[0][0] * (255 / 16)).round().astype("uint8")).save(tmp_path / "seven", "PNG")  # by its content
    assert predict(digits, tmp_path / "seven") == 0
    assert "1 prediction, " in capsys.readouterr().err


def test_image_files_as_the_run_reads_its_own(finished, tmp_path, monkeypatch, capsys):
    """Photographs of any size are cropped, resized and normalised as the evaluation does it: the same numbers."""
    random = np.random.default_rng(0)
    for n, (split, name) in enumerate(itertools.product(("train", "val"), ("cat", "dog"))):
        folder = tmp_path / "photos" / split / name
        folder.mkdir(parents=True)
        for m in range(3):
            pixels = random.integers(0, 256, (20 + m, 30 + n, 3), dtype="uint8")
            Image.fromarray(pixels).save(folder / f"{m}.{'jpg' if m else 'png'}")
    data = ("data=imagefolder", f"data.root={tmp_path}/photos", "data.size=[16,12]")
    result = finished(*data, "model=mlp", "model.hidden=[8]", "batch.global_batch=3", "updates=2", "scheduler=constant")
    assert predict(result, "--data", "test", "--out", tmp_path / "a.csv") == 0
    assert predict(result, tmp_path / "photos" / "val", "--out", tmp_path / "b.csv") == 0
    a, b = rows(tmp_path / "a.csv"), rows(tmp_path / "b.csv")
    assert [{k: v for k, v in row.items() if k != "target"} for row in a] == b
    assert {row["target"] for row in a} == {"cat", "dog"}
    assert {"p_cat", "p_dog"} < set(b[0])
    # The run's directory is all that is needed: its images are gone, and another working directory makes no difference.
    (tmp_path / "photos").rename(tmp_path / "moved")
    monkeypatch.chdir(tmp_path / "moved")
    assert predict(result, "val", "--out", tmp_path / "c.csv") == 0
    assert [row["p_cat"] for row in rows(tmp_path / "c.csv")] == [row["p_cat"] for row in b]
    assert main.main(["export", str(result.run_dir), "m.ts"]) == 0
    capsys.readouterr()
    assert predict(result, "--data", "test") == 2
    assert f"data.root={tmp_path}/photos is no directory" in capsys.readouterr().err
    assert predict(result, "--data", "test", "data.root=.", "--out", tmp_path / "d.csv") == 0
    assert len(rows(tmp_path / "d.csv")) == len(a)


# What each option reads: the words that set it, and files that are not there.
READS = {
    "cifar10": ("data.root=gone",),
    "huggingface": ("data.root=gone", "data.image=image"),
    "imagefolder": ("data.root=gone", "data.validation=v"),
    "jsonl": (
        "task=language_modelling",
        "data.path=gone.jsonl",
        "data.validation=v.jsonl",
        "data.tokenizer=file",
        "data.tokenizer_file=gone.json",
    ),
    "instructions": ("task=instruction", "data.path=gone.jsonl"),
    "labels_csv": ("data.path=gone.csv", "data.root=gone", "data.target=a"),
    "masks": ("task=segmentation", "data.root=gone"),
    "own": ("data.target=gone.Pictures",),
    "packed": ("data.root=gone",),
    "stdlib": ("task=language_modelling", "data.root=gone"),
    "tabular": ("data.path=gone.csv", "data.target=a"),
    "text": ("task=language_modelling", "data.path=gone.txt", "data.test=gone"),
    "webdataset": ("data.train=gone.tar",),
    "words": ("model=transformers", "model.name=bert", "loss=token", "data.path=gone.jsonl"),
}


@pytest.mark.parametrize("option", options()["data"])
def test_no_data_option_asks_for_its_files_where_the_model_is_used_alone(option):
    composed = compose([*READS.get(option, ()), f"data={option}"])
    checked(composed, used=MODEL_ALONE)
    if option in READS:
        with pytest.raises(UserError, match="gone"):
            checked(composed)


@pytest.mark.parametrize("precision", ["bf16", "bf16_pure"])
def test_a_run_in_16_bits_predicts(precision, finished, asked):
    code, found = asked(
        finished(f"precision={precision}", "model=mlp", "model.hidden=[32]", "updates=2", "scheduler=constant"), "--data", "test"
    )
    assert (code, list(found[0])[:3]) == (0, ["input", "label", "probability"])


def test_lines(digits, finished, tmp_path, images, asked, capsys):
    """`-` reads paths, or texts where the run reads text."""
    Image.fromarray((images[0, 0] * (255 / 16)).round().astype("uint8")).save(tmp_path / "one.png")
    code, (one, none) = asked(digits, "-", "average=false", lines=b"one.png\nnone.png\n")
    assert (code, one["input"], one["label"], one["error"]) == (1, "one.png", "0", "")
    assert "none.png cannot be read" in none["error"]
    words = ("data=stdlib", "data.max_files=20", "data.test_samples=4", "data.length=16", "model=gpt", "model.width=16")
    text = finished(*words, "model.depth=1", "model.heads=2", "loss=next_token", "updates=2", "scheduler=constant")
    code, found = asked(text, "-", lines=b"import os\n\nimport a very long line of text\n")
    assert (code, [row["input"] for row in found]) == (0, ["import os", "", "import a very long line of text"])
    assert all(0 <= int(row["label"]) < 257 for row in found)
    assert predict(text, tmp_path / "one.png") == 2
    assert "this run reads text" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("predict RUN", "needs either inputs"),
        ("predict RUN x.npy --data test", "needs either inputs"),
        ("predict RUN none.png x.npy", "none.png: there is no such file"),
        ("predict RUN wide.npy", "wide.npy has the shape (2, 1, 9, 9), and the model takes (n, 1, 8, 8)"),
        ("predict RUN broken.npy", "broken.npy cannot be read as an array"),
        ("predict RUN several.npz", "it holds the arrays a, b: name the inputs 'x'"),
        ("predict RUN empty", "empty holds no image and no array"),
        ("predict RUN - x.npy", "give it alone"),
        ("predict RUN x.npy --out p.xlsx", "must end in .csv, .jsonl or .parquet"),
        ("predict RUN x.npy --batch 0", "--batch 0"),
        ("predict RUN --data test --temperature 1", "--temperature is for runs that write answers: task=instruction"),
        ("predict x.npy", "needs either inputs"),
        ("predict nowhere x.npy", "nowhere is no run's directory"),
        ("evaluate nowhere", "nowhere is no run's directory"),
        ("evaluate RUN update=7", "no checkpoint of update 7"),
        ("evaluate RUN update=newest", "update=newest: must be a whole number, one of 'best' or 'last'"),
        ("evaluate RUN data=digit", "did you mean 'digits'"),
        ("evaluate RUN average=true update=best extra", "takes one run"),
        ("evaluate", "needs a run's directory"),
        ("export RUN --format tflite", "--format tflite: there is safetensors, torch.export, onnx, torchscript"),
        ("export RUN --with-normalize", "safetensors holds only weights"),
        ("export RUN a b", "one file is written, but a and b are named"),
        ("export RUN update=3", "no checkpoint of update 3"),
        ("export RUN average=maybe", "average=maybe: must be"),
        ("export RUN --format transformers", "for runs with model=transformers, and this one has model=mlp"),
        ("card nowhere", "nowhere is no run's directory"),
        ("card a b c", "one file is written, but b and c are named"),
        ("card a x=1", "perhaps a file"),
    ],
)
def test_what_is_refused_before_anything_begins(words, says, digits, tmp_path, images, refused):
    np.save(tmp_path / "x.npy", images)
    np.save(tmp_path / "wide.npy", np.zeros((2, 1, 9, 9), dtype="float32"))
    np.savez(tmp_path / "several.npz", a=images, b=images)
    (tmp_path / "broken.npy").write_bytes(b"\x93NUMPY no")
    (tmp_path / "empty").mkdir()
    (line,) = refused(*(digits.run_dir if word == "RUN" else word for word in words.split())).splitlines()
    assert says in line


def test_a_cell_of_csv_is_no_formula(tmp_path):
    """A class may have been named by a stranger. JSON lines have it as it is."""
    row = {"input": "-[1]", "label": "=cmd|x", "p_=cmd|x": 0.5, "@p": -1.5, "error": None}
    for name in ("a.csv", "a.jsonl"):
        with output(tmp_path / name) as write:
            write([row])
    (found,) = rows(tmp_path / "a.csv")
    assert found == {"input": "-[1]", "label": "'=cmd|x", "p_=cmd|x": "0.5", "'@p": "-1.5", "error": ""}
    assert json.loads((tmp_path / "a.jsonl").read_text()) == row


def test_a_file_that_was_half_written_is_not_left(digits, tmp_path, images, monkeypatch):
    np.save(tmp_path / "x.npy", images)
    monkeypatch.setattr("drivetrain.inference.predict.grouped", lambda *_: 1 / 0)
    assert predict(digits, tmp_path / "x.npy", "--out", tmp_path / "p.csv") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x.npy"]


def test_memory_is_bounded_and_order_kept():
    """At most two batches are read ahead of what is used, however long the input, whichever read takes longest."""
    begun = 0

    def items():
        nonlocal begun
        for n in itertools.count():
            begun += 1
            yield SampleBlock([str(n)], lambda _, n=n: (slow(n), [-n]))

    def slow(n: int) -> torch.Tensor:
        time.sleep(0.002 * (n % 3 == 0))
        if n == 5:
            raise DataError("five is broken")
        return torch.tensor([n])

    seen = []
    for batch in itertools.islice(read_in_batches(items(), 4), 5):
        seen += batch
        assert begun <= len(seen) + 8
    assert [sample.name for sample in seen] == [str(n) for n in range(20)]
    assert [(int(sample.x), sample.target) for sample in seen if not sample.error] == [(n, -n) for n in range(20) if n != 5]
    assert seen[5].error == "five is broken"


def test_completion(tmp_path):
    """Of the runs, and of what follows."""
    place = tmp_path / "outputs" / "2026-11-21" / "one"
    put(place / "environment.json", "{}")
    assert completion.candidates(["drivetrain predict "]) == ["outputs/2026-11-21/one"]
    assert "--data" in completion.candidates([f"drivetrain predict {place} --"])
    assert "update=best" in completion.candidates([f"drivetrain evaluate {place} up"])
    assert "data=imagefolder" in completion.candidates([f"drivetrain evaluate {place} data=im"])
    assert "--format" in completion.candidates([f"drivetrain export {place} --"])


# --- what the data option reads itself: tables and texts ---


def houses(path: Path, *numbers: int) -> Path:
    lines = [f"{n},{'old' if n % 3 else 'new'},{n % 2},{3 * n + 7}" for n in numbers]
    path.write_text("\n".join(["area,age,zone,price", *lines]) + "\n")
    return path


def test_rows_of_a_table(finished, tmp_path, monkeypatch, asked):
    """Rows are encoded as the training rows were, from a file and from standard input, and numbers are in the data's units."""
    train, test = houses(tmp_path / "train.csv", *range(0, 80, 2)), houses(tmp_path / "test.csv", *range(1, 40, 2))
    data = (f"data.path={train}", f"data.test={test}", "data.target=price", "data.columns={zone: category}")
    result = finished("task=regression", "data=tabular", *data, "model.hidden=[8]", "epochs=2")
    assert predict(result, "--data", "test", "--out", tmp_path / "a.csv") == 0
    monkeypatch.setattr("drivetrain.data.tabular.Tabular.load", lambda *_: pytest.fail("the data was read"))
    assert predict(result, test, "--batch", 3, "--out", tmp_path / "b.csv") == 0
    a, b = rows(tmp_path / "a.csv"), rows(tmp_path / "b.csv")
    expected = [float(row["value"]) for row in b]
    assert [float(row["value"]) for row in a] == pytest.approx(expected)  # a batch of another size may round otherwise
    assert [round(float(row["target"])) for row in a] == [3 * n + 7 for n in range(1, 40, 2)]
    errors = [abs(float(row["value"]) - float(row["target"])) for row in a]
    assert sum(errors) / len(errors) == pytest.approx(result.tested("final")["mae"])
    assert drivetrain.load(result.run_dir).predict(str(test)).labels[:, 0].tolist() == pytest.approx(expected)
    code, found = asked(result, "-", lines=test.read_bytes())
    assert [float(row["value"]) for row in found] == pytest.approx(expected)
    assert (code, found[1]["input"]) == (0, "standard input:3")


def test_rows_that_do_not_fit_a_table(finished, tmp_path, asked, capsys):
    """A row that cannot be encoded says why; a table without a column is refused before anything begins."""
    train = houses(tmp_path / "train.csv", *range(40))
    result = finished("task=regression", "data=tabular", f"data.path={train}", "data.target=price", "epochs=1")
    code, found = asked(result, "-", lines=b"zone;area;age\n1;12;new\n0;big;new\n1;;old\n1;2\n0;13;unseen\n")
    assert (code, [bool(row["value"]) for row in found]) == (1, [True, False, False, False, True])
    for row, says in zip(
        found[1:4],
        ("standard input:3: the column area holds 'big'", "no value in area", "standard input:5 has 2 cells"),
        strict=True,
    ):
        assert says in row["error"]
    (tmp_path / "less.csv").write_text("area,zone\n1,2\n")
    assert predict(result, tmp_path / "less.csv") == 2
    assert "less.csv has no column age: the model's inputs are area, age, zone" in capsys.readouterr().err
    assert predict(result, tmp_path / "photo.png", tmp_path) == 2
    (result.run_dir / "table.json").rename(tmp_path / "table.json")
    assert predict(result, train) == 2
    assert "table.json cannot be read" in capsys.readouterr().err


@pytest.mark.parametrize("label", ["animal", None])
def test_texts_by_the_runs_own_tokenizer(label, finished, tmp_path, asked):
    pytest.importorskip("tokenizers")
    texts = [f"the {'cat' if n % 2 else 'dog'} number {n} sat on the mat" for n in range(40)]
    path = put(tmp_path / "texts.jsonl", "".join(json.dumps({"text": text, "animal": text[4:7]}) + "\n" for text in texts))
    task = "text_classification" if label else "language_modelling"
    data = (f"data.path={path}", f"data.test={path}", f"data.label={label or 'null'}", "data.length=12")
    bpe = ("data.tokenizer=bpe", "data.vocabulary=300")
    small = ("model.width=16", "model.heads=2", "epochs=2", "updates=null", "batch.global_batch=8")
    result = finished(f"task={task}", "data=jsonl", *data, *bpe, *small)
    assert predict(result, path, "--out", tmp_path / "a.csv") == 0
    found = rows(tmp_path / "a.csv")
    assert [row["input"] for row in found] == [f"{path}:{n}" for n in range(1, 41)]
    if label:
        right = sum(row["label"] == text[4:7] for row, text in zip(found, texts, strict=True))
        assert right / 40 == result.tested("final")["accuracy"]
    else:
        assert list(found[0]) == ["input", "label", "probability", "error"]
        assert {int(row["label"]) for row in found} <= set(range(301))
    code, of_lines = asked(result, "-", lines="\n".join(texts).encode())
    assert (code, [row["label"] for row in of_lines]) == (0, [row["label"] for row in found])
    odd = [
        b'{"text": "the cat"}',
        b'{"body": 1}',
        b'{"text": ""}',
        b'{"text": "\\ud800"}',
        b'{"text": "\xe9"}',
        b'{"text": "the dog"}',
    ]
    path.write_bytes(b"\n".join(odd))
    code, found = asked(result, path)
    assert (code, [bool(row["label"]) for row in found]) == (1, [True, False, True, False, False, True])
    for row, says in zip(found, ("", ":2 has no 'text'", "", ":4: '", ":5: the byte 0xe9", ""), strict=True):
        assert says in row["error"]
    code, found = asked(result, "-", lines=b"the cat\n\ncaf\xe9\nthe dog\n")
    assert (code, [bool(row["label"]) for row in found]) == (1, [True, True, False, True])
    assert "standard input:3: the byte 0xe9 is no UTF-8" in found[2]["error"]


# --- runs whose samples are dicts, tuples and padded sequences: evaluated, predicted, loaded without their data, exported ---


OWN = ("data=own", "trust=[tree_sets]", "model=own", "updates=5", "epochs=2", "data.drop_last=false", "scheduler=constant")
RUNS = {
    "dicts": ("data.target=tree_sets.Dicts", "model.target=tree_sets.Net"),
    "tuples": ("data.target=tree_sets.Tuples", "model.target=tree_sets.Net"),
    "padded": ("data.target=tree_sets.Words", "model.target=tree_sets.Reader"),
}


@pytest.fixture(autouse=True)
def _sets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(command.__file__).parent))
    sys.modules.pop("tree_sets", None)


@pytest.mark.parametrize("name", RUNS)
def test_the_figures_and_the_rows_are_those_of_training(name, finished, tmp_path, monkeypatch):
    result = finished(*OWN, *RUNS[name])
    assert evaluate(result.run_dir).metrics == result.tested("final")
    assert main.main(["predict", str(result.run_dir), "--data", "test", "--batch", "3", "--out", str(tmp_path / "p.csv")]) == 0
    rows = list(csv.DictReader((tmp_path / "p.csv").open()))
    assert sum(row["label"] == row["target"] for row in rows) / len(rows) == result.tested("final")["accuracy"]
    monkeypatch.setattr(OwnDataset, "load", lambda *_: pytest.fail("the data was read"))
    run = drivetrain.load(result.run_dir)
    assert len(run.predict(run.example())) == 2


def test_a_dict_from_python_and_exports(finished, tmp_path, refused):
    result = finished(*OWN, *RUNS["dicts"])
    run = drivetrain.load(result.run_dir)
    x = map_tensors(lambda t: torch.zeros(3, *t.shape[1:], dtype=t.dtype), run.example())
    assert len(run.predict(tree_map(torch.Tensor.numpy, x))) == 3
    assert main.main(["export", str(result.run_dir), str(tmp_path / "w.safetensors")]) == 0
    assert "takes models of one input tensor" in refused("export", result.run_dir, "m.onnx", "--format", "onnx")
    assert "there is no such file" in refused("predict", result.run_dir, "p.png")


@pytest.mark.parametrize("shape", [(3, 8, 8), (4, 3, 8, 8), (1, 3, 6, 5)])
def test_an_array_is_a_sample_or_several_of_an_own_dataset_of_one_tensor(shape, finished, tmp_path, refused):
    result = finished(*OWN, "data.target=tree_sets.Pictures", "model.target=tree_sets.Pool")
    x = np.random.default_rng(0).normal(size=shape)
    np.save(tmp_path / "x.npy", x)
    assert main.main(["predict", str(result.run_dir), str(tmp_path / "x.npy"), "--out", str(tmp_path / "p.csv")]) == 0
    expected = drivetrain.load(result.run_dir).predict(torch.from_numpy(x.reshape(-1, *shape[-3:])).float()).labels
    assert [row["label"] for row in rows(tmp_path / "p.csv")] == expected
    np.save(tmp_path / "x.npy", x[..., 0, 0])
    if len(shape) == 3:
        assert "the model takes (n, 3, 8, 8)" in refused("predict", result.run_dir, tmp_path / "x.npy")


def test_an_answer_is_a_number_or_says_why_not(digits, tmp_path, images, capsys, monkeypatch):
    """Inputs are looked at after the conversion to float32, and every output too."""
    given = np.repeat(images[:1].astype("f8"), 5, 0)
    for n, value in enumerate((np.nan, np.inf, 3.5e38, 1e308)):
        given[n, 0, 3, 3] = value
    np.save(tmp_path / "x.npy", given)
    assert predict(digits, tmp_path / "x.npy", "average=false", "--out", tmp_path / "p.csv") == 1
    found = rows(tmp_path / "p.csv")
    assert [("beyond float32" in row["error"], row["label"]) for row in found] == [(True, "")] * 4 + [(False, "0")]
    assert "4 of the inputs have no answer" in capsys.readouterr().err

    def diverged(self, x):
        return Predictions.of(torch.full((len(x), 10), torch.nan), "class", self.classes)

    monkeypatch.setattr(LoadedRun, "predict_ready", diverged)
    np.save(tmp_path / "x.npy", images)
    assert predict(digits, tmp_path / "x.npy", "--out", tmp_path / "p.csv") == 1
    assert all("the model's answer is not a number" in row["error"] and not row["label"] for row in rows(tmp_path / "p.csv"))


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (np.zeros((0, 1, 8, 8), "f4"), "holds no samples"),
        (np.zeros((2, 1, 8, 8), "c8"), "holds complex numbers"),
    ],
)
def test_arrays_without_samples_and_complex_ones_are_refused(digits, tmp_path, given, says, capsys):
    np.save(tmp_path / "x.npy", given)
    assert predict(digits, tmp_path / "x.npy") == 2
    assert says in capsys.readouterr().err


def test_a_number_beyond_float32_is_refused_by_its_line(refused):
    Path("t.csv").write_text("age,label\n" + "".join(f"{'3.5e38' if i == 7 else i},{'xy'[i % 2]}\n" for i in range(40)))
    said = refused("train", "data=tabular", "data.path=t.csv", "data.target=label", "model=mlp")
    assert "t.csv:9: the column age holds a number that is infinite or beyond float32" in said
