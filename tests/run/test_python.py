"""The values that the functions of the package return: curves, tables, and the view in a notebook."""

import json

import pytest

import drivetrain
from drivetrain.core.errors import UserError
from drivetrain.core.options.overrides import words_of
from drivetrain.launch import launcher
from drivetrain.run.result import Result
from tests.support import notebook

SHORTER = {
    '"epochs=3"': '"epochs=1", "model=mlp"', '"rounds=6"': '"rounds=1", "block_s=0.02"', '"model=resnet9", ': '"model=mlp", ',
    "surgery=[],[channels_last]": "model.dropout=0,0.5", '"prove=false"': '"prove=false", "profile_s=0.2"',
}  # fmt: skip


@pytest.fixture
def result(train):
    return train("updates=4", "evaluate_every=1")


def test_history_is_a_row_for_each_record(result):
    found = result.history
    lines = (result.run_dir / "metrics.jsonl").read_text().splitlines()
    assert found.to_dict("records")[0]["loss"] == json.loads(lines[0])["loss"]
    assert len(found) == len(lines)
    assert list(found[found["event"] == "train"]["update"]) == [1, 2, 3, 4]
    last = found[found["update"] == 4]
    assert {"train", "evaluate"} <= set(last["event"])
    assert set(last["epoch"]) == {1}, "as metrics.csv has it"


def test_the_plot_has_the_curves_of_training_and_evaluation(result):
    figure = result.plot()
    curves = {axes.get_ylabel(): [line.get_label() for line in axes.get_lines()] for axes in figure.get_axes()}
    assert curves["loss"] == ["training", "test"]
    assert curves["accuracy"] == ["test"]
    (rate,) = figure.get_axes()[2].get_lines()
    assert list(rate.get_xdata()) == [1, 2, 3, 4]


def test_a_run_without_records_says_so(tmp_path):
    for ask in (lambda r: r.history, lambda r: r.plot()):
        with pytest.raises(UserError, match="has no records"):
            ask(Result(run_dir=tmp_path))


def test_keywords_are_overrides(tiny):
    result = drivetrain.train(tiny(), updates=1, resume=None, **{"optimizer.lr": 0.01, "model.hidden": [4]})
    assert (result.updates, result.error) == (1, None)
    assert words_of("f", ["a=1"], {"optimizer": "sgd,adamw", "quality": True}) == ["a=1", "optimizer=sgd,adamw", "quality=true"]
    with pytest.raises(UserError, match=r"no 'epoch' \(epoch=1\): did you mean 'epochs'"):
        drivetrain.train(epoch=1)


@pytest.mark.parametrize("verb", ["train", "sweep", "compare", "doctor"])
def test_a_text_is_no_list_of_overrides(verb):
    with pytest.raises(UserError, match=rf"drivetrain\.{verb}\('model=mlp'\): give a list of overrides, as \['model=mlp'\]"):
        getattr(drivetrain, verb)("model=mlp")


def test_a_run_of_several_ranks_prints_no_table_to_who_gets_its_result(tiny, tmp_path, monkeypatch, says):
    """`drivetrain.train` starts such a run as a command, and of one process it prints no table either."""

    assert "peak memory" in says("train", *tiny("updates=1"))
    monkeypatch.setenv(launcher.RUN_DIR_FILE, str(tmp_path / "place"))
    assert "peak memory" not in says("train", *tiny("updates=1"))
    assert (tmp_path / "place").exists()


@pytest.mark.slow
def test_a_sweep_a_comparison_and_a_doctor_from_python_after_a_run(tiny, train):
    """As in a notebook: this process has computed already."""
    train()
    assert list(drivetrain.sweep(tiny(), optimizer="sgd,adamw")["status"]) == ["completed", "completed"]
    compared = drivetrain.compare([*tiny("model.dropout=0,0.5", "optimizer.lr=0.0001"), "rounds=1"])  # for as long as that lasts
    assert [row.label for row in compared.rows] == ["model.dropout=0", "model.dropout=0.5"]
    assert "model.dropout=0.5" in compared._repr_html_()
    found = drivetrain.doctor([*tiny(), "prove=false", "profile_s=0.2"])
    assert found.problems[0].verdict[1:] in found._repr_html_()  # where it begins with a capital letter


def test_the_notebook_runs_and_has_what_it_shows():
    """Its cells with shorter runs. What is stored of them is what they show: pictures, and nothing in red."""
    names: dict[str, object] = {}
    for cell in json.loads(notebook.FILE.read_text())["cells"]:
        if cell["cell_type"] != "code":
            continue
        source = "".join(cell["source"])
        for long, short in SHORTER.items():
            source = source.replace(long, short)
        shown = notebook.run(source, names)
        kinds = [(each["output_type"], each.get("name"), sorted(each.get("data", {}))) for each in shown]
        assert kinds == [(e["output_type"], e.get("name"), sorted(e.get("data", {}))) for e in cell["outputs"]], source
        assert not any(name == "stderr" for _, name, _ in kinds)
        assert ("image/png" in str(kinds)) == ("plot" in source)
    assert names["result"].status == "completed"
