"""model=transformers: its heads, its config, its weights, and the techniques on it. Models are tiny, made from configs."""

import json
import logging
import os
import re
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import get_type_hints

import pytest
import torch

import drivetrain
from drivetrain.core.errors import UserError
from drivetrain.core.options import allowed as rules
from drivetrain.core.step.blocks import repeated_blocks
from drivetrain.inference.loaded import load
from drivetrain.model import transformers as option
from drivetrain.parallel import tensor
from drivetrain.parallel.process_group import RankWork
from tests.support import later, slow
from tests.support.same_end import resumed
from tests.support.to_end import continued, run_to_end

transformers = later.package("transformers")

SIZES = "hidden_size: 16, num_hidden_layers: 2, num_attention_heads: 2, intermediate_size: 32"
BERT = ["model=transformers", "model.name=bert", f"model.config={{{SIZES}}}"]
DISTILBERT = ["model=transformers", "model.name=distilbert", "model.config={dim: 16, n_layers: 2, n_heads: 2, hidden_dim: 32}"]
LLAMA = ["model=transformers", "model.name=llama", f"model.config={{{SIZES}, num_key_value_heads: 2}}"]
GPT2 = ["model=transformers", "model.name=gpt2", "model.config={n_embd: 16, n_layer: 2, n_head: 2, n_positions: 16}"]
VIT = ["model=transformers", "model.name=vit", f"model.config={{{SIZES}, patch_size: 4}}"]
STDLIB = ["data=stdlib", "data.length=16", "data.test_samples=8"]
LANGUAGE = [*STDLIB, "data.max_files=10", "loss=next_token"]
CLASSES = [*STDLIB, "data.kind=class", "data.max_files=300"]
CASES = {
    "bert": [*BERT, *CLASSES],
    "distilbert": [*DISTILBERT, *CLASSES],
    "gpt2": [*GPT2, *LANGUAGE],
    "llama": [*LLAMA, *LANGUAGE],
    "llama classes": [*LLAMA, *CLASSES],
    "vit": VIT,
}
TECHNIQUES = {
    "ema": ["ema=ema"],
    "accumulate": ["batch=accumulate", "batch.accumulation_steps=2", "clip=norm"],
    "bf16": ["precision=bf16"],
    "bf16_pure": ["precision=bf16_pure"],
    "blocks": ["checkpointing=blocks"],
    "lora": ["adapter=lora"],
    "dora": ["adapter=dora"],
    "freeze": ["model.freeze=['*.layer*.0.*']"],
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A BERT with a head for three classes, as transformers saves it."""
    torch.manual_seed(0)
    config = transformers.BertConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, vocab_size=300, num_labels=3
    )
    transformers.BertForSequenceClassification(config).save_pretrained(tmp_path / "bert")
    return tmp_path / "bert"


@pytest.fixture(autouse=True)
def _run_dir(tmp_path: Path) -> None:
    """The directory of what `make` builds, which keeps the config."""
    (tmp_path / "run").mkdir()


@pytest.fixture
def said(caplog):
    """The messages that were logged."""
    caplog.set_level(logging.INFO, "drivetrain")
    return lambda: "\n".join(record.getMessage() for record in caplog.records)


@pytest.mark.parametrize("case", CASES)
def test_it_trains_goes_on_and_predicts(case, tiny):
    """A finished run needs neither the folder nor the hub."""
    first = run_to_end(tiny(*CASES[case]), updates=2)
    continued(first.run_dir, "updates=3", updates=3)
    loaded = load(first.run_dir)
    example = loaded.example()
    output = loaded.model(example)
    assert isinstance(output, torch.Tensor)
    assert output.shape[-1] == len(loaded.classes)


IN_SHORT = {"bert": {"ema", "accumulate", "lora"}, "llama": {"bf16", "blocks", "dora", "freeze"}, "vit": {"bf16_pure", "lora"}}
PAIRS = [(case, technique) for case in IN_SHORT for technique in TECHNIQUES]


@pytest.mark.parametrize(("case", "technique"), slow.but(lambda pair: pair[1] in IN_SHORT[pair[0]], PAIRS, " ".join))
def test_techniques(case, technique, train):
    train(*CASES[case], *TECHNIQUES[technique])


OWN = """
import torch, transformers

class Net(torch.nn.Module):
    def __init__(self, classes):
        super().__init__()
        config = transformers.LlamaConfig(
            hidden_size=16, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2, intermediate_size=32,
            vocab_size=classes, use_cache=False,
        )
        self.llama = transformers.LlamaForCausalLM(config)

    def forward(self, tokens):
        return self.llama(tokens).logits
"""
TOGETHER = [  # of the normal suite: one of each; the others are slow
    ("llama", "parallel=tensor"), ("own", "parallel=tensor"), ("bert", "parallel=fsdp"), ("bert", "parallel=ddp"),
    ("llama", "parallel=fsdp"), ("llama", "parallel=ddp"), ("vit", "parallel=fsdp"), ("vit", "parallel=ddp"),
    ("bert", "compile=regional"), ("llama", "compile=regional"), ("vit", "compile=regional"),
]  # fmt: skip


@pytest.mark.parametrize(("case", "technique"), slow.but(lambda each: each[1] == "parallel=tensor", TOGETHER, " ".join))
def test_two_ranks_and_compiled_blocks_are_as_one_plain_process(case, technique, train, own_module):
    """A model of the user's that holds one of transformers has its plan and its blocks too."""
    own_module("held", OWN)
    ranks = ["parallel.nproc=2"] if technique.startswith("parallel") else []
    words = CASES[case] if case != "own" else ["model=own", "model.target=held.Net", "trust=[held]", *LANGUAGE]
    if case == "bert":  # each rank draws its own dropout
        words = [*words, "model.config.hidden_dropout_prob=0.0", "model.config.attention_probs_dropout_prob=0.0"]
    plain, other = train(*words), train(*words, technique, *ranks)
    assert other.judged()["loss"] == pytest.approx(plain.judged()["loss"], abs=1e-5)


def test_its_blocks_are_those_that_it_names_itself(make):
    """A BERT names its embeddings too, of which there is one."""
    model = make(*CASES["bert"]).model
    assert "BertEmbeddings" in model._no_split_modules
    blocks = repeated_blocks(torch.nn.Sequential(model))
    assert [type(block).__name__ for block in blocks] == ["BertLayer"] * 2
    model._no_split_modules = {"BertAttention"}
    assert [type(block).__name__ for block in repeated_blocks(model)] == ["BertAttention"] * 2


@pytest.mark.parametrize(
    ("kind", "more", "says"),
    [
        ("Llama", {"num_key_value_heads": 1}, "a block's 1 heads do not divide into 2 ranks"),
        ("Qwen3", {"num_key_value_heads": 2, "head_dim": 8}, "Qwen3DecoderLayer has styles unknown to drivetrain"),
        ("Bert", {"is_decoder": True}, "as llama does and bert does not"),
    ],
)
def test_a_tensor_plan_that_cannot_be_used_is_refused(kind, more, says):
    cls = getattr(transformers, f"{kind}LMHeadModel" if kind == "Bert" else f"{kind}ForCausalLM")
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32, "vocab_size": 40}
    model = cls(cls.config_class(**sizes, **more))
    mesh = SimpleNamespace(size=lambda: 2)
    with pytest.raises(UserError, match=re.escape(says)):
        tensor.shard_blocks("parallel=tensor", model, repeated_blocks(model), mesh, RankWork())


def test_a_resumed_run_ends_with_the_same_bits(tiny):
    resumed(tiny(*CASES["llama"], "saving.every_updates=2"), 2, 4)


def test_the_logits_are_those_of_transformers_without_the_padding(folder, make):
    """A shorter text in a batch has the output that it has alone; an empty one has one too."""
    trainer = make(*CLASSES, "model=transformers", f"model.name={folder}", "model.pretrained=true")
    model = trainer.model.eval()
    tokens = torch.tensor([[5, 6, 7, 0, 0], [9, 8, 7, 6, 5], [0, 0, 0, 0, 0]])
    with torch.no_grad():
        together, alone = model(tokens), model(tokens[:1, :3])
        reference = transformers.BertForSequenceClassification.from_pretrained(folder).bert(tokens[:1, :3]).pooler_output
        expected = model.classifier(reference)
    assert torch.allclose(together[:1], alone, atol=1e-6)
    assert torch.allclose(alone, expected, atol=1e-6)
    assert torch.isfinite(together).all()


def test_a_head_of_another_size_is_made_new_and_said(folder, make, said):
    trainer = make(*CLASSES, "model=transformers", f"model.name={folder}", "model.pretrained=true")
    assert trainer.model.classifier.out_features != 3
    assert "classifier.bias, classifier.weight start anew" in said()
    own = transformers.BertForSequenceClassification.from_pretrained(folder)
    assert torch.equal(trainer.model.bert.embeddings.word_embeddings.weight, own.bert.embeddings.word_embeddings.weight)
    assert trainer.model.config.id2label[0] in json.loads((trainer.run_dir / option.KEPT).read_text())["label2id"]


def test_without_pretrained_a_folder_gives_sizes_alone(folder, make):
    trainer = make(*CLASSES, "model=transformers", f"model.name={folder}")
    own = transformers.BertForSequenceClassification.from_pretrained(folder)
    weight = trainer.model.bert.encoder.layer[0].output.dense.weight
    assert weight.shape == own.bert.encoder.layer[0].output.dense.weight.shape
    assert not torch.equal(weight, own.bert.encoder.layer[0].output.dense.weight)


def test_tied_weights_stay_tied_and_are_read_again(tiny, make):
    result = drivetrain.train(tiny(*CASES["gpt2"]))
    trainer = make(*CASES["gpt2"], f"model.weights={result.run_dir}")
    model = trainer.model
    assert model.lm_head.weight is model.transformer.wte.weight
    assert torch.equal(model.lm_head.weight, load(result.run_dir).model.lm_head.weight)


def test_adapters_leave_gpt2s_own_layers_or_correct_them(make):
    """GPT-2's layers are of a class of transformers' own."""
    trainer = make(*CASES["gpt2"], "adapter=lora")
    trained = [name for name, p in trainer.model.named_parameters() if p.requires_grad]
    assert any("c_attn.lora_a" in name for name in trained), trained


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_attention_is_chosen_and_a_cache_is_not_kept_in_training(attention, make):
    config = make(*CASES["llama"], f"model.attention={attention}").model.config
    assert (config._attn_implementation, config.use_cache) == (attention, False)


def test_what_only_transformers_forward_takes_comes_in_a_dict(make, own_module):
    own_module(
        "pairs",
        "import torch\n"
        "class Pairs(torch.utils.data.Dataset):\n"
        "    classes = ('a', 'b')\n"
        "    def __init__(self, split): pass\n"
        "    def __len__(self): return 24\n"
        "    def __getitem__(self, i):\n"
        "        n = 3 + i % 4\n"
        "        ids = torch.arange(n) % 7\n"
        "        return {'input_ids': ids, 'token_type_ids': ids % 2}, i % 2\n",
    )
    words = ["data=own", "data.target=pairs.Pairs", "trust=[pairs]", "model.config.vocab_size=7"]
    trainer = make(*BERT, *words)
    assert set(next(iter(trainer.read())).x) == {"input_ids", "token_type_ids", "attention_mask"}


REFUSED = {
    "a config's unknown value": (
        [*BERT, *CLASSES, "model.config.hidden_sise=3"],
        "hidden_sise is no value of BertConfig: did you",
    ),
    "a value of another type": ([*BERT, *CLASSES, "model.config.num_hidden_layers=two"], "expected int"),
    "a head that there is not": ([*DISTILBERT, *LANGUAGE], "(distilbert) has no head for the next token"),
    "a text model for images": (BERT, "(bert) has no head for outputs for each image"),
    "too long texts": ([*GPT2, *LANGUAGE, "data.length=32"], "takes at most 16 tokens"),
    "a folder that is not there": (
        ["model=transformers", "model.name=/no/such/folder", *CLASSES],
        "model.name=/no/such/folder is no folder: set model.name=/path/to/folder",
    ),
    "two sets of initial weights": ([*BERT, "model.pretrained=true", "model.weights=x"], "two sets of initial weights"),
    "flash without its package": ([*BERT, "model.attention=flash"], "flash_attn"),
    "flex on a CPU": ([*BERT, "model.attention=flex"], "flex trains on CUDA alone, and the device is of type cpu"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_it_is_refused_with_the_reason(case, make):
    words, says = REFUSED[case]
    with pytest.raises(UserError, match=re.escape(says)):
        make(*words)


@pytest.mark.parametrize("content", [{"model_type": "nothing_known"}, {}, []], ids=str)
def test_a_folder_of_an_unknown_architecture_is_refused(content, tmp_path, make):
    (tmp_path / "config.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match=r"its config\.json names no architecture of transformers"):
        make("model=transformers", f"model.name={tmp_path}", *CLASSES)


def test_a_name_that_cannot_be_reached_is_told_at_once(make, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match=r"neither a folder nor reachable: set model\.name=/path/to/folder") as refused:
        make("model=transformers", "model.name=distilbert/distilbert-base-uncased")
    assert len(refused.value.problems) == 1


def test_a_folder_without_a_config_is_named(make, tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"empty has no config\.json"):
        make("model=transformers", f"model.name={tmp_path / 'empty'}")


def test_weights_that_do_not_fit_the_config_are_refused(folder, make):
    with pytest.raises(UserError, match="of another shape in the file"):
        make(*CLASSES, "model=transformers", f"model.name={folder}", "model.pretrained=true", "model.config.intermediate_size=64")


@pytest.mark.parametrize(
    ("key", "value", "allowed"),
    [
        ("hidden_size", 16, True),
        ("hidden_act", "gelu", True),
        ("auto_map", {"AutoModel": "x--y.z"}, False),
        ("_attn_implementation", "kernels/x", False),
        ("attn_implementation", "kernels/x", False),
        ("hidden_act", "../x", False),
    ],
)
def test_a_recipe_may_set_numbers_and_plain_names_of_a_config(key, value, allowed):
    hint = get_type_hints(option.Transformers, include_extras=True)["config"]
    problem = rules.problem(hint, {key: value})
    assert (problem == "") == allowed, problem


def _set(path, **values):
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (partial(_set, transformers_weights="adapter_model.bin"), "nothing but"),
        (partial(_set, num_hidden_layers=10**6), "at most 10,000 layers"),
        (lambda path: path.write_text("[" * 100_000), "config.json cannot be read: it is nested too deep"),
        (lambda path: path.write_bytes(b" " * (65 << 20)), "config.json cannot be read: it is larger than 64 MB"),
        (lambda path: (path.unlink(), path.mkdir()), "config.json cannot be read: it is no ordinary file"),
        (lambda path: (path.unlink(), os.mkfifo(path)), "config.json cannot be read: it is no ordinary file"),
        (lambda path: (path.parent / "adapter_config.json").write_text("{}"), "is an adapter next to the model's own weights"),
    ],
)  # fmt: skip
def test_a_folder_of_a_stranger_says_what_is_wrong_with_it(folder, spoil, says):
    """Nothing but JSON and safetensors is read, whatever config.json names."""
    spoil(folder / "config.json")
    with pytest.raises(UserError, match=re.escape(says)):
        option.Transformers(name=str(folder), pretrained=True)._given_config()
