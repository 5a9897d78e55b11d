"""The benchmarks run: short forms of both, their markers, and their arithmetic. Nothing here judges a time."""

import importlib
import json
import pkgutil
import subprocess
import sys
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import bench
import pytest
from bench import cards, harness, overhead, startup, techniques

from drivetrain.cli.list import show
from drivetrain.config import catalog
from drivetrain.measure.benchmark import variants
from drivetrain.measure.benchmark.compare import Row
from drivetrain.measure.intervals import Interval
from tests.support import pairwise

ROOT = Path(__file__).resolve().parent.parent
WITHOUT_PEERS = """
import importlib.util, sys
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name in ("lightning", "accelerate") else find(name, *rest)
from bench.overhead import main
sys.exit(main())
"""


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True, check=False)


def read(file: Path, done: subprocess.CompletedProcess[str]) -> Any:
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(file.read_text())


@pytest.mark.parametrize(
    "name", sorted(m.name for m in pkgutil.walk_packages(bench.__path__, "bench.") if "__main__" not in m.name)
)
def test_every_benchmark_finds_what_it_imports(name: str) -> None:
    importlib.import_module(name)


@pytest.mark.slow
def test_overhead_measures_what_is_there_and_names_what_is_not(tmp_path: Path) -> None:
    out = tmp_path / "o.json"
    done = run(
        "-c", WITHOUT_PEERS, "--quick", "--rounds", "2", "--variants", "ours", "accelerate", "lightning", "--out", str(out)
    )
    content = read(out, done)
    assert set(content["skipped"]) == {"accelerate", "lightning"}
    assert "skipped lightning: lightning is not installed" in done.stdout
    assert list(content["groups"]) == ["bare", "everyday"]
    for figures in content["groups"].values():
        assert set(figures["variants"]) == {"hand", "ours"}
        for variant in figures["variants"].values():
            assert variant["trained"]
            assert variant["updates"] == 20 * 3  # one warm-up block, two measured
            assert variant["loss_last"] < variant["loss_first"]
        assert figures["variants"]["hand"]["to_hand"]["ratio"]["median"] == 1
        assert len(figures["blocks_us"]["wall"]["ours"]) == 2
        assert min(figures["blocks_us"]["wall"]["ours"]) > 0


@pytest.mark.slow
def test_startup_measures(tmp_path: Path) -> None:
    out = tmp_path / "s.json"
    found = read(out, run("-m", "bench.startup", "--quick", "--out", str(out)))["starts"]
    first = found[startup.RUN]
    assert 0 < first["ready"]["median"] < first["wall"]["median"]
    assert {"precision=ampp", "optimizer.lr=-1"} < set(found)
    assert min(found[name]["cpu"]["median"] for name in (*startup.BAD, startup.TORCH, startup.RUN)) > 0
    assert found[startup.JOB]["beyond"]["median"] < found[startup.RUN]["wall"]["median"]


def test_a_variant_that_did_not_train_is_found_out(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    good = {"updates": 60, "loss_first": 2.3, "loss_last": 2.2}
    wrong = {"fewer": {"updates": 40}, "as before": {"loss_last": 2.3}, "nan": {"loss_last": float("nan")}}
    markers = {"hand": good, **{name: good | marker for name, marker in wrong.items()}}
    blocks = {name: [(0.02, 0.01)] * 2 for name in markers}
    monkeypatch.setattr(harness, "run_rounds", lambda loops, rounds, warmup: (blocks, markers))
    found = harness.steps("loops", dict.fromkeys(markers, overhead.hand), overhead.Work(20, 1), 20, 2, 1, "us")
    assert {name: variant["trained"] for name, variant in found["variants"].items()} == {
        "hand": True, "fewer": False, "as before": False, "nan": False,
    }  # fmt: skip
    assert found["variants"]["fewer"]["us"]["median"] == pytest.approx(1000)
    assert found["variants"]["fewer"]["cpu_us"]["median"] == pytest.approx(500)
    assert harness.untrained({"bare": found})
    assert not harness.untrained({"bare": {"variants": {"hand": {"trained": True}}}})
    assert capsys.readouterr().out.count("did not train") == 3


def test_a_turn_times_only_its_block() -> None:
    ours, theirs = Pipe()
    losses = iter([2.0, 1.0])
    sync = harness.BlockSync(theirs)
    sync.watch(lambda: next(losses))
    ours.send("go")
    sync(0)
    assert ours.recv() is None  # ready; no block has run
    ours.send("stop")
    with pytest.raises(harness.Done):
        sync(5)
    wall, cpu = ours.recv()
    assert 0 <= cpu < 1
    assert 0 < wall < 60
    assert ours.recv() == {"updates": 5, "loss_first": 2.0, "loss_last": 1.0}


def test_pairs_are_compared_within_their_round() -> None:
    base = [10.0**power for power in range(6)]  # the machine's speed wanders
    figures = harness.against([2 * b for b in base], base)
    assert figures["ratio"] == pytest.approx({"median": 2, "low": 2, "high": 2})
    assert (figures["difference"]["low"], figures["difference"]["high"]) == (1, 1e5)
    assert harness.ratio(figures["ratio"]) == "2.00 (2.00 … 2.00)"
    few = harness.against([2 * b for b in base[:5]], base[:5])["ratio"]  # of five pairs none of 95 % can be had
    assert few == {"median": pytest.approx(2), "low": None, "high": None}
    assert harness.ratio(few) == "2.00"
    assert harness.spread(list(range(11))) == {"median": 5, "p10": 1, "p90": 9}


def test_every_technique_has_a_case_that_composes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or a reason why it has no figure. An option that is off by itself is what the others are compared with."""
    pairwise.prepare_folder(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    known = cards.cards()
    assert {word.partition("=")[0] for word in known} == {*cards.GROUPS, "loss", "model"}
    assert set(cards.NONE) <= set(known)
    for word, case in known.items():
        if word not in cards.NONE:
            base = [*cards.ALL, *(each.format(photos=tmp_path / "images") for each in case.base)]
            for label, words in ((case.off, [*base, case.off]), (word, [*base, *word.split(), *case.beside])):
                spec = variants.compose(label, words)
                lacking = [problem for problem in spec.problems if "which is not installed" in problem]
                assert spec.problems == lacking, word


def test_a_card_has_its_figures_and_the_campaign_goes_on(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "cards.json"
    words = ["--rounds", "1", "--block-s", "0.01", "--out", str(out), "--cards"]
    cards.main([*words, "clip=norm", "precision=tf32"])
    content = json.loads(out.read_text())
    card = content["cards"]["clip=norm"]
    assert (card["against"], card["ratio"][1:], len(card["rates"][1])) == ("clip=none", [None, None], 1)
    assert card["ratio"][0] == pytest.approx(card["rates"][1][0] / card["rates"][0][0])
    assert content["cards"]["precision=tf32"]["reason"].startswith("not measurable on a CPU")
    assert "all are measured" in capfd.readouterr().out
    cards.main([*words, "clip=norm", "--minutes", "0"])  # nothing is left to measure
    assert json.loads(out.read_text())["cards"] == content["cards"]
    cards.main([*words, "clip=agc", "--minutes", "0"])
    assert "1 are left: call it again" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("memory", "says"),
    [
        ([12.4, 11.0, 14.0], "1.50 × as fast as x=off (1.40 to 1.60), 12 MiB more memory (+11 to +14)"),
        ([-300.0, -310.0, -290.0], "1.50 × as fast as x=off (1.40 to 1.60), 300 MiB less memory (-310 to -290)"),
        ([3.0, -1.0, 7.0], "1.50 × as fast as x=off (1.40 to 1.60), as much memory"),  # not certain
        (None, "1.50 × as fast as x=off (1.40 to 1.60)"),
    ],
)
def test_what_a_card_says(memory: list[float] | None, says: str) -> None:
    card = {"against": "x=off", "case": "model=mlp a.b=1 model=gpt", "beside": ["x.k=2"], "ratio": [1.5, 1.4, 1.6]}
    said = cards.sentence(card | {"memory_mib": memory}, "a CPU")
    assert said == f"{says}; with x.k=2, model=gpt, one thread, a CPU"


def test_the_cards_of_the_options_are_those_of_the_campaign() -> None:
    """`drivetrain list` says what the record holds."""
    assert dict(catalog.measured()) == cards.said()


def test_a_list_shows_what_was_measured(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(
        catalog,
        "measured",
        lambda: {"clip=norm": "0.99 × as fast", "clip=norm clip.norm_type=1": "slower", "surgery=[sync_bn]": "no figure"},
    )
    for word, line in (
        ("clip=norm", "measured: 0.99 × as fast\n    measured clip.norm_type=1: slower"),
        ("surgery=sync_bn", "measured: no figure"),
    ):
        show(word)
        assert line in capsys.readouterr().out
    show("clip=agc")
    assert "measured" not in capsys.readouterr().out


def test_a_card_has_the_memory_of_the_option_less_that_of_its_base() -> None:
    first = Row("clip=none", [], rates=[10.0] * 6, peaks_bytes=[100 * cards.MIB] * 6)
    row = Row(
        "clip=norm", [], ratio=Interval(0.9, 0.8, 1.0), rates=[9.0] * 6, peaks_bytes=[(120 + n % 2) * cards.MIB for n in range(6)]
    )
    found = cards.figures(first, row, cards.cards()["clip=norm"])
    assert found["memory_mib"][0] == pytest.approx(20.5)
    assert found["memory_mib"][1] < 20.5 < found["memory_mib"][2]
    assert (found["of_mib"], found["ratio"]) == (100, [0.9, 0.8, 1.0])
    failed = cards.figures(first, Row("clip=norm", [], error="out of memory\nat a line"), cards.cards()["clip=norm"])
    assert failed == {"reason": "out of memory"}


@pytest.mark.slow
def test_what_a_rank_saves_does_not_grow_with_the_ranks():
    """The short form of `python -m bench.scale --only spread`: two worlds of ranks whose collectives return at once."""
    found = []
    for ranks in ("8", "1024"):
        command = [sys.executable, "-m", "bench.scale", "one_of", "fsdp", ranks, "1000000", "6"]
        done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=harness.ROOT)
        found.append(json.loads(done.stdout.strip().splitlines()[-1]))
    assert found[0]["state_bytes"] == found[1]["state_bytes"]
    assert all(each["own_us"] > 0 for each in found)


def test_a_trial_says_what_it_found_and_the_campaign_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = (
        "data=synthetic",
        "data.shape=[4]",
        "data.samples=40",
        "data.test_samples=20",
        "model=mlp",
        "model.hidden=[4]",
        "epochs=1",
    )
    small = (*base, "batch.global_batch=10", "optimizer=adamw")
    words = ("", "optimizer.lr=0.5", "optimizer=sgd")
    tried = {"small": techniques.Trial(small, words), "optimizers on digits": techniques.Trial(small, words[2:], "loss<=100")}
    monkeypatch.setattr(techniques, "TRIALS", tried)
    out = tmp_path / "techniques.json"
    techniques.main(["--seeds", "2", "--out", str(out)])
    content = json.loads(out.read_text())
    first, other, _ = content["trials"]["small"]["rows"].values()
    assert first["verdict"] == "first"
    assert len(first["each"]) == 2
    assert len(other["worse_by"]) == 3
    (timed,) = content["trials"]["optimizers on digits"]["rows"].values()
    assert timed["updates"] == [4, 4]
    assert len(timed["update_ms"]) == techniques.ROUNDS
    said = techniques.sentences(content)
    assert set(said) == {"optimizer=adamw optimizer.lr=0.5", "optimizer=sgd"}
    assert "2 seeds" in said["optimizer=sgd"][0]
    monkeypatch.setattr(techniques, "made", None)  # what is there is not made again
    techniques.main(["--out", str(out)])


@pytest.mark.parametrize(
    ("row", "says"),
    [
        (
            {"worse_by": [-0.2, -0.3, -0.1], "verdict": "BETTER"},
            ": loss 1, without it 1.2: better by 0.2 (0.1 to 0.3)",
        ),
        (
            {"worse_by": [0.2, -0.1, 0.5], "verdict": "FAIL"},
            ": loss 1, without it 1.2: no difference shown, worse by 0.2 (-0.1 to 0.5)",
        ),
        ({"worse_by": [0.0, 0.0, 0.0], "verdict": "PASS"}, ": loss 1, without it 1.2: the same"),
        ({"reason": "out of memory"}, "out of memory"),
    ],
)
def test_what_a_card_says_of_a_result(row: dict[str, Any], says: str) -> None:
    rows = {"as it is": {"mean": [1.2]}, "clip=spike": {"metric": "loss", "mean": [1.0], "reason": None, **row}}
    trial = {"rows": rows, "base": "data=digits model=mlp model.hidden=[4]", "seeds": 5}
    (said,) = techniques.sentences({"trials": {"one": trial}})["clip=spike"]
    assert said.endswith(says)


def test_the_table_of_optimizers_has_the_soonest_first_and_is_the_records() -> None:
    rows = {
        "optimizer=adamw": {"updates": [10, 20, 30], "update_ms": [1.0, 2.0, 3.0]},
        "optimizer=sgd": {"updates": [10, 10, 10], "update_ms": [2.0, 2.0, 2.0]},
        "optimizer=lars": {"updates": [5, None, None], "update_ms": [1.0, 1.0, 1.0]},
    }
    found = techniques.table({"trials": {"optimizers on digits": {"rows": rows, "target": "accuracy>=0.9"}}})
    assert [line.split("`")[1] for line in found.splitlines() if line.startswith("| `")] == ["sgd", "adamw", "lars"]
    assert "| `sgd` | 3 of 3 | 10 | 2.00 | 0.02 |" in found
    page = techniques.PAGE.read_text(encoding="utf-8")
    assert techniques.table(harness.before(techniques.FILE)) in page
