"""metrics.jsonl with spoilt lines: what can be read is kept, and resuming and reporting go on."""

import json
import os
import shutil
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

import drivetrain
from drivetrain.core.errors import UserError
from drivetrain.core.machine import process
from drivetrain.logger.files import Files
from drivetrain.run import reader, records, remarks
from drivetrain.run.identity import differences
from drivetrain.run.reader import Points, read
from drivetrain.run.result import Result, interval
from drivetrain.saving import manifest
from drivetrain.sweeps.store import StoredJob
from drivetrain.ui import terminal
from drivetrain.ui.sheet import sentence
from tests.support.put import put

GOOD = [{"event": "train", "update": n, "loss": 1.0 / n, "samples": 8 * n, "time": 100.0 + n} for n in (1, 2, 3)]
SPOILT = [
    b"\xff\xfe\x00", b"[1, 2]", b"{}", b'{"event": "train", "update": "2"}', b'{"event": "train", "update": 2, "time": "noon"}',
    b"[" * 100_000, b"null", b'{"update": true}', b"not json", b'{"event": "train", "update": 1' + b"0" * 5000 + b"}",
]  # fmt: skip


def write(path, unfinished=b""):
    good = [json.dumps(record).encode() for record in GOOD]
    path.write_bytes(b"\n".join([*SPOILT, good[0], *SPOILT, good[1], b"", good[2], *SPOILT, unfinished]))
    return path


def test_readable_records_are_kept_and_the_others_counted(tmp_path):
    assert records.read(write(tmp_path / "metrics.jsonl", b'{"event": "tra')) == (GOOD, 3 * len(SPOILT))
    assert records.read(tmp_path / "none.jsonl") == ([], 0)
    (tmp_path / "metrics.jsonl").write_bytes(json.dumps(GOOD[0]).encode() + b'\n{"event": "tra')
    assert records.read(tmp_path / "metrics.jsonl") == (GOOD[:1], 0), "the last line of a killed run is not whole"


def test_a_log_of_empty_lines_or_zeros_is_not_read_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = put(tmp_path / "metrics.jsonl", b'{"update": 1}\n')
    os.truncate(path, 2**40)
    assert records.read(path).records == [{"update": 1}]
    monkeypatch.setattr(records, "MOST_SPOILT", 100)
    put(path, b'{"update": 1}\n' + b"\n" * 1000 + b'{"update": 2}\n')
    assert records.read(path).records == [{"update": 1}]


def test_a_resumed_run_and_a_report_go_on(tmp_path, caplog):
    path = write(tmp_path / "metrics.jsonl")
    assert reader.read(tmp_path).train.updates == [1, 2, 3]
    log = Files()
    log.start(tmp_path, 2)
    log.log({"event": "train", "update": 3, "loss": 0.5})
    log.close()
    assert f"{path}: {3 * len(SPOILT)} lines could not be read, and are left out" in caplog.messages
    assert [r["update"] for r in map(json.loads, path.read_text().splitlines())] == [1, 2, 3]
    assert len((tmp_path / "metrics.csv").read_text().splitlines()) == 4


def test_the_last_record_of_an_event_is_found_among_spoilt_ones():
    lines = b"\n".join([json.dumps(GOOD[0]).encode(), b'{"event": "evaluate", "update": 1}', *SPOILT])
    assert records.last(lines, "train") == GOOD[0]
    assert records.last(b"\n".join(SPOILT), "train") is None


def test_the_best_evaluation_need_not_be_the_last(tmp_path):
    rates = [{"event": "train", "update": n, "samples_per_second": rate} for n, rate in ((1, 5.0), (2, 90.0), (3, 80.0))]
    seen = [
        {"event": "evaluate", "update": n, "set": "validation", "loss": loss} for n, loss in ((1, 0.5), (2, 0.25), (3, 0.375))
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in (*rates, *seen)))
    (tmp_path / "environment.json").write_text(json.dumps({"selection": {"metric": "loss", "better": "min"}}))
    run = reader.read(tmp_path)
    assert (run.best(), run.final()) == (0.25, 0.375)
    assert run.rates() == [80.0, 90.0], "the first one includes the warm-up"


# --- what is read of a run's directory ---


def test_the_pause_before_a_resume_is_no_time_of_the_run(tmp_path: Path) -> None:
    """An evaluation, an hour in which the run was down, and another one two seconds after it went on."""
    events = [("train", 100.0), ("evaluate", 101.0), ("resume", 3701.0), ("train", 3702.0), ("evaluate", 3703.0)]
    lines = [json.dumps({"event": event, "update": n, "epoch": 0, "time": at}) for n, (event, at) in enumerate(events)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    run = read(tmp_path)
    assert run.evaluated.seconds == [1.0, 3.0]
    assert run.train.seconds == [0.0, 2.0]
    assert run.evaluated.updates == [1, 4]


def test_a_resumed_run_says_so_in_its_records(train) -> None:
    first = train("updates=2", "saving.every_updates=1", "stop=none")
    assert not [line for line in (first.run_dir / "metrics.jsonl").read_text().splitlines() if '"resume"' in line]
    second = train(f"resume={first.run_dir}", "resume_changed=true", "updates=4")
    records = [json.loads(line) for line in (second.run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [r["update"] for r in records if r["event"] == "resume"] == [2]
    assert read(second.run_dir).evaluated.seconds == sorted(read(second.run_dir).evaluated.seconds)


def test_folders_are_searched_to_a_depth(tmp_path: Path) -> None:
    """A stranger's folder may have a thousand in each other, more than Python can call."""
    for depth in (reader.DEEPEST, reader.DEEPEST + 1):
        put(tmp_path.joinpath("deep", *"a" * depth, f"{depth}/result.json"), "")
    with pytest.raises(UserError, match="no run in"):
        reader.find([tmp_path / "deep"])
    for place in ("deep/a/run", "run"):
        put(tmp_path / place / "result.json", "")
    assert [run.path.name for run in reader.find([tmp_path / "deep", tmp_path / "run"])] == ["run", "run"]


# --- how two configs differ ---


@pytest.mark.parametrize(
    ("before", "after", "told"),
    [
        ((5, None), (9, None), []),
        ((5, None), (4, None), ["epochs: 5 → 4"]),
        ((5, None), (5, 7), ["updates: null → 7"]),
        (("many", None), (4, None), ["epochs: many → 4"]),  # a spoilt one is no error of its own
    ],
)
def test_a_run_may_become_longer_and_not_shorter(before, after, told):
    old, new = (dict(zip(("epochs", "updates"), length, strict=True)) for length in (before, after))
    assert differences(old, new, set()) == told


# --- what tables say of a run's best evaluation beside its last one ---


def result(best: float, at: int, **final: float) -> Result:
    validation = {"final": {"loss": 0.5, "accuracy": 0.8, **final}, "best": {"loss": 0.6, "accuracy": best, "update": at}}
    test = {"final": {"accuracy": 0.7}, "best": {"accuracy": 0.75, "update": at}}
    selection = {"metric": "accuracy", "better": "max"}
    return Result("completed", metrics={"validation": validation, "test": test}, selection=selection, updates=80, epochs=10)


def test_the_best_is_named_with_its_epoch_and_what_does_not_select_with_its_value_there():
    run = result(0.9, at=48)
    assert run.note_on_best("validation", "accuracy") == "(best 0.9 after epoch 6)"
    assert run.note_on_best("validation", "loss") == "(0.6 at the best epoch)"
    assert run.note_on_best("test", "accuracy") == "(0.75 at the best epoch)"
    assert run.note_on_best("test", "loss") == ""
    last = result(0.8, at=80)
    assert [last.note_on_best(s, n) for s in ("validation", "test") for n in ("accuracy", "loss")] == ["(the best)", "", "", ""]
    assert result(0.9, at=47).when({"update": 47}) == " at update 47"


def test_a_sweep_shows_by_what_it_ranks_and_marks_the_winner(capsys):
    terminal.show_jobs([(0, "a", result(0.85, at=80)), (1, "b", result(0.9, at=48))], "accuracy", 1)
    header, first, second, *_ = (line for line in capsys.readouterr().out.splitlines() if line.strip())
    assert header.split() == [
        "job", "overrides", "status", "validation", "loss", "validation", "accuracy", "best", "validation", "accuracy",
        "samples/s", "time",
    ]  # fmt: skip
    assert "0.8500 after epoch 10" in first
    assert second.split()[:2] == ["1", "*"]
    assert "0.9000 after epoch 6" in second


def test_a_rate_that_jumps_is_told(train, caplog):
    """The schedule is that of a longer run now."""
    first = train("epochs=2", "updates=null", "scheduler=cosine")
    caplog.clear()
    drivetrain.train([f"resume={first.run_dir}", "epochs=6"])
    (said,) = [message for message in caplog.messages if "the learning rate goes up" in message]
    assert "the schedule is now that of" in said
    assert f"model.weights={first.run_dir}" in said
    assert float(said.split(" to ")[1].split(":")[0]) > 1e-3 * 0.5


@pytest.mark.parametrize("words", [("scheduler=cosine",), ("scheduler=cyclic", "scheduler.up=1")])
def test_a_rate_that_goes_on_as_its_schedule_has_it_is_not_told(words, train, caplog):
    first = train("epochs=4", "updates=null", "saving.keep=99", "saving.every_updates=1", *words)
    for checkpoint in sorted(manifest.checkpoints(first.run_dir), key=lambda path: int(path.name))[1:]:
        shutil.rmtree(checkpoint)
    assert drivetrain.train([f"resume={first.run_dir}"]).resumed_at == 1
    assert not [message for message in caplog.messages if "goes up" in message]


def test_a_file_that_no_run_wrote_is_no_result(tmp_path):
    Result("completed", target={"reach": "a>=1", "update": None, "samples": None, "seconds": None}).write(tmp_path)
    path, good = tmp_path / "result.json", json.loads((tmp_path / "result.json").read_text())
    assert Result.read(tmp_path) is not None
    targets = ({"reach": 1}, {"reach": "a>=1", "update": 3, "samples": "many", "seconds": 1.0}, {})
    not_in_the_file = ({"code": 0}, {"signal": 0}, {"run_dir": "."})
    for spoilt in (*({"target": target} for target in targets), *not_in_the_file):
        path.write_text(json.dumps({**good, **spoilt}))
        assert Result.read(tmp_path) is None
    path.write_text(json.dumps({**good, "status": "interrupted"}))
    assert Result.read(tmp_path).code == 75, "the exit code follows from the status"


# --- the clock of the machine is set while a run trains: times go on, and durations are never negative ---


PACKAGE = Path(drivetrain.__file__).parent
DATES = {"core/machine/process.py", "run/environment.py", "compile/base.py"}  # that read the date, and take no duration from it


def test_setting_the_clock_back_moves_neither_records_nor_durations(monkeypatch, train):
    real = time.time
    calls = []

    def jumping() -> float:  # a day back, from the first record on
        calls.append(1)
        return real() - 86_400 * (len(calls) > 1)

    monkeypatch.setattr(time, "time", jumping)
    before = process.now()
    result = train("updates=2")
    assert 0 < result.time_to_first_step_s <= result.wall_s < 600
    assert before <= process.now() < before + 600


def test_durations_come_from_the_monotonic_clock():
    users = {p.relative_to(PACKAGE).as_posix() for p in PACKAGE.rglob("*.py") if "time.time()" in p.read_text(encoding="utf-8")}
    assert users <= DATES, "a duration is time.monotonic()'s, a record's time is core.process.now()'s"


def test_a_job_of_a_sweep_whose_folder_is_gone_has_a_result(tmp_path):
    entry = StoredJob(0, SimpleNamespace(overrides=[], problems=[], job=None), tmp_path / "moved" / "0")  # type: ignore[arg-type]
    entry.close(1, "it was lost")
    assert entry.load_result(("failed",))
    (tmp_path / "file").write_text("")
    StoredJob(1, entry.job, tmp_path / "file" / "1").close(1, "nowhere to write to")


# --- what a run's figures say at its end, in words; nothing where they say nothing ---


def points(losses: list[float], every: int = 10, name: str = "loss") -> Points:
    updates = [every * (i + 1) for i in range(len(losses))]
    return Points(updates, updates, [float(u) for u in updates], [{name: loss} for loss in losses], "validation")


@pytest.mark.parametrize(
    ("trained", "evaluated", "says"),
    [
        ([2.0, 1.0, 0.5, 0.2], [1.5, 0.9, 1.0, 1.3], "overfitted since update 20: the validation loss rose from 0.9 to 1.3, and"),
        ([2.0, 1.0, 0.5, 0.2], [1.5, 0.9, 0.9, 0.92], None),  # no more than noise
        ([2.0, 1.0, 1e-4, 1e-5], [1.5, 0.9, 1e-5, 2e-5], None),  # nothing is left to lose
        ([2.0, 1.0, 1.5, 1.6], [1.5, 0.9, 1.0, 1.3], None),  # both rise: that is no overfitting
        ([2.0, 1.0, 0.5, 0.2], [1.5, 1.0, 0.8, 0.5], "still improving: the validation loss fell from 0.8 to 0.5"),
        ([2.0, 1.0, 0.5, 0.2], [1.5, 0.6, 0.51, 0.5], None),
        ([2.0, 1.0, 0.5], [1.5, 1.0, 0.5], None),  # too few to tell
        ([2.3, 2.3, 2.3, 2.3], [2.3, 2.31, 2.3, 2.29], "hardly learnt: the validation loss is 2.29 at the end"),
        ([2.3], [2.3], "hardly learnt"),
        ([2.3, -1.0], [2.3, -4.0], None),  # a loss that may be negative has no shares
        ([], [], None),
    ],
)
def test_curves(trained, evaluated, says):
    said = list(remarks.of_curves(points(trained), points(evaluated)))
    assert [line.startswith(says) for line in said] == [True] * (says is not None), said
    named = list(remarks.of_curves(points(trained), points(evaluated, name="noisy/loss"), "noisy/loss"))
    assert named == said
    kept = list(remarks.of_curves(points(trained), points(evaluated), kept_best=True))
    assert len(kept) == len(said)
    assert "saving=best" not in "".join(kept)


@pytest.mark.parametrize(
    ("accuracy", "samples", "commonest", "says"),
    [
        (0.9, 11, 0.5, "few samples: the accuracy of 0.9 on the 11 samples of the test set may be anything from 0.61"),
        (0.6, 11, 0.5, "at chance: the accuracy of 0.6 on the 11 samples of the test set is not surely above"),
        (0.9, 10_000, 0.95, "at chance"),  # the commonest class alone is better
        (0.9, 10_000, 0.5, None),
        (0.9, 10_000, None, None),
        (0.9, 20, None, "few samples"),
        (None, 3, 0.5, None),
    ],
)
def test_accuracies(accuracy, samples, commonest, says):
    final = {} if accuracy is None else {"accuracy": accuracy, "top5": 0.1}
    result = Result(metrics={"test": {"final": final}}, shares={"accuracy": samples, "top5": samples})
    said = list(remarks.of_test(result, {} if commonest is None else {"": commonest}))
    assert [line.startswith(says) for line in said] == [True] * (says is not None), said


def test_named_sets():
    found = {"clean/accuracy": 0.9, "noisy/accuracy": 0.5}
    result = Result(metrics={"test": {"final": found}}, shares=dict.fromkeys(found, 10_000))
    (said,) = remarks.of_test(result, {"clean": 0.5, "noisy": 0.5})
    assert "of the test set noisy" in said


@pytest.mark.parametrize(
    ("of_set", "name", "value", "samples", "says"),
    [
        ("test", "accuracy", 9 / 11, 11, "(11 samples: 0.52 to 0.95)"),
        ("test", "top5", 0.97, 360, "(360 samples: 0.95 to 0.98)"),
        ("test", "accuracy", 0.9, 100_000, ""),
        ("validation", "accuracy", 9 / 11, 11, ""),  # models are selected by it
        ("test", "loss", 0.3, 11, ""),
        ("test", "accuracy", 1.5, 11, ""),  # whoever wrote that
        ("test", "accuracy", 0.5, 0, ""),
    ],
)
def test_the_interval_of_a_share(of_set, name, value, samples, says):
    result = Result(shares={"accuracy": samples, "top5": samples})
    assert result.uncertainty(of_set, name, value) == says


def test_a_run_tells_the_intervals_of_its_shares(train, capsys, says):
    """In the table at its end, in its page, in a notebook and evaluated again; of shares of the test set's samples alone."""
    result = train("metrics=[top5,f1]", "metrics.top5.k=2", "updates=2", "data.test_samples=11")
    assert result.shares == {"accuracy": 11, "top2": 11}
    terminal.show_result(result)
    out, page = capsys.readouterr().out, (result.run_dir / "report.html").read_text()
    for name in result.shares:
        said = result.uncertainty("test", name, result.tested()[name])
        assert said.startswith("(11 samples: 0.")
        for shown in (out, page, result._repr_html_()):
            assert said in shown
    assert f"accuracy {terminal.number(result.tested()['accuracy'])} (11 samples: " in page  # its first sentence
    assert out.count(result.remarks[0]) == 1
    assert page.count(sentence(result.remarks[0])[1:]) == 1  # in a paragraph of its own, and not in the first sentence
    terminal.show_result(result, noted=True)
    assert result.remarks[0].partition(":")[0] not in capsys.readouterr().out
    out = says("evaluate", result.run_dir, "data.test_samples=12")
    assert out.count(" (12 samples: 0.") == 2
    assert train("debug=fast", "data.test_samples=11").shares == {}  # which evaluates a part


def test_answers_of_which_a_sample_has_several_have_no_interval():
    scenes = [
        "task=segmentation",
        "data=digit_scenes",
        "data.samples=40",
        "data.test_samples=10",
        "model.width=4",
    ]
    result = drivetrain.train([*scenes, "metrics=[accuracy,iou]", "epochs=1", "saving=none"])
    assert "accuracy" in result.tested()
    assert result.shares == {}


def test_an_interval_covers_19_of_20():
    """Of every number of successes of 40 trials, those whose interval holds the true share have 95 % of its chance, or nearly."""
    from math import comb

    for share in (0.1, 0.37, 0.8):
        held = [k for k in range(41) if (i := interval(k / 40, 40)) and i[0] <= share <= i[1]]
        assert 0.92 < sum(comb(40, k) * share**k * (1 - share) ** (40 - k) for k in held) < 0.98


def test_a_run_ends_with_them(train):
    result = train("updates=2", "optimizer=sgd", "optimizer.lr=1e-9")
    assert result.remarks[0].startswith("hardly learnt: the test loss is ")
    assert Result.read(result.run_dir).remarks == result.remarks
    page = (result.run_dir / "report.html").read_text()
    assert all(line[1:] in page for line in result.remarks)  # there they begin with a capital letter
