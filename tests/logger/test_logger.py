"""The places of metrics: the same numbers in every place, each update once."""

import csv
import json
import logging
import os
import struct
import threading
from pathlib import Path

import pytest
import torch
from PIL import Image

import drivetrain
from drivetrain.core.errors import UserError
from drivetrain.logger import Logger, drawing
from drivetrain.logger.base import Guarded, TrackedRun, guarded, known_ids, write_ids
from drivetrain.logger.files import Csv, Files, as_rows
from drivetrain.logger.trackers import TensorBoard, Wandb, has_login
from tests.support import slow
from tests.support.to_end import continued


def records(run_dir) -> list[dict]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def test_a_line_for_each_logged_update_and_each_evaluation_and_a_table_of_them(train):
    result = train("updates=null", "epochs=3", "log_every=2")
    told = records(result.run_dir)
    assert [r["update"] for r in told if r["event"] == "train"] == [2, 4, 6, 8, 10, 12]
    assert [r["update"] for r in told if r["event"] == "evaluate"] == [4, 8, 12]
    first = told[0]
    assert {"event", "update", "epoch", "loss", "lr", "samples", "skipped", "samples_per_second", "data_wait"} <= set(first)
    assert (first["samples"], first["lr"], first["skipped"]) == (24, 0.05, 0)
    assert told[-1]["loss"] == result.judged("final")["loss"]
    with (result.run_dir / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
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
    one, two = (t.log.writers[0].losses for t in (single, pairs))
    assert len(one) == 4
    assert two == pytest.approx([(one[0] + one[1]) / 2, (one[2] + one[3]) / 2], rel=1e-6)


def test_tensorboard_shows_the_values_of_the_lines_and_a_resumed_update_once(train):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    first = train("logger=[tensorboard]")  # the files are always written
    result = drivetrain.train([f"resume={first.run_dir}", "updates=4"])
    events = EventAccumulator(str(result.run_dir / "tensorboard"))
    events.Reload()
    seen = {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    assert {"train/loss", "train/lr", "test/loss", "test/accuracy"} <= set(seen)
    assert [step for step, _ in seen["train/loss"]] == [1, 2, 3, 4]
    assert {tag: points for tag, points in seen.items() if tag in (written := told(result.run_dir))} == approx(written)


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
    with pytest.raises(UserError, match=r"trackers.json .*: remove it, and trackers begin their own run"):
        known_ids(file)


def test_ids_of_trackers(tmp_path):
    file = tmp_path / "trackers.json"
    assert known_ids(file) == {}
    write_ids(file, ids := {"mlflow": "0a1b", "wandb": "a name"})
    assert known_ids(file) == ids
    file.write_text(file.read_text().replace("0a1b", "0a1c"))
    with pytest.raises(UserError, match=r"SHA-256 differs\): remove it, and trackers begin their own run"):
        known_ids(file)


def test_a_resumed_run_keeps_each_update_once(tmp_path):
    lines = [json.dumps({"event": "train", "update": u}) for u in (1, 2, 3, 4)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + '\n{"event": "train", "upd')  # a kill cut it short
    files = Files()
    files.start(tmp_path, 2)
    files.log({"event": "train", "update": 3})
    files.close()
    assert [r["update"] for r in records(tmp_path)] == [1, 2, 3]

    Files().start(tmp_path, 0)
    assert records(tmp_path) == []  # a fresh run keeps nothing of another


@pytest.mark.parametrize("words", [["optimizer.lr=1e30"], ["updates=1", "optimizer.lr=1e30"]], ids=["training", "evaluation"])
def test_every_line_is_json_that_anyone_can_read(train, words):
    """NaN is no JSON: a number that is not finite is null."""

    def refuse(word: str) -> None:
        raise AssertionError(word)

    run_dir = train(*words, ends="diverged").run_dir
    for text in [*(run_dir / "metrics.jsonl").read_text().splitlines(), (run_dir / "result.json").read_text()]:
        assert json.loads(text, parse_constant=refuse)


# --- a logger neither holds up a run nor ends it ---


class Broken(Logger):
    """Fails at its second record."""

    def __init__(self, in_thread=True, required=False):
        self.in_thread, self.required, self.records, self.closed = in_thread, required, [], False

    def log(self, record):
        self.records.append(record)
        if len(self.records) > 1:
            raise ConnectionError("no route to host")

    def close(self):
        self.closed = True


@pytest.mark.parametrize("in_thread", [True, False])
def test_its_first_error_is_logged_and_its_last(caplog, in_thread):
    broken = Broken(in_thread)
    writer = Guarded("broken", broken)
    for update in range(5):
        writer.log({"update": update})
    writer.close("completed")
    assert [r["update"] for r in broken.records] == [0, 1]
    assert broken.closed
    (said,) = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert said.startswith("logger=broken failed, and the run goes on without it")
    assert "ConnectionError: no route to host" in said


def test_a_required_logger_ends_the_run():
    writer = Guarded("files", Broken(in_thread=False, required=True))
    writer.log({})
    with pytest.raises(ConnectionError):
        writer.log({})


def test_a_slow_logger_holds_up_nobody():
    go_on, records = threading.Event(), []

    class Slow(Logger):
        def log(self, record):
            go_on.wait()
            records.append(record["update"])

    writer = Guarded("slow", Slow())
    for update in range(3):
        writer.log({"update": update})
    assert records == []  # and we are here
    go_on.set()
    writer.close("completed")
    assert records == [0, 1, 2]


def test_a_run_goes_on_without_a_tracker_that_fails(make, caplog):
    trainer = make("updates=3")
    trainer.log.writers.insert(0, Guarded("broken", Broken()))
    trainer.fit()
    trainer.log.writers[0].close("completed")
    assert trainer.progress.updates == 3
    assert caplog.text.count("logger=broken failed") == 1


class CannotStart(Logger):
    def start(self, run_dir, update):
        raise ConnectionError("no route to host\nmore")


def test_what_cannot_start_is_one_line_and_a_resumed_run_goes_on_without_it(make, caplog):
    make("updates=1")
    (context,) = make.contexts
    with pytest.raises(UserError, match=r"^logger=x cannot start: ConnectionError: no route to host$"):
        guarded("x", CannotStart(), context)
    context.progress.updates = 1
    guarded("x", CannotStart(), context).close("completed")
    assert "the run goes on without it" in caplog.text


def test_csv_is_a_whole_table_at_any_time(tmp_path):
    table = Csv()
    table.start(tmp_path, 0)
    rows = [{"event": "train", "update": 1, "loss": 2.0}, {"event": "train", "update": 2, "loss": 1.0}]
    rows.append({"event": "evaluate", "update": 2, "accuracy": 0.5})
    for number, row in enumerate(rows, 1):
        table.log(row)
        with (tmp_path / "metrics.csv").open() as file:
            read = [{k: v for k, v in line.items() if v} for line in csv.DictReader(file)]
        assert read == [{k: str(v) for k, v in row.items()} for row in rows[:number]]


# --- each tracker's files, read back by its own library: they hold what metrics.jsonl holds, and a resume continues the run ---


PICTURES = ["data.shape=[3,8,8]", "logger.images.samples=4", "logger.images.predictions=4"]


def told(run_dir: Path) -> dict[str, list[tuple[int, float]]]:
    """The figures of metrics.jsonl: <event or set>/<name> → (update, value)."""
    found: dict[str, list[tuple[int, float]]] = {}
    for record in map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines()):
        for key, value in record.items():
            if key not in ("event", "update", "time") and isinstance(value, int | float):
                found.setdefault(f"{record.get('set', record['event'])}/{key}", []).append((record["update"], value))
    return found


def tracked(train, tracker: str, *words: str) -> Path:
    """The directory of a run of two updates that was resumed to four."""
    first = train(f"logger=[{tracker},images]", *PICTURES, *words)
    again = continued(first.run_dir, "updates=4", updates=4)
    assert tracker in json.loads((again.run_dir / "trackers.json").read_text())
    log = (again.run_dir / "log.txt").read_text()
    assert "failed" not in log, log
    return again.run_dir


def approx(points: dict[str, list[tuple[int, float]]]) -> dict[str, list]:
    return {name: [pytest.approx(point, rel=1e-6) for point in of_name] for name, of_name in points.items()}


def wandb_records(folder: Path) -> list:
    """The records of an offline run: LevelDB's log format, which wandb's own program reads, of wandb's own messages."""
    from wandb.proto.wandb_internal_pb2 import Record

    (file,) = folder.glob("*.wandb")
    content, block, found, part = file.read_bytes(), 32768, [], b""
    at = 7  # of the file's own header
    while at + 7 <= len(content):
        if block - at % block < 7:  # the rest of a block that has no room for a header
            at += block - at % block
            continue
        _, length, kind = struct.unpack("<IHB", content[at : at + 7])
        part += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # a whole record, or its last part
            record = Record()
            record.ParseFromString(part)
            found.append(record)
            part = b""
    return found


def test_wandb_offline(train, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "online")  # the run's setting counts, and nothing is sent
    run_dir = tracked(train, "wandb", "logger.wandb.project=mine", "logger.wandb.tags=[small]")
    id_of_run = json.loads((run_dir / "trackers.json").read_text())["wandb"]
    parts = sorted((run_dir / "wandb").glob("offline-run-*"))
    assert [part.name.endswith(id_of_run) for part in parts] == [True, True]
    seen: dict[str, list[tuple[int, float]]] = {}
    pictures = 0
    for part in parts:
        for record in wandb_records(part):
            if record.WhichOneof("record_type") == "run":
                assert (record.run.project, record.run.run_id, list(record.run.tags)) == ("mine", id_of_run, ["small"])
                config = {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in record.run.config.update}
                assert config["optimizer.lr"] == 0.05
            elif record.WhichOneof("record_type") == "history":
                row = {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
                pictures += sum(value == "image-file" for value in row.values())  # <name>._type
                for name, value in row.items():
                    if "/" in name:
                        seen.setdefault(name, []).append((row["update"], value))
    assert seen == approx(told(run_dir))
    assert pictures == 3  # samples once, and two evaluations


@pytest.mark.parametrize("uri", slow.but(bool, ["folder", ""]))  # a new database takes ten seconds
def test_mlflow(train, uri, tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.delenv("MLFLOW_ALLOW_FILE_STORE", raising=False)
    given = ["logger.mlflow.uri=folder"] if uri else []
    run_dir = tracked(train, "mlflow", *given, "logger.mlflow.tags=[short,'stage=small']")
    client = mlflow.MlflowClient(uri or f"sqlite:///{tmp_path / 'outputs/mlflow.db'}")
    experiment = client.get_experiment_by_name("drivetrain")
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.status, run.data.tags["stage"], run.data.tags["short"]) == ("FINISHED", "small", "true")
    assert run.data.params["optimizer.lr"] == "0.05"
    assert run.info.run_name == "-".join(run_dir.parts[-2:])
    seen = {name: [(m.step, m.value) for m in client.get_metric_history(run.info.run_id, name)] for name in run.data.metrics}
    assert {name: sorted(points) for name, points in seen.items()} == approx(told(run_dir))
    assert len(client.list_artifacts(run.info.run_id, "images")) == 3


def test_tensorboard_shows_pictures(train):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run_dir = train("logger=[tensorboard,images]", *PICTURES).run_dir
    events = EventAccumulator(str(run_dir / "tensorboard"))
    events.Reload()
    assert set(events.Tags()["images"]) == {"samples", "predictions"}
    with Image.open(run_dir / "images" / "predictions-2.png") as picture:
        assert (events.Images("predictions")[0].width, events.Images("predictions")[0].height) == picture.size


@pytest.mark.parametrize("package", ["tensorboard", "wandb", "mlflow"])
def test_a_logger_without_its_package_is_one_line(problems, lacking, package):
    lacking(package)
    (problem,) = problems(f"logger=[{package}]")
    assert f"logger={package} needs the package '{package}'" in problem
    assert f"pip install 'drivetrain[{package}]'" in problem


def test_wandb_online_without_a_login_is_one_line(problems, monkeypatch, tmp_path):
    pytest.importorskip("wandb")
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_BASE_URL", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    (problem,) = problems("logger=[wandb]", "logger.wandb.mode=online")
    assert "wandb login" in problem
    assert "WANDB_API_KEY" in problem
    (tmp_path / ".netrc").write_text("machine api.wandb.ai login user password secret\n")
    (tmp_path / ".netrc").chmod(0o600)
    assert has_login()


def test_an_mlflow_server_that_does_not_answer_is_one_line(problems):
    pytest.importorskip("mlflow")
    (problem,) = problems("logger=[mlflow]", "logger.mlflow.uri=http://localhost:9")
    assert "http://localhost cannot be reached" in problem


def test_images_are_refused_where_there_are_none(problems):
    (problem,) = problems("logger=[images]", "data=stdlib", "loss=next_token", "model=gpt")
    assert "sequences of tokens" in problem
    (problem,) = problems("logger=[images]", "parallel=fsdp", "parallel.nproc=2")
    assert "logger.images.predictions=0" in problem
    with pytest.raises(UserError, match="3 channels"):
        drivetrain.train(["data=synthetic", "data.shape=[5,8,8]", "model=mlp", "logger=[images]", "updates=1"])


def test_the_pictures_show_what_the_model_sees(train):
    """Tiles of the first micro-batch, and predictions by the weights that were evaluated: looking changes nothing in the run."""
    words = ["data=digits", "model=mlp", "augment=[mixup]", "updates=3"]
    plain, shown = train(*words), train(*words, "logger=[images]")
    assert plain.metrics == shown.metrics
    files = sorted(file.name for file in (shown.run_dir / "images").iterdir())
    assert files == ["predictions-3.png", "samples.png"]


@pytest.mark.parametrize(
    ("target", "kind", "names", "said"),
    [
        (1, "class", ["cat", "dog"], ["dog"]),
        ([0.6, 0.4], "class", ["cat", "dog"], ["cat: 60%", "dog: 40%"]),  # of two samples that were mixed
        ([1.0, 0.0], "class", None, ["0: 100%"]),
        ([1.0, 0.0, 1.0], "labels", ["a", "b", "c"], ["a, c"]),
        ([0.0, 0.0], "labels", ["a", "b"], ["none"]),
        ([0.123456, 2.0], "values", None, ["0.1235", "2"]),
        ([[0, 1], [1, -100]], "mask", ["sky", "tree"], ["tree: 67%", "sky: 33%"]),
    ],
)
def test_a_target_in_words(target, kind, names, said):
    assert drawing.in_words(torch.tensor(target), kind, names) == said


def test_evaluations_that_come_again_are_there_once(tmp_path: Path) -> None:
    """A kill after the last evaluation: the resumed run makes it again, as it makes those of the run's end."""
    log = Files()

    def record(event: str, update: int, **more: str) -> None:
        log.log({"event": event, "update": update, **more})

    log.start(tmp_path, 0)
    for update in (1, 2, 3):
        record("train", update)
    record("evaluate", 2, set="validation")
    record("evaluate", 3, set="validation")
    record("evaluate", 3, set="test", weights="final")
    log.close()

    def kept(evaluated: int) -> list[tuple[str, int, str]]:
        log = Files()
        log.start(tmp_path, 3, evaluated)
        log.close()
        lines = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
        return [(r["event"], r["update"], r.get("set", "")) for r in lines]

    trained = [("train", 1, ""), ("train", 2, ""), ("train", 3, ""), ("evaluate", 2, "validation")]
    assert kept(3) == [*trained, ("evaluate", 3, "validation")]
    assert kept(2) == trained, "the checkpoint was saved before the evaluation"
