"""Run the command as a user does, in a process of its own, and read what it left."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import drivetrain
from tests.support.waiting import LIMIT_S, until

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PACKAGE = Path(drivetrain.__file__).parents[1]  # whichever drivetrain pytest tests: checkout, copy or wheel
DRIVETRAIN = ("-m", "drivetrain")
SRC_TRAIN = ("-m", "src.train")
TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "drivetrain")
TINY = ("model=mlp", "model.hidden=[32]", "log_every=1")
OWN = ("model=own", "trust=[my_nets]", "log_every=1")
ADDED_BY_LAUNCHERS = ("WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "FORCE_COLOR", "DRIVETRAIN_TRACEBACK")


@dataclass(frozen=True)
class Done:
    """A command that has ended."""

    code: int
    out: str
    err: str

    @property
    def errors(self) -> list[str]:
        """The lines that begin with "error:"."""
        return [line for line in self.err.splitlines() if line.startswith("error:")]


def environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """This process's environment, without what a launcher added, with the drivetrain that is under test."""
    env = {k: v for k, v in os.environ.items() if k not in ADDED_BY_LAUNCHERS}
    extra = dict(extra or {})
    paths = [extra.pop("PYTHONPATH", ""), str(PACKAGE), os.environ.get("PYTHONPATH", "")]
    return {**env, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(p for p in paths if p), **extra}


def start(*words: str, cwd: Path, how: Sequence[str] = DRIVETRAIN, env: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
    """Start a command in a session of its own, so that all its processes can be ended together."""
    return subprocess.Popen(
        [sys.executable, *how, *words], cwd=cwd, env=environment(env), text=True, start_new_session=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def finish(process: subprocess.Popen[str], code: int | None = None) -> Done:
    """Wait for a command, which must end with this exit code; one that hangs is killed with all its children: the test fails."""
    try:
        out, err = process.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        kill_all(process)
        out, err = process.communicate()
        raise AssertionError(f"hung: {process.args}\n{out}\n{err}") from None
    done = Done(process.returncode, out, err)
    assert code is None or (done.code == code and "Traceback" not in out + err), done
    return done


def kill_all(process: subprocess.Popen[str]) -> None:
    """SIGKILL to the command and to every process it started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def run(
    *words: str, cwd: Path, how: Sequence[str] = DRIVETRAIN, env: Mapping[str, str] | None = None, code: int | None = None
) -> Done:
    """A command to its end, with this exit code and without a traceback."""
    return finish(start(*words, cwd=cwd, how=how, env=env), code)


def train(
    *words: str, cwd: Path, how: Sequence[str] = DRIVETRAIN, env: Mapping[str, str] | None = None, code: int | None = None
) -> Done:
    """`drivetrain train -q …` to its end, with this exit code."""
    return run("train", "-q", *words, cwd=cwd, how=how, env=env, code=code)


@contextmanager
def at_the_gate(
    place: Path, at: str, *words: str, ranks: int = 1, env: Mapping[str, str] | None = None
) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """A run of my_nets.Gated that waits, all its ranks at the gate; (process, the file that lets it go on)."""
    gate = empty(place.with_name(f"{place.name}-gate"))
    process = start("train", "-q", *words, cwd=place, env={"GATE": str(gate), "GATE_AT": at, **(env or {})})
    try:
        arrivals(gate, ranks, process)
        yield process, gate / "go"
    finally:
        kill_all(process)
        process.communicate()


def arrivals(gate: Path, count: int, process: subprocess.Popen[Any]) -> list[Path]:
    """Wait until so many of a command's processes have come to the gate; the files that say so."""

    def arrived() -> list[Path]:
        assert process.poll() is None, process.communicate()
        found = list(gate.glob("arrived-*"))
        return found if len(found) >= count else []

    return until(arrived, lambda: "never came to the gate")


def empty(place: Path) -> Path:
    """A new empty directory."""
    place.mkdir(parents=True)
    return place


def with_own_nets(place: Path) -> Path:
    """A new directory that holds the user's my_nets.py alone."""
    shutil.copy(HERE / "my_nets.py", empty(place))
    return place


def runs(root: Path) -> list[Path]:
    """The run directories below an output_dir, sweeps' jobs too, by their results."""
    return sorted(path.parent for path in root.rglob("config.yaml") if path.parent.name != ".hydra")


def only_run(root: Path) -> Path:
    """The one run below an output_dir."""
    (found,) = runs(root)
    return found


def strict_json(text: str) -> Any:
    """JSON as the standard has it: NaN and Infinity are none."""

    def refuse(word: str) -> None:
        raise ValueError(f"{word} is not JSON")

    return json.loads(text, parse_constant=refuse)


def result(run_dir: Path) -> dict[str, Any]:
    """A run's result.json."""
    return json.loads((run_dir / "result.json").read_text())


def records(run_dir: Path, event: str) -> list[dict[str, Any]]:
    """A run's metrics.jsonl: its "train" or its "evaluate" lines, without the time of day."""
    lines = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return [{k: v for k, v in record.items() if k != "time"} for record in lines if record["event"] == event]


def losses(run_dir: Path) -> list[tuple[Any, ...]]:
    """The results of training at each logged update, without what depends on the clock."""
    return [tuple(r[k] for k in ("update", "epoch", "loss", "lr", "samples", "skipped")) for r in records(run_dir, "train")]


def checkpoints(run_dir: Path) -> list[Path]:
    """The saved states, oldest first."""
    return sorted((run_dir / "checkpoints").glob("[0-9]*"), key=lambda path: int(path.name))


def tensors(result: Any) -> dict[str, Any]:
    """The weights that a run, which must have completed, saved last."""
    from safetensors.torch import load_file

    assert result.status == "completed", result.error
    return load_file(checkpoints(result.run_dir)[-1] / "model.safetensors")


def everything(run_dir: Path) -> dict[str, bytes]:
    """The content of all files of a run, by their paths in it."""
    return {str(file.relative_to(run_dir)): file.read_bytes() for file in run_dir.rglob("*") if file.is_file()}


def weights(run_dir: Path) -> bytes:
    """The newest saved weights, byte for byte, without what the file says of the model."""
    content = (checkpoints(run_dir)[-1] / "model.safetensors").read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:end])
    header.pop("__metadata__", None)
    return json.dumps(header).encode() + content[end:]
