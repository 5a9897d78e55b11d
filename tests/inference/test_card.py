"""`drivetrain card`: the model card of a finished run."""

import json
import re
from pathlib import Path

import pytest
import yaml

from drivetrain.cli import main
from drivetrain.inference import card
from drivetrain.run import reader
from drivetrain.run.result import interval
from tests.support import made_pages


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
    table = tmp_path / "houses.csv"
    table.write_text("\n".join(["area,rooms,price", *(f"{n},{n % 3},{2 * n}" for n in range(60))]) + "\n")
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


@pytest.mark.parametrize(
    ("words", "told"),
    [(["nowhere"], "nowhere is no run's directory"), (["a", "b", "c"], "perhaps a file"), (["a", "x=1"], "perhaps a file")],
)
def test_wrong_words(words, told, capsys):
    assert main.main(["card", *words]) == 2
    assert told in capsys.readouterr().err
