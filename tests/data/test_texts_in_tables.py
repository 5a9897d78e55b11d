"""A column of texts in a table: a model that has a tokenizer reads it, for a class, a number or labels."""

import json
import logging
from pathlib import Path

import pytest
import torch

from drivetrain.core.errors import UserError
from drivetrain.inference.evaluation import evaluate
from drivetrain.inference.loaded import load
from tests.data.test_model_tokenizer import TEXTS, bert, of
from tests.support import later
from tests.support.to_end import run_to_end

transformers = later.package("transformers")
__all__ = ["bert"]

NOT = ["data.validation=null", "data.length=12"]
CLASSES = ["task=text_classification", "data=tabular", "data.path=reviews.csv", "data.target=stars", *NOT]
NUMBERS = ["task=regression", "data=tabular", "data.path=reviews.csv", "data.target=price", "data.columns=[review]", *NOT]


@pytest.fixture(autouse=True)
def _table(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir(exist_ok=True)
    rows = [f'"{text}",{"ab"[i % 2]},{i / 2 + 0.25}' for i, text in enumerate(TEXTS)]
    (tmp_path / "reviews.csv").write_text("\n".join(["review,stars,price", *rows]) + "\n")


@pytest.mark.parametrize("words", [CLASSES, NUMBERS], ids=["class", "number"])
def test_inputs_are_those_of_the_same_texts_in_json_lines(words, bert, make, caplog):
    """Tokens, padding, cuts and targets; and what is said of them. Numbers are standardised, as in any table."""
    caplog.set_level(logging.INFO, "drivetrain")
    source = make(*words, *of(bert)).train_data.source
    assert "training texts have data.length=12 tokens or more" in caplog.text
    own = transformers.AutoTokenizer.from_pretrained(bert)
    x, y = source.fetch(torch.arange(len(source)))
    numbers = [int(source.name(n).rpartition(":")[2]) - 2 for n in range(len(source))]
    expected = own([TEXTS[n].strip() for n in numbers], padding=True, truncation=True, max_length=12, return_tensors="pt")
    assert torch.equal(x, expected["input_ids"])
    if words is CLASSES:
        assert y.tolist() == [n % 2 for n in numbers]
        assert source.labels().tolist() == y.tolist()
    else:
        given = torch.tensor([n / 2 + 0.25 for n in numbers])
        assert torch.allclose(y.flatten(), (given - given.mean()) / given.std(correction=0), atol=1e-5)
        assert source.labels() is None


@pytest.mark.parametrize("words", [CLASSES, NUMBERS], ids=["class", "number"])
def test_a_run_is_evaluated_again_and_predicts_rows_and_tables(words, bert, tiny, tmp_path):
    """Predictions of a table and of one row alike; rows may lack the columns that are no input."""
    result = run_to_end(tiny(*words, *of(bert)))
    assert json.loads((result.run_dir / "table.json").read_text())["inputs"] == ["review"]
    assert evaluate(result.run_dir).metrics["loss"] == result.metrics["test"]["final"]["loss"]
    loaded = load(result.run_dir)
    (tmp_path / "new.csv").write_text('review\n"ab end"\n"end, ab ab ab ab ab ab ab ab ab ab ab ab"\n')
    (tmp_path / "one.csv").write_text('review\n"ab end"\n')
    whole, one = (loaded.predict(tmp_path / name).output for name in ("new.csv", "one.csv"))
    assert whole.shape == (2, 2 if words is CLASSES else 1)
    assert torch.allclose(whole[:1], one, atol=1e-6)
    assert type(loaded.model).__name__ == "BertForSequenceClassification"


def test_bytes_are_read_without_a_tokenizer(make):
    """A model that is made anew reads a column of the type text by its bytes."""
    words = ["model=transformers", "model.name=bert", "model.config={hidden_size: 16, num_hidden_layers: 1}"]
    trainer = make(*CLASSES, "data.columns=[review:text]", *words, "model.config.num_attention_heads=2")
    x, _ = trainer.train_data.source.fetch(torch.tensor([0]))
    assert bytes(t - 1 for t in x[0].tolist()).decode() == next(t for t in TEXTS if t.startswith("line 0"))[:12]


def test_other_columns_are_left_out_and_said(bert, make):
    make(*CLASSES, *of(bert))
    assert make.contexts[0].data.inputs == ("inputs: review a text of up to 12 tokens; price left out (the model reads one text)")


REFUSED = {
    "numbers beside it": (["data.columns=[review,price]"], "the column price cannot be used: the model reads one text"),
    "several": (["data.target=price"], r"the inputs have review, stars: name one, as by data\.columns=\[review:text\]"),
    "none": (["data.columns=[price]"], "reads one column of them, and the inputs have none: name one"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case, bert, make):
    words, says = REFUSED[case]
    task = [*NUMBERS, "data.columns=null"] if case == "several" else CLASSES
    with pytest.raises(UserError, match=says):
        make(*task, *words, *of(bert))


def test_numbers_for_a_transformer_are_refused(make):
    with pytest.raises(UserError, match=r"data\.columns=\[NAME:text\]"):
        make(*NUMBERS, "data.columns=[stars]", "model=transformers", "model.name=bert")
