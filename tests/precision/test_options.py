"""TF32, bfloat16 throughout, float8, and what AMP costs: in effect, undone afterwards, exact after a resume."""

import importlib.util
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch.utils._pytree import tree_leaves

import drivetrain
from drivetrain.config.catalog import options
from drivetrain.core.errors import Diverged, UserError
from drivetrain.core.machine import accelerators
from drivetrain.core.machine.accelerators import Accelerator
from drivetrain.core.step.step import LateAnswer
from drivetrain.core.world import World
from drivetrain.debug.torch_modes import waiting_calls
from drivetrain.launch import launcher
from drivetrain.model.nets import Mlp
from drivetrain.precision import Precision, base
from drivetrain.precision.base import Amp, Fp8
from drivetrain.precision.bf16_pure import Bf16Pure
from drivetrain.saving import checkpoint_io
from tests.support import slow
from tests.support.context import context
from tests.support.to_end import continued

PURE = {"fp32 masters": "precision.master=fp32", "stochastic": "precision.master=stochastic"}
masters = pytest.mark.parametrize("master", PURE.values(), ids=PURE)
fp8 = pytest.mark.skipif(not importlib.util.find_spec("torchao"), reason="needs torchao")

FP8 = ["precision=fp8", "precision.emulate=true", "model.hidden=[128,128]", "batch.global_batch=12"]
ALL = {
    "fp32": ["precision=fp32"],
    "tf32": ["precision=tf32"],
    "amp": ["precision=amp", "precision.growth_interval=2"],
    "bf16": ["precision=bf16"],
    "bf16_pure, masters": ["precision=bf16_pure"],
    "bf16_pure, stochastic": ["precision=bf16_pure", "precision.master=stochastic"],
    "fp8": FP8,
}


def traced_types(trainer, tmp_path, names=("aten::addmm", "aten::mm", "aten::mkldnn_convolution", "aten::convolution_backward")):
    """The element types that these operations work on while the trainer fits, without its evaluation."""
    trainer.evaluator.max_batches = 0
    trainer.progress.evaluated = trainer.max_updates
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profile:
        trainer.fit()
    profile.export_chrome_trace(str(tmp_path / "trace.json"))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    seen = [e["args"]["Input type"] for e in events if e.get("name") in names and "args" in e]
    return {kind for types in seen for kind in types if kind not in ("", "Scalar", "ScalarList", "GenericList", "Int", "bool")}


# --- every precision ---


def test_the_process_is_as_it_was_also_after_a_run_that_failed(train, monkeypatch):
    monkeypatch.setattr("drivetrain.loss.classification.CrossEntropy.__call__", lambda *_: 1 / 0)
    for words in (ALL["tf32"], ALL["bf16"]):
        train(*words, ends="failed")
        assert not torch.is_autocast_enabled("cpu")
        assert torch.get_float32_matmul_precision() == "highest"


def test_a_loss_that_is_no_mean_is_refused_by_its_shape(train, monkeypatch):
    monkeypatch.setattr("drivetrain.loss.classification.CrossEntropy.__call__", lambda _, output, target: output.logsumexp(1))
    for words in (ALL["fp32"], ALL["amp"]):
        with pytest.raises(UserError, match=r"has the shape \(12,\): return its mean"):
            train(*words)


def test_a_run_may_go_on_in_any_other_precision(tiny, tmp_path):
    part = drivetrain.train(tiny("model.hidden=[128,128]", "updates=2", "epochs=9"))
    for name, words in ALL.items():
        if name != "fp8" or importlib.util.find_spec("torchao"):
            run_dir = shutil.copytree(part.run_dir, tmp_path / name)
            continued(run_dir, *words, "updates=4", "resume_changed=true", updates=4)


# --- tf32 ---


def test_tf32_sets_what_torch_looks_at(make):
    make("precision=tf32", "precision.cudnn=false")
    assert torch.get_float32_matmul_precision() == "high"
    assert torch.backends.cudnn.allow_tf32 is False
    make("precision=tf32", "precision.matmul=medium")
    assert torch.get_float32_matmul_precision() == "medium"
    assert torch.backends.cudnn.allow_tf32 is True


def test_tf32_says_where_it_does_nothing(make, caplog, monkeypatch):
    for rounded, remarks in ((True, 0), (False, 1)):
        monkeypatch.setattr(base, "are_rounded", lambda device, rounded=rounded: rounded)
        caplog.clear()
        make("precision=tf32")
        assert sum("precision=tf32 rounds nothing on this device" in line for line in caplog.messages) == remarks


def test_rounding_is_measured():
    class InBfloat16(torch.overrides.TorchFunctionMode):
        """A device whose matrix products round their inputs."""

        def __torch_function__(self, func, types, args=(), kwargs=None):
            if func.__name__ in ("matmul", "__matmul__"):
                args = [a.bfloat16().float() for a in args]
            return func(*args, **(kwargs or {}))

    cpu = torch.device("cpu")
    assert not base.are_rounded(cpu)
    with InBfloat16():
        assert base.are_rounded(cpu)


def test_float32_means_every_product(make):
    """torch's default rounds convolutions to TF32 on CUDA, and a calling program may have set more."""
    torch.set_float32_matmul_precision("medium")
    make("precision=fp32")
    assert torch.get_float32_matmul_precision() == "highest"
    assert torch.backends.cudnn.allow_tf32 is False


def test_what_autocast_leaves_in_float32_is_as_torch_has_it(make):
    make("precision=bf16")
    assert torch.backends.cudnn.allow_tf32 is True


def test_a_program_may_have_used_the_newer_names_of_torch(make):
    """A program that sets fp32_precision: torch's older names can then raise an error where they are read."""
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    torch.backends.cudnn.conv.fp32_precision = "ieee"
    make("precision=fp32")
    assert [torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32] == ["highest", False]


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_tf32_rounds_matrix_products_on_cuda(make):
    make("precision=tf32")
    a = torch.randn(256, 256, device="cuda")
    rounded = a @ a
    make("precision=fp32")
    exact = a @ a
    assert not torch.equal(rounded, exact)
    torch.testing.assert_close(rounded, exact, rtol=1e-2, atol=0.1)


# --- amp ---


def test_amp_is_torchs_own_sequence():
    """Over ten updates, an overflow among them: torch's scaler.step, and ours."""

    def setting():
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 3)
        return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    inputs = torch.randn(10, 5, 4, generator=torch.Generator().manual_seed(1))
    inputs[4] *= 1e38

    model, optimizer = setting()
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=3)
    scales = []
    for x in inputs:
        scaler.scale(model(x).square().mean()).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
        optimizer.zero_grad()

    ours, optimizer = setting()
    precision = Amp(init_scale=256.0, growth_interval=3)
    precision.setup(context())
    reads, stepped = [], []
    for x, scale in zip(inputs, scales, strict=True):
        precision.backward(ours(x).square().mean(), torch.ones(()))
        with waiting_calls(reads.append):
            stepped.append(precision.step(optimizer, lambda: torch.nn.utils.clip_grad_norm_(ours.parameters(), 1.0)))
        assert precision.scaler.get_scale() == scale
        optimizer.zero_grad()
    assert stepped == [True] * 4 + [False] + [True] * 5
    assert len(reads) == 10
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), ours.parameters(), strict=True))


# --- bfloat16 throughout ---


@masters
@pytest.mark.parametrize("model", [["model=mlp"], ["model=resnet9", "model.width=8"]], ids=["mlp", "resnet9"])
def test_everything_computes_in_bfloat16(make, tmp_path, master, model):
    trainer = make("precision=bf16_pure", master, *model)
    convolves = any(isinstance(m, torch.nn.Conv2d) for m in trainer.model.modules())  # in float32 on a CPU
    assert traced_types(trainer, tmp_path) == {"c10::BFloat16", *(["float"] if convolves else [])}
    norms = [m for m in trainer.model.modules() if isinstance(m, torch.nn.BatchNorm2d)]
    in_norms = {id(t) for m in norms for t in [*m.parameters(), *m.buffers()]}
    assert bool(norms) == ("model=resnet9" in model)
    for tensor in [*trainer.model.parameters(), *trainer.model.buffers()]:
        expected = torch.float32 if id(tensor) in in_norms else torch.bfloat16
        assert tensor.dtype == expected or not tensor.is_floating_point()
    assert all(p.grad is None or p.grad.dtype == p.dtype for p in trainer.model.parameters())
    assert trainer.model(torch.randn(2, 3, 8, 8)).dtype == torch.float32  # what the loss is taken of


class OneWeight(torch.nn.Module):
    """A weight of ones, whose gradient is one everywhere."""

    def __init__(self, n: int = 20_000) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(n))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.weight * x).sum()


class Sgd:
    """An option that builds plain SGD."""

    lr = 1e-4

    def build(self, context):
        return torch.optim.SGD(context.model.parameters(), lr=self.lr)


def after_updates(master: str, updates: int):
    precision = Bf16Pure(master)
    precision.setup(context())
    model = precision.convert(OneWeight(), torch.ones(()))
    optimizer = precision.build_optimizer(Sgd(), context(model=model))
    for _ in range(updates):
        precision.backward(model(torch.ones(())), torch.ones(()))
        assert precision.step(optimizer, lambda: None)
        model.weight.grad = None
    return precision, model, optimizer


def test_updates_below_bfloat16s_resolution_add_up():
    assert torch.ones((), dtype=torch.bfloat16) - 1e-4 == 1  # which is why plain bfloat16 would not move at all
    _, model, optimizer = after_updates("fp32", 60)
    (master,) = optimizer.param_groups[0]["params"]
    torch.testing.assert_close(master.detach(), torch.full((20_000,), 1 - 60e-4), rtol=0, atol=1e-5)
    assert torch.equal(model.weight.detach(), master.detach().bfloat16())
    assert not (model.weight == 1).any()
    _, model, _ = after_updates("stochastic", 60)
    assert float(model.weight.detach().double().mean()) == pytest.approx(1 - 60e-4, abs=2e-4)
    assert (model.weight == 1).any()
    assert (model.weight != 1).any()


def test_stochastic_rounding_goes_to_a_neighbour_and_is_right_in_the_mean():
    precision = Bf16Pure("stochastic")
    precision.setup(context())
    values = torch.tensor([1.001, -1.001, 3.14159, 1e-30, -7e20, 0.0, 1.0, 65280.5])
    model = torch.nn.ParameterList([values.repeat_interleave(20_000)])
    precision.convert(model, torch.ones(()))
    precision._round_masters_to_weights()
    rounded = model[0].detach().double().view(len(values), -1)
    exact = values.double()
    down = values.bfloat16()
    assert torch.equal(rounded[5:7].amin(1), exact[5:7])  # what bfloat16 has stays
    assert torch.equal(rounded[5:7].amax(1), exact[5:7])
    spacing = 2.0 ** (exact.abs().clamp(min=1e-45).log2().floor() - 7)
    assert ((rounded - exact[:, None]).abs() < spacing[:, None]).all()
    assert all(len(row.unique()) == 2 for row, value in zip(rounded, exact, strict=True) if value not in down.double())
    error = (rounded.mean(1) - exact).abs() / spacing
    assert (error < 0.02).all()  # 20,000 draws: a spread of 0.0035


@masters
def test_between_updates_only_masters_that_are_kept_take_memory(master):
    precision, model, _ = after_updates(master.partition("=")[2], 2)
    held = precision._flat.untyped_storage().nbytes()
    assert held == (0 if "stochastic" in master else 4 * model.weight.numel())


def test_masters_have_their_weights_strides(make):
    """Fused kernels want parameters, gradients and state alike, and a copy between strides is slow."""
    trainer = make("precision=bf16_pure", "model=resnet9", "model.width=8", "surgery=[channels_last]")
    pairs = list(zip(trainer.precision._parameters, trainer.precision._masters, strict=True))
    assert any(p.ndim == 4 and not p.is_contiguous() for p, _ in pairs)
    assert all(p.stride() == m.stride() and p.shape == m.shape for p, m in pairs)
    trainer.fit()
    assert all(torch.equal(p, m.to(torch.bfloat16)) for p, m in pairs)


@masters
@pytest.mark.parametrize(
    "optimizer",  # those that run an update's forward several times are refused with weights in 16 bits
    slow.but({"sgd", "adamw", "muon", "lamb"}.__contains__, sorted({*options()["optimizer"]} - {"lbfgs", "sam"})),
)
def test_every_optimizer_updates_in_float32(make, master, optimizer):
    if optimizer.startswith("apex"):
        pytest.importorskip("apex")
    trainer = make("precision=bf16_pure", master, f"optimizer={optimizer}", "updates=3")
    before = [p.detach().clone() for p in trainer.model.parameters()]
    trainer.fit()
    updated = [p for group in trainer.optimizer.param_groups for p in group["params"]]
    assert len(updated) == len(before)
    assert {p.dtype for p in updated} == {torch.float32}
    assert not {id(p) for p in updated} & {id(p) for p in trainer.model.parameters()}
    state = torch.utils._pytree.tree_leaves(trainer.optimizer.state_dict())
    assert torch.bfloat16 not in {t.dtype for t in state if isinstance(t, torch.Tensor)}
    assert any(not torch.equal(a, p) for a, p in zip(before, trainer.model.parameters(), strict=True))
    assert all(p.dtype == torch.bfloat16 and p.isfinite().all() for p in trainer.model.parameters())


@masters
def test_weights_to_evaluate_stand_in_the_model_and_those_to_train_come_back(fitted, master):
    trainer = fitted("precision=bf16_pure", master, "optimizer=schedulefree", "optimizer.lr=0.1", "updates=3")
    trained = [p.detach().clone() for p in trainer.model.parameters()]
    y = [state["y"].clone() for state in trainer.optimizer.state_dict()["state"].values()]
    with trainer.evaluator.eval_weights():
        averaged = [p.detach().clone() for p in trainer.model.parameters()]
    assert any(not torch.equal(a, b) for a, b in zip(trained, averaged, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(trained, trainer.model.parameters(), strict=True))
    again = [state["y"] for state in trainer.optimizer.state_dict()["state"].values()]
    assert all(torch.equal(a, b) for a, b in zip(y, again, strict=True))
    order = {id(m): p for m, p in zip(trainer.precision._masters, trainer.precision._parameters, strict=True)}
    updated = [p for group in trainer.optimizer.param_groups for p in group["params"]]
    assert all(torch.equal(order[id(m)], kept.bfloat16()) for m, kept in zip(updated, y, strict=True))


@masters
def test_gradients_are_clipped_in_float32(make, master):
    trainer = make("precision=bf16_pure", master, "clip=norm", "clip.max_norm=0.01")
    clip, seen = trainer.step.clip, []

    def watched():
        clip()
        grads = [p.grad for group in trainer.optimizer.param_groups for p in group["params"]]
        seen.append(({g.dtype for g in grads}, float(torch.cat([g.flatten() for g in grads]).norm())))

    trainer.step = replace(trainer.step, clip=watched)
    trainer.fit()
    assert [kinds for kinds, _ in seen] == [{torch.float32}] * 2
    assert [norm for _, norm in seen] == pytest.approx([0.01] * 2, rel=1e-4)
    assert all(p.grad is None for group in trainer.optimizer.param_groups for p in group["params"])  # not kept beside the model's


@masters
def test_the_average_of_bfloat16_weights_is_float32(make, each_update, master):
    trainer = make("precision=bf16_pure", master, "ema=ema", "ema.decay=0.999", "ema.warmup=false", "updates=4")
    start = [p.detach().double() for p in trainer.model.parameters()]
    seen = each_update(trainer, lambda: [p.detach().double() for p in trainer.model.parameters()])
    trainer.fit()
    average = trainer.ema.state_dict()["tensors"]
    for i, (name, p) in enumerate(trainer.model.named_parameters()):
        expected = start[i]
        for weights in seen:
            expected = 0.999 * expected + 0.001 * weights[i]
        assert average[name].dtype == torch.float32
        torch.testing.assert_close(average[name].double(), expected, rtol=1e-5, atol=1e-7)
        raw = p.detach().clone()
        with trainer.ema.swapped():
            assert torch.equal(p, average[name].bfloat16())
        assert torch.equal(p, raw)
    assert any(not torch.equal(average[n].double(), s) for (n, _), s in zip(trainer.model.named_parameters(), start, strict=True))


def test_ranks_round_alike_and_runs_of_another_seed_do_not(make):
    words = ["precision=bf16_pure", "precision.master=stochastic"]
    ranks = [make(*words, world=World(rank, 2)).precision._generator.get_state() for rank in (0, 1)]
    assert torch.equal(*ranks)
    assert not torch.equal(make(*words, "runtime.seed=1").precision._generator.get_state(), ranks[0])


def test_tied_weights_stay_tied(tiny, fitted, own_module):
    own_module(
        "tied",
        "import torch\n"
        "class Net(torch.nn.Module):\n"
        "    def __init__(self, shape, classes):\n"
        "        super().__init__()\n"
        "        self.a, self.b = torch.nn.Linear(192, 192), torch.nn.Linear(192, 192)\n"
        "        self.b.weight = self.a.weight\n"
        "        self.head = torch.nn.Linear(192, classes)\n"
        "    def forward(self, x):\n"
        "        return self.head(self.b(self.a(x.flatten(1)).relu()))\n",
    )
    trainer = fitted("precision=bf16_pure", "model=own", "model.target=tied.Net", "trust=[tied]")
    assert trainer.model.a.weight is trainer.model.b.weight
    assert len(trainer.precision._masters) == 5
    assert trainer.progress.updates == 2


def test_saved_weights_are_the_models_and_load_into_float32(train):
    result = train("precision=bf16_pure", "model.hidden=[8]")
    weights = safetensors.torch.load_file(Path(result.run_dir) / "checkpoints" / "2" / "model.safetensors")
    assert {w.dtype for w in weights.values()} == {torch.bfloat16}
    plain = Mlp((3, 8, 8), 4, [8], 0.0)
    plain.load_state_dict(weights)
    assert plain.head.weight.dtype == torch.float32
    _, state = checkpoint_io.load(Path(result.run_dir) / "checkpoints" / "2")
    for name, master in state["precision"]["masters"].items():
        assert master.dtype == torch.float32
        assert torch.equal(master.bfloat16(), weights[name])


def test_what_bfloat16_does_to_accumulation_is_said(tiny):
    said = launcher.prepare(tiny("precision=bf16_pure", "batch=accumulate", "batch.accumulation_steps=2")).notices
    assert any(
        "precision=bf16_pure adds up the gradients of 2 micro-batches (batch.accumulation_steps) in bfloat16" in line
        for line in said
    )
    assert not launcher.prepare(tiny("precision=bf16_pure")).notices


# --- fp8 ---


@fp8
def test_fp8_converts_the_layers_that_gain_and_says_so(make, caplog):
    trainer = make(*FP8, "model.hidden=[128,128,100]")
    from torchao.float8.float8_linear import Float8Linear

    converted = [name for name, m in trainer.model.named_modules() if isinstance(m, Float8Linear)]
    assert converted == ["layers.0.linear", "layers.1.linear"]  # 192→128, 128→128; not 128→100, nor the head
    assert any("2 of 4 Linear layers compute in float8" in line for line in caplog.messages)
    plain = make("model.hidden=[128,128,100]")
    plain.model.load_state_dict(trainer.model.state_dict())  # plain names and types
    assert {p.dtype for p in trainer.model.parameters()} == {torch.float32}


@fp8
def test_fp8_steps_close_to_bf16_and_is_not_it(fitted):
    length = ["model.hidden=[128,128]", "updates=3", "optimizer.lr=0.01"]
    reference = fitted("precision=bf16", *length)
    for scaling in ("tensorwise", "rowwise", "rowwise_with_gw_hp"):
        trainer = fitted(*FP8, f"precision.scaling={scaling}", *length)
        assert len(trainer.log.writers[0].losses) == 3
        assert trainer.log.writers[0].losses == pytest.approx(reference.log.writers[0].losses, rel=0.1), scaling
        assert trainer.log.writers[0].losses != reference.log.writers[0].losses, scaling


@fp8
def test_fp8_products_have_float8s_few_values(make):
    """A layer's output is the product of inputs and weights rounded to 3 bits of mantissa."""
    from torchao.float8.float8_utils import to_fp8_saturated

    trainer = make(*FP8)
    layer, x = trainer.model.layers[0].linear, torch.randn(16, 192)
    with torch.no_grad(), trainer.precision.autocast():
        output = layer(x)

    def rounded(t):
        scale = torch.finfo(torch.float8_e4m3fn).max / t.abs().max()
        return to_fp8_saturated(t * scale, torch.float8_e4m3fn).float() / scale

    expected = rounded(x.to(torch.bfloat16).float()) @ rounded(layer.weight.detach()).T + layer.bias
    torch.testing.assert_close(output.float(), expected, rtol=0.02, atol=0.02)
    assert (output.float() - (x @ layer.weight.T + layer.bias)).abs().max() > 0.02


@fp8
def test_fp8_refuses_a_model_without_a_layer_to_convert(make):
    with pytest.raises(UserError, match=r"finds no Linear layer to convert \(192→64, 64→4, 64→64\).*set precision=bf16"):
        make("precision=fp8", "precision.emulate=true", "model.hidden=[64,64]")
    make("precision=fp8", "precision.emulate=true", "model.hidden=[64,64]", "precision.min_features=64")


@fp8
def test_fp8_says_what_it_wants_beside_it(tiny):
    assert any("compile=inductor fuses them" in line for line in launcher.prepare(tiny("precision=fp8")).notices)
    (said,) = launcher.prepare(tiny("precision=fp8", "precision.emulate=true")).notices
    assert "slower than any other precision" in said


def test_what_cannot_be_is_refused(problems):
    for words in (
        ["precision=tf32", "precision.matmul=lowest"],
        ["precision=bf16_pure", "precision.master=none"],
        ["precision=fp8", "precision.scaling=blockwise"],
        ["precision=fp8", "precision.min_features=0"],
        *(["precision=amp", f"precision.{word}"] for word in ("init_scale=0", "init_scale=big", "growth_interval=0")),
    ):
        assert any(p.startswith(words[1]) for p in problems(*words)), words


def test_stochastic_rounding_resumes_on_another_kind_of_device():
    """The generators of a CPU and of a GPU have states of different sizes."""
    precision = Bf16Pure("stochastic")
    precision.setup(context())
    own = precision.state_dict()["random"]
    precision.load_state_dict({"random": torch.zeros(16, dtype=torch.uint8)})  # a GPU's: a seed and an offset
    assert torch.equal(precision.state_dict()["random"], own)
    precision.load_state_dict({"random": torch.Generator().manual_seed(5).get_state()})
    assert not torch.equal(precision.state_dict()["random"], own)


# --- number formats: truly in effect, close to float32, and an overflow that moves nothing ---


@pytest.mark.parametrize(
    ("precision", "kind"), [("fp32", "float"), ("bf16", "c10::BFloat16"), ("amp", "c10::Half")], ids=["fp32", "bf16", "amp"]
)
def test_the_matrix_products_are_in_this_format_forward_and_backward(make, tmp_path, precision, kind):
    trainer = make(f"precision={precision}", "saving=none")
    assert traced_types(trainer, tmp_path) == {kind}
    assert all(p.dtype == torch.float32 for p in trainer.model.parameters())


@pytest.mark.parametrize("model", [["model=mlp"], ["model=resnet9", "model.width=8"]], ids=["mlp", "resnet9"])
def test_sixteen_bits_stay_close_to_float32_and_are_not_it(fitted, model):
    length = [*model, "updates=3", "optimizer.lr=0.001"]  # small, so that rounding is not amplified
    reference = fitted(*length)
    pure = ["precision=bf16_pure", "precision.master=stochastic"]
    for words, away in ((["precision=bf16"], 0.02), (["precision=amp"], 0.003), (pure[:1], 0.03), (pure, 0.03)):
        trainer = fitted(*words, *length)
        assert len(trainer.log.writers[0].losses) == 3
        assert trainer.log.writers[0].losses == pytest.approx(reference.log.writers[0].losses, rel=away), words
        assert trainer.log.writers[0].losses != reference.log.writers[0].losses, words


def test_evaluation_runs_in_the_same_format(make):
    trainer = make("precision=bf16")
    kinds = set()
    trainer.model.head.register_forward_hook(lambda m, i, output: kinds.add(output.dtype))
    trainer.evaluator.metrics()
    assert kinds == {torch.bfloat16}


def snapshot(trainer) -> dict:
    """All that an update may move."""
    return {
        "updates": trainer.progress.updates,
        "weights": [p.detach().clone() for p in trainer.model.parameters()],
        "average": {k: v.clone() for k, v in trainer.ema.state_dict()["tensors"].items()},
        "averaged": trainer.ema.state_dict()["updates"],
    }


def moved(before: dict, after: dict) -> set[str]:
    """The names of what is different."""
    differs = {k for k in ("updates", "averaged") if before[k] != after[k]}
    if any(not torch.equal(a, b) for a, b in zip(before["weights"], after["weights"], strict=True)):
        differs.add("weights")
    if any(not torch.equal(v, after["average"][k]) for k, v in before["average"].items()):
        differs.add("average")
    return differs


OVERFLOW = ["precision=amp", f"precision.init_scale={2.0**24}"]  # gradients of about 0.1 overflow float16 at first


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_an_overflow_moves_nothing_but_the_scale(make, each_update, steps, optimizer):
    trainer = make(
        *OVERFLOW, "updates=3", "epochs=5", "scheduler=cosine", "ema=ema", f"optimizer={optimizer}",
        "batch=accumulate", f"batch.accumulation_steps={steps}",
    )  # fmt: skip
    seen = each_update(trainer, lambda: (snapshot(trainer), trainer.precision.scaler.get_scale()))
    before, scale = snapshot(trainer), trainer.precision.scaler.get_scale()
    trainer.fit()
    skips, counted = 0, []
    for after, new_scale in seen:
        changed = moved(before, after)
        if new_scale < scale:
            skips += 1
            assert not changed
        else:
            assert changed == {"updates", "weights", "average", "averaged"}
        before, scale = after, new_scale
        counted.append(skips)
    assert skips == trainer.progress.skipped > 0
    assert trainer.progress.updates == 3
    assert len(seen) == 3 + skips
    records = [r for r in trainer.log.writers[0] if r["event"] == "train"]
    assert [r["skipped"] for r in records] == counted
    made = [n - skipped for n, skipped in enumerate([0, *counted[:-1]])]  # updates before each
    assert [r["lr"] for r in records] == [
        trainer.scheduler._base[0] * trainer.scheduler.lr_factor(u) for u in made
    ]  # an overflow moves no rate
    assert trainer.progress.samples == 12 * len(seen)  # a skipped update has consumed its samples


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_an_answer_that_comes_late_changes_nothing(make, monkeypatch, optimizer):
    """Fused kernels skip an update themselves, and the host asks at the next one or where something is due."""

    def trained(reads):
        monkeypatch.setattr("drivetrain.precision.base._skips_overflows", (lambda _: False) if reads else skips)
        trainer = make(
            *OVERFLOW, "precision.growth_interval=3", "updates=13", "epochs=9", "scheduler=cosine", "ema=ema", "log_every=5",
            f"optimizer={optimizer}", "batch=accumulate", "batch.accumulation_steps=2", "saving.every_updates=3",
            "saving.keep=99", "optimizer.fused=true",
        )  # fmt: skip
        asked, made = [], LateAnswer.__bool__
        monkeypatch.setattr(LateAnswer, "__bool__", lambda self: asked.append(trainer.progress.window) or made(self))
        trainer.fit()
        monkeypatch.setattr(LateAnswer, "__bool__", made)
        saved = sorted(int(each.name) for each in (trainer.run_dir / "checkpoints").iterdir())
        records = [{k: r.get(k) for k in ("update", "loss", "lr", "skipped")} for r in trainer.log.writers[0]]
        state = snapshot(trainer), trainer.optimizer.state_dict()["state"], trainer.precision.scaler.state_dict()
        shutil.rmtree(trainer.run_dir)
        return saved, records, trainer.progress.state_dict(), flat(state), len(asked)

    def flat(value):
        return torch.cat([t.detach().double().flatten() for t in tree_leaves(value) if isinstance(t, torch.Tensor)])

    skips = base._skips_overflows
    *expected, state, read = trained(True)
    *found, late_state, late = trained(False)
    assert expected == found
    assert found[2]["skipped"] > 3
    assert torch.equal(state, late_state)
    assert (read, late > 8) == (0, True)


def test_an_overflow_at_the_first_update_leaves_no_momentum_behind(make, each_update):
    # deterministic: torch then fills memory that nobody wrote with NaN, which makes what is left behind visible
    trainer = make(*OVERFLOW, "epochs=5", "updates=1", "runtime.deterministic=true", "runtime.cudnn_benchmark=false")
    gradients = each_update(trainer, lambda: [p.grad.clone() for p in trainer.model.parameters()])
    trainer.fit()
    assert trainer.progress.skipped > 0
    assert trainer.progress.updates == 1
    groups = {id(p): group["weight_decay"] for group in trainer.optimizer.param_groups for p in group["params"]}
    for p, grad in zip(trainer.model.parameters(), gradients[-1], strict=True):
        momentum = trainer.optimizer.state[p]["momentum_buffer"]
        assert momentum.isfinite().all()
        if not groups[id(p)]:
            torch.testing.assert_close(momentum, grad)  # the first real gradient and nothing before it


def test_skips_end_a_run_only_in_a_row(make):
    """49, an update, 49 more: the run goes on. The 50th in a row ends it."""
    length = ["epochs=50", "updates=2", "saving=none", "evaluate_every=1000", "model.hidden=[4]"]
    trainer = make("precision=amp", *length)
    skips = [False] * 49 + [True] + [False] * 49 + [True]
    trainer.precision.step = lambda *_: skips.pop(0)
    trainer.fit()
    assert (trainer.progress.updates, trainer.progress.skipped) == (2, 98)
    trainer = make("precision=amp", *length)
    made = []
    trainer.precision.step = lambda *_: bool(made.append(0))
    with pytest.raises(Diverged, match="50 updates in a row"):
        trainer.fit()
    assert len(made) == 50


@pytest.mark.parametrize(("precision", "scale"), [(Precision(), 1), (Amp(init_scale=8.0), 8)])
def test_the_weight_of_a_micro_batch_multiplies_its_gradients(precision, scale):
    x = torch.tensor([2.0, -3.0], requires_grad=True)
    precision.setup(of := context())
    for weight in (0.25, 0.5):
        precision.backward((x**2).sum(), torch.tensor(weight))
    torch.testing.assert_close(x.grad, scale * 2 * x.detach() * 0.75)
    of.on_exit.close()


def test_fp8_without_its_library_or_device_is_refused(problems, monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "torchao" else find_spec(name, *a))
    (problem,) = problems("precision=fp8")
    assert "precision=fp8 needs the package 'torchao'" in problem
    assert "pip install 'drivetrain[torchao]'" in problem
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: object() if name == "torchao" else find_spec(name, *a))
    for found, here in (
        (Accelerator(), "here is none"),
        (Accelerator("xpu", 1), "here is none"),
        (Accelerator("cuda", 1, (8, 6)), "here it is 8.6"),
        (Accelerator("cuda", 1, (9, 0), rocm=True), "9.4 or newer, and here it is 9.0"),
    ):
        monkeypatch.setattr(accelerators, "find", lambda found=found: found)
        (problem,) = problems("precision=fp8")
        assert "precision=fp8 needs a CUDA device" in problem
        assert here in problem


def test_an_update_that_runs_out_of_memory_can_be_repeated_with_loss_scaling(make):
    """torch counts gradients as unscaled until the scaler's update, and refuses to unscale them twice."""
    trainer = make("precision=amp")
    step, x = trainer.optimizer.step, torch.ones(2, 4)
    weights = trainer.optimizer.param_groups[0]["params"]

    def out_of_memory() -> None:
        raise torch.OutOfMemoryError("no memory for the optimizer's state")

    for p in weights:
        p.grad = torch.zeros_like(p)
    trainer.precision.scaler.scale(x)
    trainer.optimizer.step = out_of_memory
    with pytest.raises(torch.OutOfMemoryError):
        trainer.precision.step(trainer.optimizer, lambda: None)
    trainer.optimizer.step = step
    assert trainer.precision.step(trainer.optimizer, lambda: None)


def test_fp8_converts_what_is_large_enough_and_sixteen_divides():
    """Needs no torchao."""
    for sizes, converted in (((64, 48), True), ((32, 32), True), ((64, 40), False), ((16, 64), False)):
        assert Fp8(min_features=32)._is_convertible(torch.nn.Linear(*sizes)) is converted, sizes


# --- convolutions over one pixel: a gradient that is a number ---


def poison() -> None:
    """Memory that is free now holds NaN: who reads it without writing will tell."""
    [torch.full((2**power,), float("nan")) for power in range(4, 18) for _ in range(4)]


@pytest.mark.parametrize("precision", ["bf16", "bf16_pure"])
def test_gradients_are_finite_in_bfloat16(make, precision):
    """Digits are 8×8: a net that halves them five times has one pixel left to stride over."""
    words = ["data=digits", "model=timm", "model.name=test_resnet", "batch.global_batch=4", "runtime.device=cpu"]
    trainer = make(*words, f"precision={precision}")
    trainer.model.train()
    stream = trainer.read()
    for micro, _ in zip(stream, range(8), strict=False):
        poison()
        trainer.step.micro_batch(micro, torch.zeros(()))
        poison()
        assert all(p.grad.isfinite().all() for p in trainer.model.parameters() if p.grad is not None)
        trainer.step.zero_grad()
