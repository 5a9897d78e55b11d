"""Compiling parts, steps and scripts: in effect, equal to the plain run, and refused where it cannot be."""

import os
import subprocess
import sys
import warnings
from collections import Counter
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode

from drivetrain.compile.base import CudaGraph, Inductor, KeptGradients, drop_broken, keep_gradients
from drivetrain.compile.replays import CapturedGraph
from drivetrain.compile.whole_step import WholeStep
from drivetrain.launch.job import prepare
from tests.support import slow
from tests.support.command import tensors

RESNET = ["model=resnet9", "model.width=8", "optimizer.lr=0.01", "updates=3"]
OWN = ["model=own", "trust=[tests]"]
MLP = ["model=mlp", "model.hidden=[16,16]", "updates=5", "epochs=2"]


def assert_close(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor], start: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys() == start.keys()
    for name, value in a.items():
        torch.testing.assert_close(b[name], value, rtol=1e-4, atol=1e-5)
    assert any(not torch.equal(a[name], start[name]) for name in a)


def own_exit(option: Any) -> Any:
    """The option as it is in a run that ends with the process."""
    option._on_exit = ExitStack()
    return option


@pytest.fixture
def compilations(monkeypatch):
    """torch.compile traces as inductor does, and runs what it traced as it is; what it was asked to compile, and how."""
    calls, original = [], torch.compile

    def compile_(what, **settings):
        calls.append((what, settings))
        return original(what, backend="aot_eager", dynamic=settings.get("dynamic"), fullgraph=settings.get("fullgraph", False))

    monkeypatch.setattr("drivetrain.core.lazy.torch.compile", compile_)  # the module that drivetrain's groups see
    yield calls
    torch._dynamo.reset()


# --- regional: the repeated blocks alone ---


def test_regional_compiles_the_blocks_alone(make, compilations, caplog):
    trainer = make(*RESNET, "compile=regional", "compile.block=Residual")
    assert trainer.step.forward is trainer.model
    assert len(compilations) == 2
    assert [type(m).__name__ for m in trainer.model.modules() if "forward" in vars(m)] == ["Residual", "Residual"]
    assert any("2 Residual compiled" in line for line in caplog.messages)


def test_regional_equals_the_plain_run_and_keeps_plain_names(train, make, compilations):
    plain, regional = train(*RESNET), train(*RESNET, "compile=regional")
    assert_close(tensors(plain), tensors(regional), make(*RESNET).model.state_dict())


def test_equal_blocks_share_a_compilation(make, compilations):
    import torch._dynamo.utils as dynamo

    vit = ["model=timm", "model.name=vit_tiny_patch16_224", "data.shape=[3,16,16]", "+model.kwargs.img_size=16"]
    vit += ["+model.kwargs.patch_size=8", "+model.kwargs.depth=4", "+model.kwargs.embed_dim=48"]
    dynamo.counters.clear()
    make(*vit, "compile=regional", "updates=2", "saving=none", "data.test_samples=4").fit()
    assert len(compilations) == 4
    assert dynamo.counters["stats"]["unique_graphs"] < 3


def test_evaluation_is_not_compiled(make, compilations):
    import torch._dynamo.utils as dynamo

    trainer = make(*RESNET, "compile=regional")
    dynamo.counters.clear()
    trainer.evaluator.metrics()
    assert not dynamo.counters["stats"]


# --- step: forward, backward and update as one graph ---


@pytest.mark.parametrize(
    "words",
    [
        ["scheduler=linear", "optimizer.lr=0.2"],  # the rate is a tensor: with a constant in its place the ends would differ
        pytest.param(["optimizer=adamw", "scheduler=cosine", "clip=norm", "clip.max_norm=0.1"], marks=pytest.mark.slow),
        pytest.param(["batch=accumulate", "batch.accumulation_steps=3"], marks=pytest.mark.slow),
        pytest.param(["precision=bf16", "ema=ema"], marks=pytest.mark.slow),
        pytest.param(["precision=bf16_pure", "clip=norm"], marks=pytest.mark.slow),
        ["precision=amp", "clip=norm", "optimizer=adamw", "batch=accumulate", "batch.accumulation_steps=3"],
        pytest.param(["checkpointing=blocks", "model.dropout=0.0"], marks=pytest.mark.slow),
        pytest.param(["checkpointing=selective", "model.dropout=0.0"], marks=pytest.mark.slow),
        pytest.param(["optimizer=lamb", "optimizer.lr=0.01"], marks=pytest.mark.slow),
        pytest.param(["optimizer=lars", "scheduler=linear"], marks=pytest.mark.slow),
    ],
    ids=" ".join,
)
def test_a_step_as_one_graph_is_the_plain_step(train, make, recorded, words):
    plain, step = train(*MLP, *words), train(*MLP, *words, "compile=step")
    assert_close(tensors(plain), tensors(step), make(*MLP, *words).model.state_dict())
    assert recorded, "it was recorded"
    assert step.compile_s is not None


VIT = ["model=timm", "model.name=vit_tiny_patch16_224", "data.shape=[3,16,16]", "+model.kwargs.img_size=16"]
VIT += ["+model.kwargs.patch_size=8", "+model.kwargs.depth=2", "+model.kwargs.embed_dim=48", "data.test_samples=4", "saving=none"]


@pytest.mark.parametrize("policy", slow.but("products".__eq__, ["products", "half", "attention"]))
def test_a_recorded_step_recomputes_what_the_policy_does_not_keep(fitted, recorded, policy):
    """With dropout everywhere: what is recomputed draws nothing again, so that all weights are those without, bit for bit."""
    words = [*VIT, "+model.kwargs.proj_drop_rate=0.2", "+model.kwargs.attn_drop_rate=0.2", "updates=3", "compile=step"]
    selecting = ["selective", "checkpointing.min_depth=1", f"checkpointing.policy={policy}"]
    options = [[f"checkpointing={option}", *more] for option, *more in (["none"], ["blocks"], selecting)]
    ends = [fitted(*words, *option).model.state_dict() for option in options]
    none, blocks, selective = (Counter(str(node.target) for node in graph.graph.nodes) for graph in recorded)
    kept = {"products": none["aten.addmm.default"], "attention": blocks["aten.addmm.default"]}
    if policy == "half":
        assert none["aten.addmm.default"] < selective["aten.addmm.default"] < blocks["aten.addmm.default"]
    else:
        assert selective["aten.addmm.default"] == kept[policy]
    assert none["aten.addmm.default"] < blocks["aten.addmm.default"]
    assert none["aten.gelu.default"] < selective["aten.gelu.default"] == blocks["aten.gelu.default"]
    for state in ends[1:]:
        assert all(torch.equal(value, state[name]) for name, value in ends[0].items())


@pytest.mark.slow
def test_the_compiler_leaves_what_is_recomputed_in_the_backward(make):
    """It runs each product of a block twice; where the policy keeps products, once."""
    from torch._inductor.utils import run_and_get_code

    products = {}
    for option in ("none", "blocks", "selective"):
        words = [] if option != "selective" else ["checkpointing.min_depth=1"]
        trainer = make(*VIT, "updates=3", "epochs=2", "compile=step", f"checkpointing={option}", *words)
        _, code = run_and_get_code(trainer.fit)
        products[option] = sum(source.count("addmm(") for source in code)
    assert 0 < products["none"] == products["selective"] < products["blocks"]


@pytest.mark.parametrize("optimizer", slow.but("adamw".__eq__, ["sgd", "adamw", "muon", "lamb"]))
def test_an_overflow_within_the_graph_moves_nothing_but_the_scale(make, recorded, optimizer):
    """The scale doubles after each update, until it overflows. The graph decides on the device whether an update counts."""
    words = [*MLP, "precision=amp", f"precision.init_scale={2.0**13}", "precision.growth_interval=1", "epochs=9", "updates=8"]
    words += [f"optimizer={optimizer}", "optimizer.lr=0.01", "ema=ema", "scheduler=linear", "clip=norm", "saving=none"]
    plain, step = make(*words), make(*words, "compile=step")
    for trainer in (plain, step):
        trainer.fit()
    assert len(recorded) == 1
    assert step.progress.skipped == plain.progress.skipped > 0
    assert step.precision.scaler.get_scale() == plain.precision.scaler.get_scale()
    for a, b in zip(plain.ema.state_dict()["tensors"].values(), step.ema.state_dict()["tensors"].values(), strict=True):
        torch.testing.assert_close(b, a, rtol=1e-3, atol=1e-4)


def test_the_graph_holds_forward_backward_and_update(make, recorded):
    """After the recording no operation of the model or the optimizer runs outside the graph."""
    trainer = make(*MLP, "compile=step", "optimizer=adamw", "saving=none")
    forwards = []
    trainer.model.register_forward_pre_hook(lambda m, *_: forwards.append(torch.is_grad_enabled()))
    trainer.fit()
    assert sum(forwards) == 2, "op by op, and recorded"
    assert len(recorded) == 1
    names = [str(node.target) for node in recorded[0].graph.nodes]
    assert any("addmm" in n for n in names)
    assert any("threshold_backward" in n or "relu" in n for n in names)
    assert any("sqrt" in n for n in names), "AdamW's update is in it"


@pytest.mark.slow
def test_a_steps_code_is_kept_for_the_next_run(train, tmp_path):
    from torch._dynamo.utils import counters

    found = []
    for _ in range(2):
        counters.clear()
        tensors(train(*MLP, "compile=step", f"compile.cache_dir={tmp_path}"))
        found.append({name: counters["inductor"][f"fxgraph_cache_{name}"] for name in ("miss", "hit", "bypass")})
    assert found == [{"miss": 1, "hit": 0, "bypass": 0}, {"miss": 0, "hit": 1, "bypass": 0}]


class Reads(nn.Module):
    """A model that reads a value back in its forward."""

    def __init__(self, shape, classes):
        super().__init__()
        self.head = nn.Linear(shape[0] * shape[1] * shape[2], classes)

    def forward(self, x):
        out = self.head(x.flatten(1))
        return out if float(out.sum()) > 1e9 else out * 1.0


def test_the_compiler_does_not_advise_to_round_what_the_precision_keeps():
    """As torch 2.11 warns on a device that has TensorFloat-32, whatever precision was asked for."""
    advice = "TensorFloat32 tensor cores for float32 matrix multiplication available but not enabled."
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        warnings.warn(advice, stacklevel=1)
        own_exit(Inductor()).prepare(1.0)
        warnings.warn(advice, stacklevel=1)
        warnings.warn("another", stacklevel=1)
    assert [str(each.message) for each in said] == [advice, "another"]


def test_a_step_without_its_graph_keeps_counters_where_torchs_foreach_reads_them():
    """On the CPU: read from a device, they would hold up the host once for each parameter of each update."""
    with FakeTensorMode():
        model = torch.nn.Linear(4, 4, device="cuda:0")
        optimizer = torch.optim.AdamW(model.parameters(), foreach=True)

        def devices():
            return {state["step"].device.type for state in optimizer.state.values()}

        step = WholeStep(Eager(), model, optimizer, lambda: model, cudagraph=False)
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()
        assert devices() == {"cpu"}
        step._start_graphs(list(model.parameters()))
        assert devices() == {"cuda"}
        step._give_up("as a test wants")
        assert devices() == {"cpu"}


class Eager:
    def with_forward(self, forward):
        return self


def test_a_step_that_cannot_be_a_graph_says_why_and_goes_on(train, recorded, compilations):
    words = [*OWN, "model.target=tests.compile.test_options.Reads", "updates=5", "epochs=2"]
    plain, step = train(*words), train(*words, "compile=step")
    assert_close(tensors(plain), tensors(step), {k: v * 0 for k, v in tensors(plain).items()})
    remarks = [line for line in (step.run_dir / "log.txt").read_text().splitlines() if "compile=step" in line]
    assert len(remarks) == 1
    assert "cannot be one graph" in remarks[0]
    assert "compile=inductor" in remarks[0]


@pytest.mark.slow
@pytest.mark.parametrize("option", ["inductor", "regional", "step"])
def test_inductor_itself_trains_the_same(train, option):
    words = ["model=resnet9", "model.width=8", "optimizer.lr=0.01", "updates=6", "epochs=2"]
    plain, compiled = train(*words), train(*words, f"compile={option}")
    assert compiled.compile_s > 0
    a, b = tensors(plain), tensors(compiled)
    assert all(torch.allclose(b[name].float(), a[name].float(), rtol=1e-3, atol=1e-4) for name in a)


# --- step on CUDA: the graph is captured, and replayed by one launch ---


class SimulatedCuda:
    """Stands in for torch.cuda's graphs: a replay computes what was captured; a capture may fail."""

    def __init__(self, monkeypatch, error: str = "") -> None:
        self.captures, self.replays, self.error, self.stream = [], 0, error, "main"
        monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: self)
        monkeypatch.setattr(torch.cuda, "graph", self.capture)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: self.stream)
        monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: setattr(self, "stream", stream))
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "default_generators", (self,))
        self.random_state = "before"

    def clone_state(self) -> str:
        return f"a copy of the state {self.random_state}"

    def graphsafe_set_state(self, state: str) -> None:
        self.random_state = state

    @contextmanager
    def capture(self, graph, **settings):
        self.captures.append(settings)
        self.stream, self.random_state = "capture", "in a capture"
        yield
        if self.error:  # as in releases of torch that leave the capture's stream current
            raise RuntimeError(self.error)
        self.stream = "main"

    def replay(self) -> None:
        self.replays += 1
        self.compute()


def test_a_graph_is_captured_at_its_second_call_and_replayed(monkeypatch):
    cuda, total = SimulatedCuda(monkeypatch), torch.zeros(())

    calls = []
    for size in (2, 3):  # one for each shape of a micro-batch
        x = torch.zeros(size)

        def run(x=x):
            calls.append(len(x))
            return total.copy_(x.sum())

        graph, cuda.compute = CapturedGraph(run, "pool"), lambda x=x: total.copy_(x.sum())
        for i in range(4):
            x.fill_(float(i))
            assert float(graph()) == size * i
    assert calls == [2, 2, 3, 3], "once to load the kernels, once captured"
    assert cuda.replays == 6
    assert cuda.captures == [{"pool": "pool", "capture_error_mode": "thread_local"}] * 2


def test_a_step_that_cuda_cannot_capture_goes_on_without(monkeypatch, caplog):
    cuda = SimulatedCuda(monkeypatch, error="operation not permitted when stream is capturing")
    numbers = iter(range(9))
    graph = CapturedGraph(lambda: next(numbers), "pool")
    assert [graph() for _ in range(4)] == [0, 2, 3, 4], "the second call was to be captured, and computed nothing"
    assert (cuda.replays, len(cuda.captures), cuda.stream) == (0, 1, "main")
    assert cuda.random_state == "a copy of the state in a capture", "torch lets no generator draw whose capture has failed"
    (line,) = caplog.messages
    assert "no CUDA graph" in line
    assert "not permitted" in line


# --- jit, cudagraph, and what is refused ---


def test_cudagraph_is_torchs_mode_that_keeps_the_parameters_in_place(monkeypatch):
    """torch's backend "cudagraphs" takes parameters for inputs that change, and copies them before each replay."""
    asked = []
    monkeypatch.setattr("drivetrain.core.lazy.torch.compile", lambda model, **settings: asked.append(settings))
    own_exit(CudaGraph(fullgraph=True)).apply(nn.Linear(2, 2), torch.zeros(2, 2), 1.0)
    assert asked == [{"mode": "reduce-overhead", "dynamic": False, "fullgraph": True}]


class Replayed(torch.autograd.Function):
    """A product whose weight gets its gradient in memory that each backward writes anew, as the replay of a CUDA graph does."""

    memory: ClassVar[dict] = {}

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight.T

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        memory = Replayed.memory.setdefault(weight.data_ptr(), torch.empty_like(weight)).copy_(grad.T @ x)
        fresh = torch.empty(0).set_(memory.untyped_storage(), 0, memory.shape, memory.stride())  # a replay gives new tensors
        return grad @ weight, fresh


@pytest.mark.parametrize("zero_grad", ["none", "memset"])
def test_gradients_in_a_graphs_memory_are_kept_until_the_update(zero_grad):
    @dataclass
    class Backward:
        weights: list

        def micro_batch(self, batch, loss_sum):
            h = batch
            for weight in self.weights:
                h = product(h, weight).tanh()
            h.sum().backward()

        def zero_grad(self):
            for weight in self.weights:
                weight.grad = None if zero_grad == "none" else weight.grad.zero_()

    def gradients(wrapped):
        torch.manual_seed(0)
        step = Backward([nn.Parameter(torch.randn(4, 4)) for _ in range(2)])
        step, parameters = (KeptGradients(step, step.weights) if wrapped else step), step.weights
        found = []
        for _ in range(3):  # updates
            for _ in range(3):  # micro-batches
                step.micro_batch(torch.randn(5, 4), None)
            found += [p.grad.clone() for p in parameters]
            step.zero_grad()
        return found

    product = torch.nn.functional.linear
    plain = gradients(False)
    product = Replayed.apply
    assert all(map(torch.equal, gradients(True), plain))
    assert not all(map(torch.equal, gradients(False), plain)), "the test is to have what it guards against"


def test_a_cuda_graph_keeps_gradients_that_are_added_up():
    def kept(kind, steps, zero_grad):
        run = SimpleNamespace(batch=SimpleNamespace(accumulation_steps=steps), runtime=SimpleNamespace(zero_grad=zero_grad))
        context = SimpleNamespace(run=run, device=torch.device(kind), model=nn.Linear(2, 2))
        return isinstance(keep_gradients(object(), context), KeptGradients)

    assert kept("cuda", 2, "none")
    assert kept("cuda", 1, "memset")
    assert not kept("cuda", 1, "none"), "the update has read the gradients before the next replay"
    assert not kept("cpu", 2, "none")


@pytest.mark.parametrize("method", ["trace", "script"])
def test_jit_is_torchscript_and_trains_the_same(train, make, method):
    words = [*MLP, "compile=jit", f"compile.method={method}"]
    trainer = make(*words)
    assert isinstance(trainer.step.forward, torch.jit.ScriptModule)
    assert not isinstance(trainer.model, torch.jit.ScriptModule)
    assert_close(tensors(train(*MLP)), tensors(train(*words)), make(*MLP).model.state_dict())


def test_tracing_leaves_statistics_and_random_streams_alone(make):
    plain, traced = make(*RESNET), make(*RESNET, "compile=jit")
    for name, value in plain.model.state_dict().items():
        assert torch.equal(value, traced.model.state_dict()[name]), name


def test_jit_says_that_it_is_retired(tiny):
    assert any("retired" in line and "compile=inductor" in line for line in prepare(tiny("compile=jit")).notices)


def test_a_model_that_cannot_be_scripted_is_refused(make):
    with pytest.raises(ValueError, match=r"compile=jit cannot script .*compile.method=trace"):
        make(
            "model=own",
            "model.target=tests.compile.test_options.Untyped",
            "trust=[tests]",
            "compile=jit",
            "compile.method=script",
        )


class Untyped(Reads):
    """A model that TorchScript cannot read."""

    def forward(self, x):
        return self.head(x.flatten(1)) + dict.fromkeys(vars(self), 0.0).get("none", 0.0)


def test_what_cannot_be_is_refused_at_once(problems, monkeypatch):
    for words, names in (
        (["compile=cudagraph"], ("compile=cudagraph", "CUDA")),
        (["compile=cudagraph", "runtime.device=cpu"], ("runtime.device=cpu", "compile=inductor")),
        (["compile=cudagraph", "batch=accumulate", "parallel=ddp"], ("compile=cudagraph", "batch=accumulate", "parallel=ddp")),
        (["compile=step", "precision=bf16_pure", "precision.master=stochastic"], ("compile=step", "precision.master=fp32")),
        (["compile=inductor", "compile.mode=reduce-overhead", "parallel=fsdp"], ("compile=inductor", "CUDA graphs", "fsdp")),
        (["compile=inductor", "compile.mode=max-autotune", "parallel=fsdp"], ("compile=inductor", "CUDA graphs", "fsdp")),
        (["compile=step", "parallel=fsdp"], ("compile=step", "parallel=fsdp")),
        (["compile=step", "optimizer=adamw", "optimizer.fused=true"], ("optimizer.fused=true", "compile=step")),
        (["compile=inductor", "compile.mode=reduce-overhead", "runtime.device=cpu"], ("compile.mode=reduce-overhead", "cpu")),
        (["compile=jit", "debug=anomaly"], ("compile=jit", "debug=anomaly")),
        (["compile=inductor", "debug=anomaly"], ("compile=inductor and debug=anomaly exclude each other",)),
        (["compile=inductor", "compile.mode=fastest"], ("compile.mode=fastest",)),
    ):
        said = " ".join(problems(*words))
        assert all(name in said for name in names), said
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert any("compile=inductor needs a C++ compiler" in p for p in problems("compile=inductor"))


def test_kernels_are_kept_where_asked(make, tmp_path, compilations):
    make("compile=inductor", f"compile.cache_dir={tmp_path / 'kernels'}")
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "kernels")


# --- compiling: what is handed to torch, that names stay plain, and that results stay what they were ---


def test_the_settings_reach_torch(make, compilations):
    make("compile=inductor", "compile.mode=max-autotune", "compile.dynamic=false", "compile.fullgraph=true")
    assert [settings for _, settings in compilations] == [{"mode": "max-autotune", "dynamic": False, "fullgraph": True}]


@pytest.mark.slow
def test_a_traced_step_equals_the_plain_one_and_saves_plain_names(train, make, compilations):
    words = ["model=resnet9", "model.width=8", "checkpointing=blocks", "updates=3", "optimizer.lr=0.01"]
    plain, traced = train(*words), train(*words, "compile=inductor", "compile.fullgraph=true")
    assert len(compilations) == 1
    b = tensors(traced)
    assert_close(tensors(plain), b, make(*words).model.state_dict())
    assert b["features.3.body.0.1.num_batches_tracked"] == 3  # once a batch: recomputation does not count
    assert plain.compile_s is None
    assert traced.compile_s is not None


def test_one_graph_serves_the_whole_run(make, compilations):
    """Shapes hold still while training, and evaluation does not go through it: nothing is compiled again."""
    import torch._dynamo.utils as dynamo

    dynamo.counters.clear()
    make("compile=inductor", "updates=8", "epochs=4", "scheduler=cosine", "ema=ema").fit()
    assert dynamo.counters["stats"]["unique_graphs"] == 1
    assert not dynamo.counters["graph_break"]


def test_what_a_killed_linker_left_is_not_loaded(tmp_path):
    """A truncated shared object in the kept cache would fail every later run; whole ones and fresh ones stay."""
    whole = Path(torch._C.__file__).read_bytes()
    left = {"whole": whole, "cut": whole[:1000], "head": whole[:40], "blank": bytes(len(whole)), "empty": b"", "fresh": b""}
    (tmp_path / "kernels").mkdir()
    for name, content in left.items():
        file = tmp_path / f"kernels/{name}.so"
        file.write_bytes(content)
        os.utime(file, None if name == "fresh" else (0, 0))
    assert {file.stem for file in drop_broken(tmp_path)} == {"cut", "head", "blank", "empty"}
    assert {file.stem for file in tmp_path.rglob("*.so")} == {"whole", "fresh"}


@pytest.mark.slow
def test_a_cache_full_of_truncated_kernels_is_built_anew(tiny, tmp_path):
    run = [sys.executable, "-m", "drivetrain", "train", *tiny("compile=inductor", f"compile.cache_dir={tmp_path}/cache")]
    subprocess.run(run, check=True)
    kernels = list((tmp_path / "cache").rglob("*.so"))
    assert kernels
    for file in kernels:
        file.write_bytes(file.read_bytes()[:200])
        os.utime(file, (0, 0))
    subprocess.run(run, check=True)


def test_a_layout_that_torchs_compiler_foresaw_wrongly_is_advised_upon():
    """As an H100 and an H200 said it with torch 2.11, for the default network's maps of one pixel."""
    wrong = "expected size 128==128, stride 9==1 at dim=1\nError in op: torch.ops.aten.convolution_backward.default"
    assert "surgery=[channels_last]" in Inductor().advice(AssertionError(wrong))
    assert Inductor().advice(AssertionError("another")) == ""
