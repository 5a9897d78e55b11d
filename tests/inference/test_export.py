"""Exported files give the model's output in plain torch or onnxruntime, as the page shows; and the card of a run."""

import errno
import json
import os
import re
from pathlib import Path

import pytest
import safetensors
import safetensors.torch
import torch
import yaml

import drivetrain
from drivetrain.cli import main
from drivetrain.core.errors import UserError
from drivetrain.data.schema import TableSchema
from drivetrain.inference import card, export
from drivetrain.run import reader
from drivetrain.run.result import interval
from tests.support import made_pages
from tests.support.command import ROOT
from tests.support.put import put

PAGE = ROOT / "docs" / "export.md"
RESNET = ("model=resnet9", "model.width=4", "updates=2", "scheduler=constant", "surgery=[channels_last]")
GPT = (
    "data=stdlib", "data.max_files=20", "data.test_samples=4", "data.length=16", "model=gpt", "model.width=16", "model.depth=1",
    "model.heads=2", "loss=next_token", "updates=2", "scheduler=constant",
)  # fmt: skip


@pytest.fixture
def samples(images) -> torch.Tensor:
    return torch.from_numpy(images)


def read(path: Path, kind: str):
    """The exported model as plain torch, or onnxruntime, runs it; and its metadata."""
    if kind == "onnx":
        import onnxruntime

        session = onnxruntime.InferenceSession(str(path))
        about = session.get_modelmeta().custom_metadata_map["drivetrain"]
        return lambda x: torch.from_numpy(session.run(None, {"input": x.numpy()})[0]), json.loads(about)
    files = {"drivetrain": ""}
    if kind == "torch.export":
        return torch.export.load(path, extra_files=files).module(), json.loads(files["drivetrain"])
    return torch.jit.load(path, _extra_files=files), json.loads(files["drivetrain"])


PLAIN, WHOLE = "plain", "whole"  # normalised inputs; those of the data set
SLOW = [
    pytest.param(kind, form, marks=pytest.mark.slow)
    for kind, form in (("onnx", WHOLE), ("torch.export", WHOLE), ("torch.export", PLAIN), ("onnx", PLAIN), ("torchscript", PLAIN))
]


@pytest.mark.parametrize(("kind", "form"), [("torchscript", WHOLE), *SLOW])
def test_convolutions(kind, form, finished, tmp_path, samples, says):
    """BatchNorm and convolutions, for any batch size, with and without the normalisation."""
    run = drivetrain.load(finished(*RESNET).run_dir)
    expected = run.predict(samples).output
    path, words = tmp_path / f"model{export.SUFFIX[kind]}", ["--with-normalize"] * (form == WHOLE)
    assert "matches the model's output to" in says("export", run.run_dir, path, "--format", kind, *words)
    model, about = read(path, kind)
    mean, std = (torch.tensor(about["normalize"][key]).view(-1, 1, 1) for key in ("mean", "std"))
    given = samples if words else (samples - mean) / std
    with torch.no_grad():
        torch.testing.assert_close(model(given), expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(model(given[:1]), expected[:1], rtol=1e-5, atol=1e-5)
    assert (about["shape"], about["outputs"], about["model"]["option"]) == ([1, 8, 8], 10, "resnet9")
    assert about["input"].startswith("values as the data set has them" if words else "normalised")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["onnx", "torch.export"])
def test_attention(kind, finished, tmp_path):
    """A transformer over tokens."""
    run = drivetrain.load(finished(*GPT).run_dir)
    path = tmp_path / f"model{export.SUFFIX[kind]}"
    assert main.main(["export", str(run.run_dir), str(path), "--format", kind]) == 0
    tokens = torch.randint(257, (3, 16), generator=torch.Generator().manual_seed(1))
    model, about = read(path, kind)
    torch.testing.assert_close(model(tokens), run.predict(tokens).output, rtol=1e-5, atol=1e-5)
    assert (about["dtype"], about["input"]) == ("int64", "tokens, int64")


def test_weights_say_what_they_need(digits, tmp_path):
    """An exported file, and the checkpoint's own file of weights, say what is needed to use them alone."""
    path = tmp_path / "w.safetensors"
    assert main.main(["export", str(digits.run_dir), str(path)]) == 0
    checkpoint = digits.run_dir / "checkpoints" / str(digits.updates)
    for file in (path, checkpoint / "model.safetensors"):
        with safetensors.safe_open(file, "pt") as opened:
            about = json.loads(opened.metadata()["drivetrain"])
            assert about["shape"] == [1, 8, 8]
            assert about["model"] == {"option": "mlp", "hidden": [32], "dropout": 0.0}
            assert len(about["normalize"]["mean"]) == 1
    assert json.loads((checkpoint / "manifest.json").read_text())["about"]["outputs"] == 10


@pytest.mark.parametrize("kind", ["safetensors", "torchscript"])
def test_a_file_has_the_schema_of_its_tables(kind, finished, tmp_path):
    """So that whoever uses it reads each column as training did."""
    table = put(tmp_path / "t.csv", "a,b,y\n" + "".join(f"{n:03d},{n} %,{n % 2}\n" for n in range(40)))
    data = ("data=tabular", f"data.path={table}", f"data.test={table}", "data.target=y")
    run = finished(*data, "model=mlp", "model.hidden=[4]", "epochs=1").run_dir
    path = tmp_path / f"model{export.SUFFIX[kind]}"
    assert main.main(["export", str(run), str(path)]) == 0
    if kind == "safetensors":
        with safetensors.safe_open(path, "pt") as opened:
            about = json.loads(opened.metadata()["drivetrain"])
    else:
        _, about = read(path, kind)
    schema = TableSchema.from_json(about["files"]["table.json"])
    assert about["files"] == {"table.json": (run / "table.json").read_text()}
    assert (schema.columns["a"].type, schema.columns["b"].style["unit"]) == ("category", "%")


def test_a_file_that_gives_another_output_is_not_kept(digits, tmp_path, monkeypatch, refused):
    read_as_before = export._read_torchscript
    monkeypatch.setattr(export, "_read_torchscript", lambda path: lambda x: read_as_before(path)(x) + 0.001)
    assert "its output differs from the model's by" in refused("export", digits.run_dir, tmp_path / "m.ts")


def test_what_an_exporter_cannot_express(finished, tmp_path, refused):
    """One line, and no file."""
    (tmp_path / "odd_nets.py").write_text(
        "import torch\n"
        "class Odd(torch.nn.Linear):\n"
        "    def __init__(self, shape, classes):\n        super().__init__(64, classes)\n"
        "    def forward(self, x):\n"
        "        x = x.flatten(1)\n"
        "        return super().forward(x if float(x.detach().sum()) > 1e9 else x * 2)\n"
    )
    result = finished("model=own", "model.target=odd_nets.Odd", "trust=[odd_nets]", "updates=2", "scheduler=constant")
    (line,) = refused("export", result.run_dir, tmp_path / "m.pt2").splitlines()
    assert "--format torch.export cannot express this model" in line


def test_sharded_checkpoints_are_one_file(finished, tmp_path):
    words = ("model=mlp", "model.hidden=[8]", "epochs=1")
    whole, parts = finished(*words), finished(*words, "saving.sharded=true")
    for run in (whole, parts):
        assert main.main(["export", str(run.run_dir), str(tmp_path / f"{run is whole}.safetensors")]) == 0
    a, b = (safetensors.torch.load_file(tmp_path / f"{whole_one}.safetensors") for whole_one in (True, False))
    torch.testing.assert_close(a, b, rtol=0, atol=0)
    x = torch.rand(4, 1, 8, 8)
    torch.testing.assert_close(*(drivetrain.load(run.run_dir).predict(x).output for run in (whole, parts)), rtol=0, atol=0)


def test_the_page_is_right(digits, samples):
    """Every example of docs/export.md is run as it stands, on a run that was exported in each format."""
    for kind in (kind for kind in export.SUFFIX if kind != "transformers"):  # which needs such a model
        assert main.main(["export", str(digits.run_dir), f"model{export.SUFFIX[kind]}", "--format", kind]) == 0
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(blocks) == 5
    run = drivetrain.load(digits.run_dir)
    expected = run.predict(samples).output
    for block in blocks:
        names = {"x": run.transforms(samples), "raw": samples, "RUN": str(digits.run_dir)}
        exec(block.replace("hidden=[256, 256]", "hidden=[32]"), names)
        torch.testing.assert_close(torch.as_tensor(names["output"]).detach(), expected, rtol=1e-5, atol=1e-5)


def test_the_suffix_of_a_file_is_its_format():
    assert export.format_of(None, None) == "safetensors"
    assert export.format_of(Path("m"), "onnx") == export.format_of(Path("m.ONNX"), None) == "onnx"
    with_suffix = [kind for kind in export.SUFFIX if export.SUFFIX[kind]]
    assert [export.format_of(Path(f"m{export.SUFFIX[kind]}"), None) for kind in with_suffix] == with_suffix
    assert export.format_of(Path("m.bin"), "torchscript") == "torchscript"
    with pytest.raises(UserError, match=r"m\.bin: the format is not known from '\.bin': name the file \.safetensors"):
        export.format_of(Path("m.bin"), None)
    with pytest.raises(UserError, match=r"onxx: the format is not known without a suffix \(did you mean 'onnx'\?\)"):
        export.format_of(Path("onxx"), None)
    assert [*map(export.format_named, ("onnx", "pt2", "torch.export", "transformers", "m"))] == [
        "onnx", "torch.export", "torch.export", "transformers", None,
    ]  # fmt: skip
    with pytest.raises(UserError, match=r"m\.onnx: a file of this name is onnx, and --format says safetensors"):
        export.format_of(Path("m.onnx"), "safetensors")
    with pytest.raises(UserError, match="--format onxn: there is safetensors"):
        export.format_of(None, "onxn")


def test_the_umask_says_who_can_read_a_file(tmp_path):
    before = os.umask(0o027)
    try:
        with export._atomic(tmp_path / "m.safetensors") as file:
            safetensors.torch.save_file({"a": torch.zeros(2)}, file)
    finally:
        os.umask(before)
    assert (tmp_path / "m.safetensors").stat().st_mode & 0o777 == 0o640
    assert [path.name for path in tmp_path.iterdir()] == ["m.safetensors"]


# --- `drivetrain card`: the model card of a finished run ---


def parts(text: str) -> tuple[dict, str]:
    """The front matter, and the rest."""
    _, head, body = re.split(r"^---$", text, maxsplit=2, flags=re.M)
    return yaml.safe_load(head), body


def test_a_card_of_a_run(tiny, capsys):
    assert main.main(["train", *tiny("saving=best"), "-q"]) == 0
    (run_dir,) = (path.parent for path in Path("outputs").glob("*/*/result.json"))
    assert main.main(["card", str(run_dir)]) == 0
    head, body = parts((run_dir / "README.md").read_text())
    result = json.loads((run_dir / "result.json").read_text())
    found = result["metrics"]["test"]["best"]["accuracy"]
    (index,) = head.pop("model-index")
    named = {"library_name": "drivetrain", "license": "unknown", "tags": ["drivetrain"]}
    assert head == named | {"pipeline_tag": "image-classification"}
    assert index["results"][0]["dataset"] == {"name": "synthetic", "type": "synthetic", "split": "test"}
    assert {each["type"]: each["value"] for each in index["results"][0]["metrics"]}["accuracy"] == found
    low, high = interval(found, 20)
    assert f"| `accuracy` | test | {found:.4f} | {low:.4f} to {high:.4f} (20 samples) |" in body
    titles = ["Intended use", "Training data", "Training", "Results", "Limits", "Licence", "Recipe"]
    assert re.findall(r"^## (.*)", body, re.M) == titles
    assert "one of 4 classes" in body
    assert "| `optimizer.lr` | `0.05` |" in body
    assert "\n    schema: 1\n" in body  # the recipe, as code
    assert "outputs" not in body  # no path of this machine


def test_the_card_of_a_table_names_its_file_and_its_columns(tiny, tmp_path):
    table = put(tmp_path / "houses.csv", "\n".join(["area,rooms,price", *(f"{n},{n % 3},{2 * n}" for n in range(60))]) + "\n")
    words = ["task=regression", "data=tabular", f"data.path={table}", "data.target=price", "model=mlp", "loss=mse", "epochs=1"]
    assert main.main(["train", *tiny(*words), "-q"]) == 0
    (run_dir,) = (path.parent for path in Path("outputs").glob("*/*/result.json"))
    assert main.main(["card", str(run_dir)]) == 0
    head, body = parts((run_dir / "README.md").read_text())
    assert head["model-index"][0]["results"][0]["dataset"] == {"name": "houses.csv", "type": "tabular", "split": "test"}
    assert "It takes the columns `area`, `rooms` and gives 1 number" in body
    assert "`data=tabular`, read from `houses.csv`, " in body
    assert str(tmp_path) not in body
    (run_dir / "table.json").write_text("[")
    assert "It takes inputs of the shape" in card.text(reader.read(run_dir))


def test_text_from_outside_is_text(tmp_path):
    run = reader.read(made_pages.run_folder(tmp_path / "run", 0.1, "failed"))
    run.config |= {"model": made_pages.HOSTILE, "data": f"{made_pages.HOSTILE}\n---\nlicense: mit"}
    head, body = parts(card.text(run))
    assert head["license"] == "unknown"
    assert head["model-index"][0]["results"][0]["dataset"]["name"] == run.config["data"]
    bare = re.sub(r"`[^`]*`", "", body[: body.index("## Recipe")])
    assert not re.search(r"(?<!\\)[<&]", bare), bare
    assert "\u202e" not in body
    assert "\x1b" not in body


@pytest.mark.parametrize("kind", [".pt2", ".ts"])
def test_a_full_disk_is_said_and_leaves_nothing(digits, tmp_path, kind, monkeypatch, capsys):
    """torch's own writers end the process there."""

    def full(self, content):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    assert main.main(["export", str(digits.run_dir), str(tmp_path / f"m{kind}")]) == 2
    assert f"m{kind} cannot be written: No space left on device" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
