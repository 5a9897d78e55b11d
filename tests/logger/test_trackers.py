"""Each tracker's files, read back by its own library: they hold what metrics.jsonl holds, and a resume continues the run."""

import json
import struct
from pathlib import Path

import pytest
from PIL import Image

import drivetrain
from drivetrain.config import validate as check
from drivetrain.logger.wandb import has_login
from tests.support import slow

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
    assert first.status == "completed", first.error
    again = drivetrain.train([f"resume={first.run_dir}", "updates=4"])
    assert (again.status, again.updates) == ("completed", 4), again.error
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


@pytest.mark.parametrize("package", ["wandb", "mlflow"])
def test_a_tracker_without_its_package_is_one_line(problems, package, monkeypatch):
    import importlib.util

    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == package else find_spec(name, *a))
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
    result = None
    with pytest.raises(check.UserError, match="3 channels"):
        result = drivetrain.train(["data=synthetic", "data.shape=[5,8,8]", "model=mlp", "logger=[images]", "updates=1"])
    assert result is None


def test_the_pictures_show_what_the_model_sees(train, make):
    """Tiles of the first micro-batch, and predictions by the weights that were evaluated: looking changes nothing in the run."""
    words = ["data=digits", "model=mlp", "augment=[mixup]", "updates=3"]
    plain, shown = train(*words), train(*words, "logger=[images]")
    assert plain.metrics == shown.metrics
    files = sorted(file.name for file in (shown.run_dir / "images").iterdir())
    assert files == ["predictions-3.png", "samples.png"]
