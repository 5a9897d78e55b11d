"""A rehearsal finds what would end a long run, or make its resume another one: planted faults, each with what names it."""

import json

import pytest

from drivetrain.cli import main
from drivetrain.measure import rehearse
from tests.support import command

FAULTS = """
import itertools, os, random
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
    assert [mark for mark, _ in found.values()].count("–") == 2


@pytest.mark.parametrize(
    ("words", "dataset", "step", "says"),
    [
        ((), "Entropy", "another process computes the same bits", "values differ"),
        ((), "Unreadable", "every sample can be read", "the last file is cut off"),
        (("loss=own", "loss.target=planted.Loss"), "Rows", "killed and resumed, it computes the same bits", "values differ"),
        (
            ("callbacks=[planted.Watch]",),
            "Rows",
            "it trains, evaluates, saves, and stops when told",
            "no figure of that name",
        ),
        (("model=own", "model.target=planted.Net"), "Rows", "it can be exported", ""),
        (
            ("model=own", "model.target=planted.Fails"),
            "Rows",
            "it trains, evaluates, saves, and stops when told",
            "only in an evaluation",
        ),
    ],
)
@pytest.mark.slow
def test_a_planted_fault_is_found(tmp_path, words, dataset, step, says):
    found = wrong(rehearsed(tmp_path, *words, dataset=dataset))
    assert says in found[step], found


def test_what_cannot_be_rehearsed_is_refused(tmp_path, capsys):
    assert main.main(["rehearse", "model=nope"]) == 2
    assert main.main(["rehearse", "budget=soon"]) == 2
    assert "budget=soon is no time" in capsys.readouterr().err


def test_where_no_time_is_left_steps_are_not_begun(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(rehearse.RehearsedRun, "data", lambda self: "x")
    ticks = iter(range(0, 100_000, 50))
    monkeypatch.setattr(rehearse.time, "monotonic", lambda: next(ticks))
    assert main.main(["rehearse", "model=mlp", "runtime.device=cpu", "budget=10s"]) in (0, 1)
    assert "no time was left (budget=10s)" in capsys.readouterr().out
