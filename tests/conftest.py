"""Every test starts from a directory of its own, one thread, and runs of a second."""

import contextlib
import gc
import itertools
import logging
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from time import monotonic, sleep  # whose names in `time` tests replace
from typing import Any

import pytest

# Bytecode is kept, whatever the machine prefers: each interpreter of a test would compile torch's thousand files again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
os.environ["OMP_NUM_THREADS"] = "1"  # whatever it is outside: the workers of xdist and the ranks share the cores already
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # a thread that waits by spinning takes the core from the one it waits for

from drivetrain.core.machine import signals
from drivetrain.core.machine.isolation import isolated
from tests.support import composed, fork_server, leftovers
from tests.support.put import put
from tests.support.refusals import problems_of

sys.dont_write_bytecode = False
leftovers.end_with_pytest()
fork_server.install()
composed.install()
fork_server.do_not_wait_for_the_disk()
logging.getLogger().setLevel(logging.INFO)  # what a run says of itself; pytest's log_level would set it 12 times a test

NUMBERS = itertools.count()
UNTIL: list[tuple[float, pytest.Item, Any]] = []  # when the running test is stuck
WATCHES: list[threading.Thread] = []
OF_LAUNCHERS = ("WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
TINY = [
    "data=synthetic", "data.shape=[3,8,8]", "data.classes=4", "data.samples=48", "data.test_samples=20",
    "model=mlp", "optimizer=sgd", "optimizer.lr=0.05", "scheduler=constant", "batch.global_batch=12",
    "log_every=1", "updates=2",
]  # fmt: skip


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Give the campaigns an hour each. A lent machine may have pytest without its plugin for limits of time."""
    for item in items if config.pluginmanager.hasplugin("timeout") else ():
        if item.get_closest_marker("slow") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(3600))


@pytest.hookimpl(optionalhook=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: Any) -> bool:
    """Let one thread watch the limits of all tests: to start and end a timer for each takes as long as half of the tests."""
    UNTIL[:] = [(monotonic() + settings.timeout, item, settings)]
    if not WATCHES:
        WATCHES.append(threading.Thread(target=_watch, name="limits of time", daemon=True))
        WATCHES[0].start()
    return True


@pytest.hookimpl(optionalhook=True)
def pytest_timeout_cancel_timer(item: pytest.Item) -> bool:
    UNTIL.clear()
    return True


def _watch() -> None:
    from pytest_timeout import timeout_timer

    while True:
        sleep(1)
        for until, item, settings in UNTIL[:]:
            if monotonic() > until:
                timeout_timer(item, settings)  # which ends this process with the stacks of its threads


def pytest_collection_finish(session: pytest.Session) -> None:
    """Start autograd, and leave what a worker has by now out of all collections of garbage, which runs with stages ask for.

    With a fake CUDA device autograd would start threads for it, and no process that is forked then could compute gradients.
    """
    if (torch := sys.modules.get("torch")) is not None:
        torch.ones((), requires_grad=True).backward()
    if hasattr(session.config, "workerinput"):
        gc.collect()
        gc.freeze()
        with contextlib.suppress(OSError):
            fork_server.use_huge_pages()  # a fork then takes half the time


class Sink(list[dict[str, Any]]):
    """A logger that keeps its records."""

    def log(self, record: dict[str, Any]) -> None:
        self.append(record)

    @property
    def losses(self) -> list[float]:
        """The losses of the training's records."""
        return [record["loss"] for record in self if record["event"] == "train"]


@pytest.fixture
def tmp_path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of the test's own. pytest's also has a link to the newest one, whose change takes half a millisecond."""
    name = re.sub(r"\W", "_", request.node.name)[:30]
    path = tmp_path_factory.getbasetemp() / f"{name}{next(NUMBERS)}"
    path.mkdir(mode=0o700)
    return path


@pytest.fixture
def _no_launcher() -> Iterator[None]:
    """Remove what a test leaves of a launcher's variables, such as a Slurm task adds, after monkeypatch has undone its own."""
    yield
    for name in OF_LAUNCHERS:
        os.environ.pop(name, None)


@pytest.fixture(autouse=True, scope="session")
def _own_key(tmp_path_factory: pytest.TempPathFactory) -> None:
    """The key that signs runs stays in the tests' folder, also in programs that a test starts."""
    os.environ["XDG_STATE_HOME"] = str(tmp_path_factory.mktemp("state"))
    fork_server.look_often()


@pytest.fixture(autouse=True)
def _own_place(_no_launcher: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Runs land in the test's directory; torch's switches are put back."""
    monkeypatch.chdir(tmp_path)
    for name in (*OF_LAUNCHERS, "PYTHONSAFEPATH"):  # the command sets the last one, also in a test that calls it as a function
        monkeypatch.delenv(name, raising=False)
    with isolated():
        yield


@pytest.fixture(autouse=True)
def _forked_or_not(_no_launcher: None, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A test that is marked `own_process` starts every command as a new interpreter."""
    if request.node.get_closest_marker("own_process"):
        monkeypatch.setattr(fork_server.Popen, "forking", False)


@pytest.fixture(autouse=True)
def _half_as_on_any_cpu(_no_launcher: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Computing in 16 bits is the same whatever this CPU is good at: all matrix products in it."""
    from drivetrain.precision import cpu_half

    def measure(model: Any, example: Any, dtype: Any) -> float:
        return 1.0

    monkeypatch.setattr(cpu_half, "measure", measure)


@pytest.fixture(scope="session")
def data_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The data sets and classes that options want, for tests that only read them."""
    from tests.test_contract import write_outside

    made = tmp_path_factory.mktemp("outside")
    write_outside(made)
    return made


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """A directory of the user's, which holds the networks of my_nets.py alone."""
    from tests.support.command import with_own_nets

    return with_own_nets(tmp_path / "here")


@pytest.fixture
def own_handlers() -> Iterator[None]:
    """This program answers the signals that stop a run itself: one that did ends no program after it."""
    before = {number: signal.signal(number, lambda *_: None) for number in signals.STOP_SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(scope="session")
def tiny() -> Callable[..., list[str]]:
    """The words of a tiny run and the given ones. A group that is given another option loses its tiny values."""

    def words(*given: str) -> list[str]:
        chosen = {w.partition("=")[0] for w in given}
        kept = [w for w in TINY if w.startswith("batch.") or w.partition("=")[0].partition(".")[0] not in chosen]
        return [*kept, *given]

    return words


@pytest.fixture
def import_from(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Path], None]]:
    """Let a folder's modules be imported in this test alone: those of several examples have one name."""
    known: set[str] = set()

    def place(folder: Path) -> None:
        known.update(path.stem for path in folder.glob("*.py"))
        for name in known:
            sys.modules.pop(name, None)
        monkeypatch.syspath_prepend(folder)

    yield place
    for name in known:
        sys.modules.pop(name, None)


@pytest.fixture
def own_module(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str, str], Path]:
    """`own_module(name, text)`: write a module of the user's, which can be imported in this test alone."""

    def write(name: str, text: str) -> Path:
        monkeypatch.syspath_prepend(tmp_path)
        return put(tmp_path / f"{name}.py", text)

    return write


@pytest.fixture
def train(tiny: Callable[..., list[str]]) -> Callable[..., Any]:
    """Train a tiny run with these words to its end, which is `ends`, after `updates`; its result."""
    from tests.support.to_end import run_to_end

    return lambda *words, **end: run_to_end(tiny(*words), **end)


@pytest.fixture
def trainer_of(tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """`trainer_of(job)`: the job's trainer, not started; its one log writer keeps the records."""
    from drivetrain.core.world import World
    from drivetrain.engine import build
    from drivetrain.engine.context import RunContext

    def built(job: Any, world: World | None = None, run_dir: Path = tmp_path / "run") -> Any:
        contexts.append(RunContext(job.run, world or World(), run_dir))
        return build.build(contexts[-1], [Sink()])

    contexts: list[Any] = []
    built.contexts = contexts  # type: ignore[attr-defined]
    yield built
    for context in reversed(contexts):
        context.on_exit.close()


@pytest.fixture
def make(tiny: Callable[..., list[str]], trainer_of: Callable[..., Any]) -> Callable[..., Any]:
    """`make(*overrides)`: the trainer of a tiny run, not started."""
    from drivetrain.config import validate as check
    from drivetrain.launch import launcher

    def built(*words: str, **where: Any) -> Any:
        job = launcher.prepare(tiny(*words))
        check.validate_device(job.run)
        return trainer_of(job, **where)

    built.contexts = trainer_of.contexts  # type: ignore[attr-defined]
    return built


@pytest.fixture
def fitted(make: Callable[..., Any]) -> Callable[..., Any]:
    """`fitted(*overrides)`: the trainer of a tiny run, which it has trained to its end."""

    def built(*words: str, **where: Any) -> Any:
        trainer = make(*words, **where)
        trainer.fit()
        return trainer

    return built


@pytest.fixture
def logged(make: Callable[..., Any], caplog: pytest.LogCaptureFixture) -> Callable[..., list[str]]:
    """`logged(*overrides)`: the lines that building a tiny run logs."""

    def lines(*words: str) -> list[str]:
        caplog.clear()
        make(*words)
        return list(caplog.messages)

    return lines


@pytest.fixture
def problems(tiny: Callable[..., list[str]]) -> Callable[..., list[str]]:
    """The problems for which a tiny run with these words is refused; it must be."""
    from drivetrain.config import validate as check
    from drivetrain.launch import launcher

    def told(*words: str) -> list[str]:
        return problems_of(lambda: check.validate_device(launcher.prepare(tiny(*words)).run))

    return told


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Callable[..., str]:
    """`refused(*words)`: what a command says that is refused: exit code 2, without a traceback, and nothing is written."""
    from drivetrain.cli import main

    def told(*words: object) -> str:
        before = sorted(tmp_path.rglob("*"))
        capsys.readouterr()
        assert main.main([*map(str, words)]) == 2
        said = capsys.readouterr()
        assert "Traceback" not in said.out + said.err
        assert sorted(tmp_path.rglob("*")) == before
        return said.err

    return told


@pytest.fixture
def says(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """`says(*words)`: what a command prints that ends well."""
    from drivetrain.cli import main

    def told(*words: object) -> str:
        capsys.readouterr()
        assert main.main([*map(str, words)]) == 0
        return capsys.readouterr().out

    return told


@pytest.fixture
def lacking(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """`lacking(package)`: the package is not installed, whatever this machine has."""
    import importlib.util

    find_spec = importlib.util.find_spec
    return lambda package: monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *more: None if name == package else find_spec(name, *more)
    )


@pytest.fixture
def stop_at(monkeypatch: pytest.MonkeyPatch) -> Callable[[int | None], None]:
    """`stop_at(n)`: the next runs get a signal during step number n, counted with the skipped ones; None: during none."""
    from drivetrain.engine.trainer import Trainer

    after = Trainer._after_update

    def stop(step: int | None) -> None:
        def stopped(self: Trainer, epoch_end: bool) -> bool:
            if self.progress.steps == step:
                self._stop.raised = signal.SIGURG  # which ends no program
            return after(self, epoch_end)

        monkeypatch.setattr(Trainer, "_after_update", stopped)

    return stop


@pytest.fixture
def each_update() -> Callable[..., list[Any]]:
    """`each_update(trainer, look)`: what `look()` gives at the end of each update, its gradients still there."""

    def watch(trainer: Any, look: Callable[[], Any]) -> list[Any]:
        seen: list[Any] = []
        inner = trainer.step

        class Watched:
            micro_batch = inner.micro_batch

            def update(self) -> bool:
                return bool(inner.update())

            def zero_grad(self) -> None:
                seen.append(look())
                inner.zero_grad()

        trainer.step = Watched()
        return seen

    return watch


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """The graphs of compile=step, which run as they were recorded: inductor's own work is left out."""
    import torch
    import torch._inductor

    graphs: list[Any] = []
    monkeypatch.setattr(torch._inductor, "compile", lambda graph, inputs, options=None: graphs.append(graph) or graph)
    yield graphs
    torch._dynamo.reset()


@pytest.fixture
def float64() -> None:
    """Models and synthetic data in double precision: equal means equal to 1e-12."""
    import torch

    torch.set_default_dtype(torch.float64)
