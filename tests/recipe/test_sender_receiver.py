"""A sender's recipe arrives at a receiver through every place: as the same config, and as the same weights."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from drivetrain.cli.main import main
from drivetrain.launch.job import prepare
from drivetrain.recipe import fetch
from tests.support.command import empty, only_run, run, train
from tests.support.places import Site, site

COMMIT = "0123456789abcdef0123456789abcdef01234567"
KNOBS = [
    "data=digits",
    "model=mlp",
    "model.hidden=[16]",
    "precision=bf16",
    "optimizer.lr=0.03",
    "updates=12",
    "runtime.threads=1",
]


@dataclass
class Sender:
    """Someone with a recipe, and the places that they can put it."""

    place: Path
    host: Site
    recipe: Path  # exported from a run
    there: Path  # the working directory of the receiver

    def file(self) -> list[str]:
        return [f"recipe={self.recipe}"]

    def name(self) -> list[str]:
        (self.there / "shared.yaml").write_bytes(self.recipe.read_bytes())
        return ["recipe=shared"]

    def web(self) -> list[str]:
        text = self.recipe.read_bytes()
        return [f"recipe={self.host.has('/shared.yaml', text)}#sha256={fetch.sha256_of(text)}"]

    def hub(self) -> list[str]:
        pytest.importorskip("huggingface_hub")
        self.host.has(f"/me/recipes/resolve/{COMMIT}/shared.yaml", self.recipe.read_bytes())
        return [f"recipe=hf://me/recipes@{COMMIT}/shared.yaml"]


WAYS = {
    "file": Sender.file, "name": Sender.name, "web": Sender.web, "hub": Sender.hub,
}  # fmt: skip


@pytest.fixture
def host() -> Iterator[Site]:
    with site() as served:
        yield served


def receiver(tmp_path: Path, host: Site) -> dict[str, str]:
    """The environment of somebody else: another home, another cache, and this hub."""
    return {"XDG_CACHE_HOME": str(tmp_path / "theirs"), "XDG_STATE_HOME": str(tmp_path / "them"), "HF_ENDPOINT": host.url}


def test_the_same_config_arrives_through_every_place(tmp_path, host, monkeypatch, capsys):
    run_dir = empty(tmp_path / "sender" / "run")
    job = prepare([*KNOBS, "runtime.device=cpu"])
    job.write_files(run_dir)
    assert main(["recipe", "export", str(run_dir), str(tmp_path / "sender" / "shared.yaml")]) == 0
    sender = Sender(tmp_path / "sender", host, tmp_path / "sender" / "shared.yaml", empty(tmp_path / "receiver"))
    monkeypatch.chdir(sender.there)
    for name, value in receiver(tmp_path, host).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("sys.path", [*__import__("sys").path])
    hashes = {name: prepare([*way(sender), "runtime.device=cpu"]).config_hash for name, way in WAYS.items()}
    assert hashes == dict.fromkeys(WAYS, job.config_hash)
    assert prepare([*sender.file(), "runtime.device=cpu", "optimizer.lr=0.04"]).config_hash != job.config_hash


@pytest.mark.slow
@pytest.mark.own_process
@pytest.mark.parametrize("way", WAYS.values(), ids=list(WAYS))
def test_the_same_weights_come_out_on_the_other_side(tmp_path, host, way: Callable[[Sender], list[str]]):
    here, there = empty(tmp_path / "sender"), empty(tmp_path / "receiver")
    done = train(*KNOBS, "runtime.device=cpu", cwd=here)
    assert done.code == 0, done
    sent = only_run(here / "outputs")
    exported = run("recipe", "export", str(sent), "shared.yaml", cwd=here)
    assert exported.code == 0, exported
    words, env = way(Sender(here, host, here / "shared.yaml", there)), receiver(tmp_path, host)
    line = shlex.join(["train", "-q", *words, "runtime.device=cpu", "runtime.threads=1"])
    done = run(*shlex.split(line), cwd=there, env=env)
    assert done.code == 0, done
    received = only_run(there / "outputs")
    hashes = [json.loads((each / "environment.json").read_text())["config_hash"] for each in (sent, received)]
    assert hashes[0] == hashes[1]
    ours, theirs = (weights(each) for each in (sent, received))
    assert ours.keys() == theirs.keys()
    assert all(ours[name].equal(theirs[name]) for name in ours)
    asked = len(host.asked)
    again = run("recipe", "check", words[0].removeprefix("recipe="), *words[1:], cwd=there, env=env)
    assert (again.code, again.err, len(host.asked)) == (0, "", asked)  # from the cache, and not shown again


def weights(run_dir: Path) -> dict[str, Any]:
    """The weights of a run's last checkpoint."""
    import safetensors.torch

    newest = max((run_dir / "checkpoints").glob("[0-9]*"), key=lambda path: int(path.name))
    (file,) = newest.glob("*.safetensors")
    return dict(safetensors.torch.load_file(file))
