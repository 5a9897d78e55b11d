"""A process that has imported torch and forks: a `python -m drivetrain` that starts in milliseconds instead of seconds.

`install()` puts `Popen` in the place of `subprocess.Popen`. A command `[sys.executable, "-m", "drivetrain", …]` is then run
by a child of the server, and so is a user's `[sys.executable, "program.py", …]`, with the arguments, environment, directory,
files, session and signals of a process of its own.
Its exit code, its output and its process id are those of any other process. Every other command starts as ever, and so
does one whose interpreter would be another one: other PYTHON… variables, a sitecustomize.py, another copy of drivetrain.
`Popen.forking = False` (the marker `own_process`) turns it off.

One server forks for a whole session of tests: the workers of pytest-xdist are children of it too, which saves them the
imports, and each of them asks it for its commands by a socket of its own.

The server runs this file as a script. It has run nothing of torch and has started no thread, so that its children may fork.
"""

import atexit
import contextlib
import ctypes
import gc
import json
import os
import pkgutil
import runpy
import select
import signal
import site
import socket
import subprocess
import sys
import threading
import traceback
import weakref
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any, ClassVar, NoReturn

MODULES = ("drivetrain", "drivetrain.cli.child", "src.train", "bench.gpu", "tests.support.forks")
# What an interpreter and its libraries read once, when they start: a command with other values needs an interpreter of its own.
READ_AT_START = ("PYTHON", "OMP_", "MKL_", "OPENBLAS_", "LD_", "TORCH_", "TORCHINDUCTOR_", "KMP_", "CUDA_", "TZ", "LC_", "LANG")
# What libraries set in the tests' own process when they are imported: no test means a command to have it.
SET_BY_IMPORTS = ("KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK", "TORCHINDUCTOR_CACHE_DIR")
HUGE_PAGE, MADV_COLLAPSE = 2**21, 25  # of Linux
WORKER = [sys.executable, "-u", "-c", "import sys;exec(eval(sys.stdin.readline()))"]  # as execnet starts a worker of xdist
PROGRAM = "program.py"  # a user's own, in the working directory
CHANNEL = "DRIVETRAIN_TEST_CHANNEL"  # the number of the file by which a worker asks the server for its commands
LENGTH = 8  # bytes that hold the length of a request
TORCH = (
    "torch", "torch.distributed.elastic.agent.server.local_elastic_agent", "torch.distributed.fsdp", "torch._dynamo",
    "torch.distributed.elastic.rendezvous.c10d_rendezvous_backend", "torch.distributed.launcher.api", "torch._inductor.config",
    "safetensors.torch", "torchvision", "timm", "torchmetrics",
)  # fmt: skip
COMMAND = ("drivetrain.cli.main", "drivetrain.config.validate", "hydra", "omegaconf", "yaml", "rich.console", "rich.table")


class Server:
    """The server, as the process sees it that starts commands."""

    def __init__(self, package: Path) -> None:
        self.lock = threading.Lock()
        self.owner = os.getpid()
        self.process = None
        if inherited := os.environ.pop(CHANNEL, None):
            self.channel = socket.socket(fileno=int(inherited))
            return
        self.channel, theirs = socket.socketpair()
        with theirs:
            self.process = _Popen(
                [sys.executable, __file__, str(theirs.fileno()), str(package.parent)],
                env={k: v for k, v in AT_START.items() if k != "PYTHONPATH"},
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, pass_fds=[theirs.fileno()],
            )  # fmt: skip
        atexit.register(self.close)

    def fork(self, request: dict[str, Any], files: list[int]) -> int:
        """The process id of a child that runs the request, with these files as its standard ones and for its status."""
        text = json.dumps(request).encode()
        with self.lock:
            socket.send_fds(self.channel, [len(text).to_bytes(LENGTH, "big")], files)
            self.channel.sendall(text)
            answer = self.channel.recv(LENGTH)
        if not answer:
            raise RuntimeError("the fork server has ended")
        return int.from_bytes(answer, "big")

    def close(self) -> None:
        """End the server; its children go on."""
        if os.getpid() == self.owner:
            self.channel.close()
            if self.process is not None:
                self.process.wait()


_Popen = subprocess.Popen
AT_START = dict(os.environ)  # also the servers'


class Popen(_Popen):  # type: ignore[type-arg]
    """subprocess.Popen; a command of drivetrain's is forked by the server."""

    forking = True
    installed = False  # whether any interpreter of this environment finds the package, also in an editable installation
    package: Path
    _server: ClassVar[Server | None] = None
    _status: int | None = None  # the pipe that tells a forked command's end

    def _execute_child(self, args: Any, executable: Any, preexec_fn: Any, close_fds: bool, pass_fds: Any, *rest: Any) -> None:
        cwd, env, _, _, shell, *pipes = rest[:11]
        start_new_session = rest[-2]
        safe = not isinstance(args, (str, bytes, os.PathLike)) and list(args[1:2]) == ["-P"]
        words = [args[0], *args[2:]] if safe else args  # -P: the working directory is not on the import path
        worker = words == WORKER
        plain = executable is None and preexec_fn is None and not pass_fds and not shell
        env = {str(k): str(v) for k, v in (os.environ if env is None else env).items()}
        for name in SET_BY_IMPORTS:
            if name not in AT_START and env.get(name) == os.environ.get(name):
                env.pop(name, None)
        cwd = os.path.abspath(cwd or os.getcwd())
        if not (plain and self.forking and (worker or self._may_fork(words, cwd, env, safe or bool(env.get("PYTHONSAFEPATH"))))):
            super()._execute_child(args, executable, preexec_fn, close_fds, pass_fds, *rest)
            return
        p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite = pipes
        self._status, told = os.pipe()
        request = {
            "module": None if worker else words[1] if words[1] == PROGRAM else words[2],
            "words": list(map(str, words[2 if words[1] == PROGRAM else 3 :])),
            "safe": safe,
            "cwd": cwd,
            "env": env,
            "session": start_new_session,
        }
        files = [p2cread if p2cread != -1 else 0, c2pwrite if c2pwrite != -1 else 1, errwrite if errwrite != -1 else 2, told]
        try:
            self.pid = self._own_server().fork(request, files)
        finally:
            os.close(told)
            for mine, theirs in ((p2cwrite, p2cread), (c2pread, c2pwrite), (errread, errwrite)):
                if mine != -1 and theirs != -1:
                    os.close(theirs)
            if (null := getattr(self, "_devnull", None)) is not None:
                os.close(null)
        self._child_created = True

    def _own_server(self) -> Server:
        if Popen._server is None or Popen._server.owner != os.getpid():
            Popen._server = Server(self.package)
        return Popen._server

    def _may_fork(self, args: Any, cwd: str, env: dict[str, str], safe: bool) -> bool:
        if isinstance(args, (str, bytes, os.PathLike)) or args[0] != sys.executable:
            return False
        if args[1] != PROGRAM and (args[1] != "-m" or args[2] not in MODULES):
            return False
        names = {n for n in {*env, *AT_START} if n.startswith(READ_AT_START) and n not in ("PYTHONPATH", "PYTHONSAFEPATH")}
        if any(env.get(n) != AT_START.get(n) for n in names):
            return False
        places = [Path(p) for p in env.get("PYTHONPATH", "").split(os.pathsep) if p]
        if any((p / f"{name}.py").exists() for p in places for name in ("sitecustomize", "usercustomize")):
            return False
        checkout = self.package.parents[1]
        if (
            args[1] != PROGRAM and args[2].partition(".")[0] != "drivetrain"
        ):  # found in the working directory, a program of the tests also elsewhere
            return Path(cwd) == checkout or (args[2].startswith("tests.") and checkout in places)
        found = next(
            (p / "drivetrain" for p in [*([] if safe else [Path(cwd)]), *places] if (p / "drivetrain" / "__init__.py").exists()),
            None,
        )
        return found == self.package or (found is None and self.installed)

    def _ask(self, pid: int, flags: int) -> tuple[int, int]:
        """os.waitpid for a child of the server."""
        assert self._status is not None
        if flags & os.WNOHANG and not select.select([self._status], [], [], 0)[0]:
            return 0, 0
        told = os.read(self._status, LENGTH)
        os.close(self._status)
        return pid, int.from_bytes(told, "big") if told else signal.SIGKILL  # the server was killed

    def _internal_poll(self, _deadstate: Any = None, *rest: Any) -> Any:
        return super()._internal_poll(_deadstate, *(rest if self._status is None else [self._ask]))

    def _try_wait(self, wait_flags: int) -> tuple[int, int]:
        return super()._try_wait(wait_flags) if self._status is None else self._ask(self.pid, wait_flags)


def install() -> None:
    """Let every `subprocess.run` and `subprocess.Popen` of this process fork drivetrain's commands."""
    import drivetrain

    Popen.package = Path(drivetrain.__file__).resolve().parent
    place = str(Popen.package.parent)
    Popen.installed = place in site.getsitepackages() or place not in sys.path
    subprocess.Popen = Popen  # type: ignore[misc]


# From here on: the server.


def serve(channel: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """Fork a child for each request and tell its end. None when the tests are over; in a child its request and files."""
    woken, wake = os.pipe()
    for end in (woken, wake):
        os.set_blocking(end, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    status_of: dict[int, int] = {}
    channels = [channel]  # the first one's end is the tests'; the others are the workers'
    while True:
        ready = select.select([*channels, woken], [], [])[0]
        if woken in ready:
            os.read(woken, 4096)
            _reap(status_of)
        for asking in [each for each in channels if each in ready]:
            header, files, _, _ = socket.recv_fds(asking, LENGTH, 4)
            if not header and asking is channel:
                return None
            if not header:
                asking.close()
                channels.remove(asking)
                continue
            request = json.loads(_receive(asking, int.from_bytes(header, "big")))
            ours, theirs = socket.socketpair()
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for end in (woken, wake, files.pop(), *status_of.values()):
                    os.close(end)
                for each in (*channels, ours):
                    each.close()
                if request["module"] is None:
                    request["env"][CHANNEL] = str(theirs.detach())
                else:
                    theirs.close()
                return request, files
            theirs.close()
            if request["module"] is None:
                channels.append(ours)
            else:
                ours.close()
            status_of[pid] = files.pop()
            for file in files:
                os.close(file)
            asking.sendall(pid.to_bytes(LENGTH, "big"))


def _receive(channel: socket.socket, length: int) -> bytes:
    text = b""
    while len(text) < length:
        text += channel.recv(length - len(text))
    return text


def _reap(status_of: dict[int, int]) -> None:
    for pid, told in list(status_of.items()):
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            with contextlib.suppress(BrokenPipeError):  # nobody waits for it any more
                os.write(told, status.to_bytes(LENGTH, "big"))
            os.close(told)
            del status_of[pid]


def become(request: dict[str, Any], files: list[int], path: list[str]) -> None:
    """Take on what the request says, as if this interpreter had just started for it, and run its module."""
    from drivetrain.core.machine import process

    if request["session"]:
        os.setsid()
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    own = [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p]
    safe = request["safe"] or bool(os.environ.get("PYTHONSAFEPATH"))
    sys.path[:] = [*([] if safe else [request["cwd"]]), *own, *path]
    sys.argv = [request["module"] or "-c", *request["words"]]
    sys.orig_argv[:] = [sys.executable, "-m", *sys.argv]
    _open_standard_files()
    process.restart_clock()
    process.of_one_run = True  # as one that has just started
    if request["module"] is None:
        sys.modules["tests.support.composed"] = sys.modules["composed_of_tests"]  # which is in the place of Hydra's already
        exec(WORKER[-1], {"__name__": "__main__"})
        return
    if "." in request["module"]:
        sys.modules.pop(request["module"], None)  # it was imported as another's part; now it is the program
    OfCommand.path = path
    subprocess.Popen = OfCommand  # type: ignore[misc]
    if request["module"] == PROGRAM:
        runpy.run_path(PROGRAM, run_name="__main__")
    else:
        runpy.run_module(request["module"], run_name="__main__", alter_sys=True)


def run(request: dict[str, Any], files: list[int], path: list[str]) -> NoReturn:
    """Run what the request says to its end, in this process, which has forked for it."""
    code: Any = None
    try:
        become(request, files, path)
    except SystemExit as given:
        code = given.code
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:
        traceback.print_exc()
        code = 1
    end(code)


class OfCommand(_Popen):  # type: ignore[type-arg]
    """subprocess.Popen of a command, or of a user's program: it forks itself for `drivetrain train`, whose parent it then is."""

    path: ClassVar[list[str]]

    def _execute_child(self, args: Any, executable: Any, preexec_fn: Any, close_fds: bool, pass_fds: Any, *rest: Any) -> None:
        if list(args[:3]) != [sys.executable, "-P", "-m"] or args[3] not in MODULES:
            super()._execute_child(args, executable, preexec_fn, close_fds, pass_fds, *rest)
            return
        cwd, env, _, _, _, *pipes = rest[:11]
        of_child = pipes[0], pipes[3], pipes[5]  # the other ends are this process's
        self.pid = os.fork()
        if self.pid == 0:
            forget_finalizers()
            for number in signal.valid_signals():
                if callable(signal.getsignal(number)):
                    signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
            request = {
                "module": args[3],
                "words": args[4:],
                "safe": True,
                "cwd": cwd or os.getcwd(),
                "env": env,
                "session": False,
            }
            run(request, [os.dup(number if file == -1 else file) for number, file in enumerate(of_child)], self.path)
        for file in of_child:
            if file != -1:
                os.close(file)
        self._child_created = True


def _open_standard_files() -> None:
    """sys.stdin, stdout and stderr as an interpreter opens them when it starts: what they are decides how they buffer."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        old = getattr(sys, name)
        lines = number == 2 or os.isatty(number)
        new = open(number, "w" if number else "r", encoding=old.encoding, errors=old.errors, closefd=False)  # noqa: SIM115
        new.reconfigure(line_buffering=lines)  # type: ignore[union-attr]
        setattr(sys, name, new)
        setattr(sys, f"__{name}__", new)


def do_not_wait_for_the_disk() -> None:
    """Make `os.fsync` look at the file only. A run syncs fourteen files, and tests cut no machine's power."""
    os.fsync = os.fstat  # type: ignore[assignment]


def look_often() -> None:
    """Let a loader that closes look five times a second whether its workers have ended, where torch looks every five seconds.

    A process looks as often whether the one that forked it is there.
    """
    from torch.utils.data import _utils

    from drivetrain.core.machine import forking

    forking.LOOK_S = _utils.MP_STATUS_CHECK_INTERVAL = _utils.worker.MP_STATUS_CHECK_INTERVAL = 0.2


def preload() -> None:
    """Import what the commands import; run nothing of it."""
    import drivetrain

    do_not_wait_for_the_disk()
    for name in (*COMMAND, *TORCH):
        import_module(name)
    composed = _beside("composed")
    composed.install()
    composed.read_all()
    words = ["data=digits", "model=mlp", "model.hidden=[8]", "optimizer.lr=1e-3"]
    import_module("drivetrain.launch.job").prepare(words)  # what reads the config has then imported and parsed its grammars
    for found in pkgutil.walk_packages(drivetrain.__path__, "drivetrain."):
        if not found.name.endswith(("__main__", "torchao_adamw")):  # torchao asks for devices, and then no fork can use any
            import_if_installed(found.name)
    import_module("drivetrain.data.digits").read_table()
    look_often()
    threads = Path("/proc/self/task")
    assert not threads.is_dir() or len(list(threads.iterdir())) == 1, "a process of several threads may not fork"
    gc.freeze()
    forget_finalizers()  # libraries unregister their operators one by one: a child ends without
    with contextlib.suppress(OSError):
        use_huge_pages()


def forget_finalizers() -> None:
    """Finalize nothing at this process's end that was made so far."""
    for each in weakref.finalize._registry:  # type: ignore[attr-defined]
        each.atexit = False


def import_if_installed(name: str) -> None:
    """Import a module, unless it is for a package of somebody else's that is not installed."""
    try:
        import_module(name)
    except ModuleNotFoundError as error:
        if str(error.name).partition(".")[0] == "drivetrain":
            raise


def use_huge_pages() -> None:
    """Hold this process's memory in pages of 2 MiB where Linux can: a fork copies the list of them, in a third of the time."""
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    for line in Path("/proc/self/maps").read_text().splitlines():
        place, may, _, _, file, *name = line.split()
        first, end = (int(address, 16) for address in place.split("-"))
        first, end = -(-first // HUGE_PAGE) * HUGE_PAGE, end // HUGE_PAGE * HUGE_PAGE
        if may.startswith("rw") and file == "0" and name in ([], ["[heap]"]) and first < end:
            madvise(first, end - first, MADV_COLLAPSE)  # what cannot be joined stays as it is


def _beside(name: str) -> Any:
    """A module of this folder, which a command cannot import by its name."""
    spec = spec_from_file_location(f"{name}_of_tests", Path(__file__).with_name(f"{name}.py"))
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def end(code: Any) -> NoReturn:
    """End this process as an interpreter does, but for taking its modules apart, which would copy what is shared."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    if isinstance(code, str):
        print(code, file=sys.stderr)
    status = code if isinstance(code, int) else int(code is not None)
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            status = 120  # as Python itself says it
    os._exit(status & 0xFF)


def main() -> None:
    """Serve; a child runs its command."""
    plain = sys.path[1:]  # [0] is this file's folder
    sys.path[0] = sys.argv[2]
    channel = socket.socket(fileno=int(sys.argv[1]))
    preload()
    mine = serve(channel)
    if mine is None:  # the tests are over
        end(0)
    run(*mine, plain)


if __name__ == "__main__":
    main()
