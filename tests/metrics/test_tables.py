"""Tables of an evaluation as text: whole, or what says the most of a large one."""

from drivetrain.core import tables


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
