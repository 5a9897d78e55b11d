"""The loss of a large vocabulary without its logits: the same values and gradients, and never all logits at once."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from drivetrain.core.errors import UserError
from drivetrain.core.step.microbatch import MicroBatch
from drivetrain.core.step.model_call import ModelCall
from drivetrain.core.step.trees import leaves
from drivetrain.loss import language
from drivetrain.loss.language import MaskedToken, NextToken, TokenClass
from drivetrain.parallel import Parallel
from tests.support.context import context

CLASSES, WIDTH = 11, 6


class Net(nn.Module):
    """An embedding and a head, with what the model does with the logits."""

    def __init__(self, tail=lambda z: z, head=None, tied=False, classes=CLASSES, width=WIDTH):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(classes, width)
        self.norm = nn.LayerNorm(width)
        self.head = head or nn.Linear(width, classes, bias=not tied)
        self.tail = tail
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens):
        return self.tail(self.head(self.norm(self.embedding(tokens))))


class Odd(nn.Linear):
    """A Linear of another kind, as adapters are."""


def batch(seed=0, length=7, classes=CLASSES):
    generator = torch.Generator().manual_seed(seed)
    x, y = (torch.randint(classes, (3, length), generator=generator) for _ in range(2))
    y[0, :4] = -100
    return MicroBatch(x, y, torch.ones(()), True, False)


def read(loss, model, **known):
    """The loss for a run of the model; the lines that it logs."""
    about = {"data": SimpleNamespace(classes=CLASSES), "model_call": ModelCall("one"), **known}
    made = context(**about)
    made.run = SimpleNamespace(compile=SimpleNamespace(torchscript=False), parallel=Parallel(), named=lambda group: f"{group}=it")
    return list(loss.read(model, made))


def trained(model, loss, given):
    """The loss of a micro-batch and the gradients of the weights."""
    model.zero_grad()
    value = loss.step(model, given)
    value.backward()
    return [value.detach(), *(p.grad.clone() for p in model.parameters())]


TAILS = {
    "plain": lambda z: z,
    "scaled": lambda z: z / 3.0,
    "capped": lambda z: 4.0 * torch.tanh(z / 2.0),
    "in place, in float32 or more": lambda z: z.mul_(0.5).to(z.dtype).tanh_() * 3,
}
SETTINGS = {
    "plain": {},
    "z": {"z_loss": 0.3},
    "smoothed": {"label_smoothing": 0.2},
    "both": {"z_loss": 0.3, "label_smoothing": 0.2},
}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("settings", SETTINGS)
def test_values_and_gradients_are_those_of_whole_logits(tied, tail, settings, float64):
    model, given = Net(TAILS[tail], tied=tied), batch()
    for counted in (False, True):
        whole = NextToken(1, **SETTINGS[settings])
        whole.counted = counted
        expected = trained(model, whole, given)
        for chunks in (1, 2, 5, 40):  # more than tokens
            loss = NextToken(max(2, chunks), **SETTINGS[settings])
            loss.counted = counted
            twin = Net(TAILS[tail], tied=tied)
            assert read(loss, twin) == []
            torch.testing.assert_close(trained(twin, loss, given), expected, rtol=1e-12, atol=1e-14)
            torch.testing.assert_close(loss.evaluate(twin, given, False)[1], whole.evaluate(model, given, False)[1])
            torch.testing.assert_close(loss.evaluate(twin, given, True), whole.evaluate(model, given, True))  # a metric's


@pytest.mark.parametrize("cls", [TokenClass, MaskedToken])
def test_an_evaluation_counts_right_answers_without_logits(cls, float64):
    model, given, loss = Net(), batch(length=50), cls(chunks=3)
    assert read(loss, model) == []
    with torch.no_grad():
        output, sums = loss.evaluate(model, given, False)
    assert output.numel() == 0
    torch.testing.assert_close(sums, cls(chunks=1).sums(Net()(given.x), given.y))
    assert 0 < sums[1] < sums[2]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bits_are_as_near_float32_as_whole_logits(dtype):
    given = batch(length=200, classes=500)
    exact = trained(Net(classes=500, width=64), NextToken(1), given)
    errors = []
    for chunks in (1, 8):
        loss, model = NextToken(chunks), Net(classes=500, width=64)
        read(loss, model)
        with torch.autocast("cpu", dtype):
            found = trained(model, loss, given)
        assert [f.dtype for f in found] == [e.dtype for e in exact]
        errors.append([float((f - e).norm() / e.norm()) for f, e in zip(found, exact, strict=True)])
    assert max(errors[1]) <= max(errors[0])
    assert sum(errors[1]) <= sum(errors[0])
    assert errors[1][0] <= 2e-5  # the loss is summed in float32


def test_frozen_weights_get_no_gradient_and_16_bit_ones_their_own_type():
    model, loss = Net().bfloat16(), NextToken(3)
    model.head.weight.requires_grad_(False)
    read(loss, model)
    loss.step(model, batch()).backward()
    assert model.head.weight.grad is None
    assert model.head.bias.grad.dtype == torch.bfloat16
    assert model.embedding.weight.grad.any()


class Largest(TorchDispatchMode):
    """The most numbers that a tensor has."""

    found = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.found = max([self.found, *(t.numel() for t in leaves(out) if isinstance(t, torch.Tensor))])
        return out


@pytest.mark.parametrize("chunks", [8, "auto"])
def test_all_logits_never_exist(chunks, monkeypatch):
    monkeypatch.setattr(language, "LARGE", CLASSES)
    monkeypatch.setattr(language, "PART", 3 * 100 * CLASSES // 8)
    given, sizes = batch(length=100), []
    for parts in (1, chunks):
        model, loss = Net(), NextToken(parts)
        read(loss, model)
        with Largest() as largest:
            loss.step(model, given).backward()
        sizes.append(largest.found)
    assert sizes[0] == 300 * CLASSES
    assert sizes[1] <= 300 * WIDTH


def test_a_small_vocabulary_keeps_its_logits_by_default():
    loss, model = NextToken(), Net()
    assert read(loss, model) == []
    assert loss.head is None
    assert not model.head._forward_pre_hooks


ODD = {
    "log_softmax": (Net(lambda z: z.log_softmax(-1)), "the model changes the output of head (log_softmax)"),
    "added to": (Net(lambda z: 1 + z), "the model changes the output of head (add"),
    "bent twice": (Net(lambda z: z.tanh().tanh()), "the model changes the output of head (tanh)"),
    "divides by them": (Net(lambda z: 1 / z), "the model changes the output of head"),
    "by a weight": (Net(lambda z: z * torch.ones(())), "the model changes the output of head (mul)"),
    "used beside": (Net(lambda z: (z.sum(), z)[1]), "the model uses the output of head in other ways too"),
    "several layers": (Net(head=nn.Sequential(nn.Linear(WIDTH, 11), nn.ReLU())), "the model changes the output of head.0 (relu)"),
    "no Linear": (Net(head=Odd(WIDTH, CLASSES)), "head is a Odd, not one product"),
}  # fmt: skip


@pytest.mark.parametrize("name", ODD)
def test_a_head_that_is_not_one_product_is_refused_by_name(name, monkeypatch):
    model, said = ODD[name]
    example = torch.zeros(2, 7, dtype=torch.int64)
    with pytest.raises(UserError, match=r"set loss\.chunks=1") as refused:
        read(NextToken(4), model, example=example)
    assert f"loss.chunks=4 computes the output layer in parts, and {said}" in str(refused.value)
    monkeypatch.setattr(language, "LARGE", CLASSES)
    loss = NextToken()
    (line,) = read(loss, model, example=example)
    assert said in line
    assert loss.head is None
    torch.testing.assert_close(loss.evaluate(model, batch(), False), NextToken(1).evaluate(model, batch(), False))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["compile=jit"], "compile=jit does not run it"),
        (["parallel=dp"], "parallel=dp does not run it"),
        (["parallel=pipeline"], "parallel=pipeline does not run it"),
        (["loss=[next_token,masked_token]", "loss.next_token.chunks=3"], "a sum of losses takes whole outputs"),
    ],
)
def test_what_takes_whole_logits_refuses_parts(words, said, problems):
    given = ["data=stdlib", "loss=next_token", "model=gpt", *([] if "[" in words[0] else ["loss.chunks=3"])]
    found = problems(*given, *words)
    assert any(said in line and "set it to 1" in line for line in found), found


TEXT = [
    "data=stdlib", "data.length=16", "data.max_files=10", "data.test_samples=8", "loss=next_token", "batch.global_batch=6",
    "updates=3", "evaluate_every=3", "log_every=1", "optimizer=sgd", "optimizer.lr=0.05",
]  # fmt: skip
GPT = ["model=gpt", "model.width=16", "model.depth=2", "model.heads=2"]
SIZES = "hidden_size: 16, num_hidden_layers: 2, num_attention_heads: 2, intermediate_size: 32"
LLAMA = ["model=transformers", "model.name=llama", f"model.config={{{SIZES}, num_key_value_heads: 2}}"]
RUNS = {
    "accumulated": [*GPT, "batch=accumulate", "batch.accumulation_steps=3", "ema=ema", "clip=norm"],
    "of so many tokens": [*GPT, "batch.tokens=80", "loss.z_loss=0.01", "loss.label_smoothing=0.1"],
    "recomputed": [*GPT, "checkpointing=every_k"],
    "recomputed by operations": [*GPT, "checkpointing=selective"],
    "with a closure": [*GPT, "optimizer=sam"],
    "llama": LLAMA,
    "an adapter": [*LLAMA, "adapter=lora", "adapter.rank=2"],
    "gpt2, tied": ["model=transformers", "model.name=gpt2", "model.config={n_embd: 16, n_layer: 2, n_head: 2}"],
    "gemma2, capped": ["model=transformers", "model.name=gemma2", f"model.config={{{SIZES}, num_key_value_heads: 2}}"],
    "cohere, scaled": ["model=transformers", "model.name=cohere", f"model.config={{{SIZES}, num_key_value_heads: 2}}"],
    "bert": ["model=transformers", "model.name=bert", f"model.config={{{SIZES}}}", "loss=masked_token"],
    "modernbert": ["model=transformers", "model.name=modernbert", f"model.config={{{SIZES}}}", "loss=masked_token"],
    "inductor": [*GPT, "compile=inductor"],
    "the whole step": [*GPT, "compile=step", "updates=6"],
}  # fmt: skip


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if "compile" in str(words) else ()) for name, words in RUNS.items()]
)
def test_a_run_in_parts_is_the_run(name, fitted, tmp_path):
    ends = []
    for chunks in (1, 3):
        (tmp_path / "run").mkdir(exist_ok=True)
        trainer = fitted(*TEXT, *RUNS[name], f"loss.chunks={chunks}")
        losses = [(record["event"], record["loss"]) for record in trainer.log.writers[0] if "loss" in record]
        ends.append((losses, dict(trainer.model.named_parameters())))
    (whole, weights), (parts, found) = ends
    assert len(whole) > 3
    for (event, loss), (same, theirs) in zip(whole, parts, strict=True):
        assert event == same
        assert theirs == pytest.approx(loss, rel=2e-6)
    for key, weight in weights.items():
        torch.testing.assert_close(found[key], weight, rtol=1e-4, atol=1e-6)
