"""A rehearsal finds what would end a long run, or make its resume another one: planted faults, each with what names it."""

import json
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from drivetrain.cli import main
from drivetrain.measure import rehearse
from tests.support import command
from tests.support.put import put

FAULTS = """
import os, random, signal, time
import torch
import drivetrain

X = torch.randn(64, 5, generator=torch.Generator().manual_seed(0))
Y = (X[:, 0] > 0).long()


class Rows(torch.utils.data.Dataset):
    num_classes = 2

    def __init__(self, split="train"):
        self.rows = range(64) if split == "train" else range(32)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, number):
        return X[number], Y[number]


class Entropy(Rows):
    def __getitem__(self, number):
        x, y = super().__getitem__(number)
        return x + random.SystemRandom().random(), y


class HashOrder(Rows):
    def __getitem__(self, number):
        x, y = super().__getitem__(number)
        return x * next(iter({"1.0", "1.5", "2.0", "0.5", "0.25"})).__len__() + hash("a") % 7, y


class Unreadable(Rows):
    def __getitem__(self, number):
        if number == 63:
            raise OSError("the last file is cut off")
        return super().__getitem__(number)


class Loss:
    def __init__(self):
        self.calls = 0

    def __call__(self, output, target):
        self.calls += 1
        return torch.nn.functional.cross_entropy(output, target) * (1 + self.calls)


class Watch(drivetrain.Callback):
    def evaluation(self, event):
        raise RuntimeError("no figure of that name")


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(5, 2)

    def forward(self, x):
        if not torch.compiler.is_compiling():
            return self.layer(x)
        return self.layer(torch.tensor(x.tolist()))


class Rank:
    def __call__(self, output, target):
        group = torch.distributed
        rank = group.get_rank() if group.is_initialized() else 0
        return torch.nn.functional.cross_entropy(output, target) * (1 + rank)


class Clock(Rows):
    def __getitem__(self, number):
        x, y = super().__getitem__(number)
        return x * (1 + time.time() % 1), y


class Counts(Rows):
    calls = 0

    def __getitem__(self, number):
        self.calls += 1
        x, y = super().__getitem__(number)
        return x + 0.001 * self.calls, y


class Shape(Rows):
    def __getitem__(self, number):
        x, y = super().__getitem__(number)
        return (x[:4] if number == 63 else x), y


class Label(Rows):
    def __getitem__(self, number):
        x, y = super().__getitem__(number)
        return x, torch.tensor(7) if number == 63 else y


class Nan(Rows):
    def __getitem__(self, number):
        x, y = super().__getitem__(number)
        return x * float("nan") if number == 63 else x, y


class Stubborn(Rows):
    def __getitem__(self, number):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        return super().__getitem__(number)


class Unsaved(Rows):
    def state_dict(self):
        return {"draw": lambda: 0}

    def load_state_dict(self, state):
        pass


class Slow(drivetrain.Callback):
    def end(self, event):
        time.sleep(33)


class Drift(drivetrain.Callback):
    calls, every_update, needs_model = 0, True, True

    def update(self, event):
        self.calls += 1
        with torch.no_grad():
            next(event.model.parameters()).add_(1e-3 * self.calls)


class Saves(drivetrain.Callback):
    def save(self, event):
        raise OSError("no right to write there")


def wanted(output, target):
    raise KeyError("a class that the test set lacks")


class Forgets(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.calls = torch.nn.Linear(5, 2), 0

    def forward(self, x):
        self.calls += self.training
        return self.layer(x) * (1 + 0.01 * self.calls)


class Drops(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.layer = torch.nn.Linear(5, 5), torch.nn.Linear(5, 2)

    def forward(self, x):
        return self.layer(self.first(x))

    def state_dict(self, *args, **kwargs):
        return {name: value for name, value in super().state_dict(*args, **kwargs).items() if "first" not in name}


class Noise(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(5, 2)

    def forward(self, x):
        draws = torch.Generator()
        draws.seed()
        return self.layer(x + torch.randn(x.shape, generator=draws))


class Tuple(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(5, 2)

    def forward(self, x):
        return self.layer(x) if self.training else (self.layer(x), x)


class Hungry(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(5, 2)

    def forward(self, x):
        if not self.training and not torch.compiler.is_compiling():
            torch.empty(2**50)
        return self.layer(x)


class Fails(Net):
    def forward(self, x):
        if not self.training and not torch.is_grad_enabled() and len(x) > 4:
            raise RuntimeError("only in an evaluation")
        return super().forward(x)
"""
OWN = (
    "data=own", "trust=[planted]", "data.target=planted.{}", "data.validation=test", "model=mlp", "model.hidden=[4]",
    "batch.global_batch=8", "runtime.device=cpu", "log_every=1",
)  # fmt: skip


def rehearsed(tmp_path, *words: str, dataset: str = "Rows") -> dict[str, tuple[str, str]]:
    """Rehearse; step → mark and what is said. The exit code says whether all hold."""
    (tmp_path / "planted.py").write_text(FAULTS)
    groups = {word.split("=")[0] for word in words}
    given = [word.format(dataset) for word in OWN if not {word.split("=")[0], word.split(".")[0]} & groups]
    done = command.run("rehearse", *given, *words, cwd=tmp_path, env={"PYTHONPATH": str(tmp_path)})
    (file,) = tmp_path.rglob("rehearse.json")
    found = {row["step"]: (row["mark"], row["found"]) for row in json.loads(file.read_text())["steps"]}
    assert done.code == int(any(mark == "✘" for mark, _ in found.values())), done
    assert not list(tmp_path.glob("outputs/*-*-*")), "its small runs are gone"
    return found


def wrong(found: dict[str, tuple[str, str]]) -> dict[str, str]:
    return {step: said for step, (mark, said) in found.items() if mark == "✘"}


def test_a_run_that_will_survive(tmp_path):
    found = rehearsed(tmp_path)
    assert wrong(found) == {}
    assert found["every sample can be read"] == ("✔", "all 128 samples")
    mark, said = found["killed and resumed, it computes the same bits"]
    assert (mark, said.rpartition(" ")[0]) == ("✔", "bit for bit, at update")
    assert int(said.rpartition(" ")[2]) > rehearse.KILLED_AT + 1  # what was computed after the kill
    assert found["its trackers can be reached"] == ("–", "it has none")
    assert [mark for mark, _ in found.values()].count("–") == 3


READ, TRAIN, REPEAT, RESUME, RANKS, EXPORT = (
    "every sample can be read", "it trains, evaluates, saves, and stops when told", "another process computes the same bits",
    "killed and resumed, it computes the same bits", "its ranks compute what one process does",
    "it can be exported",
)  # fmt: skip
TWO = ("parallel=ddp", "parallel.nproc=2")


def net(name: str) -> tuple[str, str]:
    return "model=own", f"model.target=planted.{name}"


PLANTED = {
    "draws of the system": ((), "Entropy", REPEAT, "values differ"),
    "the order of a set": ((), "HashOrder", REPEAT, "values differ"),
    "a clock": ((), "Clock", REPEAT, "values differ"),
    "draws of a generator without a seed": (net("Noise"), "Rows", REPEAT, "values differ"),
    "a Dataset that counts": ((), "Counts", RESUME, "values differ"),
    "a loss that counts": (("loss=own", "loss.target=planted.Loss"), "Rows", RESUME, "values differ"),
    "a network that counts": (net("Forgets"), "Rows", RESUME, "values differ"),
    "a callback that counts": (("callbacks=[planted.Drift]",), "Rows", RESUME, "values differ"),
    "a file that cannot be read": ((), "Unreadable", READ, "the last file is cut off"),
    "a sample of another shape": ((), "Shape", READ, "x has the shapes [4] and [5]"),
    "a class that there is not": ((), "Label", TRAIN, "7"),
    "a sample that is not finite": ((), "Nan", TRAIN, "nan"),
    "a state that cannot be saved": ((), "Unsaved", TRAIN, "lambda"),
    "a signal that is ignored": (("epochs=40",), "Stubborn", TRAIN, "did not stop at SIGTERM"),
    "a stop that takes too long": (("callbacks=[planted.Slow]",), "Rows", TRAIN, "s after SIGTERM"),
    "a callback at an evaluation": (("callbacks=[planted.Watch]",), "Rows", TRAIN, "no figure of that name"),
    "a callback at a save": (("callbacks=[planted.Saves]",), "Rows", TRAIN, "no right to write there"),
    "a metric": (("metrics=[own]", "metrics.own.target=planted.wanted"), "Rows", TRAIN, "a class that the test set lacks"),
    "a forward of evaluations": (net("Fails"), "Rows", TRAIN, "only in an evaluation"),
    "the memory of evaluations": (net("Hungry"), "Rows", TRAIN, "memory"),
    "other outputs of evaluations": (net("Tuple"), "Rows", TRAIN, ""),
    "weights that are not saved": (net("Drops"), "Rows", RESUME, ""),
    "a loss of the rank": (("loss=own", "loss.target=planted.Rank", *TWO), "Rows", RANKS, "differs"),
    "an export": (net("Net"), "Rows", EXPORT, ""),
    "a tracker that is not there": (
        ("logger=[files,mlflow]", "logger.mlflow.uri=http://127.0.0.1:9"),
        "Rows",
        TRAIN,
        "cannot be reached",
    ),
}


@pytest.mark.parametrize("fault", PLANTED)
@pytest.mark.slow
def test_a_planted_fault_is_found(tmp_path, fault):
    words, dataset, step, says = PLANTED[fault]
    found = wrong(rehearsed(tmp_path, *words, dataset=dataset))
    assert says in found[step], found


def test_a_disk_that_holds_two_checkpoints_and_not_three(tmp_path, monkeypatch):
    saved = tmp_path / "whole" / "checkpoints" / "2"
    put(saved / "weights", bytes(100))
    (tmp_path / "whole" / "recipe.yaml").touch()
    monkeypatch.setattr(rehearse.manifest, "checkpoints", lambda _: [saved])
    run = SimpleNamespace(saving=SimpleNamespace(keep=2), values={"output_dir": str(tmp_path)})
    found = rehearse.RehearsedRun(SimpleNamespace(run=run), (), (), tmp_path, 0.0)
    for free, fits in ((300, True), (299, False)):
        monkeypatch.setattr(rehearse.shutil, "disk_usage", lambda _, free=free: SimpleNamespace(free=free))
        with nullcontext() if fits else pytest.raises(rehearse.Wrong, match=r"lower saving\.keep"):
            found.disk()


@pytest.mark.slow
def test_it_is_rehearsed_where_a_launcher_starts_jobs(tmp_path):
    assert wrong(rehearsed(tmp_path, "hydra/launcher=submitit_local", "hydra.launcher.timeout_min=9")) == {}
    assert list(tmp_path.glob("outputs/rehearse/submitit/*/*.out"))


def test_what_cannot_be_rehearsed_is_refused(refused):
    assert "by submitit_slurm or submitit_local" in refused("rehearse", "model=mlp", "hydra/launcher=joblib")
    assert main.main(["rehearse", "model=nope"]) == 2
    assert "budget=soon is no time" in refused("rehearse", "budget=soon")


def test_where_no_time_is_left_steps_are_not_begun(monkeypatch, capsys):
    monkeypatch.setattr(rehearse.RehearsedRun, "data", lambda self: "x")
    ticks = iter(range(0, 100_000, 50))
    monkeypatch.setattr(rehearse.time, "monotonic", lambda: next(ticks))
    assert main.main(["rehearse", "model=mlp", "runtime.device=cpu", "budget=10s"]) in (0, 1)
    assert "no time was left (budget=10s)" in capsys.readouterr().out
