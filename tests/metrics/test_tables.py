"""Tables of an evaluation as text: whole, or what says the most of a large one."""

from PIL import Image

from drivetrain.core import tables
from drivetrain.ui import table_picture
from drivetrain.ui.pages import classes
from drivetrain.ui.sheet import joined


def test_a_small_confusion_matrix_is_shown_whole():
    table = {"rows": ["cat", "dog"], "columns": ["cat", "dog"], "values": [[1200, 3], [0, 7]]}
    title, header, rows = tables.shown("confusion_matrix", table)
    assert title.startswith("confusion matrix (row")
    assert header == ["", "cat", "dog"]
    assert rows == [["cat", "1,200", "3"], ["dog", "0", "7"]]


def test_of_a_large_one_the_pairs_that_are_confused_the_most():
    names = [f"c{n}" for n in range(20)]
    values = [[90 if row == column else 0 for column in range(20)] for row in range(20)]
    values[3][5], values[7][1] = 10, 30
    title, _, rows = tables.shown("confusion_matrix", {"rows": names, "columns": names, "values": values})
    assert title == "confusion matrix: what is confused the most"
    assert rows == [["c7", "c1", "30", "25.0%"], ["c3", "c5", "10", "10.0%"]]


def test_of_many_classes_the_worst():
    table = {
        "rows": [f"c{n}" for n in range(20)], "columns": ["precision", "f1", "samples"],
        "values": [[0.5, 1 - n / 100, n] for n in range(20)],
    }  # fmt: skip
    title, _, rows = tables.shown("per_class", table, most=2)
    assert title == "per class: 2 of 20 classes, the worst by f1"
    assert rows == [["c19", "0.5000", "0.8100", "19"], ["c18", "0.5000", "0.8200", "18"]]


def test_a_matrix_on_a_page():
    table = {"rows": ["cat", "<b>"], "columns": ["cat", "<b>"], "values": [[10, 0], [5, 5]]}
    bodies = [each.html for each in classes.sections({"confusion_matrix": table}, "test set")]
    assert bodies[-1].count('style="--share:') == 4
    assert '<td style="--share:0.500">5</td>' in bodies[-1]
    assert "&lt;b&gt;" in bodies[-1]
    names = [str(n) for n in range(50)]
    large = {"rows": names, "columns": names, "values": [[3 if n == m else int(m == 7) for n in range(50)] for m in range(50)]}
    assert "predicted as" in joined(classes.sections({"confusion_matrix": large}, "test set"))
    per_class = {"rows": ["cat", "dog"], "columns": ["f1", "samples"], "values": [[0.5, 9], [1.0, 3]]}
    assert "--part:50%" in joined(classes.sections({"per_class": per_class}, "test set"))


def test_pictures(tmp_path):
    """The picture's cells are as dark as the share of the class."""
    table = {"rows": ["cat", "dog"], "columns": ["cat", "dog"], "values": [[10, 0], [5, 5]]}
    for size in (1, 200):
        large = {"rows": [str(n) for n in range(2 * size)] if size > 1 else ["cat", "dog"]}
        counts = [[value for value in line for _ in range(size)] for line in table["values"] for _ in range(size)]
        picture = Image.open(table_picture.draw({**large, "values": counts}, tmp_path / f"images{size}" / "matrix.png"))
        assert max(picture.size) < 2000
        colors = {color for _, color in picture.convert("RGB").getcolors(10_000)}
        assert ((62, 99, 221) in colors) == (size == 1)  # a share of 1
        assert (255, 255, 255) in colors
