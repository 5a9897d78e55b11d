"""The files of a run of model=transformers are read by transformers and by peft, and what peft leaves starts a run."""

import json
import math
import os
from itertools import product
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import drivetrain
from drivetrain.cli import main
from drivetrain.cli.finished import export
from drivetrain.core.errors import UserError
from drivetrain.inference.loaded import load
from tests.support import command, later, slow

transformers, peft = later.package("transformers"), later.package("peft")

SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
LANGUAGE = ["data=stdlib", "data.length=16", "data.test_samples=8", "data.max_files=10", "loss=next_token"]
CLASSES = ["data=stdlib", "data.length=16", "data.test_samples=8", "data.kind=class", "data.max_files=300"]
MODELS = {
    "llama": ("LlamaForCausalLM", {**SIZES, "vocab_size": 257}, [*LANGUAGE, "adapter.train_also=[]"]),
    "gpt2": ("GPT2LMHeadModel", {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 16, "vocab_size": 257}, LANGUAGE),
    "bert": ("BertForSequenceClassification", {**SIZES, "vocab_size": 257, "num_labels": 4}, CLASSES),
}


@pytest.fixture
def case(model: str, tmp_path: Path):
    """The class of a model, its folder, and the words of runs on it."""
    name, sizes, words = MODELS[model]
    cls = getattr(transformers, name)
    torch.manual_seed(0)
    cls(cls.config_class(**sizes)).save_pretrained(tmp_path / "base")
    (tmp_path / "run").mkdir()
    return cls, tmp_path / "base", ["model=transformers", f"model.name={tmp_path / 'base'}", "model.pretrained=true", *words]


def outputs(model) -> torch.Tensor:
    tokens = torch.arange(1, 13).view(2, 6)
    with torch.no_grad():
        found = model.eval()(input_ids=tokens)
    return found if isinstance(found, torch.Tensor) else found.logits


ADAPTERS = {
    "lora": ["adapter=lora"],
    "dora": ["adapter=dora"],
    "pissa": ["adapter=lora", "adapter.init=pissa", "adapter.scale=stabilized"],
}
QUICK = {
    ("llama", "pissa"),
    ("gpt2", "dora"),
    ("bert", "lora"),
    ("gpt2", "pissa"),
}  # each model and each adapter; all pairs in the slow suite
PAIRS = slow.but(QUICK.__contains__, list(product(MODELS, ADAPTERS)), "-".join)


@pytest.mark.parametrize(("model", "adapter"), PAIRS)
def test_an_adapter_is_read_by_peft_and_by_a_run(case, adapter, tiny, tmp_path, make, capsys):
    cls, base, words = case
    words = [*words, *ADAPTERS[adapter], "adapter.rank=4"]
    run = drivetrain.train(tiny(*words, "optimizer.lr=1"))
    expected = outputs(load(run.run_dir).model)
    assert main.main(["export", str(run.run_dir), str(tmp_path / "adapter"), "--format", "transformers", "--adapter"]) == 0
    assert sorted(path.name for path in (tmp_path / "adapter").iterdir()) == [
        "README.md", "adapter_config.json", "adapter_model.safetensors",
    ]  # fmt: skip
    assert str(tmp_path) not in "".join(path.read_text(errors="replace") for path in (tmp_path / "adapter").iterdir())
    own = cls.from_pretrained(base)
    before = outputs(own)
    theirs = peft.PeftModel.from_pretrained(own, tmp_path / "adapter")
    assert torch.allclose(outputs(theirs), expected, atol=2e-6)
    assert not torch.allclose(before, expected, atol=1e-4)
    assert torch.allclose(outputs(theirs.merge_and_unload()), expected, atol=2e-6)
    again = make(*words, f"adapter.weights={tmp_path / 'adapter'}").model
    assert torch.allclose(outputs(again), expected, atol=2e-6)


@pytest.mark.parametrize("model", ["gpt2"])
def test_an_adapter_that_peft_reads_as_another_model_is_refused(case, tiny, tmp_path):
    """An embedding that trained, tied to the head: peft leaves the head as it was."""
    words = [*case[2], "adapter=lora", "adapter.train_also=[transformer.wte]"]
    run = drivetrain.train(tiny(*words, "optimizer.lr=0.1"))
    with pytest.raises(UserError, match=r"was not written: its output differs .* peft unties the weights .* leave --adapter out"):
        export([str(run.run_dir), str(tmp_path / "adapter"), "--format", "transformers", "--adapter"])
    assert not (tmp_path / "adapter").exists()
    export([str(run.run_dir), str(tmp_path / "whole"), "--format", "transformers"])
    with pytest.raises(UserError, match="whole is not empty: name another folder"):
        export([str(run.run_dir), str(tmp_path / "whole"), "--format", "transformers"])


@pytest.mark.parametrize(("model", "adapter"), PAIRS)
def test_an_adapter_of_peft_starts_a_run(case, adapter, make, tmp_path):
    cls, base, words = case
    model = cls.from_pretrained(base)
    also = ["classifier"] if hasattr(model, "classifier") else None
    config = peft.LoraConfig(
        task_type="SEQ_CLS" if also else "CAUSAL_LM", r=4, lora_alpha=8, target_modules="all-linear", use_dora=adapter == "dora",
        modules_to_save=also, init_lora_weights="pissa" if adapter == "pissa" else False, use_rslora=adapter == "pissa",
    )  # fmt: skip
    theirs = peft.get_peft_model(model, config)
    if adapter == "pissa":  # which is the base at first
        with torch.no_grad():
            for name, p in theirs.named_parameters():
                p.mul_(1.5 if "lora_A" in name else 1)
    theirs.save_pretrained(tmp_path / "theirs")
    own = [*ADAPTERS[adapter], "adapter.rank=4", "adapter.alpha=8"]
    ours = make(*words, *own, f"adapter.weights={tmp_path / 'theirs'}").model
    assert torch.allclose(outputs(ours), outputs(theirs), atol=2e-6)


@pytest.mark.parametrize("model", MODELS)
def test_a_whole_model_is_read_by_transformers(case, tiny, tmp_path):
    cls, _, words = case
    run = drivetrain.train(tiny(*[word for word in words if not word.startswith("adapter")]))
    assert main.main(["export", str(run.run_dir), str(tmp_path / "whole"), "--format", "transformers"]) == 0
    again = cls.from_pretrained(tmp_path / "whole")
    assert torch.equal(outputs(again), outputs(load(run.run_dir).model))
    assert again.config.use_cache
    card = (tmp_path / "whole" / "README.md").read_text()
    assert "library_name: transformers" in card
    assert ".from_pretrained(FOLDER)" in card
    assert "## Limits" in card


def test_adapters_are_merged_without_the_switch(tiny, tmp_path):
    words = ["model=transformers", "model.name=llama", "model.config={" + ", ".join(f"{k}: {v}" for k, v in SIZES.items()) + "}"]
    run = drivetrain.train(tiny(*words, *LANGUAGE, "adapter=lora"))
    assert main.main(["export", str(run.run_dir), str(tmp_path / "whole"), "--format", "transformers"]) == 0
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "whole")
    assert torch.allclose(outputs(again), outputs(load(run.run_dir).model), atol=1e-6)
    with pytest.raises(UserError, match="the frozen weights of this run began at random"):
        export([str(run.run_dir), str(tmp_path / "other"), "--format", "transformers", "--adapter"])


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("use_rslora", True, "adapter.scale=stabilized"),
        ("init_lora_weights", "pissa", "adapter.init=pissa"),
        ("init_lora_weights", "olora", "init_lora_weights=olora"),
        ("r", 3, "was trained with adapter.rank=3: set that"),
        ("lora_alpha", 99, "adapter.alpha=99"),
        ("use_dora", True, "adapter=dora"),
        ("bias", "all", "bias=all"),
        ("peft_type", "IA3", "peft_type=IA3"),
    ],
)
def test_a_folder_of_peft_that_does_not_fit_is_refused(key, value, says, make, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "theirs").mkdir()
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, key: value}
    (tmp_path / "theirs" / "adapter_config.json").write_text(json.dumps(config))
    save_file({}, tmp_path / "theirs" / "adapter_model.safetensors")
    with pytest.raises(UserError, match=says):
        make("model.hidden=[8,8]", "adapter=lora", "adapter.rank=4", "adapter.alpha=8", f"adapter.weights={tmp_path / 'theirs'}")


def _of_base(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {f"base_model.model.{name}": 0 * each for name, each in model.named_parameters() if "lora" not in name}


@pytest.mark.parametrize(
    ("config", "tensors", "says"),
    [
        ({}, _of_base, "in only one of the two"),  # weights of the model itself, that no setting names
        ({}, lambda _: {"base_model.model.nowhere": torch.ones(1)}, "in only one of the two"),
        ({}, lambda model: {name: each[:1] for name, each in _adapters(model).items()}, "of another shape"),
        ({}, lambda model: {name: each * math.nan for name, each in _adapters(model).items()}, "not finite"),
        ({"modules_to_save": 7}, lambda _: {}, "TypeError"),
        ("[]", lambda _: {}, "AttributeError"),
        ('{"a":' * 9_999, lambda _: {}, "nested too deep"),
        ("{}", lambda _: {}, "KeyError: 'r'"),
        ({}, b"\xff" * 99, "SafetensorError"),
        ({}, None, "is no folder with"),
    ],
)
def test_a_strangers_adapter_changes_nothing_else(config, tensors, says, make, tmp_path):
    words = ["model.hidden=[8,8]", "adapter=lora", "adapter.rank=4", "adapter.alpha=8"]
    (tmp_path / "run").mkdir()
    folder = command.empty(tmp_path / "theirs")
    whole = {"peft_type": "LORA", "r": 4, "lora_alpha": 8}
    (folder / "adapter_config.json").write_text(config if isinstance(config, str) else json.dumps({**whole, **config}))
    file = folder / "adapter_model.safetensors"
    if tensors is None:
        os.mkfifo(file)
    elif isinstance(tensors, bytes):
        file.write_bytes(tensors)
    else:
        model = make(*words).model
        save_file({name: each.detach().contiguous() for name, each in {**_adapters(model), **tensors(model)}.items()}, file)
    with pytest.raises(UserError, match=says):
        make(*words, f"adapter.weights={folder}")


def _adapters(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    parts = {"lora_a": "lora_A.weight", "lora_b": "lora_B.weight"}
    return {
        f"base_model.model.{name.rpartition('.')[0]}.{parts[name.rpartition('.')[2]]}": each
        for name, each in model.named_parameters()
        if name.rpartition(".")[2] in parts
    }
