"""The message of an error that ends a run."""

import errno
import math
import os
import re
import resource
import shutil
import socket
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from drivetrain.core.errors import BAD_CONFIG, FAILED, Diverged, UserError
from drivetrain.core.user.code import first_lines
from drivetrain.data.own import OwnDataset
from drivetrain.engine.training_log import TrainingLog
from drivetrain.launch import addresses, machine_limits
from drivetrain.launch.job import prepare
from drivetrain.saving import space
from tests.support import command
from tests.support.put import put
from tests.support.refusals import problems_of
from tests.support.waiting import LIMIT_S


def test_weights_that_do_not_fit_are_listed():
    with pytest.raises(RuntimeError) as refused:
        torch.nn.Linear(3, 2).load_state_dict(torch.nn.Linear(4, 2, bias=False).state_dict())
    said = first_lines(refused.value)
    assert said.startswith("Error(s) in loading state_dict for Linear: Missing key(s)")
    assert "size mismatch for weight" in said
    assert "\n" not in said


def test_a_problem_ends_whatever_it_quotes():
    quoted = UserError(["short", f"no file {'x' * 100_000}: set data.root"])
    assert quoted.problems[0] == "short"
    assert len(quoted.problems[1]) < 2_000
    assert quoted.problems[1].startswith("no file x")
    assert quoted.problems[1].endswith("x: set data.root")
    assert re.search("x … 98,[0-9]{3} characters … x", quoted.problems[1])
    assert UserError(quoted.problems).problems == quoted.problems  # also where it is raised again


def test_the_lines_of_an_error():
    assert first_lines(RuntimeError("one\ntwo")) == "one"
    assert first_lines(RuntimeError("")) == ""
    assert first_lines(RuntimeError("all of:\n" + "x\n" * 9)) == "all of: x; x; x; x; x … and 4 more"
    caught = "Caught KeyError in DataLoader worker process 0.\nOriginal Traceback …\n  File …\nKeyError: 'no such file'\n"
    assert first_lines(LookupError(caught)) == "Caught KeyError in DataLoader worker process 0: KeyError: 'no such file'"


def test_a_run_that_diverged_says_from_when_on_and_what_to_set():
    parallel = SimpleNamespace(all_reduce_sum=lambda sums: sums, rank_metrics=lambda *_: {}, data_world=SimpleNamespace(size=1))
    progress = SimpleNamespace(updates=0, samples=0, steps=0, skipped=0, epoch=0)
    timer, mfu = SimpleNamespace(since_last=lambda: (1.0, {}), wait=0.0), SimpleNamespace(at=lambda _: None)
    log = TrainingLog([], progress, parallel, timer, torch.device("cpu"), mfu)
    for update, loss in ((1, 2.0), (2, 0.5), (3, 40.0), (4, math.nan)):
        progress.updates = progress.steps = update
        log.loss_sum += loss
        if update < 4:
            log.train(0.1)
    with pytest.raises(Diverged, match=r"from 0\.5 at update 2 to 40 at update 3: lower optimizer\.lr \(the rate was 0\.1\)"):
        log.train(0.1)


@pytest.mark.parametrize(
    ("group", "target", "says"),
    [
        ("optimizer", "torch.optim.SGD", "optimizer=sgd is the option that ships for it"),
        ("optimizer", "torch.optim.SparseAdam", "derives from drivetrain.optimizer.Optimizer and makes it"),
        ("loader", "torch.utils.data.DataLoader", "derives from drivetrain.loader.Loader"),
        ("loss", "torch.nn.NLLLoss", "set loss=own loss.target=torch.nn.NLLLoss"),
    ],
)
def test_a_class_that_is_no_option(group, target, says, tmp_path):
    put(tmp_path / group / "bare.yaml", f"# a class as it is\n_target_: {target}\n")
    assert says in " ".join(problems_of(prepare, [f"{group}=bare", "trust=[torch]"], [str(tmp_path)]))


class Numbers(torch.utils.data.Dataset):
    """Samples whose targets are numbers."""

    def __init__(self, train: bool = True) -> None:
        self.train = train

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int):
        return [index / 20, 1.0], index / 10


def test_own_data_whose_targets_are_numbers_needs_no_number_of_classes():
    job = prepare(["data=own", f"data.target={__name__}.Numbers", f"trust=[{__name__.split('.')[0]}]", "task=regression"])
    assert job.run.data.load(torch.device("cpu")).classes == 1
    with pytest.raises(UserError, match="with fractions: set task=regression"):
        OwnDataset(target=f"{__name__}.Numbers").load(torch.device("cpu"))


# --- limits of a machine: a run that meets one names it, and what to set ---

SMALL = 48 * 2**10


def statvfs(**found):
    """The answer of os.statvfs on a disk."""
    names = ("f_bsize", "f_frsize", "f_blocks", "f_bfree", "f_bavail", "f_files", "f_ffree", "f_favail", "f_flag", "f_namemax")
    return os.statvfs_result([found.get(name, 1) for name in names])


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (OSError(errno.EMFILE, "Too many open files"), ["its limit is", "ulimit -n"]),
        (RuntimeError("DataLoader worker (pid 3) is killed by signal: Bus error."), ["/dev/shm has", "loader.num_workers"]),
        (RuntimeError("unable to allocate shared memory(shm) for file </torch_1_2_0>"), ["/dev/shm has", "--shm-size"]),
        (OSError(errno.ENOSPC, "No space left on device"), ["/dev/shm has 0.0 MB, 0.0 MB free"]),  # of a semaphore
        (ImportError("libtorch_cpu.so: failed to map segment from shared object"), ["its limit is 2 GiB", "ulimit -v unlimited"]),
        (MemoryError(), ["its limit is 2 GiB"]),
        (OSError(errno.ENOSPC, "No space left on device", "metrics.jsonl"), None),
        (RuntimeError("shape mismatch"), None),
        (ModuleNotFoundError("No module named 'my_pkg'"), None),
        (ImportError("cannot import name 'Net' from 'my_pkg'"), None),
    ],
)
def test_what_is_exhausted_is_named_with_what_to_set(monkeypatch, error, says):
    monkeypatch.setattr(os, "statvfs", lambda path: statvfs(f_blocks=SMALL, f_bavail=0))
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (2**31 if kind == resource.RLIMIT_AS else 1024, -1))
    told = machine_limits.explain(error)
    assert told is None if says is None else all(each in told for each in says), told


def test_an_import_that_fails_for_another_reason_is_not_told_as_a_limit(monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (resource.RLIM_INFINITY, -1))
    assert machine_limits.explain(ImportError("no module")) is None


def test_used_up_inodes_are_told_in_place_of_the_free_bytes(monkeypatch, tmp_path):
    monkeypatch.setattr(os, "statvfs", lambda path: statvfs(f_bavail=2**30, f_files=10, f_favail=0))
    told = space.explain(OSError(errno.ENOSPC, "No space left on device", "metrics.jsonl"), tmp_path)
    assert "all inodes are in use" in told
    assert "MB" not in told


@pytest.mark.parametrize(("names", "address"), [(["localhost"], "localhost"), (["127.0.0.1"], "127.0.0.1"), (["::1"], "::1")])
def test_ranks_meet_at_what_answers(monkeypatch, names, address):
    resolve = socket.getaddrinfo

    def only(host, *given, **named):
        if host in ("localhost", "127.0.0.1", "::1") and host not in names:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return resolve("localhost" if host == "::1" else host, *given, **named)  # a machine of the suite may have no IPv6

    monkeypatch.setattr(socket, "getaddrinfo", only)
    assert addresses.own_address() == address


def test_no_loopback_is_a_sentence(monkeypatch):
    def refuse(*given, **named):
        raise OSError(errno.ENETUNREACH, "Network is unreachable")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    with pytest.raises(UserError, match=r"localhost: Network is unreachable; 127\.0\.0\.1: .* set parallel=single"):
        addresses.own_address()


RUN = ("data=digits", "model=mlp", "updates=2", "epochs=1", "batch.global_batch=512", "runtime.device=cpu")
DDP = ("parallel=ddp", "parallel.nproc=2")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("limit", "words", "code", "says"),
    [
        ("mount -t tmpfs -o size=64k tmpfs /dev/shm", ["loader=workers"], FAILED, "/dev/shm has 0.1 MB"),
        ("mount -t tmpfs -o size=64k tmpfs /dev/shm", ["loader=workers", *DDP], FAILED, "/dev/shm has 0.1 MB"),
        ("mount -t tmpfs -o nr_inodes=12 tmpfs small", ["output_dir=small"], FAILED, "all inodes are in use"),
        ("ulimit -v 2000000", [], FAILED, "its limit is 1.91 GiB"),
        ("mount --bind empty /etc/hosts", DDP, 0, ""),
        ("ip link set lo down", DDP, BAD_CONFIG, "none answers"),
    ],
)
def test_a_run_within_the_limit(tmp_path, limit, words, code, says):
    if os.geteuid() or not shutil.which("unshare") or subprocess.run(["unshare", "-mn", "true"], check=False).returncode:
        pytest.skip("only root may limit a mount or a network")
    (tmp_path / "small").mkdir()
    (tmp_path / "empty").touch()
    alone = "-mn" if limit.startswith("ip ") else "-m"  # a network of its own begins with its loopback turned off
    shell = limit if alone == "-m" else "true"
    train = [sys.executable, "-m", "drivetrain", "train", "-q", *RUN, *words]
    done = subprocess.run(
        ["unshare", alone, "bash", "-c", f'{shell} && exec "$@"', "bash", *train],
        cwd=tmp_path, env=command.environment(), capture_output=True, text=True, check=False, timeout=LIMIT_S,
    )  # fmt: skip
    assert done.returncode == code, done
    assert says in done.stderr, done
    assert not any(word in done.stderr for word in ("Traceback", "Exception ignored")), done.stderr
