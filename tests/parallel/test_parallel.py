"""One process or several: the same mathematics, the same evaluation, the same files."""

import os
import socket

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

from drivetrain.core.errors import UserError
from drivetrain.core.machine import accelerators
from drivetrain.core.machine.accelerators import Accelerator
from drivetrain.core.world import World
from drivetrain.launch.job import prepare
from drivetrain.model.nets import ResNet9
from drivetrain.parallel import Parallel, environment
from drivetrain.parallel.ddp import Ddp
from drivetrain.parallel.environment import _tasks_of_node, launched, world_of_environment
from drivetrain.parallel.onehost import _move_inputs_hook
from drivetrain.parallel.pipeline import PipelineParallel
from drivetrain.parallel.tensor import Tensor
from drivetrain.saving import checkpoint_io
from tests.support import command
from tests.support.command import tensors
from tests.support.context import context
from tests.support.to_end import run_to_end

# What float32 sums in another order may differ by after a handful of updates.
CLOSE = {"rtol": 1e-4, "atol": 1e-6}


# --- real ranks: two processes of gloo ---


RESNET = ["model=resnet9", "model.width=8", "checkpointing=blocks", "ema=ema", "ema.decay=0.5", "updates=4"]


@pytest.fixture(scope="module")
def blocks_on_two_ranks(tmp_path_factory):
    """A run of all that wraps and averages: its result."""
    return run_to_end([
        "data=synthetic", "data.shape=[3,8,8]", "data.classes=4", "data.samples=48", "data.test_samples=20",
        "optimizer=sgd", "optimizer.lr=0.05", "scheduler=constant", "batch.global_batch=12", *RESNET,
        "parallel=ddp", f"output_dir={tmp_path_factory.mktemp('ddp')}",
    ])  # fmt: skip


def test_weights_of_wrapped_blocks_load_into_the_plain_model(blocks_on_two_ranks):
    saved = tensors(blocks_on_two_ranks)
    plain = ResNet9((3, 8, 8), 4, 8, False)
    assert plain.load_state_dict(saved, strict=True)
    assert set(saved) == set(plain.state_dict())
    assert saved["features.0.1.num_batches_tracked"] == 4


@pytest.mark.parametrize("which", ["loss", "ema_loss"])
def test_all_ranks_evaluate_the_model_that_is_saved(blocks_on_two_ranks, make, which):
    """BatchNorm's statistics differ from rank to rank; what is told must be of those that are saved."""
    alone = make(*RESNET)
    alone.restore(*checkpoint_io.load(blocks_on_two_ranks.run_dir / "checkpoints" / "4"))
    with alone.ema.swapped() if which == "ema_loss" else torch.no_grad():
        told = alone.evaluator.metrics()["loss"]
    assert blocks_on_two_ranks.judged("final")[which] == pytest.approx(told, rel=1e-6)


# --- one rank in this process: what DDP does can be counted ---


@pytest.fixture
def one_rank(monkeypatch):
    """The environment of a world of one."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    for name, value in (("RANK", 0), ("WORLD_SIZE", 1), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", port)):
        monkeypatch.setenv(name, str(value))
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def hook(meet):
    """A hook of DDP that calls `meet()` for each bucket, and hands its gradients on as they are."""

    def handed_on(state, bucket):
        meet()
        future = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    return handed_on


@pytest.mark.parametrize("steps", [1, 3])
def test_gradients_meet_once_an_update_not_once_a_micro_batch(make, one_rank, steps):
    trainer = make("parallel=ddp", "batch=accumulate", f"batch.accumulation_steps={steps}", "updates=4")
    meetings = []
    step = trainer.step.inner if steps == 1 else trainer.step.inner.inner  # several are measured too (noise_scale)
    step.forward.register_comm_hook(None, hook(lambda: meetings.append(trainer.progress.updates)))
    micros = []
    trainer.model.register_forward_hook(lambda m, *_: micros.append(m.training))
    trainer.fit()
    assert sum(micros) == 4 * steps
    assert meetings == [0, 1, 2, 3]


def test_ddp_is_told_its_settings(make, one_rank):
    trainer = make("parallel=ddp", "parallel.bucket_mb=0.5", "parallel.find_unused_parameters=true")
    assert trainer.step.inner.forward.bucket_bytes_cap == 0.5 * 2**20
    assert trainer.step.inner.forward.find_unused_parameters
    assert trainer.step.inner.forward.gradient_as_bucket_view
    assert trainer.step.inner.forward.module is trainer.model  # evaluated and saved under its own names


def test_buckets_are_reduced_during_a_compiled_backward(make, one_rank, each_update, monkeypatch):
    """torch splits a compiled model at DDP's buckets, so that the first meets before the last gradients are there."""
    compile_ = torch.compile
    monkeypatch.setattr("drivetrain.core.lazy.torch.compile", lambda model, **_: compile_(model, backend="aot_eager"))
    trainer = make("parallel=ddp", "parallel.bucket_mb=1", "compile=inductor", "model.hidden=[512,512,512]", "updates=2")
    order = []
    trainer.step.inner.forward.register_comm_hook(None, hook(lambda: order.append("bucket")))
    for p in trainer.model.parameters():
        p.register_post_accumulate_grad_hook(lambda p: order.append("gradient"))
    updates = each_update(trainer, lambda: [order.copy(), order.clear()][0])
    trainer.fit()
    assert 1 <= updates[-1].index("bucket") < updates[-1].count("gradient")


@pytest.mark.parametrize(("word", "shared"), [([], False), (["parallel.forward_sync_buffers=true"], True)], ids=["own", "shared"])
def test_buffers_are_sent_before_each_forward_only_if_asked(make, one_rank, monkeypatch, word, shared):
    trainer = make("parallel=ddp", "model=resnet9", "model.width=8", *word)
    sent = []
    monkeypatch.setattr(torch.nn.parallel.DistributedDataParallel, "_sync_buffers", lambda self: sent.append(1))
    trainer.fit()
    assert bool(sent) == shared


def test_states_are_saved_as_often_as_asked_for_on_ranks_too(fitted, one_rank, tmp_path):
    """All ranks count alike, so that they save at these updates without asking one another."""
    fitted("parallel=ddp", "saving.every_updates=3", "saving.keep=50", "data.samples=480", "updates=13")
    saved = sorted(int(p.name) for p in (tmp_path / "run" / "checkpoints").iterdir())
    assert saved == [3, 6, 9, 12, 13]


def test_ddp_on_one_device_trains(train):
    """`parallel=ddp` on a machine with one GPU is one rank: that is no error."""
    assert train("parallel=ddp", "parallel.nproc=1").updates == 2


# --- who takes part ---


def test_single_is_one_process_and_changes_nothing():
    parallel, model, sums = Parallel(), torch.nn.Linear(2, 2), torch.ones(3)
    parallel.setup(context())
    assert parallel.ranks() == 1
    assert parallel.wrap_model(model, context()) is model
    assert parallel.all_reduce_sum(sums) is sums
    assert parallel.all_reduce_flag(2) == 2
    assert parallel.gather_object("mine") == ["mine"]


@pytest.mark.parametrize(("devices", "ranks"), [(0, 2), (1, 1), (3, 3)], ids=["no device", "one", "three"])
def test_ranks_follow_the_devices_two_on_a_cpu(monkeypatch, devices, ranks):
    monkeypatch.setattr("drivetrain.core.machine.accelerators.device_count", lambda: devices)
    assert Ddp().ranks() == ranks
    assert Ddp(nproc=5).ranks() == 5


def test_the_ranks_of_a_launcher_are_honoured(monkeypatch, problems):
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setenv("RANK", "0")
    assert Ddp().ranks() == 3
    assert any("parallel.nproc=2, but the launcher started 3 ranks" in p for p in problems("parallel=ddp", "parallel.nproc=2"))
    assert any("set parallel=ddp" in p for p in problems("parallel=single"))


def test_more_ranks_than_samples_are_refused(make):
    with pytest.raises(UserError, match=r"3 ranks, but only 2 training samples: lower parallel\.nproc"):
        make("data.samples=2", "data.drop_last=false", world=World(0, 3))


REFUSED = [
    *(([word], word) for word in ("parallel.nproc=0", "parallel.nproc=many", "parallel.bucket_mb=0", "parallel.timeout_s=-1")),
    (["parallel.bucket_mb=0.5", "compile=inductor"], "parallel.bucket_mb=0.5 and compile=inductor"),
    (["compile=step", "data.drop_last=false"], "parallel=ddp and compile=step need equal micro-batches on all ranks"),
    (["compile=step", "data.drop_last=true", "batch=bucketed"], "parallel=ddp and compile=step need equal micro-batches on all"),
]


@pytest.mark.parametrize(("words", "says"), REFUSED, ids=str)
def test_what_cannot_be_is_refused(problems, words, says):
    assert any(p.startswith(says) for p in problems("parallel=ddp", *words))


def test_sharded_weights_are_not_compiled_for_all_lengths_at_once(problems):
    """Beside another problem, so that there is one in any case."""
    text = [
        "data=stdlib",
        "model=gpt",
        "loss=next_token",
        "batch=bucketed",
        "compile=regional",
        "adapter=lora",
        "model.freeze=[head]",
    ]

    def told(*words):
        return any("compile.dynamic=false" in p for p in problems(*text, *words))

    for strategy in (["parallel=tensor"], ["parallel=pipeline", "parallel.tensor=2"]):
        assert told(*strategy)
        assert not told(*strategy, "compile.dynamic=false")
    assert not told("parallel=fsdp")


def test_ranks_send_tensors_of_objects_from_the_cpu(monkeypatch):
    """An object arrives on the device that it was on, by its number: rank 0 may have no such device, or little room on it."""
    objects, tensors = [], []
    monkeypatch.setattr(torch.distributed, "gather_object", lambda value, *_, **__: objects.append(value))
    monkeypatch.setattr(torch.distributed, "send", lambda tensor, *_, **__: tensors.append(tensor))
    pipeline = PipelineParallel()
    pipeline.world, pipeline._control = World(1, 2), None
    with FakeTensorMode():
        assert (
            pipeline.gather_object({"step": torch.ones((), device="cuda:1"), "average": torch.ones(2, 3, device="cuda:1").T})
            == []
        )
    assert len(objects) == 1
    assert [(tensor.device.type, tuple(tensor.shape)) for tensor in tensors] == [("cpu", (1,)), ("cpu", (6,))]


@pytest.mark.parametrize(("device", "queued"), [("cpu", False), ("cuda:1", True)])
def test_a_block_on_the_cpu_waits_for_what_the_device_sends_it(monkeypatch, device, queued):
    asked = []
    monkeypatch.setattr(torch.Tensor, "to", lambda self, *args, **settings: asked.append((*args, settings["non_blocking"])))
    _move_inputs_hook(torch.device(device))(None, (torch.ones(2),), {})
    assert asked == [(torch.device(device), queued)]


# --- the rank of this process among how many, as launchers tell it ---


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


def test_the_first_host_by_slurms_own_tool(tmp_path, monkeypatch):
    tool = tmp_path / "scontrol"
    for answer, first in (("echo from-the-tool other", "from-the-tool"), ("echo half; exit 1", "gpu03"), ("true", "gpu03")):
        tool.write_text(f"#!/bin/sh\n{answer}\n")
        tool.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
        assert environment._first_host("gpu[03-05,7],login") == first


def test_a_batch_script_itself_is_no_task(told):
    """sbatch sets the number of tasks, and nothing has started them: one process, as Lightning found out the hard way."""
    told({"SLURM_JOB_ID": "4711", "SLURM_NTASKS": "8", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"})
    assert launched() is None
    assert world_of_environment() == World()


@pytest.mark.parametrize("wrong", ["RANK", "WORLD_SIZE"])
def test_what_is_no_number_is_refused(told, wrong):
    told({"RANK": "0", "WORLD_SIZE": "2", wrong: "first"})
    with pytest.raises(UserError, match=f"{wrong}=first in the environment is not a number"):
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
    assert "parallel=ddp needs collectives, but MPS has none" in problem


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
