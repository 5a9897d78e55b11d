"""Which activations are recomputed: every_k, selective's policies and the compiler's budget, each as exact as none."""

import itertools

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from drivetrain.core.blocks import repeated_blocks
from tests.support import slow

VIT = ["model=timm", "model.name=vit_tiny_patch16_224", "data.shape=[3,16,16]", "batch.global_batch=6"]
VIT += ["+model.kwargs.img_size=16", "+model.kwargs.patch_size=8", "+model.kwargs.depth=4", "+model.kwargs.embed_dim=48"]
MODELS = {
    "resnet9": ["model=resnet9", "model.width=8"],
    "mlp with dropout": ["model=mlp", "model.hidden=[64,64,64]", "model.dropout=0.5"],
    "vit with dropout": [*VIT, "+model.kwargs.proj_drop_rate=0.2", "+model.kwargs.attn_drop_rate=0.2"],
    "timm resnet": ["model=timm", "model.name=resnet10t", "data.shape=[3,32,32]", "batch.global_batch=6"],
}
OPTIONS = {
    "every_k": ["checkpointing=every_k"],
    "products": ["checkpointing=selective"],
    "half": ["checkpointing=selective", "checkpointing.policy=half"],
    "attention": ["checkpointing=selective", "checkpointing.policy=attention"],
    "deep products": ["checkpointing=selective", "checkpointing.min_depth=100000"],
}


class Counted(TorchDispatchMode):
    """How often each operation ran."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[str, int] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.removeprefix("aten::")
        self.counts[name] = self.counts.get(name, 0) + 1
        return func(*args, **(kwargs or {}))


def counted_step(trainer) -> dict[str, int]:
    """The operations of a forward and a backward."""
    images = torch.randn(4, *trainer.train_data.source.fetch(torch.arange(1))[0].shape[1:])
    with Counted() as counted:
        trainer.step.forward(images).square().mean().backward()
    return counted.counts


def saved_bytes(trainer) -> int:
    """What autograd keeps of the activations between forward and backward."""
    weights = {p.untyped_storage().data_ptr() for p in trainer.model.parameters()}
    kept: dict[int, int] = {}

    def pack(t: torch.Tensor) -> torch.Tensor:
        storage = t.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        held.append(t)  # alive, so that no two share an address
        return t

    held: list[torch.Tensor] = []
    images = torch.randn(32, *trainer.train_data.source.fetch(torch.arange(1))[0].shape[1:])
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        trainer.step.forward(images)
    return sum(kept.values())


@pytest.mark.parametrize(
    ("model", "option"), slow.but(lambda both: "resnet9" in both or "products" in both, itertools.product(MODELS, OPTIONS))
)
def test_gradients_statistics_and_weights_are_those_without(make, each_update, model, option):
    seen, ends = [], []
    for words in (["checkpointing=none"], OPTIONS[option]):
        trainer = make(*MODELS[model], *words, "updates=2", "saving=none", "data.test_samples=4")
        seen.append(each_update(trainer, lambda t=trainer: [p.grad.clone() for p in t.model.parameters()]))
        trainer.fit()
        ends.append(trainer.model.state_dict())
    assert len(seen[0]) == 2
    for without, recomputed in zip(*seen, strict=True):
        assert any(g.any() for g in without)
        assert all(torch.equal(a, b) for a, b in zip(without, recomputed, strict=True))
    assert ends[0].keys() == ends[1].keys()
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])


def test_every_second_and_every_third_block(make):
    for k, changed in ((2, [0, 2]), (3, [0, 3])):
        trainer = make(*VIT, "checkpointing=every_k", f"checkpointing.k={k}")
        blocks = repeated_blocks(trainer.model)
        assert len(blocks) == 4
        assert [i for i, block in enumerate(blocks) if "forward" in vars(block)] == changed


def test_selective_recomputes_what_is_cheap_alone(make):
    """A ViT: matrix products and attention run once, GELU and LayerNorm twice; with blocks, all of a block twice."""
    none, selective, blocks = (
        counted_step(make(*VIT, f"checkpointing={o}", "checkpointing.min_depth=1" if o == "selective" else "updates=2"))
        for o in ("none", "selective", "blocks")
    )
    attention = next(name for name in none if "scaled_dot_product" in name and "backward" not in name)
    for product in ("addmm", attention):
        assert none[product] == selective[product] < blocks[product], product
    for cheap in ("gelu", "native_layer_norm"):
        assert none[cheap] < selective[cheap] == blocks[cheap], cheap


def test_selective_keeps_convolutions_and_recomputes_norms(make):
    none, selective = (counted_step(make(*MODELS["resnet9"], f"checkpointing={o}")) for o in ("none", "selective"))
    assert none["convolution"] == selective["convolution"] == 8
    assert selective["native_batch_norm"] == none["native_batch_norm"] + 4  # those of its two residual blocks


def test_half_and_attention_keep_less_than_products(make):
    """Of a block's matrix products every second one runs again; with attention alone kept, all of them."""
    words = [*VIT, "checkpointing=selective", "checkpointing.min_depth=1"]
    none = counted_step(make(*VIT, "checkpointing=none"))
    policies = ("products", "half", "attention")
    products, half, attention = (counted_step(make(*words, f"checkpointing.policy={p}")) for p in policies)
    assert none["addmm"] == products["addmm"] < half["addmm"] < attention["addmm"]
    sdpa = next(name for name in none if "scaled_dot_product" in name and "backward" not in name)
    assert attention[sdpa] == none[sdpa]


def test_a_product_over_few_terms_is_recomputed(make):
    words = [*MODELS["resnet9"], "checkpointing=selective"]
    kept, recomputed = (counted_step(make(*words, f"checkpointing.min_depth={d}")) for d in (1, 100_000))
    assert recomputed["convolution"] == kept["convolution"] + 4


def test_each_option_keeps_less_than_the_one_before(make):
    none, every_k, blocks = (saved_bytes(make(*VIT, f"checkpointing={o}")) for o in ("none", "every_k", "blocks"))
    selective = saved_bytes(make(*VIT, "checkpointing=selective"))
    assert blocks < every_k < none
    assert blocks < none / 3
    assert selective < none


def test_the_compiler_is_given_the_budget(make, monkeypatch):
    import torch._functorch.config as functorch

    seen = []
    monkeypatch.setattr("drivetrain.core.lazy.torch.compile", lambda m, **_: seen.append(functorch.activation_memory_budget) or m)
    make("checkpointing=budget", "checkpointing.budget=0.25", "compile=inductor")
    make("compile=inductor")
    assert seen == [0.25, 1.0]


@pytest.mark.slow
def test_a_smaller_budget_keeps_less(make, monkeypatch):
    """By the partitioner that inductor uses, on a graph that runs op by op."""
    original = torch.compile

    def partitioned(model, **knobs):
        return original(model, backend="aot_eager_decomp_partition")

    monkeypatch.setattr("drivetrain.core.lazy.torch.compile", partitioned)
    words = ["model=mlp", "model.hidden=[64,64,64,64]", "checkpointing=budget", "compile=inductor"]
    kept = [saved_bytes(make(*words, f"checkpointing.budget={b}")) for b in (1.0, 0.0)]
    torch._dynamo.reset()
    assert 0 < kept[1] < 0.5 * kept[0]


def test_a_block_of_the_users_choice(make):
    trainer = make(*VIT, "checkpointing=selective", "checkpointing.block=Mlp")
    assert {type(m).__name__ for m in trainer.model.modules() if "forward" in vars(m)} == {"Mlp"}


def test_what_cannot_be_is_refused_with_both_names(problems):
    for words, names in (
        (["checkpointing=budget"], ("checkpointing=budget", "compile=none", "compile=inductor")),
        (["checkpointing=blocks", "compile=jit"], ("checkpointing=blocks", "compile=jit")),
        (["checkpointing=every_k", "checkpointing.k=1"], ("checkpointing.k=1", "≥ 2")),
    ):
        said = " ".join(problems(*words))
        assert all(name in said for name in names), said


def test_a_kept_result_is_not_overwritten_in_place(make):
    """An activation that works in place would change the product that is kept."""
    trainer = make(*MODELS["timm resnet"], "checkpointing=selective")
    inside = [m for b in repeated_blocks(trainer.model) for m in b.modules()]
    assert any(isinstance(m, nn.ReLU) for m in inside)
    assert not any(getattr(m, "inplace", False) for m in inside)


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", ["blocks", "budget"])
@pytest.mark.parametrize("precision", ["bf16", "bf16_pure"])
def test_what_the_compiler_recomputes_in_bfloat16_gives_the_same_gradients(make, precision, checkpointing):
    """It rounds elsewhere the second time: a backward that looks for a value of the forward again would find none."""
    found = []
    for recomputed in ("none", checkpointing):
        trainer = make(
            "data=digits", "model=resnet9", "model.width=4", f"precision={precision}", "compile=inductor",
            f"checkpointing={recomputed}", *(["checkpointing.budget=0.2"] if recomputed == "budget" else []),
        )  # fmt: skip
        for micro in trainer.loader.stream(trainer.train_data, trainer.requests(), trainer.device, trainer.memory_format):
            trainer.step.micro_batch(micro, torch.zeros(()))
            break
        found.append(torch.cat([p.grad.flatten().float() for p in trainer.model.parameters()]))
    assert torch.isfinite(found[1]).all()
    assert (found[0] - found[1]).norm() < 0.1 * found[0].norm()


def test_torchs_synchronised_norm_is_recomputed_though_it_insists_on_its_counter():
    from torch._subclasses.fake_tensor import FakeTensorMode

    from drivetrain.checkpointing.recompute import _frozen_statistics

    with FakeTensorMode():
        norm = nn.SyncBatchNorm(4, device="cuda:0")
        counter, written = norm.num_batches_tracked, norm.num_batches_tracked._version
        with _frozen_statistics([norm]):
            norm(torch.ones(2, 4, 3, 3, device="cuda:0"))
        assert norm.num_batches_tracked is counter
        assert (counter._version, norm.momentum) == (written, 0.1)
