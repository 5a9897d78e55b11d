"""The rank of this process among how many, as launchers tell it."""

import os

import pytest
import torch
import torch.distributed as dist

from drivetrain.core import accelerators
from drivetrain.core.accelerators import Accelerator
from drivetrain.core.errors import UserError
from drivetrain.core.world import World
from drivetrain.launch.job import prepare
from drivetrain.parallel import environment
from drivetrain.parallel.ddp import Ddp
from drivetrain.parallel.environment import _tasks_of_node, launched, world_of_environment
from drivetrain.parallel.tensor import Tensor
from tests.support import command
from tests.support.context import context

STEP = {
    "SLURM_JOB_ID": "4711", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "6", "SLURM_PROCID": "5", "SLURM_LOCALID": "0",
    "SLURM_NODEID": "2", "SLURM_STEP_TASKS_PER_NODE": "3,2,1", "SLURM_STEP_NODELIST": "127.0.0.1",
}  # fmt: skip


@pytest.fixture
def told(monkeypatch):
    """Set these variables of the environment, and no other launcher's."""

    def tell(variables):
        for name in (*STEP, "MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return tell


@pytest.mark.parametrize("variables", [{}, {"WORLD_SIZE": "1"}])
def test_alone(told, variables):
    """Some clusters set the variable of a launcher for one process too."""
    told(variables)
    assert (launched() or 1) == 1
    assert world_of_environment() == World()


def test_torchruns_words(told):
    told({"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"})
    assert launched() == 8
    assert world_of_environment() == World(3, 8, 1, 2)
    told({"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1"})
    assert world_of_environment() == World(3, 8, 1, 8)


def test_a_pytorchjob_names_no_local_rank_and_starts_one_process_in_each_pod(told):
    told({"RANK": "3", "WORLD_SIZE": "8"})
    assert world_of_environment() == World(3, 8, 0, 1)


def test_slurms_words_for_a_task_of_a_step(told, monkeypatch):
    told(STEP)
    assert launched() == 6
    assert world_of_environment() == World(5, 6, 0, 1)
    assert (os.environ["RANK"], os.environ["WORLD_SIZE"], os.environ["MASTER_ADDR"]) == ("5", "6", "127.0.0.1")
    assert 20_000 <= int(os.environ["MASTER_PORT"]) < 30_000
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("per_node", "node", "tasks"), [("2(x3),1", "2", 2), ("2(x3),1", "3", 1), ("4", "0", 4), ("3,2,1", "1", 2)]
)
def test_tasks_of_a_node(told, per_node, node, tasks):
    assert _tasks_of_node({"SLURM_STEP_TASKS_PER_NODE": per_node, "SLURM_NODEID": node}) == tasks


@pytest.mark.parametrize(
    ("nodes", "first"), [("gpu[03-05,7],login", "gpu03"), ("node1", "node1"), ("a,b", "a"), ("n[7,9]", "n7"), ("x,y[1-2]", "x")]
)
def test_the_first_host_without_slurms_own_tool(monkeypatch, nodes, first):
    monkeypatch.setattr(environment.subprocess, "run", lambda *a, **k: (_ for _ in ()).throw(OSError()))
    assert environment._first_host(nodes) == first


def test_a_batch_script_itself_is_no_task(told):
    """sbatch sets the number of tasks, and nothing has started them: one process, as Lightning found out the hard way."""
    told({"SLURM_JOB_ID": "4711", "SLURM_NTASKS": "8", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"})
    assert launched() is None
    assert world_of_environment() == World()


@pytest.mark.parametrize("wrong", ["RANK", "WORLD_SIZE"])
def test_what_is_no_number_is_refused(told, wrong):
    told({"RANK": "0", "WORLD_SIZE": "2", wrong: "first"})
    with pytest.raises(UserError, match=f"{wrong}=first in the environment is no number"):
        world_of_environment()


def test_two_tasks_of_a_slurm_step_train_as_one(tmp_path):
    """As srun starts them: each with its own variables, none told of the other."""
    words = ("data=digits", "model=mlp", "model.hidden=[8]", "updates=3", "parallel=ddp", "runtime.device=cpu")
    step = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2"}
    begun = [
        command.start("train", "-q", *words, cwd=tmp_path, env={**step, "SLURM_PROCID": rank, "SLURM_LOCALID": rank})
        for rank in "01"
    ]
    ended = [command.finish(process) for process in begun]
    assert [done.code for done in ended] == [0, 0], ended
    assert command.result(command.only_run(tmp_path / "outputs"))["world_size"] == 2


# --- devices ---


def of_devices(monkeypatch, found, *words):
    """The problems of a run on a machine with these devices."""
    monkeypatch.setattr(accelerators, "find", lambda: found)
    monkeypatch.setattr(accelerators, "device_count", lambda: found.count)
    run = prepare(["data=digits", *words]).run
    return run, list(run.parallel.validate_device(run))


def test_there_is_a_rank_for_each_device(monkeypatch):
    run, problems = of_devices(monkeypatch, Accelerator("cuda", 4, (9, 0)), "parallel=ddp")
    assert (run.parallel.local_ranks(), problems) == (4, [])
    run, problems = of_devices(monkeypatch, Accelerator(), "parallel=ddp")
    assert (run.parallel.local_ranks(), problems) == (2, [])
    run, problems = of_devices(monkeypatch, Accelerator("cuda", 4, (9, 0)), "parallel=ddp", "runtime.device=cpu")
    assert (run.parallel.local_ranks(), problems) == (2, []), "a run on the CPU leaves the machine's devices alone"


def test_more_ranks_than_devices_are_refused(monkeypatch):
    _, (problem,) = of_devices(monkeypatch, Accelerator("xpu", 1), "parallel=ddp", "parallel.nproc=2")
    assert "parallel.nproc=2 starts 2 ranks, and torch finds 1 XPU devices" in problem
    assert not of_devices(monkeypatch, Accelerator("cuda", 1), "parallel=ddp", "parallel.nproc=2", "runtime.device=cpu")[1]


def test_what_mps_cannot_do_is_refused(monkeypatch):
    _, (problem,) = of_devices(monkeypatch, Accelerator("mps", 1), "parallel=ddp", "runtime.device=mps")
    assert "parallel=ddp needs collectives, and MPS has none" in problem


def test_split_needs_devices_that_there_are(monkeypatch):
    _, (problem,) = of_devices(monkeypatch, Accelerator("cuda", 2), "parallel=split", "parallel.devices=[cuda:0,cuda:2]")
    assert "there is no cuda:2: torch finds 2 CUDA devices" in problem
    _, (problem,) = of_devices(monkeypatch, Accelerator(), "parallel=split")
    assert "parallel=split needs two devices, and torch finds none" in problem
    assert not of_devices(monkeypatch, Accelerator("cuda", 2), "parallel=split")[1]


def test_ranks_on_one_device_are_refused(monkeypatch):
    """As where two tasks were given the same CUDA_VISIBLE_DEVICES. Other machines have devices of the same number."""
    ids = {0: ("a", "GPU-1"), 1: ("b", "GPU-1"), 2: ("b", "GPU-1")}
    ddp = Ddp(nproc=3)
    ddp.world, ddp._device, ddp._control = World(0, 3), torch.device("cpu"), None

    def gather(ranks, own, group):
        for rank, (host, device) in ids.items():
            ranks[rank] = (own[0], host, device)

    monkeypatch.setattr(dist, "all_gather_object", gather)
    with pytest.raises(UserError, match="ranks 1 and 2 are on one device of b"):
        ddp._check_same_start(context())
    ids[2] = ("b", "GPU-2")
    ddp._check_same_start(context())
    ids.update(dict.fromkeys(ids, ("a", None)))  # CPUs, which ranks share
    ddp._check_same_start(context())


@pytest.mark.parametrize(("rank", "stream"), [(0, 0), (1, 0), (2, 2), (3, 2)])
def test_ranks_that_compute_the_same_activations_draw_the_same(rank, stream):
    """A dropout on a tensor rank goes on with the group's first one's numbers, whoever drew them before."""
    tensor, ddp = Tensor(nproc=4, size=2), Ddp(nproc=4)
    tensor.world = ddp.world = World(rank, 4)
    assert tensor.rng_rank() == stream
    assert ddp.rng_rank() == rank
