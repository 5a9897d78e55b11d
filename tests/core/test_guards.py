"""A run asks for no more than this machine has, unless the operator says so."""

import re
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from drivetrain.core.errors import UserError
from drivetrain.core.machine import guards
from drivetrain.launch.job import prepare
from drivetrain.model import base
from drivetrain.model.nets import Mlp
from tests.support.put import put


@pytest.mark.parametrize(
    "words",
    [
        ["loader=workers", "loader.num_workers=5000"],
        ["loader=threads", "loader.num_threads=100000"],
        ["parallel=ddp", "parallel.nproc=4096", "batch.global_batch=4096"],
        ["parallel=ddp", "parallel.nproc=32", "loader=workers", "loader.num_workers=64"],  # of all ranks together
        ["runtime.threads=1000000000"],
    ],
)
def test_processes_and_threads(words, monkeypatch):
    monkeypatch.setattr(guards, "usable_cores", lambda ranks=None: 2)
    words = [*words, "runtime.device=cpu"]
    with pytest.raises(UserError, match=r"on a machine of 2 cores, where at most 64 are of use.*DRIVETRAIN_LIMITS=off"):
        prepare(words)
    monkeypatch.setenv("DRIVETRAIN_LIMITS", "off")
    prepare(words)


def test_what_helps_is_allowed(monkeypatch):
    monkeypatch.setattr(guards, "usable_cores", lambda ranks=None: 2)
    prepare(["loader=workers", "loader.num_workers=16"])
    prepare(["parallel=ddp", "parallel.nproc=8", "loader=workers", "loader.num_workers=8", "runtime.device=cpu"])
    monkeypatch.setattr(guards, "usable_cores", lambda ranks=None: 224)
    prepare(["parallel=ddp", "parallel.nproc=8", "loader=workers", "loader.num_workers=200", "runtime.device=cpu"])


def test_batches_ahead_are_few():
    with pytest.raises(UserError, match="prefetch_factor"):
        prepare(["loader=threads", "loader.prefetch_factor=1000000000"])


def peak_kib() -> int:
    with open("/proc/self/status") as file:
        return int(re.search(r"VmHWM:\s+(\d+)", file.read())[1])


def test_a_model_larger_than_the_memory_is_refused_before_it_takes_any():
    before = peak_kib()
    told = pytest.raises(UserError, match=r"model=mlp makes a model of more than .* GiB .*DRIVETRAIN_LIMITS=off")
    with told, guards.model_within(1 << 30, "model=mlp"):
        Mlp((3, 8, 8), 10, [20_000, 20_000], 0.0)  # 1.6 GB
    with pytest.raises(UserError, match="no memory"), guards.model_within(1 << 60, "model=mlp"):
        nn.Linear(2**24, 2**28)  # more than an address space holds
    assert peak_kib() - before < 300_000
    assert not nn.modules.module._global_parameter_registration_hooks


def test_a_model_of_endless_depth(monkeypatch):
    monkeypatch.setattr(guards, "MOST_MODULES", 500)
    with pytest.raises(UserError, match="more than 500 modules"), guards.model_within(1 << 30, "model=own"):
        nn.Sequential(*(nn.Sequential(nn.Identity()) for _ in range(10**9)))


def test_a_model_that_fits_is_the_same(monkeypatch):
    torch.manual_seed(0)
    expected = Mlp((3, 8, 8), 4, [16, 16], 0.0).state_dict()
    torch.manual_seed(0)
    size = sum(t.numel() * 4 for t in expected.values())
    with guards.model_within(size, ""):
        model = Mlp((3, 8, 8), 4, [16, 16], 0.0)
        model.again = model.head  # tied weights count once
        model.head.weight = model.head.weight
    assert all(torch.equal(model.state_dict()[name], expected[name]) for name in expected)
    with pytest.raises(UserError), guards.model_within(size - 4, ""):
        Mlp((3, 8, 8), 4, [16, 16], 0.0)
    monkeypatch.setenv("DRIVETRAIN_LIMITS", "off")
    with guards.model_within(0, ""):
        Mlp((3, 8, 8), 4, [16, 16], 0.0)


def test_gradients_and_the_optimizers_state_need_memory_too(make, monkeypatch):
    size = sum(p.numel() * 4 for p in make().model.parameters())
    for optimizer, copies in (("optimizer=sgd", 2), ("optimizer=adamw", 4)):
        monkeypatch.setattr(base, "memory_bytes", lambda most=copies * size: most)
        make(optimizer)
        monkeypatch.setattr(base, "memory_bytes", lambda most=copies * size - 1: most)
        with pytest.raises(UserError, match=f"with {copies - 1} times as much for gradients and the optimizer's state"):
            make(optimizer)


def test_a_device_has_room_for_them_or_the_model_is_refused_before_it_is_made(make, monkeypatch):
    """A stand-in tells of the device's memory: the model is created in the machine's, of which there is enough."""
    size = sum(p.numel() * 4 for p in make().model.parameters())

    def room(most: int) -> None:
        monkeypatch.setattr(base, "device_bytes", lambda device: most)

    room(4 * size)
    make("optimizer=adamw")
    room(4 * size - 1)
    with pytest.raises(UserError, match=r"model=mlp makes .* and cpu has memory for .* with 3 times as much for gradients and"):
        make("optimizer=adamw")
    make("optimizer=sgd")
    room(size)  # parts of the model or narrower copies of it train there, after all of it was moved
    make("precision=bf16_pure", "precision.master=stochastic")
    make("parallel=split", "parallel.devices=[cpu,cpu]", "model.hidden=[64,64]")
    room(size - 1)
    with pytest.raises(UserError, match=r"and cpu has memory for [\d.e-]+ GiB of them: make it smaller"):
        make("precision=bf16_pure", "precision.master=stochastic")
    monkeypatch.setenv("DRIVETRAIN_LIMITS", "off")
    make("optimizer=adamw")


def test_a_devices_memory_is_asked_of_torch(monkeypatch):
    asked = SimpleNamespace(mem_get_info=lambda device: (3, 7))
    monkeypatch.setattr(guards.torch, "get_device_module", lambda device: asked)
    assert guards.device_bytes(torch.device("cuda", 0)) == 7
    monkeypatch.undo()
    assert guards.device_bytes(torch.device("cpu")) is None


def test_a_batch_larger_than_the_memory(make, monkeypatch):
    digits = ["data=digits", "model=mlp"]
    monkeypatch.setattr(guards, "memory_bytes", lambda: 12 * 8 * 8 - 1)
    with pytest.raises(UserError, match=r"reads 12 samples of the shape \[1, 8, 8\] at once.*batch.accumulation_steps.*=off"):
        make(*digits)
    monkeypatch.setenv("DRIVETRAIN_LIMITS", "off")
    make(*digits)


def test_a_run_refuses_such_a_model(train, monkeypatch):
    monkeypatch.setattr(base, "memory_bytes", lambda: 1 << 20)
    with pytest.raises(UserError, match="model=mlp makes a model of more than"):
        train("model.hidden=[2000,2000]")


@pytest.mark.parametrize(
    ("shape", "numbers"), [((3, 8, 8), 192), ({"image": (3, 8, 8), "age": ()}, 193), (((2, 3), (4,)), 10), ((), 1)]
)
def test_the_numbers_of_a_sample(shape, numbers):
    assert guards.numbers_in(shape) == numbers


@pytest.mark.parametrize("rank", [10**9, 10**12])
@pytest.mark.parametrize("adapter", ["lora", "dora"])
def test_adapters_larger_than_the_memory_are_refused(make, adapter, rank):
    with pytest.raises(
        UserError, match=rf"adapter.rank={rank} makes a model (of more than .* GiB|that this machine has no memory)"
    ):
        make(f"adapter={adapter}", f"adapter.rank={rank}", "model=mlp")


@pytest.mark.parametrize(
    "words", [["data.samples=1000000000"], ["data.test_samples=1000000000"], ["data.shape=[3,1000000,1000000]"]]
)
def test_random_samples_beyond_the_memory_are_refused(words):
    with pytest.raises(UserError, match=r"samples of the shape .* take .* GiB, and this machine has"):
        prepare(["data=synthetic", *words])
    with pytest.raises(UserError, match="1,000,000,500 scenes take"):
        prepare(["task=multilabel", "data=digit_scenes", "model=mlp", "data.samples=1000000000"])


def test_an_output_for_each_of_too_many_classes_is_refused(make):
    with pytest.raises(UserError, match="model=mlp makes a model"):
        make("model=mlp", "data.classes=1000000000000")


@pytest.mark.parametrize(
    "word",
    [
        "clip=value clip.clip_value=1e300", "clip=agc clip.eps=1e300", "optimizer.eps=1e300", "debug=gradcheck debug.eps=1e-300",
        "debug=gradcheck debug.eps=0.99",
        "optimizer=muon optimizer.ns_steps=1000000000", "data=digit_scenes data.noise=1000000000",
        "metrics=[auroc] metrics.auroc.thresholds=1000000000",
        "metrics=[calibration_error] metrics.calibration_error.bins=1000000000",
        "adapter=lora adapter.rank=4611686018427387904", "epochs=4611686018427387904",
        "ema=post_hoc ema.width=1e-300",
    ],
)  # fmt: skip
def test_every_number_has_bounds(word):
    """Those that no arithmetic of a step can hold are refused by the setting's name."""
    with pytest.raises(UserError, match=rf"{word.split()[-1].partition('=')[0]}=.*must be"):
        prepare(word.split())


# --- the limits of the control groups that this process is in, wherever the kernel or a container put them ---


@pytest.mark.parametrize(
    ("own", "files", "memory", "cores"),
    [
        ("0::/\n", {"memory.max": "1000\n", "cpu.max": "50000 100000\n"}, [1000], [0.5]),  # a container with groups of its own
        ("0::/a/b\n", {"a/b/memory.max": "900\n", "a/memory.max": "500\n", "a/cpu.max": "max 100000\n"}, [900, 500], []),
        ("0::/a\n", {"a/memory.max": "max\n"}, [], []),
        ("0::/of/the/host\n", {"memory.max": "700\n"}, [700], []),  # the path is the host's, the files are the container's
        (
            "4:memory:/a\n1:cpu,cpuacct:/a\n0::/\n",
            {
                "memory/a/memory.limit_in_bytes": "800\n", "memory/memory.limit_in_bytes": "9223372036854771712\n",
                "cpu,cpuacct/a/cpu.cfs_quota_us": "150000\n", "cpu,cpuacct/a/cpu.cfs_period_us": "100000\n",
                "cpu,cpuacct/cpu.cfs_quota_us": "-1\n", "cpu,cpuacct/cpu.cfs_period_us": "100000\n",
            },
            [800, 9223372036854771712], [1.5],
        ),
        ("12:cpuset:/a\n", {"cpuset/a/memory.max": "1\n"}, [], []),
        (None, {}, [], []),  # no Linux
    ],
)  # fmt: skip
def test_the_limits_of_every_group_count(own, files, memory, cores, tmp_path, monkeypatch):
    for name, text in files.items():
        put(tmp_path / name, text)
    if own is not None:
        (tmp_path / "own").write_text(own)
    monkeypatch.setattr(guards, "MOUNT", tmp_path)
    monkeypatch.setattr(guards, "OWN", tmp_path / "own")
    assert (guards.cgroup_bytes(), guards.cores()) == (memory, cores)
    if memory:
        assert guards.memory_bytes() == min(memory)
    assert guards.usable_cores(1) >= 1
    if cores:
        assert guards.usable_cores(1) == max(1, int(min(cores)))
