"""The roles of layers and parameters, in the networks of each library and in those of a user."""

from typing import Any

import pytest
import torch
from torch import nn

from drivetrain.core.step.architecture import Architecture, resting, sparse_parameters, tied_names
from drivetrain.model import gpt, nets
from tests.support import later

TOKENS, NUMBERS = torch.zeros(2, 8, dtype=torch.int64), torch.zeros(2, 8)
WIDE = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32, "vocab_size": 40}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 2}


def of_transformers(auto: str, kind: str, **sizes: Any) -> nn.Module:
    transformers = later.package("transformers")
    with torch.device("meta"):
        made: nn.Module = getattr(transformers, auto).from_config(transformers.AutoConfig.for_model(kind, **sizes))
    return made


BLOCK = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
BERTS = [f"bert.encoder.layer.0.{n}" for n in ("attention.self.query", "attention.self.key", "attention.self.value",
         "attention.output.dense", "intermediate.dense", "output.dense")]  # fmt: skip
GATED = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
GPT2 = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
BART = [f"model.{part}.layers.0.{n}" for part in ("encoder", "decoder") for n in (
    *(f"{a}.{p}" for a in ("self_attn", "encoder_attn")[: 1 + (part == "decoder")]
      for p in ("k_proj", "v_proj", "q_proj", "out_proj")),
    "fc1", "fc2")]  # fmt: skip
SMALL_BART = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "vocab_size": 40,
              "decoder_attention_heads": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32}  # fmt: skip
CAUSAL, CLASSES, MASKED = "AutoModelForCausalLM", "AutoModelForSequenceClassification", "AutoModelForMaskedLM"
# config → (heads, output layers, hidden matrices without ".weight")
OF_TRANSFORMERS = {
    "gpt2": (CAUSAL, {"n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": 40}, ["lm_head"], ["lm_head"],
             [f"transformer.h.0.{n}" for n in GPT2]),
    "llama tied": (CAUSAL, {**WIDE, "tie_word_embeddings": True}, ["lm_head"], ["lm_head"],
                   [f"model.layers.0.{n}" for n in (*BLOCK, *GATED)]),
    "llama": (CLASSES, WIDE, ["score"], ["score"], [f"model.layers.0.{n}" for n in (*BLOCK, *GATED)]),
    "bert": (CLASSES, WIDE, ["classifier"], ["classifier"], [*BERTS, "bert.pooler.dense"]),
    "bert masked": (MASKED, WIDE, ["cls"], ["cls.predictions.decoder"], [*BERTS, "cls.predictions.transform.dense"]),
    "bart": ("AutoModelForSeq2SeqLM", SMALL_BART, ["lm_head"], ["lm_head"], BART),
    "mixtral": (CAUSAL, {**WIDE, **EXPERTS}, ["lm_head"], ["lm_head"],
                [*(f"model.layers.0.{n}" for n in BLOCK), "model.layers.0.mlp.experts.gate_up_proj",
                 "model.layers.0.mlp.experts.down_proj"]),
    "mamba": (CAUSAL, {"hidden_size": 16, "num_hidden_layers": 1, "vocab_size": 40, "state_size": 4}, ["lm_head"], ["lm_head"],
              [f"backbone.layers.0.mixer.{n}" for n in ("conv1d", "in_proj", "x_proj", "dt_proj", "out_proj")]),
}  # fmt: skip


@pytest.mark.parametrize("name", OF_TRANSFORMERS)
def test_the_models_of_transformers(name: str) -> None:
    auto, sizes, heads, outputs, hidden = OF_TRANSFORMERS[name]
    found = Architecture.of(of_transformers(auto, name.split()[0], **sizes), TOKENS)
    assert (found.heads, found.outputs) == (heads, outputs)
    assert {n.removesuffix(".weight") for n in found.hidden} == set(hidden)
    assert {n for n, m in found.hidden.items() if m.transposed} == {n for n in found.hidden if name == "gpt2"}
    assert {n for n, m in found.hidden.items() if m.stacked} == {n for n in found.hidden if "experts" in n}


def test_a_head_that_is_no_child_beside_a_body_is_asked_for() -> None:
    t5 = of_transformers("AutoModelForSeq2SeqLM", "t5", d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, vocab_size=40)
    found = Architecture.of(t5, TOKENS)
    assert found.outputs == ["lm_head"]
    assert "encoder.block.0.layer.0.SelfAttention.q.weight" in found.hidden
    trunk = Architecture.of(of_transformers("AutoModel", "vit", hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
                                            intermediate_size=32), torch.zeros(2, 3, 224, 224))  # fmt: skip
    assert trunk.outputs == ["pooler.dense"]
    assert len(trunk.hidden) == 6, "all but the patches' convolution"


def test_experts_that_hold_their_weights_as_inputs_by_outputs_are_told() -> None:
    model = of_transformers(CAUSAL, "gpt_oss", **WIDE, **EXPERTS, head_dim=8)
    experts = {n: m for n, m in Architecture.of(model, TOKENS).hidden.items() if "experts" in n}
    assert len(experts) == 2
    assert all(m.stacked and m.transposed for m in experts.values())


@pytest.mark.parametrize(
    ("name", "first", "classifier"),
    [
        ("resnet18", "conv1.weight", ["fc"]), ("vit_tiny_patch16_224", "patch_embed.proj.weight", ["head"]),
        ("convnext_atto", "stem.0.weight", ["head.fc"]), ("mobilenetv3_small_050", "conv_stem.weight", ["classifier"]),
        ("deit_tiny_distilled_patch16_224", "patch_embed.proj.weight", ["head", "head_dist"]),
    ],
)  # fmt: skip
def test_the_networks_of_timm(name: str, first: str, classifier: list[str]) -> None:
    timm = later.package("timm")
    with torch.device("meta"):
        model, trunk = timm.create_model(name, num_classes=5), timm.create_model(name, num_classes=0)
    found = Architecture.of(model, torch.zeros(2, 3, 8, 8))
    assert (found.heads, found.outputs) == (classifier, classifier)
    weights = {f"{n}.weight" for n, m in model.named_modules() if isinstance(m, nn.Linear | nn.Conv2d)}
    assert set(found.hidden) == weights - {first} - {f"{n}.weight" for n in classifier}
    assert Architecture.of(trunk, torch.zeros(2, 3, 8, 8)).outputs == []


def test_the_networks_of_drivetrain() -> None:
    tied = Architecture.of(gpt.Gpt(8, 30, 16, 1, 2, 0.0, 2, 9, 0.0), TOKENS)
    assert tied.outputs == ["head"]
    assert tied.of_outputs == {"embedding.weight"}
    assert tied.embeddings == {"embedding.weight", "ngrams.tables.0.weight"}
    parts = ("attention.qkv", "attention.out", "feed_forward.up", "feed_forward.down")
    assert list(tied.hidden) == [f"blocks.0.{part}.weight" for part in parts]
    mlp = Architecture.of(nets.Mlp((4,), 3, (8, 8), 0.0), NUMBERS)
    assert (mlp.outputs, list(mlp.hidden)) == (["head"], ["layers.1.linear.weight"])
    assert Architecture.of(nets.UNet((1, 8, 8), 2, 4, 2), torch.zeros(2, 1, 8, 8)).outputs == ["head"]


class Own(nn.Module):
    """The head comes first and has a usual name; layers of all kinds follow."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.fc, self.table = nn.Linear(8, 3), nn.Linear(8, 8), nn.Embedding(9, 8)
        self.lstm, self.cell = nn.LSTM(8, 8, num_layers=2, proj_size=4), nn.GRUCell(8, 8)
        self.block = nn.TransformerEncoderLayer(8, 2, 16)
        self.places, self.gain = nn.Parameter(torch.zeros(1, 5, 8)), nn.Parameter(torch.ones(8, 1, 1))
        self.experts = nn.ModuleList([Experts()])


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.bias = nn.Parameter(torch.zeros(4, 8, 16)), nn.Parameter(torch.zeros(4, 16))


def test_a_network_of_a_user() -> None:
    model = Own()
    found = Architecture.of(model, TOKENS)
    assert found.outputs == ["head"]
    lstm = {f"lstm.weight_{n}_l{layer}" for n in ("ih", "hh", "hr") for layer in (0, 1)}
    assert set(found.hidden) == {
        "fc.weight", *lstm, "cell.weight_ih", "cell.weight_hh", "block.self_attn.in_proj_weight",
        "block.self_attn.out_proj.weight", "block.linear1.weight", "block.linear2.weight", "experts.0.up",
    }  # fmt: skip
    assert set(found.hidden) - set(Architecture.of(model, NUMBERS).hidden) == {"fc.weight"}, "an embedding, but of positions"


def test_without_a_usual_name_the_last_layer_is_the_head() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2), nn.BatchNorm1d(2))
    found = Architecture.of(model, NUMBERS)
    assert (found.heads, found.outputs, list(found.hidden)) == (["2"], ["2"], ["1.weight"])
    assert found.of_outputs == {"2.weight", "2.bias"}
    phase = Architecture.of(nn.ModuleDict({"made": model, "judge": nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))}), NUMBERS,
                            [f"made.{name}" for name, _ in model.named_parameters()])  # fmt: skip
    assert (phase.outputs, list(phase.hidden)) == (["made.2"], ["made.1.weight"])


def test_tied_names_sparse_gradients_and_modes() -> None:
    model = nn.ModuleDict({"a": nn.Embedding(4, 3, sparse=True), "b": nn.Linear(3, 4, bias=False), "c": nn.EmbeddingBag(4, 3)})
    model["b"].weight = model["a"].weight
    assert tied_names(model) == {"b.weight": "a.weight"}
    assert list(sparse_parameters(model).values()) == ["a.weight"]
    model["a"].weight.requires_grad_(False)
    assert sparse_parameters(model) == {}
    assert resting(model) == []
    model["a"].eval()
    model["c"].eval()
    assert resting(model) == ["a"]
    assert resting(model.eval()) == [], "a finished run"
