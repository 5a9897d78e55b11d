"""hydra/launcher=ray: a sweep's jobs as tasks of a cluster. Where Ray is not installed, what it is asked for is answered here."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import json
import multiprocessing
import os
import signal
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from drivetrain.core.errors import UserError
from drivetrain.sweeps import launchers
from drivetrain.sweeps.launchers import OnRay
from drivetrain.sweeps.options import Ray, split
from tests.support import command
from tests.support.waiting import until

SMALL = ["data=synthetic", "data.samples=64", "model=mlp", "model.hidden=[8]", "epochs=2", "batch.global_batch=16",
         "runtime.threads=1"]  # fmt: skip


class FakeRay(ModuleType):
    """The calls of Ray that a launcher makes: a task is a forked process, as Ray's fresh workers are processes."""

    class exceptions:
        class RayError(Exception):
            pass

    def __init__(self) -> None:
        super().__init__("ray")
        self.__spec__ = importlib.machinery.ModuleSpec("ray", None)
        self.asked: dict[str, Any] = {}
        self.cancelled: list[Any] = []

    def init(self, **given: Any) -> None:
        self.asked |= given
        if given["address"] == "nowhere:1":
            raise ConnectionError("ray.init\nfailed to connect")

    def remote(self, **given: Any) -> Any:
        self.asked |= given
        return lambda function: SimpleNamespace(remote=lambda *args: self.start(function, args))

    def start(self, function: Any, args: Any) -> Any:
        process = multiprocessing.get_context("fork").Process(target=lambda: os._exit(function(*args)))
        process.start()
        return process

    def wait(self, refs: list[Any], timeout: float) -> tuple[list[Any], list[Any]]:
        multiprocessing.connection.wait([ref.sentinel for ref in refs], timeout)
        done = [ref for ref in refs if not ref.is_alive()]
        return done, [ref for ref in refs if ref not in done]

    def get(self, ref: Any) -> int:
        ref.join()
        if ref.exitcode < 0:
            raise self.exceptions.RayError("a worker\nThe worker died unexpectedly")
        return int(ref.exitcode)

    def cancel(self, ref: Any, force: bool) -> None:
        self.cancelled.append((ref, force))
        os.kill(ref.pid, signal.SIGINT)


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    fake = FakeRay()
    monkeypatch.setitem(sys.modules, "ray", fake)
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    return fake


def entry(folder: Path, ends: list[Any]) -> Any:
    folder.mkdir()
    return SimpleNamespace(number=folder.name, run_dir=folder, close=lambda *how: ends.append(how))


def test_a_sweep_runs_in_a_cluster(ray: FakeRay, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    """Each job is composed where it runs, has its output in its folder, and asks for what a job takes."""
    from drivetrain.cli import main

    monkeypatch.chdir(tmp_path)
    words = ["hydra/launcher=ray", "hydra.launcher.num_cpus=2", "hydra.launcher.num_gpus=0.5"]
    assert main.main(["train", "-m", *SMALL, "optimizer=sgd,adamw", *words]) == 0
    results = [json.loads(file.read_text()) for file in sorted(tmp_path.glob("outputs/multirun/*/*/*/result.json"))]
    assert [each["status"] for each in results] == ["completed"] * 2
    assert {word for each in results for word in each["overrides"] if word.startswith("optimizer")} == {
        "optimizer=sgd", "optimizer=adamw"
    }  # fmt: skip
    assert len([*tmp_path.glob("outputs/multirun/*/*/*/output.txt")]) == 2
    assert {key: ray.asked[key] for key in ("address", "num_cpus", "num_gpus", "max_calls", "max_retries")} == {
        "address": "local", "num_cpus": 2, "num_gpus": 0.5, "max_calls": 1, "max_retries": 0
    }  # fmt: skip
    assert "src" in ray.asked["runtime_env"]["env_vars"]["PYTHONPATH"]
    assert "2 jobs in" in capfd.readouterr().out


def test_a_job_whose_worker_dies_and_one_that_is_stopped(ray: FakeRay, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ends: list[Any] = []

    def job(sweep: Path, number: int, *_: Any) -> int:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # a fork may drop what is raised while it begins
        (sweep / f"{number}.up").touch()
        signal.pause()
        return 0

    monkeypatch.setattr(launchers, "_on_ray", job)
    launcher = OnRay(Ray(address="auto"), tmp_path, 2)
    jobs = [entry(tmp_path / name, ends) for name in "ab"]
    launcher.start(jobs)
    until(lambda: len([*tmp_path.glob("*.up")]) == 2)
    assert launcher.wait(0.0) == []
    launcher.signal(signal.SIGTERM)
    ended: list[Any] = []
    while len(ended) < 2:
        ended += launcher.wait(1.0, stopped=True)
    assert {force for _, force in ray.cancelled} == {False}  # so that it saves
    assert len(ends) == 2
    for code, error, status in ends:
        assert code is None or code > 0
        assert status == "interrupted"
        assert error.startswith("the job's task in Ray ended without a result")


def test_a_cluster_that_is_not_there(ray: FakeRay, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="address=nowhere:1: no Ray cluster is reached there: failed to connect"):
        OnRay(Ray(address="nowhere:1"), tmp_path, 1)


def test_its_settings() -> None:
    settings, words = split(["epochs=1", "hydra/launcher=ray", "hydra.launcher.address=auto"], check=False)
    assert (settings.launcher, words) == (Ray("auto"), ["epochs=1"])
    if importlib.util.find_spec("ray") is None:
        with pytest.raises(UserError, match=r"needs the package 'ray', .* pip install 'drivetrain\[ray\]'"):
            split(["hydra/launcher=ray"])


@pytest.mark.slow
def test_a_real_cluster_on_this_machine(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'drivetrain[ray]'")
    done = command.train("-m", *SMALL, "optimizer=sgd,adamw", "hydra/launcher=ray", cwd=tmp_path)
    assert done.code == 0, done
    results = [json.loads(file.read_text()) for file in tmp_path.glob("outputs/multirun/*/*/*/result.json")]
    assert [each["status"] for each in results] == ["completed"] * 2
