"""`drivetrain.load` and `drivetrain.runs`, and what notebooks show."""

import copy
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import drivetrain
from drivetrain.core.errors import DataError, UserError
from drivetrain.data import tokenizer
from drivetrain.data.base import Splits
from drivetrain.data.jsonl import Jsonl
from drivetrain.data.schema import TableSchema
from drivetrain.data.tabular import Tabular
from drivetrain.engine.summary import KeptFiles, NoSamples
from drivetrain.run.result import Result
from drivetrain.saving import manifest
from tests.support.put import put
from tests.support.to_end import continued


def test_a_loaded_run(digits, images, tmp_path):
    """Model, transforms and classes; predictions by them are those of `predict`."""
    random = torch.get_rng_state()
    run = drivetrain.load(digits.run_dir)
    torch.testing.assert_close(torch.get_rng_state(), random, rtol=0, atol=0)
    assert (run.classes, run.update, run.kind) == ([str(n) for n in range(10)], digits.updates, "class")
    assert not run.model.training
    assert not any(p.requires_grad for p in run.model.parameters())
    found = run.predict(images.astype("float64"))
    assert (len(found), found.labels[:3]) == (6, [run.classes[n] for n in found.output.argmax(1)[:3].tolist()])
    assert found.probabilities is not None
    torch.testing.assert_close(run.model(run.transforms(images)).softmax(-1), found.probabilities)
    torch.testing.assert_close(run.predict(images[0]).output, found.output[:1])
    Image.fromarray((images[0, 0] * (255 / 16)).round().astype("uint8")).save(tmp_path / "0.png")
    assert run.predict(str(tmp_path / "0.png")).labels == run.predict([tmp_path / "0.png"]).labels
    assert f"update {digits.updates}" in repr(run)


def test_the_data_is_not_needed(digits, images, monkeypatch):
    """The checkpoint says what a model must know of its data."""
    from drivetrain.data.digits import Digits

    expected = drivetrain.load(digits.run_dir).predict(images).output
    monkeypatch.setattr(Digits, "load", lambda *_: pytest.fail("the data was read"))
    torch.testing.assert_close(drivetrain.load(digits.run_dir).predict(images).output, expected, rtol=0, atol=0)


def test_averaged_weights_and_other_checkpoints(digits, images):
    newest, average, first = (drivetrain.load(digits.run_dir, **k) for k in ({"average": False}, {}, {"update": 8}))
    weight = newest.model.head.weight
    assert not torch.equal(weight, average.model.head.weight)
    assert not torch.equal(weight, first.model.head.weight)
    assert first.update == 8


@pytest.mark.parametrize("shape", [(2, 1, 9, 9), (8, 8), (2, 3, 8, 8)])
def test_inputs_of_another_size(digits, shape):
    with pytest.raises(DataError, match=r"has the shape \(.*\), and the model takes \(n, 1, 8, 8\): resize it"):
        drivetrain.load(digits.run_dir).predict(np.zeros(shape))


def test_notebooks(digits, images):
    """Results and predictions are tables, with what comes from outside escaped."""
    html = drivetrain.load(digits.run_dir).predict(np.concatenate([images] * 3))._repr_html_()
    assert html.count("<tr>") == 11
    assert "and 8 more" in html
    shown = digits._repr_html_()
    assert f"{digits.tested('final')['accuracy']:.4f}" in shown
    assert "completed" in shown
    assert "&lt;b&gt;" in Result(error="<b>")._repr_html_()


def test_runs(train, monkeypatch):
    """A row for each run, the oldest first, with the settings in which they differ."""
    train("output_dir=out", "optimizer.lr=0.1")
    train("output_dir=out", "optimizer.lr=0.2", "model.hidden=[4]")
    frame = drivetrain.runs("out")
    assert list(frame["optimizer.lr"]) == [0.1, 0.2]
    assert list(frame["status"]) == ["completed"] * 2
    assert frame["test.final.loss"].notna().all()
    assert frame["model.hidden"][1] == (4,)
    with pytest.raises(UserError, match="nothing: there is no such folder"):
        drivetrain.runs("nothing")
    monkeypatch.setitem(__import__("sys").modules, "pandas", None)
    with pytest.raises(UserError, match=r"pip install 'drivetrain\[pandas\]'"):
        drivetrain.runs("out")


# --- the files in which a run keeps how its inputs are encoded: what no run writes is refused ---

COLUMN = {
    "name": "a", "type": "number", "style": {"decimal": ".", "thousands": "", "unit": ""}, "categories": None, "mean": [0.0],
    "std": [1.0],
}  # fmt: skip
TEXT = {**COLUMN, "type": "category", "style": None, "mean": [], "std": []}
DATE = {**COLUMN, "type": "date", "style": ["", 4], "mean": [0.0] * 4, "std": [1.0] * 4}


def table(*columns: Any, **others: Any) -> dict[str, Any]:
    """The content of a run's table.json."""
    return {
        "missing": ["", "na"],
        "inputs": [c["name"] for c in columns if isinstance(c, dict) and "name" in c],
        "columns": columns,
        **others,
    }


TEXTS = [f"the {'cat' if n % 2 else 'dog'} number {n} sat on the mat" for n in range(40)]


def link(file: Path, to: str) -> None:
    file.symlink_to(to)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (os.mkfifo, "it is no ordinary file"),
        (os.mkdir, "Is a directory|ordinary"),
        (lambda file: link(file, "/dev/zero"), "it is a link"),
        (lambda file: link(file, "/etc/passwd"), "it is a link"),
        (lambda file: file.write_bytes(b"\xff"), "invalid start byte"),
        (lambda file: os.truncate(os.open(file, os.O_CREAT | os.O_WRONLY), 2**30), "larger than 64 MB"),
    ],
)
def test_a_kept_file_is_an_ordinary_one(tmp_path: Path, make: Callable[[Path], Any], says: str) -> None:
    make(tmp_path / "table.json")
    with pytest.raises(UserError, match=f"table.json cannot be read .*({says})"):
        KeptFiles(tmp_path, None)["table.json"]


def splits(name: str, text: str, **others: Any) -> Splits:
    """The data of a run that keeps this file."""
    return Splits(
        train=NoSamples(), test=NoSamples(), shape=others.pop("shape", (8,)), classes=others.pop("classes", 2), normalize=None,
        files={name: text}, **others,
    )  # fmt: skip


@pytest.mark.parametrize(
    "content",
    [
        "{}", "5", "[]", "[" * 100_000, "not json", [COLUMN], table(), table(None), table(5), table({}),
        table({**COLUMN, "more": 1}),
        table({**COLUMN, "name": 5}), table({**COLUMN, "mean": "x"}), table({**COLUMN, "mean": [float("nan")]}),
        table({**COLUMN, "std": [0.0]}), table({**COLUMN, "std": [-1.0]}), table({**COLUMN, "std": [float("inf")]}),
        table({**COLUMN, "std": [10**400]}), table({**COLUMN, "std": []}), table({**COLUMN, "type": "text"}),
        table({**COLUMN, "style": None}), table({**COLUMN, "style": {"decimal": "."}}),
        table({**COLUMN, "style": {"decimal": "(a+)+", "thousands": "", "unit": ""}}),
        table({**COLUMN, "style": {"decimal": ".", "thousands": "", "unit": "x"}}),
        table({**TEXT, "categories": []}), table({**TEXT, "categories": [5]}), table({**TEXT, "categories": "abc"}),
        table({**TEXT, "categories": ["x"] * 1001}), table({**COLUMN, "categories": ["x"]}), table({**DATE, "style": ["%", 4]}),
        table({**DATE, "style": ["", 9]}), table({**DATE, "mean": [0.0], "std": [1.0]}), table(COLUMN, missing=5),
        table(COLUMN, inputs=["b"]), table(COLUMN, inputs=5), table(COLUMN, inputs=["a"] * 7), table(*[COLUMN] * 200_000),
    ],
    ids=lambda content: str(content)[:30],
)  # fmt: skip
def test_a_table_that_no_run_writes(tmp_path: Path, content: Any) -> None:
    text = content if isinstance(content, str) else json.dumps(content)
    (tmp_path / "t.csv").write_text("a\n1\n")
    with pytest.raises(UserError, match=r"^the run's table.json is not what drivetrain wrote there"):
        Tabular().read_inputs(tmp_path / "t.csv", splits("table.json", text), 10)


def test_a_table_that_a_run_writes(tmp_path: Path) -> None:
    date = {**DATE, "name": "d"}
    columns = [{**COLUMN, "name": "c0"}, {**TEXT, "categories": ["x", "y", "z"]}, date]
    schema = TableSchema.from_json(json.dumps(table(*columns)))
    assert (schema.outputs, TableSchema.from_json(schema.to_json())) == (8, schema)
    (tmp_path / "t.csv").write_text("d,c0,a\n2024-02-03,2,y\n")
    ((names, read),) = Tabular().read_inputs(tmp_path / "t.csv", splits("table.json", schema.to_json()), 10).blocks
    assert (names, read(slice(1)).tolist()) == ([f"{tmp_path / 't.csv'}:2"], [[2, 0, 1, 0, 2024, 2, 3, 5]])


@pytest.fixture(scope="module")
def written() -> dict[str, Any]:
    """A tokenizer as a run keeps it."""
    pytest.importorskip("tokenizers")
    content: dict[str, Any] = json.loads(tokenizer.BytePairs.trained(TEXTS, 270).to_json())
    return content


SPLIT = {"type": "Split", "pattern": {"Regex": "^(([a-z ]+)+)+[A-Z]$"}, "behavior": "Isolated", "invert": False}
REPLACE = {"type": "Replace", "pattern": {"String": "o"}, "content": "o" * 300}
HOSTILE: dict[str, Any] = {
    "a token beyond all others": lambda c: c["model"]["vocab"].update(zz=2**31),
    "a negative token": lambda c: c["model"]["vocab"].update(zz=-5),
    "tokens with a gap": lambda c: c["model"]["vocab"].update(h=10**6),
    "a token of no number": lambda c: c["model"]["vocab"].update(h="1"),
    "merges of nothing": lambda c: c["model"].update(merges=[["zz", "yy"]]),
    "no merges": lambda c: c["model"].update(merges=5),
    "chance": lambda c: c["model"].update(dropout=0.5),
    "a pattern that takes for ever": lambda c: c.update(pre_tokenizer=SPLIT),
    "texts that grow": lambda c: c.update(normalizer={"type": "Sequence", "normalizers": [REPLACE] * 4}),
    "a long beginning": lambda c: c.update(normalizer={"type": "Prepend", "prepend": "x" * 10**6}),
    "a panic": lambda c: c.update(normalizer={"type": "Precompiled", "precompiled_charsmap": "AAAA"}),
    "more tokens": lambda c: c.update(added_tokens=[{"id": 5_000_000, "content": "hello"}]),
    "a template": lambda c: c.update(post_processor={"type": "TemplateProcessing"}),
    "another model": lambda c: c.update(model={"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "[UNK]"}),
    "no decoder": lambda c: c.update(decoder=None),
    "a part of a later version": lambda c: c.update(more={"type": "x"}),
}  # fmt: skip


@pytest.mark.parametrize("hostile", HOSTILE)
def test_a_tokenizer_that_no_run_writes(written: dict[str, Any], hostile: str) -> None:
    content = copy.deepcopy(written)
    HOSTILE[hostile](content)
    for option, data in ((Jsonl(), {"classes": 1000}), (Jsonl(label="x"), {"vocabulary": 1000})):
        with pytest.raises(UserError, match=r"^the run's tokenizer.json is not what drivetrain wrote there"):
            option.encode("hello", splits("tokenizer.json", json.dumps(content), **data))


@pytest.mark.parametrize("text", ["", "{}", "5", "[]", "[" * 100_000, '{"model": null}', '{"model": {"type": "BPE"}}'])
def test_a_text_that_is_no_tokenizer(text: str) -> None:
    with pytest.raises(UserError, match=r"^the run's tokenizer.json is not what drivetrain wrote there"):
        Jsonl().encode("hello", splits("tokenizer.json", text, classes=1000))


def test_a_tokenizer_has_no_more_tokens_than_the_model(written: dict[str, Any]) -> None:
    size, text = len(written["model"]["vocab"]), json.dumps(written)
    for option, key in ((Jsonl(), "classes"), (Jsonl(label="x"), "vocabulary")):
        assert len(option.encode("hello", splits("tokenizer.json", text, **{key: size + 1})))
        with pytest.raises(UserError, match=f"it has {size} tokens, which are not the model's"):
            option.encode("hello", splits("tokenizer.json", text, **{key: size}))


def test_the_operators_own_tokenizer_may_have_any_part(written: dict[str, Any], tmp_path: Path) -> None:
    """It may where the run keeps the same; and an error of the library, panics among them, is one line."""
    file = put(tmp_path / "own.json", json.dumps({**written, "normalizer": {"type": "Lowercase"}}))
    text = tokenizer.BytePairs.loaded(file).to_json()
    with pytest.raises(ValueError, match=r"its normalizer is none that drivetrain trains: give the file .* data.tokenizer_file"):
        tokenizer.from_json(text)
    assert torch.equal(tokenizer.from_json(text, file)(["THE CAT"])[0], tokenizer.from_json(text, file)(["the cat"])[0])
    with pytest.raises(ValueError, match="its normalizer"):
        tokenizer.from_json(text.replace("Lowercase", "NFC"), file)
    HOSTILE["a panic"](written := copy.deepcopy(written))
    file.write_text(json.dumps(written))
    with pytest.raises(UserError, match=r"own.json is no tokenizer of the tokenizers library"):
        tokenizer.BytePairs.loaded(file)


def test_a_changed_file_is_not_taken(finished: Callable[..., Any], tmp_path: Path) -> None:
    """One digit in the run's table would change its predictions. A resumed run writes it anew."""
    table = put(tmp_path / "t.csv", "a,b,y\n" + "".join(f"{n},{n * n},{n % 2}\n" for n in range(40)))
    words = ("task=classification", "data=tabular", f"data.path={table}", "data.target=y", "model=mlp", "model.hidden=[4]")
    run = shutil.copytree(finished(*words, "epochs=1").run_dir, tmp_path / "run")
    (checkpoint,) = manifest.checkpoints(run)
    assert set(manifest.about(checkpoint)["files"]) == {"table.json"}
    assert len(drivetrain.load(run).predict(str(table)).probabilities) == 40
    content = (run / "table.json").read_text()
    (run / "table.json").write_text(content.replace('"missing": [', '"missing": ["x",'))
    with pytest.raises(UserError, match=r"table.json is not what the run wrote \(its SHA-256 differs\)"):
        drivetrain.load(run).predict(str(table))
    continued(run, "epochs=2")
    assert (run / "table.json").read_text() == content


GPT = (
    "data=jsonl", "data.length=8", "data.holdout=0.3", "loss=next_token", "model=gpt", "model.width=8", "model.depth=1",
    "model.heads=2", "ema=post_hoc", "updates=8", "batch.global_batch=8", "scheduler=constant", "optimizer.lr=0.5",
)  # fmt: skip


@pytest.fixture
def of_texts(finished: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory, tmp_path: Path) -> Path:
    """A copy of a run on texts, and its own checkpoints' manifests to be changed."""
    texts = put(tmp_path_factory.getbasetemp() / "texts.jsonl", "".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return shutil.copytree(finished(*GPT, f"data.path={texts}").run_dir, tmp_path / "run")


@pytest.mark.parametrize("average", [True, 0.05, 0.1])
def test_the_averages_of_a_run_on_texts(of_texts: Path, average: bool | float) -> None:
    """A table of positions is no part of them, and the weight that embedding and output layer share is averaged for both."""
    trained, averaged = (drivetrain.load(of_texts, average=each) for each in (False, average))
    assert averaged.model.head.weight is averaged.model.embedding.weight
    assert not torch.equal(trained.model.embedding.weight, averaged.model.embedding.weight)
    assert torch.equal(trained.model.rotary, averaged.model.rotary)
    assert trained.predict("the cat").output.shape == averaged.predict("the cat").output.shape


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"shape": []}, r"model=gpt cannot be built for the data that .*8/manifest.json describes \(IndexError: .*was changed"),
        ({"inputs": {"keys": {}}, "shape": None}, r"model=gpt cannot be built for the data that .* describes \(KeyError: 0\)"),
        ({"outputs": 3, "classes": None}, "the run's weights do not fit the model"),
        ({"normalize": {"mean": [0.0], "std": [1.0]}}, r"model=gpt of .* cannot take the input \(RuntimeError: "),
    ],
)
def test_a_manifest_that_describes_another_model_is_refused_in_one_line(
    of_texts: Path, change: dict[str, Any], says: str
) -> None:
    """It may have the right hash of itself. torch is left as it was."""
    before = torch.get_num_threads(), torch.backends.mkldnn.enabled, torch.get_rng_state()
    checkpoint = of_texts / "checkpoints" / "8"
    about = manifest.about(checkpoint) | change
    (checkpoint / "manifest.json").unlink()
    manifest.write(checkpoint, 8, about)
    assert manifest.verify(checkpoint) is None
    with pytest.raises(UserError, match=says) as error:
        drivetrain.load(of_texts).predict("the cat")
    assert len(error.value.problems) == 1
    assert (torch.get_num_threads(), torch.backends.mkldnn.enabled) == before[:2]
    assert torch.equal(torch.get_rng_state(), before[2])
