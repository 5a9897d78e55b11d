"""`drivetrain doctor`: the planted bottleneck is the one that it names, with its line, and what it prescribes is proven."""

import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from bench import attribution
from bench.attribution import MODELS, PLACES, draw
from torch.autograd import DeviceType

from drivetrain.core.machine.device import Clock
from drivetrain.measure.intervals import Interval
from drivetrain.measure.profile import device_time, doctor, step
from drivetrain.measure.profile.attribution import Attribution, CodeLine, attribute, together
from drivetrain.measure.profile.device_time import END
from drivetrain.measure.profile.doctor import COMPUTE, Problem, profiled
from drivetrain.measure.profile.operations import OperationRecorder, TimedOperation
from drivetrain.measure.profile.phases import DATA, REST
from drivetrain.measure.profile.sampler import SAMPLE_S, Spent, _Instants, sampled
from drivetrain.measure.profile.step import Looked, Turn
from drivetrain.measure.profile.user_code import Found, Site, find
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
def examined(tmp_path, monkeypatch):
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
    monkeypatch.setattr(doctor.child, "ask", lambda run, question, failed: made_pages.profile())
    monkeypatch.setattr(doctor, "diagnose", lambda *given: reversed(problems))
    found = doctor.examine([*tiny(), "prove=false"])
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
def test_what_was_planted_is_found(examined, case):
    said, mark = examined(case, "prove=false", "profile_s=0.4"), CASES[case].mark
    assert CASES[case].verdict in said.split("verdict: ")[1], said
    if mark is not None:
        assert place(mark) in said, said


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_what_was_planted_is_the_verdict(examined, case):
    said, mark = examined(case, "prove=false", "profile_s=0.4"), CASES[case].mark
    first = said.split("verdict: ")[1].splitlines()
    assert CASES[case].verdict in first[0], said
    if mark is not None:
        assert place(mark) in first[1], said


@pytest.mark.slow
def test_what_it_prescribes_is_faster_and_runs(examined):
    said = examined("slow data", "data.kwargs.pause=0.002", "batch.global_batch=16", "profile_s=0.3", "rounds=6", "block_s=0.2")
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
    """Costs are drawn: the doctor's code knows none of these kinds."""
    found = {seed: attribution.examine(draw(seed), 1.5) for seed in range(20)}
    assert sum(f["named"] for f in found.values()) >= 19, [f for f in found.values() if not f["named"]]
    assert sum(f["clean"] for f in found.values()) >= 19, [f for f in found.values() if not f["clean"]]


@pytest.mark.slow
def test_costs_of_a_tenth_are_named(monkeypatch):
    """The short form, from shares that scatter, is below."""
    monkeypatch.setattr(fork_server.Popen, "forking", False)
    program = "import json; from bench import attribution; print(json.dumps(attribution.tenths(2.0)))"
    done = subprocess.run([sys.executable, "-c", program], env=as_a_user(), stdout=subprocess.PIPE, text=True, check=True)
    said = json.loads(done.stdout.splitlines()[-1])
    assert len(said) == 6
    assert all(said.values()), said


def test_drawn_programs_are_sound():
    for kind in attribution.TENTHS:
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


# --- shares of a step's time by the user's own lines: from made-up samples and operations, and from real ones ---


NOTHING, BACKWARD = Found(), Found(in_backward=True)


def users_code(x):
    return x


def site(instruction: int = 0) -> Found:
    return Found(Site(users_code.__code__, instruction))


def operation(found: Found, ms: float, backward_ms: float = 0.0, layer: bool = False, name: str = "mul") -> TimedOperation:
    made = TimedOperation(name, found, "micro_batch", layer, False, False, False)
    made.ms, made.backward_ms, made.backward_operations, made.frozen = ms, backward_ms, int(backward_ms > 0), True
    return made


def whole(found: Attribution) -> float:
    return sum(line.share + line.layers for line in found.lines) + sum(found.rest.values())


def test_the_backward_goes_to_the_lines_whose_forward_it_belongs_to():
    samples = {("micro_batch", site()): Spent(1.0), ("micro_batch", BACKWARD): Spent(6.0), ("update", NOTHING): Spent(1.0),
               ("data", NOTHING): Spent(0.0, 2.0)}  # fmt: skip
    found = attribute(samples, [operation(site(), 1.0, 20.0), operation(NOTHING, 1.0, 40.0)], 1)
    (line,) = found.lines
    assert (line.share, line.backward) == (pytest.approx(0.3), pytest.approx(0.2))
    assert found.rest == {
        "model and loss": pytest.approx(0.4), "the update": pytest.approx(0.1), "waiting for data": pytest.approx(0.2),
    }  # fmt: skip
    assert whole(found) == pytest.approx(1.0)


def test_what_the_models_layers_need_is_no_cost_of_the_line_that_calls_them():
    samples = {("micro_batch", site()): Spent(4.0), ("micro_batch", BACKWARD): Spent(4.0), ("update", NOTHING): Spent(2.0)}
    operations = [operation(site(), 3.0, 3.0, layer=True), operation(site(), 1.0, 1.0)]
    (line,) = attribute(samples, operations, 1).lines
    assert (line.share, line.layers) == (pytest.approx(0.2), pytest.approx(0.6))
    for change in ({"wide": True}, {"wasted": True}):
        vars(operations[0]).update(change)
        (line,) = attribute(samples, operations, 1).lines
        assert line.share == pytest.approx(0.8), "float64, and layers without a gradient, are not what it needs"
        vars(operations[0]).update(wide=False, wasted=False)


def test_time_that_no_operation_accounts_for_is_the_lines():
    sleeping, computing = site(2), site(3)
    samples = {("micro_batch", sleeping): Spent(0.0, 3.0), ("micro_batch", computing): Spent(7.0)}
    (line,) = attribute(samples, [operation(computing, 5.0, layer=True)], 1).lines  # both calls stand on it
    assert (line.share, line.layers, line.waits) == (pytest.approx(0.3), pytest.approx(0.7), pytest.approx(0.3))


def test_the_engines_own_time_is_that_of_its_operations():
    """A thousand small operations cost more in the backward than their own time, which is all that is recorded of them."""
    many = [operation(site(), 0.0, 0.001) for _ in range(1000)]
    samples = {("micro_batch", BACKWARD): Spent(0.012), ("micro_batch", site()): Spent(0.0)}
    found = attribute(samples, [*many, operation(NOTHING, 1.0, 10.0)], 1, watched=1)
    assert found.lines[0].share == pytest.approx(2 / 12, abs=0.01)
    assert attribute(samples, [*many, operation(NOTHING, 1.0, 10.0)], 1).lines[0].share == pytest.approx(1 / 11, abs=0.01)


def test_where_an_accelerator_works_its_own_times_count_and_the_host_only_while_it_waits():
    samples = {("micro_batch", site()): Spent(0.0, 8.0), ("update", NOTHING): Spent(2.0)}
    found = attribute(samples, [operation(site(), 1.0), operation(NOTHING, 5.0, 4.0)], 1, busy=0.9)
    assert found.lines[0].share == pytest.approx(0.1 * 0.8 + 0.9 * 0.1)
    assert whole(found) == pytest.approx(1.0)


def test_reading_in_other_processes_is_divided_by_reading_here():
    found = Attribution([], {"waiting for data": 0.5, "the update": 0.5})
    divided = found.with_reading({("data", site()): Spent(3.0), ("data", NOTHING): Spent(1.0)})
    (line,) = divided.lines
    assert (line.reads_data, line.share) == (True, pytest.approx(0.375))
    assert whole(divided) == pytest.approx(1.0)
    assert found.with_reading({}).rest == found.rest


def watched(work, seen):
    """Samples of work, which is done until they are enough."""
    spent = {}
    while not seen(spent):
        with sampled(lambda: "micro_batch", watched.__code__) as (_, more):
            work()
        spent = together([spent, more])
    return spent


def test_the_sampler_sees_where_a_thread_sleeps_and_where_it_computes():
    def slept():
        time.sleep(0.004)

    def computed():
        return sum(range(20000))

    def seen(spent):
        names.update(found.site.code.co_name for _, found in spent if found.site is not None)
        return {"slept", "computed"} <= names

    names: set[str] = set()
    watched(lambda: (slept(), computed()), seen)
    assert not [t for t in threading.enumerate() if t.name == "sampler"]


def test_time_without_work_is_told_from_time_on_a_core_and_time_that_waits_for_one_counts_nowhere():
    now = Spent()
    instants = _Instants(lambda: now, lambda frame: ("micro_batch", frame))
    for _ in range(100):
        for name, busy, waits in (("sleeps", 0.0, 0.01), ("computes", 0.01, 0.0), ("queues", 0.0, 0.0)):
            now += Spent(busy, waits, 0.01)
            instants.count(name)
    found = {name: (spent.busy, spent.waits) for (_, name), spent in instants.spent.items()}
    expected = {"sleeps": (0.0, 1.0), "computes": (1.0, 0.0), "queues": (0.0, 0.0)}
    assert found == {name: pytest.approx(seconds, abs=0.05) for name, seconds in expected.items()}


def test_shares_are_right_where_most_time_is_in_calls_that_cannot_be_interrupted():
    """A call of C is looked at when it returns, Python code at once: neither may gain by it."""
    now = 0.0
    instants = _Instants(lambda: Spent(now, 0.0, now), lambda frame: ("micro_batch", frame))
    pause = SAMPLE_S
    for _ in range(200):
        now += 0.004  # one call
        pause = instants.count("call")
        ends = now + 0.0024  # bytecode
        while now + pause < ends:
            now += pause
            pause = instants.count("code")
        now = ends
        for _ in range(8):  # calls shorter than the time between two instants
            now += 0.0002
            pause = instants.count("short calls")
    seconds = {name: spent.own for (_, name), spent in instants.spent.items()}
    total = sum(seconds.values())
    shares = {name: round(s / total, 2) for name, s in seconds.items()}
    assert shares == {
        "call": pytest.approx(0.5, abs=0.02),
        "code": pytest.approx(0.3, abs=0.02),
        "short calls": pytest.approx(0.2, abs=0.02),
    }


def test_the_backwards_own_time_is_not_that_of_a_hook_which_it_calls():
    def hook(grad):
        return None

    x = torch.ones(500, 500, requires_grad=True)

    def backward():
        y = x
        for _ in range(6):
            y = y @ x
            y.register_hook(hook)
        y.sum().backward()

    def own(spent, is_it):
        return sum(seconds.own for (_, found), seconds in spent.items() if is_it(found))

    spent = watched(backward, lambda spent: own(spent, lambda found: found.in_backward) > 0.1)
    in_hook = own(spent, lambda found: found.site is not None and found.site.code.co_name == "hook")
    assert in_hook < 0.1 * own(spent, lambda found: found.in_backward)


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.spare = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)

    def forward(self, x):
        y = self.layer(x)
        self.spare(x)
        y = y + torch.sin(y.double()).float()
        return y @ self.layer.weight


def test_operations_are_known_by_their_line_forward_and_backward():
    net, first = Net(), Net.forward.__code__.co_firstlineno

    def step():
        net(torch.rand(4, 8)).sum().backward()

    recorder = OperationRecorder(lambda: "micro_batch", Clock(), step.__code__, small_size=1)
    with recorder.recording():
        step()
    by_line: dict[int, list[TimedOperation]] = {}
    for made in recorder.operations:
        if made.found.site is not None:
            by_line.setdefault(made.found.site.line - first, []).append(made)
    layer, spare, sine, product = (by_line[n] for n in (1, 2, 3, 4))
    assert all(o.needed for o in layer + product), [o.name for o in layer + product if not o.needed]
    assert sum(o.backward_operations for o in layer) > 0
    assert [o.name for o in spare if o.layer and o.wasted and not o.frozen][-1] == "addmm"
    assert sum(o.backward_operations for o in spare) == 0
    assert not any(o.needed for o in sine)
    assert next(o for o in sine if o.name == "sin").wide
    assert next(o for o in sine if o.name == "sin").backward_operations > 0


def test_frames_of_the_harness_are_not_the_users():
    def root():
        return find(__import__("sys")._getframe(), root.__code__)

    assert root() == Found()


def problems(*lines: CodeLine) -> list[doctor.Problem]:
    profile = SimpleNamespace(lines=list(lines), device="cpu", step_ms=10.0, queued=0.0)
    return list(doctor._own_lines(profile))


def test_any_line_that_certainly_costs_is_named_and_what_is_known_only_adds_advice():
    (named,) = problems(CodeLine("a.py:3 in forward", "odd(x)", share=0.3), CodeLine("a.py:4 in forward", share=0.04, layers=0.8))
    assert (named.share, named.verdict) == (0.3, "a line of your own takes 30% of the step")
    assert named.evidence.startswith("a.py:3 in forward: `odd(x)`")
    said = {
        "waits": CodeLine("a.py:3 in f", share=0.3, waits=0.9),
        "float64": CodeLine("a.py:3 in f", share=0.3, operations=2, wide=0.9),
        "no gradient": CodeLine("a.py:3 in f", share=0.3, operations=2, wasted=0.9),
        "2 operations": CodeLine("a.py:3 in f", share=0.3, operations=2, names=("mul",)),
        "loop over elements": CodeLine("a.py:3 in f", share=0.3, operations=99, small_operations=99),
        "tensors are made": CodeLine("a.py:3 in f", share=0.3, operations=1, created=0.9, created_ms={"randperm": 3.0}),
    }  # fmt: skip
    for words, line in said.items():
        (problem,) = problems(line)
        assert problem.share == pytest.approx(0.3)
        assert words in problem.verdict + problem.evidence


def test_a_cost_that_is_spread_over_a_function_is_named_too():
    lines = [CodeLine(f"a.py:{n} in f", share=0.04) for n in range(5)] + [CodeLine("b.py:1 in g", share=0.02)]
    (named,) = problems(*lines)
    assert (named.share, named.verdict) == (pytest.approx(0.2), "the lines of f in a.py take 20% of the step")
    assert named.evidence == "20%, most of all a.py:0 in f, 4%; a.py:1 in f, 4%; a.py:2 in f, 4%"


# --- what the device does during an update, from a profile's events ---


class Range(NamedTuple):
    start: float
    end: float


class Event:
    def __init__(
        self, name: str, start: float, end: float, device: DeviceType = DeviceType.CPU, thread: int = 1, annotation: bool = False
    ) -> None:
        self.name, self.time_range, self.device_type, self.thread = name, Range(start, end), device, thread
        self.cpu_parent, self.is_user_annotation = None, annotation


def test_what_overlaps_is_counted_once():
    assert device_time._union_us([Event("a", 0, 4), Event("b", 2, 5), Event("c", 3, 4), Event("d", 7, 8)]) == 6
    assert device_time._union_us([]) == 0


def test_a_cpus_time_is_in_operations_between_them_or_waits_for_data():
    reading = operation(NOTHING, 9.0)
    reading.phase = "data"
    found = step._cpu_shares([operation(NOTHING, 20.0, 5.0), operation(NOTHING, 15.0), reading], 100.0, 0.2)
    assert found == {"in operations": pytest.approx(0.4), "between operations (Python, dispatch)": pytest.approx(0.4)}
    assert step._cpu_shares([operation(NOTHING, 120.0)], 100.0, 0.2)["between operations (Python, dispatch)"] == 0


@pytest.mark.parametrize("device", [DeviceType.CUDA, DeviceType.XPU])
def test_on_a_device_our_own_waiting_is_not_the_hosts(device):
    cuda = device
    events = [
        # Named ranges are repeated on the device: they are no work of it.
        Event("Optimizer.step#SGD.step", 0, 90, cuda, annotation=True), Event(END, 70, 100, cuda, annotation=True),
        Event("gemm", 0, 30, cuda), Event("Memcpy HtoD", 20, 40, cuda), Event("relu", 50, 60, cuda),
        Event("cudaStreamSynchronize", 10, 15), Event(END, 80, 100), Event("cudaDeviceSynchronize", 81, 99),
    ]  # fmt: skip
    found = device_time._device_shares(events, 100.0)
    assert found == {
        "the device computes": pytest.approx(0.4), "the device copies": pytest.approx(0.2),
        "the device is idle": pytest.approx(0.5), "the host waits for the device": pytest.approx(0.05),
    }  # fmt: skip
    assert device_time._device_shares(events[5:], 100.0) == {}, "a profiler that sees nothing of the device"


def looked(waits: Sequence[float]) -> Looked:
    """Looks at updates of 100 ms each, in which the step waits for data for these shares of the time."""
    turns = [Turn(0.1, 1e12, {DATA: share, "forward": 1 - share}) for share in waits]
    phases = {DATA: 100 * sum(waits) / len(waits), "forward": 100 - 100 * sum(waits) / len(waits)}
    return Looked(
        [],
        {},
        turns=turns,
        step_ms=100.0,
        phases=phases,
        utilization={},
        read_ms=None,
        queued=0.0,
        threads=1,
    )


def test_the_wait_for_data_has_the_interval_of_its_looks():
    found = looked([0.2, 0.3] * 4).waits_for_data
    assert found.middle == pytest.approx(0.25)
    assert found.high - 0.25 == pytest.approx(0.25 - found.low) == pytest.approx(0.0447, abs=1e-3)
    assert looked([0.3] * 8).waits_for_data == pytest.approx((0.3, 0.3, 0.3))


def wait(*looks: float) -> SimpleNamespace:
    """A profile whose waiting for data was seen so in several looks."""
    return profile(waits_for_data=looked(looks).waits_for_data)


@pytest.mark.parametrize(
    ("looks", "certain", "verdict"),
    [
        ((0.24, 0.26) * 4, True, ""),
        ((0.12, 0.40) * 4, False, "no bottleneck is certain: the step may wait for data 39% of its time"),
        ((0.15, 0.17) * 4, False, "no bottleneck: the step computes"),
    ],
)
def test_a_wait_for_data_is_the_verdict_where_its_interval_lies_above_the_threshold(looks, certain, verdict):
    found = list(doctor._data(wait(*looks), job()))
    assert bool(found) == certain
    assert all("loader=x: the wait is 24 to 26%" in problem.evidence for problem in found)
    assert bottom(waits_for_data=looked(looks).waits_for_data).startswith(verdict or "no bottleneck: the step computes")


# --- what the doctor tells of, and of what it is silent: on made-up profiles, just below and above each threshold ---


NONE = Interval(0.0, 0.0, 0.0)


def profile(**given: Any) -> Any:
    """An update of 100 ms, 100 of them in an epoch of 10 s."""
    usual: dict[str, Any] = {
        "step_ms": 100.0, "phases": {"data wait": 0.0, "forward": 100.0}, "lines": [], "evaluation_s": 0.0, "saving_s": None,
        "updates": 100, "run_updates": 10_000, "queued": 0.0, "rest": {}, "start_s": 1.0, "utilization": {},
        "micro_batch": 8, "read_ms": None, "device": "cpu", "threads": 2,
        "turns": [Turn(0.1, 1e12, {})] * 2, "bandwidth": 1e10, "step_flops": 0.0,
        "waits_for_data": NONE,
    }  # fmt: skip
    return SimpleNamespace(**{**usual, **given})


def job(**loader: Any) -> Any:
    batch = SimpleNamespace(size=lambda epoch: 8, accumulation_steps=1, fixed_micro_batches=True)
    reader = SimpleNamespace(**{"num_workers": 0, **loader})
    return SimpleNamespace(run=SimpleNamespace(loader=reader, batch=batch, named=lambda group: f"{group}=x"))


NOW_AND_THEN = doctor._now_and_then  # (profile, updates between two checkpoints, epochs between two evaluations)


@pytest.mark.parametrize(
    ("problems", "told"),
    [
        (lambda: doctor._data(wait(0.19, 0.19), job()), []),
        (lambda: doctor._data(wait(0.21, 0.21), job()), [0.21]),
        (lambda: doctor._ranks(profile(phases={"communication": 19.0, "forward": 81.0}), job(), 2), []),
        (lambda: doctor._ranks(profile(phases={"communication": 21.0, "forward": 79.0}), job(), 2), [0.21]),
        # One save at the end of an epoch, and one every so many updates.
        (lambda: NOW_AND_THEN(profile(saving_s=1.0), None, 1), []),
        (lambda: NOW_AND_THEN(profile(saving_s=1.2), None, 1), [0.107]),
        (lambda: NOW_AND_THEN(profile(saving_s=0.2), 25, 1), []),
        (lambda: NOW_AND_THEN(profile(saving_s=0.3), 25, 1), [0.130]),
        (lambda: NOW_AND_THEN(profile(evaluation_s=2.4), None, 1), []),
        (lambda: NOW_AND_THEN(profile(evaluation_s=2.6), None, 1), [0.206]),
        (lambda: NOW_AND_THEN(profile(evaluation_s=4.8), None, 2), []),
        (lambda: NOW_AND_THEN(profile(evaluation_s=5.2), None, 2), [0.206]),
        # In a run of seconds neither is a cost.
        (lambda: NOW_AND_THEN(profile(saving_s=2.0, run_updates=400), None, 1), []),
        (lambda: NOW_AND_THEN(profile(saving_s=2.0, run_updates=600), None, 1), [0.167]),
        (lambda: NOW_AND_THEN(profile(evaluation_s=4.0, run_updates=200), None, 1), []),
        (lambda: NOW_AND_THEN(profile(evaluation_s=4.0, run_updates=300), None, 1), [0.286]),
    ],
)
def test_what_is_told_begins_at_its_threshold(problems, told):
    assert [pytest.approx(problem.share, abs=1e-3) for problem in problems()] == told


def test_the_remedies_of_saving_are_named():
    (at_ends,), (often,) = (list(doctor._now_and_then(profile(saving_s=2.0), every, 1)) for every in (None, 25))
    assert at_ends.overrides == ("saving.asynchronous=true",)
    assert at_ends.evidence.startswith("1 checkpoint an epoch")
    assert often.overrides == ("saving.every_updates=null saving.every_minutes=10", "saving.asynchronous=true")


def told(*lines: CodeLine, device: str = "cpu") -> list[tuple[str, float]]:
    return [(p.name, pytest.approx(p.share)) for p in doctor._own_lines(profile(lines=list(lines), device=device))]


@pytest.mark.parametrize(
    ("share", "more", "name"),
    [
        (0.049, {}, None), (0.051, {}, "line"), (0.029, {"small_operations": 99}, None), (0.04, {"small_operations": 63}, None),
        (0.04, {"small_operations": 64}, "loop"), (0.04, {"created": 0.9}, "created"), (0.04, {"created": 0.5}, None),
    ],
)  # fmt: skip
def test_lines(share, more, name):
    assert told(CodeLine("a.py:1 in f", share=share, **more)) == ([(name, share)] if name else [])


@pytest.mark.parametrize(("other", "expected"), [(0.019, []), (0.03, [("lines", 0.06)])])
def test_lines_of_a_function(other, expected):
    assert told(CodeLine("a.py:1 in f", share=0.03), CodeLine("a.py:2 in f", share=other)) == expected


# A line's share in eight looks, of a machine at rest and of a busy one: by such looks the answer has to be the same each time.
STEADY = (0.097, 0.103, 0.095, 0.106, 0.099, 0.101, 0.098, 0.102)
UNSTEADY = (0.05, 0.16, 0.08, 0.12, 0.09, 0.11, 0.14, 0.07)
HOPELESS = (0.0, 0.4, 0.01, 0.2, 0.0, 0.02, 0.15, 0.02)


def seen(shares: Sequence[float], **more: Any) -> CodeLine:
    return CodeLine("net.py:12 in forward", "odd(x)", share=sum(shares) / len(shares), looks=tuple(shares), **more)


# Costs of a tenth of the step, as the live form plants them, by what is seen of their lines.
TENTHS = {
    "a tensor built anew": ({"operations": 2, "created": 1.0, "created_ms": {"linspace": 1.0}}, "tensors are made"),
    "a collection of garbage": ({}, "computes there, outside of torch"),
    "a sleep": ({"waits": 0.95}, "sleeps, or waits"),
    "an fsync": ({"waits": 0.9}, "waits for a file"),
    "a detour through float64": ({"operations": 9, "wide": 0.9, "names": ("sin",)}, "compute in float64"),
}


@pytest.mark.parametrize("looks", [STEADY, UNSTEADY])
@pytest.mark.parametrize("kind", TENTHS)
def test_a_cost_of_a_tenth_is_named_each_time_by_lines_that_scatter(kind, looks):
    what, words = TENTHS[kind]
    (named,) = problems(seen(looks, **what), CodeLine("net.py:13 in forward", share=0.01, layers=0.7))
    assert words in named.verdict + named.evidence
    assert named.evidence.startswith("net.py:12 in forward")


def bottom(**given: Any) -> str:
    """The verdict where no problem is certain."""
    values = SimpleNamespace(precision=SimpleNamespace(full_float32=False), compile=SimpleNamespace(active=True),
                             checkpointing=SimpleNamespace(active=False))  # fmt: skip
    with mock.patch.multiple(doctor, with_channels_last=lambda _: [], usable_cores=lambda: 2):
        (problem,) = doctor._compute(profile(**given), SimpleNamespace(run=values))
    return "\n".join([problem.verdict, problem.evidence, *problem.overrides])


def test_where_nothing_is_certain_the_verdict_says_so_and_names_the_largest_line_all_the_same():
    assert bottom() == "no bottleneck: the step computes, most of all in the forward\nno line of your own takes 3% of the step"
    small = seen([share / 2.5 for share in STEADY])
    assert problems(small) == []
    assert bottom(lines=[small]).endswith("most: net.py:12 in forward: `odd(x)`: 4% (4 to 4%) of the step")
    assert problems(seen(HOPELESS)) == []
    assert bottom(lines=[seen(HOPELESS)]).startswith("no bottleneck is certain: a line of your own may take 22% of the step")
    assert "certain, as this machine is too busy to tell: a line" in bottom(lines=[seen(HOPELESS)], queued=0.6)


def test_a_trial_of_the_threads_is_proposed_where_cores_are_left():
    assert [bottom(threads=n).splitlines()[2:] for n in (1, 2)] == [["runtime.threads=auto"], []]


def test_the_interval_is_that_of_the_looks_and_several_lines_have_one_together():
    low, high = seen(STEADY).interval[1:]
    assert (low, high) == (pytest.approx(0.0971, abs=1e-3), pytest.approx(0.1029, abs=1e-3))
    assert seen(UNSTEADY).interval.low < 0.08 < 0.13 < seen(UNSTEADY).interval.high
    # What one line loses another one has: together they are certain, and each alone is not.
    there, here = [0.0, 0.14] * 4, [0.14, 0.0] * 4
    assert problems(seen(there)) == []
    (named,) = problems(seen(there), seen(here))
    assert (named.name, named.share) == ("lines", pytest.approx(0.14))


def test_the_shares_of_each_table_add_up_and_own_lines_stand_there_with_their_interval():
    lines = [seen(STEADY), CodeLine("net.py:13 in forward", share=0.02, layers=0.5)]
    of_phases = {"forward": 60.0, "backward": 30.0, REST: 10.0}
    given = profile(phases=of_phases, step_ms=104.0, queued=0.3, lines=lines, rest={"the update": 0.3})
    found = doctor.Diagnosis(given, [doctor.Problem(0.1, "line", "v", "e")], [])
    phases, notes, by_line, beside = doctor.profiled(found)
    assert [row[0] for row in phases.rows] == ["forward", "backward", REST, "an update"]
    assert phases.texts()[-1] == ["an update", "100.00 ms", "100%", ""]
    assert by_line.texts()[2] == ["net.py:12 in forward: odd(x)", "10%", "10 to 10%", ""]
    assert ["all else", "8%", "", ""] in by_line.texts()
    assert ["an update, not profiled", "104.00 ms"] in beside.texts()
    assert "the step waited for one for 30% of the time" in notes.text
    assert [(line["place"], line["share"]) for line in found.as_dict()["lines"]] == [
        ("net.py:12 in forward", pytest.approx(0.1, abs=1e-3))
    ]
    assert 0.09 < found.as_dict()["lines"][0]["low"] < 0.1


def test_a_value_that_is_read_back_costs_its_line_on_a_device_alone():
    line = CodeLine("a.py:1 in f", share=0.04, host_reads=1)
    assert told(line) == [("sync", doctor.HOST_READ_SHARE)]
    assert told(line, device="cuda") == [("sync", 0.04)]


def test_every_shape_of_an_epoch_is_warmed_up(make, monkeypatch):
    """What is compiled or recorded for the short last update would be so while the profile looks."""
    trainer, shapes = make("data.samples=126", "batch.global_batch=12", "updates=null", "epochs=1", "data.drop_last=false"), set()
    trainer.model.register_forward_hook(lambda _, inputs, __: shapes.add(len(inputs[0])))
    monkeypatch.setattr(step, "look", mock.Mock(side_effect=TimeoutError))
    with pytest.raises(TimeoutError):
        step.profile_step(trainer, 0.01)
    assert shapes == {12, 6}
