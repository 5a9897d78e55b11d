"""Tables as data: CSV, Parquet and NumPy files, and two of scikit-learn's; and a table beside images."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from drivetrain.core.context import NO_RUN_DIR
from drivetrain.core.errors import UserError
from drivetrain.data.base import Units
from drivetrain.data.images import LabelsCsv
from drivetrain.data.tables import open_table
from drivetrain.data.tabular import Diabetes, Rows, Tabular, Wine

CPU = torch.device("cpu")
Write = Callable[..., str]


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
        import pyarrow
        from pyarrow import parquet

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
        (["x,y", "1,a", "2,", "3,b"], {"target": "y"}, "table.csv:3 has no value in the target column y, and 1 of 3 rows"),
        (["y", "1", "2", "3"], {"target": "y"}, "no column beside the target"),
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


def test_numbers_that_no_training_row_has_lead_to_regression(tmp_path):
    train, test = written(tmp_path, "x,price", "1,10", "2,20"), written(tmp_path, "x,price", "3,31.5", name="test.csv")
    with pytest.raises(UserError, match=r"no training row has the class 31.5 of price: if it is a number .* task=regression"):
        asked(Tabular(path=train, test=test, target="price"), "class").load(CPU)


def test_a_text_among_numbers_of_the_test_is_named(tmp_path):
    train = written(tmp_path, "x,y", "1,1", "2,2")
    test = written(tmp_path, "x,y", "3,1", "many,2", name="test.csv")
    with pytest.raises(UserError, match=r"test.csv:3: the column x holds 'many', and the training rows have numbers there"):
        asked(Tabular(path=train, test=test, target="y"), "values").load(CPU)


def test_texts_are_no_targets_of_regression(houses):
    with pytest.raises(UserError, match="holds texts, such as 'a', and regression wants numbers: set task=classification"):
        asked(Tabular(path=houses, target="kind"), "values").load(CPU)


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
    with pytest.raises(UserError, match=r"names 2 images that are not there, the first is .*gone.png: set data.root"):
        asked(LabelsCsv(path=path, test=path, target="y")).load(CPU)


def test_several_outputs_for_each_number_have_its_units():
    """As a quantile loss wants them: those of the first number first."""
    units = Units(torch.tensor([0.0, 100.0]), torch.tensor([1.0, 10.0]))
    outputs = torch.tensor([[-1.0, 0.0, 1.0, -1.0, 0.0, 1.0]])
    assert units(outputs).tolist() == [[-1.0, 0.0, 1.0, 90.0, 100.0, 110.0]]
    assert units(outputs[:, :2]).tolist() == [[-1.0, 100.0]]
