"""The process: device, seeds, threads, and gradients that are forgotten."""

import json
import subprocess
import sys

import pytest
import torch

import drivetrain
from drivetrain.core.errors import UserError
from drivetrain.core.machine import accelerators
from drivetrain.core.machine.accelerators import Accelerator
from drivetrain.core.world import World
from drivetrain.launch.job import prepare
from drivetrain.runtime import Runtime


def weights(trainer) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in trainer.model.parameters()])


def test_the_seed_decides_the_weights_and_the_dropout(make, fitted):
    def end(seed: int) -> torch.Tensor:
        return weights(fitted(f"runtime.seed={seed}", "model.dropout=0.5"))

    assert torch.equal(end(0), end(0))
    assert not torch.equal(end(0), end(1))
    assert torch.equal(weights(make()), weights(make()))


def test_ranks_start_from_the_same_weights_and_drop_differently():
    begin = [(Runtime().set_up_process(World(rank, 2, rank, 2)), torch.rand(3))[1] for rank in range(2)]
    goes_on = [(Runtime().seed_rank(World(rank, 2, rank, 2)), torch.rand(3))[1] for rank in range(2)]
    assert torch.equal(*begin)
    assert not torch.equal(*goes_on)


def test_memset_writes_zeros_and_trains_the_same(make):
    Runtime(zero_grad="memset").zero([torch.nn.Parameter(torch.ones(2))])  # as after a forward that does not fit into memory
    freed, zeroed = make(), make("runtime.zero_grad=memset")
    freed.fit()
    zeroed.fit()
    assert all(p.grad is None for p in freed.model.parameters())
    assert all(p.grad is not None and not p.grad.any() for p in zeroed.model.parameters())
    assert torch.equal(weights(freed), weights(zeroed))
    assert not torch.equal(weights(freed), weights(make()))


def test_auto_is_the_cpu_where_there_is_no_cuda(make, problems, monkeypatch):
    monkeypatch.setattr(accelerators, "find", Accelerator)
    assert make().device == torch.device("cpu")
    for device in ("cuda", "xpu", "mps"):
        (problem,) = problems(f"runtime.device={device}")
        assert f"runtime.device={device}, but torch finds no {device.upper()} device: set" in problem


def test_a_device_that_does_not_start_is_said(make, problems, monkeypatch, caplog):
    monkeypatch.setattr(accelerators, "find", lambda: Accelerator(problem="the driver is too old"))
    assert make().device == torch.device("cpu")
    assert any(
        "this run is on the CPU, because torch cannot use the device here: the driver is too old" in m for m in caplog.messages
    )
    assert "no CUDA device (the driver is too old)" in problems("runtime.device=cuda")[0]


@pytest.fixture
def devices(monkeypatch):
    """Let torch have devices of this type, which are only named; the numbers that are chosen."""

    def have(type_: str, count: int) -> list[int]:
        chosen: list[int] = []
        monkeypatch.setattr(accelerators, "find", lambda: Accelerator(type_, count, (9, 0)))
        monkeypatch.setattr(torch.accelerator, "device_count", lambda: count)
        monkeypatch.setattr(torch.accelerator, "set_device_index", chosen.append)
        return chosen

    return have


@pytest.mark.parametrize(
    ("device", "type_", "count", "local_rank", "name"),
    [
        ("auto", "cuda", 4, 3, "cuda:3"),
        ("auto", "xpu", 2, 1, "xpu:1"),
        ("cuda", "cuda", 1, 3, "cuda:0"),  # a Slurm task that sees one device
        ("cuda", "cuda", 2, 3, "cuda:1"),  # one that sees two
        ("cuda:1", "cuda", 2, 0, "cuda:1"),
        ("xpu:1", "xpu", 2, 0, "xpu:1"),
        ("auto", "mps", 1, 0, "cpu"),
        ("mps", "mps", 1, 0, "mps"),
        ("cpu", "cuda", 2, 0, "cpu"),
    ],
)
def test_a_rank_takes_its_device(devices, device, type_, count, local_rank, name):
    chosen = devices(type_, count)
    runtime = Runtime(device=device)
    found = runtime._device(World(local_rank, 4, local_rank, 4))
    assert found == torch.device(name)
    assert runtime.device_type() == found.type
    assert chosen == ([] if found.index is None else [found.index])


def test_a_device_that_fails_in_the_rank_is_a_users_error(devices, monkeypatch):
    devices("cuda", 2)

    def fail(index):
        raise RuntimeError("CUDA error: out of memory\nmore")

    monkeypatch.setattr(torch.accelerator, "set_device_index", fail)
    with pytest.raises(UserError, match=r"runtime.device=auto: CUDA does not start: CUDA error: out of memory: set"):
        Runtime()._device(World())


def test_a_number_beyond_the_devices_is_refused(devices, problems):
    devices("cuda", 2)
    (problem,) = problems("runtime.device=cuda:2")
    assert "torch finds 2 CUDA devices: the last one is cuda:1" in problem
    (problem,) = problems("runtime.device=cuda:1", "parallel=ddp")
    assert "runtime.device=cuda:1 is one device, and parallel=ddp uses several" in problem


def test_threads_are_what_was_asked_for_also_after_another_run(make, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1})
    for asked, given in ((2, 2), (1, 1), ("null", 2)):  # the cores, not what the run before was given
        make(f"runtime.threads={asked}")
        assert torch.get_num_threads() == given


@pytest.mark.parametrize(
    ("given", "launch", "asked", "expected"),
    [
        ("3", None, None, 3),
        ("1", None, None, 1),
        ("", None, None, 4),  # its share of the cores
        ("6,2", None, None, 6),  # of nested regions
        ("3", None, 5, 5),
        ("1", "none", None, 4),  # torchrun's own, which nobody asked for
        ("3", "none", None, 3),
        ("1", "drivetrain", None, 1),  # of ranks that drivetrain started
    ],
)
def test_threads_are_those_of_the_environment_where_none_are_set(given, launch, asked, expected, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", given)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(8)))
    monkeypatch.setattr("drivetrain.core.machine.guards.cores", list)
    if launch is not None:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", launch)
    assert Runtime(threads=asked).thread_count(2) == expected


def test_a_number_of_threads_in_the_environment_is_checked(monkeypatch, problems):
    monkeypatch.setenv("OMP_NUM_THREADS", "many")
    assert problems() == ["OMP_NUM_THREADS=many in the environment is no number of threads: set it to one, or unset it"]
    monkeypatch.setenv("OMP_NUM_THREADS", "123456")
    (problem,) = problems()
    assert problem.startswith("OMP_NUM_THREADS=123456 starts 123,456 threads")


def test_backend_flags_are_set_and_unset(make):
    make("runtime.deterministic=true", "runtime.cudnn_benchmark=false")
    assert torch.are_deterministic_algorithms_enabled()
    assert not torch.utils.deterministic.fill_uninitialized_memory
    assert not torch.backends.cudnn.benchmark
    make()
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.backends.cudnn.benchmark


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["runtime.deterministic=true"], "exclude each other"),
        (["runtime.device=tpu"], "runtime.device=tpu"),
        (["runtime.seed=-1"], "runtime.seed=-1"),
        (["runtime.threads=0"], "runtime.threads=0"),
        (["runtime.zero_grad=maybe"], "runtime.zero_grad=maybe"),
    ],
)
def test_what_cannot_be_is_refused(problems, words, says):
    assert any(says in p and "runtime." in p for p in problems(*words))


FAULTS = """
import resource, sys
import drivetrain, torch

def blocks(count):
    for _ in range(count):
        torch.ones(2**24)  # 64 MB: above what glibc keeps by itself, however it has adapted

drivetrain.train(sys.argv[1:])
blocks(3)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
blocks(20)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="glibc's")
def test_freed_memory_stays_with_the_process(tiny):
    """Pages that are fetched anew are counted: a block of many MB fetches none when what was freed is kept."""
    counts = {}
    for keep in ("false", "true"):
        words = tiny("saving=none", "runtime.threads=1", f"runtime.keep_memory={keep}")
        done = subprocess.run([sys.executable, "-c", FAULTS, *words], capture_output=True, text=True, check=True)
        counts[keep] = int(done.stdout.splitlines()[-1])
    assert counts["true"] < counts["false"] / 2


@pytest.mark.parametrize(("attention", "flash"), [("auto", True), ("flash", True), ("math", False)])
def test_attention_runs_on_the_kernel_that_is_asked_for(attention, flash):
    q, k, v = torch.randn(3, 2, 4, 8, 16)
    expected = torch.softmax(q @ k.mT / 4, -1) @ v
    Runtime(attention=attention).set_up_process(World())
    with torch.profiler.profile() as profile:
        found = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    torch.testing.assert_close(found, expected)
    assert any("flash_attention" in event.key for event in profile.key_averages()) == flash


class Timed:
    """Trials that say how long an update takes with each number of threads."""

    def __init__(self, seconds: dict[int, float], *words: str):
        self.seconds, self.asked, self.run = seconds, 0, prepare(["runtime.device=cpu", *words]).run

    def thread_seconds(self, counts):
        self.asked += 1
        return [self.seconds[n] for n in counts] if self.seconds else []


@pytest.mark.parametrize(
    ("seconds", "words", "chosen"),
    [
        ({1: 0.002, 2: 0.0021, 4: 0.004, 6: 0.005}, (), 1),
        ({1: 0.0103, 2: 0.01, 4: 0.02, 6: 0.03}, (), 1),  # not faster by more than the noise: the fewest
        ({1: 0.02, 2: 0.011, 4: 0.008, 6: 0.009}, (), 4),
        ({1: 0.02, 2: 0.011, 3: 0.008}, ("parallel=ddp", "parallel.nproc=2"), 3),  # two ranks share six cores
        ({}, (), 6),  # a large model
    ],
)
def test_threads_are_chosen_by_trial_once_and_recorded_for_a_resume(seconds, words, chosen, monkeypatch, caplog):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(6)))
    monkeypatch.setattr("drivetrain.core.machine.guards.cores", list)
    given, trials = Runtime(device="cpu", threads="auto"), Timed(seconds, *words)
    with caplog.at_level("INFO"):
        found = given.choose(trials)
    assert (found.threads, found.untried, given.threads, given.untried) == (chosen, "", "auto", "runtime.threads=1")
    assert f"runtime.threads=auto: {chosen} of {3 if words else 6}" in caplog.text
    assert (given.choose(trials, found.found).threads, trials.asked) == (chosen, 1)
    assert given.choose(trials, {**found.found, "cores": 99}).threads == chosen
    assert trials.asked == 2, "another machine"


def test_no_trial_where_there_is_nothing_to_choose(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0})
    trials = Timed({1: 1.0})
    assert (Runtime(device="cpu", threads="auto").choose(trials).threads, trials.asked) == (1, 0)
    assert Runtime(threads="auto").thread_count(1) == 1


def test_a_run_computes_with_the_threads_that_its_trial_found_and_so_does_its_resume(tiny, monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1})
    found = drivetrain.train(tiny("runtime.threads=auto", "epochs=1"))
    recorded = json.loads((found.run_dir / "environment.json").read_text())["runtime"]
    assert recorded["threads"] in (1, 2)
    assert len(recorded["update_seconds"]) == 2
    before = {**recorded, "threads": 3 - recorded["threads"]}  # what no trial of now says: a resume keeps what was recorded
    about = json.loads((found.run_dir / "environment.json").read_text())
    (found.run_dir / "environment.json").write_text(json.dumps({**about, "runtime": before}))
    again = drivetrain.train([f"resume={found.run_dir}", "epochs=2"])
    assert json.loads((again.run_dir / "environment.json").read_text())["runtime"] == before
