"""`drivetrain compare`: the variants, their rounds and notes, the verdict on quality, and the answer in one sentence."""

import math
import os
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from drivetrain.cli import main
from drivetrain.core.errors import UserError
from drivetrain.core.machine import signals
from drivetrain.core.machine.forking import ForkedProcess
from drivetrain.core.machine.signals import ended_by_signals
from drivetrain.launch.job import prepare
from drivetrain.measure.benchmark.compare import Comparison, Row, _named, headline, names, notes_on, sections, table, techniques
from drivetrain.measure.benchmark.interleave import Variant, run_rounds
from drivetrain.measure.benchmark.quality import FAIL, FIRST, Verdict, in_words
from drivetrain.measure.benchmark.variants import TrainedRun
from drivetrain.measure.intervals import Interval
from drivetrain.ui.sheet import joined
from tests.support import json_keys, pages
from tests.support.waiting import until


def test_variants_are_interleaved_and_leave_a_table_and_a_page(command, tiny):
    """One that fails while it runs is a row with its reason, and ends the command with 1; a planted break is a FAIL."""
    words = ["data=digits", "epochs=2", "updates=null", "batch.global_batch=64", "optimizer=adamw", "optimizer.lr=0.003,0.9,1e30"]
    judged = ["quality=true", "seeds=3", "max_seeds=3", "rounds=2", "block_s=0.02"]
    done, found = command("compare", *tiny(*words, *judged), code=1)
    assert [row["label"] for row in found["rows"]] == [f"optimizer.lr={lr}" for lr in ("0.003", "0.9", "1e+30")]
    base, broken = (row["verdict"] for row in found["rows"][:2])
    assert (base["outcome"], broken["outcome"]) == (FIRST, FAIL), done.stdout
    assert (broken["effect"], broken["claims"]) == ("changes", ["optimizer.lr"])
    assert "FAIL" in done.stdout
    for row in found["rows"][:2]:
        assert (row["error"], len(row["rates"]), row["global_batch"]) == (None, 2, 64)
        assert row["samples_per_second"] > 0
        assert row["step_ms_p50"] <= row["step_ms_p95"]
        assert row["peak_memory_bytes"] > 2**20
    error = found["rows"][2]["error"]
    assert "not finite" in error or "loss is" in error
    assert error in done.stdout
    json_keys.check_compare(found)
    page = next(Path("outputs/compare").rglob("compare.html")).read_text()
    assert "optimizer.lr=0.9" in page
    assert 'src="http' not in page
    left = [p for p in Path("outputs").rglob("*") if p.is_file() and p.name != ".lock"]
    assert {p.name for p in left} == {"compare.json", "compare.html"}  # of the variants nothing is left


@pytest.mark.slow
def test_the_runs_own_saving_is_compared_where_it_is_named(command, tiny):
    _, found = command("compare", *tiny("saving=last,best", "saving.every_updates=1", "rounds=1", "block_s=0.02"))
    assert [row["label"] for row in found["rows"]] == ["saving=last", "saving=best"]
    assert all("saving=none" not in row["overrides"] for row in found["rows"])


@pytest.mark.own_process
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="looks for processes by their command lines in /proc")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
@pytest.mark.slow
def test_a_stopped_comparison_leaves_no_variant_behind(tiny, number, tmp_path):
    """Variants that stand still would stand for ever: they end with the process that holds them."""
    words = tiny("optimizer=sgd,adamw", "rounds=100", "block_s=0.05", f"output_dir={tmp_path}/mine")
    command = [sys.executable, "-m", "drivetrain", "compare", *words]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as held:
        while "round 2" not in held.stderr.readline():
            pass
        held.send_signal(number)
        held.stderr.read()
    assert held.returncode == (75 if number == signal.SIGTERM else -9)
    until(lambda: not [p for p in Path("/proc").glob("[0-9]*/cmdline") if f"{tmp_path}/mine" in text_of(p)])
    if number == signal.SIGTERM:
        assert not [p for p in (tmp_path / "mine").rglob("*") if p.is_file()]


def text_of(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:  # gone by now
        return ""


def test_a_first_variant_that_fails_ends_the_command_with_the_reason(command, tiny):
    done, found = command("compare", *tiny("optimizer.lr=1e30,0.05,0.06", "rounds=2", "block_s=0.02", "log_every=1"), code=2)
    assert not found
    assert "the first variant (optimizer.lr=1e+30) is what the others are compared to, and it ended: " in done.stderr
    assert "Traceback" not in done.stderr


WATCHED = """
import sys, torch
from pathlib import Path
from drivetrain.launch.job import prepare
from drivetrain.measure.benchmark.interleave import Variant
from tests.support.waiting import until

def states(variant, wanted):  # a signal takes a moment to arrive
    return until(lambda: (found := states_now(variant)) == wanted and found, lambda: states_now(variant))

def states_now(variant):
    processes = [Path(f"/proc/{p}") for p in [variant._process.pid, *children(variant._process.pid)]]
    return "".join(sorted({(p / "stat").read_text().rpartition(")")[2].split()[0] for p in processes}))

def children(pid):
    return [int(c) for c in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]

variants = [Variant(str(n), prepare([*sys.argv[1:], "saving=none"]), Path(f"variant{n}")) for n in range(2)]
try:
    for variant in variants:
        variant.start(0, 0.05)
    print(len(children(variants[0]._process.pid)), states(variants[0], 'T'), states(variants[1], 'T'))
    blocks = [variant.timed_block() for variant in variants]
    print(states(variants[0], 'T'), states(variants[1], 'T'),
    blocks[0].updates == len(blocks[0].step_s) == variants[0].updates_per_block)
finally:
    processes = [variant._process.pid for variant in variants]
    for variant in variants:
        variant.stop()
print(*[Path(f"/proc/{pid}").exists() for pid in processes])
"""


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="reads the states of processes from /proc")
@pytest.mark.parametrize(
    "words",
    [
        pytest.param(["data=digits", "loader=workers", "loader.num_workers=2"], marks=pytest.mark.slow),
        pytest.param(["parallel=ddp", "parallel.nproc=2"], marks=pytest.mark.slow),
    ],
    ids=["workers", "ranks"],
)
def test_who_waits_stands_still_with_its_workers_and_ranks(tiny, words):
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", WATCHED, *tiny(*words)], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[:3] == ["2 T T", "T T True", "False False"]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_heard_where_python_drops_its_exception(number):
    class Last:
        def __del__(self):
            os.kill(os.getpid(), number)
            for _ in range(100):  # until the handler has run, here
                pass

    went_on = []

    def work():
        with ended_by_signals() as raise_if_interrupted:
            Last()
            went_on.append(True)
            raise_if_interrupted()

    with pytest.raises(KeyboardInterrupt):
        work()
    assert went_on


def test_a_signal_that_is_sent_twice_interrupts_no_cleaning_up(monkeypatch):
    """`timeout` and launchers send it to the process, and to its group."""
    now, cleaned = [100.0], []
    monkeypatch.setattr(signals.time, "monotonic", lambda: now[0])

    def work(later_s: float) -> None:
        with ended_by_signals():
            try:
                signal.raise_signal(signal.SIGTERM)
            finally:
                now[0] += later_s
                signal.raise_signal(signal.SIGTERM)
                cleaned.append(later_s)

    for later_s in (0.1, 2.0):  # the second time somebody insists
        with pytest.raises(KeyboardInterrupt):
            work(later_s)
    assert cleaned == [0.1]


class Waiting:
    """A process that is there until it is killed; it hears Ctrl-C while it is waited for."""

    def is_alive(self):
        return True

    def join(self):
        raise KeyboardInterrupt


def test_ctrl_c_while_a_variant_is_waited_for_leaves_no_other_alive(monkeypatch):
    """Variants are stopped processes, and the end of the program would wait for one that is left for ever."""
    variants, killed = [Variant(label, None, Path()) for label in "abc"], []
    monkeypatch.setattr(Variant, "start", lambda variant, *_: setattr(variant, "_process", Waiting()))
    monkeypatch.setattr(
        Variant, "_signal", lambda variant, number: killed.append(variant.label) if number == signal.SIGKILL else None
    )
    monkeypatch.setattr(Variant, "timed_block", lambda variant: signal.raise_signal(signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        run_rounds(variants, 1, 0.1)
    assert killed[:3] == ["a", "b", "c"]


@pytest.mark.parametrize("forked", [False, True])
def test_a_signal_while_a_variant_starts_ends_it_as_an_interruption(tiny, monkeypatch, forked):
    """Before the fork there is nothing to end; after it there is a process, which nobody else knows."""
    start, started = ForkedProcess.start, []

    def interrupted(process):
        if forked:
            start(process)
            started.append(process)
        raise KeyboardInterrupt

    monkeypatch.setattr(ForkedProcess, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_rounds([Variant("a", prepare(tiny()), Path("a"))], 1, 0.1)
    assert [process.exitcode for process in started] == [-signal.SIGKILL] * forked


def test_variants_of_unequal_work_are_grouped():
    variants = [Variant(label, None, Path(), {"global_batch": batch}) for label, batch in (("a", 1000), ("b", 1000), ("c", 64))]
    assert list(notes_on(variants)) == ["the variants do not do the same work. Samples in an update: 1,000 (a, b); 64 (c)"]
    assert not list(notes_on(variants[:2]))


def test_a_variant_that_is_the_first_one_bit_for_bit_is_said_to_be_so():
    weights = {"a": (4, "d1"), "b": (4, "d1"), "c": (4, "d2"), "d": (5, "d1")}
    variants = [Variant(label, None, Path(), {"weights": each}) for label, each in weights.items()]
    assert list(notes_on(variants)) == ["b: bit for bit the first variant after 4 updates: only its speed can differ"]


# --- `drivetrain ablate`: that its variants are the baseline with, and the recipe without, exactly what they are named for ---

PAIRS = [
    ("naive", "fast", []),
    ("naive", "fast", ["model=mlp", "surgery=[]"]),
    ("default", "fast", ["data=digits"]),
    ("fast", "naive", []),
    ("default", "digits_stages", ["epochs=10"]),
]


@pytest.mark.parametrize(("baseline", "recipe", "words"), PAIRS, ids=lambda p: p if isinstance(p, str) else " ".join(p))
def test_all_techniques_together_make_the_one_the_other_and_each_changes_something(baseline, recipe, words):
    from_words, to_words = [f"recipe={baseline}", *words], [f"recipe={recipe}", *words]
    before, after = prepare(from_words), prepare(to_words)
    added, removed = techniques(before, after), techniques(after, before)
    found = added.found()
    assert {change.key for change in found} == {change.key for change in removed.found()}
    assert prepare([*from_words, *added.overrides(found)]).config_hash == after.config_hash
    assert prepare([*to_words, *removed.overrides(removed.found())]).config_hash == before.config_hash
    hashes = {prepare([*from_words, *added.overrides([each])]).config_hash for each in found}
    assert len(hashes) == len(found)
    assert before.config_hash not in {*hashes, after.config_hash}


def test_a_stage_that_is_left_out_has_the_runs_own_config_as_long_as_it_lasts():
    stages = "stages=[{until:0.2,clip:norm,clip.max_norm:2},{until:'5ep'},{model.freeze:[head.*]}]"
    baseline, recipe = prepare(["epochs=10"]), prepare(["epochs=10", stages])
    added, removed = techniques(baseline, recipe), techniques(recipe, baseline)
    first, last = added.found()
    assert first.label == "stage until 0.2: clip=norm clip.max_norm=2"
    assert added.overrides([last]) == ["stages=[{until:0.2},{until:'5ep'},{model.freeze:['head.*']}]"]
    first, last = removed.found()
    assert removed.overrides([last]) == ["stages=[{until:0.2,clip:norm,clip.max_norm:2},{until:'5ep'},{}]"]
    assert removed.overrides([first, last]) == ["stages=null"]
    (whole,) = techniques(prepare(["epochs=10", "stages=[{until: 1ep, clip: norm}]"]), recipe).found()
    assert prepare(["epochs=10", whole.label]).config_hash == recipe.config_hash


def test_overrides_without_a_recipe_are_told_to_be_on_both_sides(capsys):
    assert main.main(["ablate", "baseline=fast", "clip=norm", "augment=[mixup]"]) == 2
    told = capsys.readouterr()
    assert "recipe=fast; clip=norm 'augment=[mixup]' are set on both sides, so that the effect is not measured" in told.out
    assert "do not differ" in told.err
    assert main.main(["ablate", "recipe=fast", "baseline=fast", "clip=norm"]) == 2
    assert "both sides" not in capsys.readouterr().out


def test_a_recipe_with_one_technique_more_leaves_its_tables_and_a_page(command, tiny):
    for name, more in (("plain", ""), ("better", "clip: {max_norm: 0.5}\n")):
        text = "# @package _global_\ndefaults:\n  - override /clip: norm\n  - _self_\n"
        Path(f"{name}.yaml").write_text(text + more)
    words = ["recipe=better.yaml", "baseline=plain.yaml", "rounds=1", "block_s=0.02", "tables=[alone,steps]"]
    done, found = command("ablate", *words, *tiny())
    assert list(found) == ["From plain.yaml to better.yaml, step by step", "plain.yaml and one technique more"]
    for each in found.values():
        json_keys.check_compare(each, " recipe baseline tables only format")
        assert [row["label"] for row in each["rows"]] == [f"plain.yaml with {len(tiny())} overrides", "+ clip.max_norm=0.5"]
    assert "+ clip.max_norm=0.5" in done.stdout
    pages.check(next(Path("outputs/ablate").rglob("ablate.html")).read_text())


# --- the answer of a comparison in one sentence, and its table ---


BASE = Row("naive", [], None, ratio=Interval(1.0, 1.0, 1.0))
FAST = Row("fast <b>", [], None, ratio=Interval(1.41, 1.3, 1.5))
UNSURE = Row("unsure", [], None, ratio=Interval(1.6, 0.9, 2.0))
FEW = Row("few", [], None, ratio=Interval(1.8, 0.0, math.inf))  # as too few rounds give it
FAILED = Row("failed", [], "out of memory")


def comparison(*rows, quality=False):
    return Comparison(list(rows), [], [], SimpleNamespace(quality=quality, block_s=0.4), {}, 1.0)


def judged(row, outcome, metric="accuracy", **more):
    return Row(row.label, [], None, ratio=row.ratio, verdict=Verdict(outcome, "accuracy 0.9 ± 0.01, loss 2", metric, **more))


def arriving(row, *seconds):
    """A variant whose seeds reached the target after so many seconds; None: not."""
    name = "seconds to accuracy>=0.9"
    runs = [TrainedRun(n, 1, {name: 99.0 if s is None else s}, [name] * (s is None)) for n, s in enumerate(seconds)]
    return replace(row, verdict=Verdict("INCONCLUSIVE", "accuracy 0.9", "accuracy", runs))


def better_by(*interval):
    return {"degradation": {"accuracy": Interval(*interval)}}


SLOWER = replace(UNSURE, ratio=Interval(0.9, 0.8, 1.1))
SLOW, FIRST_ROW = Row("slow", [], None, ratio=Interval(0.8, 0.7, 0.9)), judged(BASE, FIRST)
BETTER = judged(SLOW, "INCONCLUSIVE", **better_by(-0.02, -0.03, -0.01))
NOT_CERTAIN = "No variant is measurably faster than naive"
KNOWN = "with a result known to be as good"
IS_FAST = "fast <b> is 1.41 × as fast as naive (1.30 to 1.50)"


@pytest.mark.parametrize(
    ("rows", "answer"),
    [
        # The fastest variant that is certain is the answer.
        ([BASE, FAST, UNSURE, FEW, FAILED], f"{IS_FAST}."),
        (
            [BASE, UNSURE, FEW, FAILED],
            f"{NOT_CERTAIN}.",
        ),
        ([BASE, UNSURE, FAILED], f"{NOT_CERTAIN}."),
        ([BASE, SLOWER], f"{NOT_CERTAIN}."),
        # Where quality was asked for, only a PASS is an answer.
        *(
            (
                [FIRST_ROW, judged(FAST, outcome)],
                f"{NOT_CERTAIN} {KNOWN}.",
            )
            for outcome in ("FAIL", "INCONCLUSIVE")
        ),
        ([FIRST_ROW, judged(FAST, "PASS")], f"{IS_FAST}, and its result is no worse."),
        # A result that is certainly better is in the answer.
        (
            [FIRST_ROW, BETTER, judged(UNSURE, "PASS", **better_by(-0.2, -0.5, 0.1))],
            "slow has a better accuracy than naive, by 0.02 (0.01 to 0.03), but no variant is measurably faster with a result "
            "known to be as good.",
        ),
        (
            [FIRST_ROW, BETTER, judged(FAST, "PASS")],
            f"{IS_FAST}, and its result is no worse; slow has a better accuracy than naive, by 0.02 (0.01 to 0.03).",
        ),
        (
            [FIRST_ROW, BETTER, judged(FAST, "PASS", **better_by(-0.04, -0.05, -0.03))],
            f"{IS_FAST}, and has a better accuracy than naive, by 0.04 (0.03 to 0.05).",
        ),
        # Of the same mathematics another loss is a FAIL.
        ([FIRST_ROW, judged(SLOW, "FAIL", **better_by(-0.02, -0.03, -0.01))], f"{NOT_CERTAIN} {KNOWN}."),
    ],
)
def test_the_answer_in_one_sentence(rows, answer):
    assert headline(comparison(*rows, quality=any(row.verdict for row in rows))) == answer


def test_a_variant_is_called_in_a_sentence_as_the_comparison_says():
    step = replace(FAST, label="+ precision=bf16")
    ladder = replace(comparison(BASE, step), subject="naive with all up to {}")
    assert headline(ladder) == "naive with all up to precision=bf16 is 1.41 × as fast as naive (1.30 to 1.50)."


def to_target(*rows):
    return replace(comparison(*rows, quality=True), target="accuracy>=0.9")


def test_with_a_target_variants_are_ranked_by_the_time_to_it():
    base = arriving(BASE, *[10.0, 10.5, 9.8, 10.1, 10.2, 9.9, 10.3, 10.0])
    soon, never = arriving(UNSURE, *[5.0, 5.2, 4.9, 5.1, 5.05, 4.95, 5.15, 5.0]), arriving(FAST, *[None] * 8)
    found = to_target(base, never, soon, FAILED)
    assert headline(found).startswith(
        "unsure reaches accuracy>=0.9 sooner than naive, 2.00 × as fast (1.99 to 2.01): 5.0 s (median), by 8 of 8 seeds. "
        "No variant is measurably faster"
    )
    shown = table(found)
    assert [*shown.header][:5] == ["variant", "reached", "time to accuracy>=0.9", "updates to it", "sooner"]
    assert [row[:3] for row in shown.texts()] == [
        ["unsure", "8 of 8", "5.0 s"],
        ["naive", "8 of 8", "10.1 s"],
        ["fast <b>", "0 of 8", "not reached"],
        ["failed", "0 of 0", "not reached"],
    ]
    assert shown.winner == 0


TIMED, NEVER = arriving(BASE, 10.0, 11.0, 9.0), arriving(FAST, None, None, None)
NOT_SOONER = "No variant reaches accuracy>=0.9 certainly sooner than "


@pytest.mark.parametrize(
    ("rows", "begins"),
    [
        ([NEVER, NEVER], "No variant reaches accuracy>=0.9."),
        ([TIMED, NEVER], f"{NOT_SOONER}naive; the first in the order is naive: 10.0 s (median), by 3 of 3 seeds."),
        (
            [replace(NEVER, label="naive"), replace(TIMED, label="late")],
            f"{NOT_SOONER}naive; the first in the order is late: 10.0 s (median), by 3 of 3 seeds.",
        ),
        (
            [NEVER, arriving(UNSURE, 4.0, None, None)],
            f"{NOT_SOONER}fast <b>; the first in the order is unsure: 1 of 3 seeds.",
        ),
    ],
)
def test_what_is_not_certainly_sooner_is_no_winner(rows, begins):
    assert headline(to_target(*rows)).startswith(begins)


def test_the_table_draws_intervals_and_says_what_differs():
    worse = judged(FAST, "FAIL", degradation={"accuracy": Interval(0.02, 0.01, 0.03)})
    better = judged(UNSURE, "PASS", degradation={"accuracy": Interval(-0.02, -0.03, -0.01)})
    same = judged(FEW, "PASS", degradation={"accuracy": Interval(0.0, 0.0, 0.0)})
    text = joined(sections(comparison(judged(BASE, FIRST), worse, better, same, FAILED, quality=True)))
    for expected in (
        "fast &lt;b&gt;", 'class="faster"', 'class="FAIL"', ">worse by 0.02 (0.01 to 0.03)", ">the same</td>",
        "accuracy of the validation set",
        ">better by 0.02 (0.01 to 0.03)", ">0.9 ± 0.01", "out of memory", "95 % interval 1.300 to 1.500",
    ):  # fmt: skip
        assert expected in text
    assert "<b>" not in text
    assert text.count("<tr>") == 12  # the variants, and all of their figures
    assert not re.search(r'="[^"]*(inf|nan)', text)  # a variant without an interval does not spoil the others' scale


def test_the_winner_is_marked_and_columns_come_in_one_order():
    text = table(comparison(judged(BASE, FIRST), judged(FAST, "PASS"), judged(UNSURE, "PASS"), quality=True)).html
    assert re.findall(r"<tr class=winner>.*?</th>", text) == ['<tr class=winner><th scope="row">fast &lt;b&gt;</th>']
    heads = re.findall(r'<button type="button">(.*?)</button>', text)
    assert heads[:3] == ["variant", "accuracy of the validation set", "speed"]


@pytest.mark.parametrize(
    ("labels", "called"),
    [
        (["precision=fp32 surgery=[]", "precision=bf16 surgery=[]"], ["precision=fp32", "precision=bf16"]),
        (["a=1 b=1", "a=1 b=2", "a=2 b=2"], ["a=1 b=1", "b=2", "a=2 b=2"]),
        (["lr=1", "lr=1"], ["lr=1", "lr=1"]),
        (["naive", "+ precision=bf16", "+ compile=step"], ["naive", "+ precision=bf16", "+ compile=step"]),
    ],
)
def test_variants_are_named_by_what_differs(labels, called):
    assert names(comparison(*(replace(BASE, label=label) for label in labels))) == called


@pytest.mark.parametrize(
    ("found", "words"),
    [
        ((0.0, 0.0, 0.0), "the same"),
        ((-1.1e-17, -0.0057, 0.0057), "the same on average (-0.0057 to 0.0057)"),
        ((0.014, -0.0037, 0.032), "worse by 0.014 (-0.0037 to 0.032)"),
        ((-0.02, -0.03, -0.01), "better by 0.02 (0.01 to 0.03)"),
    ],
)
def test_a_difference_in_words(found, words):
    assert in_words(*found) == words


def test_an_ablation_of_named_techniques_has_these_alone():
    found = techniques(prepare(["recipe=naive"]), prepare(["recipe=fast"])).found()
    assert _named(found, None) == found
    first = found[0]
    assert [change.key for change in _named(found, [first.key.partition(".")[0]])] == [first.key]
    with pytest.raises(UserError, match=r"only=nothing: it is no technique that differs"):
        _named(found, ["nothing"])
