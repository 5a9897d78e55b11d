"""One page of each kind, made from figures by hand: no run, no measurement."""

import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from drivetrain.cli import show_data
from drivetrain.launch.job import prepare
from drivetrain.measure.benchmark import compare
from drivetrain.measure.benchmark.compare import Comparison, Row
from drivetrain.measure.benchmark.quality import FIRST, PASS, Verdict
from drivetrain.measure.benchmark.variants import VariantSpec
from drivetrain.measure.bisect import bisect
from drivetrain.measure.bisect.search import NAMED, BisectSettings, ChangeSearch, Measured, Subsets
from drivetrain.measure.certify import certify, judge
from drivetrain.measure.certify.judge import Trace, TracedTensor
from drivetrain.measure.intervals import Interval
from drivetrain.measure.profile.attribution import CodeLine
from drivetrain.measure.profile.doctor import Diagnosis, Problem
from drivetrain.measure.profile.doctor import sheet_of as doctor_sheet
from drivetrain.measure.profile.step import Turn
from drivetrain.measure.tune import tune
from drivetrain.measure.tune.range_test import RangeTest
from drivetrain.measure.verbs import origin
from drivetrain.run import reader
from drivetrain.ui.pages.runs import sheet_of

HOSTILE = "<!--<script>alert(1)</script>\u202e\x1b[2J&amp;'\""
ABOUT: dict[str, Any] = {
    "drivetrain": "0.1.0", "python": "3.11", "platform": "Linux", "processor": "a CPU", "git_commit": None, "lock_hash": "0" * 16,
    "versions": {"torch": "2.15.0", HOSTILE: HOSTILE},
}  # fmt: skip


def run_folder(folder: Path, lr: float, status: str = "completed") -> Path:
    """The files of a run of 40 updates, as drivetrain writes them."""
    folder.mkdir(parents=True)
    records: list[dict[str, Any]] = []
    for n in range(1, 41):
        record = {"event": "train", "update": n, "samples": 64 * n, "time": 1e9 + n}
        figures = {"loss": 2.3 * math.exp(-n * lr), "lr": lr, "samples_per_second": 1000.0 + n}
        records.append({**record, **figures, "data_wait": 0.1, "memory_bytes": 2**30})
        if n % 10 == 0:
            value = 1 - math.exp(-n * lr)
            records.append(
                {"event": "evaluate", "update": n, "set": "validation", "loss": 1.0, "accuracy": value, "time": 1e9 + n}
            )
    last = {"loss": 1.0, "accuracy": 1 - math.exp(-40 * lr)}
    names = ["cat", HOSTILE, "a dog with a long name"]
    table = {"confusion_matrix": {"rows": names, "columns": names, "values": [[9, 1, 0], [0, 7, 3], [5, 0, 5]]}}
    table["per_class"] = {"rows": names, "columns": ["f1", "samples"], "values": [[0.75, 10], [0.78, 10], [0.56, 10]]}
    overrides = [f"optimizer.lr={lr}", "model=mlp", f"data.root='{HOSTILE}'"]
    selection = {"metric": "accuracy", "better": "max"}
    result = {
        "status": status, "error": HOSTILE if status != "completed" else None, "updates": 40, "epochs": 4.0, "wall_s": 41.0,
        "metrics": {"validation": {"final": last, "best": {**last, "update": 40}}, "test": {"final": last}},
        "tables": {"test": {"final": table}}, "selection": selection, "samples_per_second": 1020.0, "step_ms_p50": 60.0,
        "overrides": overrides, "peak_memory_bytes": 2**30, "device": "cpu", "device_name": "a CPU, 2 threads",
    }  # fmt: skip
    content = {
        "result.json": json.dumps(result),
        "environment.json": json.dumps({**ABOUT, "time": 1e9, "overrides": overrides, "selection": selection}),
        "metrics.jsonl": "".join(json.dumps(record) + "\n" for record in records),
        "config.yaml": f"optimizer: {{lr: {lr}}}\nepochs: 4\n",
        "recipe.yaml": "defaults: [{override /model: mlp}, {override /data: digits}, {override /optimizer: adamw}]\n"
        f"optimizer: {{lr: {lr}}}\nepochs: 4\n",
    }
    for name, text in content.items():
        (folder / name).write_text(text, encoding="utf-8")
    return folder


def comparison(quality: bool = True) -> Comparison:
    """Four variants: the first, a faster one, one without an interval, and one that failed."""

    def verdict(outcome: str, worse: float) -> Verdict | None:
        found = Verdict(outcome, "accuracy 0.9 ± 0.01, loss 2", "accuracy", degradation={"accuracy": Interval(worse, -0.1, 0.1)})
        return found if quality else None

    rates = [1000.0, 1010.0, 990.0, 1005.0, 1000.0, 995.0]
    rows = [
        Row("precision=fp32 surgery=[]", [], ratio=Interval(1, 1, 1), samples_per_second=1000.0, rates=rates, step_ms_p50=10.0),
        Row("precision=bf16 surgery=[channels_last]", [], ratio=Interval(1.41, 1.3, 1.5), rates=[1.4 * r for r in rates]),
        Row("precision=bf16 surgery=[]", [], ratio=Interval(0.8, 0.0, math.inf), rates=rates[:2], samples_per_second=800.0),
        Row(f"precision={HOSTILE} surgery=[]", [], error=HOSTILE),
    ]
    rows[0].verdict, rows[1].verdict, rows[2].verdict = verdict(FIRST, 0), verdict(PASS, 0.0), verdict("INCONCLUSIVE", 0.01)
    settings: Any = SimpleNamespace(quality=quality, block_s=0.4)
    return Comparison(rows, [HOSTILE], [], settings, ABOUT, 1.0)


def profile() -> Any:
    """The parts of an update's time: a fifth waits for data, and a line of the user's own takes half."""
    line = CodeLine("net.py:12 in forward", HOSTILE, share=0.5, layers=0.2, looks=(0.4, 0.6, 0.5, 0.5))
    return SimpleNamespace(
        queued=0.4, start_s=2.0, threads=1, device="cpu", turns=[Turn(0.1, flops, {}) for flops in (0.9e12, 1e12, 1.1e12)],
        waits_for_data=Interval(0.2, 0.15, 0.25),
        step_ms=100.0, phases={"data wait": 20.0, "forward": 80.0}, utilization={"in operations": 0.9}, evaluation_s=1.0,
        saving_s=0.1, lines=[line], rest={"the update": 0.2}, bandwidth=1e10, step_flops=1e9,
    )  # fmt: skip


def doctors() -> str:
    """The page of a diagnosis with a gain."""
    done = comparison(quality=False)
    gain = done.rows[1], done.rows[0]
    problem = Problem(0.2, "data", "the step waits for data 20% of its time", HOSTILE)
    found = Diagnosis(profile(), [problem, problem], [gain], [HOSTILE], {"What could help, each by itself": done})
    found_by = origin(["doctor", "data=digits"], ABOUT)
    sheet = doctor_sheet(found, ["drivetrain train precision=bf16"])
    return replace(sheet, sections=[*sheet.sections, *found_by]).page()


def bisected() -> ChangeSearch:
    """A bisection that found one cause."""
    changes: Any = [SimpleNamespace(key="precision", good="fp32", bad=HOSTILE), SimpleNamespace(key="lr", good="1", bad="2")]
    sides = [VariantSpec(name, [], None) for name in ("naive", "mine.yaml")]
    overrides: Any = SimpleNamespace(overrides=lambda chosen: [])
    measurer: Any = SimpleNamespace(
        unit="samples/s", settings=BisectSettings(), subsets=Subsets(sides[0], sides[1], overrides, (), (), changes, [HOSTILE]),
        shown=lambda found: (f"{found.effect.middle:+.0%}", f"{found.effect.low:+.0%}") if found.effect else (),
    )  # fmt: skip
    effect = Interval(-0.2, -0.3, -0.1)
    tried = {
        frozenset({0}): Measured(effect, 6),
        frozenset({1}): Measured(None, 6, HOSTILE),
        frozenset({0, 1}): Measured(effect, 6),
    }
    return ChangeSearch(2, measurer, tried, NAMED, [(0,)], Measured(effect, 6))


def certified() -> str:
    """The page of two runs that differ, of which one could not be looked into."""
    key = (1, "weights", HOSTILE)
    traces = [Trace({key: TracedTensor(np.array([value]), 1e-7, (1,))}, unseen=[HOSTILE]) for value in (1.1, 1.0)]
    verdict = judge.judge(*traces, judge.Floors())
    return certify.sheet_of(certify.Certified(verdict, *traces, 2.0**-24, [("optimizer.lr", "0.1", HOSTILE)])).page()


def data(folder: Path) -> str:
    """The page of a table's data, in which a column and its categories have hostile names."""
    quoted = HOSTILE.replace('"', '""')
    rows = [f'{n},"{quoted} {n % 3}",{"ab"[n % 2]}' for n in range(40)]
    (folder / "data.csv").write_text("\n".join([f'age,"{quoted}",kind', *rows]), encoding="utf-8")
    words = ["data=tabular", f"data.path={folder / 'data.csv'}", "data.target=kind", "task=classification"]
    return show_data.sheet_of(prepare(words).run).page()


def every(folder: Path) -> dict[str, str]:
    """Name → page."""
    for n, lr in enumerate((0.003, 0.03, 0.3)):
        run_folder(folder / str(n), lr)
    runs = reader.find([folder])
    failed = reader.read(run_folder(folder / "failed", 0.1, "diverged"))
    rates = [10 ** (-6 + n / 10) for n in range(60)]
    tested = RangeTest(rates, [2.0 - 0.02 * n if n < 40 else 3.0 for n in range(60)], 0.1)
    tuning: Any = SimpleNamespace(notes=[HOSTILE], comparisons={"The proof": comparison(), "Alone": comparison(quality=False)})
    both = {"Alone": comparison(quality=False), "The proof": comparison()}
    return {
        "run": sheet_of([runs[1]]).page(),
        "failed run": sheet_of([failed]).page(),
        "report": sheet_of(runs).page(),
        "compare": compare.sheet_of(comparison()).page(),
        "ablate": compare.ablation_sheet("fast", HOSTILE, both).page(),
        "tune": tune.sheet_of(tuning, "precision=bf16 makes it faster", ["drivetrain train"], tested).page(),
        "doctor": doctors(),
        "bisect": bisect.sheet_of(bisected(), 9.0).page(),
        "certify": certified(),
        "data": data(folder),
    }
