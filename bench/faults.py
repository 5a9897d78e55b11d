"""Plants faults in runs, and writes how each ends: exit code, message, what is left on disk, and what `resume=` makes of it.

`python -m bench.faults [--only NAME …] [--out FILE] [--table]`. The faults are those that a run must survive or answer: of the
disk, the run's directory and files, ranks and workers, the machine, the data, the model and the config. `--table` writes them
into docs/runs.md too. Linux; some faults need root, to mount small disks, and are named where they are left out.

A row is as stated if the exit code is the one that is written here, one message says what is the matter in the words that are
written here, nothing prints a traceback, no half-written checkpoint stays, and the run can be gone on with if there was one.
The resumed run is compared with one that had no fault, bit for bit.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from tests.support import command, same_end
from tests.support.command import Done

from bench import harness
from bench.fault_table import FAULTS, HOLDERS, UPDATE, WORDS, Fault, LeftOut, needs

HANGS_S = 100
TABLE = Path("docs/runs.md")
BEGIN, END = "<!-- made by python -m bench.faults --table -->\n", "<!-- end -->\n"


class Row(NamedTuple):
    """What came of a fault."""

    fault: str
    exit: int
    message: str
    result: str  # the status in result.json
    checkpoints: list[str]
    half_written: list[str]
    resume: str  # what `resume=` then came to
    wrong: list[str]  # what is not as stated


def plant(fault: Fault, folder: Path, whole: Callable[[tuple[str, ...]], Path]) -> Row:
    """Run with a fault. `whole(words)` is the run of these words that has none."""
    place = Path(tempfile.mkdtemp(dir=folder))
    for name in ("traced.py", "faulty_nets.py"):
        shutil.copy(command.HERE / name, place)
    command.empty(place / "struck")
    with _disk(place, fault.disk):
        if fault.before is not None:
            fault.before(place)
        if fault.name.endswith("full before the run"):
            (place / "outputs/filled").write_bytes(bytes(shutil.disk_usage(place / "outputs").free))
        words = [*(fault.whole or ()), *fault.words]
        if fault.after is not None:
            assert command.train(*words, cwd=place).code == 0
            fault.after(place)
            words = [f"resume={command.only_run(place / 'outputs').relative_to(place)}", *fault.beside]
        done = _run(fault, words, place)
        _undo(place)
        return _judged(fault, done, place, whole)


@contextmanager
def _disk(place: Path, size: str) -> Iterator[None]:
    outputs = command.empty(place / "outputs")
    if not size:
        yield
        return
    if os.geteuid() or subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "none", outputs], check=False).returncode:
        raise LeftOut("only root may mount a small disk")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", outputs], check=True)


def _run(fault: Fault, words: Sequence[str], place: Path) -> Done:
    env = {"FAULT": fault.strike, "FAULT_AT": str(UPDATE if fault.strike else 0), "FAULT_ONCE": str(place / "struck/once")}
    if fault.rank is not None:
        env["FAULT_RANK"] = str(fault.rank)
    if not fault.wrap:
        return command.train(*words, cwd=place, env={**env, **dict(fault.env)})
    needs(fault.wrap[0])(place)
    line = [*fault.wrap, sys.executable, *command.DRIVETRAIN, "train", "-q", *words]
    try:
        done = subprocess.run(
            line, cwd=place, env=command.environment(env), capture_output=True, text=True, check=False, timeout=HANGS_S
        )
    except subprocess.TimeoutExpired:
        return Done(124, "", f"hung for {HANGS_S} s")
    return Done(done.returncode, done.stdout, done.stderr)


def _undo(place: Path) -> None:
    """End the fault: there is space again, the disk can be written, nobody else has the run."""
    if shutil.which("chattr") is not None:
        subprocess.run(["chattr", "-R", "-i", place / "outputs"], check=False, capture_output=True)
    (place / "outputs/filled").unlink(missing_ok=True)
    if (holder := HOLDERS.pop(place, None)) is not None:
        holder.kill()
        holder.communicate()


def _judged(fault: Fault, done: Done, place: Path, whole: Callable[[tuple[str, ...]], Path]) -> Row:
    wrong = []
    if done.code != fault.code:
        wrong.append(f"exit code {done.code} instead of {fault.code}")
    if "Traceback" in done.err:
        wrong.append("a traceback")
    if len(done.errors) != (fault.code > 0 and bool(fault.says)):
        wrong.append(f"{len(done.errors)} errors")
    lines = [line for line in done.err.splitlines() if re.search(fault.says, line)] if fault.says else [""]
    if not lines:
        wrong.append(f"the message is not {fault.says!r}: {done.err[-500:]}")
    found = command.runs(place)
    run_dir = found[0] if found else None
    half = [] if run_dir is None else [p.name for p in (run_dir / "checkpoints").glob(".*")]
    if half and fault.code != -9 and not fault.half_written:
        wrong.append(f"half-written: {half}")
    status = command.result(run_dir)["status"] if run_dir is not None and (run_dir / "result.json").exists() else "none"
    saved = [] if run_dir is None else [p.name for p in command.checkpoints(run_dir)]
    resume = "none"
    if fault.resumes and run_dir is not None:
        resume = _resumed(fault, run_dir, place, whole, wrong)
    elif fault.resumes:
        wrong.append("there is no run to go on with")
    message = (done.errors or [lines[0] if lines else ""])[0].replace(str(place), "…").replace(str(place.parent), "…")
    return Row(fault.name, done.code, message, status, saved, half, resume, [w.replace(str(place), "…") for w in wrong])


def _resumed(fault: Fault, run_dir: Path, place: Path, whole: Callable[[tuple[str, ...]], Path], wrong: list[str]) -> str:
    again = command.train(f"resume={run_dir.relative_to(place)}", cwd=place)
    if again.code:
        wrong.append(f"does not resume: {again.err[-500:]}")
        return f"exit {again.code}"
    different = same_end.differences(run_dir, whole(fault.words))
    if left := [p.name for p in (run_dir / "checkpoints").glob(".*")]:
        wrong.append(f"half-written after resume: {left}")
    if different == list(fault.lost):
        return f"same bits{''.join(f', but the {name} before' for name in fault.lost)}"
    wrong.append(f"differs after resume: {different[:5]}")
    return "other bits"


def campaign(faults: Sequence[Fault], jobs: int = 2) -> tuple[list[Row], dict[str, str]]:
    """Plant all of them. Return the rows, and what was left out with the reason."""
    folder = Path(tempfile.mkdtemp())
    left_out: dict[str, str] = {}
    rows: list[Row] = []
    known: dict[tuple[str, ...], Path] = {}
    lock = threading.Lock()

    def whole(words: tuple[str, ...]) -> Path:
        with lock:
            if words not in known:
                place = command.empty(folder / f"whole-{len(known)}")
                for name in ("traced.py", "faulty_nets.py"):
                    shutil.copy(command.HERE / name, place)
                done = command.train(*WORDS, *words, cwd=place)
                assert done.code == 0, done
                known[words] = command.only_run(place / "outputs")
            return known[words]

    def one(fault: Fault) -> None:
        try:
            rows.append(plant(fault, folder, whole))
            print(f"{fault.name}: exit {rows[-1].exit}, {rows[-1].resume} {rows[-1].wrong}", flush=True)
        except LeftOut as reason:
            left_out[fault.name] = str(reason)

    try:
        with ThreadPoolExecutor(jobs) as pool:
            list(pool.map(one, faults))
        order = [fault.name for fault in faults]
        rows.sort(key=lambda row: order.index(row.fault))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return rows, left_out


def markdown(faults: Sequence[Fault]) -> str:
    """The table of the docs: what is stated, and then measured, of each fault."""
    lines = ["| what happens | outcome | `resume=` |", "|---|---|---|"]
    for fault in faults:
        lost = f", without the {' and '.join(fault.lost)} before" if fault.lost else ""
        lines.append(f"| {fault.name} | {fault.outcome} | {f'the same bits{lost}' if fault.resumes else '–'} |")
    return "\n".join(lines) + "\n"


def write_table(file: Path) -> None:
    """Put the table between the two marks of a page."""
    text = file.read_text()
    head, _, rest = text.partition(BEGIN)
    file.write_text(f"{head}{BEGIN}\n{markdown(FAULTS)}\n{END}{rest.partition(END)[2]}")


def main() -> None:
    """Plant, show, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", help="parts of the names of faults")
    parser.add_argument("--jobs", type=int, default=2, help="faults at the same time")
    parser.add_argument("--out", type=Path, default=harness.RESULTS / "faults-cpu.json")
    parser.add_argument("--table", action="store_true", help=f"write the table in {TABLE}")
    given = parser.parse_args()
    harness.fork_commands()
    chosen = [f for f in FAULTS if given.only is None or any(part in f.name for part in given.only)]
    rows, left_out = campaign(chosen, given.jobs)
    shown = [[r.fault, str(r.exit), r.resume, r.message[:60], "; ".join(r.wrong)[:60]] for r in rows]
    harness.table(f"{len(rows)} faults", ["fault", "exit", "resume=", "message", "not as stated"], shown)
    harness.write(given.out, {
        "machine": harness.machine(), "faults": len(rows), "as_stated": sum(not r.wrong for r in rows), "left_out": left_out,
        "rows": [r._asdict() for r in rows],
    })  # fmt: skip
    if given.table:
        write_table(harness.ROOT / TABLE)
    raise SystemExit(any(r.wrong for r in rows))


if __name__ == "__main__":
    main()
