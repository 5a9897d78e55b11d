"""What is read of a run's directory."""

from __future__ import annotations

import json
from pathlib import Path

from drivetrain.run.reader import read


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
