"""Where metrics go: the same numbers in every place, each update once."""

import csv
import json
import os

import pytest

import drivetrain
from drivetrain.core.errors import UserError
from drivetrain.logger import Files, TensorBoard, Wandb
from drivetrain.logger.files import as_rows
from drivetrain.logger.tracker import TrackedRun, known_ids, write_ids


def records(run_dir) -> list[dict]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def test_a_line_for_each_logged_update_and_each_evaluation(train):
    result = train("updates=null", "epochs=3", "log_every=2")
    told = records(result.run_dir)
    assert [r["update"] for r in told if r["event"] == "train"] == [2, 4, 6, 8, 10, 12]
    assert [r["update"] for r in told if r["event"] == "evaluate"] == [4, 8, 12]
    first = told[0]
    assert {"event", "update", "epoch", "loss", "lr", "samples", "skipped", "samples_per_second", "data_wait"} <= set(first)
    assert (first["samples"], first["lr"], first["skipped"]) == (24, 0.05, 0)
    assert told[-1]["loss"] == result.judged("final")["loss"]


def test_the_table_holds_what_the_lines_hold(train):
    run_dir = train().run_dir
    with (run_dir / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    told = records(run_dir)
    assert len(rows) == len(told) == 3
    for row, record in zip(rows, as_rows(told), strict=True):
        assert {k: v for k, v in row.items() if v} == {k: str(v) for k, v in record.items() if v is not None}
    assert {"loss", "test_loss", "test_accuracy"} < set(rows[0])


def test_a_table_has_a_column_for_each_set_and_counts_epochs_from_one():
    train, validation = {"event": "train", "loss": 2.0}, {"event": "evaluate", "set": "validation", "loss": 3.0}
    whole = [{**train, "update": 4, "epoch": 0}, {**validation, "update": 4, "epoch": 1}]
    begun = [
        {**train, "update": 6, "epoch": 1},
        {**validation, "update": 6, "epoch": 1},
        {**validation, "set": "test", "epoch": 2},
    ]
    rows = as_rows([*whole, *begun])
    assert [row["epoch"] for row in rows] == [1, 1, 2, 2, 2]
    assert [(row.get("loss"), row.get("validation_loss"), row.get("test_loss")) for row in rows] == [
        (2.0, None, None), (None, 3.0, None), (2.0, None, None), (None, 3.0, None), (None, None, 3.0),
    ]  # fmt: skip


def test_a_logged_loss_is_the_mean_over_the_updates_since_the_last(make):
    single, pairs = (make("updates=4", f"log_every={n}") for n in (1, 2))
    single.fit()
    pairs.fit()
    one, two = ([r["loss"] for r in t.log.writers[0] if r["event"] == "train"] for t in (single, pairs))
    assert len(one) == 4
    assert two == pytest.approx([(one[0] + one[1]) / 2, (one[2] + one[3]) / 2], rel=1e-6)


def test_tensorboard_reads_the_values_of_the_lines(train):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    result = train("logger=[files,tensorboard]", "updates=null", "epochs=2")
    events = EventAccumulator(str(result.run_dir / "tensorboard"))
    events.Reload()
    told = records(result.run_dir)
    seen = {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    assert {"train/loss", "train/lr", "test/loss", "test/accuracy"} <= set(seen)
    for tag, points in seen.items():
        event, key = tag.split("/")
        expected = [(r["update"], r[key]) for r in told if r.get("set", r["event"]) == event and r[key] is not None]
        assert [step for step, _ in points] == [step for step, _ in expected]
        assert [v for _, v in points] == pytest.approx([v for _, v in expected], rel=1e-6)  # it keeps float32
        assert points


def test_tensorboard_shows_a_resumed_update_once(train):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run_dir = train("logger=[files,tensorboard]").run_dir
    drivetrain.train([f"resume={run_dir}", "updates=4"])
    events = EventAccumulator(str(run_dir / "tensorboard"))
    events.Reload()
    assert [e.step for e in events.Scalars("train/loss")] == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("folder", "start"),
    [
        ("tensorboard", lambda run_dir: TensorBoard().start(run_dir, 0)),
        ("wandb", lambda run_dir: Wandb().open(TrackedRun(run_dir, run_dir, "name", {}, None))),
    ],
)
def test_a_library_does_not_write_through_a_linked_folder(folder, start, tmp_path):
    """A run's directory may come from a stranger: one that is resumed would write where its link leads."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / folder).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="it is a link"):
        start(tmp_path / "run")
    assert list((tmp_path / "elsewhere").iterdir()) == []


@pytest.mark.parametrize(
    "content",
    [
        "5",
        "[]",
        "[" * 100_000,
        "{",
        '{"mlflow": 5}',
        '{"mlflow": "0a1b"}',
        {"mlflow": "../other"},
        {"mlflow": "/etc"},
        b"\xff",
        None,
    ],
)
def test_ids_of_trackers_that_no_run_writes(content, tmp_path):
    file = tmp_path / "trackers.json"
    if content is None:
        os.mkfifo(file)
    elif isinstance(content, dict):
        write_ids(file, content)
    else:
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError, match=r"trackers.json .*: remove it, and trackers begin a run of their own"):
        known_ids(file)


def test_ids_of_trackers(tmp_path):
    file = tmp_path / "trackers.json"
    assert known_ids(file) == {}
    write_ids(file, ids := {"mlflow": "0a1b", "wandb": "a name"})
    assert known_ids(file) == ids
    file.write_text(file.read_text().replace("0a1b", "0a1c"))
    with pytest.raises(UserError, match=r"SHA-256 differs\): remove it, and trackers begin a run of their own"):
        known_ids(file)


def test_a_resumed_run_keeps_each_update_once(tmp_path):
    lines = [json.dumps({"event": "train", "update": u}) for u in (1, 2, 3, 4)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + '\n{"event": "train", "upd')  # a kill cut it short
    files = Files()
    files.start(tmp_path, 2)
    files.log({"event": "train", "update": 3})
    files.close()
    assert [r["update"] for r in records(tmp_path)] == [1, 2, 3]


def test_a_fresh_run_keeps_nothing_of_another(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"event": "train", "update": 7}\n')
    files = Files()
    files.start(tmp_path, 0)
    files.close()
    assert records(tmp_path) == []


@pytest.mark.parametrize("words", [["optimizer.lr=1e30"], ["updates=1", "optimizer.lr=1e30"]], ids=["training", "evaluation"])
def test_every_line_is_json_that_anyone_can_read(train, words):
    """NaN is no JSON: a number that is not finite is null."""

    def refuse(word: str) -> None:
        raise AssertionError(word)

    run_dir = train(*words).run_dir
    for text in [*(run_dir / "metrics.jsonl").read_text().splitlines(), (run_dir / "result.json").read_text()]:
        assert json.loads(text, parse_constant=refuse)


def test_the_files_are_always_written(train):
    assert records(train("logger=[tensorboard]").run_dir)


def test_what_cannot_be_is_refused(problems, monkeypatch):
    import importlib.util

    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "tensorboard" else find_spec(name, *a))
    (problem,) = problems("logger=[tensorboard]")
    assert "logger=tensorboard needs the package 'tensorboard'" in problem
    assert "pip install 'drivetrain[tensorboard]'" in problem
