"""`python -m bench.gpu`: each stage runs on a CPU in small, so that it works on the day a device is there."""

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from bench import harness
from bench.gpu import campaign, clock, loops, right, smoke, speed
from bench.gpu.campaign import Campaign, Row
from bench.gpu.speed import Loop

from drivetrain.config.catalog import LISTS, options
from drivetrain.core.machine.signals import StopFlag
from drivetrain.launch import launcher
from tests.support.put import put

ROOT = Path(__file__).resolve().parent.parent


INSTALLED = [folder for folder in sys.path if Path(folder).name == "site-packages"]
BARE = [sys.executable, "-S", "-m"]  # without the .pth file by which the checkout is installed: drivetrain is not found


def uninstalled() -> dict[str, str]:
    """The environment of a bare interpreter: the packages are there, but not the checkout."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(INSTALLED)}


def stages(out: Path, name: str, rows: str, bare: bool = True) -> dict[str, dict[str, Any]]:
    """Run rows of a stage or of the lease as the command does, `bare` in a checkout that is not installed; each stage's JSON."""
    words = ["bench.gpu", name, "--cpu", "--rows", rows, "--results", str(out)]
    command, env = ([*BARE, *words], uninstalled()) if bare else ([sys.executable, "-m", *words], None)
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    texts = {file.name.removeprefix("gpu-").removesuffix("-cpu.json"): file.read_text() for file in out.glob("*.json")}
    found = {of: json.loads(text) for of, text in texts.items()}
    assert done.returncode == 0, done.stdout + done.stderr + json.dumps(found, indent=1)
    assert "the same command goes on" not in done.stdout
    for of, text in texts.items():
        assert found[of]["machine"]["cpu"]
        assert f"{ROOT}/" not in text  # no places on this machine
        assert f"{tempfile.gettempdir()}/tmp" not in text
    assert {row for each in found.values() for row in each["rows"]} == set(rows.split(","))
    return found


def test_the_benchmarks_need_no_installation(tmp_path: Path) -> None:
    missing = subprocess.run(
        [*BARE[:2], "-c", "import drivetrain"], cwd=tmp_path, env=uninstalled(), capture_output=True, check=False
    )
    assert b"No module named 'drivetrain'" in missing.stderr
    for name in ("bench.gpu", "bench.overhead"):
        done = subprocess.run([*BARE, name, "--help"], cwd=ROOT, env=uninstalled(), capture_output=True, text=True, check=False)
        assert done.stdout.startswith("usage: "), done.stderr


def test_the_lease(tmp_path: Path) -> None:
    """Rows of several stages in one call, each written to its own stage's file."""
    rows = "compile=cudagraph,optimizer=adamw,save and resume,launch-bound eager,loader=sync,loader=device"
    found = stages(tmp_path, "lease", rows, False)
    rows = found["smoke"]["rows"]
    assert rows["compile=cudagraph"]["status"] == "refused"
    assert "needs a CUDA device" in rows["compile=cudagraph"]["reason"]
    assert (rows["optimizer=adamw"]["updates"], rows["save and resume"]["updates"]) == (2, 4)
    assert found["clock"]["rows"]["launch-bound eager"]["outside_samples_per_s"] > 0
    assert isinstance(found["clock"]["rows"]["launch-bound eager"]["within"], bool)
    (compared,) = found["right"]["summary"]["compared"].values()
    assert compared["within"]


@pytest.mark.slow
def test_the_whole_form_of_a_cpu(tmp_path: Path) -> None:
    found = {
        name: stages(tmp_path / name, name, ",".join(rows))[name]
        for name, rows in {
            "smoke": smoke.CPU_ROWS,
            "right": right.CPU_ROWS,
            "clock": clock.CPU_ROWS,
            "speed": (*speed.CPU_ROWS, "gpt more"),
        }.items()
    }
    verbs = found["smoke"]["rows"]
    assert len(verbs["compare"]["written"]["compare.json"]["rows"]) == 2
    assert "verdict:" in verbs["doctor"]["output"]
    compared = found["right"]["summary"]["compared"]
    assert all(each["within"] and each["tolerance"]["reason"] for each in compared.values())
    interrupted = found["right"]["rows"]["interrupted"]
    assert interrupted["stopped_at"] < interrupted["of"]
    rows = {name: row for name, row in found["speed"]["rows"].items() if "variants" in row}
    assert not any(row["failed_variants"] for row in rows.values())
    assert set(rows["vit_b"]["variants"]) == {"hand", "timm fast", "ours none"}
    assert set(rows["gpt more"]["variants"]) == {"hand", "naive", "timm", "ours none"}
    assert min(variant["model_tflops"] for row in rows.values() for variant in row["variants"].values()) > 0


def test_smoke_has_every_option_and_every_risky_pair(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(harness, "in_process", lambda *_: {})  # which would write the images
    names = {row.name for row in smoke.rows("cuda", tmp_path)}
    for group, found in options().items():
        assert {f"{group}=[{name}]" if group in LISTS else f"{group}={name}" for name in found} <= names
    assert {"loader=device compile=step", "compile=cudagraph precision=amp", "precision=amp parallel=ddp", "torchrun"} <= names


def test_a_small_run_on_a_device_has_one_rank_and_its_device_alone(tmp_path: Path) -> None:
    words = smoke.overrides(("parallel=ddp", "updates=4"), "cuda", tmp_path)
    assert {"parallel.nproc=1", "runtime.device=cuda", "updates=4"} <= set(words)
    assert "updates=2" not in words
    assert "parallel.devices=[cuda:0,cuda:0]" in smoke.overrides(("parallel=split",), "cuda", tmp_path)


# The campaign: rows are kept, skipped, killed and told apart.


def campaign_in(folder: Path, minutes: float = 1.0, **given: Any) -> Campaign:
    return Campaign(folder, "cpu", {}, time.monotonic() + 60 * minutes, **given)


def fine() -> dict[str, Any]:
    return {"figure": 1}


def fails() -> None:
    print("what it wrote", os.__file__)
    raise ValueError("why")


def hangs(hanging: Path) -> None:
    campaign.report({"so_far": 1})
    hanging.touch()
    with StopFlag():  # as in a run, which handles signals
        subprocess.run(["sleep", "600"], start_new_session=True, check=True)


def dies() -> None:
    os._exit(9)


def test_a_failure_has_its_traceback_and_a_second_call_goes_on(tmp_path: Path) -> None:
    rows = [Row("fine", fine), Row("fails", fails), Row("dies", dies)]
    assert campaign_in(tmp_path).run(rows) == []
    kept = json.loads((tmp_path / "gpu--cpu.json").read_text())
    assert kept["rows"]["fine"]["figure"] == 1
    failed = kept["rows"]["fails"]
    assert "Traceback" in failed["error"]
    assert "ValueError: why" in failed["error"]
    assert f"{sys.base_prefix}/" not in (tmp_path / "gpu--cpu.json").read_text()
    assert "what it wrote" in failed["output"]
    assert "code 9" in kept["rows"]["dies"]["error"]
    again = campaign_in(tmp_path)
    rerun = [Row("fine", fails), Row("fails", fine), Row("new", fine)]
    again.run(rerun)
    assert [again.rows("")[name]["status"] for name in ("fine", "fails", "new")] == ["ok", "failed", "ok"]
    again.run(rerun, retry=True)
    assert again.rows("")["fails"]["status"] == "ok"


def test_what_travels_is_copied_at_once_and_read_back(tmp_path: Path) -> None:
    """A machine that is lent anew has an empty folder, and what was brought along."""
    kept, out, fresh = (tmp_path / name for name in ("kept", "out", "fresh"))
    campaign_in(kept, out=out).run([Row("fine", fine, stage="smoke")])
    assert (out / "gpu-smoke-cpu.json").read_bytes() == (kept / "gpu-smoke-cpu.json").read_bytes()
    for given in ((kept, fresh), (fresh, out)):
        again = campaign_in(given[0], out=given[1])
        assert again.run([Row("fine", fails, stage="smoke"), Row("new", fine, stage="smoke")]) == []
        assert {name: row["status"] for name, row in again.rows("smoke").items()} == {"fine": "ok", "new": "ok"}


def test_the_compilers_cache_travels_where_it_is_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(campaign, "CARRIED", tmp_path / "carried")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "first"))
    cache = campaign.cache_folder()
    put(cache / "fxgraph" / "kernel", kernel := random.Random(0).randbytes(400))
    monkeypatch.setattr(campaign, "LARGEST", 350)  # of two pieces
    campaign.keep_cache(cache, tmp_path / "carried")
    assert len(list((tmp_path / "carried").iterdir())) == 2
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "second"))
    assert (campaign.cache_folder() / "fxgraph" / "kernel").read_bytes() == kernel
    monkeypatch.setattr(campaign, "LARGEST", 10)
    campaign.keep_cache(cache, tmp_path)
    assert not list(tmp_path.glob(f"{campaign.ARCHIVE}*"))


def test_a_timed_row_runs_alone(tmp_path: Path) -> None:
    """No row begins beside it, and it begins beside none, though there is room for them."""
    work, other, timed = campaign_in(tmp_path), Row("other", fine), Row("timed", fine, alone=True)
    assert work._next([timed, other], [other], jobs=2) is None
    assert work._next([other], [timed], jobs=2) is None
    assert work._next([other], [other], jobs=2) is other
    assert work._next([timed], [], jobs=2) is timed


def test_a_row_over_its_time_is_killed_with_all_that_it_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It hangs; once it does, its time is over by the clock."""
    file = tmp_path / "hanging"
    set_forward = SimpleNamespace(monotonic=lambda: time.monotonic() + 3600 * file.exists(), sleep=time.sleep)
    monkeypatch.setattr(campaign, "time", set_forward)
    work = campaign_in(tmp_path, minutes=120)
    assert work.run([Row("hangs", hangs, (file,), limit_s=20)]) == []
    row = work.rows("")["hangs"]
    assert (row["status"], row["so_far"]) == ("killed", 1)
    assert "in hangs" in row["output"]  # where it stood
    assert not _sleeping()
    # A call with little time gives less to a row; one with more time runs it again, one with as much only where that is asked.
    assert work.run([Row("hangs", fails, limit_s=20)]) == []
    assert work.rows("")["hangs"]["status"] == "killed"
    work.run([Row("hangs", fails, limit_s=30)])
    assert work.rows("")["hangs"]["status"] == "failed"
    work.run([Row("hangs", fine, limit_s=20)], retry=True)
    assert work.rows("")["hangs"]["status"] == "ok"


def _sleeping() -> bool:
    """True if a `sleep 600` of this test is left."""
    commands = []
    for pid in harness.descendants(os.getpid()):
        try:
            commands.append(Path(f"/proc/{pid}/cmdline").read_bytes())
        except OSError:
            continue
    return any(command.startswith(b"sleep\x00600") for command in commands)


def test_rows_for_which_there_is_no_time_stay_open(tmp_path: Path) -> None:
    work = campaign_in(tmp_path, 0.5)
    assert [row.name for row in work.run([Row("long", fine, least_s=60), Row("short", fine, least_s=0)])] == ["long"]
    assert list(work.rows("")) == ["short"]


def test_rows_are_chosen_by_name_in_which_only_a_star_is_special() -> None:
    rows = [Row("augment=[mixup]", fine), Row("augment=m", fine), Row("loader=sync compile=step", fine)]
    assert [row.name for row in campaign.chosen(rows, ["augment=[mixup]"])] == ["augment=[mixup]"]
    assert [row.name for row in campaign.chosen(rows, ["*compile=step"])] == ["loader=sync compile=step"]


# Variants: two at once beside the base, and what fails says why.


def variant(updates: float, sync: Any) -> None:
    sync.watch(lambda: updates)
    for block in range(100):
        sync(block)


def broken(sync: Any) -> None:
    os.write(1, b"from the variant")
    raise RuntimeError("CUDA error: device-side assert triggered")


ARMS: dict[str, Loop] = {name: (variant, (n,)) for n, name in enumerate(("base", "a", "b", "c"))}


def large(tried: Path, sync: Any) -> None:
    """It does not fit the first time."""
    if tried.exists():
        variant(4, sync)
    tried.touch()
    raise MemoryError("torch.OutOfMemoryError")


def names(found: speed.Interleaved) -> list[list[str]]:
    return [[variant.name for variant in group] for group in found.groups]


def test_two_variants_are_live_beside_the_base_and_one_that_does_not_fit_is_tried_beside_the_base_alone(tmp_path: Path) -> None:
    found = speed.run(ARMS, 2, 60.0, tmp_path)
    assert names(found) == [["base", "a", "b"], ["base", "c"]]
    assert all(len(variant.blocks) == 2 for group in found.groups for variant in group)
    assert found.groups[1][1].marker["loss_last"] == 3
    again = speed.run({**ARMS, "b": (large, (tmp_path / "tried",))}, 2, 60.0, tmp_path)
    assert (names(again), again.failed) == ([["base", "a"], ["base", "b", "c"]], {})


def test_no_group_begins_when_the_time_is_over_and_each_round_is_reported(tmp_path: Path) -> None:
    seen: list[list[int]] = []
    speed.run(ARMS, 2, 60.0, tmp_path, lambda found: seen.append([len(v.blocks) for group in found.groups for v in group]))
    assert seen[:3] == [[1, 1, 1], [2, 2, 2], [2, 2, 2, 1, 1]]
    late = speed.run(ARMS, 9, 0.0, tmp_path)  # its first group has its fewest rounds, and no other begins
    assert (names(late), len(late.groups[0][0].blocks)) == ([["base", "a", "b"]], speed.MIN_ROUNDS)
    assert late.failed == {"c": speed.NO_TIME}


def test_a_variant_that_fails_says_why_and_the_others_go_on(tmp_path: Path) -> None:
    found = speed.run({**ARMS, "broken": (broken, ())}, 2, 60.0, tmp_path)
    assert {name for group in names(found) for name in group} == set(ARMS)
    assert "Traceback" in found.failed["broken"]
    assert "device-side assert" in found.failed["broken"]
    assert "from the variant" in found.failed["broken"]
    with pytest.raises(RuntimeError, match="device-side assert"):
        speed.run({"broken": (broken, ()), **ARMS}, 2, 60.0, tmp_path)


def test_a_rate_that_leaves_out_the_devices_work_is_found_out() -> None:
    honest = [(float(n), 20.0 * n, 1280.0 * n, 1280.0) for n in range(1, 9)]
    assert clock.rates(honest, 50.0)["within"]
    too_fast = [(seconds, updates, samples, 1.1 * rate) for seconds, updates, samples, rate in honest]
    found = clock.rates(too_fast, 50.0)
    assert found["reported_over_outside"] == pytest.approx(1.1)
    assert not found["within"]
    assert found["outside_step_ms"] == pytest.approx(50.0)


def test_slow_steps_are_told_by_what_they_come_after() -> None:
    steps = [0.5] * 6 + [0.1, 0.01, 0.01, 0.03, 0.01, 0.01]  # of records of two updates, three of which are not counted
    found = clock.slow(steps, 2)
    assert found["slow_steps_cost_ms"] == {"first after a record": pytest.approx(90), "others": pytest.approx(20)}
    assert found["steps_us"][0] == 500_000


def test_only_a_training_record_ends_a_block() -> None:
    ended: list[int] = []
    sink = harness.Sink(lambda record: ended.append(record["update"]))
    for event in ("evaluate", "remark", "train"):
        sink.log({"event": event, "update": 7})
    assert ended == [7]


# The arithmetic.


def test_losses_are_compared_at_three_places() -> None:
    reference = [2.0] * 40
    assert right.compare(reference, reference, right.EXACT)["within"]
    assert not right.compare([2.0 + 1e-12, *reference[1:]], reference, right.EXACT)["within"]
    late = [*reference[:-10], *[2.4] * 10]
    found = right.compare(late, reference, right.FORMATS["bf16"])
    assert found["difference"] == {"first": 0.0, "early": 0.0, "late": pytest.approx(0.2)}
    assert not found["within"]


def test_flops_are_those_of_forward_and_backward() -> None:
    import torch

    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
    flops = loops.flops_per_sample(model, torch.zeros(2, 8), lambda output: output.sum())
    assert flops == 2 * (2 * 8 * 16 + 3 * 16 * 4)  # the first layer's input needs no gradient


def test_a_devices_peak_is_found_by_its_name() -> None:
    assert loops.data_sheet_tflops("NVIDIA H200") == 989.5
    assert loops.data_sheet_tflops("NVIDIA A100-SXM4-80GB") == 312.0
    assert loops.data_sheet_tflops("NVIDIA L40S") == 362
    assert loops.data_sheet_tflops("CPU") is None


def test_marks_take_the_best_of_our_variants() -> None:
    def row(**rates: float) -> dict[str, Any]:
        figures = {name.replace("_", " "): {"over_base": {"median": 1 / r}, "model_tflops": r / 10} for name, r in rates.items()}
        return {"variants": figures}

    found = speed.summary(
        {"ceilings": {"bf16_matmul_tflops": 800.0}, "resnet50": row(ours_step=3.0), "resnet50 more": row(ours_none=2.0, timm=2.0)}
    )
    (mark,) = found["marks"]
    assert (mark["variant"], mark["asked"]) == ("ours step", 1.25)
    assert mark["reached"] == pytest.approx(1.5)
    assert found["of_measured_bf16_matmul"]["resnet50 more"]["timm"] == round(0.2 / 800, 4)


def test_the_lease_has_rows_of_every_stage_and_no_rule_refuses_a_timed_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(harness, "in_process", lambda *_: {})  # which would write the images
    found = {stage: import_module(f"bench.gpu.{stage}").rows("cuda", tmp_path) for stage in campaign.STAGES}
    for stage, patterns in campaign.ORDER:
        assert all(campaign.chosen(found[stage], [pattern]) for pattern in patterns)
    assert [row.name for row in campaign.ordered(found)][-1] == "tests marked cuda"
    words = [campaign.distinct(row.args[0]) for row in (*found["clock"], *found["right"])]
    for row in found["speed"]:
        variants = row.args[1] if len(row.args) == 2 and isinstance(row.args[1], dict) else {}
        words += [loops.overrides(*arguments) for run, arguments in variants.values() if run is loops.ours]
    for given in words:
        assert launcher.prepare(given).run.values["epochs"]
