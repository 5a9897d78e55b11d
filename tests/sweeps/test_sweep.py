"""The parts of a sweep by themselves: its words, its space, what is left of it, its table, and its jobs as tasks of Ray."""

import importlib.machinery
import importlib.util
import json
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

from drivetrain.core.errors import UserError
from drivetrain.core.machine import accelerators, guards
from drivetrain.core.machine.accelerators import Accelerator
from drivetrain.core.options.selection import Selection, selected
from drivetrain.run import directory
from drivetrain.run.result import Result
from drivetrain.sweeps import driver, launchers, optuna, store
from drivetrain.sweeps.driver import Display, progress, row
from drivetrain.sweeps.launchers import OnRay, _parameters, own_device
from drivetrain.sweeps.options import Basic, Joblib, Optuna, Ray, SubmititLocal, SubmititSlurm, split
from drivetrain.sweeps.optuna import Search, choices, examples, setting
from drivetrain.sweeps.optuna import read as read_space
from drivetrain.sweeps.store import (
    LENGTH,
    Grid,
    StoredJob,
    Sweep,
    SweepJob,
    best_of,
    config_of,
    means,
    merge_overrides,
    one_job,
    prepare,
    read,
    ties,
    unfinished,
    value_of,
    write_summary,
)
from drivetrain.ui import terminal
from tests.support import command
from tests.support.refusals import problems_of
from tests.support.waiting import until

OPTUNA = "hydra/sweeper=optuna"
SLURM = "hydra/launcher=submitit_slurm"


def ended(entry: StoredJob, status: str = "completed", accuracy: float | None = None, **more: float) -> None:
    """Let a job have ended like this."""
    entry.run_dir.mkdir(exist_ok=True)
    figures = {} if accuracy is None else {"accuracy": accuracy, **more}
    Result(status=status, metrics={"test": {"final": figures, "best": figures}}, wall_s=1.0).write(entry.run_dir)
    entry.result = Result.read(entry.run_dir)


# --- Hydra's words ---


def test_hydras_words_are_told_from_the_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: name)
    settings, words = split(["epochs=1,2", SLURM, "hydra.launcher.partition=gpu", "hydra.launcher.mem_gb=4", OPTUNA])
    assert words == ["epochs=1,2"]
    assert settings.launcher == SubmititSlurm(partition="gpu", mem_gb=4)
    assert settings.sweeper == Optuna(n_trials=20, n_jobs=1, sampler="tpe")
    settings, _ = split(["hydra/launcher=joblib", "hydra.launcher.n_jobs=2", "hydra/sweeper=basic"])
    assert (settings.launcher, settings.sweeper) == (Joblib(n_jobs=2), Basic())
    assert split([])[0].launcher == Basic()


def test_everything_that_is_wrong_with_them_is_told_at_once() -> None:
    told = problems_of(
        lambda: split(
            ["hydra/launcher=submitit_local", "hydra.launcher.partition=x", "hydra.launcher.timeout_mn=3", "hydra.run.dir=x",
             "hydra.launcher.setup=ls", "hydra.launcher.array_parallelism=1,2", "hydra/sweeper=optun"]
        )
    )  # fmt: skip
    expected = [
        "'hydra.launcher.array_parallelism=1,2': ", "hydra.run.dir is for one run: set hydra.sweep", "submitit_slurm has it",
        "did you mean 'timeout_min'", "hydra.launcher.setup=ls: must be a list", "did you mean 'optuna'",
    ]  # fmt: skip
    assert len(told) == len(expected)
    for line, part in zip(told, expected, strict=True):
        assert part in line


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (
            ["hydra.launcher.n_jobs=2"],
            "hydra/launcher=basic has no 'n_jobs' (hydra.launcher.n_jobs): hydra/launcher=joblib has it",
        ),
        (["hydra/launcher=joblib", "hydra.launcher.n_jobs=0"], "must be ≥ 1"),
        (["hydra/launcher=joblib", OPTUNA], "hydra.sweeper.n_jobs says how many"),
        ([OPTUNA, "hydra.sweeper.sampler=cmaes"], "must be one of 'tpe', 'random' or 'grid'"),
        (["hydra/launcher=dask"], "there is: basic, joblib, ray, submitit_local, submitit_slurm"),
    ],
)
def test_a_wrong_word_of_hydras(words: list[str], part: str) -> None:
    (told,) = problems_of(split, words)
    assert part in told


@pytest.mark.parametrize(("word", "package"), [("hydra/launcher=submitit_local", "slurm"), (OPTUNA, "optuna")])
def test_an_extra_that_is_missing_is_named(word: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    (told,) = problems_of(split, [word])
    assert f"pip install 'drivetrain[{package}]'" in told


def test_the_settings_reach_submitit_under_its_own_names(monkeypatch: pytest.MonkeyPatch) -> None:
    import submitit

    monkeypatch.setattr("shutil.which", lambda name: name)

    asked = SubmititSlurm(30, "gpu", "me", None, "h200", 2, 4, 1, 8, 16, 3, ["module load cuda"])
    given = _parameters(asked)
    assert given == {
        "timeout_min": 30, "slurm_partition": "gpu", "slurm_account": "me", "slurm_constraint": "h200", "nodes": 2,
        "tasks_per_node": 4, "gpus_per_node": 1, "cpus_per_task": 8, "mem_gb": 16, "slurm_array_parallelism": 3,
        "slurm_setup": ["module load cuda"],
    }  # fmt: skip
    executor = submitit.AutoExecutor("logs", cluster="slurm")
    executor.update_parameters(**given)  # it refuses names that it does not know
    assert executor._executor.parameters | {"time": 30, "mem": "16GB", "constraint": "h200"} == executor._executor.parameters
    submitit.AutoExecutor("logs", cluster="local").update_parameters(**_parameters(SubmititLocal(timeout_min=3)))


def test_jobs_at_a_time_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = guards.usable_cores(1)
    monkeypatch.setenv(guards.JOBS, "2")
    assert guards.usable_cores(1) == max(1, alone // 2)
    assert guards.usable_cores(10**6) == 1


def test_jobs_at_a_time_go_round_the_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = (StoredJob(n, job, tmp_path) for n, job in enumerate(prepare(["parallel=single,ddp"])))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    assert [own_device(one, place)["CUDA_VISIBLE_DEVICES"] for place in range(3)] == ["4", "6", "4"]
    assert own_device(two, 1) == {}, "it has several"
    (numbered,) = (StoredJob(n, job, tmp_path) for n, job in enumerate(prepare(["runtime.device=cuda:1"])))
    assert own_device(numbered, 1) == {}, "it names one"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4")
    assert own_device(one, 1) == {}
    monkeypatch.setattr(accelerators, "find", lambda: Accelerator("cuda", 2, (9, 4), rocm=True))
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "2,3")
    assert own_device(one, 1) == {"HIP_VISIBLE_DEVICES": "3"}, "ROCm prefers it to the other"


# --- going on ---


def a_sweep(path: Path, words: list[str]) -> tuple[Sweep, Grid]:
    path.mkdir(parents=True, exist_ok=True)
    sweep, grid = Sweep(path, words, []), Grid(prepare(words))
    grid.begin(sweep)
    return sweep, grid


def test_only_what_has_ended_well_or_for_good_is_kept(tmp_path: Path) -> None:
    words = ["optimizer.lr=0.1,0.2,0.3,0.4,0.5,0.6"]
    sweep, store = a_sweep(tmp_path / "s", words)
    for entry, status in zip(sweep.entries, ("completed", "diverged", "failed", "interrupted"), strict=False):
        ended(entry, status)
    (tmp_path / "s" / "4").mkdir()  # killed: it wrote no result
    assert not store.is_finished()
    again = a_sweep(tmp_path / "s", words)[1]
    assert [e.number for e in again.kept] == [0, 1]
    assert [e.number for e in again.ask(10)] == [2, 3, 4, 5]
    assert again.ask(1) == []


def test_a_job_that_is_killed_behind_its_result_has_the_results_code(tmp_path: Path) -> None:
    """And not 247, which is -9 as a byte."""
    sweep, _ = a_sweep(tmp_path / "s", ["epochs=1,2"])
    ended(sweep.entries[0], "completed")
    for entry, code in zip(sweep.entries, (0, 1), strict=True):
        entry.close(-9, "the job's process was killed by signal 9")
        assert entry.result is not None
        assert entry.result.code == code


def test_a_folder_without_a_checkpoint_starts_anew(tmp_path: Path) -> None:
    sweep, _ = a_sweep(tmp_path / "s", ["epochs=1,2"])
    for entry in sweep.entries:
        ended(entry, "failed")
        (entry.run_dir / "metrics.jsonl").touch()
    (sweep.entries[1].run_dir / "checkpoints" / "3").mkdir(parents=True)
    for entry in sweep.entries:
        entry.prepare_folder()
    assert [p.name for p in sweep.entries[0].run_dir.iterdir()] == [".lock"]
    assert (sweep.entries[1].run_dir / "metrics.jsonl").exists()
    assert Result.read(sweep.entries[1].run_dir) is None  # that of the part before is not taken for the next one's


def test_jobs_json_holds_all_that_a_job_needs(tmp_path: Path) -> None:
    """Also a cell of a recipe's own grid."""
    sweep, _ = a_sweep(tmp_path / "s", ["recipe=speed_ladder", "updates=2,3"])
    last = sweep.entries[-1]
    alone = one_job(sweep.path, last.number)
    assert alone.job.overrides == last.job.overrides
    assert alone.job.job is not None
    assert last.job.job is not None
    assert alone.job.job.config_hash == last.job.job.config_hash
    assert len({e.job.job.config_hash for e in sweep.entries if e.job.job}) == len(sweep.entries) > 2


def test_the_newest_unfinished_sweep_of_the_same_words(tmp_path: Path) -> None:
    words = ["epochs=1,2"]
    more = "hydra.sweeper.n_trials=5"  # may change too
    places = [tmp_path / "multirun" / "2026-01-01" / name for name in ("a", "b", "c", "d")]
    for place, theirs in zip(places, (words, [*words, "hydra/launcher=joblib", more], ["epochs=1,3"], words), strict=True):
        a_sweep(place, theirs)
        (place / ".lock").touch()
    write_summary(Sweep(places[3], words, []), None, 1.0, finished=True)
    assert sorted(p.name for p in unfinished(tmp_path, words)) == ["a", "b"]
    with directory.locked(places[0]):
        assert [p.name for p in unfinished(tmp_path, words)] == ["b"]


def test_beside_a_sweeps_folder_only_how_it_runs_may_be_said() -> None:
    words = ["epochs=1,2", SLURM, "hydra.launcher.partition=a", "hydra.launcher.qos=b"]
    place = Path("there")
    assert merge_overrides(place, words, ["hydra.launcher.partition=c"])[-2:] == [
        "hydra.launcher.qos=b",
        "hydra.launcher.partition=c",
    ]
    assert merge_overrides(place, words, ["hydra/launcher=joblib"]) == ["epochs=1,2", "hydra/launcher=joblib"]
    (told,) = problems_of(merge_overrides, place, words, ["epochs=3", "hydra.sweeper.n_trials=4"])
    assert told.endswith("leave out epochs=3")


def test_a_sweep_is_not_gone_on_with_twice_at_once(tmp_path: Path, refused: Callable[..., str]) -> None:
    sweep, _ = a_sweep(tmp_path / "s", ["epochs=1,2"])
    with directory.locked(sweep.path):
        assert "is in use by another process" in refused("train", "-m", f"resume={sweep.path}")
    assert "is a sweep: say -m" in refused("train", f"resume={sweep.path}")
    content = json.loads((sweep.path / "jobs.json").read_text())
    for damaged in ([], {**content, "overrides": 5}, {**content, "config_dirs": [5]}, {**content, "jobs": ["x"]}):
        (sweep.path / "jobs.json").write_text(json.dumps(damaged))
        assert "damaged, or of an older drivetrain" in refused("train", "-m", f"resume={sweep.path}")


def test_a_changed_sweep_is_not_taken(tiny, tmp_path):
    """Its words may name code to run."""
    (tmp_path / "evil.py").write_text("raise SystemExit('imported')\n")
    folder = tmp_path / "sweep"
    folder.mkdir()
    store.Sweep(folder, tiny("seed=1,2"), []).add([])
    assert store.read_own(folder)["jobs"] == []
    content = store.read(folder)
    content["overrides"] += ["trust=[evil]", "model=own", "model.target=evil.Net"]
    (folder / "jobs.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match=r"start it anew with the words that you accept: .*evil\.Net"):
        driver.run([f"resume={folder}"])
    assert "evil" not in sys.modules


# --- the objective ---


def test_the_best_job_by_the_losss_metric(tmp_path: Path) -> None:
    sweep, store = a_sweep(tmp_path / "s", ["epochs=1,2,3,4"])
    for entry, (status, value) in zip(
        sweep.entries, (("completed", 0.5), ("completed", 0.7), ("diverged", 0.9), ("completed", float("nan"))), strict=True
    ):
        ended(entry, status, value)
    objective = store.objective
    assert objective == Selection("accuracy", max)
    write_summary(sweep, objective, 7.0, store.is_finished())
    told = json.loads((sweep.path / "sweep.json").read_text())
    assert (told["best"], told["finished"], told["wall_s"]) == (1, True, 7.0)
    assert told["objective"] == {"metric": "accuracy", "direction": "maximize"}
    assert [(j["status"], j["objective"]) for j in told["jobs"]] == [
        ("completed", 0.5), ("completed", 0.7), ("diverged", None), ("completed", None),
    ]  # fmt: skip
    assert best_of(sweep.entries, Selection("loss", min)) is None


def test_the_loss_decides_ties_and_an_average_counts_where_there_is_one(tmp_path: Path) -> None:
    sweep, store = a_sweep(tmp_path / "s", ["ema=none,ema", "epochs=1,2"])
    objective = store.objective
    assert objective == Selection("accuracy", max)
    for entry, loss in zip(sweep.entries, (0.4, 0.3, 0.3, 0.5), strict=True):
        ended(entry, "completed", 0.9, loss=loss)
    best = best_of(sweep.entries, objective)
    assert best is not None
    assert (best.number, ties(sweep.entries, objective, best)) == (1, ": job 2 ties with it")
    ended(best, "completed", 0.9, loss=0.1)
    assert ties(sweep.entries, objective, best) == ": jobs 0, 2, 3 tie with it in accuracy, and its loss is lower"
    ended(sweep.entries[2], "completed", 0.8, loss=0.5, ema_accuracy=0.95, ema_loss=0.6)
    assert (best_of(sweep.entries, objective), value_of(sweep.entries[2].result, objective)) == (sweep.entries[2], 0.95)
    assert ties(sweep.entries, objective, sweep.entries[2]) == ""


def test_of_configs_over_folds_the_best_mean_decides(tmp_path: Path) -> None:
    """Not the fold that is easiest; a config one of whose folds did not end is the last."""
    sweep, store = a_sweep(tmp_path / "s", ["data.folds=2", "data.fold=0,1", "epochs=1,2,3"])
    for entry, value in zip(sweep.entries, (0.99, 0.9, 0.8, 0.5, 0.8, 0.99), strict=True):
        ended(entry, "completed", value)
    best = best_of(sweep.entries, store.objective)
    assert best is not None
    assert (best.number, means(sweep.entries, store.objective)[config_of(best)]) == (5, pytest.approx(0.895))
    ended(sweep.entries[2], "diverged", 0.8)
    assert best_of(sweep.entries, store.objective) is sweep.entries[1]


def test_jobs_with_different_metrics_have_no_best(tmp_path: Path) -> None:
    sweep, grid = a_sweep(tmp_path / "s", ["recipe=default,stdlib_gpt"])
    assert [selected(e.job.job.run).maximize for e in sweep.entries if e.job.job] == [True, False]
    assert grid.objective is None


# --- the table ---


def entries(path: Path, count: int) -> list[StoredJob]:
    return [StoredJob(n, SweepJob(f"seed={n}", [], None, []), path / str(n)) for n in range(count)]


def told_progress(entry: StoredJob, update: int, of: int) -> None:
    entry.run_dir.mkdir(exist_ok=True)
    record = {"event": "train", "update": update, "loss": 0.25, "samples_per_second": 1234.0}
    lines = [{**record, "update": n} for n in range(update - 200, update + 1)] + [{"event": "evaluate", "update": update}]
    (entry.run_dir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"event": "tr')
    (entry.run_dir / LENGTH).write_text(str(of))


def test_a_jobs_progress_is_read_from_the_end_of_its_file(tmp_path: Path) -> None:
    (entry,) = entries(tmp_path, 1)
    assert progress(entry) == ({}, None)
    told_progress(entry, 300, 400)
    record, length = progress(entry)
    assert (record["update"], length) == (300, 400)


def test_the_time_left_follows_from_what_was_done_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [5.0]
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    all_of_them = entries(tmp_path, 4)
    display = Display(4)
    display.keep(all_of_them[:1])
    told_progress(all_of_them[1], 200, 400)  # half of it was made before the sweep was gone on with
    for entry in all_of_them[1:3]:
        display.begin(entry)
    assert display.seconds_left(all_of_them[1:3]) is None
    clock[0] = 15.0
    told_progress(all_of_them[1], 300, 400)
    assert display.seconds_left(all_of_them[1:3]) == pytest.approx(10 / 0.25 * (3 - 0.25))
    ended(all_of_them[1])
    display.end(all_of_them[1], all_of_them[2:3])
    assert display.seconds_left(all_of_them[2:3]) == pytest.approx(10 / 0.5 * 2)


def drawn(display: Display, jobs: list[StoredJob], running: list[StoredJob], max_rows: int) -> str:
    from rich.console import Console

    console = Console(width=120, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(display.table(jobs, running, max_rows))
    return console.export_text()


def test_the_tables_name_the_set_of_a_figure(capsys: pytest.CaptureFixture[str]) -> None:
    results = [
        Result("completed", metrics={"validation": {"final": {"loss": 0.5}}, "test": {"final": {"loss": 0.7}}}),
        Result("completed", metrics={"test": {"final": {"loss": 0.9}}}),
    ]
    terminal.show_jobs([(n, f"seed={n}", result) for n, result in enumerate(results)])
    header, *rows = capsys.readouterr().out.splitlines()
    assert header.split("status")[1].split("samples/s")[0].split() == ["validation", "loss", "test", "loss"]
    assert [line.split()[3:5] for line in rows if "completed" in line] == [["0.5000", "–"], ["–", "0.9000"]]
    entry = StoredJob(0, SweepJob("", [], None, []), Path())
    entry.result = results[0]
    assert "0.5000 validation" in row(entry, False)


def test_the_live_table(tmp_path: Path) -> None:
    jobs = entries(tmp_path, 40)
    display = Display(40)
    for entry in jobs[:2]:
        display.begin(entry)
    ended(jobs[0], "failed")
    display.end(jobs[0], jobs[1:2])
    told_progress(jobs[1], 300, 1400)
    text = drawn(display, jobs, jobs[1:2], 50)
    assert "1 of 40 done · 1 failed" in text
    assert "left" in text.splitlines()[0]
    (line,) = (line for line in text.splitlines() if "seed=1 " in line)
    assert [cell.strip() for cell in line.split("│")[1:-2]] == ["1", "seed=1", "running", "300/1,400", "0.2500 training", "1,234"]
    assert text.count("waiting") == 38
    text = drawn(display, jobs, jobs[1:2], 10)  # they do not fit: those that run
    assert "seed=1 " in text
    assert "seed=2 " not in text


# --- the search ---


@pytest.mark.parametrize(
    ("word", "axis"),
    [
        ("optimizer.lr=interval(1,2)", FloatDistribution(1.0, 2.0)),
        ("optimizer.lr=tag(log,interval(1e-4,1e-1))", FloatDistribution(1e-4, 1e-1, log=True)),
        ("epochs=int(interval(1,5))", IntDistribution(1, 5)),
        ("epochs=range(1,5)", IntDistribution(1, 4)),
        ("epochs=range(1,6,2)", IntDistribution(1, 5, step=2)),
        ("clip.norm=range(0.5,2.0,0.5)", FloatDistribution(0.5, 1.5, step=0.5)),
        ("precision=fp32,bf16", CategoricalDistribution(["fp32", "bf16"])),
        ("surgery=choice([],[channels_last])", CategoricalDistribution(["[]", "[channels_last]"])),
    ],
)
def test_hydras_grammar_is_the_space(word: str, axis: Any) -> None:
    key = word.partition("=")[0]
    assert read_space(["updates=3", word]) == (["updates=3", key], {key: axis})
    values = choices(axis)
    if values is not None and "interval" not in word:
        store = prepare(["updates=3", word])  # what a sweep makes of the same word
        assert [setting(key, v) for v in values] == [job.overrides[1] for job in store]


def test_an_interval_is_tried_in_its_middle() -> None:
    """The middle of what is searched: between 1e-4 and 1e-2 by its logarithm that is 1e-3."""
    assert examples(FloatDistribution(1e-4, 1e-2, log=True)) == [pytest.approx(1e-3)]
    assert examples(FloatDistribution(1.0, 2.0)) == [1.5]
    assert examples(IntDistribution(1, 5)) == [3]


def test_what_is_no_space() -> None:
    told = problems_of(
        lambda: read_space(
            ["a=interval(2,1)", "b=tag(log,interval(0,1))", "c=tag(often,interval(0,1))", "d=tag(log,choice(1,2))", "e=1,1",
             "g=interval(0,1e999)", "h=glob(*)", "f=interval(1,2)", "f=3"]
        )
    )  # fmt: skip
    parts = ("low <= high", "low > 0", "tag often", "not for listed", "twice", "two ends", "glob()", "f is both searched")
    for line, part in zip(told, parts, strict=True):
        assert part in line


def a_search(path: Path, *words: str) -> tuple[Sweep, Search]:
    settings, own = split([OPTUNA, *words])
    assert isinstance(settings.sweeper, Optuna)
    sweep, search = Sweep(path, [OPTUNA, *words], []), Search(settings.sweeper, own, [])
    path.mkdir(exist_ok=True)
    search.begin(sweep)
    return sweep, search


LR = "optimizer.lr=tag(log,interval(1e-4,1e-1))"


def test_a_search_goes_on_where_it_was(tmp_path: Path) -> None:
    """Finished trials count, also failed ones; those under way come again with their values; new ones are others.

    Trials are drawn from the space, the same ones by the same seed.
    """
    import optuna

    words = ("model=mlp", LR, "epochs=1,2", "hydra.sweeper.n_trials=6", "hydra.sweeper.seed=3")
    sweep, search = a_search(tmp_path / "s", *words)
    first = search.ask(5)
    for entry in first:
        lr, epochs = (word.partition("=")[2] for word in entry.job.label.split())
        assert 1e-4 <= float(lr) <= 1e-1
        assert epochs in ("1", "2")
    alike, other = (a_search(tmp_path / f"{seed}", *words[:-1], f"hydra.sweeper.seed={seed}")[1].ask(3) for seed in (3, 4))
    drawn, again, others = ([entry.job.label for entry in entries[:3]] for entries in (first, alike, other))
    assert drawn == again != others
    for entry, status, value in ((first[0], "completed", 0.5), (first[1], "failed", None), (first[2], "diverged", None)):
        ended(entry, status, value)
        search.tell(entry)
    ended(first[3], "completed", 0.75)  # killed before optuna was told
    assert not search.is_finished()
    sweep, search = a_search(tmp_path / "s", *words)
    assert [e.number for e in search.kept] == [0, 1, 2, 3]
    rest = search.ask(9)
    assert [e.number for e in rest] == [4, 5]
    assert rest[0].job.overrides == first[4].job.overrides
    assert len({e.job.label for e in sweep.entries}) == 6
    assert [j["overrides"] for j in read(sweep.path)["jobs"]] == [e.job.overrides for e in sweep.entries]
    for entry in rest:
        ended(entry, "completed", 0.25)
        search.tell(entry)
    assert search.is_finished()
    study = optuna.load_study(study_name="search", storage=f"sqlite:///{sweep.path / 'study.db'}")
    assert [t.state.name for t in study.trials] == ["COMPLETE", "FAIL", "PRUNED", "COMPLETE", "COMPLETE", "COMPLETE"]
    assert (study.best_trial.number, study.best_value, study.direction.name) == (3, 0.75, "MAXIMIZE")


def test_a_study_that_was_changed_is_refused_or_gives_none_of_its_values(tmp_path: Path) -> None:
    """A sweep's folder may be a stranger's: its study gives no value that the search's own words do not."""
    import optuna

    words = ("model=mlp", LR, "hydra.sweeper.n_trials=3")
    _, search = a_search(tmp_path / "s", *words)
    (entry, *_) = search.ask(1)
    ended(entry, "completed", 0.5)
    search.tell(entry)
    file = tmp_path / "s" / "study.db"
    whole = file.read_bytes()
    for content in (b"no database", whole[: len(whole) // 2], whole[:100] + bytes(len(whole) - 100)):
        file.write_bytes(content)
        with pytest.raises(UserError, match=r"study.db is not a study of Optuna's"):
            a_search(tmp_path / "s", *words)
    for number, axis in enumerate((CategoricalDistribution(["0.1 trust=[evil]"]), FloatDistribution(1.0, 1e9))):
        file = tmp_path / f"{number}.db"
        study = optuna.create_study(storage=f"sqlite:///{file}", study_name="search", direction="maximize")
        value = axis.choices[0] if isinstance(axis, CategoricalDistribution) else 2.0
        study.add_trial(optuna.create_trial(params={"optimizer.lr": value}, distributions={"optimizer.lr": axis}, value=0.9))
        a_search(tmp_path / f"{number}", *words)
        (tmp_path / f"{number}" / "study.db").write_bytes(file.read_bytes())
        sweep, search = a_search(tmp_path / f"{number}", *words)
        assert (search.kept, sweep.entries) == ([], [])


def test_a_grid_has_each_combination_once(tmp_path: Path) -> None:
    words = (
        "model=mlp",
        "optimizer=sgd,adamw",
        "epochs=range(1,4)",
        "hydra.sweeper.sampler=grid",
        "hydra.sweeper.direction=minimize",
    )
    sweep, search = a_search(tmp_path / "s", *words)
    assert search.total == 6
    for entry in search.ask(4):
        ended(entry, "completed", 0.5)
        search.tell(entry)
    sweep, search = a_search(tmp_path / "s", *words)
    search.ask(9)
    assert len(sweep.entries) == len({e.job.label for e in sweep.entries}) == 6
    assert not search.objective.maximize
    (told,) = problems_of(a_search, tmp_path / "t", LR, "hydra.sweeper.sampler=grid")
    assert "optimizer.lr has an interval" in told
    many = ("epochs=range(1,5000)", "log_every=range(1,5000)")
    (told,) = problems_of(a_search, tmp_path / "m", *many, "hydra.sweeper.sampler=grid")
    assert "combinations are too many: at most" in told


# --- a sweep that is too large or hopeless is refused at once ---


@pytest.mark.parametrize(
    ("read", "words", "says"),
    [
        *(
            (read, [word], None)
            for read in (store.prepare, optuna.read)
            for word in ("optimizer.lr=range(0,1e9)", "epochs=range(0,1000000000)", "epochs=range(0,1e999)")
        ),
        (store.prepare, [f"{key}=range(0,10000)" for key in ("epochs", "log_every")], "100,000,000 combinations"),
        (store.prepare, ["epochs=range(1,4,0)"], r"'epochs=range\(1,4,0\)' is not a sweep"),
    ],
)
def test_endless_ranges(read, words, says, monkeypatch):
    monkeypatch.setattr(store, "prepare_one", None)  # nothing is composed
    with pytest.raises(UserError, match=says):
        read(words)


def test_a_hopeless_sweep_is_not_composed_to_its_end(monkeypatch):
    made = []

    def fail(overrides, *_):
        made.append(overrides)
        raise UserError(f"no such option: {overrides[1]}" if len(made) < 3 else "no such option")

    monkeypatch.setattr(store, "prepare_job", fail)
    with pytest.raises(UserError) as told:
        store.prepare(["epochs=range(0,80)", "log_every=range(1,11)"])
    assert len(made) == store.HOPELESS
    assert told.value.problems[-2:] == [
        "no such option",
        "none of the first 50 jobs of this sweep can run: the others were not tried",
    ]


def test_a_sweep_with_one_good_job_is_composed_to_its_end(monkeypatch):
    def prepare(overrides, *_):
        if overrides[0] != "epochs=3":
            raise UserError("bad")
        return object()

    monkeypatch.setattr(store, "prepare_job", prepare)
    assert len(store.prepare(["epochs=range(0,80)"])) == 80


# --- hydra/launcher=ray: jobs as tasks of a cluster; where Ray is not installed, what it is asked for is answered here ---


SMALL = ["data=synthetic", "data.samples=64", "model=mlp", "model.hidden=[8]", "epochs=2", "batch.global_batch=16",
         "runtime.threads=1"]  # fmt: skip


class FakeRay(ModuleType):
    """The calls of Ray that a launcher makes: a task is a forked process, as Ray's fresh workers are processes."""

    class exceptions:
        class RayError(Exception):
            pass

    def __init__(self) -> None:
        super().__init__("ray")
        self.__spec__ = importlib.machinery.ModuleSpec("ray", None)
        self.asked: dict[str, Any] = {}
        self.cancelled: list[Any] = []

    def init(self, **given: Any) -> None:
        self.asked |= given
        if given["address"] == "nowhere:1":
            raise ConnectionError("ray.init\nfailed to connect")

    def remote(self, **given: Any) -> Any:
        self.asked |= given
        return lambda function: SimpleNamespace(remote=lambda *args: self.start(function, args))

    def start(self, function: Any, args: Any) -> Any:
        process = multiprocessing.get_context("fork").Process(target=lambda: os._exit(function(*args)))
        process.start()
        return process

    def wait(self, refs: list[Any], timeout: float) -> tuple[list[Any], list[Any]]:
        multiprocessing.connection.wait([ref.sentinel for ref in refs], timeout)
        done = [ref for ref in refs if not ref.is_alive()]
        return done, [ref for ref in refs if ref not in done]

    def get(self, ref: Any) -> int:
        ref.join()
        if ref.exitcode < 0:
            raise self.exceptions.RayError("a worker\nThe worker died unexpectedly")
        return int(ref.exitcode)

    def cancel(self, ref: Any, force: bool) -> None:
        self.cancelled.append((ref, force))
        os.kill(ref.pid, signal.SIGINT)


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    fake = FakeRay()
    monkeypatch.setitem(sys.modules, "ray", fake)
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    return fake


def entry(folder: Path, ends: list[Any]) -> Any:
    folder.mkdir()
    return SimpleNamespace(number=folder.name, run_dir=folder, close=lambda *how: ends.append(how))


def test_a_sweep_runs_in_a_cluster(ray: FakeRay, tmp_path: Path, capfd: Any) -> None:
    """Each job is composed where it runs, has its output in its folder, and asks for what a job takes."""
    from drivetrain.cli import main

    words = ["hydra/launcher=ray", "hydra.launcher.num_cpus=2", "hydra.launcher.num_gpus=0.5"]
    assert main.main(["train", "-m", *SMALL, "optimizer=sgd,adamw", *words]) == 0
    results = [json.loads(file.read_text()) for file in sorted(tmp_path.glob("outputs/multirun/*/*/*/result.json"))]
    assert [each["status"] for each in results] == ["completed"] * 2
    assert {word for each in results for word in each["overrides"] if word.startswith("optimizer")} == {
        "optimizer=sgd", "optimizer=adamw"
    }  # fmt: skip
    assert len([*tmp_path.glob("outputs/multirun/*/*/*/output.txt")]) == 2
    assert {key: ray.asked[key] for key in ("address", "num_cpus", "num_gpus", "max_calls", "max_retries")} == {
        "address": "local", "num_cpus": 2, "num_gpus": 0.5, "max_calls": 1, "max_retries": 0
    }  # fmt: skip
    assert "src" in ray.asked["runtime_env"]["env_vars"]["PYTHONPATH"]
    assert "2 jobs in" in capfd.readouterr().out


def test_a_job_whose_worker_dies_and_one_that_is_stopped(ray: FakeRay, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ends: list[Any] = []

    def job(sweep: Path, number: int, *_: Any) -> int:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # a fork may drop what is raised while it begins
        (sweep / f"{number}.up").touch()
        signal.pause()
        return 0

    monkeypatch.setattr(launchers, "_on_ray", job)
    launcher = OnRay(Ray(address="auto"), tmp_path, 2)
    jobs = [entry(tmp_path / name, ends) for name in "ab"]
    launcher.start(jobs)
    until(lambda: len([*tmp_path.glob("*.up")]) == 2)
    assert launcher.wait(0.0) == []
    launcher.signal(signal.SIGTERM)
    ended: list[Any] = []
    while len(ended) < 2:
        ended += launcher.wait(1.0, stopped=True)
    assert {force for _, force in ray.cancelled} == {False}  # so that it saves
    assert len(ends) == 2
    for code, error, status in ends:
        assert code is None or code > 0
        assert status == "interrupted"
        assert error.startswith("the job's task in Ray ended without a result")


def test_a_cluster_that_is_not_there(ray: FakeRay, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="address=nowhere:1: no Ray cluster answers there: failed to connect"):
        OnRay(Ray(address="nowhere:1"), tmp_path, 1)


def test_its_settings() -> None:
    settings, words = split(["epochs=1", "hydra/launcher=ray", "hydra.launcher.address=auto"], check=False)
    assert (settings.launcher, words) == (Ray("auto"), ["epochs=1"])
    if importlib.util.find_spec("ray") is None:
        with pytest.raises(UserError, match=r"needs the package 'ray', .* pip install 'drivetrain\[ray\]'"):
            split(["hydra/launcher=ray"])


@pytest.mark.slow
def test_a_real_cluster_on_this_machine(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'drivetrain[ray]'")
    command.train("-m", *SMALL, "optimizer=sgd,adamw", "hydra/launcher=ray", cwd=tmp_path, code=0)
    results = [json.loads(file.read_text()) for file in tmp_path.glob("outputs/multirun/*/*/*/result.json")]
    assert [each["status"] for each in results] == ["completed"] * 2
