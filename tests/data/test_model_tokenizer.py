"""The tokenizer of model=transformers is the data's: tokens, padding, cuts and masks are those of transformers itself."""

import json
import logging
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

import drivetrain
from drivetrain.core.errors import UserError
from drivetrain.data.tokenizer import OfModel
from drivetrain.inference.evaluation import evaluate
from drivetrain.inference.loaded import load
from tests.support import later
from tests.support.to_end import run_to_end

transformers = later.package("transformers")

TEXTS = [f"line {i} of many: {'ab ' * (i % 7)}{'end' * (i % 3)}" for i in range(60)]
SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}


def tokenizer(around: bool, **special: str):
    """A byte-level tokenizer; `around` puts [CLS] and [SEP] around each text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    made = Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=alphabet, special_tokens=list(dict.fromkeys(special.values())), show_progress=False
    )
    made.train_from_iterator(TEXTS, trainer)
    if around:
        tokens = [(name, made.token_to_id(name)) for name in ("[CLS]", "[SEP]")]
        made.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=tokens)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, **special)


@pytest.fixture
def bert(tmp_path: Path) -> Path:
    """A folder with a BERT and its tokenizer."""
    torch.manual_seed(0)
    own = tokenizer(True, pad_token="[PAD]", cls_token="[CLS]", sep_token="[SEP]")
    own.save_pretrained(tmp_path / "bert")
    config = transformers.BertConfig(**SIZES, vocab_size=len(own), pad_token_id=own.pad_token_id, num_labels=2)
    transformers.BertForSequenceClassification(config).save_pretrained(tmp_path / "bert")
    return tmp_path / "bert"


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    """A folder with a Llama and its tokenizer, which has an end of text alone, as GPT-2's."""
    torch.manual_seed(0)
    own = tokenizer(False, eos_token="<|endoftext|>")
    own.save_pretrained(tmp_path / "llama")
    config = transformers.LlamaConfig(**SIZES, vocab_size=len(own) + 7, max_position_embeddings=64)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "llama")
    return tmp_path / "llama"


@pytest.fixture(autouse=True)
def _files(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    lines = [json.dumps({"text": text, "kind": "ab"[i % 2]}) for i, text in enumerate(TEXTS)]
    (tmp_path / "texts.jsonl").write_text("\n".join(lines) + "\n")


CLASSES = ["data=jsonl", "data.path=texts.jsonl", "data.label=kind", "data.length=12", "data.validation=null"]
LANGUAGE = ["data=jsonl", "data.path=texts.jsonl", "data.length=12", "data.validation=null", "loss=next_token"]


def of(folder: Path) -> list[str]:
    return ["model=transformers", f"model.name={folder}", "model.pretrained=true"]


@pytest.mark.parametrize("which", ["bert", "llama"])
def test_texts_with_a_class_are_as_transformers_has_them(which, request, make, caplog):
    """Tokens, special ones, cuts and padding; the model sees no padding."""
    folder = request.getfixturevalue(which)
    caplog.set_level(logging.INFO, "drivetrain")
    trainer = make(*CLASSES, *of(folder))
    source = trainer.train_data.source
    x, _ = source.fetch(torch.arange(len(source)))
    own = transformers.AutoTokenizer.from_pretrained(folder)
    own.pad_token = own.pad_token or own.eos_token
    expected = own(TEXTS, padding=True, truncation=True, max_length=12, return_tensors="pt")
    rows = {tuple(row) for row in expected["input_ids"].tolist()}
    assert {tuple(row) for row in x.tolist()} <= rows
    assert trainer.model.config.pad_token_id == own.pad_token_id
    assert "training texts have data.length=12 tokens or more" in caplog.text
    model = trainer.model.eval()
    short = own("ab", return_tensors="pt")["input_ids"]
    padded = torch.nn.functional.pad(short, (0, 5), value=own.pad_token_id)
    with torch.no_grad():
        assert torch.allclose(model(short), model(padded), atol=1e-6)


def test_texts_to_continue_have_the_models_tokens(llama, make):
    trainer = make(*LANGUAGE, *of(llama))
    own = transformers.AutoTokenizer.from_pretrained(llama)
    source = trainer.train_data.source
    x, y = source.fetch(torch.tensor([0]))
    real = y[0] != -100
    assert x[0, 0] == own.eos_token_id
    assert x[0, 1:][real[1:]].tolist() == y[0][real][:-1].tolist()
    assert own.decode(y[0][real]) in " ".join(TEXTS)
    assert trainer.model.config.vocab_size == len(own) + 7  # of the file


@pytest.mark.parametrize("which", ["bert", "llama"])
def test_a_run_trains_and_predicts_by_the_models_tokenizer(which, request, tiny):
    folder = request.getfixturevalue(which)
    words = CLASSES if which == "bert" else LANGUAGE
    result = run_to_end(tiny(*words, *of(folder)))
    loaded = load(result.run_dir)
    own = transformers.AutoTokenizer.from_pretrained(folder)
    ids = loaded.transforms.read_text("ab end").tolist()
    expected = own("ab end")["input_ids"]
    assert ids == (expected if which == "bert" else [own.eos_token_id, *expected])


def _replace(content: str, **pattern: str) -> dict[str, object]:
    return {"type": "Replace", "pattern": pattern, "content": content}


@pytest.mark.parametrize(
    ("normalizer", "times"),
    [
        ([_replace("aa", String="a")] * 40, "1,099,511,627,776"),
        ([_replace("x", Regex="b*")] * 40, "1,099,511,627,776"),
        ([_replace("xx", String="")] * 40, "12,157,665,459,056,928,768"),
        ([{"type": "Prepend", "prepend": "a" * 70_000}], "70,000"),
        ([_replace("\u2581", String=" "), {"type": "Prepend", "prepend": "\u2581"}, _replace(" ", Regex=" {2,}")], ""),
        ([_replace("\u0627", Regex="[\u0623\u0625]")] * 40 + [{"type": "NFC"}], ""),
    ],
)
def test_a_strangers_tokenizer_that_makes_texts_endless_is_refused(normalizer, times, bert):
    """40 steps, each of which doubles a text, would fill any memory at the first text."""
    file = bert / "tokenizer.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "normalizer": {"type": "Sequence", "normalizers": normalizer}}))
    with pytest.raises(UserError, match=f"make a text {times} times as long") if times else nullcontext():
        assert OfModel.read(file, {})(["a b"])


def test_weights_with_a_tokenizer_do_not_get_other_tokens(bert, make):
    with pytest.raises(UserError, match=r"has tokens of its own, and the weights of model.name=.* know those of their tokenizer"):
        make(*CLASSES, "data.tokenizer=bytes", *of(bert))


def test_a_tokenizer_that_was_changed_since_is_refused(bert, tiny):
    result = drivetrain.train(tiny(*CLASSES, *of(bert)))
    tokenizer(True, pad_token="[PAD]", cls_token="[CLS]", sep_token="[SEP]", mask_token="[MASK]").save_pretrained(bert)
    with pytest.raises(UserError, match=r"not that of model\.name"):
        load(result.run_dir).transforms.read_text("ab")


def test_a_folder_that_has_moved_is_said_and_may_be_named_anew(bert, tiny, tmp_path):
    result = drivetrain.train(tiny(*CLASSES, *of(bert)))
    moved = bert.rename(tmp_path / "moved")
    with pytest.raises(UserError, match=r"bert is no folder: set model\.name=/path/to/folder"):
        evaluate(result.run_dir)
    again = evaluate(result.run_dir, [f"model.name={moved}"])
    assert again.metrics["loss"] == result.metrics["test"]["final"]["loss"]


def test_a_length_for_the_special_tokens_alone_is_refused(bert, make):
    with pytest.raises(UserError, match=r"data\.length=2: the tokenizer puts 2 tokens around each text"):
        make(*CLASSES, "data.length=2", *of(bert))
