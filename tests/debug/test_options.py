"""profile, nvtx, gradcheck, sync, overfit: each finds what was planted, nothing where nothing is, and changes no number."""

import contextlib
import csv
import gzip
import json
import re
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import drivetrain
from drivetrain.core.errors import UserError
from drivetrain.debug import profile
from drivetrain.debug.gradcheck import WrongGradient
from drivetrain.debug.host_sync import HostSync
from drivetrain.debug.profile import Profile
from drivetrain.debug.window import Nvtx
from drivetrain.launch import launcher
from tests.conftest import TINY
from tests.support.to_end import run_to_end

SOURCE = Path(drivetrain.__file__).parents[1]
NARROW = ("amp", "bf16", "bf16_pure", "fp8")

PLANTED = '''
"""Models with a fault each."""
import torch
from torch import nn


class Forgot(torch.autograd.Function):
    """tanh, whose backward forgot the square."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.tanh()

    @staticmethod
    def backward(ctx, grad):
        return grad * (1 - ctx.saved_tensors[0].tanh())


class RightTwice(torch.autograd.Function):
    """tanh, whose backward has the right derivative too."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.tanh()

    @staticmethod
    def backward(ctx, grad):
        return grad * (1 - ctx.saved_tensors[0].tanh() ** 2)


class RightOnce(RightTwice):
    """tanh with the right backward, whose own derivative forgets the input."""

    @staticmethod
    def backward(ctx, grad):
        return grad * (1 - ctx.saved_tensors[0].detach().tanh() ** 2)


class Tanh(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function.apply(x)


class Attention(nn.Module):
    """torch's attention on a CPU, whose backward has no derivative."""

    def forward(self, x):
        x = x.view(-1, 1, 4, 4)
        return nn.functional.scaled_dot_product_attention(x, x, x).flatten(1)


class Looks(torch.autograd.Function):
    """Itself, with a look at its gradient."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad.sum().tolist()  # in the backward
        return grad


class Act(nn.Module):
    def forward(self, x):
        return Forgot.apply(x)


class Scaled(nn.Module):
    """A parameter whose gradient is wrong, beside an input whose gradient is right."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(16))

    def forward(self, x):
        return x * (2 * self.scale.detach() - self.scale)


class Narrow(nn.Module):
    """Computes in float32 and gives back what it was given."""

    def forward(self, x):
        return x.float().tanh().to(x.dtype)


class Float(nn.Module):
    """Wants float32."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x):
        return self.linear(x.float())


class Item(nn.Module):
    def forward(self, x):
        return x * float(x.mean().item() < 1e9)  # in the forward


class Mask(nn.Module):
    def forward(self, x):
        x[x > 1e9] = 0.0  # which is none: one value needs no places
        if (x > 1e9).any():  # in an if
            raise AssertionError
        return x + x[x > 1e9].sum()  # by a mask


class Peek(nn.Module):
    def forward(self, x):
        return Looks.apply(x)


class Slow(nn.Module):
    def forward(self, x):
        matrix = torch.arange(90000.0, dtype=torch.float64).view(300, 300)
        torch.linalg.eigh(matrix + matrix.T)
        return x


class Root(nn.Module):
    def forward(self, x):
        return x + torch.sqrt(x * 0)  # sqrt has an infinite slope at 0, times 0


MIDDLE = {"act": Act, "scaled": Scaled, "narrow": Narrow, "float": Float, "item": Item, "mask": Mask, "peek": Peek,
          "slow": Slow, "root": Root,
          "right_twice": lambda: Tanh(RightTwice), "right_once": lambda: Tanh(RightOnce),
          "attention": Attention,
          "right": lambda: nn.Sequential(nn.Dropout(0.2), nn.ReLU(inplace=True), nn.LayerNorm(16))}


class Net(nn.Module):
    def __init__(self, shape, classes, middle="right"):
        super().__init__()
        self.first = nn.Linear(shape[0] * shape[1] * shape[2], 16)
        self.middle = MIDDLE[middle]()
        self.head = nn.Linear(16, classes)

    def forward(self, x):
        return self.head(self.middle(self.first(x.flatten(1))))


class Itself(Net):
    """Wrong in its own forward, between its modules."""

    def forward(self, x):
        return self.head(Forgot.apply(self.first(x.flatten(1))))


class Cut(Net):
    """Learns nothing: its output hangs on no parameter but a bias."""

    def forward(self, x):
        return self.head(self.first(x.flatten(1)).detach() * 0)
'''


@pytest.fixture
def planted(monkeypatch, own_module):
    """`planted(middle)`: the words of a model with that fault."""
    own_module("planted_faults", PLANTED)
    monkeypatch.delitem(sys.modules, "planted_faults", raising=False)

    def words(middle: str = "right", cls: str = "Net") -> list[str]:
        return ["model=own", f"model.target=planted_faults.{cls}", "trust=[planted_faults]", f"+model.kwargs.middle={middle}"]

    return words


def line_of(text: str) -> int:
    (line,) = [n for n, code in enumerate(PLANTED.splitlines(), 1) if text in code]
    return line


def losses(result_or_trainer) -> list[float]:
    if hasattr(result_or_trainer, "log"):
        records = result_or_trainer.log.writers[0]
    else:
        records = [json.loads(line) for line in (Path(result_or_trainer.run_dir) / "metrics.jsonl").read_text().splitlines()]
    return [r["loss"] for r in records if r["event"] == "train"]


def report(result) -> list[str]:
    return (Path(result.run_dir) / "debug.txt").read_text().splitlines()


# --- none ---


@pytest.mark.parametrize(
    ("option", "loaded"),
    [
        pytest.param("host_sync", ["drivetrain.debug.host_sync", "drivetrain.debug.torch_modes"], marks=pytest.mark.slow),
        pytest.param("none", [], marks=pytest.mark.slow),
        pytest.param("fast", [], marks=pytest.mark.slow),
        pytest.param("overfit", [], marks=pytest.mark.slow),
    ],
)
def test_only_the_option_that_is_asked_for_is_imported(tiny, tmp_path, option, loaded):
    code = f"""
import sys, drivetrain
result = drivetrain.train({tiny(f"debug={option}")!r})
ours = sorted(n for n in sys.modules if n.startswith("drivetrain.debug.") and n != "drivetrain.debug.base")
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
import torch
left = [*_get_current_function_mode_stack(), *_get_current_dispatch_mode_stack()]
print("done", result.status, ours, left, torch.is_anomaly_enabled(), torch.autograd.profiler._is_profiler_enabled)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False, env={"PYTHONPATH": str(SOURCE)}
    )
    assert f"done completed {loaded!r} [] False False" in done.stdout, done.stdout + done.stderr


def test_none_wraps_nothing_and_reports_nothing(train, make):
    from drivetrain.engine.step import PlainStep
    from drivetrain.precision import Precision

    trainer = make()
    assert type(trainer.precision) is Precision
    assert type(trainer.step) is PlainStep
    names = [watch(iter(())).gi_code.co_name for watch in trainer.stream_watchers]
    assert names == ["watch", "check_waiting", "watch"]
    assert not (Path(train().run_dir) / "debug.txt").exists()


@pytest.mark.parametrize(
    "beside", [["model.dropout=0.2", "optimizer=adamw"], ["precision=fp32", "batch=accumulate", "batch.accumulation_steps=3"]]
)
def test_a_watched_run_has_the_numbers_of_a_plain_one(fitted, beside):
    ends = {}
    for option in ("none", "profile", "gradcheck", "host_sync"):
        trainer = fitted(*beside, f"debug={option}", "updates=4")
        ends[option] = losses(trainer), trainer.progress.final
    assert len(ends["none"][0]) == 4
    assert ends == dict.fromkeys(ends, ends["none"])


# --- profile ---


PROFILE = ["debug=profile", "debug.skip=2", "debug.warmup=1", "debug.window=3", "updates=9", "epochs=9"]


@pytest.fixture(scope="module")
def profiled(tmp_path_factory):
    own = ["model.hidden=[64]", "data.samples=240", "data.test_samples=20", f"output_dir={tmp_path_factory.mktemp('profiled')}"]
    return run_to_end([*TINY, *PROFILE, *own], updates=9)


def trace_of(result) -> list[dict]:
    with gzip.open(Path(result.run_dir) / "profile" / "trace.json.gz", "rt") as file:
        return json.load(file)["traceEvents"]


def test_profile_leaves_a_trace_of_its_window_with_phases_and_operations(profiled):
    events = trace_of(profiled)
    spans = [e for e in events if e.get("ph") == "X"]
    marks = [e["name"] for e in spans if e.get("cat") == "user_annotation"]
    for phase in ("data", "forward", "backward", "update"):
        assert marks.count(phase) == 3, phase
    assert sum(name.startswith("ProfilerStep") for name in marks) == 3
    assert {"aten::addmm", "aten::mm", "aten::cross_entropy_loss"} <= {e["name"] for e in spans}
    assert all(isinstance(e["ts"], int | float) and e["dur"] >= 0 for e in spans)  # what a viewer needs to draw it
    forward, backward = (next(e for e in spans if e["name"] == name) for name in ("forward", "backward"))
    inside = [e["name"] for e in spans if forward["ts"] <= e["ts"] and e["ts"] + e["dur"] <= forward["ts"] + forward["dur"]]
    assert "aten::addmm" in inside
    assert forward["ts"] + forward["dur"] <= backward["ts"]


def test_profile_says_the_time_the_operations_and_the_memory(profiled):
    head, *rest = report(profiled)
    shares = dict(re.findall(r"(\w+) (\d+)%", head))
    assert head.startswith("profile of updates 4 to 6: ")
    assert list(shares) == ["data", "forward", "backward", "update", "rest"]
    assert sum(map(int, shares.values())) in range(97, 104)
    operations = [re.fullmatch(r" +([\d.]+)% +[\d.]+ ms +(\d+) calls  (\S.*)", line) for line in rest[:12]]
    assert all(operations)
    percents = [float(found[1]) for found in operations]
    assert percents == sorted(percents, reverse=True)
    assert 50 < sum(percents) <= 100.5
    table = (Path(profiled.run_dir) / "profile" / "operations.txt").read_text()
    assert all(found[3] in table for found in operations)
    assert rest[12].startswith("memory cpu: at most ")
    assert rest[13].endswith("operations.txt has every operation")


def test_profile_has_the_memory_over_time_in_a_file_and_in_the_trace(profiled):
    with (Path(profiled.run_dir) / "profile" / "memory.csv").open() as file:
        rows = list(csv.DictReader(file))
    levels = [int(row["allocated_bytes"]) for row in rows]
    for before, after, row in zip(levels, levels[1:], rows[1:], strict=False):
        assert after - before == int(row["change_bytes"])
    assert {row["device"] for row in rows} == {"cpu"}
    assert {"forward", "backward"} <= {row["phase"] for row in rows}
    assert [float(row["ms"]) for row in rows] == sorted(float(row["ms"]) for row in rows)
    counters = [e["args"]["bytes"] for e in trace_of(profiled) if e["ph"] == "C"]
    assert counters == levels
    (said,) = re.findall(r"at most ([\d.]+) MiB above the start, in (\w+)", "\n".join(report(profiled)))
    peak = max(range(len(levels)), key=levels.__getitem__)
    assert (float(said[0]), said[1]) == (round(levels[peak] / 2**20, 1), rows[peak]["phase"])


class Row:
    """A row of the profiler's averages."""

    def __init__(self, key, cpu, device, type_=torch.autograd.DeviceType.CPU, annotation=False) -> None:
        self.key, self.cpu_time_total, self.self_device_time_total, self.count = key, cpu, device, 1
        self.device_type, self.is_user_annotation = type_, annotation


def test_profile_tells_the_hosts_rows_from_the_devices():
    """On CUDA the profiler repeats every range on the device, with no host time, and lists each kernel beside its operation."""
    cuda = torch.autograd.DeviceType.CUDA
    rows = [
        Row("ProfilerStep*", 1000.0, 0.0, annotation=True), Row("forward", 600.0, 0.0, annotation=True),
        Row("aten::mm", 300.0, 90.0),
        Row("ProfilerStep*", 0.0, 800.0, cuda, annotation=True), Row("forward", 0.0, 700.0, cuda, annotation=True),
        Row("aten::add", 200.0, 10.0), Row("gemm_kernel", 0.0, 90.0, cuda), Row("add_kernel", 0.0, 10.0, cuda),
    ]  # fmt: skip
    option = Profile()
    option._window_title = "update 3"
    assert option._shares(rows) == "profile of update 3: 1.00 ms each on the host (forward 60%, rest 40%)"
    found = [line.split() for line in option._operations(rows, "self_device_time_total")]
    assert [(line[0], line[-1]) for line in found] == [("90.0%", "aten::mm"), ("10.0%", "aten::add")]


def test_profile_finds_the_phase_of_memory_by_the_hosts_ranges(tmp_path):
    def span(name, cat, start, length):
        return {"ph": "X", "name": name, "cat": cat, "ts": start, "dur": length, "pid": 1}

    def level(at, total):
        args = {"Device Type": 1, "Device Id": 0, "Total Allocated": total, "Bytes": total}
        return {"name": "[memory]", "ts": at, "pid": 1, "args": args}

    events = [
        span("forward", "user_annotation", 0, 10), span("backward", "user_annotation", 10, 10),
        span("forward", "gpu_user_annotation", 12, 15),  # the device is later than the host, whose allocations these are
        level(5, 2**20), level(15, 2**21),
    ]  # fmt: skip
    assert profile._memory(events, tmp_path / "memory.csv", "xpu")[0].startswith("memory xpu:0: at most 2.0 MiB, in backward;")


def test_profile_names_a_planted_slow_operation_first(train, planted):
    result = train("debug=profile", "debug.skip=0", "debug.window=1", *planted("slow"))
    assert report(result)[1].endswith("aten::_linalg_eigh")


@pytest.mark.parametrize(("updates", "seen"), [(1, "update 1"), (2, "update 2"), (4, "updates 3 to 4"), (40, "updates 13 to 17")])
def test_profile_of_a_run_too_short_for_it_looks_at_its_end(train, updates, seen):
    result = train("debug=profile", f"updates={updates}", "epochs=20", "log_every=20")
    assert result.updates == updates
    assert report(result)[0].startswith(f"profile of {seen}: ")
    said = launcher.prepare(["debug=profile", f"updates={updates}"]).notices
    assert bool(said) == (updates < 17)
    assert all("debug=profile looks at updates up to 17, but updates=" in line for line in said)


def test_profile_of_a_run_that_breaks_off_leaves_what_it_had(train, monkeypatch):
    from drivetrain.engine.trainer import Trainer

    def after(self, epoch_end):
        raise ArithmeticError("planted")

    monkeypatch.setattr(Trainer, "_after_update", after)
    result = train("debug=profile", "debug.skip=0", "debug.warmup=0", "updates=9", "epochs=9", ends="failed")
    assert "planted" in result.error
    assert trace_of(result)
    assert not torch.autograd.profiler._is_profiler_enabled


def test_profile_without_memory_writes_none(train):
    result = train("debug=profile", "debug.memory=false")
    assert {p.name for p in (Path(result.run_dir) / "profile").iterdir()} == {"trace.json.gz", "operations.txt"}


def test_evaluation_in_the_window_is_no_forward(train):
    result = train("debug=profile", "debug.skip=1", "debug.warmup=1", "debug.window=4", "updates=6", "epochs=9")
    marks = [e["name"] for e in trace_of(result) if e.get("cat") == "user_annotation"]
    assert marks.count("forward") == 4  # updates 3 to 6, with the end of an epoch of 4 among them
    assert marks.count("evaluate") == 2


# --- nvtx ---


@pytest.fixture
def cuda_calls(monkeypatch):
    """The calls that debug=nvtx makes of torch.cuda, recorded."""
    calls = []

    @contextlib.contextmanager
    def span(name):
        calls.append(f"<{name}")
        yield
        calls.append(f"{name}>")

    monkeypatch.setattr(torch.cuda.nvtx, "range", span)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: calls.append("synchronize"))
    monkeypatch.setattr(torch.cuda.profiler, "start", lambda: calls.append("start"))
    monkeypatch.setattr(torch.cuda.profiler, "stop", lambda: calls.append("stop"))
    monkeypatch.setattr(torch.autograd.profiler, "emit_nvtx", lambda record_shapes: span(f"operations {record_shapes}"))
    return calls


def mark(make, trainer, option) -> None:
    """Put a debugging option into a trainer that was built without one, for a device that is not here."""
    built = option.build(make.contexts[-1])
    precision = built.wrap_precision(trainer.precision)
    trainer.step = replace(trainer.step, precision=precision)
    trainer.evaluator.precision = precision
    trainer.stream_watchers += built.stream_watchers()


def test_nvtx_marks_phases_and_captures_its_window(make, cuda_calls):
    trainer = make("updates=3", "saving=none")
    trainer.evaluator.max_batches = 0
    trainer.progress.evaluated = 3
    mark(make, trainer, Nvtx(skip=1, window=1, shapes=True))
    trainer.fit()
    step = [word for phase in ("forward", "backward", "update") for word in (f"<{phase}", f"{phase}>")]
    window = ["synchronize", "start", "<operations True", "<data", "data>", *step, "operations True>", "synchronize", "stop"]
    assert cuda_calls == [*step, *window, *step]


def test_nvtx_without_operations_marks_the_phases_alone(make, cuda_calls):
    trainer = make("updates=1", "saving=none")
    mark(make, trainer, Nvtx(skip=0, window=1, operations=False))
    trainer.fit()
    assert "<forward" in cuda_calls
    assert not any("operations" in call for call in cuda_calls)


# --- gradcheck ---


@pytest.mark.parametrize("model", [["model=mlp", "model.dropout=0.3"], ["model=resnet9", "model.width=4"], "right"])
def test_gradcheck_finds_nothing_where_all_is_right(make, planted, model, caplog):
    trainer = make("debug=gradcheck", *(planted(model) if isinstance(model, str) else model))
    (line,) = [line for line in caplog.messages if "gradcheck" in line]
    assert re.fullmatch(r"debug=gradcheck: the gradients of \d+ modules and of the loss are right", line)
    assert {p.dtype for p in trainer.model.parameters()} == {torch.float32}
    assert torch.get_default_dtype() == torch.float32


@pytest.mark.slow
@pytest.mark.parametrize("name", ["resnet18", "vit_tiny_patch16_224", "convnext_atto", "efficientnet_b0"])
@pytest.mark.parametrize("seed", [0, 1])
def test_gradcheck_finds_nothing_in_timms_models(logged, name, seed):
    kwargs = ["+model.kwargs.img_size=32", "+model.kwargs.patch_size=8"] if name.startswith("vit") else []
    words = ["model=timm", f"model.name={name}", *kwargs, "data.shape=[3,32,32]", f"runtime.seed={seed}"]
    assert any("of the loss are right" in line for line in logged("debug=gradcheck", *words))


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("act",), "module middle (Act), with respect to its input: "),
        (("scaled",), "module middle (Scaled), with respect to scale: "),
        (("right", "Itself"), "the model itself (Itself), with respect to its input: "),
    ],
)
def test_gradcheck_names_the_module_whose_backward_is_wrong(make, train, planted, words, says):
    with pytest.raises(WrongGradient) as found:
        make("debug=gradcheck", *planted(*words))
    assert str(found.value).startswith(f"a backward is not its forward's derivative: {says}")
    assert str(found.value).count("with respect to") == 1  # neither its neighbours nor what it lies in
    analytical, numerical = re.findall(
        r": (-?[\d.e+-]+) along a direction in which differences give (-?[\d.e+-]+)", str(found.value)
    )[0]
    assert float(analytical) != pytest.approx(float(numerical), rel=1e-3)
    assert says in train("debug=gradcheck", *planted(*words), updates=0, ends="failed").error
    with pytest.raises(WrongGradient, match=r"^a backward is not"):  # before the second derivative
        make("debug=gradcheck", "debug.second=true", *planted(*words))


def test_gradcheck_finds_a_wrong_loss(make, monkeypatch, planted):
    import importlib

    planted()
    forgot = importlib.import_module("planted_faults").Forgot
    monkeypatch.setattr(
        "drivetrain.loss.classification.CrossEntropy.__call__", lambda self, x, y: forgot.apply(x).square().mean()
    )
    with pytest.raises(WrongGradient, match=r"the loss of the whole model, with respect to head\.bias: "):
        make("debug=gradcheck")


@pytest.mark.parametrize(
    "model",
    [
        ["model=mlp", "model.dropout=0.3"],
        pytest.param(["model=resnet9", "model.width=4"], marks=pytest.mark.slow),
        "right_twice",
        "right",
    ],
)
def test_the_second_derivatives_are_right(logged, planted, model):
    words = planted(model) if isinstance(model, str) else model
    (line,) = [line for line in logged("debug=gradcheck", "debug.second=true", *words) if "derivatives" in line]
    assert re.fullmatch(r"debug.second=true: the second derivatives of \d+ modules and of the loss are right", line)


def test_a_wrong_second_derivative_behind_a_right_first_is_named(make, train, planted):
    make("debug=gradcheck", *planted("right_once"))
    with pytest.raises(WrongGradient) as found:
        make("debug=gradcheck", "debug.second=true", *planted("right_once"))
    says = "a double backward is not its backward's derivative: module middle (Tanh), with respect to its input: "
    assert str(found.value).startswith(f"{says}0 along a direction in which differences give ")
    assert str(found.value).count("with respect to") == 1
    result = train("debug=gradcheck", "debug.second=true", *planted("right_once"), updates=0, ends="failed")
    assert says in result.error


def test_a_backward_without_a_derivative_is_left_out(logged, planted):
    words = ["debug=gradcheck", "debug.second=true", *planted("attention")]
    said = [line for line in logged(*words) if line.startswith("debug")]
    assert said[0].endswith("modules and of the loss are right")
    assert said[1] == "debug.second=true: the second derivatives of 2 modules are right"  # the linear layers around it
    assert said[2].startswith("debug.second=true leaves out module middle (Attention): ")
    assert "is not implemented" in said[2]


@pytest.mark.parametrize(("middle", "why"), [("narrow", "narrower format than float64"), ("float", "must have the same dtype")])
def test_gradcheck_says_what_cannot_do_float64_and_checks_the_rest(logged, planted, middle, why):
    said = [line for line in logged("debug=gradcheck", *planted(middle)) if "gradcheck" in line]
    assert said[0] == "debug=gradcheck: the gradients of 2 modules are right"  # the linear layers around it
    assert said[1].startswith(f"debug=gradcheck leaves out module middle ({middle.capitalize()}): ")
    assert why in said[1]


def test_gradcheck_of_a_model_that_cannot_be_copied_is_refused(make, monkeypatch):
    from drivetrain.model.nets import Mlp

    def refuse(self, memo):
        raise TypeError("no copies")

    monkeypatch.setattr(Mlp, "__deepcopy__", refuse, raising=False)
    with pytest.raises(UserError, match="copying fails: no copies"):
        make("debug=gradcheck")


# --- sync ---


SYNC = ["debug=host_sync", "updates=5", "epochs=9", "log_every=1"]


@pytest.mark.parametrize(
    "beside",
    [[], ["optimizer=adamw", "optimizer.foreach=true"], ["optimizer=adamw", "optimizer.fused=false", "optimizer.foreach=false"],
     ["precision=bf16", "ema=ema", "clip=norm"], ["batch=accumulate", "batch.accumulation_steps=2", "scheduler=cosine"],
     ["model=resnet9", "model.width=4", "checkpointing=blocks", "surgery=[channels_last]"], ["precision=bf16_pure"]],
    ids=str,
)  # fmt: skip
def test_a_step_of_ours_waits_for_nothing(train, beside):
    """Also where the loss is logged, the model evaluated and the state saved at every turn: those are read on purpose."""
    result = train(*SYNC, *beside, "saving.every_updates=1")
    assert report(result) == ["debug=host_sync: no hidden host synchronisation in 4 updates"]


@pytest.mark.parametrize(
    ("middle", "found"),
    [
        ("item", [("# in the forward", "forward: Tensor.item")]),
        ("mask", [("# by a mask", "forward: index by a mask"), ("# in an if", "forward: Tensor.__bool__")]),
        ("peek", [("# in the backward", "backward: Tensor.tolist")]),
    ],
)
@pytest.mark.parametrize("steps", [1, 2])
def test_sync_names_the_line_and_counts_once_a_call(train, planted, middle, found, steps):
    result = train(*SYNC, *planted(middle), "batch=accumulate", f"batch.accumulation_steps={steps}")
    head, *lines = report(result)
    assert head == f"debug=host_sync: {len(found)} hidden host synchronisations in 4 updates, the most frequent first"
    assert sorted(lines) == sorted(f"  planted_faults.py:{line_of(mark)} in {what}, {4 * steps} times" for mark, what in found)


def test_sync_tells_of_the_one_read_that_loss_scaling_needs(train):
    result = train(*SYNC, "precision=amp", "precision.init_scale=8.0", "optimizer.fused=false")  # a fused one reads none
    head, line = report(result)
    assert head.startswith("debug=host_sync: 1 hidden")
    assert re.fullmatch(r"  \S*precision/base\.py:\d+ in \S+: Tensor\.__float__, 4 times", line)


def test_sync_on_cuda_listens_to_torchs_warnings(make, planted, monkeypatch):
    """On a machine without CUDA: the same warnings, raised by hand."""
    modes = []
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    trainer = make(*planted("right"), "updates=3", "saving=none")
    trainer.progress.evaluated = 3  # the steps alone
    middle = trainer.model.middle

    def waits(x):
        for _ in range(2):
            warnings.warn("called a synchronizing CUDA operation (Triggered internally)", UserWarning, stacklevel=1)
        warnings.warn("Synchronization debug mode is a prototype feature", UserWarning, stacklevel=1)
        warnings.warn("something else", UserWarning, stacklevel=1)
        return x

    monkeypatch.setattr(middle, "forward", waits)
    monkeypatch.setattr("drivetrain.debug.host_sync.HostSync._detection", lambda self: self._cuda_detection())
    option = HostSync(skip=1).build(make.contexts[-1])
    trainer.stream_watchers += option.stream_watchers()
    with pytest.warns(UserWarning, match="operation|mode|else") as heard:
        trainer.fit()
    line = waits.__code__.co_firstlineno + 2
    assert [str(w.message).split()[0] for w in heard] == [
        "called",
        "called",
        "Synchronization",
        "something",
        "something",
        "something",
    ]
    head, place = option.report()
    assert head.startswith("debug=host_sync: 1 hidden host synchronisations in 2 updates")
    assert place.endswith(f"test_options.py:{line} in waits: waits for the device, 4 times")
    assert modes == ["warn", "default"] * 2


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_sync_on_cuda(train, planted):
    assert report(train(*SYNC)) == ["debug=host_sync: no hidden host synchronisation in 4 updates"]
    _, *lines = report(train(*SYNC, *planted("item")))
    assert any(f"planted_faults.py:{line_of('# in the forward')} in forward" in line for line in lines)


def test_sync_of_a_run_shorter_than_its_start_says_so(train):
    assert report(train("debug=host_sync", "debug.skip=2")) == [
        "debug=host_sync watched no update: the run was over after debug.skip=2"
    ]


# --- overfit ---


def test_overfit_trains_and_evaluates_on_one_batch(make):
    trainer = make(
        "debug=overfit", "debug.updates=9", "updates=null", "epochs=9", "batch=accumulate", "batch.accumulation_steps=2"
    )
    seen, tested = [], []
    trainer.model.register_forward_hook(lambda m, args, _: (seen if m.training else tested).append(args[0].clone()))
    trainer.fit()
    assert trainer.progress.updates == 9
    assert trainer.progress.epoch == 2  # of four updates each, though all on one batch
    assert len(seen) == 18
    assert all(torch.equal(x, seen[i % 2]) for i, x in enumerate(seen))
    batch = {tuple(row.flatten().tolist()) for x in seen[:2] for row in x}
    assert len(batch) == 12
    for at in range(0, len(tested), 2):
        assert {tuple(row.flatten().tolist()) for x in tested[at : at + 2] for row in x} == batch


@pytest.mark.parametrize(
    "beside",
    [
        [],
        *(
            pytest.param(w, marks=pytest.mark.slow)
            for w in (["parallel=ddp"], ["precision=bf16_pure"], ["loader=workers", "data=digits"])
        ),
    ],
    ids=str,
)
def test_overfit_says_that_a_good_model_can_learn(train, beside):
    words = ["debug=overfit", "debug.updates=60", "updates=null", "epochs=99", "optimizer.lr=0.2", "batch.global_batch=8"]
    result = train(*words, *beside)
    assert result.judged("final")["loss"] < 0.1
    (line,) = report(result)
    assert line.startswith(f"debug=overfit: after {result.updates} updates on one batch of 8 the loss is ")
    assert line.endswith("below 0.1: model, loss and optimizer can learn")


def test_overfit_says_that_a_broken_model_cannot(train, planted):
    result = train("debug=overfit", "debug.updates=60", "updates=null", "epochs=99", *planted("right", "Cut"), updates=60)
    assert result.judged("final")["loss"] > 0.5
    assert "not below 0.1: something is broken" in report(result)[0]


def test_what_an_option_leaves_out_is_said(make, tiny):
    words = ["debug=overfit", "model=resnet9", "model.width=4", "augment=[flip_crop]"]
    assert make(*words).train_data.steps == ()
    said = launcher.prepare(tiny(*words, "ema=ema")).notices
    assert any("debug=overfit leaves augment=[flip_crop] out" in line for line in said)
    assert any("not at those of ema=ema" in line for line in said)
    said = launcher.prepare(tiny("debug=gradcheck", "compile=inductor")).notices
    assert any("debug=gradcheck checks the plain model, not what compile=inductor makes of it" in line for line in said)


# --- anomaly ---


@pytest.mark.parametrize(
    ("words", "says"),
    [
        *(
            (f"debug={option} {wrong}", f"^{wrong}")
            for option, wrong in (
                ("profile", "debug.window=0"), ("profile", "debug.skip=-1"), ("gradcheck", "debug.samples=0"),
                ("gradcheck", "debug.eps=0"), ("host_sync", "debug.skip=-1"), ("overfit", "debug.updates=0"),
                ("overfit", "debug.target=0"), ("nvtx", "debug.window=0"), ("fast", "debug.updates=0"),
                ("anomaly", "debug.check_nan=1"),
            )
        ),
        ("debug=nvtx runtime.device=cpu", "runtime.device=cpu has none: set debug=profile"),
        ("debug=nvtx", "debug=nvtx needs a CUDA device"),
        ("debug=nvtx runtime.device=cpu debug.shapes=true debug.operations=false", "debug.shapes=true describes operations"),
        *((f"debug=gradcheck precision={p}", f"precision={p} is too coarse .*: set precision=fp32") for p in NARROW),
        ("debug=host_sync compile=inductor runtime.device=cpu", "compile=inductor makes none: set compile=none"),
        ("debug=anomaly precision=amp", "^debug=anomaly .*precision=amp makes some .*debug.check_nan=false"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(problems, words, says, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert any(re.search(says, problem) for problem in problems(*words.split()))


def test_anomaly_that_looks_for_no_nan_goes_with_loss_scaling(tiny):
    assert not launcher.prepare(tiny("debug=anomaly", "precision=amp", "debug.check_nan=false")).notices


# --- debugging aids: nothing of them in a plain run, and each finds what it is for ---


def test_anomaly_names_the_line_that_made_a_nan(train, planted):
    show = warnings.showwarning
    result = train(*planted("root"), "debug=anomaly", ends="failed")
    assert warnings.showwarning is show
    found = (result.run_dir / "debug.txt").read_text()
    line = line_of("sqrt has an infinite slope")
    assert re.search(r"planted_faults\.py.*\n.*return x \+ torch\.sqrt\(x \* 0\)", found)  # the forward, as torch tells it
    made = rf"debug=anomaly: made in .*planted_faults\.py\", line {line}, in forward: return x \+ torch"
    assert re.search(made, found.splitlines()[-1])
    assert "'MulBackward0' returned nan values" in result.error
    assert not torch.is_anomaly_enabled()  # the process may train another run
    assert "Backward" not in train(*planted("root"), ends="diverged").error
    train(*planted("root"), "debug=anomaly", "debug.check_nan=false", ends="diverged")


def test_anomaly_is_on_while_training_and_changes_no_number(make):
    plain, watched = make(), make("debug=anomaly")
    assert torch.is_anomaly_enabled()
    watched.fit()
    torch.autograd.set_detect_anomaly(False)
    plain.fit()
    losses = [[r["loss"] for r in t.log.writers[0]] for t in (plain, watched)]
    assert losses[0] == losses[1]
    assert len(losses[0]) == 3


def test_an_eager_run_imports_neither_the_compiler_nor_torchmetrics(tiny, tmp_path):
    """They cost seconds of every start."""
    code = f"""
import sys, drivetrain
result = drivetrain.train({tiny("metrics=[confusion_matrix,f1]")!r})
print("done", result.status, result.updates, [name in sys.modules for name in ("torch", "torch._dynamo", "timm", "torchmetrics")])
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False, env={"PYTHONPATH": str(SOURCE)}
    )
    assert "done completed 2 [True, False, False, False]" in done.stdout, done.stdout + done.stderr


def test_fast_walks_the_whole_path_in_a_few_updates(make):
    trainer = make("debug=fast", "debug.updates=3", "debug.eval_batches=1", "updates=null")
    seen = []
    trainer.model.register_forward_hook(lambda m, i, o: None if m.training else seen.append(len(o)))
    trainer.fit()
    assert trainer.progress.updates == 3
    assert seen == [12]
    assert [r["event"] for r in trainer.log.writers[0]] == ["train"] * 3 + ["evaluate"]
