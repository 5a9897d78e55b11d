"""`drivetrain compare`: the variants, their rounds, their notes, and the verdict on quality."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from drivetrain.cli import main
from drivetrain.core import signals
from drivetrain.core.forking import ForkedProcess
from drivetrain.core.signals import ended_by_signals
from drivetrain.launch.job import prepare
from drivetrain.measure.benchmark.compare import notes_on, techniques
from drivetrain.measure.benchmark.interleave import Variant, run_rounds
from drivetrain.measure.benchmark.quality import FAIL, FIRST
from tests.support import json_keys, pages
from tests.support.waiting import until


def test_variants_are_interleaved_and_leave_a_table_and_a_page(command, tiny):
    """One that fails while it runs is a row with its reason, and ends the command with 1."""
    done, found = command("compare", *tiny("optimizer.lr=0.05,0.04,1e30", "rounds=2", "block_s=0.02", "log_every=1"))
    assert done.returncode == 1, done.stderr
    assert [row["label"] for row in found["rows"]] == [f"optimizer.lr={lr}" for lr in ("0.05", "0.04", "1e+30")]
    for row in found["rows"][:2]:
        assert (row["error"], len(row["rates"]), row["global_batch"]) == (None, 2, 12)
        assert row["samples_per_second"] > 0
        assert row["step_ms_p50"] <= row["step_ms_p95"]
        assert row["peak_memory_bytes"] > 2**20
    error = found["rows"][2]["error"]
    assert "not finite" in error or "loss is" in error
    assert error in done.stdout
    json_keys.check_compare(found)
    page = next(Path("outputs/compare").rglob("compare.html")).read_text()
    assert "optimizer.lr=0.04" in page
    assert 'src="http' not in page
    left = [p for p in Path("outputs").rglob("*") if p.is_file() and p.name != ".lock"]
    assert {p.name for p in left} == {"compare.json", "compare.html"}  # of the variants nothing is left


@pytest.mark.slow
def test_the_runs_own_saving_is_compared_where_it_is_named(command, tiny):
    done, found = command("compare", *tiny("saving=last,best", "saving.every_updates=1", "rounds=1", "block_s=0.02"))
    assert done.returncode == 0, done.stderr
    assert [row["label"] for row in found["rows"]] == ["saving=last", "saving=best"]
    assert all("saving=none" not in row["overrides"] for row in found["rows"])


@pytest.mark.parametrize("verb", ["compare", "ablate", "doctor"])
def test_what_is_to_be_gone_on_with_is_refused(verb, capsys):
    assert main.main([verb, "resume=auto", "precision=fp32,bf16"]) == 2
    assert "leave resume= out" in capsys.readouterr().err


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
    done, found = command("compare", *tiny("optimizer.lr=1e30,0.05,0.06", "rounds=2", "block_s=0.02", "log_every=1"))
    assert (done.returncode, found) == (2, {})
    assert "the first variant (optimizer.lr=1e+30) is what the others are compared to, and it ended: " in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["precision=fp32"], "nothing to compare"),
        (["precision=fp32,bf16", "rounds=0"], "rounds=0: must be"),
        (["precision=fp32,bf16", "rounds=6,12"], "takes one value"),
        (["precision=fp32,bf16", "rounds=6", "rounds=12"], "rounds is given twice"),
        (["precision=fp32,bf17", "optimizer.lrr=1"], "did you mean"),
        (["compile=none,cudagraph", "runtime.device=cpu"], "compile=cudagraph needs a CUDA device"),
    ],
)
def test_wrong_words_are_answered_at_once(words, told, capsys):
    assert main.main(["compare", *words]) == 2
    assert told in capsys.readouterr().err
    assert not Path("outputs").exists()


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


def test_a_planted_break_fails(command, tiny):
    words = ["data=digits", "epochs=2", "updates=null", "batch.global_batch=64", "optimizer=adamw", "optimizer.lr=0.003,0.9"]
    done, found = command("compare", *tiny(*words, "quality=true", "seeds=3", "max_seeds=3", "rounds=1", "block_s=0.02"))
    base, broken = (row["verdict"] for row in found["rows"])
    assert broken["outcome"] == FAIL, done.stdout
    assert base["outcome"] == FIRST
    json_keys.check_compare(found)
    assert broken["effect"] == "changes"
    assert broken["claims"] == ["optimizer.lr"]
    assert "FAIL" in done.stdout


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
    assert done.returncode == 0, done.stderr
    assert list(found) == ["From plain.yaml to better.yaml, step by step", "plain.yaml and one technique more"]
    for each in found.values():
        json_keys.check_compare(each, " recipe baseline tables")
        assert [row["label"] for row in each["rows"]] == [f"plain.yaml with {len(tiny())} overrides", "+ clip.max_norm=0.5"]
    assert "+ clip.max_norm=0.5" in done.stdout
    pages.check(next(Path("outputs/ablate").rglob("ablate.html")).read_text())
