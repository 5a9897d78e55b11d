"""`drivetrain doctor`: the planted bottleneck is the one that it names, with its line, and what it prescribes is proven."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from bench import attribution
from bench.attribution import MODELS, PLACES, draw

from drivetrain.measure.profile import doctor as doctor_module
from drivetrain.measure.profile.doctor import COMPUTE, Problem, profiled
from drivetrain.recipe.reader import read
from drivetrain.ui.sheet import Table
from tests.support import bottlenecks, fork_server, made_pages
from tests.support.bottlenecks import CASES, config_dir, place


def as_a_user() -> dict[str, str]:
    """The environment, but for the number of threads of the tests, and how they wait: their cost is what is measured."""
    return {name: value for name, value in os.environ.items() if not name.startswith("OMP_")} | {
        "PYTHONPATH": os.pathsep.join(sys.path)
    }


@pytest.fixture
def doctor(tmp_path, monkeypatch):
    """The doctor in a new interpreter, on a planted case; what it said. A forked one has frames of the tests' server."""
    monkeypatch.setattr(fork_server.Popen, "forking", False)

    def run(case: str, *more: str) -> str:
        words = [*config_dir(tmp_path), *bottlenecks.overrides_of(CASES[case]), *more]
        command = [sys.executable, "-m", "drivetrain", "doctor", *{w.partition("=")[0]: w for w in words}.values()]
        done = subprocess.run(command, env=as_a_user(), capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


def test_what_was_found_is_shown_and_left(tiny, monkeypatch, capsys):
    problems = [
        Problem(0.5, "line", "a line of your own takes 50% of the step", "net.py:12 in forward: `x.sort()`"),
        Problem(0.3, "data", "the step waits for data 30% of its time", "loader=sync"),
        Problem(0.0, COMPUTE, "no bottleneck", ""),
    ]
    monkeypatch.setattr(doctor_module.child, "ask", lambda run, question, failed: made_pages.profile())
    monkeypatch.setattr(doctor_module, "diagnose", lambda *given: reversed(problems))
    found = doctor_module.examine([*tiny(), "prove=false"])
    said = capsys.readouterr().out
    assert "\nverdict: a line of your own takes 50% of the step\n  net.py:12 in forward: `x.sort()`\n" in said
    assert "\nalso: the step waits for data 30% of its time\n  loader=sync\n" in said
    assert "no bottleneck" not in said
    (page,) = Path("outputs/doctor").rglob("doctor.html")
    assert f"written to {page.parent}/doctor.json and doctor.html" in said
    (line,) = json.loads((page.parent / "doctor.json").read_text())["lines"]
    assert (line["place"], line["share"], round(line["low"], 2)) == ("net.py:12 in forward", 0.5, 0.37)
    assert "<h1>A line of your own takes 50% of the step.</h1>" in page.read_text()
    assert "<b>A line of your own takes 50% of the step.</b>" in found._repr_html_()
    phases, lines, _ = (section for section in profiled(found) if isinstance(section, Table))
    assert ["data wait", "20.00 ms", "20%", "15 to 25%"] in phases.texts()
    assert "this device: 1.000 (0.752 to 1.248) TFLOP/s of matrix products, 10 GB/s of copying" in said
    assert "the step: 1.00 GFLOP, 0.010 TFLOP/s, 1 (1 to 1) % of it" in said
    assert lines.texts()[0][1:] == ["50%", "37 to 63%", "20%"]
    assert lines.texts()[-1] == ["all else", "10%", "", ""]


SHORT = ("slow data", "workers", "saving")  # costs that no busy machine hides


@pytest.mark.slow
@pytest.mark.parametrize("case", SHORT)
def test_what_was_planted_is_found(doctor, case):
    said, mark = doctor(case, "prove=false", "profile_s=0.4"), CASES[case].mark
    assert CASES[case].verdict in said.split("verdict: ")[1], said
    if mark is not None:
        assert place(mark) in said, said


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_what_was_planted_is_the_verdict(doctor, case):
    said, mark = doctor(case, "prove=false", "profile_s=0.4"), CASES[case].mark
    first = said.split("verdict: ")[1].splitlines()
    assert CASES[case].verdict in first[0], said
    if mark is not None:
        assert place(mark) in first[1], said


@pytest.mark.slow
def test_what_it_prescribes_is_faster_and_runs(doctor):
    said = doctor("slow data", "data.kwargs.pause=0.002", "batch.global_batch=16", "profile_s=0.3", "rounds=6", "block_s=0.2")
    gain = re.search(r"\n([\d.]+) × the samples a second \(([\d.]+) to", said)
    assert gain, said
    assert float(gain[2]) > 1
    recipe = next(Path("outputs/doctor").rglob("recipe.yaml"))
    assert str(recipe.parent) in said
    assert "measured in interleaved rounds" in recipe.read_text()
    claim = read(recipe).claim.speed
    assert (claim.ratio, claim.interval[0]) == pytest.approx((float(gain[1]), float(gain[2])), abs=0.006)
    assert re.search(rf"drivetrain recipe verify -cd \S+mine {recipe} .*data=own data\.target={bottlenecks.__name__}\.Data", said)
    assert set(claim.against) <= {"loader", "loader.num_workers", "loader.prefetch_factor"}
    words = ["epochs=1", "updates=2", *bottlenecks.OVERRIDES[:5]]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-m", "drivetrain", "train", f"recipe={recipe}", *words], env=env, check=True)


@pytest.mark.slow
def test_what_nobody_told_it_of_is_named_too():
    """Costs are drawn: the doctor's code knows none of these kinds. The short form is in test_attribution.py."""
    found = {seed: attribution.examine(draw(seed), 1.5) for seed in range(20)}
    assert sum(f["named"] for f in found.values()) >= 19, [f for f in found.values() if not f["named"]]
    assert sum(f["clean"] for f in found.values()) >= 19, [f for f in found.values() if not f["clean"]]


@pytest.mark.slow
def test_seven_costs_of_a_tenth_are_named(monkeypatch):
    """The short form, from shares that scatter, is in test_attribution.py."""
    monkeypatch.setattr(fork_server.Popen, "forking", False)
    program = "import json; from bench import attribution; print(json.dumps(attribution.sevenths(2.0)))"
    done = subprocess.run([sys.executable, "-c", program], env=as_a_user(), stdout=subprocess.PIPE, text=True, check=True)
    said = json.loads(done.stdout.splitlines()[-1])
    assert len(said) == 7
    assert all(said.values()), said


def test_drawn_programs_are_sound():
    for kind in (*attribution.TENTHS, attribution.THREADS):
        compile(attribution.tenth(kind).text, kind, "exec")
        assert len(attribution.tenth(kind).planted) == 1
    drawn = [draw(seed) for seed in range(60)]
    for program in drawn:
        compile(program.text, program.module, "exec")
        assert len(program.planted) == (3 if program.place == "spread" else 1), program
    assert draw(7) == draw(7)
    assert len({(d.kind, d.place, d.model) for d in drawn}) > 50
    assert {d.place for d in drawn} == set(PLACES)
    assert {d.model for d in drawn} == set(MODELS)


def test_a_run_that_cannot_be_is_an_error(tmp_path, capsys):
    from drivetrain.cli import main

    assert main.main(["doctor", "precision=bf17"]) == 2
    assert "did you mean" in capsys.readouterr().err
