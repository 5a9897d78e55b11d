"""Plants faults in runs, and writes how each ends: exit code, message, what is left on disk, and what `resume=` makes of it.

`python -m bench.faults [--only NAME …] [--out FILE] [--table]`. The faults are those that a run must survive or answer: of the
disk, the run's directory and files, ranks and workers, the machine, the data, the model and the config. `--table` writes them
into docs/runs.md too. Linux; some faults need root, to mount small disks, and are named where they are left out.

A row is as stated if the exit code is the one that is written here, one message says what is the matter in the words that are
written here, nothing prints a traceback, no half-written checkpoint stays, and the run can be gone on with if there was one.
The resumed run is compared with one that had no fault, bit for bit.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from tests.support import command, same_end
from tests.support.command import Done

from bench import harness

BECOME = "import os, sys; os.execvp(sys.argv[1], sys.argv[1:])"  # a Python that becomes another program
FILES = ("traced.py", "faulty_nets.py")  # beside the command

# --- the faults: how each is planted, and what is stated of it ---

WORDS = (
    "data=own", "data.target=traced.Pictures", "trust=[traced,faulty_nets]", "model=own", "model.target=faulty_nets.Faulty",
    "optimizer=adamw", "batch.global_batch=12", "updates=14", "log_every=1", "saving.every_updates=2", "runtime.device=cpu",
    "runtime.threads=1",
)  # fmt: skip
WORKERS = ("loader=workers", "loader.num_workers=1")
UPDATE = 9  # at which a fault strikes, in the second epoch
PICTURE = r"train/a/3\.png"
PICTURES = ("data=imagefolder", "data.root=pictures", "data.size=8", "model=mlp", "updates=4", "saving.every_updates=2")
Prepare = Callable[[Path], None]


class LeftOut(Exception):
    """A fault that this machine cannot have."""


class Fault(NamedTuple):
    """A fault, and what is stated of it."""

    name: str
    outcome: str  # as the table in the docs has it
    code: int
    says: str  # a pattern of the message
    strike: str = ""  # the fault of faulty_nets.Faulty that strikes
    words: tuple[str, ...] = ()
    rank: int | None = None
    before: Prepare | None = None  # done to the place before the run
    after: Prepare | None = None  # done to a finished run, after which it is gone on with: that is what is judged
    disk: str = ""  # outputs/ is a disk of its own of this size
    beside: tuple[str, ...] = ()  # the words beside `resume=` then
    whole: tuple[str, ...] | None = WORDS  # the words of a command; None: see `how`
    wrap: tuple[str, ...] = ()  # a program that starts the command
    env: tuple[tuple[str, str], ...] = ()
    resumes: bool = True
    half_written: bool = False  # a half-written checkpoint stays, which only a resumed run can remove
    lost: tuple[str, ...] = ()  # what a resumed run does not have of one without a fault


def newest(place: Path) -> Path:
    """The newest checkpoint of the one run in a place."""
    return command.checkpoints(command.only_run(place / "outputs"))[-1]


def flip(file: Path) -> None:
    """Flip one bit in the middle of a file."""
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def spoil_metrics(place: Path) -> None:
    """Put a line in metrics.jsonl that is no record."""
    file = command.only_run(place / "outputs") / "metrics.jsonl"
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join([*lines[:3], b"\xff\xfe{]\n", *lines[3:]]))


def damage(pattern: str) -> Prepare:
    """Flip a bit of a file of the newest checkpoint."""
    return lambda place: flip(newest(place) / pattern)


def spoil(name: str) -> Prepare:
    """Overwrite a file of the run with what is none."""
    return lambda place: (command.only_run(place / "outputs") / name).write_bytes(b"\x00{[: &a *b\n") and None


def link_checkpoints(place: Path) -> None:
    """Put a link in the place of the checkpoints."""
    checkpoints = command.only_run(place / "outputs") / "checkpoints"
    checkpoints.rename(place / "moved")
    checkpoints.symlink_to(place / "moved")


def pictures(bad: Callable[[Path], Any]) -> Prepare:
    """A folder of pictures, one of which is made bad."""

    def make(place: Path) -> None:
        from PIL import Image

        for part in ("train", "val"):
            for label in ("a", "b"):
                folder = command.empty(place / "pictures" / part / label)
                for number in range(12):
                    Image.new("L", (8, 8), 20 * number).save(folder / f"{number}.png")
        bad(place / "pictures/train/a/3.png")

    return make


def cut(file: Path) -> None:
    """Leave half of a picture."""
    os.truncate(file, file.stat().st_size // 2)


def hold(place: Path) -> None:
    """Be another process that has the run, for as long as this one lives."""
    run_dir = command.only_run(place / "outputs")
    held = "import fcntl,sys,time; f=open(sys.argv[1],'a'); fcntl.flock(f,fcntl.LOCK_EX); print(1,flush=True); time.sleep(600)"
    process = subprocess.Popen([sys.executable, "-c", held, str(run_dir / ".lock")], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    HOLDERS[place] = process


def needs(program: str) -> Prepare:
    """Leave the fault out where root's program is not there."""

    def check(place: Path) -> None:
        if os.geteuid() or shutil.which(program) is None:
            raise LeftOut(f"only root may use {program}")

    return check


HOLDERS: dict[Path, subprocess.Popen[bytes]] = {}  # by the place whose run they hold
PRIVATE_SHM = ("unshare", "-m", "sh", "-c", 'mount -t tmpfs -o size=48k none /dev/shm && exec "$@"', "sh")
ASCII = (("LC_ALL", "C"), ("LANG", "C"), ("PYTHONUTF8", "0"), ("PYTHONCOERCECLOCALE", "0"))
SAFE = r"is safe: go on with resume="
DDP = ("parallel=ddp", "parallel.heartbeat_timeout_s=3")
FAULTS = (
    Fault("the disk is full", "exit 1, names the space; the last checkpoint is safe", 1, SAFE, "disk_full", disk="3m"),
    Fault("checkpoints/ becomes read-only", "exit 1; the last checkpoint is safe", 1, SAFE, "read_only", before=needs("chattr")),
    Fault("the disk is full before the run", "exit 2; no run begins", 2, "No space left on device", disk="40k", resumes=False),
    Fault("the run's directory is moved", "saved where it went, exit 1", 1, r"was moved to .*go on with resume=", "run_moved"),
    Fault("the run's directory is removed", "saved next to it, exit 1", 1, r"was removed.*go on with resume=", "run_removed",
          lost=("losses", "evaluations")),
    Fault("checkpoints/ is a link", "exit 1 at the next save", 1, "is a link", after=link_checkpoints, resumes=False),
    Fault("a bit of the weights flips", "passed over for the checkpoint before", 0, "damaged model.safetensors.*passed over",
          after=damage("model.safetensors")),
    Fault("a bit of the state flips", "passed over for the checkpoint before", 0, "damaged state.pt.*passed over",
          after=damage("state.pt")),
    Fault("a bit of the manifest flips", "passed over for the checkpoint before", 0, "manifest.json.*passed over",
          after=damage("manifest.json")),
    Fault("metrics.jsonl has a spoilt line", "the line is left out", 0, "1 lines could not be read", after=spoil_metrics),
    Fault("config.yaml is spoilt", "exit 2", 2, "config.yaml", after=spoil("config.yaml"), resumes=False),
    Fault("environment.json is spoilt", "exit 2", 2, "environment.json", after=spoil("environment.json"), resumes=False),
    Fault("another process has the run", "exit 2, changes nothing", 2, "in use by another process", after=hold, resumes=False),
    Fault("a resume has another config", "exit 2, shows the difference", 2, r"optimizer\.lr", after=lambda place: None,
          beside=("optimizer.lr=0.5",)),
    Fault("a signal asks the run to end", "finishes the update, saves, exit 75", 75, "go on with resume=", "told_to_end"),
    Fault("a signal while a loader's worker is stuck", "saves within a second, exit 75", 75, r"stopped by a signal.*resume=",
          "told_to_end_while_waiting", (*WORKERS, "loader.prefetch_factor=1")),
    Fault("the process is killed", "nothing is said; resumable", -9, "", "killed"),
    Fault("code of the model ends the process", "nothing is said; resumable", 9, "", "ends_at_once"),
    Fault("code of the model calls sys.exit(0)", "exit 1", 1, "SystemExit", "exits"),
    Fault("the model raises an error", "exit 1, names the log with the traceback", 1, "RuntimeError: this forward", "raises"),
    Fault("the loss is NaN", "exit 3", 3, "the loss is nan", "not_a_number", resumes=False),
    Fault("memory runs out", "goes on with half as many samples at once", 0, "out of memory: training continues", "out_of_memory",
          resumes=False),
    Fault("a logger fails", "named once and left out; the run goes on", 0, "logger=csv.*the server is gone", "logger_fails",
          ("logger=[csv]",)),
    Fault("a job of a sweep fails", "exit 1, names the job; the others run", 1, "1 of 2", "raises",
          ("-m", "optimizer.lr=0.01,0.02"), resumes=False),
    Fault("the clock is set back a day", "no effect", 0, "", "clock_set_back"),
    Fault("no descriptors are left", "exit 1, says what to raise", 1, r"may not open more files.*ulimit -n", "no_descriptors",
          half_written=True),
    Fault("/dev/shm is tiny", "exit 1 after loader.timeout_s, says what to set", 1, "/dev/shm",
          words=(*WORKERS, "loader.timeout_s=10"),
          wrap=PRIVATE_SHM, resumes=False),
    Fault("the locale is ASCII", "no effect", 0, "", env=ASCII),
    Fault("a loader's worker is killed", "exit 75", 75, "worker was killed.*resume=", "worker_killed", WORKERS),
    Fault("a loader's worker stops", "exit 75 after loader.timeout_s", 75, r"loader\.timeout_s.*resume=", "worker_stopped",
          (*WORKERS, "loader.timeout_s=2", "loader.prefetch_factor=1")),
    Fault("a rank is killed", "exit 1, names the rank", 1, r"rank 1 ended without a result.*resume=", "killed", DDP, 1),
    Fault("a rank is killed, max_restarts=1", "all start again from the newest checkpoint", 0, "all start again from", "killed",
          (*DDP, "parallel.max_restarts=1"), 1),
    Fault("a rank stops", "exit 1, names the rank and its stack", 1, r"rank 1 gave no heartbeat.*resume=", "stopped", DDP, 1),
    Fault("the loss is NaN on one rank", "all ranks end, exit 3", 3, "the loss is nan", "not_a_number", DDP, 1, resumes=False),
    Fault("memory runs out on one rank", "exit 1, names the rank", 1, "rank 1: .*can't allocate memory", "out_of_memory", DDP, 1),
    Fault("a picture is cut short", "exit 2, names the file; no run begins", 2, PICTURE, whole=PICTURES, before=pictures(cut),
          resumes=False),
    Fault("a picture is a FIFO", "exit 2, names the file; no run begins", 2, PICTURE, whole=PICTURES,
          before=pictures(lambda file: (file.unlink(), os.mkfifo(file))), resumes=False),
    Fault("a picture is a text", "exit 2, names the file; no run begins", 2, PICTURE, whole=PICTURES,
          before=pictures(lambda file: file.write_text("no picture")), resumes=False),
)  # fmt: skip


# --- planting and judging ---

TABLE = Path("docs/runs.md")
BEGIN, END = "<!-- made by python -m bench.faults --table -->\n", "<!-- end -->\n"


class Row(NamedTuple):
    """The end of a run with a fault."""

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
    place = harness.place_in(folder, *FILES)
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
    how: Sequence[str] = command.DRIVETRAIN
    if fault.wrap:
        needs(fault.wrap[0])(place)
        how = ["-c", BECOME, *fault.wrap, sys.executable, *how]
    return command.train(*words, cwd=place, how=how, env={**env, **dict(fault.env)})


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
    lock = threading.Lock()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        folder = Path(name)

        @cache
        def trained(words: tuple[str, ...]) -> Path:
            place = harness.place_in(folder, *FILES)
            done = command.train(*WORDS, *words, cwd=place)
            assert done.code == 0, done
            return command.only_run(place / "outputs")

        def whole(words: tuple[str, ...]) -> Path:
            with lock:
                return trained(words)

        def one(fault: Fault) -> tuple[str, Row | str]:
            try:
                row = plant(fault, folder, whole)
            except LeftOut as reason:
                return fault.name, str(reason)
            print(f"{fault.name}: exit {row.exit}, {row.resume} {row.wrong}", flush=True)
            return fault.name, row

        found = dict(harness.at_once(((fault,) for fault in faults), one, jobs))
    rows = [row for fault in faults if isinstance(row := found[fault.name], Row)]
    return rows, {name: why for name, why in found.items() if isinstance(why, str)}


def markdown(faults: Sequence[Fault]) -> str:
    """The table of the docs: what is stated, and then measured, of each fault."""
    lost = {fault: f", without the {' and '.join(fault.lost)} before" if fault.lost else "" for fault in faults}
    rows = [(each.name, each.outcome, f"the same bits{lost[each]}" if each.resumes else "–") for each in faults]
    return harness.markdown(("what happens", "outcome", "`resume=`"), rows)


def main() -> None:
    """Plant, show, write."""
    given = harness.parse(__doc__, "faults-cpu.json", only=[], jobs=2, table=False)
    harness.fork_commands()
    chosen = [f for f in FAULTS if not given.only or any(part in f.name for part in given.only)]
    rows, left_out = campaign(chosen, given.jobs)
    shown = [[r.fault, str(r.exit), r.resume, r.message[:60], "; ".join(r.wrong)[:60]] for r in rows]
    harness.table(f"{len(rows)} faults", ["fault", "exit", "resume=", "message", "not as stated"], shown)
    harness.write(given.out, {
        "faults": len(rows), "as_stated": sum(not r.wrong for r in rows), "left_out": left_out,
        "rows": [r._asdict() for r in rows],
    })  # fmt: skip
    if given.table:
        page = harness.ROOT / TABLE
        page.write_text(harness.between(page.read_text(), BEGIN, END, f"\n{markdown(FAULTS)}\n"))
    raise SystemExit(any(r.wrong for r in rows))


if __name__ == "__main__":
    main()
