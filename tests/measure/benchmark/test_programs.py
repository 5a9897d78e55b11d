"""Any program compared as it is: where its figures are, revisions of its code, verdicts and exit codes."""

import json
import subprocess
import sys
from collections import Counter

import pytest
from bench import verdicts as simulated

from drivetrain.cli import main
from drivetrain.measure.benchmark import programs
from drivetrain.measure.benchmark.figures import FigureSource, Unmeasured

PROGRAM = """
import argparse, csv, json, os, random, sys
words = argparse.ArgumentParser()
words.add_argument("--seed", type=int, required=True)
words.add_argument("--gain", type=float, default=0.0)
words.add_argument("--out")
words.add_argument("--broken", action="store_true")
given = words.parse_args()
if given.broken:
    sys.exit("no such file")
BASE = 0.8
value = BASE + 0.02 * random.Random(given.seed).gauss(0, 1) + given.gain
value += 0.002 * random.Random(1000 * given.gain + given.seed).gauss(0, 1)
for epoch in range(3):
    print(f"\\x1b[1mepoch {epoch}: val_acc: {value - 0.1 * (2 - epoch):.5f}\\x1b[0m", end="\\r")
if given.out:
    json.dump({"history": [{"eval": {"accuracy": value}}]}, open(f"{given.out}/figures.json", "w"))
    csv.writer(open(f"{given.out}/log.csv", "w")).writerows([["epoch", "accuracy"], [0, ""], [1, value]])
"""
COMMAND = f"{sys.executable} program_of_tests.py --seed {{seed}} {{variant}}"
VAL_ACC = ("--metric", r"val_acc: ([\d.]+)", "--higher")


@pytest.fixture
def place(tmp_path):
    (tmp_path / "program_of_tests.py").write_text(PROGRAM)
    return tmp_path


def compare(*words: str) -> int:
    return main.main(["compare", *words])


def found(place):
    (file,) = place.rglob("compare.json")
    return json.loads(file.read_text())


@pytest.mark.parametrize(
    ("gains", "differs", "code"),
    [((0, 0.05), "BETTER", 0), ((0.05, 0), "WORSE", 4), ((0, 0), "", 5)],
    ids=["better", "worse", "same"],
)
def test_a_variant_is_better_worse_or_not_known_to_differ(place, capsys, gains, differs, code):
    variants = [word for gain in gains for word in ("--variant", f"--gain {gain}")]
    assert compare("--program", COMMAND, *variants, *VAL_ACC, "seeds=3", "max_seeds=6") == code
    (verdict,) = found(place)["verdicts"].values()
    assert verdict["differs"] == differs
    said = capsys.readouterr().out
    assert (differs or "not known to differ") in said
    assert "val_acc has several values in a run: the last one counts" in said


def test_as_good_ends_as_soon_as_that_is_known(place):
    words = ("--variant", "--gain 0", "--variant", "--gain 0.001", *VAL_ACC, "--asks", "as good", "seeds=5", "max_seeds=20")
    assert compare("--program", COMMAND, *words) == 0
    (verdict,) = found(place)["verdicts"].values()
    assert (verdict["outcome"], len(verdict["runs"])) == ("PASS", 5)


@pytest.mark.parametrize("metric", ["{out}/figures.json:history.eval.accuracy", "{out}/log.csv:accuracy"])
def test_a_figure_may_be_in_a_file(place, metric):
    program = f"{COMMAND} --out {{out}}"
    assert (
        compare(
            "--program", program, "--variant", "--gain 0", "--variant", "--gain 0.1", "--metric", metric, "--higher", "seeds=3"
        )
        == 0
    )


def test_revisions_of_the_code_are_compared_in_worktrees(place, capsys, monkeypatch):
    def git(*words: str) -> None:
        subprocess.run(["git", "-c", "user.name=n", "-c", "user.email=e", *words], cwd=place, check=True, capture_output=True)

    git("init")
    git("add", "program_of_tests.py")
    git("commit", "-m", "one")
    file = place / "program_of_tests.py"
    file.write_text(file.read_text().replace("BASE = 0.8", "BASE = 0.9"))
    git("commit", "-am", "two")
    file.write_text("not python")  # as someone is at work on it
    program = COMMAND.removesuffix(" {variant}")
    assert compare("--program", program, "--code", "HEAD~1", "--code", "HEAD", *VAL_ACC, "seeds=3") == 0
    assert "HEAD: BETTER" in (said := capsys.readouterr().out)
    assert "1 changes that are not committed are in neither revision" in said
    assert file.read_text() == "not python"
    trees = subprocess.run(["git", "worktree", "list"], cwd=place, capture_output=True, text=True, check=True).stdout
    assert len(trees.splitlines()) == 1
    assert compare("--program", program, "--code", "HEAD", "--code", "nowhere", *VAL_ACC) == 2
    assert "nowhere" in capsys.readouterr().err


NET = """
import torch

class Net(torch.nn.Sequential):
    def __init__(self, shape, classes, width=WIDTH):
        super().__init__(torch.nn.Flatten(), torch.nn.LazyLinear(width), torch.nn.ReLU(), torch.nn.Linear(width, classes))
        self(torch.zeros(1, *shape))
"""
OWN_RUN = (
    "model=own",
    "model.target=nets_of_tests.Net",
    "trust=[nets_of_tests]",
    "epochs=2",
    "runtime.device=cpu",
    "optimizer.lr=0.01",
)


@pytest.mark.slow
def test_a_run_of_drivetrain_is_compared_by_revisions_of_its_code(place, capsys, monkeypatch):
    monkeypatch.syspath_prepend(place)
    for width, message in ((2, "one"), (64, "two")):
        (place / "nets_of_tests.py").write_text(NET.replace("WIDTH", str(width)))
        for words in (("init",), ("add", "nets_of_tests.py"), ("commit", "-m", message)):
            subprocess.run(["git", "-c", "user.name=n", "-c", "user.email=e", *words], cwd=place, check=True, capture_output=True)
    assert compare("--code", "HEAD~1", "--code", "HEAD", *OWN_RUN, "quality=true", "seeds=3", "max_seeds=3") == 0
    assert "HEAD: BETTER, as good: PASS; better by" in capsys.readouterr().out


@pytest.mark.parametrize(("words", "of_set"), [((), "validation"), (("data.validation=null",), "test")])
def test_the_figure_of_a_run_of_drivetrain_is_what_it_is_judged_by(words, of_set, place, monkeypatch):
    monkeypatch.syspath_prepend(place)
    subprocess.run(["git", "init"], cwd=place, check=True, capture_output=True)
    options = programs.of_own_run(programs.Options(code=["a", "b"]), ["model=mlp", *words], [])
    assert list(options.problems()) == []
    assert options.metric == f"{{out}}/*/*/result.json:metrics.{of_set}.final.accuracy"
    assert options.higher
    assert f"{place}:" not in str(options.program), "a module that a revision has not is not the checkout's"
    assert FigureSource(str(options.metric), True).name == "accuracy"


def test_a_ledger_makes_each_further_try_harder_and_what_is_held_out_is_read_at_the_end(place, capsys):
    held = ("--holdout-metric", r"epoch 0: val_acc: ([\d.]+)")
    levels = []
    for gain in (0.05, 0.0):
        code = compare(
            "--program", COMMAND, "--variant", "--gain 0", "--variant", f"--gain {gain}", *VAL_ACC, *held,
            "--ledger", "tries.jsonl", "seeds=3", "max_seeds=3",
        )  # fmt: skip
        assert code == (0 if gain else 5)
        said = capsys.readouterr().out
        assert ("epoch of --gain 0.05: 0.6" in said) == bool(gain)
        assert ("was not looked at: no variant is kept" in said) == (not gain)
        levels = [json.loads(line)["alpha"] for line in (place / "tries.jsonl").read_text().splitlines()]
    assert levels == pytest.approx([0.05 / 2, 0.05 / 6])


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--variant", "a", "--variant", "b", *VAL_ACC), "--program has no {variant}"),
        ((*VAL_ACC,), "there is nothing to compare"),
        (("--metric", "val_acc: .*", "--higher"), "has 0 groups: put round brackets"),
        (("--metric", "val_acc: ([", "--higher"), "is no regular expression"),
        (("--metric", "a: (.*)"), "say --higher"),
        ((*VAL_ACC, "--budget", "soon"), "--budget soon is no time"),
        ((*VAL_ACC, "epochs=3"), "'epochs=3' is no setting of compare --program"),
    ],
)
def test_what_cannot_be_compared_is_refused_before_anything_runs(place, capsys, words, says):
    program = f"{sys.executable} program_of_tests.py --seed {{seed}} && echo"
    assert compare("--program", program, *words) == 2
    errors = capsys.readouterr().err
    assert says in errors
    assert "&& has no effect" in errors or "no setting" in says
    assert not (place / "outputs").exists()


def test_a_program_without_seed_noise_and_one_that_fails_are_said_to_be(place, capsys):
    same = COMMAND.replace("{seed}", "3 {variant}").replace("{variant} {variant}", "{variant}")
    words = ("--variant", "--gain 0", "--variant", "--gain 0.1", *VAL_ACC, "seeds=3", "max_seeds=3")
    assert compare("--program", f"env S={{seed}} {same}", *words) == 0
    assert "it does not depend on the seed" in capsys.readouterr().out
    assert compare("--program", COMMAND, "--variant", "--broken", "--variant", "--gain 0", *VAL_ACC) == 1
    assert "--broken failed, and the others were not judged: exit code 1: no such file" in (said := capsys.readouterr().out)
    assert said.count("exit code 1") == 1
    assert compare("--program", COMMAND, "--variant", "--gain 0", "--variant", "--broken", *VAL_ACC, "seeds=2") == 4
    assert "--broken: not known to differ, as good: FAIL; the run with seed 0 ended: exit code 1" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("given", "output", "says"),
    [
        (r"acc: (\S+)", "acc: high", "finds 'high' in its output, which is no number"),
        (r"acc: (\S+)", "acc: nan", "acc is nan"),
        (r"acc: (\S+)", "loss: 1\nend", "no line of its output matches 'acc: (\\\\S+)'; the last ones: loss: 1 | end"),
        ("old.json:a", "", "old.json is older than the run"),
        ("no.json:a", "", "it left no "),
        ("new.json:a.b", "", "has no number at a.b; it has c"),
    ],
)
def test_a_figure_that_is_none_says_why(tmp_path, given, output, says):
    (tmp_path / "old.json").write_text('{"a": 1}')
    began = (tmp_path / "old.json").stat().st_mtime + 1
    (tmp_path / "new.json").write_text('{"c": 1}')
    with pytest.raises(Unmeasured) as raised:
        FigureSource(given, True).read(output, tmp_path, tmp_path, began if given.startswith("old") else 0.0)
    assert says in str(raised.value)


def test_verdicts_are_wrong_in_five_of_a_hundred_at_most_and_see_what_there_is():
    """The short form of `python -m bench.verdicts`: the worst places of each error, with its own uncertainty."""
    import numpy as np

    for shared in (0.0, 0.9):
        at_margin = Counter(simulated.compared(np.random.default_rng(n), shared, 2.0, "as good")[0] for n in range(100))
        assert at_margin["PASS"] <= 9  # 5 of 100, and chance
        same = Counter(simulated.compared(np.random.default_rng(n), shared, 0.0, "better")[1] for n in range(100))
        assert same["BETTER"] <= 9
        far = Counter(simulated.compared(np.random.default_rng(n), shared, -2.0, "better")[1] for n in range(30))
        assert far["BETTER"] >= 28
    assert programs.UNDECIDED == 5
