"""metrics.jsonl with spoilt lines: what can be read is kept, and resuming and reporting go on."""

import json

from drivetrain.logger.files import Files
from drivetrain.run import reader, records

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
    found = records.read(write(tmp_path / "metrics.jsonl", b'{"event": "tra'))
    assert found == (GOOD, 3 * len(SPOILT))
    assert records.read(tmp_path / "none.jsonl") == ([], 0)
    (tmp_path / "metrics.jsonl").write_bytes(json.dumps(GOOD[0]).encode() + b'\n{"event": "tra')
    assert records.read(tmp_path / "metrics.jsonl") == (GOOD[:1], 0), "the last line of a killed run is not whole"


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
