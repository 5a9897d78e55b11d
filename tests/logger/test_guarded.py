"""A logger neither holds up a run nor ends it."""

import logging
import threading

import pytest

from drivetrain.core.errors import UserError
from drivetrain.logger import Guarded, Logger, guarded


class Broken(Logger):
    """Fails at its second record."""

    def __init__(self, in_thread=True, required=False):
        self.in_thread, self.required, self.records, self.closed = in_thread, required, [], False

    def log(self, record):
        self.records.append(record)
        if len(self.records) > 1:
            raise ConnectionError("no route to host")

    def close(self):
        self.closed = True


@pytest.mark.parametrize("in_thread", [True, False])
def test_its_first_error_is_logged_and_its_last(caplog, in_thread):
    broken = Broken(in_thread)
    writer = Guarded("broken", broken)
    for update in range(5):
        writer.log({"update": update})
    writer.close("completed")
    assert [r["update"] for r in broken.records] == [0, 1]
    assert broken.closed
    (said,) = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert said.startswith("logger=broken failed, and the run goes on without it")
    assert "ConnectionError: no route to host" in said


def test_a_required_logger_ends_the_run():
    writer = Guarded("files", Broken(in_thread=False, required=True))
    writer.log({})
    with pytest.raises(ConnectionError):
        writer.log({})


def test_a_slow_logger_holds_up_nobody():
    go_on, records = threading.Event(), []

    class Slow(Logger):
        def log(self, record):
            go_on.wait()
            records.append(record["update"])

    writer = Guarded("slow", Slow())
    for update in range(3):
        writer.log({"update": update})
    assert records == []  # and we are here
    go_on.set()
    writer.close("completed")
    assert records == [0, 1, 2]


def test_a_run_goes_on_without_a_tracker_that_fails(make, caplog):
    trainer = make("updates=3")
    trainer.log.writers.insert(0, Guarded("broken", Broken()))
    trainer.fit()
    trainer.log.writers[0].close("completed")
    assert trainer.progress.updates == 3
    assert caplog.text.count("logger=broken failed") == 1


class CannotStart(Logger):
    def start(self, run_dir, update):
        raise ConnectionError("no route to host\nmore")


def test_what_cannot_start_is_one_line_and_a_resumed_run_goes_on_without_it(make, caplog):
    make("updates=1")
    (context,) = make.contexts
    with pytest.raises(UserError, match=r"^logger=x cannot start: ConnectionError: no route to host$"):
        guarded("x", CannotStart(), context)
    context.progress.updates = 1
    guarded("x", CannotStart(), context).close("completed")
    assert "the run goes on without it" in caplog.text


def test_csv_is_a_whole_table_at_any_time(tmp_path):
    import csv

    from drivetrain.logger import Csv

    table = Csv()
    table.start(tmp_path, 0)
    rows = [{"event": "train", "update": 1, "loss": 2.0}, {"event": "train", "update": 2, "loss": 1.0}]
    rows.append({"event": "evaluate", "update": 2, "accuracy": 0.5})
    for number, row in enumerate(rows, 1):
        table.log(row)
        with (tmp_path / "metrics.csv").open() as file:
            read = [{k: v for k, v in line.items() if v} for line in csv.DictReader(file)]
        assert read == [{k: str(v) for k, v in row.items()} for row in rows[:number]]
