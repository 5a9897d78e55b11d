"""Low-rank adapters: the base's function at first, only they train, and merged weights are the adapted model's."""

import copy

import pytest
import safetensors.torch
import timm
import torch
from torch import nn

import drivetrain
from drivetrain.adapter import layers
from drivetrain.adapter.base import Dora, Lora
from drivetrain.cli.main import main
from drivetrain.core.errors import UserError
from drivetrain.core.step import low_rank
from drivetrain.core.step.low_rank import merged
from drivetrain.inference.evaluation import evaluate
from drivetrain.launch import launcher
from drivetrain.model import gpt
from tests.support.command import tensors
from tests.support.refusals import problems_of
from tests.support.same_end import resumed

VIT = ["model=timm", "model.name=vit_tiny_patch16_224",
       "model.kwargs={img_size: 8, patch_size: 4, depth: 2, embed_dim: 24, num_heads: 2}"]  # fmt: skip
MODELS = {"mlp": ["model.hidden=[16,12]"], "vit": VIT}
IN_BLOCKS = {
    "mlp": {"layers.0.linear", "layers.1.linear"},
    "vit": {f"blocks.{n}.{part}" for n in (0, 1) for part in ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")},
}  # fmt: skip


def adapted(model: nn.Module) -> set[str]:
    return {name for name, m in model.named_modules() if isinstance(m, layers.LoraLinear)}


@pytest.mark.parametrize(("model", "adapter"), [("mlp", "dora"), ("vit", "lora")])
def test_the_linear_layers_of_the_blocks_have_adapters_and_train_alone(make, model, adapter):
    trainer = make(*MODELS[model], f"adapter={adapter}", "adapter.rank=3", "optimizer=adamw", "optimizer.weight_decay=0.1")
    assert adapted(trainer.model) == IN_BLOCKS[model]
    trained = {name for name, p in trainer.model.named_parameters() if p.requires_grad}
    parts = ("lora_a", "lora_b", *(["dora_magnitude"] if adapter == "dora" else []))
    head = {"head.weight", "head.bias"}
    assert trained == head | {f"{layer}.{part}" for layer in IN_BLOCKS[model] for part in parts}
    linears = [m for m in trainer.model.modules() if isinstance(m, layers.LoraLinear)]
    each = [3 * (m.in_features + m.out_features) + (m.out_features if adapter == "dora" else 0) for m in linears]
    own = sum(p.numel() for n, p in trainer.model.named_parameters() if n in head)
    assert sum(p.numel() for group in trainer.optimizer.param_groups for p in group["params"]) == sum(each) + own
    before = {name: t.clone() for name, t in trainer.model.state_dict().items()}
    trainer.fit()
    changed = {name for name, t in trainer.model.state_dict().items() if not torch.equal(t, before[name])}
    assert changed == trained


def test_a_head_that_shares_its_weight_stays_as_it_is():
    model = gpt.Gpt(8, 30, 16, 2, 2, 0.0, 1, 1, 0.0)
    x = torch.zeros(2, 8, dtype=torch.int64)
    chosen = layers.choose(model, x, None, ["head"])
    parts = ("attention.qkv", "attention.out", "feed_forward.up", "feed_forward.down")
    assert set(chosen) == {f"blocks.{n}.{part}" for n in (0, 1) for part in parts}
    assert layers.unshared(model, ["head"]) == []
    with pytest.raises(UserError, match="head cannot have an adapter, because another layer shares its weight"):
        layers.choose(model, x, ["head"], ["head"])


@pytest.mark.parametrize("adapter", [Lora(rank=2, alpha=3), Dora(rank=2, alpha=3)], ids=["lora", "dora"])
def test_an_adapter_is_the_base_at_first_and_merges_into_it(float64, adapter):
    model = timm.create_model("vit_tiny_patch16_224", img_size=8, patch_size=4, depth=2, embed_dim=24, num_heads=2, num_classes=5)
    x, plain = torch.randn(3, 3, 8, 8), copy.deepcopy(model)
    chosen = layers.choose(model, x, None, ["head"])
    chosen = {name: adapter.adapted(layer) for name, layer in chosen.items()}
    for name, layer in chosen.items():
        model.set_submodule(name, layer)
    torch.testing.assert_close(model(x), plain(x), rtol=1e-12, atol=1e-12)
    with torch.no_grad():
        for layer in chosen.values():
            layer.lora_b.normal_()
            if isinstance(layer, layers.DoraLinear):
                layer.dora_magnitude.mul_(1.5)
    assert not torch.allclose(model(x), plain(x), rtol=1e-2)
    plain.load_state_dict(merged(model.state_dict()))
    torch.testing.assert_close(model(x), plain(x), rtol=1e-11, atol=1e-11)


def test_the_formulas_of_both_papers(float64):
    """W + alpha / rank · B A (Hu et al. 2021); m · V / |V| by rows (Liu et al. 2024)."""
    x = torch.randn(4, 6)
    for adapter in (Lora(rank=2, alpha=3), Dora(rank=2, alpha=3)):
        layer = adapter.adapted(nn.Linear(6, 5))
        nn.init.normal_(layer.lora_b)
        v = layer.weight + 1.5 * layer.lora_b @ layer.lora_a
        if isinstance(layer, layers.DoraLinear):
            nn.init.normal_(layer.dora_magnitude)
            v = layer.dora_magnitude[:, None] * v / v.norm(dim=1, keepdim=True)
        torch.testing.assert_close(layer(x), x @ v.T + layer.bias)


@pytest.mark.parametrize("size", [(6, 5), (3, 9)])
@pytest.mark.parametrize("adapter", [Lora, Dora])
def test_pissa_is_its_formula_and_the_base_at_first(float64, adapter, size):
    """A and B of the largest singular values, of equal weight; also of a rank that the weight has not."""
    layer = nn.Linear(*size)
    weight, x = layer.weight.detach().clone(), torch.randn(4, size[0])
    expected = layer(x)
    made = adapter(rank=4, alpha=3, scale="stabilized", init="pissa").adapted(layer)
    torch.testing.assert_close(made(x), expected, rtol=1e-10, atol=1e-12)
    assert float(made.lora_scale) == pytest.approx(1.5)  # alpha / √rank
    rank = min(4, *size)
    u, s, vh = torch.linalg.svd(weight, full_matrices=False)
    largest = u[:, :rank] @ torch.diag(s[:rank]) @ vh[:rank]
    torch.testing.assert_close(made.weight.detach(), weight - largest, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(1.5 * made.lora_b @ made.lora_a, largest, rtol=1e-10, atol=1e-12, check_dtype=False)
    torch.testing.assert_close(made.lora_a[:rank].norm(dim=1), made.lora_b[:, :rank].norm(dim=0))


def test_b_learns_at_a_rate_of_its_own(make):
    trainer = make(*MODELS["mlp"], "adapter=lora", "adapter.lr_ratio=16", "optimizer=adamw", "optimizer.lr=0.001")
    rates = {n.rpartition(".")[2]: g["lr"] for g in trainer.optimizer.param_groups for n in g["param_names"]}
    assert rates["lora_b"] == pytest.approx(16 * rates["lora_a"])
    assert rates["lora_a"] == pytest.approx(rates["bias"])


def test_dropout_is_the_corrections_alone(float64):
    layer = Lora(rank=2, dropout=0.5).adapted(nn.Linear(6, 5))
    x, base = torch.randn(2000, 6), layer(torch.zeros(1, 6)) * 0
    base = base + nn.functional.linear(x, layer.weight, layer.bias)
    assert torch.equal(layer(x), base)
    nn.init.normal_(layer.lora_b)
    dropped, whole = layer(x) - base, layer.eval()(x) - base
    assert not torch.allclose(dropped, whole)
    torch.testing.assert_close(dropped.mean(0), whole.mean(0), rtol=0, atol=1.5)  # its expectation


def test_targets_and_what_trains_also(make):
    trainer = make(*VIT, "adapter=lora", "adapter.targets=['*.qkv']", "adapter.train_also=[norm, 'blocks.0.norm?.bias']")
    assert adapted(trainer.model) == {"blocks.0.attn.qkv", "blocks.1.attn.qkv"}
    own = {n for n, p in trainer.model.named_parameters() if p.requires_grad and "lora" not in n}
    assert own == {"norm.weight", "norm.bias", "blocks.0.norm1.bias", "blocks.0.norm2.bias"}


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["adapter.targets=[qvk]"], "adapter.targets: 'qvk' matches no Linear layer"),
        (["adapter.train_also=[hed]"], "adapter.train_also: 'hed' matches no parameter"),
        (["data.shape=[1,8,8]", "model=resnet9", "model.width=4"], "finds no Linear layer to correct"),
    ],
)  # fmt: skip
def test_what_cannot_be_adapted_is_named(make, words, says):
    assert says in problems_of(make, "adapter=lora", *words)[0]


def test_a_layer_whose_weight_is_used_past_its_forward_gets_none():
    class Past(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.used = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            return nn.functional.linear(self.inner(x), self.used.weight)

    assert set(layers.choose(Past(), torch.zeros(2, 4), None, [])) == {"inner"}
    with pytest.raises(UserError, match="used cannot have an adapter, because the model's forward does not call it"):
        layers.choose(Past(), torch.zeros(2, 4), ["used"], [])


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["model.freeze=[layers]"], "model.freeze and model.unfreeze have nothing to say"),
        (["debug=gradcheck"], "debug=gradcheck and adapter=dora"),
        (["optimizer=muon"], "adapter=dora and optimizer=muon exclude each other"),
        (["precision=fp8", "precision.emulate=true"], "adapter=dora and precision=fp8 exclude each other"),
        ([*VIT, "parallel=tensor", "parallel.nproc=2"], "adapter=dora and parallel=tensor exclude each other"),
    ],
)
def test_what_it_does_not_go_with(problems, words, says):
    assert any(says in line for line in problems("adapter=dora", *words))


def test_random_weights_are_advised_upon(tiny):
    assert any("and these are random" in line for line in launcher.prepare(tiny("adapter=lora")).notices)
    assert not any("random" in line for line in launcher.prepare(tiny("adapter=lora", "model.weights=x.pt")).notices)


def test_fine_tuning_a_run_and_exporting_plain_weights(tiny, tmp_path, capsys):
    """The export has the plain model's names; the model that is loaded, the file and the next run's start are one function."""
    words = tiny("model.hidden=[16,12]")
    base = drivetrain.train(words)
    tuned = drivetrain.train([*words, "adapter=lora", "adapter.rank=2", "optimizer.lr=0.5", f"model.weights={base.run_dir}"])
    file = tmp_path / "plain.safetensors"
    assert main(["export", str(tuned.run_dir), str(file)]) == 0, capsys.readouterr().err
    plain = safetensors.torch.load_file(file)
    own, before = (safetensors.torch.load_file(r.run_dir / "checkpoints" / "2" / "model.safetensors") for r in (tuned, base))
    assert plain.keys() == before.keys() < own.keys()
    assert torch.equal(own["layers.0.linear.weight"], before["layers.0.linear.weight"])
    assert not torch.equal(plain["layers.0.linear.weight"], before["layers.0.linear.weight"])
    loaded = drivetrain.load(tuned.run_dir)
    assert all(torch.equal(t, plain[name]) for name, t in loaded.model.state_dict().items())
    x = torch.randn(5, 3, 8, 8)
    adapted_model = copy.deepcopy(loaded.model)
    for name, layer in layers.choose(adapted_model, x, None, ["head"]).items():
        adapted_model.set_submodule(name, Lora(rank=2).adapted(layer))
    adapted_model.load_state_dict(own)
    torch.testing.assert_close(adapted_model(x), loaded.model(x))
    assert evaluate(tuned.run_dir).metrics == tuned.judged("final")
    third = drivetrain.train([*words, "updates=1", "optimizer.lr=1e-30", f"model.weights={tuned.run_dir}"])
    start = safetensors.torch.load_file(third.run_dir / "checkpoints" / "1" / "model.safetensors")
    assert all(torch.equal(t, plain[name]) for name, t in start.items())


# --- a base in 8 or 4 bits ---


def in_bits(bits: int, transposed: bool = False, size: tuple[int, int] = (12, 7)) -> tuple[layers.LoraLinear, torch.Tensor]:
    """A layer in so few bits, and the weight that it had, (outputs, inputs)."""
    torch.manual_seed(0)
    layer = layers.LoraLinear.of(nn.Linear(*size), 3, 6.0, 0.0)
    if transposed:
        layer.register_buffer("lora_transposed", torch.ones((), dtype=torch.bool))
        layer.weight = nn.Parameter(layer.weight.detach().T.contiguous())
    nn.init.normal_(layer.lora_b)
    full = layer.rows.detach().clone()
    layer.narrow(bits)
    return layer, full


def wide(layer: layers.LoraLinear) -> torch.Tensor:
    return low_rank.widened(layer.weight, layer.lora_weight_scale, layer.lora_levels, layer.in_features, torch.float32)


def test_8_bits_are_those_of_torchao():
    quantization = pytest.importorskip("torchao.quantization")
    torch.manual_seed(0)
    theirs = nn.Sequential(nn.Linear(12, 7))
    layer, _ = in_bits(8)
    quantization.quantize_(theirs, quantization.Int8WeightOnlyConfig())
    assert torch.allclose(wide(layer), theirs[0].weight.dequantize(), atol=1e-6)
    assert (layer.weight.dtype, "weight" in dict(layer.named_parameters())) == (torch.int8, False)


def test_4_bits_are_those_of_torchao():
    """Its NF4, whose scales have 8 bits in turn: the levels are equal, and the scales to half a step of those."""
    nf4 = pytest.importorskip("torchao.quantization.quantize_.workflows.nf4.nf4_tensor")
    layer, full = in_bits(4, size=(256, 64))
    theirs = nf4.NF4Tensor.from_tensor(full, 64, 256)
    assert torch.allclose(theirs.nf4.float(), torch.tensor(low_rank.LEVELS), atol=1e-4)
    own, other = wide(layer), theirs.get_original_weight()
    assert (own.sign() == other.sign()).float().mean() > 0.999
    assert torch.allclose(own, other, atol=2 * float(full.abs().max()) / 256)


@pytest.mark.parametrize(("bits", "nbytes", "largest"), [(8, 64 * 130 + 64 * 4, 0.5 / 127.5), (4, 64 * 96 + 64 * 3 * 4, 0.152)])
def test_memory_and_error(bits, nbytes, largest):
    """Bytes of 64 rows of 130 numbers (4 bits: of 192, in 3 groups); no number is further off than half its widest step."""
    layer, full = in_bits(bits, size=(130, 64))
    assert layer.weight.nbytes + layer.lora_weight_scale.nbytes == nbytes
    error = (wide(layer) - full).abs()
    assert float(error.max()) <= largest * float(full.abs().max()) + 1e-7
    x = torch.randn(5, 130)
    nn.init.zeros_(layer.lora_b)
    off = layer(x) - nn.functional.linear(x, full, layer.bias)
    assert torch.all(off.abs() <= nn.functional.linear(x.abs(), error) + 1e-5)
    assert float(off.detach().abs().max()) > 0


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("bits", [8, 4])
def test_a_narrow_layer_computes_as_its_widened_weight_does_and_is_merged_so(bits, transposed):
    layer, _ = in_bits(bits, transposed)
    x = torch.randn(5, 12, requires_grad=True)
    expected = nn.functional.linear(x, wide(layer) + layer.lora_scale * layer.lora_b @ layer.lora_a, layer.bias)
    y = layer(x)
    assert torch.allclose(y, expected, atol=1e-5)
    weight = torch.randn_like(y)
    ours, theirs = (torch.autograd.grad((out * weight).sum(), [x, layer.lora_a, layer.lora_b]) for out in (y, expected))
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(ours, theirs, strict=True))
    plain = merged({f"l.{name}": tensor for name, tensor in layer.state_dict().items()})
    own = plain["l.weight"].T if transposed else plain["l.weight"]
    assert torch.allclose(nn.functional.linear(x, own, plain["l.bias"]), y, atol=1e-5)
    assert sorted(plain) == ["l.bias", "l.weight"]


@pytest.mark.parametrize("transposed", [False, True])
def test_a_base_in_16_bits_is_autocasts_own_and_keeps_no_second_copy(transposed):
    """Autocast rounds float32 weights so in each forward; without autocast, it computes as rounded weights do."""
    half, full = in_bits(16, transposed)
    assert (half.weight.dtype, "weight" in dict(half.named_parameters())) == (torch.bfloat16, False)
    plain = layers.LoraLinear.of(nn.Linear(12, 7), 3, 6.0, 0.0)
    plain.load_state_dict({n: t for n, t in half.state_dict().items() if n in plain.state_dict() and n != "weight"}, strict=False)
    plain.weight = nn.Parameter(full, requires_grad=False)
    x = torch.randn(5, 12)
    for kept in (False, True):
        results, saved = [], []
        if not kept:
            plain.weight.data = full.bfloat16().float()
        for layer in (half, plain):
            given = x.clone().requires_grad_()
            keeps = torch.autograd.graph.saved_tensors_hooks(lambda t, saved=saved: saved.append(t) or t, lambda t: t)
            with keeps, torch.autocast("cpu", torch.bfloat16, enabled=kept):
                y = layer(given)
            results.append([y, *torch.autograd.grad(y.float().square().sum(), [given, layer.lora_a, layer.lora_b])])
            if layer is half:
                of_weight = [t for t in saved if t.shape in (half.weight.shape, half.weight.T.shape)]
                assert {t.untyped_storage().data_ptr() for t in of_weight} == {half.weight.untyped_storage().data_ptr()}
        for ours, theirs in zip(*results, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
    found = merged({f"l.{name}": tensor for name, tensor in half.state_dict().items()})
    own = found["l.weight"].T if transposed else found["l.weight"]
    assert own.dtype == torch.float32
    torch.testing.assert_close(nn.functional.linear(x, own, found["l.bias"]), half(x))


NARROW = [
    ["adapter.base=bf16", "precision=bf16"],
    ["adapter.base=int8", "precision=bf16_pure"], ["adapter.base=nf4", "ema=ema", "checkpointing=blocks"],
    pytest.param(["adapter.base=nf4", "precision=bf16"], marks=pytest.mark.slow),
]  # fmt: skip


@pytest.mark.parametrize("more", NARROW, ids=" ".join)
def test_a_narrow_base_trains_and_goes_on_with_the_same_bits(tiny, more):
    whole, _ = resumed(tiny(*VIT, "adapter=lora", "saving.every_updates=2", *more), 2, 4)
    dtype = {"bf16": torch.bfloat16, "int8": torch.int8, "nf4": torch.uint8}[more[0].removeprefix("adapter.base=")]
    assert tensors(whole)["blocks.0.attn.qkv.weight"].dtype == dtype
    assert evaluate(whole.run_dir).metrics["loss"] > 0


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["adapter=dora"], "needs the lengths of the weights' rows"),
        (["adapter=lora", "parallel=fsdp"], "are not divided among ranks"),
        (["adapter=lora", "adapter.base=int4"], "adapter.base"),
    ],
)
def test_a_narrow_base_is_refused_where_it_cannot_be(words, says, make):
    with pytest.raises(UserError, match=says):
        make("model.hidden=[16,12]", "adapter.base=nf4", *words)


def test_a_stage_may_change_the_dropout(train):
    stages = "stages=[{until: 2, adapter.dropout: 0.5}]"
    train("adapter=lora", "adapter.rank=2", "adapter.dropout=0.1", "updates=4", stages, updates=4)


@pytest.mark.parametrize(
    ("words", "base"),
    [
        (["precision=bf16"], "bf16"),
        (["precision=fp32"], "full"),
        (["precision=amp"], "full"),  # float16 has other numbers
        (["precision=bf16", "adapter=dora"], "full"),
        (["precision=bf16", "adapter.base=full"], "full"),
        (["precision=bf16", "parallel=fsdp"], "full"),
        (["precision=bf16", "parallel=ddp"], "bf16"),
    ],
)
def test_frozen_weights_have_16_bits_where_the_step_rounds_them_so(words, base, tiny):
    assert launcher.prepare(tiny("model=mlp", "adapter=lora", *words)).run.adapter.base == base
