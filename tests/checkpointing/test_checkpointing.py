"""Recomputed activations: the same gradients and statistics, and truly recomputed."""

import copy
import itertools
import json
import weakref

import pytest
import timm
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from drivetrain.checkpointing import Checkpointing
from drivetrain.checkpointing.base import Blocks, Selective
from drivetrain.checkpointing.recompute import _frozen_statistics, offload_forward
from drivetrain.core.errors import UserError
from drivetrain.core.step.blocks import repeated_blocks
from drivetrain.engine.rehearsal import Rehearsal, fewest, peak_bytes
from drivetrain.launch import launcher, trials
from drivetrain.launch.trials import JobTrials
from tests.support import slow


def test_evaluation_is_not_checkpointed(make, monkeypatch):
    import torch.utils.checkpoint as checkpointing

    trainer = make(*MODELS["resnet9"], "checkpointing=blocks")
    called, original = [], checkpointing.checkpoint
    monkeypatch.setattr(checkpointing, "checkpoint", lambda *a, **k: called.append(1) or original(*a, **k))
    trainer.evaluator.metrics()
    assert not called


@pytest.mark.parametrize(
    ("model", "words", "changed"),
    [
        ("resnet9", ["checkpointing=blocks"], ["features.3", "features.8"]),  # the outermost modules that are repeated
        ("resnet9", ["checkpointing=blocks", "checkpointing.block=Residual"], ["features.3", "features.8"]),
        ("vit", ["checkpointing=every_k", "checkpointing.k=2"], ["blocks.0", "blocks.2"]),
        ("vit", ["checkpointing=every_k", "checkpointing.k=3"], ["blocks.0", "blocks.3"]),
        ("vit", ["checkpointing=selective", "checkpointing.block=Mlp"], [f"blocks.{n}.mlp" for n in range(4)]),
    ],
)
def test_the_blocks_that_are_recomputed(make, model, words, changed):
    trainer = make(*(VIT if model == "vit" else MODELS[model]), *words)
    assert [name for name, m in trainer.model.named_modules() if "forward" in vars(m)] == changed


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stack = nn.ModuleList(nn.Sequential(nn.Linear(4, 4)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.stack:
            x = layer(x)
        return x


@pytest.mark.parametrize(
    ("option", "says"), [(Blocks(), "no repeated block"), (Blocks("Attention"), "no module of class 'Attention'")]
)
def test_a_model_without_such_blocks_is_refused_with_the_classes_it_has(option, says):
    with pytest.raises(ValueError, match=says) as refused:
        option.apply(Twice())
    assert "checkpointing.block" in str(refused.value)
    assert "Sequential" in str(refused.value)


# --- which activations are recomputed: every_k, selective's policies and the compiler's budget, each as exact as none ---


VIT = ["model=timm", "model.name=vit_tiny_patch16_224", "data.shape=[3,16,16]", "batch.global_batch=6"]
VIT += ["+model.kwargs.img_size=16", "+model.kwargs.patch_size=8", "+model.kwargs.depth=4", "+model.kwargs.embed_dim=48"]
MODELS = {
    "resnet9": ["model=resnet9", "model.width=8"],
    "mlp with dropout": ["model=mlp", "model.hidden=[64,64,64]", "model.dropout=0.5"],
    "vit with dropout": [*VIT, "+model.kwargs.proj_drop_rate=0.2", "+model.kwargs.attn_drop_rate=0.2"],
    "timm resnet": ["model=timm", "model.name=resnet10t", "data.shape=[3,32,32]", "batch.global_batch=6"],
}
OPTIONS = {
    "blocks": ["checkpointing=blocks"],
    "blocks, accumulated in bf16": [
        "batch=accumulate",
        "batch.accumulation_steps=2",
        "precision=bf16",
        "checkpointing=blocks",
    ],
    "every_k": ["checkpointing=every_k"],
    "products": ["checkpointing=selective"],
    "half": ["checkpointing=selective", "checkpointing.policy=half"],
    "attention": ["checkpointing=selective", "checkpointing.policy=attention"],
    "deep products": ["checkpointing=selective", "checkpointing.min_depth=100000"],
}


class Counted(TorchDispatchMode):
    """The number of runs of each operation."""

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
    """The bytes of activations that autograd keeps between forward and backward."""
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
    ("model", "option"),
    slow.but(lambda both: "resnet9" in both or "products" in both, itertools.product(MODELS, OPTIONS)),
)
def test_gradients_statistics_and_weights_are_those_without(make, each_update, model, option):
    seen, ends = [], []
    beside = [word for word in OPTIONS[option] if not word.startswith("checkpointing")]
    for words in ([*beside, "checkpointing=none"], OPTIONS[option]):
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


def test_of_a_transformer_each_policy_recomputes_what_it_does_not_keep(make):
    """Matrix products, attention; GELU and LayerNorm, which are cheap: with blocks, all of a block runs twice."""
    options = {"none": ["none"], "blocks": ["blocks"]}
    for policy in ("products", "half", "attention"):
        options[policy] = ["selective", "checkpointing.min_depth=1", f"checkpointing.policy={policy}"]
    ran = {}
    for name, words in options.items():
        ran[name] = counted_step(make(*VIT, *(word if "." in word else f"checkpointing={word}" for word in words)))
    sdpa = next(name for name in ran["none"] if "scaled_dot_product" in name and "backward" not in name)
    products, attention = ({name: counts[operation] for name, counts in ran.items()} for operation in ("addmm", sdpa))
    assert products["none"] == products["products"] < products["half"] < products["attention"] == products["blocks"]
    assert attention["none"] == attention["products"] == attention["attention"] < attention["blocks"]
    for cheap in ("gelu", "native_layer_norm"):
        assert ran["none"][cheap] < ran["products"][cheap] == ran["blocks"][cheap], cheap


def test_of_a_resnet_norms_and_products_over_few_terms_are_recomputed(make):
    """In its two residual blocks, each of two convolutions and two norms."""
    options = ([], ["checkpointing=selective"], ["checkpointing=selective", "checkpointing.min_depth=100000"])
    none, selective, deep = (counted_step(make(*MODELS["resnet9"], *words)) for words in options)
    assert none["convolution"] == selective["convolution"] == 8 == deep["convolution"] - 4
    assert selective["native_batch_norm"] == none["native_batch_norm"] + 4


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


def test_the_compilers_settings_are_the_callers_again(make):
    import torch._dynamo.config as dynamo
    import torch._functorch.config as functorch

    with functorch.patch(activation_memory_budget=0.75), dynamo.patch(recompile_limit=3):  # pytest's would leave them deleted
        make("model=mlp", "model.hidden=[8,8,8,8,8]", "compile=regional", "compile.block=Linear")
        assert functorch.activation_memory_budget == 1
        assert dynamo.recompile_limit > 3
        make.contexts[-1].on_exit.close()
        assert (functorch.activation_memory_budget, dynamo.recompile_limit) == (0.75, 3)


@pytest.mark.slow
def test_a_smaller_budget_keeps_less(make, monkeypatch):
    """By the partitioner that inductor uses, on a graph that runs op by op."""
    original = torch.compile

    def partitioned(model, **settings):
        return original(model, backend="aot_eager_decomp_partition")

    monkeypatch.setattr("drivetrain.core.lazy.torch.compile", partitioned)
    words = ["model=mlp", "model.hidden=[64,64,64,64]", "checkpointing=budget", "compile=inductor"]
    kept = [saved_bytes(make(*words, f"checkpointing.budget={b}")) for b in (1.0, 0.0)]
    torch._dynamo.reset()
    assert 0 < kept[1] < 0.5 * kept[0]


LIMITED = ["model=resnet9", "checkpointing=blocks", "checkpointing.memory_gb=4"]


def test_what_cannot_be_is_refused_with_both_names(problems):
    for words, names in (
        (["checkpointing=budget"], ("checkpointing=budget", "compile=none", "compile=inductor")),
        (["checkpointing=blocks", "compile=jit"], ("checkpointing=blocks", "compile=jit")),
        (["checkpointing=every_k", "checkpointing.k=1"], ("checkpointing.k=1", "≥ 2")),
        (["checkpointing=offload"], ("checkpointing=offload needs a CUDA device",)),
        (["checkpointing=offload", "compile=inductor"], ("checkpointing=offload and compile=inductor exclude each other",)),
        (
            ["checkpointing=offload", "parallel=pipeline", "parallel.nproc=2"],
            ("offload and parallel=pipeline exclude each other",),
        ),
        ([*LIMITED, "parallel=fsdp", "parallel.nproc=2"], ("parallel=fsdp divides it",)),
        ([*LIMITED, "batch=auto", "batch.memory_gb=4"], ("batch=auto finds its own",)),
        (
            [*LIMITED, "updates=null", "epochs=2", "stages=[{until: 1ep, model.freeze: ['features.0.*']}]"],
            ("once for the whole run: set checkpointing.memory_gb=null",),
        ),
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
        for micro in trainer.read():
            trainer.step.micro_batch(micro, torch.zeros(()))
            break
        found.append(torch.cat([p.grad.flatten().float() for p in trainer.model.parameters()]))
    assert torch.isfinite(found[1]).all()
    assert (found[0] - found[1]).norm() < 0.1 * found[0].norm()


def test_torchs_synchronised_norm_is_recomputed_though_it_insists_on_its_counter():
    with FakeTensorMode():
        norm = nn.SyncBatchNorm(4, device="cuda:0")
        counter, written = norm.num_batches_tracked, norm.num_batches_tracked._version
        with _frozen_statistics([norm]):
            norm(torch.ones(2, 4, 3, 3, device="cuda:0"))
        assert norm.num_batches_tracked is counter
        assert (counter._version, norm.momentum) == (written, 0.1)


# --- activations in the host's memory: the same gradients, and nothing but weights and small tensors stays on the device ---


@pytest.fixture
def net():
    torch.manual_seed(0)
    model = timm.create_model(
        "vit_tiny_patch16_224", img_size=16, patch_size=4, depth=2, embed_dim=24, num_heads=2, num_classes=4
    )
    return model.train()


class Moves:
    """The tensors that go to another place of memory, by watching the copies to the host."""

    def __init__(self, monkeypatch):
        self.out, empty_like = [], torch.empty_like

        def watched(tensor, **given):
            if "pin_memory" in given:
                self.out.append(tensor)
            return empty_like(tensor, **given)

        monkeypatch.setattr(torch, "empty_like", watched)


def backward(model, x):
    torch.manual_seed(1)
    model(x).square().mean().backward()
    return [p.grad for p in model.parameters()]


@pytest.mark.parametrize("autocast", [False, True])
def test_gradients_are_the_same_bit_for_bit(net, autocast):
    twin, x = copy.deepcopy(net), torch.randn(3, 3, 16, 16)
    offload_forward(twin, 0)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        plain, offloaded = backward(net, x), backward(twin, x)
    assert all(torch.equal(a, b) for a, b in zip(plain, offloaded, strict=True))
    assert net.state_dict().keys() == twin.state_dict().keys()


def test_all_but_weights_and_small_tensors_go(net, monkeypatch):
    """Tensors that autograd saves of the plain model are counted by hand."""
    weights = {p.untyped_storage().data_ptr() for p in net.parameters()}
    expected, x = [], torch.randn(3, 3, 16, 16)

    def pack(tensor):
        if tensor.untyped_storage().data_ptr() not in weights and tensor.nbytes >= 2048:
            expected.append(tensor.nbytes)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        net(x)
    offload_forward(net, 2048)
    moves = Moves(monkeypatch)
    net(x)
    assert sum(expected) > 50_000
    assert sorted(t.nbytes for t in moves.out) == sorted(expected)
    moves.out.clear()
    with torch.no_grad():
        net(x)
    assert not moves.out


def test_autocasts_copies_of_weights_stay(net, monkeypatch):
    """As many and as large tensors go as without autocast, in half the bytes: no weight is among them."""
    moves, x = Moves(monkeypatch), torch.randn(3, 3, 16, 16)
    offload_forward(net, 0)
    shapes = {tuple(p.shape) for p in net.parameters() if p.ndim == 2}
    with torch.autocast("cpu", torch.bfloat16):
        net(x)
    gone = {tuple(t.shape) for t in moves.out if t.dtype is torch.bfloat16}
    assert gone
    assert not gone & {*shapes, *(shape[::-1] for shape in shapes)}


def test_strides_are_kept(net):
    x = torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last)
    conv, seen = torch.nn.Conv2d(3, 4, 3), []
    offload_forward(conv, 0)
    y = conv(x)
    saved = y.grad_fn._saved_input
    seen.append(saved)
    assert saved.is_contiguous(memory_format=torch.channels_last)
    assert saved.data_ptr() != x.data_ptr()


# --- selective recomputation holds fewer bytes at its peak than none on a ResNet: counted, tensor by tensor ---


class Live(TorchDispatchMode):
    """The bytes of all tensors that operations have made and that are still alive, and their peak."""

    def __init__(self, model):
        super().__init__()
        self.known = {t.untyped_storage()._cdata for t in (*model.parameters(), *model.buffers())}
        self.now = self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for storage in (t.untyped_storage() for t in tree_leaves(out) if isinstance(t, torch.Tensor)):
            if storage._cdata not in self.known:
                self.known.add(storage._cdata)
                weakref.finalize(storage, self.freed, storage._cdata, storage.nbytes())
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
        return out

    def freed(self, key, size):
        self.known.discard(key)
        self.now -= size


def peak(name, size, option):
    model = timm.create_model(name, num_classes=10).train()
    option.apply(model)
    with Live(model) as live:
        model(torch.randn(8, 3, size, size)).sum().backward()
    return live.peak


@pytest.mark.parametrize(
    ("name", "size"), [("resnet10t", 64), pytest.param("resnet18", 128, marks=pytest.mark.slow)], ids=["resnet10t", "resnet18"]
)
def test_on_a_resnet_selective_holds_less_than_none(name, size):
    none, products, half, blocks = (peak(name, size, o) for o in (Checkpointing(), Selective(), Selective("half"), Blocks()))
    assert max(blocks, half, products) < 0.99 * none, (none, products, half, blocks)


# --- checkpointing.memory_gb: a forecast chooses how many blocks are recomputed, before the run ---


DEEP = ["model=mlp", "model.hidden=[64,64,64,64,64,64]", "model.dropout=0.1", "optimizer=sgd", "batch.global_batch=16"]


def chosen(recomputed, blocks):
    option = Blocks(memory_gb=1.0)
    option.found = {"memory_gb": 1.0, "recomputed": recomputed, "blocks": blocks, "bytes": 1}
    return option


@pytest.mark.parametrize("limit", [5, 20, 44, 61, 100, 200])
def test_the_fewest_that_fit_by_halving(limit):
    peaks = [100, 90, 75, 62, 50, 48, 44, 44]  # the last one saves nothing
    asked = []
    count, peak = fewest(lambda n: asked.append(n) or peaks[n], 7, limit)
    assert peak == peaks[count]
    assert len(asked) == len(set(asked)) <= 5
    fitting = [n for n, p in enumerate(peaks) if p <= limit]
    assert count == min(fitting) if fitting else peaks[count] == 44


def test_less_memory_recomputes_more_blocks_and_keeps_fewer_bytes(make):
    """By the forecast, and by the bytes of the tensors of the real step."""

    def measured(limit):
        trainer = make(*DEEP)
        blocks, rehearsal = repeated_blocks(trainer.model), Rehearsal(trainer)
        count, forecast = fewest(lambda n: peak_bytes(rehearsal.record(512, 1, blocks[:n])), len(blocks), limit)
        model = make(*DEEP).model.train()
        chosen(count, len(blocks)).apply(model)
        with Live(model) as live:
            model(torch.ones(512, *rehearsal.sample.x.shape[1:])).sum().backward()
        return count, forecast, live.peak

    none, all_ = measured(1e12), measured(1.0)
    some = measured((none[1] + all_[1]) / 2)
    assert none[0] == 0 < some[0] < all_[0]
    for before, after in ((none, some), (some, all_)):
        assert before[1] > after[1]
        assert before[2] > after[2]


@pytest.mark.parametrize("count", [0, 2, 6])
def test_the_chosen_blocks_compute_the_same(count):
    """Gradients are those without recomputation, to the bit."""
    gradients = []
    for option in (Checkpointing(), chosen(count, 6)):
        torch.manual_seed(0)
        layers = [torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.3), torch.nn.ReLU()) for _ in range(6)]
        blocks = [Block(layer) for layer in layers]
        model = torch.nn.Sequential(*blocks)
        option.apply(model)
        model(torch.ones(4, 8)).sum().backward()
        assert sum("forward" in vars(block) for block in blocks) == (count if option.active else 0)
        gradients.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


class Block(torch.nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x)


class Told:
    """Trials that find this, and note what they were asked."""

    def __init__(self, **found):
        self.found, self.asked = found, []

    def fewest_blocks(self, block, limit_gb):
        self.asked.append((block, limit_gb))
        return self.found

    def micro_batch(self):
        return 16


def test_a_resumed_run_keeps_what_was_chosen_for_the_same_limit():
    found = {"memory_gb": 2.0, "recomputed": 3, "blocks": 6, "bytes": 5}
    option, told = Blocks("Layer", 2.0), Told(recomputed=1, blocks=6, bytes=5)
    assert option.choose(told, found).found == found
    for other in (None, {}, {**found, "memory_gb": 1.0}, {**found, "recomputed": -1}, {**found, "recomputed": "3"}):
        assert option.choose(told, other).found == {**found, "recomputed": 1}
    assert told.asked == [("Layer", 2.0)] * 5
    assert option.found is None
    assert Blocks().choose(told, found).found is None


def test_too_little_is_told_with_the_least_and_a_failed_forecast_with_its_reason(tiny, monkeypatch):
    with pytest.raises(UserError, match=r"memory_gb=2 is too little: a step of 16 samples is forecast to take at least 3 GiB"):
        Blocks(None, 2.0).choose(Told(recomputed=8, blocks=8, bytes=3 * 2**30))
    monkeypatch.setattr(trials, "_fewest_blocks", lambda *given: [].pop())
    with pytest.raises(UserError, match=r"cannot be forecast: IndexError: pop from empty list: set checkpointing.memory_gb=null"):
        JobTrials(launcher.prepare(tiny(*DEEP))).fewest_blocks(None, 2.0)


@pytest.mark.parametrize(
    ("words", "instead"),
    [
        ([*DEEP, "checkpointing=blocks", "checkpointing.memory_gb=4"], r"checkpointing\.memory_gb=null"),
        (["batch=critical", "batch.global_batch=6", "batch.max=24"], ""),
    ],
)
def test_a_launcher_that_has_started_ranks_is_refused(tiny, monkeypatch, words, instead):
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "2")
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.setenv(name, "1")
    job = launcher.prepare(tiny(*words, "parallel=ddp", "runtime.device=cpu"))
    with pytest.raises(UserError, match=f"another launcher has started them: .* or set {instead}"):
        launcher.launch(job)


def test_a_run_says_what_it_recomputes_and_a_resumed_one_does_the_same(train, monkeypatch):
    words = [*DEEP, "checkpointing=blocks", "checkpointing.memory_gb=16"]
    result = train(*words, "saving=last")  # in a new process, from which it is forecast
    read = json.loads((result.run_dir / "environment.json").read_text())["checkpointing"]
    assert read["recomputed"] == 0 < read["bytes"] < 2**30
    said = (result.run_dir / "log.txt").read_text()
    assert f"0 of {read['blocks']} blocks recomputed in the backward: the step is forecast" in said
    monkeypatch.setattr(JobTrials, "fewest_blocks", lambda *given: pytest.fail("it is not asked again"))
    again = launcher.launch(launcher.prepare_run([f"resume={result.run_dir}", "updates=3"]), quiet=True)
    assert again.status == "completed"
