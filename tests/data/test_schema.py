"""Tables: what people write in them is read as they mean it, by a schema that is decided once; or refused with file and line."""

import bz2
import gzip
import json
import lzma
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow
import pytest
import torch
from PIL import Image
from pyarrow import parquet

from drivetrain.core.errors import DataError, UserError
from drivetrain.core.options.context import NO_RUN_DIR
from drivetrain.core.options.overrides import parse
from drivetrain.data.base import Splits, Units
from drivetrain.data.cells import Cells
from drivetrain.data.images import LabelsCsv
from drivetrain.data.schema import TableSchema, mean_and_std
from drivetrain.data.tables import Form, of_array, open_table
from drivetrain.data.tabular import Diabetes, Rows, Tabular, Wine
from tests.support.command import run

CPU = torch.device("cpu")


@pytest.fixture
def houses(tmp_path: Path) -> str:
    """100 houses: a number, a category, a code, a class and a price of which two thirds are missing nothing."""
    rows = [f"{i},{'old' if i % 3 else 'new'},{i % 4},{'ab'[i % 2]},{2 * i + 1}" for i in range(100)]
    return written(tmp_path, "area,age,zone,kind,price", *rows)


def written(folder: Path, *lines: str, name: str = "table.csv") -> str:
    (folder / name).write_text("\n".join(lines) + "\n")
    return str(folder / name)


def asked(option, *targets: str):
    """The option as it is where a task wants these targets."""
    model = SimpleNamespace(has_tokenizer=False)
    return option.resolve(SimpleNamespace(task=SimpleNamespace(targets=targets), model=model))


def test_a_tables_columns_become_standardised_numbers_and_categories(houses):
    splits = asked(Tabular(path=houses, target="kind", columns=["zone:category", "*"])).load(CPU)
    x, y = splits.train.x, splits.train.y
    assert splits.shape == (1 + 2 + 4 + 1,)  # area, two ages, four zones, price
    torch.testing.assert_close(x[:, [0, 7]].mean(0), torch.zeros(2), atol=1e-5, rtol=0)
    torch.testing.assert_close(x[:, [0, 7]].std(0, correction=0), torch.ones(2))
    assert torch.equal(x[:, 1:3].sum(1), torch.ones(len(x)))
    assert (splits.names, splits.classes, y.dtype) == (["a", "b"], 2, torch.int64)
    assert len(splits.train) + len(splits.test) == 100


def test_numbers_are_the_targets_of_regression_in_the_datas_units(houses):
    splits = asked(Tabular(path=houses, target="price"), "values").load(CPU)
    prices = splits.units(splits.train.y)
    assert set(prices.flatten().round().int().tolist()) <= {2 * i + 1 for i in range(100)}
    torch.testing.assert_close(splits.train.y.mean(), torch.tensor(0.0), atol=1e-5, rtol=0)
    assert (splits.classes, splits.names) == (1, None)


def test_columns_of_0_and_1_are_several_labels(tmp_path):
    path = written(tmp_path, "x,red,round", *(f"{i},{i % 2},{i % 3 // 2}" for i in range(60)))
    splits = asked(Tabular(path=path, target=["red", "round"]), "labels").load(CPU)
    assert splits.names == ["red", "round"]
    assert splits.train.y.shape[1] == 2
    assert set(splits.train.y.flatten().tolist()) == {0.0, 1.0}


def test_the_same_rows_are_held_out_when_rows_are_added_and_moved(houses, tmp_path):
    header, *rows = Path(houses).read_text().splitlines()
    before = asked(Tabular(path=houses, target="price"), "values").load(CPU)
    more = written(tmp_path, header, *reversed(rows), "500,new,1,a,7", name="more.csv")
    after = asked(Tabular(path=more, target="price"), "values").load(CPU)
    held = [set(s.units(s.test.y).flatten().round().int().tolist()) for s in (before, after)]
    assert held[0] <= held[1]
    assert len(held[1] - held[0]) <= 1


@pytest.mark.parametrize("form", ["parquet", "npz", "tsv"])
def test_other_forms_give_the_same_table(tmp_path, form):
    area, price = np.arange(40.0), 3 * np.arange(40.0)
    csv = written(tmp_path, "area,price", *(f"{a},{p}" for a, p in zip(area, price, strict=True)))
    path = str(tmp_path / f"table.{form}")
    if form == "parquet":
        parquet.write_table(pyarrow.table({"area": area, "price": price}), path)
    elif form == "npz":
        np.savez(path, area=area, price=price)
    else:
        written(tmp_path, "area\tprice", *(f"{a}\t{p}" for a, p in zip(area, price, strict=True)), name="table.tsv")
    one, other = (asked(Tabular(path=p, target="price"), "values").load(CPU) for p in (csv, path))
    assert torch.equal(one.train.x, other.train.x)
    assert torch.equal(one.test.y, other.test.y)


def test_missing_values_are_refused_or_filled(tmp_path):
    path = written(tmp_path, "x,c,y", *(f"{'' if i == 50 else i},{'?' if i == 60 else 'ab'[i % 2]},{i}" for i in range(100)))
    with pytest.raises(UserError, match=r"table.csv:52 and others have no value in x \(1\), c \(1\): set data.missing=fill"):
        asked(Tabular(path=path, target="y", holdout=0.05), "values").load(CPU)
    splits = asked(Tabular(path=path, target="y", missing="fill", holdout=0.05), "values").load(CPU)
    filled = (splits.units(splits.train.y) - 50).abs().argmin()
    assert splits.train.x[filled, 0] == pytest.approx(0.0, abs=1e-6)  # the mean
    assert splits.shape == (1 + 3,)  # a missing text is a category of its own


def test_the_schema_that_a_run_keeps_encodes_new_rows_alike(houses):
    splits = asked(Tabular(path=houses, target="price"), "values").load(CPU)
    (found,) = predicted(splits, "zone,kind,age,area", "1,unseen,new,5")
    assert found.shape == (1, *splits.shape)
    assert found[0, -2:].tolist() == [0.0, 0.0]  # a category that no training row has


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("x,t,y\n1,a,2\n3,b,4\n5,c,6\n", [2, 3, 4]), ("x,t,y\n1,a,2\n3,b,4", [2, 3]), ("x,t,y\r\n1,a,2\r\n3,b,4\r\n", [2, 3]),
        ('x,t,y\n1,"a\n\nz",2\n\n3,b,4\n5,"c",6\n', [2, 6, 7]), ("x,t,y\r1,a,2\r3,b,4\r", [2, 3]),
    ],
)  # fmt: skip
def test_a_row_is_called_by_its_line_wherever_it_is_named(text, lines, tmp_path):
    table = tmp_path / "t.csv"
    table.write_text(text, newline="")
    option = Tabular(path=str(table), target="y", holdout=None, validation=None)
    cells = open_table(table, option.form()).cells()
    places = [f"{table}:{line}" for line in lines]
    assert [cells.place(row) for row in range(len(cells))] == places
    rows = Rows(torch.zeros(len(lines), 1), torch.zeros(len(lines)), cells)
    assert [rows.name(n) for n in range(len(lines))] == places
    assert [rows.subset(torch.tensor([1])).name(0), pickle.loads(pickle.dumps(rows)).name(1)] == [places[1]] * 2
    if "\n" in text:
        blocks = open_table(table, option.form()).blocks(2, (), ["x"])
        assert [name for names, _ in blocks for name in names] == places


def predicted(splits, *lines: str, size: int = 100, option=None) -> list[torch.Tensor]:
    """The inputs of lines, as `drivetrain predict` reads them."""
    found = (option or Tabular()).read_inputs([f"{line}\n".encode() for line in lines], splits, size)
    return [read(slice(None)) for _, read in found.blocks]


@pytest.mark.parametrize(
    ("lines", "settings", "says"),
    [
        (["x,y", "1,2"], {"target": "z"}, "data.target=z is no column"),
        (["x,y", "1,2,3"], {"target": "y"}, "table.csv:2 has 3 cells, and the first line names 2"),
        (["x,x", "1,2"], {"target": "x"}, "several columns of one name"),
        (["x,y"], {"target": "y"}, "has no rows"),
        (["x,y", "1,a", "2,", "3,b"], {"target": "y"}, "table.csv:3 has no value in the target column y, 1 of 3 rows"),
        (["y", "1", "2", "3"], {"target": "y"}, "no column except the target"),
        (["x,y", "1,2", "2,3"], {"target": "y", "columns": ["y"]}, "would be given what it is to predict"),
        (["x,y", "1,2", "2,3"], {"target": "y", "columns": ["z:category", "*"]}, "data.columns=z is no column"),
    ],
)
def test_a_wrong_table_is_answered_with_what_to_do(tmp_path, lines, settings, says):
    path = written(tmp_path, *lines)
    with pytest.raises(UserError, match=says):
        asked(Tabular(path=path, test=path, **settings)).load(CPU)


def test_a_code_is_one_category_whether_its_column_holds_numbers_or_texts(tmp_path):
    """The same codes are numbers in a column of numbers, and texts where another row has a text."""
    train = written(tmp_path, "code,y", *(f"{code},{n}" for n, code in enumerate(["1", "2", "x", "1234567"])))
    test = written(tmp_path, "code,y", "2,1", "1234567,3", name="test.csv")
    splits = asked(Tabular(path=train, test=test, target="y", columns=["code:category"]), "values").load(CPU)
    assert torch.equal(splits.test.x, splits.train.x[[1, 3]])
    assert not torch.equal(splits.train.x[0], splits.train.x[3])


@pytest.mark.parametrize(
    ("train", "test", "kind", "says"),
    [
        (["1,10", "2,20"], ["3,31.5"], "class", r"no training row has the class 31.5 of y: if it is a number .* task=regression"),
        (
            ["1,1", "2,2"],
            ["3,1", "many,2"],
            "values",
            r"test.csv:3: the column x holds 'many', and the training rows have numbers",
        ),
        (["1,a", "2,b"], ["3,a"], "values", "holds texts, such as 'a', and regression wants numbers: set task=classification"),
    ],
)
def test_what_does_not_fit_the_training_rows_is_named(tmp_path, train, test, kind, says):
    path, other = written(tmp_path, "x,y", *train), written(tmp_path, "x,y", *test, name="test.csv")
    with pytest.raises(UserError, match=says):
        asked(Tabular(path=path, test=other, target="y"), kind).load(CPU)


def test_a_trial_without_a_directory_writes_no_encoder(make, tmp_path):
    """As batch=auto, batch=critical and a forecast build the run."""
    words = "task=regression", "data=diabetes", "model=mlp", "model.hidden=[8]"
    make(*words, run_dir=NO_RUN_DIR)
    make(*words, run_dir=tmp_path)
    assert (tmp_path / "table.json").is_file()


def test_scikit_learns_tables_are_its_own():
    from sklearn.datasets import load_diabetes, load_wine

    for option, (x, y) in ((Diabetes(), load_diabetes(return_X_y=True, scaled=False)), (Wine(), load_wine(return_X_y=True))):
        splits = option.load(CPU)
        targets = torch.cat([splits.train.y, splits.test.y])
        targets = targets if splits.units is None else splits.units(targets)
        assert sorted(targets.flatten().tolist()) == pytest.approx(sorted(y.astype(float).tolist()), abs=1e-3)
        assert len(splits.train) + len(splits.test) == len(x)
        assert splits.shape == (x.shape[1],) == option.shape()
        assert len(splits.train) == option.loaded_samples()
        torch.testing.assert_close(splits.train.x.std(0, correction=0), torch.ones(x.shape[1]), atol=1e-4, rtol=1e-4)


# --- a table beside images ---


def test_a_table_beside_images_gives_a_class_labels_or_numbers(tmp_path):
    lines = []
    for i in range(40):
        Image.new("RGB", (9, 8), (6 * i, 0, 0)).save(tmp_path / f"{i}.png")
        lines.append(f"{i}.png,{'cat' if i % 2 else 'dog'},{'red|big' if i % 2 else 'red'},{i}")
    path = written(tmp_path, "image,animal,tags,age", *lines)
    splits = asked(LabelsCsv(path=path, target="animal", size=8, holdout=0.3)).load(CPU)
    x, y = splits.train.fetch(torch.arange(3))
    assert (x.shape, splits.names) == ((3, 3, 8, 8), ["cat", "dog"])
    splits = asked(LabelsCsv(path=path, target="tags", separator="|", size=8, holdout=0.3), "labels").load(CPU)
    assert splits.names == ["big", "red"]
    splits = asked(LabelsCsv(path=path, target="age", size=8, holdout=0.3), "values").load(CPU)
    x, y = splits.train.fetch(torch.arange(5))
    assert torch.equal(splits.units(y)[:, 0].round() * 6, x[:, 0, 0, 0].float())  # each image has its own row's target


def test_the_rows_of_an_image_stay_together(tmp_path):
    """Three rows for each image, as of several annotators: no image is in two sets."""
    for i in range(40):
        Image.new("RGB", (4, 4), (6 * i, 0, 9)).save(tmp_path / f"{i}.png")
    path = written(tmp_path, "image,kind,by", *(f"{i}.png,{'ab'[i % 2]},{by}" for by in "xyz" for i in range(40)))
    splits = asked(LabelsCsv(path=path, target="kind", size=8, holdout=0.3, validation=0.3)).load_sets(CPU)
    sets = [{source.name(i) for i in range(len(source))} for source in (splits.train, splits.test, splits.validation)]
    assert [len(source) for source in (splits.train, splits.test, splits.validation)] == [3 * len(names) for names in sets]
    assert sum(map(len, sets)) == len(set.union(*sets)) == 40
    assert not splits.doubts
    test = written(tmp_path, "image,kind,by", "3.png,b,x", name="test.csv")
    doubts = asked(LabelsCsv(path=path, test=test, target="kind", size=8)).load(CPU).doubts
    assert "1 images of data.test are in training too, the first is 3.png" in doubts


def test_paths_are_as_they_are_written_and_true_and_false_are_classes(tmp_path):
    names = ["a\\b.png", "0012.png", "á.png", "a b.png"] + [f"{n}.png" for n in range(20)]
    for name in names:
        Image.new("RGB", (4, 4), (9, len(name), 200)).save(tmp_path / name)
    path = written(tmp_path, "image,kind", *(f"{name},{n % 2 == 0}" for n, name in enumerate(names)))
    splits = asked(LabelsCsv(path=path, target="kind", size=8, holdout=0.3)).load(CPU)
    assert splits.names == ["false", "true"]
    found = [source.name(i) for source in (splits.train, splits.test) for i in range(len(source))]
    assert sorted(found) == sorted(str(tmp_path / name) for name in names)


def test_an_image_that_is_not_there_is_named(tmp_path):
    for i in range(20):
        Image.new("RGB", (4, 4), (6 * i, 0, 9)).save(tmp_path / f"{i}.png")
    path = written(tmp_path, "image,kind", *(f"{i}.png,{'ab'[i % 2]}" for i in range(22)))
    splits = asked(LabelsCsv(path=path, target="kind", size=8, holdout=0.3, on_error="skip", max_skipped=2)).load(CPU)
    for source in (splits.train, splits.test):
        source.fetch(torch.arange(len(source)))
    skipped = [*splits.train.skipped(), *splits.test.skipped()]
    assert sorted(skipped) == [str(tmp_path / f"{i}.png") for i in (20, 21)]
    path = written(tmp_path, "image,y", "gone.png,1", "lost.png,2")
    with pytest.raises(
        UserError, match=r"gone.png, which .* names, is not there\n.*lost.png, which .*\n2 images are not there: set data.root"
    ):
        asked(LabelsCsv(path=path, test=path, target="y")).load(CPU)


def test_an_id_is_left_out_unless_it_is_named_and_areas_are_numbers(tmp_path):
    rows = [f"{n};u{n};{20 + n % 9}.5 m²;{n % 4};{'ab'[n % 2]};{900 + n};Ada {n};{n * n}" for n in range(40)]
    (tmp_path / "t.csv").write_text("\n".join(["id;user_id;area;shop_id;kind;PassengerId;name;fare", *rows]), encoding="utf-8")
    said = {}
    for columns in (None, ["*", "id"]):
        data = Tabular(path=str(tmp_path / "t.csv"), target="kind", columns=columns).load(torch.device("cpu"))
        said[str(columns)] = data.inputs, data.shape
    inputs, shape = said["None"]
    assert inputs.startswith(
        "inputs: 3 numbers (area, shop_id, fare); id left out (an id: it is different in every row; data.columns=['*',id]"
    )
    assert (shape, [word in inputs for word in ("PassengerId left out", "name left out")]) == ((3,), [True, True])
    assert said["['*', 'id']"][0].startswith("inputs: 4 numbers (id, area, shop_id, fare); user_id left out")


def test_several_outputs_for_each_number_have_its_units():
    """As a quantile loss wants them: those of the first number first."""
    units = Units(torch.tensor([0.0, 100.0]), torch.tensor([1.0, 10.0]))
    outputs = torch.tensor([[-1.0, 0.0, 1.0, -1.0, 0.0, 1.0]])
    assert units(outputs).tolist() == [[-1.0, 0.0, 1.0, 90.0, 100.0, 110.0]]
    assert units(outputs[:, :2]).tolist() == [[-1.0, 100.0]]


ROWS = 60


def table(
    folder: Path, cells: dict[str, Callable[[int], Any]], rows: int = ROWS, separator: str = ",", name: str = "t.csv"
) -> str:
    """A table whose columns are functions of the row's number; `y` is its target."""
    columns = {**cells, "y": lambda n: n % 2}
    lines = [separator.join(columns), *(separator.join(str(cell(n)) for cell in columns.values()) for n in range(rows))]
    return written(folder, *lines, name=name)


def loaded(path: str, *wanted: str, **settings: Any) -> Splits:
    return asked(Tabular(path=path, target=settings.pop("target", "y"), **settings), *wanted or ("class",)).load(CPU)


def schema(splits: Splits) -> dict[str, dict[str, Any]]:
    """The columns in a run's table.json, by their names."""
    return {column["name"]: column for column in json.loads(splits.files["table.json"])["columns"]}


def values(path: str, column: str = "a", **settings: Any) -> list[float]:
    """The numbers that a column is read as, in the order of the rows."""
    cells = open_table(Path(path), Form(**settings)).cells()
    decided = TableSchema.decided(cells, {}, hint=(";" in Path(path).read_text() and ",") or "")
    found = decided.read(cells).columns[column]
    assert isinstance(found, np.ndarray), decided.columns[column]
    return found.tolist()


# --- numbers as people write them ---


@pytest.mark.parametrize(
    ("cells", "numbers"),
    [
        (["1,5", "-2,25", "3"], [1.5, -2.25, 3]),
        (["1.234,5", "12.345.678,25", "-1.000"], [1234.5, 12345678.25, -1000]),
        (["1,234.5", "12,345,678.25", "-1,000"], [1234.5, 12345678.25, -1000]),
        (["1 234,5", "1\u00a0234", "1\u202f000,5"], [1234.5, 1234, 1000.5]),
        (["1'234.5", "12"], [1234.5, 12]),
        (["45 %", "7.5%", "-3 %"], [45, 7.5, -3]),
        (["$1,200.50", "$3", "-$7"], [1200.5, 3, -7]),
        (["1.200,50 €", "3 €", "7,5€"], [1200.5, 3, 7.5]),
        (["12 USD", "3.5 USD", "0 USD"], [12, 3.5, 0]),
        (["+1.5", "−2.5", "1e3"], [1.5, -2.5, 1000]),
        ([" 1.5 ", ".5", "5."], [1.5, 0.5, 5]),
        (["1.5", "--", "?", "N/A", "null", "NaN", "-", ""], [1.5, *[None] * 7]),
        (["12345678901", "3"], [12345678901, 3]),
    ],
)
def test_numbers_are_read_in_the_style_that_all_cells_have(tmp_path, cells, numbers):
    found = values(written(tmp_path, "a;b", *(f"{cell};1" for cell in cells)))
    assert [None if value != value else value for value in found] == numbers


@pytest.mark.parametrize(
    "cells",
    [
        ["00501", "10001"], ["9007199254740993", "1"], ["12_3", "5"], ["0x10", "5"], ["1,23,4", "5"], ["$5", "€5"], ["5 %", "5"],
        ["1-800", "5"], ["1.2.3", "4.5.6"], ["2024-02-30", "2024-01-01"], ["12:30", "5:15"],
    ],
    ids=str,
)  # fmt: skip
def test_what_is_no_number_stays_the_text_that_it_is(tmp_path, cells):
    path = written(tmp_path, "a;y", *(f"{cell};{n % 2}" for n in range(20) for cell in cells))
    found = schema(loaded(path, test=path))["a"]
    assert (found["type"], found["categories"]) == ("category", sorted(cells))


def test_a_number_that_can_be_read_in_two_ways_is_settled_by_others_or_asked(tmp_path):
    two = {"a": lambda n: f'"1,{n:03d}"'}
    with pytest.raises(UserError, match=r"the column a holds numbers such as '1,000', .* set data.decimal=',' or"):
        loaded(table(tmp_path, two))
    for decimal, style in ((",", ("", ",")), (".", (",", "."))):
        found = schema(loaded(table(tmp_path, two), decimal=decimal))["a"]["style"]
        assert (found["thousands"], found["decimal"]) == style
    with_fractions = schema(loaded(table(tmp_path, {**two, "b": lambda n: n + 0.25})))
    assert with_fractions["a"]["style"]["thousands"] == ","
    semicolons = schema(loaded(table(tmp_path, {"a": lambda n: f"1,{n:03d}"}, separator=";")))
    assert semicolons["a"]["style"]["decimal"] == ","
    german = schema(loaded(table(tmp_path, {"a": lambda n: f"1.{n:03d}", "b": lambda n: f"{n},5"}, separator=";")))
    assert german["a"]["style"]["thousands"] == "."
    plain = schema(loaded(table(tmp_path, {"a": lambda n: f"1.{n:03d}"})))
    assert plain["a"]["style"] == {"decimal": ".", "thousands": "", "unit": ""}


@pytest.mark.parametrize(
    ("cell", "parts"),
    [
        ("2024-02-29", [2024, 2, 29, 3]), ("2024-02-29 13:30:00", [2024, 2, 29, 3, 13.5]),
        ("2024-02-29T13:30Z", [2024, 2, 29, 3, 13.5]),
        ("29.2.2024", [2024, 2, 29, 3]), ("02/29/2024", [2024, 2, 29, 3]), ("29/02/2024", [2024, 2, 29, 3]),
    ],
)  # fmt: skip
def test_dates_become_numbers(tmp_path, cell, parts):
    path = written(tmp_path, "d,y", *(f"{cell},{n % 2}" for n in range(8)))
    splits = loaded(path, test=path, normalize=False)
    assert splits.train.x[0].tolist() == parts
    assert splits.inputs == f"inputs: d a date ({', '.join(['year', 'month', 'day', 'weekday', 'hour'][: len(parts)])})"


def test_a_day_and_a_month_that_cannot_be_told_apart_are_categories(tmp_path):
    assert schema(loaded(table(tmp_path, {"d": lambda n: f"0{n % 9 + 1}/01/2024"})))["d"]["type"] == "category"


def test_words_that_count_as_missing_can_be_given(tmp_path):
    path = table(tmp_path, {"a": lambda n: -999 if n == 3 else n, "b": lambda n: "none" if n % 2 else "pool"})
    with pytest.raises(DataError, match=r"t.csv:3 and others have no value in b \(30\): .* nan null none \? - --"):
        loaded(path)
    with pytest.raises(DataError, match=r"t.csv:5 and others have no value in a \(1\)"):
        loaded(path, na=[-999])
    assert schema(loaded(path, na=[-999], missing="fill"))["b"]["categories"] == ["none", "pool"]


def test_a_constant_column_is_no_input_of_quadrillions(tmp_path):
    """The deviation of 200 × 0.1 is 1.4e-17."""
    path = table(tmp_path, {"a": lambda n: 0.1, "b": lambda n: n}, rows=200)
    splits = loaded(path)
    (x,) = predicted(splits, "a,b", "0.2,1")
    assert x[0, 0] == pytest.approx(0.1)
    assert loaded(path, "values", target="a").units.std.tolist() == [1.0]
    assert mean_and_std(np.array([1e9, 1e9 + 1])) == (1e9 + 0.5, 0.5)  # a small deviation that is one


def test_infinity_is_found_when_it_is_read(tmp_path):
    for cell in ("inf", "1e400", "-Infinity"):
        for others in (lambda n: n, lambda n: n + 0.25):
            path = table(tmp_path, {"a": lambda n, cell=cell, others=others: cell if n == 30 else others(n)})
            with pytest.raises(DataError, match=r"t.csv:32: the column a holds a number that is infinite"):
                loaded(path)


# --- one schema for every reading ---


def mixed(folder: Path, name: str = "mixed.csv") -> tuple[str, list[str]]:
    """A table with a column of each kind, and its lines."""
    lines = ["code,version,flag,size,day,y"]
    for n in range(80):
        flag, size = "true" if n % 3 else "false", "" if n % 9 == 5 else n / 4
        lines.append(f"{n % 7:03d},{['1.50', '2.25', 'rc'][n % 3]},{flag},{size},2024-0{n % 9 + 1}-11,{n % 2}")
    return written(folder, *lines, name=name), lines


def test_each_way_of_reading_gives_the_same_inputs(tmp_path):
    """The whole file, a part of it, its columns in another order, standard input, one row alone, and Parquet."""
    path, lines = mixed(tmp_path)
    option = asked(Tabular(path=path, test=path, target="y", missing="fill"))
    splits = option.load(CPU)
    whole = splits.test.x
    assert splits.shape == (7 + 3 + 2 + 1 + 4,)
    for size in (1, 7, 100):
        assert torch.equal(torch.cat(predicted(splits, *lines, size=size, option=option)), whole)
        found = option.read_inputs(Path(path), splits, size)
        assert torch.equal(torch.cat([read(slice(None)) for _, read in found.blocks]), whole)
    assert torch.equal(torch.cat(predicted(splits, lines[0], *lines[40:60], option=option)), whole[39:59])
    moved = [",".join(reversed(line.split(","))) for line in lines]
    assert torch.equal(torch.cat(predicted(splits, *moved, option=option)), whole)
    columns = list(zip(*(line.split(",") for line in lines[1:]), strict=True))
    native = {
        "code": [int(cell) for cell in columns[0]], "version": columns[1], "flag": [cell == "true" for cell in columns[2]],
        "size": [float(cell) if cell else None for cell in columns[3]], "y": [int(cell) for cell in columns[5]],
        "day": pyarrow.array(columns[4]).cast(pyarrow.date32()),
    }  # fmt: skip
    parquet.write_table(pyarrow.table(native), tmp_path / "t.parquet")
    found = option.read_inputs(tmp_path / "t.parquet", splits, 30)
    assert torch.equal(torch.cat([read(slice(None)) for _, read in found.blocks]), whole)
    assert not found.unknown


def test_a_row_is_held_out_in_each_form_of_a_table(tmp_path):
    """Whichever order columns and rows have."""
    path = table(tmp_path, {"a": lambda n: n / 4, "b": lambda n: "xyz"[n % 3], "c": lambda n: -0.0 if n % 5 else n})
    cells = open_table(Path(path), Form()).cells()
    rows = TableSchema.decided(cells, {}).read(cells)
    native = {name: np.array([row.split(",")[i] for row in Path(path).read_text().split()[1:]]) for i, name in enumerate("abcy")}
    parquet.write_table(
        pyarrow.table({n: c if n == "b" else c.astype(float) for n, c in reversed(native.items())}), tmp_path / "p"
    )
    other = open_table(tmp_path / "p", Form()).cells()
    keys = TableSchema.decided(other, {}).read(other).keys()
    assert keys.tolist() == rows.keys().tolist()
    assert len(set(keys.tolist())) == ROWS
    assert rows[::-1].keys().tolist() == keys[::-1].tolist()
    assert 0.3 < (rows.fractions() < 0.5).mean() < 0.7


def test_an_odd_row_is_answered_in_its_place_and_loses_no_other(tmp_path):
    path, lines = mixed(tmp_path)
    option = asked(Tabular(path=path, test=path, target="y", missing="fill"))
    splits = option.load(CPU)
    odd = [*lines[:20], "001,rc", *lines[20:30], '002,"rc', *lines[30:40], "001,rc,true,many,2024-01-11,1", *lines[40:]]
    found = option.read_inputs([f"{line}\n".encode() for line in odd] + [b"003,r\xe9,true,1,2024-01-11,0\n"], splits, 16)
    good, errors = [], []
    for names, read in found.blocks:
        for n in range(len(names)):
            try:
                good.append(read(slice(n, n + 1)))
            except DataError as error:
                errors.append(str(error))
    assert torch.equal(torch.cat(good), splits.test.x)
    for error, says in zip(
        errors,
        (
            ":21 has 2 cells, and the first line names 6",
            ":32: a quote",
            ":43: the column size holds 'many'",
            ":85: the byte 0xe9",
        ),
        strict=True,
    ):
        assert f"standard input{says}" in error


def test_unknown_categories_are_counted_and_said(tmp_path):
    train = table(tmp_path, {"heating": lambda n: "gas" if n % 3 else "oil", "b": lambda n: n})
    test = table(tmp_path, {"heating": lambda n: "coal" if n < 4 else "gas", "b": lambda n: n}, name="test.csv")
    splits = loaded(train, test=test)
    (doubt,) = splits.doubts
    assert "test.csv: 4 rows have a value of heating that no training row has (coal): it counts as none" in doubt
    found = Tabular().read_inputs([b"heating,b\n", b"wood,1\n", b"gas,2\n"], splits, 10)
    for _, read in found.blocks:
        read(slice(None))
    assert found.unknown == {"heating": 1}


def test_types_of_columns_can_be_given(tmp_path):
    path = table(tmp_path, {"zip": lambda n: 10000 + n % 4, "id": lambda n: n, "size": lambda n: n / 4})
    columns = parse("data.columns={zip: category, id: unused}").value()
    assert columns == ["zip:category", "id:unused", "*"]
    assert loaded(path, columns=columns).inputs == "inputs: 1 number (size), zip 4 categories"
    assert loaded(path, columns=["size", "zip:category"]).inputs == "inputs: 1 number (size), zip 4 categories"
    assert loaded(path, columns=["size"]).shape == (1,)
    with pytest.raises(DataError, match=r"t.csv:32: the column a holds 'many', and it is to hold numbers there"):
        loaded(table(tmp_path, {"a": lambda n: "many" if n == 30 else n}), columns=["a:number"])
    with pytest.raises(DataError, match=r"t.csv:2, 3, .*: the column a holds .*, and it is to hold dates there"):
        loaded(table(tmp_path, {"a": lambda n: n}), columns=["a:date"])


@pytest.mark.parametrize("name", ["sepal length (cm)", "Price ($)", "x#1", "größe", "f(x)", "a b", "100%", "what?", "x.2", "3"])
def test_any_column_can_be_named_on_the_command_line(name):
    assert parse(f"data.target={name}").value() in (name, 3)
    assert parse(f"data.columns=[{name},b]").value() in ([name, "b"], [3, "b"])
    assert parse(f"data.columns={{{name}: category}}").value() == [f"{name}:category", "*"]


def test_columns_of_arrays_are_named_by_numbers(tmp_path):
    np.save(tmp_path / "a.npy", np.stack([np.arange(40.0), np.arange(40) % 5, np.arange(40) % 2], 1))
    splits = loaded(str(tmp_path / "a.npy"), target=2, columns=[0])
    assert (splits.inputs, splits.names) == ("inputs: 1 number (0)", ["0", "1"])


# --- what a column is left out for, refused for, or doubted ---


def test_the_index_that_a_data_frame_leaves_is_left_out_and_said(tmp_path):
    csv = table(tmp_path, {"": lambda n: n, "a": lambda n: n % 7, "b": lambda n: "NA"})
    assert (
        loaded(csv).inputs == "inputs: 1 number (a); (column 1) left out (it has no name: an index); b left out (it has no value)"
    )
    columns = {"a": np.arange(ROWS) % 7, "__index_level_0__": np.arange(ROWS), "y": np.arange(ROWS) % 2}
    parquet.write_table(pyarrow.table(columns), tmp_path / "t.parquet")
    assert loaded(str(tmp_path / "t.parquet")).shape == (1,)


@pytest.mark.parametrize("kind", [pyarrow.list_(pyarrow.int64()), pyarrow.struct({"a": pyarrow.int64()}), pyarrow.binary()])
def test_a_column_of_what_is_no_cell_is_refused_by_name(tmp_path, kind):
    cell = {"list": [1], "struct": {"a": 1}, "binary": b"x"}[str(kind).partition("<")[0]]
    columns = {"a": list(range(ROWS)), "odd": pyarrow.array([cell] * ROWS, kind), "y": [n % 2 for n in range(ROWS)]}
    parquet.write_table(pyarrow.table(columns), tmp_path / "t.parquet")
    with pytest.raises(UserError, match=r"t.parquet: the column odd holds .*, which is no number and no text: leave it out"):
        loaded(str(tmp_path / "t.parquet"))
    assert loaded(str(tmp_path / "t.parquet"), columns=["odd:unused", "*"]).shape == (1,)


def test_texts_of_parquet_stay_texts(tmp_path):
    columns = {"zip": ["00501", "10001"] * 30, "big": [2**53 + 1, 2**53] * 30, "y": [n % 2 for n in range(60)]}
    parquet.write_table(pyarrow.table(columns), tmp_path / "t.parquet")
    found = schema(loaded(str(tmp_path / "t.parquet"), test=str(tmp_path / "t.parquet")))
    assert found["zip"]["categories"] == ["00501", "10001"]
    assert found["big"]["categories"] == ["9007199254740992", "9007199254740993"]


@pytest.mark.parametrize(
    ("cells", "says"),
    [
        (
            lambda n: "many" if n == 30 else n,
            r"t.csv:32: the column a holds 'many' among numbers, so that all are read as",
        ),
        (lambda n: f"house {n or 1}", r"59 of 60 rows have a text of their own in the column a, such as 'house 1': leave it out"),
    ],
)
def test_what_looks_wrong_is_said(tmp_path, cells, says):
    splits = loaded(table(tmp_path, {"a": cells, "b": lambda n: n}))
    assert any(re.search(says, doubt) for doubt in splits.doubts), splits.doubts


# --- targets ---


def test_a_class_stays_the_text_that_it_is(tmp_path):
    path = written(tmp_path, "x,y", *(f"{n},{['01', '1', 'x'][n % 3]}" for n in range(60)))
    assert loaded(path).names == ["01", "1", "x"]
    numbers = written(tmp_path, "x,y", *(f"{n},{[2, 10, 1][n % 3]}" for n in range(60)))
    assert loaded(numbers).names == ["1", "2", "10"]


def test_a_class_of_one_row_does_not_refuse_the_run(tmp_path):
    """Wherever the hold-out puts the row."""
    for lonely in range(10):
        path = written(tmp_path, "x,y", *(f"{n},{'rare' if n == lonely else 'ab'[n % 2]}" for n in range(60)))
        splits = asked(Tabular(path=path, target="y", holdout=0.5)).load_sets(CPU)
        assert splits.names == ["a", "b", "rare"]


# --- how files are written ---


def test_texts_of_other_encodings(tmp_path):
    text = "größe;y\n" + "".join(f"{'änß'[n % 3]};{n % 2}\n" for n in range(40))
    utf8 = tmp_path / "t.csv"
    utf8.write_text(text, encoding="utf-8")
    expected = loaded(str(utf8)).train.x
    for encoding in ("utf-8-sig", "utf-16", "utf-32"):
        utf8.write_bytes(text.encode(encoding))
        assert torch.equal(loaded(str(utf8)).train.x, expected)
    for encoding in ("latin-1", "cp1250", "utf-16-le"):
        utf8.write_bytes(text.encode(encoding))
        with pytest.raises(UserError, match=r"data.encoding"):
            loaded(str(utf8))
        assert torch.equal(loaded(str(utf8), encoding=encoding).train.x, expected)
    utf8.write_bytes(b'a,y\n1,0\n2,1\n\n\n"x\ny",1\n\xe9,0\n')
    with pytest.raises(DataError, match=r"t.csv:8: the byte 0xe9 is no UTF-8: save the file as UTF-8, or set data.encoding"):
        loaded(str(utf8))


@pytest.mark.parametrize(
    ("ending", "pack"),
    [(".gz", gzip.compress), (".bz2", bz2.compress), (".xz", lzma.compress), ("", bytes), (".data", bytes), (".TXT", bytes)],
)
def test_a_table_shows_by_its_bytes_what_it_is(tmp_path, ending, pack):
    path = Path(table(tmp_path, {"a": lambda n: n}))
    expected = loaded(str(path)).train.x
    packed = tmp_path / f"houses{ending}"
    packed.write_bytes(pack(path.read_bytes()))
    assert torch.equal(loaded(str(packed)).train.x, expected)


@pytest.mark.parametrize("separator", [";", "\t", "|", ":", " ", "~"])
def test_any_separator(tmp_path, separator):
    cells = {"a": lambda n: n, "b": lambda n: f'"x{separator}y"'}
    given = separator if separator in ":~ " else None
    path = table(tmp_path, cells, separator=separator)
    assert schema(loaded(path, delimiter=given))["b"]["categories"] == [f"x{separator}y"]


def test_columns_between_several_spaces(tmp_path):
    path = written(tmp_path, *(f"  {n}.5    {n % 3}   {n % 2}  " for n in range(60)))
    with pytest.raises(UserError, match=r"line 1 holds numbers between spaces: set data.delimiter=' '"):
        loaded(path)
    assert loaded(path, target=2, delimiter=" ", header=False).shape == (2,)


def test_a_file_without_names_is_asked_about(tmp_path):
    path = written(tmp_path, *(f"{n}.5,{n % 3},{'ab'[n % 2]}" for n in range(60)))
    with pytest.raises(UserError, match=r"line 1 holds the number 0.5 where names .* data.header=false, .* or data.header=true"):
        loaded(path)
    splits = loaded(path, header=False, target=2)
    assert (splits.inputs, splits.names) == ("inputs: 2 numbers (0, 1)", ["a", "b"])
    assert len(splits.train) + len(splits.test) == 60
    years = written(tmp_path, "1990,1991,y", *(f"{n},{n},{n % 2}" for n in range(60)))
    assert loaded(years, columns=[1990]).inputs == "inputs: 1 number (1990)"


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b'a,y\n1,0\n\n\n"x\n\ny",1\n2\n', r"t.csv:8 has 1 cells, and the first line names 2 columns"),
        (b"a,y\n1,0\n2,1,\n", r"t.csv:3 has 3 cells, and the first line names 2 columns"),
        (b'a,y\n1,0\n"2,1\n3,0\n', r"t.csv:3: a quote \(\"\) is not closed"),
        (b"a,y\n1,0\n2,\n", r"t.csv:3 has no value in the target column y, 1 of 2 rows: remove it"),
        (b"a,y\n1,0\n,1\n", r"t.csv:3 and others have no value in a \(1\)"),
        (b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR", r"t.csv is no table that can be read .* save it as CSV"),
        (b"PK\x03\x04 xlsx", r"t.csv cannot be read as a table"),
        (b"", r"t.csv has no rows"),
        (b"a,y\r\n1,0\r\n2,1\r\n", r"training and \d test rows|2 training"),
    ],
)
def test_a_message_names_file_and_line(tmp_path, content, says):
    (tmp_path / "t.csv").write_bytes(content)
    with pytest.raises(UserError, match=says):
        loaded(str(tmp_path / "t.csv"))


def test_what_is_wrong_in_the_test_file_names_that_file(tmp_path):
    train = table(tmp_path, {"a": lambda n: n})
    for content, says in (
        ("a,y\n1,0\nmany,1\n", "test.csv:3: the column a holds 'many'"),
        ("a,y\n1,0\n2,\n", "test.csv:3 has no value in the target column y"),
        ("a,y\n1,0\n2,7\n", "test.csv:3: no training row has the class 7 of y"),
        ("b,y\n1,0\n", "data.test=.*test.csv has no column a"),
    ):
        test = written(tmp_path, *content.splitlines(), name="test.csv")
        with pytest.raises(UserError, match=says):
            loaded(train, test=test)


def test_line_ends_of_other_systems(tmp_path):
    path = Path(table(tmp_path, {"a": lambda n: n, "b": lambda n: f'"x{n % 2}"'}))
    expected = loaded(str(path)).train.x
    for end in (b"\r\n", b"\r"):
        path.write_bytes(path.read_bytes().replace(b"\r\n", b"\n").replace(b"\n", end))
        assert torch.equal(loaded(str(path)).train.x, expected)


def test_reading_a_table_imports_no_pandas(tmp_path):
    """It takes half a second and 100 MB."""
    path = table(
        tmp_path, {"a": lambda n: n, "b": lambda n: f"{n / 4} %", "c": lambda n: "xyz"[n % 3], "d": lambda n: "2024-01-01"}
    )
    (tmp_path / "program.py").write_text(f"""
import sys, torch
from drivetrain.data.tabular import Tabular
assert "pandas" not in sys.modules, "at the start"
option = Tabular(path={path!r}, target="y")
splits = option.load(torch.device("cpu"))
[read(slice(1)) for _, read in option.read_inputs([b"a,b,c,d\\n", b"1,2 %,x,2024-01-01\\n"], splits, 10).blocks]
assert "pandas" not in sys.modules
""")
    run(cwd=tmp_path, how=["program.py"], code=0)


def test_the_cells_of_numpy_arrays():
    cells = Cells({"a": of_array(np.array([1, 2**60])), "b": of_array(np.array([True, False]))}, "arrays")
    assert cells.columns["a"].texts == ["1", str(2**60)]
    assert cells.columns["b"].texts == ["true", "false"]
    with pytest.raises(UserError, match="an array of complex128 holds neither numbers nor texts"):
        of_array(np.array([1j]))


def test_a_target_that_the_runs_own_table_does_not_have_is_named(tmp_path):
    splits = loaded(table(tmp_path, {"a": lambda n: n}))
    other = table(tmp_path, {"a": lambda n: n, "z": lambda n: n}, name="other.csv")
    with pytest.raises(UserError, match=r"data.target=z is no column of the run's own table: there is: a, y"):
        asked(Tabular(path=other, target="z")).load_whole(splits)
